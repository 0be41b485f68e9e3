"""Gradients of single samples: any chunks, any history, and the bits of a loop over the samples.

What is reduced is a sum over samples, so that on exact data no chunk and no merge can change a bit,
and the mean is the full batch's gradient. A sample without weight adds nothing, whatever it has.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from optree import tree_leaves, tree_map
from torch import Tensor

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal, assert_trees_within_bound
from pureaccum.testing.strategies import KINDS, histories, losses, pieces, reduction, seeds
from tests.draws import examples, few, generator
from tests.dropped import is_dropped
from tests.exactly import integers
from tests.networks import NETWORKS, batch_of, loss_of, params_of
from tests.problems import near
from tests.samples.problems import engines


# of embedding bags, which take vmap's slow path
pytestmark = [
    pytest.mark.exact,
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.promise("samples"),
]
models, chunks = few.flatmap(losses), st.none() | st.integers(1, 14)


def total(model, kind, batch):
    """Gradient and value of the sum that a batch stands for, weighted or not, by torch.func."""
    by = batch["mask"] if kind == "weighted" else 1
    return torch.func.grad_and_value(lambda p: (model.per_row(p, batch) * by).sum())(model.params)


def each_row(model, kind="sum"):
    """The gradients of all rows by themselves, stacked."""
    grads = [total(model, kind, row)[0] for row in pieces(model.batch, [1] * model.samples)]
    return tree_map(lambda *xs: torch.stack(xs), *grads)


def summed(each):
    return tree_map(lambda x: x.sum(0), each)


def mask_of(model, kind):
    return model.batch["mask"].double() ** (kind == "weighted")


def divided(tree, weight):
    """Once; the zeros of no weight stay zeros."""
    return tree_map(lambda x: x / (weight.item() or 1.0), tree)


@engines
@pytest.mark.parametrize("kind", KINDS)
@examples(1 / 2)
@given(models, st.data(), st.sampled_from(["sum", "mean"]), chunks, st.booleans())
def test_any_history_has_the_full_batchs_bits(kind, engine, model, data, reduce, size, donate):
    options = {"chunk_size": size, "keep_batch_dim": True, "engine": engine}
    acc = pa.per_sample_accumulator(model.loss(kind), reduce=reduce, **options)
    args = model.params, model.batch
    state = data.draw(histories(model.samples)).run(acc, *args, donate)

    (want, value), weight = total(model, kind, model.batch), mask_of(model, kind).sum()
    if reduce == "mean":
        want, value = divided(want, weight), value / weight
    assert_trees_bitwise_equal(acc.finalize(state), (want, value.double()))
    at_once = pa.per_sample_grad(model.loss(kind), reduce=reduce, **options)(*args)
    assert_trees_bitwise_equal(at_once, want)
    if (kind == "sum") == (reduce == "sum"):  # then pa.grad speaks of the same
        cut = pa.grad(model.loss(kind), microbatch_size=1, reduction=reduction(kind))
        assert_trees_bitwise_equal(cut(*args), want)
    counts = weight, torch.tensor(model.samples), torch.tensor(0), torch.tensor(0)
    assert_trees_bitwise_equal(tuple(state[2:6]), counts)


@engines
@examples(1 / 2)
@given(models, chunks)
def test_concat_is_vmap_of_grad_whatever_the_chunks(engine, model, size):
    def loss(params, row):
        return model.per_row(params, tree_map(lambda x: x[None], row))[0]

    got = pa.per_sample_grad(loss, chunk_size=size, engine=engine)(model.params, model.batch)
    want = torch.func.vmap(torch.func.grad(loss), (None, 0))(model.params, model.batch)
    assert_trees_bitwise_equal(got, want)
    assert_trees_bitwise_equal(got, each_row(model))


@pytest.mark.parametrize("network", NETWORKS)
def test_without_chunks_it_is_torch_func_untouched(network):
    """On ordinary floats too."""
    params, batch = params_of(3, torch.float32), batch_of(3, torch.float32)
    rows, loss = tree_map(lambda x: x[:, None], batch), loss_of(network, "sum")
    want = torch.func.vmap(torch.func.grad_and_value(loss), (None, 0))(params, rows)
    options = {"metrics": lambda grad, value: value}
    assert_trees_bitwise_equal(pa.per_sample_grad(loss, **options)(params, rows), want)
    whole = pa.per_sample_grad(loss, keep_batch_dim=True, **options)(params, batch)
    assert_trees_bitwise_equal(whole, want)


@engines
@pytest.mark.parametrize("kind", ["mean", "weighted"])
@examples(1 / 2)
@given(models, st.data(), chunks)
def test_second_moments_have_the_bits_of_a_loop(kind, engine, model, data, size):
    """In float64 squares of whole numbers below 2**24 are exact, and so are halves of them."""
    model = model._replace(batch=model.batch | {"mask": model.batch["mask"].clamp(max=2)})
    options = {"chunk_size": size, "keep_batch_dim": True, "engine": engine, "dtype": torch.float64}
    acc = pa.per_sample_accumulator(model.loss(kind), reduce="moments", **options)
    state = data.draw(histories(model.samples)).run(acc, model.params, model.batch)
    moments, _ = acc.finalize(state)

    mask, grads = mask_of(model, kind), tree_map(Tensor.double, each_row(model, kind))
    by = torch.where(mask > 0, 1 / mask, 0.0)
    want = summed(grads), tree_map(lambda g: torch.tensordot(by, g * g, 1), grads)
    mean, second = divided(want, mask.sum())
    assert_trees_bitwise_equal(moments.mean, mean)
    near(moments.second, second, 2.0**-44)  # each sample is rounded a few times
    assert_trees_bitwise_equal(tuple(moments[2:]), (mask.sum(), (mask > 0).double().sum()))


@engines
@examples(1 / 2)
@given(models, st.data(), chunks)
def test_signs_projections_and_a_user_s_reductions_have_the_bits_of_a_loop(
    engine, model, data, size
):
    """The largest number of each leaf, and how many samples have a large one."""
    history, each = data.draw(histories(model.samples)), each_row(model)

    def run(**options):
        options |= {"chunk_size": size, "keep_batch_dim": True, "engine": engine}
        acc = pa.per_sample_accumulator(model.loss("sum"), **options)
        return acc.finalize(history.run(acc, model.params, model.batch))[0]

    def project(grad):
        return {
            "first": tree_leaves(grad)[0].flatten()[:2] * 2,
            "all": sum(x.sum() for x in tree_leaves(grad)),
        }

    want = summed(tree_map(torch.sign, each)), summed(torch.func.vmap(project)(each))
    got = run(transform="sign", reduce="sum"), run(transform=project, reduce="sum")
    assert_trees_bitwise_equal(got, want)

    def init(like):
        return tree_map(lambda x: x - torch.inf, like), torch.tensor(0)

    def of_rows(grads):
        largest = torch.stack([x.abs().flatten(1).amax(1) for x in tree_leaves(grads)]).amax(0)
        return tree_map(lambda x: x.amax(0), grads), (largest > 100).sum()

    def update(state, grads, weight):
        assert weight.tolist() == [1.0] * len(weight)
        return merge(state, of_rows(grads))

    def merge(a, b):
        return tree_map(torch.maximum, a[0], b[0]), a[1] + b[1]

    got = run(reduce=pa.Reducer(init, update, merge, lambda state: state))
    assert_trees_bitwise_equal(got, of_rows(each))


@engines
@examples(1 / 2)
@given(st.lists(st.tuples(st.integers(-99, 99), st.integers(-99, 99)), min_size=1), chunks)
def test_norms_and_squares_have_the_bits_of_a_loop(engine, rows, size):
    """Of leaves with one number each; (3k, 4k) has the norm 5k."""
    params = {"a": torch.zeros(()), "b": torch.zeros(1)}
    s, t = torch.tensor(rows, dtype=torch.float32).unbind(1)
    options = {"batch_argnums": (1, 2), "chunk_size": size, "engine": engine}

    def loss(params, s, t):
        return (params["a"] * s + params["b"] * t).sum()

    acc = pa.per_sample_accumulator(loss, squares=True, **options)
    squares = acc.update(acc.init(params), params, s, t).squares
    counts = torch.stack([(s * s).sum(), (t * t).sum(), torch.tensor(len(rows))])
    assert_trees_bitwise_equal(squares, counts.double())
    got = pa.clipped_sum(loss, 1e9, **options)(params, 3 * s, 4 * s)  # none is that large
    sums = {"a": 3 * s.sum(), "b": 4 * s.sum()[None]}
    assert_trees_bitwise_equal(got, (sums, 5 * s.abs()))
    normed = pa.per_sample_grad(loss, transform="normalize", reduce="sum", **options)
    assert_trees_bitwise_equal(normed(params, 0 * s, 0 * t), params)  # zeros have no direction


@engines
@pytest.mark.parametrize(("dtype", "k"), [(torch.bfloat16, 53), (torch.float16, 511)], ids=str)
def test_norms_and_squares_of_narrow_gradients_are_wide(engine, dtype, k):
    """3 k and 4 k are numbers of that dtype, and 5 k is none."""
    w, x = torch.zeros(2, dtype=dtype), torch.tensor([[3.0 * k, 4.0 * k], [0.0, 1.0]]).to(dtype)
    assert x[0].tolist() == [3 * k, 4 * k]
    assert torch.tensor(5.0 * k).to(dtype).item() != 5 * k
    acc = pa.per_sample_accumulator(lambda w, x: (w * x).sum(), squares=True, engine=engine)
    assert acc.update(acc.init(w), w, x).squares.tolist() == [(5 * k) ** 2 + 1, 2]
    _, norms = pa.clipped_sum(lambda w, x: (w * x).sum(), 1.0, engine=engine)(w, x)
    assert norms.tolist() == [5 * k, 1]


@engines
@pytest.mark.parametrize("by", [None, "sign", "normalize", "clip"])
@examples(1 / 3)
@given(seeds(), chunks)
def test_a_sample_without_weight_adds_nothing_though_its_gradient_is_nan(engine, by, seed, size):
    """All are powers of two, and so are norms over four leaves of four equal numbers."""
    random = generator(seed)
    params = {name: torch.zeros(2, 2) for name in "abcd"}
    x = 2 ** torch.randint(-14, -6, (9,), generator=random).float()
    mask = torch.randint(0, 2, (9,), generator=random)
    transform = pa.clip_by_global_norm(1e9) if by == "clip" else by
    options = {
        "batch_argnums": (1, 2),
        "chunk_size": size,
        "engine": engine,
        "transform": transform,
    }

    def loss(params, x, mask):
        out = sum(leaf.sum() for leaf in params.values())
        return pa.Weighted((out + 1) * x * mask + out * (0 / mask), mask)

    def run(reduce, x, mask):
        acc = pa.per_sample_accumulator(loss, reduce=reduce, squares=True, **options)
        state = acc.update(acc.init(params), params, x, mask)
        return acc.finalize(state), tuple(state[1:3]), state.nonfinite, state.squares

    for reduce in ("sum", "mean", "moments"):
        got, want = run(reduce, x, mask), run(reduce, x[mask > 0], mask[mask > 0])
        if reduce == "moments":  # chunks of other samples have other means, which are rounded
            near(got[0][0].second, want[0][0].second, 2.0**-18)
            got, want = ((r[0][0]._replace(centred=()), r[0][1], *r[1:]) for r in (got, want))
        assert_trees_bitwise_equal(got, want)
    if by in ("sign", "normalize"):
        each, many = {"sign": 4.0, "normalize": 0.25}[by], mask.sum().item()
        assert run("sum", x, mask)[-1].tolist() == [each * many] * 4 + [many]
    concat = pa.per_sample_grad(loss, **options)(params, x, mask)
    assert all((leaf[mask == 0] == 0).all() for leaf in concat.values())


@engines
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64, torch.float64])
def test_sums_of_samples_are_wide(engine, dtype):
    """60 times 255 is no bfloat16, and its square no float16."""
    x = torch.randint(-255, 256, (60, 7), generator=generator(0)).to(dtype)
    x = x + 1j * x.flip(0) if dtype.is_complex else x.abs()
    w, wide = torch.zeros(7, dtype=dtype), torch.promote_types(dtype, torch.float32)

    def loss(w, x):
        return (w * x).sum().real if dtype.is_complex else (w * x).sum()

    def run(reduce, by=None):
        options = {"reduce": reduce, "transform": by, "chunk_size": 7, "engine": engine}
        return pa.per_sample_grad(loss, **options)(w, x)

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(w, x)
    assert_trees_bitwise_equal(run("concat"), each)
    # of a complex number a quotient, whose kernels differ in the last place or two
    assert_trees_within_bound(run("concat", "sign"), torch.sgn(each), 2.0**-22)
    assert_trees_bitwise_equal(run("sum"), each.to(wide).sum(0))
    parts = torch.view_as_real(each) if dtype.is_complex else each[..., None]
    total = each.to(wide).sum(0)
    mean = torch.complex(total.real / 60, total.imag / 60) if dtype.is_complex else total / 60
    want = mean, (parts.to(wide.to_real()) ** 2).sum((0, -1)) / 60
    moments = run("moments")
    assert_trees_bitwise_equal(moments.mean, want[0])
    near(moments.second, want[1], 2.0**-18)  # 60 samples, each rounded a few times


@engines
@pytest.mark.parametrize("donate", [False, True])
@given(
    st.lists(st.sampled_from([1.0, -2.0, torch.inf, -torch.inf, torch.nan]), max_size=9),
    st.sampled_from(["sum", "mean", "moments"]),
    chunks,
)
def test_samples_that_are_not_finite_are_counted_and_not_left_out(
    engine, donate, numbers, reduce, size
):
    """Each of them, over all updates and merges; the value is what it is of such numbers."""
    x, w = torch.tensor(numbers), torch.ones(())
    options = {"chunk_size": size, "engine": engine, "reduce": reduce}
    acc = pa.per_sample_accumulator(lambda w, x: w * x, **options)
    first, second = (
        acc.update(acc.init(w), w, part, donate=donate) for part in x.tensor_split([len(x) // 2])
    )
    state = acc.update(acc.merge(first, second), w, x, donate=donate)
    assert state.nonfinite == 2 * (~x.isfinite()).sum()
    assert (state.microbatches, state.skipped, state.weight) == (2 * len(x), 0, 2 * len(x))
    _, value = acc.finalize(state)
    expected = x.double().sum() if reduce == "sum" else x.double().sum() / len(x)
    total = 2 * expected if reduce == "sum" else expected
    assert_trees_bitwise_equal(value, total)


@engines
@examples(1 / 2)
@given(
    argnums=st.sampled_from([0, 1, (1, 0)]),
    has_aux=st.booleans(),
    at=st.sampled_from([(2, 3), (3, 2), (-1, -2)]),
    size=chunks,
    keep=st.booleans(),
    randomness=st.sampled_from(["different", "same"]),
    dtype=st.sampled_from([None, torch.float64]),
)
def test_a_clipped_sum_takes_every_option_of_per_sample_grad(
    engine, argnums, has_aux, at, size, keep, randomness, dtype
):
    """It is that function with four of its words given, called as often, with as many samples."""
    random = generator(3)
    args = torch.randn(3, generator=random), torch.ones(()), torch.randn(7, 3), torch.ones(7, 2)
    shapes = []

    def loss(w, scale, x, y):
        if not is_dropped():
            shapes.append((x.shape, y.shape))
        kept = torch.rand_like(x) > 0.5
        value = ((w * x * kept).sum() * scale - y.sum()) ** 2
        return (value, {"x": x.sum()}) if has_aux else value

    options = {"batch_argnums": at, "chunk_size": size, "keep_batch_dim": keep}
    options |= {"randomness": randomness, "engine": engine, "dtype": dtype}
    came = []
    given_words = {"transform": pa.clip_by_global_norm(2.0), "reduce": "sum", "metrics": "norm"}
    for func in (
        pa.clipped_sum(loss, 2.0, argnums, has_aux, **options),
        pa.per_sample_grad(loss, argnums, has_aux, **given_words, **options),
    ):
        shapes.clear()
        torch.manual_seed(0)
        came.append((func(*args), list(shapes)))
    (got, seen), (want, wanted) = came
    assert_trees_bitwise_equal(got, want)
    assert seen == wanted
    assert len(seen) == (7 if engine == "autograd" else -(-7 // (size or 7)))
    assert seen[0] == (((1, 3), (1, 2)) if keep else ((3,), (2,)))


def mixed_loss(params, scale, batch, table, more):
    """Integers to look up, bools to choose, None and numbers for all, from two batches."""
    assert (batch["nothing"], batch["half"]) == (None, 0.5)
    row = torch.where(batch["on"], table[batch["i"]], params["w"]) + more
    out = (scale * params["w"] * row).sum() * batch["half"] * 2
    return out, {"i": batch["i"], "deep": [row, (out.detach(),)]}


@engines
@pytest.mark.parametrize("size", [None, 1, 4])
def test_any_arguments_and_aux_are_those_of_a_loop(engine, size):
    random = generator(1)
    i = torch.randint(0, 5, (9,), generator=random)
    batch, more = {"i": i, "on": i > 1, "half": 0.5, "nothing": None}, integers(random, 9, 4)
    params, table = {"w": integers(random, 4)}, integers(random, 5, 4)
    args = params, torch.tensor(3.0), batch, table, more
    options = {"has_aux": True, "batch_argnums": (2, -1), "chunk_size": size, "engine": engine}

    def loop(argnums):
        rows = []
        for r in range(9):
            row = tree_map(lambda x, r=r: x[r] if isinstance(x, Tensor) else x, batch)
            one = torch.func.grad_and_value(mixed_loss, argnums, has_aux=True)
            grads, (value, aux) = one(*args[:2], row, table, more[r])
            rows.append((grads, (aux, value)))
        return tree_map(lambda *xs: torch.stack(xs), *rows)

    for argnums in (0, (1, 0), (-4, -5)):
        got = pa.per_sample_grad(mixed_loss, argnums, metrics=lambda grad, value: value, **options)
        same = tuple(n % 5 for n in argnums) if isinstance(argnums, tuple) else argnums
        assert_trees_bitwise_equal(got(*args), loop(same))
    grads, (aux, _) = loop(0)
    acc = pa.per_sample_accumulator(mixed_loss, reduce="sum", **options)
    state, seen = acc.update(acc.init(params), *args)
    assert_trees_bitwise_equal((state.grads, seen), (summed(grads), aux))
