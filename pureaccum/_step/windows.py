"""A window: the microbatches of one step, from a stream, and what follows from their sums.

    sums = gradients of the scaled loss, added up microbatch by microbatch
    gradients = sums / weight / scale
    applied = all of them are finite, there was any weight, and the learning rate is finite

A step that is not applied leaves parameters, optimizer state, schedule and buffers bit for bit as
they were. The loss scale learns from it all the same, but only from its gradients: a learning rate
of NaN says nothing about the scale.

Each function is given the plan of the step first. All are pure; where the plan donates, they write
to the memory of the state that they are given.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import optree
import torch
from torch import Tensor

from .._base.checks import LARGEST_INT, check_int, check_same_structure, check_state
from .._base.dtensors import Layouts, closed, norms_of_parts, opened, resolved
from .._base.states import Spoiled, hand_over, mark
from .._base.torch_internals import may_write
from .._base.trees import (
    Tree,
    all_finite_of,
    apart,
    flatten,
    is_finite,
    known,
    moved,
    norm,
    norm_of_all,
    on_host,
    scalar,
    seen_finite,
    tree_leaves,
    tree_map,
    unflatten,
    where,
    zeros,
)
from .._core.accumulator import AccumState, empty, updated
from .._core.accumulator import merged as merge_states
from .._core.batches import read_microbatch
from .._core.coupling import question_of
from .._core.loss import divisor, mean_value
from .._core.reductions import AuxState, finish_aux, fold_aux
from .._core.weights import Microbatch, divided
from .._core.writes import Given
from .._samples.noise_scale import BatchNoise, noise_of
from .buffers import begin_buffers, finish_buffers, merged_moments
from .microbatch_loss import caller, check_keys, onwards, sharing, what_is_shared
from .ranks import of_all_ranks, refuse_derivative
from .state import (
    Plan,
    StepInfo,
    StepWindow,
    TrainState,
    check_window,
    read_train_state,
    recording,
)


# A stream of microbatches --------------------------------------------------------------------


@recording
def begin_window(plan: Plan, state: TrainState) -> StepWindow:
    """An empty window, with the buffers that its first microbatch is given."""
    refuse_derivative(plan)  # of all ranks: one may have no microbatch
    (leaves, _), _ = read_train_state(plan, state, plan.optimizer.check)
    count = len(leaves) if plan.rule.squares else None
    return StepWindow(
        accum=empty(zeros(state.params), leaves[0].device, count),
        buffers=tree_map(torch.clone, begin_buffers(plan.buffers, state.buffers)),
        rows=torch.zeros_like(state.samples),
    )


@recording
def update_window(
    plan: Plan,
    state: TrainState,
    window: StepWindow,
    microbatch: Tree,
    *shared: Any,
    offset: int | None = None,
) -> Any:
    """The window with one more microbatch, or ``(window, aux)``."""
    if shared:
        plan = sharing(plan, shared)
    window, entry, _ = updated_window(plan, state, window, microbatch, offset=offset)
    return (window, entry.aux) if plan.has_aux else window


@recording
def folded_window(
    plan: Plan,
    state: TrainState,
    window: StepWindow,
    aux: AuxState | None,
    microbatch: Tree,
    *shared: Any,
) -> tuple[StepWindow, AuxState | None]:
    """The window with one more microbatch, and what has been reduced of aux with its own."""
    window, entry, rows = updated_window(sharing(plan, shared), state, window, microbatch)
    if plan.has_aux:
        skipping = plan.rule.nonfinite == "skip"
        aux = fold_aux(aux, entry, rows, plan.aux_reduction, skipping)
    return window, aux


def updated_window(
    plan: Plan,
    state: TrainState,
    window: StepWindow,
    microbatch: Tree,
    unit: float | None = None,
    offset: int | None = None,
    counts: int | None = None,
) -> tuple[StepWindow, Microbatch, int]:
    """The window with one more microbatch, what that came to, and its rows, if it has any.

    Its mean counts for its rows, or for as many as ``counts`` says.
    """
    (leaves, spec), _ = read_train_state(plan, state)
    check_window(plan, state, window, (leaves, spec))
    read = read_microbatch(microbatch, "microbatch")
    check_keys(plan, read)
    rows = read.rows or 0
    refuse_derivative(plan)
    given = Given("microbatch", read.leaves, read.spec)
    accum, entry = updated(
        window.accum,
        caller(plan, state, spec),
        microbatch,
        leaves,
        spec,
        read,
        plan.rule,
        (plan.known, Given("state.params", leaves, spec), *what_is_shared(plan), given),
        question_of(read, plan.rule) if plan.check else None,
        carried=(window.buffers, first_row(plan, window, offset)),
        donate=plan.donate,
        scale=scale_of(plan, state),
        unit=unit,
        counts=counts,
    )
    carried = window.buffers, window.rows
    try:
        after, entry = onwards(plan, carried, entry, rows)
        if plan.donate and may_write():
            if plan.has_aux:
                given_up = state.params, state.buffers, window.buffers
                entry = entry._replace(aux=apart(entry.aux, given_up))
            new, carried_spec = flatten(after)
            after = unflatten(carried_spec, hand_over(tree_leaves(carried), new))
        else:  # no two states may share a tensor
            after = tree_map(torch.clone, after)
    except BaseException:
        if plan.donate and may_write():  # the sums are given up already
            mark(tree_leaves(window.accum), Spoiled)
        raise
    return StepWindow(accum, *after), entry, rows


def first_row(plan: Plan, window: StepWindow, offset: int | None) -> Tensor:
    """How many rows of the step come before those of the next microbatch."""
    if offset is not None:
        expected = "the rows of this step that come before this microbatch's, an int of at least 0"
        offset = check_int(offset, "offset", expected, 0, LARGEST_INT // 2)
        return torch.full_like(window.rows, offset)
    if plan.keys and plan.group is not None:
        raise ValueError(
            "a step with keys over several ranks cannot know which rows of the batch a microbatch "
            "holds, and rows of two ranks would get the same keys. Say how many rows come before "
            "it, on all ranks: step.update(state, window, microbatch, offset=...)."
        )
    return window.rows


def step_over_stream(
    plan: Plan,
    more: Callable[..., tuple[StepWindow, AuxState | None]],
    apply: Callable[[TrainState, StepWindow], tuple[TrainState, StepInfo]],
    state: TrainState,
    microbatches: Iterable[Tree],
    *shared: Any,
) -> tuple[TrainState, StepInfo]:
    """One step over the microbatches of a stream; ``more`` adds one of them, and its aux."""
    if isinstance(microbatches, (Tensor, Mapping, str)) or not isinstance(microbatches, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"microbatches is a {type(microbatches).__name__}; expected an iterable of "
            "microbatches, such as a list that windows(loader, k) gave. A batch at hand goes to "
            "step(state, batch), or here as microbatches(batch, size)."
        )
    window, aux = begin_window(plan, state), None
    for microbatch in microbatches:
        window, aux = more(state, window, aux, microbatch, *shared)
    state, info = apply(state, window)
    return state, info if aux is None else info._replace(aux=finish_aux(aux))


@recording
def merge_windows(plan: Plan, a: StepWindow, b: StepWindow) -> StepWindow:
    """One window of two, of which the first came first."""
    names = "the first window", "the second window"
    for window, what in zip((a, b), names, strict=True):
        check_state(window, StepWindow, "this step", what)
    if plan.buffers == "sequential":
        raise ValueError(
            "this step was made with buffers='sequential', which go from one microbatch to the "
            "next: two windows that began with the same buffers have none together. Expected "
            "'pooled' or 'freeze'."
        )
    cause = "Windows that are merged come from the same step and state."
    check_same_structure(flatten(a)[1], flatten(b)[1], *names, cause)
    of_grads = f"{names[0]}.accum.grads", f"{names[1]}.accum.grads"
    accum = merge_states(a.accum, b.accum, plan.rule.squares, of_grads)
    buffers = tree_map(torch.clone, a.buffers)
    if buffers and buffers.moments:
        buffers = buffers._replace(moments=merged_moments(a.buffers.moments, b.buffers.moments))
    return StepWindow(accum, buffers, a.rows + b.rows)


@recording
def apply_window(plan: Plan, state: TrainState, window: StepWindow) -> tuple[TrainState, StepInfo]:
    """The next state, and what happened."""
    return applied_window(plan, state, window)


def applied_window(
    plan: Plan,
    state: TrainState,
    window: StepWindow,
    unit: float = 1.0,
    aux: Tree = (),
    rows: float = 1.0,
) -> tuple[TrainState, StepInfo]:
    """The next state and what happened.

    The sums are still to be multiplied by ``unit``, and the weight by ``rows``.
    """
    params, ready = read_train_state(plan, state, plan.optimizer.ready)
    check_window(plan, state, window, params)
    carried = window.buffers, window.rows
    own, shared = plan.donate and may_write(), plan.group is not None
    sums = tree_leaves(window.accum.grads)
    work = [x.detach() for x in sums] if own else [x.clone() for x in sums] if shared else sums
    accum = window.accum._replace(grads=work)
    try:
        if shared:
            accum, carried = of_all_ranks(plan, state, window._replace(accum=accum), unit)
            unit = 1.0
        given = plan, state, ready, params[1], accum, carried, aux
        result = finished(*given, unit=unit, rows=rows, own=own or shared)
    except BaseException:
        if own:
            mark(sums, Spoiled)
        raise
    if own:
        mark(tree_leaves(window))
    return result


# From sums to the next state -----------------------------------------------------------------


def finished(
    plan: Plan,
    state: TrainState,
    ready: Any,
    spec: optree.PyTreeSpec,
    accum: AccumState,
    carried: tuple[Any, Any],
    aux: Tree,
    *,
    unit: float | Tensor = 1.0,
    rows: float = 1.0,
    own: bool,
) -> tuple[TrainState, StepInfo]:
    """The next state and what happened, from sums.

    Args:
        plan: What the step is made of.
        state: The state before.
        ready: What the optimizer's ``ready`` gave for it.
        spec: The structure of its parameters.
        accum: What was accumulated; its gradients are a list.
        carried: The buffers as the last microbatch left them, and the rows of the step.
        aux: The aux of all microbatches, reduced.
        unit: What the gradients are still to be multiplied by.
        rows: What the weight is still to be multiplied by.
        own: Whether the gradients may be changed in place.
    """
    in_place = may_write()
    device = state.samples.device
    total, weight, count, skipped, nonfinite, weighted = on_host(
        accum.total,
        accum.weight,
        accum.microbatches,
        accum.skipped,
        accum.nonfinite,
        accum.weighted,
    )
    plain = plan.rule.reduction == "sum" and weighted == 0
    by = divisor(weight, plain)
    scale = scale_of(plan, state)
    scales = [] if scale is None else [scale]
    by_unit = by / unit if isinstance(unit, Tensor) or unit != 1.0 else by
    parts, layouts = opened(resolved(accum.grads))
    own = own and in_place
    parts = divided(parts, by_unit, *scales, own=own, same=own or not in_place)
    length = norm_of_all(parts, layouts)
    # A norm that is finite is that of finite numbers; it may overflow where these do not.
    sound: Any = seen_finite(total, length)
    if not sound:
        sound = all_finite_of(parts, layouts, own) & is_finite(total)
    any_weight = weight != 0
    if plain is not False:
        any_weight = any_weight | (plain & (count > skipped))
    applied, told = _applied(sound & any_weight, ready.sound, device)
    weight, noise = scalar(weight * rows, torch.float64, device), ()
    if plan.rule.squares:
        of_squares = (1.0 if scale is None else scale.double() ** 2) / rows
        noise = _noise(accum, parts, layouts, of_squares, weight)
    info = StepInfo(
        loss=scalar(mean_value(total, by), torch.float64, device),
        grad_norm=length,
        weight=weight,
        microbatches=scalar(count, torch.int64, device),
        skipped=scalar(skipped, torch.int64, device),
        applied=applied,
        scale=torch.ones_like(length) if scale is None else scale.clone(),
        aux=() if aux is None else aux,
        noise=noise,
    )
    buffers, scaling = state.buffers, state.loss_scale
    if plan.buffers is not None:
        buffers = where(applied, finish_buffers(carried[0]), buffers)
    if plan.loss_scale is not None:
        finite = scalar(sound & (nonfinite == 0), torch.bool, device)
        learned = plan.loss_scale.update(scaling, finite)
        # a window in which nothing was seen says nothing about the scale
        scaling = where(any_weight | ~finite, learned, scaling)
    donate = plan.donate and in_place
    if donate and plan.has_aux:
        info = info._replace(aux=apart(info.aux, (state.params, state.buffers)))
    # Made before anything that was given up is written: memory may run out here.
    counts: Any = {"key": state.key.clone(), "attempts": state.attempts + 1}
    counts["applied"] = state.applied + applied.to(state.applied.device)
    counts["samples"] = state.samples + carried[1]
    params, opt_state = ready.apply(closed(parts, layouts), told, donate, length)
    new = TrainState(
        params=params, buffers=buffers, opt_state=opt_state, loss_scale=scaling, **counts
    )
    if donate:  # params and opt_state were given up to the optimizer
        mark(tree_leaves(state._replace(params=(), opt_state=())))
    return new, info


def scale_of(plan: Plan, state: TrainState) -> Tensor | None:
    """The loss scale of a step, if it has one."""
    return None if plan.loss_scale is None else state.loss_scale.scale


def _applied(worth: Any, rate_is_sound: Any, device: torch.device) -> tuple[Tensor, Any]:
    """Whether a step is applied, for the info and for the optimizer.

    The optimizer is told on the host what the host knows: no kernel need run for nothing, and
    torch's kernels refuse a rate that the dtype of the parameters cannot hold.
    """
    if isinstance(rate_is_sound, Tensor):
        worth = worth & moved(rate_is_sound, device)
    elif not rate_is_sound:
        worth = False
    told = known(worth) if isinstance(worth, Tensor) else worth
    return scalar(worth, torch.bool, device), worth if told is None else told


def _noise(
    accum: AccumState, parts: list[Tensor], layouts: Layouts | None, by: Any, weight: Tensor
) -> BatchNoise:
    squares = accum.squares
    if not isinstance(squares, Tensor):  # of no microbatch
        squares = torch.zeros(len(parts) + 1, dtype=torch.float64, device=parts[0].device)
    norms = [norm(x) for x in parts] if layouts is None else norms_of_parts(parts, layouts)
    return noise_of(norms, squares[:-1] / by, weight.to(squares.device), squares[-1])
