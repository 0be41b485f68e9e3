"""What follows from the sums of a window: mean gradients, a judgement, and the next state.

    gradients = sums / weight / scale
    applied = all of them are finite, there was any weight, and the learning rate is finite

A step that is not applied leaves parameters, optimizer state, schedule and buffers bit for bit as
they were. The loss scale learns from it all the same, but only from its gradients: a learning rate
of NaN says nothing about the scale.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base import dtensors, states, trees
from .._base.torch_internals import modes
from .._base.trees import norm
from .._core import ledger, losses, reductions, terms, weights
from .._optim import updates
from .._samples import noise_scale
from . import plans
from .buffers import finish_buffers
from .state import StepInfo, TrainState


class Summed(NamedTuple):
    """What a window came to.

    Attributes:
        accum: What was accumulated; its gradients are a list.
        carried: The buffers as the last microbatch left them, and the samples of the step.
        aux: The aux of all microbatches, reduced; ``()`` without any.
        unit: What the gradients are still to be multiplied by.
        rows: What the weight is still to be multiplied by.
        own: Whether the gradients may be changed in place.
        checked: Whether the loss was checked.
    """

    accum: ledger.AccumState
    carried: tuple[Any, Any]
    aux: trees.Tree = ()
    unit: float | Tensor = 1.0
    rows: float = 1.0
    own: bool = True
    checked: bool | Tensor = False


class Means(NamedTuple):
    """The mean gradients, and the numbers that go with them: Python's where the host has them.

    Attributes:
        parts: This rank's parts of the gradients.
        layouts: Where those of DTensors lie.
        norm: Their global norm.
        loss: The loss over the whole batch.
        weight: What it was divided by.
        any_weight: Whether that was anything, or a plain sum was taken of something.
        sound: Whether all of it is finite.
        nonfinite: How many microbatches were not finite.
        scale: That of the loss, if it is scaled.
    """

    parts: list[Tensor]
    layouts: dtensors.Layouts | None
    norm: Tensor
    loss: Any
    weight: Any
    any_weight: Any
    sound: Any
    nonfinite: Any
    scale: Tensor | None


class Verdict(NamedTuple):
    """Whether a step is applied: for the info, and as the optimizer is told.

    The optimizer is told on the host what the host knows: no kernel need run for nothing, and
    torch's kernels refuse a rate that the dtype of the parameters cannot hold.
    """

    applied: Tensor
    told: Any


def finished(
    plan: plans.Plan, state: TrainState, ready: updates.Ready, summed: Summed
) -> tuple[TrainState, StepInfo]:
    """The next state and what happened, from sums."""
    means = mean_gradients(plan, state, summed)
    verdict = judgement(means, ready, state.samples.device)
    info = info_of(plan, state, ready, summed, means, verdict)
    donate = plan.donate and modes.may_write()
    if donate and plan.calling.has_aux:
        info = info._replace(aux=trees.apart(info.aux, (state.params, state.buffers)))
    return next_state(plan, state, ready, summed, means, verdict), info


def mean_gradients(plan: plans.Plan, state: TrainState, summed: Summed) -> Means:
    """Sums, divided once by their true weight, and by the scale of the loss."""
    accum, unit = summed.accum, summed.unit
    total, weight, count, skipped, nonfinite, weighted = trees.on_host(
        accum.total,
        terms.whole_weight(accum.weight),
        accum.microbatches,
        accum.skipped,
        accum.nonfinite,
        accum.weighted,
    )
    plain = plan.rule.reduction == "sum" and weighted == 0
    by = losses.divisor(weight, plain)
    scale = scale_of(plan, state)
    scales = [] if scale is None else [scale]
    by_unit = by / unit if isinstance(unit, Tensor) or unit != 1.0 else by
    parts, layouts = dtensors.opened(dtensors.resolved(accum.grads))
    own = summed.own and modes.may_add_in_place()
    parts = weights.divided(parts, by_unit, *scales, own=own, same=own or not modes.may_write())
    length = trees.norm_of_all(parts, layouts)
    # A norm that is finite is that of finite numbers; it may overflow where these do not.
    sound: Any = trees.seen_finite(total, length)
    if not sound:
        sound = trees.all_finite_of(parts, layouts, own) & trees.is_finite(total)
    any_weight = weight != 0
    if plain is not False:
        any_weight = any_weight | (plain & (count > skipped))
    return Means(
        parts=parts,
        layouts=layouts,
        norm=length,
        loss=losses.mean_value(total, by),
        weight=weight * summed.rows,
        any_weight=any_weight,
        sound=sound,
        nonfinite=nonfinite,
        scale=scale,
    )


def judgement(means: Means, ready: updates.Ready, device: torch.device) -> Verdict:
    """A step is applied if all is finite, it had any weight, and its rate can be used."""
    worth, rate_is_sound = means.sound & means.any_weight, ready.sound
    if isinstance(rate_is_sound, Tensor):
        worth = worth & trees.moved(rate_is_sound, device)
    elif not rate_is_sound:
        worth = False
    told = trees.known(worth) if isinstance(worth, Tensor) else worth
    return Verdict(trees.scalar(worth, torch.bool, device), worth if told is None else told)


def info_of(
    plan: plans.Plan,
    state: TrainState,
    ready: updates.Ready,
    summed: Summed,
    means: Means,
    verdict: Verdict,
) -> StepInfo:
    """What happened, in tensors of its own."""
    device, accum = state.samples.device, summed.accum
    scale, weight = means.scale, trees.scalar(means.weight, torch.float64, device)
    rate = ready.rate
    return StepInfo(
        loss=trees.scalar(means.loss, torch.float64, device),
        grad_norm=means.norm,
        weight=weight,
        microbatches=trees.scalar(accum.microbatches, torch.int64, device),
        skipped=trees.scalar(accum.skipped, torch.int64, device),
        applied=verdict.applied,
        checked=trees.scalar(summed.checked, torch.bool, device),
        scale=torch.ones_like(means.norm) if scale is None else scale.clone(),
        # copies: the state's own may be given up
        lr=rate.clone() if isinstance(rate, Tensor) else trees.tree_map(Tensor.clone, rate),
        aux=summed.aux,
        noise=_noise(summed, means, weight) if plan.rule.squares else (),
    )


def next_state(
    plan: plans.Plan,
    state: TrainState,
    ready: updates.Ready,
    summed: Summed,
    means: Means,
    verdict: Verdict,
) -> TrainState:
    """The state after a step, or the old one with one attempt more."""
    applied, device = verdict.applied, state.samples.device
    donate = plan.donate and modes.may_write()
    buffers, scaling = state.buffers, state.loss_scale
    if plan.calling.buffers is not None:
        buffers = trees.where(applied, finish_buffers(summed.carried[0]), buffers)
    if plan.loss_scale is not None:
        finite = trees.scalar(means.sound & (means.nonfinite == 0), torch.bool, device)
        learned = plan.loss_scale.update(scaling, finite)
        # a window in which nothing was seen says nothing about the scale
        scaling = trees.where(means.any_weight | ~finite, learned, scaling)
    # Made before anything that was given up is written: memory may run out here.
    counts: Any = {"key": state.key.clone(), "attempts": state.attempts + 1}
    counts["applied"] = state.applied + applied.to(state.applied.device)
    counts["samples"] = state.samples + summed.carried[1]
    parts = dtensors.closed(means.parts, means.layouts)
    with modes.named_range("optimizer"):
        params, opt_state = ready.apply(parts, verdict.told, donate, means.norm)
    new = TrainState(
        params=params, buffers=buffers, opt_state=opt_state, loss_scale=scaling, **counts
    )
    if donate:  # params and opt_state were given up to the optimizer
        states.mark(trees.tree_leaves(state._replace(params=(), opt_state=())))
    return new


def finished_aux(aux: reductions.AuxState | None) -> trees.Tree:
    """What aux was reduced to, if there is any."""
    return () if aux is None else reductions.finish_aux(aux)


def scale_of(plan: plans.Plan, state: TrainState) -> Tensor | None:
    """The loss scale of a step, if it has one."""
    return None if plan.loss_scale is None else state.loss_scale.scale


def _noise(summed: Summed, means: Means, weight: Tensor) -> noise_scale.BatchNoise:
    parts, layouts, scale, squares = means.parts, means.layouts, means.scale, summed.accum.squares
    if not isinstance(squares, Tensor):  # of no microbatch
        squares = torch.zeros(len(parts) + 1, dtype=torch.float64, device=parts[0].device)
    norms = [norm(x) for x in parts] if layouts is None else dtensors.norms_of_parts(parts, layouts)
    by = (1.0 if scale is None else scale.double() ** 2) / summed.rows
    return noise_scale.noise_of(norms, squares[:-1] / by, weight.to(squares.device), squares[-1])
