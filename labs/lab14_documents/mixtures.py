"""Who has how much to do, for real mixtures of document lengths: counted, not run. For lab 14.

The lengths are those of texts that come with Python, a token for four bytes.
"""

import os
import random
import re
from pathlib import Path
from pydoc_data.topics import topics

import torch

from labs.kit.harness import table
from labs.kit.pictures import RANKS
from labs.lab14_documents.documents import finished, position_of

BLOCK = 128  # tokens dealt together by work: FlexAttention's block
THEIRS = "by document (PyTorch)", "by work (PyTorch)"


def mixtures(tokens, seed):
    """{what: (lengths of documents that fill a sequence of so many tokens, window)}."""
    library = [file.stat().st_size for file in sorted(Path(os.__file__).parent.glob("*.py"))]
    paragraphs = [len(text) for topic in topics.values() for text in re.split(r"\n\n+", topic)]
    documents = {"paragraphs": paragraphs, "source files": library}
    found = {"one document": ([tokens], None)}
    for what, sizes in documents.items():
        random.Random(seed).shuffle(sizes)
        lengths, left = [], tokens
        for size in sizes * (1 + 4 * tokens // sum(sizes)):  # again, if there is too little
            if left:
                lengths.append(min(left, size // 4 + 1))
                left -= lengths[-1]
        found[what] = lengths, None
    return found | {"source files, window 1024": (found["source files"][0], 1024)}


def pytorchs(position, first, world):
    """{what: held} by PyTorch's private balancers, where this version has them and they can."""
    try:
        from torch.distributed.tensor.experimental._context_parallel import _load_balancer as theirs

        schedule = theirs._PTRRLoadBalancer.ptrr_scheduling
        balancer = theirs._PerDocumentHeadTailLoadBalancer
    except (ImportError, AttributeError):
        return {}
    found, s = {}, len(position)
    if s % (BLOCK * world) == 0:
        blocks = torch.arange(s).view(-1, BLOCK)
        taken = schedule((blocks - first[blocks] + 1).sum(1), world)
        found[THEIRS[1]] = [blocks[mine].flatten() for mine in taken]
    starts = [*(position == 0).nonzero()[:, 0].tolist(), s]
    # It takes documents whose lengths 2P divides: of each the rest is put behind, as padding is
    wanted = [b - a - (b - a) % (2 * world) for a, b in zip(starts, starts[1:])]
    if sum(wanted) % world == 0:
        order = balancer([[n for n in wanted if n]], world, "cpu")._generate_indices()[0]
        kept = torch.cat([torch.arange(a, a + n) for a, n in zip(starts, wanted)])
        found[THEIRS[0]] = [kept[part].sort().values for part in order.chunk(world)]
    return found


def strategies(lab, position, first, world):
    """{what: held}, by the learner's placements and PyTorch's."""
    s = len(position)
    return {
        "in order": lab.in_order(s, world),
        "zigzag of the sequence": lab.by_document(torch.arange(s), world),
        "by document": lab.by_document(position, world),
        "by work": lab.by_work(first, world, BLOCK),
        **pytorchs(position, first, world),
    }


def steps(held, first):
    """(P, P): pairs of rank r in step t of a ring, when it has the keys of rank r - t."""
    pairs = torch.zeros(len(held), len(held))
    for source, keys in enumerate(held):
        before = torch.zeros(len(first) + 1, dtype=torch.long)  # how many of these keys are before
        before[keys + 1] = 1
        before = before.cumsum(0)
        for step in range(len(held)):
            rank = (source + step) % len(held)
            pairs[rank, step] = (before[held[rank] + 1] - before[first[held[rank]]]).sum()
    return pairs


def tokens_sent(held, first):
    """How many keys go from rank to rank in a ring, as travels() says, of all ranks together."""
    s, world, sent = len(first), len(held), 0
    furthest = []  # of each rank, for each key: the first that the next of its queries sees
    for at in held:
        following = torch.full((s,), s)
        following[at] = at
        following = following.flip(0).cummin(0).values.flip(0)
        furthest.append(torch.cat([first, torch.tensor([s])])[following])
    for source, keys in enumerate(held):
        last = torch.zeros_like(keys)  # how many ranks further a key goes
        for step in range(1, world):
            last[furthest[(source + step) % world][keys] <= keys] = step
        sent += int(last.sum())
    return sent


def compare(lab, args):
    """A row for each mixture and strategy: shares of an even one, and of all keys going round."""
    rows, world = [], args.ranks
    for what, (lengths, window) in mixtures(args.tokens, args.seed).items():
        position = position_of(lengths)
        # Not the learner's, which may read it off an (s, s) mask: here that has 17 GB
        first = finished.first_seen(position, window)
        for how, held in strategies(lab, position, first, world).items():
            pairs, tokens = steps(held, first), [len(at) for at in held]
            mean = pairs.sum().item() / world
            row = {"mixture": what, "documents": len(lengths), "strategy": how}
            row["pairs"] = pairs.sum(1).max().item() / mean
            row["ring"] = pairs.max(0).values.sum().item() / mean
            row["tokens"] = max(tokens) * world / sum(tokens)
            row["sent"] = tokens_sent(held, first) / ((world - 1) * sum(tokens))
            rows.append(row)
    return rows


def show(rows, args):
    """Print them."""
    print(f"\n{args.tokens:,} tokens on {args.ranks} ranks: the busiest rank, in even shares")
    lines = [["documents", "strategy", "pairs", "pairs, in step", "tokens", "keys sent"]]
    last = None
    for row in rows:
        shares = [f"{row[name]:.2f}" for name in ("pairs", "ring", "tokens")]
        name = f"{row['documents']}: {row['mixture']}" if row["mixture"] != last else ""
        lines.append([name, row["strategy"], *shares, f"{row['sent']:.0%}"])
        last = row["mixture"]
    table(*lines)
    print("\n  in step: each step of a ring waits for its busiest rank; sent: of all going round")
    print("  (PyTorch): its private balancers; by document, of what 2P divides of each document")


def draw(axis, rows, where):
    """The busiest rank's pairs, by mixture and strategy."""
    rows = [row for row in rows if row["strategy"] not in THEIRS]
    names = [*dict.fromkeys(row["mixture"] for row in rows)]
    hows = [*dict.fromkeys(row["strategy"] for row in rows)]
    for i, how in enumerate(hows):
        mine = [row["pairs"] for row in rows if row["strategy"] == how]
        places = [j + 0.2 * (i - 1.5) for j in range(len(names))]
        axis.bar(places, mine, 0.18, color=RANKS[i], label=how)
    axis.axhline(1, color="black", lw=0.8)
    axis.set_xticks(range(len(names)), [name.replace(", ", ",\n") for name in names])
    axis.set(ylabel="even shares")
    axis.set_title(f"The busiest rank's pairs: {where}", loc="left")
    axis.legend(frameon=False, fontsize=8, ncol=2)
