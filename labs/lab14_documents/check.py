"""Lab 14's exercises: their cases. mistakes.txt has the wrong answers.

In float64, so that nothing but a mistake is off by more than EXACT. What is right comes from masks
that are put together document by document, from PyTorch's own attention and Hugging Face's models,
which see one document at a time, and beside these from the finished lab.
"""

import inspect
import random
from contextlib import contextmanager
from functools import partial
from itertools import product
from unittest import mock

import torch
import torch.nn.functional as F

from labs.kit.eye import Most
from labs.kit.harness import Wrong
from labs.kit.inputs import drawn
from labs.kit.judge import checks
from labs.kit.models import EXACT
from labs.lab14_documents.documents import (
    END,
    IGNORE,
    VOCAB,
    document_of,
    finished,
    first_of,
    mask_of,
    packed_ids,
    packings,
    placements,
    position_of,
)
from labs.lab14_documents.packed import (
    FAMILIES,
    attention_case,
    gradient_elsewhere,
    model_errors,
)

GROUPS = [1, 3], [0, 2, 3], [0, 1, 2, 3], [2]
WINDOWS = 4, None, 3, None  # one for each of the packings
shard_range = finished.shard_range


# ---- Documents and the mask ----------------------------------------------------------------------


def documents(group, seed):
    cases = packings(seed) | {"one token": [1]}
    for (what, lengths), (whole, end) in product(cases.items(), [(True, END), (False, 0)]):
        title = f"{what}, {'each' if whole else 'not the last'} with its end"
        given = {"ids": packed_ids(lengths, seed, whole, end), "end": end}
        right = {"document": document_of(lengths), "position": position_of(lengths)}
        yield title, ("documents", given, "document, position"), right
        yield title, ("targets", given, "targets")


def mask(group, seed):
    chosen = random.Random(seed)
    for (what, lengths), window in product(packings(seed).items(), (3, None, 1, 50)):
        given = {"position": position_of(lengths), "window": window}
        first, seen = first_of(lengths, window), mask_of(lengths, window)
        title = f"{what}, window {window}"
        yield title, ("first_seen", given, "first"), {"first": first}
        for n in 3, len(first) + 1:  # of the second no key is left
            queries, keys = (chosen.sample(range(len(first)), len(first) // m) for m in (2, n))
            q_at, k_at = (torch.tensor(at, dtype=torch.long) for at in (queries, keys))
            given = {"q_at": q_at, "k_at": k_at, "first": first}
            yield title, ("visible", given, "visible"), {"visible": seen[q_at][:, k_at]}


# ---- Who holds which tokens ----------------------------------------------------------------------


def see_work(given, lab, eye):
    eye.call(lambda *args: [float(n) for n in lab.work(*args)], given, "the list of pairs")


def work(group, seed):
    for (what, lengths), world, window in product(
        packings(seed).items(), (4, 5, 2, 1), (3, None, 1, 50)
    ):
        for where, held in placements(lengths, world, seed).items():
            given = {"held": held, "first": first_of(lengths, window)}
            yield f"{what} {where} on {world} ranks, window {window}", partial(see_work, given)
    given = {"held": [torch.arange(6001)], "first": torch.zeros(6001, dtype=torch.long)}
    yield "a document of 6,001 tokens", partial(see_work, given)


def see_held(name, world, given, lab, eye):
    """Each rank's tokens, as tensors."""

    def call(*args):
        held = getattr(lab, name)(*args)
        return held[0] if world == 1 else held

    eye.call(call, given, ", ".join(f"held[{rank}]" for rank in range(world)))


def by_document(group, seed):
    cases = packings(seed) | {"two documents": [23, 11]}
    for (what, lengths), world in product(cases.items(), (3, 4, 8, 2, 1)):
        given = {"position": position_of(lengths), "world": world}
        yield f"{what} on {world} ranks", partial(see_held, "by_document", world, given)


def by_work(group, seed):
    cases = packings(seed) | {"a long document and many of one token": [12] + 36 * [1]}
    for (what, lengths), window in product(cases.items(), (None, 3)):
        for world, size in (4, 2), (3, 4), (2, 3), (1, 4), (4, 7):
            given = {"first": first_of(lengths, window), "world": world, "size": size}
            title = f"{what} on {world} ranks, window {window}, blocks of {size}"
            yield title, partial(see_held, "by_work", world, given)


# ---- Which keys are multiplied, and which travel -------------------------------------------------


def tiles_of(lab, q_at, k_at, first):
    """[(rows, keys)] as numbers: (start, end) of each."""
    slices = lab.tiles(q_at, k_at, first)
    return [(rows.indices(len(q_at))[:2], keys.indices(len(k_at))[:2]) for rows, keys in slices]


def see_tiles(held, first, tile, lab, eye):
    for (i, q_at), (j, k_at) in product(enumerate(held), repeat=2):
        given = {"q_at": q_at, "k_at": k_at, "first": first}
        with mock.patch.object(lab, "TILE", tile):
            eye.call(partial(tiles_of, lab), given, f"the tiles of held[{i}] with held[{j}]")


def tiles(group, seed):
    for what, lengths in packings(seed).items():
        for where, held in placements(lengths, 3, seed).items():
            for tile, window in (1, None), (1, 3), (4, None), (16, 3):
                title = f"{what} {where} on 3 ranks, TILE {tile}, window {window}"
                yield title, partial(see_tiles, held, first_of(lengths, window), tile)


def placed(seed, worlds):
    """Yield (what, held, first) of documents in four placements on so many ranks."""
    for (what, lengths), window in zip(packings(seed).items(), WINDOWS):
        for world in worlds:
            for where, held in placements(lengths, world, seed).items():
                title = f"{what} {where} on {world} ranks, window {window}"
                yield title, held, first_of(lengths, window)


def travels(group, seed):
    for title, held, first in placed(seed, (4, 3, 2, 1)):
        for source, step in product(range(len(held)), range(len(held) + 1)):
            given = {"held": held, "source": source, "step": step, "first": first}
            yield f"{title}: of rank {source} in step {step}", ("travels", given, "the tokens")


def message_bytes(group, seed):
    for title, held, first in placed(seed, (4, 3, 2, 1)):
        for rank in range(len(held)):
            given = {"held": held, "first": first, "rank": rank, "kv": 5, "g": 3, "d": 2}
            given["itemsize"] = (8, 2)[rank % 2]
            out = "bytes of the ring, bytes of Ulysses"
            yield f"{title}, {given['itemsize']} bytes a number", ("message_bytes", given, out)


# ---- Attention on ranks --------------------------------------------------------------------------

EXCHANGES = "the list of exchanges by pass_on()"


@contextmanager
def watched(lab, eye, computing, hint):
    """Note pass_on()'s exchanges: what they carry, and whether the rank computes meanwhile.

    computing: the name of the function that computes; where no query sees a key that does not
    count. Raises Wrong where an exchange is another than ours: it would hang.
    """
    events, exchanges, known = [], [], eye.right.get(EXCHANGES)
    pass_on, compute = lab.pass_on, getattr(lab, computing)

    def noting_pass_on(x, length, by, group):
        wait, number, own = None, len(exchanges), (x.shape[-2], length, by)
        if own[:2] != (0, 0):
            exchanges.append(own)
            right = own if known is None else known[number] if number < len(known) else "none"
            if own != right:
                text = f"pass_on() number {number} is {own}, (tokens sent, received, by), not"
                raise Wrong(f"{text} {right}", hint)
            events.append(f"begin {number}")
        wait = pass_on(x, length, by, group)

        def noting_wait():
            events.append(f"wait {number}")
            return wait()

        return noting_wait if own[:2] != (0, 0) else wait

    def noting_compute(*args, **kwargs):
        given = inspect.signature(compute).bind(*args, **kwargs).arguments
        if finished.visible(given["q_at"], given["k_at"], given["first"]).any():
            events.append("compute")
        return compute(*args, **kwargs)

    with mock.patch.multiple(lab, pass_on=noting_pass_on, **{computing: noting_compute}):
        yield
    eye.note(EXCHANGES, exchanges)
    waited = [i for i in range(len(exchanges)) if f"wait {i}" in events]
    eye.note("exchanges that nobody waits for", Most(len(exchanges) - len(waited)))
    spans = [events[events.index(f"begin {i}") : events.index(f"wait {i}")] for i in waited]
    idle = Most(sum("compute" not in span for span in spans))
    eye.note("exchanges during which nothing is computed", idle)


def ring_cases(group, seed):
    """Yield (what, held, this rank's tokens, case) of attention on one device."""
    for (what, lengths), window in zip(packings(seed).items(), WINDOWS):
        case = attention_case(seed, lengths, window)
        for where, held in placements(lengths, group.size(), seed).items():
            title = f"{what} {where} on {group.size()} ranks, window {window}"
            yield title, held, held[group.rank()], case


def see_ring_forward(given, lab, eye):
    def call(*args):
        out, lse, kept = lab.ring_forward(*args)
        return out, lse, *kept

    hint = "ring_forward() must pass on k and v together, once in a step: of the keys those "
    hint += "that travels() names for the step after, and it receives what the previous rank "
    hint += "sends on."
    names = ["out", "lse", *(f"kept[{step}]" for step in range(len(given["held"])))]
    with watched(lab, eye, "attend", hint):
        eye.call(call, given, ", ".join(names))


def ring_forward(group, seed):
    for title, held, own, case in ring_cases(group, seed):
        given = {"q": case.q[:, :, own], "k": case.k[:, own], "v": case.v[:, own]}
        given |= {"held": held, "first": case.first, "group": group}
        yield title, partial(see_ring_forward, given), {"out": case.out[:, :, own]}


def see_ring_backward(given, lab, eye):
    hint = "ring_backward() must pass back, from the last step to step 1, gradients of the "
    hint += "keys that came in this step, and it receives those of the keys that went on."
    with watched(lab, eye, "attend_backward", hint):
        eye.call(lab.ring_backward, given, "dq, dk, dv")


def ring_backward(group, seed):
    for title, held, own, case in ring_cases(group, seed):
        q, k, v, dout = case.q[:, :, own], case.k[:, own], case.v[:, own], case.dout[:, :, own]
        out, lse, kept = finished.ring_forward(q, k, v, held, case.first, group)
        given = {"q": q, "kept": kept, "out": out, "lse": lse, "dout": dout}
        given |= {"held": held, "first": case.first, "group": group}
        right = {"dq": case.dq[:, :, own], "dk": case.dk[:, own], "dv": case.dv[:, own]}
        yield title, partial(see_ring_backward, given), right


def ulysses(group, seed):
    for title, held, own, case in ring_cases(group, seed):
        kv = len(case.k)
        x, heads = (
            drawn(seed + 3, kv, len(case.first), 2),
            slice(*shard_range(kv, group.rank(), len(held))),
        )
        given = {"x": x[:, own].requires_grad_(), "held": held, "group": group}
        yield title, ("to_heads", given, "own heads"), {"own heads": x[heads]}
        given = {"x": x[heads].clone().requires_grad_(), "kv": kv, "held": held, "group": group}
        yield title, ("to_tokens", given, "own tokens"), {"own tokens": x[:, own]}
        given = {"q": case.q[:, :, own], "k": case.k[:, own], "v": case.v[:, own]}
        given = {name: leaf.requires_grad_() for name, leaf in given.items()}
        given |= {"held": held, "first": case.first, "group": group}
        right = {"attention": case.out[:, :, own], "the gradient of q": case.dq[:, :, own]}
        right |= {"the gradient of k": case.dk[:, own], "the gradient of v": case.dv[:, own]}
        yield title, ("ulysses_attention", given, "attention", [case.dout[:, :, own]]), right


# ---- The loss ------------------------------------------------------------------------------------


def see_model(family, way, *case):
    def see(lab, eye):
        apply = lab.RingAttention.apply if way == "ring" else lab.ulysses_attention
        errors = model_errors(lab, family, apply, *case)
        off = [name for name, error in errors.items() if not error <= EXACT]
        eye.note("the list of tensors that are off", off)
        _, elsewhere = gradient_elsewhere(lab, family, apply, *case)
        eye.note("a gradient in another document's embeddings is there", bool(elsewhere.any()))

    return see


def loss(group, seed):
    P, rank = group.size(), group.rank()
    few = {"no target at all": [1] * 12, "targets of one rank": [1] * 9 + [3]}
    for what, lengths in (packings(seed) | few | {"3,001 targets": [3002]}).items():
        labels = finished.targets(packed_ids(lengths, seed), END)
        logits = drawn(seed, len(labels), VOCAB)
        for where, held in placements(lengths, P, seed).items():
            x, own = logits[held[rank]].requires_grad_(), labels[held[rank]]
            right = F.cross_entropy(x, own, reduction="sum", ignore_index=IGNORE).detach()
            right = {"the summand": right / (labels != IGNORE).sum().clamp(min=1)}
            given = {"logits": x, "labels": own, "group": group}
            call = "mean_loss", given, "the summand", [torch.ones((), dtype=x.dtype)]
            yield f"{what} {where} on {P} ranks", call, right
    lengths = packings(seed)["documents of many lengths"]
    family, way = [*FAMILIES][P % 3], "ring" if P % 2 else "Ulysses"
    where, held = [*placements(lengths, P, seed).items()][P % 4]
    see = see_model(family, way, lengths, held, group, seed)
    right = {"the list of tensors that are off": []}
    yield f"{family} {where} on {P} ranks, {way}", see, right


ALONE = documents, mask, work, by_document, by_work, tiles, travels
RANKS = ring_forward, ring_backward, ulysses
EXERCISES = {cases.__name__: (cases, 1) for cases in ALONE}
EXERCISES |= {cases.__name__: (cases, 4, GROUPS) for cases in RANKS}
EXERCISES |= {"bytes": (message_bytes, 1), "loss": (loss, 4, GROUPS)}
CHECKS, BUGS = checks(EXERCISES, finished, EXACT)
