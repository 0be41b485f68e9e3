"""Modules and states that do not belong together are refused, and so are buffers gone astray."""

import sys

import pytest
import torch
from torch import nn

from pureaccum._pure.functional import functional
from pureaccum._step.buffers import begin_buffers, check_policy, collect_buffers, watching
from tests.refusals import refused


pytestmark = [pytest.mark.faults, pytest.mark.promise("errors"), pytest.mark.table]


class Net(nn.Module):
    """Tied, and with a BatchNorm in a layer below."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.head = nn.Linear(2, 2)
        self.head.weight = self.body[0].weight

    def forward(self, x):
        return self.head(self.body(x))


W = "body.0.weight"
X = torch.arange(6.0).reshape(3, 2)


def refuses(change, error, *words):
    """What ``change`` makes of (params, buffers); under transforms it is the same error."""
    net = Net()
    fn = functional(net)
    params, buffers = change(dict(fn.params), dict(fn.buffers))
    with refused(error, *words, given=(net, params, buffers)):
        fn.apply(params, buffers, X)
    with refused(error, *words, given=(net, params, buffers)):
        torch.func.grad(lambda w: fn.apply(params, buffers, X * w)[0].sum())(torch.ones(()))
    with refused(error, *words, given=(net, params, buffers)):
        torch.func.vmap(lambda x: fn.apply(params, buffers, x)[0])(X[None])


NO_MODULES = {"function": torch.relu, "class": nn.Linear, "state": {}, "none": None}


@pytest.mark.parametrize("what", NO_MODULES.values(), ids=NO_MODULES)
def test_what_is_no_module_is_refused(what):
    with refused(TypeError, type(what).__name__, "expected a torch.nn.Module"):
        functional(what)


def wrapped(name, inner):
    """The wrapper without the processes that it needs."""
    if name == "DataParallel":
        return nn.DataParallel(inner)
    if name == "DistributedDataParallel":
        kind = nn.parallel.DistributedDataParallel
    else:
        fsdp = pytest.importorskip("torch.distributed.fsdp")
        kind = getattr(fsdp, name)
    if name == "FSDPModule":  # what fully_shard does
        inner.__class__ = type("FSDPNet", (kind, type(inner)), {})
        return inner
    outer = kind.__new__(kind)
    nn.Module.__init__(outer)
    outer._modules["_fsdp_wrapped_module" if "Sharded" in name else "module"] = inner
    return outer


WRAPPERS = {
    "DataParallel": ("is a DataParallel", "unsynchronised gradients"),
    "DistributedDataParallel": ("is a DistributedDataParallel", "unsynchronised gradients"),
    "FullyShardedDataParallel": ("is sharded by FSDP", "would ignore the parameters passed"),
    "FSDPModule": ("is sharded by FSDP (FSDPNet)", "would ignore the parameters passed"),
}


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
@pytest.mark.parametrize("below", [False, True])
@pytest.mark.parametrize(("name", "words"), WRAPPERS.items(), ids=WRAPPERS)
def test_wrapped_modules_are_refused(name, words, below):
    """Also where only a part is wrapped."""
    module, path = wrapped(name, Net()), "module"
    if below:
        module, path = nn.Sequential(nn.Linear(2, 2), module), "module.1"
    advice = "without fully_shard" if "FSDP" in words[0] else f"expected {path}.module"
    with refused(TypeError, f"{path} {words[0]}", *words[1:], advice):
        functional(module)


def test_nothing_of_torch_distributed_is_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.distributed.fsdp", raising=False)
    functional(Net())
    assert "torch.distributed.fsdp" not in sys.modules


def test_a_lazy_module_is_refused():
    lazy = nn.Sequential(nn.LazyLinear(2))
    with refused(ValueError, "0.weight has no shape yet", "Call the lazy module once"):
        functional(lazy)
    lazy(X)
    functional(lazy)


STRANGERS = {
    "another model's": (
        lambda p, b: ({**p, "conv.weight": p[W]}, b),
        ("params['conv.weight'] is not a parameter", "whose first of 5", W, "another model"),
    ),
    "from DDP": (
        lambda p, b: ({"module." + k: x for k, x in p.items()}, b),
        (f"params['module.{W}'] is not a parameter", f"has {W!r}", "prefix 'module.'"),
    ),
    "tied": (
        lambda p, b: ({**p, "head.weight": p[W]}, b),
        ("params['head.weight'] is tied to", repr(W), "that one alone"),
    ),
    "a buffer": (
        lambda p, b: (p | b, b),
        ("params['body.1.running_mean'] is not a parameter",),
    ),
    "one buffer too many": (
        lambda p, b: (p, {**b, "mask": b["body.1.running_mean"]}),
        ("buffers['mask'] is not a buffer", "whose first of 3"),
    ),
    "params for buffers": (lambda p, b: (p, p), ("is not a buffer of the module",)),
    "shape": (
        lambda p, b: ({**p, W: torch.ones(3, 2)}, b),
        (f"params[{W!r}] has shape (3, 2)", "expected (2, 2), as in the module", "torch.func.vmap"),
    ),
    "buffer's shape": (
        lambda p, b: (p, {**b, "body.1.running_var": torch.ones(1)}),
        ("buffers['body.1.running_var'] has shape (1,)", "(2,)"),
    ),
    "no buffers": (
        lambda p, b: (p, {}),
        ("buffers['body.1.running_mean'] is missing", "all 3", "functional(module).buffers"),
    ),
    "empty buffers": (lambda p, b: (p, ()), ("buffers['body.1.running_mean'] is missing",)),
    "one buffer too few": (
        lambda p, b: (p, {k: x for k, x in b.items() if not k.endswith("var")}),
        ("buffers['body.1.running_var'] is missing",),
    ),
}


@pytest.mark.parametrize(("change", "words"), STRANGERS.values(), ids=STRANGERS)
def test_a_state_that_does_not_fit_is_refused(change, words):
    refuses(change, ValueError, *words)


NO_STATES = {
    "list": (lambda p, b: (list(p.values()), b), ("params is a list", "functional(module).params")),
    "module": (lambda p, b: (Net(), b), ("params is a Net", "expected a dict")),
    "None": (lambda p, b: (p, None), ("buffers is a NoneType", "functional(module).buffers")),
    "a number": (lambda p, b: ({**p, W: 1.0}, b), (f"params[{W!r}] is a float", "a tensor")),
}


@pytest.mark.parametrize(("change", "words"), NO_STATES.values(), ids=NO_STATES)
def test_what_is_no_state_of_a_module_is_refused(change, words):
    if isinstance(change({}, {})[0], nn.Module):
        net, module = functional(Net()), Net()
        with refused(TypeError, *words, given=module):
            net.apply(module, net.buffers, X)
        return
    refuses(change, TypeError, *words)


def test_a_parameter_that_a_module_does_not_have_is_refused():
    with refused(
        ValueError, "params['w'] is not a parameter of the module. Likely cause: the state"
    ):
        functional(nn.ReLU()).apply({"w": X}, (), X)


# Buffers on their way through microbatches ----------------------------------------------


@pytest.mark.mechanism
def test_a_policy_is_one_of_three():
    for policy in (None, "freeze", "sequential", "pooled"):
        check_policy(policy)
    for policy in ("Pooled", "", True):
        with refused(ValueError, "buffers is", "'freeze' or 'sequential' or 'pooled'"):
            check_policy(policy)


@pytest.mark.mechanism
def test_buffers_are_tensors():
    with refused(TypeError, "buffers['n'] is a float", "expected a tensor"):
        begin_buffers("sequential", {"n": 1.0})


RETURNED = {
    "nothing": (lambda b: None, ValueError, ("new_buffers['n'] is missing", "leaves: got 0")),
    "one less": (lambda b: {"n": b["n"]}, ValueError, ("new_buffers['x'] is missing",)),
    "one more": (lambda b: {**b, "z": b["n"]}, ValueError, ("new_buffers['z'] is not in buffers",)),
    "a number": (lambda b: {**b, "n": 3}, TypeError, ("new_buffers['n'] is an int",)),
    "shape": (lambda b: {**b, "x": b["x"][:1]}, ValueError, ("['x'] has shape (1,)", "(2,)")),
    "dtype": (lambda b: {**b, "n": b["n"] + 0.5}, ValueError, ("['n'] is torch.float32", "int64")),
    "a pair": (lambda b: (b, X), ValueError, ("new_buffers",)),
}


@pytest.mark.mechanism
@pytest.mark.parametrize("policy", ["freeze", "sequential", "pooled"])
@pytest.mark.parametrize(("change", "error", "words"), RETURNED.values(), ids=RETURNED)
def test_new_buffers_that_are_not_like_buffers_are_refused(policy, change, error, words):
    buffers = {"n": torch.tensor(3), "x": torch.ones(2)}
    new_buffers, usual = change(buffers), "With buffers, aux is (new_buffers, aux)"
    with refused(error, *words, usual, given=(buffers, new_buffers)):
        collect_buffers(policy, [], new_buffers, begin_buffers(policy, buffers).values)


class Often(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x):
        return self.norm(self.norm(x))


def pooled(module, change=dict, calls=1):
    fn = functional(module)
    with watching("pooled") as seen:
        new_buffers = fn.buffers
        for _ in range(calls):
            _, new_buffers = fn.apply(fn.params, new_buffers, X)
    return collect_buffers("pooled", seen, change(new_buffers), fn.buffers)


@pytest.mark.mechanism
def test_a_layer_that_is_called_twice_is_not_pooled():
    module = Often()
    words = ("new_buffers['norm.running_mean']", "2 calls of batch norm", "buffers='sequential'")
    with refused(ValueError, *words, given=module):
        pooled(module)


STRAY = {
    "copied": {"change": lambda b: {k: x.clone() for k, x in b.items()}},
    "detached": {"change": lambda b: {k: x.detach() for k, x in b.items()}},
    "two calls": {"calls": 2},
}


@pytest.mark.mechanism
@pytest.mark.parametrize("how", STRAY.values(), ids=STRAY)
def test_statistics_that_are_not_returned_are_not_pooled(how):
    module = Net()
    assert pooled(module).moments
    words = ("1 running mean(s) that are not in new_buffers", "functional(module).apply", "once")
    with refused(ValueError, *words, given=module):
        pooled(module, **how)


@pytest.mark.mechanism
def test_statistics_under_another_name_are_not_pooled():
    buffers = {"mean": torch.zeros(2), "var": torch.ones(2)}
    with watching("pooled") as seen:
        nn.functional.batch_norm(X, *buffers.values(), training=True)
    with refused(ValueError, "not in new_buffers", "'running_mean' with 'running_var'"):
        collect_buffers("pooled", seen, buffers, buffers)
