"""What becomes of aux: each reduction of ``aux_reduction``, against the same thing by hand."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import seeds
from tests.draws import generator
from tests.exactly import integers


pytestmark = [pytest.mark.laws, pytest.mark.promise("values")]
UNIT = Fraction(1, 2**24)  # u of float32
TRANSFORMS = ("grad", "value")


def transformed(transform, loss, **options):
    """``(w, x) -> aux``, by way of either public transform that has one."""
    return lambda *args: getattr(pa, transform)(loss, has_aux=True, **options)(*args)[1]


def data(seed, rows):
    g = generator(seed)
    return integers(g, 2), integers(g, rows, 2)


@pytest.mark.parametrize("transform", TRANSFORMS)
@given(seeds(), st.integers(1, 12), st.integers(1, 13))
def test_each_reduction_reduces_as_its_loop_does(transform, seed, rows, size):
    """As a prefix tree: one reduction for a whole subtree, and reductions inside a tuple."""

    def loss(w, x):
        tops = {"x": x.max(), "count": len(x), "low": x.amin(0)}
        return (x @ w).mean(), {
            "rows": {"x": x, "more": [x[:, 0].long()]},
            "sums": tops,
            "pair": (x.amax(0), ("a word", x.sum(), 3)),
        }

    reductions = {"rows": "concat", "sums": "sum", "pair": ("stack", "last")}
    w, x = data(seed, rows)
    parts = x.split(size)
    aux = transformed(transform, loss, microbatch_size=size, aux_reduction=reductions)(w, x)
    assert_trees_bitwise_equal(aux["rows"], {"x": x, "more": [x[:, 0].long()]})
    assert aux["sums"]["x"] == sum(part.max() for part in parts)
    assert aux["sums"]["count"] == rows
    assert torch.equal(aux["sums"]["low"], torch.stack([part.amin(0) for part in parts]).sum(0))
    assert torch.equal(aux["pair"][0], torch.stack([part.amax(0) for part in parts]))
    assert_trees_bitwise_equal(aux["pair"][1], ("a word", parts[-1].sum(), 3))


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("kind", ["mean", "sum", "weighted"])
@given(seeds(), st.integers(1, 12), st.integers(1, 12))
def test_mean_is_weighted_as_the_loss_is(transform, kind, seed, rows, size):
    """By samples, or by the weight of ``Weighted``; rounded by the division and by the cast."""

    def loss(w, x):
        out = (x @ w).mean() if kind == "mean" else (x @ w).sum()
        if kind == "weighted":
            out = pa.Weighted(out, x[:, 0].abs().sum())
        return out, {"top": x.max(), "tops": x.amax(0).reshape(1, 2)}

    reduction = "sum" if kind == "sum" else "mean"
    w, x = data(seed, rows)
    x[0, 0] = 1.0  # some weight
    options = {"microbatch_size": size, "reduction": reduction, "aux_reduction": "mean"}
    aux = transformed(transform, loss, **options)(w, x)
    assert aux["tops"].shape == (1, 2)
    parts = x.split(size)
    weights = [int(p[:, 0].abs().sum()) if kind == "weighted" else len(p) for p in parts]
    for got, column in ((aux["top"], slice(None)), (aux["tops"][0, 1], 1)):
        tops = [Fraction(part[:, column].max().item()) for part in parts]
        exact = sum(a * b for a, b in zip(weights, tops, strict=True)) / Fraction(sum(weights))
        assert abs(Fraction(got.item()) - exact) <= (2 * UNIT + UNIT**2) * abs(exact)


FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.complex64]
LEAVES = st.tuples(
    st.sampled_from([*FLOATS, torch.int32, torch.bool, int, float]),
    st.lists(st.integers(0, 3), max_size=2),
)


@pytest.mark.parametrize("transform", TRANSFORMS)
@given(
    leaves=st.dictionaries(st.sampled_from("abcd"), LEAVES, min_size=1),
    reduction=st.sampled_from(["sum", "mean", "stack", "last"]),
    size=st.sampled_from([1, 2, 4]),
    seed=seeds(),
)
def test_a_leaf_comes_out_in_the_shape_and_the_dtype_of_its_kind(
    transform, leaves, reduction, size, seed
):
    """As by hand, of any leaf: integers over two to the something microbatches round nowhere."""
    parts = 4 // size
    g = generator(seed)
    given_ = {
        name: [torch.randint(0, 2, shape, generator=g) for _ in range(parts)]
        for name, (_, shape) in leaves.items()
    }

    def leaf(name, i):
        kind, _ = leaves[name]
        x = given_[name][i]
        return x.to(kind) if isinstance(kind, torch.dtype) else kind(x.sum())

    def loss(w, x):
        return (x @ w).mean(), {name: leaf(name, int(x[0, 0])) for name in leaves}

    def by_hand(name):
        every = [leaf(name, i) for i in range(parts)]
        if reduction == "last":
            return every[-1]
        stacked = torch.stack([torch.as_tensor(x) for x in every])
        if reduction == "stack":
            return stacked
        kind = leaves[name][0]
        summed = stacked.to(torch.complex128 if stacked.is_complex() else torch.float64).sum(0)
        if reduction == "mean":
            return (summed / parts).to(kind if kind in FLOATS else torch.float64)
        whole = torch.float64 if kind is float else torch.int64
        return summed.to(kind if kind in FLOATS else whole)

    if reduction == "stack":  # of tensors alone
        leaves = {k: x for k, x in leaves.items() if isinstance(x[0], torch.dtype)}
    numbers = torch.arange(parts).repeat_interleave(size)
    x = torch.stack([numbers, numbers], 1).float()
    aux = transformed(transform, loss, microbatch_size=size, aux_reduction=reduction)(
        torch.ones(2), x
    )
    assert_trees_bitwise_equal(aux, {name: by_hand(name) for name in leaves})


@pytest.mark.parametrize("engine", ["func", "autograd"])
@given(seeds(), st.integers(1, 4), st.integers(1, 4), st.integers(0, 4))
def test_a_skipped_microbatch_takes_its_weight_along(engine, seed, count, size, poisoned):
    """Sums and means are those of the microbatches that were kept; ``concat`` keeps all samples."""

    def loss(w, x):
        return (x @ w).mean(), {
            "sum": x.sum(),
            "mean": x.sum() * 2,
            "rows": x,
            "max": x.amax(0),
            "min": x.amin(0),
        }

    w, x = data(seed, count * size)
    bad = min(poisoned, count)  # perhaps none
    x[bad * size : (bad + 1) * size] = torch.nan
    reductions = {"rows": "concat"} | {
        reduction: reduction for reduction in ("sum", "mean", "max", "min")
    }
    gradient = pa.grad(
        loss,
        has_aux=True,
        microbatch_size=size,
        aux_reduction=reductions,
        nonfinite="skip",
        engine=engine,
    )
    grads, aux = gradient(w, x)
    kept = [part for i, part in enumerate(x.split(size)) if i != bad]
    total = sum(part.sum() for part in kept) if kept else torch.zeros(())
    assert torch.equal(aux["sum"], total)
    assert_trees_bitwise_equal(aux["rows"], x)
    if not kept:
        assert aux["mean"].isnan()
        assert torch.equal(grads, torch.zeros(2))
        return
    assert torch.equal(aux["max"], torch.cat(kept).amax(0))
    assert torch.equal(aux["min"], torch.cat(kept).amin(0))
    exact = 2 * Fraction(total.item()) / len(kept)
    assert abs(Fraction(aux["mean"].item()) - exact) <= (2 * UNIT + UNIT**2) * abs(exact)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_masked_microbatch_has_no_say_in_a_mean(transform):
    """Weight zero: its mean is NaN, and NaN times zero is NaN."""

    def loss(w, batch):
        x, mask = batch
        total, weight = (mask * (x * w)).sum(), mask.sum()
        return pa.Weighted(total, weight), total / weight

    x, mask = torch.tensor([4.0, 5.0, 6.0, 7.0]), torch.tensor([0.0, 0.0, 1.0, 3.0])
    options = {"microbatch_size": 2, "aux_reduction": "mean"}
    assert transformed(transform, loss, **options)(torch.tensor(1.0), (x, mask)) == 27 / 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, torch.bool], ids=str)
def test_sums_of_narrow_dtypes_are_wide(dtype):
    """600 ones: more than bfloat16 or a bool counts, then rounded once to the leaf's dtype."""

    loss = lambda w, x: ((w * x).mean(), torch.ones((), dtype=dtype))  # noqa: E731
    aux = transformed("grad", loss, microbatch_size=1, aux_reduction="sum")
    result = aux(torch.tensor(1.0), torch.ones(600))
    assert result == 600
    assert result.dtype == (dtype if dtype.is_floating_point else torch.int64)


@given(seeds(), st.integers(1, 5))
def test_update_hands_out_the_aux_of_its_microbatch(seed, rows):
    """As the loss returned it, whatever its leaves are."""

    more = {"word": "a", "none": None, "n": 1}
    loss = lambda w, x: ((x @ w).mean(), {"x": x, **more})  # noqa: E731
    acc = pa.accumulator(loss, has_aux=True)
    w, x = data(seed, rows)
    state, aux = acc.update(acc.init(w), w, x)
    assert_trees_bitwise_equal(aux, loss(w, x)[1])
    assert_trees_bitwise_equal(
        state, pa.accumulator(lambda w, x: loss(w, x)[0]).update(acc.init(w), w, x)
    )
