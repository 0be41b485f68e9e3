"""Of gradients one tree is alive, the sums, and of any leaf no more than three of its size.

The gradient as it comes, that multiplied by its factor, and that selected by its weight: each leaf
is added while the backward pass still runs, and what is handed on in its place has no memory.
"""

import pytest
import torch

import pureaccum as pa
from pureaccum._core.auto_size import counting
from tests.calls import ENGINES


pytestmark = [pytest.mark.bounds, pytest.mark.promise("one buffer")]
SIDE, ROWS = 512, 4
LEAF = SIDE * SIDE * 4  # 1 MiB, from which on each is added by itself


def mean(params, x):
    return torch.stack([(x @ w).square().mean() for w in params]).sum()


def weighted(params, x):
    return pa.Weighted(mean(params, x) * len(x), (x[:, 0] > 0).sum())


def whole(loss, params, x, engine):
    return lambda: pa.grad(loss, microbatch_size=ROWS, engine=engine)(params, x)


def cut(loss, params, x, engine):
    return lambda: pa.grad(loss, microbatch_size=2, engine=engine)(params, x)


def step(loss, params, x, engine):
    made = pa.make_step(loss, pa.sgd(0.1), microbatch_size=2, engine=engine, donate=True)
    state = made.init(params)
    return lambda: made(state, x)


def update(loss, params, x, engine):
    acc = pa.accumulator(loss, engine=engine)
    state = acc.init(params)
    return lambda: acc.update(state, params, x, donate=True)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("loss", [mean, weighted])
@pytest.mark.parametrize("form", [whole, cut, step, update])
@pytest.mark.parametrize("leaves", [4, 12])
def test_one_gradient_tree_is_alive_whatever_the_number_of_leaves(form, loss, engine, leaves):
    """Of a donated update the sums were there before; the rest are samples, and they are few."""
    params = [torch.full((SIDE, SIDE), 2.0**-9) for _ in range(leaves)]
    run = form(loss, params, torch.ones(ROWS, SIDE), engine)
    with counting() as live:
        run()
    activations = 4 * leaves * ROWS * SIDE * 4
    assert live.peak <= (0 if form is update else leaves * LEAF) + 3 * LEAF + activations
