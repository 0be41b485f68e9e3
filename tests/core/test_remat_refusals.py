"""What a rematerialised function cannot do says so, and never comes out as a wrong gradient."""

import pytest
import torch
from torch import nn
from torch.func import grad, jvp, vjp, vmap

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from tests.draws import generator
from tests.problems import drawing, leaf
from tests.refusals import refused, saying


pytestmark = [pytest.mark.faults, pytest.mark.promise("second run"), pytest.mark.table]
W, X = torch.randn(3, 3, generator=generator(0)), torch.randn(3, 3, generator=generator(1))
x = X[0]


PART = nn.Linear(3, 3)  # whose parameters are captured


@pytest.mark.promise("followed")
def test_a_constant_under_no_grad_may_be_captured():
    """The level of vjp records, and the one below it, to which the parameter belongs, does not."""
    plain = lambda w: PART(x @ w)  # noqa: E731
    with torch.no_grad():
        ours, torchs = (vjp(f, W)[1](x) for f in (pa.remat(plain), plain))
    assert_trees_bitwise_equal(ours, torchs)


# Functions that are not pure -----------------------------------------------------------


@pytest.mark.promise("writes")
@pytest.mark.parametrize(
    "run",
    [
        lambda f: f(X.clone()),
        lambda f: f(leaf(W) * 1),
        lambda f: grad(lambda x: f(x * 1).sum())(X),
        lambda f: vmap(f)(X.clone()),
        lambda f: grad(lambda X: vmap(f)(X * 1).sum())(X),
        lambda f: vmap(grad(lambda x: f(x * 1).sum()))(X),
    ],
    ids=["alone", "autograd", "grad", "vmap", "grad(vmap)", "vmap(grad)"],
)
def test_an_argument_that_is_written_to_is_refused(run):
    """The second run would start from what the first one left."""
    with refused(RuntimeError, "writes to args[0]", "in place", given=[W, X]):
        run(pa.remat(lambda x: x.add_(1)))


def test_an_input_that_is_written_to_afterwards_is_refused():
    """As torch says of any function that needs its inputs."""
    y = leaf(W) * 1
    out = pa.remat(torch.sin)(y)
    y.add_(1)
    with saying(RuntimeError, "modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("transform", ["backward", "grad", "jvp"])
def test_an_error_of_the_second_run_comes_as_it_is(transform):
    """And the generator stands where it stood."""
    calls = []

    def func(x):
        calls.append(0)
        out = x * torch.rand(3)
        if len(calls) == 2:
            raise RuntimeError("boom")
        return out

    lean = pa.remat(func)
    run = {
        "backward": lambda: lean(leaf(x)).sum().backward(),
        "grad": lambda: grad(lambda x: lean(x).sum())(x),
        "jvp": lambda: jvp(lean, (x,), (x,)),
    }

    def raised():
        with pytest.raises(RuntimeError, match=r"^boom$"):
            run[transform]()

    _, after = drawing(raised, 3)
    assert torch.equal(after, drawing(lambda: torch.rand(3), 3)[1])


def test_a_second_backward_pass_has_to_be_announced():
    out = pa.remat(torch.sin)(leaf(W)).sum()
    out.backward(retain_graph=True)
    out.backward()
    with saying(RuntimeError, "second time"):
        out.backward()


@pytest.mark.parametrize(
    ("error", "words", "make"),
    [
        pytest.param(
            TypeError,
            ("func is 3", "expected a function"),
            lambda: pa.remat(3),
            marks=pytest.mark.promise("errors"),
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_arguments_of_remat_that_make_no_sense_are_refused(error, words, make):
    with refused(error, *words):
        make()
