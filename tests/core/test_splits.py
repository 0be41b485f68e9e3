"""Any cut, any order, any merge tree: the same bits as the full batch.

These tests have teeth: ordinary data, or a narrow accumulator, would not pass them.
"""

import itertools

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import KINDS, compositions, histories, losses, pieces, reduction
from pureaccum.testing.strategies.losses import LIMIT, majorant
from tests.draws import examples, few, generator, powers_of_two
from tests.exactly import integers


pytestmark = [pytest.mark.exact, pytest.mark.promise("bits")]
engines = pytest.mark.parametrize("engine", ["func", "autograd"])


@engines
@pytest.mark.parametrize("kind", KINDS)
@given(st.data(), st.booleans())
def test_any_history_gives_the_bits_of_the_full_batch(kind, engine, data, donate):
    """Sums and ``Weighted`` over any number of samples, means over a power of two."""
    model = data.draw((powers_of_two if kind == "mean" else few).flatmap(losses))
    history = data.draw(histories(model.samples))
    acc = pa.accumulator(model.loss(kind), reduction=reduction(kind), engine=engine)

    state = history.run(acc, model.params, model.batch, donate)
    grads, value = acc.finalize(state, donate=donate)

    want, want_value = model.full_batch(kind)
    assert_trees_bitwise_equal(grads, want)
    if kind != "mean" or all(size & (size - 1) == 0 for size in history.sizes):
        assert_trees_bitwise_equal(
            value, want_value
        )  # other means round in the loss: see test_given_gradients.py


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
def test_the_state_counts_rows_masks_and_microbatches(kind, data):
    model = data.draw(few.flatmap(losses))
    history = data.draw(histories(model.samples))
    acc = pa.accumulator(model.loss(kind), reduction=reduction(kind))

    state = history.run(acc, model.params, model.batch)

    weights = {"sum": 0, "mean": model.samples, "weighted": int(model.batch["mask"].sum())}
    assert_trees_bitwise_equal(state.weight, torch.tensor(weights[kind], dtype=torch.float64))
    assert state.microbatches == len(history.sizes)
    assert state.skipped == state.nonfinite == 0


@engines
@pytest.mark.parametrize("kind", KINDS)
@examples(1 / 4)
@given(st.data())
def test_every_microbatch_size_gives_the_bits_of_the_full_batch(kind, engine, data):
    model = data.draw((powers_of_two if kind == "mean" else few).flatmap(losses))
    loss, args, how = model.loss(kind), (model.params, model.batch), reduction(kind)
    want, want_value = model.full_batch(kind)
    want_value = want_value.float()  # in the dtype of the loss

    for size in (None, *range(1, model.samples + 2)):
        options = {"microbatch_size": size, "reduction": how}
        grads, value = pa.grad_and_value(loss, engine=engine, **options)(*args)
        assert_trees_bitwise_equal(pa.grad(loss, engine=engine, **options)(*args), want)
        assert_trees_bitwise_equal(grads, want)
        if kind != "mean" or size is None or size & (size - 1) == 0 or size >= model.samples:
            assert_trees_bitwise_equal(value, want_value)
            assert_trees_bitwise_equal(pa.value(loss, **options)(*args), want_value)


@examples(1 / 2)
@given(losses(13, sparse=True), st.data())
def test_all_splits_of_a_mean_over_13_rows_agree_to_the_bit(model, data):
    """13/13 is 1: the sums are exact, and are divided by 13 once."""
    acc = pa.accumulator(model.loss("mean"))
    sums, _ = model.full_batch("sum")
    want = optree.tree_map(lambda g: g.to_dense() / 13, sums)

    history = data.draw(histories(13))
    grads, _ = acc.finalize(history.run(acc, model.params, model.batch))
    assert_trees_bitwise_equal(grads, want)
    size = data.draw(st.integers(1, 12))
    assert_trees_bitwise_equal(
        pa.grad(model.loss("mean"), microbatch_size=size)(model.params, model.batch), want
    )


@engines
@examples(1 / 2)
@given(st.data())
def test_sizes_of_their_own_give_the_bits_of_the_full_batch(engine, data):
    model = data.draw(few.flatmap(losses))
    sizes = [size for size in data.draw(histories(model.samples)).sizes if size]
    want, _ = model.full_batch("weighted")
    got = pa.grad(model.loss("weighted"), microbatch_size=tuple(sizes), engine=engine)
    assert_trees_bitwise_equal(got(model.params, model.batch), want)


ODD = [None, [], (), 0, {}, torch.zeros(0), "batch"]  # whatever a loader yields


@pytest.mark.promise("batches")
@given(st.lists(st.sampled_from(range(len(ODD))), max_size=12), st.integers(1, 14), st.data())
def test_windows_are_all_that_a_loader_yields_in_order(numbers, k, data):
    """Nothing is lost, whatever the batches are; and nothing is asked for before its window is."""
    asked = []

    def loader():
        for i in numbers:
            asked.append(i)
            yield ODD[i]

    kinds = {"iterator": loader, "list": lambda: [ODD[i] for i in numbers]}
    came = []
    windows = pa.windows(kinds[kind := data.draw(st.sampled_from(sorted(kinds)))](), k)
    assert not asked
    for window in windows:
        assert isinstance(window, list)
        came.append(window)
        assert kind == "list" or len(asked) == sum(map(len, came))
    assert [len(window) for window in came] == [
        min(k, len(numbers) - start) for start in range(0, len(numbers), k)
    ]
    flat = itertools.chain.from_iterable(came)
    assert all(x is ODD[i] for x, i in zip(flat, numbers, strict=True))
    assert next(iter(windows), None) is None


# Controls ----------------------------------------------------------------------------------------


def squared(w, batch):
    return ((batch["x"] @ w - batch["y"]) ** 2).sum()


def splits_that_agree(w, batch):
    """How many of the 16 splits into equal microbatches give the full batch's bits."""
    full = torch.func.grad(squared)(w, batch)
    splits = (
        pa.grad(squared, microbatch_size=size, reduction="sum")(w, batch) for size in range(1, 17)
    )
    return sum(torch.equal(split, full) for split in splits)


def test_gaussian_data_does_not_agree_between_splits():
    random = generator(0)
    batch = {"x": torch.randn(16, 8, generator=random), "y": torch.randn(16, 2, generator=random)}
    assert splits_that_agree(torch.randn(8, 2, generator=random), batch) < 16


def test_integer_data_of_the_same_shape_agrees_between_all_splits():
    random = generator(0)
    batch = {"x": integers(random, 16, 8), "y": integers(random, 16, 2)}
    assert splits_that_agree(integers(random, 8, 2), batch) == 16


@pytest.mark.nightly
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_an_accumulator_in_16_bits_would_be_caught(narrow):
    """A quarter of the models that we draw, at least, have sums that 16 bits cannot hold."""
    caught = []

    @settings(max_examples=200)  # of 40, drawn from one another, it is 0.2 to 0.8
    @given(losses(8, sparse=True))
    def draw(model):
        grad = torch.func.grad(model.loss("sum"))
        full = optree.tree_leaves(grad(model.params, model.batch))
        sums = [torch.zeros(leaf.shape, dtype=narrow) for leaf in full]
        for row in pieces(model.batch, [1] * model.samples):
            grads = optree.tree_leaves(grad(model.params, row))
            sums = [total + g.to_dense().to(narrow) for total, g in zip(sums, grads, strict=True)]
        caught.append(
            any((s.float() != g.to_dense()).any() for s, g in zip(sums, full, strict=True))
        )

    draw()
    assert sum(caught) > len(caught) / 4


@pytest.mark.promise("tools")
@examples(1 / 2)
@given(few.flatmap(losses), st.data())
def test_the_majorant_bounds_value_and_gradient_of_every_part(model, data):
    """In float64, on any part of the batch: so every partial sum is below the limit."""
    bound = majorant(model)
    assert bound < LIMIT
    params, batch = optree.tree_map(
        lambda x: x.double() if x.is_floating_point() else x, (model.params, model.batch)
    )
    for part in pieces(batch, data.draw(compositions(model.samples, empty=True))):
        grads, value = torch.func.grad_and_value(model.loss("sum"))(params, part)
        for number in (value, *optree.tree_leaves(grads)):
            dense = number.to_dense()
            assert (dense.abs() <= bound).all()
            assert torch.equal(dense * 4, (dense * 4).round())
