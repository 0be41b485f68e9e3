"""A schedule or a rate that cannot work is refused, and says what came."""

import math

import pytest
import torch

import pureaccum as pa
from pureaccum._optim.schedules import check_rate, rate_at
from tests.refusals import refused, saying


pytestmark = pytest.mark.faults
COUNT = torch.tensor(3)
PARTS = {
    "constant": (pa.constant, "value"),
    "linear_warmup": (lambda x: pa.linear_warmup(x, 3), "peak"),
    "linear_warmup, start": (lambda x: pa.linear_warmup(0.1, 3, start=x), "start"),
    "cosine_decay": (lambda x: pa.cosine_decay(x, 3), "peak"),
    "cosine_decay, end": (lambda x: pa.cosine_decay(0.1, 3, end=x), "end"),
    "step_decay": (lambda x: pa.step_decay(x, 3), "peak"),
    "step_decay, factor": (lambda x: pa.step_decay(0.1, [3], x), "factor"),
    "exponential_decay": (lambda x: pa.exponential_decay(x, 0.5), "peak"),
    "exponential_decay, factor": (lambda x: pa.exponential_decay(0.1, x), "factor"),
    "exponential_decay, end": (lambda x: pa.exponential_decay(0.1, 0.5, end=x), "end"),
    "one_cycle": (lambda x: pa.one_cycle(x, 3), "peak"),
    "plateau": (pa.plateau, "lr"),
    "check_rate": (check_rate, "lr"),
    "rate_at": (lambda x: rate_at(x, COUNT), "lr"),
}
EVERY = pytest.mark.parametrize(("take", "name"), PARTS.values(), ids=PARTS)


@EVERY
@pytest.mark.parametrize("value", [-0.1, -1, math.nan, math.inf])
def test_a_number_that_is_no_rate_is_refused(take, name, value):
    with refused(ValueError, f"{name} is {value!r}", "expected a float", "finite", "not negative"):
        take(value)


@EVERY
@pytest.mark.parametrize("value", [True, None, "0.1", [0.1], 1j])
def test_what_is_no_number_is_refused(take, name, value):
    words = (f"{name} is {value!r}", type(value).__name__, "expected a float", "a 0-d tensor")
    with refused(TypeError, *words):
        take(value)


@EVERY
@pytest.mark.parametrize("value", [torch.ones(1), torch.tensor(1j), torch.tensor(True)], ids=str)
def test_a_tensor_that_is_no_rate_is_refused(take, name, value):
    words = (f"{name} is a tensor", str(tuple(value.shape)), str(value.dtype), "0-d tensor", "real")
    with refused(ValueError, *words, given=value):
        take(value)


def test_a_rate_says_that_it_may_be_a_schedule():
    for take in (check_rate, lambda lr: rate_at(lr, COUNT)):
        with refused(TypeError, "lr is None", "expected a float, a 0-d tensor or a schedule"):
            take(None)


@pytest.mark.parametrize(
    "lr", [0, 0.0, 1, 1e-3, torch.tensor(-1.0), torch.tensor(1), pa.constant(1)]
)
def test_numbers_tensors_and_schedules_are_rates(lr):
    """The numbers of a tensor are not looked at: that would wait for the device."""
    check_rate(lr)
    rate_at(lr, COUNT)


@pytest.mark.parametrize(
    "make",
    [
        pa.linear_warmup,
        pa.cosine_decay,
        pa.step_decay,
        lambda peak, steps: pa.exponential_decay(peak, 0.5, steps),
        pa.one_cycle,
    ],
    ids=["linear_warmup", "cosine_decay", "step_decay", "exponential_decay", "one_cycle"],
)
def test_steps_are_a_positive_int(make):
    for steps in (0, -1):
        with refused(ValueError, f"steps is {steps}", "expected a positive int"):
            make(0.1, steps)
    for steps in (True, 2.0, None, torch.tensor(2.0)):
        with refused(TypeError, f"steps is {steps!r}", "expected a positive int"):
            make(0.1, steps)


# Decays ---------------------------------------------------------------------------------


def test_counts_of_a_decay_are_positive_ints_that_increase():
    for steps in ([3, 3], (3, 2)):
        with refused(ValueError, f"steps[1] is {steps[1]}, after 3", "steps to increase"):
            pa.step_decay(0.1, steps)
    with refused(ValueError, "steps[0] is 0", "expected a positive int"):
        pa.step_decay(0.1, [0, 2])
    for steps in ([2, 3.0], "23"):
        with refused(TypeError, f"steps[{len(steps) - 2 + (steps != '23')}] is"):
            pa.step_decay(0.1, steps)
    with refused(TypeError, "steps is a tensor of shape (2,)", "several of them in a list"):
        pa.step_decay(0.1, torch.tensor([2, 3]))


def test_a_decay_does_not_end_above_its_peak():
    with refused(ValueError, "end is 10.0, above peak=0.1", "a rate, and not a count"):
        pa.exponential_decay(0.1, 0.5, end=10)
    pa.exponential_decay(0.1, 0.5, end=0.1)


CYCLES = {
    "share": ({"pct_start": 30}, ValueError, ("pct_start is 30.0", "from 0 to 1")),
    "share of three": (
        {"pct_start": 0.6, "three_phase": True},
        ValueError,
        ("pct_start is 0.6", "from 0 to a half", "a way back"),
    ),
    "share below": ({"pct_start": -0.1}, ValueError, ("pct_start is -0.1",)),
    "no share": ({"pct_start": None}, TypeError, ("pct_start is None",)),
    "word": ({"anneal_strategy": "cosine"}, ValueError, ("anneal_strategy is 'cosine'", "'cos'")),
    "no number": ({"div_factor": "25"}, TypeError, ("div_factor is '25'", "above zero")),
    "zero": ({"div_factor": 0}, ValueError, ("div_factor is 0.0", "above zero")),
    "inf": ({"final_div_factor": math.inf}, ValueError, ("final_div_factor is inf", "finite")),
    "phases": ({"three_phase": 3}, ValueError, ("three_phase is 3", "False or True")),
}


@pytest.mark.parametrize(("knobs", "error", "words"), CYCLES.values(), ids=CYCLES)
def test_a_cycle_that_cannot_be_is_refused(knobs, error, words):
    with refused(error, *words):
        pa.one_cycle(0.1, 10, **knobs)


# Joining --------------------------------------------------------------------------------


A = pa.constant(0.1)


@pytest.mark.parametrize(
    ("schedules", "boundaries"), [([A], [1]), ([A, A], []), ([A, A], [1, 2]), ([], [])]
)
def test_there_is_one_schedule_more_than_boundaries(schedules, boundaries):
    words = (f"{len(schedules)} schedules", f"{len(boundaries)} boundaries", "one more schedule")
    with refused(ValueError, *words):
        pa.join_schedules(schedules, boundaries)


@pytest.mark.parametrize("boundaries", [[3, 3], [3, 2]])
def test_boundaries_increase(boundaries):
    with refused(ValueError, f"boundaries[1] is {boundaries[1]}, after 3", "not lengths"):
        pa.join_schedules([A, A, A], boundaries)


def test_boundaries_are_positive_ints():
    for boundary in (0, -2):
        with refused(ValueError, f"boundaries[0] is {boundary}", "expected a positive int"):
            pa.join_schedules([A, A], [boundary])
    for boundary in (2.0, True, None):
        with refused(TypeError, f"boundaries[1] is {boundary!r}", "expected a positive int"):
            pa.join_schedules([A, A, A], [1, boundary])


def test_a_number_among_the_schedules_is_refused():
    with refused(TypeError, "schedules[1] is 0.1, a float", "constant(rate)"):
        pa.join_schedules([A, 0.1], [2])


# Calls ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schedule",
    [
        A,
        pa.linear_warmup(1.0, 2),
        pa.cosine_decay(1.0, 2),
        pa.join_schedules([A, A], [2]),
        pa.step_decay(1.0, 2),
        pa.step_decay(1.0, []),
        pa.exponential_decay(1.0, 0.5),
        pa.one_cycle(1.0, 2),
    ],
)
@pytest.mark.parametrize("count", [3, 3.0, None])
def test_the_count_is_a_tensor(schedule, count):
    with refused(TypeError, f"the count is {count!r}", "0-d integer tensor", "torch.tensor"):
        schedule(count)


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(
    ("result", "error", "words"),
    [
        (None, TypeError, ["None, a NoneType", "without a return"]),
        (True, TypeError, ["True, a bool"]),
        ("0.1", TypeError, ["'0.1', a str"]),
        ((torch.tensor(0.1),), TypeError, ["a tuple"]),
        (torch.ones(1), ValueError, ["(1,)", "torch.float32"]),
        (torch.tensor(1j), ValueError, ["()", "torch.complex64"]),
        (torch.tensor(True), ValueError, ["()", "torch.bool"]),
    ],
)
def test_a_schedule_that_returns_no_rate_is_refused(result, error, words, joined):
    schedule = pa.join_schedules([A, lambda count: result], [2]) if joined else lambda count: result
    with refused(error, "the schedule returned", *words, "expected", "0-d tensor"):
        rate_at(schedule, COUNT)


@pytest.mark.parametrize("number", [0.5, 1])
@pytest.mark.parametrize("joined", [False, True])
def test_a_number_that_the_compiler_would_keep_for_ever_is_refused(number, joined):
    schedule = pa.join_schedules([A, lambda count: number], [2]) if joined else lambda count: number
    torch.compiler.reset()
    compiled = torch.compile(lambda c: rate_at(schedule, c), fullgraph=True, backend="eager")
    kind = type(number).__name__
    with saying(Exception, f"the schedule returned a Python {kind}", "constant", "step tensor"):
        compiled(COUNT)
    assert rate_at(schedule, COUNT) == number
