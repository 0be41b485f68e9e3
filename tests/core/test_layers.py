"""A new statistic is one file and one line: a layer from outside of the package.

The file sums the cosine between each microbatch's gradient and the sum before it; the line puts it
into ``LAYERS``. The core does not know it.
"""

import pytest
import torch
from torch import Tensor

import pureaccum as pa
from pureaccum._core.layers.order import LAYERS
from pureaccum._core.seams import judged_below, taking


pytestmark = [pytest.mark.laws, pytest.mark.mechanism]
found = []


# The file ----------------------------------------------------------------------------------------


def cosines(seams, window):
    """Sum the cosines between the gradients of microbatches and the sums before them."""
    inner, parts = taking(seams, window), list[Tensor]()

    def take(which, grads, weighing):
        for i, grad in zip(which, grads, strict=True):
            total = window.sink.tensors[i]
            if total is not None:
                parts.append(torch.stack([(grad * total).sum(), *map(square, (grad, total))]))
        inner(which, grads, weighing)

    def judge(entry, weighing):
        if parts:
            dot, one, other = torch.stack(parts).sum(0)
            found.append(dot / (one * other).sqrt())
            parts.clear()
        return judged_below(seams, entry, weighing)

    return seams._replace(take=take, judge=judge)


def square(x):
    return x.square().sum()


# The line ----------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _asked():
    found.clear()
    LAYERS.append((lambda rule: True, cosines))
    yield
    LAYERS.pop()


# What it gives -----------------------------------------------------------------------------------


ROWS = torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 4.0], [-2.0, 1.0]])


def loss(params, x):
    return ((x @ params["w"]).tanh() + params["b"]).square().mean()


def by_hand(params):
    total, cosines = torch.zeros(3), []
    for x in ROWS.split(1):
        grads = torch.func.grad(loss)(params, x)
        grad = torch.cat([grads["b"].view(1), grads["w"]])
        if total.any():
            cosines.append(torch.nn.functional.cosine_similarity(grad, total, 0))
        total = total + grad
    return cosines


@pytest.mark.parametrize("engine", ["func", "autograd"])
@pytest.mark.parametrize("options", [{}, {"nonfinite": "skip"}, {"has_aux": True}], ids=str)
def test_the_cosines_of_a_batch(engine, options):
    params = {"w": torch.tensor([0.3, -0.2]), "b": torch.tensor(0.5)}
    own = (lambda p, x: (loss(p, x), {})) if "has_aux" in options else loss
    pa.grad(own, microbatch_size=1, engine=engine, **options)(params, ROWS)
    torch.testing.assert_close(found[-3:], by_hand(params), rtol=1e-5, atol=1e-6)


def test_without_the_line_none_of_it_runs():
    LAYERS.pop()
    pa.grad(loss, microbatch_size=1)({"w": torch.ones(2), "b": torch.tensor(0.5)}, ROWS)
    assert not found
    LAYERS.append((lambda rule: True, cosines))
