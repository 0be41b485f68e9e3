"""Shared strategies: ways to accumulate a batch, trees of tensors, models with exact arithmetic.

Exact means that every number on the way, forward and backward, is an integer (a quarter at the
least, after ties of maxima) that float32 holds. Then any split, order and merge tree has to give
the same bits as the full batch, and one wrong bit is a fault.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
import torch.nn.functional as F
from hypothesis import assume, settings
from hypothesis import strategies as st
from torch import Tensor

import pureaccum as pa


seeds = st.integers(0, 2**32 - 1)  # hypothesis shrinks a seed, torch draws the big tensors


def every(share: int) -> settings:
    """The profile's examples divided by ``share``, for properties that are dear to check."""
    return settings(max_examples=max(1, settings.default.max_examples // share))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def integers(shape: tuple[int, ...], high: int, random: torch.Generator) -> Tensor:
    """Of both signs, but more of the one: sums that cancel stay small and prove little."""
    return torch.randint(-high // 3, high + 1, shape, generator=random).float()


def assert_same_bits(got: Any, want: Any) -> None:
    """Every leaf has the same dtype, shape and numbers; NaN is NaN, and -0 is 0."""
    got, want = optree.tree_map(lambda x: x.to_dense(), (got, want))
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


# Ways to accumulate a batch --------------------------------------------------------------


class History(NamedTuple):
    """Which rows go, in which order, into which state, and how the states are merged."""

    groups: list[list[slice]]
    merges: list[tuple[int, int]]

    def parts(self) -> list[slice]:
        return [rows for group in self.groups for rows in group]

    def run(self, acc: Any, params: Any, batch: Any, donate: bool = False) -> pa.AccumState:
        states = []
        for group in self.groups:
            state = acc.init(params)
            for rows in group:
                state = acc.update(state, params, take(batch, rows), donate=donate)
            states.append(state)
        for i, j in self.merges:
            one, other = states.pop(i), states.pop(j)
            states.append(acc.merge(one, other))
        (state,) = states
        return state


def take(batch: Any, rows: slice) -> Any:
    return optree.tree_map(lambda x: x[rows], batch)


@st.composite
def compositions(draw: st.DrawFn, n: int, empty: bool = False) -> list[slice]:
    """Every way of cutting n rows into microbatches; with ``empty``, ones without rows too."""
    cuts = sorted(draw(st.lists(st.integers(0, n) if empty else st.integers(1, max(1, n - 1)))))
    edges = [0, *cuts, n] if empty else sorted({0, *cuts, n})
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


@st.composite
def histories(draw: st.DrawFn, n: int) -> History:
    """Any cut, any order, any number of states (some untouched), any merge tree."""
    order = draw(st.permutations(draw(compositions(n, empty=True))))
    groups = [order[rows] for rows in draw(compositions(len(order), empty=True))]
    left = range(len(groups), 1, -1)
    merges = [(draw(st.integers(0, k - 1)), draw(st.integers(0, k - 2))) for k in left]
    return History(groups, merges)


# Trees -----------------------------------------------------------------------------------


shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


def trees(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Nested tuples, lists and dicts with one leaf at least."""
    return st.recursive(
        leaves,
        lambda inside: (
            st.lists(inside, min_size=1, max_size=3)
            | st.lists(inside, min_size=1, max_size=3).map(tuple)
            | st.dictionaries(st.sampled_from("zawb"), inside, min_size=1, max_size=3)
        ),
        max_leaves=5,
    )


# Models with exact arithmetic ------------------------------------------------------------


HIGH = 15
LIMIT = 2**20  # times 4 for two ties, times 3 for a mask: float32 holds integers to 2**24


class Model(NamedTuple):
    """One loss a row; ``larger`` stands for torch.maximum, for the sake of ``majorant``."""

    per_row: Callable[..., Tensor]
    params: Any
    batch: dict[str, Tensor]

    @property
    def rows(self) -> int:
        return len(self.batch["y"])

    def loss(self, kind: str) -> Callable[[Any, dict[str, Tensor]], Any]:
        """The sum of the rows, their mean, or their mean weighted by an integer mask."""

        def sum_(params: Any, batch: dict[str, Tensor]) -> Tensor:
            return self.per_row(params, batch).sum()

        def mean(params: Any, batch: dict[str, Tensor]) -> Tensor:
            return self.per_row(params, batch).mean()

        def weighted(params: Any, batch: dict[str, Tensor]) -> pa.Weighted:
            mask = batch["mask"]
            return pa.Weighted((self.per_row(params, batch) * mask).sum(), mask.sum())

        return {"sum": sum_, "mean": mean, "weighted": weighted}[kind]

    def full_batch(self, kind: str) -> tuple[Any, Tensor]:
        """What torch.func says about the whole batch at once; ``weighted`` divided once."""
        if kind != "weighted":
            grads, value = torch.func.grad_and_value(self.loss(kind))(self.params, self.batch)
            return grads, value.double()

        def total(params: Any) -> Tensor:
            return self.loss(kind)(params, self.batch).total

        grads, value = torch.func.grad_and_value(total)(self.params)
        weight = self.batch["mask"].sum()
        by = weight if weight else 1
        return optree.tree_map(lambda g: g.to_dense() / by, grads), value.double() / weight


KINDS = ("sum", "mean", "weighted")


def reduction(kind: str) -> str:
    """The argument of pureaccum to go with a kind of loss; ``Weighted`` overrides any."""
    return "sum" if kind == "sum" else "mean"


def majorant(model: Model) -> float:
    """A bound on every number in the loss's sum and its gradient, whatever is summed first.

    The same model on absolute values, where nothing cancels: sums for maxima, -|y| for y.
    """

    def positive(x: Tensor) -> Tensor:
        return x.double().abs() if x.is_floating_point() else x

    params, batch = optree.tree_map(positive, (model.params, model.batch))
    batch["y"] = -batch["y"]
    grads, value = torch.func.grad_and_value(
        lambda params: model.per_row(params, batch, larger=torch.add).sum()
    )(params)
    return max(g.to_dense().abs().max().item() for g in (value, *optree.tree_leaves(grads)))


ACTIVATIONS = {
    "relu": lambda h, larger: h.relu(),
    "abs": lambda h, larger: h.abs(),
    "max": lambda h, larger: larger(h, h.flip(-1)),
}
DISTANCES = {
    "dot": lambda out, y: (out * y).sum(-1),
    "abs": lambda out, y: (out - y).abs().sum(-1),
    "squared": lambda out, y: ((out - y) ** 2).sum(-1),
}
few = st.integers(1, 12)
Recipe = Callable[[torch.Generator, int], tuple[Any, dict[str, Tensor]]]


def _affine(into: int, out: int, high: int, random: torch.Generator) -> dict[str, Tensor]:
    return {"w": integers((into, out), high, random), "b": integers((out,), high, random)}


@st.composite
def _mlps(draw: st.DrawFn, rows: int) -> tuple[Callable[..., Tensor], Recipe]:
    widths = draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    acts = [ACTIVATIONS[draw(st.sampled_from(sorted(ACTIVATIONS)))] for _ in widths[2:]]
    distance = DISTANCES[draw(st.sampled_from(sorted(DISTANCES)))]

    def per_row(params: Any, batch: dict[str, Tensor], larger: Any = torch.maximum) -> Tensor:
        h = batch["x"] @ params[0]["w"] + params[0]["b"]
        for layer, act in zip(params[1:], acts, strict=True):
            h = act(h, larger) @ layer["w"] + layer["b"]
        return distance(h, batch["y"])

    def recipe(random: torch.Generator, high: int) -> tuple[Any, dict[str, Tensor]]:
        params = [_affine(a, b, high, random) for a, b in itertools.pairwise(widths)]
        shapes = {"x": (rows, widths[0]), "y": (rows, widths[-1])}
        return params, {name: integers(shape, HIGH, random) for name, shape in shapes.items()}

    return per_row, recipe


@st.composite
def _convnets(draw: st.DrawFn, rows: int) -> tuple[Callable[..., Tensor], Recipe]:
    channels, filters, side = draw(st.tuples(*[st.integers(1, 2)] * 2, st.integers(1, 3)))
    act = ACTIVATIONS[draw(st.sampled_from(["relu", "abs"]))]
    distance = DISTANCES[draw(st.sampled_from(sorted(DISTANCES)))]

    def per_row(params: Any, batch: dict[str, Tensor], larger: Any = torch.maximum) -> Tensor:
        h = act(F.conv2d(batch["x"], params["filters"], params["b"], padding=side // 2), larger)
        h = F.avg_pool2d(h, 2, divisor_override=1).flatten(1)  # a sum over each 2 x 2 square
        return distance(h @ params["out"]["w"] + params["out"]["b"], batch["y"])

    def recipe(random: torch.Generator, high: int) -> tuple[Any, dict[str, Tensor]]:
        pooled = filters * ((4 + 2 * (side // 2) - side + 1) // 2) ** 2
        params = {
            "filters": integers((filters, channels, side, side), high, random),
            "b": integers((filters,), high, random),
            "out": _affine(pooled, 2, high, random),
        }
        x, y = integers((rows, channels, 4, 4), HIGH, random), integers((rows, 2), HIGH, random)
        return params, {"x": x, "y": y}

    return per_row, recipe


@st.composite
def _embeddings(draw: st.DrawFn, rows: int) -> tuple[Callable[..., Tensor], Recipe]:
    width, bag, sparse = draw(st.tuples(st.integers(1, 4), st.booleans(), st.booleans()))
    distance = DISTANCES[draw(st.sampled_from(sorted(DISTANCES)))]

    def per_row(params: Any, batch: dict[str, Tensor], larger: Any = torch.maximum) -> Tensor:
        (table, out), tokens = params, batch["tokens"]
        if bag:
            h = F.embedding_bag(tokens, table, mode="sum", sparse=sparse)
        else:
            h = F.embedding(tokens, table, sparse=sparse).sum(1)
        return distance(h @ out["w"] + out["b"], batch["y"])

    def recipe(random: torch.Generator, high: int) -> tuple[Any, dict[str, Tensor]]:
        params = integers((5, width), HIGH, random), _affine(width, 2, high, random)
        tokens = torch.randint(0, 5, (rows, 3), generator=random)
        return params, {"tokens": tokens, "y": integers((rows, 2), HIGH, random)}

    return per_row, recipe


@st.composite
def exact_models(draw: st.DrawFn, rows: st.SearchStrategy[int] = few) -> Model:
    """An MLP, a convnet or an embedding, its weights as large as exactness allows."""
    n, seed = draw(rows), draw(seeds)
    per_row, recipe = draw(st.one_of(_mlps(n), _convnets(n), _embeddings(n)))
    for high in (255, 127, 63, 31, 22, HIGH, 11, 8, 6, 5, 4, 3, 2, 1):
        random = generator(seed)
        params, batch = recipe(random, high)
        model = Model(per_row, params, batch)
        if majorant(model) < LIMIT:
            mask = torch.randint(-2, 4, (n,), generator=random).relu()  # half of it zeros
            return model._replace(batch=batch | {"mask": mask.float()})
    assume(False)
    raise AssertionError
