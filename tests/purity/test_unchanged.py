"""The picture of the world notices whatever might change, and nothing else."""

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.purity.unchanged import unchanged


Change = Callable[[nn.Module, Tensor], Any]


def replace_parameters(module: nn.Module, _: Tensor) -> None:
    module.__dict__["_parameters"] = dict(module._parameters)


CHANGES: dict[str, Change] = {
    "an addition of zero": lambda m, x: x.add_(0),
    "a number": lambda m, x: x.fill_(2),
    "the sign of zero": lambda m, x: x.data.neg_(),
    "requires_grad": lambda m, x: x.requires_grad_(),
    "a grad": lambda m, x: setattr(x, "grad", torch.ones(2)),
    "other memory": lambda m, x: x.set_(x.clone()),
    "a hook on a tensor": lambda m, x: next(m.parameters()).register_hook(lambda g: g),
    "a parameter in place": lambda m, x: m[0].weight.data.add_(1),
    "a parameter replaced": lambda m, x: setattr(m[0], "weight", nn.Parameter(m[0].weight)),
    "a parameter's grad": lambda m, x: m(torch.ones(1, 2)).sum().backward(),
    "the dict of parameters": lambda m, x: replace_parameters(m[0], x),
    "a buffer": lambda m, x: m[1](torch.ones(2, 2)),
    "a hook on a module": lambda m, x: m[0].register_forward_hook(lambda *_: None),
    "training": lambda m, x: m.eval(),
    "a draw": lambda m, x: torch.rand(1),
    "a draw in Python": lambda m, x: random.random(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_it_notices(change: Change) -> None:
    module, x = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), torch.zeros(2)
    with pytest.raises(AssertionError), unchanged(module, [x]):
        change(module, x)


@pytest.mark.parametrize("name", ["pre_hook", "hook"])
def test_it_notices_hooks_of_all_modules(name: str) -> None:
    register = getattr(nn.modules.module, f"register_module_forward_{name}")
    handles: list[Any] = []
    with pytest.raises(AssertionError), unchanged():
        handles.append(register(lambda *_: None))
    handles[0].remove()


def test_it_notices_a_mode_also_when_an_error_comes() -> None:
    def leave_a_mode() -> None:
        torch.set_grad_enabled(False)
        raise RuntimeError

    try:
        with pytest.raises(AssertionError), unchanged(), suppress(KeyError):
            leave_a_mode()
    finally:
        torch.set_grad_enabled(True)


def test_it_lets_be_what_does_not_change() -> None:
    module, x = nn.Linear(2, 2), torch.full((2,), torch.nan)
    with unchanged(module, {"x": x}):
        module(x)
    with unchanged(module, draws=True):
        torch.rand(1)
