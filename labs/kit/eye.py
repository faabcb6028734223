"""What there is to see of a function: results, gradients, bytes, dtypes, what is written to."""

import torch

from labs.kit.harness import Traffic, relative_error
from labs.kit.tools import Kept, noted_waits

WHOLE = {torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8}


class Most(int):
    """A number, of bytes say: fewer than ours are right, too."""


class Calls(Most):
    """A number of messages: up to 4 are right, too, or up to twice as many as ours."""


class Eye:
    """Notes what there is to see of one lab's code, in the order in which it happens.

    seen {name: value}. together(flag): whether a flag holds on all ranks. right {name: value}: what
    should be seen, as far as that is known.
    """

    def __init__(self, together, right):
        self.together, self.right, self.seen = together, right, {}

    def note(self, name, value):
        self.seen[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value

    def goes_on(self):
        """Whether all seen so far is exactly right, on every rank; else what follows may hang."""
        known = [name for name in self.seen if name in self.right]
        right = all(differs(self.seen[name], self.right[name], 0) is None for name in known)
        if not self.together(right):
            self.note("skipped", None)
        return "skipped" not in self.seen

    def note_unwaited(self, name, traffic, waits):
        calls = sum(count for count, _ in traffic.ops.values())
        self.note(name, Most(max(0, calls - len(waits))))

    def note_traffic(self, when, traffic, waits):
        self.note_unwaited(f"{when}: messages that nobody waits for", traffic, waits)
        for op, (count, nbytes) in traffic.ops.items():
            self.note(f"{when}: bytes that {op} moves", Most(nbytes))
            self.note(f"{when}: calls of {op}", Calls(count))

    def call(self, function, given, out="the result", dy=None, parameters=None, keeps=False):
        """Note all that there is to see of function(*given.values()) and of its backward.

        given {name: argument}: tensors are copied, and those that require it get a gradient; so do
        parameters {name: tensor}. out: the results' names. dy: their gradients, else random
        numbers. keeps: whether it matters what the backward keeps. Returns the results.
        """
        args = {name: copied(value) for name, value in given.items()}
        parameters = parameters or {}
        with Traffic() as traffic, Kept(*parameters.values()) as kept, noted_waits(id) as waits:
            called = [x.clone() if is_trained(x) else x for x in args.values()]
            outs = function(*called)
        self.note_traffic("forward", traffic, waits)
        names = out.split(", ")
        outs = outs if len(names) > 1 and isinstance(outs, tuple | list) else [outs]
        self.note("the number of results", len(outs))
        for name, y in zip(names, outs):
            self.note(name, y)
        trained = {name: x for name, x in (args | parameters).items() if is_trained(x)}
        if trained:
            self.note_backward(dict(zip(names, outs)), trained, dy, kept if keeps else None)
        for (name, x), mine in zip(given.items(), called):
            self.note(f"{name} is overwritten", not unchanged(mine, x))
        return outs[0] if len(names) == 1 else outs

    def note_backward(self, outs, trained, dy, kept):
        """Note gradients of `trained` {name: tensor}, and their cost; not where that may hang."""
        tracked = [y for y in outs.values() if isinstance(y, torch.Tensor) and y.requires_grad]
        self.note("the number of results with a gradient", len(tracked))
        if kept and tracked:
            kept.note_attributes(tracked[0])
            self.note("what the backward keeps, in bytes", Most(kept.bytes))
        wanted = [getattr(self.right.get(name, y), "shape", None) for name, y in outs.items()]
        fits = wanted == [getattr(y, "shape", None) for y in outs.values()]
        if not self.together(bool(tracked) and fits):
            self.note("skipped", None)
            return
        dy = dy or [noise(y) for y in tracked]
        given = [y.clone() for y in dy]
        how = {"allow_unused": True, "materialize_grads": True}
        with Traffic() as traffic, noted_waits(id) as waits:
            grads = torch.autograd.grad(tracked, [*trained.values()], given, **how)
        self.note_traffic("backward", traffic, waits)
        for name, grad in zip(trained, grads):
            self.note(f"the gradient of {name}", grad)
        self.note("dy is overwritten", not all(map(torch.equal, given, dy)))


def is_trained(value):
    return isinstance(value, torch.Tensor) and value.requires_grad


def copied(value):
    """A tensor as a new leaf, a list as a new list of copies."""
    if isinstance(value, list):
        return [copied(x) for x in value]
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return value


def unchanged(mine, x):
    """Whether an argument, also each of a list, is as it was before the call."""
    if isinstance(x, list):
        return len(mine) == len(x) and all(map(unchanged, mine, x))
    if isinstance(x, torch.Tensor):
        return torch.equal(mine.nan_to_num(), x.nan_to_num())
    return mine == x


def noise(y):
    """Random numbers of y's shape and dtype, always the same."""
    numbers = torch.Generator().manual_seed(y.numel())
    return torch.randn(y.shape, generator=numbers, dtype=y.dtype)


def differs(mine, right, tolerance):
    """What is wrong with a value, in words that follow its name; None where nothing is."""
    if isinstance(right, torch.Tensor):
        return differs_tensor(mine, right, tolerance)
    if isinstance(mine, Most):
        most = max(4, 2 * (right or 0)) if isinstance(mine, Calls) else right or 0
        return None if mine <= most else f"are {mine} (at most {most})"
    if isinstance(mine, bool):
        return None if mine == right else "" if mine else "no longer"
    harmless = right is None and isinstance(mine, torch.Tensor)  # what is done in place, too
    return None if harmless or mine == right else f"is {mine!r}, not {right!r}"


def differs_tensor(mine, right, tolerance):
    """differs(), of a tensor: its kind, shape, what is infinite, its numbers, its dtype."""
    if not isinstance(mine, torch.Tensor):
        return f"is {type(mine).__name__}, not a tensor"
    if mine.shape != right.shape:
        return f"has shape {tuple(mine.shape)}, not {tuple(right.shape)}"
    if not right.is_floating_point():
        if torch.equal(mine, right):  # also int32 for int64, but no booleans or floats
            same = mine.dtype == right.dtype or not {mine.dtype, right.dtype} - WHOLE
            return None if same else f"is {mine.dtype}, not {right.dtype}"
        if right.numel() <= 12:
            return f"is {mine.tolist()}, not {right.tolist()}"
        place = tuple((mine != right).nonzero()[0].tolist())  # the first that is wrong
        return f"is {mine[place].item()}, not {right[place].item()}, at {[*place]}"
    odd = ~right.isfinite()
    if not torch.allclose(mine[odd].double(), right[odd].double(), equal_nan=True):
        return f"is {mine[odd][0]:g} where it should be {right[odd][0]:g}"
    error = relative_error(mine.masked_fill(odd, 0), right.masked_fill(odd, 0))
    if not error <= tolerance:
        return f"is off by {error:.1e} (at most {tolerance:.0e})"
    return None if mine.dtype == right.dtype else f"is {mine.dtype}, not {right.dtype}"
