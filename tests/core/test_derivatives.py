"""``pa.grad`` and ``pa.value`` under every outer transform of torch.func, and under two of them.

Second-order terms are easily lost without an error (``create_graph=False`` loses them all), and
a sum that was started unbatched cannot be added to under vmap.
"""

import optree
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import seeds
from tests.draws import examples
from tests.exactly import SUM, WEIGHTED, full_batch, make_batch, make_params
from tests.outer import TRANSFORMS, jvp, make, policies, problems, tangent, total


pytestmark = [pytest.mark.transforms, pytest.mark.promise("closure")]
each = pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda f: f.__name__)


@pytest.mark.parametrize("ours", ["gradient", "streamed", "value"])
@each
@examples(1 / 6)
@given(problems)
def test_each_transform_is_that_of_torch_func(transform, ours, problem):
    """Of a gradient; of one through several updates and a merge; and of the value.

    ``donate`` is without effect under a transform.
    """
    problem.check(transform, ours)


@each
@examples(1 / 8, fewest=8)  # each is eight nests: 0.6 s
@example(make("weighted", "skip", 1, 5, 2))
@given(problems)
def test_each_nest_of_two_transforms_is_that_of_torch_func_grad(transform, problem):
    for inner in TRANSFORMS:
        problem.check(lambda f, inner=inner: transform(inner(f)))


@examples(1 / 6)
@given(problems)
def test_hessian_of_the_value_is_jacobian_of_the_gradient(problem):
    problem.check(torch.func.hessian, "value")
    problem.check(torch.func.jacrev)
    problem.check(torch.func.jacfwd)


@examples(1 / 6)
@given(problems)
def test_the_hessian_vector_product_that_the_documentation_names(problem):
    def product(f):
        hessian = torch.func.hessian(f)(problem.params, problem.batch)
        vector = tangent(problem.params)
        return {
            i: sum(torch.tensordot(row[k], v, dims=v.dim()) for k, v in vector.items())
            for i, row in hessian.items()
        }

    terms = [product(f) for f in problem.pieces()]
    ours = jvp(problem.gradient)(problem.params, problem.batch)
    problem.compare(ours, product(problem.whole), terms)


@pytest.mark.parametrize(
    ("loss", "nonfinite"),
    [(SUM, "propagate"), pytest.param(WEIGHTED, "skip", marks=pytest.mark.slow)],
)
def test_an_accumulation_compiles_into_one_graph(loss, nonfinite):
    gradient = pa.grad_and_value(
        loss.call, microbatch_size=3, reduction=loss.reduction, nonfinite=nonfinite
    )
    params, batch = make_params(0), make_batch(0, 8)
    torch.compiler.reset()
    compiled = torch.compile(gradient, fullgraph=True, backend="aot_eager")
    assert_trees_bitwise_equal(compiled(params, batch), gradient(params, batch))
    assert_trees_bitwise_equal(compiled(params, batch)[0], full_batch(loss, params, batch))


# Inside of a loss, and beside per-sample gradients ----------------------------------------------


@examples(1 / 3)
@given(problems, st.integers(1, 8))
def test_a_loss_may_adapt_by_pa_grad(problem, outer_size):
    """Inner steps over one batch, an outer gradient over another: microbatched both, as MAML."""
    other = make(problem.kind, problem.nonfinite, 1, 6, outer_size)

    def adapted(gradient, params):
        steps = gradient(params, problem.batch)
        return optree.tree_map(lambda p, g: p - 0.01 * g, params, steps)

    ours = pa.grad(
        lambda p, b: other.loss(adapted(problem.gradient, p), b),
        microbatch_size=outer_size,
        **other.knobs,
    )
    whole = torch.func.grad(problem.whole)
    pieces = [
        torch.func.grad(lambda p, f=f: f(adapted(whole, p), other.batch)) for f in other.pieces()
    ]
    problem.compare(
        ours(problem.params, other.batch),
        torch.func.grad(lambda p: other.whole(adapted(whole, p), other.batch))(problem.params),
        [piece(problem.params) for piece in pieces],
    )


@examples(1 / 3)
@given(problems)
def test_a_loss_may_penalise_the_norm_of_a_gradient(problem):
    """grad of ``|pa.grad|**2``: twice the Hessian times the gradient."""

    def penalty(gradient):
        return lambda p: sum((g**2).sum() for g in gradient(p, problem.batch).values())

    whole = torch.func.grad(problem.whole)
    now = whole(problem.params, problem.batch)

    def term(f):
        of = torch.func.grad(f)
        dot = lambda p: 2 * sum((g * now[k]).sum() for k, g in of(p, problem.batch).items())  # noqa: E731
        return torch.func.grad(dot)(problem.params)

    problem.compare(
        torch.func.grad(penalty(problem.gradient))(problem.params),
        torch.func.grad(penalty(whole))(problem.params),
        [term(f) for f in problem.pieces()],
    )


rowwise = st.builds(make, st.just("mean"), policies, seeds(), st.integers(1, 7), st.integers(1, 8))


@examples(1 / 3)
@given(rowwise)
def test_pa_grad_stands_beside_per_sample_gradients(problem):
    samples = {key: column[:, None] for key, column in problem.batch.items()}
    ours = pa.grad(total, microbatch_size=1, **problem.knobs)
    each = torch.func.vmap(ours, (None, 0))(problem.params, samples)
    torchs = torch.func.vmap(torch.func.grad(total), (None, 0))(problem.params, samples)
    rows = [optree.tree_map(lambda g, i=i: g[i], torchs) for i in range(len(problem.batch["x"]))]
    problem.compare(each, torchs, [torchs])
    mean = optree.tree_map(lambda g: g.mean(0), each)
    scaled = [optree.tree_map(lambda g: g / len(rows), row) for row in rows]
    problem.compare(problem.gradient(problem.params, problem.batch), mean, scaled)


@examples(1 / 3)
@given(rowwise)
def test_a_loss_may_map_over_its_rows(problem):
    def loss(params, batch):
        samples = {key: column[:, None] for key, column in batch.items()}
        return torch.func.vmap(total, (None, 0))(params, samples).mean()

    ours = pa.grad(loss, microbatch_size=problem.size, **problem.knobs)
    whole, pieces = torch.func.grad(problem.whole), map(torch.func.grad, problem.pieces())
    problem.compare(
        ours(problem.params, problem.batch),
        whole(problem.params, problem.batch),
        [piece(problem.params, problem.batch) for piece in pieces],
    )
