"""``pa.grad`` and ``pa.value`` under every outer transform of torch.func, and under two of them.

Second-order terms are easily lost without an error (``create_graph=False`` loses them all), and
a sum that was started unbatched cannot be added to under vmap.
"""

import pytest
import torch
from hypothesis import example, given

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from tests.draws import examples
from tests.exactly import SUM, WEIGHTED, full_batch, make_batch, make_params
from tests.outer import TRANSFORMS, jvp, make, problems, tangent


pytestmark = [pytest.mark.transforms, pytest.mark.promise("closure")]
each = pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda f: f.__name__)


@each
@examples(1 / 3)
@given(problems)
def test_each_transform_of_pa_grad_is_that_of_torch_func_grad(transform, problem):
    problem.check(transform)


@each
@examples(1 / 6)
@given(problems)
def test_each_transform_of_a_stream_is_that_of_the_gradient(transform, problem):
    """Through several updates and a merge; ``donate`` is without effect under a transform."""
    problem.check(transform, "streamed")


@each
@examples(1 / 6)
@given(problems)
def test_each_transform_of_the_value_is_that_of_the_loss(transform, problem):
    problem.check(transform, "value")


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
    """``jvp(pa.grad(f))`` is the microbatched Hessian times a vector."""

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
