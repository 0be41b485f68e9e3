"""Reduced Jacobians of samples under outer transforms: those of a loop over the rows."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from optree import tree_map
from torch import Tensor

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import seeds
from tests.draws import examples
from tests.outer import TRANSFORMS, Problem, make


pytestmark = pytest.mark.transforms
sizes = st.none() | st.integers(1, 6)
problems = st.builds(make, st.just("sum"), st.just("propagate"), seeds(), st.integers(1, 5), sizes)


def outputs(problem: Problem) -> Any:
    """Three numbers of a sample, whose losses are those of the problem."""

    def of(params: Any, row: Any) -> Tensor:
        loss = problem.loss(params, tree_map(lambda x: x[None], row))
        return torch.stack([loss, (loss + params["b"].sum()).sin(), loss * loss])

    return of


@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda f: f.__name__)
@examples(1 / 7)
@given(problem=problems)
def test_each_transform_of_reduced_jacobians_is_that_of_a_loop(
    transform: Any, problem: Problem
) -> None:
    of, count = outputs(problem), len(problem.batch["x"])

    def square(jacobian: Any) -> Any:
        return tree_map(lambda x: x * x, jacobian)

    summed = pa.per_sample_grad(of, reduce="sum", transform=square, chunk_size=problem.size)

    def addend(i: int) -> Any:
        def of_row(params: Any, batch: Any) -> Any:
            row = {key: column[i] for key, column in batch.items()}
            return square(torch.func.jacrev(of)(params, row))

        return of_row

    terms = [addend(i) for i in range(count)]

    def loop(*args: Any) -> Any:
        return tree_map(lambda *xs: sum(xs), *(term(*args) for term in terms))

    args = problem.params, problem.batch
    each = [transform(term)(*args) for term in terms]
    problem.compare(transform(summed)(*args), transform(loop)(*args), each)


def test_reduced_jacobians_compile_into_one_graph() -> None:
    """Two chunks, of two rows and of one, on exact data: the bits of eager code."""
    w, x = torch.tensor([1.0, 2.0]), torch.tensor([[1.0, -2.0], [3.0, 1.0], [0.0, 4.0]])
    summed = pa.per_sample_grad(lambda w, x: (w * x) ** 2, chunk_size=2, reduce="sum")
    torch.compiler.reset()
    compiled = torch.compile(summed, fullgraph=True, backend="aot_eager")
    assert_trees_bitwise_equal(compiled(w, x), summed(w, x))
    assert_trees_bitwise_equal(compiled(w, x), torch.diag(2 * w * (x * x).sum(0)))
