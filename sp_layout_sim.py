"""Sequence parallelism as a layout of tensor parallelism, on simulated ranks: numpy only.

The MLP block of a transformer, y = x + dropout(MLP(norm(x))), is computed forward and backward
by hand: on one device, and on P ranks, which are the entries of a list. The ranks shard the
weights, and they hold the activations in one of two layouts:

    tp    tensor parallelism: outside the matrix products every rank has all tokens
    sp    the same with sequence parallelism: there each rank has its own tokens only

The products are the same. What differs is where the tensors around them lie, and so what is
sent. This is sp (v: what the forward sends, ^: what the backward sends):

    x, norm                        own tokens      (b, s/P, h)   Shard(1)
    v all-gather       ^ reduce-scatter
    enter                          all tokens      (b, s, h)     Replicate
    up, silu: column parallel      own features    (b, s, f/P)   Shard(2)
    down: row parallel             addends         (b, s, h)     Partial
    v reduce-scatter   ^ all-gather
    leave, dropout, y              own tokens      (b, s/P, h)   Shard(1)

The words on the right are PyTorch DTensor's. Shard(n): a rank has its slice of axis n.
Replicate: it has all of the tensor. Partial: it has an addend, and the sum over the ranks is the
tensor. In tp Replicate stands where sp has Shard(1). An attention block has the same edges, with
heads in place of features (labs/four_layouts.py).

    python sp_layout_sim.py                           # three answers, then how they come about
    python sp_layout_sim.py --tp 4 --seq 14           # 4 ranks, 14 tokens
    python sp_layout_sim.py --break forgot_reduction  # a mistake, caught; --help has five
"""

import argparse
import signal
import sys
from types import SimpleNamespace

import numpy as np

TOLERANCE = 1e-12  # relative error against one device, in float64
DROPOUT = 0.5
BF16, MASK = 2, 1  # bytes of a number on a GPU
LARGEST = 1 << 22  # numbers in a tensor of all ranks; with more a laptop would need minutes


# ---- 1. Where every tensor lies -------------------------------------------------------------

REPLICATE, PARTIAL = "Replicate", "Partial"
SHARD_0, SHARD_1, SHARD_2 = "Shard(0)", "Shard(1)", "Shard(2)"
BETWEEN = {"tp": REPLICATE, "sp": SHARD_1}  # what lies between two blocks


def placements(layout):
    """{step: (its placement, its gradient's)}: what the two layouts differ in."""
    between = BETWEEN[layout]
    return {
        "x": (between, between),
        "norm": (between, between),
        "enter": (REPLICATE, PARTIAL),  # each rank's weights give an addend of the gradient
        "up": (SHARD_2, SHARD_2),
        "silu": (SHARD_2, SHARD_2),
        "down": (PARTIAL, REPLICATE),  # an addend has the gradient of the sum
        "leave": (between, between),
        "dropout": (between, between),
        "y": (between, between),
    }


# Weights are (in, out): column parallel is a shard of out, row parallel a shard of in.
WEIGHTS = {"norm": REPLICATE, "up": SHARD_1, "up bias": SHARD_0, "down": SHARD_0}
WEIGHTS["down bias"] = REPLICATE
KEPT = ["x", "norm", "up", "silu", "mask"]  # all that the backward gets from the forward


def place(full, placement, P):
    """One device's tensor as it lies on P ranks; if P does not divide, the first have more."""
    if placement == REPLICATE:
        return [full] * P
    return np.array_split(full, P, [SHARD_0, SHARD_1, SHARD_2].index(placement))


# ---- 2. What brings a tensor from one placement to another ----------------------------------


class Ranks:
    """Ranks that send arrays to each other, and count what they send."""

    def __init__(self, table):
        self.placements = table
        self.phase = "forward"
        self.counts = {}  # {(phase, collective): [calls, bytes of all ranks]}
        self.moves = {}  # {(step, next step): the collective}, entered by move() or break_it()

    def exchange(self, pieces, collective, calls=1):
        """pieces[r][to] goes from rank r to rank `to`. Returns received[to][r]."""
        count = self.counts.setdefault((self.phase, collective), [0, 0])
        count[0] += calls
        for r, row in enumerate(pieces):
            count[1] += sum(BF16 * x.size for to, x in enumerate(row) if to != r)
        return list(zip(*pieces))

    def move(self, arrays, before, after, gradient=False):
        """A step's arrays, or their gradient, brought to where the step `after` has to lie."""
        lies, wanted = (self.placements[step][int(gradient)] for step in (before, after))
        collective = nothing if lies == wanted else MOVES[lies, wanted]
        return self.moves.setdefault((before, after), collective)(arrays, self)


def all_gather(xs, ranks, name="all_gather", calls=1):
    """(b, s/P, h) -> (b, s, h) on every rank."""
    pieces = [[x] * len(xs) for x in xs]
    return [np.concatenate(got, 1) for got in ranks.exchange(pieces, name, calls)]


def reduce_scatter(xs, ranks, name="reduce_scatter", calls=1):
    """Addends (b, s, h) -> each rank's own tokens of their sum, (b, s/P, h)."""
    pieces = [np.array_split(x, len(xs), 1) for x in xs]
    return [sum(got) for got in ranks.exchange(pieces, name, calls)]


def all_reduce(xs, ranks, calls=1):
    """Addends (b, s, h) -> their sum on every rank: a reduce-scatter, then an all-gather."""
    own_tokens = reduce_scatter(xs, ranks, "all_reduce", calls)
    return all_gather(own_tokens, ranks, "all_reduce", calls=0)


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
    """x / (1 + exp(-x)), written so that it cannot overflow."""
    return x * (1 + np.tanh(x / 2)) / 2


def silu_backward(dy, x):
    sigmoid = (1 + np.tanh(x / 2)) / 2
    return dy * sigmoid * (1 + x * (1 - sigmoid))


def dropout(x, mask):
    """Its own backward, too."""
    return x * mask / (1 - DROPOUT)


def each(function, *lists):
    """A list of function(a rank's arrays); several lists, where it returns several results."""
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
    v["down"] = each(np.matmul, v["silu"], W["down"])  # (b, s, h), an addend
    v["leave"] = ranks.move(v["down"], "down", "leave")  # (b, s/P, h)
    biased = each(np.add, v["leave"], W["down bias"])  # before the sum it would count P times
    v["dropout"] = each(dropout, biased, mask)
    v["y"] = each(np.add, v["x"], v["dropout"])
    return v


def backward(dy, kept, W, ranks):
    """({step: gradient of its arrays}, {weight: its gradient}): the forward from its end."""
    g, dW = {"y": dy, "dropout": dy}, {}
    g["leave"] = each(dropout, g["dropout"], kept["mask"])
    dW["down bias"] = [dx.sum((0, 1)) for dx in g["leave"]]
    g["down"] = ranks.move(g["leave"], "leave", "down", gradient=True)
    g["silu"], dW["down"] = each(matmul_backward, g["down"], kept["silu"], W["down"])
    g["up"] = each(silu_backward, g["silu"], kept["up"])
    dW["up bias"] = [dx.sum((0, 1)) for dx in g["up"]]
    entered = ranks.move(kept["norm"], "norm", "enter")  # sp kept own tokens, so gathers again
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
    W["up"] /= h**0.5
    W["down"] /= f**0.5
    x, mask, dy = rng.normal(size=(3, args.batch, args.seq, h))
    return x, W, mask > 0, dy  # mask: DROPOUT is half


def simulate(layout, problem, P, fault=None):
    """A step on P ranks: values v, gradients g, gradients of weights dW, and the ranks."""
    x, W, mask, dy = problem
    # In a real job each rank draws its mask: in sp from a seed of its own, or the masks would be
    # alike; in tp from the same one, or the replicas would diverge.
    x, mask, dy = (place(full, BETWEEN[layout], P) for full in (x, mask, dy))
    W = {name: place(w, WEIGHTS[name], P) for name, w in W.items()}
    ranks = Ranks(placements(layout))
    # In tp every rank sees all tokens, so it has all of a replicated weight's gradient.
    to_sum = ["down bias", "norm"] if layout == "sp" else []
    if fault:
        break_it(fault, layout, ranks, W, mask, to_sum)
    v = forward(x, W, mask, ranks)
    kept = {name: v[name] for name in KEPT}
    sizes = [x.size * (MASK if name == "mask" else BF16) for name in kept for x in kept[name]]
    ranks.counts["kept", "tensors"] = [len(kept), sum(sizes)]
    ranks.phase = "backward"
    g, dW = backward(dy, kept, W, ranks)
    ranks.phase = "gradients"
    for i, name in enumerate(to_sum):  # in one bucket, so all of them are one call
        # (1, h): so that what is split, axis 1, is h
        summed = all_reduce([w[None] for w in dW[name]], ranks, calls=int(i == 0))
        dW[name] = [w[0] for w in summed]
    return SimpleNamespace(v=v, g=g, dW=dW, ranks=ranks)


# ---- 5. Checks: every number, every byte kept, every byte sent ------------------------------


def expected(layout, args):
    """{(phase, what): ([tensors or calls, bytes of all ranks], formula of one rank's)}."""
    P, tokens, h = args.tp, args.batch * args.seq, args.hidden
    outside, inside = 5 * tokens * h, 4 * tokens * args.ffn  # x, norm, mask; up, silu
    M = BF16 * (P - 1) * tokens * h  # to gather or scatter a tensor (b, s, h)
    if layout == "tp":
        return {
            ("kept", "tensors"): ([5, outside * P + inside], "5 bsh + 4 bsf/P"),
            ("forward", "all_reduce"): ([1, 2 * M], "2 M"),
            ("backward", "all_reduce"): ([1, 2 * M], "2 M"),
        }
    return {
        ("kept", "tensors"): ([5, outside + inside], "5 bsh/P + 4 bsf/P"),
        ("forward", "all_gather"): ([1, M], "M"),
        ("forward", "reduce_scatter"): ([1, M], "M"),
        ("backward", "all_gather"): ([2, 2 * M], "2 M: norm is gathered again"),
        ("backward", "reduce_scatter"): ([1, M], "M"),
        ("gradients", "all_reduce"): ([1, 8 * (P - 1) * h], "8 h (P-1)/P: norm, down bias"),
    }


def error(arrays, full, placement):
    """The largest ||a - b|| / ||full|| of the ranks; b: what should lie there."""
    if placement == PARTIAL:
        arrays, placement = [sum(arrays)], REPLICATE
    pieces = place(full, placement, len(arrays))
    distances = [np.linalg.norm(a - b) for a, b in zip(arrays, pieces)]
    return np.max(distances) / (np.linalg.norm(full) or 1)  # 0, if a mask drops all


def compare(run, one):
    """{name: error against one device}, in the order of computation; the culprit is first."""
    table = run.ranks.placements
    found = {step: error(run.v[step], one.v[step][0], table[step][0]) for step in table}
    for step in reversed(table):
        found[f"gradient of {step}"] = error(run.g[step], one.g[step][0], table[step][1])
    for name, dw in run.dW.items():
        found[f"gradient of weight {name}"] = error(dw, one.dW[name][0], WEIGHTS[name])
    return found


FAULTS = ["forgot_reduction", "forgot_backward_reduction", "bias_before_reduction"]
FAULTS += ["wrong_dropout_seed", "unsummed_gradients"]  # the checks have to catch every one


def break_it(fault, layout, ranks, W, mask, to_sum):
    """For --break: changes what simulate() made for this run."""

    def unreduced(xs, ranks):
        return [place(x, BETWEEN[layout], len(xs))[r] for r, x in enumerate(xs)]

    if fault == "forgot_reduction":
        ranks.moves["down", "leave"] = unreduced
    if fault == "forgot_backward_reduction":
        ranks.moves["enter", "norm"] = unreduced
    if fault == "bias_before_reduction":  # each addend has it, so that dropout sees P of it
        W["down bias"] = [len(mask) * bias for bias in W["down bias"]]
    if fault == "wrong_dropout_seed" and layout == "sp":  # whose ranks have tokens of their own
        mask[1:] = [~own for own in mask[1:]]
    if fault == "unsummed_gradients":  # right in tp, wrong in sp
        to_sum.clear()


# ---- 6. Report and command line -------------------------------------------------------------


def say_table(rows):
    """Columns aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    print(*(f"  {line}" for line in lines), "", sep="\n")


def say_answers(tp, sp, P, on_features):
    """The three questions, with the numbers of this run."""
    full, own = tp.v["leave"][0].shape, sp.v["leave"][0].shape

    def both(phase):
        counts = (run.ranks.counts.items() for run in (tp, sp))
        sizes = (sum(size for (at, _), (_, size) in x if at == phase) / P for x in counts)
        return "{:,.0f} bytes in tp, {:,.0f} in sp".format(*sizes)

    print(f"""\
1. Which tp_mode switches sequence parallelism on?
   reduce_scatter, in Nanotron; all_reduce is tensor parallelism alone. In Megatron it is
   --sequence-parallel. It takes no more ranks: the same {P} run here as tp and as sp.
2. What differs in what is stored?
   Both add up the same addends. all_reduce leaves the sum, {full}, on every rank;
   reduce_scatter leaves each token on one rank, {own} on rank 0.
   So for the backward a rank keeps {both("kept")}.
   In the forward it sends {both("forward")}: an all-reduce is a
   reduce-scatter and an all-gather. In the backward it sends {both("backward")},
   which gathers again what it did not keep.
3. Why can a norm be computed on (b, s/P, h)?
   Its mean and variance are of the h features of one token, and a rank has all of these: on
   {own} norm is that of one device (ok). On (b, s, h/P) a rank has a part of each
   token's features, and the relative error is {on_features:.1g}.
""")


def say_steps(tp, sp):
    """Where each step's tensor lies, its gradient if elsewhere, and what moves them."""
    table = sp.ranks.placements
    rows = [["step", "tp", "sp", "its gradient, if elsewhere", "sp, rank 0", "check"]]
    for before, step in zip(["", *table], table):
        for arrow, way in (("  v", (before, step)), ("  ^", (step, before))):
            if way in sp.ranks.moves:
                names = [run.ranks.moves[way].__name__ for run in (tp, sp)]
                rows.append([arrow, *names, "", "", ""])
        lies, gradient = table[step]
        names = step, f"gradient of {step}"
        worst = np.max([run.errors[name] for run in (tp, sp) for name in names])
        rows.append([step, tp.ranks.placements[step][0], lies, gradient * (gradient != lies)])
        rows[-1] += [str(sp.v[step][0].shape), "ok" if worst <= TOLERANCE else f"{worst:.1g}"]
    say_table(rows)


def report(args):
    """Computes and shows all of it. Returns whether all held."""
    P, problem = args.tp, make_problem(args)
    one = simulate("tp", problem, 1)  # tests compare it with PyTorch's autograd
    tp, sp = (simulate(layout, problem, P, args.fault) for layout in BETWEEN)
    tp.errors, sp.errors = compare(tp, one), compare(sp, one)
    wrong = [x for x in sp.errors if not np.max([tp.errors[x], sp.errors[x]]) <= TOLERANCE]
    rows = [["", "", "", "bytes", "formula"]]
    for layout, run in {"tp": tp, "sp": sp}.items():
        wanted, counts = expected(layout, args), run.ranks.counts
        if counts != {what: count for what, (count, _) in wanted.items()}:
            wrong.append(f"what {layout} keeps or sends")
        for what, (_, formula) in wanted.items():
            n, size = counts.get(what, [0, 0])
            rows.append([layout, what[0], f"{n} {what[1]}", f"{size / P:,.0f}", formula])
    if wrong:
        print(f"{wrong[0]} is wrong. All that is computed before it is one device's.\n")
    else:
        features = place(problem[0], SHARD_2, P), place(problem[1]["norm"], SHARD_0, P)
        say_answers(tp, sp, P, error(each(layer_norm, *features), one.v["norm"][0], SHARD_2))
    partials = " + ".join(f"{x.flat[0]:.4f}" for x in sp.v["down"]).replace("+ -", "- ")
    first = [f"{run.v['leave'][0].flat[0]:.4f}" for run in (sp, tp, one)]
    print(f"""\
Full output = reduce_scatter(sum(partials)): {"no" if "leave" in wrong else "ok"}. Its first number:
{partials} = {first[0]} in sp, {first[1]} in tp, {first[2]} on one device.

b, s, h, f = {args.batch}, {args.seq}, {args.hidden}, {args.ffn}. v, ^: sent in forward, backward.
""")
    say_steps(tp, sp)
    print("What a rank keeps and sends in bfloat16, on average. M: (P-1)/P of a (b, s, h).\n")
    say_table(rows)
    verdict = "PASS sp_layout_sim: all is as on one device, bytes are as the formulas say"
    if wrong:
        verdict = f"FAIL sp_layout_sim: {', '.join(wrong)}"
    print(verdict, flush=True)
    return not wrong


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"error: {message}\n")


def parse(argv, parser):
    """The arguments; exits with 2 where nothing of that size can be computed."""
    sizes = {"tp": 2, "batch": 2, "seq": 12, "hidden": 16, "ffn": 64}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size, metavar="N", help=f"({size})")
    args = parser.parse_args(argv)
    P, b, s, h, f = (getattr(args, name) for name in sizes)
    if not 1 <= P <= 64:
        parser.error(f"--tp {P}: use 1 to 64")
    for name, least in {"batch": 1, "seq": P, "hidden": max(P, 4), "ffn": P}.items():
        if getattr(args, name) < least:
            parser.error(f"--{name} {getattr(args, name)} on {P} ranks: use {least} or more")
    if max(P * b * s * max(h, f), h * f) > LARGEST:
        parser.error(f"use smaller sizes: all ranks' tensors may have {LARGEST:,} numbers together")
    return args


def main(argv=None):
    """Returns the exit status: 0 all held, 1 a check failed, 2 unusable arguments."""
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("--break", dest="fault", choices=FAULTS, help="a mistake to catch")
    args = parse(argv, parser)
    if args.fault and args.tp == 1:
        parser.error(f"--break {args.fault} on 1 rank, which sends nothing: use --tp 2")
    try:
        return 0 if report(args) else 1
    except OSError as problem:  # a full disk, say
        parser.error(f"cannot write the report: {problem.strerror}")


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # `| head` ends it, without a traceback
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
