"""Loss scaling for fp16, as a pure state stored with the parameters.

Scales that are powers of two change no bit of the numbers that they scale and unscale.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base import checks, named_leaves, reprs, states, trees
from .._base.settings import records


@states.loadable
class LossScaleState(NamedTuple):
    """The loss scale and its counters, all 0-d tensors.

    Attributes:
        scale: The factor of the loss, float32.
        growth_tracker: The number of finite updates since the scale last changed or overflowed,
            int32.
        hysteresis_tracker: The number of non-finite updates until the scale backs off, int32. It
            backs off with the update that brings this to zero, and with every later one.

    Example:
        >>> import torch
        >>> loss_scale = dynamic_loss_scale(init_scale=8.0)
        >>> state = loss_scale.update(loss_scale.init(), torch.tensor(True))
        >>> state.scale, state.growth_tracker
        (tensor(8.), tensor(1, dtype=torch.int32))
    """

    scale: Tensor
    growth_tracker: Tensor
    hysteresis_tracker: Tensor


class LossScale(NamedTuple):
    """The four functions of a loss scale.

    Attributes:
        init: ``init(device=None)`` returns the first state.
        scale: ``scale(state, x)`` returns x times the scale. An x in float16 or bfloat16 becomes
            float32, because 65536 is inf in float16.
        unscale: ``unscale(state, tree)`` returns a new tree with every leaf divided by the scale,
            in float32 or wider. Check ``all_finite`` of this tree, not of the scaled one.
        update: ``update(state, finite)`` returns the next state, where finite is a 0-d bool tensor.
            It never synchronises with the device.

    Example:
        >>> loss_scale = static_loss_scale(1024.0)
        >>> state = loss_scale.init()
        >>> loss_scale.scale(state, torch.tensor(0.5))
        tensor(512.)
        >>> loss_scale.unscale(state, {"w": torch.tensor([512.0], dtype=torch.float16)})
        {'w': tensor([0.5000])}
    """

    init: Callable[..., LossScaleState]
    scale: Callable[[LossScaleState, Tensor], Tensor]
    unscale: Callable[[LossScaleState, trees.Tree], trees.Tree]
    update: Callable[[LossScaleState, Tensor], LossScaleState]

    __repr__ = reprs.of_made


@records
def dynamic_loss_scale(
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    *,
    min_scale: float = 1.0,
    max_scale: float = 2.0**127,
    hysteresis: int = 1,
) -> LossScale:
    """Return a loss scale that backs off at an overflow and grows after a run of finite updates.

    The rule, with the result clamped to [``min_scale``, ``max_scale``]::

        not finite (the hysteresis-th and on)   scale *= backoff_factor
        growth_interval finite updates in a row scale *= growth_factor

    The transitions are those of ``torch.amp.GradScaler``, which has no floor. After 144 overflows
    in a row from ``2**16`` the reciprocal of its scale is inf, and the next good gradient is
    applied as inf instead of being skipped. ``hysteresis`` is Megatron's. With a scale and factors
    that are powers of two, as by default, scaling and unscaling are exact.

    Args:
        init_scale: The first scale.
        growth_factor: The factor of growth, above 1. The scale does not grow to inf.
        backoff_factor: The factor of a back-off, below 1.
        growth_interval: The number of finite updates in a row after which the scale grows.
        min_scale: The smallest scale. A scale of 1 leaves the gradient as it is.
        max_scale: The largest scale.
        hysteresis: The number of non-finite updates at which the scale first backs off; it then
            backs off at every further one. Only growth, even if ``max_scale`` prevents it, resets
            the count. GradScaler's is 1.

    Example:
        >>> loss_scale = dynamic_loss_scale()
        >>> state = loss_scale.init()
        >>> grad = loss_scale.unscale(state, torch.tensor([float("inf"), 2.0**16]))
        >>> grad
        tensor([inf, 1.])
        >>> loss_scale.update(state, torch.isfinite(grad).all()).scale
        tensor(32768.)

    References:
        Micikevicius et al., `Mixed precision training <https://arxiv.org/abs/1710.03740>`_, 2018;
        `torch.amp.GradScaler <https://docs.pytorch.org/docs/stable/amp.html>`_
    """
    init_scale = _check_scale("init_scale", init_scale)
    min_scale = _check_scale("min_scale", min_scale)
    max_scale = _check_scale("max_scale", max_scale)
    why = "the scale grows by it"
    growth_factor = _check_between("growth_factor", growth_factor, 1.0, math.inf, why)
    why = "the scale shrinks by it"
    backoff_factor = _check_between("backoff_factor", backoff_factor, 0.0, 1.0, why)
    why = "finite updates are counted up to it"
    growth_interval = _check_count("growth_interval", growth_interval, why)
    hysteresis = _check_count("hysteresis", hysteresis, "1 backs off at every overflow")
    if min_scale > max_scale:
        raise ValueError(
            f"min_scale is {min_scale!r}, above max_scale={max_scale!r}; expected at most "
            "max_scale."
        )
    if not min_scale <= init_scale <= max_scale:
        below = init_scale < min_scale
        raise ValueError(
            f"init_scale is {init_scale!r}; expected a number between min_scale={min_scale!r} and "
            f"max_scale={max_scale!r}, where every update keeps the scale. To start there, pass "
            f"{'min_scale' if below else 'max_scale'}={init_scale!r} or "
            f"{'less' if below else 'more'}."
        )

    def init(device: torch.device | str | None = None) -> LossScaleState:
        """Return the first state, complete."""
        settings: Any = {"growth_factor": growth_factor, "backoff_factor": backoff_factor}
        settings["growth_interval"] = growth_interval
        return _state(init_scale, hysteresis, device, settings)

    def update(state: LossScaleState, finite: Tensor) -> LossScaleState:
        """Return the next state, given whether every gradient was finite."""
        checks.check_state(state, LossScaleState, _OWNER)
        scale, tracker, budget = state
        _check_flag(finite)
        due = finite & (tracker + 1 >= growth_interval)
        left = torch.where(finite, budget, (budget - 1).clamp(min=0))
        wide = scale.double()  # GradScaler too multiplies in float64 and rounds once
        grown, less = (wide * growth_factor).float(), (wide * backoff_factor).float()
        grows, shrinks = due & torch.isfinite(grown), ~finite & (left == 0)
        new = torch.where(grows, grown, torch.where(shrinks, less, scale))
        return LossScaleState(
            new.clamp(min_scale, max_scale),
            torch.where(finite & ~due, tracker + 1, 0),
            torch.where(due, hysteresis, left),
        )

    return LossScale(init, _scaled, _unscaled, update)


@records
def static_loss_scale(scale: float) -> LossScale:
    """Return a loss scale that never changes; a step with an overflow is still not applied.

    The rule: ``update(state, finite)`` is ``state``.

    Args:
        scale: The factor of the loss; a power of two is exact. A scale far below 1 silently turns
            small gradients into zero. float32 holds nothing below ``2**-149``, so with a scale of
            ``2**-149`` only gradients of 1 and more survive.

    Example:
        >>> loss_scale = static_loss_scale(1024.0)
        >>> loss_scale.update(loss_scale.init(), torch.tensor(False)).scale
        tensor(1024.)
    """
    scale = _check_scale("scale", scale)

    def init(device: torch.device | str | None = None) -> LossScaleState:
        """Return the first state, complete."""
        return _state(scale, 0, device, {})

    def update(state: LossScaleState, finite: Tensor) -> LossScaleState:
        """Return the same state, in new memory."""
        checks.check_state(state, LossScaleState, _OWNER)
        _check_flag(finite)
        # no two states may share a tensor: donating the one would take it from the other
        return LossScaleState(*(x.clone() for x in state))

    return LossScale(init, _scaled, _unscaled, update)


# What both kinds share ------------------------------------------------------------------


_OWNER = "the loss scale"


def _state(scale: float, hysteresis: int, device: Any, settings: Any) -> LossScaleState:
    """The first state, filled where it lives: nothing is copied from the host."""
    return LossScaleState(
        states.with_settings(torch.full((), scale, dtype=torch.float32, device=device), settings),
        torch.full((), 0, dtype=torch.int32, device=device),
        torch.full((), hysteresis, dtype=torch.int32, device=device),
    )


def _scaled(state: LossScaleState, x: Tensor) -> Tensor:
    """``x * scale``, in float32 at least."""
    checks.check_state(state, LossScaleState, _OWNER)
    _check_tensor("x", x, "a tensor, the loss or the cotangent")
    wide = x.to(trees.accumulation_dtype(x.dtype))
    return wide * trees.as_scalar_of(wide, state.scale)


def _unscaled(state: LossScaleState, tree: trees.Tree) -> trees.Tree:
    """``tree / scale``, in float32 at least."""
    checks.check_state(state, LossScaleState, _OWNER)

    def unscale(x: Tensor) -> Tensor:
        _check_tensor("a leaf of the tree", x, "a tensor, a gradient")
        wide = x.to(trees.accumulation_dtype(x.dtype))
        # not times the reciprocal, which is inf for a small scale: CUDA takes it where the divisor
        # is a Python number or lies on the host, and as_scalar_of brings it to the device
        by = trees.as_scalar_of(wide, state.scale)
        if wide.is_complex() and not wide.is_sparse:  # a complex divisor is not exact
            return torch.complex(wide.real / by, wide.imag / by)
        return wide / by

    return trees.tree_map(unscale, tree)


# Arguments ------------------------------------------------------------------------------


SMALLEST, LARGEST = 2.0**-149, torch.finfo(torch.float32).max  # the positive numbers of float32
LARGEST_COUNT = torch.iinfo(torch.int32).max


def _check_scale(name: str, value: Any) -> float:
    expected = "a positive number that float32 holds (2**-149 to 3.4e38), the dtype of the scale"
    return checks.check_number(value, name, expected, lambda scale: SMALLEST <= scale <= LARGEST)


def _check_between(name: str, value: Any, low: float, high: float, why: str) -> float:
    expected = f"a finite number between {low} and {high}, both excluded: {why}"
    return checks.check_number(value, name, expected, lambda factor: low < factor < high)


def _check_count(name: str, value: Any, why: str) -> int:
    return checks.check_int(value, name, f"an int from 1 to 2**31 - 1: {why}", 1, LARGEST_COUNT)


def _check_tensor(name: str, value: Any, expected: str) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is {reprs.kind(value)}; expected {expected}.")


def _check_flag(finite: Any) -> None:
    expected = "a 0-d bool tensor, as all_finite returns it"
    _check_tensor("finite", finite, expected)
    if finite.dtype != torch.bool or finite.ndim:
        raise TypeError(
            f"finite has dtype {finite.dtype} and shape {tuple(finite.shape)}; expected {expected}."
        )


def scale_of_scaler(old: Any, scaler: Any) -> LossScaleState:
    """A loss scale that goes on where a ``GradScaler`` of torch stopped, of its ``state_dict``."""
    if not isinstance(old, LossScaleState):
        raise ValueError(
            "scaler needs a state with a loss scale, but this state has none. Use make_step(..., "
            "loss_scale=dynamic_loss_scale(...))."
        )
    if not isinstance(scaler, Mapping) or not {"scale", "_growth_tracker"} <= {*scaler}:
        raise TypeError(
            f"scaler is {scaler!r}; expected the state_dict() of a GradScaler, a dict with "
            "'scale' and '_growth_tracker'. A disabled GradScaler has an empty one."
        )
    tracker = int(scaler["_growth_tracker"])
    return named_leaves.tree_set(old, scale=float(scaler["scale"]), growth_tracker=tracker)
