"""Recurrent networks on a CPU: their float32 kernels ask for the grad mode below torch.func."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pureaccum as pa


def by_func(loss: Any, params: dict[str, Tensor], x: Tensor) -> list[Tensor]:
    total, pull = torch.func.vjp(lambda params: loss(params, x), params)
    with torch.no_grad():  # with a graph of the backward pass, torch takes another kernel
        return list(pull(torch.ones_like(total))[0].values())


def by_autograd(loss: Any, params: dict[str, Tensor], x: Tensor) -> list[Tensor]:
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    return list(torch.autograd.grad(loss(leaves, x), list(leaves.values())))


@pytest.mark.parametrize(("engine", "alone"), [("func", by_func), ("autograd", by_autograd)])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_microbatches_are_summed_in_bits(kind: Any, mode: Any, engine: Any, alone: Any) -> None:
    """Under no_grad the LSTM kernel saves nothing for its backward pass, which then fails."""
    net = kind(3, 4, batch_first=True)
    params = {name: p.detach() for name, p in net.named_parameters()}
    x = torch.randn(6, 3, 3)

    def loss(params: Any, x: Tensor) -> Tensor:
        return (torch.func.functional_call(net, params, (x,))[0] ** 2).sum()

    with mode():
        grads = pa.grad(loss, microbatch_size=4, reduction="sum", engine=engine)(params, x)
    first, second = alone(loss, params, x[:4]), alone(loss, params, x[4:])
    for name, a, b in zip(params, first, second, strict=True):
        assert torch.equal(grads[name], a + b), name
