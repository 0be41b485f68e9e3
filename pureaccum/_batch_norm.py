"""Batch norm in two stages: moments that are pooled, and rows that are normalised with them.

    elements, mean, squares = sum((x - mean)**2)        of each microbatch, merged without
    x = (x - mean) / sqrt(squares / elements + eps)     cancellation (Chan et al., 1983)

Sums of x**2 would lose a third of the variance in float32 where the mean is a thousand times the
standard deviation; these lose nothing, and two ranks merge theirs as two microbatches do.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._stage import Stage, pooled, rowwise
from ._tree import Tree, accumulation_dtype, known


class BatchMoments(NamedTuple):
    """The moments of every channel over a batch, float64.

    Args:
        elements: How many a channel has, int64.
        mean: Their mean.
        squares: The sum of their squared distances from it.
    """

    elements: Tensor
    mean: Tensor
    squares: Tensor

    def running(
        self, mean: Tensor, var: Tensor, momentum: float | Tensor = 0.1
    ) -> tuple[Tensor, Tensor]:
        """Running statistics after this batch, as a batch norm over all of it updates them."""
        unbiased = self.squares / (self.elements - 1)
        pairs = (mean, self.mean), (var, unbiased)
        new_mean, new_var = (torch.lerp(x.double(), y, momentum).to(x.dtype) for x, y in pairs)
        return new_mean, new_var


def batch_norm(
    name: str,
    affine: Callable[[Tree], tuple[Tensor | None, Tensor | None]] | None = None,
    *,
    at: Any = None,
    eps: float = 1e-5,
) -> list[Stage]:
    """Make the two stages of a batch norm in training mode, over the full batch.

    Args:
        name: What the pooled moments are called. A last stage that reads them returns new running
            statistics: ``moments.running(mean, var, momentum)``.
        affine: ``affine(params)`` gives weight and bias, or None for either.
        at: The entry of the boundary, a dict, to normalise; None where the boundary is a tensor.
        eps: Added to the variance.

    Returns:
        Two stages, for a list of stages.

    >>> from pureaccum import grad_and_value, staged
    >>> loss = staged([*batch_norm("bn"), rowwise(lambda w, x: (w * x).square().mean())])
    >>> grad_and_value(loss, microbatch_size=2)(torch.tensor(1.0), torch.randn(9, 4) + 1000)[1]
    tensor(1.0000)
    """

    def share(params: Tree, x: Tree) -> BatchMoments:
        return moments(x if at is None else x[at])

    def normalised(params: Tree, x: Tree, pooled: BatchMoments) -> Tree:
        weight, bias = (None, None) if affine is None else affine(params)
        y = normalise(x if at is None else x[at], pooled, weight, bias, eps)
        return y if at is None else {**x, at: y}

    return [pooled(share, name, merge=merge), rowwise(normalised, reads=name)]


def moments(x: Tensor) -> BatchMoments:
    """Of the channels of one microbatch: all dims but 1 are summed over."""
    x = x.to(accumulation_dtype(x.dtype))
    dims, each = [0, *range(2, x.dim())], (1, -1, *[1] * (x.dim() - 2))
    elements = x.numel() // max(x.shape[1], 1)
    # From wherever distances are measured, the moments are the same, and so are all derivatives.
    # From near the mean nothing cancels. (torch.var_mean takes ten times as long on a CPU.)
    about = x[:1].detach().mean(dims)
    away = x - about.view(each)
    mean = away.sum(dims).double() / elements
    squares = away.square().sum(dims).double() - elements * mean**2
    count = torch.full((), elements, dtype=torch.int64, device=x.device)
    return BatchMoments(count, mean + about, squares)


def merge(parts: BatchMoments) -> BatchMoments:
    """Of several microbatches, or ranks, stacked along dim 0."""
    elements, each = parts.elements.sum(0), parts.elements.double().unsqueeze(1)
    mean = (parts.mean * (each / elements)).sum(0)
    squares = parts.squares + each * (parts.mean - mean) ** 2
    return BatchMoments(elements, mean, squares.sum(0))


def normalise(
    x: Tensor, pooled: BatchMoments, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Rows of a microbatch, with the moments of the batch.

    torch's own kernel takes mean and variance for constants. So it is given them as constants,
    and an affine map beside them that is the identity in value and has their derivatives.
    """
    if not torch.compiler.is_compiling() and known(pooled.elements) == 1:
        raise ValueError(
            f"expected more than one value per channel when training, got input of shape "
            f"{tuple(x.shape)} in a batch of one row."
        )
    var = pooled.squares / pooled.elements
    mean_, var_ = pooled.mean.detach(), var.detach()
    wide = accumulation_dtype(x.dtype)
    scale, shift = torch.sqrt((var_ + eps) / (var + eps)), (mean_ - pooled.mean)
    shift = shift * torch.rsqrt(var + eps)
    if weight is not None:
        scale, shift = scale * weight, shift * weight
    if bias is not None:
        shift = shift + bias
    fixed = mean_.to(wide), var_.to(wide)
    return F.batch_norm(x, *fixed, scale.to(wide), shift.to(wide), training=False, eps=eps)
