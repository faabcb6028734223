"""Four layouts of one transformer block, forward and backward by hand, on simulated ranks.

sp_layout_sim.py has an MLP block as tp and sp. Here an attention block comes first, and there are
two more layouts. P ranks (--tp, in all four) shard

    tp       the weights; between the blocks activations are replicated
    sp       the weights; between the blocks the same ranks shard the tokens
    ulysses  the tokens; inside attention, between two all-to-alls, the heads
    cp       the tokens, inside attention too: keys and values go round a ring (lab 7)

In ulysses and cp (context parallelism) the weights are replicated: only attention sends
activations, and the gradients of all weights are summed. On one device the tensors are

    qkv        (b, s, heads, 3, d)   queries, keys and values; d = h / heads
    attention  (b, s, heads, d)      each head's output
    up, silu   (b, s, f)             the MLP
    others     (b, s, h)             norms, projections, dropout, residuals

Shard(1) is a slice of tokens, Shard(2) of heads or features. sp_layout_sim.py computes the MLP;
some of its names are others here (NAMES). Rotary positions and GQA are left out.

    python labs/four_layouts.py                                   # the table of four layouts
    python labs/four_layouts.py --layout ulysses --json out.json  # the same; all four in out.json
    python results/plot.py out.json                               # a picture of the one in --layout
"""

import argparse
import json
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import sp_layout_sim as sim  # noqa: E402
from sp_layout_sim import REPLICATE, SHARD_0, SHARD_1, SHARD_2, each  # noqa: E402

# ---- 1. Where every tensor lies -------------------------------------------------------------

# sp_layout_sim.py's names: the names here. Its x is the sum of this x and attention's output.
NAMES = {"x": "residual", "norm": "norm 2", "enter": "enter mlp", "leave": "leave mlp"}
NAMES |= {"dropout": "dropout 2", "mask": "mask 2"}


def renamed(mlp):
    """A dict of sp_layout_sim.py, of steps or of weights, under the names here."""
    return {NAMES.get(name, name): value for name, value in mlp.items()}


WEIGHTS = {"norm 1": REPLICATE, "qkv": SHARD_1, "o": SHARD_0, "o bias": REPLICATE}
WEIGHTS |= renamed(sim.WEIGHTS)


def placements(layout):
    """{step: (its placement, its gradient's)}, of the steps that the layout has, in order."""
    if layout in ("tp", "sp"):
        mlp = sim.placements(layout)  # attention's steps lie as the MLP's first eight do
        steps = ["x", "norm 1", "enter attention", "qkv", "attention", "o", "leave attention"]
        return dict(zip([*steps, "dropout 1"], mlp.values())) | renamed(mlp)
    heads = ["qkv of heads", "attention of heads"] if layout == "ulysses" else []
    steps = ["x", "norm 1", "qkv", *heads, "attention", "o", "dropout 1", "residual", "norm 2"]
    steps += ["up", "silu", "down", "dropout 2", "y"]
    return {step: (SHARD_2, SHARD_2) if step in heads else (SHARD_1, SHARD_1) for step in steps}


# ---- 2. Attention by hand -------------------------------------------------------------------


def scores(q, k, ahead):
    """(b, q, heads, k), -inf for later keys; ahead: the first query's place - the first key's."""
    z = np.einsum("bqad,bkad->bqak", q, k) / q.shape[-1] ** 0.5
    seen = np.tri(q.shape[1], k.shape[1], ahead, dtype=bool)
    return np.where(seen[:, None], z, -np.inf)


def attend(q, k, v, ahead=0):
    """Causal attention: (out (b, q, heads, d), lse (b, q, heads))."""
    z = scores(q, k, ahead)
    top = z.max(-1)
    lse = top + np.log(np.exp(z - top[..., None]).sum(-1))
    return np.einsum("bqak,bkad->bqad", np.exp(z - lse[..., None]), v), lse


def attend_backward(dout, out, lse, q, k, v, ahead=0):
    """(dq, dk, dv). lse gives the probabilities back, as in FlashAttention."""
    p = np.exp(scores(q, k, ahead) - lse[..., None])
    dp = np.einsum("bqad,bkad->bqak", dout, v)
    dqk = p * (dp - (dout * out).sum(-1)[..., None]) / q.shape[-1] ** 0.5  # of q @ k
    dq = np.einsum("bqak,bkad->bqad", dqk, k)
    dk = np.einsum("bqak,bqad->bkad", dqk, q)
    return dq, dk, np.einsum("bqak,bqad->bkad", p, dout)


def own_heads(qkv, ranks):
    """tp and sp, where a rank has all tokens of its heads: {step: its arrays}."""
    out, lse = each(lambda x: attend(*np.moveaxis(x, 3, 0)), qkv)
    return {"attention": out, "lse": lse}


def own_heads_backward(dout, kept, ranks):
    q_k_v = zip(*(np.moveaxis(x, 3, 0) for x in kept["qkv"]))
    parts = each(attend_backward, dout, kept["attention"], kept["lse"], *q_k_v)
    return {"qkv": [np.stack(dqkv, 3) for dqkv in zip(*parts)]}


def all_to_all(xs, cut_axis, join_axis, ranks, calls=1):
    """Rank r gets the r-th piece of every rank's array, and joins them along another axis."""
    pieces = [np.array_split(x, len(xs), cut_axis) for x in xs]
    received = ranks.exchange(pieces, "all_to_all", calls)
    return [np.concatenate(got, join_axis) for got in received]


def ulysses(qkv, ranks):
    """Own tokens, all heads -> all tokens, own heads, and back (arXiv 2309.14509)."""
    qkv = all_to_all(qkv, 2, 1, ranks, calls=3)  # one array here; a message each of q, k and v
    inside = own_heads(qkv, ranks)
    v = {"qkv of heads": qkv, "attention of heads": inside["attention"], "lse": inside["lse"]}
    return v | {"attention": all_to_all(inside["attention"], 1, 2, ranks)}


def ulysses_backward(dout, kept, ranks):
    dout = all_to_all(dout, 2, 1, ranks)
    inside = {"attention": kept["attention of heads"], "qkv": kept["qkv of heads"]}
    dqkv = own_heads_backward(dout, inside | {"lse": kept["lse"]}, ranks)["qkv"]
    dqkv_of_tokens = all_to_all(dqkv, 1, 2, ranks, calls=3)
    return {"attention of heads": dout, "qkv of heads": dqkv, "qkv": dqkv_of_tokens}


def send_next(xs, ranks):
    """One step round the ring: each rank gets what the rank before it had."""
    P = len(xs)
    pieces = [[x if to == (r + 1) % P else x[:0] for to in range(P)] for r, x in enumerate(xs)]
    return [got[r - 1] for r, got in enumerate(ranks.exchange(pieces, "send"))]


def turn_of_ring(turn, qkv, kv):
    """[(rank r, attend's arguments)], where kv are the keys and values of rank r - turn."""
    first, work = np.cumsum([0] + [x.shape[1] for x in qkv]), []  # the ranks' first positions
    for r in range(turn, len(qkv)):  # to lower ranks they are later, so rank 0 works in one turn
        ahead = first[r] - first[r - turn]
        work.append((r, (qkv[r][:, :, :, 0], kv[r][:, :, :, 0], kv[r][:, :, :, 1], ahead)))
    return work


def ring(qkv, ranks):
    """Queries stay, keys and values go round (arXiv 2310.01889)."""
    kv = [x[:, :, :, 1:] for x in qkv]
    out = [np.zeros_like(x[:, :, :, 0]) for x in qkv]
    lse = [np.full(x.shape[:-1], -np.inf) for x in out]
    for turn in range(len(qkv)):
        kv = send_next(kv, ranks) if turn else kv
        for r, arguments in turn_of_ring(turn, qkv, kv):
            part, part_lse = attend(*arguments)
            total = np.logaddexp(lse[r], part_lse)  # online softmax: parts weighed by sums of exp
            old, new = (np.exp(x - total)[..., None] for x in (lse[r], part_lse))
            out[r], lse[r] = out[r] * old + part * new, total
    return {"attention": out, "lse": lse}


def ring_backward(dout, kept, ranks):
    """The gradients of keys and values go round with them, and one step more: home."""
    qkv, out, lse = kept["qkv"], kept["attention"], kept["lse"]
    kv = [x[:, :, :, 1:] for x in qkv]
    dq, dkv = each(np.zeros_like, out), each(np.zeros_like, kv)
    for turn in range(len(qkv)):
        kv = send_next(kv, ranks) if turn else kv
        for r, arguments in turn_of_ring(turn, qkv, kv):
            dq_part, *dkv_part = attend_backward(dout[r], out[r], lse[r], *arguments)
            dq[r] += dq_part
            dkv[r] += np.stack(dkv_part, 3)
        dkv = send_next(dkv, ranks)
    return {"qkv": each(lambda q, kv: np.concatenate([q[:, :, :, None], kv], 3), dq, dkv)}


ATTENTION = {"tp": (own_heads, own_heads_backward), "sp": (own_heads, own_heads_backward)}
ATTENTION |= {"ulysses": (ulysses, ulysses_backward), "cp": (ring, ring_backward)}
MOVED_BY = {  # {layout: {step: what attention sends to make it, and to make its gradient}}
    "ulysses": {"qkv of heads": ["3 all_to_all"] * 2, "attention": ["1 all_to_all"] * 2},
    "cp": {"attention": ["P - 1 send", "2 P - 1 send"]},
}


# ---- 3. The block, and a step on P ranks ----------------------------------------------------

KEPT = {"ulysses": ["qkv of heads", "attention of heads", "attention"]}  # others: qkv, attention
BYTES = {"mask 1": sim.MASK, "mask 2": sim.MASK, "lse": 4}  # of a number; of others sim.BF16
COUNTS = ["phase", "op", "count", "sent_bytes"]


def project(x, w):
    """x @ w for w (in, out), where in or out may be two axes, (heads, d)."""
    return np.tensordot(x, w, x.ndim - 2)


def project_backward(dy, x, w):
    dx = np.tensordot(dy, w, (range(2, dy.ndim), range(x.ndim - 2, w.ndim)))
    return dx, np.tensordot(x, dy, ((0, 1), (0, 1)))


def forward(layout, x, W, masks, ranks):
    """{step: its arrays}: attention, then the MLP block of sp_layout_sim.py."""
    v = {"x": x, "mask 1": masks[0], "norm 1": each(sim.layer_norm, x, W["norm 1"])}
    v["enter attention"] = ranks.move(v["norm 1"], "norm 1", "enter attention")
    v["qkv"] = each(project, v["enter attention"], W["qkv"])
    v |= ATTENTION[layout][0](v["qkv"], ranks)
    v["o"] = each(project, v["attention"], W["o"])
    v["leave attention"] = ranks.move(v["o"], "o", "leave attention")
    v["dropout 1"] = each(sim.dropout, each(np.add, v["leave attention"], W["o bias"]), masks[0])
    v["residual"] = each(np.add, x, v["dropout 1"])
    return v | renamed(sim.forward(v["residual"], W | {"norm": W["norm 2"]}, masks[1], ranks))


def backward(layout, dy, kept, W, ranks):
    """({step: gradient of its arrays}, {weight: its gradient})."""
    mlp_kept = {name: kept[NAMES.get(name, name)] for name in sim.KEPT}
    g, dW = map(renamed, sim.backward(dy, mlp_kept, W | {"norm": W["norm 2"]}, ranks))
    g["dropout 1"] = g["residual"]
    g["leave attention"] = each(sim.dropout, g["residual"], kept["mask 1"])
    dW["o bias"] = [dx.sum((0, 1)) for dx in g["leave attention"]]
    g["o"] = ranks.move(g["leave attention"], "leave attention", "o", gradient=True)
    g["attention"], dW["o"] = each(project_backward, g["o"], kept["attention"], W["o"])
    g |= ATTENTION[layout][1](g["attention"], kept, ranks)
    entered = ranks.move(kept["norm 1"], "norm 1", "enter attention")
    g["enter attention"], dW["qkv"] = each(project_backward, g["qkv"], entered, W["qkv"])
    g["norm 1"] = ranks.move(g["enter attention"], "enter attention", "norm 1", gradient=True)
    dx, dW["norm 1"] = each(sim.layer_norm_backward, g["norm 1"], kept["x"], W["norm 1"])
    g["x"] = each(np.add, g["residual"], dx)
    return g, dW


def make_problem(args):
    """x (b, s, h), the weights, the two dropout masks, and dy: the gradient from above."""
    rng, h, a = np.random.default_rng(0), args.hidden, args.heads
    x, W, mask, dy = sim.make_problem(args)
    W = renamed(W) | {"norm 1": rng.normal(size=h), "o bias": rng.normal(size=h)}
    W["qkv"] = rng.normal(size=(h, a, 3, h // a)) / h**0.5
    W["o"] = rng.normal(size=(a, h // a, h)) / h**0.5
    return x, W, [mask, mask[..., ::-1]], dy  # the second mask is the first, from right to left


def simulate(layout, problem, P, Ranks=sim.Ranks):
    """A step on P ranks of a class Ranks, which may also watch what they send."""
    x, W, masks, dy = problem
    x, dy, *masks = (sim.place(t, placements(layout)["x"][0], P) for t in (x, dy, *masks))
    if layout in ("tp", "sp"):
        at, edges = WEIGHTS, sim.placements(layout) | placements(layout)
    else:  # all steps at the edges of attention and MLP lie alike, so nothing is moved
        at = dict.fromkeys(WEIGHTS, REPLICATE)
        edges = dict.fromkeys([*sim.STEPS, *placements("tp")], (SHARD_1, SHARD_1))
    W, ranks = {name: sim.place(w, at[name], P) for name, w in W.items()}, Ranks(edges)
    v = forward(layout, x, W, masks, ranks)
    kept = ["x", "norm 1", "mask 1", "lse", *KEPT.get(layout, ["qkv", "attention"])]
    kept = {name: v[name] for name in [*kept, *renamed(dict.fromkeys(sim.KEPT))]}
    ranks.phase = "backward"
    g, dW = backward(layout, dy, kept, W, ranks)
    ranks.phase = "gradients"
    # A rank with its own tokens only has a part of the gradient of a replicated weight.
    to_sum = [name for name in dW if at[name] == REPLICATE and layout != "tp"]
    for name in to_sum:  # all in one message; as (1, ...), since all_reduce() splits axis 1
        summed = sim.all_reduce([w[None] for w in dW[name]], ranks, calls=int(name == to_sum[0]))
        dW[name] = [w[0] for w in summed]
    return SimpleNamespace(v=v, g=g, dW=dW, W=W, at=at, kept=kept, ranks=ranks)


# ---- 4. Checks and report -------------------------------------------------------------------


def check(layout, problem, one, P):
    """One layout's part of --json."""
    run, table, steps = simulate(layout, problem, P), placements(layout), {}
    moves, moved_by = run.ranks.moves, dict(MOVED_BY.get(layout, {}))
    for phase, before, after in moves:  # what leads to a step, and what leads back from it
        if phase == "forward":
            pair = moves[phase, before, after], moves["backward", after, before]
            moved_by[NAMES.get(after, after)] = [move.__name__ for move in pair]
    for step, (lies, back) in table.items():
        steps[step] = found = {"placement": lies, "gradient_placement": back, "slices": ["all"] * P}
        found["shapes"] = [x.shape for x in run.v[step]]
        if lies in sim.AXIS:
            ends = np.cumsum([0] + [shape[sim.AXIS[lies]] for shape in found["shapes"]])
            found["slices"] = [f"{i}:{j}" for i, j in pairwise(ends)]
        found["moved_by"] = moved_by.get(step)
    errors = sim.compare(run, one, table, run.at)
    kept = [[x.size * BYTES.get(name, sim.BF16) for x in xs] for name, xs in run.kept.items()]
    return {
        "wrong": [name for name, x in errors.items() if not x <= sim.TOLERANCE],
        "steps": steps,
        "weight_bytes": [sim.BF16 * sum(w[r].size for w in run.W.values()) for r in range(P)],
        "kept_bytes": [sum(of_rank) for of_rank in zip(*kept)],
        "traffic": [dict(zip(COUNTS, (*what, *n))) for what, n in run.ranks.counts.items()],
    }


def run(args):
    """What --json writes: all layouts, each against one device."""
    problem = make_problem(args)
    one = simulate("ulysses", problem, 1)  # computes every step that any layout has
    return vars(args) | {"layouts": {x: check(x, problem, one, args.tp) for x in ATTENTION}}


def report(results):
    """The table of four layouts, a row each."""
    tensor = sim.BF16 * results["batch"] * results["seq"] * results["hidden"]
    heads = ["weights", "   kept", "forward", "backward", "gradients"]
    rows = [["", "between", "attention", "MLP", *heads, "check"]]
    for layout, found in results["layouts"].items():
        table = placements(layout)
        at = table["x"], table.get("attention of heads", table["attention"]), table["up"]
        sent = ([t["sent_bytes"] for t in found["traffic"] if t["phase"] == x] for x in heads[2:])
        sizes = found["weight_bytes"], found["kept_bytes"], *sent
        means = [sum(of_ranks) / results["tp"] / tensor for of_ranks in sizes]
        numbers = [f"{mean:{len(head)}.2f}" for head, mean in zip(heads, means)]
        rows.append([layout, *(x for x, _ in at), *numbers, ", ".join(found["wrong"]) or "ok"])
    print("Where activations lie. What a rank has of weights, keeps and sends: 1 is a (b, s, h).\n")
    sim.say_table(rows)
    passed = all(row[-1] == "ok" for row in rows[1:])
    print(f"{'PASS' if passed else 'FAIL'} four_layouts: all values and gradients are one device's")
    return passed


def parse(argv):
    """The arguments; exits with 2 where nothing of that size can be computed."""
    look = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=look)
    parser.add_argument("--heads", type=int, default=4, help="heads of attention (4)")
    parser.add_argument("--layout", choices=ATTENTION, default="sp", help="for plot.py (sp)")
    parser.add_argument("--json", type=argparse.FileType("w"), help="results of all layouts")
    args = sim.parse(argv, parser)
    if args.heads < args.tp or args.hidden % args.heads:
        parser.error(f"--heads {args.heads}: use {args.tp} or more that divide {args.hidden}")
    if args.batch * args.heads * args.seq**2 > sim.LARGEST:
        parser.error(f"--seq {args.seq}: use less, the scores have too many numbers")
    return args


def main(argv=None):
    """Returns the exit status: 0 all held, 1 a check failed. argparse exits with 2."""
    args = parse(argv)
    results = run(args)
    passed = report(results)
    if args.json:
        with args.json as file:
            json.dump(results | {"json": file.name}, file, indent=1)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
