"""The window that writes in place gives the bits of the one that writes to nothing.

Over the zoo of losses, engine by engine; and for every pair of layers.
"""

import random
from contextlib import contextmanager
from itertools import combinations

import numpy as np
import pytest
import torch

import pureaccum as pa
from pureaccum._base.torch_internals import modes
from pureaccum._core.sums import kinds_of
from pureaccum.testing import assert_trees_bitwise_equal
from tests.zoo.residents import residents


pytestmark = [pytest.mark.laws, pytest.mark.mechanism]


@contextmanager
def out_of_place(patch):
    asked = []
    patch.setattr(modes, "may_add_in_place", lambda: asked.append("") is not None)
    yield asked
    patch.undo()


def outcome(run):
    """What a run gives, or the error that it ends in."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    try:
        return run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def assert_both_windows_give(run, patch):
    written = outcome(run)
    with out_of_place(patch) as asked:
        plain = outcome(run)
    assert asked
    if isinstance(plain, str):
        assert written == plain
    else:
        assert_trees_bitwise_equal(written, plain)


# A sparse gradient is added entry by entry in place; a term of a new sum is dense, and so entries
# of one sample are added to each other first, which rounds otherwise.
SPARSE = {"sparse_embedding"}


@pytest.mark.parametrize("engine", ["func", "autograd"])
@pytest.mark.parametrize(
    ("species", "dtype"), residents(lambda it: it.kind != "impure" and it.name not in SPARSE)
)
def test_the_zoo(species, dtype, engine, monkeypatch):
    known = {"reduction", "has_aux", "batch_argnums"}

    def run():
        loss, params, batch, options = species.make(dtype, seed=0)
        own = {name: options[name] for name in known & options.keys()}
        grad = pa.grad_and_value(loss, microbatch_size=5, engine=engine, check=False, **own)
        return grad(params, batch), grad(params, batch)

    assert_both_windows_give(run, monkeypatch)


@pytest.mark.parametrize("engine", ["func", "autograd"])
def test_leaves_that_are_large_together(engine, monkeypatch):
    """None alone: autograd adds all of them, of which one comes with every other microbatch."""
    params = {name: torch.ones(300, 300) for name in "abc"} | {"bias": torch.ones(300)}
    rows = torch.arange(8.0 * 300).view(8, 300).remainder(5) - 2
    rows[:, 0] = torch.arange(8.0) % 4
    kinds = kinds_of([*params.values()], [torch.float32] * 4)
    assert [*kinds.added] == [0, 1, 2, 3]
    assert not kinds.large

    def loss(p, x):
        y = torch.tanh(x @ p["a"] / 64 @ p["b"].mT / 64 + p["bias"])
        return (y @ p["c"] if x[0, 0] == 0 else y).square().mean()

    def run():
        step = pa.make_step(loss, pa.sgd(0.1), microbatch_size=2, engine=engine, check=False)
        return step(step.init(params), rows)

    assert_both_windows_give(run, monkeypatch)


LAYERS = {
    "aux": {"has_aux": True},
    "scale": {"loss_scale": pa.static_loss_scale(2.0**8)},
    "squares": {"noise": True},
    "raise": {"nonfinite": "raise"},
    "skip": {"nonfinite": "skip"},
}
PAIRS = [*combinations(LAYERS, 2), *((layer,) for layer in LAYERS), ()]


@pytest.mark.parametrize("bad", [False, True], ids=["finite", "nan"])
@pytest.mark.parametrize(
    "large", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["small", "large"]
)
@pytest.mark.parametrize("engine", ["func", "autograd"])
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_every_pair_of_layers(pair, engine, large, bad, monkeypatch):
    """By a whole batch, and as a stream whose windows are given up, and are not."""
    width = 512 if large else 3  # a leaf of 1 MiB is added one by one
    rows = torch.arange(7.0 * width).view(7, width).remainder(5) - 2
    if bad:
        rows[4, 1] = torch.nan

    def loss(params, x):
        y = torch.tanh(x @ params["w"]) * params["v"]
        mean = pa.Weighted(y.square().sum(), (x[:, 0] > -2).sum())
        return (mean, {"y": y.sum(1)}) if "aux" in pair else mean

    def run():
        options = {name: option for layer in pair for name, option in LAYERS[layer].items()}
        found = []
        for donate in (False, True):
            step = pa.make_step(
                loss,
                pa.sgd(0.1),
                microbatch_size=2,
                engine=engine,
                donate=donate,
                check=False,
                **options,
            )
            params = {"w": torch.eye(width) / 4, "v": torch.ones(width), "unused": torch.ones(2)}
            state = step.init(params)
            state, info = step(state, rows)
            state, more = step.window(state, pa.microbatches(rows, 3))
            found += [state, info, more]
        return found

    assert_both_windows_give(run, monkeypatch)
