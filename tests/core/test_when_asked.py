"""When a loss is asked whether it may be cut, and where nobody asks: told by the calls of it."""

from collections import Counter
from functools import partial

import pytest
import torch
from torch.autograd import forward_ad

import pureaccum as pa
from pureaccum import CoupledLossError
from pureaccum._core import coupling
from pureaccum.testing import assert_trees_bitwise_equal
from tests.problems import Operations, fits, function, in_parts, leaf, nobody_was_asked, together
from tests.runs import RUNS


pytestmark = [
    pytest.mark.purity,
    pytest.mark.promise("refused"),
    pytest.mark.usefixtures(nobody_was_asked.__name__),
]
W = torch.tensor([0.5, -1.0, 0.25])
SCHEDULE = (1, 2, 4, 8)  # the calls that ask, of the first nine


def rows(n, seed=0):
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(seed))


def coupled(w, x):
    return fits(w, x) + x.mean(0).square().sum()


class Noting:
    """A loss that notes of how many samples it is called."""

    def __init__(self, loss=fits):
        self.inner, self.calls = loss, list[int]()

    def __call__(self, w, x):
        self.calls.append(len(x))
        return self.inner(w, x)

    def loss(self, w, x):
        return self(w, x)

    def during(self, run):
        self.calls.clear()
        run()
        return Counter(self.calls)


# Which calls ask -------------------------------------------------------------------------


def run_of(name, loss, check):
    x, state = rows(12), pa.accumulator(fits).init(W)
    if name == "update":
        return lambda: pa.accumulator(loss(), check=check).update(state, W, x[:4])
    return lambda: RUNS[name](loss(), W, x, size=4, check=check)


NOTING = Noting()
MADE = {  # at each call
    "the same": lambda: NOTING,
    "a lambda": lambda: lambda w, x: NOTING(w, x),
    "a bound method": lambda: NOTING.loss,
    "a partial": lambda: partial(lambda noting, w, x: noting(w, x), NOTING),
    "around a temperature": lambda: (lambda t: lambda w, x: NOTING(w, x) * t)(float(len(MADE))),
}


@pytest.mark.parametrize("name", ["grad", "value", "update", "step"])
@pytest.mark.parametrize("made", MADE)
def test_calls_one_two_four_and_eight_ask_one_microbatch(name, made):
    """Two parts of it, beside what a call computes that does not ask."""
    asking, plain = (run_of(name, MADE[made], check) for check in (True, False))
    for call in range(1, 10):
        more, usual = NOTING.during(asking), NOTING.during(plain)
        more.subtract(usual)
        if call == 1:
            more[4] = 0  # a loss is watched when it is first called
        expected = Counter()
        if call in SCHEDULE:  # and, of a batch at hand, some samples that lie far apart
            expected = Counter({2: 2} if name == "update" else {2: 3, 4: 1 - (call == 1)})
        assert more == expected, (call, more, usual)


def test_a_call_that_does_not_ask_calls_the_loss_once_a_microbatch():
    loss = Noting()
    grad = pa.grad(loss, microbatch_size=4)
    calls = [loss.during(lambda: grad(W, rows(10))) for _ in range(9)]
    usual = Counter({4: 2, 2: 1})
    assert [call == usual for call in calls] == [call not in SCHEDULE for call in range(1, 10)]


def test_each_call_that_asks_is_about_another_microbatch():
    """So that one bad microbatch of four is met, wherever it stands."""
    loss = lambda w, x: (coupled if (x > 5).any() else fits)(w, x)  # noqa: E731
    for bad, call in enumerate(SCHEDULE):
        coupling._answers.clear()
        x = rows(16)
        x[4 * bad] = 6
        grad = pa.grad(loss, microbatch_size=4)
        for _ in range(call - 1):
            grad(W, x)
        with pytest.raises(CoupledLossError):
            grad(W, x)


# Where nobody asks -----------------------------------------------------------------------


def under_a_mode(loss, **options):
    with Operations():
        pa.grad(loss, microbatch_size=4, **options)(W, rows(12))


def under_forward_ad(loss, **options):
    with forward_ad.dual_level():
        w = forward_ad.make_dual(W, W)
        pa.value(loss, microbatch_size=4, **options)(w, rows(12))


def in_a_backward_pass(loss, **options):
    gradient = lambda: pa.grad(loss, microbatch_size=4, **options)(W, rows(12))  # noqa: E731
    Inner = function(lambda w: w.clone(), lambda g, w: gradient(), old=True)
    Inner.apply(leaf(W)).sum().backward()


def reported(loss, **options):
    step = pa.make_step(loss, pa.sgd(0.1), microbatch_size=4, **options)
    pa.memory_report(step, step.init(W), rows(12))


def transformed(transform, of, loss, **options):
    transform(of(loss, microbatch_size=4, **options))(W, rows(12))


def mapped(loss, **options):
    grad = pa.grad(loss, microbatch_size=4, **options)
    torch.func.vmap(grad, (0, None))(torch.stack([W, -W]), rows(12))


def compiled(loss, **options):
    torch.compiler.reset()
    run = pa.grad(loss.inner, microbatch_size=4, **options)
    torch.compile(run, backend="eager")(W, rows(12))


def uncut(loss, **options):
    x = rows(12)
    for size in (None, 12, 20):
        for name in ("grad", "value", "step"):
            RUNS[name](loss, W, x, size=size, **options)


NOBODY = {
    "torch.func.grad": partial(transformed, torch.func.grad, pa.value),
    "torch.func.jacrev": partial(transformed, torch.func.jacrev, pa.grad),
    "torch.func.hessian": partial(transformed, torch.func.hessian, pa.value),
    "vmap": mapped,
    "forward AD": under_forward_ad,
    "a dispatch mode": under_a_mode,
    "a backward pass": in_a_backward_pass,
    "memory_report": reported,
    "torch.compile": compiled,
    "all rows at once": uncut,
}


@pytest.mark.nightly
@pytest.mark.parametrize("run", NOBODY.values(), ids=NOBODY)
def test_nobody_asks(run):
    asked, plain = (Noting(coupled) for _ in range(2))
    for _ in range(2):
        run(asked)
        run(plain, check=False)
    assert asked.calls == plain.calls


def test_a_backward_pass_through_a_value_does_not_ask():
    calls = []
    for check in (True, False):
        loss, w = Noting(), W.clone().requires_grad_()
        value = pa.value(loss, microbatch_size=4, check=check)(w, rows(12))
        calls.append(loss.during(value.backward))
    assert calls[0] == calls[1]


# What cannot be told ---------------------------------------------------------------------


def knows_its_rows(w, x):
    return (x.view(4, 3) @ w).square().mean()


def wants_two_rows(w, x):
    if len(x) < 2:
        raise ValueError("a row on its own")
    return fits(w, x)


def normalised(w, x):
    return (torch.nn.functional.batch_norm(x, None, None, training=True) @ w).square().mean()


RAISES = {knows_its_rows: 4, wants_two_rows: 2, normalised: 2}


@pytest.mark.parametrize("loss", RAISES, ids=lambda loss: loss.__name__)
def test_a_loss_that_raises_on_parts_is_not_blamed(loss):
    """Nor is its error shown. (Two samples are all that there are, or they could be joined.)"""
    parts = [rows(RAISES[loss], seed) for seed in range(3)]
    for _ in range(9):
        results = []
        for check in (True, False):
            acc = pa.accumulator(loss, check=check)
            results.append(acc.finalize(in_parts(acc, W, parts)))
        assert_trees_bitwise_equal(*results)


def test_batch_norm_over_microbatches_of_two_rows_is_told_by_two_of_them():
    with pytest.raises(CoupledLossError):
        pa.grad(normalised, microbatch_size=2)(W, rows(4))


@pytest.mark.parametrize(("n", "size"), [(1, 1), (1, 4), (2, 1), (3, 1), (5, 4), (9, 1), (0, 1)])
def test_few_rows(n, size):
    x = rows(n)
    for make in (pa.grad, pa.value):
        got, want = (make(fits, microbatch_size=size, check=check)(W, x) for check in (True, False))
        assert_trees_bitwise_equal(got, want)
    if n > size:
        with pytest.raises(CoupledLossError):
            pa.value(coupled, microbatch_size=size)(W, x)
    else:
        pa.value(coupled, microbatch_size=size)(W, x)


def test_microbatches_without_rows_count_for_nothing():
    loss = lambda w, x: pa.Weighted((x @ w).square().sum(), len(x))  # noqa: E731
    parts = rows(0), rows(4), rows(0), rows(1)
    assert in_parts(pa.accumulator(loss), W, parts).weight == 5


@pytest.mark.promise("threads")
def test_two_threads_ask_one_loss():
    x = rows(12)
    want = pa.grad(fits, microbatch_size=4, check=False)(W, x)

    def repeat():
        results = []
        for _ in range(9):
            results.append(pa.grad(lambda w, x: fits(w, x), microbatch_size=4)(W, x))
            with pytest.raises(CoupledLossError):
                pa.grad(coupled, microbatch_size=4)(W, x)
        return results

    for results in together(repeat, repeat):
        for grads in results:
            assert_trees_bitwise_equal(grads, want)
