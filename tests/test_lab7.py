"""Lab 7 as a learner meets it: the run, other sizes, its bugs, wrong and other right answers."""

import json
from textwrap import dedent

import pytest
from conftest import ROOT, python
from learner import REGION, answered, grade, graded, lab_file, ranks

pytestmark = pytest.mark.slow  # minutes, with the other labs'

LAB = lab_file("lab7")
lab7 = ranks.load(LAB)
CHECKS = ranks.room("checks", LAB).CHECKS
shown = ranks.room("experiments", LAB)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The lab, run once: what it prints, its JSON, its picture."""
    folder = tmp_path_factory.mktemp("lab7")
    options = "--predict", 458752, "--json", folder / "lab7.json", "--plot", folder / "lab7.png"
    done = python(LAB, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == "", "nothing but the report is printed"
    return done.stdout, json.loads((folder / "lab7.json").read_text()), folder / "lab7.png"


def test_the_lab_proves_itself(run):
    printed, found, picture = run
    assert printed.endswith("\nPASS lab7_ring_attention: all 8 exercises' checks hold\n")
    assert "\n  predicted 458752, measured 458752: right\n" in printed
    assert picture.read_bytes()[:4] == b"\x89PNG" and picture.stat().st_size > 20_000
    assert found["passed"] and found["failed"] == []
    assert found["exercises"].keys() == CHECKS.keys()
    assert all(seen["passed"] and seen["report"] for seen in found["exercises"].values())


def test_balance(run):
    """1024 tokens on 4 ranks by hand: 256 queries have 256 * 257 / 2 pairs with their own keys,
    256^2 with earlier ones; zigzag has half of those in every step."""
    balance, own, earlier = run[1]["balance"], 256 * 257 // 2, 256 * 256
    contiguous = [[own] + [earlier] * r + [0] * (3 - r) for r in range(4)]
    assert balance["contiguous"]["pairs"] == contiguous
    in_itself = 2 * (128 * 129 // 2) + 128 * 128
    assert balance["zigzag"]["pairs"] == [[in_itself] + [earlier // 2] * 3] * 4
    assert balance["contiguous"]["lockstep"] > 1.74 and balance["zigzag"]["lockstep"] == 1
    for P, (contiguous, zigzag) in balance["long"].items():
        assert contiguous > (2 * int(P) - 1) / int(P) - 0.01 and zigzag < 1.01
    for placement in "contiguous", "zigzag":
        for count in balance[placement]["counted"]:
            assert count["in_tiles"] == count["forward"] == count["backward"]


def test_side_by_side(run):
    """Bytes that a rank of 4 sends for 256 tokens, 8 heads of 16 numbers, float64: by hand."""
    ways = {(r["heads"], r["kv_heads"], r["ranks"], r["way"]): r for r in run[1]["ways"]}
    tokens = 256 * 128 * 8  # all of them, as bytes
    names = "SP", "Ulysses", "CP, ring", "CP, all-gather"
    sent = [ways[8, 8, 4, way]["forward"] / tokens for way in names]
    assert sent == [2 * 3 / 4, 4 / 4 * 3 / 4, 2 * 3 / 4, 2 * 3 / 4]
    assert ways[8, 4, 4, "CP, ring"]["forward"] == tokens * 3 / 4, "half of the KV heads"
    assert ways[8, 8, 4, "CP, ring"]["backward"] == 2 * tokens * 7 / 4
    refused = {way: row["refused"] for (*_, way), row in ways.items() if "refused" in row}
    assert refused.keys() == {"SP", "Ulysses"} and "3 heads" in refused["SP"]
    for row in ways.values():
        if "refused" not in row:
            assert row["expected"] == [row["forward"], row["backward"]] and row["error"] < 1e-10


def test_too_few_tokens(capsys):
    assert grade.run_lab(LAB, ["--length", "3"]) == 2
    found = "error: argument --length: 3 tokens are too few for 4 ranks; 4 would do\n"
    assert capsys.readouterr() == ("", found)


@pytest.mark.parametrize("length", [5, 333])  # 5: with zigzag 3 of the 8 chunks are empty
def test_lengths_that_nothing_divides(length):
    counted = ranks.on_ranks(4, shown.balance_on_rank, lab7, 0, length)
    for placement in "contiguous", "zigzag":
        for pairs, found in zip(lab7.work(length, 4, placement), counted):
            count = found[placement]
            assert pairs.sum() <= count["in_tiles"] == count["forward"] == count["backward"]


BUGS = {
    "zigzag_from_the_middle": ("positions", "2P - 1 - r counts from the end"),
    "keys_of_the_next_rank": ("ring_forward", "they travel to rank + 1"),
    "local_mask": ("ring_forward", "positions are those of the keys' owner"),
    "parts_averaged": ("merge", "a part counts by exp(its lse - lse)"),
    "no_peak": ("merge", "exp(lse) is infinite"),
    "inf_minus_inf": ("attend", "inf - inf where no key is seen"),
    "future_multiplied": ("attend", "multiply only keys that are seen"),
    "softmax_of_the_block": ("attend_backward", "p is of the whole softmax"),
    "delta_forgotten": ("attend_backward", "take delta off"),
    "first_query_head_only": ("attend_backward", "a KV head sums over the g heads"),
    "global_peers": ("pass_on", "count within the group"),
    "waits_at_once": ("pass_on", "isend and irecv begin"),
    "sent_on_after_use": ("ring_forward", "pass_on(), then attend(), then wait"),
    "one_send_too_many": ("ring_forward", "the last block has been everywhere"),
    "heads_repeated": ("ring_forward", "K and V of the KV heads"),
    "not_sent_home": ("ring_backward", "send it home"),
    "others_forgotten": ("ring_backward", "add it to the gradient that follows"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_bugs_are_caught(bug):
    exercise, said = BUGS[bug]
    passed, verdict = graded(LAB, exercise, bug=bug)
    assert not passed and said in verdict, verdict


def ours(exercise, *changes):
    """[our answer to an exercise], with pieces replaced by others: (ours, theirs)."""
    (text,) = (body for _, name, body in REGION.findall(LAB.read_text()) if name == exercise)
    text = dedent(text)
    for right, other in changes:
        assert right in text, right
        text = text.replace(right, other)
    return [text]


SEND = "pass_on(kv, len(held[source - 1]), group)"
WRONG = [
    ("positions", ours("positions", ("2 * world - 1 - rank", "world + rank")), "from the end"),
    ("positions", ours("positions", ("[early, late]", "[late, early]")), "the early chunk first"),
    (
        "positions",
        ours("positions", ("torch.cat([early, late])", "torch.arange(rank, length, world)")),
        "single tokens in turn: deal 2P chunks",
    ),
    ("work", ["return torch.ones(world, world, dtype=torch.long)"], "is off by"),
    ("work", ours("work", ("(rank - step)", "(rank + step)")), "they travel to rank + 1"),
    ("work", ours("work", (", right=True", "")), "a query sees its own key too"),
    ("work", ours("work", ("return pairs", "return pairs.T")), "this is [step, rank]"),
    (
        "work",
        ["return torch.tensor([[len(q) * len(k) for k in held] for q in held])"],
        "sees no key of its future",
    ),
    ("attend", ours("attend", ("(s - finite)", "s")), "divide by the sum of exp(scores)"),
    ("attend", ours("attend", (".clamp(min=torch.finfo(s.dtype).min)", "")), "inf - inf"),
    ("attend", ours("attend", ("s.logsumexp(-1)\n", "s.amax(-1)\n")), "off by"),
    (
        "attend",
        [
            """
            s = scores(q[..., rows, :], k, q_pos[rows], k_pos)
            lse[..., rows] = s.logsumexp(-1)
            out[..., rows, :] = s.softmax(-1).nan_to_num(0) @ v[:, :, None]
            """
        ],
        "multiply only keys that are seen",
    ),
    (
        "attend",
        [
            """
            s = scores(q[..., rows, :], k[..., keys, :], q_pos[rows], k_pos[keys])
            lse[..., rows] = s.exp().sum(-1)
            out[..., rows, :] = s.softmax(-1).nan_to_num(0) @ v[:, :, None, keys]
            """
        ],
        "the log of the sum, not the sum",
    ),
    (
        "merge",
        ["return (out1 + out2) / 2, torch.logaddexp(lse1, lse2)"],
        "a part counts by exp(its lse - lse)",
    ),
    (
        "merge",
        ["return out1 + out2, torch.logaddexp(lse1, lse2)"],
        "each is a mean: it counts by exp(its lse - lse)",
    ),
    (
        "merge",
        ours("merge", ("(lse1 -", "(lse0 -"), ("(lse2 -", "(lse1 -"), ("(lse0 -", "(lse2 -")),
        "the weights are exchanged",
    ),
    (
        "merge",
        [
            """
            lse = (lse1.exp() + lse2.exp()).log()
            weights = (lse1 - lse).exp()[..., None], (lse2 - lse).exp()[..., None]
            return weights[0] * out1 + weights[1] * out2, lse
            """
        ],
        "inf - inf where no key is seen",
    ),
    (
        "attend_backward",
        ours("attend_backward", (" / math.sqrt(q.shape[-1])", "")),
        "scores were divided by sqrt(d)",
    ),
    (
        "attend_backward",
        ours("attend_backward", (" - delta[..., rows, None]", "")),
        "take delta off",
    ),
    (
        "attend_backward",
        ours("attend_backward", ("keys, :] += (ds", "keys, :] = (ds")),
        "a key is in many tiles",
    ),
    (
        "attend_backward",
        ours("attend_backward", (" - lse[..., rows, None]).exp()", ").softmax(-1).nan_to_num(0)")),
        "p is of the whole softmax",
    ),
    (
        "pass_on",
        [
            """
            if P == 1:
                return lambda: x
            arriving = x.new_empty(*x.shape[:-2], length, x.shape[-1])
            sending = dist.isend(x.contiguous(), group=group, group_dst=(rank + 1) % P)
            dist.recv(arriving, group=group, group_src=(rank - 1) % P)
            sending.wait()
            return lambda: arriving
            """
        ],
        "isend and irecv begin",
    ),
    ("pass_on", ours("pass_on", ("return wait", "return lambda: arriving")), "call wait() on both"),
    (
        "pass_on",
        ours("pass_on", ("rank + 1", "rank + P - 1"), ("(rank - 1)", "(rank + 1)")),
        "send to rank + 1, receive from rank - 1",
    ),
    ("pass_on", ours("pass_on", ("group_peer", "peer")), "count within the group"),
    (
        "ring_forward",
        ours("ring_forward", ("(rank - step)", "(rank + step)")),
        "they travel to rank + 1",
    ),
    ("ring_forward", ["return attend(q, k, v, held[rank], held[rank])"], "own keys only"),
    (
        "ring_forward",
        [
            """
            blocks = [k.new_empty(2, *k.shape[:2], len(pos), k.shape[-1]) for pos in held]
            dist.all_gather(blocks, torch.stack([k, v]), group=group)
            for kv, pos in zip(blocks, held):
                out, lse = merge(out, lse, *attend(q, *kv, held[rank], pos))
            return out, lse
            """
        ],
        "sends to its neighbour and to no other",
    ),
    (
        "ring_forward",
        ours("ring_forward", ("pass_on(kv", "pass_on(torch.stack([k, v])")),
        "not the own one again",
    ),
    (
        "ring_forward",
        ours("ring_forward", (f"arriving = {SEND}", "pass"), ("arriving()", f"{SEND}()")),
        "pass_on(), then attend(), then wait",
    ),
    ("ring_backward", ours("ring_backward", ("dk, dv = following()", "dk, dv = dkv")), "home"),
    (
        "ring_backward",
        ours("ring_backward", ("dkv += following()", "following()")),
        "add it to the gradient that follows",
    ),
    (
        "ring_backward",
        ours("ring_backward", ("dq += mine_q", "dq = mine_q")),
        "dq of the last step's keys alone",
    ),
    (
        "ring_backward",
        ["return attend_backward(q, k, v, dout, lse, delta, held[rank], held[rank])"],
        "dq of the own keys alone",
    ),
]

RIGHT = {
    "positions": [
        """
        if placement == CONTIGUOUS:
            return torch.arange(length).tensor_split(world)[rank]
        chunks = torch.arange(length).tensor_split(2 * world)
        return torch.cat([chunks[rank], chunks[-1 - rank]])
        """
    ],
    "work": [
        """
        found = torch.zeros(world, world)
        for r, q_pos in enumerate(held):
            for owner, k_pos in enumerate(held):
                found[r, (r - owner) % world] = (k_pos <= q_pos[:, None]).sum()
        return found
        """
    ],
    "attend": [
        """
        s = scores(q[..., rows, :], k[..., keys, :], q_pos[rows], k_pos[keys])
        top = s.amax(-1, keepdim=True).clamp(min=-1e300)
        p = torch.exp(s - top)
        total = p.sum(-1, keepdim=True)
        lse[..., rows] = (top + total.log()).squeeze(-1)
        out[..., rows, :] = (p / total.clamp(min=1e-300)) @ v[..., keys, :].unsqueeze(2)
        """
    ],
    "merge": [
        """
        share = torch.sigmoid(lse1 - lse2).nan_to_num(0).unsqueeze(-1)
        return out2 + share * (out1 - out2), torch.stack([lse1, lse2]).logsumexp(0)
        """
    ],
    "attend_backward": [
        """
        p = torch.exp(scores(q_tile, k_seen, q_pos[rows], k_pos[keys]) - lse[..., rows, None])
        dp = torch.einsum("bkgnd,bkmd->bkgnm", do_tile, v_seen)
        ds = (p * dp - p * delta[..., rows, None]) * q.shape[-1] ** -0.5
        dq[..., rows, :] = torch.einsum("bkgnm,bkmd->bkgnd", ds, k_seen)
        dk[..., keys, :] += torch.einsum("bkgnm,bkgnd->bkmd", ds, q_tile)
        dv[..., keys, :] += torch.einsum("bkgnm,bkgnd->bkmd", p, do_tile)
        """
    ],
    "pass_on": [
        """
        if P == 1:
            return x.clone
        after, before = (rank + 1) % P, (rank - 1) % P
        arriving = torch.empty(*x.shape[:-2], length, x.shape[-1], dtype=x.dtype)
        sending = dist.isend(x.contiguous(), group=group, group_dst=after)
        receiving = dist.irecv(arriving, group=group, group_src=before)

        def finish():
            receiving.wait()
            sending.wait()
            return arriving

        return finish
        """
    ],
    "ring_forward": [
        """
        block = torch.stack([k, v])
        for owner in [*range(rank, -1, -1), *range(P - 1, rank, -1)]:
            last = owner == (rank + 1) % P
            finish = None if last else pass_on(block, held[owner - 1].numel(), group)
            out, lse = merge(*attend(q, block[0], block[1], held[rank], held[owner]), out, lse)
            block = block if last else finish()
        return out, lse
        """
    ],
    "ring_backward": [
        """
        kv, travelling = torch.stack([k, v]), 0
        for step in range(P):
            owner = (rank - step) % P
            if step < P - 1:
                arriving = pass_on(kv, len(held[owner - 1]), group)
            found = attend_backward(q, *kv, dout, lse, delta, held[rank], held[owner])
            dq = dq + found[0]
            travelling = travelling + torch.stack(found[1:])
            travelling = pass_on(travelling, len(held[owner - 1]), group)()
            kv = arriving() if step < P - 1 else None
        return dq, *travelling
        """
    ],
}


@pytest.mark.parametrize("exercise,regions,hint", WRONG)
def test_wrong_answers_get_their_hint(exercise, regions, hint):
    passed, verdict = graded(LAB, exercise, regions)
    assert not passed and hint in verdict, verdict


def test_other_right_answers_pass_and_the_lab_accepts_them(tmp_path):
    """In another folder's my_labs/, with other inputs."""
    (tmp_path / "labs").symlink_to(ROOT / "labs")
    (tmp_path / "my_labs").mkdir()
    mine = tmp_path / "my_labs" / LAB.name
    mine.write_text(answered(LAB, RIGHT))
    run = python(mine, "--seed", "77", cwd=tmp_path)
    assert run.returncode == 0 and run.stdout.endswith("exercises' checks hold\n"), run.stdout
    assert "Predict, then run: how many bytes does each of 4 ranks send" in run.stdout
