"""A gradient that torch only notes to be zero is zeros like any other: torch.sgn's, for one.

Such a tensor has no memory, and raises where it is written to.
"""

import pytest
import torch

import pureaccum as pa
from pureaccum._base.trees import tree_leaves
from pureaccum.testing import assert_trees_bitwise_equal
from tests.problems import in_a_window, leaf


pytestmark = [pytest.mark.exact, pytest.mark.promise("bits")]
X = torch.arange(-7.0, 8.0).reshape(5, 3)
SMALL = {"a": torch.tensor([1.0, -2.0, 0.0]), "b": torch.ones(3)}
LARGE = {"a": torch.ones(512, 512), "b": torch.ones(3)}


def loss(p, x):
    return (torch.sgn(p["a"]).sum() * x + p["b"] * x).sum() / 4


def stream(p, engine):
    step = pa.make_step(loss, pa.sgd(0.5), engine=engine, reduction="sum")
    return in_a_window(step, step.init(p), X.split(2))[0].params


def cut(size=2, **options):
    options |= {"microbatch_size": size, "reduction": "sum"}
    return lambda p, e: pa.grad(loss, engine=e, **options)(p, X)


CALLS = {
    "cut": cut(),
    "one microbatch": cut(5),
    "skip": cut(nonfinite="skip"),
    "whole": lambda p, e: pa.grad(loss, engine=e)(p, X),
    "samples": lambda p, e: pa.per_sample_grad(
        loss, keep_batch_dim=True, engine={"autograd": "autograd"}.get(e, "vmap")
    )(p, X),
    "primitive": lambda p, _: torch.func.grad(
        lambda p: pa.microbatch(loss, microbatch_size=2, reduce="sum")(p, X)
    )(p),
}


@pytest.mark.parametrize("p", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize(
    "engine",
    ["func", "autograd", pytest.param("auto", marks=pytest.mark.given_up("auto engine"))],
)
@pytest.mark.parametrize("call", CALLS)
def test_a_gradient_of_noted_zeros_has_numbers(call, engine, p):
    got = CALLS[call](p, engine)
    if call in ("cut", "one microbatch", "skip"):  # others are as torch gives them
        for x in tree_leaves(got):
            x.add_(1).sub_(1)  # it may be written to
    assert not got["a"].any()
    b = X.sum(0) / 4
    assert_trees_bitwise_equal(got["b"] if call != "samples" else got["b"].sum(0), b)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("optimizer", [pa.sgd, pa.adamw, lambda lr: pa.sgd(lr, momentum=0.5)])
def test_a_step_takes_such_a_gradient(optimizer, donate):
    step = pa.make_step(loss, optimizer(0.5), microbatch_size=2, donate=donate, reduction="sum")
    state, info = step(step.init({"a": torch.zeros(3), "b": SMALL["b"]}), X)
    assert info.applied
    assert not state.params["a"].any()
    assert (state.params["b"] != 1).any()


AROUND = {
    "hessian": torch.func.hessian,
    "jvp(grad)": lambda f: lambda p: torch.func.jvp(torch.func.grad(f), (p,), (p,))[1],
    "grad(grad)": lambda f: torch.func.grad(lambda p: torch.func.grad(f)(p).sum()),
    "jacfwd(jacfwd)": lambda f: torch.func.jacfwd(torch.func.jacfwd(f)),
    "vmap(grad)": lambda f: lambda p: torch.func.vmap(torch.func.grad(f))(torch.stack([p, p])),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("size", [2, 5])
def test_such_a_gradient_is_differentiated_again(around, size):
    f = pa.microbatch(lambda p, x: (torch.sgn(p) * x).sum(), microbatch_size=size, reduce="sum")
    assert not AROUND[around](lambda p: f(p, X))(torch.ones(3)).any()


def test_backward_leaves_gradients_that_may_be_written_to():
    p = {k: leaf(x) for k, x in SMALL.items()}
    pa.value(loss, microbatch_size=2, reduction="sum")(p, X).backward()
    assert p["a"].grad is not None
    assert not p["a"].grad.add_(1).sub_(1).any()
    assert_trees_bitwise_equal(stream(SMALL, "auto"), stream(SMALL, "func"))
