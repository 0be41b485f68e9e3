"""Every kind of leaf in one tree: large and small, 0-d, empty, turned, strided, of any dtype."""

import pytest
import torch
from hypothesis import given

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import KINDS, histories, reduction, seeds
from tests.core.linear_loss import (
    LARGE,
    ROWS,
    every_kind_of_leaf,
    gradient_sums,
    linear_batch,
    linear_loss,
    weight_of,
)
from tests.draws import examples


pytestmark = [
    pytest.mark.exact,
    pytest.mark.parametrize("engine", ["func", "autograd"]),
    pytest.mark.promise("bits"),
]


@pytest.mark.parametrize("kind", KINDS)
@examples(1 / 6)
@given(seed=seeds(), history=histories(ROWS))
def test_any_history_sums_every_kind_of_leaf(kind, engine, seed, history):
    batch, params = linear_batch(seed), every_kind_of_leaf()
    acc = pa.accumulator(linear_loss(kind), reduction=reduction(kind), engine=engine)
    want, by = gradient_sums(kind, batch), weight_of(kind, batch) or 1

    for donate in (False, True):
        state = history.run(acc, params, batch, donate)
        assert_trees_bitwise_equal(state.grads, want)
        grads, _ = acc.finalize(state, donate=donate)
        assert_trees_bitwise_equal(grads, {name: leaf / by for name, leaf in want.items()})


@pytest.mark.promise("narrow")
@pytest.mark.parametrize("narrow", [True, False], ids=["all", "no bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@examples(1 / 12)
@given(seed=seeds())
def test_grad_casts_every_kind_of_leaf_back_once(kind, narrow, engine, seed):
    batch, params = linear_batch(seed), every_kind_of_leaf(narrow)
    sums, by = gradient_sums(kind, batch), weight_of(kind, batch) or 1
    want = {name: (sums[name] / by).to(leaf.dtype) for name, leaf in params.items()}
    for size in (1, 3, ROWS - 1):
        options = {"microbatch_size": size, "reduction": reduction(kind), "engine": engine}
        assert_trees_bitwise_equal(pa.grad(linear_loss(kind), **options)(params, batch), want)


@pytest.mark.parametrize("donate", [False, True])
@examples(1 / 6)
@given(seed=seeds())
def test_a_leaf_that_the_loss_does_not_use_has_gradient_zero(engine, donate, seed):
    """With other leaves in use, and with none: the loss is then a constant."""
    batch = linear_batch(seed)
    used, unused = every_kind_of_leaf(), {"large": torch.ones(LARGE), "small": torch.ones(3)}
    losses = {
        "some": lambda params, batch: linear_loss("sum")(params["used"], batch),
        "none": lambda params, batch: batch["s"].sum(),
    }
    for name, loss in losses.items():
        params = {"used": used, "unused": unused}
        acc = pa.accumulator(loss, reduction="sum", engine=engine)
        state = acc.update(acc.init(params), params, batch, donate=donate)
        sums = gradient_sums("sum", batch)
        zeros = {name: torch.zeros_like(leaf) for name, leaf in sums.items()}
        assert_trees_bitwise_equal(state.grads["used"], sums if name == "some" else zeros)
        assert_trees_bitwise_equal(
            state.grads["unused"], {"large": torch.zeros(LARGE), "small": torch.zeros(3)}
        )


@pytest.mark.parametrize("nonfinite", ["propagate", "skip", "raise"])
def test_a_leaf_that_a_microbatched_function_does_not_use_has_gradient_zero(engine, nonfinite):
    """Its backward pass says that there is none, where others of the loss's leave a leaf out."""
    cut = pa.microbatch(lambda params, x: x * params["used"], microbatch_size=2)
    params = {"used": torch.ones(LARGE[1]), "unused": torch.ones(LARGE)}
    batch = torch.ones(4, LARGE[1])
    options = {"reduction": "sum", "engine": engine, "nonfinite": nonfinite}
    acc = pa.accumulator(lambda params, x: cut(params, x).sum(), **options)
    state = acc.update(acc.init(params), params, batch)
    want = {"used": torch.full((LARGE[1],), 4.0), "unused": torch.zeros(LARGE)}
    assert_trees_bitwise_equal(state.grads, want)
