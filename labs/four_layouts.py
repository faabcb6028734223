"""Four layouts of one transformer block, forward and backward by hand, on simulated ranks.

sp_layout_sim.py has the MLP block as tp and sp. Here an attention block comes first, and there
are two more layouts. The ranks shard

    tp       the weights; between the blocks activations are replicated
    sp       the weights; between the blocks the same ranks shard the tokens
    ulysses  the tokens; inside attention, between two all-to-alls, the heads
    cp       the tokens, inside attention too: keys and values go round a ring

In ulysses and cp (context parallelism) the weights are replicated: only attention sends
activations, and the gradients of all weights are summed.

    python labs/four_layouts.py                                   # the table of four layouts
    python labs/four_layouts.py --layout ulysses --json out.json
    python results/plot.py out.json                               # where its tensors lie
"""

import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import sp_layout_sim as sim  # noqa: E402
from labs.kit.cli import UsageError, check_writable, please_any_reader, write_json  # noqa: E402
from sp_layout_sim import REPLICATE, SHARD_0, SHARD_1, SHARD_2, each  # noqa: E402

# ---- 1. Where every tensor lies -------------------------------------------------------------

NAMES = {"x": "residual", "norm": "norm 2", "enter": "enter mlp", "leave": "leave mlp"}
NAMES |= {"dropout": "dropout 2", "mask": "mask 2"}  # what sp_layout_sim.py's are called here
MLP = {NAMES.get(step, step): step for step in [*sim.placements("tp"), "mask"]}
WEIGHTS = {"norm 1": REPLICATE, "qkv": SHARD_1, "o": SHARD_0, "o bias": REPLICATE}
WEIGHTS |= {NAMES.get(name, name): at for name, at in sim.WEIGHTS.items()}


def placements(layout):
    """{step: (its placement, its gradient's)}, of the steps that the layout has, in order."""
    if layout in ("tp", "sp"):
        mlp = sim.placements(layout)
        table = {"x": mlp["x"], "norm 1": mlp["norm"], "enter attention": mlp["enter"]}
        table |= {"qkv": mlp["up"], "attention": mlp["silu"], "o": mlp["down"]}
        table |= {"leave attention": mlp["leave"], "dropout 1": mlp["dropout"]}
        return table | {NAMES.get(step, step): at for step, at in mlp.items()}
    heads = ["qkv of heads", "attention of heads"] if layout == "ulysses" else []
    steps = ["x", "norm 1", "qkv", *heads, "attention", "o", "dropout 1", "residual", "norm 2"]
    steps += ["up", "silu", "down", "dropout 2", "y"]
    at = {step: SHARD_2 if step in heads else SHARD_1 for step in steps}
    return {step: (at[step], at[step]) for step in steps}


# ---- 2. Attention by hand -------------------------------------------------------------------


def scores(q, k, ahead):
    """(b, q, heads, k), -inf for later keys; ahead: first query's position - first key's."""
    z = np.einsum("bqad,bkad->bqak", q, k) / q.shape[-1] ** 0.5
    seen = np.tri(q.shape[1], k.shape[1], ahead, dtype=bool)
    return np.where(seen[:, None], z, -np.inf)


def attend(q, k, v, ahead=0):
    """Causal attention: (out (b, q, heads, d), log-sum-exp of the scores (b, q, heads))."""
    z = scores(q, k, ahead)
    top = z.max(-1)
    lse = top + np.log(np.exp(z - top[..., None]).sum(-1))
    return np.einsum("bqak,bkad->bqad", np.exp(z - lse[..., None]), v), lse


def attend_backward(dout, out, lse, q, k, v, ahead=0):
    """(dq, dk, dv). lse gives the probabilities back, as in FlashAttention."""
    p = np.exp(scores(q, k, ahead) - lse[..., None])
    dp = np.einsum("bqad,bkad->bqak", dout, v)
    dz = p * (dp - (dout * out).sum(-1)[..., None]) / q.shape[-1] ** 0.5
    dq = np.einsum("bqak,bkad->bqad", dz, k)
    dk = np.einsum("bqak,bqad->bkad", dz, q)
    return dq, dk, np.einsum("bqak,bqad->bkad", p, dout)


def own_heads(qkv, ranks):
    """tp and sp, where a rank has all tokens of its heads: {step: its arrays}."""
    out, lse = each(lambda x: attend(*np.moveaxis(x, 3, 0)), qkv)
    return {"attention": out, "lse": lse}


def own_heads_backward(dout, kept, ranks):
    q_k_v = zip(*(np.moveaxis(x, 3, 0) for x in kept["qkv"]))
    parts = each(attend_backward, dout, kept["attention"], kept["lse"], *q_k_v)
    return {"qkv": [np.stack(dqkv, 3) for dqkv in zip(*parts)]}


def all_to_all(xs, cut_axis, join_axis, ranks):
    """Rank r gets the r-th piece of every rank's array, and joins them along another axis."""
    calls = 3 if xs[0].ndim == 5 else 1  # q, k and v are one array here, but a message each
    pieces = [np.array_split(x, len(xs), cut_axis) for x in xs]
    received = ranks.exchange(pieces, "all_to_all", calls)
    return [np.concatenate(got, join_axis) for got in received]


def ulysses(qkv, ranks):
    """Own tokens, all heads -> all tokens, own heads, and back (arXiv 2309.14509)."""
    qkv = all_to_all(qkv, 2, 1, ranks)
    out, lse = own_heads(qkv, ranks).values()
    back = all_to_all(out, 1, 2, ranks)
    return {"qkv of heads": qkv, "attention of heads": out, "lse": lse, "attention": back}


def ulysses_backward(dout, kept, ranks):
    dout = all_to_all(dout, 2, 1, ranks)
    inside = {"attention": kept["attention of heads"], "qkv": kept["qkv of heads"]}
    dqkv = own_heads_backward(dout, inside | {"lse": kept["lse"]}, ranks)["qkv"]
    back = all_to_all(dqkv, 1, 2, ranks)
    return {"attention of heads": dout, "qkv of heads": dqkv, "qkv": back}


def send_next(xs, ranks):
    """One step round the ring."""
    P = len(xs)
    pieces = [[x if to == (r + 1) % P else x[:0] for to in range(P)] for r, x in enumerate(xs)]
    return [got[r - 1] for r, got in enumerate(ranks.exchange(pieces, "send"))]


def turns(qkv, ranks):
    """Yields [(rank, arguments of attend)] for every place of the keys and values."""
    P, kv = len(qkv), [x[:, :, :, 1:] for x in qkv]
    first = np.cumsum([0] + [x.shape[1] for x in qkv])  # positions of the ranks' first tokens
    for turn in range(P):
        if turn:
            kv = send_next(kv, ranks)
        here = []
        for r in range(P):
            owner = (r - turn) % P
            if owner <= r:  # later keys are masked: rank 0 has 1 turn of work, the last rank P
                q, k, v = qkv[r][:, :, :, 0], kv[r][:, :, :, 0], kv[r][:, :, :, 1]
                here.append((r, (q, k, v, first[r] - first[owner])))
        yield here


def ring(qkv, ranks):
    """Queries stay, keys and values go round (arXiv 2310.01889)."""
    out = [np.zeros_like(x[:, :, :, 0]) for x in qkv]
    lse = [np.full(x.shape[:-1], -np.inf) for x in out]
    for here in turns(qkv, ranks):
        for r, arguments in here:  # online softmax: each part is weighed by its sum of exp
            part, part_lse = attend(*arguments)
            total = np.logaddexp(lse[r], part_lse)
            old, new = (np.exp(x - total)[..., None] for x in (lse[r], part_lse))
            out[r], lse[r] = out[r] * old + part * new, total
    return {"attention": out, "lse": lse}


def ring_backward(dout, kept, ranks):
    """The gradients of keys and values go round with them, and one step more: home."""
    qkv, out, lse = kept["qkv"], kept["attention"], kept["lse"]
    dq = [np.zeros_like(x) for x in out]
    dkv = [np.zeros_like(x[:, :, :, 1:]) for x in qkv]
    for here in turns(qkv, ranks):
        for r, arguments in here:
            dq_part, *dkv_part = attend_backward(dout[r], out[r], lse[r], *arguments)
            dq[r] += dq_part
            dkv[r] += np.stack(dkv_part, 3)
        dkv = send_next(dkv, ranks)
    return {"qkv": each(lambda q, kv: np.concatenate([q[:, :, :, None], kv], 3), dq, dkv)}


ATTENTION = {"tp": (own_heads, own_heads_backward), "sp": (own_heads, own_heads_backward)}
ATTENTION |= {"ulysses": (ulysses, ulysses_backward), "cp": (ring, ring_backward)}
COUNTS = ["phase", "op", "count", "sent_bytes"]
KEPT = {"ulysses": ["qkv of heads", "attention of heads", "attention"]}  # for the backward
BYTES = {"mask 1": sim.MASK, "mask 2": sim.MASK, "lse": 4}  # others: bfloat16


# ---- 3. The block, and a step on P ranks ----------------------------------------------------


def project(x, w):
    return np.tensordot(x, w, x.ndim - 2)  # in or out may be several axes, as (heads, d)


def project_backward(dy, x, w):
    dx = np.tensordot(dy, w, (range(2, dy.ndim), range(x.ndim - 2, w.ndim)))
    return dx, np.tensordot(x, dy, ((0, 1), (0, 1)))


def forward(layout, x, W, masks, ranks):
    """{step: its arrays}: attention, then the MLP block of sp_layout_sim.py."""
    v = {"x": x, "mask 1": masks[0], "norm 1": each(sim.layer_norm, x, W["norm 1"])}
    v["enter attention"] = ranks.move(v["norm 1"], "norm", "enter")
    v["qkv"] = each(project, v["enter attention"], W["qkv"])
    v |= ATTENTION[layout][0](v["qkv"], ranks)
    v["o"] = each(project, v["attention"], W["o"])
    v["leave attention"] = ranks.move(v["o"], "down", "leave")
    v["dropout 1"] = each(sim.dropout, each(np.add, v["leave attention"], W["o bias"]), masks[0])
    v["residual"] = each(np.add, x, v["dropout 1"])
    mlp = sim.forward(v["residual"], W | {"norm": W["norm 2"]}, masks[1], ranks)
    return v | {here: mlp[there] for here, there in MLP.items()}


def backward(layout, dy, kept, W, ranks):
    """({step: gradient of its arrays}, {weight: its gradient})."""
    mlp_kept = {MLP[step]: arrays for step, arrays in kept.items() if step in MLP}
    mlp, dW = sim.backward(dy, mlp_kept, W | {"norm": W["norm 2"]}, ranks)
    g = {here: mlp[there] for here, there in MLP.items() if there in mlp}
    dW["norm 2"] = dW.pop("norm")
    g["dropout 1"] = g["residual"]
    g["leave attention"] = each(sim.dropout, g["residual"], kept["mask 1"])
    dW["o bias"] = [dx.sum((0, 1)) for dx in g["leave attention"]]
    g["o"] = ranks.move(g["leave attention"], "leave", "down", gradient=True)
    g["attention"], dW["o"] = each(project_backward, g["o"], kept["attention"], W["o"])
    g |= ATTENTION[layout][1](g["attention"], kept, ranks)
    entered = ranks.move(kept["norm 1"], "norm", "enter")
    g["enter attention"], dW["qkv"] = each(project_backward, g["qkv"], entered, W["qkv"])
    g["norm 1"] = ranks.move(g["enter attention"], "enter", "norm", gradient=True)
    dx, dW["norm 1"] = each(sim.layer_norm_backward, g["norm 1"], kept["x"], W["norm 1"])
    g["x"] = each(np.add, g["residual"], dx)
    return g, dW


def make_problem(args):
    """x (b, s, h), the weights, the two dropout masks, and dy: the gradient from above."""
    rng, h, a = np.random.default_rng(0), args.hidden, args.heads
    x, W, mask, dy = sim.make_problem(args)
    W["norm 2"] = W.pop("norm")
    W |= {"norm 1": rng.normal(size=h), "o bias": rng.normal(size=h)}
    W["qkv"] = rng.normal(size=(h, a, 3, h // a)) / h**0.5
    W["o"] = rng.normal(size=(a, h // a, h)) / h**0.5
    return x, W, [mask, mask[..., ::-1]], dy


def simulate(layout, problem, P, Ranks=sim.Ranks):
    """A step on P ranks: values v, gradients g, gradients of weights dW, and what it took."""
    x, W, masks, dy = problem
    x, dy, *masks = (sim.place(t, placements(layout)["x"][0], P) for t in (x, dy, *masks))
    if layout in ("tp", "sp"):
        at, edges = WEIGHTS, sim.placements(layout)
    else:  # every step between the same placements: nothing is moved at the edges
        at = dict.fromkeys(WEIGHTS, REPLICATE)
        edges = dict.fromkeys(MLP.values(), (SHARD_1, SHARD_1))
    W, ranks = {name: sim.place(w, at[name], P) for name, w in W.items()}, Ranks(edges)
    v = forward(layout, x, W, masks, ranks)
    inside = KEPT.get(layout, ["qkv", "attention"])
    kept = {name: v[name] for name in ["x", "norm 1", "mask 1", "lse", *inside]}
    kept |= {here: v[here] for here, there in MLP.items() if there in sim.KEPT}
    ranks.phase = "backward"
    g, dW = backward(layout, dy, kept, W, ranks)
    ranks.phase = "gradients"
    # A rank with its own tokens only has an addend of the gradient of a replicated weight.
    to_sum = [name for name in dW if at[name] == REPLICATE and layout != "tp"]
    for i, name in enumerate(to_sum):  # in one bucket, so all of them are one call
        summed = sim.all_reduce([w[None] for w in dW[name]], ranks, calls=int(i == 0))
        dW[name] = [w[0] for w in summed]
    return SimpleNamespace(v=v, g=g, dW=dW, W=W, at=at, kept=kept, ranks=ranks)


# ---- 4. Checks and report -------------------------------------------------------------------


def check(layout, problem, one, P):
    """One layout's part of --json."""
    many, steps, errors, later = simulate(layout, problem, P), {}, {}, {}
    names = {way: move.__name__ for way, move in many.ranks.moves.items()}
    edges = ("norm", "enter"), ("down", "leave")
    moved = {b: (names[a, b], names[b, a]) for a, b in edges}
    if layout == "ulysses":
        moved |= {"qkv of heads": ["3 all_to_all"] * 2, "attention": ["1 all_to_all"] * 2}
    if layout == "cp":
        moved["attention"] = "P - 1 send", "2 P - 1 send"
    for step, (lies, back) in placements(layout).items():
        shapes = [x.shape for x in many.v[step]]
        ends = [0, *np.cumsum([x[int(lies[6])] for x in shapes])] if "(" in lies else []
        steps[step] = {"placement": lies, "gradient_placement": back, "shapes": shapes}
        steps[step]["slices"] = [f"{i}:{j}" for i, j in pairwise(ends)] or ["all"] * P
        steps[step]["moved_by"] = moved.get(step.replace(" attention", "").replace(" mlp", ""))
        errors[step] = sim.error(many.v[step], one.v[step][0], lies)
        later[f"gradient of {step}"] = sim.error(many.g[step], one.g[step][0], back)
    for name, dw in many.dW.items():
        later[f"gradient of weight {name}"] = sim.error(dw, one.dW[name][0], many.at[name])
    kept = [[x.size * BYTES.get(name, sim.BF16) for x in xs] for name, xs in many.kept.items()]
    return {
        "wrong": [x for x, e in (errors | later).items() if not e <= sim.TOLERANCE],
        "steps": steps,
        "weight_bytes": [sim.BF16 * sum(w[r].size for w in many.W.values()) for r in range(P)],
        "kept_bytes": [sum(rank) for rank in zip(*kept)],
        "traffic": [dict(zip(COUNTS, (*what, *n))) for what, n in many.ranks.counts.items()],
    }


def run(args):
    """What --json writes: all layouts, each against one device."""
    problem = make_problem(args)
    one = simulate("ulysses", problem, 1)  # has all steps, and on 1 rank moves nothing
    return vars(args) | {"layouts": {x: check(x, problem, one, args.tp) for x in ATTENTION}}


def report(results):
    """The table of four layouts, a row each."""
    P, tensor = results["tp"], 2 * results["batch"] * results["seq"] * results["hidden"]
    phases = ["forward", "backward", "gradients"]
    rows = [["", "between", "attention", "MLP", "weights", "kept", *phases, "check"]]
    for layout, found in results["layouts"].items():
        table = placements(layout)
        at = table["x"], table.get("attention of heads", table["attention"]), table["up"]
        sent = ([t["sent_bytes"] for t in found["traffic"] if t["phase"] == x] for x in phases)
        sizes = found["weight_bytes"], found["kept_bytes"], *sent
        numbers = [f"{sum(of_ranks) / P / tensor:.2f}" for of_ranks in sizes]
        rows.append([layout, *(x for x, _ in at), *numbers, ", ".join(found["wrong"]) or "ok"])
    print("Where activations lie; weights, kept and sent bytes of a rank in tensors (b, s, h).\n")
    sim.say_table(rows)
    passed = all(row[-1] == "ok" for row in rows[1:])
    what = "four_layouts: all values and gradients are one device's"
    print("PASS" if passed else "FAIL", what, flush=True)
    return passed


def parse(argv):
    """The arguments; exits with 2 where nothing of that size can be computed."""
    parser = sim.Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("--heads", type=int, default=4, metavar="N", help="(4)")
    parser.add_argument("--layout", choices=ATTENTION, default="sp", help="for plot.py (sp)")
    parser.add_argument("--json", metavar="FILE", help="write the results")
    args = sim.parse(argv, parser)
    if args.heads < args.tp or args.hidden % args.heads:
        parser.error(f"--heads {args.heads}: use {args.tp} or more that divide {args.hidden}")
    if args.batch * args.heads * args.seq**2 > sim.LARGEST:
        parser.error(f"--seq {args.seq}: use less, the scores have too many numbers")
    return args


def main(argv=None):
    """Returns the exit status: 0 all held, 1 a check failed, 2 unusable arguments."""
    args = parse(argv)
    try:
        check_writable(args.json)
        results = run(args)
        passed = report(results)
        if args.json:
            write_json(args.json, results)
    except (UsageError, OSError) as problem:  # OSError: a full disk
        print(f"error: {problem}", file=sys.stderr)
        return 2
    return 0 if passed else 1


if __name__ == "__main__":
    please_any_reader()
    sys.exit(main())
