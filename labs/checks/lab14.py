"""Lab 14's checks, each of which runs on every rank, and the bugs that they have to catch.

In float64, so that nothing but a mistake is off by more than EXACT. What is right comes from masks
that are put together document by document, from PyTorch's own attention, mask and load balancer,
and from Hugging Face's models, which see one document at a time. See documents.py.
"""

import random

import torch
import torch.distributed as dist
from checks.compare import close, drawn, tried
from checks.documents import (
    END,
    IGNORE,
    Unchanged,
    document_of,
    expect_held,
    expect_numbers,
    expect_pytorchs,
    expect_tiles,
    expect_travels,
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
from checks.experts import gradients, members
from checks.packed import (
    FAMILIES,
    agreed,
    dense,
    expect_loss,
    expect_model,
    expect_one,
    expect_overlap,
    expect_sent,
    moved,
    ring_cases,
    watch,
)
from harness import Traffic, expect

split = finished.split
WINDOWS = 3, None, 1, 50


def check_documents(lab, group, seed):
    for what, lengths in packings(seed).items():
        for whole, end in (True, END), (False, 0):
            ids = packed_ids(lengths, seed, whole, end)
            with Unchanged(ids=ids):
                found, labels = lab.documents(ids, end), lab.targets(ids, end)
            both = isinstance(found, tuple) and len(found) == 2
            expect(both, "documents() does not return a pair", "(document, position)")
            told = f"{what}, {'each' if whole else 'not the last'} with its end"
            s, right = len(ids), document_of(lengths).tolist()
            late = [n + int(i == end) for n, i in zip(right, ids.tolist())]
            hints = {"an end belongs to the document that it ends": late}
            hint = "how many ends lie before the token?"
            expect_numbers(f"{told}: document", found[0], right, hints, hint)
            right = position_of(lengths).tolist()
            hints = {"positions begin anew in each document": [*range(s)]}
            hints["the first token of a document has position 0"] = [p + 1 for p in right]
            hint = "a token's number less that of the first of its document"
            expect_numbers(f"{told}: position", found[1], right, hints, hint)
            shifted = [*ids[1:].tolist(), IGNORE]
            ends = position_of(lengths).tolist()[1:] + [0]
            right = [i if p else IGNORE for i, p in zip(shifted, ends)]
            hints = {"a document's last token has no target: next comes another one's": shifted}
            hints["the target is the token behind it, not itself"] = [
                IGNORE if i == end else i for i in ids.tolist()
            ]
            hints["the last token of all has no target either"] = [*right[:-1], int(ids[0])]
            expect_numbers(f"{told}: targets", labels, right, hints)
    return "1 to 40 documents, of one token or many, with and without a last end: as drawn"


def check_mask(lab, group, seed):
    chosen = random.Random(seed)
    for what, lengths in packings(seed).items():
        position, s = position_of(lengths), sum(lengths)
        for window in WINDOWS:
            told, most = f"{what}, window {window}", window or s
            mask = pytorchs_mask(lengths, window)
            with Unchanged(position=position):
                first = lab.first_seen(position, window)
            crossing = [max(0, i - most + 1) for i in range(s)]
            hints = {"no query sees another document: no further back than its start": crossing}
            no_window = [i - p for i, p in enumerate(position.tolist())]
            hints["a window of w: w keys, the own one included"] = no_window
            wide = [max(i - most, start) for i, start in enumerate(no_window)]
            hints["a window of w has w keys with the own one: w - 1 before it"] = wide
            expect_numbers(f"{told}: first", first, first_of(lengths, window).tolist(), hints)
            q_at, k_at = (torch.tensor(chosen.sample(range(s), s // n)) for n in (2, 3))
            first = first_of(lengths, window)
            with Unchanged(q_at=q_at, k_at=k_at, first=first):
                found = lab.visible(q_at, k_at, first)
            right = mask[q_at][:, k_at]
            hints = {"not the keys that come after the query": k_at >= first[q_at, None]}
            hints["not the keys before the first one that it sees"] = k_at <= q_at[:, None]
            hints["a query sees its own key, too"] = right & (k_at < q_at[:, None])
            hints["nor is the first key left out"] = right & (k_at > first[q_at, None])
            hints = {text: wrong.double() for text, wrong in hints.items()}
            hint = "q_at and k_at are the tokens' numbers: compare these, not places in the lists"
            found = found.double() if isinstance(found, torch.Tensor) else found
            close(f"{told}: visible", found, right.double(), hints, hint)
    return "with and without windows: what PyTorch's create_mask and a block-diagonal mask say"


def check_work(lab, group, seed):
    for what, lengths in packings(seed).items():
        for world in 1, 2, 4, 5:
            for where, held in placements(lengths, world, seed).items():
                for window in WINDOWS:
                    mask, first = mask_of(lengths, window), first_of(lengths, window)
                    with Unchanged(held=held, first=first):
                        found = lab.work(held, first)
                    right = [int(mask[at].sum()) for at in held]
                    others = [pairs - len(at) for pairs, at in zip(right, held)]
                    hints = {"a query sees its own key, too": others}
                    own = [int(mask[at][:, at].sum()) for at in held]
                    hints["the keys may be on any rank"] = own
                    every = [int((at + 1).sum()) for at in held]
                    hints["not the keys before first: they are another document's"] = every
                    told = f"{what} {where} on {world} ranks, window {window}: work"
                    expect_numbers(told, found, right, hints)
    return "1 to 5 ranks, four placements, with and without windows: as counted in the mask"


def check_by_document(lab, group, seed):
    cases = packings(seed) | {"one token": [1], "two documents": [23, 11]}
    for what, lengths in cases.items():
        for world in 1, 2, 3, 4, 8:
            position = position_of(lengths)
            with Unchanged(position=position):
                found = lab.by_document(position, world)
            told, right = f"{what} on {world} ranks", zigzag(lengths, world)
            hints = {"in every document, not in the whole": zigzag(lengths, world, whole=True)}
            anew = "what is left goes to the ranks in turn: go on where the last document stopped"
            hints[anew] = zigzag(lengths, world, anew=True)
            hint = "2P chunks of n // 2P tokens; rank r has chunks r and 2P - 1 - r, then the rest"
            expect_held(told, found, right, hints, hint)
    for world in 1, 2, 3:
        whose = expect_pytorchs(lab, world)
    return f"1 to 8 ranks: zigzag in each document, at most a token apart; {whose}"


def check_by_work(lab, group, seed):
    cases = packings(seed) | {"a long document and many of one token": [12] + 36 * [1]}
    for what, lengths in cases.items():
        for world, size in (1, 4), (2, 3), (3, 4), (4, 2), (4, 7):
            for window in None, 3:
                first = first_of(lengths, window)
                with Unchanged(first=first):
                    found = lab.by_work(first, world, size)
                case = lengths, window, world, size
                hints = {"a rank has room for ceil(blocks / P)": heaviest_first(*case, room=99)}
                for order, text in (
                    ("in order", "the block with the most pairs first"),
                    ("least", "the most pairs first, not the fewest"),
                    ("last", "of equals the lower number first"),
                ):
                    hints[text] = heaviest_first(*case, order=order)
                told = f"{what} on {world} ranks, window {window}, blocks of {size}"
                hint = "each block to the rank with the fewest pairs so far, of those with room"
                expect_held(told, found, heaviest_first(*case), hints, hint)
    return "1 to 4 ranks, the last block shorter: dealt as from the mask, block by block"


def check_tiles(lab, group, seed):
    for what, lengths in packings(seed).items():
        for where, held in placements(lengths, 3, seed).items():
            for tile, window in (1, None), (1, 3), (4, None), (16, 3):
                lab.TILE, first, mask = tile, first_of(lengths, window), mask_of(lengths, window)
                for q_at, k_at in (pair for q in held for pair in ((q, k) for k in held)):
                    with Unchanged(q_at=q_at, k_at=k_at, first=first):
                        found = [*lab.tiles(q_at, k_at, first)]
                    told = f"{what} {where}, TILE {tile}, window {window}: tiles of queries "
                    told += f"{short(q_at.tolist())} and keys {short(k_at.tolist())}"
                    expect_tiles(told, found, mask[q_at][:, k_at], tile)
    return "four placements: the fewest keys; with a tile of one query just the pairs of the mask"


def check_travels(lab, group, seed):
    for what, lengths in packings(seed).items():
        for P in 1, 2, 3, 4:
            for where, held in placements(lengths, P, seed).items():
                for window in None, 3:
                    first, mask = first_of(lengths, window), mask_of(lengths, window)
                    for source in range(P):
                        told = f"{what} {where} on {P} ranks, window {window}: of rank {source} "
                        with Unchanged(held=held, first=first):
                            found = [lab.travels(held, source, t, first) for t in range(P + 1)]
                        expect_travels(told, found, held, source, mask)
    return "1 to 4 ranks, four placements, windows: no key goes further than to its last query"


def check_ring_forward(lab, world, seed):
    worst, events = 0, watch(lab)
    for told, group, held, case in ring_cases(seed):
        own, rank, first = held[group.rank()], group.rank(), case.first
        q, k, v = case.q[:, :, own], case.k[:, own], case.v[:, own]
        events.clear()
        hint = "keys and the numbers of their tokens belong together: kv and travels() of one step"
        call = lab.ring_forward, q, k, v, held, first, group
        with Unchanged(q=q, k=k, v=v, held=held, first=first), Traffic() as traffic:
            found = tried(told, hint, *call)
        triple = isinstance(found, tuple) and len(found) == 3
        expect(triple, f"{told}: ring_forward() does not return three", "(out, lse, kept)")
        out, lse, kept = found
        alone = dense(q, k, v, case.mask[own][:, own])
        hints = {"these are this rank's own keys only: the others' come by pass_on()": alone}
        hint = "merge() the part of every step, of its keys and their tokens' numbers"
        call = close, f"{told}: out", out, case.out[:, :, own], hints, hint
        worst = max(worst, agreed(group, *call))
        scores = (q @ case.k[:, None].mT).masked_fill(~case.mask[own], -torch.inf)
        close(f"{told}: lse", lse, scores.logsumexp(-1), None, "merge() gives both")
        steps = [finished.travels(held, (rank - t) % len(held), t, first) for t in range(len(held))]
        listed = isinstance(kept, list | tuple) and len(kept) == len(steps)
        expect(listed, f"{told}: kept is not a list of {len(held)}", "k and v of every step")
        hint = "k and v as they were used in this step, stacked"
        for at, mine in zip(steps, kept):
            close(f"{told}: kept", mine, torch.stack([case.k, case.v])[:, :, at], None, hint)
        expect_sent(told, traffic, case, held, rank, 1)
        busy = [case.mask[own][:, at].any() for at in steps]
        expect_overlap(told, events, case, held, rank, busy)
    return f"1 to 4 ranks, four placements, a window: off by {worst:.0e}; no key too many is sent"


def check_ring_backward(lab, world, seed):
    worst = 0
    for told, group, held, case in ring_cases(seed):
        own, first = held[group.rank()], case.first
        q, k, v, dout = case.q[:, :, own], case.k[:, own], case.v[:, own], case.dout[:, :, own]
        out, lse, kept = finished.ring_forward(q, k, v, held, first, group)
        delta = (dout * out).sum(-1)
        mine = finished.attend_backward(q, k, v, dout, lse, delta, own, own, first)
        hint = "what comes back belongs to the keys that went on: travels() of the step after"
        call = lab.ring_backward, q, kept, out, lse, dout, held, first, group
        given = {"q": q, "kept": kept, "out": out, "lse": lse, "dout": dout, "held": held}
        with Unchanged(**given, first=first), Traffic() as traffic:
            found = tried(told, hint, *call)
        triple = isinstance(found, tuple | list) and len(found) == 3
        expect(triple, f"{told}: ring_backward() does not return three", "(dq, dk, dv)")
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
        hint = "of every rank's tokens own heads come; a head of a token is a row of c numbers"
        mine = x[:, own]
        with Unchanged(x=mine, held=held), Traffic() as traffic:
            found = tried(f"{told}: to_heads()", hint, lab.to_heads, mine, held, group)
        hints = {"they come rank by rank: put the tokens in order": x[heads][:, order]}
        close(f"{told}: to_heads()", found, x[heads], hints, hint)
        expect_one(f"{told}: to_heads()", traffic, mine.nbytes)
        hint = "each rank gets its own tokens of these heads, heads in the order of the ranks"
        mine = x[heads]
        with Unchanged(x=mine, held=held), Traffic() as traffic:
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
        rank, P, own = group.rank(), group.size(), held[group.rank()]
        kv, g, _, d = case.q.shape
        leaves = case.q[:, :, own], case.k[:, own], case.v[:, own]
        leaves = [leaf.clone().requires_grad_() for leaf in leaves]
        counted = []
        for way in finished.RingAttention.apply, finished.ulysses_attention:
            with Traffic() as traffic:
                way(*leaves, held, case.first, group).sum().backward()
            counted.append(traffic.bytes("send") + traffic.bytes("all_to_all"))
        with Unchanged(held=held, first=case.first):
            found = lab.message_bytes(held, case.first, rank, kv, g, d, 8)
        pair = isinstance(found, tuple) and len(found) == 2
        expect(pair, f"{told}: message_bytes() returns {found}", "(ring, Ulysses)")
        row, going = 2 * kv * d * 8, sum(moved(case, held, rank, t) for t in range(1, P))
        everyone = [None] * P  # of all ranks together: one alone may send nothing
        dist.all_gather_object(everyone, (found[0], counted[0], going * row), group=group)
        mine, right, forward = map(sum, zip(*everyone))
        hints = {2 * (P - 1) * len(case.first) * row: "of a block only what travels"}
        hints |= {forward: "in the backward the gradients go back, too"}
        hints |= {right: "back goes what had come, and that is not what went on"}
        problem = f"{told}: {found[0]} bytes of the ring, not {counted[0]}"
        expect(found[0] == counted[0], problem, hints.get(mine, "k and v, of kv heads"))
        start, end = split(kv, rank, P)
        there, back = kv * len(own) * d * 8, (end - start) * len(case.first) * d * 8
        hints = {counted[1] // 2: "the backward sends as much as the forward"}
        hints |= {there * (g + 2) + back * g: "the backward goes both ways again"}
        hints |= {there * (2 * g + 2): "the way back is of own heads of all tokens"}
        hints |= {2 * (there * (g + 2) + back * (g + 2)): "back goes the output: g heads of d"}
        problem = f"{told}: {found[1]} bytes of Ulysses, not {counted[1]}"
        hint = "a row to the heads: g + 2 heads of d; back: g; the backward the other way round"
        expect(found[1] == counted[1], problem, hints.get(found[1], hint))
    return "1 to 4 ranks, four placements, a window: both as counted, to the byte"


def check_loss(lab, world, seed):
    worst, ways = 0, {"ring": lab.RingAttention.apply, "Ulysses": lab.ulysses_attention}
    for group, rank, P in members(groups_of_all_sizes()):
        for what, lengths in {**packings(seed), "no target at all": [1] * 12}.items():
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
