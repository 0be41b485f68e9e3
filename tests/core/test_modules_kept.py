"""A module that is called with other parameters keeps its own: parameters, buffers, hooks, mode."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

import pureaccum as pa
from pureaccum.testing import unchanged
from tests.calls import CALLS, ENGINES, BoomError, combinations
from tests.pure.networks import call, inputs, make, other_params, switch


pytestmark = [pytest.mark.purity, pytest.mark.promise("purity")]
Tensors = dict[str, Tensor]
NAMES = ("linear", "lstm", "parametrized", "batch norm", "tied", "nested")
some_calls = pytest.mark.parametrize(
    ("name", "knobs"),
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
def test_a_call_leaves_the_module_as_it_was(name, knobs, network, fails):
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
        CALLS[name].run(squares(net), params, batch, check=False, **knobs)


@pytest.mark.parametrize("network", NAMES)
@pytest.mark.parametrize("engine", ENGINES)
def test_after_a_call_a_module_computes_with_its_own_parameters(network, engine):
    net = module(network).eval()
    params, x = other_params(net), inputs(6)
    before = net(x)
    pa.grad(lambda p, x: (call(net, p, x) ** 2).mean(), microbatch_size=2, engine=engine)(params, x)
    assert torch.equal(net(x), before)


@some_calls
def test_the_module_s_own_parameters_can_be_what_is_differentiated(name, knobs):
    net = module("linear")
    params, batch = dict(net.named_parameters()), {"x": inputs(5)}
    with unchanged(net, params, batch):
        CALLS[name].run(squares(net, functional_call), params, batch, **knobs)


@pytest.mark.parametrize("size", [2, 6])
def test_captured_buffers_that_would_be_written_raise_and_stay(size):
    """torch.func refuses to write to what it did not clone; so nothing was written."""
    net = module("batch norm")
    params = other_params(net)
    knobs = {"microbatch_size": size, "check": False}
    with unchanged(net, params), pytest.raises(RuntimeError, match="mutate a captured Tensor"):
        pa.grad(lambda p, x: functional_call(net, p, x).mean(), **knobs)(params, inputs(6))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_frozen_parameter_stays_frozen_and_has_a_gradient(engine):
    """``requires_grad`` says what ``.backward()`` reaches; argnums says what is differentiated."""
    net = module("linear").requires_grad_(False)
    gradient = pa.grad(squares(net, functional_call), microbatch_size=2, engine=engine)
    with unchanged(net):
        grads = gradient(dict(net.named_parameters()), {"x": inputs(5)})
    assert all(bool(grad.any()) for grad in grads.values())
