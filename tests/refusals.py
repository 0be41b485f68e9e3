"""What a refusal has to be, and the public functions that may refuse."""

import traceback
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import pureaccum as pa
from pureaccum.testing import unchanged
from tests.dropped import is_dropped


PACKAGE = Path(pa.__file__).parent
Tensors = dict[str, Tensor]
PARAMS = {"b": torch.tensor(1.0), "w": torch.tensor([1.0, -2.0])}


class Old(torch.autograd.Function):
    """A Function as they were before setup_context, which torch.func refuses."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class Loss:
    """Counts its calls."""

    def __init__(self, func):
        self.func, self.calls = func, 0

    def __call__(self, *args):
        self.calls += not is_dropped()
        return self.func(*args)


def squares(params, batch):
    return ((batch["x"] @ params["w"] + params["b"]) ** 2).mean()


def make_batch(rows=4):
    return {"x": torch.arange(2.0 * rows).reshape(rows, 2)}


def saying(error, *words):
    """``pytest.raises``, for an error that holds all words whatever lies between them."""

    def holds(raised):
        missing = [word for word in words if word not in str(raised)]
        assert not missing, f"{missing} not in {raised}"
        return True

    return pytest.raises(error, check=holds)


@contextmanager
def refused(error, *words, given=(), loss=None, calls=0):
    """An error of the package's own, with these words, after so many calls; nothing has changed."""
    with unchanged(given), saying(error, *words) as caught:
        yield
    last = traceback.extract_tb(caught.tb)[-1].filename
    assert PACKAGE in Path(last).parents, f"raised in {last}"
    assert loss is None or loss.calls == calls


class Receiver(NamedTuple):
    """A public function as ``run(loss, params, batch, **options)``; how it calls its arguments."""

    run: Callable[..., Any]
    params: str
    batch: str


def _update(donate):
    def run(loss, params, batch, **options):
        """Into a state that is not empty, and that an error leaves as it is."""
        acc = pa.accumulator(loss, **options)
        started = pa.accumulator(squares)
        with torch.autocast("cpu", enabled=False):
            state = started.update(started.init(PARAMS), PARAMS, make_batch(3))
        with unchanged(state) if not donate else _unchanged_if_refused(state):
            return acc.update(state, params, batch, donate=donate)

    return run


@contextmanager
def _unchanged_if_refused(state):
    before = pa.accumulator(squares).merge(state, pa.accumulator(squares).init(PARAMS))
    try:
        yield
    except Exception:
        torch.testing.assert_close(tuple(state), tuple(before), rtol=0, atol=0)
        raise


RECEIVERS = {
    "grad": Receiver(
        lambda f, p, b, **k: pa.grad(f, microbatch_size=2, **k)(p, b), "args[0]", "args[1]"
    ),
    "grad_and_value": Receiver(
        lambda f, p, b, **k: pa.grad_and_value(f, microbatch_size=2, engine="autograd", **k)(p, b),
        "args[0]",
        "args[1]",
    ),
    "grad, skip": Receiver(
        lambda f, p, b, **k: pa.grad(f, microbatch_size=2, nonfinite="skip", **k)(p, b),
        "args[0]",
        "args[1]",
    ),
    "value": Receiver(
        lambda f, p, b, **k: pa.value(f, microbatch_size=2, **k)(p, b), "", "args[1]"
    ),
    "update": Receiver(_update(donate=False), "params", "batch"),
    "donated update": Receiver(_update(donate=True), "params", "batch"),
    "microbatches": Receiver(lambda f, p, b: pa.microbatches(b, 2), "", "batch"),
}


def receivers_but(*names):
    return {name: to for name, to in RECEIVERS.items() if name not in names}


def receivers(*but):
    """Parametrize over all receivers but some."""
    to = receivers_but(*but)
    return pytest.mark.parametrize("to", to.values(), ids=to)


def advice_on(error):
    """The notes on an error, but for the one that says which samples raised it."""
    return [x for x in getattr(error, "__notes__", []) if not x.startswith("pureaccum: raised ")]
