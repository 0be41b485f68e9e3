"""Batch norm in two stages: moments that are pooled, and rows that are normalised with them.

    elements, sum(x - c), sum((x - c)**2)               of each microbatch, about a c near its mean
    x = (x - mean) / sqrt(var + eps)                    with the moments of the whole batch

Sums of x**2 would lose a third of the variance in float32 where the mean is a thousand times the
standard deviation; about a point near the mean nothing cancels. Two ranks merge theirs as two
microbatches do.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._stage import Stage, pooled, rowwise
from ._tree import Tree, accumulation_dtype, known


class Share(NamedTuple):
    """What one microbatch, or several, know of each channel."""

    elements: Tensor
    about: Tensor  # from where distances are measured, a constant
    sums: Tensor  # of the distances
    squares: Tensor  # of their squares


class BatchMoments(NamedTuple):
    """The moments of every channel over a batch, and what normalises with them.

    Attributes:
        elements: How many a channel has, int64.
        mean: Their mean, float64.
        var: Their variance, the biased one, float64.
        scale: 1, with the derivative of what divides.
        shift: 0, with the derivative of what is subtracted.
    """

    elements: Tensor
    mean: Tensor
    var: Tensor
    scale: Tensor
    shift: Tensor

    def running(
        self, mean: Tensor, var: Tensor, momentum: float | Tensor = 0.1
    ) -> tuple[Tensor, Tensor]:
        """Running statistics after this batch, as a batch norm over all of it updates them.

        Args:
            mean: The running mean before it.
            var: The running variance before it.
            momentum: The share of this batch.

        Returns:
            The running mean and variance after it.
        """
        elements = self.elements.double()  # a 0-d integer would make it float32
        unbiased = self.var * (elements / (elements - 1))
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

    The rule, with the moments of all rows of a channel::

        mean, var = Σ x / n, Σ (x - mean)² / n
        x = (x - mean) / sqrt(var + eps) * weight + bias

    Args:
        name: What the pooled moments are called. A last stage that reads them returns new running
            statistics: ``moments.running(mean, var, momentum)``.
        affine: ``affine(params)`` gives weight and bias, or None for either.
        at: The entry of the boundary, a dict, to normalise; None where the boundary is a tensor.
        eps: Added to the variance.

    Returns:
        Two stages, for a list of stages.

    Example:
        >>> from pureaccum import grad_and_value, staged
        >>> loss = staged([*batch_norm("bn"), rowwise(lambda w, x: (w * x).square().mean())])
        >>> grad_and_value(loss, microbatch_size=2)(torch.tensor(1.0), torch.randn(9, 4) + 1000)[1]
        tensor(1.0000)

    References:
        Ioffe and Szegedy, `Batch normalization <https://arxiv.org/abs/1502.03167>`_, 2015.
        Chan, Golub and LeVeque, `Algorithms for computing the sample variance
        <https://doi.org/10.1080/00031305.1983.10483115>`_, 1983.
    """

    def share(params: Tree, x: Tree) -> Share:
        return share_of(x if at is None else x[at])

    def normalised(params: Tree, x: Tree, moments: BatchMoments) -> Tree:
        weight, bias = (None, None) if affine is None else affine(params)
        y = normalise(x if at is None else x[at], moments, weight, bias, eps)
        return y if at is None else {**x, at: y}

    return [
        pooled(share, name, merge=lambda shares: moments_of(shares, eps)),
        rowwise(normalised, reads=name),
    ]


def share_of(x: Tensor) -> Share:
    """Of one microbatch: all dims but 1 are summed over."""
    x = x.to(accumulation_dtype(x.dtype))
    dims, each = [0, *range(2, x.dim())], (1, -1, *[1] * (x.dim() - 2))
    # Wherever distances are measured from, the moments are the same, and so are all derivatives.
    # (torch.var_mean takes ten times as long on a CPU.)
    about = x[0].detach()
    about = about.flatten(1).mean(1) if x.dim() > 2 else about.clone()
    away = x - about.view(each)
    count = torch.full((), x.numel() // max(x.shape[1], 1), dtype=torch.int64, device=x.device)
    return Share(count, about, away.sum(dims), away.square().sum(dims))


def merge(shares: Share) -> Share:
    """One share out of several that are stacked along dim 0, in float64."""
    elements, about, sums, squares = shares
    each, about = elements.double().unsqueeze(1), about.double()
    apart = about - about[0]
    squares = squares + 2 * apart * sums + each * apart**2
    return Share(elements.sum(0), about[0], (sums + each * apart).sum(0), squares.sum(0))


def moments_of(shares: Share, eps: float) -> BatchMoments:
    """The moments of a batch, from stacked shares."""
    share, wide = merge(shares), shares.about.dtype
    mean = share.sums / share.elements
    var = share.squares / share.elements - mean**2
    mean = share.about + mean
    # torch's kernel for batch norm takes mean and variance for constants. So it is given them as
    # constants, and an affine map beside them, the identity in value, that has their derivatives.
    mean_, var_ = mean.detach(), var.detach()
    scale = torch.sqrt((var_ + eps) / (var + eps))
    shift = (mean_ - mean) * torch.rsqrt(var + eps)
    return BatchMoments(share.elements, mean, var, scale.to(wide), shift.to(wide))


def normalise(
    x: Tensor, moments: BatchMoments, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Rows of a microbatch, with the moments of the batch."""
    if not torch.compiler.is_dynamo_compiling() and known(moments.elements) == 1:
        raise ValueError(
            f"expected more than one value per channel when training, got input of shape "
            f"{tuple(x.shape)} in a batch of one row."
        )
    wide = accumulation_dtype(x.dtype)
    scale, shift = moments.scale, moments.shift
    if weight is not None:
        scale, shift = scale * weight, shift * weight
    if bias is not None:
        shift = shift + bias
    fixed = moments.mean.detach().to(wide), moments.var.detach().to(wide)
    return F.batch_norm(x, *fixed, scale.to(wide), shift.to(wide), training=False, eps=eps)
