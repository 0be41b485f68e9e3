"""In which form the compiler gets a batch.

It follows from sizes, and can be read off (``step.form(state, batch)``):

    "unrolled"  one graph, in which each microbatch stands: for one of them, and, as the fastest and
                leanest form, for a few of a model of few leaves
    "scan"      one graph with one loop, which holds three gradient trees: where they are small
    "loop"      a graph of one microbatch, which adds to the sums in place, and one that applies
                them; streams of microbatches use the same two, and so do ranks, which add up their
                sums between them

A graph knows how many rows a microbatch has, and a loop takes any number of microbatches: a
handful of batch sizes is compiled a handful of times.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from ._batches import Batch, cut
from ._call import caller
from ._scan import one_of, tensors_of
from ._together import how_many
from ._torch import let_vary
from ._train_state import Plan, TrainState
from ._tree import Tree, accumulation_dtype, flatten, unflatten
from ._tree import leaves as leaves_of


TINY, SMALL = 2**20, 2**23  # bytes of gradients, of which a scan holds three
FEW, SHORT = 4, 64  # microbatches, and leaves times microbatches: longer graphs compile for minutes


class Recipe(NamedTuple):
    """How batches of one shape go through the compiler."""

    form: str
    key: tuple[Any, ...]  # of the graph
    arrange: Callable[[list[Any]], tuple[Any, ...]]  # its arguments, from the leaves of a batch
    tiny: bool  # gradients
    brief: bool  # a graph of few leaves
    several: int = 1  # microbatches that go together


class Form(NamedTuple):
    """A form, how many whole microbatches there are, and the rows that are left."""

    name: str
    whole: int
    rest: int
    tiny: bool  # gradients


def form_of(plan: Plan, state: TrainState, flat: Batch) -> Form:
    """The form that follows from the sizes."""
    leaves = leaves_of(state.params)
    size = sum(x.numel() * accumulation_dtype(x.dtype).itemsize for x in leaves)
    tiny = size <= TINY
    if plan.group is not None:  # what reaches other ranks cannot stand in a graph
        count, rest = divmod(flat.rows or 0, plan.size or flat.rows or 1)
        return Form("loop", count, rest, tiny)
    if plan.size is None or flat.rows is None or flat.rows <= plan.size:
        return Form("unrolled", 1, 0, tiny)
    count, rest = divmod(flat.rows, plan.size)
    parts = count + (rest > 0)
    few = parts <= FEW and parts * len(leaves) <= SHORT
    if count == 1 or (few and not tiny):
        return Form("unrolled", count, rest, tiny)
    return Form("scan" if size <= SMALL else "loop", count, rest, tiny)


def recipe_for(plan: Plan, state: TrainState, flat: Batch, several: int | None = None) -> Recipe:
    """How batches like this one go through the compiler."""
    name, count, rest, tiny = form_of(plan, state, flat)
    size = plan.size or 1
    brief = len(leaves_of(state.params)) * FEW <= SHORT
    first, flat = flat, flat._replace(leaves=[])  # a recipe outlives the batch
    if name == "scan":
        several = several or together(plan, state, first)

        def stacked(leaves: list[Any]) -> tuple[Any, ...]:
            here = flat._replace(leaves=leaves)
            tail = rows_of(here, count * size) if rest else None
            return *stacks(here, size, count, several), tail, several

        key = *(x is None for x in stacked(first.leaves)[:3]), several
        return Recipe(name, key, stacked, tiny, brief, several)

    def pieces(leaves: list[Any]) -> tuple[Any, ...]:
        here = flat._replace(leaves=leaves)
        if count == 1 and not rest:
            parts = [unflatten(flat.spec, leaves)]
        else:
            parts = list(cut(here, size))
            if rest:
                parts[-1] = rows_of(here, count * size)
        return tuple(parts) if name == "loop" else (parts,)

    return Recipe(name, (count, rest > 0), pieces, tiny, brief)


def together(plan: Plan, state: TrainState, flat: Batch) -> int:
    """How many microbatches go through at once."""
    if plan.has_aux or plan.buffers or plan.rule.nonfinite != "propagate":
        return 1
    size = plan.size or 1
    params, spec = flatten(state.params)
    first = tensors_of(next(stacks(flat, size, 2, 1)))
    one = one_of(caller(plan, state, spec), unflatten(flat.spec, flat.leaves))
    return how_many(one, params, first, state.samples)


def stacks(flat: Batch, size: int, count: int, several: int) -> Iterator[Tree]:
    """The whole microbatches stacked, in groups if several go together, and those that are left."""
    groups, left = divmod(count, several)
    if groups == 1:  # one group is no loop
        groups, left = 0, count
    end = groups * several * size

    def of(at: slice, *shape: int) -> Tree:
        leaves = [x[at].view(*shape, *x.shape[1:]) if is_tensor(x) else x for x in flat.leaves]
        return unflatten(flat.spec, leaves)

    shape = (count,) if several == 1 else (groups, several)
    yield of(slice(end), *shape, size) if groups else None
    yield of(slice(end, count * size), left, size) if left else None


def rows_of(flat: Batch, start: int) -> Tree:
    """The rows from ``start`` on, of which there may be any number."""
    leaves = [let_vary(x[start:]) if is_tensor(x) else x for x in flat.leaves]
    return unflatten(flat.spec, leaves)


def is_tensor(x: Any) -> bool:
    """Whether a leaf of a batch is cut."""
    return isinstance(x, Tensor)
