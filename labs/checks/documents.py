"""Packed documents, their attention on one device, and whole models of Hugging Face's: for lab 14.

The mask is put together document by document, as a block-diagonal matrix; so it shares nothing with
the lab's rule, which is about single tokens.
"""

import random
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from checks.experts import EXACT, Float64, drawn, gradients
from harness import LABS, Wrong, expect, load
from transformers import (
    AttentionInterface,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

finished = load(LABS / "lab14_documents.py")  # not the learner's
IGNORE, END, VOCAB = finished.IGNORE, 7, 31
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": VOCAB}
SIZES |= {"num_key_value_heads": 4, "head_dim": 4, "intermediate_size": 12, "pad_token_id": None}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}
FAMILIES = {
    "LLaMA": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True}),
    "Mistral, window 4": (MistralConfig, MistralForCausalLM, {"sliding_window": 4}),
    "Qwen3, window 3 and none": (Qwen3Config, Qwen3ForCausalLM, MIXED | {"sliding_window": 3}),
}
WAYS = {"ring": finished.RingAttention.apply, "Ulysses": finished.ulysses_attention}


# ---- Documents and their mask --------------------------------------------------------------------


def packings(seed):
    """{what: lengths of documents}, in another order for each seed."""
    chosen = random.Random(seed)
    mixed = [1, 1, 2, 3, 5, 8, 19]  # 19: more than a rank's share of the 39
    chosen.shuffle(mixed)
    return {
        "one document": [29],
        "documents of many lengths": mixed,
        "40 documents": [chosen.randint(1, 4) for _ in range(40)],
        "documents that end where ranks end": [9, 3, 6, 6, 3, 9],  # 36 tokens, 2, 3, 4 ranks
    }


def packed_ids(lengths, seed, whole=True, end=END):
    """ids (s,) of documents that end with `end`; not whole: the last one lacks it."""
    numbers = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB - 1, (sum(lengths),), generator=numbers)
    ids += ids >= end  # any id but the end's
    ends = torch.tensor(lengths).cumsum(0) - 1
    ids[ends if whole else ends[:-1]] = end
    return ids


def mask_of(lengths, window):
    """(s, s) booleans: whether a query sees a key, of the whole packed sequence."""
    blocks = [torch.ones(n, n, dtype=torch.bool).tril() for n in lengths]
    if window is not None:
        blocks = [block.triu(1 - window) for block in blocks]
    return torch.block_diag(*blocks).bool()


def position_of(lengths):
    """(s,): each token's place in its document."""
    return torch.cat([torch.arange(n) for n in lengths])


def document_of(lengths):
    """(s,): the number of each token's document."""
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


def first_of(lengths, window):
    """(s,): the first key that each query sees, read off the mask."""
    return mask_of(lengths, window).int().argmax(1)


def placements(lengths, world, seed):
    """{what: held}: the lab's three, and tokens dealt at random."""
    chosen, first = random.Random(seed), first_of(lengths, None)
    tokens = [*range(sum(lengths))]
    chosen.shuffle(tokens)
    return {
        "in order": finished.in_order(len(first), world),
        "by document": finished.by_document(position_of(lengths), world),
        "by work": finished.by_work(first, world, 3),
        "at random": [torch.tensor(sorted(tokens[rank::world])) for rank in range(world)],
    }


# ---- What the checks have in common --------------------------------------------------------------


def numbers_of(what, found):
    """A tensor, or a list of numbers, as a list of Python's; raises Wrong."""
    expect(found is not None, f"{what} is None", "return it")
    try:
        return found.tolist() if isinstance(found, torch.Tensor) else [int(x) for x in found]
    except (TypeError, ValueError) as problem:
        raise Wrong(f"{what} is {type(found).__name__}, not numbers") from problem


def expect_numbers(what, found, right, hints=None, otherwise=""):
    """Raise Wrong unless found has the numbers of the list `right`.

    hints {text: a known wrong list}; otherwise: the hint where it is none of these.
    """
    found = numbers_of(what, found)
    known = [text for text, wrong in (hints or {}).items() if found == wrong]
    expect(found == right, f"{what} is {found}, not {right}", known[0] if known else otherwise)


def expect_held(what, found, right, hints=None, otherwise=""):
    """The same of one tensor for each rank."""
    fine = isinstance(found, list | tuple) and len(found) == len(right)
    expect(fine, f"{what} is not a list of {len(right)}, one for each rank", "a tensor for each")
    found = [numbers_of(f"{what}[{rank}]", at) for rank, at in enumerate(found)]
    known = [text for text, wrong in (hints or {}).items() if found == wrong]
    expect(found == right, f"{what} is {found}, not {right}", known[0] if known else otherwise)


class Unchanged:
    """Raises Wrong on leaving where one of these tensors, or lists of them, has been changed."""

    def __init__(self, **given):
        self.given = given
        self.before = {name: self.copy(value) for name, value in given.items()}

    def copy(self, value):
        if isinstance(value, torch.Tensor):
            return value.detach().clone()
        return [*map(self.copy, value)]

    def same(self, mine, before):
        if isinstance(mine, torch.Tensor):
            return torch.equal(mine, before)
        return len(mine) == len(before) and all(map(self.same, mine, before))

    def __enter__(self):
        return self

    def __exit__(self, kind, *problem):
        if kind is None:
            for name, before in self.before.items():
                same = self.same(self.given[name], before)
                expect(same, f"{name}, an argument, is changed", "work on a new tensor or list")


def groups_of_all_sizes():
    """Groups of 1 to 4 of four ranks, whose ranks have other numbers in them than in the world."""
    return [dist.new_group(ranks) for ranks in ([2], [1, 3], [0, 2, 3], [0, 1, 2, 3])]


# ---- Attention on one device ---------------------------------------------------------------------


def attention_case(seed, lengths, window, kv=5, g=2, d=3):
    """q (kv, g, s, d), k, v, dout of a packed sequence; on one device out, dq, dk, dv."""
    s = sum(lengths)
    q, dout = drawn(seed, kv, g, s, d), drawn(seed + 1, kv, g, s, d)
    k, v = drawn(seed + 2, 2, kv, s, d)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    mask = mask_of(lengths, window)
    out = dense(*leaves, mask)
    dq, dk, dv = gradients(out, dout, leaves)
    case = SimpleNamespace(q=q, k=k, v=v, dout=dout, out=out.detach(), dq=dq, dk=dk, dv=dv)
    case.mask, case.first = mask, first_of(lengths, window)
    return case


def dense(q, k, v, mask):
    """Attention with a mask (n, m) by PyTorch's own function, without a scale."""
    k, v = (x[:, None].expand(-1, q.shape[1], -1, -1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)


# ---- Whole models --------------------------------------------------------------------------------


def tiny(family, seed):
    """Hugging Face's model with random weights, in float64, the same on every rank."""
    config, causal, more = FAMILIES[family]
    torch.manual_seed(seed)
    model = causal(config(**SIZES, **more)).double().eval()
    for parameter in model.parameters():  # so that no norm is 1
        parameter.data += 0.2 * torch.randn(parameter.shape, dtype=torch.float64)
    return model


def each_document_alone(model, ids, lengths):
    """(loss, {name: gradient}) of the untouched model, which sees one document at a time."""
    total = sum(n - 1 for n in lengths)
    loss = torch.zeros((), dtype=torch.float64)
    with Float64():
        for document in ids.split(lengths):
            logits = model(input_ids=document[None], use_cache=False).logits[0]
            loss = loss + F.cross_entropy(logits[:-1], document[1:], reduction="sum") / total
    loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return loss.detach(), grads


def model_errors(lab, family, way, lengths, held, group, seed):
    """Relative errors of a train_step on this rank: {"loss", each parameter's name: error}."""
    model, ids = tiny(family, seed), packed_ids(lengths, seed)
    loss, right = each_document_alone(model, ids, lengths)
    with Float64():
        found = lab.train_step(model, ids, END, way, held, group)
    norm = torch.stack([grad.norm() for grad in right.values()]).norm()
    errors = {"loss": abs(found - loss).item() / loss.item()}
    for name, parameter in model.named_parameters():
        # what is zero by construction is held against a thousandth of all gradients' norm
        most = torch.maximum(right[name].norm(), norm / 1000)
        errors[name] = ((parameter.grad - right[name]).norm() / most).item()
    return errors


def gradient_elsewhere(lab, family, way, lengths, held, group, seed):
    """Of one document's loss: (the gradient in its own embeddings, in all others), on this rank."""
    model, ids, own = tiny(family, seed), packed_ids(lengths, seed), held[group.rank()]
    document, position = document_of(lengths)[own], position_of(lengths)
    chosen = lengths.index(max(lengths))
    attention = partial(lab.attention_of, way, position, held, group)
    AttentionInterface.register("documents", attention)
    model.set_attn_implementation("documents")
    x = model.get_input_embeddings()(ids[own]).detach().requires_grad_()
    labels = finished.targets(ids, END)[own].masked_fill(document != chosen, IGNORE)
    with Float64():
        given = {"inputs_embeds": x[None], "position_ids": position[own][None]}
        logits = model(**given, use_cache=False).logits[0]
        lab.mean_loss(logits, labels, group).backward()
    return x.grad[document == chosen], x.grad[document != chosen]


def expect_model(lab, what, *case):
    """Raise Wrong unless a train_step is exact and no gradient crosses documents; the error."""
    errors = model_errors(lab, *case)
    for name, error in errors.items():
        expect(error <= EXACT, f"{what}: {name} is off by {error:.1e} (at most {EXACT:.0e})")
    _, elsewhere = gradient_elsewhere(lab, *case)
    found = f"{what}: a document's loss has a gradient in another document's embeddings"
    expect(torch.equal(elsewhere, torch.zeros_like(elsewhere)), found)
    return max(errors.values())
