"""A microbatch of weight zero adds nothing, to the bit, even where all that it has is NaN."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import histories, seeds
from tests.core.linear_loss import LARGE
from tests.draws import examples, generator
from tests.exactly import integers


pytestmark = [pytest.mark.exact, pytest.mark.promise("weights")]
ROWS = 8
engines = pytest.mark.parametrize("engine", ["func", "autograd"])
policies = pytest.mark.parametrize("nonfinite", ["propagate", "skip", "raise"])


def nan_where_masked(params, batch):
    """Its total is 0 / weight off: exactly right, and NaN with NaN gradients at weight zero."""
    mask, tokens = batch["mask"], batch["tokens"]
    weight = mask.sum()
    scale = (batch["s"] * mask).sum()
    total = sum(leaf.sum() for leaf in params["dense"].values()) * scale
    broken = sum(leaf.sum() for leaf in params["dense"].values())
    for table in params["tables"].values():
        rows = F.embedding(tokens, table, sparse=True)
        total = total + (rows.sum((1, 2)) * mask).sum()
        broken = broken + rows.sum()
    return pa.Weighted(total + broken * (0 / weight), weight)


def params_and_batch(seed):
    random = generator(seed)
    params = {
        "dense": {"large": torch.zeros(LARGE), "small": torch.ones(3), "scalar": torch.ones(())},
        "tables": {"large": torch.ones(300_000, 1), "small": torch.ones(7, 1)},
    }
    batch = {
        "s": integers(random, ROWS),
        "tokens": torch.randint(0, 7, (ROWS, 1), generator=random),
        "mask": torch.randint(-1, 2, (ROWS,), generator=random).relu().float(),
    }
    return params, batch


def masked_sums(params, batch):
    mask = batch["mask"]
    dense = {
        name: torch.full_like(x, (batch["s"] * mask).sum()) for name, x in params["dense"].items()
    }
    tables = {
        name: torch.zeros_like(x).index_add_(0, batch["tokens"][:, 0], mask[:, None])
        for name, x in params["tables"].items()
    }
    return {"dense": dense, "tables": tables}


@engines
@policies
@examples(1 / 6)
@given(seed=seeds(), history=histories(ROWS), donate=st.booleans())
def test_masked_microbatches_add_nothing_anywhere(engine, nonfinite, seed, history, donate):
    params, batch = params_and_batch(seed)
    acc = pa.accumulator(nan_where_masked, engine=engine, nonfinite=nonfinite)

    state = history.run(acc, params, batch, donate)

    sums = masked_sums(params, batch)
    assert_trees_bitwise_equal(state.grads, sums)
    assert torch.isfinite(state.total)
    assert (state.weight, state.skipped, state.nonfinite) == (batch["mask"].sum(), 0, 0)


@engines
@policies
@examples(1 / 12)
@given(seed=seeds(), size=st.integers(1, ROWS + 1))
def test_masked_microbatches_of_grad_add_nothing(engine, nonfinite, seed, size):
    params, batch = params_and_batch(seed)
    by = batch["mask"].sum() or torch.tensor(1.0)
    sums = masked_sums(params, batch)
    want = {part: {k: x / by for k, x in leaves.items()} for part, leaves in sums.items()}
    options = {"microbatch_size": size, "engine": engine, "nonfinite": nonfinite}
    assert_trees_bitwise_equal(pa.grad(nan_where_masked, **options)(params, batch), want)


@engines
@pytest.mark.parametrize("size", [None, 3])
def test_a_batch_of_weight_zero_has_gradient_zero_and_value_nan(engine, size):
    params, batch = params_and_batch(0)
    batch["mask"].zero_()
    grads, value = pa.grad_and_value(nan_where_masked, microbatch_size=size, engine=engine)(
        params, batch
    )
    zeros = {
        part: {k: torch.zeros_like(x) for k, x in leaves.items()} for part, leaves in params.items()
    }
    assert_trees_bitwise_equal(grads, zeros)
    assert value.isnan()
    assert pa.value(nan_where_masked, microbatch_size=size)(params, batch).isnan()
