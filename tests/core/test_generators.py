"""Random numbers that the loss draws are those of a torch.func loop over the microbatches."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from tests.calls import ENGINES, NONFINITE
from tests.problems import drawing, in_parts


pytestmark = pytest.mark.purity
W = torch.tensor([1.0, -2.0, 3.0])
seeds = st.integers(0, 2**31)


def squares(w, x):
    """Integers doubled or dropped: exact, and the gradient tells which were dropped."""
    return (dropout(x * w, 0.5) ** 2).sum()


def torch_loop(x, size, loss=squares):
    """What the engine promises to be, without what is not finite."""
    grads = [torch.func.grad(loss)(W, part) for part in x.split(size)]
    return sum((grad for grad in grads if grad.isfinite().all()), torch.zeros_like(W))


def check(run, by_hand, seed):
    """That numbers and the generator after them are those of the loop."""
    assert_trees_bitwise_equal(drawing(run, seed), drawing(by_hand, seed))


def gradient(x, size, loss=squares, **knobs):
    return lambda: pa.grad(loss, microbatch_size=size, reduction="sum", **knobs)(W, x)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("nonfinite", NONFINITE)
@given(seed=seeds, rows=st.integers(1, 9), size=st.integers(1, 5))
def test_masks_and_generator_are_those_of_the_loop(engine, nonfinite, seed, rows, size):
    x = torch.randint(1, 8, (rows, 3), generator=torch.Generator().manual_seed(seed)).float()
    run = gradient(x, size, engine=engine, nonfinite=nonfinite)
    check(run, lambda: torch_loop(x, size), seed)


@pytest.mark.parametrize("engine", ENGINES)
@given(seed=seeds, bad=st.sets(st.integers(0, 3), min_size=1))
def test_a_window_that_is_done_again_draws_the_same_numbers_once(engine, seed, bad):
    """``"skip"`` adds first and looks afterwards; what it does again is what it did."""
    x = torch.ones(8, 3)
    for i in bad:
        x[2 * i] = torch.inf  # a mask of three zeros makes it NaN: inf times zero
    run = gradient(x, 2, engine=engine, nonfinite="skip")
    check(run, lambda: torch_loop(x, 2), seed)


@pytest.mark.parametrize("engine", ENGINES)
@given(seed=seeds)
def test_a_stream_draws_as_the_loop_does(engine, seed):
    x = torch.ones(7, 3)
    acc = pa.accumulator(squares, reduction="sum", engine=engine)
    run = lambda: acc.finalize(in_parts(acc, W, pa.microbatches(x, 3), donate=True))[0]  # noqa: E731
    check(run, lambda: torch_loop(x, 3), seed)


def test_value_draws_as_the_loop_does():
    x = torch.ones(7, 3)
    value = pa.value(squares, microbatch_size=3, reduction="sum")
    by_hand = lambda: sum(squares(W, part) for part in x.split(3)).double()  # noqa: E731
    check(lambda: value(W, x).double(), by_hand, 3)


def test_a_checkpoint_recomputes_with_the_masks_that_it_drew():
    """And what was drawn before it is drawn once."""
    plain = lambda w, x: squares(w, dropout(x, 0.5))  # noqa: E731
    lean = lambda w, x: checkpoint(squares, w, dropout(x, 0.5), use_reentrant=False)  # noqa: E731
    x = torch.ones(7, 3)
    check(gradient(x, 3, lean, engine="autograd"), lambda: torch_loop(x, 3, plain), 4)


def test_a_captured_tensor_that_requires_a_gradient_costs_no_second_draw():
    """A whole batch is computed once more where its gradients are to have a graph."""
    x, captured = torch.arange(1.0, 13.0).view(4, 3), torch.tensor(2.0, requires_grad=True)
    loss = lambda w, x: captured * squares(w, x)  # noqa: E731
    grads, after = drawing(lambda: pa.grad(loss)(W, x), 1)
    want = drawing(lambda: torch.func.grad(loss)(W, x), 1)
    assert_trees_bitwise_equal((grads.detach(), after), want)
    grads.sum().backward()
    assert captured.grad is not None
