"""Lab 14's checks, each of which runs on every rank, and the bugs that they have to catch.

In float64, so that nothing but a mistake is off by more than EXACT. What is right comes from masks
that are put together document by document, from PyTorch's own attention, mask and load balancer,
and from Hugging Face's models, which see one document at a time. See documents.py.
"""

import random

import torch

from labs.kit.compare import close, drawn, gradients, tried, unchanged
from labs.kit.harness import Traffic, Wrong, expect
from labs.kit.tools import members
from labs.kit.usual import usual_hint
from labs.lab14_documents.documents import (
    END,
    IGNORE,
    MISTAKES,
    document_of,
    expect_held,
    expect_numbers,
    expect_pytorchs,
    expect_tiles,
    expect_travels,
    expect_visible,
    finished,
    first_of,
    groups_of_all_sizes,
    heaviest_first,
    mask_of,
    packed_ids,
    packings,
    placements,
    position_of,
    pytorchs_mask,
    short,
    zigzag,
)
from labs.lab14_documents.packed import (
    FAMILIES,
    agreed,
    expect_all,
    expect_loss,
    expect_model,
    expect_one,
    expect_overlap,
    expect_sent,
    lengths_of,
    ring_cases,
    watch,
)

split = finished.split
WINDOWS = 3, None, 1, 50


def check_documents(lab, group, seed):
    for what, lengths in packings(seed).items():
        for whole, end in (True, END), (False, 0):
            ids = packed_ids(lengths, seed, whole, end)
            with unchanged(ids=ids):
                found, labels = lab.documents(ids, end), lab.targets(ids, end)
            both = isinstance(found, tuple | list) and len(found) == 2
            expect(both, "documents() does not return a pair", "(document, position)")
            told = f"{what}, {'each' if whole else 'not the last'} with its end"
            right, call = position_of(lengths).tolist(), (finished.documents, (ids, end))
            expect_numbers(f"{told}: document", found[0], document_of(lengths).tolist(), *call, 0)
            expect_numbers(f"{told}: position", found[1], right, *call, 1)
            behind = zip([*ids[1:].tolist(), IGNORE], [*right[1:], 0])
            right = [i if place else IGNORE for i, place in behind]
            expect_numbers(f"{told}: targets", labels, right, finished.targets, (ids, end))
    return "1 to 40 documents, of one token or many, with and without a last end: as drawn"


def check_mask(lab, group, seed):
    chosen = random.Random(seed)
    for what, lengths in packings(seed).items():
        position, s = position_of(lengths), sum(lengths)
        for window in WINDOWS:
            told = f"{what}, window {window}"
            mask = pytorchs_mask(lengths, window)
            with unchanged(position=position):
                first = lab.first_seen(position, window)
            right, args = first_of(lengths, window), (position, window)
            expect_numbers(f"{told}: first", first, right.tolist(), finished.first_seen, args)
            q_at, k_at = (torch.tensor(chosen.sample(range(s), s // n)) for n in (2, 3))
            args = q_at, k_at, right
            with unchanged(q_at=q_at, k_at=k_at, first=right):
                found = lab.visible(*args)
            expect_visible(told, found, mask[q_at][:, k_at], args)
    return "with and without windows: what PyTorch's create_mask and a block-diagonal mask say"


def check_work(lab, group, seed):
    for what, lengths in packings(seed).items():
        for world in 4, 5, 2, 1:
            for where, held in placements(lengths, world, seed).items():
                for window in WINDOWS:
                    mask, first = mask_of(lengths, window), first_of(lengths, window)
                    with unchanged(held=held, first=first):
                        found = lab.work(held, first)
                    right = [int(mask[at].sum()) for at in held]
                    told = f"{what} {where} on {world} ranks, window {window}: work"
                    expect_numbers(told, found, right, finished.work, (held, first))
    return "1 to 5 ranks, four placements, with and without windows: as counted in the mask"


def check_by_document(lab, group, seed):
    cases = packings(seed) | {"one token": [1], "two documents": [23, 11]}
    for what, lengths in cases.items():
        for world in 3, 4, 8, 2, 1:
            position = position_of(lengths)
            with unchanged(position=position):
                found = lab.by_document(position, world)
            told, right = f"{what} on {world} ranks", zigzag(lengths, world)
            expect_held(told, found, right, finished.by_document, (position, world))
    for world in 1, 2, 3:
        whose = expect_pytorchs(lab, world)
    return f"1 to 8 ranks: zigzag in each document, at most a token apart; {whose}"


def check_by_work(lab, group, seed):
    cases = packings(seed) | {"a long document and many of one token": [12] + 36 * [1]}
    for what, lengths in cases.items():
        for world, size in (4, 2), (3, 4), (2, 3), (1, 4), (4, 7):
            for window in None, 3:
                first = first_of(lengths, window)
                told = f"{what} on {world} ranks, window {window}, blocks of {size}"
                args = first, world, size
                with unchanged(first=first):
                    found = tried(told, "a rank has room for ceil(blocks / P)", lab.by_work, *args)
                right = heaviest_first(lengths, window, world, size)
                expect_held(told, found, right, finished.by_work, args)
    return "1 to 4 ranks, the last block shorter: dealt as from the mask, block by block"


def check_tiles(lab, group, seed):
    for what, lengths in packings(seed).items():
        for where, held in placements(lengths, 3, seed).items():
            for tile, window in (1, None), (1, 3), (4, None), (16, 3):
                lab.TILE, first, mask = tile, first_of(lengths, window), mask_of(lengths, window)
                for q_at, k_at in (pair for q in held for pair in ((q, k) for k in held)):
                    told = f"{what} {where}, TILE {tile}, window {window}: tiles of queries "
                    told += f"{short(q_at.tolist())} and keys {short(k_at.tolist())}"
                    args = q_at, k_at, first
                    hint = "where the queries see none of the keys, nothing is yielded"
                    with unchanged(q_at=q_at, k_at=k_at, first=first):
                        found = tried(told, hint, lambda args=args: [*lab.tiles(*args)])
                    expect_tiles(told, found, mask[q_at][:, k_at], tile, args)
    return "four placements: the fewest keys; with a tile of one query just the pairs of the mask"


def check_travels(lab, group, seed):
    for what, lengths in packings(seed).items():
        for P in 4, 3, 2, 1:
            for where, held in placements(lengths, P, seed).items():
                for window in None, 3:
                    first, mask = first_of(lengths, window), mask_of(lengths, window)
                    for source in range(P):
                        told = f"{what} {where} on {P} ranks, window {window}: of rank {source} "
                        with unchanged(held=held, first=first):
                            found = [lab.travels(held, source, t, first) for t in range(P + 1)]
                        expect_travels(told, found, held, source, mask, first)
    return "1 to 4 ranks, four placements, windows: no key goes further than to its last query"


def check_ring_forward(lab, world, seed):
    hint = "send what travels() in the step after, receive what the previous rank sends on"
    worst, (events, lengths) = 0, watch(lab, 1, hint)
    for told, group, held, case in ring_cases(seed):
        own, rank, first = held[group.rank()], group.rank(), case.first
        q, k, v = case.q[:, :, own], case.k[:, own], case.v[:, own]
        events.clear()
        lengths[:] = lengths_of(case, held, rank, True)
        hint = "keys and the numbers of their tokens belong together: kv and travels() of one step"
        call = lab.ring_forward, q, k, v, held, first, group
        with unchanged(q=q, k=k, v=v, held=held, first=first), Traffic() as traffic:
            found = tried(told, hint, *call)
        triple = isinstance(found, tuple) and len(found) == 3
        expect(triple, f"{told}: ring_forward() does not return three", "(out, lse, kept)")
        by = "the others' keys come by pass_on(), and what that returns waits for them"
        expect_all(told, events, lengths, by)
        out, lse, kept = found
        hint = "merge() the part of every step, of its keys and their tokens' numbers"
        call = close, f"{told}: out", out, case.out[:, :, own], None, hint
        worst = max(worst, agreed(group, *call))
        scores = (q @ case.k[:, None].mT).masked_fill(~case.mask[own], -torch.inf)
        close(f"{told}: lse", lse, scores.logsumexp(-1), None, "merge() gives both")
        steps = [finished.travels(held, (rank - t) % len(held), t, first) for t in range(len(held))]
        listed = isinstance(kept, list | tuple) and len(kept) == len(steps)
        expect(listed, f"{told}: kept is not a list of {len(held)}", "k and v of every step")
        for step, (at, mine) in enumerate(zip(steps, kept)):
            right = torch.stack([case.k[:, at], case.v[:, at]])
            close(f"{told}: kept[{step}]", mine, right, None, "k and v of this step, stacked")
        expect_sent(told, traffic, case, held, rank, 1)
        busy = [case.mask[own][:, at].any() for at in steps]
        expect_overlap(told, events, case, held, rank, busy)
    return f"1 to 4 ranks, four placements, a window: off by {worst:.0e}; no key too many is sent"


def check_ring_backward(lab, world, seed):
    hint = "from the last step on: back goes what had come, and what went comes"
    worst, (events, lengths) = 0, watch(lab, -1, hint)
    for told, group, held, case in ring_cases(seed):
        own, first = held[group.rank()], case.first
        q, k, v, dout = case.q[:, :, own], case.k[:, own], case.v[:, own], case.dout[:, :, own]
        out, lse, kept = finished.ring_forward(q, k, v, held, first, group)
        delta = (dout * out).sum(-1)
        mine = finished.attend_backward(q, k, v, dout, lse, delta, own, own, first)
        hint = "of each step attend_backward()'s dk, dv, and what comes back for keys that went on"
        lengths[:] = lengths_of(case, held, group.rank(), False)
        events.clear()
        call = lab.ring_backward, q, kept, out, lse, dout, held, first, group
        given = {"q": q, "kept": kept, "out": out, "lse": lse, "dout": dout, "held": held}
        with unchanged(**given, first=first), Traffic() as traffic:
            found = tried(told, hint, *call)
        triple = isinstance(found, tuple | list) and len(found) == 3
        expect(triple, f"{told}: ring_backward() does not return three", "(dq, dk, dv)")
        order = "from the last step on: back go gradients of what came, what went is waited for"
        expect_all(told, events, lengths, order)
        right = case.dq[:, :, own], case.dk[:, own], case.dv[:, own]
        only = "the own queries' part alone: add what the next rank gives back"
        hints = [{"dq of the own keys alone: add what every step gives": mine[0]}]
        hints += [{only: part} for part in mine[1:]]
        for name, one, other, known in zip(("dq", "dk", "dv"), found, right, hints):
            call = close, f"{told}: {name}", one, other, known, hint
            worst = max(worst, agreed(group, *call))
        expect_sent(told, traffic, case, held, group.rank(), 0)
    return f"1 to 4 ranks, four placements, a window: dq, dk, dv off by {worst:.0e}"


def check_ulysses(lab, world, seed):
    worst = 0
    for told, group, held, case in ring_cases(seed):
        rank, P, own = group.rank(), group.size(), held[group.rank()]
        kv, s, order = len(case.k), len(case.first), torch.cat(held)
        x, heads = drawn(seed + 3, kv, s, 2), slice(*split(kv, rank, P))
        hint = "from rank r come (own heads, tokens of r, c): heads by split(), tokens by held"
        mine = x[:, own]
        with unchanged(x=mine, held=held), Traffic() as traffic:
            found = tried(f"{told}: to_heads()", hint, lab.to_heads, mine, held, group)
        came = x[heads][:, order]
        hints = {"they come rank by rank: put the tokens in order": came}
        hints["a token goes to its number: by the inverse of torch.cat(held)"] = came[:, order]
        close(f"{told}: to_heads()", found, x[heads], hints, hint)
        expect_one(f"{told}: to_heads()", traffic, mine.nbytes)
        hint = "x[:, held[r]] go to rank r, heads first; as many heads come as split() gives each"
        mine = x[heads]
        with unchanged(x=mine, held=held), Traffic() as traffic:
            found = tried(f"{told}: to_tokens()", hint, lab.to_tokens, mine, kv, held, group)
        close(f"{told}: to_tokens()", found, x[:, own], None, hint)
        expect_one(f"{told}: to_tokens()", traffic, mine.nbytes)
        leaves = case.q[:, :, own], case.k[:, own], case.v[:, own]
        leaves = [leaf.clone().requires_grad_() for leaf in leaves]
        out = lab.ulysses_attention(*leaves, held, case.first, group)
        worst = max(worst, close(f"{told}: attention", out.detach(), case.out[:, :, own]))
        hint = "the backward needs AllToAll.apply, and no detach()"
        expect(out.requires_grad, f"{told}: attention has no gradient", hint)
        grads = gradients(out, case.dout[:, :, own], leaves)
        right = case.dq[:, :, own], case.dk[:, own], case.dv[:, own]
        for name, one, other in zip(("dq", "dk", "dv"), grads, right):
            worst = max(worst, close(f"{told}: {name}", one, other, None, hint))
    return f"1 to 4 ranks, 5 KV heads, any placement: attention and gradients off by {worst:.0e}"


def check_bytes(lab, world, seed):
    for told, group, held, case in ring_cases(seed):
        rank, own = group.rank(), held[group.rank()]
        kv, g, _, d = case.q.shape
        leaves = case.q[:, :, own], case.k[:, own], case.v[:, own]
        leaves = [leaf.clone().requires_grad_() for leaf in leaves]
        counted = []
        for way in finished.RingAttention.apply, finished.ulysses_attention:
            with Traffic() as traffic:
                way(*leaves, held, case.first, group).sum().backward()
            counted.append(traffic.bytes("send") + traffic.bytes("all_to_all"))
        for itemsize in 8, 2:
            args = held, case.first, rank, kv, g, d, itemsize
            with unchanged(held=held, first=case.first):
                found = lab.message_bytes(*args)
            pair = isinstance(found, tuple | list) and len(found) == 2
            expect(pair, f"{told}: message_bytes() returns {found}", "(ring, Ulysses)")
            for part, way in enumerate(("the ring", "Ulysses")):
                right = counted[part] * itemsize // 8
                if found[part] != right:
                    hint = usual_hint(MISTAKES, finished.message_bytes, args, found[part], part)
                    problem = f"{found[part]} bytes of {way}, not {right}"
                    raise Wrong(f"{told}, {itemsize} bytes a number: {problem}", hint)
    return "1 to 4 ranks, four placements, a window: both as counted, to the byte"


def check_loss(lab, world, seed):
    worst, ways = 0, {"ring": lab.RingAttention.apply, "Ulysses": lab.ulysses_attention}
    for group, rank, P in members(groups_of_all_sizes()):
        few = {"no target at all": [1] * 12, "targets of one rank": [1] * 9 + [3]}
        for what, lengths in (packings(seed) | few).items():
            labels = finished.targets(packed_ids(lengths, seed), END)
            for where, held in placements(lengths, P, seed).items():
                expect_loss(lab, f"{what} {where} on {P} ranks", labels, held[rank], group, seed)
        lengths = packings(seed)["documents of many lengths"]
        for i, (family, way) in enumerate(zip(FAMILIES, ("ring", "Ulysses", "ring"))):
            where, held = [*placements(lengths, P, seed).items()][(i + P) % 4]
            told = f"{family} {where} on {P} ranks, {way}"
            case = family, ways[way], lengths, held, group, seed
            worst = max(worst, expect_model(lab, told, *case))
    return f"summands, gradients; whole models on 1 to 4 ranks, every gradient off by {worst:.0e}"


CHECKS = {
    "documents": (check_documents, 1),
    "mask": (check_mask, 1),
    "work": (check_work, 1),
    "by_document": (check_by_document, 1),
    "by_work": (check_by_work, 1),
    "tiles": (check_tiles, 1),
    "travels": (check_travels, 1),
    "ring_forward": (check_ring_forward, 4),
    "ring_backward": (check_ring_backward, 4),
    "ulysses": (check_ulysses, 4),
    "bytes": (check_bytes, 4),
    "loss": (check_loss, 4),
}


# Bugs for --inject-bug: the checks have to catch every one


def dropped_document_mask(lab):
    """The mask of documents is dropped: every query sees all that lies before it."""
    right = lab.first_seen
    lab.first_seen = lambda position, window: right(torch.arange(len(position)), window)


def local_documents(lab):
    """Each rank takes its own tokens for the whole sequence: a document begins with its first."""
    right = lab.ring_forward

    def ring_forward(q, k, v, held, first, group):
        first = first.clone()
        for at in held:
            first[at] = first[at].clamp(min=at[0])
        return right(q, k, v, held, first, group)

    lab.ring_forward = ring_forward


def everything_travels(lab):
    """All keys go round the whole ring: results are right, and bytes grow with the length."""
    lab.travels = lambda held, source, step, first: held[source][: len(first) * (step < len(held))]


BUGS = [dropped_document_mask, local_documents, everything_travels]
