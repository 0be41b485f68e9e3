"""Random numbers that the loss draws are those of a torch.func loop over the microbatches."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

import pureaccum as pa
from tests.calls import ENGINES, NONFINITE


pytestmark = pytest.mark.purity


def squares(w, x):
    """Integers doubled or dropped: exact, and the gradient tells which were dropped."""
    return (dropout(x * w, 0.5) ** 2).sum()


def torch_loop(w, x, size, loss=squares):
    """What the engine promises to be, without what is not finite; and the generator after it."""
    grads = [torch.func.grad(loss)(w, part) for part in x.split(size)]
    finite = [grad for grad in grads if grad.isfinite().all()]
    return sum(finite, torch.zeros_like(w)), torch.get_rng_state()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("nonfinite", NONFINITE)
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 9), size=st.integers(1, 5))
def test_masks_and_generator_are_those_of_the_loop(engine, nonfinite, seed, rows, size):
    w = torch.tensor([1.0, -2.0, 3.0])
    x = torch.randint(1, 8, (rows, 3), generator=torch.Generator().manual_seed(seed)).float()
    torch.manual_seed(seed)
    expected, generator = torch_loop(w, x, size)
    torch.manual_seed(seed)
    grads = pa.grad(
        squares, microbatch_size=size, reduction="sum", engine=engine, nonfinite=nonfinite
    )(w, x)
    assert torch.equal(grads, expected)
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.parametrize("engine", ENGINES)
@given(seed=st.integers(0, 2**31), bad=st.sets(st.integers(0, 3), min_size=1))
def test_a_window_that_is_done_again_draws_the_same_numbers_once(engine, seed, bad):
    """``"skip"`` adds first and looks afterwards; what it does again is what it did."""
    w, x = torch.tensor([1.0, -2.0, 3.0]), torch.ones(8, 3)
    for i in bad:
        x[2 * i] = torch.inf  # a mask of three zeros makes it NaN: inf times zero
    torch.manual_seed(seed)
    expected, generator = torch_loop(w, x, 2)
    torch.manual_seed(seed)
    grads = pa.grad(squares, microbatch_size=2, reduction="sum", engine=engine, nonfinite="skip")(
        w, x
    )
    assert torch.equal(grads, expected)
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.parametrize("engine", ENGINES)
@given(seed=st.integers(0, 2**31))
def test_a_stream_draws_as_the_loop_does(engine, seed):
    w, x = torch.tensor([1.0, -2.0, 3.0]), torch.ones(7, 3)
    torch.manual_seed(seed)
    expected, generator = torch_loop(w, x, 3)
    torch.manual_seed(seed)
    acc = pa.accumulator(squares, reduction="sum", engine=engine)
    state = acc.init(w)
    for part in pa.microbatches(x, 3):
        state = acc.update(state, w, part, donate=True)
    assert torch.equal(acc.finalize(state)[0], expected)
    assert torch.equal(torch.get_rng_state(), generator)


def test_value_draws_as_the_loop_does():
    w, x = torch.tensor([1.0, -2.0, 3.0]), torch.ones(7, 3)
    torch.manual_seed(3)
    expected = sum(squares(w, part) for part in x.split(3))
    generator = torch.get_rng_state()
    torch.manual_seed(3)
    value = pa.value(squares, microbatch_size=3, reduction="sum")(w, x)
    assert torch.equal(value, expected)
    assert torch.equal(torch.get_rng_state(), generator)


def test_a_checkpoint_recomputes_with_the_masks_that_it_drew():
    """And what was drawn before it is drawn once."""
    w, x = torch.tensor([1.0, -2.0, 3.0]), torch.ones(7, 3)
    plain = lambda w, x: squares(w, dropout(x, 0.5))  # noqa: E731

    def checkpointed(w, x):
        return checkpoint(squares, w, dropout(x, 0.5), use_reentrant=False)

    torch.manual_seed(4)
    expected, generator = torch_loop(w, x, 3, plain)
    torch.manual_seed(4)
    grads = pa.grad(checkpointed, microbatch_size=3, reduction="sum", engine="autograd")(w, x)
    assert torch.equal(grads, expected)
    assert torch.equal(torch.get_rng_state(), generator)


def test_a_captured_tensor_that_requires_a_gradient_costs_no_second_draw():
    """A whole batch is computed once more where its gradients are to have a graph."""
    w, x = torch.tensor([1.0, -2.0, 3.0]), torch.arange(1.0, 13.0).view(4, 3)
    captured = torch.tensor(2.0, requires_grad=True)
    loss = lambda w, x: captured * squares(w, x)  # noqa: E731
    torch.manual_seed(1)
    grads = pa.grad(loss)(w, x)
    after = torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(grads, torch.func.grad(loss)(w, x))
    assert torch.equal(after, torch.get_rng_state())
    grads.sum().backward()
    assert captured.grad is not None
