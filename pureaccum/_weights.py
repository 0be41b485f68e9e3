"""What a microbatch weighs: its total, its weight, and how its gradient is pulled.

The gradient of a mean is pulled with its rows and that of ``Weighted`` as it is, because sums
add up where means do not. But a sum over 2,000 tokens overflows in fp16 where their mean does
not. So the cotangent is the weight divided by the power of two at or above it, and that power
multiplies the gradient once it has been cast to the sum's dtype: exact, with the range of a mean.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._loss import Read, Reduction, Shape, join_aux
from ._sums import Weighing


class Microbatch(NamedTuple):
    """What a microbatch came to, beside its gradient."""

    total: Tensor  # float64; zero where nothing is added
    weight: Tensor  # float64; likewise
    share: Tensor  # its weight in a mean of its aux: its rows where the loss is a plain sum
    finite: Tensor
    aux: Any
    dtype: torch.dtype  # of the loss


def weigh(
    seen: Read, shape: Shape, rows: int | None, reduction: Reduction
) -> tuple[Weighing | None, Microbatch]:
    """Weigh a microbatch; None where it is known to weigh nothing before anything is pulled."""
    total = seen.total
    weighing: Weighing | None
    if not isinstance(seen.weight, tuple):
        weight, keep = seen.weight, seen.weight != 0
        wide = torch.where(keep, total.double(), 0.0)
        # The weight lies on the device and nothing may wait for it. The lower end keeps the
        # reciprocal of a tiny weight inside float32.
        mantissa, _ = torch.frexp(weight)
        power = torch.where(mantissa == 0.5, weight, weight / mantissa).clamp(min=2.0**-24)
        power = torch.where(weight > 0, power, 1.0)
        cotangent = torch.ones_like(total) * (1 / power).to(total.dtype)
        share, weighing = weight, Weighing(cotangent, power, keep)
    elif reduction == "sum":  # has no weight: there is nothing to divide by
        wide = total.double()
        weight, share = torch.zeros_like(wide), torch.full_like(wide, float(rows or 0))
        weighing = Weighing(torch.ones_like(total), 1.0, None)
    elif rows is None:
        raise ValueError(
            "the loss is a mean over rows, but no batch argument holds a tensor that tells how "
            "many. Return Weighted(total, weight), pass reduction='sum', or name the batch "
            "arguments in batch_argnums."
        )
    elif rows == 0:  # the mean of nothing is NaN, and so is its gradient
        wide = weight = share = torch.zeros_like(total, dtype=torch.float64)
        weighing = None
    else:
        share = weight = torch.full_like(total, rows, dtype=torch.float64)
        wide, power = total * weight, float(1 << (rows - 1).bit_length())
        weighing = Weighing(torch.full_like(total, rows / power), power, None)
    finite = (wide - wide) == 0  # inf - inf is NaN; a third of the time of isfinite
    aux = join_aux(seen.aux, shape)
    return weighing, Microbatch(wide, weight, share, finite, aux, shape.dtype)


def judged(added: Microbatch, flags: Iterable[Tensor], keep: Tensor | None) -> Microbatch:
    """A microbatch is finite if its total and all of its gradient are, or if it has no weight."""
    ok = added.finite
    for flag in flags:
        ok = ok & flag.to(ok.device)
    return added._replace(finite=ok if keep is None else ok | ~keep)


def kept(added: Microbatch) -> Microbatch:
    """A skipped microbatch takes its weight along."""
    total, weight, share = (
        torch.where(added.finite, x, 0.0) for x in (added.total, added.weight, added.share)
    )
    return added._replace(total=total, weight=weight, share=share)


def known_true(flag: Tensor) -> bool:
    """Whether a flag is known to be true. Only one that lies on the CPU anyway is read."""
    return type(flag) is torch.Tensor and flag.device.type == "cpu" and bool(flag)
