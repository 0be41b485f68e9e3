"""A window: the microbatches of one step, from a stream, and what follows from their sums.

    sums = gradients of the scaled loss, added up microbatch by microbatch
    the next state follows from them: see next_state.py

Each function is given the plan of the step first. All are pure; where the plan donates, they write
to the memory of the state that they are given.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from .._base import checks, states, trees
from .._base.torch_internals import modes
from .._core import batches, ledger, reductions, seams, structures, terms, windows, writes
from .._core.accumulator import updated
from .._core.coupling import question_of
from .._core.sums import Kinds, kinds_of
from .._core.weights import Microbatch
from . import microbatch_loss, next_state, plans, ranks
from .buffers import begin_buffers, merged_moments
from .state import StepInfo, StepWindow, TrainState


# A stream of microbatches --------------------------------------------------------------------


@plans.recording
def begin_window(plan: plans.Plan, state: TrainState) -> StepWindow:
    """Begin a window: empty, with the buffers for its first microbatch."""
    ranks.refuse_derivative(plan)  # of all ranks: one may have no microbatch
    params = plans.read_train_state(plan, state)
    plans.begun_by(plan, state, params)
    leaves, _ = params
    count = len(leaves) if plan.rule.squares else None
    return StepWindow(
        accum=ledger.empty(trees.zeros(state.params), leaves[0].device, count),
        buffers=trees.tree_map(torch.clone, begin_buffers(plan.calling.buffers, state.buffers)),
        rows=torch.zeros_like(state.samples),
        checked=torch.zeros_like(state.samples, dtype=torch.bool),
    )


@plans.recording
def update_window(
    plan: plans.Plan,
    state: TrainState,
    window: StepWindow,
    microbatch: trees.Tree,
    *shared: Any,
    offset: int | None = None,
    weights: Any = None,
) -> Any:
    """Add a microbatch to a window: the window, or ``(window, aux)``."""
    plan = with_weights(plan, state, weights)
    if shared:
        plan = microbatch_loss.sharing(plan, shared)
    window, entry, _ = updated_window(plan, state, window, microbatch, offset=offset)
    return (window, entry.aux) if plan.calling.has_aux else window


@plans.recording
def folded_window(
    plan: plans.Plan,
    state: TrainState,
    window: StepWindow,
    aux: reductions.AuxState | None,
    microbatch: trees.Tree,
    *shared: Any,
    weights: Any = None,
) -> tuple[StepWindow, reductions.AuxState | None]:
    """The window with one more microbatch, and what has been reduced of aux with its own."""
    plan = microbatch_loss.sharing(with_weights(plan, state, weights), shared)
    window, entry, rows = updated_window(plan, state, window, microbatch)
    if plan.calling.has_aux:
        skipping = plan.rule.nonfinite == "skip"
        aux = reductions.fold_aux(aux, entry, rows, plan.calling.aux_reduction, skipping)
    return window, aux


def updated_window(
    plan: plans.Plan,
    state: TrainState,
    window: StepWindow,
    microbatch: trees.Tree,
    unit: float | None = None,
    offset: int | None = None,
    counts: int | None = None,
) -> tuple[StepWindow, Microbatch, int]:
    """The window with one more microbatch, what that came to, and its samples, if it has any.

    Its mean counts for its samples, or for as many as ``counts`` says.
    """
    leaves, spec = trees.flatten(checks.check_state(state, TrainState, "this step").params)
    beside = trees.flatten((state._replace(params=()), window))
    key = structures.structure_of(
        "update", (leaves, spec), flat := trees.flatten(microbatch), beside
    )

    def examined() -> tuple[batches.Batch, Kinds]:
        plans.read_train_state(plan, state)
        plans.check_window(plan, state, window, (leaves, spec))
        read = batches.read_microbatch(microbatch, "microbatch")
        microbatch_loss.check_keys(plan, read)
        return read, kinds_of(leaves, [x.dtype for x in trees.tree_leaves(window.accum.grads)])

    read, kinds = structures.update_of(plan.structures, key, leaves, flat, examined)
    rows = read.rows or 0
    ranks.refuse_derivative(plan)
    given = writes.Given("microbatch", read.leaves, read.spec)
    loss = windows.GuardedLoss(
        microbatch_loss.caller(plan, state, spec),
        plan.calling.known,
        (writes.Given("state.params", leaves, spec), *microbatch_loss.what_is_shared(plan), given),
        writes.Asks(
            question_of(read, plan.rule, "update") if plan.calling.check else None,
            plan.calling.keeps_buffers,
        ),
    )
    before = window.buffers, first_row(plan, window, offset)
    part = seams.Portion(
        tree=microbatch,
        rows=rows,
        carried=before,
        counts=counts or read.rows,
        whole=plan.calling.whole,
    )
    about = seams.Window(rule=plan.rule, unit=unit, scale=next_state.scale_of(plan, state))
    traced = torch.compiler.is_dynamo_compiling()  # a graph asks nothing
    asked = 0 if traced else checks.here.asked
    accum, entry = updated(window.accum, loss, read, part, about, kinds, plan.donate)
    checked = window.checked
    if not traced and checks.here.asked > asked:
        checked = torch.ones_like(checked)
    carried = window.buffers, window.rows
    try:
        after, entry = microbatch_loss.onwards(plan, carried, entry, rows)
        carried, after = (*carried, window.checked), (*after, checked)
        if plan.donate and modes.may_write():
            if plan.calling.has_aux:
                given_up = state.params, state.buffers, window.buffers
                entry = entry._replace(aux=trees.apart(entry.aux, given_up))
            new, carried_spec = trees.flatten(after)
            after = trees.unflatten(carried_spec, states.hand_over(trees.tree_leaves(carried), new))
        else:  # no two states may share a tensor
            after = trees.tree_map(torch.clone, after)
    except BaseException:
        if plan.donate and modes.may_write():  # the sums are given up already
            states.mark(trees.tree_leaves(window.accum), states.Spoiled)
        raise
    return StepWindow(accum, *after), entry, rows


def with_weights(plan: plans.Plan, state: TrainState, weights: Any) -> plans.Plan:
    """The plan of a call that is given the weights of the terms of the loss, if it is given any."""
    if weights is None:
        return plan
    whole = terms.given_weights(weights, state.samples.device)
    return plan._replace(calling=plan.calling._replace(whole=whole))


def first_row(plan: plans.Plan, window: StepWindow, offset: int | None) -> torch.Tensor:
    """How many samples of the step come before those of the next microbatch."""
    if offset is not None:
        expected = "the samples of this step before this microbatch, an int of at least 0"
        offset = checks.check_int(offset, "offset", expected, 0, checks.LARGEST_INT // 2)
        return torch.full_like(window.rows, offset)
    if plan.calling.keys and plan.group is not None:
        raise ValueError(
            "offset is missing: a step with keys over several ranks cannot know which samples of "
            "the batch a microbatch holds, and samples of two ranks would get the same keys. Pass "
            "the number of samples before it, on all ranks: step.update(state, window, "
            "microbatch, offset=...)."
        )
    return window.rows


def step_over_stream(
    plan: plans.Plan,
    more: Callable[..., tuple[StepWindow, reductions.AuxState | None]],
    apply: Callable[[TrainState, StepWindow], tuple[TrainState, StepInfo]],
    state: TrainState,
    microbatches: Iterable[trees.Tree],
    *shared: Any,
    weights: Any = None,
) -> tuple[TrainState, StepInfo]:
    """Take a step over the microbatches of a stream; ``more`` adds one of them, and its aux."""
    advice = (
        "Pass a batch, such as (x, y), to step(state, batch), or here as microbatches(batch, size)."
    )
    checks.check_stream(microbatches, "microbatches", "microbatches", advice)
    window, aux = begin_window(plan, state), None
    for microbatch in microbatches:
        window, aux = more(state, window, aux, microbatch, *shared, weights=weights)
    state, info = apply(state, window)
    return state, info._replace(aux=next_state.finished_aux(aux))


@plans.recording
def merge_windows(plan: plans.Plan, a: StepWindow, b: StepWindow) -> StepWindow:
    """Merge two windows, of which the first came first."""
    names = "the first window", "the second window"
    for window, what in zip((a, b), names, strict=True):
        checks.check_state(window, StepWindow, "this step", what)
    if plan.calling.buffers == "sequential":
        raise ValueError(
            "windows with buffers='sequential' cannot be merged, because buffers go from one "
            "microbatch to the next, and both windows began with the same ones. Use 'pooled' or "
            "'freeze'."
        )
    cause = "Merge windows of the same step and state."
    checks.check_same_structure(trees.flatten(a)[1], trees.flatten(b)[1], *names, cause)
    of_grads = f"{names[0]}.accum.grads", f"{names[1]}.accum.grads"
    accum = ledger.merged(a.accum, b.accum, plan.rule.squares, of_grads)
    buffers = trees.tree_map(torch.clone, a.buffers)
    if buffers and buffers.moments:
        buffers = buffers._replace(moments=merged_moments(a.buffers.moments, b.buffers.moments))
    return StepWindow(accum, buffers, a.rows + b.rows, a.checked | b.checked)


@plans.recording
def apply_window(
    plan: plans.Plan, state: TrainState, window: StepWindow
) -> tuple[TrainState, StepInfo]:
    """Apply a window: the next state, and a record of what happened."""
    return applied_window(plan, state, window)


def applied_window(
    plan: plans.Plan,
    state: TrainState,
    window: StepWindow,
    unit: float = 1.0,
    aux: trees.Tree = (),
    rows: float = 1.0,
) -> tuple[TrainState, StepInfo]:
    """The next state and what happened.

    The sums are still to be multiplied by ``unit``, and the weight by ``rows``.
    """
    params = plans.read_train_state(plan, state)
    ready = plans.begun_by(plan, state, params)(state.opt_state, params)
    plans.check_window(plan, state, window, params)
    carried = window.buffers, window.rows
    own, shared = plan.donate and modes.may_write(), plan.group is not None
    sums = trees.tree_leaves(window.accum.grads)
    work = [x.detach() for x in sums] if own else [x.clone() for x in sums] if shared else sums
    accum = window.accum._replace(grads=work)
    try:
        if shared:
            accum, carried = ranks.of_all_ranks(plan, state, window._replace(accum=accum), unit)
            unit = 1.0
        summed = next_state.Summed(
            accum=accum,
            carried=carried,
            aux=aux,
            unit=unit,
            rows=rows,
            own=own or shared,
            checked=window.checked,
        )
        result = next_state.finished(plan, state, ready, summed)
    except BaseException:
        if own:
            states.mark(sums, states.Spoiled)
        raise
    if own:
        states.mark(trees.tree_leaves(window))
    return result
