"""A step over a batch at hand, whole or on several ranks.

sums of all microbatches, and then what follows from the sums of any window: see windows.py
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._base import Flat, Tree, check_state, flatten
from .._core import (
    Accumulated,
    Accumulation,
    CutBatch,
    Microbatch,
    accumulate,
    begun,
    in_tensors,
    inside_of,
    need_rows,
    read_batch,
    read_cut,
)
from .buffers import begin_buffers
from .microbatch_loss import caller, check_keys, onwards
from .ranks import before_this_rank, of_all_ranks, on_this_rank
from .state import Plan, StepInfo, StepWindow, TrainState, read_train_state, recording
from .windows import finished, scale_of


@recording
def step_whole(plan: Plan, state: TrainState, batch: Tree) -> tuple[TrainState, StepInfo]:
    """One step over a whole batch."""
    check_state(state, TrainState, "this step")
    if plan.group is not None:
        return step_of_ranks(plan, partial(rows_of_this_rank, plan, plan.size), state, batch)
    cut = read_cut(batch, plan.size, plan.has_aux, "batch")
    check_keys(plan, cut.batch)
    return step_over(plan, state, cut)


def step_over(
    plan: Plan,
    state: TrainState,
    cut: Any,
    summing: Callable[[Accumulation], Accumulated] = accumulate,
) -> tuple[TrainState, StepInfo]:
    """One step over a batch that is cut, in a form that ``summing`` knows."""
    params, ready = read_train_state(plan, state, plan.optimizer.ready)
    before = 0 if summing is accumulate else torch.zeros_like(state.samples)
    job = _accumulation(plan, state, params, cut, before)
    counted = isinstance(cut, CutBatch) and not plan.buffers and not plan.keys
    sums = summing(job._replace(advance=None) if counted else job)
    carried = ((), sum(cut.sizes)) if counted else sums.carried
    # A batch that a loss sees at once passes through untouched, and its mean weighs 1.
    rows = carried[1] or 1 if cut.untouched and not sums.weighted else 1
    given = plan, state, ready, params[1], sums.state, carried, sums.aux
    return finished(*given, unit=sums.unit, rows=float(rows), own=True)


@recording
def step_of_ranks(
    plan: Plan, summing: Callable[..., Accumulated], state: TrainState, batch: Tree
) -> tuple[TrainState, StepInfo]:
    """One step over a batch of which each rank has some rows; ``summing`` sums its own.

    It may have to try more than once, and meanwhile tells other ranks nothing.
    """
    rows = need_rows(read_batch(batch, "batch"), "batch")
    (_, spec), ready = read_train_state(plan, state, plan.optimizer.ready)
    first = state.samples
    if plan.keys:
        first = first + before_this_rank(plan, state, rows)
    sums = summing(on_this_rank(plan, state), batch, first)
    buffers, own_rows = sums.carried
    own = in_tensors(sums.state, state.samples.device, plan.rule.squares)
    window = StepWindow(own, buffers, torch.full_like(state.samples, own_rows))
    accum, carried = of_all_ranks(plan, state, window, sums.unit)
    return finished(plan, state, ready, spec, accum, carried, sums.aux, own=True)


def rows_of_this_rank(
    plan: Plan, size: int | None, state: TrainState, batch: Tree, first: Tensor
) -> Accumulated:
    """The sums over the rows of this rank, the first of which is number ``first`` in the run."""
    cut = read_cut(batch, size, False, "batch", alone=False)
    check_keys(plan, cut.batch)
    job = _accumulation(plan, state, flatten(state.params), cut, 0, first)
    return accumulate(job) if cut.batch.rows else _of_no_rows(plan, job)


def _of_no_rows(plan: Plan, job: Accumulation) -> Accumulated:
    """What a rank without rows adds: nothing. But other ranks may wait for it inside of the loss.

    So the loss is called with no rows, unless it cannot be. If it reaches other ranks, its buffers
    are those that it has with them.
    """

    def advance(carried: Any, entry: Microbatch, rows: int) -> Any:
        return onwards(plan, carried, entry._replace(share=1.0), rows)

    came: Accumulated | None = None
    cut = job.batch._replace(size=None, sizes=[0], unit=1.0)
    with inside_of(begun()) as around:
        try:
            came = accumulate(job._replace(batch=cut, advance=advance))
        except Exception:
            if around.group is not None:
                raise
    if came is not None and around.group is not None:
        amounts = came.state._replace(microbatches=0, weighted=0)
        return came._replace(state=amounts, aux=())
    return accumulate(job._replace(batch=cut._replace(size=1, sizes=[])))


def _accumulation(
    plan: Plan,
    state: TrainState,
    params: Flat,
    cut: Any,
    before: Any,
    first: Tensor | None = None,
) -> Accumulation:
    return Accumulation(
        call=caller(plan, state, params[1], first),
        leaves=params[0],
        spec=params[1],
        batch=cut,
        rule=plan.rule,
        at_least=torch.float32,
        aux_reduction=plan.aux_reduction,
        known=plan.known,
        roots=("state.params", "batch"),
        scale=scale_of(plan, state),
        carried=(begin_buffers(plan.buffers, state.buffers), before),
        advance=partial(onwards, plan),
    )
