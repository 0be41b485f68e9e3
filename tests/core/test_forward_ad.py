"""Dual tensors of ``torch.autograd.forward_ad`` keep their tangents, outside of any transform.

``detach`` drops a tangent without a word, and so would an engine that works on detached leaves.
What is expected is ``torch.func.jvp`` of the same of the full batch, in float64, within sqrt(u).
"""

import optree
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import pureaccum as pa
from tests.problems import in_parts, near, normal, once


pytestmark = [pytest.mark.transforms, pytest.mark.promise("closure")]


def rows(w, x):
    return torch.tanh(x @ w) @ w


def loss(w, x):
    return rows(w, x).square().mean()


def total(w, x):
    return rows(w, x).square().sum()


def weighted(w, x):
    return pa.Weighted(total(w, x), x.new_tensor(3.0 * len(x)))


def stepped(optimizer, gradient):
    """Two steps of an optimizer."""

    def run(w, x):
        state = optimizer.init(w)
        for _ in range(2):
            w, state = optimizer.apply(gradient(w, x), state, w)
        return w

    return run


def by_step(optimizer, **knobs):
    step = pa.make_step(loss, optimizer, microbatch_size=2, **knobs)
    return lambda w, x: step(once(step, w, x)[0], x)[0].params


def streamed(w, x):
    acc = pa.accumulator(loss)
    return acc.finalize(in_parts(acc, w, x.split(2)))


def backward(f, create_graph=False):
    """The gradients of what comes out, squared and summed, by plain autograd."""

    def run(w, x):
        its = [it if it.requires_grad else it.requires_grad_() for it in (w, x)]
        return torch.autograd.grad(squared(f)(*its), its, create_graph=create_graph)

    return run


def squared(f):
    return lambda w, x: f(w, x).square().sum()


NET = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)).double()


def networked(size):
    fn = pa.functional(NET, microbatch_size=size)
    return lambda w, x: fn.apply(fn.params, fn.buffers, x @ w)[0]


GRAD = torch.func.grad(loss)
BOTH = torch.func.grad_and_value(loss)
EACH = torch.func.vmap(GRAD, (None, 0))
CASES = {
    "grad of the whole": (pa.grad(loss), GRAD),
    "grad": (pa.grad(loss, microbatch_size=2), GRAD),
    "grad by autograd": (pa.grad(loss, microbatch_size=2, engine="autograd"), GRAD),
    "grad_and_value": (pa.grad_and_value(loss, microbatch_size=2), BOTH),
    "grad of Weighted": (pa.grad(weighted, microbatch_size=2), GRAD),
    "value": (pa.value(loss, microbatch_size=2), loss),
    "accumulator": (streamed, BOTH),
    "single samples": (
        pa.per_sample_grad(loss, chunk_size=2, keep_batch_dim=True, reduce="concat"),
        lambda w, x: EACH(w, x[:, None]),
    ),
    "their mean": (
        pa.per_sample_grad(loss, chunk_size=2, keep_batch_dim=True, reduce="mean"),
        GRAD,
    ),
    "sgd": (by_step(pa.sgd(0.1, momentum=0.9)), stepped(pa.sgd(0.1, momentum=0.9), GRAD)),
    "adamw": (by_step(pa.adamw(0.1)), stepped(pa.adamw(0.1), GRAD)),
    "donated": (by_step(pa.sgd(0.1), donate=True), stepped(pa.sgd(0.1), GRAD)),
    "microbatch": (pa.microbatch(rows, microbatch_size=2), rows),
    "remat": (pa.remat(rows), rows),
}


def mapped(f):
    """The gradient of a sum, mapped over a factor."""

    def run(w, x):
        factors = torch.tensor([1.0, 2.0], dtype=torch.float64)
        return torch.func.vmap(lambda c: torch.func.grad(lambda w: f(c * w, x))(w))(factors)

    return run


CASES["under vmap"] = (mapped(pa.microbatch(total, microbatch_size=2, reduce="sum")), mapped(total))
MICROBATCHED = {
    "rows": (pa.microbatch(rows, microbatch_size=2), rows),
    "a sum": (pa.microbatch(total, microbatch_size=2, reduce="sum"), total),
    "a weighted mean": (pa.microbatch(weighted, microbatch_size=2), loss),
    "one piece": (pa.remat(rows), rows),
    "BatchNorm": (networked(2), networked(None)),
}
for _name, (_ours, _whole) in MICROBATCHED.items():
    for _create in (False, True):
        _key = f"backward of {_name}" + ", recorded" * _create
        CASES[_key] = (backward(_ours, _create), torch.func.grad(squared(_whole), (0, 1)))


@pytest.mark.parametrize(("ours", "plain"), CASES.values(), ids=CASES)
def test_tangents_go_along(ours, plain):
    for dual in ("w", "x", "wx"):
        check(ours, plain, dual)


def check(ours, plain, dual):
    primals = normal(3, 3), normal(6, 3, seed=1)
    directions = normal(3, 3, seed=2), normal(6, 3, seed=3)
    tangents = [t if which in dual else 0 * t for t, which in zip(directions, "wx", strict=True)]
    value, want = torch.func.jvp(plain, primals, tuple(tangents))
    with forward_ad.dual_level():
        given = [
            forward_ad.make_dual(p.clone(), t) if which in dual else p.clone()
            for p, t, which in zip(primals, tangents, "wx", strict=True)
        ]
        pairs = [forward_ad.unpack_dual(x) for x in optree.tree_leaves(ours(*given))]
    near([pair.primal for pair in pairs], optree.tree_leaves(value), floor=1)
    near([pair.tangent for pair in pairs], optree.tree_leaves(want), floor=1)
