"""A step over several ranks: each accumulates its own samples, and one reduction makes it whole.

    where samples have keys: the samples of the ranks before this one
    ... the window, as in one process ...
    sums, totals, weights, counts, samples and buffers of all ranks

All that follows (division, clipping, whether the step is applied, what the loss scale learns) is
computed from the same bits on every rank, and so every rank comes to the same state.
"""

from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import distributed
from .._base import checks, claims, dtensors, trees
from .._base.settings import settings_of
from .._base.torch_internals import functorch, modes
from .._core import buckets, called_modules, causes, ledger
from .._core.exchange import Exchange, any_rank, exchange, gather_one
from . import plans
from .buffers import Carried, LayerMoments, batch_norm_buffers, begin_buffers, merged_moments
from .state import StepWindow, TrainState


def agreement_of(plan: plans.Plan, compile: Any) -> claims.Agreement:
    """What ranks have to agree on: all settings that decide what a step makes of sums.

    Each rank may come to its sums in its own way: by its loss, microbatches, engine and memory.
    """
    rule = plan.rule
    made_with = {
        "optimizer": plan.optimizer,
        "reduction": rule.reduction,
        "nonfinite": rule.nonfinite,
        "noise": rule.squares,
        "loss_scale": plan.loss_scale,
        "policy": plan.calling.policy,
        "buffers": plan.calling.buffers,
        "keys": plan.calling.keys,
        "compile": compile,
    }
    settings: dict[str, str] = {}
    for name, thing in made_with.items():
        settings |= settings_of(thing, name)
    return claims.agreement(settings)


def before_this_rank(plan: plans.Plan, state: TrainState, rows: int) -> Tensor:
    """How many samples of the batch the ranks before this one have."""
    assert plan.agreed is not None
    device = state.samples.device
    if not modes.at_top_level():
        of_all = gather_one(torch.tensor(rows, device=device), plan.group)
    else:
        call = "step(state, batch), where samples get keys"
        held = {"state": state}
        claimed = claims.claim(plan.agreed, call, {}, held, device, _CAUSE, whole=False)
        of_all = buckets.meet(claimed, plan.group, rows)
    return of_all[: dist.get_rank(plan.group)].sum().to(torch.int64)


def on_this_rank(
    plan: plans.Plan, state: TrainState, shared: tuple[Any, ...]
) -> tuple[TrainState, tuple[Any, ...]]:
    """What this rank computes from, so that all ranks have the whole derivative by it.

    Nothing but transforms can tell it from what all ranks hold.
    """
    if plan.group is None or modes.at_top_level():
        return state, shared
    held = {"params": state.params, "buffers": state.buffers, "loss_scale": state.loss_scale}
    held, shared = exchange("copy", (held, shared), plan.group)
    return state._replace(**held), shared


def of_all_ranks(
    plan: plans.Plan,
    state: TrainState,
    window: StepWindow,
    unit: Any = 1.0,
    given: trees.Tree = (),
    refused: str = "",
) -> tuple[ledger.AccumState, tuple[Any, Tensor]]:
    """The sums of all ranks, and what is carried after their last sample: buffers, their number.

    The window is that of this rank, computed from ``given``; its gradients are a list, which is
    given up, still to be multiplied by the unit of this rank. ``refused`` says why a rank has no
    window: its loss may not be cut.
    """
    if not modes.at_top_level():
        return _under_transforms(plan, state, window, unit, given)
    claimed = _claimed(plan, state, window.accum, refused)
    accum, of_all = distributed.begin_sum(
        window.accum, plan.group, claimed, window.rows, unit=unit
    )()
    buffers = window.buffers
    if plan.calling.buffers not in (None, "freeze"):
        buffers = _pooled(buffers, plan.group)
    return accum, (buffers, of_all.sum().to(torch.int64))


def window_of_all_ranks(
    plan: plans.Plan, state: TrainState, window: StepWindow, unit: Any = 1.0
) -> StepWindow:
    """The window of all ranks, from the window of this one, whose sums are given up."""
    sums, spec = trees.flatten(window.accum.grads)
    own = window._replace(accum=window.accum._replace(grads=sums))
    accum, (buffers, rows) = of_all_ranks(plan, state, own, unit)
    accum = accum._replace(grads=trees.unflatten(spec, accum.grads))
    return StepWindow(accum, buffers, rows, window.checked)


def weights_of_all(plan: plans.Plan, weights: Tensor) -> Tensor:
    """The weights of the terms of a loss over all ranks, of those of this one."""
    if not modes.at_top_level():
        return exchange("psum", weights, plan.group)
    return Exchange("psum", buckets.group_of(plan.group)).run([weights])[0]


def check_same(
    agreed: claims.Agreement, params: trees.Tree, buffers: trees.Tree, key: Tensor, group: Any
) -> None:
    """Check that all ranks begin with the same state; if not, all of them raise."""
    leaves, _ = checks.read_params(params)
    dtensors.refuse_sharded(
        leaves,
        "params",
        "With group, every rank holds params whole. Omit group: a step sums a batch that is "
        "sharded over the mesh (distribute_tensor) over its ranks.",
    )
    begun = {"params": params, "buffers": buffers, "key": key}
    cause = (
        "All ranks must make the same steps from the same state, with the same settings. Seed all "
        "ranks alike before you make the model (torch.manual_seed), or send the parameters of one "
        "rank to the others (torch.distributed.broadcast)."
    )
    device = leaves[0].device
    # nobody can look; what is exchanged later is compared by its shapes
    if not modes.at_top_level():
        return
    buckets.meet(
        claims.claim(agreed, "step.init(...)", {}, begun, device, cause, whole=True), group
    )


def refuse_derivative(plan: plans.Plan) -> None:
    """Raise where a stream over several ranks is differentiated."""
    if plan.group is not None and functorch.differentiating():
        raise RuntimeError(
            "a stream over several ranks does not work under a transform that differentiates, "
            "because ranks may have different numbers of microbatches, and a derivative would "
            "have to reach the others at each of them. Use step(state, batch), which reaches them "
            "once."
        )


_CAUSE = (
    "All ranks must make the same steps from the same state, and this step was not made. Likely "
    "causes: one rank loaded a checkpoint of another step, has other settings, or calls its steps "
    "in another order."
)


@contextmanager
def telling_ranks(plan: plans.Plan, state: TrainState) -> Generator[None]:
    """Let all ranks raise, in place of waiting, where the loss of some may not be cut."""
    try:
        yield
    except (causes.CoupledLossError, called_modules.DroppedBuffersError) as error:
        if plan.group is None:
            raise
        nothing = trees.zeros_for_sums(trees.flatten(state.params)[0], torch.float32)
        count = len(nothing) if plan.rule.squares else None
        accum = ledger.empty(nothing, state.samples.device, count)
        buffers = begin_buffers(plan.calling.buffers, state.buffers)
        none = torch.zeros_like(state.samples)
        window = StepWindow(accum, buffers, none, none.bool())
        with suppress(ValueError):  # the others raise that
            of_all_ranks(plan, state, window, refused=str(error).partition(". ")[0])
        raise


def _claimed(
    plan: plans.Plan, state: TrainState, accum: ledger.AccumState, refused: str
) -> claims.Claim:
    assert plan.agreed is not None
    sums, values = {"window.accum": accum}, {"state": state}
    mine = claims.claim(
        plan.agreed, "the end of a step", sums, values, state.samples.device, _CAUSE
    )
    if not refused:
        return mine

    def words() -> list[claims.Table]:
        table, *rest = mine.words()
        return [{**table, "the error of the loss": refused}, *rest]

    return mine._replace(kind=mine.kind + 1, words=words)


def _under_transforms(
    plan: plans.Plan, state: TrainState, window: StepWindow, unit: Any, given: trees.Tree
) -> tuple[ledger.AccumState, tuple[Any, Tensor]]:
    """What was accumulated on all ranks, as a function of what each rank gives.

    Every active vmap maps all that is exchanged, whatever samples and numbers a rank has.
    """
    zero = claims.nothing_of(given, window.rows.device)
    accum = window.accum._replace(grads=[grad * unit for grad in window.accum.grads])
    accum, rows = exchange("total", claims.tied((accum, window.rows), zero), plan.group)
    if plan.calling.buffers in (None, "freeze"):  # not those of this rank, which are copies
        return accum, (begin_buffers(plan.calling.buffers, state.buffers), rows)
    leaves, spec = trees.flatten(window.buffers.values)
    moments = window.buffers.moments
    leaves += [torch.stack(moments)] if moments else []
    # What is constant on all ranks stays so: torch differentiates by no running statistic.
    followed = any_rank([*map(functorch.differentiated, leaves)], window.rows.device, plan.group)
    zeros = [zero if yes else zero.detach() for yes in followed]
    pairs = zip(leaves, zeros, strict=True)
    of_all = [gather_one(claims.tied(x, zero), plan.group, "total") for x, zero in pairs]
    if moments:
        moments = reduce(merged_moments, (LayerMoments(*each) for each in of_all.pop()))
    return accum, (Carried(trees.unflatten(spec, [x[0] for x in of_all]), moments), rows)


def _pooled(carried: Carried, group: Any) -> Carried:
    """The buffers of all ranks: moments merged in the order of the ranks, the rest from rank 0."""
    leaves, spec = trees.flatten(carried.values)
    pooled = {i for at in batch_norm_buffers(leaves, spec) for i in at if i is not None}
    for i, leaf in enumerate(leaves):
        if i not in pooled:
            leaves[i] = leaf.clone(memory_format=torch.contiguous_format)
            with claims.between_ranks():
                dist.broadcast(leaves[i], group=group, group_src=0)
    moments = carried.moments
    if moments:
        of_all = gather_one(torch.stack(moments), group)
        moments = reduce(merged_moments, (LayerMoments(*each) for each in of_all))
    return Carried(trees.unflatten(spec, leaves), moments)
