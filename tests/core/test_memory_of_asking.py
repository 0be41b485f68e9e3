"""The first call of a loss, which asks it, holds no more at its peak than one that does not ask.

What is asked runs without recording, and is gone before the microbatch's own graph is there. A
dispatch mode would see each tensor, and nobody asks under one: torch's profiler counts the bytes.
"""

import weakref

import pytest
import torch
from torch import nn
from torch.func import functional_call

import pureaccum as pa
from tests.problems import forget_losses


pytestmark = [pytest.mark.bounds, pytest.mark.promise("refused")]
PARTS, WIDTH = 4, 64
AUTO = pytest.param("auto", marks=pytest.mark.given_up("auto engine"))
STATE = torch.get_rng_state().numel()  # bytes of where a generator stands, which is kept


def layers(*more):
    torch.manual_seed(0)
    each = (layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU(), *more))
    return nn.Sequential(*each)


NETWORKS = {
    "float32": layers,
    "dropout": lambda: layers(nn.Dropout(0.1)),  # asked where nothing is random
    "bfloat16": lambda: layers().bfloat16(),  # asked in float64, too
}


def run_of(way, name, check):
    net = NETWORKS[name]()
    params = {key: p.detach() for key, p in net.named_parameters()}
    x = torch.randn(64 * PARTS, WIDTH, dtype=next(net.parameters()).dtype)

    loss = lambda params, x: (functional_call(net, params, (x,)).float() ** 2).mean()  # noqa: E731
    options = {"microbatch_size": 64, "check": check}
    if way == "value":
        value = pa.value(loss, **options)
        return lambda: value(params, x)
    if way in ("auto", "func", "autograd"):
        grad = pa.grad(loss, engine=way, **options)
        return lambda: grad(params, x)
    step = pa.make_step(loss, pa.sgd(0.1), donate=way == "donated step", **options)
    state = step.init(params)
    return lambda: step(state, x)


def peak(run):
    """The most bytes of a CPU that were alive at once, beyond what was there before."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profile:
        run()
    live = most = 0
    events = [*profile.profiler.kineto_results.events()]
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("way", ["value", AUTO, "func", "autograd", "step", "donated step"])
def test_the_first_call_holds_no_more_than_one_that_does_not_ask(way, name):
    forget_losses()  # or it would not be the first
    asking, plain = (peak(run_of(way, name, check)) for check in (True, False))
    # without a graph, what a microbatch holds shows, and that is the same and a copy of its samples
    copy = 64 * WIDTH * 4 if way == "value" else 0
    assert asking <= plain + STATE + copy
    assert plain > 4 * 64 * WIDTH  # it was measured


@pytest.mark.mechanism
def test_what_is_joined_is_gone_before_the_loss_is_recorded():
    """A process keeps the pages that lie between it and a graph."""
    x, joined, alive = torch.randn(64, 3), [], []

    def loss(w, part):
        if torch.is_grad_enabled():
            alive.append([each() for each in joined if each() is not None])
        elif part.untyped_storage().data_ptr() != x.untyped_storage().data_ptr():
            joined.append(weakref.ref(part))
        return (part @ w).square().mean()

    step = pa.make_step(loss, pa.sgd(0.1), microbatch_size=16)
    step(step.init(torch.ones(3)), x)
    assert joined
    assert len(alive) >= 4
    assert not any(alive)
