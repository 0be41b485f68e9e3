"""Odd leaves:

complex, sparse, not contiguous, without samples or elements, and no tensors at all.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import seeds
from tests.draws import examples, generator
from tests.exactly import copied
from tests.problems import in_parts
from tests.tables import each_once


pytestmark = [pytest.mark.parity, pytest.mark.promise("bits")]
engines = pytest.mark.parametrize("engine", ["func", "autograd"])
widths = pytest.mark.parametrize("width", [3, 2**18])  # the latter is added by a hook
COUNTS = ("microbatches", "skipped", "nonfinite", "weighted")
NONFINITE = ("propagate", "skip", "raise")


def whole(g, *shape):
    return torch.randint(-7, 8, shape, generator=g).float()


@engines
@widths
@examples(1 / 4)
@example(nonfinite="propagate", seed=1, rows=5, size=2)
@given(
    nonfinite=st.sampled_from(NONFINITE),
    seed=seeds(),
    rows=st.integers(2, 6),
    size=st.integers(1, 5),
)
def test_gradients_of_complex_parameters_are_summed(engine, width, nonfinite, seed, rows, size):
    g = generator(seed)
    w = torch.complex(whole(g, width), whole(g, width))
    x, y = torch.complex(whole(g, rows, 1), whole(g, rows, 1)), whole(g, rows, 3)

    def loss(p, batch):
        out = batch[0] * p["w"][:3] * p["v"].conj()
        once = (p["v"].conj() * 3).real.sum()
        return (batch[1] * (out.real - 2 * out.imag)).sum() + len(batch[1]) * once

    params = {"w": w, "v": torch.complex(whole(g, 3), whole(g, 3))}
    gradient = pa.grad(
        loss, microbatch_size=size, reduction="sum", engine=engine, nonfinite=nonfinite
    )
    each = [torch.func.grad(loss)(params, part) for part in pa.microbatches((x, y), size)]
    want = {k: sum(part[k] for part in each).resolve_conj() for k in params}
    assert_trees_bitwise_equal(gradient(params, (x, y)), want)


@pytest.mark.promise("skip")
@engines
@widths
def test_a_complex_gradient_that_is_not_finite_is_skipped(engine, width):
    """Only its imaginary part is NaN, and it arrives conjugated."""
    w = torch.ones(width, dtype=torch.complex64)
    loss = lambda w, x: (w.conj() * x[:, None]).real.sum()  # noqa: E731
    x = torch.tensor([1 + 2j, complex(3, float("inf")), 5 - 1j])
    for batch, count in ((x, 1), (x[1:2], 1), (x[:1], 0)):
        acc = pa.accumulator(loss, reduction="sum", nonfinite="skip", engine=engine)
        state = in_parts(acc, w, batch.split(1))
        assert state.skipped == state.nonfinite == count
        good = batch[batch.imag.isfinite()].sum()
        assert torch.equal(state.grads, good.expand(width))
    gradient = pa.grad(loss, microbatch_size=1, reduction="sum", nonfinite="skip", engine=engine)
    assert torch.equal(gradient(w, x), (6 + 1j) * w)


@pytest.mark.promise("skip")
@engines
@widths
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("donate", [False, True])
def test_a_gradient_may_be_nan_where_the_loss_is_not(engine, width, donate, weighted):
    """The root of zero: ``skip`` looks at every leaf, large and small, not only at the loss."""

    def loss(p, x):
        out = (p["w"][:3] * x[:, None]).sqrt().sum() + 4 * len(x) * p["v"]
        return pa.Weighted(out, 2.0 * len(x)) if weighted else out

    params = {"w": torch.ones(width), "v": torch.tensor(1.0)}
    acc = pa.accumulator(loss, reduction="sum", nonfinite="skip", engine=engine)
    first = acc.update(acc.init(params), params, torch.tensor([4.0]))
    expected = copied(first)
    second = acc.update(first, params, torch.zeros(1), donate=donate)
    assert second.skipped == 1
    assert_trees_bitwise_equal(second, expected._replace(**{k: getattr(second, k) for k in COUNTS}))
    gradient = pa.grad(loss, microbatch_size=1, reduction="sum", nonfinite="skip", engine=engine)
    assert_trees_bitwise_equal(gradient(params, torch.tensor([0.0, 4.0])), acc.finalize(second)[0])


@pytest.mark.promise("batches")
@engines
@pytest.mark.parametrize("value", [3, 2.5, True, 1 + 0j, None], ids=repr)
def test_a_batch_may_hold_leaves_that_all_rows_share(engine, value):
    """Python scalars and None reach every microbatch as they are; integers and bools are cut."""
    batch = {
        "x": torch.randint(-7, 8, (7, 3)).float(),
        "index": torch.arange(7) % 3,
        "on": torch.arange(7) % 2 == 0,
        "shared": value,
        "nested": [value, (torch.arange(7, dtype=torch.uint8),)],
    }

    def loss(w, b):
        assert b["shared"] is value
        assert b["nested"][0] is value
        factor = abs(value) if value is not None else 1
        picked = w[b["index"]] * b["x"].sum(-1) * b["nested"][1][0]
        return torch.where(b["on"], picked * factor, 0).sum()

    w = torch.ones(3)
    gradient = pa.grad(loss, microbatch_size=2, reduction="sum", engine=engine)
    assert_trees_bitwise_equal(gradient(w, batch), torch.func.grad(loss)(w, batch))


POLICIES = {f"{e}-{n}": (e, n) for n in NONFINITE for e in ("func", "autograd")}
LAYOUTS = {
    "transposed": lambda n: torch.arange(float(n * 4)).view(n, 4).t(),
    "strided": lambda n: torch.arange(float(n * 8)).view(4, n * 2)[:, ::2],
    "expanded": lambda n: torch.tensor(3.0).expand(4, n),
    "offset": lambda n: torch.arange(float(n * 4 + 5))[5:].view(4, n),
    "permuted": lambda n: torch.arange(float(n * 8)).view(n, 2, 4).permute(2, 1, 0)[:, 1],
}


@each_once("layout, engine, nonfinite", LAYOUTS, POLICIES)
@pytest.mark.parametrize("columns", [2, 2**16])  # the latter is added by a hook
def test_leaves_need_not_be_contiguous(layout, columns, nonfinite, engine):
    """Params and batch; Weighted too, whose large gradients are added in pieces."""
    w = layout(columns)
    x = (torch.arange(5 * 4) % 7 - 3.0).view(4, 5).t()

    def loss(w, x):
        return pa.Weighted((x @ w)[:, :2].sum() + (x[:, :, None] * w[:, -1:]).sum(), len(x))

    gradient = pa.grad(loss, microbatch_size=2, nonfinite=nonfinite, engine=engine)
    expected = torch.zeros(4, columns)
    expected[:, :2] += x.sum(0)[:, None]
    expected[:, -1:] += x.sum(0)[:, None]
    assert torch.equal(gradient(w, x), expected / 5)


@each_once("reduction, engine, nonfinite", {"mean": "mean", "sum": "sum"}, POLICIES)
def test_leaves_may_have_no_dimension_and_no_elements(engine, nonfinite, reduction):
    params = {"scalar": torch.tensor(2.0), "none": torch.zeros(0, 3), "one": torch.ones(1, 1)}
    batch = {"x": torch.arange(8.0), "empty": torch.zeros(8, 0)}

    def loss(p, b):
        rows = p["scalar"] * p["one"] * b["x"] + p["none"].sum() + b["empty"].sum()
        return getattr(rows, reduction)()

    gradient = pa.grad(
        loss, microbatch_size=2, reduction=reduction, engine=engine, nonfinite=nonfinite
    )
    assert_trees_bitwise_equal(gradient(params, batch), torch.func.grad(loss)(params, batch))


@pytest.mark.promise("narrow")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@engines
def test_zero_d_leaves_keep_their_dtype(engine, dtype):
    """A 0-d leaf would take on the dtype of what divides it."""
    w, x = torch.tensor(1.0, dtype=dtype), torch.arange(1.0, 6.0, dtype=dtype)
    loss = lambda w, x: pa.Weighted((w * x).sum(), len(x))  # noqa: E731
    gradient = pa.grad(loss, microbatch_size=2, engine=engine)
    assert_trees_bitwise_equal(gradient(w, x), torch.tensor(3.0, dtype=dtype))
    acc = pa.accumulator(loss, engine=engine)
    grads, _ = acc.finalize(acc.update(acc.init(w), w, x))
    assert_trees_bitwise_equal(
        grads, torch.tensor(3.0, dtype=torch.promote_types(dtype, torch.float32))
    )


policies = pytest.mark.parametrize(("engine", "nonfinite"), POLICIES.values(), ids=POLICIES)


@policies
def test_a_gradient_may_be_a_view_of_its_cotangent(nonfinite, engine):
    """And the sum that begins with it is added to: 1, 2, 4, ... in place of 1, 2, 3, ..."""
    loss = lambda w, x: w.squeeze() + x.mean()  # noqa: E731
    grad = pa.grad(loss, microbatch_size=2, engine=engine, nonfinite=nonfinite)
    assert torch.equal(grad(torch.ones(1), torch.arange(12.0)), torch.ones(1))


@policies
def test_two_gradients_may_be_views_of_one_tensor(nonfinite, engine):
    """``.backward()`` itself is wrong here: see test_torch_faults."""

    def loss(params, x):
        a, b = (p.view(-1) for p in params)
        return ((a + b) * torch.arange(6.0)).sum() + x.mean()

    grad = pa.grad(loss, microbatch_size=2, engine=engine, nonfinite=nonfinite)
    for grads in grad((torch.ones(2, 3), torch.ones(3, 2)), torch.arange(8.0)):
        assert torch.equal(grads.view(-1), torch.arange(6.0))


# Embeddings with sparse gradients: sums are dense, exact, and those of dense gradients -----------


VOCABULARIES = (6, 2**16)  # 4 columns of float32: the latter is 1 MiB, and added by a hook


def total(params, batch, sparse):
    rows = F.embedding(batch["i"], params["emb"], sparse=sparse)  # (rows, 2, 4)
    return ((rows @ params["w"]) * batch["y"][:, None]).sum()


def make(seed, vocabulary, rows):
    g = generator(seed)
    batch = {
        "i": torch.randint(0, 6, (rows, 2), generator=g),  # repeats within samples and between
        "y": whole(g, rows),
        "mask": torch.randint(0, 3, (rows,), generator=g),
    }
    return {"emb": whole(g, 1, 4).expand(vocabulary, 4).clone(), "w": whole(g, 4)}, batch


@engines
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

    options = {"reduction": "sum", "nonfinite": nonfinite, "engine": engine, "check": False}
    acc = pa.accumulator(loss, **options)
    state, expected = acc.init(params), {k: torch.zeros_like(p) for k, p in params.items()}
    for part in pa.microbatches(batch, size):
        state = acc.update(state, params, part)
        if not weighted or part["mask"].sum():
            grads = torch.func.grad(lambda p, part=part: total(p, part, sparse=False))(params)
            expected = {k: expected[k] + grads[k] for k in params}
    assert_trees_bitwise_equal(state.grads, expected)
    gradient = pa.grad(loss, microbatch_size=size, **options)
    result = gradient(params, batch)
    assert all(g.layout == torch.strided for g in result.values())
    if weighted and rows > size:
        weight = batch["mask"].sum().item() or 1
        assert_trees_bitwise_equal(result, {k: g / weight for k, g in expected.items()})
    elif not weighted:
        assert_trees_bitwise_equal(result, expected)


@pytest.mark.promise("skip")
@engines
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
