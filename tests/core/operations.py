"""Losses of all operations of torch, made of the samples that torch tests itself with (OpInfo).

    loss(params, rows) = mean over samples of (row * a fixed weighing of what the operation returns)

The params are all floating-point and complex tensors that a sample gives to the operation. So a
loss is linear in samples, and may be cut.

    @parts
    def test_...(part: int) -> None:
        for of in losses_of_part(part):
            ... of.loss(of.params, ROWS) ...

A tenth of the operations is asked, always the same, and under the profile ``dev`` a handful; under
``thorough`` all are.
"""

import itertools
import sys
import types
import unittest
import zlib
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import optree
import pytest
import torch
from torch import Tensor

from tests.conftest import PROFILE


# Both halves add up to a power of two: what a loss multiplies its gradient by is one, in each.
ROWS = torch.tensor([1.0, 3.0, 2.0, 2.0], dtype=torch.float64)
PARTS = 250 if PROFILE == "dev" else 10
MOST = {"dev": 1, "ci": 2}.get(PROFILE, 20)  # samples of an operation and dtype
DTYPES = {"real": torch.float64, "complex": torch.complex128}
parts = pytest.mark.parametrize("part", range(PARTS if PROFILE == "thorough" else 1))

LEFT_OUT = {
    **dict.fromkeys(
        ("empty_like", "new_empty", "new_empty_strided"), "its numbers are what was in memory"
    ),
    "linalg.lstsq": "its rounding depends on where memory lies",
}


class OfOperation(NamedTuple):
    """A loss of an operation, and what it is differentiated with respect to."""

    name: str
    params: list[Tensor]
    loss: Callable[[list[Tensor], Tensor], Tensor]


@cache
def differentiable():
    """All operations that torch differentiates, by name.

    To import torch's table of them changes switches of torch, which are put back.
    """
    if "expecttest" not in sys.modules:  # of which only a class is used, to derive from it
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stub
    scripted = torch._C.ScriptFunction.__call__, torch._C.ScriptMethod.__call__
    flags = torch.backends.flags_frozen.__globals__  # torch.backends itself is a stand-in
    allowed = flags["__allow_nonbracketed_mutation_flag"]
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    finally:
        torch._C.ScriptFunction.__call__, torch._C.ScriptMethod.__call__ = scripted
        flags["__allow_nonbracketed_mutation_flag"] = allowed
    names = {f"{op.name}.{op.variant_test_name}".rstrip("."): op for op in op_db}
    return {
        name: op
        for name, op in sorted(names.items())
        if op.supports_autograd and op.name not in LEFT_OUT
    }


def losses_of_part(part, *always):
    """Losses of the operations of one part; the first part has those that are named, too."""
    for name in differentiable():
        if zlib.crc32(name.encode()) % PARTS == part or (part == 0 and name in always):
            yield from losses(name)


def losses(name, most=MOST):
    """Losses of some samples of an operation, real and complex ones, which torch differentiates."""
    op = differentiable()[name]
    for kind, dtype in DTYPES.items():
        if dtype not in op.supported_backward_dtypes("cpu"):
            continue
        seeded()
        made = op.sample_inputs("cpu", dtype, requires_grad=False)
        samples = list(itertools.islice(made, most * most))  # each of which takes a millisecond
        for i in range(0, len(samples), max(len(samples) // most, 1))[:most]:
            found = _of_sample(f"{name}[{kind} {i}]", op, samples[i])
            if found is not None and gradient_of_torch(found) is not None:
                yield found


def _of_sample(name, op, sample):
    given = sample.input, tuple(sample.args), dict(sample.kwargs)
    leaves, spec = optree.tree_flatten(given, none_is_leaf=True)
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    if any(x.layout != torch.strided or x.is_nested for x in tensors):
        return None
    at = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and continuous(x)]
    if not at:
        return None
    process = sample.output_process_fn_grad

    def loss(params, rows):
        its = list(leaves)
        for i, x in zip(at, params, strict=True):
            its[i] = x
        first, args, kwargs = optree.tree_unflatten(spec, its)
        return (rows * weighed(process(op(first, *args, **kwargs)))).mean()

    return OfOperation(name, [leaves[i].detach().clone() for i in at], loss)


def continuous(x):
    return x.is_floating_point() or x.is_complex()


def weighed(out):
    """One number that depends on each number of a result, on no two of them alike."""
    total = torch.zeros((), dtype=torch.float64)
    for x in optree.tree_leaves(out):
        if isinstance(x, Tensor) and continuous(x) and x.layout == torch.strided:
            x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
            by = torch.cos(torch.arange(x.numel(), dtype=torch.float64) + 1).view(x.shape)
            total = total + (x * by).sum()
    return total


def draws(of):
    """Whether an operation draws random numbers, and each microbatch its own."""
    seeded()
    try:
        return not torch.equal(*[of.loss(of.params, ROWS).nan_to_num() for _ in range(2)])
    except RuntimeError:
        return False


def gradient_of_torch(of):
    """The gradients and the value that plain torch gives; None where it gives none, or writes."""
    seeded()
    leaves = [x.clone().requires_grad_() for x in of.params]
    try:
        total = of.loss(leaves, ROWS)
        found = torch.autograd.grad(total, leaves, allow_unused=True)
    except (RuntimeError, NotImplementedError):
        return None
    if any(x._version for x in leaves):  # an embedding with max_norm writes to its table
        return None
    grads = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]
    return grads, total.detach()


def seeded():
    """Seed the CPU's generator alone: ``torch.manual_seed`` takes longer than most losses."""
    torch.default_generator.manual_seed(0)
