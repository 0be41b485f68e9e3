"""What a step that compiles itself hands out and holds on to."""

import gc
import weakref

import pytest
import torch

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from tests.step.problems import EAGER


pytestmark = [pytest.mark.purity, pytest.mark.promise("compiled"), pytest.mark.promise("donation")]


def batch_of(rows):
    return torch.arange(3.0 * rows).reshape(rows, 3)


def loss(w, x):
    return ((x * w) ** 2).mean()


@pytest.mark.nightly
@pytest.mark.parametrize("compile", [False, EAGER], ids=["eager", "compiled"])
@pytest.mark.parametrize("rows", [300_000, 3])  # above 1 MiB of gradients a graph is in place
def test_aux_that_is_a_parameter_is_that_before_the_step(rows, compile):
    """A state that was given up is written to; what was handed out of it is not."""
    step = pa.make_step(
        lambda w, x: (loss(w[:3], x), w),
        pa.sgd(0.5),
        has_aux=True,
        aux_reduction="last",
        donate=True,
        compile=compile,
    )
    w = torch.ones(rows)
    state, info = step(step.init(w), batch_of(2))
    assert_trees_bitwise_equal(info.aux, w)
    assert info.aux.data_ptr() != state.params.data_ptr()
    step(state, batch_of(2))
    assert_trees_bitwise_equal(info.aux, w)


@pytest.mark.nightly
@pytest.mark.parametrize("donate", [False, True])
def test_aux_that_is_a_buffer_is_that_before_the_microbatch(donate):
    """Also where the window is written to, which a stream that does not donate copies first."""

    def running(w, x, buffers):
        return loss(w, x), ({"mean": buffers["mean"] + x.mean(0)}, buffers["mean"])

    options = {"has_aux": True, "buffers": "sequential", "aux_reduction": "last"}
    step = pa.make_step(running, pa.sgd(0.5), donate=donate, compile=EAGER, **options)
    state = step.init(torch.ones(3), buffers={"mean": torch.ones(3)})
    window, aux = step.update(state, step.begin(state), batch_of(2))
    assert_trees_bitwise_equal(aux, torch.ones(3))
    window, later = step.update(state, window, batch_of(2))
    assert_trees_bitwise_equal(aux, torch.ones(3))
    assert_trees_bitwise_equal(later, torch.ones(3) + batch_of(2).mean(0))


@pytest.mark.nightly
def test_no_batch_is_kept():
    """What is remembered of a kind of batches holds none of them."""
    step = pa.make_step(loss, pa.sgd(0.5), microbatch_size=2, compile=EAGER)
    state = step.init(torch.ones(3))
    for rows in (1, 4):
        batch = batch_of(rows)
        seen = weakref.ref(batch)
        step(state, batch)
        del batch
        gc.collect()
        assert seen() is None


@pytest.mark.slow
def test_a_loss_without_a_module_is_guarded_too():
    """The compiler names the globals of such a function as it names those of NamedTuples."""
    names = {"loss": loss, "factor": 1.0}
    exec("def scaled(w, x): return factor * loss(w, x)", names)
    step = pa.make_step(names["scaled"], pa.sgd(0.5), compile=EAGER)
    state = step.init(torch.ones(3))
    once = step(state, batch_of(2))[1].loss
    names["factor"] = 2.0
    assert step(state, batch_of(2))[1].loss == 2 * once
