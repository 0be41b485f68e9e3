"""Over all of torch's operations: every way to a derivative gives what plain torch gives.

A way computes one derivative of one loss: first by engines, a step and the primitive, then of
second order. What comes is that of torch, to the last bit but where torch.func itself rounds in
another way; the second call gives the bits of the first, and so does one that nobody guards.
"""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp

import pureaccum as pa
from pureaccum._core.writes import WriteError, unguarded
from pureaccum.testing import assert_trees_bitwise_equal
from tests.conftest import PROFILE
from tests.core.operations import ROWS, draws, gradient_of_torch, losses_of_part, parts, seeded
from tests.draws import generator
from tests.problems import Functions, leaf


pytestmark = [
    pytest.mark.laws,
    pytest.mark.promise("closure"),
    pytest.mark.promise("purity"),
    pytest.mark.filterwarnings("ignore"),  # torch's own, of its operations
]
Params = list[Tensor]
Loss = Callable[[Params, Tensor], Tensor]
Of = Callable[
    [Loss], Callable[[Params], Tensor]
]  # a loss over all samples, as a function of params

WRONG_WHERE_OBSERVED = "linalg.pinv", "polar"  # with complex numbers: pytorch#198118


class Handing:
    """An optimizer whose next parameters are the gradients."""

    def init(self, params):
        return ()

    def apply(self, grads, state, params):
        return grads, state


# Losses over all samples, in four ways -----------------------------------------------------------


def plain(loss):
    return lambda p: loss(p, ROWS)


def total(loss):
    return lambda p: pa.microbatch(loss, microbatch_size=2, reduce="sum")(p, ROWS) / 2


def rows(loss):
    each = lambda p, rows: loss(p, rows) * torch.ones_like(rows)  # noqa: E731
    return lambda p: pa.microbatch(each, microbatch_size=2)(p, ROWS).mean()


def captured(loss):
    options = {"microbatch_size": 2, "reduce": "sum", "batch_argnums": 0}
    return lambda p: pa.microbatch(lambda rows: loss(p, rows), **options)(ROWS) / 2


def value(loss):
    return lambda p: pa.value(loss, microbatch_size=2)(p, ROWS)


# Derivatives of them --------------------------------------------------------------------------


def by_func(of):
    return lambda loss, p: grad(of(loss))(p)


def by_backward(of):
    def way(loss, p):
        leaves = [leaf(x) for x in p]
        return gradients(of(loss)(leaves), leaves)

    return way


def gradients(out, leaves, **options):
    found = torch.autograd.grad(out, leaves, allow_unused=True, **options)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]


def forward_over_reverse(of):
    return lambda loss, p: jvp(grad(of(loss)), (p,), (direction(p),))[1]


def reverse_over_reverse(of):
    def way(loss, p):
        leaves = [leaf(x) for x in p]
        grads = gradients(of(loss)(leaves), leaves, create_graph=True)
        pairs = zip(map(real, grads), map(real, direction(p)), strict=True)
        return gradients(torch.stack([(g * v).sum() for g, v in pairs]).sum(), leaves)

    return way


def direction(p):
    random = generator(1)
    return [torch.randn(x.shape, generator=random, dtype=x.dtype) for x in p]


def real(x):
    x = x.to_dense() if x.is_sparse else x
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def step(loss, p):
    step = pa.make_step(loss, Handing(), microbatch_size=2)
    return step(step.init(p), ROWS)[0].params


FUNC, BACKWARD = by_func(plain), by_backward(plain)
FORWARD, REVERSE = forward_over_reverse(plain), reverse_over_reverse(plain)
# Each way, and how plain torch computes the same.
FIRST = {
    "func": (lambda loss, p: pa.grad(loss, microbatch_size=2)(p, ROWS), FUNC),
    "autograd": (
        lambda loss, p: pa.grad(loss, microbatch_size=2, engine="autograd")(p, ROWS),
        BACKWARD,
    ),
    "whole": (lambda loss, p: pa.grad(loss)(p, ROWS), FUNC),
    "step": (step, BACKWARD),
    "value": (by_backward(value), BACKWARD),
    "total": (by_func(total), FUNC),
    "total, backward": (by_backward(total), BACKWARD),
    "rows": (by_func(rows), FUNC),
    "rows, backward": (by_backward(rows), BACKWARD),
    "captured": (by_func(captured), FUNC),
    "captured, backward": (by_backward(captured), BACKWARD),
}
SECOND = {
    "jvp of grad": (
        lambda loss, p: jvp(
            lambda p: pa.grad(loss, microbatch_size=2)(p, ROWS), (p,), (direction(p),)
        )[1],
        FORWARD,
    ),
    "jvp of total": (forward_over_reverse(total), FORWARD),
    "jvp of captured": (forward_over_reverse(captured), FORWARD),
    "backward twice of total": (reverse_over_reverse(total), REVERSE),
    "backward twice of rows": (reverse_over_reverse(rows), REVERSE),
    "backward twice of value": (reverse_over_reverse(value), REVERSE),
}


# torch.func reads no tensor of indices, by which a value is differentiated: it raises, and says so.
REFUSED = {("tensor_split", "value"), ("tensor_split", "backward twice of value")}


@pytest.mark.nightly
@parts
def test_every_way_gives_what_torch_gives(part):
    """Where an operation has several samples, each goes every other way, but for ``thorough``."""
    some = losses_of_part(part, *WRONG_WHERE_OBSERVED)
    for operation, group in groupby(some, lambda of: of.name.partition("[")[0]):
        samples = [*group]
        turns = 1 if PROFILE == "thorough" else min(len(samples), 2)
        for i, of in enumerate(samples):
            random, by_torch = draws(of), dict[Any, Any]()
            for name in [*(FIRST | SECOND)][i % turns :: turns]:
                if (operation, name) not in REFUSED:
                    check(of, name, random, by_torch)


def check(of, name, random, by_torch):
    """Compare one way with torch, its second call with the first, and one that nobody guards."""
    way, plain = (FIRST | SECOND)[name]
    for by in (FUNC, BACKWARD, plain):
        if by not in by_torch:
            by_torch[by] = found(by, of, of.loss)
    want, said = by_torch[plain], f"{of.name}, {name}"
    if want is None or (random and name in SECOND):
        return  # torch has no such derivative
    loss = lambda p, rows: of.loss(p, rows)  # noqa: E731
    came = found(way, of, loss)
    assert came is not None, f"{said}: torch gives a derivative, and this raises"
    numbers = [*want, of.loss(of.params, ROWS)] if name == "step" else []
    applied = all(real(x).isfinite().all() for x in numbers)  # a step of other numbers is not
    if applied and not random:
        near(came, want, by_torch[FUNC] or by_torch[BACKWARD], said)
    if name in FIRST:
        same(found(way, of, loss), came, f"{said}, the second call")
        unseen = found(way, of, lambda p, rows: of.loss(p, rows), guarded=False)
        same(unseen, came, f"{said}, unguarded")


def found(way, of, loss, *, guarded=True):
    """What a way gives; None where torch refuses the loss."""
    seeded()
    params = [x.clone() for x in of.params]
    try:
        with nullcontext() if guarded else unguarded():
            out = way(loss, params)
    except (RuntimeError, NotImplementedError, WriteError):
        return None
    assert all(x._version == 0 for x in params), of.name
    same(params, of.params, f"{of.name}, the inputs")
    return out


def same(came, want, said):
    try:
        assert_trees_bitwise_equal(came, want)
    except AssertionError as error:
        raise AssertionError(said) from error


def near(came, want, first, said):
    """The same bits, or the same to half of the digits: what is not rounding is more.

    A second derivative may be what is left of terms as large as the first, and of their rounding.
    """
    scale = 2.0**-40 * max((size(x) for x in first), default=0.0)
    for x, y in zip(map(real, came), map(real, want), strict=True):
        assert torch.equal(x.isfinite(), y.isfinite()), said
        assert size(x - y) <= 2.0**-26 * size(y) + scale, said


def size(x):
    return float(real(x).nan_to_num(0.0, 0.0, 0.0).norm())


@pytest.mark.slow
@pytest.mark.mechanism
@parts
def test_a_function_mode_changes_no_bit(part):
    """``microbatch`` finds what is captured by such a mode, in the run that it uses."""
    for of in losses_of_part(part, *WRONG_WHERE_OBSERVED):
        expected = gradient_of_torch(of)
        with Functions():
            came = gradient_of_torch(of)
        assert_trees_bitwise_equal(came, expected)
