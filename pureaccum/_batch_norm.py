"""Batch norm of rows that come in microbatches, with the moments of all of them.

    sum(x - c), sum((x - c)**2)           of each microbatch, about a c near its mean
    x = (x - mean) / sqrt(var + eps)      with the moments of the whole batch

Sums of x**2 would lose a third of the variance in float32 where the mean is a thousand times the
standard deviation; about a point near the mean nothing cancels.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._tree import accumulation_dtype


class Share(NamedTuple):
    """What one microbatch, or several, know of each channel."""

    about: Tensor  # from where distances are measured, a constant
    sums: Tensor  # of the distances
    squares: Tensor  # of their squares


class Moments(NamedTuple):
    """The moments of every channel over a batch, in float64."""

    elements: int  # of a channel
    mean: Tensor
    var: Tensor  # the biased one

    def running(
        self, mean: Tensor, var: Tensor, momentum: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        """Running statistics after this batch, which have no history, whoever differentiates."""
        unbiased = self.var * (self.elements / (self.elements - 1))
        pairs = (mean, self.mean), (var, unbiased)
        new = [torch.lerp(x.double(), y.detach(), momentum).to(x.dtype) for x, y in pairs]
        return new[0], new[1]


class Scaling(NamedTuple):
    """What normalises rows: constants, and beside them what has their derivatives.

    torch's kernel takes mean and variance for constants. So it is given them as constants, and an
    affine map, the identity in value, that is differentiated in their place.
    """

    mean: Tensor
    var: Tensor
    scale: Tensor  # 1
    shift: Tensor  # 0


def share_of(x: Tensor) -> Share:
    """Of one microbatch: all dims but 1 are summed over."""
    x = x.to(accumulation_dtype(x.dtype))
    dims, each = [0, *range(2, x.dim())], (1, -1, *[1] * (x.dim() - 2))
    # Wherever distances are measured from, the moments are the same, and so are all derivatives.
    # (torch.var_mean takes ten times as long on a CPU.)
    about = x[0].detach()
    about = about.flatten(1).mean(1) if x.dim() > 2 else about.clone()
    away = x - about.view(each)
    return Share(about, away.sum(dims), away.square().sum(dims))


def merge(shares: Share, elements: Sequence[int]) -> Share:
    """One share out of several that are stacked along dim 0, in float64."""
    about, sums, squares = (x.double() for x in shares)
    each = torch.tensor(elements, dtype=torch.float64, device=about.device).unsqueeze(1)
    apart = about - about[0]
    squares = squares + 2 * apart * sums + each * apart**2
    return Share(about[0], (sums + each * apart).sum(0), squares.sum(0))


def moments_of(shares: Share, elements: Sequence[int]) -> Moments:
    """The moments of a batch, from stacked shares; ``elements`` are those of a channel in each."""
    (about, sums, squares), count = merge(shares, elements), sum(elements)
    away = sums / count
    return Moments(count, about + away, squares / count - away**2)


def scaling_of(moments: Moments, eps: float, dtype: torch.dtype) -> Scaling:
    """What normalises rows of a dtype."""
    mean, var = moments.mean.detach(), moments.var.detach()
    inverse = torch.rsqrt(moments.var + eps)
    scale, shift = torch.sqrt(var + eps) * inverse, (mean - moments.mean) * inverse
    wide = accumulation_dtype(dtype)
    return Scaling(*(x.to(wide) for x in (mean, var, scale, shift)))


def normalise(
    x: Tensor, scaling: Scaling, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Rows of a microbatch, with the moments of the batch."""
    mean, var, scale, shift = scaling
    if weight is not None:
        scale, shift = scale * weight, shift * weight
    if bias is not None:
        shift = shift + bias
    return F.batch_norm(x, mean, var, scale.to(mean), shift.to(mean), training=False, eps=eps)
