"""A step over a batch at hand, whole or on several ranks.

sums of all microbatches, and then what follows from the sums of any window: see windows.py
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._base.checks import check_state
from .._base.states import mark
from .._base.torch_internals import may_write
from .._base.trees import Flat, Tree, add, apart, flatten, tree_leaves, tree_map, unflatten
from .._core.accumulator import in_tensors
from .._core.batches import need_rows, read_batch
from .._core.exchange import inside_of, onlooker
from .._core.reductions import AuxState, finish_aux
from .._core.weights import Microbatch
from .._core.whole_batch import Accumulated, Accumulation, CutBatch, accumulate, read_cut
from .buffers import begin_buffers
from .microbatch_loss import caller, check_keys, onwards, sharing, what_is_shared
from .ranks import before_this_rank, of_all_ranks, on_this_rank, telling_ranks
from .state import (
    Plan,
    StepInfo,
    StepWindow,
    TrainState,
    check_window,
    read_train_state,
    recording,
)
from .windows import finished, first_row, scale_of


@recording
def step_whole(
    plan: Plan, state: TrainState, batch: Tree, *shared: Any
) -> tuple[TrainState, StepInfo]:
    """One step over a whole batch."""
    check_state(state, TrainState, "this step")
    if plan.group is not None:
        return step_in_sums(plan, partial(sums_of_rows, plan, plan.size), state, batch, *shared)
    if shared:
        plan = sharing(plan, shared)
    cut = read_cut(batch, plan.size, plan.has_aux, "batch")
    check_keys(plan, cut.batch)
    return step_over(plan, state, cut)


def step_over(plan: Plan, state: TrainState, cut: CutBatch) -> tuple[TrainState, StepInfo]:
    """One step over a batch that is cut."""
    params, ready = read_train_state(plan, state, plan.optimizer.ready)
    job = _accumulation(plan, state, params, cut, 0)
    counted = not plan.buffers and not plan.keys
    sums = accumulate(job._replace(advance=None) if counted else job)
    carried = ((), sum(cut.sizes)) if counted else sums.carried
    # A batch that a loss sees at once passes through untouched, and its mean weighs 1.
    rows = carried[1] or 1 if cut.untouched and not sums.weighted else 1
    aux = None if sums.aux is None else finish_aux(sums.aux)
    given = plan, state, ready, params[1], sums.state, carried, aux
    return finished(*given, unit=sums.unit, rows=float(rows), own=True)


Summing = Callable[..., tuple[Accumulated, float]]  # see ``sums_of_rows``


@recording
def step_in_sums(
    plan: Plan, summing: Summing, state: TrainState, batch: Tree, *shared: Any
) -> tuple[TrainState, StepInfo]:
    """One step over a batch of which ``summing`` sums the rows that this rank has.

    It may have to try more than once. Meanwhile it tells other ranks nothing, and gives up nothing.
    """
    check_state(state, TrainState, "this step")
    rows = need_rows(read_batch(batch, "batch"), "batch")
    (_, spec), ready = read_train_state(plan, state, plan.optimizer.ready)
    first = state.samples
    if plan.keys and plan.group is not None:
        first = first + before_this_rank(plan, state, rows)
    mine, shared = on_this_rank(plan, state, shared)
    with telling_ranks(plan, state):
        sums, times = summing(mine, batch, first, *shared)
    accum, unit, carried = sums.state, sums.unit, sums.carried
    if plan.group is not None:
        buffers, own_rows = carried
        own = in_tensors(accum, state.samples.device, plan.rule.squares)
        window = StepWindow(own, buffers, torch.full_like(state.samples, own_rows))
        given = mine.params, mine.buffers, mine.loss_scale, batch, shared
        accum, carried = of_all_ranks(plan, state, window, unit, given)
        unit = 1.0
    aux = None if sums.aux is None else finish_aux(sums.aux)
    given = plan, state, ready, spec, accum, carried, aux
    return finished(*given, unit=unit, rows=times, own=True)


def sums_of_rows(
    plan: Plan,
    size: int | list[int] | None,
    state: TrainState,
    batch: Tree,
    first: Tensor,
    *shared: Any,
) -> tuple[Accumulated, float]:
    """The sums over some rows, of which the first is number ``first`` in the run.

    And what their weight is still to be multiplied by.
    """
    plan, alone = sharing(plan, shared), plan.group is None
    cut = read_cut(batch, size, plan.has_aux and alone, "batch", alone=alone)
    check_keys(plan, cut.batch)
    job = _accumulation(plan, state, flatten(state.params), cut, 0, first)
    sums = accumulate(job) if cut.batch.rows or alone else _of_no_rows(plan, job)
    whole = cut.untouched and not sums.weighted
    return sums, float(cut.batch.rows or 1) if whole else 1.0


def _of_no_rows(plan: Plan, job: Accumulation) -> Accumulated:
    """What a rank without rows adds: nothing. But other ranks may wait for it inside of the loss.

    So the loss is called with no rows, unless it cannot be. If it reaches other ranks, its buffers
    are those that it has with them.
    """

    def advance(carried: Any, entry: Microbatch, rows: int) -> Any:
        return onwards(plan, carried, entry._replace(share=1.0), rows)

    came: Accumulated | None = None
    cut = job.batch._replace(sizes=[0], unit=1.0)
    with inside_of(onlooker()) as around:
        try:
            came = accumulate(job._replace(batch=cut, advance=advance))
        except Exception:
            if around.group is not None:
                raise
    if came is not None and around.group is not None:
        amounts = came.state._replace(microbatches=0, weighted=0)
        return came._replace(state=amounts, aux=None)
    return accumulate(job._replace(batch=cut._replace(size=1, sizes=[])))


def _accumulation(
    plan: Plan,
    state: TrainState,
    params: Flat,
    cut: CutBatch,
    before: Any,
    first: Tensor | None = None,
) -> Accumulation:
    return Accumulation(
        call=caller(plan, state, params[1], first, cut.batch.rows),
        leaves=params[0],
        spec=params[1],
        batch=cut,
        rule=plan.rule,
        at_least=torch.float32,
        aux_reduction=plan.aux_reduction,
        known=plan.known,
        roots=("state.params", "batch"),
        beside=what_is_shared(plan) if plan.shared else (),
        scale=scale_of(plan, state),
        check=plan.check,
        carried=(begin_buffers(plan.buffers, state.buffers), before),
        advance=partial(onwards, plan),
    )


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
    new, aux = folded_in_sums(
        plan, summing, state, window, None, microbatch, *shared, offset=offset
    )
    return (new, () if aux is None else finish_aux(aux)) if plan.has_aux else new


@recording
def folded_in_sums(
    plan: Plan,
    summing: Callable[..., Accumulated],
    state: TrainState,
    window: StepWindow,
    aux: AuxState | None,
    microbatch: Tree,
    *shared: Any,
    offset: int | None = None,
) -> tuple[StepWindow, AuxState | None]:
    """The same, and what has been reduced of aux with that of this microbatch."""
    params, _ = read_train_state(plan, state)
    check_window(plan, state, window, params)
    at = first_row(plan, window, offset)
    sums = summing(state, microbatch, window, at, aux, *shared)
    grads = [x * sums.unit if sums.unit != 1 else x for x in sums.state.grads]
    own = sums.state._replace(grads=grads)
    own = in_tensors(own, state.samples.device, plan.rule.squares)
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
    plan: Plan,
    size: int,
    state: TrainState,
    microbatch: Tree,
    window: StepWindow,
    first: Tensor,
    aux: AuxState | None,
    *shared: Any,
) -> Accumulated:
    """The sums over a microbatch, of which ``first`` rows of the step come before it."""
    plan = sharing(plan, shared)
    cut = read_cut(microbatch, size, False, "microbatch", alone=False)
    check_keys(plan, cut.batch)
    job = _accumulation(plan, state, flatten(state.params), cut, first)
    return accumulate(job._replace(carried=(window.buffers, first), aux=aux))
