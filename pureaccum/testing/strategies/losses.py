"""Small random models with exact arithmetic, and the full-batch result of each.

Every intermediate number, forward and backward, is an integer that float32 holds (or a multiple of
a quarter, after ties of maxima). So any split, order and merge tree must give the same bits as the
full batch, and one wrong bit is a fault.
"""

import itertools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

from ..._base import trees
from ..._core.losses import Reduction
from ..._core.weighted import Weighted
from . import data


Kind = Literal["sum", "mean", "weighted"]
KINDS: tuple[Kind, ...] = ("sum", "mean", "weighted")


def reduction(kind: Kind) -> Reduction:
    """The ``reduction`` argument for a kind of loss; ``Weighted`` overrides any.

    Args:
        kind: One of ``KINDS``: ``"sum"``, ``"mean"`` or ``"weighted"``.

    Example:
        >>> [reduction(kind) for kind in KINDS]
        ['sum', 'mean', 'mean']
    """
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; expected one of {', '.join(KINDS)}.")
    return "sum" if kind == "sum" else "mean"


class ExactModel(NamedTuple):
    """A model, its parameters and a batch, with arithmetic that is exact in float32.

    Sums over samples are exact, and so are means over a number of samples that is a power of two.

    Attributes:
        name: The kind of model.
        per_row: ``per_row(params, batch)`` returns one loss per sample. ``larger=`` replaces
            ``torch.maximum``.
        params: A tree of float32 tensors.
        batch: A dict with the target ``"y"``, an int64 ``"mask"`` with zeros, and ``"x"`` or
            ``"tokens"``.

    Example:
        >>> batch = {"y": torch.tensor([1.0, 2.0, 6.0]), "mask": torch.tensor([1, 1, 0])}
        >>> model = ExactModel("product", lambda w, batch: w * batch["y"], torch.tensor(2.0), batch)
        >>> model.full_batch("weighted")
        (tensor(1.5000), tensor(3., dtype=torch.float64))
    """

    name: str
    per_row: Callable[..., Tensor]
    params: trees.Tree
    batch: dict[str, Tensor]

    @property
    def samples(self) -> int:
        """The number of samples in the batch."""
        return len(self.batch["y"])

    def loss(self, kind: Kind) -> Callable[[trees.Tree, dict[str, Tensor]], Any]:
        """Return the loss ``loss_fn(params, batch)``, for use with ``reduction(kind)``.

        Args:
            kind: The ``"sum"`` over samples, their ``"mean"``, or ``"weighted"``: their mean
                weighted by the mask, as a ``Weighted``.
        """

        def sum_(params: trees.Tree, batch: dict[str, Tensor]) -> Tensor:
            return self.per_row(params, batch).sum()

        def mean(params: trees.Tree, batch: dict[str, Tensor]) -> Tensor:
            return self.per_row(params, batch).mean()

        def weighted(params: trees.Tree, batch: dict[str, Tensor]) -> Weighted:
            mask = batch["mask"]
            return Weighted((self.per_row(params, batch) * mask).sum(), mask.sum())

        return {"sum": sum_, "mean": mean, "weighted": weighted}[kind]

    def full_batch(self, kind: Kind) -> tuple[trees.Tree, Tensor]:
        """Return the full-batch gradients by torch.func, all dense, and the value in float64.

        A ``"weighted"`` result is divided once.

        Args:
            kind: As for ``loss``.
        """
        if kind != "weighted":
            grads, value = torch.func.grad_and_value(self.loss(kind))(self.params, self.batch)
            return trees.tree_map(lambda g: g.to_dense(), grads), value.double()

        def total(params: trees.Tree) -> Tensor:
            return self.loss(kind)(params, self.batch).total

        grads, value = torch.func.grad_and_value(total)(self.params)
        weight = self.batch["mask"].sum()
        by = weight if weight else 1
        return trees.tree_map(lambda g: g.to_dense() / by, grads), value.double() / weight


def losses(samples: int, sparse: bool = False) -> st.SearchStrategy[ExactModel]:
    """Small random models with exact arithmetic: an MLP, a convnet or an embedding.

    Their numbers are as large as exactness allows, so a sum in half precision shows. They shrink to
    a single linear layer with numbers from -1 to 3.

    Args:
        samples: The number of samples in the batch, at least one. Several hundred leave no room for
            large numbers.
        sparse: Whether to draw embeddings with sparse gradients too.

    Example:
        >>> from hypothesis import HealthCheck, given, settings
        >>> @settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        ... @given(losses(samples=4))
        ... def test(model):
        ...     loss = model.loss("mean")(model.params, model.batch)
        ...     assert loss * 4 == model.full_batch("sum")[1]
        >>> test()
    """
    if samples < 1:
        raise ValueError(
            f"samples is {samples}; expected at least one, because no samples have no mean."
        )
    return _losses(samples, sparse)


# How large the numbers may be ------------------------------------------------------------


MOST = 15  # the largest number in a batch
LIMIT = 2**20  # times 4 for two ties, times 3 for a mask: float32 holds integers to 2**24
HIGHS = (255, 127, 63, 31, 22, 15, 11, 8, 6, 5, 4, 3, 2, 1)


def majorant(model: ExactModel) -> float:
    """A bound on every number in the loss's sum and its gradient, whatever is summed first.

    The same model on absolute values, where nothing cancels: sums for maxima, -|y| for y.
    """

    def positive(x: Tensor) -> Tensor:
        return x.double().abs() if x.is_floating_point() else x

    params, batch = trees.tree_map(positive, (model.params, model.batch))
    batch["y"] = -batch["y"]
    grads, value = torch.func.grad_and_value(
        lambda params: model.per_row(params, batch, larger=torch.add).sum()
    )(params)
    return max(g.to_dense().abs().max().item() for g in (value, *trees.tree_leaves(grads)))


@st.composite
def _losses(draw: st.DrawFn, samples: int, sparse: bool) -> ExactModel:
    most = draw(st.sampled_from([3, *[HIGHS[0]] * 7]))  # it shrinks to 3, and is drawn large
    kinds = (_mlps(samples), _convnets(samples), _embeddings(samples, sparse))
    name, per_row, fill = draw(st.one_of(kinds))
    seed = draw(data.seeds())
    for high in HIGHS[HIGHS.index(most) :]:
        random = torch.Generator().manual_seed(seed)
        model = ExactModel(name, per_row, *fill(random, high))
        if majorant(model) < LIMIT:
            mask = torch.randint(-2, 4, (samples,), generator=random).relu()  # half of it zeros
            return model._replace(batch=model.batch | {"mask": mask})
    assume(False)
    raise AssertionError


# Models ----------------------------------------------------------------------------------
#
# The first is the simplest and takes the fewest draws, and all draw numbers: any shrinks to it.


Fill = Callable[[torch.Generator, int], tuple[Any, dict[str, Tensor]]]  # draws params and a batch
Architecture = tuple[str, Callable[..., Tensor], Fill]  # a name, the losses per sample

ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "relu": lambda h, larger: h.relu(),
    "abs": lambda h, larger: h.abs(),
    "max": lambda h, larger: larger(h, h.flip(-1)),
}
DISTANCES: dict[str, Callable[..., Tensor]] = {
    "dot": lambda out, y: (out * y).sum(-1),
    "abs": lambda out, y: (out - y).abs().sum(-1),
    "squared": lambda out, y: ((out - y) ** 2).sum(-1),
}
distances = st.sampled_from([*DISTANCES])


def _integers(shape: tuple[int, ...], high: int, random: torch.Generator) -> Tensor:
    """Integers of both signs, but more that are positive: sums that cancel prove little."""
    return torch.randint(-high // 3, high + 1, shape, generator=random).float()


def _affine(into: int, out: int, high: int, random: torch.Generator) -> dict[str, Tensor]:
    return {"w": _integers((into, out), high, random), "b": _integers((out,), high, random)}


@st.composite
def _mlps(draw: st.DrawFn, samples: int) -> Architecture:
    layers = draw(st.integers(1, 3))
    widths = [draw(st.integers(1, 4)) for _ in range(layers + 1)]
    acts = [draw(st.sampled_from([*ACTIVATIONS])) for _ in range(layers - 1)]
    distance = draw(distances)
    kind = f"MLP with {' and '.join(acts)}" if acts else "linear"

    def per_row(params: Any, batch: dict[str, Tensor], larger: Any = torch.maximum) -> Tensor:
        h = batch["x"] @ params[0]["w"] + params[0]["b"]
        for layer, act in zip(params[1:], acts, strict=True):
            h = ACTIVATIONS[act](h, larger) @ layer["w"] + layer["b"]
        return DISTANCES[distance](h, batch["y"])

    def fill(random: torch.Generator, high: int) -> tuple[Any, dict[str, Tensor]]:
        params = [_affine(a, b, high, random) for a, b in itertools.pairwise(widths)]
        shapes = {"x": (samples, widths[0]), "y": (samples, widths[-1])}
        most = min(high, MOST)
        return params, {name: _integers(shape, most, random) for name, shape in shapes.items()}

    return f"{kind} {'-'.join(str(w) for w in widths)}, {distance}", per_row, fill


@st.composite
def _convnets(draw: st.DrawFn, samples: int) -> Architecture:
    channels, filters, side = draw(st.tuples(*[st.integers(1, 2)] * 2, st.integers(1, 3)))
    act, distance = draw(st.sampled_from(["relu", "abs"])), draw(distances)

    def per_row(params: Any, batch: dict[str, Tensor], larger: Any = torch.maximum) -> Tensor:
        h = F.conv2d(batch["x"], params["filters"], params["b"], padding=side // 2)
        h = F.avg_pool2d(ACTIVATIONS[act](h, larger), 2, divisor_override=1)  # sums of squares
        return DISTANCES[distance](
            h.flatten(1) @ params["out"]["w"] + params["out"]["b"], batch["y"]
        )

    def fill(random: torch.Generator, high: int) -> tuple[Any, dict[str, Tensor]]:
        pooled = filters * ((4 + 2 * (side // 2) - side + 1) // 2) ** 2
        params = {
            "filters": _integers((filters, channels, side, side), high, random),
            "b": _integers((filters,), high, random),
            "out": _affine(pooled, 2, high, random),
        }
        x = _integers((samples, channels, 4, 4), min(high, MOST), random)
        return params, {"x": x, "y": _integers((samples, 2), min(high, MOST), random)}

    name = f"convnet with {act}, {channels} to {filters} channels by {side}x{side}, {distance}"
    return name, per_row, fill


@st.composite
def _embeddings(draw: st.DrawFn, samples: int, sparse: bool) -> Architecture:
    width, count = draw(st.tuples(st.integers(1, 4), st.integers(1, 3)))
    kinds = ["embedding", "bag", *(["sparse embedding", "sparse bag"] if sparse else [])]
    kind, distance = draw(st.sampled_from(kinds)), draw(distances)
    sparse = "sparse" in kind

    def per_row(params: Any, batch: dict[str, Tensor], larger: Any = torch.maximum) -> Tensor:
        (table, out), tokens = params, batch["tokens"]
        if "bag" in kind:
            h = F.embedding_bag(tokens, table, mode="sum", sparse=sparse)
        else:
            h = F.embedding(tokens, table, sparse=sparse).sum(1)
        return DISTANCES[distance](h @ out["w"] + out["b"], batch["y"])

    def fill(random: torch.Generator, high: int) -> tuple[Any, dict[str, Tensor]]:
        table = _integers((5, width), min(high, MOST), random)
        tokens = torch.randint(0, 5, (samples, count), generator=random)
        y = _integers((samples, 2), min(high, MOST), random)
        return (table, _affine(width, 2, high, random)), {"tokens": tokens, "y": y}

    return f"{kind} of {count} tokens, width {width}, {distance}", per_row, fill
