"""``plateau`` beside torch's ReduceLROnPlateau: the same bits, for any metrics."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from tests.draws import examples
from tests.optimizers import Copies


pytestmark = pytest.mark.parity
INF = math.inf
# Few different numbers, so that some are just as good as the best.
metrics = st.lists(
    st.sampled_from([math.nan, INF, -INF, 0.0, -0.0, 1.0, 1.0 - 1e-4, 0.9, -1.0])
    | st.floats(-2, 2),
    max_size=30,
)
settings = st.fixed_dictionaries(
    {
        "factor": st.sampled_from([0.0, 0.1, 0.5, 0.999]) | st.floats(0, 1, exclude_max=True),
        "patience": st.integers(0, 3),
        "threshold": st.sampled_from([0.0, 1e-4]) | st.floats(0, 1, exclude_max=True),
        "threshold_mode": st.sampled_from(["rel", "abs"]),
        "mode": st.sampled_from(["min", "max"]),
        "cooldown": st.integers(0, 3),
        "min_lr": st.sampled_from([0.0, 1e-3]),
        "eps": st.sampled_from([0.0, 1e-8, 1e-2]),
    }
)
BRISK = {"factor": 0.5, "patience": 1, "cooldown": 1, "min_lr": 0.05}
FALLING = [3.0, 2.0, 2.5, 2.5, 2.5, math.nan, 1.0, 1.0, INF, 1.0, 1.0, 1.0, 1.0]


def theirs(lr, their, seen):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=lr)
    scheduler, found = ReduceLROnPlateau(optimizer, **their), []
    for metric in [None, *seen]:
        if metric is not None:
            scheduler.step(metric)
        counts = scheduler.num_bad_epochs, scheduler.cooldown_counter
        found.append((optimizer.param_groups[0]["lr"], float(scheduler.best), *counts))
    return found


def states(falling, seen):
    found = [falling.init()]
    for metric in seen:
        found.append(falling.update(found[-1], metric))
    return found


def numbers(state):
    assert [x.dtype for x in state] == [torch.float64] * 2 + [torch.int64] * 2
    assert all(x.shape == () for x in state)
    return tuple(x.item() for x in state)


@given(st.sampled_from([1.0, 0.1, 1e-3]), settings, metrics)
@example(0.1, {}, [1.0] * 40)
@example(0.1, {"mode": "max", "patience": 0}, [math.nan, 1.0, math.nan, math.nan, 2.0])
@example(1.0, {"patience": 0, "factor": 0.5, "eps": 0.5}, [1.0, 1.0, 1.0])
@example(0.1, {"patience": 0, "min_lr": 0.03}, [1.0] * 4)
@example(1.0, {"patience": 0}, [-INF, -INF, -5.0])
def test_the_states_are_those_of_torch(lr, knobs, seen):
    """A metric of NaN is never better, and never the best."""
    got = [numbers(state) for state in states(pa.plateau(lr, **knobs), seen)]
    assert got == theirs(lr, knobs, seen)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int64, int])
def test_a_metric_is_a_number_or_a_tensor(dtype):
    """As torch reads it: ``float(metric)``."""
    seen = [3, 2, 2, 2, 1, 1, 1]
    if dtype is not int:
        seen = [torch.tensor(x / 3 if dtype.is_floating_point else x, dtype=dtype) for x in seen]
    knobs = {"patience": 0, "threshold": 0.0}
    got = [numbers(state) for state in states(pa.plateau(0.1, **knobs), seen)]
    assert got == theirs(0.1, knobs, seen)


def test_a_step_takes_the_rate_of_a_tracker():
    """The rate of a state of training is the tracker's, and the parameters are torch's."""
    falling, step = pa.plateau(0.5, factor=0.5, patience=0), pa.make_step(mean, pa.sgd(0.5))
    tracker, state = falling.init(), step.init(torch.tensor(4.0))
    x = nn.Parameter(torch.tensor(4.0))
    optimizer = torch.optim.SGD([x], lr=0.5)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for metric in (1.0, 1.0, 0.5, 0.5, 0.5):
        tracker = falling.update(tracker, metric)
        state = state._replace(opt_state=state.opt_state._replace(lr=tracker.lr))
        state, _ = step(state, torch.ones(2))
        scheduler.step(metric)
        optimizer.zero_grad()
        mean(x, torch.ones(2)).backward()
        optimizer.step()
        assert torch.equal(state.params, x.detach())


def mean(params, batch):
    return ((params - batch) ** 2).mean()


# As a pure function ---------------------------------------------------------------------


def test_no_argument_changes_and_no_two_states_share_memory():
    lr, seen = torch.tensor(0.5, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64)
    falling = pa.plateau(lr, patience=0)
    found = [falling.init()]
    for _ in range(3):
        with unchanged([*found], lr, seen):
            found.append(falling.update(found[-1], seen))
    places = [x.data_ptr() for x in (lr, seen, *[x for state in found for x in state])]
    assert len(set(places)) == len(places)


def test_a_state_keeps_no_graph_of_its_metrics():
    w = torch.tensor(2.0, requires_grad=True)
    falling = pa.plateau(0.5)
    assert not any(x.requires_grad for x in falling.update(falling.init(), w * w))


@examples(1 / 4)
@given(st.lists(st.lists(st.sampled_from(FALLING), min_size=6, max_size=6), min_size=2, max_size=3))
def test_members_have_rates_of_their_own(seen):
    rates = torch.arange(1, len(seen) + 1).double()
    state = torch.func.vmap(lambda lr: pa.plateau(lr, **BRISK).init())(rates)
    for metric in torch.tensor(seen).T:
        state = torch.func.vmap(pa.plateau(1.0, **BRISK).update)(state, metric)
    for i, member in enumerate(pa.unstack(state)):
        alone = states(pa.plateau(float(i + 1), **BRISK), torch.tensor(seen[i]))[-1]
        assert_trees_bitwise_equal(member, alone)


def test_an_update_compiles_into_one_graph():
    torch.compiler.reset()
    falling = pa.plateau(0.4, **BRISK)
    compiled = torch.compile(falling.update, fullgraph=True, backend="aot_eager")
    state = compiled(falling.init(), torch.tensor(FALLING[0]))
    with torch.compiler.set_stance("fail_on_recompile"):
        for metric in FALLING[1:]:
            state = compiled(state, torch.tensor(metric))
    assert_trees_bitwise_equal(state, states(falling, torch.tensor(FALLING))[-1])


def test_a_compiled_update_takes_numbers():
    torch.compiler.reset()
    falling = pa.plateau(0.4, **BRISK)
    compiled = torch.compile(falling.update, fullgraph=True, backend="aot_eager")
    state = falling.init()
    for metric in FALLING:
        state = compiled(state, metric)
    assert_trees_bitwise_equal(state, states(falling, FALLING)[-1])


def test_a_rate_may_be_differentiated():
    def last(lr):
        return states(pa.plateau(lr, factor=0.5, patience=0), [1.0, 1.0, 0.5, 1.0])[-1].lr

    lr = torch.tensor(0.5, dtype=torch.float64)
    assert torch.func.grad(last)(lr) == 0.25
    assert torch.func.jvp(last, (lr,), (torch.ones_like(lr),)) == (0.125, 0.25)


@pytest.mark.parametrize("place", ["metric", "lr", "both"])
def test_a_state_lies_where_one_would_wait_and_nothing_waits(place):
    """On the meta device, where nobody can read a number."""
    device = {"metric": "cpu"}.get(place, "meta")
    falling = pa.plateau(torch.tensor(0.5, device=device))
    metric = torch.tensor(1.0, device="cpu" if place == "lr" else "meta")
    state = falling.init()
    with Copies() as copies:
        for _ in range(2):
            state = falling.update(state, metric)
        state = falling.update(state, 1.0)
    assert {x.device.type for x in state} == {"meta"}
    assert not any(copy.waits for copy in copies.seen)
