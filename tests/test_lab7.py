"""Lab 7 as a learner meets it: the run, other sizes, its bugs, wrong and other right answers."""

import pytest
from learner import caught, lab_file, listed, ranks, refused, run_answered, run_finished

pytestmark = pytest.mark.slow  # minutes, with the other labs'

LAB = lab_file("lab7")
lab7 = ranks.load(LAB)
shown = ranks.room("experiments", LAB)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    printed, results = run_finished(LAB, tmp_path_factory.mktemp("lab7"), "--predict", 458752)
    assert "\n  predicted 458752, measured 458752: right\n" in printed
    return results


def test_balance(finished):
    """1024 tokens on 4 ranks by hand: 256 queries have 256 * 257 / 2 pairs with their own keys,
    256^2 with earlier ones; zigzag has half of those in every step."""
    balance, own, earlier = finished["balance"], 256 * 257 // 2, 256 * 256
    contiguous = [[own] + [earlier] * r + [0] * (3 - r) for r in range(4)]
    assert balance["contiguous"]["pairs"] == contiguous
    in_itself = 2 * (128 * 129 // 2) + 128 * 128
    assert balance["zigzag"]["pairs"] == [[in_itself] + [earlier // 2] * 3] * 4
    assert balance["contiguous"]["lockstep"] > 1.74 and balance["zigzag"]["lockstep"] == 1
    for P, (contiguous, zigzag) in balance["long"].items():
        assert contiguous > (2 * int(P) - 1) / int(P) - 0.01 and zigzag < 1.01


def test_side_by_side(finished):
    """Bytes that a rank of 4 sends for 256 tokens, 8 heads of 16 numbers, float64: by hand."""
    ways = {(r["heads"], r["kv_heads"], r["ranks"], r["way"]): r for r in finished["ways"]}
    tokens = 256 * 128 * 8  # all of them, as bytes
    names = "SP", "Ulysses", "CP, ring", "CP, all-gather"
    sent = [ways[8, 8, 4, way]["forward"] / tokens for way in names]
    assert sent == [2 * 3 / 4, 4 / 4 * 3 / 4, 2 * 3 / 4, 2 * 3 / 4]
    assert ways[8, 4, 4, "CP, ring"]["forward"] == tokens * 3 / 4, "half of the KV heads"
    assert ways[8, 8, 4, "CP, ring"]["backward"] == 2 * tokens * 7 / 4
    refused = {way: row["refused"] for (*_, way), row in ways.items() if "refused" in row}
    assert refused.keys() == {"SP", "Ulysses"} and "3 heads" in refused["SP"]


def test_too_few_tokens(capsys):
    found = "argument --length: 3 tokens are too few for 4 ranks; 4 would do"
    refused(LAB, ["--length", "3"], found, capsys)


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

ANSWERS = """
== positions: from the end
2 * world - 1 - rank -> world + rank
== positions: the early chunk first
[early, late] -> [late, early]
== positions: single tokens in turn: deal 2P chunks
torch.cat([early, late]) -> torch.arange(rank, length, world)
== positions
if placement == CONTIGUOUS:
    return torch.arange(length).tensor_split(world)[rank]
chunks = torch.arange(length).tensor_split(2 * world)
return torch.cat([chunks[rank], chunks[-1 - rank]])
== work: they travel to rank + 1
(rank - step) -> (rank + step)
== work: a query sees its own key too
held[rank], right=True -> held[rank]
== work: sees no key of its future
torch.searchsorted(keys, held[rank], right=True).sum() -> len(keys) * len(held[rank])
== work
found = torch.zeros(world, world)
for r, q_pos in enumerate(held):
    for owner, k_pos in enumerate(held):
        found[r, (r - owner) % world] = (k_pos <= q_pos[:, None]).sum()
return found
== attend: divide by the sum of exp(scores)
(s - finite).exp() -> s.exp()
== attend: inf - inf
None].clamp(min=torch.finfo(s.dtype).min) -> None]
== attend: the log of the sum, not the sum
s.logsumexp(-1) -> s.exp().sum(-1)
(s - finite).exp() -> s.softmax(-1).nan_to_num(0)
== attend
s = scores(q[..., rows, :], k[..., keys, :], q_pos[rows], k_pos[keys])
p = torch.exp(s - s.amax(-1, keepdim=True).clamp(min=-1e300))
total = p.sum(-1, keepdim=True)
lse[..., rows] = s.amax(-1) + total.log().squeeze(-1)
out[..., rows, :] = (p / total.clamp(min=1e-300)) @ v[..., keys, :].unsqueeze(2)
== merge: each is a mean: it counts by exp(its lse - lse)
return out1 + out2, torch.logaddexp(lse1, lse2)
== merge: the weights are exchanged
(lse1 - finite).exp()[..., None] * out1 -> (lse1 - finite).exp()[..., None] * out2
(lse2 - finite).exp()[..., None] * out2 -> (lse2 - finite).exp()[..., None] * out1
== merge: inf - inf where no key is seen
finite = lse.clamp(min=torch.finfo(lse.dtype).min) -> finite = lse
== merge
share = torch.sigmoid(lse1 - lse2).nan_to_num(0).unsqueeze(-1)
return out2 + share * (out1 - out2), torch.stack([lse1, lse2]).logsumexp(0)
== attend_backward: scores were divided by sqrt(d)
None]) / math.sqrt(q.shape[-1]) -> None])
== attend_backward: take delta off
mT[:, :, None] - delta[..., rows, None] -> mT[:, :, None]
== attend_backward: a key is in many tiles
keys, :] += (ds -> keys, :] = (ds
== attend_backward
p = torch.exp(scores(q_tile, k_seen, q_pos[rows], k_pos[keys]) - lse[..., rows, None])
dp = torch.einsum("bkgnd,bkmd->bkgnm", do_tile, v_seen)
ds = (p * dp - p * delta[..., rows, None]) * q.shape[-1] ** -0.5
dq[..., rows, :] = torch.einsum("bkgnm,bkmd->bkgnd", ds, k_seen)
dk[..., keys, :] += torch.einsum("bkgnm,bkgnd->bkmd", ds, q_tile)
dv[..., keys, :] += torch.einsum("bkgnm,bkgnd->bkmd", p, do_tile)
== pass_on: call wait() on both
return wait -> return lambda: arriving
== pass_on: send to rank + 1, receive from rank - 1
rank + 1 -> rank + P - 1
(rank - 1) -> (rank + 1)
== pass_on: count within the group
group_peer -> peer
== pass_on
if P == 1:
    return x.clone
arriving = torch.empty(*x.shape[:-2], length, x.shape[-1], dtype=x.dtype)
sending = dist.isend(x.contiguous(), group=group, group_dst=(rank + 1) % P)
receiving = dist.irecv(arriving, group=group, group_src=(rank - 1) % P)

def finish():
    receiving.wait()
    sending.wait()
    return arriving

return finish
== ring_forward: own keys only
return attend(q, k, v, held[rank], held[rank])
== ring_forward: sends to its neighbour and to no other
blocks = [k.new_empty(2, *k.shape[:2], len(pos), k.shape[-1]) for pos in held]
dist.all_gather(blocks, torch.stack([k, v]), group=group)
for kv, pos in zip(blocks, held):
    out, lse = merge(out, lse, *attend(q, *kv, held[rank], pos))
return out, lse
== ring_forward: not the own one again
pass_on(kv -> pass_on(torch.stack([k, v])
== ring_forward
block = torch.stack([k, v])
for owner in [*range(rank, -1, -1), *range(P - 1, rank, -1)]:
    last = owner == (rank + 1) % P
    finish = None if last else pass_on(block, held[owner - 1].numel(), group)
    out, lse = merge(*attend(q, block[0], block[1], held[rank], held[owner]), out, lse)
    block = block if last else finish()
return out, lse
== ring_backward: home
dk, dv = following() -> dk, dv = dkv
== ring_backward: dq of the last step's keys alone
dq += mine_q -> dq = mine_q
== ring_backward: dq of the own keys alone
return attend_backward(q, k, v, dout, lse, delta, held[rank], held[rank])
== ring_backward
kv, travelling = torch.stack([k, v]), 0
for step in range(P):
    owner = (rank - step) % P
    arriving = pass_on(kv, len(held[owner - 1]), group) if step < P - 1 else None
    found = attend_backward(q, *kv, dout, lse, delta, held[rank], held[owner])
    dq = dq + found[0]
    travelling = travelling + torch.stack(found[1:])
    travelling = pass_on(travelling, len(held[owner - 1]), group)()
    kv = arriving() if arriving else None
return dq, *travelling
"""
WRONG, RIGHT = listed(LAB, ANSWERS)
test_bugs_are_caught, test_wrong_answers_get_their_hint = caught(LAB, BUGS, WRONG)


def test_other_right_answers_pass_and_the_lab_accepts_them(tmp_path):
    run_answered(LAB, RIGHT, tmp_path, "--seed", 77)
