"""The loss of one microbatch as a step calls it, and what goes on to the next microbatch.

The buffers and the number of samples so far are carried from one microbatch to the next. The loss
gets what was configured: ``buffers=`` and ``keys=``, one key per sample, made of the run's key, the
number of the step and the number of the sample. So masks do not depend on how a batch is cut.
"""

from typing import Any

import optree
import torch
from torch import Tensor

from .._base import containers, dtensors, reprs, sharded_rows, trees
from .._core import batches, coupling, losses, terms, weights, writes
from .._pure import keys
from . import plans
from .buffers import advance_buffers, collect_buffers, watching
from .state import TrainState


def caller(
    plan: plans.Plan,
    state: TrainState,
    spec: optree.PyTreeSpec,
    first: Tensor | None = None,
    total: int | None = None,
) -> coupling.LossOfPart:
    """The loss of one microbatch of this step; ``LossOfPart`` says what it is given.

    The first sample of the step has the number ``first``, or that of the next one of the run. A
    batch at hand has ``total`` samples.
    """
    calling = plan.calling
    loss_fn, shared = calling.loss_fn, calling.shared
    if (
        calling.buffers is None
        and not calling.keys
        and (calling.policy is None or not calling.has_aux)
    ):

        def plainly(leaves: list[Tensor], part: trees.Tree, rows: int, carried: Any) -> Any:
            params = trees.unflatten(spec, leaves)
            try:
                return loss_fn(params, part, *shared)
            except Exception as error:
                losses.advise_on_arguments(error, (params, part, *shared), {})
                raise

        return plainly
    loss_fn = losses.advising(loss_fn, 1)
    attempt = keys.fold_in(state.key, state.attempts) if calling.keys else None
    first = state.samples if first is None else first

    def call(leaves: list[Tensor], part: trees.Tree, rows: int, carried: tuple[Any, Any]) -> Any:
        buffers, before = carried
        named: dict[str, Any] = {}
        if calling.buffers:
            named["buffers"] = buffers.values
        if attempt is not None:
            named["keys"] = keys_of(part, attempt, first, before, rows, total)
        params = trees.unflatten(spec, leaves)
        collected: Any = ()
        if calling.buffers is None:
            out = loss_fn(params, part, *shared, **named)
            # the engine says what is wrong with it
            if not calling.has_aux or not losses.is_pair(out):
                return out
            loss, aux = out
        else:
            with watching(calling.buffers) as seen:
                out = loss_fn(params, part, *shared, **named)
            loss, new, aux = _three(out, calling.has_aux)
            collected = collect_buffers(calling.buffers, seen, new, buffers.values)
        if calling.policy is not None:
            aux = calling.policy.cast_to_output(aux)
        return loss, aux if calling.buffers is None else (collected, aux)

    return call


def keys_of(
    part: trees.Tree, attempt: Tensor, first: Tensor, before: Any, rows: int, total: int | None
) -> Tensor:
    """A key for each sample of a microbatch; each rank makes those of its own samples."""
    leaves = trees.flatten(part)[0]
    if not dtensors.any_sharded(leaves):
        index = torch.arange(rows, dtype=torch.int64, device=first.device)
        return keys.fold_in(attempt, first + before + index)
    x = next(x for x in leaves if dtensors.is_sharded(x))
    return sharded_rows.rows_like(
        keys.fold_in(attempt, first + sharded_rows.numbers_of_rows(x, before, total)), x
    )


def sharing(plan: plans.Plan, shared: tuple[Any, ...]) -> plans.Plan:
    """The plan of one call, in which the loss is given more than the batch."""
    if not shared:
        return plan
    leaves, spec = containers.open_tree(shared)
    return with_shared(plan, trees.unflatten(spec, leaves), plan.calling.whole)


def with_shared(plan: plans.Plan, shared: tuple[Any, ...], whole: terms.Whole = None) -> plans.Plan:
    """The plan of a call that gives the loss these, which are trees of tensors.

    ``whole`` are the weights of the whole batch, of a sum of ``Weighted``.
    """
    return plan._replace(calling=plan.calling._replace(shared=shared, whole=whole))


def beside_batch(plan: plans.Plan) -> tuple[tuple[Any, ...], terms.Whole]:
    """What a graph is given beside state and batch, for ``with_shared``."""
    return plan.calling.shared, plan.calling.whole


def what_is_shared(plan: plans.Plan) -> tuple[writes.Given, ...]:
    """What the loss is given beside the batch, by name; in a graph, where nobody asks, nothing."""
    told = plan.calling.shared and not torch.compiler.is_dynamo_compiling()
    return (writes.Given("shared", *trees.flatten(plan.calling.shared)),) if told else ()


def check_keys(plan: plans.Plan, batch: batches.Batch) -> None:
    """Check that the samples of a batch can be given keys, if they are to be."""
    if plan.calling.keys:
        batches.need_rows(batch)


def _three(out: Any, has_aux: bool) -> tuple[Any, trees.Tree, Any]:
    """The loss, the new buffers and the aux in what a loss with buffers returned."""
    if not losses.is_pair(out) or (has_aux and not losses.is_pair(out[1])):
        wanted = "(loss, (new_buffers, aux))" if has_aux else "(loss, new_buffers)"
        raise TypeError(
            f"the loss returned {reprs.kind(out)}; expected {wanted}, because buffers are "
            f"configured and has_aux={has_aux}."
        )
    return (out[0], *out[1]) if has_aux else (*out, ())


def onwards(
    plan: plans.Plan, carried: tuple[Any, Any], entry: weights.Microbatch, rows: int
) -> tuple[tuple[Any, Any], weights.Microbatch]:
    """What the next microbatch is given, and the microbatch with its own aux alone.

    One that weighs nothing leaves the buffers as they were, but for those that may be of all ranks.
    """
    buffers, before = carried
    if plan.calling.buffers:
        collected, aux = entry.aux
        keep = entry.weight != 0 if isinstance(entry.weight, Tensor) else None
        buffers = advance_buffers(plan.calling.buffers, buffers, collected, keep, entry.reached)
        entry = entry._replace(aux=aux)
    return (buffers, before + rows), entry
