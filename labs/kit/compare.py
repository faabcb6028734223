"""How the labs compare: in float64, with a hint, and with copies of what was handed in."""

import inspect
from contextlib import contextmanager
from functools import partial

import torch
from torch.utils._pytree import tree_leaves, tree_map

from labs.kit.blame import hint_at
from labs.kit.harness import Wrong, expect, expect_close


def close(what, mine, right, hints=None, otherwise="", tolerance=1e-10):
    """expect_close(); otherwise: the hint where the tensor is none of the known wrong ones."""
    return expect_close(what, mine, right, tolerance, hints, otherwise)


def expect_same(names, given, before):
    """Raise Wrong where arguments differ from their copies, made before the call."""
    same = all(map(torch.equal, given, before))
    expect(same, f"{names} is overwritten", "the caller's tensors stay as they are: make new ones")


def tried(what, hint, function, *args, **kwargs):
    """What a function returns. If it raises, Wrong, with the hint and that of a known error."""
    try:
        return function(*args, **kwargs)
    except Wrong:
        raise
    except Exception as problem:
        first = f"{type(problem).__name__}: {problem}".partition("\n")[0]
        if isinstance(problem, NotImplementedError) and "meta tensor" not in first:
            raise  # an exercise not done
        hint = "; ".join(filter(None, (hint, hint_at(first))))
        raise Wrong(f"{what} fails, {first}", hint) from problem


def raised(function, *args, kind=ValueError):
    """The message of a call's error, if that is of the kind; None without one; else Wrong."""
    try:
        function(*args)
    except kind as problem:
        return str(problem)
    except NotImplementedError:  # an exercise not done
        raise
    except Exception as problem:
        hint = f"raise {kind.__name__}, with a message that says what to use"
        raise Wrong(f"{type(problem).__name__}: {problem}", hint) from None
    return None


def drawn(seed, *shape):
    """Random numbers, the same on every rank."""
    numbers = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=numbers, dtype=torch.float64)


def mistaken(function, *changes):
    """A finished function with usual mistakes: changes (ours, theirs) are parts of its text."""
    text, names = inspect.getsource(function), dict(function.__globals__)
    for ours, theirs in changes:
        expect(ours in text, f"no {ours} in {function.__name__}")
        text = text.replace(ours, theirs)
    exec(text, names)
    return names[function.__name__]


def draw_float64(seed):
    """number(low, high) and randn(*shape), of float64, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    randn = partial(torch.randn, generator=generator, dtype=torch.float64)
    return lambda low, high: int(torch.randint(low, high, (), generator=generator)), randn


@contextmanager
def unchanged(**given):
    """Raises Wrong at its end if one of these tensors, or lists of tensors, was changed."""
    before = tree_map(lambda x: x.detach().clone(), given)
    yield
    for name, value in given.items():
        pairs = tree_leaves(value), tree_leaves(before[name])
        same = len(pairs[0]) == len(pairs[1]) and all(map(torch.equal, *pairs))
        expect(same, f"{name}, an argument, is changed", "work on a new tensor or list")


def gradients(y, dy, inputs):
    """Those of the sum of y dy; zeros where y does not depend on an input."""
    return torch.autograd.grad(y, inputs, dy, allow_unused=True, materialize_grads=True)
