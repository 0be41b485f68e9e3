"""A step over a batch at hand, whole or on several ranks.

The sums of all its microbatches, and then what follows from the sums of any window: see
next_state.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._base.checks import check_state
from .._base.states import mark
from .._base.torch_internals.modes import may_write
from .._base.trees import (
    Tree,
    add,
    apart,
    flatten,
    tree_leaves,
    tree_map,
    unflatten,
)
from .._core.batches import need_rows, read_batch
from .._core.exchange import inside_of, onlooker
from .._core.ledger import Flow, in_tensors
from .._core.reductions import AuxState, finish_aux
from .._core.seams import Window
from .._core.weights import Microbatch
from .._core.whole_batch import Accumulated, accumulate
from .._core.windows import GuardedLoss
from .._core.writes import Given
from .buffers import begin_buffers
from .microbatch_loss import caller, onwards, sharing, what_is_shared
from .next_state import Summed, finished, finished_aux, scale_of
from .plans import Plan, begun_by, check_window, read_train_state, recording
from .ranks import before_this_rank, of_all_ranks, on_this_rank, telling_ranks
from .state import StepInfo, StepWindow, TrainState
from .structure import Prepared, examined, prepare
from .windows import first_row


Summing = Callable[..., Summed]  # see ``sums_of_rows``


@recording
def step_whole(
    plan: Plan, state: TrainState, batch: Tree, *shared: Any
) -> tuple[TrainState, StepInfo]:
    """One step over a whole batch."""
    if plan.group is not None:
        return _step_of_ranks(plan, partial(sums_of_rows, plan, plan.size), state, batch, *shared)
    prepared, begin = prepare(plan, state, batch)
    ready = begin(state.opt_state, prepared.params)
    sums = _summed(sharing(plan, shared), state, prepared, state.samples)
    return finished(plan, state, ready, sums)


@recording
def step_in_sums(
    plan: Plan, summing: Summing, state: TrainState, batch: Tree, *shared: Any
) -> tuple[TrainState, StepInfo]:
    """One step over a batch of which ``summing`` sums the rows that this rank has.

    It may have to try more than once. Meanwhile it tells other ranks nothing, and gives up nothing.
    """
    if plan.group is not None:
        return _step_of_ranks(plan, summing, state, batch, *shared)
    params = read_train_state(plan, state)
    ready = begun_by(plan, state, params)(state.opt_state, params)
    return finished(plan, state, ready, summing(state, batch, state.samples, *shared))


def _step_of_ranks(
    plan: Plan, summing: Summing, state: TrainState, batch: Tree, *shared: Any
) -> tuple[TrainState, StepInfo]:
    check_state(state, TrainState, "this step")
    rows = need_rows(read_batch(batch, "batch"), "batch")
    params = read_train_state(plan, state)
    ready = begun_by(plan, state, params)(state.opt_state, params)
    first = state.samples
    if plan.calling.keys:
        first = first + before_this_rank(plan, state, rows)
    mine, shared = on_this_rank(plan, state, shared)
    with telling_ranks(plan, state):
        sums = summing(mine, batch, first, *shared)
    buffers, own_rows = sums.carried
    accum = in_tensors(sums.accum, state.samples.device, plan.rule.squares)
    window = StepWindow(accum, buffers, torch.full_like(state.samples, own_rows))
    given = mine.params, mine.buffers, mine.loss_scale, batch, shared
    accum, carried = of_all_ranks(plan, state, window, sums.unit, given)
    return finished(plan, state, ready, sums._replace(accum=accum, carried=carried, unit=1.0))


def sums_of_rows(
    plan: Plan,
    size: int | list[int] | None,
    state: TrainState,
    batch: Tree,
    first: Tensor,
    *shared: Any,
) -> Summed:
    """The sums over some rows, of which the first is number ``first`` in the run."""
    prepared = examined(plan, size, flatten(state.params), batch)
    return _summed(sharing(plan, shared), state, prepared, first)


def _summed(plan: Plan, state: TrainState, prepared: Prepared, first: Tensor) -> Summed:
    cut, buffers = prepared.cut, plan.calling.buffers
    rows = cut.batch.rows
    some = bool(rows) or plan.group is None
    if some and not (buffers or plan.calling.keys):  # nothing is carried; rows are counted at once
        flow = Flow(carried=((), sum(cut.sizes)), aux_reduction=plan.calling.aux_reduction)
    else:
        flow = _flow(plan, (begin_buffers(buffers, state.buffers), 0))
    summing = _accumulated if some else _of_no_rows
    sums = summing(plan, state, prepared, first, flow)
    return Summed(
        accum=sums.state,
        carried=sums.carried,
        aux=() if sums.aux is None else finish_aux(sums.aux),
        unit=sums.unit,
        # A batch that a loss sees at once passes through untouched, and its mean weighs 1.
        rows=float(rows or 1) if cut.untouched and not sums.weighted else 1.0,
    )


def _of_no_rows(
    plan: Plan, state: TrainState, prepared: Prepared, first: Tensor, flow: Flow
) -> Accumulated:
    """What a rank without rows adds: nothing. But other ranks may wait for it inside of the loss.

    So the loss is called with no rows, unless it cannot be. If it reaches other ranks, its buffers
    are those that it has with them.
    """

    def advance(carried: Any, entry: Microbatch, rows: int) -> Any:
        after, new = onwards(plan, carried, entry._replace(weight=1.0), rows)
        return after, new._replace(weight=entry.weight)

    came: Accumulated | None = None
    with inside_of(onlooker()) as around:
        try:
            none = prepared._replace(cut=prepared.cut._replace(sizes=[0], unit=1.0))
            came = _accumulated(plan, state, none, first, flow._replace(advance=advance))
        except Exception:
            if around.group is not None:
                raise
    if came is not None and around.group is not None:
        amounts = came.state._replace(microbatches=0, weighted=0)
        return came._replace(state=amounts, aux=None)
    none = prepared._replace(cut=prepared.cut._replace(size=1, sizes=[], unit=1.0))
    return _accumulated(plan, state, none, first, flow)


# A microbatch of a stream that may have to be cut itself ---------------------------------------


@recording
def update_in_sums(
    plan: Plan,
    summing: Callable[..., Accumulated],
    state: TrainState,
    window: StepWindow,
    microbatch: Tree,
    *shared: Any,
    offset: int | None = None,
) -> Any:
    """The window with one more microbatch, whose rows ``summing`` sums; or ``(window, aux)``."""
    new, aux = _folded(plan, summing, state, window, None, microbatch, shared, offset)
    return (new, finished_aux(aux)) if plan.calling.has_aux else new


@recording
def folded_in_sums(
    plan: Plan,
    summing: Callable[..., Accumulated],
    state: TrainState,
    window: StepWindow,
    aux: AuxState | None,
    microbatch: Tree,
    *shared: Any,
) -> tuple[StepWindow, AuxState | None]:
    """The same, and what has been reduced of aux with that of this microbatch."""
    return _folded(plan, summing, state, window, aux, microbatch, shared)


def _folded(
    plan: Plan,
    summing: Callable[..., Accumulated],
    state: TrainState,
    window: StepWindow,
    aux: AuxState | None,
    microbatch: Tree,
    shared: tuple[Any, ...],
    offset: int | None = None,
) -> tuple[StepWindow, AuxState | None]:
    params = read_train_state(plan, state)
    check_window(plan, state, window, params)
    flow = _flow(plan, (window.buffers, first_row(plan, window, offset)))._replace(aux=aux)
    sums = summing(state, microbatch, flow, *shared)
    grads = [x * sums.unit if sums.unit != 1 else x for x in sums.state.grads]
    own = in_tensors(sums.state, state.samples.device, plan.rule.squares)
    own = own._replace(grads=unflatten(params[1], grads))
    rows = torch.full_like(window.rows, read_batch(microbatch).rows or 0)
    buffers = tree_map(torch.clone, sums.carried[0])
    new = StepWindow(add(window.accum, own), buffers, window.rows + rows)
    aux = sums.aux
    if plan.donate and may_write():
        if aux is not None:
            given_up = state.params, state.buffers, window.buffers
            aux = aux._replace(states=apart(aux.states, given_up))
        mark(tree_leaves(window))
    return new, aux


def sums_of_microbatch(
    plan: Plan, size: int, state: TrainState, microbatch: Tree, flow: Flow, *shared: Any
) -> Accumulated:
    """The sums over a microbatch."""
    prepared = examined(plan, size, flatten(state.params), microbatch, "microbatch")
    return _accumulated(sharing(plan, shared), state, prepared, None, flow)


# Both ------------------------------------------------------------------------------------------


def _flow(plan: Plan, carried: Any) -> Flow:
    return Flow(
        carried=carried, advance=partial(onwards, plan), aux_reduction=plan.calling.aux_reduction
    )


def _accumulated(
    plan: Plan, state: TrainState, prepared: Prepared, first: Tensor | None, flow: Flow
) -> Accumulated:
    """The sums over a batch, of which the first row is number ``first`` in the run."""
    (leaves, spec), cut, kinds, question = prepared
    rows = Given("batch", cut.batch.leaves, cut.batch.spec)
    loss = GuardedLoss(
        caller(plan, state, spec, first, cut.batch.rows),
        plan.calling.known,
        (Given("state.params", leaves, spec), *what_is_shared(plan), rows),
        question,
    )
    return accumulate(loss, cut, Window(rule=plan.rule, scale=scale_of(plan, state)), kinds, flow)
