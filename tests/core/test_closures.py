"""What a function holds is found, wherever it holds it."""

import logging
from collections import OrderedDict
from functools import partial, wraps
from types import SimpleNamespace
from weakref import ref

import pytest
import torch
from torch import nn

import pureaccum as pa
from pureaccum._core.closures import MOST, held_by


pytestmark = [pytest.mark.purity, pytest.mark.mechanism]
T, NET = torch.ones(2), nn.Linear(2, 2)
FN = pa.functional(NET)
LOGGER = logging.getLogger(__name__)
LOGGER.net = NET


class Slotted:
    __slots__ = ("empty", "net")

    def __init__(self):
        self.net = NET


class Owner:
    def __init__(self):
        self.nets, self.itself = [NET], self

    def call(self, x):
        return self.nets[0](x) * T

    def __call__(self, x):
        return self.call(x)


def closing(*held):
    return lambda x: (held, x)


def later():
    def of(x):
        return net(x)  # not assigned yet

    found = held_by(of)
    net = NET
    return found, net


def decorated(func):
    @wraps(func)
    def called(*args):
        return func(*args)

    return called


HOLDERS = {
    "a module": (NET, True, False),
    "a closure": (closing(NET, T), True, True),
    "a closure in a closure": (closing(closing(NET)), True, False),
    "a default": (lambda x, net=NET: net(x), True, False),
    "a default by name": (lambda x, *, t=T: t * x, False, True),
    "a partial": (partial(lambda net, x, t: net(x) * t, NET, t=T), True, True),
    "a bound method": (Owner().call, True, True),
    "an object that is called": (closing(Owner()), True, False),
    "a module's method": (NET.extra_repr, True, False),
    "a global name": (lambda x: NET(x), True, False),
    "a global name of a function inside": (lambda: lambda x: T * x, False, True),
    "a decorated function": (decorated(lambda x: NET(x)), True, False),
    "containers": (closing([{"a": (NET,)}], OrderedDict(t=T), {1, frozenset([T])}), True, True),
    "attributes": (closing(SimpleNamespace(deep=SimpleNamespace(net=NET))), True, False),
    "slots": (closing(Slotted()), True, False),
    "a weak reference": (closing(ref(NET)), True, False),
    "a functional module": (closing(FN.apply), True, False),
    "a logger, which holds all others": (closing(LOGGER), False, False),
    "nothing": (lambda x: torch.nn.functional.relu(x) + len([1, "a", None]), False, False),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_modules_and_tensors_are_found(name):
    func, module, tensor = HOLDERS[name]
    held = held_by(func)
    assert held is not None
    modules, tensors = held
    assert any(x is NET for x in modules) == module
    assert any(x is T for x in tensors) == tensor


def test_a_variable_that_is_not_assigned_yet_holds_nothing():
    found, _ = later()
    assert found == ([], [])


def test_a_function_that_holds_too_much_is_said_to():
    """It is watched instead, and right."""
    many = [[i] for i in range(MOST)]
    assert held_by(closing(many)) is None
    w = torch.ones(3, requires_grad=True)
    x = torch.arange(6.0).view(2, 3)
    pa.microbatch(lambda x: x * w * len(many), microbatch_size=1, batch_argnums=0)(
        x
    ).sum().backward()
    assert torch.equal(w.grad, x.sum(0) * MOST)
