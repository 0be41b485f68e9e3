"""The exact tests have teeth: ordinary data, or a narrow accumulator, would not pass them."""

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pureaccum as pa
from pureaccum.testing.strategies import compositions, losses, pieces
from pureaccum.testing.strategies.losses import LIMIT, majorant
from tests.draws import examples, few, generator
from tests.exactly import integers


pytestmark = [pytest.mark.exact, pytest.mark.promise("bits")]


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


@pytest.mark.parametrize(
    "narrow", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
)
def test_an_accumulator_in_16_bits_would_be_caught(narrow):
    """A quarter of the models that we draw, at least, have sums that 16 bits cannot hold."""
    caught = []

    @settings(max_examples=200)  # of 40, drawn from one another, it is 0.2 to 0.8
    @given(losses(8, sparse=True))
    def draw(model):
        grad = torch.func.grad(model.loss("sum"))
        full = optree.tree_leaves(grad(model.params, model.batch))
        sums = [torch.zeros(leaf.shape, dtype=narrow) for leaf in full]
        for row in pieces(model.batch, [1] * model.rows):
            grads = optree.tree_leaves(grad(model.params, row))
            sums = [total + g.to_dense().to(narrow) for total, g in zip(sums, grads, strict=True)]
        caught.append(
            any((s.float() != g.to_dense()).any() for s, g in zip(sums, full, strict=True))
        )

    draw()
    assert sum(caught) > len(caught) / 4


@examples(1 / 2)
@given(few.flatmap(losses), st.data())
def test_the_majorant_bounds_value_and_gradient_of_every_part(model, data):
    """In float64, on any part of the batch: so every partial sum is below the limit."""
    bound = majorant(model)
    assert bound < LIMIT
    params, batch = optree.tree_map(
        lambda x: x.double() if x.is_floating_point() else x, (model.params, model.batch)
    )
    for part in pieces(batch, data.draw(compositions(model.rows, empty=True))):
        grads, value = torch.func.grad_and_value(model.loss("sum"))(params, part)
        for number in (value, *optree.tree_leaves(grads)):
            dense = number.to_dense()
            assert (dense.abs() <= bound).all()
            assert torch.equal(dense * 4, (dense * 4).round())
