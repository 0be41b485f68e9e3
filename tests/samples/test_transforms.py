"""What is made of samples' gradients under outer transforms: the same of a loop over the samples.

In float64. A transform of a sum is compared to the norms of the transformed addends, as in
outer.py; here an addend is what one sample brings to a mean, to second moments, to a clipped sum,
to a sum of squared Jacobians. Inner products are compared with those of Jacobians that are written
out.
"""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from optree import tree_leaves, tree_map
from torch.func import grad, hessian, jacrev, vmap

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import seeds
from tests.draws import examples
from tests.outer import TRANSFORMS, U64, kinds, make, total, weight


pytestmark = [pytest.mark.transforms, pytest.mark.promise("samples")]
transforms = pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda f: f.__name__)
MAX_NORM = 0.75
policy, rows, sizes = st.just("propagate"), st.integers(1, 5), st.none() | st.integers(1, 6)
problems = st.builds(make, kinds, policy, seeds(), rows, sizes)
sums = st.builds(make, st.just("sum"), policy, seeds(), rows, sizes)


# What a sample with gradient g and weight w brings, of the weight of the whole batch.
WHAT = {
    "mean": lambda g, w, whole: tree_map(lambda x: x / whole, g),
    "second": lambda g, w, whole: tree_map(lambda x: x * x / torch.where(w > 0, w, 1) / whole, g),
    "clipped": lambda g, w, whole: tree_map(
        lambda x: x * (MAX_NORM / (norm_of(g) + 1e-6)).clamp(max=1.0), g
    ),
}


def norm_of(tree):
    return torch.cat([x.flatten() for x in tree.values()]).norm()


def row_of(batch, i):
    return {key: column[i] for key, column in batch.items()}


def ours(problem, what):
    options = {"keep_batch_dim": True, "chunk_size": problem.size}
    if what == "clipped":
        summed = pa.clipped_sum(problem.loss, MAX_NORM, **options)
        return lambda params, batch: summed(params, batch)[0]
    if what == "second":
        moments = pa.per_sample_grad(problem.loss, reduce="moments", **options)
        return lambda params, batch: moments(params, batch).second
    acc = pa.per_sample_accumulator(problem.loss, **options)

    def streamed(params, batch):
        states = [acc.init(params), acc.init(params)]
        for i, part in enumerate(pa.microbatches(batch, 2)):
            states[i % 2] = acc.update(states[i % 2], params, part, donate=i > 1)
        return acc.finalize(acc.merge(*states))[0]

    return streamed


def addend(problem, what, i):
    """What sample i brings, as a function of params and of the whole batch."""

    def of(params, batch):
        row = row_of(batch, slice(i, i + 1))
        w, whole = torch.ones((), dtype=torch.float64), len(batch["x"])
        if problem.kind == "weighted":
            w, whole = weight(row), weight(batch)
        return WHAT[what](grad(total)(params, row), w, whole)

    return of


def check_sum(problem, transform, summed, terms):
    """That a transform of a sum is that of a loop over its terms."""

    def loop(*args):
        return tree_map(lambda *xs: sum(xs), *(term(*args) for term in terms))

    args = problem.params, problem.batch
    each = [transform(term)(*args) for term in terms]
    problem.compare(transform(summed)(*args), transform(loop)(*args), each)


@transforms
@pytest.mark.parametrize("what", WHAT)
@examples(1 / 7)
@given(problem=problems)
def test_each_transform_of_reduced_gradients_is_that_of_a_loop(transform, what, problem):
    terms = [addend(problem, what, i) for i in range(len(problem.batch["x"]))]
    check_sum(problem, transform, ours(problem, what), terms)


@transforms
@examples(1 / 7)
@given(problem=sums)
def test_each_transform_of_reduced_jacobians_is_that_of_a_loop(transform, problem):
    """Of three numbers of a sample, whose losses are those of the problem."""

    def of(params, row):
        loss = problem.loss(params, tree_map(lambda x: x[None], row))
        return torch.stack([loss, (loss + params["b"].sum()).sin(), loss * loss])

    def square(jacobian):
        return tree_map(lambda x: x * x, jacobian)

    def term(i, params, batch):
        return square(jacrev(of)(params, row_of(batch, i)))

    summed = pa.per_sample_grad(of, reduce="sum", transform=square, chunk_size=problem.size)
    terms = [partial(term, i) for i in range(len(problem.batch["x"]))]
    check_sum(problem, transform, summed, terms)


def outputs(params, row):
    """Of a linear layer: two numbers of a sample."""
    return torch.tanh(row["x"] @ params["w"] + params["b"]) * row["y"]


def rows_of(params, batch):
    jacobian = vmap(jacrev(outputs), (None, 0))(params, batch)
    return torch.cat([x.flatten(2) for x in (jacobian["w"], jacobian["b"])], -1)


def written_out(params, batch):
    j = rows_of(params, batch)
    return torch.einsum("naf,mbf->nmab", j, j)


@transforms
@pytest.mark.parametrize("apart", [False, True])
@examples(1 / 7)
@given(problem=sums)
def test_each_transform_of_products_is_that_of_jacobians_written_out(transform, apart, problem):
    """To the square root of the unit, times the norms of what comes out and of what goes in."""
    of = pa.gramian(outputs, chunk_size=problem.size)

    def ours(params, batch):
        return of(params, batch, other=batch) if apart else of(params, batch)

    args = problem.params, problem.batch
    got, want = (transform(f)(*args) for f in (ours, written_out))
    size = 1 + rows_of(*args).square().sum() + sum(x.square().sum() for x in args[0].values())
    for x, y in zip(tree_leaves(got), tree_leaves(want), strict=True):
        assert x.shape == y.shape
        assert (x - y).norm() <= U64**0.5 * (size + y.norm())


def test_second_derivatives_of_products_go_through():
    problem = make("sum", "propagate", 0, 3, 2)

    def total(f):
        return hessian(lambda b: f({**problem.params, "b": b}, problem.batch).sin().sum())

    of = pa.gramian(outputs, chunk_size=2)
    got, want = (total(f)(problem.params["b"]) for f in (of, written_out))
    assert (got - want).norm() <= U64**0.5 * want.norm()


W, X = torch.tensor([1.0, 2.0]), torch.tensor([[1.0, -2.0], [3.0, 1.0], [0.0, 4.0]])
EACH = 2 * W * X * X
IN_ONE_GRAPH = {  # what is made of W and X, and what the first of it is
    "clipped sums": (
        pa.clipped_sum(lambda w, x: (w * x).sum() ** 2, 1e9, chunk_size=2),
        grad(lambda w: ((X @ w) ** 2).sum())(W),
    ),
    "reduced jacobians": (
        pa.per_sample_grad(lambda w, x: (w * x) ** 2, chunk_size=2, reduce="sum"),
        torch.diag(EACH.sum(0)),
    ),
    "inner products": (
        pa.gramian(lambda w, x: (w * x) ** 2, chunk_size=2),
        torch.diag_embed(EACH[:, None] * EACH),
    ),
}


@pytest.mark.promise("samples")
@pytest.mark.promise("compiled")
@pytest.mark.nightly
@pytest.mark.parametrize("name", IN_ONE_GRAPH)
def test_it_compiles_into_one_graph(name):
    """Two chunks, of two samples and of one, on exact data: the bits of eager code."""
    of, want = IN_ONE_GRAPH[name]
    torch.compiler.reset()
    compiled = torch.compile(of, fullgraph=True, backend="aot_eager")
    assert_trees_bitwise_equal(compiled(W, X), of(W, X))
    assert_trees_bitwise_equal(tree_leaves(compiled(W, X))[0], want)


def second_moments(problem, size):
    options = {"reduce": "moments", "keep_batch_dim": True, "chunk_size": size}
    of = pa.per_sample_grad(problem.loss, **options)
    return lambda params, batch: tuple(of(params, batch).second.values())


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda p: second_moments(p, 2), lambda p: second_moments(p, None)),
        (lambda p: pa.gramian(outputs, chunk_size=2), lambda p: written_out),
    ],
    ids=["second moments, with chunks as without", "inner products"],
)
def test_plain_autograd_follows(ours, theirs):
    problem = make("sum", "propagate", 0, 4, 2)
    params = {k: p.requires_grad_() for k, p in problem.params.items()}

    def derivative(of):
        found = sum(x.sin().sum() for x in tree_leaves(of(params, problem.batch)))
        return torch.autograd.grad(found, [*params.values()])

    for found, want in zip(derivative(ours(problem)), derivative(theirs(problem)), strict=True):
        assert (found - want).norm() <= U64**0.5 * want.norm()


def test_a_sample_without_a_gradient_has_a_derivative():
    """It cannot be made of length 1, and stays zero: so does its derivative."""
    normalized = pa.per_sample_grad(
        lambda w, x: (w * x).sum().sin(), reduce="sum", transform="normalize"
    )
    w, x = torch.tensor([1.0, 2.0]).double(), torch.tensor([[1.0, 2.0], [0, 0], [3, 1]]).double()

    def outer(w, x):
        return (normalized(w, x) * w).sum()

    want = grad(outer)(w, x[::2])
    assert want.isfinite().all()
    assert_trees_bitwise_equal(grad(outer)(w, x), want)
