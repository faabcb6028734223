"""What a tensor is across ranks: found by comparing the ranks' run with a run of one device.

=    every rank holds the tensor that one device holds at the same line
d0   joined along dimension 0 (d1: 1, ...) the ranks' tensors are that tensor: a shard each
+    added up they are that tensor: partial sums; max: the largest of them are
r    their rows are that tensor's in another order
s    equal on all ranks, and in no way a tensor of one device
x    each rank's own, and together in no way a tensor of one device
u    not yet filled: memory for a message
"""

from difflib import SequenceMatcher
from itertools import permutations

import numpy as np

from labs.walk.record import Unfilled


def close(a, b):
    """Whether two tensors are equal except for rounding in float64."""
    return a.shape == b.shape and a.dtype == b.dtype and np.allclose(a, b, 1e-9, 1e-12)


def relation(parts, full):
    """How the ranks' tensors make one device's: =, d0, d1, ..., +, max; None if they do not."""
    if all(close(x, full) for x in parts):
        return "="
    if any(x.ndim != full.ndim for x in parts):
        return None
    for dim in range(full.ndim):
        others = {x.shape[:dim] + x.shape[dim + 1 :] for x in parts}
        if len(others) == 1 and close(np.concatenate(parts, dim), full):
            return f"d{dim}"
    if any(x.shape != full.shape for x in parts) or full.dtype.kind != "f":
        return None
    if close(sum(parts), full):
        return "+"
    return "max" if close(np.maximum.reduce(parts), full) else None


def shared_relation(parts, full, sharing):
    """relation(), where `sharing` ranks in a row may hold, or add up to, the same shard."""
    found = relation(parts, full)
    if found or sharing == 1:
        return found
    groups = [parts[i : i + sharing] for i in range(0, len(parts), sharing)]
    if all(close(x, group[0]) for group in groups for x in group):
        return relation([group[0] for group in groups], full)
    if all(len({x.shape for x in group}) == 1 for group in groups):
        found = relation([sum(group) for group in groups], full)
        return found and f"+{found}"
    return None


def is_reordered(parts, full):
    """Whether the ranks' rows (of the last dimension) are one device's in another order."""
    if full.dtype.kind != "f" or full.ndim < 2 or sum(x.size for x in parts) != full.size:
        return False
    if any(x.ndim < 2 or x.shape[-1] != full.shape[-1] for x in parts):
        return False
    rows = []
    for tensors in (parts, [full]):
        together = np.concatenate([x.reshape(-1, x.shape[-1]) for x in tensors])
        rows.append(sorted(map(tuple, np.round(together, 9).tolist())))
    return len(rows[0]) > 1 and rows[0] == rows[1]


def badge(parts, candidates, sharing=1):
    """(what the ranks' tensors are, the tensor of one device or None). candidates: its tensors,
    the likeliest first; they are tried transposed, too."""
    if any(isinstance(x, Unfilled) for x in parts):
        return "u", None
    for full in candidates:
        orders = permutations(range(full.ndim)) if 1 < full.ndim < 4 else [range(full.ndim)]
        for order in orders:
            found = shared_relation(parts, full.transpose(*order), sharing)
            if found:
                return found, full.transpose(*order)
    if all(close(x, parts[0]) for x in parts):
        return "s", None
    for full in candidates:
        if is_reordered(parts, full):
            return "r", full
    return "x", None


def key(step, calls):
    """What has to agree for two steps to be the same one in two runs."""
    call = calls[step.call]
    return step.kind, call.name, call.phase, step.line, call.module, step.note


def matched(steps, calls, other_steps, other_calls, key=key):
    """{place in steps: place in other_steps} of the same steps in two runs."""
    keys = [[key(step, c) for step in s] for s, c in ((steps, calls), (other_steps, other_calls))]
    blocks = SequenceMatcher(None, *keys, autojunk=False).get_matching_blocks()
    return {a + i: b + i for a, b, size in blocks for i in range(size)}


class OneDevice:
    """A run of one device, and what it holds where the ranks' run is."""

    def __init__(self, one, ranks):
        self.steps, self.call, self.at, last = one.steps, {}, [], 0
        match = matched(ranks.steps, ranks.calls, one.steps, one.calls)
        for place, step in enumerate(ranks.steps):
            if place in match:
                last = match[place]
                self.call[step.call] = one.steps[last].call
            self.at.append(last)

    def candidates(self, place, call, name):
        """Tensors of the same call: the namesake, as of now and then later; then all others."""
        before, after, others = [], [], []
        for i, step in enumerate(self.steps):
            if step.call != self.call.get(call):
                continue
            for other, x in step.changed.items():
                if isinstance(x, np.ndarray) and other != name:
                    others.append(x)
                elif isinstance(x, np.ndarray):
                    (before if i <= self.at[place] else after).append(x)
        return before[::-1] + after + others
