"""The Python numbers in a batch, as inputs of a graph.

A compiler takes a Python number for a constant: the number of the step, or a coefficient that is
annealed, would be compiled anew with every value. So inside a graph the loss is given a 0-d tensor
in place of each of them,

    batch["t"] = 0.3   ->   tensor(0.3)

if that comes to the same. The loss is tried out with both, and what is not the same (a 0-d tensor
may be wider than the numbers it meets; ``range(n)``, a slice or an ``if`` asks it what it is) stays
a constant.
"""

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from .._base.generators import put_back
from .._base.torch_internals import seeing
from .._base.trees import flatten, unflatten
from .._core.batches import Batch, cut
from .._core.loss import read
from .buffers import begin
from .call import caller
from .precision import under
from .state import Plan, TrainState


Numbers = dict[int, Tensor]  # which leaf of a batch, and what stands for it
Dtypes = tuple[tuple[int, torch.dtype], ...]  # which leaf, and its dtype

# A Python number takes on the dtype of what it meets, and so does a 0-d tensor where that has
# dimensions. Where it has none, the wider of the two dtypes wins: hence the narrower ones.
OF_FLOATS = (torch.float64, torch.float32, torch.bfloat16)
OF_INTS = (torch.int64, torch.float64)  # an int64 that is divided is a float32


def dtypes_of_numbers(plan: Plan, state: TrainState, batch: Batch) -> Dtypes:
    """Which leaves may be tensors to the loss, and of what dtype.

    Bools choose what is computed, and remain what they are.
    """
    found = [i for i, x in enumerate(batch.leaves) if isinstance(x, (int, float))]
    chosen: Dtypes = ()
    for i in (i for i in found if not isinstance(batch.leaves[i], bool)):
        x = batch.leaves[i]
        # Another value than this one, which may be 0 or 1, and hide what is done to it.
        value = x + 1 if isinstance(x, int) else (x + 1) / math.pi
        leaves = [*batch.leaves[:i], value, *batch.leaves[i + 1 :]]
        want = _tried(plan, state, batch._replace(leaves=leaves), ())
        for dtype in OF_INTS if isinstance(x, int) else OF_FLOATS:
            dtypes = *chosen, (i, dtype)
            came = want and _tried(plan, state, batch._replace(leaves=leaves), dtypes)
            if came and _same(came, want):
                chosen = dtypes
                break
    return chosen


def taken_out(leaves: list[Any], dtypes: Dtypes, device: torch.device) -> tuple[list[Any], Numbers]:
    """Leaves in which all numbers of a place are alike, and those numbers as tensors."""
    if not dtypes:
        return leaves, {}
    # Filled and not copied: a device need not be waited for.
    numbers = {i: torch.full((), leaves[i], dtype=dtype, device=device) for i, dtype in dtypes}
    return [0 if i in numbers else x for i, x in enumerate(leaves)], numbers


def with_numbers(plan: Plan, numbers: Numbers) -> Plan:
    """The plan of a loss that finds them in its batch; no policy casts them, as none casts 0.3."""
    if not numbers:
        return plan
    loss_fn = plan.loss_fn if plan.policy is None else plan.loss_fn.__wrapped__

    def filled(params: Any, part: Any, **named: Any) -> Any:
        leaves, spec = flatten(part)
        leaves = [numbers.get(i, x) for i, x in enumerate(leaves)]
        return loss_fn(params, unflatten(spec, leaves), **named)

    return plan._replace(loss_fn=under(plan.policy, filled))


def _tried(plan: Plan, state: TrainState, batch: Batch, dtypes: Dtypes) -> Any:
    """What the loss makes of the first microbatch, and how often a tensor was asked what it is."""
    asked: list[Any] = []

    def see(arguments: Any, out: Any) -> None:
        if isinstance(out, (bool, int, float)):
            asked.append(out)

    device = state.samples.device
    params, spec = flatten(state.params)
    carried = begin(plan.buffers, state.buffers) if plan.buffers else (), state.samples
    try:
        leaves, numbers = taken_out(batch.leaves, dtypes, device)
        part = next(cut(batch._replace(leaves=leaves), plan.size or batch.rows or 1))
        call = caller(with_numbers(plan, numbers), state, spec)
        with (
            torch.no_grad(),
            put_back(device),
            warnings.catch_warnings(),
            seeing(see),
        ):
            warnings.simplefilter("ignore")
            out = call(params, part, carried)
        return *read(out, plan.rule.has_aux), len(asked)
    except Exception:
        return None


def _same(came: Any, want: Any) -> bool:
    """Whether two trials came to the same dtypes, and to the same numbers up to rounding."""
    (read_a, *rest_a), (read_b, *rest_b) = came, want
    (xs, spec), (ys, other) = flatten(read_a), flatten(read_b)
    try:
        alike = rest_a == rest_b and spec == other
    except Exception:  # aux may be anything
        return False
    return alike and all(map(_close, xs, ys))


def _close(x: Tensor, y: Tensor) -> bool:
    """Kernels for numbers and for tensors differ in the last bits, narrower dtypes in half."""
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    inexact = x.dtype.is_floating_point or x.dtype.is_complex
    eps = torch.finfo(x.dtype).eps if inexact else 0.0
    return torch.allclose(x, y, rtol=min(2**8 * eps, eps**0.5), atol=0, equal_nan=True)
