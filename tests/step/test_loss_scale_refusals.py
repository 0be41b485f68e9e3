"""A loss scale that cannot work is refused where it is made, and says which knob is wrong."""

import math

import pytest
import torch

import pureaccum as pa
from tests.refusals import refused


pytestmark = pytest.mark.faults
KINDS = pytest.mark.parametrize(
    "loss_scale", [pa.dynamic_loss_scale(), pa.static_loss_scale(2.0)], ids=["dynamic", "static"]
)
NO_NUMBERS = [True, None, "2", (2.0,), 2j, torch.tensor(2.0)]
NO_SCALES = [0, 0.0, -1.0, math.nan, math.inf, 1e-46, 1e39]  # float32 makes 0 or inf


@pytest.mark.parametrize("name", ["init_scale", "min_scale", "max_scale", "scale"])
def test_a_scale_is_a_positive_number_of_float32(name):
    make = pa.static_loss_scale if name == "scale" else pa.dynamic_loss_scale
    for error, values in ((ValueError, NO_SCALES), (TypeError, NO_NUMBERS)):
        for value in values:
            with refused(error, f"{name} is {value!r}", "expected a positive number", "float32"):
                make(**{name: value})


@pytest.mark.parametrize(
    ("name", "values", "limits"),
    [
        ("growth_factor", [1.0, 1, 0.5, -2.0, math.inf, math.nan], "between 1.0 and inf"),
        ("backoff_factor", [1.0, 1, 2.0, 0.0, -0.5, math.nan], "between 0.0 and 1.0"),
    ],
)
def test_a_factor_that_grows_or_shrinks_nothing_is_refused(name, values, limits):
    for value in values:
        with refused(ValueError, f"{name} is {value!r}", "expected", limits):
            pa.dynamic_loss_scale(**{name: value})
    for value in NO_NUMBERS:
        with refused(TypeError, f"{name} is {value!r}", type(value).__name__, limits):
            pa.dynamic_loss_scale(**{name: value})


@pytest.mark.parametrize("name", ["growth_interval", "hysteresis"])
def test_a_count_is_a_positive_int_of_int32(name):
    for value in (0, -1, 2**31):
        with refused(ValueError, f"{name} is {value}", "expected an int from 1"):
            pa.dynamic_loss_scale(**{name: value})
    for value in (*NO_NUMBERS, 2.0):
        with refused(TypeError, f"{name} is {value!r}", "expected an int from 1"):
            pa.dynamic_loss_scale(**{name: value})
    pa.dynamic_loss_scale(**{name: 2**31 - 1})


def test_bounds_that_cross_are_refused():
    with refused(ValueError, "min_scale is 8.0", "above max_scale=4.0", "expected"):
        pa.dynamic_loss_scale(4.0, min_scale=8.0, max_scale=4.0)


def test_a_first_scale_outside_its_bounds_is_refused():
    with refused(ValueError, "init_scale is 0.5", "min_scale=1.0", "pass min_scale=0.5 or less"):
        pa.dynamic_loss_scale(0.5)
    with refused(ValueError, "init_scale is 16.0", "max_scale=8.0", "pass max_scale=16.0 or more"):
        pa.dynamic_loss_scale(16.0, max_scale=8.0)


@KINDS
@pytest.mark.parametrize("state", [None, torch.tensor(2.0), (2.0, 0, 1), {"scale": 2.0}])
def test_what_is_no_state_of_a_loss_scale_is_refused(loss_scale, state):
    words = (f"state is a {type(state).__name__}", "expects the LossScaleState", "init")
    for call in (
        lambda: loss_scale.scale(state, torch.ones(())),
        lambda: loss_scale.unscale(state, {"w": torch.ones(2)}),
        lambda: loss_scale.update(state, torch.tensor(True)),
    ):
        with refused(TypeError, *words):
            call()


@KINDS
@pytest.mark.parametrize(
    ("finite", "words"),
    [
        (True, ["a bool"]),
        (None, ["a NoneType"]),
        (torch.tensor(1.0), ["torch.float32"]),
        (torch.tensor([True, False]), ["torch.bool", "(2,)"]),
    ],
)
def test_finite_is_a_0d_bool_tensor(loss_scale, finite, words):
    state = loss_scale.init()
    with refused(TypeError, "finite", *words, "expected a 0-d bool tensor", given=state):
        loss_scale.update(state, finite)


@KINDS
def test_only_tensors_are_scaled(loss_scale):
    state = loss_scale.init()
    with refused(TypeError, "x is a float", "expected a tensor", given=state):
        loss_scale.scale(state, 1.0)
    with refused(TypeError, "a leaf of the tree is a float", "expected a tensor", given=state):
        loss_scale.unscale(state, {"w": 1.0})
