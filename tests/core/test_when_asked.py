"""When a loss is asked whether it may be cut, and where nobody asks: told by the calls of it."""

import os
import subprocess
import sys
import warnings
from collections import Counter
from functools import partial

import pytest
import torch
from torch.autograd import forward_ad

import pureaccum as pa
from pureaccum import CoupledLossError
from pureaccum.testing import assert_trees_bitwise_equal
from tests.problems import (
    Operations,
    fits,
    forget_losses,
    function,
    in_parts,
    leaf,
    nobody_was_asked,
    together,
)
from tests.runs import RUNS


pytestmark = [
    pytest.mark.purity,
    pytest.mark.promise("refused"),
    pytest.mark.usefixtures(nobody_was_asked.__name__),
]
W = torch.tensor([0.5, -1.0, 0.25])
SCHEDULE = (1, 2, 3, 5, 8)  # the calls that ask, of the first nine


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
    "a bound method": lambda: NOTING.loss,
}
ANEW = {
    "a lambda": lambda: lambda w, x: NOTING(w, x),
    "a partial": lambda: partial(NOTING.loss),
    "around a temperature": lambda: (lambda t: lambda w, x: NOTING(w, x) * t)(float(len(MADE))),
}


@pytest.mark.parametrize("name", ["grad", "value", "update", "step"])
@pytest.mark.parametrize("made", MADE)
def test_calls_one_two_three_five_and_eight_ask_one_microbatch(name, made):
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


@pytest.mark.parametrize("made", ANEW)
def test_a_loss_that_is_made_anew_is_asked_anew(made):
    asking = run_of("grad", ANEW[made], True)
    for _ in range(9):
        assert NOTING.during(asking)[2] >= 2


def test_making_losses_anew_again_and_again_is_told_once():
    def run():
        pa.grad(lambda w, x: fits(w, x), microbatch_size=2)(W, rows(4))

    for _ in range(49):
        run()
    with pytest.warns(UserWarning, match=r"50 losses made of .*<lambda>.*Make the loss once"):
        run()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(10):
            run()


def test_a_second_loss_of_one_factory_is_asked():
    """Whatever its first one has answered, and however often."""

    def made(weight, module):
        return lambda w, x: fits(w, x) + weight * module(x).square().mean()

    first = pa.grad(made(0.0, torch.nn.Identity()), microbatch_size=4)
    for _ in range(40):
        first(W, rows(12))
    second = pa.grad(made(0.1, lambda x: x - x.mean(0)), microbatch_size=4)
    with pytest.raises(CoupledLossError):
        second(W, rows(12))


class Equal:
    """Losses that compare equal, and their methods too."""

    def __init__(self, loss):
        self.inner = loss

    def __eq__(self, other):
        return isinstance(other, Equal)

    def __hash__(self):
        return 1

    def __call__(self, w, x):
        return self.inner(w, x)

    def loss(self, w, x):
        return self.inner(w, x)


@pytest.mark.parametrize("method", [False, True])
def test_losses_that_are_equal_are_two(method):
    one, other = Equal(fits), Equal(coupled)
    for _ in range(9):
        pa.grad(one.loss if method else one, microbatch_size=4)(W, rows(12))
    with pytest.raises(CoupledLossError):
        pa.grad(other.loss if method else other, microbatch_size=4)(W, rows(12))


@pytest.mark.parametrize("period", [10, 12])
def test_what_comes_once_in_a_period_is_refused(period):
    """Padding in the last batch of an epoch, say: no power of two is a multiple of ten."""
    loss = lambda w, x: (coupled if (x > 5).any() else fits)(w, x)  # noqa: E731
    bad = rows(12)
    bad[:, 0] = 6
    value = pa.value(loss, microbatch_size=4)

    def run():
        for call in range(1, 1200):
            value(W, rows(12) if call % period else bad)

    with pytest.raises(CoupledLossError):
        run()


def test_each_number_of_samples_and_each_caller_is_a_kind_of_its_own():
    """So the last batch of an epoch is asked about, and what a value shows is no gradient's."""
    loss = Noting()
    grad, value = (make(loss, microbatch_size=4) for make in (pa.grad, pa.value))
    for _ in range(8):
        grad(W, rows(12))
    for run in (lambda: grad(W, rows(11)), lambda: value(W, rows(12))):
        assert loss.during(run)[2] >= 2
    assert loss.during(lambda: grad(W, rows(12))) == Counter({4: 3})


def test_many_numbers_of_samples_are_eight_kinds_and_one_more():
    """A stream of packed sequences is not asked about each of its lengths."""
    loss = Noting()
    acc = pa.accumulator(loss)
    state = acc.init(W)
    asked = 0
    for n in [*range(8, 200)]:
        calls = loss.during(lambda: acc.update(state, W, rows(n)))  # noqa: B023
        asked += sum(calls.values()) > 1
    assert 8 <= asked < 30


def test_info_tells_that_a_step_has_asked():
    for size in (4, None):
        step = pa.make_step(lambda w, x: fits(w, x), pa.sgd(0.1), microbatch_size=size)
        state, told = step.init(W), []
        for _ in range(9):
            whole = step(state, rows(12)) if size else step.window(state, [rows(12)])
            state, info = whole
            assert info.checked.shape == ()
            assert info.checked.dtype == torch.bool
            told.append(bool(info.checked))
        assert [call for call, yes in enumerate(told, 1) if yes] == [*SCHEDULE]


# Settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["grad", "value", "update", "step"])
def test_off_runs_what_was_written_once_a_microbatch_and_refuses_nothing(name):
    loss = Noting(coupled)
    run = run_of(name, lambda: loss, True)
    with pa.checks("off"):
        for _ in range(3):
            assert loss.during(run) == ({4: 1} if name == "update" else {4: 3})
    with pytest.raises(CoupledLossError):
        run()


def test_always_asks_every_call_but_not_where_one_function_says_no():
    asking, plain = (run_of("step", lambda: NOTING, check) for check in (True, False))
    with pa.checks("always"):
        for _ in range(9):
            assert NOTING.during(asking)[2] >= 2
        NOTING.during(plain)
        assert NOTING.during(plain) == {4: 3}


@pytest.mark.promise("threads")
def test_a_setting_is_its_threads_and_a_plain_call_the_processs():
    def asks():
        loss = Noting(coupled)
        try:
            pa.grad(loss, microbatch_size=4)(W, rows(12))
        except CoupledLossError:
            return True
        return False

    made = pa.checks("off")  # about to be entered: no other thread sees it for a moment
    assert together(asks) == [True]
    with made:
        assert [asks(), *together(asks)] == [False, True]
        with pa.checks("always"):
            assert asks()
        assert not asks()
    try:
        assert repr(pa.checks("off")) == "checks('off')"
        assert [asks(), *together(asks)] == [False, False]
        with pa.checks("first"):
            assert [asks(), *together(asks)] == [True, False]
    finally:
        pa.checks("first")
    assert [asks(), *together(asks)] == [True, True]
    with pytest.raises(ValueError, match="mode is 'plain'; expected 'off' or 'first' or 'always'"):
        pa.checks("plain")


@pytest.mark.nightly
@pytest.mark.parametrize(("given", "comes"), [("off", "off"), ("none", "CHECKS is 'none'")])
def test_the_environment_sets_the_beginning(given, comes):
    said = "import pureaccum._base.checks as checks; print(checks.here.checks)"
    of = os.environ | {"PUREACCUM_CHECKS": given}
    run = subprocess.run([sys.executable, "-c", said], env=of, capture_output=True, text=True)
    assert comes in run.stdout + run.stderr


def test_a_call_that_does_not_ask_calls_the_loss_once_a_microbatch():
    loss = Noting()
    grad = pa.grad(loss, microbatch_size=4)
    calls = [loss.during(lambda: grad(W, rows(10))) for _ in range(9)]
    usual = Counter({4: 2, 2: 1})
    assert [call == usual for call in calls] == [call not in SCHEDULE for call in range(1, 10)]


def test_each_call_that_asks_is_about_another_microbatch():
    """So that one bad microbatch of four is met, wherever it stands."""
    loss = lambda w, x: (coupled if (x > 5).any() else fits)(w, x)  # noqa: E731
    for bad, call in enumerate(SCHEDULE[:4]):
        forget_losses()
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


def pairs(w, x):
    """Samples 2i and 2i + 1 are a pair; of one sample it is a mean over nothing."""
    score = x @ w
    return -torch.nn.functional.logsigmoid(score[0::2] - score[1::2]).mean()


def triples(w, x):
    score = x @ w
    return (1 + score[0::3] - score[1::3] * score[2::3]).relu().mean()


@pytest.mark.parametrize(
    ("loss", "size"), [(pairs, 2), (pairs, 4), (pairs, 8), (triples, 3), (triples, 6)]
)
@pytest.mark.parametrize("name", ["grad", "value", "step"])
def test_samples_that_belong_together_are_no_reason(name, loss, size):
    """NaN in a part of fewer than four samples proves nothing."""
    for _ in range(4):
        RUNS[name](loss, W, rows(24), size=size)


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
