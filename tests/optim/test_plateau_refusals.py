"""Settings of ``plateau`` that cannot work are refused, and metrics that are none."""

import math

import pytest
import torch

import pureaccum as pa
from tests.refusals import refused


pytestmark = pytest.mark.faults
SETTINGS = {
    "factor": ({"factor": 1.0}, ValueError, ("factor is 1.0", "below 1")),
    "no factor": ({"factor": None}, TypeError, ("factor is None", "below 1")),
    "patience": ({"patience": -1}, ValueError, ("patience is -1", "number of updates")),
    "half a patience": ({"patience": 0.5}, TypeError, ("patience is 0.5", "an int")),
    "cooldown": ({"cooldown": -1}, ValueError, ("cooldown is -1", "number of updates")),
    "mode": ({"mode": "less"}, ValueError, ("mode is 'less'", "'min' or 'max'")),
    "words": ({"threshold_mode": "max"}, ValueError, ("threshold_mode is 'max'", "'rel' or")),
    "threshold": ({"threshold": -0.1, "threshold_mode": "abs"}, ValueError, ("threshold is -0.1",)),
    "all of it": ({"threshold": 1.0}, ValueError, ("threshold is 1.0", "a share of the best")),
    "floor": ({"min_lr": 0.2}, ValueError, ("min_lr is 0.2, above lr=0.1", "never change")),
    "eps": ({"eps": math.nan}, ValueError, ("eps is nan", "finite")),
}


@pytest.mark.parametrize(("knobs", "error", "words"), SETTINGS.values(), ids=SETTINGS)
def test_a_setting_that_cannot_work_is_refused(knobs, error, words):
    with refused(error, *words):
        pa.plateau(0.1, **knobs)


def test_thresholds_of_one_and_more_have_a_meaning_elsewhere():
    pa.plateau(0.1, threshold=2, threshold_mode="abs")
    pa.plateau(0.1, threshold=2, mode="max")
    pa.plateau(0.1, min_lr=0.1)


def test_a_schedule_is_no_rate_of_a_plateau():
    with refused(TypeError, "lr is <function", "expected a float or a 0-d tensor"):
        pa.plateau(pa.constant(0.1))


@pytest.mark.parametrize("metric", [None, True, "1.0", [1.0], 1j])
def test_what_is_no_number_is_no_metric(metric):
    falling = pa.plateau(0.1)
    state = falling.init()
    with refused(TypeError, f"metric is {metric!r}", "a number or a 0-d tensor", given=state):
        falling.update(state, metric)


@pytest.mark.parametrize("metric", [torch.ones(1), torch.tensor(1j), torch.tensor(True)], ids=str)
def test_a_tensor_that_is_no_metric_is_refused(metric):
    falling = pa.plateau(0.1)
    words = ("metric is a tensor", str(tuple(metric.shape)), str(metric.dtype), "real 0-d tensor")
    with refused(ValueError, *words, given=metric):
        falling.update(falling.init(), metric)


def test_arguments_in_another_order_are_noticed():
    falling = pa.plateau(0.1)
    with refused(TypeError, "state is a Tensor", "plateau expects the PlateauState"):
        falling.update(torch.tensor(1.0), falling.init())
