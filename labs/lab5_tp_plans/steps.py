"""What lab 5's experiments share: messages in a few letters, Hugging Face's models in float64."""

import contextlib
import sys
from types import SimpleNamespace
from unittest import mock

import torch


def short(ops):
    """{op: [calls, bytes]} in a few letters: 5 AG 5 RS."""
    letters = {"all_gather": "AG", "reduce_scatter": "RS", "all_reduce": "AR", "all_to_all": "A2A"}
    return " ".join(f"{ops[op][0]} {letters.get(op, op)}" for op in sorted(ops)) or "none"


@contextlib.contextmanager
def upcasts_in_float64(model):
    """Hugging Face computes norms, softmax, rotary embedding and loss in float32, whatever the
    model's dtype, by torch.float32 or x.float(): float64 here."""
    modeling = sys.modules[type(model).__module__]
    names = SimpleNamespace(**vars(torch) | {"float32": torch.float64})
    with (
        mock.patch.object(modeling, "torch", names),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        yield
