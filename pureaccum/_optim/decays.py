"""Learning rates that fall by a factor, and the one-cycle rate, as in torch's schedulers.

    step_decay          StepLR, MultiStepLR
    exponential_decay   ExponentialLR
    one_cycle           OneCycleLR

Each rate is computed from the number of applied steps alone. torch multiplies the last rate, so
its rounding errors accumulate and these do not. All that ``schedules`` says holds for them too.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._base import checks, settings
from . import schedules


@settings.records
def step_decay(
    peak: float | Tensor, steps: int | Sequence[int], factor: float | Tensor = 0.1
) -> schedules.Schedule:
    """Multiply the rate by ``factor`` every ``steps`` steps, or at each count in a list.

    The rule: ``rate(count) = peak * factor ** passed``. ``passed`` is ``count // steps`` for an
    int. For a list it is the number of its counts that have been reached.

    Args:
        peak: The first rate, a number or a 0-d tensor.
        steps: An int: the number of applied steps between changes, as in torch's StepLR. A list of
            increasing ints: the counts at which the rate changes, as in MultiStepLR.
        factor: The number that multiplies the rate at each change, or a 0-d tensor.

    Example:
        >>> rate = step_decay(1.0, steps=2, factor=0.5)
        >>> [rate(torch.tensor(count)).item() for count in range(6)]
        [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
        >>> rate = step_decay(1.0, steps=[1, 4], factor=0.5)
        >>> [rate(torch.tensor(count)).item() for count in range(6)]
        [1.0, 0.5, 0.5, 0.5, 0.25, 0.25]

    References:
        `torch.optim.lr_scheduler.MultiStepLR <https://docs.pytorch.org/docs/stable/generated/torch.optim.lr_scheduler.MultiStepLR.html>`_
    """
    peak, factor = schedules.read_rate("peak", peak), schedules.read_rate("factor", factor)
    if isinstance(steps, Sequence):
        at, every = schedules.check_increasing(steps, "steps"), 0
    else:
        expected = f"{schedules.COUNT}, or several of them in a list"
        at, every = [], checks.check_int(steps, "steps", expected, 1, checks.LARGEST_INT)

    def rate(count: Tensor) -> Tensor:
        count = schedules.steps_of(count)
        if every:
            passed = torch.div(count, every, rounding_mode="floor").double()
        else:
            passed = sum(((count >= step).double() for step in at), schedules.as_rate(0.0, count))
        return schedules.as_rate(peak, count) * schedules.as_rate(factor, count) ** passed

    return rate


@settings.records
def exponential_decay(
    peak: float | Tensor, factor: float | Tensor, steps: int = 1, end: float | Tensor = 0.0
) -> schedules.Schedule:
    """Shrink the rate smoothly, by ``factor`` over every ``steps`` steps, but never below ``end``.

    The rule: ``rate(count) = max(peak * factor ** (count / steps), end)``.

    With ``steps=1`` this is torch's ExponentialLR. For a rate that drops in steps see
    ``step_decay``.

    Args:
        peak: The first rate, a number or a 0-d tensor.
        factor: The number that multiplies the rate over ``steps`` steps, or a 0-d tensor.
        steps: The number of applied steps over which the rate changes by ``factor``.
        end: The lowest rate, a number or a 0-d tensor.

    Example:
        >>> rate = exponential_decay(1.0, factor=0.25, steps=2, end=0.1)
        >>> [rate(torch.tensor(count)).item() for count in range(6)]
        [1.0, 0.5, 0.25, 0.125, 0.1, 0.1]

    References:
        `torch.optim.lr_scheduler.ExponentialLR <https://docs.pytorch.org/docs/stable/generated/torch.optim.lr_scheduler.ExponentialLR.html>`_
    """
    peak, factor, end = (
        schedules.read_rate("peak", peak),
        schedules.read_rate("factor", factor),
        schedules.read_rate("end", end),
    )
    steps = checks.check_int(steps, "steps", schedules.COUNT, 1, checks.LARGEST_INT)
    if isinstance(peak, float) and isinstance(end, float) and end > peak:
        raise ValueError(
            f"end is {end!r}, above peak={peak!r}; expected at most peak, because end is the "
            "lowest rate. Likely cause: end is a count, not a rate."
        )

    def rate(count: Tensor) -> Tensor:
        power = schedules.as_rate(factor, count) ** (schedules.count_within(count) / steps)
        now, least = schedules.as_rate(peak, count) * power, schedules.as_rate(end, count)
        return torch.where(now < least, least, now)

    return rate


@settings.records
def one_cycle(
    peak: float | Tensor,
    steps: int,
    *,
    pct_start: float = 0.3,
    anneal_strategy: str = "cos",
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
    three_phase: bool = False,
) -> schedules.Schedule:
    """Raise the rate to ``peak``, then lower it far below its start, as torch's OneCycleLR does.

    The rule, along half a cosine or in a straight line from each rate to the next::

        count                            rate
        0                                start = peak / div_factor
        pct_start * steps - 1            peak
        2 * pct_start * steps - 2        start                       # only with three_phase
        steps - 1, and from there on     start / final_div_factor

    Unlike torch's scheduler, which raises after the last step, this one keeps the last rate. Where
    torch divides by zero because its first or last phase has no length, the rate jumps to the end
    of that phase. Only the rate changes: OneCycleLR by default cycles the momentum too.

    Args:
        peak: The highest rate, a number or a 0-d tensor.
        steps: The number of applied steps in all phases together.
        pct_start: The share of the steps in which the rate rises, from 0 to 1. If that is less than
            one step, the rate starts to fall at once.
        anneal_strategy: ``"cos"`` or ``"linear"``.
        div_factor: ``peak`` divided by the first rate.
        final_div_factor: The first rate divided by the last.
        three_phase: Whether the rate first falls to its start as fast as it rose, and then on to
            the last rate. ``pct_start`` is then at most 0.5.

    Example:
        >>> rate = one_cycle(1.0, steps=6, pct_start=0.5, anneal_strategy="linear", div_factor=5)
        >>> [round(rate(torch.tensor(count)).item(), 3) for count in range(8)]
        [0.2, 0.6, 1.0, 0.667, 0.333, 0.0, 0.0, 0.0]

    References:
        Smith and Topin, `Super-convergence <https://arxiv.org/abs/1708.07120>`_, 2018;
        ``torch.optim.lr_scheduler.OneCycleLR``
    """
    peak = schedules.read_rate("peak", peak)
    steps = checks.check_int(steps, "steps", schedules.COUNT, 1, checks.LARGEST_INT)
    checks.check_choice(anneal_strategy, ("cos", "linear"), "anneal_strategy")
    checks.check_choice(three_phase, (False, True), "three_phase")
    most, expected = (0.5, "a half, because the way back is as long") if three_phase else (1, "1")
    expected = f"a share of the steps from 0 to {expected}"
    pct_start = checks.check_number(pct_start, "pct_start", expected, lambda it: 0 <= it <= most)
    div_factor = _check_divisor("div_factor", div_factor)
    final_div_factor = _check_divisor("final_div_factor", final_div_factor)
    # torch's arithmetic: the same step on either side of each
    ends = [pct_start * steps - 1, *[2 * pct_start * steps - 2] * three_phase, float(steps - 1)]

    def rate(count: Tensor) -> Tensor:
        count = schedules.count_within(count, steps - 1)
        top = schedules.as_rate(peak, count)
        start = top / schedules.as_rate(div_factor, count)
        rates = [
            start,
            top,
            *[start] * three_phase,
            start / schedules.as_rate(final_div_factor, count),
        ]
        chosen = rates[-1]
        phases = zip(itertools.pairwise((0.0, *ends)), itertools.pairwise(rates), strict=True)
        for (begin, end), (first, last) in reversed(list(phases)):
            length = end - begin
            left = ((end - count) / length).clamp(0, 1) if length else torch.zeros_like(count)
            left = schedules.half_cosine(left) if anneal_strategy == "cos" else left
            chosen = torch.where(count <= end, torch.lerp(last, first, left), chosen)
        return chosen

    return rate


def _check_divisor(name: str, value: Any) -> float:
    return checks.check_number(
        value, name, "a finite number above zero", lambda it: 0 < it < torch.inf
    )
