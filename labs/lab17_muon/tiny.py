"""The tiny model under Muon, for lab 17: shards and wholes, rounding, the loss beside AdamW's."""

import statistics
from pydoc_data.topics import topics

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from labs.kit.harness import on_ranks, relative_error, table

TINY = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 8, "vocab_size": 256}
TINY |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}  # as tp.py's tiny
TRAINING, BATCH, LENGTH = 80, 8, 64  # steps, sequences, tokens
RATES = {"AdamW": (1e-3, 3e-3, 1e-2), "Muon": (5e-3, 2e-2, 6e-2)}


# ---- Shards and rounding -------------------------------------------------------------------------


def text_batch(step):
    """Token ids (b, s), bytes of Python's manual: another piece for each step."""
    text = "".join(topics[name] for name in sorted(topics)).encode()[: 1 << 18]
    starts = [(step * BATCH + i) * LENGTH % (len(text) - LENGTH) for i in range(BATCH)]
    return torch.tensor([[*text[start : start + LENGTH]] for start in starts])


def tiny():
    """The untrained model, the same in all runs."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**TINY, tie_word_embeddings=True))


def shards(lab):
    """By kind of matrix: how far the shards' own Newton-Schulz is from the matrix's; and rounding.

    Of the first gradients of the tiny model. moved: how many times as far as the gradient the
    result moves, if that is moved by 1e-7.
    """
    model, rows = tiny().double(), {}
    lab.loss_of(model, text_batch(0)).backward()
    for name in lab.choose(model, False):
        row = rows.setdefault(name.split(".")[-2], {2: [], 4: [], "moved": [], "bfloat16": []})
        dim, grad = int("o_proj" in name or "down_proj" in name), model.get_parameter(name).grad
        whole = lab.newton_schulz(grad, torch.float64)
        for world in 2, 4:
            parts = [lab.newton_schulz(x, torch.float64) for x in grad.chunk(world, dim)]
            row[world].append(relative_error(torch.cat(parts, dim), whole))
        noise = torch.randn(grad.shape, generator=torch.Generator().manual_seed(1)).double()
        near = grad + 1e-7 * grad.norm() / noise.norm() * noise
        row["moved"].append(relative_error(lab.newton_schulz(near, torch.float64), whole) / 1e-7)
        row["bfloat16"].append(relative_error(lab.newton_schulz(grad, torch.bfloat16), whole))
    found = {kind: {k: statistics.mean(v) for k, v in row.items()} for kind, row in rows.items()}
    print("\nThe tiny model's first gradients: how far a shard's own Newton-Schulz is off that of")
    print("the matrix; bfloat16's off float64's; what becomes of a change of 1e-7 in the gradient")
    lines = [["", "2 shards", "4 shards", "bfloat16", "1e-7 becomes"]]
    for kind, row in found.items():
        cells = [f"{row[key]:.0%}" for key in (2, 4, "bfloat16")]
        lines.append([kind, *cells, f"{row['moved'] * 1e-7:.0e}"])
    table(*lines)
    return found


def untouched(lab):
    """{"matrices", "same": how many, "off"}: torch.optim.Muon as it is, which casts to bfloat16."""
    model = tiny()
    lab.loss_of(model, text_batch(0)).backward()
    params = [model.get_parameter(name) for name in lab.choose(model, False)]
    mine = [lab.orthogonalize(p.grad, 1, torch.bfloat16) for p in params]
    for p in params:
        p.data.zero_()
    torch.optim.Muon(params, lr=1.0, weight_decay=0.0, momentum=0.0).step()
    pairs = [(ours, -p.detach()) for ours, p in zip(mine, params)]
    same = [torch.equal(*pair) for pair in pairs]
    worst = max(relative_error(*pair) for pair in pairs)
    print("\ntorch.optim.Muon itself, in bfloat16, on one device, and orthogonalize() in bfloat16:")
    print(f"the same bits for {sum(same)} of {len(same)} matrices, at most {worst:.0e} apart")
    return {"matrices": len(same), "same": sum(same), "off": worst}


# ---- The loss ------------------------------------------------------------------------------------


def train(lab, optimizer, rate):
    """The losses of TRAINING steps of the tiny model on one device."""
    model, losses = tiny(), []
    chosen = lab.choose(model, False) if optimizer == "Muon" else {}
    own = {name: (p, 0) for name, p in model.named_parameters()}
    rest = [p for name, p in model.named_parameters() if name not in chosen]
    adamw = torch.optim.AdamW(rest, lr=rate if optimizer == "AdamW" else 3e-3)
    parts = [(own[name][0], blocks) for name, blocks in chosen.items()]
    matrices = [lab.Matrix(p, torch.zeros_like(p), 0, [len(p)], blocks) for p, blocks in parts]

    def alone(parts, matrices, group, dtype):
        return [lab.orthogonalize(p, m.blocks, dtype) for p, m in zip(parts, matrices)]

    for number in range(TRAINING):
        model.zero_grad()
        loss = lab.loss_of(model, text_batch(number))
        loss.backward()
        lab.step(matrices, alone, None, rate, dtype=torch.float32)
        adamw.step()
        losses.append(loss.item())
    return losses


def train_on_rank(group, lab):
    """{learning rate: losses} of the optimizer that is this rank's; no message is sent."""
    name = [*RATES][group.rank()]
    return {rate: train(lab, name, rate) for rate in RATES[name]}


def losses(lab):
    """{optimizer: {learning rate: losses}}"""
    found = dict(zip(RATES, on_ranks(2, train_on_rank, lab, timeout=240)))
    lines = [["optimizer", "learning rate", "loss of the first 10 steps", "of the last 10"]]
    for name, runs in found.items():
        for rate, each in runs.items():
            ends = [f"{statistics.mean(part):.3f}" for part in (each[:10], each[-10:])]
            lines.append([name, rate, *ends])
    print(f"\ntiny, {TRAINING} steps of {BATCH * LENGTH} bytes of Python's manual, the same in all")
    table(*lines)
    return found
