"""A loss scale that cannot work is refused where it is made, and says which option is wrong."""

import math

import pytest
import torch

import pureaccum as pa
from pureaccum._base import reprs
from tests.refusals import refused


pytestmark = [pytest.mark.faults, pytest.mark.promise("errors"), pytest.mark.table]
KINDS = pytest.mark.parametrize(
    "loss_scale", [pa.dynamic_loss_scale(), pa.static_loss_scale(2.0)], ids=["dynamic", "static"]
)
NO_NUMBERS = [True, None, "2", (2.0,), 2j, torch.tensor(2.0)]
NO_SCALES = [0, 0.0, -1.0, math.nan, math.inf, 1e-46, 1e39]  # float32 makes 0 or inf


DYNAMIC, STATIC = pa.dynamic_loss_scale, pa.static_loss_scale
NO_COUNTS = [0, -1, 2**31]
# Each option, the numbers that it does not take, what else it does not take, and what is said.
OPTIONS = dict.fromkeys(
    ("init_scale", "min_scale", "max_scale", "scale"),
    (NO_SCALES, NO_NUMBERS, ("expected a positive number", "float32")),
)
OPTIONS |= {
    "growth_factor": ([1.0, 1, 0.5, -2.0, math.inf, math.nan], NO_NUMBERS, ["between 1.0 and inf"]),
    "backoff_factor": ([1.0, 1, 2.0, 0.0, -0.5, math.nan], NO_NUMBERS, ["between 0.0 and 1.0"]),
    "growth_interval": (NO_COUNTS, [*NO_NUMBERS, 2.0], ["expected an int from 1"]),
    "hysteresis": (NO_COUNTS, [*NO_NUMBERS, 2.0], ["expected an int from 1"]),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_of_a_loss_scale_that_cannot_work_is_refused(name):
    """Scales are positive numbers of float32, factors grow and shrink, counts fit into an int32."""
    wrong, strange, words = OPTIONS[name]
    make = STATIC if name == "scale" else DYNAMIC
    for value in wrong:
        with refused(ValueError, f"{name} is {value!r}", "expected", *words):
            make(**{name: value})
    for value in strange:
        kind = [type(value).__name__] if "factor" in name else []
        with refused(TypeError, f"{name} is {value!r}", *kind, *words):
            make(**{name: value})
    if "int" in words[0]:
        make(**{name: 2**31 - 1})


@pytest.mark.parametrize(
    ("first", "bounds", "words"),
    [
        (4.0, {"min_scale": 8.0, "max_scale": 4.0}, ("min_scale is 8.0", "above max_scale=4.0")),
        (0.5, {}, ("init_scale is 0.5", "min_scale=1.0", "pass min_scale=0.5 or less")),
        (
            16.0,
            {"max_scale": 8.0},
            ("init_scale is 16.0", "max_scale=8.0", "max_scale=16.0 or more"),
        ),
    ],
)
def test_bounds_that_cross_and_a_first_scale_outside_of_them_are_refused(first, bounds, words):
    with refused(ValueError, *words, "expected"):
        DYNAMIC(first, **bounds)


@KINDS
@pytest.mark.parametrize("state", [None, torch.tensor(2.0), (2.0, 0, 1), {"scale": 2.0}])
def test_what_is_no_state_of_a_loss_scale_is_refused(loss_scale, state):
    words = (f"state is {reprs.kind(state)}", "expects the LossScaleState", "init")
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
