"""A module that is called with other parameters keeps its own: parameters, buffers, hooks, mode."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from tests.calls import CALLS, ENGINES, BoomError, combinations
from tests.dropped import is_dropped
from tests.problems import ROOT, in_parts
from tests.pure.networks import (
    NETWORKS,
    Checkpointed,
    Direct,
    Generated,
    by_hand,
    call,
    inputs,
    make,
    other_params,
    square,
    switch,
)


pytestmark = [pytest.mark.purity, pytest.mark.promise("purity")]
Tensors = dict[str, Tensor]
NAMES = ("linear", "lstm", "parametrized", "batch norm", "tied", "nested")
some_calls = pytest.mark.parametrize(
    ("name", "options"),
    [*combinations("grad", "donated stream", nonfinite=("propagate", "skip")), ("value", {})],
)


def module(name):
    """Trained a little, so that there are gradients and hooks to lose."""
    net = make(name)
    switch([net], on=False)
    net(inputs(4)).sum().backward()
    net.register_forward_hook(lambda *_: None)
    net.register_forward_pre_hook(lambda *_: None)
    return net.eval().train()


def squares(net, by=call):
    return lambda params, batch: (by(net, params, batch["x"]) ** 2).mean()


@some_calls
@pytest.mark.parametrize("network", NAMES)
@pytest.mark.parametrize("fails", [False, True])
def test_a_call_leaves_the_module_as_it_was(name, options, network, fails):
    """Also one that fails inside the module, at the second microbatch."""
    net = module(network)
    params, batch = other_params(net), {"x": inputs(6)}
    calls = iter([False, True])

    def fail(*_):
        if next(calls):
            raise BoomError

    if fails:
        net.get_submodule("head" if hasattr(net, "head") else "").register_forward_hook(fail)
    with unchanged(net, params, batch), pytest.raises(BoomError) if fails else nullcontext():
        CALLS[name].run(squares(net), params, batch, check=False, **options)


@pytest.mark.parametrize("network", NAMES)
@pytest.mark.parametrize("engine", ENGINES)
def test_after_a_call_a_module_computes_with_its_own_parameters(network, engine):
    net = module(network).eval()
    params, x = other_params(net), inputs(6)
    before = net(x)
    pa.grad(lambda p, x: (call(net, p, x) ** 2).mean(), microbatch_size=2, engine=engine)(params, x)
    assert torch.equal(net(x), before)


@some_calls
def test_the_module_s_own_parameters_can_be_what_is_differentiated(name, options):
    net = module("linear")
    params, batch = dict(net.named_parameters()), {"x": inputs(5)}
    with unchanged(net, params, batch):
        CALLS[name].run(squares(net, functional_call), params, batch, **options)


@pytest.mark.promise("writes")
@pytest.mark.parametrize("size", [2, 6])
def test_captured_buffers_that_would_be_written_raise_and_stay(size):
    """torch.func refuses to write to what it did not clone; so nothing was written."""
    net = module("batch norm")
    params = other_params(net)
    options = {"microbatch_size": size, "check": False}
    with unchanged(net, params), pytest.raises(RuntimeError, match="mutate a captured Tensor"):
        pa.grad(lambda p, x: functional_call(net, p, x).mean(), **options)(params, inputs(6))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_frozen_parameter_stays_frozen_and_has_a_gradient(engine):
    """``requires_grad`` says what ``.backward()`` reaches; argnums says what is differentiated."""
    net = module("linear").requires_grad_(False)
    gradient = pa.grad(squares(net, functional_call), microbatch_size=2, engine=engine)
    with unchanged(net):
        grads = gradient(dict(net.named_parameters()), {"x": inputs(5)})
    assert all(bool(grad.any()) for grad in grads.values())


# A module that recomputes does so with the parameters that it was given ------------------------


NAMED = ("linear", "a method", "lstm", "nested")


def gradients(loss, params, x, size=2):
    wrt = tuple(range(len(params)))
    options = {"batch_argnums": len(params), "microbatch_size": size, "check": False}
    return pa.grad(loss, wrt, engine="autograd", **options)(*params, x)


def check(loss, nets, params, x, size=2, plain=None):
    """That a gradient is the one without checkpoints, and changes nothing."""
    expected = by_hand(plain or loss, nets, params, x, size)
    with unchanged(nets, params, [x]):
        grads = gradients(loss, params, x, size)
    assert_trees_bitwise_equal(grads, expected)


@pytest.mark.given_up("retries")
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("size", [3, 8])
def test_the_gradient_is_that_without_checkpoints(name, size):
    net = make(name)
    check(square(net), [net], (other_params(net),), inputs(8), size)


@pytest.mark.given_up("retries")
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("donate", [False, True])
def test_the_gradient_of_a_stream_is_that_without_checkpoints(name, donate):
    net, x = make(name), inputs(8)
    params = other_params(net)
    (expected,) = by_hand(square(net), [net], (params,), x, 3)
    with unchanged(net, params, [x]):
        acc = pa.accumulator(square(net), engine="autograd")
        grads, _ = acc.finalize(in_parts(acc, params, pa.microbatches(x, 3), donate))
    assert_trees_bitwise_equal(grads, expected)


def product(net, other):
    """Of two modules, each with parameters of its own; or of one that is called twice."""
    return lambda p, q, x: (call(net, p, x) * call(other, q, x)).mean()


@pytest.mark.given_up("retries")
def test_two_modules_in_one_loss_recompute_with_their_own_parameters():
    nets = [make("linear", 0), make("a method", 5)]
    params = tuple(other_params(net, i) for i, net in enumerate(nets))
    check(product(*nets), nets, params, inputs(5))


@pytest.mark.given_up("retries")
@pytest.mark.parametrize("name", NETWORKS)
def test_a_module_may_be_called_twice_with_the_same_parameters(name):
    """And with buffers of its own each time, which a gradient does not depend on."""
    net = make(name)
    loss = lambda p, x: (call(net, p, x) * call(net, p, -x)).mean()  # noqa: E731
    check(loss, [net], (other_params(net),), inputs(6))


def two_that_share_one():
    shared = nn.Linear(3, 3)
    return [Checkpointed(shared).double(), Checkpointed(shared).double()]


AMBIGUOUS = {name: lambda name=name: [make(name)] * 2 for name in NAMED} | {
    "two modules that share one": two_that_share_one
}


@pytest.mark.given_up("retries")
# torch 2.11 leaves the generator of an inner checkpoint to the garbage collector, which complains.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", AMBIGUOUS)
def test_a_module_called_twice_with_different_parameters_is_refused(name):
    """A recomputation cannot tell whose it is: an error, never a wrong gradient."""
    nets = AMBIGUOUS[name]()
    params = other_params(nets[0], 1), other_params(nets[1], 2)
    said = "two different sets of parameters"
    with unchanged(nets, params), pytest.raises(RuntimeError, match=said):
        gradients(product(*nets), params, inputs(5))


@pytest.mark.promise("second run")
def test_what_the_refusal_advises_works():
    net = make("linear")
    net.on = False

    def again(p, x):
        return checkpoint(lambda p, x: functional_call(net, p, x), p, x, use_reentrant=False)

    loss = lambda p, q, x: (again(p, x) * again(q, x)).mean()  # noqa: E731
    params = other_params(net, 1), other_params(net, 2)
    check(loss, [], params, inputs(5), plain=product(net, net))


@pytest.mark.promise("followed")
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_module_that_recomputes_has_its_gradient_or_is_refused(name, engine):
    """Never a gradient without a part, nor one with the module's own parameters."""
    net, x = make(name), inputs(8)
    params, loss = other_params(net), square(net)
    (want,) = by_hand(loss, [net], (params,), x, 4)
    with unchanged(net, params, [x]):
        try:
            got = pa.grad(loss, microbatch_size=4, engine=engine, check=False)(params, x)
        except RuntimeError as error:
            if "checkpoint" not in str(error) and "hooks" not in str(error):
                raise
            return
    for key in want:
        assert (got[key] - want[key]).norm() <= ROOT * (1 + want[key].norm())


@pytest.mark.promise("followed")
def test_a_functional_call_inside_a_module_is_right_or_refused():
    """Parameters that a forward pass makes are held by nobody once it is over."""
    net = Generated().double()
    try:
        check(square(net), [net], (other_params(net),), inputs(5))
    except RuntimeError as error:
        if "checkpoint" not in str(error):
            raise


class Fails(nn.Module):
    """Raises in the forward pass in which ``fails`` says so."""

    def __init__(self, fails):
        super().__init__()
        self.linear, self.fails = nn.Linear(3, 3), iter(fails)

    def forward(self, x):
        if not is_dropped() and next(self.fails):
            raise KeyError("boom")
        return self.linear(x)


@pytest.mark.parametrize(
    "fails",
    [
        pytest.param([True], id="forward"),
        pytest.param([False, True], id="recomputation", marks=pytest.mark.given_up("retries")),
    ],
)
def test_an_error_inside_a_module_leaves_it_as_it_was(fails):
    net = Checkpointed(Fails(fails)).double()
    net.register_forward_hook(lambda *_: None, always_call=True)
    net.register_forward_hook(lambda *_: None)
    params = other_params(net)
    with unchanged(net, params), pytest.raises(KeyError, match="boom"):
        gradients(square(net), (params,), inputs(4))


@pytest.mark.given_up("retries")
def test_hooks_of_the_user_run_as_often_as_in_torch():
    net, x, calls = make("linear"), inputs(4), []
    net.head.register_forward_pre_hook(lambda *_: calls.append("head"))
    net.block.register_forward_pre_hook(lambda *_: calls.append("block"))
    loss = square(net)
    with unchanged(net):
        gradients(loss, (other_params(net),), x, 4)
        calls.clear()  # the first call of a loss is made twice
        gradients(loss, (other_params(net),), x, 4)
    assert calls == ["block", "head", "block"]  # … and the recomputation


@pytest.mark.parametrize("where", ["around the call", "inside the loss"])
def test_saved_tensor_hooks_of_the_user_are_asked(where):
    """Offloading to a host, for one; they are how a checkpoint works, too."""
    net, x = make("a method"), inputs(5)
    params, packed, unpacked = (other_params(net),), [], []
    pack = lambda t: packed.append(0) or t  # noqa: E731
    unpack = lambda t: unpacked.append(0) or t  # noqa: E731
    hooks = lambda here: saved_tensors_hooks(pack, unpack) if here == where else nullcontext()  # noqa: E731

    def loss(p, x):
        with hooks("inside the loss"):
            return square(net)(p, x)

    expected = by_hand(square(net), [net], params, x, 2)
    switch([net], on=False)
    with unchanged(net, params), hooks("around the call"):
        grads = gradients(loss, params, x)
    assert_trees_bitwise_equal(grads, expected)
    assert 0 < len(unpacked) <= len(packed)


def test_parameters_of_the_module_itself_stay_free_of_gradients():
    """Reentrant or captured: nothing is left in ``.grad``."""
    net, x = nn.Sequential(Direct(), nn.Linear(3, 1)).double(), inputs(4)
    params = {"weight": torch.ones(3, 1, dtype=torch.float64)}
    with unchanged(net):
        (grads,) = gradients(lambda p, x: (net(x) @ p["weight"][:1]).mean(), (params,), x, 2)
    assert grads["weight"].any()
