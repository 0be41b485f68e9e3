"""Any cut, any order, any merge tree: the same bits as the full batch."""

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pureaccum as pa
from tests.strategies import (
    KINDS,
    Model,
    assert_same_bits,
    every,
    exact_models,
    histories,
    reduction,
)


powers_of_two = st.sampled_from([1, 2, 4, 8, 16])
engines = pytest.mark.parametrize("engine", ["func", "autograd"])


@engines
@pytest.mark.parametrize("kind", KINDS)
@given(st.data(), st.booleans())
def test_any_history_gives_the_bits_of_the_full_batch(kind, engine, data, donate):
    """Sums and ``Weighted`` over any number of rows, means over a power of two."""
    model = data.draw(exact_models(powers_of_two) if kind == "mean" else exact_models())
    history = data.draw(histories(model.rows))
    acc = pa.accumulator(model.loss(kind), reduction=reduction(kind), engine=engine)

    state = history.run(acc, model.params, model.batch, donate)
    grads, value = acc.finalize(state, donate=donate)

    want, want_value = model.full_batch(kind)
    assert_same_bits(grads, want)
    sizes = [rows.stop - rows.start for rows in history.parts()]
    if kind != "mean" or all(size & (size - 1) == 0 for size in sizes):
        assert_same_bits(value, want_value)  # other means round in the loss: see tests/bounds


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
def test_the_state_counts_rows_masks_and_microbatches(kind, data):
    model: Model = data.draw(exact_models())
    history = data.draw(histories(model.rows))
    acc = pa.accumulator(model.loss(kind), reduction=reduction(kind))

    state = history.run(acc, model.params, model.batch)

    weights = {"sum": 0, "mean": model.rows, "weighted": int(model.batch["mask"].sum())}
    assert_same_bits(state.weight, torch.tensor(weights[kind], dtype=torch.float64))
    assert state.microbatches == len(history.parts())
    assert state.skipped == state.nonfinite == 0


@engines
@pytest.mark.parametrize("kind", KINDS)
@every(4)
@given(st.data())
def test_every_microbatch_size_gives_the_bits_of_the_full_batch(kind, engine, data):
    model: Model = data.draw(exact_models(powers_of_two) if kind == "mean" else exact_models())
    loss, args, how = model.loss(kind), (model.params, model.batch), reduction(kind)
    want, want_value = model.full_batch(kind)
    want_value = want_value.float()  # in the dtype of the loss

    for size in (None, *range(1, model.rows + 2)):
        knobs = {"microbatch_size": size, "reduction": how}
        grads, value = pa.grad_and_value(loss, engine=engine, **knobs)(*args)
        assert_same_bits(pa.grad(loss, engine=engine, **knobs)(*args), want)
        assert_same_bits(grads, want)
        if kind != "mean" or size is None or size & (size - 1) == 0 or size >= model.rows:
            assert_same_bits(value, want_value)
            assert_same_bits(pa.value(loss, **knobs)(*args), want_value)


@every(2)
@given(exact_models(st.just(13)), st.data())
def test_all_splits_of_a_mean_over_13_rows_agree_to_the_bit(model, data):
    """13/13 is 1: the sums are exact, and are divided by 13 once."""
    acc = pa.accumulator(model.loss("mean"))
    sums, _ = model.full_batch("sum")
    want = optree.tree_map(lambda g: g.to_dense() / 13, sums)

    history = data.draw(histories(13))
    grads, _ = acc.finalize(history.run(acc, model.params, model.batch))
    assert_same_bits(grads, want)
    size = data.draw(st.integers(1, 12))
    assert_same_bits(
        pa.grad(model.loss("mean"), microbatch_size=size)(model.params, model.batch), want
    )


@every(2)
@given(exact_models(st.just(13)), st.integers(13, 15))
def test_a_single_microbatch_is_torch_func_untouched(model, size):
    loss, args = model.loss("mean"), (model.params, model.batch)
    want = torch.func.grad_and_value(loss)(*args)
    assert_same_bits(pa.grad_and_value(loss, microbatch_size=size)(*args), want)
