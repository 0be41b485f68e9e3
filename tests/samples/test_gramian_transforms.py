"""Inner products of gradients under outer transforms: those of Jacobians that are written out."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from optree import tree_leaves
from torch import Tensor
from torch.func import hessian, jacrev, vmap

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import seeds
from tests.draws import examples
from tests.outer import TRANSFORMS, U64, Problem, make


pytestmark = pytest.mark.transforms
problems = st.builds(
    make, st.just("sum"), st.just("propagate"), seeds(), st.integers(1, 4), st.integers(1, 5)
)


def outputs(params: Any, row: Any) -> Tensor:
    """Of a linear layer: two numbers of a sample."""
    return torch.tanh(row["x"] @ params["w"] + params["b"]) * row["y"]


def rows_of(jacobian: Any) -> Tensor:
    return torch.cat([x.flatten(2) for x in (jacobian["w"], jacobian["b"])], -1)


def written_out(params: Any, batch: Any) -> Tensor:
    j = rows_of(vmap(jacrev(outputs), (None, 0))(params, batch))
    return torch.einsum("naf,mbf->nmab", j, j)


@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("apart", [False, True])
@examples(1 / 7)
@given(problem=problems)
def test_each_transform_of_products_is_that_of_jacobians_written_out(
    transform: Any, apart: bool, problem: Problem
) -> None:
    """To the square root of the unit, times the norms of what comes out and of what goes in."""
    of = pa.gramian(outputs, chunk_size=problem.size)

    def ours(params: Any, batch: Any) -> Tensor:
        return of(params, batch, other=batch) if apart else of(params, batch)

    args = problem.params, problem.batch
    got, want = (transform(f)(*args) for f in (ours, written_out))
    j = rows_of(vmap(jacrev(outputs), (None, 0))(*args))
    size = 1 + j.square().sum() + sum(x.square().sum() for x in args[0].values())
    for x, y in zip(tree_leaves(got), tree_leaves(want), strict=True):
        assert x.shape == y.shape
        assert (x - y).norm() <= U64**0.5 * (size + y.norm())


def test_second_derivatives_go_through() -> None:
    problem = make("sum", "propagate", 0, 3, 2)
    of = pa.gramian(outputs, chunk_size=2)

    def total(f: Any) -> Any:
        return hessian(lambda b: f({**problem.params, "b": b}, problem.batch).sin().sum())

    got, want = (total(f)(problem.params["b"]) for f in (of, written_out))
    assert (got - want).norm() <= U64**0.5 * want.norm()


def test_products_compile_into_one_graph() -> None:
    """Blocks of two rows and of one, on exact data: the bits of eager code."""
    w, x = torch.tensor([1.0, 2.0]), torch.tensor([[1.0, -2.0], [3.0, 1.0], [0.0, 4.0]])
    of = pa.gramian(lambda w, x: (w * x) ** 2, chunk_size=2)
    torch.compiler.reset()
    compiled = torch.compile(of, fullgraph=True, backend="aot_eager")
    assert_trees_bitwise_equal(compiled(w, x), of(w, x))
    each = 2 * w * x * x
    want = torch.diag_embed(each[:, None] * each)
    assert_trees_bitwise_equal(compiled(w, x), want)


def test_plain_autograd_follows_the_matrix() -> None:
    problem = make("sum", "propagate", 0, 4, 2)
    params = {k: p.requires_grad_() for k, p in problem.params.items()}
    found, want = (
        torch.autograd.grad(f(params, problem.batch).sin().sum(), [*params.values()])
        for f in (pa.gramian(outputs, chunk_size=2), written_out)
    )
    for a, b in zip(found, want, strict=True):
        assert (a - b).norm() <= U64**0.5 * b.norm()
