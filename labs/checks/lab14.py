"""Lab 14's checks, each of which runs on every rank, and the bugs that they have to catch.

In float64, so that nothing but a mistake is off by more than EXACT. What is right comes from masks
that are put together document by document, from PyTorch's own attention, mask and load balancer,
and from Hugging Face's models, which see one document at a time. See documents.py.
"""

import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from checks.documents import (
    END,
    FAMILIES,
    IGNORE,
    Unchanged,
    attention_case,
    dense,
    document_of,
    expect_held,
    expect_model,
    expect_numbers,
    finished,
    first_of,
    groups_of_all_sizes,
    mask_of,
    packed_ids,
    packings,
    placements,
    position_of,
)
from checks.experts import drawn, gradients, members, same
from checks.zero import attempt
from harness import Traffic, expect
from torch.nn.attention.flex_attention import create_mask

split = finished.split
WINDOWS = None, 1, 3, 50


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
        position, document = position_of(lengths), document_of(lengths)
        s = len(position)
        for window in WINDOWS:
            told, most = f"{what}, window {window}", window or s

            def seen(b, h, q, k):
                return (k <= q) & (document[k] == document[q]) & (q - k < most)

            mask = mask_of(lengths, window)
            flex = create_mask(seen, 1, 1, s, s, device="cpu")[0, 0]
            expect(torch.equal(flex, mask), f"{told}: PyTorch has another mask than this check")
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
            same(f"{told}: visible", found, right.double(), hints, hint)
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
                    hints = {"a query sees its own key, too": [mask[at].sum() - len(at) for at in held]}
                    own = [int(mask[at][:, at].sum()) for at in held]
                    hints["the keys may be on any rank"] = own
                    every = [int((at + 1).sum()) for at in held]
                    hints["not the keys before first: they are another document's"] = every
                    told = f"{what} {where} on {world} ranks, window {window}: work"
                    expect_numbers(told, found, right, hints)
    return "1 to 5 ranks, four placements, with and without windows: as counted in the mask"


def zigzag(lengths, world, anew=False, whole=False):
    """by_document()'s answer token by token; anew: every document's rest begins with rank 0."""
    held, turn, start = [[] for _ in range(world)], 0, 0
    for n in [sum(lengths)] if whole else lengths:
        size = n // (2 * world)
        turn = 0 if anew else turn
        for place in range(n):
            if place < 2 * world * size:
                rank = min(place // size, 2 * world - 1 - place // size)
            else:
                rank, turn = turn % world, turn + 1
            held[rank].append(start + place)
        start += n
    return held


def expect_pytorchs(lab, lengths, world):
    """The same assignment as PyTorch's balancer's, of one document: it wants multiples of 2P."""
    try:
        from torch.distributed.tensor.experimental._context_parallel import _load_balancer as theirs

        balancer = theirs._PerDocumentHeadTailLoadBalancer
    except (ImportError, AttributeError):  # it is private: another version may lack it
        return "PyTorch's is not in this version"
    for n in lengths:
        n *= 2 * world
        indices = balancer([[n]], world, "cpu")._generate_indices()[0]
        right = [sorted(part.tolist()) for part in indices.chunk(world)]
        expect_held(f"a document of {n} tokens", lab.by_document(torch.arange(n), world), right)
    return "PyTorch's"


def check_by_document(lab, group, seed):
    cases = packings(seed) | {"one token": [1], "two documents": [23, 11]}
    for what, lengths in cases.items():
        for world in 1, 2, 3, 4, 8:
            position = position_of(lengths)
            with Unchanged(position=position):
                found = lab.by_document(position, world)
            told, right = f"{what} on {world} ranks", zigzag(lengths, world)
            hints = {"in every document, not in the whole sequence": zigzag(lengths, world, whole=True)}
            anew = "what is left goes to the ranks in turn: go on where the last document stopped"
            hints[anew] = zigzag(lengths, world, anew=True)
            unsorted = "every rank's tokens in ascending order"
            listed = isinstance(found, list | tuple) and all(isinstance(x, torch.Tensor) for x in found)
            if listed and [sorted(x.tolist()) for x in found] == right:
                hints[unsorted] = [x.tolist() for x in found]
            hint = "2P chunks of n // 2P tokens; rank r has chunks r and 2P - 1 - r, then the rest"
            expect_held(told, found, right, hints, hint)
    whose = expect_pytorchs(lab, [1, 3], 2) and expect_pytorchs(lab, [2, 5], 3)
    return f"1 to 8 ranks: zigzag in each document, at most a token apart; as {whose}"


def heaviest_first(lengths, window, world, size, room=None, order=None):
    """by_work()'s answer from the mask, block by block."""
    s, pairs = sum(lengths), mask_of(lengths, window).sum(1).tolist()
    blocks = [range(start, min(start + size, s)) for start in range(0, s, size)]
    cost = [sum(pairs[i] for i in block) for block in blocks]
    held, total, taken = [[] for _ in range(world)], [0] * world, [0] * world
    room = room or -(-len(blocks) // world)
    for b in sorted(range(len(blocks)), key=order or (lambda b: (-cost[b], b))):
        rank = min((total[r], r) for r in range(world) if taken[r] < room)[1]
        held[rank] += blocks[b]
        total[rank] += cost[b]
        taken[rank] += 1
    return [sorted(tokens) for tokens in held]
