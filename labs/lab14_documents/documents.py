"""Packed documents, their masks and where their tokens are placed: for lab 14.

The mask is put together document by document, as a block-diagonal matrix; so it shares nothing with
the lab's rule, which is about single tokens.
"""

import random
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch.nn.attention.flex_attention import create_mask
from torch.utils._pytree import tree_map

from labs.kit.harness import Wrong, expect
from labs.kit.usual import usual_hint
from labs.lab14_documents import lesson as finished  # not the learner's

IGNORE, END, VOCAB = finished.IGNORE, 7, 31
MISTAKES = """
== documents
 - ends.long() ->  # an end belongs to the document that it ends
 - ends.long() ->  + 1 - ends.long()  # the first document has the number 0
ends.cumsum(0) - ends.long() -> (ends.roll(1) & ~ends).cumsum(0)  # E E: each ends one
torch.where(starts, index, 0).cummax(0).values -> 0  # positions begin anew in each document
return document, index - -> return document, index + 1 -  # a document's first position is 0
torch.where(starts -> torch.where(ends  # a document begins with the token behind an end, not at it
document: how many ends lie before the token; position: how many tokens of its document
== targets
.masked_fill(ids == end, IGNORE) ->  # a document's last token has no target: next comes another's
masked_fill(ids == end -> masked_fill(following == end  # an end is a target, and has none
following.masked_fill -> ids.masked_fill  # the target is the token behind it, not itself
following = torch.cat([ids[1:], -> following = torch.cat([ids[:1], ids[:-2],  # not before
ids.new_full((1,), IGNORE) -> ids[:1]  # the last token of all has no target either
the id of the token behind it; none has an end, nor the last token of all
== first_seen
window - 1 -> window  # a window of w has w keys with the own one: w - 1 before it
position if window is None else position.clamp(max=window - 1) -> position  # a window of w: w keys
position if -> torch.arange(len(position)) if  # no query sees another document
position.clamp -> torch.arange(len(position)).clamp  # no query sees another document
clamp(max -> clamp(min  # of the document's start and the window's the later one
return torch.arange(len(position)) - -> return position -  # its number in the packed sequence
return torch.arange(len(position)) - -> return  # the key's number, not how far back it is
the token's number less how many keys it sees before it, in its document and its window
== visible
(k_at <= q_at[:, None]) & ->  # not the keys that come after the query
 & (k_at >= first[q_at, None]) ->  # not the keys before the first one that it sees
k_at <= q_at -> k_at < q_at  # a query sees its own key, too
k_at >= first -> k_at > first  # nor is the first key left out
first[q_at, None] -> first[k_at]  # the first key is that of the query: first[q_at]
first[q_at, None] -> first[: len(q_at), None]  # compare numbers of tokens, not places in lists
(n, m): from first[q_at] to q_at, both included; the tokens' numbers, not places in the lists
== work
 + 1 ->  # a query sees its own key, too
at - first[at] + 1 -> at + 1  # not the keys before first: they are another document's
(at - first[at] + 1) -> visible(at, at, first)  # the keys may be on any rank
first[at] -> first[: len(at)]  # first of the tokens' numbers, not of their places in the list
(at - -> (torch.arange(len(at)) -  # the tokens' numbers, not their places in the list
.sum().item() -> .double().mean().item()  # the sum over the rank's queries
in held -> in in_order(len(first), len(held))  # rank r has the tokens held[r], in any placement
of each token of held[r] the keys from first to its own, whoever holds them
== by_document
[*starts, len(position)] -> [0, len(position)]  # in every document, not in the whole
[*starts, len(position)] -> starts  # the last document ends where the sequence does
held[turn % world] -> held[(token - end + left) % world]  # go on where the last document stopped
held[turn % world] -> held[-1]  # the tokens behind the chunks: one by one to the ranks in turn
held[turn % world] -> held[-1 - turn % world]  # the tokens behind the chunks go to ranks 0, 1, ...
min(chunk, 2 * world - 1 - chunk) -> chunk % world  # rank r has chunks r and 2P - 1 - r
min(chunk, 2 * world - 1 - chunk) -> chunk // 2  # rank r has chunks r and 2P - 1 - r
2 * world -> world  # 2P chunks of n // 2P tokens: each rank has two
2P chunks of n // 2P tokens; rank r has chunks r and 2P - 1 - r; then the rest, in turn
== by_work
total[rank] += pairs[block] -> total[rank] += 1  # the fewest pairs so far, not the fewest blocks
 if len(taken[r]) < room ->  # a rank has room for ceil(blocks / P)
-(-len(blocks) // world) -> len(blocks) // world + 1  # a rank has room for ceil(blocks / P)
key=pairs.__getitem__, reverse=True -> key=int  # the block with the most pairs first
, reverse=True ->  # the most pairs first, not the fewest
range(len(blocks)), key -> range(len(blocks) - 1, -1, -1), key  # of equals the lower number first
for r in range(world) -> for r in reversed(range(world))  # of equal ranks the lower number first
 + 1).sum -> ).sum  # a query sees its own key, too
(block - first[block] + 1) -> visible(block, block, first)  # keys may lie outside of the block
.split(size) -> .split(size)[: len(first) // size]  # the last block may be shorter, and counts too
rank = min( -> rank = max(  # to the rank with the fewest pairs so far
each block to the rank with the fewest pairs so far, of those with room for ceil(blocks / P)
== tiles
visible(q_at[rows] -> visible(q_at[rows][-1:]  # of all these queries, not of the last one
seen[-1] + 1) -> seen[-1])  # the end of a slice is not in it
slice(seen[0], -> slice(0,  # not the keys before the first that one of these queries sees
slice(seen[0], seen[-1] + 1) -> slice(0, len(k_at))  # only keys that one of these queries sees
slice(seen[0], seen[-1] + 1) -> slice(*k_at[[seen[0], seen[-1]]].tolist())  # places in k_at
any(0) -> all(0)  # a key that one of these queries sees is enough
.tolist() -> .tolist() or [0, -1]  # queries that see none of the keys: nothing is yielded
first).any -> first * 0 + first[q_at[rows][0]]).any  # keys that none sees may lie between theirs
these rows, and the places in k_at from the first to the last key that one of them sees
== travels
keys[needed] -> keys  # only keys that a query of ranks source + step to source + P - 1 sees
(source + other) -> (source - other)  # for ranks source + step, source + step + 1, ... alone
keys[needed] -> needed.nonzero()[:, 0]  # the tokens' numbers, not their places in held
range(step, P) -> range(step, step + 1)  # also those that only a rank further on sees
range(step, P) -> range(step + 1, P)  # also those that only the rank sees to which they come
needed |= -> needed =  # that any rank further on sees, not only the last
any(0) -> all(0)  # that one query sees is enough
held[source], -> held[(source + step) % len(held)],  # the keys that rank source holds
step 0: all that it holds; then what queries of ranks source + step to source + P - 1 see
== message_bytes
2 * kv * d -> 2 * kv * g * d  # k and v, of kv heads
in rank - step + 1, rank - step: -> in [rank - step + 1]:  # gradients of the keys that came go back
rank - step: -> rank - step + 1:  # back goes what had come, and that is not what went on
in rank - step + 1, -> in rank - step,  # forward goes what goes on to the next rank
len(travels(held, source % P, step, first)) -> len(held[source % P])  # of a block only what travels
range(1, P) -> range(P)  # keys of step 0 are at home: they are not sent
tokens * 2 * kv -> tokens * kv  # k and v, of kv heads
2 * kv * d -> 2 * kv  # a head has d numbers
(2 * g + 2) -> (g + 1)  # the backward sends as much as the forward
(2 * g + 2) -> (g + 2)  # q, k, v there, the output back, and in the backward the other way round
(2 * g + 2) -> (2 * g + 1)  # k and v beside g heads of q
(2 * g + 2) -> 2 * (g + 2)  # back goes the output: g heads of d
rows * (2 * g + 2) -> (rows * g + 2 * kv * len(held[rank]))  # the backward goes both ways again
 + (end - start) * len(first) ->  # the way back is of own heads of all tokens
(end - start) * len(first) -> kv * len(held[rank])  # the way back is of own heads of all tokens
(end - start) -> kv // P  # split() says how many heads a rank has
 * len(first) ->  * (len(first) - 2 * len(held[rank]))  # what stays on the rank counts, too
 * itemsize ->  * 4  # a number has `itemsize` bytes
 * itemsize ->  * 8  # a number has `itemsize` bytes
ring: k and v, of kv heads, there and their gradients back; Ulysses: g + 2 heads of d there, g back
"""


# ---- Documents and their mask --------------------------------------------------------------------


def packings(seed):
    """{what: lengths of documents}, in another order for each seed."""
    chosen = random.Random(seed)
    mixed = [1, 1, 2, 3, 5, 8, 19]  # 19: more than a rank's share of the 39
    chosen.shuffle(mixed)
    return {
        "documents of many lengths": mixed,  # first: here the usual mistakes differ most
        "one document": [29],
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


def placements(lengths, world, seed, lab=finished):
    """{what: held}: the lab's three, and tokens dealt at random; a check's by the finished lab."""
    chosen, first = random.Random(seed), first_of(lengths, None)
    tokens = [*range(sum(lengths))]
    chosen.shuffle(tokens)
    return {
        "in order": lab.in_order(len(first), world),
        "by document": lab.by_document(position_of(lengths), world),
        "by work": lab.by_work(first, world, 3),
        "at random": [torch.tensor(sorted(tokens[rank::world])) for rank in range(world)],
    }


def zigzag(lengths, world):
    """by_document()'s answer token by token."""
    held, turn, start = [[] for _ in range(world)], 0, 0
    for n in lengths:
        size = n // (2 * world)
        for place in range(n):
            if place < 2 * world * size:
                rank = min(place // size, 2 * world - 1 - place // size)
            else:
                rank, turn = turn % world, turn + 1
            held[rank].append(start + place)
        start += n
    return held


def heaviest_first(lengths, window, world, size):
    """by_work()'s answer from the mask, block by block."""
    s, pairs = sum(lengths), mask_of(lengths, window).sum(1).tolist()
    blocks = [range(start, min(start + size, s)) for start in range(0, s, size)]
    cost = [sum(pairs[i] for i in block) for block in blocks]
    held, total, taken = [[] for _ in range(world)], [0] * world, [0] * world
    room = -(-len(blocks) // world)
    for b in sorted(range(len(blocks)), key=lambda b: (-cost[b], b)):
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
        return [float(x) if float(x) % 1 else int(x) for x in found]
    except (TypeError, ValueError) as problem:
        raise Wrong(f"{what} is {type(found).__name__}, not numbers") from problem


def plain(results):
    """Tensors among results as lists."""
    return tree_map(lambda x: x.tolist() if isinstance(x, torch.Tensor) else x, results)


def expect_numbers(what, found, right, function, args, part=None):
    """Raise Wrong unless found has the numbers of the list `right`."""
    found = numbers_of(what, found)
    if found != right:
        hint = usual_hint(MISTAKES, function, args, found, part, plain)
        raise Wrong(f"{what}{difference(found, right)}", hint)


def expect_visible(told, found, right, args):
    """Raise Wrong unless found are the booleans `right` (n, m), with one pair that is not."""
    fine = isinstance(found, torch.Tensor) and found.shape == right.shape
    expect(fine, f"{told}: visible is no tensor {(*right.shape,)}", "(n, m): a row for each query")
    wrong = (found.double() != right.double()).nonzero().tolist()
    if wrong:
        (i, j), (q_at, k_at, first) = wrong[0], args
        what = f"{told}: visible: of query {q_at[i]} (first {first[q_at[i]]}) and key {k_at[j]} it"
        hint = usual_hint(MISTAKES, finished.visible, args, found.double())
        raise Wrong(f"{what} is {bool(found[i, j])}", hint)


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


def expect_held(what, found, right, function, args):
    """The same of one tensor for each rank."""
    fine = isinstance(found, list | tuple) and len(found) == len(right)
    expect(fine, f"{what} is not a list of {len(right)}, one for each rank", "a tensor for each")
    found = [numbers_of(f"{what}[{rank}]", at) for rank, at in enumerate(found)]
    for rank, (mine, wanted) in enumerate(zip(found, right)):
        if mine != wanted:
            ascending = sorted(mine) == wanted and "each rank's tokens in ascending order"
            hint = ascending or usual_hint(MISTAKES, function, args, found, None, plain)
            raise Wrong(f"{what}: held[{rank}]{difference(mine, wanted)}", hint)


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
        args = torch.arange(n), world
        told = f"a document of {n} tokens"
        expect_held(told, lab.by_document(*args), right, finished.by_document, args)
    return "PyTorch's"


def expect_tiles(told, found, mask, tile, args):
    """Raise Wrong unless these slices are the shortest for the mask (n, m) of queries and keys."""
    (n, m), right = mask.shape, []
    for start in range(0, n, tile):
        seen = mask[start : start + tile].any(0).nonzero()
        if len(seen):
            right.append(((start, min(start + tile, n)), (int(seen[0]), int(seen[-1]) + 1)))
    slices = [tuple(map(type, pair)) == (slice, slice) for pair in found]
    expect(all(slices), f"{told} are {found}", "yield two slices: rows, keys")

    def ends(slices):
        return [(rows.indices(n)[:2], keys.indices(m)[:2]) for rows, keys in slices]

    mine = ends(found)
    pairs = enumerate(zip_longest(mine, right))
    i = next((i for i, (one, other) in pairs if one != other), 0)
    named = f"(rows, keys) number {i} of {len(mine)} is {mine[i : i + 1]}, not {right[i : i + 1]}"
    if mine != right:
        finished.TILE = tile
        hint = usual_hint(MISTAKES, finished.tiles, args, mine, None, ends)
        raise Wrong(f"{told}: {named}", hint)


def expect_travels(told, found, held, source, mask, first):
    """Raise Wrong unless found[step] are the keys that a rank sees from this step on."""
    keys, P = held[source], len(held)
    for step, mine in enumerate(found):
        ranks = range(source + step, source + P)
        queries = torch.cat([keys[:0], *(held[rank % P] for rank in ranks)])
        right = keys[mask[queries][:, keys].any(0)] if step else keys
        what, args = f"{told}travels in step {step}", (held, source, step, first)
        expect_numbers(what, mine, right.tolist(), finished.travels, args)
