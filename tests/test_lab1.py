"""Lab 1 as a learner meets it: the run, its options, its bugs, wrong and right answers."""

import json

import pytest
from learner import caught, grade, lab_file, listed, ranks, refused, run_answered, run_finished

pytestmark = pytest.mark.slow  # minutes, with the other labs'

LAB = lab_file("lab1")


def test_the_lab_holds(tmp_path):
    printed, results = run_finished(LAB, tmp_path, "--ranks", 3, "--predict", 4480)
    assert "\n  predicted 4480, measured 4480: right\n" in printed
    counts = {row["operation"]: row for row in results["counts"] if row["ranks"] == 3}
    sent = {name: row["bytes"] / row["message"] for name, row in counts.items()}
    assert sent["all-reduce"] == pytest.approx(4 / 3) and sent["gather and add"] == 2
    assert sent["all-to-all"] == sent["all-gather"] == pytest.approx(2 / 3)
    assert [row["steps"] for row in counts.values()] == [2, 2, 4, 2, 2]
    for row in results["reads"]:
        if row["value"] != 1:
            assert row["seconds"] > 0.4, "right, and waited for the late rank"
    assert results["overwritten"] == 0
    a, b = results["fit"]["latency_s"], results["fit"]["seconds_per_byte"]
    predicted = results["time"]["predicted"]["ring_all_reduce"][-1]
    assert predicted == pytest.approx(4 * (a + b * 4194304 / 3))


def test_the_fit_finds_latency_and_bandwidth():
    sizes = [4**k for k in range(4, 12)]
    a, b = ranks.room("experiments", LAB).fit(sizes, [20e-6 + n / 5e9 for n in sizes])
    assert (a, 1 / b) == (pytest.approx(20e-6), pytest.approx(5e9))


BAD = [  # of these, those that all labs have are tried here alone
    (["--ranks", "1"], "argument --ranks: invalid choice: 1"),
    (["--inject-bug", "typo"], "no bug typo; --inject-bug list names them"),
    (["--json", "/nowhere/lab.json"], "cannot write /nowhere/lab.json"),
    (["--predict", "half"], "argument --predict: invalid float value: 'half'"),
    (["--typo"], "unrecognized arguments: --typo"),
]


@pytest.mark.parametrize("options,message", BAD)
def test_bad_input_is_one_line(capsys, options, message):
    refused(LAB, options, message, capsys)


def test_a_bug_fails_the_lab(capsys, tmp_path):
    file = tmp_path / "bug.json"
    assert grade.run_lab(LAB, ["--inject-bug", "all_to_everyone", "--json", str(file)]) == 1
    assert capsys.readouterr().out.endswith("\nFAIL lab1_collectives: all_reduce\n")
    results = json.loads(file.read_text())
    assert not results["passed"] and not results["exercises"]["all_reduce"]["passed"]


BUGS = {
    "other_direction": ("exchange", "it goes to `to` and comes from `source`"),
    "own_chunks_only": ("reduce_scatter", "only two ranks' parts"),
    "added_in_place": ("reduce_scatter", "add into a new tensor"),
    "order_of_arrival": ("all_gather", "chunk c belongs in place c"),
    "all_to_everyone": ("all_reduce", "send one chunk a step, not all of x"),
    "no_way_back": ("gradients", "on the way back `receives` is what is sent"),
    "slice_for_gradient": ("gradients", "the other ranks read it too"),
    "never_waited_for": ("overlap", "work.wait() before you return dx"),
    "waited_for_at_once": ("overlap", "after dw, not before"),
}

ANSWERS = """
== exchange: start both (isend, irecv), then wait for both
received = x.new_empty(shape)
dist.send(x.contiguous(), group=group, group_dst=to)
dist.recv(received, group=group, group_src=source)
return received
== exchange: call work.wait() on both
work.wait() -> pass
== exchange: goes to `to` and comes from `source`
x.contiguous(), group=group, group_peer=to -> x.contiguous(), group=group, group_peer=source
received, group=group, group_peer=source -> received, group=group, group_peer=to
== exchange
received = x.new_empty(shape)
sending = dist.isend(x.contiguous(), group=group, group_dst=to)
receiving = dist.irecv(received, group=group, group_src=source)
receiving.wait()
sending.wait()
return received
== reduce_scatter: chunk rank - 1 sets out first, not chunk rank
chunks[(rank - 1) % P] -> chunks[rank]
chunks[(rank - 2 - step) % P] -> chunks[(rank - 1 - step) % P]
== reduce_scatter: on its way: P - 1 steps
range(P - 1) -> range(P - 2)
== reduce_scatter: add into a new tensor
for step in range(P - 1):
    sent, own = chunks[(rank - 1 - step) % P], chunks[(rank - 2 - step) % P]
    own += exchange(sent, (rank + 1) % P, (rank - 1) % P, own.shape, group)
return own
== reduce_scatter
total = chunks[rank - 1].clone()
for place in range(rank - 2, rank - 1 - P, -1):
    own = chunks[place % P]
    total = exchange(total, (rank + 1) % P, (rank - 1) % P, own.shape, group).add_(own)
return total
== all_gather: send on what came last, not the own
exchange(chunks[sent] -> exchange(shard
== all_gather: chunk c belongs in place c
torch.cat(chunks) -> torch.cat([chunks[rank - back] for back in range(P)])
== all_gather: P - 1 steps
range(P - 1) -> range(P - 2)
== all_gather
out = shard.new_empty(n, *shard.shape[1:])
places = out.split(sizes)
places[rank].copy_(shard)
for back in range(1, P):
    place, sent = places[(rank - back) % P], places[(rank - back + 1) % P]
    place.copy_(exchange(sent, (rank + 1) % P, (rank - 1) % P, place.shape, group))
return out
== all_reduce: send one chunk a step, not all of x
total, P = x, group.size()
for step in range(1, P):
    to, source = (group.rank() + step) % P, (group.rank() - step) % P
    total = total + exchange(x, to, source, x.shape, group)
return total
== all_reduce: build it from exchange alone
total = x.clone()
dist.all_reduce(total, group=group)
return total
== all_reduce: has shape
ring_all_gather(ring_reduce_scatter(x, group), len(x), group) -> ring_reduce_scatter(x, group)
== all_reduce
own = ring_reduce_scatter(x, group)
everything = ring_all_gather(own, x.shape[0], group)
return everything
== all_to_all: what rank r sent belongs in place r
torch.cat(arrived) -> torch.cat([arrived[rank - step] for step in range(P)])
== all_to_all: stands s ranks ahead
arrived[source] = -> arrived[to] =
== all_to_all: build it from exchange alone
out = x.new_empty(sum(receives), *x.shape[1:])
dist.all_to_all_single(out, x, receives, sends, group=group)
return out
== all_to_all
parts, got = x.split(sends), {}
for source in range(rank + 1 - P, rank):
    to, source = (2 * rank - source) % P, source % P
    got[source] = exchange(parts[to], to, source, (receives[source], *x.shape[1:]), group)
got[rank] = parts[rank]
return torch.cat([got[r] for r in sorted(got)])
== gradients: the other ranks read it too
ring_reduce_scatter(grad, ctx.group) -> grad.tensor_split(ctx.group.size())[ctx.group.rank()]
== gradients: only the own chunk has a gradient here
...
--
start, end = split(ctx.n, ctx.group.rank(), ctx.group.size())
dx = grad.new_zeros(ctx.n, *grad.shape[1:])
dx[start:end] = grad
return dx, None
--
...
== gradients: on the way back `receives` is what is sent
ctx.receives, ctx.sends -> ctx.sends, ctx.receives
== gradients
return ReduceScatter.apply(grad.contiguous(), ctx.group), None, None
--
return AllGather.apply(grad.contiguous(), ctx.n, ctx.group), None
--
return AllToAll.apply(grad, ctx.receives, ctx.sends, ctx.group), None, None, None
== overlap: work.wait() before you return dx
work.wait() -> pass
== overlap: after dw, not before
work = dist.all_reduce(dx, group=group, async_op=True) -> dist.all_reduce(dx, group=group)
work.wait() -> pass
== overlap: start the all-reduce of dx first
dw = grad.T @ x -> pass
dx = grad @ weight -> dw, dx = grad.T @ x, grad @ weight
== overlap
dx = torch.mm(grad, weight)
work = dist.all_reduce(dx, dist.ReduceOp.SUM, group, True)
dw = torch.einsum("bo,bi->oi", grad, x)
work.wait()
return dx, dw
"""
WRONG, RIGHT = listed(LAB, ANSWERS)
test_bugs_are_caught, test_wrong_answers_get_their_hint = caught(LAB, BUGS, WRONG)


def test_other_right_answers_pass_and_the_lab_accepts_them(tmp_path):
    run_answered(LAB, RIGHT, tmp_path, "--ranks", 2)
