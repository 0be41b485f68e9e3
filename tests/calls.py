"""Every public function, called on one small world."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import pureaccum as pa


ENGINES = ("func", "autograd")
NONFINITE = ("propagate", "skip", "raise")
Tensors = dict[str, Tensor]
Loss = Callable[[Any, Any], Any]


class BoomError(Exception):
    """What losses of these tests raise."""


class Explodes(Function):
    """Good forward, bad backward."""

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_):
        raise BoomError


def make_params():
    """A small leaf and one of 1 MiB, whose gradient takes another way into the sum."""
    return {"w": torch.tensor([1.0, -2.0]), "large": torch.ones(512, 512)}


def make_batch(rows=5):
    return {"x": torch.arange(2.0 * rows).reshape(rows, 2) - 3, "y": torch.arange(1.0 * rows)}


def mean_loss(params, batch):
    out = batch["x"] @ params["w"] + (params["large"] * params["large"]).sum() * 2.0**-18
    return ((out - batch["y"]) ** 2).mean()


def with_aux(loss):
    return lambda params, batch: (loss(params, batch), {"rows": batch["x"].sum(1)})


class Call(NamedTuple):
    """A public function as ``run(loss, params, batch, **options)``, two samples a microbatch."""

    run: Callable[..., Any]
    differentiates: bool = True


def _stream(loss, params, batch, donate=False, **options):
    acc = pa.accumulator(loss, **options)
    state = acc.init(params)
    for part in pa.microbatches(batch, 2):
        state = acc.update(state, params, part, donate=donate)
    return acc.finalize(acc.merge(state, acc.init(params)), donate=donate)


CALLS = {
    "grad": Call(lambda f, p, b, **k: pa.grad(f, microbatch_size=2, **k)(p, b)),
    "grad_and_value": Call(lambda f, p, b, **k: pa.grad_and_value(f, microbatch_size=2, **k)(p, b)),
    "grad with aux": Call(
        lambda f, p, b, **k: pa.grad(with_aux(f), has_aux=True, microbatch_size=2, **k)(p, b)
    ),
    "one microbatch": Call(lambda f, p, b, **k: pa.grad(f, microbatch_size=9, **k)(p, b)),
    "stream": Call(_stream),
    "donated stream": Call(lambda f, p, b, **k: _stream(f, p, b, donate=True, **k)),
    "value": Call(
        lambda f, p, b, check=True, **_: pa.value(f, microbatch_size=2, check=check)(p, b), False
    ),
}


def combinations(*names, nonfinite=NONFINITE):
    """Calls with the options that they take, for ``parametrize(("name", "options"), ...)``.

    Any two of a call, an engine and a word for ``nonfinite`` come together in one of them.
    """
    return [
        pytest.param(name, given, id="-".join([name, *given.values()]))
        for i, name in enumerate(names or CALLS)
        for j, word in enumerate(nonfinite if CALLS[name].differentiates else nonfinite[:1])
        for given in [{"engine": ENGINES[(i + j) % 2], "nonfinite": word}]
    ]


GRADIENTS = [name for name, call in CALLS.items() if call.differentiates]
