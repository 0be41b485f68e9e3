"""A public call changes no argument and no mode, and draws nothing; also when it raises."""

from contextlib import contextmanager

import pytest
import torch

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from tests.calls import (
    CALLS,
    GRADIENTS,
    BoomError,
    Explodes,
    combinations,
    make_batch,
    make_params,
    mean_loss,
)
from tests.dropped import is_dropped


pytestmark = [pytest.mark.purity, pytest.mark.promise("purity")]
every_call = pytest.mark.parametrize(("name", "knobs"), combinations())


def trained_params():
    """Parameters that have seen ``.backward()``: gradients, hooks and versions are theirs."""
    params = {key: torch.nn.Parameter(x) for key, x in make_params().items()}
    params["w"].grad = torch.tensor([3.0, 4.0])
    params["w"].register_hook(lambda grad: grad * 7)
    return params


@every_call
def test_a_call_changes_nothing_and_gives_the_same_again(name, knobs):
    params, batch = trained_params(), make_batch()
    with unchanged(params, batch):
        first, second = (CALLS[name].run(mean_loss, params, batch, **knobs) for _ in range(2))
    assert_trees_bitwise_equal(first, second)


@every_call
@pytest.mark.parametrize("where", ["first", "last"])
def test_an_error_in_the_loss_changes_nothing(name, knobs, where):
    params, batch, calls = trained_params(), make_batch(), []
    at = 0 if where == "first" or name == "one microbatch" else 2

    def loss(params, batch):
        if not is_dropped():
            calls.append(len(batch["x"]))
        if len(calls) > at:
            raise BoomError
        return mean_loss(params, batch)

    with unchanged(params, batch), pytest.raises(BoomError):
        CALLS[name].run(loss, params, batch, **knobs)
    assert len(calls) == at + 1


@pytest.mark.parametrize(("name", "knobs"), combinations(*GRADIENTS))
@pytest.mark.parametrize("leaf", ["w", "large"])
def test_an_error_in_the_backward_pass_changes_nothing(name, knobs, leaf):
    params, batch = trained_params(), make_batch()

    def loss(params, batch):
        return mean_loss(params | {leaf: Explodes.apply(params[leaf])}, batch)

    with unchanged(params, batch), pytest.raises(BoomError):
        CALLS[name].run(loss, params, batch, **knobs)


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES = {
    "no_grad": torch.no_grad,
    "autocast without its cache": lambda: torch.autocast(
        "cpu", torch.bfloat16, enabled=False, cache_enabled=False
    ),
    "deterministic": deterministic,
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "inference_mode": torch.inference_mode,
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize(("name", "knobs"), combinations(nonfinite=("propagate",)))
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_mode_around_a_call_stays_and_changes_no_result(mode, name, knobs):
    """Autograd records nothing in inference mode: an error may say so, a zero gradient may not."""
    params, batch, engine = make_params(), make_batch(), knobs["engine"]
    expected = CALLS[name].run(mean_loss, params, batch, **knobs)
    with mode(), unchanged(params, batch):
        try:
            result = CALLS[name].run(mean_loss, params, batch, **knobs)
        except RuntimeError as error:
            if (engine, mode) != ("autograd", torch.inference_mode) or "inference" not in str(
                error
            ):
                raise
            return
    assert_trees_bitwise_equal(result, expected)


def test_looking_at_a_tree_changes_nothing():
    tree = trained_params()
    with unchanged(tree):
        pa.global_norm(tree)
        pa.all_finite(tree)


def test_microbatches_are_views():
    batch = make_batch()
    with unchanged(batch):
        parts = list(pa.microbatches(batch, 2))
    starts = [part["x"].storage_offset() for part in parts]
    assert starts == [0, 4, 8]
    assert {part["x"].untyped_storage().data_ptr() for part in parts} == {batch["x"].data_ptr()}
    assert_trees_bitwise_equal(torch.cat([part["y"] for part in parts]), batch["y"])
