"""A module under a size is what it is now, whatever its forward reads, at each call.

The oracle is the same module called with the batch whole. Between two calls something changes that
forward reads: outputs, gradients and buffers are the full batch's again, or the call raises.
"""

import contextlib
import contextvars
import gc
import linecache
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial, reduce
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pureaccum as pa
from tests.draws import generator
from tests.pure.networks import backward


pytestmark = [pytest.mark.bounds, pytest.mark.promise("coupled")]
PROMISED = 1e-10
X = torch.randn(7, 4, dtype=torch.float64, generator=generator(3)) + 1


class Net(nn.Module):
    """A forward that is a function of the module and of what a BatchNorm gives."""

    def __init__(self, func, **attributes):
        super().__init__()
        self.lin, self.bn, self.out = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.func = func
        for name, value in attributes.items():
            setattr(self, name, value)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for p in self.double().parameters():
                nn.init.normal_(p)

    def forward(self, x):
        return self.func(self, self.bn(self.lin(x)))


def gradient(fn, x, way):
    """Gradients, value, and buffers."""

    def loss(params, x):
        out, buffers = fn.apply(params, fn.buffers, x)
        leaves = out if isinstance(out, (tuple, list)) else [out]
        return sum(y.sin().sum(1).mean() for y in leaves), buffers

    of = torch.func.grad_and_value(loss, has_aux=True)
    of = partial(backward, loss) if way == "backward" else of
    grads, (value, buffers) = of(fn.params, x)
    return grads, value, buffers


def compare(cut, plain, way):
    want = gradient(plain, X, way)
    for mine, its in zip(gradient(cut, X, way), want, strict=True):
        pairs = [(mine[k], its[k]) for k in its] if isinstance(its, dict) else [(mine, its)]
        size = sum(float(b.double().norm()) ** 2 for _, b in pairs) ** 0.5
        off = sum(float((a.double() - b.double()).norm()) ** 2 for a, b in pairs) ** 0.5
        assert off <= PROMISED * (1 + size)


# What forward reads, and how it changes --------------------------------------------------------


GLOBAL = {"scale": 1.0, "twice": False}
FLAG = contextvars.ContextVar("flag", default=False)
LOCAL = threading.local()


def attribute(name, *values):
    *owners, last = name.split(".")

    def changes(net):
        at = reduce(getattr, owners, net)
        return [lambda value=value: setattr(at, last, value) for value in values]

    return changes


def item(get, key, *values):
    return lambda net: [lambda value=value: get(net).__setitem__(key, value) for value in values]


def branch(condition):
    return lambda self, x: self.out(x.exp()) if condition(self, x) else x * 2


def tried(self, x):
    try:
        return x * self.cfg.scale
    except AttributeError:
        return x


def closure():
    scale = 1.0

    def change():
        nonlocal scale
        scale = 3.0

    return lambda self, x: x * scale, lambda _: [change]


def detached_in_a_branch(self, x):
    stopped = x.detach()
    return self.out(stopped if self.cfg.on else x) + x.sin()


class Doubled(nn.Module):
    factor = 1.0

    def forward(self, x):
        return x * type(self).factor


CLOSURE = closure()
CFG = SimpleNamespace


on = partial(attribute, "cfg.on")


def program(forward, changes, **attributes):
    return forward, attributes, changes


def calls(*changes):
    return lambda net: [lambda change=change: change(net) for change in changes]


def itself(self, x):
    return x


PROGRAMS = {
    "attribute": program(lambda self, x: x * self.t, attribute("t", 0.5, 0.25, 3.0), t=1.0),
    "int attribute": program(lambda self, x: x**self.n, attribute("n", 3, 4), n=2),
    "attribute in arithmetic": program(
        lambda self, x: x * (1 - self.t / 2) ** 2 + -self.t, attribute("t", 0.5, 0.25), t=1.0
    ),
    "attribute that decides": program(
        branch(lambda self, x: self.t > 0.4), attribute("t", 0.5, 0.25, 0.7), t=1.0
    ),
    "attribute through math": program(
        lambda self, x: x * float(torch.tensor(self.t).sqrt()), attribute("t", 4.0), t=1.0
    ),
    "a number, then an int": program(lambda self, x: x / self.t, attribute("t", 3, 4.0), t=2.0),
    "bool attribute": program(
        branch(lambda self, x: self.twice), attribute("twice", True, False), twice=False
    ),
    "eps": program(itself, attribute("bn.eps", 1e-2, 0.3)),
    "momentum": program(itself, attribute("bn.momentum", 0.5, None, 0.2)),
    "training": program(itself, attribute("bn.training", False, True)),
    "tracking": program(itself, attribute("bn.track_running_stats", False, True)),
    "config": program(lambda self, x: x * self.cfg.on, on(2.0, 5.0), cfg=CFG(on=1.0)),
    "deep config": program(
        lambda self, x: x * self.cfg.a.b, attribute("cfg.a.b", 2.0), cfg=CFG(a=CFG(b=1.0))
    ),
    "config that decides": program(
        branch(lambda self, x: self.cfg.on), on(True, False), cfg=CFG(on=False)
    ),
    "list": program(
        lambda self, x: x * self.scales[0], item(lambda net: net.scales, 0, 2.0, 3.0), scales=[1.0]
    ),
    "dict": program(
        lambda self, x: x * self.scales["a"],
        item(lambda net: net.scales, "a", 2.0),
        scales={"a": 1.0},
    ),
    "dict of tensors": program(
        lambda self, x: x * self.scales["a"],
        item(lambda net: net.scales, "a", X[1], X[2]),
        scales={"a": X[0]},
    ),
    "global": program(
        lambda self, x: x * GLOBAL["scale"], item(lambda _: GLOBAL, "scale", 2.0, 1.0)
    ),
    "class attribute": program(
        lambda self, x: self.d(x),
        calls(lambda _: setattr(Doubled, "factor", 3.0), lambda _: setattr(Doubled, "factor", 1)),
        d=Doubled(),
    ),
    "closure": program(*CLOSURE),
    "context variable": program(
        branch(lambda self, x: FLAG.get()),
        calls(lambda _: FLAG.set(True), lambda _: FLAG.set(False)),
    ),
    "thread-local": program(
        branch(lambda self, x: getattr(LOCAL, "on", False)),
        calls(lambda _: setattr(LOCAL, "on", True), lambda _: delattr(LOCAL, "on")),
    ),
    "environment": program(
        branch(lambda self, x: "PUREACCUM_TEST" in os.environ),
        calls(
            lambda _: os.environ.__setitem__("PUREACCUM_TEST", ""),
            lambda _: os.environ.pop("PUREACCUM_TEST"),
        ),
    ),
    "try": program(
        tried,
        calls(lambda net: delattr(net.cfg, "scale"), lambda net: setattr(net.cfg, "scale", 3.0)),
        cfg=CFG(scale=2.0),
    ),
    "detach in a branch": program(
        lambda self, x: self.out(x.detach() if self.cfg.on else x) + x.sin(),
        on(True, False),
        cfg=CFG(on=False),
    ),
    "detach that is always called": program(
        detached_in_a_branch, on(True, False), cfg=CFG(on=False)
    ),
    "a module that is another one": program(
        lambda self, x: self.cfg.on(x), on(nn.Sigmoid(), torch.relu), cfg=CFG(on=nn.Tanh())
    ),
    "order": program(lambda self, x: [self.out(x), x][self.cfg.on] * 1.5, on(1, 0), cfg=CFG(on=0)),
    "outputs": program(
        lambda self, x: (x, x.sin()) if self.cfg.on else x, on(True, False), cfg=CFG(on=False)
    ),
    "frozen by detach": program(
        lambda self, x: x @ (self.out.weight.detach() if self.cfg.on else self.out.weight),
        on(False, True),
        cfg=CFG(on=True),
    ),
    "a norm more": program(
        lambda self, x: self.bn(x.exp()) if self.cfg.on else x, on(True, False), cfg=CFG(on=False)
    ),
    "no norm before": program(
        lambda self, x: F.batch_norm(x.exp(), None, None, training=self.cfg.on),
        on(True),
        cfg=CFG(on=True),
    ),
    "dropout of nothing": program(
        lambda self, x: F.dropout(x, self.cfg.on, self.training), on(1.0, 0.0), cfg=CFG(on=0.0)
    ),
}


@pytest.mark.parametrize("way", ["backward", "torch.func"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_changes_between_two_calls_is_seen(name, way):
    func, attributes, changes = PROGRAMS[name]
    net = Net(func, **attributes)
    cut, plain = pa.functional(net, microbatch_size=3), pa.functional(net)
    compare(cut, plain, way)
    for change in changes(net):
        change()
        for _ in range(2):
            compare(cut, plain, way)


# Branches that stand-ins for tensors would get wrong --------------------------------------------


SEES = {
    "isinstance": lambda self, x: isinstance(x, Tensor),
    "type": lambda self, x: type(x) is Tensor,
    "is_tensor": lambda self, x: torch.is_tensor(x),
    "no attribute": lambda self, x: hasattr(x, "logits"),
    "attribute": lambda self, x: hasattr(x, "shape"),
    "parameter": lambda self, x: isinstance(self.out.weight, Tensor),
    "channels": lambda self, x: x.shape[1] == self.out.in_features,
    "dims": lambda self, x: x.dim() == 2 and x.ndim < 3,
    "dtype": lambda self, x: x.dtype == torch.float64,
    "device": lambda self, x: x.device.type == "cpu",
    "floating": lambda self, x: x.is_floating_point() and torch.is_floating_point(x),
    "grad mode": lambda self, x: torch.is_grad_enabled(),
    "autocast": lambda self, x: torch.is_autocast_enabled("cpu"),
    "training": lambda self, x: self.training,
    "callable": lambda self, x: callable(x),
    "thread": lambda self, x: threading.current_thread() is threading.main_thread(),
    "constant": lambda self, x: bool(torch.tensor([1.0, 2.0]).sum() > 2),
}


@pytest.mark.parametrize("around", ["nothing", "no_grad", "autocast", "inference_mode"])
@pytest.mark.parametrize("name", SEES)
def test_a_branch_goes_the_way_of_the_module(name, around):
    net = Net(branch(SEES[name]))
    cut, plain = pa.functional(net, microbatch_size=3), pa.functional(net)
    for mode in (contextlib.nullcontext(), MODES[around](), contextlib.nullcontext()):
        with mode:
            got, want = (fn.apply(fn.params, fn.buffers, X) for fn in (cut, plain))
        unit = 1e-10 if around != "autocast" else 2**-4
        torch.testing.assert_close(got[0], want[0], rtol=unit, atol=unit)


MODES = {
    "nothing": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference_mode": torch.inference_mode,
}


# What is refused -------------------------------------------------------------------------------


REFUSED = {
    "statistics after the call": (lambda self, x: x - self.bn.running_mean, "is read again"),
    "requires_grad": (lambda self, x: x * 2 if x.requires_grad else x, "requires_grad"),
    "grad_fn": (lambda self, x: x if x.grad_fn is None else x * 2, "grad_fn"),
    "is_leaf": (lambda self, x: x * 2 if x.is_leaf else x, "is_leaf"),
    "data": (lambda self, x: x.data + x, "Use detach()"),
    "weight.data": (lambda self, x: (self.out.weight.data.mul_(2), x)[1], "Use detach()"),
    "times rows": (lambda self, x: x * x.shape[0], "how many samples"),
    "mean of rows": (lambda self, x: x - x.sum(0) / x.shape[0], "how many samples"),
    "full of rows": (lambda self, x: x * torch.full((4,), x.size(0)), "how many samples"),
    "tensor of rows": (lambda self, x: x * torch.tensor([x.size(0)]), "how many samples"),
    "root of rows": (lambda self, x: x / x.shape[0] ** 0.5, "how many samples"),
    "as many as rows": (lambda self, x: sum([x] * x.shape[0]), "how many samples"),
    "text": (lambda self, x: x * 2 if f"{x.shape[0]}" == "7" else x, "how many samples"),
    "key": (lambda self, x: x * {7: 2.0}.get(x.shape[0], 1.0), "how many samples"),
    "swapped dims": (lambda self, x: x * 2 if x.t().shape[1] > 5 else x, "how many samples"),
    "numbers": (lambda self, x: x * 2 if x.sum() > 0 else x, "numbers of its input"),
    "transform": (lambda self, x: torch.vmap(lambda row: row * 2)(x), "no traced operation"),
    "no_grad": (lambda self, x: x + torch.no_grad()(lambda: x * 2)(), "under no_grad"),
    "a generator": (
        lambda self, x: x + torch.randn(x.shape, generator=generator(0)),
        "random numbers",
    ),
}


@pytest.mark.promise("followed")
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_trace_would_lose_is_refused(name):
    func, words = REFUSED[name]
    net = Net(func)
    before = {key: x.clone() for key, x in net.state_dict().items()}
    cut = pa.functional(net, microbatch_size=3)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"module.* cannot be cut|writes") as caught:
            gradient(cut, X, "torch.func")
        assert words in str(caught.value)
    assert all(torch.equal(x, before[key]) for key, x in net.state_dict().items())


@pytest.mark.slow
def test_memory_is_flat_over_calls_that_differ():
    """Nothing of a call is left: no trace, no code, no structure of a trace beyond a few."""
    net = Net(lambda self, x: sum(x * self.cfg.t for _ in range(self.cfg.n)), cfg=CFG(t=1.0, n=1))
    cut = pa.functional(net, microbatch_size=3)

    def calls(count):
        for i in range(count):
            net.cfg.t, net.cfg.n = 1.0 / (i + 2), i % 3 + 1
            gradient(cut, X, "backward")
        gc.collect()
        return len(gc.get_objects())

    lines, first = len(linecache.cache), calls(9)
    assert calls(60) <= first + 50
    assert len(linecache.cache) <= lines + 1


@pytest.mark.slow
@pytest.mark.promise("threads")
def test_threads_whose_contexts_differ_each_get_their_own():
    net = Net(branch(lambda self, x: getattr(LOCAL, "on", False)))
    cut, plain = pa.functional(net, microbatch_size=3), pa.functional(net)

    def call(on):
        LOCAL.on = on
        for _ in range(5):
            compare(cut, plain, "torch.func")

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(call, i % 2 == 0) for i in range(8)]:
            done.result()
