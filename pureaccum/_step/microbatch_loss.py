"""The loss of one microbatch as a step calls it, and what goes on to the next microbatch.

The buffers and the number of rows so far are carried from one microbatch to the next. The loss
gets what was configured: ``buffers=`` and ``keys=``, one key per row, made of the run's key, the
number of the step and the number of the row. So masks do not depend on how a batch is cut.

A compiler takes a Python number for a constant, and would compile anew for every value of one that
changes, such as the number of the step or a coefficient that is annealed. So inside a graph the
loss is given a 0-d tensor in place of each number,

    batch["t"] = 0.3   ->   tensor(0.3)

if the loss is the same with it. Both are tried, and a number stays a constant where they differ (a
0-d tensor may be wider than what it meets; ``range(n)``, a slice or an ``if`` asks for its value).
"""

import math
import warnings
from typing import Any

import optree
import torch
from torch import Tensor

from .._base import (
    Tree,
    any_sharded,
    flatten,
    is_sharded,
    numbers_of_rows,
    open_tree,
    put_back,
    rows_like,
    seeing,
    unflatten,
)
from .._core import (
    Batch,
    Given,
    LossOfPart,
    Microbatch,
    advise_on_arguments,
    advising,
    cut_batch,
    is_pair,
    need_rows,
    read,
    under,
)
from .._pure import fold_in
from .buffers import advance_buffers, begin_buffers, collect_buffers, watching
from .state import Plan, TrainState, size_of


def caller(
    plan: Plan,
    state: TrainState,
    spec: optree.PyTreeSpec,
    first: Tensor | None = None,
    total: int | None = None,
) -> LossOfPart:
    """The loss of one microbatch of this step; ``LossOfPart`` says what it is given.

    The first row of the step has the number ``first``, or that of the next one of the run. A batch
    at hand has ``total`` rows.
    """
    loss_fn, shared = plan.loss_fn, plan.shared
    if plan.buffers is None and not plan.keys and (plan.policy is None or not plan.has_aux):

        def plainly(leaves: list[Tensor], part: Tree, rows: int, carried: Any) -> Any:
            params = unflatten(spec, leaves)
            try:
                return loss_fn(params, part, *shared)
            except Exception as error:
                advise_on_arguments(error, (params, part, *shared), {})
                raise

        return plainly
    loss_fn = advising(loss_fn, 1)
    attempt = fold_in(state.key, state.attempts) if plan.keys else None
    first = state.samples if first is None else first

    def call(leaves: list[Tensor], part: Tree, rows: int, carried: tuple[Any, Any]) -> Any:
        buffers, before = carried
        named: dict[str, Any] = {}
        if plan.buffers:
            named["buffers"] = buffers.values
        if attempt is not None:
            named["keys"] = keys_of(part, attempt, first, before, rows, total)
        params = unflatten(spec, leaves)
        collected: Any = ()
        if plan.buffers is None:
            out = loss_fn(params, part, *shared, **named)
            if not plan.has_aux or not is_pair(out):  # the engine says what is wrong with it
                return out
            loss, aux = out
        else:
            with watching(plan.buffers) as seen:
                out = loss_fn(params, part, *shared, **named)
            loss, new, aux = _three(out, plan.has_aux)
            collected = collect_buffers(plan.buffers, seen, new, buffers.values)
        if plan.policy is not None:
            aux = plan.policy.cast_to_output(aux)
        return loss, aux if plan.buffers is None else (collected, aux)

    return call


def keys_of(
    part: Tree, attempt: Tensor, first: Tensor, before: Any, rows: int, total: int | None
) -> Tensor:
    """A key for each row of a microbatch; of DTensors, each rank makes those of its own rows."""
    leaves = flatten(part)[0]
    if not any_sharded(leaves):
        index = torch.arange(rows, dtype=torch.int64, device=first.device)
        return fold_in(attempt, first + before + index)
    x = next(x for x in leaves if is_sharded(x))
    return rows_like(fold_in(attempt, first + numbers_of_rows(x, before, total)), x)


def sharing(plan: Plan, shared: tuple[Any, ...]) -> Plan:
    """The plan of one call, in which the loss is given more than the batch."""
    if not shared:
        return plan
    leaves, spec = open_tree(shared)
    return plan._replace(shared=unflatten(spec, leaves))


def what_is_shared(plan: Plan) -> tuple[Given, ...]:
    """What the loss is given beside the batch, by name."""
    return (Given("shared", *flatten(plan.shared)),) if plan.shared else ()


def check_keys(plan: Plan, batch: Batch) -> None:
    """Check that the rows of a batch can be given keys, if they are to be."""
    if plan.keys:
        need_rows(batch)


def first_part(batch: Batch, size: int | None) -> tuple[Tree, int]:
    """The first microbatch of a batch, and its rows."""
    rows = batch.rows or 1
    size = rows if size is None else min(size, rows)
    return next(cut_batch(batch, size)), size


def _three(out: Any, has_aux: bool) -> tuple[Any, Tree, Any]:
    """The loss, the new buffers and the aux in what a loss with buffers returned."""
    if not is_pair(out) or (has_aux and not is_pair(out[1])):
        wanted = "(loss, (new_buffers, aux))" if has_aux else "(loss, new_buffers)"
        raise TypeError(
            f"the loss returned a {type(out).__name__}; with buffers configured and "
            f"has_aux={has_aux} it returns {wanted}."
        )
    return (out[0], *out[1]) if has_aux else (*out, ())


def onwards(
    plan: Plan, carried: tuple[Any, Any], entry: Microbatch, rows: int
) -> tuple[tuple[Any, Any], Microbatch]:
    """What the next microbatch is given, and the microbatch with its own aux alone.

    One that weighs nothing leaves the buffers as they were, but for those that may be of all ranks.
    """
    buffers, before = carried
    if plan.buffers:
        collected, aux = entry.aux
        keep = entry.share != 0 if isinstance(entry.share, Tensor) else None
        buffers = advance_buffers(plan.buffers, buffers, collected, keep, entry.reached)
        entry = entry._replace(aux=aux)
    return (buffers, before + rows), entry


# Python numbers as tensors -------------------------------------------------------------------


# Which leaf of a batch, and after those of what is shared, and the tensor in place of it.
Numbers = dict[int, Tensor]
Dtypes = tuple[tuple[int, torch.dtype], ...]  # which leaf, and the dtype of that tensor

# A Python number takes on the dtype of what it meets, and so does a 0-d tensor if that has
# dimensions. If it has none, the wider of the two dtypes wins: hence the narrower ones.
OF_FLOATS = (torch.float64, torch.float32, torch.bfloat16)
OF_INTS = (torch.int64, torch.float64)  # an int64 that is divided is a float32


def dtypes_of_numbers(plan: Plan, state: TrainState, batch: Batch) -> Dtypes:
    """Which leaves of a batch, and of what is shared, may be tensors, and of what dtype.

    A bool chooses what is computed, and stays a bool.
    """
    chosen: Dtypes = ()
    given = [*batch.leaves, *flatten(plan.shared)[0]]
    for i, x in enumerate(given):
        if isinstance(x, bool) or not isinstance(x, (int, float)):
            continue
        # Another value than its own, which may be 0 or 1 and hide what is done to it.
        value = x + 1 if isinstance(x, int) else (x + 1) / math.pi
        leaves = [*given[:i], value, *given[i + 1 :]]
        want = _tried(plan, state, batch, leaves, ())
        for dtype in OF_INTS if isinstance(x, int) else OF_FLOATS:
            dtypes = *chosen, (i, dtype)
            came = want and _tried(plan, state, batch, leaves, dtypes)
            if came and _same(came, want):
                chosen = dtypes
                break
    return chosen


def taken_out(leaves: list[Any], dtypes: Dtypes, device: torch.device) -> tuple[list[Any], Numbers]:
    """The leaves with 0 in place of those numbers, and the numbers as tensors."""
    if not dtypes:
        return leaves, {}
    # Filled and not copied, so that nothing waits for a device.
    numbers = {i: torch.full((), leaves[i], dtype=dtype, device=device) for i, dtype in dtypes}
    return [0 if i in numbers else x for i, x in enumerate(leaves)], numbers


def with_numbers(plan: Plan, numbers: Numbers) -> Plan:
    """The plan with a loss that finds the numbers in its batch.

    No policy casts them, as none would cast 0.3.
    """
    if not numbers:
        return plan
    loss_fn = plan.loss_fn if plan.policy is None else plan.loss_fn.__wrapped__

    def filled(params: Any, *rest: Any, **named: Any) -> Any:
        leaves, spec = flatten(rest)
        leaves = [numbers.get(i, x) for i, x in enumerate(leaves)]
        return loss_fn(params, *unflatten(spec, leaves), **named)

    return plan._replace(loss_fn=under(plan.policy, filled))


def _tried(plan: Plan, state: TrainState, batch: Batch, leaves: list[Any], dtypes: Dtypes) -> Any:
    """What the loss returns for the first microbatch, and how often a tensor's value was asked."""
    asked: list[Any] = []

    def see(arguments: Any, out: Any) -> None:
        if isinstance(out, (bool, int, float)):
            asked.append(out)

    device = state.samples.device
    params, spec = flatten(state.params)
    carried = begin_buffers(plan.buffers, state.buffers), 0
    try:
        leaves, numbers = taken_out(leaves, dtypes, device)
        count = len(batch.leaves)
        batch = batch._replace(leaves=leaves[:count])
        plan = plan._replace(shared=unflatten(flatten(plan.shared)[1], leaves[count:]))
        call = caller(with_numbers(plan, numbers), state, spec)
        with (
            torch.no_grad(),
            put_back(device),
            warnings.catch_warnings(),
            seeing(see),
        ):
            warnings.simplefilter("ignore")
            out = call(params, *first_part(batch, size_of(plan)), carried)
        return *read(out, plan.rule.has_aux), len(asked)
    except Exception:
        return None


def _same(came: Any, want: Any) -> bool:
    """Whether two trials gave the same dtypes, and the same numbers up to rounding."""
    (read_a, *rest_a), (read_b, *rest_b) = came, want
    (xs, spec), (ys, other) = flatten(read_a), flatten(read_b)
    try:
        alike = rest_a == rest_b and spec == other
    except Exception:  # aux may be anything
        return False
    return alike and all(map(_close, xs, ys))


def _close(x: Tensor, y: Tensor) -> bool:
    """Whether two results are the same up to rounding.

    Kernels for numbers and for tensors differ in the last bits; in narrow dtypes in half of them.
    """
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    inexact = x.dtype.is_floating_point or x.dtype.is_complex
    eps = torch.finfo(x.dtype).eps if inexact else 0.0
    return torch.allclose(x, y, rtol=min(2**8 * eps, eps**0.5), atol=0, equal_nan=True)
