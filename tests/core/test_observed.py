"""The first microbatch of a loss is run once more, observed, and nothing of that run is left."""

import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import pureaccum as pa
from pureaccum._base.torch_internals.modes import dispatched
from pureaccum._core.writes import unguarded
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from tests.calls import BoomError
from tests.exactly import but_checked
from tests.problems import Around, Operations, leaf
from tests.refusals import saying
from tests.runs import RUNS, by_autograd, runs, total


pytestmark = [pytest.mark.purity, pytest.mark.promise("purity")]

X = torch.linspace(-1, 1, 24).reshape(6, 4)
W = torch.linspace(0.5, 1.5, 4)
Loss = Callable[[Any, Tensor], Tensor]


CALLS = {
    name: lambda f, run=run: run(f, W, X)
    for name, run in runs(
        *(
            "grad_and_value",
            "autograd",
            "value",
            "step",
            "stream",
            "primitive",
            "backward",
            "remat",
        ),
        "vmap",
        whole=partial(RUNS["grad_and_value"], size=None),
        samples=partial(RUNS["samples"], size=None, engine="autograd"),
    ).items()
}
calls = pytest.mark.parametrize("call", CALLS)


@calls
def test_random_numbers_are_drawn_as_if_the_loss_were_called_once(call):
    own = torch.Generator()

    def made():
        def loss(w, x):
            mask = torch.rand(4) + torch.rand(4, generator=own)
            return (w * x * mask).square().mean() * random.random() * np.random.rand()

        return loss

    def run(loss):
        for seed, begin in enumerate(
            (torch.manual_seed, own.manual_seed, random.seed, np.random.seed)
        ):
            begin(seed)
        out = but_checked(CALLS[call](loss))
        states = torch.get_rng_state(), own.get_state(), torch.tensor(np.random.get_state()[1])
        return out, states, torch.tensor(random.getstate()[1], dtype=torch.int64)

    loss = made()
    with unguarded():
        expected = run(made())
    for _ in range(2):
        assert_trees_bitwise_equal(run(loss), expected)


@pytest.mark.parametrize("call", ["grad_and_value", "autograd", "value", "step", "stream"])
def test_random_numbers_are_those_of_a_loss_that_is_not_checked(call):
    def made():
        def loss(w, x):
            mask = torch.rand(4) * random.random() * np.random.rand()
            return (w * x * mask).square().mean()

        return loss

    def run(loss, **options):
        for begin in (torch.manual_seed, random.seed, np.random.seed):
            begin(0)
        out = RUNS[call](loss, W, X, **options)
        if call in ("step", "stream"):
            out = out[0].params, out[1].loss
        return out, torch.rand(2), torch.tensor([random.random(), np.random.rand()])

    loss, expected = made(), run(made(), check=False)
    for _ in range(2):
        assert_trees_bitwise_equal(run(loss), expected)


class Counting(nn.Module):
    """Counts its calls in an attribute."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 1), 0

    def forward(self, x):
        self.calls += 1
        self.last = x.shape
        return self.linear(x)


@pytest.mark.given_up("early writes")
@pytest.mark.parametrize("by", ["functional", "captured"])
def test_attributes_of_modules_are_assigned_as_if_the_loss_were_called_once(by):
    net = Counting()
    fn = pa.functional(net)
    if by == "captured":  # else the call is made again, to follow what is captured
        net.requires_grad_(False)

    def loss(w, x):
        out = fn.apply(w, (), x)[0] if by == "functional" else net(x) * w["linear.bias"]
        return out.square().mean() + len(net.last)

    for i in range(1, 3):
        pa.grad(loss, microbatch_size=2)(fn.params, X)
        assert net.calls == 3 * i


class Hooked(nn.Module):
    """Hooks a layer at its first call and remembers that it did, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x):
        if not hasattr(self, "hooked"):
            self.hooked = self.linear.register_forward_hook(lambda module, args, out: 3 * out)
        return self.linear(x)


HOOKED = {
    "functional": lambda net, w, x, fn: fn.apply(w, (), x)[0],
    "functional_call": lambda net, w, x, fn: functional_call(net, w, (x,)),
    "captured": lambda net, w, x, fn: net(x) * w["linear.bias"],
}


@pytest.mark.promise("functional")
@pytest.mark.parametrize("by", HOOKED)
def test_a_hook_that_the_first_call_makes_is_there_at_every_call(by):
    """With the observed run both are undone, the hook and what remembers it."""
    net, other = Hooked(), Hooked()
    other.load_state_dict(net.state_dict())
    other(X)  # makes its hook unobserved

    def loss_of(net):
        fn = pa.functional(net)
        return lambda w, x: HOOKED[by](net, w, x, fn).square().mean()

    params = pa.functional(net).params
    if by == "captured":  # else the call is made again, to follow what is captured
        net.requires_grad_(False)
    loss, expected = loss_of(net), torch.func.grad(loss_of(other))(params, X)
    for _ in range(2):
        assert_trees_bitwise_equal(pa.grad(loss)(params, X), expected)
    assert len(net.linear._forward_hooks) == 1


@pytest.mark.promise("functional")
def test_the_first_call_of_a_functional_is_one_call():
    """It is observed, to see whether it leads back to the module itself."""
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), Counting())
    fn, states = pa.functional(net), []
    for _ in range(2):
        torch.manual_seed(0)
        states.append((fn.apply(fn.params, fn.buffers, X), fn.buffers, torch.get_rng_state()))
    assert_trees_bitwise_equal(*states)
    assert net[2].calls == 2


@calls
def test_an_error_of_the_loss_is_that_of_the_run_that_counts(call):
    raised = []

    def loss(w, x):
        raised.append(BoomError())
        raise raised[-1]

    with pytest.raises(BoomError) as caught:
        CALLS[call](loss)
    assert caught.value is raised[-1]
    assert caught.value.__context__ is None


@pytest.mark.given_up("early writes")
@calls
def test_a_loss_that_fails_where_it_is_observed_is_guarded_by_versions(call):
    def made(writes):
        def loss(w, x):
            if dispatched():
                raise BoomError
            if writes:
                x.add_(1)
            return (w * x).square().mean()

        return loss

    loss = made(writes=False)
    with unguarded():
        expected = but_checked(CALLS[call](made(writes=False)))
    for _ in range(2):
        assert_trees_bitwise_equal(but_checked(CALLS[call](loss)), expected)
    before = X.clone()
    try:
        with pytest.raises(RuntimeError, match=r"in.place"):  # ours, or what torch.func says
            CALLS[call](made(writes=True))
    finally:
        X.copy_(before)


@pytest.mark.given_up("early writes")
def test_a_module_that_fails_where_it_is_observed_is_called_itself():
    class Fails(nn.Linear):
        def forward(self, x):
            if dispatched():
                raise BoomError
            return super().forward(x)

    net = Fails(4, 2)
    fn = pa.functional(net)
    other = {name: 2 * x for name, x in fn.params.items()}
    for _ in range(2):
        got, _ = fn.apply(other, (), X)
        assert_trees_bitwise_equal(got, torch.func.functional_call(net, other, (X,)))


@pytest.mark.given_up("early writes")
@pytest.mark.parametrize("call", ["autograd", "value", "step", "stream", "backward"])
def test_a_loss_that_catches_the_refusal_of_a_write_is_refused_all_the_same(call):
    """Nobody would refuse the write where it counts."""
    held = torch.zeros(4)

    def loss(w, x):
        with suppress(RuntimeError):
            held.data.add_(1)
        return (w * x).square().mean()

    with unchanged(held), saying(RuntimeError, "writes to", "shape (4,)"):
        CALLS[call](loss)


@calls
def test_a_dispatch_mode_around_sees_a_loss_once(call):
    loss = lambda w, x: (w * x).square().mean()  # noqa: E731
    seen = []
    for _ in range(2):
        with Operations() as operations:
            CALLS[call](loss)
        seen.append([x for x in operations.seen if "square" in str(x) or "pow" in str(x)])
    assert seen[0] == seen[1] != []


@pytest.mark.given_up("early writes")
def test_a_kind_that_nobody_could_observe_is_observed_the_next_time():
    def loss(w, x):
        if len(noted) == 1:
            held.data.add_(1)
        return (w * x).square().mean()

    held, noted = torch.zeros(4), list[int]()
    with Operations():
        pa.value(loss, microbatch_size=6)(W, X)
    noted.append(1)
    with unchanged(held), saying(RuntimeError, "writes to"):
        pa.value(loss, microbatch_size=6)(W, X)


@pytest.mark.promise("closure")
def test_a_checkpoint_around_does_not_count_what_the_observed_run_saves():
    loss = total(lambda w, x: (w * x).sin().sum())
    w = leaf(W)
    checkpoint(loss, w, X, use_reentrant=False).backward()
    assert_trees_bitwise_equal(w.grad, by_autograd(loss, W, X))


@pytest.mark.given_up("retries")
def test_a_checkpoint_inside_is_recomputed_with_the_right_parameters():
    """Also where a loss makes other tensors of them at each call."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    params = {k: 2 * v.detach() for k, v in net.named_parameters()}
    kept = Around(lambda x, net: checkpoint(net, x, use_reentrant=False), net)
    plain = Around(lambda x, net: net(x), net)

    def gradient(module):
        def loss(p, x):
            halved = {f"parts.0.{name}": 0.5 * value for name, value in p.items()}
            return torch.func.functional_call(module, halved, (x,)).mean()

        return pa.grad(loss, microbatch_size=2, engine="autograd")(params, X)

    assert_trees_bitwise_equal(gradient(kept), gradient(plain))
