"""Hugging Face's models with random weights in float64, and what counts as equal to them."""

import torch
from torch.overrides import TorchFunctionMode

EXACT = 1e-10


class Float64(TorchFunctionMode):
    """Inside, what asks for float32 gets float64: for the proof only.

    Hugging Face computes norms, the router's softmax and its balance loss in float32, whatever the
    model's dtype. That is off by 1e-7 on either side, and on each in another way. Inside, a
    division of whole numbers gives float64, too.
    """

    def __enter__(self):
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *problem):
        torch.set_default_dtype(torch.float32)
        return super().__exit__(*problem)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = [torch.float64 if arg is torch.float32 else arg for arg in args]
        kwargs = kwargs or {}
        if kwargs.get("dtype") is torch.float32:
            kwargs = kwargs | {"dtype": torch.float64}
        return func(*args, **kwargs)


def random_model(causal, config, seed):
    """Hugging Face's model with random weights, in float64, the same on every rank."""
    torch.manual_seed(seed)
    model = causal(config).double().eval()
    for parameter in model.parameters():  # so that no norm is 1 and no two choices are alike
        parameter.data += 0.2 * torch.randn(parameter.shape, dtype=torch.float64)
    return model


def relative_errors(loss, grads, right_loss, right):
    """{"loss", each parameter's name: error} of gradients {name: tensor} and one device's."""
    norm = torch.stack([grad.norm() for grad in right.values()]).norm()
    errors = {"loss": abs(loss - right_loss).item() / right_loss.item()}
    for name, grad in right.items():
        # what is zero by construction is held against a thousandth of all gradients' norm
        error = (grads[name] - grad).norm() / torch.maximum(grad.norm(), norm / 1000)
        errors[name] = error.item()
    return errors
