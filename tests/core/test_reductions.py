"""What ``pa.microbatch`` returns, for each reduction, is what plain code gives for the full batch.

Values, and gradients of first and second order, in bits: on integers, and with weights and samples
whose numbers are powers of two wherever something is divided by them.
"""

from itertools import accumulate

import optree
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import compositions, seeds
from tests.draws import examples, generator
from tests.exactly import integers
from tests.problems import pulled


pytestmark = [
    pytest.mark.exact,
    pytest.mark.promise("bits"),
    pytest.mark.promise("reductions"),
]
ROWS = 8
cuts = st.integers(1, ROWS + 1) | compositions(ROWS)


def rows_of(cut):
    return cut if isinstance(cut, list) else [len(x) for x in torch.zeros(ROWS).split(cut)]


def data(seed):
    g = generator(seed)
    return integers(g, 3, 2, bound=3), integers(g, ROWS, 3, bound=3)


def rows(w, x):
    return (x @ w) * (x[:, :2] + 1)


def sums(w, x):
    return rows(w, x).sum(0)


# Each: the function of a microbatch, and the reduction; then the same of all parts, where it is
# another.
REDUCTIONS = {
    "concat": (rows, "concat"),
    "sum": (sums, "sum"),
    "mean": (lambda w, x: sums(w, x) / len(x), "mean"),
    "stack": (sums, "stack", lambda w, parts: torch.stack([sums(w, part) for part in parts])),
    "last": (sums, "last", lambda w, parts: sums(w, parts[-1])),
    "one reduction for a tree": (lambda w, x: {"a": rows(w, x), "b": [x]}, "concat"),
    "a tree of reductions": (
        lambda w, x: {"a": rows(w, x), "b": (sums(w, x), x.sum())},
        {"a": "concat", "b": "sum"},
    ),
    "an output that is an input": (lambda w, x: (x, x), "concat"),
    "an output that is given twice": (
        lambda w, x: [h := rows(w, x), h, h.T.T],
        "concat",
        lambda w, parts: [rows(w, torch.cat(parts))] * 3,
    ),
    "an output of what all share": (lambda w, x: w * 2, "sum", lambda w, parts: w * 2 * len(parts)),
    "expanded": (lambda w, x: w[0].expand(len(x), 2), "concat"),
}
reductions = pytest.mark.parametrize("name", REDUCTIONS)


def square(tree):
    """A number, of any tree, that couples all of it."""
    return sum(((x.sum(0) + x) * x).sum() for x in optree.tree_leaves(tree))


def alike(of, ours, plain):
    assert_trees_bitwise_equal(of(ours), of(plain))


@reductions
@examples(1 / 2)
@given(st.data(), seeds())
def test_each_reduction_has_the_value_gradient_and_hessian_of_the_full_batch(name, data_, seed):
    func, reduction, *of_parts = REDUCTIONS[name]
    sizes = rows_of(data_.draw(cuts))
    if name == "mean":
        sizes = [1 << (size.bit_length() - 1) for size in sizes]
        sizes += [1] * (ROWS - sum(sizes))
    w, x = data(seed)
    micro = pa.microbatch(func, microbatch_size=sizes, reduce=reduction)
    whole = (lambda w, x: of_parts[0](w, x.split(sizes))) if of_parts else func
    alike(lambda f: f(w, x), micro, whole)
    alike(lambda f: torch.func.grad(lambda w, x: square(f(w, x)), (0, 1))(w, x), micro, whole)
    alike(lambda f: torch.func.hessian(lambda w, x: square(f(w, x)))(w, x), micro, whole)


@pytest.mark.parametrize("reduction", ["max", "min"])
@given(cuts, seeds())
def test_the_largest_and_the_smallest_of_all_rows_are_found(reduction, cut, seed):
    w, x = data(seed)

    def func(w, x):
        most = getattr(rows(w, x), "a" + reduction)(0)
        return {"float": most, "int": most.long()}

    got = pa.microbatch(func, microbatch_size=cut, reduce=reduction)(w, x)
    assert_trees_bitwise_equal(got, func(w, x))
    x[ROWS // 2] = torch.nan
    got = pa.microbatch(lambda w, x: func(w, x)["float"], microbatch_size=cut, reduce=reduction)(
        w, x
    )
    assert got.isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["max", "min"])
@given(cuts, seeds())
def test_microbatches_that_tie_share_the_gradient_of_the_largest(reduction, cut, seed):
    """Evenly, as those of torch's amax and amin do; halves and quarters are exact."""
    w, x = data(seed)
    sizes = rows_of(cut)
    func = lambda w, x: (rows(w, x) % 3).sum(0)  # noqa: E731
    parts = lambda w, x: torch.stack([func(w, part) for part in x.split(sizes)])  # noqa: E731
    whole = lambda w, x: getattr(parts(w, x), "a" + reduction)(0)  # noqa: E731
    assume(all(n in (1, 2, 4, 8) for n in (parts(w, x) == whole(w, x)).sum(0).tolist()))
    micro = pa.microbatch(func, microbatch_size=sizes, reduce=reduction)
    both, v = (0, 1), (w.flip(0), x.flip(0))
    for of in (
        lambda f: torch.func.grad(lambda w, x: square(f(w, x)), both)(w, x),
        lambda f: torch.func.jvp(f, (w, x), v),
        lambda f: torch.func.hessian(lambda w: square(f(w, x)))(w),
    ):
        alike(of, micro, whole)


@given(cuts, seeds())
def test_a_reducer_of_the_user_s_is_applied(cut, seed):
    """It is given one value a microbatch, and the samples of that as its weight."""
    w, x = data(seed)
    best = pa.Reducer(
        lambda like: (like.new_full((), -torch.inf), torch.zeros((), dtype=torch.float64)),
        lambda s, values, weights: (torch.maximum(s[0], values.amax()), s[1] + weights.sum()),
        lambda a, b: (torch.maximum(a[0], b[0]), a[1] + b[1]),
        lambda s: {"best": s[0], "rows": s[1]},
    )
    func = lambda w, x: (rows(w, x).amax(), rows(w, x).sum(0))  # noqa: E731
    got, sums = pa.microbatch(func, microbatch_size=cut, reduce=(best, "sum"))(w, x)
    assert got["best"] == rows(w, x).max()
    assert got["rows"] == ROWS
    assert_trees_bitwise_equal(sums, rows(w, x).sum(0))


# Arguments ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dim", [1, -1, -2])
@given(cuts, seeds())
def test_rows_may_lie_along_another_dim(dim, cut, seed):
    """-2 is the first of two dims and the second of three."""
    w, x = data(seed)
    batch = x.movedim(0, dim)

    func = lambda w, x: rows(w, x.movedim(dim, 0)).movedim(0, dim)  # noqa: E731
    micro = pa.microbatch(func, microbatch_size=cut, dim=dim)
    alike(lambda f: f(w, batch), micro, func)
    number = lambda f: lambda w, x: f(w, x).pow(2).sum()  # noqa: E731
    alike(lambda f: torch.func.grad(number(f), 1)(w, batch), micro, func)
    alike(lambda f: torch.func.hessian(number(f))(w, batch), micro, func)


@given(cuts, seeds())
def test_batches_are_given_by_position_and_by_name(cut, seed):
    w, x = data(seed)

    func = lambda x, w, scale, *, y, name="": rows(w, x["x"]) * scale + y[:, :2]  # noqa: E731
    micro = pa.microbatch(func, microbatch_size=cut, batch_argnums=(0,), batch_argnames="y")
    args, named = ({"x": x}, w, 2.0), {"y": x, "name": "a"}
    number = lambda f: lambda *args, **named: square(f(*args, **named))  # noqa: E731
    alike(lambda f: f(*args, **named), micro, func)
    alike(lambda f: torch.func.grad(number(f), (0, 1))(*args, **named), micro, func)


@given(cuts, seeds())
def test_outputs_may_be_integers_and_no_tensors(cut, seed):
    """Integer samples in and out, indices of samples, numbers that are summed, and constants."""
    w, x = data(seed)
    batch = {"i": (x[:, 0].abs()).long() % 3, "x": x, "none": None}

    def func(w, b):
        return {
            "rows": w[b["i"]],
            "i": b["i"] * 2,
            "large": b["x"] > 0,
            "n": len(b["x"]),
            "half": 0.5 * len(b["x"]),
            "count": b["i"].sum(),
            "none": b["none"],
        }

    spec = dict.fromkeys(("rows", "i", "large"), "concat") | dict.fromkeys(
        ("n", "half", "count"), "sum"
    )
    micro = pa.microbatch(func, microbatch_size=cut, reduce={**spec, "none": "concat"})
    got, want = micro(w, batch), func(w, batch)
    for key in ("n", "half"):
        assert got.pop(key) == want.pop(key)
    assert_trees_bitwise_equal(got, want)
    number = lambda f: lambda w: (f(w, batch)["rows"] ** 2 * x[:, :2]).sum()  # noqa: E731
    alike(lambda f: torch.func.grad(number(f))(w), micro, func)


NO_DERIVATIVE = {
    "counts": (lambda w, x: (x > w[0, 0]).sum(), "sum"),
    "indices": (lambda w, x: (x @ w).argmax(1), "concat"),
    "strings": (lambda w, x: {"which": "a", "of": None}, "last"),
    "nothing": (lambda w, x: (), "concat"),
}


@pytest.mark.parametrize("name", NO_DERIVATIVE)
@pytest.mark.parametrize("remat", [False, True])
def test_outputs_without_a_derivative_stand_beside_those_with_one(name, remat):
    """It comes out where a gradient is wanted, and the gradient of the rest is what it is."""
    func, reductions = NO_DERIVATIVE[name]
    w, x = data(0)
    micro = pa.remat(func) if remat else pa.microbatch(func, microbatch_size=2, reduce=reductions)
    found = []  # torch.func's own aux are tensors alone

    def loss(w, f):
        found.append(f(w, x))
        return (x @ w).square().sum()

    want = torch.func.grad(loss)(w, func)
    assert_trees_bitwise_equal(torch.func.grad(loss)(w, micro), want)
    assert_trees_bitwise_equal(pulled(lambda w: loss(w, micro), w), want)
    for out in found[1:]:
        assert_trees_bitwise_equal(out, found[0])


@given(cuts, seeds())
def test_rows_may_be_complex(cut, seed):
    w, x = data(seed)
    w, x = torch.complex(w, w.flip(0)), torch.complex(x, x.flip(1))
    micro = pa.microbatch(rows, microbatch_size=cut)

    def gradient(f):
        number = lambda z: (z.sum(0) * z).sum()  # noqa: E731
        return torch.func.grad(lambda *at: number(torch.view_as_real(f(*at))), (0, 1))(w, x)

    alike(gradient, micro, rows)


@pytest.mark.parametrize("order", [0, 1, 2])
def test_a_function_of_a_batch_without_rows_is_the_plain_one(order):
    """One call of no samples, since only that tells what comes out."""
    w, x = data(0)
    micro = pa.microbatch(
        lambda w, x: (rows(w, x), rows(w, x).sum(0)), microbatch_size=2, reduce=("concat", "sum")
    )
    f = lambda w: (lambda z, s: z.sum() + s.sum() + (w**2).sum())(*micro(w, x[:0]))  # noqa: E731
    want = [(w**2).sum(), 2 * w, 2 * torch.eye(6).reshape(3, 2, 3, 2)][order]
    for _ in range(order):
        f = torch.func.jacrev(f)
    assert_trees_bitwise_equal(f(w), want)
    assert micro(w, x[:0])[0].shape == (0, 2)


# Weights -----------------------------------------------------------------------------------


def weighted(w, x, a, b):
    """Two means and samples; a mean is NaN, and so its derivatives, where there is no weight."""
    h = rows(w, x).sum(1)

    def mean(h, mask):
        return pa.Weighted(
            (h * mask).sum() * torch.where(mask.sum() == 0, torch.nan, 1.0), mask.sum()
        )

    return {"a": mean(h, a), "b": [mean(h * h, b)], "rows": h}


def mask_of(seed, without):
    """Some samples have none; all together have a power of two."""
    mask = torch.randint(0, 4, (ROWS,), generator=generator(seed)).float()
    mask[[*without]] = 0
    mask[min({*range(ROWS)} - without)] += 32 - mask.sum()
    return mask


@pytest.mark.parametrize("transform", ["value", "grad", "backward", "fr", "rf", "rr", "ff", "vmap"])
@examples(1 / 2)
@given(cuts, seeds(), *[st.sets(st.integers(0, ROWS - 1), max_size=ROWS - 1)] * 2)
def test_several_weighted_means_are_each_the_full_batch_s(transform, cut, seed, one, other):
    """Each with its own weight; microbatches that have none add nothing, at any order."""
    w, x = data(seed)
    a, b = mask_of(seed, one), mask_of(seed + 1, other)
    micro = pa.microbatch(weighted, microbatch_size=cut, batch_argnums=(1, 2, 3))

    def ours(w):
        out = micro(w, x, a, b)
        return out["a"] * 2 + out["b"][0] + out["rows"].sum()

    def plain(w):
        h = rows(w, x).sum(1)
        return (h * a).sum() / 32 * 2 + (h * h * b).sum() / 32 + h.sum()

    fwd, rev = torch.func.jacfwd, torch.func.jacrev
    apply = {
        "value": lambda f: f,
        "grad": torch.func.grad,
        "backward": lambda f: lambda w: pulled(f, w),
        "fr": lambda f: fwd(rev(f)),
        "rf": lambda f: rev(fwd(f)),
        "rr": lambda f: rev(rev(f)),
        "ff": lambda f: fwd(fwd(f)),
        "vmap": lambda f: lambda w: torch.func.vmap(torch.func.grad(f))(torch.stack([w, -w])),
    }[transform]
    alike(lambda f: apply(f)(w), ours, plain)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_a_weighted_mean_stands_beside_one_without_a_gradient(order, first):
    """Whether a microbatch counts is said by the mean that is differentiated, at every order."""
    x, mask = torch.arange(1.0, 5), torch.tensor([1.0, 1, 0, 0])

    def func(w, x, mask):
        loss = pa.Weighted((w**4 * x).sum(), float(len(x)))
        metric = pa.Weighted((x * mask).sum(), mask.sum())
        return (loss, metric) if first else (metric, loss)

    micro = pa.microbatch(func, microbatch_size=2, batch_argnums=(1, 2))

    ours = lambda w: micro(w, x, mask)[int(not first)]  # noqa: E731
    plain = lambda w: (w**4 * x).sum() / 4  # noqa: E731
    for _ in range(order):
        ours, plain = torch.func.grad(ours), torch.func.grad(plain)
    alike(lambda f: f(torch.tensor(2.0)), ours, plain)


def test_the_mean_of_a_batch_without_any_weight_is_nan():
    """Is NaN, as is its gradient: a step over it is not applied."""
    w, x = data(0)
    micro = pa.microbatch(weighted, microbatch_size=3, batch_argnums=(1, 2, 3))
    nothing = torch.zeros(ROWS)
    assert micro(w, x, nothing, nothing)["a"].isnan()


@given(compositions(ROWS), seeds())
def test_weights_beside_sums_are_the_law_of_an_outer_cut(cut, seed):
    """A loss that returns undivided sums may be cut once more, and by any other sizes."""
    w, x = data(seed)

    def loss(w, x):
        micro = pa.microbatch(
            lambda w, x: (rows(w, x).sum(), len(x)), microbatch_size=2, reduce="sum"
        )
        return pa.Weighted(*micro(w, x))

    got = pa.grad_and_value(loss, microbatch_size=cut)(w, x)
    want = torch.func.grad_and_value(lambda w: rows(w, x).sum() / ROWS)(w)
    assert_trees_bitwise_equal(got, want)


@pytest.mark.promise("narrow")
def test_sums_of_outputs_are_wide():
    """Of shares and of gradients: in bfloat16 the sum of 256 and one more is 256."""
    w, x = torch.ones(1, dtype=torch.bfloat16), torch.ones(300, 1, dtype=torch.bfloat16)
    micro = pa.microbatch(lambda w, x: (w * x).sum(0), microbatch_size=1, reduce="sum")
    gradient = torch.func.grad(lambda w: micro(w, x).float().sum())(w)
    assert gradient == micro(w, x) == 300


def test_lists_of_sizes_name_the_rows_of_each():
    seen = []

    def func(x):
        seen.append(len(x))
        return x

    pa.microbatch(func, microbatch_size=4, batch_argnums=0)(torch.zeros(ROWS))  # observed, once
    for sizes in ([1, 3, 4], (5, 3)):
        seen.clear()
        pa.microbatch(func, microbatch_size=sizes, batch_argnums=0)(torch.zeros(ROWS))
        assert tuple(accumulate(seen)) == tuple(accumulate(sizes))


@pytest.mark.promise("batches")
def test_strings_of_a_batch_go_to_every_microbatch():
    """As numbers and None do: what has no rows is not cut."""

    def of(w, batch):
        assert {k: v for k, v in batch.items() if k != "x"} == others
        return (w * batch["x"]).pow(3).sum()

    others = {"how": "cubed", "flag": True, "none": None}
    batch = {"x": torch.arange(5.0), **others}
    w = torch.tensor(2.0)
    assert pa.microbatch(of, microbatch_size=2, reduce="sum")(w, batch) == of(w, batch)
    assert pa.value(of, microbatch_size=2, reduction="sum")(w, batch) == of(w, batch)


@pytest.mark.parametrize("reduction", ["concat", "sum"])
@given(cut=cuts, seed=seeds())
def test_a_gradient_may_be_sparse(reduction, cut, seed):
    """Of an embedding: laid beside samples, or of a ``Weighted`` that does not count everywhere."""
    g = generator(seed)
    table, ids = integers(g, 6, 2, bound=3), torch.randint(6, (ROWS,), generator=g)
    mask = (ids > 2).double()
    assume(mask.any())

    def found(w, ids, mask):
        z = torch.nn.functional.embedding(ids, w, sparse=True)
        if reduction == "concat":
            return z
        return pa.Weighted((z.square().sum(1) * mask).sum() / (mask.sum() > 0), mask.sum())

    def gradient(f):
        leaf = table.clone().requires_grad_()
        out = f(leaf, ids, mask)
        out = out.total if isinstance(out, pa.Weighted) else out * mask.sum()
        (out.square().sum() if reduction == "concat" else out).backward()
        assert leaf.grad is not None
        return leaf.grad.to_dense()

    micro = pa.microbatch(found, microbatch_size=cut, batch_argnums=(1, 2), reduce=reduction)
    alike(gradient, micro, found)


CALLED = {
    "plainly": lambda f, w: f(w),
    "with a gradient": lambda f, w: torch.func.vjp(f, w)[0],
    "under vmap": lambda f, w: torch.func.vmap(f)(torch.stack([w, 2 * w]))[0],
    "compiled": lambda f, w: torch.compile(f, backend="eager")(w),
}


@pytest.mark.parametrize(
    ("how", "captured"),
    [
        *((how, False) for how in CALLED if how != "compiled"),
        *((how, True) for how in ("plainly", "with a gradient")),
        *(pytest.param("compiled", it, marks=pytest.mark.slow) for it in (False, True)),
        pytest.param("under vmap", True, marks=pytest.mark.given_up("captured")),
    ],
)
def test_a_shared_tensor_is_a_term_of_every_microbatch(how, captured):
    """One and the same tensor comes out of each, and is added as often."""
    w, x = data(0)

    def summed(w):
        options = {"microbatch_size": 2, "reduce": "sum"}
        if captured:
            return pa.microbatch(lambda x: w, batch_argnums=0, **options)(x)
        return pa.microbatch(lambda w, x: w, **options)(w, x)

    assert_trees_bitwise_equal(CALLED[how](summed, w), w * (ROWS // 2))
