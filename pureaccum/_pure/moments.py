"""What batch norm saw, layer by layer, as moments that can be merged.

merged(moments of some rows, moments of others) = the moments of all of them
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from .._base.states import loadable


@loadable
class Moments(NamedTuple):
    """What batch norm saw so far: one float64 number a channel, all its layers end to end.

    Args:
        elements: How many there were; zero for a layer that was not called.
        mean: Their mean.
        squares: The sum of their squared distances from it, which does not cancel.
        momentum: What the last call was to update the running statistics with.
    """

    elements: Tensor
    mean: Tensor
    squares: Tensor
    momentum: Tensor


class Seen(NamedTuple):
    """A call of batch norm: whose running statistics it was to update, and with what."""

    running_mean: Tensor
    elements: int
    mean: Tensor
    var: Tensor
    momentum: float


class Layer(NamedTuple):
    """Where the buffers of one batch norm lie among the leaves."""

    mean: int
    var: int
    tracked: int | None


def layers(leaves: list[Tensor], spec: optree.PyTreeSpec) -> list[Layer]:
    """Every ``…running_mean`` with a ``…running_var`` of its shape beside it."""
    at: dict[Any, int] = {path: i for i, path in enumerate(spec.paths())}
    found: list[Layer] = []
    for path, mean in at.items():
        *above, name = path or ("",)
        if isinstance(name, str) and name.endswith("running_mean"):
            stem = name.removesuffix("running_mean")
            var = at.get((*above, stem + "running_var"))
            if var is not None and leaves[var].shape == leaves[mean].shape:
                found.append(Layer(mean, var, at.get((*above, stem + "num_batches_tracked"))))
    return found


def moments_of(calls: Sequence[Seen | None], means: list[Tensor]) -> Moments | tuple[()]:
    """The moments of some layers; the variance that batch norm keeps is the unbiased one."""
    if not means:
        return ()
    rows: list[tuple[Tensor, ...]] = []
    for call, mean in zip(calls, means, strict=True):
        zeros = torch.zeros_like(mean, dtype=torch.float64)
        if call is None:
            rows.append((zeros,) * 4)
        else:
            squares = call.var.double() * (call.elements - 1)
            rows.append((zeros + call.elements, call.mean, squares, zeros + call.momentum))
    return Moments(*(joined(column) for column in zip(*rows, strict=True)))


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """All their numbers in one float64 vector, on the device of the first."""
    device = tensors[0].device
    return torch.cat([x.to(device).reshape(-1) for x in tensors]).double()


def merged(a: Moments, b: Moments) -> Moments:
    """The moments of two groups together (Chan, Golub and LeVeque, 1983)."""
    elements = a.elements + b.elements
    share = b.elements / elements.clamp(min=1)
    apart = b.mean - a.mean
    return Moments(
        elements,
        a.mean + apart * share,
        a.squares + b.squares + apart * apart * (a.elements * share),
        torch.where(b.elements > 0, b.momentum, a.momentum),
    )
