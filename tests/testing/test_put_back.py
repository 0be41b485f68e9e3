"""What a loss keeps, and random numbers, are after a check what they were before."""

import random
from collections import deque
from functools import lru_cache, partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from pureaccum.testing._check.subject import preserving_random, reseed
from tests.testing.problems import W, X, report_of, squares


pytestmark = [pytest.mark.purity, pytest.mark.promise("purity"), pytest.mark.promise("check")]


class Owner:
    calls = 0

    def loss(self, w, x):
        self.calls += 1
        return squares(w, x)


calls = 0


def in_a_cell():
    count = 0

    def loss(w, x):
        nonlocal count
        count += 1
        return squares(w, x)

    return loss, lambda: count


def in_a_global():
    def loss(w, x):
        global calls
        calls += 1
        return squares(w, x)

    return loss, lambda: calls


def in_arguments():
    def loss(seen, w, x, *, also):
        seen.append(1)
        also[len(also)] = 1
        return squares(w, x)

    seen, also = [], {}
    return partial(loss, seen, also=also), lambda: (seen[:], {**also})


def in_the_owner():
    owner = Owner()
    return owner.loss, lambda: owner.calls


def held(make, change):
    """In what a function holds."""

    def keeper():
        thing = make()

        def loss(w, x):
            change(thing)
            return squares(w, x)

        return loss, lambda: repr(vars(thing) if isinstance(thing, (nn.Module, Owner)) else thing)

    return keeper


def in_a_default():
    def loss(w, x, seen=[0], *, also={}):  # noqa: B006
        seen[0] += 1
        also[len(also)] = 1
        return squares(w, x)

    return loss, lambda: repr((loss.__defaults__, loss.__kwdefaults__))


def grow(x):
    x.data = torch.cat([x.data, x.data[:1]])


KEEPERS = {
    "a cell": in_a_cell,
    "a default": in_a_default,
    "a namespace": held(lambda: SimpleNamespace(n=0), lambda x: setattr(x, "n", x.n + 1)),
    "a queue": held(lambda: deque([0], maxlen=3), lambda x: x.append(len(x))),
    "a set": held(set, lambda x: x.add(len(x))),
    "an array": held(lambda: np.zeros(2), lambda x: x.__iadd__(1)),
    "a tensor that grows": held(lambda: torch.ones(2), grow),
    "a tensor that comes round": held(
        lambda: torch.zeros((), dtype=torch.int64), lambda x: x.add_(1).remainder_(2)
    ),
    "hooks": held(nn.Identity, lambda x: x.register_forward_hook(lambda *_: None)),
    "a global": in_a_global,
    "arguments of a partial": in_arguments,
    "the owner of a method": in_the_owner,
    "a dict": held(lambda: {1: 0}, lambda x: x.update({1: x[1] + 1, 2: 3})),
    "a list": held(list, lambda x: x.append(1)),
    "a list in a dict": held(lambda: {"a": []}, lambda x: x["a"].append(1)),
    "a tensor": held(lambda: torch.tensor([torch.nan, 0]), lambda x: x.add_(1)),
    "an attribute": held(Owner, lambda x: x.loss(W, X)),
    "an attribute of a module": held(nn.Identity, lambda x: setattr(x, "calls", len(vars(x)))),
    "a buffer": held(
        lambda: nn.BatchNorm1d(3), lambda x: setattr(x, "running_mean", x.running_mean + 1)
    ),
    "a parameter": held(
        lambda: nn.Linear(1, 1), lambda x: setattr(x, "bias", nn.Parameter(x.bias.data + 1))
    ),
}


@pytest.mark.parametrize("keeper", KEEPERS.values(), ids=KEEPERS)
def test_what_a_loss_keeps_is_put_back(keeper):
    loss, read = keeper()
    before = read()
    report_of(loss)
    assert read() == before
    loss(W, X)
    assert read() != before  # the control


def test_a_nan_that_is_kept_is_not_written():
    missing = torch.tensor([torch.nan, 1.0, 1.0])
    assert report_of(lambda w, x: squares(w * missing.nan_to_num(), x)).fits


own = torch.Generator()


def drawn():
    one = torch.rand((), generator=own).item()
    return torch.rand(()).item(), random.random(), np.random.random(), one


@pytest.mark.mechanism
@pytest.mark.parametrize("seed", [0, 2**32 + 1])
def test_random_numbers_begin_anew_with_a_seed(seed):
    with preserving_random():
        reseed(seed, [own])
        first = drawn()
        reseed(seed, [own])
        assert drawn() == first
        reseed(seed + 1, [own])
        assert not {*drawn()} & {*first}


@pytest.mark.mechanism
def test_random_states_are_preserved():
    with preserving_random([own]):
        reseed(3, [own])
        expected = drawn()
        reseed(3, [own])
        with preserving_random([own]):
            reseed(4, [own])
            drawn()
        assert drawn() == expected


def test_gradients_of_what_a_loss_holds_are_put_back():
    """A backward pass inside the loss is state: what it accumulates is said, and taken back."""
    critic = nn.Linear(3, 1)
    critic.bias.grad = torch.ones(1)

    def loss(w, x):
        critic(x).square().mean().backward()
        return squares(w, x)

    report = report_of(loss)
    assert report.diagnoses[0].kind == "state"
    assert "critic" in report.diagnoses[0].says
    assert critic.weight.grad is None
    assert critic.bias.grad.equal(torch.ones(1))


def test_nothing_of_another_dtype_stays_in_a_cache():
    @lru_cache
    def table(rows):
        return torch.eye(rows)

    def loss(w, x):
        return squares(w, table(len(x)) @ x)

    assert report_of(loss).fits
    assert loss(W, X).dtype == torch.float32
