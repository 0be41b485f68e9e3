"""Learning rates that change with the number of applied steps.

A schedule is any function from that number, a 0-d integer tensor, to a 0-d tensor. Those made
here give float64 and never wait for the device; they go through vmap, torch.compile and
torch.func, also for gradients with respect to the rates that they are made of.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import optree
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from .._base import LARGEST_INT, as_float, known, moved, paths, shown, transform_active


Schedule = Callable[[Tensor], Any]


def constant(value: float | Tensor) -> Schedule:
    """The same rate for ever.

    The rule: ``rate(count) = value``, in float64.

    Args:
        value: A number, or a 0-d tensor.

    Returns:
        A schedule.

    Example:
        >>> constant(0.1)(torch.tensor(7))
        tensor(0.1000, dtype=torch.float64)

    References:
        ``optax``: `Optimizer schedules
        <https://optax.readthedocs.io/en/latest/api/optimizer_schedules.html>`_
    """
    value = _part("value", value)
    return lambda count: _float64(value, count)


def linear_warmup(peak: float | Tensor, steps: int, start: float | Tensor = 0.0) -> Schedule:
    """From ``start`` at count 0 in a straight line to ``peak`` at ``steps``, and on at ``peak``.

    The rule: ``rate(count) = start + (peak - start) * min(count / steps, 1)``.

    Args:
        peak: The last rate, a number or a 0-d tensor.
        steps: After how many applied steps it is reached.
        start: The first rate, a number or a 0-d tensor.

    Returns:
        A schedule.

    Example:
        >>> rate = linear_warmup(0.1, steps=4)
        >>> [round(rate(torch.tensor(count)).item(), 3) for count in range(6)]
        [0.0, 0.025, 0.05, 0.075, 0.1, 0.1]

    References:
        Goyal et al., `Accurate, large minibatch SGD <https://arxiv.org/abs/1706.02677>`_, 2017.
    """
    peak = _part("peak", peak)
    _check_count("steps", steps)
    start = _part("start", start)

    def rate(count: Tensor) -> Tensor:
        done = _within(count, steps) / steps
        return torch.lerp(_float64(start, count), _float64(peak, count), done)

    return rate


def cosine_decay(peak: float | Tensor, steps: int, end: float | Tensor = 0.0) -> Schedule:
    """From ``peak`` at count 0 along half a cosine to ``end`` at ``steps``, and on at ``end``.

    The rule: ``rate(count) = end + (peak - end) * (1 + cos(pi * min(count / steps, 1))) / 2``.

    Args:
        peak: The first rate, a number or a 0-d tensor.
        steps: After how many applied steps ``end`` is reached.
        end: The last rate, a number or a 0-d tensor.

    Returns:
        A schedule.

    Example:
        >>> rate = cosine_decay(0.1, steps=4)
        >>> [round(rate(torch.tensor(count)).item(), 3) for count in range(6)]
        [0.1, 0.085, 0.05, 0.015, 0.0, 0.0]

    References:
        Loshchilov and Hutter, `SGDR <https://arxiv.org/abs/1608.03983>`_, 2017.
    """
    peak = _part("peak", peak)
    _check_count("steps", steps)
    end = _part("end", end)

    def rate(count: Tensor) -> Tensor:
        left = (steps - _within(count, steps)) / steps
        # (1 + cos(pi * done)) / 2, which would cancel near the end, and this is exact at both ends
        height = torch.sin(math.pi / 2 * left) ** 2
        return torch.lerp(_float64(end, count), _float64(peak, count), height)

    return rate


def join_schedules(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """One schedule after the other: at each boundary the next begins, at its own count 0.

    The rule: ``rate(count) = schedules[i](count - begins[i])``, where ``begins`` is
    ``[0, *boundaries]`` and ``i`` the last one that has begun.

    A schedule is only ever asked for counts of its own share, also where another one is chosen:
    an inf or NaN outside of it reaches neither the rate nor its derivatives.

    Args:
        schedules: What is joined, at least one.
        boundaries: The counts at which the second, third … schedule begins, increasing.

    Returns:
        A schedule.

    Example:
        >>> rate = join_schedules([linear_warmup(1.0, 2), cosine_decay(1.0, 2)], [2])
        >>> [round(rate(torch.tensor(count)).item(), 3) for count in range(6)]
        [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]

    References:
        ``optax.join_schedules``: `Optimizer schedules
        <https://optax.readthedocs.io/en/latest/api/optimizer_schedules.html>`_
    """
    _check_joined(schedules, boundaries)
    begins = (0, *boundaries)
    lasts = (*(end - begin - 1 for begin, end in itertools.pairwise(begins)), None)
    shares = tuple(zip(schedules, begins, lasts, strict=True))

    def rate(count: Tensor) -> Tensor:
        _check_steps_taken(count)
        rates = [_float64(rate_at(f, (count - a).clamp(0, z)), count) for f, a, z in shares]
        chosen = rates[0]
        for begin, later in zip(begins[1:], rates[1:], strict=True):
            chosen = torch.where(count < begin, chosen, later)
        return chosen

    return rate


# For those who take a rate --------------------------------------------------------------


def check_rate(lr: Any) -> None:
    """Raise where lr is no learning rate; the numbers in a tensor are not looked at."""
    refuse_scheduler(lr)
    if not callable(lr):
        _part("lr", lr, "a float, a 0-d tensor or a schedule (applied steps -> 0-d tensor)")


def refuse_scheduler(lr: Any) -> None:
    """Raise where lr is one of torch's schedulers, or the class of one."""
    kind: type = lr if isinstance(lr, type) else type(lr)
    if issubclass(kind, LRScheduler):
        raise TypeError(
            f"lr is a scheduler of torch, {kind.__name__}, which changes the rate in an optimizer "
            "object; expected a float, a 0-d tensor or a schedule, a function of the number of "
            "applied steps: cosine_decay, linear_warmup, join_schedules or one of your own."
        )


def rate_at(lr: Any, count: Tensor) -> Tensor:
    """The learning rate after so many applied steps, as a 0-d tensor.

    >>> rate_at(0.5, torch.tensor(3)), rate_at(lambda count: 1 / (1 + count), torch.tensor(3))
    (tensor(0.5000, dtype=torch.float64), tensor(0.2500))
    """
    if not callable(lr):
        check_rate(lr)
        return lr if isinstance(lr, Tensor) else _float64(as_float(lr), count)
    rate = lr(count)
    if isinstance(rate, Tensor):
        if rate.ndim or not _is_real(rate):
            raise ValueError(
                f"the schedule returned a tensor of shape {tuple(rate.shape)} and {rate.dtype}; "
                "expected a real 0-d tensor, one rate for the step."
            )
        return rate
    if not _is_number(rate):
        raise TypeError(
            f"the schedule returned {rate!r}, a {type(rate).__name__}; expected a 0-d tensor, "
            "computed from the number of applied steps. A schedule without a return?"
        )
    if torch.compiler.is_dynamo_compiling():
        raise TypeError(
            f"the schedule returned a Python {type(rate).__name__}, which torch.compile would "
            "bake into the graph as a constant: the rate would never change again. Compute it "
            "from the step tensor with torch operations; for one fixed rate pass the number itself."
        )
    return _float64(as_float(rate), count)


def check_held(lr: float, leaves: list[Tensor], spec: optree.PyTreeSpec) -> None:
    """Raise where a learning rate is too large for the dtype of a parameter."""
    for i, x in enumerate(leaves):
        most = torch.finfo(x.dtype).max
        if not lr <= most:
            raise ValueError(
                f"lr is {lr!r}, which {paths(spec, 'params')[i]} in {x.dtype} cannot hold, so "
                f"no step would be applied; expected at most {most:.3g}. A slip in the exponent?"
            )


def is_sound(rate: Tensor, leaves: list[Tensor]) -> bool | Tensor:
    """Whether a learning rate is finite in the dtypes of the parameters.

    A bool where the host knows the rate, which costs a device nothing, and else a 0-d tensor.
    """
    dtypes = {x.dtype for x in leaves}
    if rate.is_floating_point():
        dtypes.add(rate.dtype)  # in which it is compared
    most = min(torch.finfo(dtype).max for dtype in dtypes)
    number = None if transform_active() else known(rate)
    return rate.abs() <= most if number is None else abs(number) <= most


# Pieces ---------------------------------------------------------------------------------


def _float64(value: float | Tensor, count: Tensor) -> Tensor:
    """A rate where the count lies; a number is filled in there and not copied from the host."""
    _check_steps_taken(count)
    if isinstance(value, Tensor):
        return moved(value, count.device, torch.float64)
    return torch.full((), value, dtype=torch.float64, device=count.device)


def _within(count: Tensor, steps: int) -> Tensor:
    """The count, from 0 to steps, as float64: integers are exact up to 2**53."""
    _check_steps_taken(count)
    return count.clamp(0, steps).double()


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_real(x: Tensor) -> bool:
    return not x.is_complex() and x.dtype != torch.bool


def _check_steps_taken(count: Any) -> None:
    if not isinstance(count, Tensor):
        raise TypeError(
            f"the count is {count!r}, a {type(count).__name__}; expected the number of applied "
            "steps as a 0-d integer tensor: torch.tensor(count)."
        )


def _part(name: str, value: Any, expected: str = "a float or a 0-d tensor") -> Any:
    """A rate that others are made of: a tensor as it is, and any other number as a float."""
    value = as_float(value)
    if isinstance(value, Tensor):
        if value.ndim or not _is_real(value):
            raise ValueError(
                f"{name} is a tensor of shape {tuple(value.shape)} and {value.dtype}; expected "
                f"{expected}, of a real dtype."
            )
    elif not _is_number(value):
        raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; expected {expected}.")
    elif not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value!r}; expected {expected}, finite and not negative.")
    return value


def _check_count(name: str, value: Any) -> None:
    expected = "a positive int below 2**63, a number of applied steps"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; expected {expected}.")
    if not 1 <= value <= LARGEST_INT:
        raise ValueError(f"{name} is {shown(value)}; expected {expected}.")


def _check_joined(schedules: Sequence[Any], boundaries: Sequence[Any]) -> None:
    if len(schedules) != len(boundaries) + 1:
        raise ValueError(
            f"there are {len(schedules)} schedules and {len(boundaries)} boundaries; expected one "
            "schedule more than boundaries, each of which lies between two schedules."
        )
    for i, schedule in enumerate(schedules):
        if not callable(schedule):
            raise TypeError(
                f"schedules[{i}] is {schedule!r}, a {type(schedule).__name__}; expected a "
                "schedule. One fixed rate is constant(rate)."
            )
    for i, boundary in enumerate(boundaries):
        _check_count(f"boundaries[{i}]", boundary)
        if i and boundary <= boundaries[i - 1]:
            raise ValueError(
                f"boundaries[{i}] is {boundary}, after {boundaries[i - 1]}; expected boundaries "
                "to increase: they are counts of all applied steps, not lengths."
            )
