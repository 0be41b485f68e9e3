"""Calls in two threads, each on its own module, do not see each other."""

from concurrent.futures import ThreadPoolExecutor

import pytest

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from tests.problems import together
from tests.pure.networks import by_hand, call, inputs, make, other_params, square, switch


pytestmark = [pytest.mark.purity, pytest.mark.promise("threads")]
REPEATS = 15


def work(seed, engine, nonfinite):
    """A module and a call on it; with autograd it is checkpointed and so watched by hooks."""
    net = make("nested", seed)
    switch([net], on=engine == "autograd")
    params, x = other_params(net, seed), inputs(5, seed)
    options = {"engine": engine, "nonfinite": nonfinite, "microbatch_size": 2}
    return net, lambda: pa.grad(square(net), **options)(params, x)


@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
@pytest.mark.parametrize(
    "engines", [("func", "func"), ("autograd", "autograd"), ("func", "autograd")], ids="-".join
)
def test_two_threads_on_two_modules_do_not_see_each_other(engines, nonfinite):
    nets, calls = zip(*(work(i, e, nonfinite) for i, e in enumerate(engines)), strict=True)
    expected = [run() for run in calls]

    with unchanged(nets, draws=True):
        results = together(*(lambda run=run: [run() for _ in range(REPEATS)] for run in calls))
    for result, want in zip(results, expected, strict=True):
        for grads in result:
            assert_trees_bitwise_equal(grads, want)


def test_a_module_in_another_thread_is_not_watched():
    """It is called while the loss runs, and still holds its own while the backward pass does."""
    net, other = make("linear", 0), make("linear", 3)
    params, x = other_params(net), inputs(5)
    own, held = [id(m._parameters) for m in other.modules()], []

    def loss(params, x):
        out = square(net)(params, x)
        pool.submit(call, other, other_params(other), x).result()
        out.register_hook(lambda _: held.append([id(m._parameters) for m in other.modules()]))
        return out

    with unchanged([net, other], draws=True), ThreadPoolExecutor(1) as pool:
        grads = pa.grad(loss, microbatch_size=2, engine="autograd")(params, x)
    assert held == [own] * 3
    assert_trees_bitwise_equal((grads,), by_hand(square(net), [net], (params,), x, 2))
