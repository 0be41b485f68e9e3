"""A step that compiles itself asks its loss first, in eager mode: what is refused has no graph."""

import pytest
import torch

import pureaccum as pa
from pureaccum import CoupledLossError
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from tests.draws import generator
from tests.problems import HALF, near, nobody_was_asked
from tests.refusals import squares
from tests.step.problems import counting


pytestmark = [
    pytest.mark.transforms,
    pytest.mark.promise("refused"),
    pytest.mark.promise("compiled"),
    pytest.mark.usefixtures(nobody_was_asked.__name__),
]
SIZE = 4
W = {"w": torch.tensor([0.5, -1.0, 0.25]), "b": torch.tensor(0.0)}


def rows(n, *bad):
    """Samples, of which some count twice."""
    x = torch.randn(n, 3, generator=generator(n))
    mask = torch.ones(n)
    mask[list(bad)] = 2.0
    return {"x": x, "mask": mask}


def masked(params, batch):
    return ((batch["x"] @ params["w"]) ** 2 * batch["mask"]).sum() / batch["mask"].sum()


def standardised(params, batch):
    x = batch["x"]
    return (((x - x.mean(0)) @ params["w"]) ** 2).mean()


def made(loss, **options):
    torch.compiler.reset()
    settings, graphs = counting()
    step = pa.make_step(loss, pa.sgd(0.1), compile=settings, **options)
    return step, step.init(W), graphs


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("loss", [masked, standardised], ids=lambda loss: loss.__name__)
def test_what_is_refused_is_not_compiled(loss, donate):
    step, state, graphs = made(loss, microbatch_size=SIZE, donate=donate)
    batch = rows(12, 0, 1, 5)
    with unchanged(state, batch), pytest.raises(CoupledLossError):
        step(state, batch)
    assert not graphs
    assert_trees_bitwise_equal(state.params, W)


def test_a_stream_that_is_refused_is_not_compiled():
    step, state, graphs = made(lambda params, batch: masked(params, batch))
    window = step.begin(state)
    with unchanged(state, window), pytest.raises(CoupledLossError):
        step.update(state, window, rows(4, 0))
    assert not graphs


def test_a_stream_of_a_loss_that_was_watched_before_is_asked():
    def loss(params, batch):
        return masked(params, batch)

    plain = pa.make_step(loss, pa.sgd(0.1), microbatch_size=SIZE, check=False)
    plain(plain.init(W), rows(12))
    step, state, _ = made(loss)
    with pytest.raises(CoupledLossError):
        step.update(state, step.begin(state), rows(4, 0))


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_it_is_refused_again(stream):
    step, state, graphs = made(masked, microbatch_size=None if stream else SIZE)
    batch = rows(12, 0)
    for _ in range(4):
        with pytest.raises(CoupledLossError):
            step.window(state, pa.microbatches(batch, 4)) if stream else step(state, batch)
    assert not graphs


@pytest.mark.slow
def test_unasked_it_compiles_and_trains_on_what_a_step_without_graphs_does():
    step, state, graphs = made(masked, microbatch_size=SIZE, check=False)
    plain = pa.make_step(masked, pa.sgd(0.1), microbatch_size=SIZE, check=False)
    batch = rows(12, 0, 1, 5)
    got, _ = step(state, batch)
    want, _ = plain(plain.init(W), batch)
    assert graphs
    near(got.params, want.params, HALF)


@pytest.mark.slow
def test_asking_changes_no_bit_and_no_graph():
    results = []
    for check in (True, False):
        step, state, graphs = made(squares, microbatch_size=SIZE, check=check)
        for _ in range(9):
            state, _ = step(state, rows(12))
        results.append((state.params, torch.tensor(len(graphs))))
    assert_trees_bitwise_equal(*results)


@pytest.mark.slow
@pytest.mark.parametrize(("bad", "call"), [(0, 1), (4, 2), (8, 3)])
def test_another_microbatch_is_asked_at_calls_two_and_three(bad, call):
    step, state, _ = made(masked, microbatch_size=SIZE)
    for _ in range(call - 1):
        state, _ = step(state, rows(12, bad))
    with pytest.raises(CoupledLossError):
        step(state, rows(12, bad))


@pytest.mark.nightly
@pytest.mark.parametrize("size", [None, 12, 20])
def test_rows_that_are_not_cut_are_not_asked_about(size):
    step, state, _ = made(standardised, microbatch_size=size)
    for _ in range(2):
        state, info = step(state, rows(12))
        assert info.applied
