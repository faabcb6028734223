"""Lab 1: it holds and says what it should, its bugs and typical wrong answers are caught, with a hint."""

import importlib
import json
import re
import sys

import pytest
from conftest import REGION, ROOT, python, splice

pytestmark = pytest.mark.slow  # minutes, with the other labs'

sys.path.insert(0, str(ROOT / "labs"))  # a lab's ranks import it by name
lab = importlib.import_module("lab1_collectives")
LAB = ROOT / "labs" / "lab1_collectives.py"


def test_the_lab_holds(tmp_path):
    run = python(
        LAB, "--ranks", "3", "--json", tmp_path / "lab.json", "--plot", tmp_path / "lab.png"
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stderr == "", "nothing but the report is printed"
    assert run.stdout.endswith("\nPASS lab1_collectives: all 7 exercises' checks hold\n")
    results = json.loads((tmp_path / "lab.json").read_text())
    assert results["passed"] and list(results["exercises"]) == list(lab.CHECKS)

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
    a, b = lab.fit(sizes, [20e-6 + n / 5e9 for n in sizes])
    assert (a, 1 / b) == (pytest.approx(20e-6), pytest.approx(5e9))


BUGS = {
    "other_direction": "exchange",
    "own_chunks_only": "reduce_scatter",
    "added_in_place": "reduce_scatter",
    "order_of_arrival": "all_gather",
    "all_to_everyone": "all_reduce",
    "no_way_back": "gradients",
    "slice_for_gradient": "gradients",
    "never_waited_for": "overlap",
    "waited_for_at_once": "overlap",
}


@pytest.mark.parametrize("bug", [bug.__name__ for bug in lab.BUGS])
def test_bugs_are_caught(bug):
    check(BUGS[bug], LAB)  # holds without
    with pytest.raises(lab.Wrong):
        check(BUGS[bug], LAB, bug)


def test_a_bug_fails_the_lab(capsys):
    assert lab.main(["--inject-bug", "all_to_everyone"]) == 1
    report = capsys.readouterr().out
    assert report.endswith("\nFAIL lab1_collectives: all_reduce\n"), report
    assert re.search(r"all_reduce +3 +FAIL +rank \d: sends 960 bytes, not 640", report)


def test_the_bugs_are_listed(capsys):
    assert lab.main(["--inject-bug", "list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(BUGS)


WRONG_ANSWERS = [
    (
        "exchange",  # blocking: all ranks send, and nobody receives
        """
        received = x.new_empty(shape)
        dist.send(x.contiguous(), group=group, group_dst=to)
        dist.recv(received, group=group, group_src=source)
        return received
        """,
        "start both (isend, irecv), then wait for both",
    ),
    (
        "exchange",  # not waited for
        """
        received = x.new_empty(shape)
        works = [dist.isend(x.contiguous(), group=group, group_dst=to)]
        works += [dist.irecv(received, group=group, group_src=source)]
        return received
        """,
        "call work.wait() on both",
    ),
    (
        "exchange",  # to and source swapped
        """
        received = x.new_empty(shape)
        works = [dist.isend(x.contiguous(), group=group, group_dst=source)]
        works += [dist.irecv(received, group=group, group_src=to)]
        for work in works:
            work.wait()
        return received
        """,
        "goes to `to` and comes from `source`",
    ),
    (
        "reduce_scatter",  # starts with the own chunk: ends one place off
        """
        total = chunks[rank]
        for step in range(P - 1):
            own = chunks[(rank - 1 - step) % P]
            total = own + exchange(total, (rank + 1) % P, (rank - 1) % P, own.shape, group)
        return total
        """,
        "chunk rank - 1 sets out first, not chunk rank",
    ),
    (
        "reduce_scatter",  # a step short
        """
        total = chunks[(rank - 1) % P]
        for step in range(P - 2):
            own = chunks[(rank - 2 - step) % P]
            total = own + exchange(total, (rank + 1) % P, (rank - 1) % P, own.shape, group)
        return total
        """,
        "on its way: P - 1 steps",
    ),
    (
        "reduce_scatter",  # in place
        """
        for step in range(P - 1):
            sent, own = chunks[(rank - 1 - step) % P], chunks[(rank - 2 - step) % P]
            own += exchange(sent, (rank + 1) % P, (rank - 1) % P, own.shape, group)
        return own
        """,
        "add into a new tensor",
    ),
    (
        "all_gather",  # sends the own shard in every step
        """
        chunks = [shard] * P
        for step in range(P - 1):
            shape = sizes[(rank - step - 1) % P], *shard.shape[1:]
            chunks[rank - step - 1] = exchange(shard, (rank + 1) % P, (rank - 1) % P, shape, group)
        return torch.cat(chunks)
        """,
        "send on what came last, not the own",
    ),
    (
        "all_gather",  # in the order of arrival
        """
        chunks = [shard]
        for step in range(P - 1):
            shape = sizes[(rank - step - 1) % P], *shard.shape[1:]
            chunks.append(exchange(chunks[-1], (rank + 1) % P, (rank - 1) % P, shape, group))
        return torch.cat(chunks)
        """,
        "chunk c belongs in place c",
    ),
    (
        "all_reduce",  # everything to everyone
        """
        total = x
        for step in range(1, group.size()):
            to, source = (group.rank() + step) % group.size(), (group.rank() - step) % group.size()
            total = total + exchange(x, to, source, x.shape, group)
        return total
        """,
        "send one chunk a step, not all of x",
    ),
    (
        "all_reduce",  # not ours
        """
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total
        """,
        "build it from exchange alone",
    ),
    (
        "all_reduce",  # not ours, where Traffic cannot see it
        """
        import threading

        total = x.clone()
        work = threading.Thread(target=dist.all_reduce, args=(total,), kwargs={"group": group})
        work.start()
        work.join()
        return total
        """,
        "some data takes another way",
    ),
    (
        "all_to_all",  # in the order of arrival
        """
        parts = x.split(sends)
        arrived = [parts[rank]]
        for step in range(1, P):
            to, source = (rank + step) % P, (rank - step) % P
            arrived.append(exchange(parts[to], to, source, (receives[source], *x.shape[1:]), group))
        return torch.cat(arrived)
        """,
        "what rank r sent belongs in place r",
    ),
    (
        "gradients",  # the own slice
        """
        start, end = split(len(grad), ctx.group.rank(), ctx.group.size())
        return grad[start:end], None, None
        """,
        "the other ranks read it too",
    ),
    (
        "overlap",  # returned while on its way
        """
        dx = grad @ weight
        dist.all_reduce(dx, group=group, async_op=True)
        return dx, grad.T @ x
        """,
        "work.wait() before you return dx",
    ),
    (
        "overlap",  # nothing overlaps
        """
        dx = grad @ weight
        dist.all_reduce(dx, group=group)
        return dx, grad.T @ x
        """,
        "after dw, not before",
    ),
    (
        "overlap",  # dw first
        """
        dw, dx = grad.T @ x, grad @ weight
        dist.all_reduce(dx, group=group, async_op=True).wait()
        return dx, dw
        """,
        "start the all-reduce of dx first",
    ),
]


@pytest.mark.parametrize("exercise,answer,hint", WRONG_ANSWERS)
def test_wrong_answers_get_their_hint(tmp_path, exercise, answer, hint):
    places = [name for _, name, _ in REGION.findall(LAB.read_text())].count(exercise)
    path = splice(lab, tmp_path / LAB.name, exercise, [answer] + [None] * (places - 1))
    with pytest.raises(lab.Wrong) as caught:
        check(exercise, path)
    assert hint in caught.value.hint, caught.value


def check(exercise, answers, bug=None):
    """The reports of an exercise's check on its ranks."""
    return lab.on_ranks(lab.CHECKS[exercise][1], lab.check_on_rank, str(answers), bug, exercise, 7)


@pytest.mark.parametrize(
    "options,message",
    [
        (["--ranks", "1"], "argument --ranks: invalid choice: 1"),
        (["--ranks", "two"], "argument --ranks: invalid int value: 'two'"),
        (["--inject-bug", "typo"], "no bug typo; --inject-bug list names them"),
        (["--json", "/nowhere/lab.json"], "cannot write /nowhere/lab.json"),
        (["--typo"], "unrecognized arguments: --typo"),
    ],
)
def test_bad_input_is_one_line(capsys, options, message):
    assert lab.main(options) == 2
    out, errors = capsys.readouterr()
    assert out == "" and errors.startswith(f"error: {message}") and errors.count("\n") == 1
