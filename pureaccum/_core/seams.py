"""The gradient of one microbatch, as four functions that features wrap.

    seen = read(loss(leaves, part))        forwards
    weighing, entry = term(seen, rows)     how its gradient enters the sums, and what it came to
    take(which, grads, weighing)           some of its gradients, as the backward pass gives them
    entry = judge(entry, weighing)         at the end

A feature is a layer: a function that is given these seams and gives others, which wrap some of
them. What it remembers from one seam to the next is its own. Where no layer is asked for, none of
their lines runs, and gradients enter the sums in whichever way is cheapest.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from . import coupling, exchange, losses, sums, terms, weights


Nonfinite = Literal["propagate", "skip", "raise"]
Engine = Literal["auto", "func", "autograd"]


class Rule(NamedTuple):
    """How gradients are taken and summed, alike for all microbatches."""

    has_aux: bool
    reduction: losses.Reduction
    nonfinite: Nonfinite
    engine: Engine
    squares: bool = False  # whether the squared norms of gradients are summed: see squares.py
    scaled: bool = False  # whether the loss is multiplied by a scale
    layers: tuple["Layer", ...] = ()  # those of all this: see order.py


class Portion(NamedTuple):
    """A microbatch, as a loss is given it, and the samples that its mean counts for."""

    tree: Any
    rows: int
    carried: Any  # from the microbatch before
    counts: int | None
    whole: terms.Whole = None  # the weights of the whole batch, of a sum of ``Weighted``


class Recorded(NamedTuple):
    """A forward pass: what was recorded of it, and what the loss returned as others see it."""

    total: Tensor
    leaves: list[Tensor]
    seen: losses.Read
    shape: losses.Shape
    backward: exchange.Backward | None  # the pass that will come; None inside of a graph
    pull: Callable[[Tensor], Sequence[Tensor | None]] | None = None  # None: by autograd


Term = Callable[[Recorded, int | None], tuple[weights.Weighing | None, weights.Microbatch]]
Take = Callable[[Sequence[int], Sequence[Tensor], weights.Weighing], None]
Judge = Callable[[weights.Microbatch, weights.Weighing | None], weights.Microbatch]


class Seams(NamedTuple):
    """How one microbatch is added: the places where layers wrap."""

    loss: coupling.LossOfPart
    read: Callable[..., tuple[losses.Read, losses.Shape]]
    term: Term  # no weighing: it is known to add nothing, and no gradient is taken
    take: Take | None = None  # None: straight into the sums
    judge: Judge | None = None


class Window(NamedTuple):
    """What layers know beside the seams."""

    rule: Rule
    unit: float | None = None  # what the sums are multiples of: see ``weigh``
    scale: Tensor | None = None  # of the loss, if it is scaled
    # What an error calls the loss (None), or the gradient of a leaf.
    name: Callable[[int | None], str] = lambda _: "a microbatch"
    before: list[Tensor] | None = None  # the sums as they were, if the caller still holds them
    # What this rank divides its sums by at the end; None where it adds them to those of others.
    divides: float | None = None
    # put in by ``adder``: a compiler takes no object here
    sink: sums.Sums | sums.Terms = cast(Any, None)


Layer = Callable[[Seams, Window], Seams]


def taking(seams: Seams, window: Window) -> Take:
    """Where a layer hands gradients on to."""
    return seams.take or window.sink.add


def handing_on(
    seams: Seams, window: Window, look: Callable[[Tensor], Tensor]
) -> tuple[Take, dict[int, Tensor]]:
    """Hand gradients on, and note what a look at each of them gives, by its leaf."""
    inner = taking(seams, window)
    noted: dict[int, Tensor] = {}  # torch's compiler calls no dict[int, Tensor]

    def take(which: Sequence[int], grads: Sequence[Tensor], weighing: weights.Weighing) -> None:
        noted.update(zip(which, map(look, grads), strict=True))
        inner(which, grads, weighing)

    return take, noted


def judged_below(
    seams: Seams, entry: weights.Microbatch, weighing: weights.Weighing | None
) -> weights.Microbatch:
    """An entry as the layers below judge it."""
    return entry if seams.judge is None else seams.judge(entry, weighing)


def of_total(rule: Rule, unit: float | None) -> Term:
    """The innermost term: means and sums of as many samples have one weighing in a window."""
    made: dict[Any, tuple[weights.Weighing | None, weights.Microbatch]] = {}
    reduction = rule.reduction
    # Looking a symbol up makes it a number: a graph for each number of samples.
    keeps = not torch.compiler.is_dynamo_compiling()

    def term(
        recorded: Recorded, rows: int | None
    ) -> tuple[weights.Weighing | None, weights.Microbatch]:
        seen, shape = recorded.seen, recorded.shape
        kind = rows, shape.dtype, shape.weighted
        kept = keeps and type(rows) is int
        if kept and kind in made:
            weighing, like = made[kind]
            return weighing, like._replace(value=seen.total)
        entry = weights.enter(seen, shape, rows, reduction)
        found = weights.weigh(seen, rows, reduction, unit), entry
        if kept and rows and not shape.weighted:  # of no samples the value is no total
            made[kind] = found
        return found

    return term
