"""Attention of packed documents on ranks, and whole models of Hugging Face's: for lab 14."""

from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import (
    AttentionInterface,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from labs.kit.blame import default_group_refused
from labs.kit.compare import close, drawn, gradients, unchanged
from labs.kit.harness import Traffic, Wrong, expect
from labs.kit.models import Float64, expect_exact, random_model, relative_errors
from labs.kit.tools import members
from labs.lab14_documents.documents import (
    END,
    IGNORE,
    VOCAB,
    document_of,
    finished,
    first_of,
    groups_of_all_sizes,
    mask_of,
    packed_ids,
    packings,
    placements,
    position_of,
)

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": VOCAB}
SIZES |= {"num_key_value_heads": 4, "head_dim": 4, "intermediate_size": 12, "pad_token_id": None}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}
FAMILIES = {
    "LLaMA": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True}),
    "Mistral, window 4": (MistralConfig, MistralForCausalLM, {"sliding_window": 4}),
    "Qwen3, window 3 and none": (Qwen3Config, Qwen3ForCausalLM, MIXED | {"sliding_window": 3}),
}


# ---- Attention on one device ---------------------------------------------------------------------


def attention_case(seed, lengths, window, kv=5, g=3, d=2):
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


def ring_cases(seed):
    """Yield (what, group, held, case) on every rank of each group."""
    cases = [(*item, window) for item, window in zip(packings(seed).items(), (4, None, 3, None))]
    for group, _, P in members(groups_of_all_sizes()):
        for what, lengths, window in cases:
            case = attention_case(seed, lengths, window)
            for where, held in placements(lengths, P, seed).items():
                yield f"{what} {where} on {P} ranks, window {window}", group, held, case


def agreed(group, check, *args):
    """check(*args) on every rank of the group: all raise what the first has found that finds any.

    A rank that alone has nothing wrong would go on, and find something else.
    """
    result = wrong = None
    try:
        result = check(*args)
    except Wrong as problem:
        wrong = problem
    everyone = [None] * group.size()
    dist.all_gather_object(everyone, wrong, group=group)
    for problem in everyone:
        if problem:
            raise problem
    return result


def moved(case, held, rank, step):
    """How many keys this rank sends on, to come to the next one in this step."""
    return len(finished.travels(held, (rank - step + 1) % len(held), step, case.first))


def expect_sent(told, traffic, case, held, rank, forward):
    """Raise Wrong unless as many bytes were sent as the keys (or gradients) that travel have."""
    others = ", ".join(sorted(set(traffic.ops) - {"send"}))
    expect(not others, f"{told}: calls {others}", "pass_on() is all that it takes")
    row, P = 2 * len(case.k) * case.k.shape[-1] * 8, len(held)
    ahead = rank if forward else rank - 1  # back goes what had come, to where it came from
    right = row * sum(moved(case, held, ahead % P, step) for step in range(1, P))
    sent = traffic.bytes("send")
    found = f"{told}: {sent} bytes are sent, not {right}"
    expect(sent == right, found, "in each step what travels() says, and no more")


def watch(lab, toward, hint):
    """Have pass_on, its wait and attend note themselves: a list of b(egun), a(ttend), w(aited).

    And the lengths (sent, received) that pass_on is called with: raises Wrong unless each is the
    next of those that the check has put into the second list; hint: what the lengths are.
    """
    events, lengths, pass_on, attend = [], [], lab.pass_on, lab.attend

    def noting_pass_on(x, length, by, group):
        expect(by == toward, f"pass_on() by {by}", f"this way it is by {toward}")
        world = group is dist.group.WORLD
        expect(not world, "pass_on() among all ranks of the job", "pass the group that is given")
        moves = x.shape[-2] + length > 0
        right, mine = lengths.pop(0) if moves and lengths else (0, 0), (x.shape[-2], length)
        found = f"pass_on() sends {mine[0]} tokens for {mine[1]}, and {right[0]} go for {right[1]}"
        expect(mine == right, found, hint)
        events.extend("b" * moves)
        wait = pass_on(x, length, by, group)

        def noting_wait():
            events.extend("w" * moves)
            return wait()

        return noting_wait

    def noting_attend(*args):
        events.append("a")
        return attend(*args)

    lab.pass_on, lab.attend = noting_pass_on, noting_attend
    return events, lengths


def expect_all(told, events, lengths, hint):
    """Raise Wrong unless all exchanges of watch() have been begun, and each waited for."""
    expect(not lengths, f"{told}: no pass_on() of (sent, received) tokens {lengths[:1]}", hint)
    waited = events.count("b") == events.count("w")
    expect(waited, f"{told}: what a pass_on() has begun is not waited for", hint)


def lengths_of(case, held, rank, forward):
    """[(tokens sent, received) of each exchange of the ring, where there are any]."""
    P = len(held)
    ranks = (rank, rank - 1) if forward else (rank - 1, rank)  # back goes what had come
    steps = range(1, P) if forward else reversed(range(1, P))
    pairs = [tuple(moved(case, held, r % P, step) for r in ranks) for step in steps]
    return [pair for pair in pairs if any(pair)]


def expect_overlap(told, events, case, held, rank, busy):
    """Raise Wrong where a step waits first; busy: of each step, whether this rank has pairs in it.

    Steps that move nothing have left no b and no w.
    """
    for step, has in enumerate(busy):
        moves = moved(case, held, rank, step + 1) + moved(case, held, rank - 1, step + 1)
        if not moves:
            continue
        _, _, after = "".join(events).partition("b")
        during, _, events = after.partition("w")
        found = f"{told}: waits for keys before it has computed with those that it has"
        expect("a" in during or not has, found, "pass_on(), then attend(), then wait")


def expect_one(what, traffic, right):
    """Raise Wrong unless one all-to-all of so many bytes is all there was."""
    found = f"{what}: {traffic.ops}: use one all-to-all of {right} bytes"
    hint = "rows of c numbers, all in one message"
    expect(traffic.ops == {"all_to_all": [1, right]}, found, hint)


def expect_loss(lab, told, labels, own, group, seed):
    """Raise Wrong unless mean_loss() of a rank's tokens is its summand, with its gradient."""
    logits, mine = drawn(seed, len(labels), VOCAB), labels[own]
    x = logits[own].requires_grad_()
    with unchanged(logits=x, labels=mine), Traffic() as traffic, default_group_refused():
        found = lab.mean_loss(x, mine, group)
    total, own_targets = (labels != IGNORE).sum(), (mine != IGNORE).sum()
    hint = "the number of targets has no gradient; the loss has"
    expect(found.requires_grad, f"{told}: the summand has no gradient", hint)
    losses = F.cross_entropy(x, mine, reduction="sum")
    right = losses / total if total else 0 * x.sum()
    hints = {"of all ranks' targets, not of this rank's: all-reduce their number": own_targets}
    hints["a mean of the ranks' means weighs their tokens differently"] = own_targets * group.size()
    hints["targets, not tokens: a document's last token has none"] = len(labels)
    hints["the mean: divide by the number of all ranks' targets"] = 1
    hints["the sum, once divided: reduction='sum'"] = own_targets * total
    hints = {text: (losses / n).detach() for text, n in hints.items() if n}
    hint = "a rank without a target has 0; where no rank has one, the sum is divided by 1"
    if total and not found.isnan():
        hint = "the sum over own targets / all ranks' targets, to which a rank without one adds 0"
    close(f"{told}: the summand", found.detach(), right.detach(), hints, hint)
    grads = (gradients(y, None, [x])[0] for y in (found, right))
    close(f"{told}: the gradient", *grads, None, "that of the own summand, and of no other")
    hint = "one number: how many targets there are; a rank that has none takes part, too"
    one = [*traffic.ops] == ["all_reduce"] and traffic.ops["all_reduce"] <= [1, 8]
    expect(one, f"{told}: messages {traffic.ops or 'none'}", hint)


# ---- Whole models --------------------------------------------------------------------------------


def tiny(family, seed):
    """Hugging Face's model with random weights, in float64, the same on every rank."""
    config, causal, more = FAMILIES[family]
    return random_model(causal, config(**SIZES, **more), seed)


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
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return relative_errors(found, grads, loss, right)


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
    worst = expect_exact(what, model_errors(lab, *case))
    _, elsewhere = gradient_elsewhere(lab, *case)
    found = f"{what}: a document's loss has a gradient in another document's embeddings"
    expect(torch.equal(elsewhere, torch.zeros_like(elsewhere)), found)
    return worst
