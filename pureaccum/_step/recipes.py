"""The form in which the compiler gets a batch, and which graph it goes to.

The form follows from sizes, and ``step.form(state, batch)`` says which one it is:

    "unrolled"  one graph that contains each microbatch: for one of them, and, as the fastest and
                leanest form, for a few of a model of few leaves
    "scan"      one graph with one loop, which holds three gradient trees: where these are small
    "loop"      a graph of one microbatch, which adds to the sums in place, and one that applies
                them; streams of microbatches use the same two, and so do ranks, which add up their
                sums between the two, and optimizers of ``from_torch``, which no graph can apply

A graph knows the shapes of a microbatch, and other shapes have graphs of their own. It leaves open
how many microbatches there are, and how many samples a shorter last one has: a handful of batch
sizes is compiled a handful of times.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from .._base import trees
from .._base.torch_internals import compiler
from .._core import batches
from . import constants, microbatch_loss, plans, scan
from .state import TrainState


TINY, SMALL = 2**20, 2**23  # bytes of gradients, of which a scan holds three
FEW, SHORT = 4, 64  # microbatches, and leaves times microbatches: longer graphs compile for minutes


class Freedom(NamedTuple):
    """What a graph leaves open."""

    several: int  # how many microbatches go together
    sizes: bool = True  # how many microbatches, how many samples in the last one, and the like


class Arranged(NamedTuple):
    """A batch as a graph is given it. What it has none of is None."""

    # of as many microbatches each, stacked along a new dim; if several, along two
    groups: trees.Tree
    group: trees.Tree  # microbatches that are too few to be one of these, stacked
    pieces: list[trees.Tree]  # microbatches by themselves
    several: int  # microbatches of each of the groups, which go through at once


class Recipe(NamedTuple):
    """How batches of one shape go through the compiler."""

    form: str
    key: int  # of its graphs
    arrange: Callable[[list[Any]], Arranged]  # from the leaves of a batch
    tiny: bool  # whether the gradients are
    cpp: bool  # whether in C++, which halves a small step's time, and compiles half as long again
    free: Freedom


class Arrangement(NamedTuple):
    """How the samples of a batch are arranged."""

    groups: int  # of microbatches that a scan takes together, one by one or several at once
    several: int  # microbatches of a group
    left: int  # microbatches that are too few to be a group
    pieces: int  # microbatches that stand in the graph by themselves
    last: int | None  # the samples of one that may be of any length


class Shapes(NamedTuple):
    """What a step has been compiled for."""

    first: dict[Any, tuple[int, ...]]  # the sizes that came first with each of them
    graphs: dict[Any, int]  # the number of each graph
    told_apart: bool  # False where shapes share graphs, as the user said by dynamic=True


def form_of(plan: plans.Plan, state: TrainState, flat: batches.Batch) -> str:
    """The form that follows from the sizes."""
    # what follows sums is no graph, or what comes before them
    before = plan.calling.known.terms and not takes_whole(plan, flat)
    if plan.group is not None or not plan.optimizer.in_graphs or before:
        return "loop"
    held, leaves = gradient_bytes(state), len(trees.tree_leaves(state.params))
    whole, rest = divmod(flat.rows or 0, plans.size_of(plan) or flat.rows or 1)
    parts = whole + (rest > 0)
    if whole <= 1 or (held > TINY and parts <= FEW and parts * leaves <= SHORT):
        return "unrolled"
    return "scan" if held <= SMALL else "loop"


def takes_whole(plan: plans.Plan, flat: batches.Batch) -> bool:
    """Whether a batch is one microbatch, and nobody else has samples of it."""
    return plan.group is None and (flat.rows or 0) <= (plans.size_of(plan) or flat.rows or 0)


def gradient_bytes(state: TrainState) -> int:
    """The bytes of the sums of gradients."""
    leaves = trees.tree_leaves(state.params)
    return sum(x.numel() * trees.accumulation_dtype(x.dtype).itemsize for x in leaves)


def recipe_for(
    plan: plans.Plan,
    state: TrainState,
    flat: batches.Batch,
    shapes: Shapes,
    free: Freedom | None = None,
) -> Recipe:
    """How batches like this one go through the compiler."""
    name, size = form_of(plan, state, flat), plans.size_of(plan)
    free = free or Freedom(together(plan, state, flat) if name == "scan" else 1)
    cut = cut_of(name, flat.rows or 0, size, free.several)
    (beside, shared_spec), (held, held_spec) = (
        trees.flatten(microbatch_loss.beside_batch(plan)),
        trees.flatten(state),
    )
    apart = shapes.told_apart
    looks = *constants.looks_of(flat.leaves, apart, 1), *constants.looks_of([*beside, *held], apart)
    told = name, free, flat.spec, shared_spec, held_spec, *looks
    sizes = cut.groups, cut.left, cut.last or 0
    # A graph that knows its sizes is faster: only the second one takes any.
    first = shapes.first.setdefault(told, sizes)
    alone = cut.groups + cut.left + cut.pieces == 0
    usual = *first[:-1], (size or first[-1]) if alone else 0
    vary = [free.sizes and n > 1 and n != m for n, m in zip(sizes, usual, strict=True)]
    # torch makes other graphs for zero and for one than for any number of at least two.
    each = [min(n, 2) for n in sizes] if free.sizes else sizes
    pieces = cut.pieces if name == "unrolled" else 0
    key = shapes.graphs.setdefault((*told, pieces, *each), len(shapes.graphs))
    arrange = partial(arranged, flat._replace(leaves=[]), size or 1, cut, vary)
    tiny, small = gradient_bytes(state) <= TINY, len(trees.tree_leaves(state.params)) * FEW <= SHORT
    cpp = small and has_cpp_wrapper(state.samples.device.type)
    return Recipe(form=name, key=key, arrange=arrange, tiny=tiny, cpp=cpp, free=free)


def narrowed(recipe: Recipe) -> Freedom | None:
    """What another graph leaves open where the compiler failed on the graph of this recipe."""
    free = recipe.free
    if free.several > 1:
        return free._replace(several=1)
    return free._replace(sizes=False) if free.sizes else None


def together(plan: plans.Plan, state: TrainState, flat: batches.Batch) -> int:
    """How many microbatches go through a scan at once."""
    rule = plan.rule
    if (
        plan.calling.has_aux
        or plan.calling.buffers
        or rule.nonfinite != "propagate"
        or rule.squares
    ):
        return 1
    params, spec = trees.flatten(state.params)
    like, size = trees.unflatten(flat.spec, flat.leaves), plans.size_of(plan) or 1
    first, _ = stacks(
        flat, size, Arrangement(groups=2, several=1, left=0, pieces=0, last=None), (False, False)
    )
    one = scan.one_of(microbatch_loss.caller(plan, state, spec), like, size)
    return scan.how_many(one, params, scan.tensors_of(first))


def cut_of(name: str, rows: int, size: int | None, several: int) -> Arrangement:
    """How so many samples are arranged for a form."""
    whole, rest = divmod(rows, size or rows or 1)
    groups = left = pieces = 0
    last = rest or None
    if whole + (rest > 0) <= 1:
        last = rows
    elif name != "scan":
        pieces = whole
    else:
        groups, left = divmod(whole, several)
        if groups == 1:  # one group is no loop
            groups, left = 0, whole
    return Arrangement(groups=groups, several=several, left=left, pieces=pieces, last=last)


def arranged(
    flat: batches.Batch, size: int, cut: Arrangement, vary: Sequence[bool], leaves: list[Any]
) -> Arranged:
    """The leaves of a batch as a graph is given them, of which some may be of any length."""
    flat = flat._replace(leaves=leaves)
    pieces = [*batches.cut_batch(flat, size)][: cut.pieces] if cut.pieces else []
    if cut.last is not None:
        start = (cut.groups * cut.several + cut.left + cut.pieces) * size
        pieces.append(rows_of(flat, start, vary[-1]))
    return Arranged(*stacks(flat, size, cut, vary), pieces, cut.several)


def stacks(
    flat: batches.Batch, size: int, cut: Arrangement, vary: Sequence[bool]
) -> tuple[trees.Tree, trees.Tree]:
    """Whole microbatches, stacked, in groups where several go together, and those that are left."""
    groups, several, left, *_ = cut
    end = groups * several * size

    def of(at: slice, any_number: bool, *shape: int) -> trees.Tree:
        leaves = [
            x[at].view(*shape, *x.shape[1:]) if isinstance(x, Tensor) else x for x in flat.leaves
        ]
        return trees.unflatten(flat.spec, [open_to(x, any_number) for x in leaves])

    shape = (groups,) if several == 1 else (groups, several)
    return (
        of(slice(end), vary[0], *shape, size) if groups else None,
        of(slice(end, end + left * size), vary[1], left, size) if left else None,
    )


def rows_of(flat: batches.Batch, start: int, any_number: bool) -> trees.Tree:
    """The samples from ``start`` on, of which there may be any number."""
    leaves = [
        x[start:] if isinstance(x, Tensor) and (start or any_number) else x for x in flat.leaves
    ]
    return trees.unflatten(flat.spec, [open_to(x, any_number) for x in leaves])


def open_to(x: Any, any_number: bool) -> Any:
    """A leaf, so marked that the graph made for it takes any number of samples."""
    return compiler.let_vary(x) if any_number and isinstance(x, Tensor) else x


def cuda_toolkit() -> str | None:
    """The folder of CUDA's toolkit, which has its compiler and does not come with torch."""
    from torch.utils import cpp_extension  # takes a third of a second

    return cpp_extension.CUDA_HOME


def has_cpp_wrapper(device: str, toolkit: Callable[[], str | None] = cuda_toolkit) -> bool:
    """Whether inductor can build its C++ wrapper for a type of device."""
    return device == "cpu" or (device == "cuda" and toolkit() is not None)
