"""The loss of one microbatch as a step calls it, and what goes on to the next microbatch.

What is carried is the buffers and the number of samples so far. The loss gets what was configured:
``buffers=`` and ``keys=``, one key a row, made of the run's key, the number of the step and the
number of the row. So masks do not depend on how a batch is cut.
"""

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from .._base.dtensors import refuse_sharded
from .._base.trees import Tree, unflatten
from .._core.batches import need_rows, read_batch
from .._core.loss import is_pair
from .._core.weights import Microbatch
from .._pure.keys import fold_in
from .buffers import advance, collect, watching
from .state import Plan, TrainState


def caller(
    plan: Plan, state: TrainState, spec: optree.PyTreeSpec
) -> Callable[[list[Tensor], Tree, Any], Any]:
    """The loss of a microbatch, given what is carried: the buffers and the number of samples."""
    attempt = attempt_key(plan, state)

    def call(leaves: list[Tensor], part: Tree, carried: tuple[Any, Tensor]) -> Any:
        buffers, samples = carried
        named: dict[str, Any] = {}
        if plan.buffers:
            named["buffers"] = buffers.values
        if attempt is not None:
            read = read_batch(part)
            refuse_sharded(read.leaves, "the batch", _KEYS)
            named["keys"] = row_keys(attempt, samples, need_rows(read))
        params = unflatten(spec, leaves)
        collected: Any = ()
        if plan.buffers is None:
            out = plan.loss_fn(params, part, **named)
            if not plan.has_aux or not is_pair(out):  # what is wrong with it is said elsewhere
                return out
            loss, aux = out
        else:
            with watching(plan.buffers) as seen:
                out = plan.loss_fn(params, part, **named)
            loss, new, aux = _three(out, plan.has_aux)
            collected = collect(plan.buffers, seen, new, buffers.values)
        if plan.policy is not None:
            aux = plan.policy.cast_to_output(aux)
        return loss, aux if plan.buffers is None else (collected, aux)

    return call


_KEYS = (
    "keys=True gives row i the key of row i, while ranks cut the rows that they hold: a row would "
    "get the key of another. Draw random numbers from a key in the batch itself."
)


def attempt_key(plan: Plan, state: TrainState) -> Tensor | None:
    """The key of this step, where keys are configured."""
    return fold_in(state.key, state.attempts) if plan.keys else None


def row_keys(attempt: Tensor, samples: Tensor, rows: int) -> Tensor:
    """One key a row, from the number of the row in the run."""
    index = torch.arange(rows, dtype=torch.int64, device=samples.device)
    return fold_in(attempt, samples + index)


def _three(out: Any, has_aux: bool) -> tuple[Any, Tree, Any]:
    """Loss, new buffers and aux of what a loss with buffers returned."""
    if not is_pair(out) or (has_aux and not is_pair(out[1])):
        wanted = "(loss, (new_buffers, aux))" if has_aux else "(loss, new_buffers)"
        raise TypeError(
            f"the loss returned a {type(out).__name__}; with buffers configured and "
            f"has_aux={has_aux} it returns {wanted}."
        )
    return (out[0], *out[1]) if has_aux else (*out, ())


def onwards(
    plan: Plan, carried: tuple[Any, Tensor], entry: Microbatch, rows: int
) -> tuple[tuple[Any, Tensor], Microbatch]:
    """What the next microbatch is given; one that weighs nothing leaves the buffers alone."""
    buffers, samples = carried
    if plan.buffers:
        collected, aux = entry.aux
        keep = entry.share != 0 if isinstance(entry.share, Tensor) else None
        buffers, entry = advance(plan.buffers, buffers, collected, keep), entry._replace(aux=aux)
    return (buffers, samples + rows), entry
