"""A step over a batch at hand, whole or on several ranks.

The sums of all its microbatches, and then what follows from the sums of any window: see
next_state.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._base import checks, states, trees
from .._base.torch_internals import modes
from .._core import batches, exchange, ledger, reductions, weights, whole_batch, windows, writes
from .._core.seams import Window
from . import microbatch_loss, next_state, plans, ranks, structure
from .buffers import begin_buffers
from .state import StepInfo, StepWindow, TrainState
from .windows import first_row, with_weights


Summing = Callable[..., next_state.Summed]  # see ``sums_of_rows``


@plans.recording
def step_whole(
    plan: plans.Plan, state: TrainState, batch: trees.Tree, *shared: Any
) -> tuple[TrainState, StepInfo]:
    """One step over a whole batch."""
    if plan.group is not None:
        return _step_of_ranks(plan, partial(sums_of_rows, plan, plan.size), state, batch, *shared)
    prepared, begin = structure.prepare(plan, state, batch)
    ready = begin(state.opt_state, prepared.params)
    sums = _summed(microbatch_loss.sharing(plan, shared), state, prepared, state.samples)
    return next_state.finished(plan, state, ready, sums)


@plans.recording
def step_in_sums(
    plan: plans.Plan, summing: Summing, state: TrainState, batch: trees.Tree, *shared: Any
) -> tuple[TrainState, StepInfo]:
    """One step over a batch of which ``summing`` sums the samples that this rank has.

    It may have to try more than once. Meanwhile it tells other ranks nothing, and gives up nothing.
    """
    if plan.group is not None:
        return _step_of_ranks(plan, summing, state, batch, *shared)
    params = plans.read_train_state(plan, state)
    ready = plans.begun_by(plan, state, params)(state.opt_state, params)
    return next_state.finished(plan, state, ready, summing(state, batch, state.samples, *shared))


def _step_of_ranks(
    plan: plans.Plan, summing: Summing, state: TrainState, batch: trees.Tree, *shared: Any
) -> tuple[TrainState, StepInfo]:
    checks.check_state(state, TrainState, "this step")
    rows = batches.need_rows(batches.read_batch(batch, "batch"), "batch")
    params = plans.read_train_state(plan, state)
    ready = plans.begun_by(plan, state, params)(state.opt_state, params)
    first = state.samples
    if plan.calling.keys:
        first = first + ranks.before_this_rank(plan, state, rows)
    mine, shared = ranks.on_this_rank(plan, state, shared)
    with ranks.telling_ranks(plan, state):
        sums = summing(mine, batch, first, *shared)
    buffers, own_rows = sums.carried
    accum = ledger.in_tensors(sums.accum, state.samples.device, plan.rule.squares)
    rows = torch.full_like(state.samples, own_rows)
    window = StepWindow(accum, buffers, rows, torch.zeros_like(rows, dtype=torch.bool))
    given = mine.params, mine.buffers, mine.loss_scale, batch, shared
    accum, carried = ranks.of_all_ranks(plan, state, window, sums.unit, given)
    return next_state.finished(
        plan, state, ready, sums._replace(accum=accum, carried=carried, unit=1.0)
    )


def sums_of_rows(
    plan: plans.Plan,
    size: int | list[int] | None,
    state: TrainState,
    batch: trees.Tree,
    first: Tensor,
    *shared: Any,
) -> next_state.Summed:
    """The sums over some samples, of which the first is number ``first`` in the run."""
    prepared = structure.examined(plan, size, trees.flatten(state.params), batch)
    return _summed(microbatch_loss.sharing(plan, shared), state, prepared, first)


def _summed(
    plan: plans.Plan, state: TrainState, prepared: structure.Prepared, first: Tensor
) -> next_state.Summed:
    cut, buffers = prepared.cut, plan.calling.buffers
    rows = cut.batch.rows
    some = bool(rows) or plan.group is None
    if some and not (buffers or plan.calling.keys):  # nothing is carried; all count at once
        flow = ledger.Flow(carried=((), sum(cut.sizes)), aux_reduction=plan.calling.aux_reduction)
    else:
        flow = _flow(plan, (begin_buffers(buffers, state.buffers), 0))
    traced = torch.compiler.is_dynamo_compiling()  # a graph asks nothing
    summing, asked = _accumulated if some else _of_no_rows, 0 if traced else checks.here.asked
    sums = summing(plan, state, prepared, first, flow)
    return next_state.Summed(
        accum=sums.state,
        carried=sums.carried,
        aux=() if sums.aux is None else reductions.finish_aux(sums.aux),
        unit=sums.unit,
        # A batch that a loss sees at once passes through untouched, and its mean weighs 1.
        rows=float(rows or 1) if cut.untouched and not sums.weighted else 1.0,
        checked=not traced and checks.here.asked > asked,
    )


def _of_no_rows(
    plan: plans.Plan,
    state: TrainState,
    prepared: structure.Prepared,
    first: Tensor,
    flow: ledger.Flow,
) -> whole_batch.Accumulated:
    """What a rank without samples adds: nothing. But others may wait for it inside of the loss.

    So the loss is called with no samples, unless it cannot be. If it reaches other ranks, its
    buffers are those that it has with them.
    """

    def advance(carried: Any, entry: weights.Microbatch, rows: int) -> Any:
        after, new = microbatch_loss.onwards(plan, carried, entry._replace(weight=1.0), rows)
        return after, new._replace(weight=entry.weight)

    came: whole_batch.Accumulated | None = None
    with exchange.inside_of(exchange.onlooker()) as around:
        try:
            none = prepared._replace(cut=prepared.cut._replace(sizes=[0], unit=1.0))
            came = _accumulated(plan, state, none, first, flow._replace(advance=advance))
        except Exception:
            if around.group is not None:
                raise
    reached = around.group is not None
    if came is not None and (reached or plan.calling.known.terms):  # or ranks count its weights
        amounts = came.state._replace(microbatches=0, weighted=0)
        carried = came.carried if reached else flow.carried
        return came._replace(state=amounts, carried=carried, aux=None)
    none = prepared._replace(cut=prepared.cut._replace(size=1, sizes=[], unit=1.0))
    return _accumulated(plan, state, none, first, flow)


# A microbatch of a stream that may have to be cut itself ---------------------------------------


@plans.recording
def update_in_sums(
    plan: plans.Plan,
    summing: Callable[..., whole_batch.Accumulated],
    state: TrainState,
    window: StepWindow,
    microbatch: trees.Tree,
    *shared: Any,
    offset: int | None = None,
    weights: Any = None,
) -> Any:
    """The window with one more microbatch, whose samples ``summing`` sums; or ``(window, aux)``."""
    plan = with_weights(plan, state, weights)
    new, aux = _folded(plan, summing, state, window, None, microbatch, shared, offset)
    return (new, next_state.finished_aux(aux)) if plan.calling.has_aux else new


@plans.recording
def folded_in_sums(
    plan: plans.Plan,
    summing: Callable[..., whole_batch.Accumulated],
    state: TrainState,
    window: StepWindow,
    aux: reductions.AuxState | None,
    microbatch: trees.Tree,
    *shared: Any,
    weights: Any = None,
) -> tuple[StepWindow, reductions.AuxState | None]:
    """The same, and what has been reduced of aux with that of this microbatch."""
    plan = with_weights(plan, state, weights)
    return _folded(plan, summing, state, window, aux, microbatch, shared)


def _folded(
    plan: plans.Plan,
    summing: Callable[..., whole_batch.Accumulated],
    state: TrainState,
    window: StepWindow,
    aux: reductions.AuxState | None,
    microbatch: trees.Tree,
    shared: tuple[Any, ...],
    offset: int | None = None,
) -> tuple[StepWindow, reductions.AuxState | None]:
    params = plans.read_train_state(plan, state)
    plans.check_window(plan, state, window, params)
    flow = _flow(plan, (window.buffers, first_row(plan, window, offset)))
    flow = flow._replace(aux=aux, whole=plan.calling.whole)
    asked = checks.here.asked
    sums = summing(state, microbatch, flow, *shared)
    checked = window.checked | (checks.here.asked > asked)
    grads = [x * sums.unit if sums.unit != 1 else x for x in sums.state.grads]
    own = ledger.in_tensors(sums.state, state.samples.device, plan.rule.squares)
    own = own._replace(grads=trees.unflatten(params[1], grads))
    rows = torch.full_like(window.rows, batches.read_batch(microbatch).rows or 0)
    buffers = trees.tree_map(torch.clone, sums.carried[0])
    new = StepWindow(trees.add(window.accum, own), buffers, window.rows + rows, checked)
    aux = sums.aux
    if plan.donate and modes.may_write():
        if aux is not None:
            given_up = state.params, state.buffers, window.buffers
            aux = aux._replace(states=trees.apart(aux.states, given_up))
        states.mark(trees.tree_leaves(window))
    return new, aux


def sums_of_microbatch(
    plan: plans.Plan,
    size: int,
    state: TrainState,
    microbatch: trees.Tree,
    flow: ledger.Flow,
    *shared: Any,
) -> whole_batch.Accumulated:
    """The sums over a microbatch."""
    prepared = structure.examined(plan, size, trees.flatten(state.params), microbatch, "microbatch")
    return _accumulated(microbatch_loss.sharing(plan, shared), state, prepared, None, flow)


# Both ------------------------------------------------------------------------------------------


def _flow(plan: plans.Plan, carried: Any) -> ledger.Flow:
    return ledger.Flow(
        carried=carried,
        advance=partial(microbatch_loss.onwards, plan),
        aux_reduction=plan.calling.aux_reduction,
    )


def _accumulated(
    plan: plans.Plan,
    state: TrainState,
    prepared: structure.Prepared,
    first: Tensor | None,
    flow: ledger.Flow,
) -> whole_batch.Accumulated:
    """The sums over a batch, of which the first sample is number ``first`` in the run."""
    (leaves, spec), cut, kinds, question = prepared
    rows = writes.Given("batch", cut.batch.leaves, cut.batch.spec)
    loss = windows.GuardedLoss(
        microbatch_loss.caller(plan, state, spec, first, cut.batch.rows),
        plan.calling.known,
        (writes.Given("state.params", leaves, spec), *microbatch_loss.what_is_shared(plan), rows),
        writes.Asks(question, plan.calling.keeps_buffers),
    )
    if plan.group is not None:
        flow = flow._replace(of_all_ranks=partial(ranks.weights_of_all, plan))
    return whole_batch.accumulate(
        loss, cut, Window(rule=plan.rule, scale=next_state.scale_of(plan, state)), kinds, flow
    )
