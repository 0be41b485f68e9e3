"""The loss in its own dtypes: not judged, but reported, and looked at for overflow."""

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from .cuts import Parts
from .trials import norm


def natively(
    run: Callable[[Parts], list[Tensor]],
    alone: Callable[[], list[Tensor]],
    full: list[Tensor],
    tried: Sequence[Parts],
) -> tuple[list[float], int | None]:
    """Errors of what is accumulated, relative to the full batch's own; a leaf that is not finite.

    Args:
        run: Accumulates in the loss's own dtypes.
        alone: The full batch at once, in these.
        full: The full batch in the dtype of the comparison.
        tried: Some splits that are finite there.
    """

    def error(got: list[Tensor]) -> list[float]:
        return [norm(x - y) for x, y in zip(got, full, strict=True)]

    if not tried:
        return [math.nan] * len(full), None
    own = error(alone())
    worst = [max(column) for column in zip(*(error(run(parts)) for parts in tried), strict=True)]
    overflow = (i for i, x in enumerate(worst) if not math.isfinite(x))
    return [_ratio(x, y) for x, y in zip(worst, own, strict=True)], next(overflow, None)


def _ratio(error: float, own: float) -> float:
    if not own < math.inf:
        return math.nan if not error < math.inf else 0.0
    return error / own if own else math.nan if error else 1.0


def as_near_as_can_be(ratios: Sequence[float]) -> bool:
    """Whether the errors are rounding in the loss's own dtype, for all that can be told."""
    told = [ratio for ratio in ratios if not math.isnan(ratio)]
    return bool(told) and max(told) <= _ROUNDINGS


_ROUNDINGS = 16.0  # of the full batch's own error: a real one is thousands of times that
