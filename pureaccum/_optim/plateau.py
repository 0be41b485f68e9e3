"""A learning rate that falls when a metric improves no more: ReduceLROnPlateau as a pure state.

    better      best = metric, bad = 0; otherwise bad += 1
    cooldown    counts down, and bad = 0 meanwhile
    reduce      bad > patience: lr = max(lr * factor, min_lr), and cooldown and bad begin anew

The numbers are float64, in the order in which torch computes them in Python: the same bits.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base import checks, dtensors, states, trees
from . import schedules


@states.loadable
class PlateauState(NamedTuple):
    """The learning rate, and what decides when it falls; 0-d tensors.

    Attributes:
        lr: The learning rate now, float64.
        best: The best metric so far, float64; at first inf, or -inf where more is better.
        bad: How many updates in a row were no better, int64.
        cooldown: For how many more updates such are not counted, int64.
    """

    lr: Tensor
    best: Tensor
    bad: Tensor
    cooldown: Tensor


class Plateau(NamedTuple):
    """The two functions of a learning rate that falls on plateaus.

    Attributes:
        init: ``init()`` gives the first state.
        update: ``update(state, metric)`` gives the next state; metric is a number or a 0-d tensor.
            It never waits for a device: the state lies where the metrics lie.
    """

    init: Callable[[], PlateauState]
    update: Callable[[PlateauState, Any], PlateauState]


def plateau(
    lr: float | Tensor,
    *,
    factor: float = 0.1,
    patience: int = 10,
    threshold: float = 1e-4,
    threshold_mode: str = "rel",
    mode: str = "min",
    cooldown: int = 0,
    min_lr: float = 0.0,
    eps: float = 1e-8,
) -> Plateau:
    """Multiply the learning rate by ``factor`` when a metric has not improved for some updates.

    The rule is that of torch's ReduceLROnPlateau. A metric is better where it is below
    ``best * (1 - threshold)``, or ``best - threshold`` with ``"abs"``; with ``mode="max"`` where it
    is above ``best * (1 + threshold)``, or ``best + threshold``. Of a metric that may be negative
    ask for ``"abs"``: a share of a negative number points the other way. A metric of NaN is never
    better; after the best of all infs nothing is.

    ``state.lr`` is the rate. Where the optimizer was made with a number, put it into the state of
    training by ``tree_set``; a state that is given up with ``donate=True`` gets a clone of it.

    Args:
        lr: The first learning rate, a number or a 0-d tensor.
        factor: What the rate is multiplied by, from 0, and below 1.
        patience: How many updates in a row may be no better; the next such one lowers the rate.
        threshold: By how much a metric has to be better, as a share of the best, or absolutely.
        threshold_mode: ``"rel"`` or ``"abs"``.
        mode: ``"min"`` where less is better, ``"max"`` where more is.
        cooldown: For how many updates after a lower rate none is counted as bad.
        min_lr: The rate is never lowered below this.
        eps: A rate that would fall by no more than this stays, so one below it never changes.

    Example:
        >>> falling = plateau(0.5, factor=0.5, patience=1)
        >>> tracker = falling.init()
        >>> for loss in (3.0, 2.0, 2.5, 2.5, 2.5):
        ...     tracker = falling.update(tracker, loss)
        >>> tracker.lr, tracker.best
        (tensor(0.2500, dtype=torch.float64), tensor(2., dtype=torch.float64))

    References:
        `torch.optim.lr_scheduler.ReduceLROnPlateau <https://docs.pytorch.org/docs/stable/generated/torch.optim.lr_scheduler.ReduceLROnPlateau.html>`_
    """
    lr = schedules.read_rate("lr", lr)
    checks.check_choice(threshold_mode, ("rel", "abs"), "threshold_mode")
    checks.check_choice(mode, ("min", "max"), "mode")
    factor = checks.check_number(factor, "factor", _SHARE, _below_one)
    threshold = checks.check_number(threshold, "threshold")
    if threshold_mode == "rel" and mode == "min":  # inf * 0 is NaN: nothing would ever be better
        checks.check_number(
            threshold, "threshold", f"{_SHARE}: a share of the best metric", _below_one
        )
    patience = checks.check_int(patience, "patience", _COUNTED, 0, checks.LARGEST_INT)
    cooldown = checks.check_int(cooldown, "cooldown", _COUNTED, 0, checks.LARGEST_INT)
    min_lr, eps = checks.check_number(min_lr, "min_lr"), checks.check_number(eps, "eps")
    if isinstance(lr, float) and lr < min_lr:
        raise ValueError(
            f"min_lr is {min_lr!r}, above lr={lr!r}; expected it at most there, or the rate would "
            "never change."
        )
    worst, by = (torch.inf, -threshold) if mode == "min" else (-torch.inf, threshold)

    def init() -> PlateauState:
        """The first state, with the first rate."""
        device = lr.device if isinstance(lr, Tensor) else torch.device("cpu")
        rate, best = (trees.scalar(x, torch.float64, device) for x in (lr, worst))
        return PlateauState(rate, best, *(trees.scalar(0, torch.int64, device) for _ in range(2)))

    def update(state: PlateauState, metric: float | Tensor) -> PlateauState:
        """The next state, by one more metric."""
        checks.check_state(state, PlateauState, "plateau")
        every = [_read_metric(metric), *state]
        # where one of them would be waited for: a copy from the host waits for nothing
        device = next((x.device for x in every if x.device.type != "cpu"), torch.device("cpu"))
        metric, rate, best, bad, waiting = (trees.moved(x, device) for x in every)
        line = best * (1.0 + by) if threshold_mode == "rel" else best + by
        better = metric < line if mode == "min" else metric > line
        bad = torch.where(better | (waiting > 0), 0, bad + 1)
        due = bad > patience
        lower = rate * factor
        lower = torch.where(lower < min_lr, min_lr, lower)
        return PlateauState(
            torch.where(due & (rate - lower > eps), lower, rate),
            torch.where(better, metric, best),
            torch.where(due, 0, bad),
            torch.where(due, cooldown, (waiting - 1).clamp(min=0)),
        )

    return Plateau(init, update)


_SHARE = "a number from 0, and below 1"
_COUNTED = "an int of at least 0, a number of updates"


def _below_one(number: float) -> bool:
    return 0 <= number < 1


def _read_metric(metric: Any) -> Tensor:
    """A metric in float64, without a graph."""
    if not isinstance(metric, Tensor):
        expected = "a number or a 0-d tensor, such as the loss of an evaluation"
        number = checks.check_number(metric, "metric", expected, lambda it: True)
        return trees.scalar(number, torch.float64, torch.device("cpu"))
    if metric.ndim or metric.is_complex() or metric.dtype == torch.bool:
        raise ValueError(
            f"metric is a tensor of shape {tuple(metric.shape)} and {metric.dtype}; expected a "
            "real 0-d tensor, one number for the update. A metric of several batches? Its mean."
        )
    dtensors.refuse_sharded(
        [metric], "metric", "every rank looks at it: pass metric.full_tensor()."
    )
    return metric.detach().double()
