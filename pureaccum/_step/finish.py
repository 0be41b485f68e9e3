"""From the sums of a window to the next training state.

    gradients = sums / weight / scale
    applied = every one of them is finite, there was any weight, and the learning rate is finite

A step that is not applied leaves parameters, optimizer state, schedule and buffers bit for bit as
they were. The loss scale learns from it all the same, but only from its gradients: a learning rate
of NaN says nothing about the scale.
"""

from typing import Any

import torch
from torch import Tensor

from .._base.donation import mark
from .._base.dtensors import resolved
from .._base.torch_internals import transform_active
from .._base.trees import (
    Tree,
    all_finite,
    apart,
    flatten,
    global_norm,
    moved,
    norm,
    unflatten,
    where,
)
from .._base.trees import leaves as leaves_of
from .._core.accumulator import AccumState, plain_sum
from .._core.loss import divisor, mean_value
from .._core.sums import divided
from .._samples.noise_scale import BatchNoise, noise_of
from .buffers import finish
from .state import Plan, StepInfo, TrainState


def finished(
    plan: Plan,
    state: TrainState,
    accum: AccumState,
    carried: tuple[Any, Tensor],
    aux: Tree,
    *,
    unit: float | Tensor = 1.0,
    rows: float = 1.0,
    own: bool,
) -> tuple[TrainState, StepInfo]:
    """Finish a step.

    Args:
        plan: What the step is made of.
        state: The state before.
        accum: What was accumulated; its sums are a list.
        carried: Buffers and the number of samples, as the last microbatch left them.
        aux: Reduced.
        unit: What the sums are still to be multiplied by.
        rows: What the weight is still to be multiplied by.
        own: Whether the sums may be changed in place.
    """
    in_place = not transform_active()
    plain = plain_sum(accum, plan.rule.reduction)
    by = divisor(accum.weight, plain)
    scale = None if plan.loss_scale is None else state.loss_scale.scale
    scales = [] if scale is None else [scale]
    grads = divided(resolved(accum.grads), by / unit, *scales, own=own and in_place)
    sound = all_finite((grads, accum.total))
    any_weight = accum.weight != 0
    if plain is not False:
        any_weight = any_weight | (plain & (accum.microbatches > accum.skipped))
    ready = plan.optimizer.ready(state.opt_state, state.params)
    applied, told = _applied(sound & any_weight, ready.sound)
    length = global_norm(grads)
    info = StepInfo(
        mean_value(accum.total, by),
        length,
        accum.weight * rows,
        accum.microbatches.clone(),
        accum.skipped.clone(),
        applied,
        torch.ones_like(length) if scale is None else scale.clone(),
        () if aux is None else aux,
        _noise(accum, grads, scale) if plan.rule.squares else (),
    )
    buffers, scaling = state.buffers, state.loss_scale
    if plan.buffers is not None:
        buffers = where(applied, finish(carried[0]), buffers)
    if plan.loss_scale is not None:
        finite = sound & (accum.nonfinite == 0)
        learned = plan.loss_scale.update(scaling, finite)
        # a window in which nothing was seen says nothing about the scale
        scaling = where(any_weight | ~finite, learned, scaling)
    donate = plan.donate and in_place
    if donate and leaves_of(info.aux):
        info = info._replace(aux=apart(info.aux, (state.params, state.buffers)))
    tree = unflatten(flatten(state.params)[1], grads)
    params, opt_state = ready.apply(tree, told, donate)
    new = TrainState(
        params,
        buffers,
        opt_state,
        scaling,
        state.key.clone(),
        state.attempts + 1,
        state.applied + applied.to(state.applied.device),
        carried[1].clone(),
    )
    if donate:
        rest = (state.buffers, state.loss_scale, *state[4:])
        mark(leaves_of(rest))
    return new, info


def _applied(worth: Tensor, rate_is_sound: bool | Tensor) -> tuple[Tensor, Tensor]:
    """Whether a step is applied, for the info, and for the optimizer.

    The optimizer is told on the host what the host knows: a kernel need not run for nothing, and
    torch's refuse a rate that the parameters' dtype cannot hold.
    """
    if isinstance(rate_is_sound, Tensor):
        worth = worth & moved(rate_is_sound, worth.device)
    elif not rate_is_sound:
        return worth & False, torch.zeros((), dtype=torch.bool, device="cpu")
    return worth, worth


def _noise(accum: AccumState, grads: list[Tensor], scale: Tensor | None) -> BatchNoise:
    squares = accum.squares
    assert isinstance(squares, Tensor)
    each = squares[:-1] if scale is None else squares[:-1] / scale.double() ** 2
    return noise_of([norm(x) for x in grads], each, accum.weight, squares[-1])
