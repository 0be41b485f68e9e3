"""``lbfgs`` is bit for bit ``torch.optim.LBFGS`` in float64, iteration by iteration.

As long as all numbers and products of them are finite: where they are not, torch's class goes on,
and ours does not.
"""

import inspect
import math
import random
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import pureaccum as pa
from pureaccum._optim.line_search import Point, strong_wolfe
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import seeds
from tests.draws import examples, generator, slices, take
from tests.optimizers import leaves


pytestmark = [pytest.mark.parity, pytest.mark.given_up("lbfgs and sam")]
SIZES = [3, 1, 4, 2, 3]  # five ragged microbatches
ROWS = sum(SIZES)
WIDE = {
    "max_iter": 20,
    "max_eval": 100,
    "tolerance_grad": 0.0,
    "tolerance_change": 0.0,
    "history_size": 10,
}
Loss = Callable[[Any], Tensor]


class Problem(NamedTuple):
    """A function to minimise, from where, and the learning rate of steps without a search."""

    loss: Loss
    params: dict[str, Tensor]
    lr: float


def randn(*shape, seed, dtype=torch.float64):
    return torch.randn(shape, generator=generator(seed), dtype=dtype)


def rosenbrock(seed):
    def loss(params):
        x = torch.cat([params["a"], params["b"].flatten()])
        return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()

    return Problem(loss, {"a": randn(1, seed=seed), "b": randn(2, 1, seed=seed + 1)}, 1e-3)


def least_squares(seed):
    x, y = randn(ROWS, 4, seed=seed), randn(ROWS, 3, seed=seed + 1)
    params = {"b": randn(3, seed=seed + 2), "w": randn(4, 3, seed=seed + 3)}
    return Problem(lambda p: ((x @ p["w"] + p["b"] - y) ** 2).mean(), params, 0.5)


def complex_squares(seed):
    """Complex parameters, and a real one; one of them is a conjugate."""
    x, y = (randn(ROWS, 4, seed=seed + i, dtype=torch.complex128) for i in range(2))
    params = {
        "c": randn(4, seed=seed + 2, dtype=torch.complex128).conj(),
        "r": randn(1, seed=seed + 3),
        "w": randn(4, 4, seed=seed + 4, dtype=torch.complex128),
    }

    def loss(p):
        return (x @ p["w"] + p["c"] - p["r"] * y).abs().square().mean()

    return Problem(loss, params, 0.3)


def rows(seed):
    return {"x": randn(ROWS, 4, seed=seed), "y": randn(ROWS, 2, seed=seed + 1)}


def make_network(seed):
    shapes = {"b1": (7,), "b2": (), "w1": (4, 7), "w2": (7, 2)}
    return {name: randn(*shape, seed=seed + i) for i, (name, shape) in enumerate(shapes.items())}


def errors(params, batch):
    """A squared error for each sample."""
    hidden = torch.tanh(batch["x"] @ params["w1"] + params["b1"])
    return ((hidden @ params["w2"] + params["b2"] - batch["y"]) ** 2).mean(1)


def network(seed):
    batch = rows(seed)
    return Problem(lambda p: errors(p, batch).mean(), make_network(seed), 0.1)


def mixed(seed):
    """Leaves of three dtypes: the vector is in the widest."""
    kinds = {"b1": torch.bfloat16, "w2": torch.float32}

    def wide(params):
        return {name: x.double() for name, x in params.items()}

    params = {name: x.to(kinds.get(name, x.dtype)) for name, x in make_network(seed).items()}
    return Problem(lambda p: network(seed).loss(wide(p)), params, 0.1)


PROBLEMS = {
    "Rosenbrock": rosenbrock,
    "least squares": least_squares,
    "complex squares": complex_squares,
    "network": network,
    "mixed": mixed,
}


class Beside:
    """``torch.optim.LBFGS``, with a closure that counts, and looks at what it gives."""

    def __init__(self, backward, params, **settings):
        self.params = {name: x.detach().resolve_conj().clone() for name, x in params.items()}
        for x in self.params.values():
            x.requires_grad_()
        self.backward, self.evaluations, self.finite = backward, 0, True
        self.optimizer = torch.optim.LBFGS(self.params.values(), **settings)

    def closure(self):
        self.optimizer.zero_grad()
        value = self.backward(self.params)
        self.evaluations += 1
        seen = [value, *self.params.values(), *(x.grad for x in self.params.values())]
        # and products of them: ours does not remember what no number holds
        self.finite &= all(bool((x.detach().abs() < 1e75).all()) for x in seen if x is not None)
        return value.detach()

    def step(self):
        return self.optimizer.step(self.closure)

    @property
    def iterations(self):
        return self.optimizer.state[next(iter(self.params.values()))]["n_iter"]

    def assert_same(self, params, state, first):
        assert_trees_bitwise_equal(params, {n: x.detach() for n, x in self.params.items()})
        assert state.iterations == self.iterations
        assert state.evaluations == self.evaluations
        assert state.value == first.double()


def backward(loss):
    def run(params):
        value = loss(params)
        value.backward()
        return value

    return run


def check(problem, calls, **settings):
    """Both side by side, as long as all is finite; gives where they end."""
    beside = Beside(backward(problem.loss), problem.params, **settings)
    func = pa.grad_and_value(problem.loss, batch_argnums=(), engine="auto")
    opt, params = pa.lbfgs(**settings), problem.params
    state = opt.init(params)
    for _ in range(calls):
        first = beside.step()
        if not beside.finite:
            break
        params, state = opt.apply(func, state, params)
        beside.assert_same(params, state, first)
    return state, beside


# The property ------------------------------------------------------------------------------------


settings = st.fixed_dictionaries(
    {
        "max_iter": st.integers(1, 12),
        "max_eval": st.integers(1, 30),
        "tolerance_grad": st.sampled_from([0.0, 1e-7, 1e-2, 0.5]),
        "tolerance_change": st.sampled_from([0.0, 1e-9, 1e-3]),
        "history_size": st.integers(1, 5),
    }
)


@pytest.mark.parametrize("search", ["strong_wolfe", None])
@pytest.mark.parametrize("name", PROBLEMS)
@examples(1)
@given(settings, seeds(), st.integers(1, 6), st.sampled_from([1e-2, 0.5, 1.0, 3.0]), st.booleans())
def test_every_call_has_the_bits_of_the_class(name, search, given, seed, calls, lr, wild):
    """Without a search at the problem's rate, or at one of which most are far too large."""
    problem = PROBLEMS[name](seed % 2**32)
    lr = lr if search or wild else problem.lr
    check(problem, calls, lr=lr, line_search_fn=search, **given)


@pytest.mark.parametrize("search", ["strong_wolfe", None])
@pytest.mark.parametrize("name", PROBLEMS)
def test_a_long_run_forgets_as_the_class_does(name, search):
    """Many more iterations than are remembered, until nothing changes any more or for a hundred."""
    problem = PROBLEMS[name](7)
    given = WIDE | {"history_size": 4, "line_search_fn": search}
    state, _ = check(problem, 5, lr=1.0 if search else problem.lr, **given)
    assert state.iterations > 8


# Rules, one by one -------------------------------------------------------------------------------


def test_all_ends_of_a_call_are_those_of_the_class():
    """The rule that is asked for is the one that ends the call: no other does at these settings."""
    for search in ("strong_wolfe", None):
        of = {"line_search_fn": search, "lr": 1.0 if search else 0.1} | WIDE
        state, _ = check(network(0), 1, **of | {"max_iter": 3})
        assert (state.iterations, state.applied) == (3, True)
        state, beside = check(network(0), 1, **of | {"max_eval": 7})
        assert state.iterations < 20
        assert beside.evaluations == 7
        state, _ = check(network(0), 1, **of | {"tolerance_grad": 0.3})
        assert 0 < state.iterations < 20
        assert state.gradient.abs().max() > 0.3  # before the last move
        state, _ = check(network(0), 1, **of | {"tolerance_change": 0.05})
        assert 0 < state.iterations < 20
        # the direction leads down by less
        state, beside = check(network(0), 2, **of | {"tolerance_change": 1e3})
        assert (state.iterations, state.evaluations, state.applied) == (2, 2, True)
        # at a minimum already
        state, beside = check(network(0), 2, **of | {"tolerance_grad": 1e3})
        assert (state.iterations, state.evaluations, state.applied) == (0, 2, True)


@pytest.mark.slow
@pytest.mark.parametrize("max_eval", [1, 2, 3])
def test_searches_without_enough_evaluations_end_where_those_of_the_class_do(max_eval):
    """At the lower one of two points, or at none that is lower: then nothing has moved."""
    moved = set()
    for seed in range(20):
        given = WIDE | {"max_eval": max_eval, "max_iter": 1, "line_search_fn": "strong_wolfe"}
        state, _ = check(rosenbrock(seed), 3, lr=3.0, **given)
        moved.add(bool(state.applied))
        assert bool(state.applied) == bool(state.move.abs().max() > 0)
    assert max_eval > 1 or moved == {False, True}


def both_searches(seed, most, downs, t):
    """Ours and the class's, on numbers that are drawn for each point."""
    theirs = sys.modules["torch.optim.lbfgs"]._strong_wolfe
    d, seen = torch.ones(1, dtype=torch.float64), []

    def at(t):
        drawn = random.Random(hash((seed, float(t))))
        seen.append(float(t))
        value = drawn.choice([-2, *[-1] * downs, 0, 0, 1, 1e-4])
        slope = drawn.choice([*[-2, -1] * downs, -0.9, 0, 1])
        return float(value), torch.full_like(d, slope)

    def point(t):
        value, gradient = at(t)
        return Point(t, value, gradient, gradient.dot(d))

    gradient = torch.full_like(d, -1.0)
    start = Point(0, 0.0, gradient, gradient.dot(d))
    came, mine = strong_wolfe(point, start, t, 1.0, most), seen.copy()
    seen.clear()
    found = theirs(lambda x, t, d: at(t), None, t, d, 0.0, gradient, start.slope, max_ls=most)
    known = [*map(math.isnan, seen), True].index(True)
    assert mine[:known] == seen[:known]
    if known == len(seen):  # else a cubic had no lowest point, of which ours takes the middle
        assert (came.value, came.gradient, came.t, len(mine)) == found


@examples(1)
@given(st.integers(0, 2**20), st.integers(0, 12), st.sampled_from([0.5, 1.0, torch.tensor(0.3)]))
def test_a_search_is_that_of_the_class_on_any_numbers(seed, most, t):
    """Whole numbers of no function: every tie and every turn that two numbers a point can force."""
    for i in range(20):
        both_searches(seed + i, most, 1 + i % 4, t)


# Microbatches ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_five_ragged_microbatches_have_the_bits_of_a_loop_in_the_closure():
    """A sum over samples, in the order of the samples."""
    batch, params = rows(3), make_network(4)

    def accumulate(params):
        total = torch.zeros((), dtype=torch.float64)
        for part in slices(SIZES):
            value = errors(params, take(batch, part)).sum()
            value.backward()
            total += value.detach()
        return total

    options = {"microbatch_size": SIZES, "reduction": "sum", "engine": "auto"}
    fn = pa.grad_and_value(lambda p, b: errors(p, b).sum(), **options)
    for search in ("strong_wolfe", None):
        given = {"lr": 1.0 if search else 1e-2, "history_size": 5, "line_search_fn": search}
        beside = Beside(accumulate, params, **given)
        opt, new = pa.lbfgs(**given), params
        state = opt.init(params)
        for _ in range(3):
            first = beside.step()
            new, state = opt.apply(lambda p: fn(p, batch), state, new)
            beside.assert_same(new, state, first)


def test_five_ragged_microbatches_go_where_the_full_batch_goes():
    """Means of microbatches differ from the full batch's in the last places; iterations too.

    The bound is that of gradients end to end, √u of float64, of the whole way.
    """
    batch, params = rows(5), make_network(6)
    fn = pa.grad_and_value(lambda p, b: errors(p, b).mean(), microbatch_size=SIZES, engine="auto")
    for search in ("strong_wolfe", None):
        given = WIDE | {"lr": 1.0 if search else 0.1, "max_iter": 1, "line_search_fn": search}
        beside = Beside(backward(lambda p: errors(p, batch).mean()), params, **given)
        opt, new, way = pa.lbfgs(**given), params, float(pa.global_norm(params))
        state = opt.init(params)
        for _ in range(12):
            first = beside.step()
            new, state = opt.apply(lambda p: fn(p, batch), state, new)
            way += float(state.move.norm())
            off = pa.global_norm({n: x - beside.params[n].detach() for n, x in new.items()})
            assert off <= math.sqrt(2.0**-53) * way
            assert abs(state.value - first) <= math.sqrt(2.0**-53) * first
            assert state.evaluations == beside.evaluations


# Settings ----------------------------------------------------------------------------------------


def test_settings_and_defaults_are_those_of_the_class_but_for_two():
    ours, theirs = (
        {name: x.default for name, x in inspect.signature(it).parameters.items()}
        for it in (pa.lbfgs, torch.optim.LBFGS.__init__)
    )
    del theirs["self"], theirs["params"]
    theirs.pop("maximize", None)  # since torch 2.15; to minimize is what pa.lbfgs is for
    assert theirs | {"history_size": 10, "line_search_fn": "strong_wolfe"} == ours
    problem = rosenbrock(1)
    beside = Beside(
        backward(problem.loss), problem.params, history_size=10, line_search_fn="strong_wolfe"
    )
    opt, first = pa.lbfgs(), beside.step()
    func = pa.grad_and_value(problem.loss, batch_argnums=())
    beside.assert_same(*opt.apply(func, opt.init(problem.params), problem.params), first)


def test_one_iteration_has_a_search_by_default():
    """torch's own default leaves it one evaluation, at params."""
    problem = rosenbrock(2)
    func, opt = pa.grad_and_value(problem.loss, batch_argnums=()), pa.lbfgs(3.0, max_iter=1)
    _, state = opt.apply(func, opt.init(problem.params), problem.params)
    assert state.evaluations > 2
    check(problem, 4, lr=3.0, max_iter=1, max_eval=25, line_search_fn="strong_wolfe")


def rates():
    schedule = pa.join_schedules([pa.linear_warmup(0.5, 2, 0.1), pa.cosine_decay(0.5, 5, 0.1)], [3])
    return {
        "tensor": (torch.tensor(0.25), lambda n: 0.25),
        "schedule": (schedule, lambda n: schedule(torch.tensor(n)).item()),
        "replaced": (0.1, lambda n: 0.1 * (n + 1)),
    }


@pytest.mark.parametrize("search", ["strong_wolfe", None])
@pytest.mark.parametrize("kind", rates())
def test_every_kind_of_learning_rate_is_the_one_that_counts(kind, search):
    problem, (lr, at) = network(2), rates()[kind]
    given = {"max_iter": 2, "max_eval": 25, "history_size": 4, "line_search_fn": search}
    beside = Beside(backward(problem.loss), problem.params, lr=at(0), **given)
    func = pa.grad_and_value(problem.loss, batch_argnums=(), engine="auto")
    opt, params = pa.lbfgs(lr, **given), problem.params
    state = opt.init(params)
    for n in range(6):
        beside.optimizer.param_groups[0]["lr"] = at(n)
        if kind == "replaced":
            state = state._replace(lr=torch.tensor(at(n), dtype=torch.float64))
        first = beside.step()
        params, state = opt.apply(func, state, params)
        beside.assert_same(params, state, first)
        assert state.steps == n + 1
    assert leaves(state.lr) == ([state.lr] if kind == "replaced" else [])
