"""A schedule, a rate, a metric or a decay that cannot work is refused, and says what came."""

import math
from functools import partial
from itertools import product

import pytest
import torch

import pureaccum as pa
from pureaccum._optim.schedules import check_rate, rate_at
from tests.refusals import refused, saying


pytestmark = [pytest.mark.faults, pytest.mark.promise("errors"), pytest.mark.table]
COUNT = torch.tensor(3)
A = pa.constant(0.1)
PARAMS = {"b": torch.ones(1, dtype=torch.bfloat16), "n": torch.tensor(3), "w": torch.ones(2)}
AVERAGE = pa.ema(0.9)
RATES = {
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
    "check_rate": (check_rate, "lr"),
    "rate_at": (lambda x: rate_at(x, COUNT), "lr"),
}
OF_STEPS = {
    "linear_warmup": pa.linear_warmup,
    "cosine_decay": pa.cosine_decay,
    "step_decay": pa.step_decay,
    "exponential_decay": lambda peak, steps: pa.exponential_decay(peak, 0.5, steps),
    "one_cycle": pa.one_cycle,
}


def rates():
    for take, name in RATES.values():
        for value in (-0.1, -1, math.nan, math.inf):
            words = (f"{name} is {value!r}", "expected a float", "finite", "not negative")
            yield partial(take, value), ValueError, words
        for value in (True, None, "0.1", [0.1], 1j):
            words = (f"{name} is {value!r}", type(value).__name__, "expected a float")
            yield partial(take, value), TypeError, (*words, "a 0-d tensor")
        for value in (torch.ones(1), torch.tensor(1j), torch.tensor(True)):
            words = (f"{name} is a tensor", str(tuple(value.shape)), str(value.dtype))
            yield partial(take, value), ValueError, (*words, "0-d tensor", "real")
    for take in (check_rate, lambda lr: rate_at(lr, COUNT)):
        words = ("lr is None", "expected a float, a 0-d tensor or a schedule")
        yield partial(take, None), TypeError, words
    for make, steps in product(OF_STEPS.values(), (0, -1, True, 2.0, None, torch.tensor(2.0))):
        error = ValueError if type(steps) is int else TypeError
        yield partial(make, 0.1, steps), error, (f"steps is {steps!r}", "expected a positive int")


def decays():
    for steps in ([3, 3], (3, 2)):
        words = (f"steps[1] is {steps[1]}, after 3", "steps to increase")
        yield partial(pa.step_decay, 0.1, steps), ValueError, words
    for steps, error, words in (
        ([0, 2], ValueError, ("steps[0] is 0", "expected a positive int")),
        ([2, 3.0], TypeError, ("steps[1] is",)),
        ("23", TypeError, ("steps[0] is",)),
        (
            torch.tensor([2, 3]),
            TypeError,
            ("steps is a tensor of shape (2,)", "several of them in a list"),
        ),
    ):
        yield partial(pa.step_decay, 0.1, steps), error, words
    words = ("end is 10.0, above peak=0.1", "a count, not a rate")
    yield partial(pa.exponential_decay, 0.1, 0.5, end=10), ValueError, words
    for error, words, cycle in (
        (ValueError, ("pct_start is 30.0", "from 0 to 1"), {"pct_start": 30}),
        (
            ValueError,
            ("pct_start is 0.6", "from 0 to a half", "the way back"),
            {"pct_start": 0.6, "three_phase": True},
        ),
        (ValueError, ("pct_start is -0.1",), {"pct_start": -0.1}),
        (TypeError, ("pct_start is None",), {"pct_start": None}),
        (ValueError, ("anneal_strategy is 'cosine'", "'cos'"), {"anneal_strategy": "cosine"}),
        (TypeError, ("div_factor is '25'", "above zero"), {"div_factor": "25"}),
        (ValueError, ("div_factor is 0.0", "above zero"), {"div_factor": 0}),
        (ValueError, ("final_div_factor is inf", "finite"), {"final_div_factor": math.inf}),
        (ValueError, ("three_phase is 3", "False or True"), {"three_phase": 3}),
    ):
        yield partial(pa.one_cycle, 0.1, 10, **cycle), error, words


def joined():
    for schedules, boundaries in (([A], [1]), ([A, A], []), ([A, A], [1, 2]), ([], [])):
        words = (f"{len(schedules)} schedules", f"{len(boundaries)} boundaries")
        run = partial(pa.join_schedules, schedules, boundaries)
        yield run, ValueError, (*words, "one more schedule")
    for second in (3, 2):
        words = (f"boundaries[1] is {second}, after 3", "not lengths")
        yield partial(pa.join_schedules, [A, A, A], [3, second]), ValueError, words
    for boundary in (0, -2):
        words = (f"boundaries[0] is {boundary}", "expected a positive int")
        yield partial(pa.join_schedules, [A, A], [boundary]), ValueError, words
    for boundary in (2.0, True, None):
        words = (f"boundaries[1] is {boundary!r}", "expected a positive int")
        yield partial(pa.join_schedules, [A, A, A], [1, boundary]), TypeError, words
    words = ("schedules[1] is 0.1, a float", "constant(rate)")
    yield partial(pa.join_schedules, [A, 0.1], [2]), TypeError, words


def calls():
    made = [A, pa.linear_warmup(1.0, 2), pa.cosine_decay(1.0, 2), pa.join_schedules([A, A], [2])]
    made += [pa.step_decay(1.0, 2), pa.step_decay(1.0, []), pa.exponential_decay(1.0, 0.5)]
    for schedule, count in product([*made, pa.one_cycle(1.0, 2)], (3, 3.0, None)):
        words = (f"the count is {count!r}", "0-d integer tensor", "torch.tensor")
        yield partial(schedule, count), TypeError, words
    for result, error, words in (
        (None, TypeError, ("None, a NoneType", "without a return")),
        (True, TypeError, ("True, a bool",)),
        ("0.1", TypeError, ("'0.1', a str",)),
        ((torch.tensor(0.1),), TypeError, ("a tuple",)),
        (torch.ones(1), ValueError, ("(1,)", "torch.float32")),
        (torch.tensor(1j), ValueError, ("()", "torch.complex64")),
        (torch.tensor(True), ValueError, ("()", "torch.bool")),
    ):
        for schedule in alone_and_joined(result):
            more = ("the schedule returned", *words, "expected", "0-d tensor")
            yield partial(rate_at, schedule, COUNT), error, more


def alone_and_joined(result):
    alone = lambda count: result  # noqa: E731
    return alone, pa.join_schedules([A, alone], [2])


def averages():
    for decay in (1.0, -0.1, math.nan, math.inf, None, True, "0.9", torch.tensor(0.9)):
        error = ValueError if type(decay) is float else TypeError
        words = (f"decay is {decay!r}", "below 1", "a function of the number of")
        yield partial(pa.ema, decay), error, words
    state = AVERAGE.init(PARAMS)
    for params, *words in (
        ({"b": PARAMS["b"], "w": PARAMS["w"]}, "params['n'] is missing"),
        (PARAMS | {"z": PARAMS["w"]}, "params['z'] is not in state.params"),
        (PARAMS | {"w": torch.ones(3)}, "params['w'] has shape (3,)", "(2,)"),
        (PARAMS | {"w": torch.ones(1)}, "params['w'] has shape (1,)", "(2,)"),
        (PARAMS | {"w": torch.ones(2).double()}, "params['w']", "float64", "float32"),
        (PARAMS | {"w": torch.ones(2) * 1j}, "params['w']", "complex64", "float32"),
        (PARAMS | {"n": torch.tensor(3.0)}, "params['n']", "int64"),
        (PARAMS | {"w": torch.ones(2).long()}, "params['w']", "int64"),
        (PARAMS | {"w": torch.ones(2, device="meta")}, "params['w']", "meta", "cpu"),
    ):
        words = (*words, "an average that init made from these params")
        yield partial(AVERAGE.update, state, params), ValueError, words
    wrong = PARAMS | {"w": 0.1}
    for run, name in (
        (partial(AVERAGE.init, {"w": torch.ones(2), "lr": 0.1}), "params['lr']"),
        (partial(AVERAGE.update, state, wrong), "params['w']"),
        (partial(AVERAGE.update, state._replace(params=wrong), PARAMS), "state.params['w']"),
    ):
        yield run, TypeError, (f"{name} is a float", "expected a tensor")
    for nothing in ({}, (), None):
        words = ("params has no leaves", "nothing to average")
        yield partial(AVERAGE.init, nothing), ValueError, words
    words = ("state is a dict", "ema expects the EmaState")
    yield partial(AVERAGE.update, PARAMS, state), TypeError, words
    for applied in (1.0, torch.tensor(1.0), torch.tensor([True, False]), "yes"):
        words = ("applied", "a 0-d bool tensor, such as info.applied")
        yield partial(AVERAGE.update, state, PARAMS, applied), TypeError, words
    for result, error in ((None, TypeError), (torch.ones(2), ValueError), (1j, TypeError)):
        average = pa.ema(lambda n, it=result: it)
        words = ("decay returned", "0-d tensor")
        yield partial(average.update, state, PARAMS), error, words


@pytest.mark.parametrize(
    ("run", "error", "words"),
    [*rates(), *decays(), *joined(), *calls(), *averages()],
)
def test_what_cannot_work_is_refused(run, error, words):
    given = [x for x in getattr(run, "args", ()) if isinstance(x, torch.Tensor | tuple | dict)]
    with refused(error, *words, given=given):
        run()


@pytest.mark.parametrize("lr", [0, 0.0, 1, 1e-3, torch.tensor(-1.0), torch.tensor(1), A])
def test_numbers_tensors_and_schedules_are_rates(lr):
    """The numbers of a tensor are not looked at: that would wait for the device."""
    check_rate(lr)
    rate_at(lr, COUNT)


def test_what_is_at_the_border_has_a_meaning():
    pa.exponential_decay(0.1, 0.5, end=0.1)


def test_what_is_averaged_may_lie_in_any_dtype_of_its_average():
    """A copy in bfloat16 of float32 parameters, or the other way round."""
    AVERAGE.update(AVERAGE.init(PARAMS), PARAMS | {"b": torch.ones(1), "w": torch.ones(2).half()})


@pytest.mark.slow
@pytest.mark.parametrize("number", [0.5, 1])
@pytest.mark.parametrize("joined", [False, True])
def test_a_number_that_the_compiler_would_keep_for_ever_is_refused(number, joined):
    schedule = alone_and_joined(number)[joined]
    torch.compiler.reset()
    compiled = torch.compile(lambda c: rate_at(schedule, c), fullgraph=True, backend="eager")
    kind = type(number).__name__
    with saying(Exception, f"the schedule returned a Python {kind}", "constant", "step tensor"):
        compiled(COUNT)
    assert rate_at(schedule, COUNT) == number
