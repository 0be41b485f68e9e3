"""``pa.grad`` and ``pa.value`` under every outer transform of torch.func, and under two of them.

Second-order terms are easily lost without an error (``create_graph=False`` loses them all), and
a sum that was started unbatched cannot be added to under vmap.
"""

import optree
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.autograd import forward_ad

import pureaccum as pa
from pureaccum._core import weights
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import seeds
from tests.draws import examples
from tests.exactly import SUM, WEIGHTED, full_batch, make_batch, make_params
from tests.outer import TRANSFORMS, jvp, make, policies, problems, tangent, total
from tests.problems import in_parts, near, normal, once


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


@pytest.mark.slow
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


@pytest.mark.promise("compiled")
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("loss", "nonfinite"),
    [(SUM, "propagate"), (WEIGHTED, "skip")],
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
        **other.options,
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
    ours = pa.grad(total, microbatch_size=1, **problem.options)
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

    ours = pa.grad(loss, microbatch_size=problem.size, **problem.options)
    whole, pieces = torch.func.grad(problem.whole), map(torch.func.grad, problem.pieces())
    problem.compare(
        ours(problem.params, problem.batch),
        whole(problem.params, problem.batch),
        [piece(problem.params, problem.batch) for piece in pieces],
    )


# Dual tensors of torch.autograd.forward_ad, outside of any transform ---------------------------


def rows(w, x):
    return torch.tanh(x @ w) @ w


def loss(w, x):
    return rows(w, x).square().mean()


def summed(w, x):
    return rows(w, x).square().sum()


def weighted(w, x):
    return pa.Weighted(summed(w, x), x.new_tensor(3.0 * len(x)))


def stepped(optimizer, gradient):
    """Two steps of an optimizer."""

    def run(w, x):
        state = optimizer.init(w)
        for _ in range(2):
            w, state = optimizer.apply(gradient(w, x), state, w)
        return w

    return run


def by_step(optimizer, **options):
    step = pa.make_step(loss, optimizer, microbatch_size=2, **options)
    return lambda w, x: step(once(step, w, x)[0], x)[0].params


def streamed(w, x):
    acc = pa.accumulator(loss)
    return acc.finalize(in_parts(acc, w, x.split(2)))


def backward(f, create_graph=False):
    """The gradients of what comes out, squared and summed, by plain autograd."""

    def run(w, x):
        its = [it if it.requires_grad else it.requires_grad_() for it in (w, x)]
        return torch.autograd.grad(squared(f)(*its), its, create_graph=create_graph)

    return run


def squared(f):
    return lambda w, x: f(w, x).square().sum()


NET = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)).double()


def networked(size):
    fn = pa.functional(NET, microbatch_size=size)
    return lambda w, x: fn.apply(fn.params, fn.buffers, x @ w)[0]


GRAD = torch.func.grad(loss)
BOTH = torch.func.grad_and_value(loss)
EACH = torch.func.vmap(GRAD, (None, 0))
CASES = {
    "grad of the whole": (pa.grad(loss), GRAD),
    "grad": (pa.grad(loss, microbatch_size=2), GRAD),
    "grad by autograd": (pa.grad(loss, microbatch_size=2, engine="autograd"), GRAD),
    "grad_and_value": (pa.grad_and_value(loss, microbatch_size=2), BOTH),
    "grad of Weighted": (pa.grad(weighted, microbatch_size=2), GRAD),
    "value": (pa.value(loss, microbatch_size=2), loss),
    "accumulator": (streamed, BOTH),
    "single samples": (
        pa.per_sample_grad(loss, chunk_size=2, keep_batch_dim=True, reduce="concat"),
        lambda w, x: EACH(w, x[:, None]),
    ),
    "their mean": (
        pa.per_sample_grad(loss, chunk_size=2, keep_batch_dim=True, reduce="mean"),
        GRAD,
    ),
    "sgd": (by_step(pa.sgd(0.1, momentum=0.9)), stepped(pa.sgd(0.1, momentum=0.9), GRAD)),
    "adamw": (by_step(pa.adamw(0.1)), stepped(pa.adamw(0.1), GRAD)),
    "donated": (by_step(pa.sgd(0.1), donate=True), stepped(pa.sgd(0.1), GRAD)),
    "microbatch": (pa.microbatch(rows, microbatch_size=2), rows),
    "remat": (pa.remat(rows), rows),
}


def mapped(f):
    """The gradient of a sum, mapped over a factor."""

    def run(w, x):
        factors = torch.tensor([1.0, 2.0], dtype=torch.float64)
        return torch.func.vmap(lambda c: torch.func.grad(lambda w: f(c * w, x))(w))(factors)

    return run


CASES["under vmap"] = (
    mapped(pa.microbatch(summed, microbatch_size=2, reduce="sum")),
    mapped(summed),
)
MICROBATCHED = {
    "rows": (pa.microbatch(rows, microbatch_size=2), rows),
    "a sum": (pa.microbatch(summed, microbatch_size=2, reduce="sum"), summed),
    "a weighted mean": (pa.microbatch(weighted, microbatch_size=2), loss),
    "one piece": (pa.remat(rows), rows),
    "BatchNorm": (networked(2), networked(None)),
}
for _name, (_ours, _whole) in MICROBATCHED.items():
    for _create in (False, True):
        _key = f"backward of {_name}" + ", recorded" * _create
        CASES[_key] = (backward(_ours, _create), torch.func.grad(squared(_whole), (0, 1)))


@pytest.mark.parametrize(("ours", "plain"), CASES.values(), ids=CASES)
def test_tangents_go_along(ours, plain):
    """``detach`` drops one without a word, and so would an engine that works on detached leaves."""
    for dual in ("w", "x", "wx"):
        check(ours, plain, dual)


@pytest.mark.mechanism
@pytest.mark.parametrize("name", ["rows", "a sum"])
def test_tangents_of_large_gradients_go_along(name, monkeypatch):
    """These are added as they come, but not where something is recorded beside them."""
    monkeypatch.setattr(weights, "LARGE", 1)
    check(*CASES[f"backward of {name}, recorded"], "wx")


@pytest.mark.parametrize("name", ["rows", "a sum"])
def test_tangents_of_a_gradient_of_two_mebibytes_go_along(name):
    ours, whole = MICROBATCHED[name]
    small = lambda f: lambda w, x: f(w / 2**5, x).sum() / 2**5  # noqa: E731
    ours, plain = backward(small(ours), True), torch.func.grad(squared(small(whole)), (0, 1))
    w, x = normal(512, 512), normal(6, 512, seed=1)
    tangents = normal(512, 512, seed=2), normal(6, 512, seed=3)
    value, want = torch.func.jvp(plain, (w, x), tangents)
    with forward_ad.dual_level():
        given = map(forward_ad.make_dual, (w, x), tangents)
        pairs = [forward_ad.unpack_dual(it) for it in ours(*given)]
    near([pair.primal for pair in pairs], [*value])
    near([pair.tangent for pair in pairs], [*want])


def check(ours, plain, dual):
    primals = normal(3, 3), normal(6, 3, seed=1)
    directions = normal(3, 3, seed=2), normal(6, 3, seed=3)
    tangents = [t if which in dual else 0 * t for t, which in zip(directions, "wx", strict=True)]
    value, want = torch.func.jvp(plain, primals, tuple(tangents))
    with forward_ad.dual_level():
        given = [
            forward_ad.make_dual(p.clone(), t) if which in dual else p.clone()
            for p, t, which in zip(primals, tangents, "wx", strict=True)
        ]
        pairs = [forward_ad.unpack_dual(x) for x in optree.tree_leaves(ours(*given))]
    near([pair.primal for pair in pairs], optree.tree_leaves(value), floor=1)
    near([pair.tangent for pair in pairs], optree.tree_leaves(want), floor=1)
