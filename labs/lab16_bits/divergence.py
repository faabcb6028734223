"""Log probabilities on several tensor parallel sizes, and sums of the same numbers in any order.

For lab 16. Plain tensor parallelism is the lab's program with as many blocks as there are ranks.
"""

import random

import torch
import torch.distributed as dist


def library(x, group):
    """The library's all-reduce: its order is its own affair."""
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


def plain(lab, dp, tp):
    """plain tensor parallelism: one product of all that a rank has, the library's all-reduce"""
    lab.BLOCKS, lab.all_reduce = tp, library


WIDER = {"LAYERS": 4, "H": 128, "HEADS": 16, "KV": 8, "D": 8, "WIDTH": 256, "VOCAB": 256, "S": 64}


def enlarge(lab):
    """Give the lab's model WIDER's sizes; returns what it had."""
    right = dict(vars(lab))
    vars(lab).update(WIDER, dropout=lambda x, *_, **__: x)
    h, width, v = lab.H, lab.WIDTH, lab.VOCAB
    shapes = {"embed": (v, h), "head": (v, h), "q": (lab.HEADS * lab.D, h), "down": (h, width)}
    shapes |= {"k": (lab.KV * lab.D, h), "v": (lab.KV * lab.D, h), "o": (h, lab.HEADS * lab.D)}
    shapes |= {"gate": (width, h), "up": (width, h)}
    lab.CUT = {name: (dim, shapes.get(name, (h,))) for name, (dim, _) in lab.CUT.items()}
    return right


def log_probabilities(group, groups, lab, seed):
    """{(how, dtype, tp): [log probability of each target]} of a forward, on rank 0."""
    found, right = {}, enlarge(lab)
    numbers = torch.Generator().manual_seed(seed)
    ids = torch.randint(lab.VOCAB, (4, lab.S), generator=numbers)
    for how in "plain", "tree":
        for dtype in torch.float32, torch.bfloat16:
            for dp, tp in groups:
                if groups[dp, tp] and dp == 1:
                    if how == "plain":
                        plain(lab, dp, tp)
                    layout = lab.Layout(*groups[dp, tp])
                    w = lab.new_state(layout, seed, dtype)["weights"]
                    with torch.no_grad():
                        logits = [lab.forward(row, w, layout, 0, 0, seed) for row in ids]
                        losses = [
                            lab.token_losses([x[:-1] for x in own], row[1:], layout)
                            for own, row in zip(logits, ids)
                        ]
                    vars(lab).update({name: right[name] for name in ("BLOCKS", "all_reduce")})
                    name = str(dtype).removeprefix("torch.")
                    found[how, name, tp] = (-torch.cat(losses)).tolist()
                dist.barrier(group)
    vars(lab).update(right)
    return found


def rows_alone(size, seed):
    """{dtype: {n: [numbers that differ, of how many]}}: n rows of a product beside those alone.

    The batch size chooses the kernel, and the order in it; on some machines nothing differs.
    """
    numbers, found = torch.Generator().manual_seed(seed), {}
    for dtype in torch.float32, torch.bfloat16:
        x, w = (torch.randn(size, size, generator=numbers).to(dtype) for _ in range(2))
        together, row = x @ w.T, found.setdefault(str(dtype).removeprefix("torch."), {})
        for n in (1, 2, 8, size // 2):
            alone = x[:n] @ w.T
            row[n] = [int((alone != together[:n]).sum()), alone.numel()]
    return found


def sums_in_every_order(count, tries, seed):
    """{dtype: [the sum of the same numbers, in units of the exact sum's last place]}."""
    numbers, chosen, found = torch.Generator().manual_seed(seed), random.Random(seed), {}
    drawn = torch.randn(count, generator=numbers)
    for dtype in torch.float32, torch.bfloat16:
        given = drawn.to(dtype)
        exact = given.double().sum()
        unit = torch.finfo(dtype).eps * 2.0 ** exact.abs().log2().floor()
        orders = torch.stack(
            [torch.tensor(chosen.sample(range(count), count)) for _ in range(tries)]
        )
        rows = given[orders]  # (tries, count)
        total = rows[:, 0]
        for i in range(1, count):
            total = total + rows[:, i]
        found[str(dtype).removeprefix("torch.")] = ((total.double() - exact) / unit).tolist()
    return found
