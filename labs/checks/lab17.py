"""Lab 17's checks, each of which runs on every rank, and the bugs that they have to catch.

In float64, so that nothing but a mistake is off by more than EXACT. What is right comes from
torch.optim.Muon on one device, with its one cast to bfloat16 taken out: see muon.py.
"""

import itertools
import random

import torch
from checks.compare import close, drawn, expect_same, tried
from checks.muon import (
    COLLECTIVES,
    EXACT,
    FAMILIES,
    LAYOUTS,
    SHAPES,
    Products,
    both_groups,
    dealt,
    expect_freed,
    expect_model,
    expect_order,
    expect_sent,
    expect_work,
    finished,
    heads_of,
    iterated,
    linears,
    matrix_case,
    right_bytes,
    right_flops,
    tensors_of,
    tiny,
    torchs,
)
from harness import Traffic, expect
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

SUBGROUP = True
DOUBLE = torch.float64


def check_newton_schulz(lab, group, seed):
    a, b, c = finished.COEFFICIENTS
    for i, (m, n) in enumerate(((5, 5), (3, 8), (8, 3), (1, 4), (4, 1), (6, 7))):
        matrix = drawn(seed + i, n, m).mT if i % 2 else drawn(seed + i, m, n)
        what, before = f"newton_schulz() of ({m}, {n})", matrix.clone()
        with FlopCounterMode(display=False) as counter:
            found = tried(what, "A is square, of X's rows", lab.newton_schulz, matrix, DOUBLE)
        expect_same("the matrix", [matrix], [before])
        factor = max(1, m / n) ** 0.5
        hints = {"ITERATIONS of them": iterated(matrix, 4, (a, b, c))}
        hints["ITERATIONS of them, no more"] = iterated(matrix, 6, (a, b, c))
        spectral = iterated(matrix, 5, (a, b, c), lambda x: torch.linalg.matrix_norm(x, 2))
        hints["|matrix| is the root of the sum of squares"] = spectral
        plus = iterated(matrix, 5, (a, b, c), lambda x: torch.linalg.matrix_norm(x) + finished.TINY)
        hints["max(|matrix|, TINY), not their sum"] = plus
        hints["the factor is orthogonalize()'s"] = torchs(matrix)
        hints["transpose it back"] = torchs(matrix).mT / factor
        hint = "ITERATIONS times (a + b A + c A A) X, in dtype"
        if isinstance(found, torch.Tensor) and not found.isfinite().all():
            hint = "(a + b A + c A A) X, of X divided by |matrix|: else it grows without end"
        close(what, found, torchs(matrix) / factor, hints, hint, EXACT)
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
        found = tried(
            what, "blocks of rows: update.chunk()", lab.orthogonalize, update, blocks, DOUBLE
        )
        expect_same("the update", [update], [before])
        right, factor = torchs(update, blocks), max(1, m / blocks / n) ** 0.5
        hints = {"the root of (rows / n), of a block's rows": right / factor * max(1, m / n) ** 0.5}
        hints["the root of (rows / n)"] = right * factor
        hints["times the root of (rows / n), where that is more than 1"] = right / factor
        hints["also where it is less than 1"] = right / factor * (m / blocks / n) ** 0.5
        hints["each block for itself"] = torchs(update)
        columns = update.view(m // blocks, blocks, n).transpose(0, 1).reshape(m, n)
        columns = torchs(columns, blocks).view(blocks, -1, n).transpose(0, 1).reshape(m, n)
        hints["a block is consecutive rows"] = columns
        swapped = {text: x for text, x in hints.items() if not torch.equal(x, right)}
        close(what, found, right, swapped, tolerance=EXACT)
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
            hints = {right / 2: "a product of (i, j) and (j, k) has 2 i j k"}
            hints[right_flops((m, n), 1)] = "of each block, and the blocks' sum"
            hints[right / blocks] = "of all blocks together"
            hints[right / finished.ITERATIONS] = "in each of ITERATIONS"
            low, high = sorted((m // blocks, n))
            wrong = 4 * high * high * low + 2 * high**3
            hints[blocks * finished.ITERATIONS * wrong] = "A has as many rows as the shorter side"
            hints[blocks * finished.ITERATIONS * 4 * low * low * high] = "A A is a product, too"
            hints.pop(right, None)
            what = f"flops(({m}, {n}), {blocks}) is {found}, not {right}"
            expect(found == right, what, hints.get(found, "X X^T, A A, and that times X"))
    return "16 shapes, 1 to 8 blocks: as counted"


def check_owners(lab, group, seed):
    chosen = random.Random(seed)
    drawn_costs = [[chosen.randint(1, 60) for _ in range(chosen.randint(1, 30))] for _ in range(9)]
    for costs in [[1, 9, 1, 1], [3] * 7, [5], *drawn_costs]:
        for world in 1, 2, 3, 5:
            given, right = list(costs), dealt(costs, world)
            what = f"owners({costs}, {world})"
            found = tried(what, "a list of ranks", lab.owners, given, world)
            expect(
                given == costs, "the caller's costs are changed", "no sort() of theirs, no pop()"
            )
            expect(isinstance(found, list | tuple), f"{what} is {found}", "a list of ranks")
            turns = [i % world for i in range(len(costs))]
            hints = {tuple(turns): "to the rank with the least so far, not in turn"}
            for order, text in (
                ("in order", "the most expensive first"),
                ("least", "the most expensive first, not the cheapest"),
                ("last", "of equals the lower number first"),
            ):
                hints.setdefault(tuple(dealt(costs, world, order)), text)
            hint = hints.get(tuple(found), "to the rank whose matrices cost least so far")
            expect([*found] == right, f"{what} is {[*found]}, not {right}", hint)
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
        with traffic, FlopCounterMode(display=False) as counter:
            call = getattr(lab, way), parts, matrices, each, DOUBLE
            found = tried(what, hint, *call)
        lab.orthogonalize = right
        expect_same("a part of an update", parts, given)
        found = tensors_of(f"{what}", found, len(parts))
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
            other = "joined rank by rank along dim, of rank r part_shape(r), without padding"
            worst = max(worst, close(told, mine, wanted, hints, other, EXACT))
        expect_freed(what, found, matrices)
        expect_work(what, way, counter.get_total_flops(), matrices, rank)
        expect_sent(what, way, traffic, matrices, rank)
        expect_order(what, way, seen, len(parts))
        with Products() as products:
            getattr(lab, way)(parts, matrices, each, torch.bfloat16)
        seen = f"{what} in bfloat16 multiplies {products.dtypes}"
        expect(products.dtypes <= {torch.bfloat16}, seen, "pass dtype on")
    return f"on 2 and 3 ranks off by {worst:.0e}; bytes, operations as predicted"


def check_everywhere(lab, group, seed):
    hint = "dist.all_gather() into a list of P tensors of padded()'s shape"
    return check_way(lab, group, seed, "everywhere", hint)


def check_by_owner(lab, group, seed):
    hint = "padded() on its way, joined() at the owner; lists at the owner, None elsewhere"
    return check_way(lab, group, seed, "by_owner", hint)


def check_at_once(lab, group, seed):
    hint = "of rank r come own matrices' part_shape(r), joined rank by rank; back, this rank's"
    return check_way(lab, group, seed, "at_once", hint)


def check_bytes(lab, group, seed):
    for world in 1, 2, 3, 4:
        for rank in range(world):
            matrices, _ = matrix_case(lab, rank, world, seed)
            for way in COLLECTIVES:
                for width in 2, 8:
                    found = lab.message_bytes(matrices, rank, way, width)
                    right = right_bytes(matrices, rank, way, width)
                    what = f"{way}, rank {rank} of {world}, {width} bytes a number"
                    same = isinstance(found, dict) and found.keys() == right.keys()
                    expect(same, f"{what}: {found}", f"a dict of {', '.join(right)}")
                    hint = bytes_hint(way, found, matrices, rank, world, width)
                    expect(found == right, f"{what}: {found}, not {right}", hint)
    return "1 to 4 ranks, every rank and way; that is what was counted of the three ways"


def bytes_hint(way, found, matrices, rank, world, width):
    """What a wrong number of bytes comes of."""
    own = width * sum(matrix.own.numel() for matrix in matrices)
    every = width * sum(matrix.shape[0] * matrix.shape[1] for matrix in matrices)
    if way == "at_once":
        hints = {own: "back goes what it owns: whole matrices", 2 * own: "back go whole matrices"}
        hints |= {every + own: "back go its own matrices alone"}
        return hints.get(found["all_to_all"], "there: its parts of all; back: all of its matrices")
    right = right_bytes(matrices, rank, "everywhere", width)["all_gather"]
    mine = [*found.values()][0]
    hints = {every: "padded: every part counts as the largest", own: "all that comes, of P ranks"}
    hints |= {right // world: "all that comes, of P ranks"} if way == "everywhere" else {}
    at_owner = "at the owner P parts, elsewhere one"
    return hints.get(mine, at_owner if way == "by_owner" else "P times the largest part")


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

    how = {"decay": decay, "beta": beta, "dtype": torch.bfloat16}
    lab.step([matrix, other], way, "the group", lr, **how)
    mean = beta * first + (1 - beta) * grad
    update = beta * mean + (1 - beta) * grad
    expect(len(asked) == 1, f"step() asks its way {len(asked)} times", "once, for all matrices")
    hints = {"momentum is a mean: (1 - beta) times the gradient": beta * first + grad}
    hints["beta and 1 - beta the other way round"] = beta * grad + (1 - beta) * first
    close("step(): momentum", matrix.momentum, mean, hints, tolerance=EXACT)
    expect(matrix.momentum is momentum, "step(): momentum is another tensor", "change it in place")
    hints = {"Nesterov: the gradient once more": mean, "the gradient as it is": grad}
    hints["with the new momentum"] = beta * first + (1 - beta) * grad
    hints["a mean again: (1 - beta) times the gradient"] = grad + beta * mean
    close("step(): the update", asked[0][0], update, hints, tolerance=EXACT)
    expect_same("a gradient", [matrix.own.grad], [grad])
    given = "the group", torch.bfloat16
    expect(asked[0][1:] == given, f"way() gets {asked[0][1:]}", "pass group and dtype on")
    right = whole * (1 - lr * decay) - lr * 10 * update
    hints = {"own first, times 1 - lr decay": whole - lr * 10 * update}
    hints["scaled before, not after"] = (whole - lr * 10 * update) * (1 - lr * decay)
    hints["times lr, too: 1 - lr decay"] = whole * (1 - decay) - lr * 10 * update
    hints["subtract it"] = whole * (1 - lr * decay) + lr * 10 * update
    close("step(): own", matrix.own.detach(), right, hints, tolerance=EXACT)
    same = matrix.own.data_ptr() == kept
    expect(same, "step(): own has other memory", "in place: the model's parameters share it")


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
