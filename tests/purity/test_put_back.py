"""What a loss keeps, and random numbers, are after a check what they were before."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pureaccum.testing import check_accumulation
from pureaccum.testing._subject import preserving_random, reseed


W, X = torch.tensor([1.0, -2.0, 0.5]), torch.linspace(-1, 2, 24).reshape(8, 3)


def squares(w: Tensor, x: Tensor) -> Tensor:
    return ((x @ w) ** 2).mean()


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


KEEPERS = {
    "a cell": in_a_cell,
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
    check_accumulation(loss, W, X, raise_on_mismatch=False)
    assert read() == before
    loss(W, X)
    assert read() != before  # the control


def test_a_nan_that_is_kept_is_not_written():
    missing = torch.tensor([torch.nan, 1.0, 1.0])
    assert check_accumulation(lambda w, x: squares(w * missing.nan_to_num(), x), W, X).fits


own = torch.Generator()


def drawn() -> tuple[float, ...]:
    one = torch.rand((), generator=own).item()
    return torch.rand(()).item(), random.random(), np.random.random(), one


@pytest.mark.parametrize("seed", [0, 2**32 + 1])
def test_random_numbers_begin_anew_with_a_seed(seed):
    with preserving_random():
        reseed(seed, [own])
        first = drawn()
        reseed(seed, [own])
        assert drawn() == first
        reseed(seed + 1, [own])
        assert not {*drawn()} & {*first}


def test_random_states_are_preserved():
    with preserving_random([own]):
        reseed(3, [own])
        expected = drawn()
        reseed(3, [own])
        with preserving_random([own]):
            reseed(4, [own])
            drawn()
        assert drawn() == expected
