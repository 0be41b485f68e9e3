"""Batch norm of rows that come in microbatches, with the moments of the whole batch.

    sum(x - c), sum((x - c)**2)           of each microbatch, about a c near its mean
    x = (x - mean) / sqrt(var + eps)      with the moments of the whole batch

Sums of x**2 would lose a third of the variance in float32 where the mean is a thousand times the
standard deviation; about a point near the mean nothing cancels.
"""

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._base import trees
from .._base.torch_internals import modes
from .._core import exchange


class Share(NamedTuple):
    """Sums over one microbatch, or over several, for each channel."""

    about: Tensor  # where distances are measured from, a constant
    sums: Tensor  # of the distances
    squares: Tensor  # of their squares


class BatchMoments(NamedTuple):
    """The moments of each channel over a batch, in float64."""

    elements: int | Tensor  # how many a channel has
    mean: Tensor
    var: Tensor  # the biased one

    def running(self, mean: Tensor, var: Tensor, momentum: float | Tensor) -> tuple[Tensor, Tensor]:
        """Running statistics after this batch, which nothing is differentiated through."""
        unbiased = self.var * (self.elements / (self.elements - 1))
        pairs = (mean, self.mean), (var, unbiased)
        new = [torch.lerp(x.double(), y.detach(), momentum).to(x.dtype) for x, y in pairs]
        return new[0], new[1]


class Scaling(NamedTuple):
    """What rows are normalised with: constants, and beside them what has their derivatives.

    torch's kernel takes mean and variance for constants. So it is given them as constants, and an
    affine map, the identity in value, that is differentiated in their place. The layer's own affine
    map comes on top.
    """

    mean: Tensor
    var: Tensor
    scale: Tensor
    shift: Tensor


def share_of_rows(x: Tensor, dims: int, dtype: torch.dtype) -> Share:
    """The share of one microbatch: sums over all of its dims but dim 1."""
    if dtype != (wide := trees.accumulation_dtype(dtype)):
        x = x.to(wide)
    # The moments and their derivatives do not depend on where distances are measured from.
    # (torch.var_mean takes ten times as long on a CPU.)
    about, inner = x.detach()[:1].sum(0), [*range(2, dims)]  # of no rows: zero
    about = about.mean([dim - 1 for dim in inner], keepdim=True) if inner else about
    away = x - about
    return Share(about, away.sum([0, *inner]), away.square().sum([0, *inner]))


def merged_shares(shares: Share, elements: Sequence[int] | Tensor) -> Share:
    """One share out of several that are stacked along dim 0, in float64.

    It is about the point of the first that has any elements: one without measures from zero.
    """
    about, sums, squares = (x.double().flatten(1) for x in shares)
    if isinstance(elements, Tensor):
        each = elements.unsqueeze(1)
        some = each > 0
        first = torch.where(some & (some.cumsum(0) == 1), about, 0.0).sum(0)
    else:
        each = torch.tensor(elements, dtype=torch.float64, device="cpu")
        each = each.to(about.device, non_blocking=True).unsqueeze(1)  # which nothing waits for
        first = about[0]
    apart = about - first
    squares = squares + 2 * apart * sums + each * apart**2
    return Share(first, (sums + each * apart).sum(0), squares.sum(0))


def moments_of(shares: Share, elements: Sequence[int], group: Any = None) -> BatchMoments:
    """The moments of a batch, from stacked shares with so many elements of a channel in each.

    Where a group of ranks is given, the batch is that of all of them.
    """
    merged, count = merged_shares(shares, elements), sum(elements)
    if group is not None:
        number = merged.about.new_full((1,), float(count))
        of_all = exchange.gather_one(torch.cat([number, *merged]), group)
        each, *stacked = of_all.split([1, *[len(merged.about)] * 3], 1)
        each = each.squeeze(1)
        merged, count = merged_shares(Share(*stacked), each), each.sum()
    away = merged.sums / count
    return BatchMoments(count, merged.about + away, merged.squares / count - away**2)


def scaling_of(
    moments: BatchMoments,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> Scaling:
    """The scaling for rows of a dtype."""
    mean, var = moments.mean.detach(), moments.var.detach()
    inverse = torch.rsqrt(moments.var + eps)
    scale, shift = torch.sqrt(var + eps) * inverse, (mean - moments.mean) * inverse
    if weight is not None:
        scale, shift = scale * weight, shift * weight
    if bias is not None:
        shift = shift + bias
    wide = trees.accumulation_dtype(dtype)
    return Scaling(*(x.to(wide) for x in (mean, var, scale, shift)))


def normalise(
    x: Tensor, scaling: Scaling, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Normalise rows of a microbatch, with a weight and a bias that are computed there, if any."""
    mean, var, scale, shift = scaling
    if weight is not None:
        scale, shift = scale * weight, shift * weight
    if bias is not None:
        shift = shift + bias
    if weight is not None or bias is not None:
        scale, shift = scale.to(mean), shift.to(mean)
    spatial = x.shape[2:]
    # Where a dim is 1, strides do not say in which order numbers lie, and torch's kernel for images
    # takes those of a gradient for another order than they are in.
    flat = x.flatten(2) if len(spatial) > 1 and 1 in (x.shape[0], *spatial) else x
    if x.dtype != mean.dtype and modes.transform_active():  # torch.func takes all in one dtype only
        flat = flat.to(mean.dtype)
    out = F.batch_norm(flat, mean, var, scale, shift, training=False, eps=eps).to(x.dtype)
    return out if flat.dim() == x.dim() else out.unflatten(2, spatial)


def of_itself(call: Mapping[str, Any]) -> Tensor:
    """Rows that are normalised with their own moments, for a call of F.batch_norm."""
    x, eps = call["input"], call["eps"]
    share = Share(*(part.unsqueeze(0) for part in share_of_rows(x, x.dim(), x.dtype)))
    moments = moments_of(share, [x.numel() // x.shape[1]])
    scaling = scaling_of(moments, call["weight"], call["bias"], eps, x.dtype)
    return normalise(x, scaling, None, None, eps)


def nearly_of_itself(call: Mapping[str, Any]) -> Tensor:
    """About the same in a tenth of the time, for where numbers do not matter."""
    x = call["input"]
    several = x if len(x) > 1 else torch.cat([x, x])  # torch refuses one number for a channel
    return torch.native_batch_norm(several, None, None, None, None, True, 0.0, 1e-5)[0][: len(x)]


# Where it is called --------------------------------------------------------------------------

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def couples(layer: nn.Module) -> bool:
    """Whether a module is a BatchNorm that looks at the batch."""
    if not isinstance(layer, BATCH_NORMS):
        return False
    return layer.training or (layer.running_mean is None and layer.running_var is None)


_DIMS = {nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,)}


def check_input(layer: Any, place: str, shape: torch.Size) -> None:
    """Check that a BatchNorm, called at a place, takes what it is given."""
    dims = next((dims for cls, dims in _DIMS.items() if isinstance(layer, cls)), None)
    if len(shape) < 2 or (dims and len(shape) not in dims):
        expected = " or ".join(f"{n}D" for n in dims or ("at least 2",))
        raise ValueError(f"{place}: expected {expected} input (got {len(shape)}D input)")
    channels = getattr(layer, "num_features", shape[1])
    if channels != shape[1] and (layer.affine or layer.running_mean is not None):
        raise ValueError(
            f"{place} normalises {channels} channels, but its input has shape {tuple(shape)}. "
            "Channels are dim 1."
        )


_ARGUMENTS = {name: its.default for name, its in signature(F.batch_norm).parameters.items()}


def batch_norm_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of F.batch_norm, by name."""
    return {**_ARGUMENTS, **dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}


def in_training(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of a batch norm looks at what it is given, as far as can be told."""
    if func is F.batch_norm:
        return batch_norm_call(args, kwargs)["training"] is not False
    names = "input weight bias running_mean running_var training"
    call = dict(zip(names.split(), args, strict=False)) | {**kwargs}
    return func is not torch.batch_norm or call.get("training") is not False


def refusing_batch_norm(error: Callable[[Any], BaseException]) -> modes.Asking:
    """A mode that raises where a batch norm, by its function, looks at what it is given."""

    def before(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if func in (F.batch_norm, torch.batch_norm) and in_training(func, args, kwargs):
            raise error(func)

    return modes.Asking(before)
