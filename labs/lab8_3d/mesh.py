"""A tiny LLaMA on a mesh of ranks, two steps beside one device's: lab 8's proof."""

import copy
import math
import os
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama import modeling_llama

from labs.kit.harness import Traffic
from labs.kit.mistakes import Mistake, mistaken_lab
from labs.lab8_3d import lesson as finished  # not the learner's

AXES, IGNORE, shard_range = finished.AXES, finished.IGNORE, finished.shard_range
all_reduce = finished.all_reduce

LENGTH = 21  # tokens a sequence: no T but 3 and 7 divides it
SAME = {"lm_head.weight": "model.embed_tokens.weight"}  # tied: one device has it under this name
TOLERANCE = 1e-5


def tiny_config(stages):
    """A LLaMA whose sizes little divides: tied embeddings, 2 KV heads, at least a layer a stage."""
    sizes = {"vocab_size": 131, "hidden_size": 32, "intermediate_size": 76, "head_dim": 4}
    sizes |= {"num_hidden_layers": max(5, stages), "initializer_range": 0.1}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True}
    return modeling_llama.LlamaConfig(**sizes, attn_implementation="sdpa")


def tiny_model(stages, seed):
    """That LLaMA on one device, with random weights: the same on every rank."""
    torch.manual_seed(seed)
    return modeling_llama.LlamaForCausalLM(tiny_config(stages))


def random_batch(sizes, microbatches, seed):
    """ids and targets (B, s) of all replicas: each sequence's first so many targets, then IGNORE.

    So no two replicas or microbatches have as many, and a mean of means is not the mean.
    """
    numbers = torch.Generator().manual_seed(seed)
    sequences = 2 * sizes["dp"] * microbatches + 1
    ids = torch.randint(131, (sequences, LENGTH + 1), generator=numbers)
    lengths = torch.randint(1, LENGTH + 1, (sequences, 1), generator=numbers)
    return ids[:, :-1], ids[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, IGNORE)


def one_device_step(model, ids, targets, most):
    """(loss, gradient norm, {name: gradient}) of HF's model as it is, clipped by torch."""
    model.zero_grad()
    loss = F.cross_entropy(model(ids).logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), most)
    return loss.item(), norm.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


def part_of(full, parameter):
    """The slice of one device's tensor that this rank has a shard of; of a norm, all of it."""
    dim, start, end = getattr(parameter, "shard", (0, 0, len(full)))
    return full.narrow(dim, start, end - start)


def relative(mine, right):
    """||mine - right|| / ||right||, of tensors or numbers; what is no number is far off."""
    mine, right = torch.as_tensor(mine).double(), torch.as_tensor(right).double()
    norm = torch.linalg.vector_norm
    return (norm(mine - right) / norm(right).clamp(min=1e-30)).nan_to_num(1e30, 1e30).item()


class Ledger(TorchDispatchMode):
    """Counts, as it happens, what a step sends: rows {(phase, op, group): [calls, bytes]}."""

    PHASES = {"target_count": "count", "forward_all": "forward", "backward_all": "backward"}
    PHASES |= {"finish_gradients": "gradients", "grad_norm": "norm", "mean_loss": "log"}

    def __init__(self, lab, groups):
        """Has the functions of the module lab that train_step calls say when they begin."""
        super().__init__()
        self.rows, self.phase = {}, "elsewhere"
        real = {name: group for name, group in groups.items() if group and group.size() > 1}
        self.names = {group.group_name: name for name, group in real.items()}
        for function, phase in self.PHASES.items():
            setattr(lab, function, partial(self.begin, phase, getattr(lab, function)))

    def begin(self, phase, function, *args, **kwargs):
        self.phase = phase
        return function(*args, **kwargs)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with Traffic() if func.namespace == "c10d" else nullcontext() as traffic:
            out = func(*args, **(kwargs or {}))
        for op, (calls, sent) in (traffic.ops if traffic else {}).items():
            packed = next(arg for arg in args if isinstance(arg, torch.ScriptObject))  # the group
            group = self.names.get(dist.ProcessGroup.unbox(packed).group_name, "another")
            row = self.rows.setdefault((self.phase, op, group), [0, 0])
            row[0], row[1] = row[0] + calls, row[1] + sent
        return out


def expected_traffic(model, groups, rows, microbatches):
    """What a step must send, from this rank's place, as Ledger counts. rows: its sequences."""
    config, size = model.config, {name: group.size() for name, group in groups.items() if group}
    h, M, T = config.hidden_size, microbatches, size["tp"]
    first, last = groups["pp"].rank() == 0, groups["pp"].rank() == size["pp"] - 1
    layers = model.stage[1] - model.stage[0]
    tokens = rows * (LENGTH + -LENGTH % T)
    hidden = 4 * tokens * h  # one (b, s, h) in float32, all microbatches together
    # the head gathers what it reads, the embedding scatters what it looked up
    gathers, scatters = 2 * layers + last, 2 * layers + first
    table = {
        ("count", "all_reduce", "dp"): [1, 8],
        ("forward", "all_gather", "tp"): [M * gathers, gathers * hidden],
        ("forward", "reduce_scatter", "tp"): [M * scatters, scatters * hidden],
        ("forward", "all_reduce", "tp"): [2 * M * last, 3 * 4 * tokens * last],  # cross entropy
        ("forward", "send", "pp"): [M * (not last), hidden // T * (not last)],
        ("backward", "reduce_scatter", "tp"): [M * gathers, gathers * hidden],
        ("backward", "all_gather", "tp"): [M * scatters, scatters * hidden],
        ("backward", "send", "pp"): [M * (not first), hidden // T * (not first)],
        ("norm", "all_reduce", "model"): [1, 8],
        ("log", "all_reduce", "pp"): [1, 4],
        ("log", "all_reduce", "dp"): [1, 4],
    }
    for name in size:
        numbers = sum(p.numel() for p in model.parameters() if name in p.shared)
        table["gradients", "all_reduce", name] = [int(numbers > 0), 4 * numbers]
    return {key: row for key, row in table.items() if row[0] and size[key[2]] > 1}


RIGHT = "each number once, over pp x tp"
NORMS = {  # {how it is computed: a part of grad_norm(), and what stands there instead}
    RIGHT: ("", ""),
    "every replica counted": ("/ copies", ""),
    "tied table counted at both ends": ('name != "dp")', 'name not in ("dp", "embedding"))'),
    "over tp alone": ('groups["model"]', 'groups["tp"]'),
    "over pp alone": ('groups["model"]', 'groups["pp"]'),
    "over all ranks, dp too": ("(squares, g", '(all_reduce(squares, groups["dp"]), g'),
}


def usual_norms(model, groups):
    """{how it is computed: the norm that this rank gets}"""
    norms = {}
    for text, edit in NORMS.items():
        lab = mistaken_lab(finished, "grad_norm", Mistake(text, [edit], [], None))
        norms[text] = lab.grad_norm(model, groups)
    grads = [p.grad.double() for p in model.parameters()]
    return norms | {"this rank's part (torch's own clip)": nn.utils.get_total_norm(grads)}


def prove(lab, sizes, microbatches, seed):
    """Two steps of lab's model on this rank of the mesh, one unclipped, one clipped.

    "errors": of the worse step, of {"loss", "gradient norm", parameters}, relative to one device's;
    "traffic" and "expected": {(phase, op, group): [calls, bytes]}."""
    model = tiny_model(sizes["pp"], seed)
    groups = lab.make_groups(sizes, model.config)
    cut = copy.deepcopy(model)
    lab.parallelize(cut, groups)
    ids, targets = random_batch(sizes, microbatches, seed)
    pad = -LENGTH % sizes["tp"]
    rows = lab.replica_rows(len(ids), groups)
    mine = F.pad(ids, (0, pad))[rows], F.pad(targets, (0, pad), value=IGNORE)[rows]
    errors, ledger = {}, Ledger(lab, groups)
    norm = one_device_step(model, ids, targets, math.inf)[1]
    for most in (norm / 2, math.inf):
        loss, norm, grads = one_device_step(model, ids, targets, most)
        cut.zero_grad()
        ledger.rows.clear()
        with ledger:
            my_loss, my_norm = lab.train_step(cut, *mine, groups, microbatches, most)
        found = {"loss": relative(my_loss, loss), "gradient norm": relative(my_norm, norm)}
        for name, p in cut.named_parameters():
            found[name] = relative(p.grad, part_of(grads[SAME.get(name, name)], p))
        errors = {name: max(error, errors.get(name, 0)) for name, error in found.items()}
    norms = usual_norms(cut, groups) | {RIGHT: lab.grad_norm(cut, groups)}
    replicas = [math.prod(groups[name].size() for name in p.shared) for p in cut.parameters()]
    real = {name: group for name, group in groups.items() if group}
    return {
        "errors": errors,
        "loss": my_loss.item(),
        "norm": my_norm.item(),
        "one_device": {"loss": loss, "norm": norm},
        "traffic": ledger.rows,
        "expected": expected_traffic(cut, groups, len(mine[0]), microbatches),
        "groups": {name: dist.get_process_group_ranks(group) for name, group in real.items()},
        "norms": {text: norm.item() for text, norm in norms.items()},
        "held": sum(p.numel() / count for p, count in zip(cut.parameters(), replicas)),
        "whole": sum(p.numel() for p in model.parameters()),
        "node": int(os.environ.get("GROUP_RANK", 0)),
    }


def sent_too_much(report):
    """The phases of prove()'s step that send more bytes than expected, by whatever collectives."""

    def total(key, phase):
        return sum(sent for place, (_, sent) in report[key].items() if place[0] == phase)

    phases = "forward", "backward", "gradients"
    sums = [(phase, total("traffic", phase), total("expected", phase)) for phase in phases]
    return [f"{phase}: {sent} bytes, {do} do" for phase, sent, do in sums if sent > do]
