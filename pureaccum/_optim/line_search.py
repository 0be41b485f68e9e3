"""The line search of L-BFGS: how far to go along a descent direction.

The rule: extend the step until two points bracket one that satisfies the strong Wolfe conditions,
then narrow the bracket by the minimum of the cubic through both ends. This is torch's search,
operation by operation. It uses tensors where torch does, because their division and square root
differ from Python's in the last place. A point that is not finite counts as infinitely high.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from .._base import states, trees
from .._base.torch_internals import kernels


# A point is low enough where it lies below a line of a ten-thousandth of the first slope, and flat
# enough where its own slope is nine tenths of that or less: the strong Wolfe conditions. What lies
# between two points is not divided any more where no parameter would change by so much.
LOW, FLAT, NARROW = 1e-4, 0.9, 1e-9


class Line(NamedTuple):
    """Where an iteration looks: ``x + t * d``, the direction as a vector and leaf by leaf."""

    x: list[Tensor]
    d: Tensor
    pieces: list[Tensor]

    def at(self, t: float) -> list[Tensor]:
        """The leaves there, as new tensors."""
        (new,) = states.copies([self.x])
        kernels.foreach_add_([trees.real_parts(y) for y in new], self.pieces, alpha=t)
        return new


class Point(NamedTuple):
    """A point on the line ``params + t * d``; its slope is that along ``d``.

    Attributes:
        t: A number, or a 0-d tensor.
        value: The value there.
        gradient: The gradient there.
        slope: A 0-d tensor in float64, on the host.
    """

    t: Any
    value: float
    gradient: Tensor
    slope: Tensor


def strong_wolfe(
    at: Callable[[Any], Point], start: Point, t: Any, reach: float, most: int
) -> Point:
    """A point that is lower and where the slope is small, or the lowest that was seen.

    Args:
        at: Evaluates the point at some ``t``.
        start: The point at 0, from where the line goes down.
        t: Where to look first.
        reach: The largest number of the direction.
        most: How many points may be looked at after the first.
    """
    ends, left = _bracket(at, start, t, most)
    low, slow = _lower(ends), False
    while left > 0 and not abs(ends[1].t - ends[0].t) * reach < NARROW:
        t, slow = _between(ends, slow)
        point, left = at(t), left - 1
        if _too_high(point, start) or point.value >= ends[low].value:
            ends[1 - low] = point
            low = _lower(ends)
            continue
        if _flat(point, start):
            return point
        if point.slope * (ends[1 - low].t - ends[low].t) >= 0:
            ends[1 - low] = ends[low]
        ends[low] = point
    return ends[low]


def _bracket(
    at: Callable[[Any], Point], start: Point, t: Any, most: int
) -> tuple[list[Point], int]:
    """Two points with such a point between them, or that point alone; how many may follow."""
    last, point, n = start, at(t), 0
    while n < most and not (_too_high(point, start) or (n > 1 and point.value >= last.value)):
        if _flat(point, start):
            return [point], 0
        if point.slope >= 0:
            break
        t = _lowest_of_cubic(last, point, point.t + 0.01 * (point.t - last.t), point.t * 10)
        last, point, n = point, at(t), n + 1
    return [start if n >= most else last, point], most - n


def _between(ends: list[Point], slow: bool) -> tuple[Any, bool]:
    """Where to divide what lies between two points, and whether that is near one of them."""
    left, right = sorted(end.t for end in ends)
    t = _lowest_of_cubic(ends[0], ends[1], left, right)
    # Near an end for the second time, or at the end: a tenth of the way from it.
    edge, near = 0.1 * (right - left), min(right - t, t - left)
    if near < edge and (slow or t >= right or t <= left):
        return (right - edge if abs(t - right) < abs(t - left) else left + edge), False
    return t, bool(near < edge)


def _too_high(point: Point, start: Point) -> bool:
    return bool(point.value > start.value + LOW * point.t * start.slope)


def _flat(point: Point, start: Point) -> bool:
    return bool(abs(point.slope) <= -FLAT * start.slope)


def _lower(ends: list[Point]) -> int:
    """Which end lies lower; the first where they are as high."""
    return 0 if ends[0].value <= ends[-1].value else 1


def _lowest_of_cubic(a: Point, b: Point, least: Any, most: Any) -> Any:
    """Where the cubic through two points with these slopes is lowest, between two bounds."""
    if a.t > b.t:
        a, b = b, a
    d1 = a.slope + b.slope - divide(3 * (a.value - b.value), a.t - b.t)
    square = d1 * d1 - a.slope * b.slope
    if square >= 0:
        d2 = square.sqrt()
        part = (b.slope + d2 - d1) / (b.slope - a.slope + 2 * d2)
        t = min(max(b.t - (b.t - a.t) * part, least), most)
        if not math.isnan(t):
            return t
    return (least + most) / 2.0


def divide(a: float, b: Any) -> Any:
    """``a / b``, and NaN where ``b`` is zero."""
    return a / b if b else math.nan
