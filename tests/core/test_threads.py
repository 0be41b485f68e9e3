"""Calls in two threads, each on its own module, do not see each other."""

from concurrent.futures import ThreadPoolExecutor

import pytest

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from tests.problems import together
from tests.pure.networks import by_hand, call, inputs, make, other_params, square, switch


pytestmark = [pytest.mark.purity, pytest.mark.promise("threads")]
REPEATS = 15


CHECKPOINTED = pytest.param(True, marks=pytest.mark.given_up("retries"), id="checkpointed")


def work(seed, engine, nonfinite, checkpointed):
    """A module and a call on it; where it is checkpointed, with autograd, hooks watch it."""
    net = make("nested", seed)
    switch([net], on=checkpointed and engine == "autograd")
    params, x = other_params(net, seed), inputs(5, seed)
    options = {"engine": engine, "nonfinite": nonfinite, "microbatch_size": 2}
    return net, lambda: pa.grad(square(net), **options)(params, x)


@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
@pytest.mark.parametrize("checkpointed", [False, CHECKPOINTED])
@pytest.mark.parametrize(
    "engines", [("func", "func"), ("autograd", "autograd"), ("func", "autograd")], ids="-".join
)
def test_two_threads_on_two_modules_do_not_see_each_other(engines, checkpointed, nonfinite):
    works = [work(i, engine, nonfinite, checkpointed) for i, engine in enumerate(engines)]
    nets, calls = zip(*works, strict=True)
    expected = [run() for run in calls]

    with unchanged(nets, draws=True):
        results = together(*(lambda run=run: [run() for _ in range(REPEATS)] for run in calls))
    for result, want in zip(results, expected, strict=True):
        for grads in result:
            assert_trees_bitwise_equal(grads, want)


@pytest.mark.parametrize("checkpointed", [False, CHECKPOINTED])
def test_a_module_in_another_thread_is_not_watched(checkpointed):
    """It is called while the loss runs, and still holds its own while the backward pass does."""
    net, other = make("linear", 0), make("linear", 3)
    switch([net, other], on=checkpointed)
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
