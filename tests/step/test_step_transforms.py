"""A step under ``torch.compile``, and differentiated; under ``vmap`` see ``test_ensembles.py``.

All in float64, and compared with the step at eager top level. There the optimizers are torch's
kernels and here the same formulas, which round in another order; so a number may be off by
``sqrt(u)`` of the size of its leaf, which leaves eight decimals to find a fault in.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import optree
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from pureaccum.testing.strategies import seeds
from tests.draws import examples, generator
from tests.problems import in_a_window
from tests.step.problems import (
    ROOT_U64,
    WARMUP,
    assert_close,
    counting,
    leaves,
    loss,
    make_batch,
    make_params,
    poisoned,
)
from tests.tables import every_night


pytestmark = [pytest.mark.transforms, pytest.mark.promise("compiled")]
U64 = 2.0**-53


# torch.compile ----------------------------------------------------------------------------


class Case(NamedTuple):
    """What a step is made of, and what it begins with."""

    loss: Callable[..., Any]
    optimizer: Any
    options: dict[str, Any]
    first: tuple[Any, ...]

    def step(self, **options):
        return pa.make_step(self.loss, self.optimizer, microbatch_size=2, **self.options, **options)


def plain(optimizer, **options):
    return Case(loss, optimizer, options, (make_params(),))


def normed(buffers):
    torch.manual_seed(0)
    fn = pa.functional(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double())

    def loss(params, batch, buffers):
        out, new_buffers = fn.apply(params, buffers, batch["x"])
        return ((out - batch["y"]) ** 2).sum(-1).mean(), (new_buffers, out)

    options = {"has_aux": True, "buffers": buffers, "check": False}
    return Case(loss, pa.sgd(0.1), options, (fn.params, fn.buffers))


CLIPPED = pa.chain(
    pa.clip_by_global_norm(0.5),
    pa.partition({"a": pa.sgd(0.1), "b": pa.adam(WARMUP)}, lambda p: "ab"[p == "w"]),
)
BF16 = pa.Policy(param=torch.float64, compute=torch.bfloat16)
GROWING, STATIC = pa.dynamic_loss_scale(8.0, growth_interval=1), pa.static_loss_scale(4.0)
CASES = {
    "sgd with a schedule": plain(pa.sgd(WARMUP, momentum=0.9, weight_decay=0.1)),
    "adamw": plain(pa.adamw(0.1, amsgrad=True)),
    "clipped and partitioned": plain(CLIPPED),
    "loss scale": plain(pa.sgd(0.1), loss_scale=GROWING),
    "skip": plain(pa.sgd(0.1), nonfinite="skip", loss_scale=STATIC),
    "keys": plain(pa.sgd(0.1), keys=True),
    "bf16": plain(pa.sgd(0.1), policy=BF16),
    # Its microbatches do not go together, so the operations are the same ones.
    "bf16, skip": plain(pa.sgd(0.1), policy=BF16, nonfinite="skip"),
    "sequential": normed("sequential"),
    "pooled": normed("pooled"),
}
OWN = ("loss scale", "keys", "bf16, skip", "sequential", "pooled")


def compiled(function):
    """One graph or an error, and how many were made so far."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(len(graphs))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend=backend), graphs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "own"),
    every_night(
        [*((name, False) for name in CASES), *((name, True) for name in OWN)],
        but=[("adamw", False)],
    ),
)
def test_a_whole_run_is_one_graph(name, own):
    """Good steps and bad ones, with other scales, rates and counts, and nothing is recompiled.

    A graph of the user's own holds each microbatch, and that of a step that compiles itself a scan.
    """
    case = CASES[name]
    step = case.step()
    ours = eager = step.init(*case.first, seed=3)
    if own:
        settings, graphs = counting()
        function, batch = case.step(compile=settings), make_batch(rows=8)
        assert function.form(ours, batch) == "scan"
    else:
        (function, graphs), batch = compiled(step), make_batch(rows=4 if len(case.first) > 1 else 3)
    bad, made = poisoned(batch, -1), 0
    for i, part in enumerate((batch, batch, bad, batch)):
        before = ours
        with unchanged(before, part):
            ours, info = function(ours, part)
        eager, what = step(eager, part)
        made = made or len(graphs)
        assert_close((ours, info), (eager, what))
        assert bool(info.applied) is (part is not bad or bool(info.skipped))
        if not info.applied:
            assert_trees_bitwise_equal(ours[:3], before[:3])
        assert ours.attempts == i + 1
    assert len(graphs) == made


@pytest.mark.nightly
def test_a_stream_of_a_step_is_one_graph():
    scaling = pa.dynamic_loss_scale()
    step = plain(pa.sgd(WARMUP), loss_scale=scaling, keys=True, nonfinite="skip").step()
    batch = make_batch()
    run = partial(in_a_window, step)
    function, _ = compiled(run)
    bad = make_batch(5, 1)
    bad["y"][0] = torch.inf
    ours = eager = step.init(make_params(), seed=3)
    for parts in ([batch, make_batch(6, 1)], [batch, bad]):
        (ours, info), (eager, what) = function(ours, parts), run(eager, parts)
        assert_close((ours, info), (eager, what))
        assert info.applied
        assert info.skipped == (parts[-1] is bad)


@pytest.mark.slow
def test_a_schedule_in_python_numbers_says_so():
    """It would be a constant of the graph."""
    step = plain(pa.sgd(lambda count: 0.1)).step()
    function, _ = compiled(step)
    state, batch = step.init(make_params()), make_batch()
    assert step(state, batch)[1].applied
    with pytest.raises(Exception, match="make a constant of the graph"):
        function(state, batch)


# Derivatives ------------------------------------------------------------------------------


RULES = {
    "sgd": lambda lr: pa.sgd(lr, momentum=0.9, weight_decay=0.1),
    "nesterov": lambda lr: pa.sgd(lr, momentum=0.5, nesterov=True),
    "adamw": lambda lr: pa.adamw(lr, eps=1e-2),
    "amsgrad": lambda lr: pa.adam(lr, eps=1e-2, amsgrad=True),
    "clipped sgd": lambda lr: pa.chain(pa.clip_by_global_norm(0.3), pa.sgd(lr, momentum=0.9)),
    "clipped adamw": lambda lr: pa.chain(pa.clip_by_global_norm(0.3), pa.adamw(lr, eps=1e-2)),
    "a schedule": lambda lr: pa.sgd(pa.linear_warmup(lr, 2, 0.05)),
}


def after_two_steps(rule, size, options):
    """The loss on another batch, a function of the learning rate and the first parameters."""
    batches, other = [make_batch(0), make_batch(1)], make_batch(2, 4)

    def run(lr, params):
        step = pa.make_step(loss, rule(lr), microbatch_size=size, **options)
        state = step.init(params, seed=1)
        for batch in batches:
            state, _ = step(state, batch)
        return loss(state.params, other)

    return run


@pytest.mark.promise("closure")
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@examples(1 / 10)
@given(
    seed=seeds(),
    size=st.sampled_from([None, 1, 2]),
    options=st.sampled_from(
        [{}, {"keys": True}, {"nonfinite": "skip"}, {"loss_scale": pa.static_loss_scale(2.0**10)}]
    ),
)
@example(seed=17020, size=None, options={})
def test_derivatives_through_two_steps_are_those_of_differences(rule, size, options, seed):
    """Backwards and forwards, beside central differences of the eager run.

    A central difference is off by ``c * h**2``, which those of ``2 * h`` and ``4 * h`` tell (one of
    them alone may be close by chance: clipping sets in between), and by the rounding of its two
    values, some units in the last place over ``h``.
    """
    run = after_two_steps(rule, size, options)
    at = torch.tensor(0.1, dtype=torch.float64), make_params(seed)
    g = generator(seed + 7)
    along = (
        torch.ones((), dtype=torch.float64),
        {name: torch.randn(x.shape, generator=g).double() for name, x in at[1].items()},
    )

    def moved(h):
        return run(*optree.tree_map(lambda x, t: x + h * t, at, along))

    def difference(h):
        return (moved(h) - moved(-h)) / (2 * h)

    h = 5e-5
    near, *far = (difference(k * h) for k in (1, 2, 4))
    value = run(*at)
    slack = max((near - x).abs() for x in far) + 2**10 * U64 * (1 + value) / h

    grads = torch.func.grad(run, (0, 1))(*at)
    pairs = zip(leaves(grads), leaves(along), strict=True)
    backwards = sum((x * t).sum() for x, t in pairs)
    same_value, forwards = torch.func.jvp(run, at, along)
    assert (backwards - near).abs() <= slack
    size_of = sum(x.norm() * t.norm() for x, t in zip(leaves(grads), leaves(along), strict=True))
    assert (forwards - backwards).abs() <= ROOT_U64 * size_of
    assert (same_value - value).abs() <= ROOT_U64 * value
    assert grads[0] != 0


@pytest.mark.promise("closure")
def test_a_step_not_applied_has_the_derivative_of_the_identity():
    """Selected and never multiplied: what was not taken brings no NaN."""
    bad = poisoned(make_batch(), 0)

    def run(lr, params):
        step = pa.make_step(loss, pa.sgd(lr), microbatch_size=2)
        state, _ = step(step.init(params), bad)
        return loss(state.params, make_batch())

    lr, params = torch.tensor(0.1, dtype=torch.float64), make_params()
    got = torch.func.jvp(run, (lr, params), (torch.ones_like(lr), params))[1]
    want = torch.func.jvp(lambda p: loss(p, make_batch()), (params,), (params,))[1]
    assert torch.equal(got, want)


@pytest.mark.promise("closure")
def test_many_learning_rates_are_differentiated_at_once():
    """vmap of grad through a step, as a search for a learning rate would."""
    run = after_two_steps(RULES["adamw"], 2, {})
    rates = torch.tensor([0.01, 0.1, 0.3], dtype=torch.float64)
    params = make_params()
    many = torch.func.vmap(torch.func.grad(run), (0, None))(rates, params)
    assert_close(many, torch.stack([torch.func.grad(run)(rate, params) for rate in rates]))
