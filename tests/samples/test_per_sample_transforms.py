"""Reduced gradients of samples under outer transforms: those of a loop over the rows.

In float64. A transform of a sum is compared to the norms of the transformed addends, as in
outer.py; here an addend is what one row brings to a mean, to second moments, to a clipped sum.
"""

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
from tests.outer import TRANSFORMS, U64, Problem, kinds, make, total, weight


pytestmark = pytest.mark.transforms
MAX_NORM = 0.75
sizes = st.none() | st.integers(1, 6)
problems = st.builds(make, kinds, st.just("propagate"), seeds(), st.integers(1, 5), sizes)


# What a row with gradient g and weight w brings, of the weight of the whole batch.
WHAT: dict[str, Any] = {
    "mean": lambda g, w, whole: tree_map(lambda x: x / whole, g),
    "second": lambda g, w, whole: tree_map(lambda x: x * x / torch.where(w > 0, w, 1) / whole, g),
    "clipped": lambda g, w, whole: tree_map(
        lambda x: x * (MAX_NORM / (norm_of(g) + 1e-6)).clamp(max=1.0), g
    ),
}


def norm_of(tree: Any) -> Tensor:
    return torch.cat([x.flatten() for x in tree.values()]).norm()


def ours(problem: Problem, what: str) -> Any:
    knobs: dict[str, Any] = {"keep_batch_dim": True, "chunk_size": problem.size}
    if what == "clipped":
        summed = pa.clipped_sum(problem.loss, MAX_NORM, **knobs)
        return lambda params, batch: summed(params, batch)[0]
    if what == "second":
        moments = pa.per_sample_grad(problem.loss, reduce="moments", **knobs)
        return lambda params, batch: moments(params, batch).second
    acc = pa.per_sample_accumulator(problem.loss, **knobs)

    def streamed(params: Any, batch: Any) -> Any:
        states = [acc.init(params), acc.init(params)]
        for i, part in enumerate(pa.microbatches(batch, 2)):
            states[i % 2] = acc.update(states[i % 2], params, part, donate=i > 1)
        return acc.finalize(acc.merge(*states))[0]

    return streamed


def addend(problem: Problem, what: str, i: int) -> Any:
    """What row i brings, as a function of params and of the whole batch."""

    def of(params: Any, batch: Any) -> Any:
        row = {key: column[i : i + 1] for key, column in batch.items()}
        w, whole = torch.ones((), dtype=torch.float64), len(batch["x"])
        if problem.kind == "weighted":
            w, whole = weight(row), weight(batch)
        return WHAT[what](torch.func.grad(total)(params, row), w, whole)

    return of


@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("what", WHAT)
@examples(1 / 7)
@given(problem=problems)
def test_each_transform_of_reduced_gradients_is_that_of_a_loop(
    transform: Any, what: str, problem: Problem
) -> None:
    args = problem.params, problem.batch
    terms = [addend(problem, what, i) for i in range(len(problem.batch["x"]))]

    def loop(params: Any, batch: Any) -> Any:
        return tree_map(lambda *xs: sum(xs), *(term(params, batch) for term in terms))

    got = transform(ours(problem, what))(*args)
    problem.compare(got, transform(loop)(*args), [transform(term)(*args) for term in terms])


def test_reduced_gradients_compile_into_one_graph() -> None:
    """Two chunks, of two rows and of one, on exact data: the bits of eager code."""
    w, x = torch.tensor([1.0, 2.0]), torch.tensor([[1.0, -2.0], [3.0, 1.0], [0.0, 4.0]])
    summed = pa.clipped_sum(lambda w, x: (w * x).sum() ** 2, 1e9, chunk_size=2)
    torch.compiler.reset()
    compiled = torch.compile(summed, fullgraph=True, backend="aot_eager")
    assert_trees_bitwise_equal(compiled(w, x), summed(w, x))
    want = torch.func.grad(lambda w: ((x @ w) ** 2).sum())(w)
    assert_trees_bitwise_equal(compiled(w, x)[0], want)


def test_with_chunks_plain_autograd_follows_the_same_as_without() -> None:
    problem = make("sum", "propagate", 0, 4, 1)
    params = {k: p.requires_grad_() for k, p in problem.params.items()}
    knobs: dict[str, Any] = {"reduce": "moments", "keep_batch_dim": True}

    def derivative(size: int | None) -> Any:
        of = pa.per_sample_grad(problem.loss, chunk_size=size, **knobs)
        total = sum(x.sin().sum() for x in of(params, problem.batch).second.values())
        return torch.autograd.grad(total, [*params.values()])

    for found, want in zip(derivative(2), derivative(None), strict=True):
        assert (found - want).norm() <= U64**0.5 * want.norm()


def test_a_sample_without_a_gradient_has_a_derivative() -> None:
    """It cannot be made of length 1, and stays zero: so does its derivative."""
    normalized = pa.per_sample_grad(
        lambda w, x: (w * x).sum().sin(), reduce="sum", transform="normalize"
    )
    w, x = torch.tensor([1.0, 2.0]).double(), torch.tensor([[1.0, 2.0], [0, 0], [3, 1]]).double()

    def outer(w: Tensor, x: Tensor) -> Tensor:
        return (normalized(w, x) * w).sum()

    want = torch.func.grad(outer)(w, x[::2])
    assert want.isfinite().all()
    assert_trees_bitwise_equal(torch.func.grad(outer)(w, x), want)
