"""The models that are measured.

Rule: a stack of square layers and nothing else, so that a whole model is named by a few numbers.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


Batch = tuple[Tensor, Tensor]


class Model(NamedTuple):
    """``depth`` layers of ``width`` by ``width``, fed ``microbatches`` times ``rows`` rows."""

    width: int
    rows: int
    microbatches: int
    depth: int = 8
    activation: str = "relu"
    bias: bool = True

    @property
    def flops(self) -> int:
        """Of one window: forward, and the two products of backward."""
        return 6 * self.microbatches * self.rows * self.depth * self.width**2

    def __str__(self) -> str:
        return f"{self.depth} x {self.width} wide, {self.microbatches} x {self.rows} rows"


class Problem(NamedTuple):
    """A model that stands in memory, with the batch of one window."""

    net: nn.Module
    params: dict[str, Tensor]
    loss: Callable[[dict[str, Tensor], Batch], Tensor]
    batch: Batch
    rows: int


def build(model: Model, device: str = "cpu") -> Problem:
    """The network, its parameters as a plain dict, its loss as a pure function, and its batch."""
    activation = {"relu": nn.ReLU, "gelu": nn.GELU}[model.activation]
    layers: list[nn.Module] = []
    for _ in range(model.depth):
        layers += [nn.Linear(model.width, model.width, bias=model.bias), activation()]
    net = nn.Sequential(*layers).to(device)
    # Aliases: every contender reads the same weights, and nobody's parameters are counted twice.
    # Detached, since torch.func keeps a graph for each microbatch where they require grad.
    params = {name: parameter.detach() for name, parameter in net.named_parameters()}

    def loss(params: dict[str, Tensor], batch: Batch) -> Tensor:
        x, y = batch
        return F.mse_loss(torch.func.functional_call(net, params, (x,)), y)

    rows = model.rows * model.microbatches
    x, y = (torch.randn(rows, model.width, device=device) for _ in range(2))
    return Problem(net, params, loss, (x, y), model.rows)
