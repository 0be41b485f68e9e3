"""``functional(module).apply`` is the module: outputs, gradients and buffers, in bits."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from pureaccum._pure.functional import functional
from pureaccum._step.buffers import (
    advance_buffers,
    begin_buffers,
    collect_buffers,
    finish_buffers,
    watching,
)
from pureaccum.testing import assert_trees_bitwise_equal


pytestmark = [pytest.mark.parity, pytest.mark.promise("functional")]


class Counting(nn.Module):
    """Buffers that are assigned anew, written in place, absent, and not saved."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("nothing", None)
        self.register_buffer("mean", torch.zeros(3), persistent=False)

    def forward(self, x):
        self.calls = self.calls + 1
        self.mean.mul_(0.5).add_(x.detach().mean(0))
        return x @ self.weight + self.mean * self.calls


class Tied(nn.Module):
    """A weight in two layers, a layer and a weight under two names, a buffer in two modules."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)
        self.again = self.norm
        self.scale = self.same = nn.Parameter(torch.randn(3))
        self.one, self.other = Counting(), Counting()
        self.other.mean = self.one.mean

    def forward(self, x):
        h = self.again(self.second(self.norm(self.first(x)) * self.scale) * self.same)
        return self.other(self.one(h))


MODULES = {
    "1d": lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)),
    "2d": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 1, 3)), nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Flatten()
    ),
    "cumulative": lambda: nn.BatchNorm1d(3, momentum=None, affine=False),
    "nested": lambda: nn.Sequential(
        nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)), nn.BatchNorm1d(3)
    ),
    "reassigned": lambda: nn.Sequential(Counting(), nn.Tanh(), Counting()),
    "tied": Tied,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(3, 2)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(3, 2)),
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3)), nn.InstanceNorm1d(1, track_running_stats=True), nn.Flatten()
    ),
    "plain": lambda: nn.Linear(3, 2),
}
INEXACT = {"weight norm"}  # torch.func differentiates a norm by other operations than autograd
every_module = pytest.mark.parametrize("name", MODULES)
policies = pytest.mark.parametrize("policy", ["freeze", "sequential", "pooled"])


@pytest.fixture(autouse=True)
def wide():
    """``module.double()`` would part buffers that are tied."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make(name):
    """A module as a function, and a copy that is called as modules are."""
    module = MODULES[name]()
    return functional(module), deepcopy(module)


def rows(count=7):
    return torch.randn(count, 3)


def own(module):
    """A copy of what a module holds."""
    both = module.named_parameters(), module.named_buffers()
    params, buffers = ({k: x.detach().clone() for k, x in named} for named in both)
    return params, buffers


def gradients(module, x):
    """What ``.backward()`` leaves for the sum of squares."""
    module.zero_grad()
    out = module(x)
    if out.requires_grad:
        (out * out).sum().backward()
    return {k: p.grad for k, p in module.named_parameters() if p.grad is not None}


def assert_same_gradients(name, got, want):
    (assert_close if name in INEXACT else assert_trees_bitwise_equal)(got, want)


def through(fn, policy, params, buffers, parts, keeps=None):
    """What a step does with buffers, and the gradient of each microbatch."""

    def loss(params, buffers, x):
        with watching(policy) as seen:
            out, new_buffers = fn.apply(params, buffers, x)
        return (out * out).sum(), collect_buffers(policy, seen, new_buffers, buffers)

    carried, grads, parts = begin_buffers(policy, buffers), [], list(parts)
    for x, keep in zip(parts, [None] * len(parts) if keeps is None else keeps, strict=True):
        one = partial(loss, buffers=carried.values, x=x)
        value, pull, collected = torch.func.vjp(one, params, has_aux=True)
        grads.append(pull(torch.ones_like(value), retain_graph=False)[0])
        flag = None if keep is None else torch.tensor(keep)
        carried = advance_buffers(policy, carried, collected, flag)
    return grads, finish_buffers(carried)


@every_module
@pytest.mark.parametrize("train", [True, False])
def test_a_call_is_the_module_s(name, train):
    """The mode is the one at the time of the call."""
    module = MODULES[name]()
    fn, other, x = functional(module), deepcopy(module).train(train), rows()
    module.train(train)
    out, new_buffers = fn.apply(fn.params, fn.buffers, x)
    assert_trees_bitwise_equal(out, other(x))
    assert_trees_bitwise_equal((fn.params, new_buffers), (own(module)[0], own(other)[1]))


@every_module
def test_gradients_are_the_module_s(name):
    fn, other = make(name)
    x = rows()

    def loss(params, buffers):
        out, new_buffers = fn.apply(params, buffers, x)
        return (out * out).sum(), new_buffers

    grads, new_buffers = torch.func.grad(loss, has_aux=True)(fn.params, fn.buffers)
    assert_same_gradients(name, grads, gradients(other, x))
    assert_trees_bitwise_equal(new_buffers, own(other)[1])


@pytest.mark.mechanism
@every_module
def test_sequentially_is_a_loop_of_calls(name):
    fn, other = make(name)
    x = rows(11)
    parts = x.split([4, 2, 5])
    grads, buffers = through(fn, "sequential", fn.params, fn.buffers, parts)
    for got, part in zip(grads, parts, strict=True):
        assert_same_gradients(name, got, gradients(other, part))
    assert_trees_bitwise_equal(buffers, own(other)[1])


@pytest.mark.mechanism
@every_module
def test_sequentially_a_microbatch_that_does_not_count_leaves_no_trace(name):
    """It may be NaN."""
    fn, other = make(name)
    x = rows(11)
    x[5] = torch.nan
    parts = x.split([4, 2, 5])
    _, buffers = through(fn, "sequential", fn.params, fn.buffers, parts, [True, False, True])
    other(parts[0])
    other(parts[2])
    assert_trees_bitwise_equal(buffers, own(other)[1])


@pytest.mark.mechanism
@every_module
def test_frozen_buffers_stay(name):
    fn, _ = make(name)
    before = {k: x.clone() for k, x in fn.buffers.items()}
    _, buffers = through(fn, "freeze", fn.params, fn.buffers, rows(6).split(3), [True, None])
    assert_trees_bitwise_equal(buffers, before)


@pytest.mark.mechanism
def test_layers_that_are_not_batch_norm_go_sequentially_when_pooled():
    fn, other = make("instance norm")
    parts = rows(9).split(3)
    _, buffers = through(fn, "pooled", fn.params, fn.buffers, parts)
    for part in parts:
        other(part)
    assert_trees_bitwise_equal(buffers, own(other)[1])


@pytest.mark.mechanism
def test_a_layer_that_is_not_training_is_not_changed_when_pooled():
    fn = functional(nn.BatchNorm1d(3).eval())
    buffers = {**fn.buffers, "running_var": torch.full((3,), torch.inf)}
    _, left = through(fn, "pooled", fn.params, buffers, rows(9).split(3))
    assert_trees_bitwise_equal(left, buffers)


def test_part_of_the_parameters_may_be_given():
    """The others are the module's own."""
    fn, other = make("1d")
    x, head = rows(), {k: p * 2 for k, p in fn.params.items() if k.startswith("3.")}
    with torch.no_grad():
        for k, p in other.named_parameters():
            p.copy_(head.get(k, p))
    assert_trees_bitwise_equal(fn.apply(head, fn.buffers, x)[0], other(x))


def test_tied_parameters_are_one_leaf():
    fn, _ = make("tied")
    names = {"second.weight", "same", "again.weight", "again.running_mean", "other.mean"}
    assert not names & (fn.params.keys() | fn.buffers.keys())
    assert {"first.weight", "norm.weight", "norm.running_mean", "one.mean"} <= (
        fn.params.keys() | fn.buffers.keys()
    )
    assert "nothing" not in functional(Counting()).buffers


def test_a_module_may_have_keywords_and_several_outputs():
    class Pair(nn.Module):
        def forward(self, params, *, buffers):
            return {"both": (params, buffers)}

    fn = functional(Pair())
    out, new_buffers = fn.apply({}, (), torch.ones(2), buffers=torch.zeros(2))
    assert_trees_bitwise_equal(out, {"both": (torch.ones(2), torch.zeros(2))})
    assert new_buffers == ()


@pytest.mark.mechanism
@policies
@pytest.mark.parametrize("name", ["1d", "2d", "reassigned", "tied"])
def test_vmap_over_models_is_a_loop_over_them(name, policy):
    """Up to the order of sums in batched kernels."""
    if name == "tied" and policy == "pooled":
        policy = "sequential"  # its BatchNorm is called twice
    fn, _ = make(name)
    parts = rows(9).split([4, 5])
    models = [own(MODULES[name]()) for _ in range(3)]
    params, buffers = (
        {k: torch.stack([model[i][k] for model in models]) for k in models[0][i]} for i in (0, 1)
    )
    got = torch.func.vmap(lambda p, b: through(fn, policy, p, b, parts))(params, buffers)
    for i, model in enumerate(models):
        grads, left = through(fn, policy, *model, parts)
        assert_close(({k: x[i] for k, x in got[1].items()}), left)
        for mine, each in zip(got[0], grads, strict=True):
            assert_close({k: x[i] for k, x in mine.items()}, each)


def assert_close(got, want):
    """Two ways through the same float64 arithmetic: they agree to sqrt(u) of the largest."""
    scale = max(float(x.double().norm()) for x in want.values())
    assert got.keys() == want.keys()
    for k, x in want.items():
        assert got[k].dtype == x.dtype
        assert (got[k] - x).double().norm() <= 2**-26.5 * scale, k


def test_a_linear_layer_has_its_tangent():
    """A linear layer is linear in its parameters."""
    fn, x = functional(nn.Linear(3, 2)), rows()
    tangents = {k: torch.randn_like(p) for k, p in fn.params.items()}
    _, tangent = torch.func.jvp(lambda p: fn.apply(p, (), x)[0], (fn.params,), (tangents,))
    assert_close({"out": tangent}, {"out": fn.apply(tangents, (), x)[0]})


RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])


@pytest.mark.mechanism
@pytest.mark.slow
@policies
@pytest.mark.skipif(RELEASE < (2, 12), reason="dynamo cannot compare structures before")
def test_microbatches_through_a_module_compile_into_one_graph(policy):
    fn, _ = make("1d")
    parts = rows(9).split([4, 5])

    def run(params, buffers, *parts):
        return through(fn, policy, params, buffers, parts)

    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    got, want = (f(fn.params, fn.buffers, *parts) for f in (compiled, run))
    assert_close(got[1], want[1])
    for mine, each in zip(got[0], want[0], strict=True):
        assert_close(mine, each)
