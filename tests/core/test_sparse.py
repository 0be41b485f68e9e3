"""Embeddings with sparse gradients: the sums are dense, exact, and the same as dense gradients'."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import seeds
from tests.draws import examples, generator


pytestmark = pytest.mark.parity
VOCABULARIES = (6, 2**16)  # 4 columns of float32: the latter is 1 MiB, and added by a hook


def total(params, batch, sparse):
    rows = F.embedding(batch["i"], params["emb"], sparse=sparse)  # (rows, 2, 4)
    return ((rows @ params["w"]) * batch["y"][:, None]).sum()


def make(seed, vocabulary, rows):
    g = generator(seed)
    whole = lambda *shape: torch.randint(-7, 8, shape, generator=g).float()  # noqa: E731
    batch = {
        "i": torch.randint(0, 6, (rows, 2), generator=g),  # repeats within rows and between
        "y": whole(rows),
        "mask": torch.randint(0, 3, (rows,), generator=g),
    }
    return {"emb": whole(1, 4).expand(vocabulary, 4).clone(), "w": whole(4)}, batch


@pytest.mark.parametrize("engine", ["func", "autograd"])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("weighted", [False, True])
@examples(1 / 4)
@example(nonfinite="propagate", seed=1, rows=6, size=2)
@given(
    nonfinite=st.sampled_from(["propagate", "skip", "raise"]),
    seed=seeds(),
    rows=st.integers(1, 6),
    size=st.integers(1, 6),
)
def test_sparse_gradients_are_summed_as_dense_ones(
    engine, vocabulary, nonfinite, weighted, seed, rows, size
):
    params, batch = make(seed, vocabulary, rows)

    def loss(p, b):
        out, weight = total(p, b, sparse=True), b["mask"].sum()
        # of no weight a total of 0, whose gradient is what it is
        return pa.Weighted(out - out.detach() * (weight == 0), weight) if weighted else out

    knobs = {"reduction": "sum", "nonfinite": nonfinite, "engine": engine, "check": False}
    acc = pa.accumulator(loss, **knobs)
    state, expected = acc.init(params), {k: torch.zeros_like(p) for k, p in params.items()}
    for part in pa.microbatches(batch, size):
        state = acc.update(state, params, part)
        if not weighted or part["mask"].sum():
            grads = torch.func.grad(lambda p, part=part: total(p, part, sparse=False))(params)
            expected = {k: expected[k] + grads[k] for k in params}
    assert_trees_bitwise_equal(state.grads, expected)
    gradient = pa.grad(loss, microbatch_size=size, **knobs)
    result = gradient(params, batch)
    assert all(g.layout == torch.strided for g in result.values())
    if weighted and rows > size:
        weight = batch["mask"].sum().item() or 1
        assert_trees_bitwise_equal(result, {k: g / weight for k, g in expected.items()})
    elif not weighted:
        assert_trees_bitwise_equal(result, expected)


@pytest.mark.parametrize("engine", ["func", "autograd"])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("donate", [False, True])
def test_a_sparse_gradient_that_is_not_finite_is_skipped(engine, vocabulary, donate):
    """One NaN among its few values."""
    params, batch = make(0, vocabulary, 6)
    loss = lambda p, b: total(p, b, sparse=True)  # noqa: E731
    acc = pa.accumulator(loss, reduction="sum", nonfinite="skip", engine=engine)
    clean = acc.update(acc.init(params), params, batch)
    before = clean.grads["emb"].clone()
    poisoned = {**batch, "y": batch["y"].clone()}
    poisoned["y"][2] = torch.inf
    state = acc.update(clean, params, poisoned, donate=donate)
    assert state.skipped == 1
    assert torch.equal(state.grads["emb"], before)
    again = pa.grad(loss, microbatch_size=2, reduction="sum", nonfinite="skip", engine=engine)
    rest = {k: torch.cat([column[:2], column[4:]]) for k, column in batch.items()}
    expected = torch.func.grad(lambda p: total(p, rest, sparse=False))(params)
    assert_trees_bitwise_equal(again(params, poisoned), expected)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_sparse_gradient_of_a_batch_that_is_not_cut_is_the_dense_one(weighted):
    """A mean over everything, against the dense gradient."""
    params, batch = make(0, 6, 4)
    batch["mask"] = torch.ones(4)

    def loss(p, b, sparse=True):
        out = total(p, b, sparse)
        return pa.Weighted(out, b["mask"].sum()) if weighted else out / len(b["mask"])

    expected = torch.func.grad(lambda p: total(p, batch, sparse=False) / 4)(params)
    for size in (None, 4, 2):
        got = pa.grad(loss, microbatch_size=size, reduction="mean")(params, batch)
        dense = {k: g.to_dense() for k, g in got.items()}
        assert_trees_bitwise_equal(dense, expected)
