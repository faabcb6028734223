"""Lab 1: it holds and shows what it should, its bugs and typical wrong answers are caught."""

import json

import pytest
from conftest import ROOT, python
from learner import answered, grade, graded, lab_file, ranks

pytestmark = pytest.mark.slow  # minutes, with the other labs'

LAB = lab_file("lab1")


def test_the_lab_holds(tmp_path):
    run = python(
        LAB,
        "--ranks",
        "3",
        "--predict",
        "4480",
        "--json",
        tmp_path / "lab.json",
        "--plot",
        tmp_path / "lab.png",
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stderr == "", "nothing but the report is printed"
    assert run.stdout.endswith("\nPASS lab1_collectives: all 7 exercises' checks hold\n")
    assert "\n  predicted 4480, measured 4480: right\n" in run.stdout
    results = json.loads((tmp_path / "lab.json").read_text())
    assert results["passed"] and list(results["exercises"]) == list(
        ranks.room("checks", LAB).CHECKS
    )

    sent = {
        (row["operation"], row["ranks"]): row["bytes"] / row["message"] for row in results["counts"]
    }
    assert sent["all-reduce", 3] == pytest.approx(4 / 3) and sent["all-reduce", 2] == 1
    assert sent["all-to-all", 3] == sent["all-gather", 3] == pytest.approx(2 / 3)
    assert sent["gather and add", 3] == 2
    assert [row["steps"] for row in results["counts"] if row["ranks"] == 3] == [2, 2, 4, 2, 2]

    assert list(results["blocking_ring"].values()) == [["done"] * 3, ["send"] * 3]
    reads = {row["read"]: (row["value"], row["seconds"] > 0.4) for row in results["reads"]}
    for stale in ("x, not waited for", "y.elem"):
        assert reads[stale][0] == 1
    for right in ("x after work.wait()", "y + 0", "y.wait()"):
        assert reads[right] == (11, True), "right, and waited for the late rank"
    assert results["overwritten"] == 0

    times = results["time"]["seconds"]
    assert all(
        len(column) == len(results["time"]["bytes"]) and min(column) > 0
        for column in times.values()
    )
    a, b = results["fit"]["latency_s"], results["fit"]["seconds_per_byte"]
    assert results["time"]["predicted"]["ring_all_reduce"][-1] == pytest.approx(
        4 * (a + b * 4194304 / 3)
    )
    assert (tmp_path / "lab.png").read_bytes()[1:4] == b"PNG"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lab.json", "lab.png"]


def test_the_fit_finds_latency_and_bandwidth():
    sizes = [4**k for k in range(4, 12)]
    fit = ranks.room("experiments", LAB).fit
    a, b = fit(sizes, [20e-6 + n / 5e9 for n in sizes])
    assert (a, 1 / b) == (pytest.approx(20e-6), pytest.approx(5e9))


def test_what_the_grader_passes_the_lab_accepts(tmp_path):
    """Other right answers in another folder's my_labs/."""
    (tmp_path / "labs").symlink_to(ROOT / "labs")
    (tmp_path / "my_labs").mkdir()
    mine = tmp_path / "my_labs" / LAB.name
    mine.write_text(answered(LAB, RIGHT))
    run = python(mine, "--ranks", "2", cwd=tmp_path)
    assert run.returncode == 0 and run.stdout.endswith("exercises' checks hold\n"), run.stdout
    assert "Predict, then run: how many bytes does each of 2 ranks send" in run.stdout


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


@pytest.mark.parametrize("bug", BUGS)
def test_bugs_are_caught(bug):
    exercise, said = BUGS[bug]
    passed, verdict = graded(LAB, exercise, bug=bug)
    assert not passed and said in verdict, verdict


def test_a_bug_fails_the_lab(capsys):
    assert grade.run_lab(LAB, ["--inject-bug", "all_to_everyone"]) == 1
    report = capsys.readouterr().out
    assert report.endswith("\nFAIL lab1_collectives: all_reduce\n"), report


WRONG = [
    (
        "exchange",  # blocking: all ranks send, and nobody receives
        [
            """
        received = x.new_empty(shape)
        dist.send(x.contiguous(), group=group, group_dst=to)
        dist.recv(received, group=group, group_src=source)
        return received
        """
        ],
        "start both (isend, irecv), then wait for both",
    ),
    (
        "exchange",  # not waited for
        [
            """
        received = x.new_empty(shape)
        works = [dist.isend(x.contiguous(), group=group, group_dst=to)]
        works += [dist.irecv(received, group=group, group_src=source)]
        return received
        """
        ],
        "call work.wait() on both",
    ),
    (
        "exchange",  # to and source swapped
        [
            """
        received = x.new_empty(shape)
        works = [dist.isend(x.contiguous(), group=group, group_dst=source)]
        works += [dist.irecv(received, group=group, group_src=to)]
        for work in works:
            work.wait()
        return received
        """
        ],
        "goes to `to` and comes from `source`",
    ),
    (
        "reduce_scatter",  # starts with the own chunk: ends one place off
        [
            """
        total = chunks[rank]
        for step in range(P - 1):
            own = chunks[(rank - 1 - step) % P]
            total = own + exchange(total, (rank + 1) % P, (rank - 1) % P, own.shape, group)
        return total
        """
        ],
        "chunk rank - 1 sets out first, not chunk rank",
    ),
    (
        "reduce_scatter",  # a step short
        [
            """
        total = chunks[(rank - 1) % P]
        for step in range(P - 2):
            own = chunks[(rank - 2 - step) % P]
            total = own + exchange(total, (rank + 1) % P, (rank - 1) % P, own.shape, group)
        return total
        """
        ],
        "on its way: P - 1 steps",
    ),
    (
        "reduce_scatter",  # in place
        [
            """
        for step in range(P - 1):
            sent, own = chunks[(rank - 1 - step) % P], chunks[(rank - 2 - step) % P]
            own += exchange(sent, (rank + 1) % P, (rank - 1) % P, own.shape, group)
        return own
        """
        ],
        "add into a new tensor",
    ),
    (
        "all_gather",  # sends the own shard in every step
        [
            """
        chunks = [shard] * P
        for step in range(P - 1):
            shape = sizes[(rank - step - 1) % P], *shard.shape[1:]
            chunks[rank - step - 1] = exchange(shard, (rank + 1) % P, (rank - 1) % P, shape, group)
        return torch.cat(chunks)
        """
        ],
        "send on what came last, not the own",
    ),
    (
        "all_gather",  # in the order of arrival
        [
            """
        chunks = [shard]
        for step in range(P - 1):
            shape = sizes[(rank - step - 1) % P], *shard.shape[1:]
            chunks.append(exchange(chunks[-1], (rank + 1) % P, (rank - 1) % P, shape, group))
        return torch.cat(chunks)
        """
        ],
        "chunk c belongs in place c",
    ),
    (
        "all_gather",  # a step short
        [
            """
            chunks = [shard] * P
            for step in range(P - 2):
                place = (rank - step - 1) % P
                shape = sizes[place], *shard.shape[1:]
                sent = chunks[(rank - step) % P]
                chunks[place] = exchange(sent, (rank + 1) % P, (rank - 1) % P, shape, group)
            return torch.cat(chunks)
            """
        ],
        "P - 1 steps",
    ),
    (
        "all_reduce",  # everything to everyone
        [
            """
        total = x
        for step in range(1, group.size()):
            to, source = (group.rank() + step) % group.size(), (group.rank() - step) % group.size()
            total = total + exchange(x, to, source, x.shape, group)
        return total
        """
        ],
        "send one chunk a step, not all of x",
    ),
    (
        "all_reduce",  # not ours
        [
            """
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total
        """
        ],
        "build it from exchange alone",
    ),
    (
        "all_reduce",  # not ours, where Traffic cannot see it
        [
            """
        import threading

        total = x.clone()
        work = threading.Thread(target=dist.all_reduce, args=(total,), kwargs={"group": group})
        work.start()
        work.join()
        return total
        """
        ],
        "some data takes another way",
    ),
    (
        "all_to_all",  # in the order of arrival
        [
            """
        parts = x.split(sends)
        arrived = [parts[rank]]
        for step in range(1, P):
            to, source = (rank + step) % P, (rank - step) % P
            arrived.append(exchange(parts[to], to, source, (receives[source], *x.shape[1:]), group))
        return torch.cat(arrived)
        """
        ],
        "what rank r sent belongs in place r",
    ),
    (
        "all_to_all",  # stored where it was sent
        [
            """
            parts = x.split(sends)
            arrived = [parts[rank]] * P
            for step in range(1, P):
                to, source = (rank + step) % P, (rank - step) % P
                shape = receives[source], *x.shape[1:]
                arrived[to] = exchange(parts[to], to, source, shape, group)
            return torch.cat(arrived)
            """
        ],
        "stands s ranks ahead",
    ),
    (
        "all_to_all",  # torch's
        [
            """
            out = x.new_empty(sum(receives), *x.shape[1:])
            dist.all_to_all_single(out, x, receives, sends, group=group)
            return out
            """
        ],
        "build it from exchange alone",
    ),
    (
        "gradients",  # the own slice
        [
            """
            start, end = split(len(grad), ctx.group.rank(), ctx.group.size())
            return grad[start:end], None, None
            """,
            None,
            None,
        ],
        "the other ranks read it too",
    ),
    (
        "gradients",  # the others' chunks have no gradient
        [
            None,
            """
            start, end = split(ctx.n, ctx.group.rank(), ctx.group.size())
            dx = grad.new_zeros(ctx.n, *grad.shape[1:])
            dx[start:end] = grad
            return dx, None
            """,
            None,
        ],
        "only the own chunk has a gradient here",
    ),
    (
        "gradients",  # forward again
        [
            None,
            None,
            "return all_to_all(grad, ctx.sends, ctx.receives, ctx.group), None, None, None",
        ],
        "on the way back `receives` is what is sent",
    ),
    (
        "overlap",  # returned while on its way
        [
            """
        dx = grad @ weight
        dist.all_reduce(dx, group=group, async_op=True)
        return dx, grad.T @ x
        """
        ],
        "work.wait() before you return dx",
    ),
    (
        "overlap",  # nothing overlaps
        [
            """
        dx = grad @ weight
        dist.all_reduce(dx, group=group)
        return dx, grad.T @ x
        """
        ],
        "after dw, not before",
    ),
    (
        "overlap",  # dw first
        [
            """
        dw, dx = grad.T @ x, grad @ weight
        dist.all_reduce(dx, group=group, async_op=True).wait()
        return dx, dw
        """
        ],
        "start the all-reduce of dx first",
    ),
]


RIGHT = {
    "exchange": [
        """
        received = x.new_empty(shape)
        sending = dist.isend(x.contiguous(), group=group, group_dst=to)
        receiving = dist.irecv(received, group=group, group_src=source)
        receiving.wait()
        sending.wait()
        return received
        """
    ],
    "reduce_scatter": [
        """
        place, total = rank - 1, chunks[rank - 1].clone()
        while place % P != rank:
            place -= 1
            shape = chunks[place % P].shape
            arrived = exchange(total, (rank + 1) % P, (rank - 1) % P, shape, group)
            total = arrived.add_(chunks[place % P])
        return total
        """
    ],
    "all_gather": [
        """
        out = shard.new_empty(n, *shard.shape[1:])
        places = out.split(sizes)
        places[rank].copy_(shard)
        for back in range(1, P):
            place = places[(rank - back) % P]
            sent = places[(rank - back + 1) % P]
            place.copy_(exchange(sent, (rank + 1) % P, (rank - 1) % P, place.shape, group))
        return out
        """
    ],
    "all_reduce": [
        """
        own = ring_reduce_scatter(x, group)
        everything = ring_all_gather(own, x.shape[0], group)
        return everything
        """
    ],
    "all_to_all": [
        """
        starts = [sum(sends[:r]) for r in range(P)]
        got = {rank: x[starts[rank] : starts[rank] + sends[rank]]}
        for source in (r for r in range(-P + 1 + rank, rank)):
            to = (2 * rank - source) % P
            part = x[starts[to] : starts[to] + sends[to]]
            source %= P
            got[source] = exchange(part, to, source, (receives[source], *x.shape[1:]), group)
        return torch.cat([got[r] for r in sorted(got)])
        """
    ],
    "gradients": [
        "return ReduceScatter.apply(grad.contiguous(), ctx.group), None, None",
        "return AllGather.apply(grad.contiguous(), ctx.n, ctx.group), None",
        "return AllToAll.apply(grad, ctx.receives, ctx.sends, ctx.group), None, None, None",
    ],
    "overlap": [
        """
        dx = torch.mm(grad, weight)
        work = dist.all_reduce(dx, dist.ReduceOp.SUM, group, True)
        dw = torch.einsum("bo,bi->oi", grad, x)
        work.wait()
        return dx, dw
        """
    ],
}


@pytest.mark.parametrize("exercise,regions,hint", WRONG)
def test_wrong_answers_get_their_hint(exercise, regions, hint):
    passed, verdict = graded(LAB, exercise, regions)
    assert not passed and hint in verdict, verdict


@pytest.mark.parametrize("exercise", RIGHT)
def test_other_right_answers_pass(exercise):
    passed, verdict = graded(LAB, exercise, RIGHT[exercise])
    assert passed, verdict


@pytest.mark.parametrize(
    "options,message",
    [
        (["--ranks", "1"], "argument --ranks: invalid choice: 1"),
        (["--ranks", "two"], "argument --ranks: invalid int value: 'two'"),
        (["--inject-bug", "typo"], "no bug typo; --inject-bug list names them"),
        (["--json", "/nowhere/lab.json"], "cannot write /nowhere/lab.json"),
        (["--predict", "half"], "argument --predict: invalid float value: 'half'"),
        (["--typo"], "unrecognized arguments: --typo"),
    ],
)
def test_bad_input_is_one_line(capsys, options, message):
    assert grade.run_lab(LAB, options) == 2
    out, errors = capsys.readouterr()
    assert out == "" and errors.startswith(f"error: {message}") and errors.count("\n") == 1
