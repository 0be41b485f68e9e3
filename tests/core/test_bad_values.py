"""A bad value is no error: it makes the result NaN. And a batch of nothing has a result, too."""

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pureaccum as pa
from tests.calls import ENGINES, NONFINITE
from tests.problems import in_parts
from tests.refusals import PARAMS, Loss, make_batch, squares


pytestmark = [pytest.mark.faults, pytest.mark.promise("applied")]
BAD = (-1.0, -0.5, -1e300, torch.nan, torch.inf, -torch.inf)
engines = pytest.mark.parametrize("engine", ENGINES)
modes = pytest.mark.parametrize("nonfinite", NONFINITE)


def weighing(params, batch):
    """Rows of which two weigh what the batch says of each."""
    return pa.Weighted((batch["x"] @ params["w"] + params["b"]).sum(), batch["weight"].sum() / 2)


def all_nan(tree):
    return all(bool(x.isnan().all()) for x in optree.tree_leaves(tree))


def all_zero(grads):
    same = lambda x, like: x.dtype == like.dtype and torch.equal(x, 0 * like)  # noqa: E731
    return optree.tree_all(optree.tree_map(same, grads, PARAMS))


good = st.sampled_from([0.0, 1.0, 3.0, 2.0**40])


@engines
@modes
@given(
    weights=st.lists(good, min_size=0, max_size=4),
    bad=st.sampled_from(BAD),
    at=st.integers(0, 4),
    size=st.sampled_from([None, 2, 100]),
)
def test_a_weight_that_is_none_makes_all_nan(engine, nonfinite, weights, bad, at, size):
    """Negative, infinite or NaN; also where the sum of all weights would be positive."""
    weights.insert(at, bad)
    at = weights.index(bad) if bad == bad else [w != w for w in weights].index(True)
    if size != 2:  # one microbatch, which weighs what the first row says
        weights = [weights[at]]
    batch = {
        "x": torch.ones(2 * len(weights), 2),
        "weight": torch.tensor(weights, dtype=torch.float64).repeat_interleave(2),
    }
    knobs = {"engine": engine, "nonfinite": nonfinite, "microbatch_size": size}
    assert all_nan(pa.grad_and_value(weighing, **knobs)(PARAMS, batch))
    assert all_nan(pa.grad(weighing, **knobs)(PARAMS, batch))
    assert all_nan(pa.value(weighing, microbatch_size=size)(PARAMS, batch))
    acc = pa.accumulator(weighing, engine=engine, nonfinite=nonfinite)
    state = in_parts(acc, PARAMS, pa.microbatches(batch, 2), donate=True)
    assert all_nan(acc.finalize(acc.merge(acc.init(PARAMS), state)))


@pytest.mark.parametrize("bad", BAD)
def test_a_python_number_that_is_no_weight_makes_all_nan(bad):
    loss = lambda params, batch: pa.Weighted(squares(params, batch), bad)  # noqa: E731
    assert all_nan(pa.grad_and_value(loss, microbatch_size=2)(PARAMS, make_batch()))


@engines
@modes
@pytest.mark.parametrize("size", [1, 3])
def test_a_mean_over_no_rows_is_nan_with_gradient_zero(engine, nonfinite, size):
    """The loss is not called: nobody promised that it stands an empty batch."""
    for returns in (squares, weighing):
        loss = Loss(returns)
        grads, value = pa.grad_and_value(
            loss, microbatch_size=size, engine=engine, nonfinite=nonfinite
        )(PARAMS, make_batch(0))
        assert all_zero(grads)
        assert value.isnan()
        assert pa.value(loss, microbatch_size=size)(PARAMS, make_batch(0)).isnan()
        assert loss.calls == 0


@engines
@modes
def test_a_sum_over_no_rows_is_zero(engine, nonfinite):
    knobs = {"microbatch_size": 2, "reduction": "sum"}
    grads, value = pa.grad_and_value(squares, engine=engine, nonfinite=nonfinite, **knobs)(
        PARAMS, make_batch(0)
    )
    assert all_zero(grads)
    assert value == 0
    assert pa.value(squares, **knobs)(PARAMS, make_batch(0)) == 0


@pytest.mark.parametrize(("reduction", "value"), [("mean", torch.nan), ("sum", 0.0)])
@pytest.mark.parametrize("donate", [False, True])
def test_a_state_that_saw_nothing_has_gradient_zero(reduction, value, donate):
    acc = pa.accumulator(squares, reduction=reduction)
    grads, came = acc.finalize(acc.init(PARAMS), donate=donate)
    assert all_zero(grads)
    torch.testing.assert_close(float(came), value, rtol=0, atol=0, equal_nan=True)


@engines
@modes
@pytest.mark.parametrize("donate", [False, True])
def test_an_empty_microbatch_of_a_stream_changes_no_mean(engine, nonfinite, donate):
    """Its own mean is NaN; it is counted, as one that was finite, and weighs nothing."""
    acc = pa.accumulator(squares, engine=engine, nonfinite=nonfinite)
    state = acc.update(acc.init(PARAMS), PARAMS, make_batch(3))
    expected = acc.finalize(state)
    state = acc.update(state, PARAMS, make_batch(0), donate=donate)
    assert optree.tree_all(optree.tree_map(torch.equal, acc.finalize(state), expected))
    assert (int(state.microbatches), int(state.skipped), int(state.nonfinite)) == (2, 0, 0)


@pytest.mark.parametrize("batch", [torch.ones(0), {"x": torch.ones(0, 3), "training": True}])
def test_a_batch_without_rows_has_no_microbatches(batch):
    assert list(pa.microbatches(batch, 2)) == []
