"""Learning rates that change with the number of applied steps.

A schedule is any function from that number, a 0-d integer tensor, to a 0-d tensor. The schedules
here return float64 and never synchronise with the device. They work under vmap, torch.compile and
torch.func, also for gradients with respect to the rates that define them.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from types import GeneratorType
from typing import Any

import optree
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from .._base import checks, reprs, settings, trees


Schedule = Callable[[Tensor], Any]
COUNT = "a positive int below 2**63, a number of applied steps"


@settings.records
def constant(value: float | Tensor) -> Schedule:
    """Keep one rate for all steps.

    The rule: ``rate(count) = value``, in float64.

    Args:
        value: A number, or a 0-d tensor.

    Example:
        >>> constant(0.1)(torch.tensor(7))
        tensor(0.1000, dtype=torch.float64)

    References:
        ``optax``: `Optimizer schedules
        <https://optax.readthedocs.io/en/latest/api/optimizer_schedules.html>`_
    """
    value = read_rate("value", value)
    return lambda count: as_rate(value, count)


@settings.records
def linear_warmup(peak: float | Tensor, steps: int, start: float | Tensor = 0.0) -> Schedule:
    """Change the rate linearly from ``start`` at count 0 to ``peak`` at ``steps``.

    The rule: ``rate(count) = start + (peak - start) * min(count / steps, 1)``.

    Args:
        peak: The last rate, a number or a 0-d tensor.
        steps: The number of applied steps until ``peak``.
        start: The first rate, a number or a 0-d tensor.

    Example:
        >>> rate = linear_warmup(0.1, steps=4)
        >>> [round(rate(torch.tensor(count)).item(), 3) for count in range(6)]
        [0.0, 0.025, 0.05, 0.075, 0.1, 0.1]

    References:
        Goyal et al., `Accurate, large minibatch SGD <https://arxiv.org/abs/1706.02677>`_, 2017.
    """
    peak, start = read_rate("peak", peak), read_rate("start", start)
    steps = checks.check_int(steps, "steps", COUNT, 1, checks.LARGEST_INT)

    def rate(count: Tensor) -> Tensor:
        done = count_within(count, steps) / steps
        return torch.lerp(as_rate(start, count), as_rate(peak, count), done)

    return rate


@settings.records
def cosine_decay(peak: float | Tensor, steps: int, end: float | Tensor = 0.0) -> Schedule:
    """Lower the rate along half a cosine from ``peak`` at count 0 to ``end`` at ``steps``.

    The rule: ``rate(count) = end + (peak - end) * (1 + cos(pi * min(count / steps, 1))) / 2``.

    Args:
        peak: The first rate, a number or a 0-d tensor.
        steps: The number of applied steps until ``end``.
        end: The last rate, a number or a 0-d tensor.

    Example:
        >>> rate = cosine_decay(0.1, steps=4)
        >>> [round(rate(torch.tensor(count)).item(), 3) for count in range(6)]
        [0.1, 0.085, 0.05, 0.015, 0.0, 0.0]

    References:
        Loshchilov and Hutter, `SGDR <https://arxiv.org/abs/1608.03983>`_, 2017.
    """
    peak, end = read_rate("peak", peak), read_rate("end", end)
    steps = checks.check_int(steps, "steps", COUNT, 1, checks.LARGEST_INT)

    def rate(count: Tensor) -> Tensor:
        left = (steps - count_within(count, steps)) / steps
        return torch.lerp(as_rate(end, count), as_rate(peak, count), half_cosine(left))

    return rate


@settings.records
def join_schedules(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """Run schedules one after another, each from its own count 0 at its boundary.

    The rule: ``rate(count) = schedules[i](count - begins[i])``, where ``begins`` is
    ``[0, *boundaries]`` and ``i`` is the last entry that ``count`` has reached.

    Every schedule is evaluated at every step, at a count clamped to its own interval. So an inf or
    NaN outside that interval reaches neither the rate nor its derivatives.

    Args:
        schedules: The schedules, at least one.
        boundaries: The counts at which the second, third … schedule begins, increasing.

    Example:
        >>> rate = join_schedules([linear_warmup(1.0, 2), cosine_decay(1.0, 2)], [2])
        >>> [round(rate(torch.tensor(count)).item(), 3) for count in range(6)]
        [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]

    References:
        ``optax.join_schedules``: `Optimizer schedules
        <https://optax.readthedocs.io/en/latest/api/optimizer_schedules.html>`_
    """
    begins = (0, *_check_joined(schedules, boundaries))
    lasts = (*(end - begin - 1 for begin, end in itertools.pairwise(begins)), None)
    shares = tuple(zip(schedules, begins, lasts, strict=True))

    def rate(count: Tensor) -> Tensor:
        count = steps_of(count)
        rates = [as_rate(rate_at(f, (count - a).clamp(0, z)), count) for f, a, z in shares]
        chosen = rates[0]
        for begin, later in zip(begins[1:], rates[1:], strict=True):
            chosen = torch.where(count < begin, chosen, later)
        return chosen

    return rate


# What optimizers ask of a learning rate -------------------------------------------------------


def check_rate(lr: Any) -> Any:
    """The learning rate itself, a number as a float; the numbers in a tensor are not looked at."""
    refuse_scheduler(lr)
    expected = "a float, a 0-d tensor or a schedule (applied steps -> 0-d tensor)"
    if isinstance(lr, (torch.nn.Module, GeneratorType)):
        raise TypeError(
            f"lr is {reprs.kind(lr)}; expected {expected}. Parameters are not an argument of an "
            "optimizer: pass functional(module).params to the init of a step."
        )
    return lr if callable(lr) else read_rate("lr", lr, expected)


def refuse_scheduler(lr: Any) -> None:
    """Raise where lr is one of torch's schedulers, or the class of one."""
    kind: type = lr if isinstance(lr, type) else type(lr)
    if issubclass(kind, LRScheduler):
        raise TypeError(
            f"lr is {kind.__name__}, a scheduler of torch, which changes the rate in an optimizer "
            "object; expected a float, a 0-d tensor or a schedule. A schedule is a function of "
            "the number of applied steps: cosine_decay, linear_warmup, join_schedules or one of "
            "your own."
        )


def rate_at(lr: Any, count: Tensor, name: str = "the schedule") -> Tensor:
    """The learning rate after so many applied steps, as a 0-d tensor.

    >>> rate_at(0.5, torch.tensor(3)), rate_at(lambda count: 1 / (1 + count), torch.tensor(3))
    (tensor(0.5000, dtype=torch.float64), tensor(0.2500))
    """
    if not callable(lr):
        rate = check_rate(lr)
        return rate if isinstance(rate, Tensor) else as_rate(rate, count)
    rate = lr(count)
    if isinstance(rate, Tensor):
        if rate.ndim or not _is_real(rate):
            raise ValueError(
                f"{name} returned a tensor of shape {tuple(rate.shape)} and {rate.dtype}; "
                "expected a real 0-d tensor, one rate for the step."
            )
        return rate
    number = checks.as_float(rate)
    if not isinstance(number, float):
        raise TypeError(
            f"{name} returned {reprs.of_value(rate)}; expected a 0-d tensor, "
            "computed from the number of applied steps. Likely cause: a schedule without a return."
        )
    if torch.compiler.is_dynamo_compiling():
        raise TypeError(
            f"{name} returned a Python {type(rate).__name__}, which torch.compile would make a "
            "constant of the graph, so the rate would never change. Compute it from the step "
            "tensor with torch operations. For a fixed rate, pass the number itself."
        )
    return as_rate(number, count)


def check_held(lr: float, leaves: list[Tensor], spec: optree.PyTreeSpec) -> None:
    """Raise where a learning rate is too large for the dtype of a parameter."""
    for i, x in enumerate(leaves):
        most = torch.finfo(x.dtype).max
        if not lr <= most:
            raise ValueError(
                f"lr is {lr!r}, which {trees.paths(spec, 'params')[i]} in {x.dtype} cannot hold, "
                f"so no step would be applied; expected at most {most:.3g}. Likely cause: a wrong "
                "exponent."
            )


def kept_rate(lr: Any, leaves: list[Tensor], spec: optree.PyTreeSpec) -> Any:
    """What the state of an optimizer keeps of its learning rate: a number, and else ``()``."""
    if not isinstance(lr, float):
        return ()
    check_held(lr, leaves, spec)
    # On a CPU, where a kernel can read it without waiting.
    return torch.full((), lr, dtype=torch.float64, device="cpu")


def check_kept(lr: Any, kept: Any, root: str) -> None:
    """Raise where the state of this name keeps a learning rate that is not its optimizer's."""
    if isinstance(lr, float) != isinstance(kept, Tensor):
        raise ValueError(
            f"{root}.lr is {kept!r}, but this optimizer was made with lr={lr!r}. The state holds "
            "a number as lr, and () for a tensor or a schedule. Likely cause: the state comes "
            "from another configuration."
        )


def is_sound(rate: Tensor, leaves: list[Tensor]) -> bool | Tensor:
    """Whether a learning rate is finite in the dtypes of the parameters.

    It is a bool where the host knows the rate, which costs a device nothing, else a 0-d tensor.
    """
    numbers = trees.numbers_in(rate)
    if numbers is not None and all(abs(x) <= torch.finfo(torch.float16).max for x in numbers):
        return True  # any dtype holds it
    dtypes = {x.dtype for x in leaves}
    if rate.is_floating_point():
        dtypes.add(rate.dtype)  # in which it is compared
    most = min(torch.finfo(dtype).max for dtype in dtypes)
    return rate.abs() <= most if (number := trees.known(rate)) is None else abs(number) <= most


# Numbers and counts ----------------------------------------------------------------------------


def as_rate(value: float | Tensor, count: Tensor) -> Tensor:
    """A rate on the device of the count; a number is filled in there, not copied from the host."""
    _check_count(count)
    if isinstance(value, Tensor):
        return trees.moved(value, count.device, torch.float64)
    return torch.full((), value, dtype=torch.float64, device=count.device)


def count_within(count: Tensor, steps: int = checks.LARGEST_INT) -> Tensor:
    """The count, from 0 to steps, as float64: integers are exact up to 2**53."""
    return steps_of(count).clamp(max=steps).double()


def steps_of(count: Tensor) -> Tensor:
    """The count, from 0 on; an int as int64, since an int32 is not compared with larger ones."""
    _check_count(count)
    return (count if count.is_floating_point() else count.long()).clamp(min=0)


def half_cosine(left: Tensor) -> Tensor:
    """The height of half a cosine, from 1 down to 0, where this share of its length is left.

    It is ``(1 + cos(pi * done)) / 2``, which would cancel near the end; this is exact at both ends.
    """
    return torch.sin(math.pi / 2 * left) ** 2


def _check_count(count: Any) -> None:
    if not isinstance(count, Tensor):
        raise TypeError(
            f"the count is {reprs.of_value(count)}; expected the number of applied "
            "steps as a 0-d integer tensor: torch.tensor(count)."
        )


def read_rate(name: str, value: Any, expected: str = "a float or a 0-d tensor") -> Any:
    """A rate: a tensor as it is, and any other number as a float."""
    if not isinstance(value, Tensor):
        return checks.check_number(value, name, f"{expected}, finite and not negative")
    if value.ndim or not _is_real(value):
        raise ValueError(
            f"{name} is a tensor of shape {tuple(value.shape)} and {value.dtype}; expected "
            f"{expected}, of a real dtype."
        )
    return value


def _is_real(x: Tensor) -> bool:
    return not x.is_complex() and x.dtype != torch.bool


def _check_joined(schedules: Sequence[Any], boundaries: Sequence[Any]) -> list[int]:
    """The boundaries as ints, if they and the schedules go together."""
    if len(schedules) != len(boundaries) + 1:
        raise ValueError(
            f"there are {len(schedules)} schedules and {len(boundaries)} boundaries; expected one "
            "more schedule than boundaries, because each boundary lies between two schedules."
        )
    for i, schedule in enumerate(schedules):
        if not callable(schedule):
            raise TypeError(
                f"schedules[{i}] is {reprs.of_value(schedule)}; expected a "
                "schedule. For a fixed rate, use constant(rate)."
            )
    return check_increasing(boundaries, "boundaries")


def check_increasing(counts: Sequence[Any], name: str) -> list[int]:
    """Counts of applied steps as ints, each above the one before it."""
    found = [
        checks.check_int(count, f"{name}[{i}]", COUNT, 1, checks.LARGEST_INT)
        for i, count in enumerate(counts)
    ]
    for i, (before, count) in enumerate(itertools.pairwise(found), 1):
        if count <= before:
            raise ValueError(
                f"{name}[{i}] is {count}, after {before}; expected {name} to increase, because "
                "they count all applied steps and are not lengths."
            )
    return found
