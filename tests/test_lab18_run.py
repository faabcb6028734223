"""Lab 18: every schedule on real ranks against one device; its orders against PyTorch's."""

import contextlib
import io

import pytest
import torch
import torch.distributed as dist
from learner import shown

from labs.kit.harness import Traffic, on_ranks
from labs.lab18_schedules import check, show
from labs.lab18_schedules import lesson as lab

SIZES = [(P, M) for P in range(1, 6) for M in range(1, 14)]


@pytest.mark.parametrize("name", [name for name in lab.SCHEDULES if name in show.TORCHS])
def test_orders_and_peaks_are_pytorchs(name):
    for P, M in SIZES:
        if (name == "interleaved" and M % P) or (name == "1f1b" and M < P):
            continue  # PyTorch has other groups there, and no table
        theirs = show.torchs_order(lab, name, P, M, lab.SCHEDULES[name][1])
        if theirs is None:
            pytest.skip(f"this torch has no {name}")
        assert lab.all_schedules(name, P, M) == theirs, (P, M)


@pytest.mark.parametrize("name", lab.SCHEDULES)
def test_times_are_pytorchs(name):
    """The simulator of its pictures gets our orders: F, I and W take 1 there, and B takes 2."""
    visual = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    V, split = lab.SCHEDULES[name][1], name in ("zb", "zbv")
    names, widths = ("FIW", (1, 1, 1)) if split else ("FB", (1, 2))
    names, widths = dict(zip("FBW", names)), dict(zip("FBW", widths))
    for P, M in SIZES:
        if P == 1 or (name == "interleaved" and M % P):
            continue  # there the last stage's B would wait for the stage before
        orders = lab.all_schedules(name, P, M)
        given = [[visual._Action.from_str(f"{s}{names[k]}{m}") for k, s, m in o] for o in orders]
        with contextlib.redirect_stdout(io.StringIO()):
            spaced = visual.add_schedule_op_spacing(given)
        for order in spaced:
            while order[-1] is None:  # it waits for nothing more
                order.pop()
        ends = [sum(2 if a and "B" in str(a) else 1 for a in order) for order in spaced]
        rows = lab.simulate(orders, P * V, lambda action: widths[action.kind])
        end = max(end for *_, end in rows)
        assert max(ends) == end, (P, M)
        part, busy = lab.bubble_formula(P, M, V, *widths.values()), V * M * sum(widths.values())
        assert part is None or part == pytest.approx(1 - busy / end), (P, M)


def prove(group, lab, family, tied):
    """The largest error of a gradient or loss, of all schedules and 1 to 9 microbatches."""
    worst, rank, P, sizes = 0.0, group.rank(), group.size(), {"num_hidden_layers": 8}
    sizes |= {"layer_types": check.LAYERS * 4} if family == "qwen3" else {}
    for M, name in ((M, name) for M in range(1, 10) for name in lab.SCHEDULES):
        if name == "interleaved" and M % P:
            continue
        ids, targets = check.batch(0, M)
        loss, grads = check.one_device(check.tiny(family, tied, **sizes), ids, targets)
        model = check.tiny(family, tied, **sizes)
        pipe = lab.Pipeline(model, name, M, group, recompute=M % 3 == 0)
        with check.in_float64(model), Traffic() as traffic:
            mine = torch.zeros_like(loss) + pipe.train_step(ids, targets)
        home, count = pipe.rank_of, pipe.stage_count
        links = [(s, s + step) for s in range(count) for step in (1, -1) if 0 <= s + step < count]
        sent = sum(home[a] == rank != home[b] for a, b in links)
        nbytes = sent * ids.numel() * check.SHAPE["hidden_size"] * 8
        calls, ends = sent * M, {home[0], home[count - 1]}
        if tied and len(ends) == 2 and rank in ends:
            calls, nbytes = calls + 1, nbytes + grads["model.embed_tokens.weight"].nbytes
        assert traffic.ops.get("send", [0, 0]) == [calls, nbytes], (name, M)
        dist.all_reduce(mine, group=group)
        held = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        everyones = [None] * P
        dist.all_gather_object(everyones, set(held), group=group)
        assert set().union(*everyones) == set(grads), (name, M)
        norm = torch.nn.utils.get_total_norm(grads.values())
        errors = [(held[n] - grads[n]).norm() / max(grads[n].norm(), norm / 1000) for n in held]
        worst = max(worst, abs(mine - loss).item() / loss.item(), *map(float, errors))
    return worst


@pytest.mark.slow
@pytest.mark.parametrize("P", [2, 3, 4])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_gradient_is_one_devices(P, family, tied):
    assert 0 < max(on_ranks(P, prove, lab, family, tied, timeout=600)) <= 1e-10


@pytest.mark.slow
def test_the_run(tmp_path):
    results = shown("lab18", tmp_path)
    assert results["prediction"]["measured"] == 7
    for name, row in results["schedules"].items():
        assert row["formula"] is None or row["formula"] == pytest.approx(row["bubble"], abs=1e-9)
        for kept, expected in zip(row.get("measured_peaks", []), row["peak_bytes"]):
            assert -1 < (kept - expected) / show.HIDDEN_BYTES <= 2 * show.P + 1, name
