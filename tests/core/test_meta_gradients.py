"""Derivatives through accumulated steps are those through the steps of the full batch.

Three inner steps, each with the gradient of ``total / weight``, which both depend on a weight for
each sample. The outer loss depends on the parameters they began with, the learning rate and the
sample weights, and is differentiated by each of them. The other side is torch.func's gradient of
the quotient over the whole batch, and optimizers written out by hand. All is float64, and held to
the bound of outer.py: ``sqrt(u)`` of the norm of a derivative, which leaves eight decimals.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, jacfwd, jvp, vmap

import pureaccum as pa
from pureaccum.testing.strategies import seeds
from tests.draws import examples, generator
from tests.outer import U64, Problem, tangent
from tests.problems import in_parts, once


pytestmark = [pytest.mark.transforms, pytest.mark.promise("closure")]
ROWS, STEPS = 5, 3
map_ = optree.tree_map


class Given(NamedTuple):
    """What the outer loss is a function of."""

    params: dict[str, Tensor]
    rate: Tensor
    theta: Tensor


Run = Callable[[Given, list[Any]], Any]  # from what is given, over batches, to parameters
Outer = Callable[[Given], Tensor]


def make(seed):
    """What is given; a batch for each step, and one more to judge by."""
    g = generator(seed)
    normal = partial(torch.randn, generator=g, dtype=torch.float64)
    theta = torch.rand(STEPS, ROWS, generator=g, dtype=torch.float64) + 0.5
    rate = torch.tensor(0.1, dtype=torch.float64)
    batches = [{"x": normal(ROWS, 3), "y": normal(ROWS, 2)} for _ in range(STEPS + 1)]
    return Given({"w": normal(3, 2), "b": normal(2)}, rate, theta), batches


def row_losses(params, batch):
    out = torch.tanh(batch["x"] @ params["w"] + params["b"])
    return ((out - batch["y"]) ** 2).sum(-1)


def weighted(params, batch):
    theta = batch["theta"]
    return pa.Weighted((theta * row_losses(params, batch)).sum(), (theta**2).sum())


def quotient(params, batch, cut_off=False):
    """The same by hand; or as it is not."""
    total, weight = weighted(params, batch)
    return total / (weight.detach() if cut_off else weight)


def outer(batches, run):
    """The loss on the last batch after a run over the others, each with its sample weights."""

    def value(given):
        pairs = zip(batches[:-1], given.theta, strict=True)
        return row_losses(run(given, [b | {"theta": t} for b, t in pairs]), batches[-1]).mean()

    return value


def descent(gradient, wrap=lambda f: f):
    def one(params, rate, batch):
        return map_(lambda p, g: p - rate * g, params, gradient(params, batch))

    def run(given, batches):
        params = given.params
        for batch in batches:
            params = wrap(one)(params, given.rate, batch)
        return params

    return run


def steps(rule, size, wrap, **options):
    def one(state, rate, batch):
        step = pa.make_step(weighted, rule(rate), microbatch_size=size, **options)
        return step(state, batch)[0]

    def run(given, batches):
        state = pa.make_step(weighted, rule(given.rate), **options).init(given.params)
        for batch in batches:
            state = wrap(one)(state, given.rate, batch)
        return state.params

    return run


def sgd_by_hand(given, batches):
    params, moment = given.params, map_(torch.zeros_like, given.params)
    for batch in batches:
        moment = map_(lambda m, g: 0.9 * m + g, moment, grad(quotient)(params, batch))
        params = map_(lambda p, m: p - given.rate * m, params, moment)
    return params


def adam_by_hand(given, batches):
    params = given.params
    first = second = map_(torch.zeros_like, params)
    for t, batch in enumerate(batches, 1):
        g = grad(quotient)(params, batch)
        first = map_(lambda m, g: 0.9 * m + 0.1 * g, first, g)
        second = map_(lambda v, g: 0.999 * v + 0.001 * g * g, second, g)
        at = given.rate / (1 - 0.9**t)
        roots = map_(lambda v, by=1 - 0.999**t: (v / by).sqrt() + 1e-2, second)
        params = map_(lambda p, m, root, at=at: p - at * m / root, params, first, roots)
    return params


wraps = pytest.mark.parametrize("wrap", [lambda f: f, pa.remat], ids=["as it is", "rematerialised"])


def check(ours, theirs, at):
    """Backwards; forwards along everything at once; and number by number."""

    def by_numbers(f):
        return jacfwd(lambda r, t: f(Given(at.params, r, t)), (0, 1))(at.rate, at.theta)

    for transform in (lambda f: grad(f)(at), lambda f: jvp(f, (at,), (tangent(at),)), by_numbers):
        want = transform(theirs)
        Problem.compare(transform(ours), want, [want])


@pytest.mark.slow
@wraps
@examples(1 / 2)
@given(seeds(), st.sampled_from([None, 1, [2, 3], 2, ROWS + 3]), st.booleans())
def test_derivatives_go_through_updates_by_hand(wrap, seed, size, skip):
    at, batches = make(seed)
    nonfinite = "skip" if skip else "propagate"
    gradient = pa.grad(weighted, microbatch_size=size, nonfinite=nonfinite)
    check(outer(batches, descent(gradient, wrap)), outer(batches, descent(grad(quotient))), at)


RULES = {
    "sgd": (lambda rate: pa.sgd(rate, momentum=0.9), sgd_by_hand),
    "adam": (lambda rate: pa.adam(rate, eps=1e-2), adam_by_hand),
}


@pytest.mark.slow
@wraps
@pytest.mark.parametrize("rule", RULES)
@examples(1 / 4)
@given(seeds(), st.sampled_from([None, 1, 2, ROWS + 3]), st.booleans())
def test_derivatives_go_through_steps(wrap, rule, seed, size, scaled):
    make_rule, by_hand = RULES[rule]
    at, batches = make(seed)
    options = {"loss_scale": pa.static_loss_scale(2.0**9)} if scaled else {}
    check(outer(batches, steps(make_rule, size, wrap, **options)), outer(batches, by_hand), at)


def test_derivatives_through_steps_are_those_of_differences():
    """Central ones of our own values, along everything; and not what a constant weight has.

    They are off by ``c h**2``, of which those of ``2 h`` tell three times as much, and by the
    rounding of two values over ``h``.
    """
    at, batches = make(2)
    f = outer(batches, descent(pa.grad(weighted, microbatch_size=2)))
    constant = outer(batches, descent(partial(grad(quotient), cut_off=True)))

    def difference(h):
        there, back = (map_(lambda x, t, h=h: x + h * t, at, tangent(at)) for h in (h, -h))
        return (f(there) - f(back)) / (2 * h)

    near, far = difference(1e-4), difference(2e-4)
    slack = (far - near).abs() + 2**10 * U64 * (1 + f(at)) / 1e-4
    assert (jvp(f, (at,), (tangent(at),))[1] - near).abs() <= slack
    assert (jvp(constant, (at,), (tangent(at),))[1] - near).abs() > 2**10 * slack
    right, wrong = grad(f)(at).theta, grad(constant)(at).theta
    assert (wrong - right).norm() > 0.1 * right.norm()


@pytest.mark.slow
@pytest.mark.given_up("captured")
@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("captured", ["rate", "theta"])
def test_a_rematerialised_step_has_the_derivatives_of_what_it_captures(size, captured):
    at, batches = make(0)
    gradient = pa.grad(weighted, microbatch_size=size)

    def run(wrap, given, batches):
        def one(params, batch, rate):
            batch, rate = (batches[0], rate) if captured == "theta" else (batch, given.rate)
            return map_(lambda p, g: p - rate * g, params, gradient(params, batch))

        return wrap(one)(given.params, *map_(Tensor.detach, (batches[0], given.rate)))

    ours, plain = (outer(batches, partial(run, wrap)) for wrap in (pa.remat, lambda f: f))
    check(ours, plain, at)


sizes = pytest.mark.parametrize("size", [None, 2])
engines = pytest.mark.parametrize("engine", ["func", "autograd"])


@sizes
@engines
@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
@pytest.mark.parametrize("passed", [True, False], ids=["passed", "captured"])
def test_plain_autograd_follows_the_weights_of_samples_or_is_refused(
    size, engine, passed, nonfinite
):
    """A gradient and a step are followed; a stream is not."""
    at, batches = make(4)
    theta = at.theta[0].clone().requires_grad_()
    batch = batches[0] | ({"theta": theta} if passed else {"row": torch.arange(ROWS)})

    def loss(params, batch):
        return weighted(params, batch if passed else batch | {"theta": theta[batch["row"]]})

    squares = lambda grads: sum((g**2).sum() for g in optree.tree_leaves(grads))  # noqa: E731
    options = {"engine": engine, "nonfinite": nonfinite}
    got = pa.grad_and_value(loss, microbatch_size=size or ROWS, **options)(at.params, batch)
    by_hand = torch.func.grad_and_value(quotient)
    want = by_hand(at.params, batches[0] | {"theta": at.theta[0]})
    Problem.compare(map_(torch.detach, got), want, [want])
    found = torch.autograd.grad(squares(got), theta)[0]
    want = grad(lambda theta: squares(by_hand(at.params, batches[0] | {"theta": theta})))(theta)
    Problem.compare(found, want.detach(), [want.detach()])
    acc = pa.accumulator(loss, squares=True, **options)
    state = in_parts(acc, at.params, pa.microbatches(batch, size or ROWS))
    with pytest.raises(RuntimeError, match="no graph is kept"):
        squares(acc.finalize(state)).backward()
    if passed:
        step = pa.make_step(loss, pa.sgd(0.1), microbatch_size=size, noise=True, **options)
        assert once(step, at.params, batch)[1].loss.requires_grad


@pytest.mark.given_up("captured")
@sizes
@engines
@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
def test_a_step_whose_loss_captures_the_weights_of_samples_is_refused(size, engine, nonfinite):
    at, batches = make(4)
    theta = at.theta[0].clone().requires_grad_()

    def loss(params, batch):
        return weighted(params, batch | {"theta": theta[batch["row"]]})

    options = {"engine": engine, "nonfinite": nonfinite}
    step = pa.make_step(loss, pa.sgd(0.1), microbatch_size=size, noise=True, **options)
    with pytest.raises(RuntimeError, match="captures a tensor"):
        once(step, at.params, batches[0] | {"row": torch.arange(ROWS)})


def test_a_microbatch_of_no_weight_has_no_part_in_a_derivative_of_the_noise():
    """Its square is divided by no weight, and is not selected: its derivative is not either."""
    at, batches = make(5)
    step = pa.make_step(weighted, pa.sgd(0.1), microbatch_size=2, noise=True)

    def outer(params, batch):
        state, info = step(step.init(params), batch)
        noise = optree.tree_leaves(info.noise, namespace="pureaccum")
        return sum(x.square().sum() for x in (*state.params.values(), *noise))

    four = map_(lambda x: x[:4], batches[0]) | {"theta": at.theta[0, :4]}
    six = {k: torch.cat([x[:2], x[:2], x[2:]]) for k, x in four.items()}
    six["theta"][2:4] = 0
    thetas = torch.stack([six["theta"], torch.ones(6).double()])  # nobody knows of no member
    of_members = vmap(grad(outer), (None, {"x": None, "y": None, "theta": 0}))
    came = of_members(at.params, six | {"theta": thetas})
    want = grad(outer)(at.params, four)
    assert all(x.isfinite().all() for x in want.values())
    Problem.compare(map_(lambda x: x[0], came), want, [want])
