"""``nonfinite="skip"``: as if the microbatch had never come, its weight included.

An inf or NaN in the loss or in the gradient of any one leaf is enough. Streamed with donation
or without, or cut by ``pa.grad`` (which adds first and looks afterwards): the same bits.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import KINDS, compositions, reduction, seeds
from tests.core.linear_loss import (
    KINDS_OF_LEAF,
    ROWS,
    every_kind_of_leaf,
    gradient_sums,
    linear_batch,
    linear_loss,
    weight_of,
)
from tests.draws import examples, slices, take
from tests.problems import in_parts


pytestmark = [pytest.mark.exact, pytest.mark.promise("skip")]


not_finite = st.sampled_from([torch.inf, -torch.inf, torch.nan])


@st.composite
def faulty_batches(draw):
    batch, bad = linear_batch(draw(seeds())), torch.zeros(ROWS, dtype=torch.bool)
    leaf = st.sampled_from([k for k, name in enumerate(KINDS_OF_LEAF) if name != "empty"])
    for row in draw(st.lists(st.integers(0, ROWS - 1), max_size=3)):
        bad[row] = True
        where, number = draw(st.sampled_from(["s", "offset", "sound"])), draw(not_finite)
        if where == "sound":
            batch["sound"][row, draw(leaf)] = 0
        else:
            batch[where][row] = number
    return batch, bad


def counted(kind, batch, bad, parts):
    """The samples of sound microbatches, and how many microbatches are not."""
    count, skipped = torch.ones(ROWS, dtype=torch.bool), 0
    for rows in parts:
        # a microbatch of weight zero adds nothing, whatever is in it: there is nothing to skip
        weight = batch["mask"][rows].sum() if kind == "weighted" else 1
        if weight != 0 and bad[rows].any():
            count[rows] = False
            skipped += 1
    return count, skipped


def stream(acc, params, batch, parts, donate=False):
    return in_parts(acc, params, [take(batch, rows) for rows in parts], donate)


cases = pytest.mark.parametrize(
    ("kind", "engine"), [(kind, engine) for kind in KINDS for engine in ("func", "autograd")]
)


@cases
@examples(1 / 3)
@given(faulty=faulty_batches(), parts=compositions(ROWS).map(slices), donate=st.booleans())
def test_a_skipped_microbatch_leaves_no_trace(kind, engine, faulty, parts, donate):
    params, (batch, bad) = every_kind_of_leaf(), faulty
    loss, how = linear_loss(kind), reduction(kind)
    skipping = pa.accumulator(loss, reduction=how, engine=engine, nonfinite="skip")
    plain = pa.accumulator(loss, reduction=how, engine=engine)
    count, skipped = counted(kind, batch, bad, parts)

    state = stream(skipping, params, batch, parts, donate)
    rest = stream(plain, params, batch, [rows for rows in parts if count[rows].all()])

    assert_trees_bitwise_equal(state[:3], rest[:3])  # gradients, total, weight
    assert_trees_bitwise_equal(state.grads, gradient_sums(kind, batch, count))
    assert state.weight == weight_of(kind, batch, count)
    assert (state.microbatches, state.skipped, state.nonfinite) == (len(parts), skipped, skipped)


@pytest.mark.slow
@cases
@examples(1 / 6)
@given(faulty=faulty_batches(), size=st.integers(1, ROWS), narrow=st.booleans())
def test_streaming_and_speculating_skip_alike(kind, engine, faulty, size, narrow):
    params, (batch, _) = every_kind_of_leaf(narrow), faulty
    loss = linear_loss(kind)
    options = {"reduction": reduction(kind), "engine": engine, "nonfinite": "skip"}
    parts = [slice(i, min(i + size, ROWS)) for i in range(0, ROWS, size)]
    acc = pa.accumulator(loss, **options)

    kept, given_up = (stream(acc, params, batch, parts, donate) for donate in (False, True))
    assert_trees_bitwise_equal(given_up, kept)

    grads, value = acc.finalize(kept)
    want = {name: grads[name].to(leaf.dtype) for name, leaf in params.items()}
    got = pa.grad_and_value(loss, microbatch_size=size, **options)(params, batch)
    dtype = loss(params, batch).total.dtype if kind == "weighted" else loss(params, batch).dtype
    assert_trees_bitwise_equal(got, (want, value.to(dtype)))


@cases
@examples(1 / 6)
@given(faulty=faulty_batches(), parts=compositions(ROWS).map(slices))
def test_propagate_adds_it_and_counts_the_losses_that_are_not_finite(kind, engine, faulty, parts):
    params, (batch, bad) = every_kind_of_leaf(), faulty
    acc = pa.accumulator(linear_loss(kind), reduction=reduction(kind), engine=engine)
    total_is_bad = ~(batch["s"] + batch["offset"]).isfinite()

    state = stream(acc, params, batch, parts)

    assert (state.skipped, state.nonfinite) == (0, counted(kind, batch, total_is_bad, parts)[1])
    assert state.weight == weight_of(kind, batch)
    all_finite = pa.all_finite((state.grads, state.total))
    assert bool(all_finite) == (counted(kind, batch, bad, parts)[1] == 0)
