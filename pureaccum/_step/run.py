"""What a step does: over a batch at hand, and over a stream of microbatches.

    gradients = sums / weight / scale
    applied = every one of them is finite, there was any weight, and the learning rate is finite

A step that is not applied leaves parameters, optimizer state, schedule and buffers bit for bit as
they were. The loss scale learns from it all the same, but only from its gradients: a learning rate
of NaN says nothing about the scale.

Each function is given the plan of the step first. All are pure; with a plan that donates they use
the memory of the state that they are given.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor

from .._base import (
    LARGEST_INT,
    Spoiled,
    Tree,
    all_finite,
    apart,
    check_int,
    check_same_structure,
    check_state,
    flatten,
    global_norm,
    hand_over,
    mark,
    moved,
    norm,
    outside_inference_mode,
    put_back,
    read_params,
    refuse_autocast_cache,
    resolved,
    transform_active,
    tree_leaves,
    tree_map,
    unflatten,
    where,
    zeros,
)
from .._core import (
    AccumState,
    Accumulated,
    Accumulation,
    Batch,
    BatchInParts,
    CutBatch,
    Given,
    Microbatch,
    accumulate,
    check_belongs,
    cut,
    divided,
    divisor,
    empty,
    guarding,
    mean_value,
    need_rows,
    plain_sum,
    read_batch,
    read_cut,
    updated,
)
from .._core import merged as merge_states
from .._samples import BatchNoise, noise_of
from ..distributed.collectives import check_group
from .buffers import begin_buffers, finish_buffers, merged_moments
from .microbatch_loss import caller, onwards
from .ranks import before_this_rank, of_all_ranks
from .scan import Stacked, fold_scanned
from .state import Plan, StepInfo, StepWindow, TrainState, check_train_state


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
        buffers = where(applied, finish_buffers(carried[0]), buffers)
    if plan.loss_scale is not None:
        finite = sound & (accum.nonfinite == 0)
        learned = plan.loss_scale.update(scaling, finite)
        # a window in which nothing was seen says nothing about the scale
        scaling = where(any_weight | ~finite, learned, scaling)
    donate = plan.donate and in_place
    if donate and tree_leaves(info.aux):
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
        mark(tree_leaves(rest))
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


def step_whole(plan: Plan, state: TrainState, batch: Tree) -> tuple[TrainState, StepInfo]:
    """One step over a whole batch."""
    check_state(state, TrainState, "this step")
    if plan.group is not None:
        return step_of_ranks(plan, partial(rows_of_this_rank, plan, plan.size), state, batch)
    return step_over(plan, state, read_cut(batch, plan.size, plan.has_aux, "batch"))


def step_over(
    plan: Plan, state: TrainState, cut: CutBatch | BatchInParts | Stacked
) -> tuple[TrainState, StepInfo]:
    """One step over a batch that is cut."""
    window = _window(plan, state, cut)
    with outside_inference_mode():
        if isinstance(cut, Stacked):
            folded, weighs_one = fold_scanned(window, cut), False
        else:
            folded, weighs_one = accumulate(window), cut.untouched
        # A batch that a loss sees at once passes through untouched, and its mean weighs 1.
        rows = window.batch.rows or 1 if weighs_one and not folded.weighted else 1
        accum, unit, carried, aux, _, _ = folded
        return finished(plan, state, accum, carried, aux, unit=unit, rows=float(rows), own=True)


def step_of_ranks(
    plan: Plan, summed: Callable[..., Accumulated], state: TrainState, batch: Tree
) -> tuple[TrainState, StepInfo]:
    """One step over a batch of which each rank has some rows; ``summed`` are those of this rank.

    That may be tried more than once: no other rank is spoken to meanwhile.
    """
    rows = need_rows(read_batch(batch, "batch"), "batch")
    _read(plan, state)
    with outside_inference_mode():
        first = state.samples
        if plan.keys:
            first = first + before_this_rank(plan, state, rows)
        accum, unit, (buffers, last), aux, _, _ = summed(state, batch, first)
        window = StepWindow(accum, buffers, last - first)
        accum, carried = of_all_ranks(plan, state, window, unit)
        return finished(plan, state, accum, carried, aux, own=True)


def rows_of_this_rank(
    plan: Plan, size: int | None, state: TrainState, batch: Tree, first: Tensor
) -> Accumulated:
    """The rows of one rank, summed; ``first`` is the number of the first in the run."""
    cut = read_cut(batch, size, False, "batch")._replace(alone=False)
    if not cut.rows:  # nothing to call the loss with
        cut = cut._replace(size=1)
    with outside_inference_mode():
        return accumulate(_window(plan, state, cut, first))


def _window(plan: Plan, state: TrainState, cut: Any, first: Tensor | None = None) -> Accumulation:
    leaves, spec = _read(plan, state)
    first = state.samples if first is None else first
    return Accumulation(
        call=caller(plan, state, spec),
        leaves=leaves,
        spec=spec,
        batch=cut,
        rule=plan.rule,
        at_least=torch.float32,
        aux_reduction=plan.aux_reduction,
        known=plan.known,
        roots=("state.params", "batch"),
        scale=_scale(plan, state),
        carried=(begin_buffers(plan.buffers, state.buffers) if plan.buffers else (), first),
        advance=partial(onwards, plan),
    )


def begin_window(plan: Plan, state: TrainState) -> StepWindow:
    """An empty window, with buffers to go through it."""
    leaves, _ = _read(plan, state)
    with outside_inference_mode():
        buffers = begin_buffers(plan.buffers, state.buffers) if plan.buffers else ()
        count = len(leaves) if plan.rule.squares else None
        sums = empty(zeros(state.params), leaves[0].device, count)
        return StepWindow(sums, tree_map(torch.clone, buffers), torch.zeros_like(state.samples))


def update_window(
    plan: Plan,
    state: TrainState,
    window: StepWindow,
    microbatch: Tree,
    offset: int | None = None,
) -> Any:
    """The window with one microbatch more, or ``(window, aux)``."""
    window, entry = updated_window(plan, state, window, microbatch, offset=offset)
    return (window, entry.aux) if plan.has_aux else window


def updated_window(
    plan: Plan,
    state: TrainState,
    window: StepWindow,
    microbatch: Tree,
    unit: float | None = None,
    offset: int | None = None,
) -> tuple[StepWindow, Microbatch]:
    """The window with one microbatch more, and what that came to."""
    leaves, spec = check_window(plan, state, window)
    carried = window.buffers, window.rows
    read = read_batch(microbatch, "microbatch")
    rows = read.rows
    call = caller(plan, state, spec)
    at = first_row(plan, state, window, offset)

    def loss(leaves: list[Tensor]) -> Any:
        return call(leaves, microbatch, (carried[0], state.samples + at))

    accum, entry = updated(
        window.accum,
        loss,
        leaves,
        spec,
        rows,
        plan.rule,
        plan.recomputes,
        (plan.known, Given("state.params", leaves, spec), Given("microbatch", *read[:2])),
        donate=plan.donate,
        scale=_scale(plan, state),
        unit=unit,
    )
    after, entry = onwards(plan, carried, entry, rows or 0)
    if plan.donate and not transform_active():
        given_up = state.params, state.buffers, carried[0]
        entry = entry._replace(aux=apart(entry.aux, given_up))
        new, carried_spec = flatten(after)
        after = unflatten(carried_spec, hand_over(tree_leaves(carried), new))
    else:  # no two states may share a tensor
        after = tree_map(torch.clone, after)
    return StepWindow(accum, *after), entry


def apply_window(
    plan: Plan, state: TrainState, window: StepWindow, unit: float = 1.0, aux: Tree = ()
) -> tuple[TrainState, StepInfo]:
    """The next state, and what happened.

    The sums of the window are still to be multiplied by ``unit``.
    """
    check_window(plan, state, window)
    carried = window.buffers, state.samples + window.rows
    own, shared = plan.donate and not transform_active(), plan.group is not None
    sums = flatten(window.accum.grads)[0]
    work = [x.detach() for x in sums] if own else [x.clone() for x in sums] if shared else sums
    accum = window.accum._replace(grads=work)
    try:
        with outside_inference_mode():
            if shared:
                own_window = window._replace(accum=accum)
                accum, carried = of_all_ranks(plan, state, own_window, unit)
                unit = 1.0
            given = plan, state, accum, carried, aux
            result = finished(*given, unit=unit, own=own or shared)
    except BaseException:
        if own:
            mark(sums, Spoiled)
        raise
    if own:
        mark(tree_leaves(window))
    return result


def look(plan: Plan, state: TrainState, batch: Batch, root: str, size: int | None = None) -> None:
    """Call the loss once for each kind of batch to see what it writes to: in a graph nobody can."""
    leaves, spec = _read(plan, state)
    given = Given("state.params", leaves, spec), Given(root, *batch[:2])
    call = caller(plan, state, spec)

    def loss(leaves: list[Tensor]) -> Any:
        part = next(cut(batch, size or batch.rows or 1))
        carried = begin_buffers(plan.buffers, state.buffers) if plan.buffers else ()
        return call(leaves, part, (carried, state.samples))

    with guarding(plan.known, *given) as guarded:
        if (watched := guarded(loss)) is not loss:
            with put_back(state.samples.device), outside_inference_mode(), torch.enable_grad():
                watched([x.detach().requires_grad_() for x in leaves])


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


def check_window(
    plan: Plan, state: TrainState, window: StepWindow
) -> tuple[list[Tensor], optree.PyTreeSpec]:
    """Check that a state and a window are of this plan, and give the parameters."""
    leaves, spec = _read(plan, state)
    check_state(window, StepWindow, "this step", "the window")
    check_belongs(window.accum, leaves, spec, plan.rule.squares)
    expected = begin_buffers(plan.buffers, state.buffers) if plan.buffers else ()
    specs = flatten(expected)[1], flatten(window.buffers)[1]
    cause = f"This step was made with buffers={plan.buffers!r}; a window of another one?"
    check_same_structure(*specs, "those that step.begin(state) gives", "window.buffers", cause)
    return leaves, spec


def first_row(plan: Plan, state: TrainState, window: StepWindow, offset: int | None) -> Tensor:
    """How many rows of the step come before a microbatch's."""
    if offset is not None:
        expected = "the rows of this step that come before this microbatch's, an int of at least 0"
        return torch.full_like(
            window.rows, check_int(offset, "offset", expected, 0, LARGEST_INT // 2)
        )
    if plan.keys and plan.group is not None:
        raise ValueError(
            "a step with keys over several ranks cannot know which rows of the batch a microbatch "
            "holds, and rows of two ranks would get the same keys. Say how many rows come before "
            "it, on all ranks: step.update(state, window, microbatch, offset=...)."
        )
    return window.rows


# BatchInParts --------------------------------------------------------------------------------


def _read(plan: Plan, state: TrainState) -> tuple[list[Tensor], optree.PyTreeSpec]:
    if plan.group is not None:
        check_group(plan.group)
    check_train_state(plan, state)
    leaves, spec = read_params(state.params, "state.params")
    refuse_autocast_cache(leaves)
    return leaves, spec


def _scale(plan: Plan, state: TrainState) -> Tensor | None:
    return None if plan.loss_scale is None else state.loss_scale.scale
