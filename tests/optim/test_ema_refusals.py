"""What ``ema`` cannot average is refused, and named."""

import math

import pytest
import torch

import pureaccum as pa
from tests.refusals import refused


pytestmark = pytest.mark.faults
PARAMS = {"b": torch.ones(1, dtype=torch.bfloat16), "n": torch.tensor(3), "w": torch.ones(2)}
AVERAGE = pa.ema(0.9)


@pytest.mark.parametrize("decay", [1.0, -0.1, math.nan, math.inf])
def test_a_number_that_is_no_decay_is_refused(decay):
    with refused(ValueError, f"decay is {decay!r}", "below 1", "a function of the number of"):
        pa.ema(decay)


@pytest.mark.parametrize("decay", [None, True, "0.9", torch.tensor(0.9)])
def test_what_is_no_decay_is_refused(decay):
    with refused(TypeError, f"decay is {decay!r}", "below 1", "a function of the number of"):
        pa.ema(decay)


MISFITS = {
    "less": ({"b": PARAMS["b"], "w": PARAMS["w"]}, ("params['n'] is missing",)),
    "more": (PARAMS | {"z": PARAMS["w"]}, ("params['z'] is not in state.params",)),
    "shape": (PARAMS | {"w": torch.ones(3)}, ("params['w'] has shape (3,)", "(2,)")),
    "broadcast": (PARAMS | {"w": torch.ones(1)}, ("params['w'] has shape (1,)", "(2,)")),
    "wider": (PARAMS | {"w": torch.ones(2).double()}, ("params['w']", "float64", "float32")),
    "complex": (PARAMS | {"w": torch.ones(2) * 1j}, ("params['w']", "complex64", "float32")),
    "a number for a count": (PARAMS | {"n": torch.tensor(3.0)}, ("params['n']", "int64")),
    "a count for a number": (PARAMS | {"w": torch.ones(2).long()}, ("params['w']", "int64")),
    "device": (PARAMS | {"w": torch.ones(2, device="meta")}, ("params['w']", "meta", "cpu")),
}


@pytest.mark.parametrize(("params", "words"), MISFITS.values(), ids=MISFITS)
def test_params_that_do_not_fit_are_named(params, words):
    state = AVERAGE.init(PARAMS)
    with refused(ValueError, *words, "that it was made from by init", given=state):
        AVERAGE.update(state, params)


def test_what_is_averaged_may_lie_in_any_dtype_of_its_average():
    """A copy in bfloat16 of float32 parameters, or the other way round."""
    AVERAGE.update(AVERAGE.init(PARAMS), PARAMS | {"b": torch.ones(1), "w": torch.ones(2).half()})


def test_leaves_that_are_no_tensors_are_named():
    with refused(TypeError, "params['lr'] is a float", "expected a tensor"):
        AVERAGE.init({"w": torch.ones(2), "lr": 0.1})
    with refused(TypeError, "params['w'] is a float", "expected a tensor"):
        AVERAGE.update(AVERAGE.init(PARAMS), PARAMS | {"w": 0.1})
    with refused(TypeError, "state.params['w'] is a float", "expected a tensor"):
        AVERAGE.update(AVERAGE.init(PARAMS)._replace(params=PARAMS | {"w": 0.1}), PARAMS)


def test_there_is_something_to_average():
    for nothing in ({}, (), None):
        with refused(ValueError, "params has no leaves", "nothing to average"):
            AVERAGE.init(nothing)


def test_arguments_in_another_order_are_noticed():
    with refused(TypeError, "state is a dict", "ema expects the EmaState"):
        AVERAGE.update(PARAMS, AVERAGE.init(PARAMS))


@pytest.mark.parametrize("applied", [1.0, torch.tensor(1.0), torch.tensor([True, False]), "yes"])
def test_a_flag_is_a_bool(applied):
    state = AVERAGE.init(PARAMS)
    with refused(TypeError, "applied", "a 0-d bool tensor, such as info.applied", given=state):
        AVERAGE.update(state, PARAMS, applied)


def test_a_decay_that_is_no_number_is_refused():
    state = AVERAGE.init(PARAMS)
    for wrong, error in ((None, TypeError), (torch.ones(2), ValueError), (1j, TypeError)):
        with refused(error, "decay returned", "0-d tensor", given=state):
            pa.ema(lambda n, wrong=wrong: wrong).update(state, PARAMS)
