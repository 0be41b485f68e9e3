"""A loss is asked whether it may be cut, and that changes no bit, no draw and no sum."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pureaccum as pa
from pureaccum import CoupledLossError
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from tests.problems import in_parts, nobody_was_asked
from tests.runs import RUNS


pytestmark = [
    pytest.mark.purity,
    pytest.mark.promise("refused"),
    pytest.mark.promise("purity"),
    pytest.mark.usefixtures(nobody_was_asked.__name__),
]
SIZE = 4
ENGINES = ("auto", "func", "autograd")
Run = Callable[[], Any]


def params():
    return {"w": torch.linspace(-1, 1, 15).reshape(5, 3), "b": torch.tensor([0.5, -1.0, 0.25])}


def batch(rows=11):
    random = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 5, generator=random)
    return {
        "x": x,
        "y": torch.arange(rows) % 3,
        "mask": torch.arange(3) <= torch.arange(rows)[:, None] % 3,
    }


def errors(params, batch):
    return (batch["x"] @ params["w"] + params["b"] - batch["y"][:, None]) ** 2


def fits(params, batch):
    return errors(params, batch).mean()


def coupled(params, batch):
    return (errors(params, batch) * batch["mask"]).sum() / batch["mask"].sum()


# What asks -------------------------------------------------------------------------------


def once_more(name, loss, **options):
    return partial(RUNS[name], loss, params(), batch(), size=SIZE, **options)


def stepping(loss, stream=False, **options):
    step = pa.make_step(loss, pa.adamw(0.1), microbatch_size=None if stream else SIZE, **options)
    state, rows = step.init(params()), batch()

    def run():
        nonlocal state
        parts = [*pa.microbatches(rows, SIZE)]
        state, info = step.window(state, parts) if stream else step(state, rows)
        return [x.clone() for x in (*state.params.values(), info.loss, info.grad_norm)]

    return run


WAYS = {
    name: partial(once_more, name)
    for name in (
        *("grad_and_value", "value", "value of a stream"),
        *("accumulator", "donated accumulator"),
    )
} | {
    "step": stepping,
    "donated step": partial(stepping, donate=True),
    "stream": partial(stepping, stream=True),
    "donated stream": partial(stepping, stream=True, donate=True),
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
engines = pytest.mark.parametrize("engine", ENGINES)


# Of a loss that fits ---------------------------------------------------------------------


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x


class Averaging(nn.Module):
    """It puts another tensor in the place of its buffer."""

    mean: Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        self.mean = self.mean + x.detach().mean()
        return x


def dropout(params, batch):
    return F.dropout(errors(params, batch), 0.5).mean()


OWN = torch.Generator()


def draws(params, batch):
    """From four generators."""
    noise = torch.empty(len(batch["x"]), 1).uniform_(generator=OWN) + torch.rand(())
    return (errors(params, batch) * (noise + float(np.random.rand()) + random.random())).mean()


LOSSES = {"plain": fits, "dropout": dropout, "four generators": draws}


SLOW = {"four generators": pytest.mark.slow}
losses = pytest.mark.parametrize("loss", [pytest.param(x, marks=SLOW.get(x, ())) for x in LOSSES])


def reset():
    for seed in (torch.manual_seed, random.seed, np.random.seed, OWN.manual_seed):
        seed(0)


def drawn_next():
    return [torch.rand(3), random.random(), np.random.rand(), torch.rand(3, generator=OWN)]


@ways
@engines
@losses
def test_results_and_draws_are_those_of_a_loss_that_nobody_asks(way, engine, loss):
    seen = []
    for check in (True, False):
        reset()
        run = way(LOSSES[loss], engine=engine, check=check)
        seen.append([*[run() for _ in range(9)], *drawn_next()])
    torch.testing.assert_close(*seen, rtol=0, atol=0)


@pytest.mark.given_up("restored modes")
@ways
@pytest.mark.parametrize("module", [Counting, Averaging])
def test_a_module_is_left_as_by_the_calls_that_count(way, module):
    left = []
    for check in (True, False):
        net = module()
        run = way(lambda p, b, net=net: (net(errors(p, b))).mean(), check=check)
        for _ in range(4):
            run()
        left.append([*net.buffers(), getattr(net, "calls", 0)])
    torch.testing.assert_close(*left, rtol=0, atol=0)


# Of a loss that does not -----------------------------------------------------------------


@ways
@engines
@losses
def test_a_refusal_changes_nothing_and_is_repeated(way, engine, loss):
    def also(params, batch):
        return coupled(params, batch) + 0 * LOSSES[loss](params, batch)

    run, own = way(also, engine=engine), OWN.get_state()
    with unchanged(also, params(), batch()):
        for _ in range(5):
            with pytest.raises(CoupledLossError):
                run()
    assert torch.equal(OWN.get_state(), own)


def test_sums_that_were_given_up_are_as_they_were_and_take_more():
    acc, own = pa.accumulator(lambda p, b: (coupled if "mask" in b else fits)(p, b)), params()
    good, bad = {k: x for k, x in batch().items() if k != "mask"}, batch()

    def sums(*parts):
        state = acc.init(own)
        for part in parts:
            if part is not bad:
                state = acc.update(state, own, part, donate=True)
                continue
            before = [x.clone() for x in (*state.grads.values(), state.total, state.weight)]
            with pytest.raises(CoupledLossError):
                acc.update(state, own, part, donate=True)
            after = [*state.grads.values(), state.total, state.weight]
            assert_trees_bitwise_equal(after, before)
        return acc.finalize(state)

    assert_trees_bitwise_equal(sums(bad, good, bad, bad, good), sums(good, good))


@pytest.mark.parametrize("size", [None, SIZE])
def test_a_step_that_is_given_its_state_up_gives_it_back(size):
    loss = lambda params, batch: (coupled if "mask" in batch else fits)(params, batch)  # noqa: E731
    good = {k: x for k, x in batch().items() if k != "mask"}
    step = pa.make_step(loss, pa.adamw(0.1), microbatch_size=size, donate=True)
    results = []
    for tries in (0, 2):
        state = step.init(params())
        for _ in range(tries):
            with pytest.raises(CoupledLossError):
                step(state, batch()) if size else step.window(state, [batch()])
        window = step.begin(state)
        window = step.update(state, window, good)
        for _ in range(tries):
            with pytest.raises(CoupledLossError):
                step.update(state, window, batch())
        results.append(step.apply(state, window)[0].params)
    assert_trees_bitwise_equal(*results)


def test_a_stream_whose_padding_begins_later_is_refused_soon():
    even = batch(4) | {"mask": torch.ones(4, 3)}
    padded = batch(4) | {"mask": batch(4)["mask"].float()}
    acc, own = pa.accumulator(coupled), params()
    in_parts(acc, own, [even] * 2)
    with pytest.raises(CoupledLossError):
        in_parts(acc, own, [padded] * 8)
    with pytest.raises(CoupledLossError):
        stepping(coupled, stream=True)()
