"""``pa.grad`` inside of a loss that is itself differentiated, and beside per-sample gradients."""

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pureaccum as pa
from pureaccum.testing.strategies import seeds
from tests.draws import examples
from tests.outer import make, policies, problems, total


pytestmark = pytest.mark.transforms


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
        def dot(p):
            return 2 * sum(
                (g * now[k]).sum() for k, g in torch.func.grad(f)(p, problem.batch).items()
            )

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
    """vmap(pa.grad) over rows is vmap(torch.func.grad), and its mean is pa.grad of the batch."""
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
