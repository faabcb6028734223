"""Sequence parallelism as a layout of tensor parallelism, on simulated ranks: numpy only.

Three questions. Answer them, then run the script, which begins with its answers:

    1. Which tp_mode of Nanotron switches sequence parallelism on?
    2. What does a rank store after an all-reduce, and what after a reduce-scatter?
    3. Why can a norm be computed on (b, s/P, h), that is, on a slice of the tokens?

The script computes a transformer's MLP block, y = x + dropout(MLP(norm(x))), forward and backward
by hand, on one device and on P ranks. A rank is an entry of a list. The ranks shard the weights,
and between two blocks they hold the activations in one of two layouts:

    tp    tensor parallelism alone: each rank holds all tokens
    sp    with sequence parallelism: each rank holds its own tokens, a slice of the sequence

The matrix products are the same. This is sp; the forward (v) goes down, the backward (^) up. The
words at the right are PyTorch DTensor's placements; Shard(n) is a slice of axis n.

    x, norm             own tokens    (b, s/P, h)  Shard(1)
    v all-gather        ^ all-gather of norm again: a rank has kept its own tokens only
                        ^ reduce-scatter of the gradient
    enter               all tokens    (b, s, h)    Replicate
    up, silu            own features  (b, s, f/P)  Shard(2)    up: column parallel
    down                partial sums  (b, s, h)    Partial     down: row parallel
    v reduce-scatter    ^ all-gather of the gradient
    leave, dropout, y   own tokens    (b, s/P, h)  Shard(1)

At last sp all-reduces what each rank has for its own tokens only: the gradients of norm's weight
and down's bias. In tp Replicate stands where sp has Shard(1), and only two all-reduces are sent:
to leave in the forward, of enter's gradient in the backward. A rank of sp, too, holds (b, s, h)
at enter and at down, but does not keep it. Attention has the same edges (labs/four_layouts.py).

    python sp_layout_sim.py                           # three answers, then what they rest on
    python sp_layout_sim.py --tp 4 --seq 14           # 4 ranks, 14 tokens
    python sp_layout_sim.py --break forgot_reduction  # a mistake, caught; --help lists five
"""

import argparse
import sys
from types import SimpleNamespace

import numpy as np

TOLERANCE = 1e-12  # relative error against one device, in float64
DROPOUT = 0.5
BF16, MASK = 2, 1  # bytes of a number and of a mask's entry, as in training on a GPU
LARGEST = 1 << 22  # numbers of a tensor on all ranks; more would take minutes on a laptop


# ---- 1. Where every tensor lies -------------------------------------------------------------

REPLICATE, PARTIAL = "Replicate", "Partial"
SHARD_0, SHARD_1, SHARD_2 = "Shard(0)", "Shard(1)", "Shard(2)"
AXIS = {SHARD_0: 0, SHARD_1: 1, SHARD_2: 2}
BETWEEN = {"tp": REPLICATE, "sp": SHARD_1}  # what lies between two blocks
STEPS = ["x", "norm", "enter", "up", "silu", "down", "leave", "dropout", "y"]


def placements(layout):
    """{step: (the placement of its value, of its gradient)}. Only `between` differs."""
    between = BETWEEN[layout]
    table = dict.fromkeys(STEPS, (between, between))
    table["enter"] = REPLICATE, PARTIAL  # each rank's weights give a partial sum of the gradient
    table["up"] = table["silu"] = SHARD_2, SHARD_2
    table["down"] = PARTIAL, REPLICATE  # a partial sum has the gradient of the sum
    return table


# Weights are (in, out): column parallel is a shard of out, row parallel a shard of in.
WEIGHTS = {"up": SHARD_1, "up bias": SHARD_0, "down": SHARD_0}
WEIGHTS |= {"norm": REPLICATE, "down bias": REPLICATE}
KEPT = ["x", "norm", "mask", "up", "silu"]  # all that the backward gets from the forward


def place(full, placement, P):
    """One device's tensor as it lies on P ranks; if P does not divide, the first have more."""
    return [full] * P if placement == REPLICATE else np.array_split(full, P, AXIS[placement])


# ---- 2. What brings a tensor from one placement to another ----------------------------------


class Ranks:
    """Ranks that send arrays to each other, and count what they send."""

    def __init__(self, table):
        self.placements = table
        self.phase = "forward"
        self.counts = {}  # {(phase, collective): [calls, bytes that leave all ranks together]}
        self.moves = {}  # {(phase, from step, to step): the collective that was used}
        self.broken = {}  # {(from step, to step): what --break puts in the collective's place}

    def exchange(self, pieces, collective, calls=1):
        """pieces[r][to] goes from rank r to rank `to`. Returns received[to][r]."""
        count = self.counts.setdefault((self.phase, collective), [0, 0])
        count[0] += calls
        for r, row in enumerate(pieces):
            count[1] += sum(BF16 * x.size for to, x in enumerate(row) if to != r)
        return list(zip(*pieces))

    def move(self, arrays, before, after, gradient=False):
        """The ranks' arrays, which lie as the step `before` does, as `after` has to lie."""
        lies, wanted = (self.placements[step][int(gradient)] for step in (before, after))
        collective = nothing if lies == wanted else MOVES[lies, wanted]
        collective = self.broken.get((before, after), collective)
        self.moves[self.phase, before, after] = collective
        return collective(arrays, self)


def all_gather(xs, ranks, name="all_gather", calls=1):
    """Each rank's own tokens, (b, s/P, h) -> all tokens on every rank, (b, s, h)."""
    pieces = [[x] * len(xs) for x in xs]
    return [np.concatenate(got, 1) for got in ranks.exchange(pieces, name, calls)]


def reduce_scatter(xs, ranks, name="reduce_scatter", calls=1):
    """Partial sums (b, s, h) -> each rank's own tokens of their sum, (b, s/P, h)."""
    pieces = [np.array_split(x, len(xs), 1) for x in xs]
    return [sum(got) for got in ranks.exchange(pieces, name, calls)]


def all_reduce(xs, ranks, calls=1):
    """Partial sums (b, s, h) -> their sum on every rank: a reduce-scatter, then an all-gather."""
    own_tokens = reduce_scatter(xs, ranks, "all_reduce", calls)
    return all_gather(own_tokens, ranks, "all_reduce", calls=0)  # the second half of that call


def nothing(xs, ranks):
    return xs


MOVES = {  # as DTensor's redistribute(): (placement, wanted placement) -> what is sent
    (PARTIAL, REPLICATE): all_reduce,
    (SHARD_1, REPLICATE): all_gather,
    (PARTIAL, SHARD_1): reduce_scatter,
}


# ---- 3. What a rank computes by itself, and the gradients -----------------------------------


def normalize(x):
    """(x - mean) / deviation, and that deviation: over the h features of each token."""
    x = x - x.mean(-1, keepdims=True)
    deviation = np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    return x / deviation, deviation


def layer_norm(x, weight):
    return normalize(x)[0] * weight


def layer_norm_backward(dy, x, weight):
    n, deviation = normalize(x)  # cheap to compute again
    dn = dy * weight
    dx = dn - dn.mean(-1, keepdims=True) - n * (dn * n).mean(-1, keepdims=True)
    return dx / deviation, (dy * n).sum((0, 1))  # dx, dweight


def matmul_backward(dy, x, w):
    return dy @ w.T, np.einsum("bsi,bso->io", x, dy)  # dx, dw


def silu(x):
    return x / (1 + np.exp(-x))


def silu_backward(dy, x):
    sigmoid = 1 / (1 + np.exp(-x))
    return dy * sigmoid * (1 + x * (1 - sigmoid))


def dropout(x, mask):
    return x * mask / (1 - DROPOUT)  # its own backward, too


def each(function, *lists):
    """[the function's result on each rank]; if it returns a tuple, a list for each of its items."""
    results = [function(*arrays) for arrays in zip(*lists)]
    return tuple(map(list, zip(*results))) if isinstance(results[0], tuple) else results


# ---- 4. The block, the same in both layouts -------------------------------------------------


def forward(x, W, mask, ranks):
    """{step: its arrays, one a rank}. The shapes in the comments are those of sp."""
    v = {"x": x, "mask": mask}  # (b, s/P, h)
    v["norm"] = each(layer_norm, v["x"], W["norm"])  # (b, s/P, h)
    v["enter"] = ranks.move(v["norm"], "norm", "enter")  # (b, s, h)
    v["up"] = each(np.add, each(np.matmul, v["enter"], W["up"]), W["up bias"])  # (b, s, f/P)
    v["silu"] = each(silu, v["up"])  # (b, s, f/P)
    v["down"] = each(np.matmul, v["silu"], W["down"])  # (b, s, h), a partial sum
    v["leave"] = ranks.move(v["down"], "down", "leave")  # (b, s/P, h)
    biased = each(np.add, v["leave"], W["down bias"])  # on the sum, so that it is added once
    v["dropout"] = each(dropout, biased, mask)
    v["y"] = each(np.add, v["x"], v["dropout"])
    return v


def backward(dy, kept, W, ranks):
    """({step: gradient of its arrays}, {weight: its gradient}), from the last step to the first."""
    g, dW = {"y": dy, "dropout": dy}, {}
    g["leave"] = each(dropout, g["dropout"], kept["mask"])
    dW["down bias"] = [dx.sum((0, 1)) for dx in g["leave"]]
    g["down"] = ranks.move(g["leave"], "leave", "down", gradient=True)
    g["silu"], dW["down"] = each(matmul_backward, g["down"], kept["silu"], W["down"])
    g["up"] = each(silu_backward, g["silu"], kept["up"])
    dW["up bias"] = [dx.sum((0, 1)) for dx in g["up"]]
    entered = ranks.move(kept["norm"], "norm", "enter")  # the all-gather that sp repeats
    g["enter"], dW["up"] = each(matmul_backward, g["up"], entered, W["up"])
    g["norm"] = ranks.move(g["enter"], "enter", "norm", gradient=True)
    dx, dW["norm"] = each(layer_norm_backward, g["norm"], kept["x"], W["norm"])
    g["x"] = each(np.add, g["y"], dx)
    return g, dW


def make_problem(args):
    """x (b, s, h), the weights, the dropout mask, and dy: the gradient from above."""
    rng, h, f = np.random.default_rng(0), args.hidden, args.ffn
    shapes = {"norm": h, "up": (h, f), "up bias": f, "down": (f, h), "down bias": h}
    W = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    W["up"], W["down"] = W["up"] / h**0.5, W["down"] / f**0.5
    x, mask, dy = rng.normal(size=(3, args.batch, args.seq, h))
    return x, W, mask > 0, dy  # mask: DROPOUT is half


def simulate(layout, problem, P, fault=None):
    """A step on P ranks: values v, gradients g, gradients of weights dW, what was kept and sent."""
    x, W, mask, dy = problem
    # Real ranks draw their masks: in tp all with one seed, since replicas must agree, in sp with
    # seeds of their own. Here each has its part of one device's, so that a wrong seed shows in y.
    x, mask, dy = (place(full, BETWEEN[layout], P) for full in (x, mask, dy))
    W = {name: place(w, WEIGHTS[name], P) for name, w in W.items()}
    ranks = Ranks(placements(layout))
    # In tp every rank sees all tokens, so it has all of a replicated weight's gradient.
    to_sum = ["down bias", "norm"] if layout == "sp" else []
    break_it(fault, layout, ranks, W, mask, to_sum)
    v = forward(x, W, mask, ranks)
    kept = {name: v[name] for name in KEPT}
    sizes = [x.size * (MASK if name == "mask" else BF16) for name in kept for x in kept[name]]
    ranks.phase = "backward"
    g, dW = backward(dy, kept, W, ranks)
    ranks.phase = "gradients"
    for name in to_sum:  # all in one message; as (1, h), since all_reduce() splits axis 1
        summed = all_reduce([w[None] for w in dW[name]], ranks, calls=int(name == to_sum[0]))
        dW[name] = [w[0] for w in summed]
    counts = {("kept", "tensors"): [len(kept), sum(sizes)]} | ranks.counts
    return SimpleNamespace(v=v, g=g, dW=dW, ranks=ranks, counts=counts)


# ---- 5. Checks: every number, every byte kept, every byte sent ------------------------------


def error(arrays, full, placement):
    """The largest ||a - b|| / ||full|| of the ranks, where b is right (and full may be 0)."""
    if placement == PARTIAL:
        arrays, placement = [sum(arrays)], REPLICATE
    pairs = zip(arrays, place(full, placement, len(arrays)))
    return np.max([np.linalg.norm(a - b) for a, b in pairs]) / (np.linalg.norm(full) or 1)


def compare(run, one, table, weights):
    """{name: error against `one`, a run on 1 rank}: values, gradients from the last step on."""
    found = [(x, run.v[x], one.v[x], table[x][0]) for x in table]
    found += [(f"gradient of {x}", run.g[x], one.g[x], table[x][1]) for x in reversed(table)]
    found += [(f"gradient of weight {x}", run.dW[x], one.dW[x], weights[x]) for x in run.dW]
    return {name: error(arrays, full, placement) for name, arrays, (full,), placement in found}


def expected(args):
    """{(layout, phase, what): (how many, bytes of all ranks, the formula of one rank's)}."""
    P, tokens, h = args.tp, args.batch * args.seq, args.hidden
    outside = (BF16 + BF16 + MASK) * tokens * h  # x, norm, mask
    inside = (BF16 + BF16) * tokens * args.ffn  # up, silu
    sent = BF16 * tokens * h * (P - 1)  # each rank sends M
    two_weights = 2 * BF16 * h * (P - 1)
    return {
        ("tp", "kept", "tensors"): (5, outside * P + inside, "5 bsh of x, norm, mask + 4 bsf/P"),
        ("tp", "forward", "all_reduce"): (1, 2 * sent, "2 M"),
        ("tp", "backward", "all_reduce"): (1, 2 * sent, "2 M"),
        ("sp", "kept", "tensors"): (5, outside + inside, "5 bsh/P of x, norm, mask + 4 bsf/P"),
        ("sp", "forward", "all_gather"): (1, sent, "M"),
        ("sp", "forward", "reduce_scatter"): (1, sent, "M"),
        ("sp", "backward", "all_gather"): (2, 2 * sent, "2 M: norm is gathered again"),
        ("sp", "backward", "reduce_scatter"): (1, sent, "M"),
        ("sp", "gradients", "all_reduce"): (1, 2 * two_weights, "2 (P-1)/P of norm, down bias"),
    }


FAULTS = {  # the checks have to catch every one
    "forgot_reduction": "forward: each rank takes its own partial sum for the sum",
    "forgot_backward_reduction": "backward: the same, for the gradient of enter",
    "bias_before_reduction": "each rank adds the bias to its partial sum: the sum has it P times",
    "wrong_dropout_seed": "tp: replicas get different masks; sp: different tokens get the same",
    "unsummed_gradients": "sp: the gradients of norm and down bias are those of own tokens",
}


def break_it(fault, layout, ranks, W, mask, to_sum):
    """Changes what simulate() made for this run, if --break asks for it."""

    def not_reduced(xs, ranks):
        return [place(x, BETWEEN[layout], len(xs))[r] for r, x in enumerate(xs)]

    def bias_then_reduce(xs, ranks, biases=W["down bias"]):
        return MOVES[PARTIAL, BETWEEN[layout]](each(np.add, xs, biases), ranks)

    edges = {"forgot_reduction": ("down", "leave"), "forgot_backward_reduction": ("enter", "norm")}
    if fault in edges:
        ranks.broken[edges[fault]] = not_reduced
    if fault == "bias_before_reduction":
        ranks.broken["down", "leave"] = bias_then_reduce
        W["down bias"] = each(np.zeros_like, W["down bias"])  # forward() does not add it again
    if fault == "wrong_dropout_seed" and layout == "tp":  # each rank has a seed of its own
        mask[1:] = [np.random.default_rng(r).permuted(m) for r, m in enumerate(mask[1:])]
    if fault == "wrong_dropout_seed" and layout == "sp":  # all ranks have the seed of rank 0
        mask[1:] = [mask[0][:, : m.shape[1]] for m in mask[1:]]
    if fault == "unsummed_gradients":
        to_sum.clear()


# ---- 6. Report and command line -------------------------------------------------------------


def say_table(rows):
    """Columns aligned to the left; numbers in them are padded already."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    print(*(f"  {line}" for line in lines), "", sep="\n")


def say_answers(runs, counts, P, on_features):
    """The answers to the three questions, with the numbers of this run."""
    full, own = (run.v["leave"][0].shape for run in runs.values())

    def both(phase):
        mine = {x: [n for key, (_, n) in counts.items() if key[:2] == (x, phase)] for x in runs}
        return f"{sum(mine['tp']) / P:,.0f} bytes in tp, {sum(mine['sp']) / P:,.0f} in sp"

    print(f"""\
1. Which tp_mode of Nanotron switches sequence parallelism on?
   REDUCE_SCATTER; ALL_REDUCE is tensor parallelism alone. Megatron's switch is
   --sequence-parallel. It takes no more ranks: the same {P} run here as tp and as sp.
2. What does a rank store after an all-reduce, and what after a reduce-scatter?
   Both add up the same partial sums. After an all-reduce a rank has the whole sum, {full}.
   After a reduce-scatter it has its own tokens of the sum, {own} on rank 0.
   For the backward it keeps {both("kept")}: sp keeps 1/P of
   x, norm and mask. Of up and silu a rank has its own features in both.
   In the forward it sends {both("forward")}: an all-reduce is a
   reduce-scatter and an all-gather. In the backward it sends {both("backward")},
   which gathers norm again. For replicated weights' gradients: {both("gradients")}.
3. Why can a norm be computed on (b, s/P, h)?
   Its mean and variance are those of one token's h features, and a rank has all of these: on
   {own} norm is as on one device. On (b, s, h/P) a rank has only some features of each
   token, and the relative error of norm is {on_features:.1g}.
""")


def say_steps(runs, checks):
    """Where each step lies, and whether it is right; between steps what is sent; the weights."""
    tp, sp = runs.values()
    rows = [["", "tp", "sp", "its gradient", "sp, rank 0", "value", "gradient"]]
    for before, step in zip(["", *STEPS], STEPS):
        for phase, *way in sp.ranks.moves:  # from one of the two to the other
            if {before, step} == {*way}:
                names = [run.ranks.moves[phase, *way].__name__ for run in (tp, sp)]
                rows.append(["  v" if phase == "forward" else "  ^", *names, "", "", "", ""])
        (in_tp, _), (in_sp, gradient) = placements("tp")[step], placements("sp")[step]
        row = [step, in_tp, in_sp, "" if gradient == in_sp else gradient, f"{sp.v[step][0].shape}"]
        rows.append([*row, checks[step], checks[f"gradient of {step}"]])
    for name, dw in sp.dW.items():
        gradient = "Partial in sp" if WEIGHTS[name] == REPLICATE else ""
        row = [f"weight {name}", WEIGHTS[name], WEIGHTS[name], gradient, f"{dw[0].shape}", ""]
        rows.append([*row, checks[f"gradient of weight {name}"]])
    say_table(rows)


def report(args):
    """Computes and shows all of it. Returns whether all held."""
    P, problem = args.tp, make_problem(args)
    one = simulate("tp", problem, 1)  # tests compare it with PyTorch's autograd
    runs = {layout: simulate(layout, problem, P, args.fault) for layout in BETWEEN}
    errors = {x: compare(run, one, placements(x), WEIGHTS) for x, run in runs.items()}
    checks = {}
    for name in errors["sp"]:
        found = {layout: errors[layout][name] for layout in runs}
        off = [f"{x} {size:.1g}" for x, size in found.items() if not size <= TOLERANCE]  # NaN, too
        checks[name] = ", ".join(off) or "ok"
    wrong = [f"{name} is wrong ({x}), no step before it" for name, x in checks.items() if x != "ok"]
    counts = {(x, *what): n for x, run in runs.items() for what, n in run.counts.items()}
    formulas, rows = expected(args), [["", "", "", "   bytes", "formula", "check"]]
    for key in formulas | counts:
        (layout, phase, what), (n, size) = key, counts.get(key, [0, 0])
        *wanted, formula = formulas.get(key, (0, 0, ""))
        check = "ok" if [n, size] == wanted else f"{wanted[0]} of {wanted[1] / P:,.0f} expected"
        rows.append([layout, phase, f"{n} {what}", f"{size / P:8,.0f}", formula, check])
        wrong += [] if check == "ok" else [f"what {layout} keeps or sends is wrong"]
    if not wrong:
        features = place(problem[0], SHARD_2, P), place(problem[1]["norm"], SHARD_0, P)
        on_features = error(each(layer_norm, *features), one.v["norm"][0], SHARD_2)
        say_answers(runs, counts, P, on_features)
    whole = checks["leave"] if checks["leave"] == "ok" else f"no, {checks['leave']}"
    partials = " + ".join(f"{x.flat[0]:.4f}" for x in runs["sp"].v["down"]).replace("+ -", "- ")
    sp, full = (f"{run.v['leave'][0].flat[0]:.4f}" for run in (runs["sp"], one))
    print(f"""\
gather(reduce_scatter(partials)) = sum(partials) = full output: {whole}
Its first number: {partials} = {sp} in sp, {full} on one device.

Where each tensor lies, and its gradient if elsewhere. v, ^: sent in the forward, the backward.
""")
    say_steps(runs, checks)
    sizes = f"b, s, h, f = {args.batch}, {args.seq}, {args.hidden}, {args.ffn}"
    print(f"What a rank keeps and sends, on average, in bfloat16. M = 2 bsh (P-1)/P. {sizes}.\n")
    say_table(rows)
    right = "all is as on one device, bytes are as the formulas say"
    print(f"FAIL sp_layout_sim: {wrong[0]}" if wrong else f"PASS sp_layout_sim: {right}")
    return not wrong


def parse(argv, parser, fewest=1):
    """The arguments; exits with 2 where nothing of that size can be computed."""
    sizes = {"tp": (2, "ranks, P"), "batch": (2, "sequences, b"), "seq": (12, "tokens in each, s")}
    sizes |= {"hidden": (16, "features of a token, h"), "ffn": (64, "features in the MLP, f")}
    for name, (size, words) in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size, help=f"{words} ({size})")
    args = parser.parse_args(argv)
    P, b, s, h, f = (getattr(args, name) for name in sizes)
    if not fewest <= P <= 64:
        parser.error(f"--tp {P}: use {fewest} to 64")
    # A norm of 2 features is always 1 and -1, and its gradient nothing but rounding.
    for name, least in {"batch": 1, "seq": P, "hidden": max(P, 4), "ffn": P}.items():
        if getattr(args, name) < least:
            parser.error(f"--{name} {getattr(args, name)} on {P} ranks: use {least} or more")
    if max(P * b * s * max(h, f), h * f) > LARGEST:
        parser.error(f"use smaller sizes: a tensor on all ranks may have {LARGEST:,} numbers")
    return args


def main(argv=None):
    """Returns the exit status: 0 all held, 1 a check failed. argparse exits with 2."""
    faults = "\n".join(f"  {name:26} {words}" for name, words in FAULTS.items())
    look = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=faults, formatter_class=look)
    parser.add_argument("--break", dest="fault", choices=FAULTS, help="a mistake, see below")
    return 0 if report(parse(argv, parser, fewest=2)) else 1  # 1 rank has nothing to shard


if __name__ == "__main__":
    sys.exit(main())
