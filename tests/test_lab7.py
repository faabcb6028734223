"""labs/lab7_ring_attention.py as a learner meets it: the run, other sizes, its bugs, and wrong answers."""

import json
import sys
from functools import partial

import conftest
import pytest
from conftest import ROOT, python

sys.path.insert(0, str(ROOT / "labs"))
import lab7_ring_attention as lab7  # noqa: E402

pytestmark = pytest.mark.slow  # minutes, with the other labs'

LAB = ROOT / "labs" / "lab7_ring_attention.py"
graded = partial(conftest.graded, lab7)
splice = partial(conftest.splice, lab7)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The lab, run once as the README says: the process, its JSON, its picture."""
    folder = tmp_path_factory.mktemp("lab7")
    done = python(LAB, "--json", folder / "lab7.json", "--plot", folder / "lab7.png")
    assert done.returncode == 0, done.stdout + done.stderr
    return done, json.loads((folder / "lab7.json").read_text()), folder / "lab7.png"


def test_the_lab_proves_itself(run):
    done, found, picture = run
    assert done.stderr == "", "nothing but the report is printed"
    assert done.stdout.splitlines()[-1] == "PASS lab7_ring_attention: all 8 exercises' checks hold"
    assert picture.read_bytes()[:4] == b"\x89PNG" and picture.stat().st_size > 20_000
    assert found["passed"] and found["failed"] == []
    assert found["exercises"].keys() == lab7.CHECKS.keys()
    assert all(
        exercise["passed"] and exercise["report"] for exercise in found["exercises"].values()
    )


def test_balance(run):
    """1024 tokens on 4 ranks by hand: 256 queries have 256 * 257 / 2 pairs with their own keys, 256^2 with
    earlier ones; zigzag has half of those in every step."""
    balance, own, earlier = run[1]["balance"], 256 * 257 // 2, 256 * 256
    assert balance["contiguous"]["pairs"] == [
        [own] + [earlier] * r + [0] * (3 - r) for r in range(4)
    ]
    in_itself = 2 * (128 * 129 // 2) + 128 * 128
    assert balance["zigzag"]["pairs"] == [[in_itself] + [earlier // 2] * 3] * 4
    assert balance["contiguous"]["lockstep"] > 1.74 and balance["zigzag"]["lockstep"] == 1


def test_side_by_side(run):
    """Bytes that a rank of 4 sends for 256 tokens, 8 heads of 16 numbers, float64: by hand."""
    ways = {(r["heads"], r["kv_heads"], r["ranks"], r["way"]): r for r in run[1]["ways"]}
    tokens = 256 * 128 * 8  # all of them, as bytes
    sent = [
        ways[8, 8, 4, way]["forward"] for way in ("SP", "Ulysses", "CP, ring", "CP, all-gather")
    ]
    assert sent == [
        2 * tokens * 3 / 4,
        4 * tokens / 4 * 3 / 4,
        2 * tokens * 3 / 4,
        2 * tokens * 3 / 4,
    ]
    assert ways[8, 4, 4, "CP, ring"]["forward"] == tokens * 3 / 4, (
        "half of the KV heads, half of the bytes"
    )
    assert ways[8, 8, 4, "CP, ring"]["backward"] == 2 * tokens * 7 / 4
    assert (
        "3 heads" in ways[3, 1, 4, "Ulysses"]["refused"]
        and "3 heads" in ways[3, 1, 4, "SP"]["refused"]
    )
    assert ways[3, 1, 4, "CP, ring"]["error"] < 1e-10


def test_too_few_tokens():
    done = python(LAB, "--length", 3)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "error: argument --length: 3 tokens are too few for 4 ranks; 4 would do\n"


def test_lengths_that_nothing_divides():
    for length in 5, 333:  # 5 tokens: with zigzag 3 of the 8 chunks are empty
        ranks = lab7.on_ranks(4, lab7.balance_on_rank, 0, length)
        for rank, found in enumerate(ranks):
            for placement in lab7.PLACEMENTS:
                need = lab7.work(length, 4, placement)[rank].sum()
                assert need <= found[placement]["in_tiles"] == found[placement]["forward"]


@pytest.mark.parametrize("exercise", lab7.CHECKS)
def test_seed(exercise):
    assert graded(LAB, exercise, seed=77)[0]


CAUGHT_BY = {
    "zigzag_from_the_middle": "positions",
    "keys_of_the_next_rank": "ring_forward",
    "local_mask": "ring_forward",
    "parts_averaged": "merge",
    "no_peak": "merge",
    "inf_minus_inf": "attend",
    "future_multiplied": "attend",
    "softmax_of_the_block": "attend_backward",
    "delta_forgotten": "attend_backward",
    "first_query_head_only": "attend_backward",
    "global_peers": "pass_on",
    "waits_at_once": "pass_on",
    "sent_on_after_use": "ring_forward",
    "one_send_too_many": "ring_forward",
    "heads_repeated": "ring_forward",
    "not_sent_home": "ring_backward",
    "others_forgotten": "ring_backward",
}


@pytest.mark.parametrize("bug", CAUGHT_BY)
def test_bug_fails_the_lab(bug, monkeypatch, capsys):
    """With the one check that has to catch it, and no experiments: those never meet a bug."""
    monkeypatch.setattr(lab7, "CHECKS", {CAUGHT_BY[bug]: lab7.CHECKS[CAUGHT_BY[bug]]})
    monkeypatch.setattr(lab7, "experiment", lambda args: {})
    assert lab7.main(["--inject-bug", bug]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == f"FAIL lab7_ring_attention: {CAUGHT_BY[bug]}"


def test_every_bug_is_tried():
    assert {bug.__name__ for bug in lab7.BUGS} == CAUGHT_BY.keys()


FORWARD = """kv = torch.stack([k, v])
for step in range(P):
    source = SOURCE
    if step < P - 1:
        arriving = pass_on(kv, len(held[source - 1]), group)
    out, lse = merge(out, lse, *attend(q, *kv, held[rank], held[source]))
    if step < P - 1:
        kv = arriving()
return out, lse"""

WRONG_ANSWERS = [
    (
        "positions",
        """if placement == CONTIGUOUS:
    return torch.arange(*split(length, rank, world))
return torch.cat([torch.arange(*split(length, c, 2 * world)) for c in (rank, rank + world)])""",
        "2P - 1 - r counts from the end",
    ),
    ("work", "return torch.ones(world, world, dtype=torch.long)", ""),
    (
        "merge",
        "return (out1 + out2) / 2, torch.logaddexp(lse1, lse2)",
        "a part counts by exp(its lse - lse)",
    ),
    (
        "merge",
        """lse = (lse1.exp() + lse2.exp()).log()
return (lse1 - lse).exp()[..., None] * out1 + (lse2 - lse).exp()[..., None] * out2, lse""",
        "inf - inf where no key is seen",
    ),
    (
        "attend",
        """s = scores(q[..., rows, :], k[..., keys, :], q_pos[rows], k_pos[keys])
lse[..., rows] = s.logsumexp(-1)
out[..., rows, :] = s.exp() @ v[:, :, None, keys]""",
        "divide by the sum of exp(scores)",
    ),
    (
        "attend_backward",
        """p = (scores(q_tile, k_seen, q_pos[rows], k_pos[keys]) - lse[..., rows, None]).exp()
ds = p * (do_tile @ v_seen.mT[:, :, None] - delta[..., rows, None])
dq[..., rows, :] = ds @ k_seen[:, :, None]
dk[..., keys, :] += (ds.mT @ q_tile).sum(2)
dv[..., keys, :] += (p.mT @ do_tile).sum(2)""",
        "scores were divided by sqrt(d)",
    ),
    (
        "pass_on",
        """rank, P = group.rank(), group.size()
if P == 1:
    return lambda: x
arriving = x.new_empty(*x.shape[:-2], length, x.shape[-1])
sending = dist.isend(x.contiguous(), group=group, group_dst=(rank + 1) % P)
dist.recv(arriving, group=group, group_src=(rank - 1) % P)
sending.wait()
return lambda: arriving""",
        "isend and irecv begin",
    ),
    ("ring_forward", FORWARD.replace("SOURCE", "(rank + step) % P"), "they travel to rank + 1"),
    ("ring_forward", "return attend(q, k, v, held[rank], held[rank])", "this rank's own keys only"),
    (
        "ring_forward",
        """parts = [torch.empty(2, *k.shape[:2], len(pos), k.shape[-1], dtype=k.dtype) for pos in held]
dist.all_gather(parts, torch.stack([k, v]), group=group)
for kv, pos in zip(parts, held):
    out, lse = merge(out, lse, *attend(q, *kv, held[rank], pos))
return out, lse""",
        "sends to its neighbour and to no other",
    ),
]


@pytest.mark.parametrize("exercise, answer, hint", WRONG_ANSWERS)
def test_wrong_answer(exercise, answer, hint, tmp_path):
    passed, found, given = graded(splice(tmp_path / "answers.py", exercise, [answer]), exercise)
    assert not passed and hint in given, (found, given)
