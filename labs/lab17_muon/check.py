"""Lab 17's checks, each of which runs on every rank, and the bugs that they have to catch.

In float64, so that nothing but a mistake is off by more than EXACT. What is right comes from
torch.optim.Muon on one device, with its one cast to bfloat16 taken out: see muon.py.
"""

import itertools
import random

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from labs.kit.compare import close, drawn, expect_same, tried
from labs.kit.harness import Traffic, Wrong, expect
from labs.kit.tools import Products
from labs.kit.usual import close_or_usual, usual_hint
from labs.lab17_muon.muon import (
    COLLECTIVES,
    EXACT,
    FAMILIES,
    LAYOUTS,
    SHAPES,
    both_groups,
    dealt,
    expect_freed,
    expect_model,
    expect_order,
    expect_sent,
    expect_work,
    finished,
    heads_of,
    linears,
    matrix_case,
    right_bytes,
    right_flops,
    tensors_of,
    tiny,
    torchs,
    watched_exchange,
)

SUBGROUP = True
DOUBLE = torch.float64
MISTAKES = """
== newton_schulz
(ITERATIONS) -> (ITERATIONS - 1)  # ITERATIONS of them
(ITERATIONS) -> (ITERATIONS + 1)  # ITERATIONS of them, no more
x.norm() -> torch.linalg.matrix_norm(x, 2)  # |matrix| is the root of the sum of squares
x.norm() -> x.abs().max()  # (a + b A + c A A) X, of X divided by |matrix|: else it grows for ever
x.norm() -> x.square().sum()  # |matrix| is the root of the sum of squares
x.norm().clamp(min=TINY) -> (x.norm() + TINY)  # max(|matrix|, TINY), not their sum
torch.addmm(gram, gram, gram, beta=b, alpha=c) -> (b + c * gram) * gram  # A A is a matrix product
x.mT if tall else x) -> x)  # transpose it back
matrix.mT if tall else matrix -> matrix  # of more rows than columns: transposed before and after
X = a X + (b A + c A A) X, ITERATIONS times, of X X^T = A; the factor is orthogonalize()'s
== orthogonalize
max(1, cut[0].shape[0] / -> max(1, update.shape[0] /  # the root of (rows / n), of a block's rows
 ** 0.5 ->  # the root of (rows / n)
factor * newton ->  newton  # times the root of (rows / n), where that is more than 1
max(1, cut[0].shape[0] / cut[0].shape[1]) -> (cut[0].shape[0] / cut[0].shape[1])  # at least 1
cut[0].shape[0] / cut[0].shape[1] -> cut[0].shape[1] / cut[0].shape[0]  # rows over columns
/ cut[0].shape[1] -> / cut[0].shape[1], cut[0].shape[1] / cut[0].shape[0]  # rows over columns
chunk(blocks) -> chunk(1)  # each block for itself
chunk(blocks) -> split(blocks)  # `blocks` blocks of m / blocks rows
torch.cat( -> torch.stack(  # (m, n): the blocks one below the other
newton_schulz(block, dtype) -> newton_schulz(block, torch.bfloat16)  # pass dtype on
a block of consecutive rows for itself: newton_schulz() times the root of (its rows / n), or 1
== flops
sum(products) -> sum(products) / 2  # a product of (i, j) and (j, k) has 2 i j k
sorted([shape[0] // blocks, shape[1]]) -> [shape[0] // blocks, shape[1]]  # A is of the shorter side
sorted([shape[0] // blocks, shape[1]]) -> sorted(shape)  # of each block, and the blocks' sum
blocks * ITERATIONS -> ITERATIONS  # of all blocks together
blocks * ITERATIONS -> blocks  # in each of ITERATIONS
 2 * short**3, ->  # A A is a product, too
 2 * short**3 -> 2 * short * short * long  # both sides of A are the shorter one: A A has 2 short^3
short, long = -> long, short =  # A has as many rows as the shorter side
X X^T, A A, and that times X, of each block: A has as many rows as the block's shorter side
== owners
, reverse=True ->  # the most expensive first, not the cheapest
key=costs.__getitem__, reverse=True -> key=int  # the most expensive first
key=costs.__getitem__, -> key=lambda i: (costs[i], i),  # of equals the lower number first
min(range(world), -> min(reversed(range(world)),  # of equal ranks the lower number
load[owner[i]] += costs[i] -> load[owner[i]] += 1  # the least cost so far, not the fewest matrices
to the rank whose matrices cost least so far; the list has the owner of matrix 0, 1, ...
== message_bytes
max(matrix.sizes) -> matrix.sizes[rank]  # padded: every part counts as the largest
max(matrix.sizes) -> sum(matrix.sizes) / len(matrix.sizes)  # padded: each counts as the largest
padded += largest * len(matrix.sizes) -> padded += largest  # all that comes, of P ranks
in_and_out += matrix.shape[0] * matrix.shape[1] * width -> pass  # back go whole matrices, its own
matrix.owner == rank -> False  # at the owner P parts, elsewhere one
shape[1] * width -> shape[1] * width - 2 * width * matrix.own.numel()  # also what stays on the rank
largest * len(matrix.sizes) -> largest * (len(matrix.sizes) - 1)  # also what stays on the rank
in_and_out += matrix.own.numel() * width -> pass  # there go its parts of all
in_and_out += matrix.own.numel() * width -> in_and_out += largest  # nothing is padded
": in_and_out} -> ": 2 * in_and_out}  # there its parts of all, back all of its own
matrix.shape[1 - matrix.dim] * -> matrix.shape[1] *  # of columns (dim 1) the other side is rows
* width -> * 4  # a number has `width` bytes
there: its parts of all; back: whole own matrices; padded: each part as the largest, P at the owner
"""


def check_newton_schulz(lab, group, seed):
    for i, (m, n) in enumerate(((5, 5), (3, 8), (8, 3), (1, 4), (4, 1), (6, 7))):
        matrix = drawn(seed + i, n, m).mT if i % 2 else drawn(seed + i, m, n)
        what, before = f"newton_schulz() of ({m}, {n})", matrix.clone()
        with FlopCounterMode(display=False) as counter:
            found = tried(what, "A is square, of X's rows", lab.newton_schulz, matrix, DOUBLE)
        expect_same("the matrix", [matrix], [before])
        right, usual = torchs(matrix) / max(1, m / n) ** 0.5, (MISTAKES, finished.newton_schulz)
        close_or_usual(what, found, right, *usual, (matrix, DOUBLE), tolerance=EXACT)
        most, counted = right_flops((m, n), 1), counter.get_total_flops()
        seen = f"{what}: {counted} operations, {most} will do"
        hint = "more rows than columns: transposed, A is smaller; and X is multiplied once a round"
        expect(counted <= most, seen, hint)
    zero = lab.newton_schulz(torch.zeros(3, 4, dtype=DOUBLE), DOUBLE)
    expect(not zero.any(), "of a matrix of zeros not zeros", "divide by TINY at least, not by 0")
    return f"6 shapes and zeros, as torch.optim.Muon; {expect_dtypes(lab, seed)}"


def expect_dtypes(lab, seed):
    """Raise Wrong unless the dtype that is asked for is computed in, and the own one returned."""
    matrix = drawn(seed, 6, 9).float()
    for dtype in torch.bfloat16, torch.float64:
        with Products() as products:
            found = lab.newton_schulz(matrix, dtype)
        what = f"newton_schulz() of float32 in {dtype}"
        expect(products.dtypes == {dtype}, f"{what} multiplies {products.dtypes}", "x.to(dtype)")
        expect(found.dtype == matrix.dtype, f"{what} is {found.dtype}", "in the matrix's own dtype")
    return "in the dtype that is asked for"


def check_blocks(lab, group, seed):
    for i, (m, n, blocks) in enumerate(((5, 7, 1), (7, 3, 1), (12, 5, 3), (12, 2, 4), (6, 6, 6))):
        update, what = drawn(seed + i, m, n), f"orthogonalize() of ({m}, {n}) in {blocks} blocks"
        before = update.clone()
        args, hint = (update, blocks, DOUBLE), "blocks of rows: update.chunk()"
        found = tried(what, hint, lab.orthogonalize, *args)
        expect_same("the update", [update], [before])
        usual = MISTAKES, finished.orthogonalize, args
        close_or_usual(what, found, torchs(update, blocks), *usual, tolerance=EXACT)
        with Products() as products:
            lab.orthogonalize(update.float(), blocks, torch.bfloat16)
        found = f"{what} in bfloat16 multiplies {products.dtypes}"
        expect(products.dtypes == {torch.bfloat16}, found, "pass dtype on")
    return "1 to 6 blocks, tall and wide: as torch.optim.Muon of each block"


def check_choose(lab, group, seed):
    for family in FAMILIES:
        model = tiny(family, seed)
        for per_head in False, True:
            what = f"{family}, per_head={per_head}: choose()"
            found = lab.choose(model, per_head)
            named = isinstance(found, dict) and all(isinstance(name, str) for name in found)
            expect(named, f"{what} is no dict of names", "{name: blocks}")
            right = {name: heads_of(model, name) if per_head else 1 for name in linears(model)}
            hint = "all parameters of the layers with two dimensions"
            for name in found.keys() - right.keys():
                known = name in dict(model.named_parameters())
                one = known and model.get_parameter(name).ndim == 1
                hint = "names are those of model.named_parameters()"
                if known:
                    hint = "what is 1-D is AdamW's" if one else "embedding and head are AdamW's"
            odd = sorted(found.keys() ^ right.keys())
            expect(not odd, f"{what}: {', '.join(odd[:3])} too many, or missing", hint)
            for name, count in right.items():
                hint = "k and v have num_key_value_heads, q has num_attention_heads"
                hint = hint if per_head and count > 1 else "1, but for q, k and v if per_head"
                expect(found[name] == count, f"{what}: {name} {found[name]}, not {count}", hint)
    return "LLaMA with biases and a tied head, Qwen3 with norms of heads: the layers' matrices"


def check_flops(lab, group, seed):
    chosen = random.Random(seed)
    for blocks in 1, 1, 3, 8:
        for _ in range(4):
            m, n = blocks * chosen.randint(2, 12), chosen.randint(2, 12)
            with FlopCounterMode(display=False) as counter:
                finished.orthogonalize(drawn(seed, m, n), blocks, DOUBLE)
            right, found = counter.get_total_flops(), lab.flops((m, n), blocks)
            if found != right:
                hint = usual_hint(MISTAKES, finished.flops, ((m, n), blocks), found)
                raise Wrong(f"flops(({m}, {n}), {blocks}) is {found}, not {right}", hint)
    return "16 shapes, 1 to 8 blocks: as counted"


def check_owners(lab, group, seed):
    chosen = random.Random(seed)
    drawn_costs = [[chosen.randint(1, 60) for _ in range(chosen.randint(1, 30))] for _ in range(9)]
    for costs in [*drawn_costs, [1, 9, 1, 1], [3] * 7, [5]]:
        for world in 3, 2, 5, 1:
            given, right = list(costs), dealt(costs, world)
            what = f"owners({costs}, {world})"
            found = tried(what, "a list of ranks", lab.owners, given, world)
            same = given == costs
            expect(same, "the caller's costs are changed", "no sort() of theirs, no pop()")
            expect(isinstance(found, list | tuple), f"{what} is {found}", "a list of ranks")
            if [*found] != right:
                hint = usual_hint(MISTAKES, finished.owners, (costs, world), [*found])
                raise Wrong(f"{what} is {[*found]}, not {right}", hint)
    return "1 to 30 matrices on 1 to 5 ranks: the most expensive first, to whom has least"


# ---- The three ways ------------------------------------------------------------------------------


def watched(lab, traffic):
    """A list that gets, at each orthogonalize(), how often each collective has been called."""
    seen, right = [], lab.orthogonalize

    def noting(*args, **named):
        seen.append({op: calls for op, (calls, _) in traffic.ops.items()})
        return right(*args, **named)

    lab.orthogonalize = noting
    return seen, right


def check_way(lab, group, seed, way, hint):
    """A way on all ranks and on two of them: its parts, messages, operations; a report."""
    worst = 0
    for each, count in itertools.product(both_groups(group), (len(SHAPES), 1)):
        rank, world = each.rank(), each.size()
        matrices, wholes = matrix_case(lab, rank, world, seed, count)
        parts = [w.split(m.sizes, m.dim)[rank] for w, m in zip(wholes, matrices)]
        given, what = [x.clone() for x in parts], f"{way}() of {count} on {world} ranks"
        traffic = Traffic()
        seen, right = watched(lab, traffic)
        counter, exchanges = FlopCounterMode(display=False), watched_exchange(lab, matrices, rank)
        with traffic, counter, exchanges:
            call = getattr(lab, way), parts, matrices, each, DOUBLE
            found = tried(what, hint, *call)
        lab.orthogonalize = right
        expect_same("a part of an update", parts, given)
        with Products() as products:
            getattr(lab, way)(parts, matrices, each, torch.float32)
        told = f"{what} in float32 multiplies {products.dtypes}"
        expect(products.dtypes <= {torch.float32}, told, "pass dtype on")
        found = tensors_of(what, found, len(parts))
        for i, (mine, whole, matrix) in enumerate(zip(found, wholes, matrices)):
            dim, shape = matrix.dim, (*matrix.shape,)
            told = f"{what}: of a {shape} matrix with {matrix.sizes} {('rows', 'columns')[dim]}"
            wanted = torchs(whole, matrix.blocks).split(matrix.sizes, dim)[rank]
            hints = {"that is the whole matrix: return the own part": torchs(whole, matrix.blocks)}
            if given[i].numel():
                hints["the shard's own: bring the whole together first"] = torchs(given[i])
                hints["not orthogonalized"] = given[i]
                hints["in its blocks"] = torchs(whole).split(matrix.sizes, dim)[rank]
            hints = {text: x for text, x in hints.items() if not torch.equal(x, wanted)}
            factor = max(1, shape[0] / shape[1]) ** 0.5
            hints["by orthogonalize(), with its factor"] = wanted / factor
            other = f"joined rank by rank along dim, without padding; {hint}"
            if isinstance(mine, torch.Tensor) and mine.shape != wanted.shape:
                other = "of each matrix, in their order, sizes[rank] rows or columns, no padding"
            worst = max(worst, close(told, mine, wanted, hints, other, EXACT))
        expect_freed(what, found, matrices)
        expect_work(what, way, counter.get_total_flops(), matrices, rank)
        expect_sent(what, way, traffic, matrices, rank)
        expect_order(what, way, seen, len(parts))
    return f"on 2 and 3 ranks off by {worst:.0e}; bytes, operations as predicted"


def check_everywhere(lab, group, seed):
    hint = "dist.all_gather() into P different tensors of padded()'s shape, then joined(), cut()"
    return check_way(lab, group, seed, "everywhere", hint)


def check_by_owner(lab, group, seed):
    hint = "padded() on its way, joined() at the owner; lists at the owner, None elsewhere"
    return check_way(lab, group, seed, "by_owner", hint)


def check_at_once(lab, group, seed):
    hint = "of rank r come own matrices' part_shape(r), joined rank by rank; back, this rank's"
    return check_way(lab, group, seed, "at_once", hint)


def check_bytes(lab, group, seed):
    for world in 4, 3, 2, 1:
        for rank in range(world):
            matrices, _ = matrix_case(lab, rank, world, seed)
            for way in COLLECTIVES:
                for width in 2, 8:
                    found = lab.message_bytes(matrices, rank, way, width)
                    right = right_bytes(matrices, rank, way, width)
                    what = f"{way}, rank {rank} of {world}, {width} bytes a number"
                    same = isinstance(found, dict) and found.keys() == right.keys()
                    expect(same, f"{what}: {found}", f"a dict of {', '.join(right)}")
                    if found != right:
                        call = MISTAKES, finished.message_bytes, (matrices, rank, way, width)
                        raise Wrong(f"{what}: {found}, not {right}", usual_hint(*call, found))
    return "1 to 4 ranks, every rank and way; that is what was counted of the three ways"


# ---- A step --------------------------------------------------------------------------------------


def expect_update(lab, seed):
    """Raise Wrong unless step() averages, looks ahead, decays, and asks a way for all else."""
    beta, decay, lr = 0.9, 0.3, 0.5
    whole, first, grad = (drawn(seed + i, 4, 3) for i in range(3))
    matrix, other = (lab.Matrix(nn.Parameter(whole.clone()), 0 * whole, 0, [4], 1) for _ in "ab")
    matrix.momentum, kept = first.clone(), matrix.own.data_ptr()
    matrix.own.grad, other.own.grad, asked = grad.clone(), grad.clone(), []
    momentum = matrix.momentum

    def way(parts, matrices, group, dtype):
        asked.append((parts[0].clone(), group, dtype))
        return [10 * part for part in parts]

    how = {"decay": decay, "beta": beta, "dtype": torch.float16}
    lab.step([matrix, other], way, "the group", lr, **how)
    same = matrix.own.data_ptr() == kept
    expect(same, "step(): own has other memory", "in place: the model's parameters share it")
    mean = beta * first + (1 - beta) * grad
    update = beta * mean + (1 - beta) * grad
    expect(len(asked) == 1, f"step() asks its way {len(asked)} times", "once, for all matrices")
    hints = {"momentum is a mean: (1 - beta) times the gradient": beta * first + grad}
    hints["beta and 1 - beta the other way round"] = beta * grad + (1 - beta) * first
    hints["momentum changes once: the update is another tensor"] = update
    hint = "beta momentum + (1 - beta) gradient"
    close("step(): momentum", matrix.momentum, mean, hints, hint, EXACT)
    expect(matrix.momentum is momentum, "step(): momentum is another tensor", "change it in place")
    hints = {"Nesterov: the gradient once more": mean, "the gradient as it is": grad}
    hints["with the new momentum"] = beta * first + (1 - beta) * grad
    hints["a mean again: (1 - beta) times the gradient"] = grad + beta * mean
    close("step(): the update", asked[0][0], update, hints, f"{hint}, of the new one", EXACT)
    expect_same("a gradient", [matrix.own.grad], [grad])
    given = "the group", torch.float16
    expect(asked[0][1:] == given, f"way() gets {asked[0][1:]}", "pass group and dtype on")
    shrunk = 1 - lr * decay
    right = whole * shrunk - lr * 10 * update
    hints = {"own first, times 1 - lr decay": whole - lr * 10 * update}
    hints["own times 1 - lr decay before, not after"] = (whole - lr * 10 * update) * shrunk
    hints["times lr, too: 1 - lr decay"] = whole * (1 - decay) - lr * 10 * update
    hints["the update is times lr"] = whole * shrunk - 10 * update
    hints["subtract it"] = whole * shrunk + lr * 10 * update
    hint = "(1 - lr decay) own - lr times what way() gives"
    close("step(): own", matrix.own.detach(), right, hints, hint, EXACT)


def check_step(lab, group, seed):
    expect_update(lab, seed)
    worst, cases = 0, list(itertools.product(FAMILIES, LAYOUTS))
    for each in both_groups(group):
        for i, (family, layout) in enumerate(cases):
            way, per_head = [*COLLECTIVES][(i + each.size()) % 3], bool((i + each.size()) % 2)
            what = f"{family}, {layout} on {each.size()} ranks, {way}, per_head={per_head}"
            case = family, layout, way, per_head, each, seed
            worst = max(worst, expect_model(lab, what, *case))
    return f"LLaMA, Qwen3, ZeRO-1, TP, 2 and 3 ranks: 3 steps as one device's, {worst:.0e}"


CHECKS = {
    "newton_schulz": (check_newton_schulz, 1),
    "blocks": (check_blocks, 1),
    "choose": (check_choose, 1),
    "flops": (check_flops, 1),
    "owners": (check_owners, 1),
    "everywhere": (check_everywhere, 3),
    "by_owner": (check_by_owner, 3),
    "at_once": (check_at_once, 3),
    "bytes": (check_bytes, 1),
    "step": (check_step, 3),
}


# Bugs for --inject-bug: the checks have to catch every one


def blockwise(lab):
    """Each rank orthogonalizes its shards: another update for each number of ranks."""

    def everywhere(parts, matrices, group, dtype):
        return [lab.orthogonalize(part, 1, dtype) if len(part) else part for part in parts]

    lab.everywhere = everywhere


def query_heads_for_all(lab):
    """k and v are cut into as many blocks as there are query heads: half a head is a block."""

    def choose(model, per_head):
        heads = model.config.num_attention_heads if per_head else 1
        return {n: heads if "attn" in n and "o_proj" not in n else 1 for n in linears(model)}

    lab.choose = choose


def owners_in_turn(lab):
    """Matrices are dealt to the ranks in turn, whatever they cost."""
    lab.owners = lambda costs, world: [i % world for i in range(len(costs))]


BUGS = [blockwise, query_heads_for_all, owners_in_turn]
