"""Learning rates that fall by a factor, and one that goes up and then far down: torch's schedulers.

    step_decay          StepLR, MultiStepLR
    exponential_decay   ExponentialLR
    one_cycle           OneCycleLR

They are computed from the number of applied steps alone, where torch multiplies the last rate: no
rounding is carried from step to step. All of ``schedules`` holds for them.
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
    """Multiply the rate by ``factor`` after every so many steps, or at each of several counts.

    The rule: ``rate(count) = peak * factor ** passed``, where ``passed`` is ``count // steps``, or
    how many of the counts ``steps`` have been reached.

    Args:
        peak: The first rate, a number or a 0-d tensor.
        steps: An int: after how many applied steps each time, as in torch's StepLR. Several ints,
            increasing: the counts at which the rate changes, as in MultiStepLR.
        factor: What the rate is multiplied by, a number or a 0-d tensor.

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
    """Multiply the rate by ``factor`` in the course of every ``steps`` steps, down to ``end``.

    The rule: ``rate(count) = max(peak * factor ** (count / steps), end)``.

    With ``steps=1`` it is torch's ExponentialLR. ``step_decay`` multiplies at once instead.

    Args:
        peak: The first rate, a number or a 0-d tensor.
        factor: What the rate is multiplied by, a number or a 0-d tensor.
        steps: In how many applied steps it is.
        end: The rate is never below this, a number or a 0-d tensor.

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
    """Go up to ``peak`` and down to a far lower rate, as the learning rate of torch's OneCycleLR.

    The rule, along half a cosine or in a straight line from each rate to the next::

        count                            rate
        0                                start = peak / div_factor
        pct_start * steps - 1            peak
        2 * pct_start * steps - 2        start                       # only with three_phase
        steps - 1, and from there on     start / final_div_factor

    torch's scheduler raises after the last step, and divides by zero where its first or its last
    phase has no length; here the last rate stays, and such a phase is at its end. OneCycleLR also
    changes the momentum, unless ``cycle_momentum=False`` is said: this changes the rate alone.

    Args:
        peak: The highest rate, a number or a 0-d tensor.
        steps: How many applied steps there are, all phases together.
        pct_start: In which share of the steps the rate goes up, from 0 to 1. Where that is less
            than one step, the cycle begins on the way down.
        anneal_strategy: ``"cos"`` or ``"linear"``.
        div_factor: ``peak`` divided by the first rate.
        final_div_factor: The first rate divided by the last.
        three_phase: Go down to the first rate as fast as up from it, and then on to the last one;
            ``pct_start`` is at most a half then.

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
