"""Packed documents, their masks and where their tokens are placed: for lab 14.

The mask is put together document by document, as a block-diagonal matrix; so it shares nothing with
the lab's rule, which is about single tokens.
"""

import random

import torch
import torch.distributed as dist
from harness import LABS, Wrong, expect, load
from torch.nn.attention.flex_attention import create_mask

finished = load(LABS / "lab14_documents.py")  # not the learner's
IGNORE, END, VOCAB = finished.IGNORE, 7, 31


# ---- Documents and their mask --------------------------------------------------------------------


def packings(seed):
    """{what: lengths of documents}, in another order for each seed."""
    chosen = random.Random(seed)
    mixed = [1, 1, 2, 3, 5, 8, 19]  # 19: more than a rank's share of the 39
    chosen.shuffle(mixed)
    return {
        "one document": [29],
        "documents of many lengths": mixed,
        "40 documents": [chosen.randint(1, 4) for _ in range(40)],
        "documents that end where ranks end": [9, 3, 6, 6, 3, 9],  # 36 tokens, 2, 3, 4 ranks
    }


def packed_ids(lengths, seed, whole=True, end=END):
    """ids (s,) of documents that end with `end`; not whole: the last one lacks it."""
    numbers = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB - 1, (sum(lengths),), generator=numbers)
    ids += ids >= end  # any id but the end's
    ends = torch.tensor(lengths).cumsum(0) - 1
    ids[ends if whole else ends[:-1]] = end
    return ids


def mask_of(lengths, window):
    """(s, s) booleans: whether a query sees a key, of the whole packed sequence."""
    blocks = [torch.ones(n, n, dtype=torch.bool).tril() for n in lengths]
    if window is not None:
        blocks = [block.triu(1 - window) for block in blocks]
    return torch.block_diag(*blocks).bool()


def pytorchs_mask(lengths, window):
    """The same by PyTorch's flex_attention."""
    document = document_of(lengths)

    def seen(b, h, q, k):
        near = True if window is None else q - k < window
        return (k <= q) & (document[k] == document[q]) & near

    s = len(document)
    return create_mask(seen, 1, 1, s, s, device="cpu")[0, 0]


def position_of(lengths):
    """(s,): each token's place in its document."""
    return torch.cat([torch.arange(n) for n in lengths])


def document_of(lengths):
    """(s,): the number of each token's document."""
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


def first_of(lengths, window):
    """(s,): the first key that each query sees, read off the mask."""
    return mask_of(lengths, window).int().argmax(1)


def placements(lengths, world, seed):
    """{what: held}: the lab's three, and tokens dealt at random."""
    chosen, first = random.Random(seed), first_of(lengths, None)
    tokens = [*range(sum(lengths))]
    chosen.shuffle(tokens)
    return {
        "in order": finished.in_order(len(first), world),
        "by document": finished.by_document(position_of(lengths), world),
        "by work": finished.by_work(first, world, 3),
        "at random": [torch.tensor(sorted(tokens[rank::world])) for rank in range(world)],
    }


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


def heaviest_first(lengths, window, world, size, room=None, order="most"):
    """by_work()'s answer from the mask, block by block."""
    s, pairs = sum(lengths), mask_of(lengths, window).sum(1).tolist()
    blocks = [range(start, min(start + size, s)) for start in range(0, s, size)]
    cost = [sum(pairs[i] for i in block) for block in blocks]
    held, total, taken = [[] for _ in range(world)], [0] * world, [0] * world
    room = room or -(-len(blocks) // world)
    keys = {"most": lambda b: (-cost[b], b), "least": lambda b: (cost[b], b)}
    keys |= {"last": lambda b: (-cost[b], -b), "in order": int}
    for b in sorted(range(len(blocks)), key=keys[order]):
        rank = min((total[r], r) for r in range(world) if taken[r] < room)[1]
        held[rank] += blocks[b]
        total[rank] += cost[b]
        taken[rank] += 1
    return [sorted(tokens) for tokens in held]


# ---- What the checks have in common --------------------------------------------------------------


def numbers_of(what, found):
    """A tensor, or a list of numbers, as a list of Python's; raises Wrong."""
    expect(found is not None, f"{what} is None", "return it")
    try:
        return found.tolist() if isinstance(found, torch.Tensor) else [int(x) for x in found]
    except (TypeError, ValueError) as problem:
        raise Wrong(f"{what} is {type(found).__name__}, not numbers") from problem


def expect_numbers(what, found, right, hints=None, otherwise=""):
    """Raise Wrong unless found has the numbers of the list `right`.

    hints {text: a known wrong list}; otherwise: the hint where it is none of these.
    """
    found = numbers_of(what, found)
    known = [text for text, wrong in (hints or {}).items() if found == wrong]
    differs = f"{what}{difference(found, right)}"
    expect(found == right, differs, known[0] if known else otherwise)


def difference(found, right):
    """Where two lists of numbers differ, in words; short ones are shown."""
    if len(found) == len(right) > 12:
        i = next((i for i, pair in enumerate(zip(found, right)) if pair[0] != pair[1]), 0)
        return f"[{i}] is {found[i]}, not {right[i]}"
    return f" is {short(found)}, not {short(right)}"


def short(numbers):
    """A list as text; of a long one the first numbers."""
    if len(numbers) <= 12:
        return str(numbers)
    return f"[{', '.join(map(str, numbers[:12]))}, ...] ({len(numbers)} of them)"


def expect_held(what, found, right, hints=None, otherwise=""):
    """The same of one tensor for each rank."""
    fine = isinstance(found, list | tuple) and len(found) == len(right)
    expect(fine, f"{what} is not a list of {len(right)}, one for each rank", "a tensor for each")
    found = [numbers_of(f"{what}[{rank}]", at) for rank, at in enumerate(found)]
    known = [text for text, wrong in (hints or {}).items() if found == wrong]
    for rank, (mine, wanted) in enumerate(zip(found, right)):
        differs = f"{what}: held[{rank}]{difference(mine, wanted)}"
        expect(mine == wanted, differs, known[0] if known else otherwise)


class Unchanged:
    """Raises Wrong on leaving where one of these tensors, or lists of them, has been changed."""

    def __init__(self, **given):
        self.given = given
        self.before = {name: self.copy(value) for name, value in given.items()}

    def copy(self, value):
        if isinstance(value, torch.Tensor):
            return value.detach().clone()
        return [*map(self.copy, value)]

    def same(self, mine, before):
        if isinstance(mine, torch.Tensor):
            return torch.equal(mine, before)
        return len(mine) == len(before) and all(map(self.same, mine, before))

    def __enter__(self):
        return self

    def __exit__(self, kind, *problem):
        if kind is None:
            for name, before in self.before.items():
                same = self.same(self.given[name], before)
                expect(same, f"{name}, an argument, is changed", "work on a new tensor or list")


def groups_of_all_sizes():
    """Groups of 1 to 4 of four ranks, whose ranks have other numbers in them than in the world."""
    return [dist.new_group(ranks) for ranks in ([1, 3], [0, 2, 3], [0, 1, 2, 3], [2])]


def expect_pytorchs(lab, world):
    """The same assignment as PyTorch's balancer's, of one document: it wants multiples of 2P."""
    try:
        from torch.distributed.tensor.experimental._context_parallel import _load_balancer as theirs

        balancer = theirs._PerDocumentHeadTailLoadBalancer
    except (ImportError, AttributeError):  # it is private: another version may lack it
        return "PyTorch's is not in this version"
    for n in 2 * world, 6 * world, 16 * world:
        indices = balancer([[n]], world, "cpu")._generate_indices()[0]
        right = [sorted(part.tolist()) for part in indices.chunk(world)]
        expect_held(f"a document of {n} tokens", lab.by_document(torch.arange(n), world), right)
    return "PyTorch's"


def expect_tiles(told, found, mask, tile):
    """Raise Wrong unless these slices are the shortest for the mask (n, m) of queries and keys."""
    n, m = mask.shape
    right, all_keys, to_last, empty = [], [], [], []
    for start in range(0, n, tile):
        rows, seen = (start, min(start + tile, n)), mask[start : start + tile].any(0).nonzero()
        if len(seen):
            right.append((rows, (int(seen[0]), int(seen[-1]) + 1)))
            all_keys.append((rows, (0, m)))
            to_last.append((rows, (0, int(seen[-1]) + 1)))
        empty.append((rows, (0, m)))
    slices = [tuple(map(type, pair)) == (slice, slice) for pair in found]
    expect(all(slices), f"{told} are {found}", "yield two slices: rows, keys")
    mine = [(rows.indices(n)[:2], keys.indices(m)[:2]) for rows, keys in found]
    hint = "the first and the last key that one of these queries sees, and what is between"
    if mine == empty and mine != right:
        hint = "only keys that one of these queries sees; where there are none, no slices"
    elif mine == to_last:
        hint = "not the keys before the first that one of these queries sees"
    elif [rows for rows, _ in mine] == [rows for rows, _ in empty] != [rows for rows, _ in right]:
        hint = "queries that see none of the keys: nothing is yielded"
    i = next((i for i, pair in enumerate(zip(mine, right)) if pair[0] != pair[1]), len(right))
    named = f"(rows, keys) number {i} of {len(mine)} is {mine[i : i + 1]}, not {right[i : i + 1]}"
    expect(mine == right, f"{told}: {named}", hint)


def expect_travels(told, found, held, source, mask):
    """Raise Wrong unless found[step] are the keys that a rank sees from this step on."""
    keys, P = held[source], len(held)

    def seen(ranks):
        queries = torch.cat([keys[:0], *(held[rank % P] for rank in ranks)])
        return keys[mask[queries][:, keys].any(0)].tolist()

    for step, mine in enumerate(found):
        right = seen(range(source + step, source + P)) if step else keys.tolist()
        back = seen(source - other for other in range(step, P))
        hints = {"they go on to the next rank: source + step, ...": back}
        hints["only keys that a query sees, there or further on"] = keys.tolist()
        hints["also those that only a rank further on sees"] = seen([source + step])
        places = [keys.tolist().index(token) for token in right]
        hints["the tokens' numbers, not their places in held"] = places
        hint = "step 0: all that it holds" if step == 0 else "none" if step == P else ""
        expect_numbers(f"{told}travels in step {step}", mine, right, hints, hint)
