"""A window: the microbatches of one step, from a stream, and what follows from their sums.

    sums = gradients of the scaled loss, added up microbatch by microbatch
    the next state follows from them: see next_state.py

Each function is given the plan of the step first. All are pure; where the plan donates, they write
to the memory of the state that they are given.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .._base.checks import LARGEST_INT, check_int, check_same_structure, check_state
from .._base.states import Spoiled, hand_over, mark
from .._base.torch_internals.modes import may_write
from .._base.trees import (
    Tree,
    apart,
    flatten,
    tree_leaves,
    tree_map,
    unflatten,
    zeros,
)
from .._core.accumulator import updated
from .._core.batches import Batch, read_microbatch
from .._core.coupling import question_of
from .._core.ledger import empty
from .._core.ledger import merged as merge_states
from .._core.reductions import AuxState, fold_aux
from .._core.seams import Portion, Window
from .._core.structures import structure_of, update_of
from .._core.sums import Kinds, kinds_of
from .._core.weights import Microbatch
from .._core.windows import GuardedLoss
from .._core.writes import Given
from .buffers import begin_buffers, merged_moments
from .microbatch_loss import caller, check_keys, onwards, sharing, what_is_shared
from .next_state import Summed, finished, finished_aux, scale_of
from .plans import Plan, begun_by, check_window, read_train_state, recording
from .ranks import of_all_ranks, refuse_derivative
from .state import StepInfo, StepWindow, TrainState


# A stream of microbatches --------------------------------------------------------------------


@recording
def begin_window(plan: Plan, state: TrainState) -> StepWindow:
    """An empty window, with the buffers that its first microbatch is given."""
    refuse_derivative(plan)  # of all ranks: one may have no microbatch
    params = read_train_state(plan, state)
    begun_by(plan, state, params)
    leaves, _ = params
    count = len(leaves) if plan.rule.squares else None
    return StepWindow(
        accum=empty(zeros(state.params), leaves[0].device, count),
        buffers=tree_map(torch.clone, begin_buffers(plan.calling.buffers, state.buffers)),
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
    return (window, entry.aux) if plan.calling.has_aux else window


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
    if plan.calling.has_aux:
        skipping = plan.rule.nonfinite == "skip"
        aux = fold_aux(aux, entry, rows, plan.calling.aux_reduction, skipping)
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
    leaves, spec = flatten(check_state(state, TrainState, "this step").params)
    beside = flatten((state._replace(params=()), window))
    key = structure_of("update", (leaves, spec), flat := flatten(microbatch), beside)

    def examined() -> tuple[Batch, Kinds]:
        read_train_state(plan, state)
        check_window(plan, state, window, (leaves, spec))
        read = read_microbatch(microbatch, "microbatch")
        check_keys(plan, read)
        return read, kinds_of(leaves, [x.dtype for x in tree_leaves(window.accum.grads)])

    read, kinds = update_of(plan.structures, key, leaves, flat, examined)
    rows = read.rows or 0
    refuse_derivative(plan)
    given = Given("microbatch", read.leaves, read.spec)
    loss = GuardedLoss(
        caller(plan, state, spec),
        plan.calling.known,
        (Given("state.params", leaves, spec), *what_is_shared(plan), given),
        question_of(read, plan.rule) if plan.calling.check else None,
    )
    before = window.buffers, first_row(plan, window, offset)
    part = Portion(microbatch, rows, before, counts or read.rows)
    about = Window(rule=plan.rule, unit=unit, scale=scale_of(plan, state))
    accum, entry = updated(window.accum, loss, read, part, about, kinds, plan.donate)
    carried = window.buffers, window.rows
    try:
        after, entry = onwards(plan, carried, entry, rows)
        if plan.donate and may_write():
            if plan.calling.has_aux:
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
    if plan.calling.keys and plan.group is not None:
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
    return state, info._replace(aux=finished_aux(aux))


@recording
def merge_windows(plan: Plan, a: StepWindow, b: StepWindow) -> StepWindow:
    """One window of two, of which the first came first."""
    names = "the first window", "the second window"
    for window, what in zip((a, b), names, strict=True):
        check_state(window, StepWindow, "this step", what)
    if plan.calling.buffers == "sequential":
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
    params = read_train_state(plan, state)
    ready = begun_by(plan, state, params)(state.opt_state, params)
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
        summed = Summed(
            accum=accum, carried=carried, aux=aux, unit=unit, rows=rows, own=own or shared
        )
        result = finished(plan, state, ready, summed)
    except BaseException:
        if own:
            mark(sums, Spoiled)
        raise
    if own:
        mark(tree_leaves(window))
    return result
