"""The Jacobian of each sample: the bits of torch.func.jacrev in a loop over the samples.

On whole numbers, whatever the chunks, the engine and the shape of what a function returns. A
reduced Jacobian is the sum, the mean or the moments of those; its samples are the gradients of
single outputs; and a chunk takes one pass forwards and, by the engine "vmap", one pass back.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from optree import tree_leaves, tree_map

import pureaccum as pa
from pureaccum.testing import assert_pure, assert_trees_bitwise_equal
from pureaccum.testing.strategies import seeds
from tests.draws import examples, generator
from tests.dropped import is_dropped
from tests.exactly import integers
from tests.networks import NETWORKS, batch_of, params_of
from tests.problems import function, near
from tests.samples.problems import chunks, engines, jacobians


pytestmark = [pytest.mark.exact, pytest.mark.promise("samples")]
rows = st.integers(1, 7)


def make(seed, count):
    random = generator(seed)
    params = {
        "w": integers(random, 3, 4, bound=7),
        "b": integers(random, 4),
        "table": integers(random, 5, 3, bound=7),
        "unused": integers(random, 2),
    }
    batch = {
        "x": integers(random, count, 3, bound=7),
        "i": torch.randint(0, 5, (count, 2), generator=random),
    }
    return params, batch


def vector(p, row):
    return torch.relu((row["x"] + p["table"][row["i"]].sum(0)) @ p["w"] + p["b"]) ** 2


# by the shape of what comes out: at most (21 * 21 * 3 + 15) ** 2 in each number
FUNCTIONS = {
    "no dims": lambda p, row: vector(p, row).sum(),
    "one": lambda p, row: vector(p, row)[:1],
    "four": vector,
    "2 x 3": lambda p, row: vector(p, row)[:2, None] * row["x"],
    "2 x 1 x 2": lambda p, row: vector(p, row).view(2, 1, 2) - p["b"][:2],
    "none": lambda p, row: vector(p, row)[:0],
    "constant": lambda p, row: row["x"],
}
functions = pytest.mark.parametrize("name", FUNCTIONS)


@functions
@engines
@examples(1 / 4)
@given(seeds(), rows, chunks)
def test_jacobians_are_those_of_a_loop_over_the_rows(engine, name, seed, count, size):
    (params, batch), func = make(seed, count), FUNCTIONS[name]
    want = jacobians(func, params, batch)
    got = assert_pure(pa.per_sample_grad(func, chunk_size=size, engine=engine), params, batch)
    assert_trees_bitwise_equal(got, want)

    def with_rows(p, rows):  # func of a batch of one sample, whose output has that sample too
        return torch.func.vmap(func, (None, 0))(p, rows)

    whole = pa.per_sample_grad(with_rows, chunk_size=size, engine=engine, keep_batch_dim=True)
    assert_trees_bitwise_equal(whole(params, batch), tree_map(lambda x: x[:, None], want))


@functions
@engines
@examples(1 / 4)
@given(seeds(), rows, chunks)
def test_reduced_jacobians_have_the_bits_of_a_loop(engine, name, seed, count, size):
    """In float64, where the squares of these numbers are exact."""
    (params, batch), func = make(seed, count), FUNCTIONS[name]
    each = tree_map(torch.Tensor.double, jacobians(func, params, batch))
    summed = tree_map(lambda x: x.sum(0), each)
    norms = torch.stack([x.flatten(1).norm(dim=1) for x in tree_leaves(each)]).norm(dim=0)

    def run(reduce, **options):
        options |= {"chunk_size": size, "engine": engine, "dtype": torch.float64, "reduce": reduce}
        return pa.per_sample_grad(func, **options)(params, batch)

    got, seen = run("sum", metrics=lambda grad, value: (grad["b"], value))
    values = torch.func.vmap(func, (None, 0))(params, batch)
    assert_trees_bitwise_equal(got, summed)
    assert_trees_bitwise_equal(seen, (each["b"].float(), values))
    assert_trees_bitwise_equal(run("mean"), tree_map(lambda x: x / count, summed))
    moments = run("moments")
    second = tree_map(lambda x: x.square().sum(0) / count, each)
    assert_trees_bitwise_equal(moments.mean, tree_map(lambda x: x / count, summed))
    near(moments.second, second, 2.0**-44)  # each sample is rounded a few times
    signs = tree_map(lambda x: x.sign().sum(0), each)
    assert_trees_bitwise_equal(run("sum", transform="sign"), signs)

    def project(jacobian):  # of one sample, whose outputs lead
        assert [x.shape for x in jacobian.values()] == [x.shape[1:] for x in each.values()]
        return jacobian["w"].sum((-1, -2)) + jacobian["b"].sum(-1)

    want = torch.func.vmap(project)(each)
    assert_trees_bitwise_equal(run("concat", transform=project), want.float())
    # whole numbers, whose norms are rounded: once a leaf, and once for all
    _, found = run("sum", metrics="norm", transform="normalize")
    assert ((found - norms).abs() <= 2.0**-20 * norms).all()


@engines
@examples(1 / 4)
@given(seeds(), rows, chunks)
def test_rows_of_a_jacobian_are_gradients_of_single_outputs(engine, seed, count, size):
    """With aux, of two arguments, and whatever a reducer of the user's own keeps."""
    params, batch = make(seed, count)
    more, options = torch.tensor([2.0, -3.0]), {"chunk_size": size, "engine": engine}
    options |= {"argnums": (2, 0), "has_aux": True}

    def func(p, row, more):
        out = vector(p, row).view(2, 2) * more
        return out, {"x": row["x"], "out": out.detach()}

    def of(i, j):
        return lambda *args: (func(*args)[0][i, j], func(*args)[1])

    got, aux = pa.per_sample_grad(func, **options)(params, batch, more)
    for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
        want, its = pa.per_sample_grad(of(i, j), **options)(params, batch, more)
        assert_trees_bitwise_equal(tree_map(lambda x, i=i, j=j: x[:, i, j], got), want)
        assert_trees_bitwise_equal(aux, its)
    largest = pa.Reducer(
        lambda like: tree_map(lambda x: x - torch.inf, like),
        lambda state, each, weights: tree_map(
            lambda a, b: torch.maximum(a, b[: len(weights)].amax(0)), state, each
        ),
        lambda a, b: tree_map(torch.maximum, a, b),
        lambda state: state,
    )
    found, _ = pa.per_sample_grad(func, reduce=largest, **options)(params, batch, more)
    assert_trees_bitwise_equal(found, tree_map(lambda x: x.amax(0), got))


@pytest.mark.parametrize("network", NETWORKS)
def test_without_chunks_it_is_torch_func_untouched(network):
    """On ordinary floats too."""
    params, batch = params_of(3, torch.float32), batch_of(3, torch.float32)

    def outputs(p, x):
        return NETWORKS[network](p, x[None])[0]

    want = torch.func.vmap(torch.func.jacrev(outputs), (None, 0))(params, batch["x"])
    assert_trees_bitwise_equal(pa.per_sample_grad(outputs)(params, batch["x"]), want)


PASSES = []  # back through it


def went_back(g, x):
    PASSES.append(None)
    return g


Seen = function(
    lambda x: x.clone(),
    went_back,
    vmap=staticmethod(lambda info, in_dims, x: (Seen.apply(x), in_dims[0])),
)


@pytest.mark.parametrize("size", [None, 2, 1])
def test_a_chunk_is_one_pass_forwards_and_one_pass_back(size):
    (params, batch), calls = make(0, 5), []

    def func(p, row):
        if not is_dropped():
            calls.append(None)
        return Seen.apply(vector(p, row))

    PASSES.clear()
    got = pa.per_sample_grad(func, chunk_size=size)(params, batch)
    assert (len(calls), len(PASSES)) == (-(-5 // (size or 5)),) * 2
    assert_trees_bitwise_equal(got, jacobians(vector, params, batch))


@pytest.mark.promise("second run")
@pytest.mark.promise("samples")
@pytest.mark.parametrize("randomness", ["same", "different"])
def test_all_outputs_of_a_sample_see_one_mask(randomness):
    """Also where the pass back computes them again."""
    w, x = torch.ones(3, 50), torch.ones(4, 3)

    def func(w, x):
        return torch.nn.functional.dropout(x[:2] * w.sum() + (x @ w)[:2], 0.5) + 0 * x[:2]

    def drawn(func):
        torch.manual_seed(0)
        return pa.per_sample_grad(func, randomness=randomness)(w, x)

    assert_trees_bitwise_equal(drawn(pa.remat(func)), drawn(func))
    assert len(drawn(func).flatten(1).unique(dim=0)) == 1 or randomness == "different"


@engines
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64, torch.float64])
def test_jacobians_have_the_dtype_of_params_and_their_sums_are_wide(engine, dtype):
    x = torch.randint(-255, 256, (60, 7), generator=generator(0)).to(dtype)
    x = x + 1j * x.flip(0) if dtype.is_complex else x.abs()
    w, wide = torch.zeros(7, dtype=dtype), torch.promote_types(dtype, torch.float32)

    def func(w, x):
        out = w[:3] * x[:3] + w[3:6] * x[3:6]
        return torch.view_as_real(out) if dtype.is_complex else out

    def of(i):  # jacrev refuses complex params
        return torch.func.vmap(torch.func.grad(lambda w, x: func(w, x).flatten()[i]), (None, 0))

    shape = func(w, x[0]).shape
    each = torch.stack([of(i)(w, x) for i in range(shape.numel())], 1).view(60, *shape, 7)
    assert_trees_bitwise_equal(pa.per_sample_grad(func, engine=engine)(w, x), each)
    got = pa.per_sample_grad(func, engine=engine, reduce="sum", chunk_size=7)(w, x)
    assert_trees_bitwise_equal(got, each.to(wide).sum(0))
