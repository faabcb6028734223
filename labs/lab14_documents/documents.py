"""Packed documents, their masks and where their tokens are placed: for lab 14.

The mask is put together document by document, as a block-diagonal matrix; so it shares nothing with
the lab's rule, which is about single tokens.
"""

import random

import torch
import torch.distributed as dist

from labs.lab14_documents import lesson as finished  # not the learner's

IGNORE, END, VOCAB = finished.IGNORE, 7, 31


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


def groups_of_all_sizes():
    """The groups of 1 to 4 of four ranks that this rank is in, with another number than in all."""
    groups = [dist.new_group(ranks) for ranks in ([1, 3], [0, 2, 3], [0, 1, 2, 3], [2])]
    return [group for group in groups if group is not dist.GroupMember.NON_GROUP_MEMBER]
