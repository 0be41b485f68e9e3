"""The loss in its own dtypes: not judged, but reported, and looked at for overflow."""

import math
from collections.abc import Iterator

from torch import Tensor

from ._subject import Subject
from ._trials import Parts, joined, norm


def natively(
    subject: Subject,
    full: list[Tensor],
    names: list[str],
    tried: list[Parts],
    seeds: Iterator[int],
) -> tuple[list[float], str]:
    """The accumulated errors relative to the full batch's own, and a leaf that is not finite."""

    def error(parts: Parts) -> list[float]:
        found = joined([subject.sums(rows, next(seeds)) for rows in parts], subject.reduction)
        return [norm(x - y) for x, y in zip(found.leaves, full, strict=True)]

    try:
        own = error((subject.everything(),))
        cut = [error(parts) for parts in tried]
    except Exception:  # a microbatch that raises: told by the comparison itself
        return [float("nan")] * len(full), ""
    worst = [max(column) for column in zip(*cut, strict=True)]
    overflow = (name for name, x in zip(names, worst, strict=True) if not math.isfinite(x))
    return [_ratio(x, y) for x, y in zip(worst, own, strict=True)], next(overflow, "")


def _ratio(error: float, own: float) -> float:
    if not own < math.inf:
        return math.nan if not error < math.inf else 0.0
    return error / own if own else math.nan if error else 1.0
