"""Outer transforms, and what they are compared with: the same transform of torch.func itself.

Both sides are float64. The gradient over microbatches is a sum of pieces, and every transform
here is linear in what it transforms, so an error is measured against the sum of the norms of the
transformed pieces: ``sqrt(u)`` times that, which no cancellation can loosen.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from hypothesis import strategies as st
from torch import Tensor

import pureaccum as pa
from pureaccum.testing.strategies import seeds
from tests.draws import generator


U64 = 2.0**-53
Function = Callable[..., Any]  # (params, batch) -> a tree of tensors


class Problem(NamedTuple):
    """A smooth loss of one kind over a batch, cut in a way."""

    kind: str
    nonfinite: str
    size: int
    params: dict[str, Tensor]
    batch: dict[str, Tensor]

    def loss(self, params, batch):
        out = total(params, batch)
        if self.kind == "mean":
            return out / batch["x"].shape[0]
        return out if self.kind == "sum" else pa.Weighted(out, weight(batch))

    @property
    def options(self):
        return {"reduction": "sum" if self.kind == "sum" else "mean", "nonfinite": self.nonfinite}

    def gradient(self, params, batch):
        return pa.grad(self.loss, microbatch_size=self.size, **self.options)(params, batch)

    def streamed(self, params, batch):
        """The same as a stream of microbatches, half of it in a state of its own."""
        acc = pa.accumulator(self.loss, **self.options)
        states = [acc.init(params), acc.init(params)]
        for i, part in enumerate(pa.microbatches(batch, self.size)):
            states[i % 2] = acc.update(states[i % 2], params, part, donate=i > 2)
        return acc.finalize(acc.merge(*states))[0]

    def value(self, params, batch):
        reduction = self.options["reduction"]
        return pa.value(self.loss, microbatch_size=self.size, reduction=reduction)(params, batch)

    def whole(self, params, batch):
        """The loss over the batch as one piece, as it is defined."""
        return self.piece(slice(None))(params, batch)

    def piece(self, rows):
        """What some of the samples bring to it."""

        def value(params, batch):
            part = {key: column[rows] for key, column in batch.items()}
            by = {"mean": batch["x"].shape[0], "sum": 1.0, "weighted": weight(batch)}
            return total(params, part) / by[self.kind]

        return value

    def pieces(self):
        rows = self.batch["x"].shape[0]
        return [self.piece(slice(i, i + self.size)) for i in range(0, rows, self.size)]

    def check(self, transform, ours="gradient"):
        """That a transform of ours is what it is of torch's, to the bound."""
        unsplit = (lambda f: f) if ours == "value" else torch.func.grad
        self.compare(
            transform(getattr(self, ours))(self.params, self.batch),
            transform(unsplit(self.whole))(self.params, self.batch),
            [transform(unsplit(f))(self.params, self.batch) for f in self.pieces()],
        )

    @staticmethod
    def compare(got, want, terms):
        xs, spec = optree.tree_flatten(got)
        ys, other = optree.tree_flatten(want)
        assert spec == other
        scales = zip(*([leaf.norm() for leaf in optree.tree_leaves(t)] for t in terms), strict=True)
        for x, y, scale in zip(xs, ys, scales, strict=True):
            assert x.shape == y.shape
            assert x.dtype == y.dtype == torch.float64
            assert (x - y).norm() <= U64**0.5 * sum(scale)


def total(params, batch):
    out = torch.tanh(batch["x"] @ params["w"] + params["b"])
    return (batch["mask"] * ((out - batch["y"]) ** 2).sum(-1)).sum()


def weight(batch):
    """Depends on the batch; times the square of what a transform may scale the batch with."""
    return (batch["mask"] * batch["scale"] ** 2).sum()


def make(kind, nonfinite, seed, rows, size):
    g = generator(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    mask = torch.randint(0, 4, (rows,), generator=g).double()
    mask[0] = 1.0
    ones = torch.ones(rows, dtype=torch.float64)
    batch = {
        "x": normal(rows, 3),
        "y": normal(rows, 2),
        "mask": mask if kind == "weighted" else ones,
        "scale": ones,
    }
    return Problem(kind, nonfinite, size, {"w": normal(3, 2), "b": normal(2)}, batch)


kinds = st.sampled_from(["mean", "sum", "weighted"])
policies = st.sampled_from(["propagate", "skip"])
problems = st.builds(make, kinds, policies, seeds(), st.integers(1, 7), st.integers(1, 8))


# The transforms: each turns a function of (params, batch) into another one ------------------

FACTORS = torch.tensor([1.0, 0.5, -2.0], dtype=torch.float64)


def stretched(batch, factor):
    """Other inputs and other weights."""
    return {**batch, "x": batch["x"] * factor, "scale": batch["scale"] * factor}


def times(params, factor):
    return {name: param * factor for name, param in params.items()}


def tangent(tree):
    return optree.tree_map(lambda x: torch.arange(x.numel()).view(x.shape).cos().to(x), tree)


def functional(tree):
    """A tree as one number, linearly."""
    pairs = zip(optree.tree_leaves(tree), optree.tree_leaves(tangent(tree)), strict=True)
    return sum((x * t).sum() for x, t in pairs)


def vmap_params(f):
    return lambda p, b: torch.func.vmap(lambda c: f(times(p, c), b))(FACTORS)


def vmap_batch(f):
    return lambda p, b: torch.func.vmap(lambda c: f(p, stretched(b, c)))(FACTORS)


def vmap_both(f):
    return lambda p, b: torch.func.vmap(lambda c: f(times(p, c), stretched(b, c)))(FACTORS)


def grad(f):
    return torch.func.grad(lambda p, b: functional(f(p, b)))


def grad_batch(f):
    return lambda p, b: torch.func.grad(lambda x: functional(f(p, {**b, "x": x})))(b["x"])


def jvp(f):
    return lambda p, b: torch.func.jvp(lambda p: f(p, b), (p,), (tangent(p),))[1]


def jacrev(f):
    return lambda p, b: torch.func.jacrev(lambda bias: f({**p, "b": bias}, b))(p["b"])


def jacfwd(f):
    return lambda p, b: torch.func.jacfwd(lambda bias: f({**p, "b": bias}, b))(p["b"])


TRANSFORMS = (vmap_params, vmap_batch, vmap_both, grad, grad_batch, jvp, jacrev, jacfwd)
