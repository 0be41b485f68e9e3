"""What parts of a step are compiled, and the form in which the compiler gets a batch.

Each of these functions becomes a graph when it is first called:

    scan, unrolled   a whole step
    more             one more microbatch, added to a window
    applied          the next state, from a window

The form follows from sizes, and ``step.form(state, batch)`` says which one it is:

    "unrolled"  one graph that contains each microbatch: for one of them, and, as the fastest and
                leanest form, for a few of a model of few leaves
    "scan"      one graph with one loop, which holds three gradient trees: where these are small
    "loop"      a graph of one microbatch, which adds to the sums in place, and one that applies
                them; streams of microbatches use the same two, and so do ranks, which add up their
                sums between the two, and optimizers of ``from_torch``, which no graph can apply

A graph knows the shapes of a microbatch, and other shapes have graphs of their own. It leaves open
how many microbatches there are, and how many rows a shorter last one has: a handful of batch sizes
is compiled a handful of times. A Python number is a constant of it: see constants.py.

In place, a graph writes the new tensors into the memory of the old ones. It returns only those
without dimensions, because torch 2.13 loses what a graph writes to a 0-d tensor on a CPU.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base.torch_internals import compile_anew, let_vary
from .._base.trees import Flat, Tree, accumulation_dtype, flatten, tree_leaves, tree_map, unflatten
from .._core.batches import Batch, cut_batch, read_batch
from .._core.reductions import share_of
from .._core.weights import Microbatch, power_of_two
from .constants import looks_of
from .microbatch_loss import caller
from .scan import Stacked, fold_scanned, how_many, one_of, tensors_of
from .state import Plan, StepWindow, TrainState, size_of
from .whole_step import step_over
from .windows import applied_window, begin_window, updated_window


Program = Callable[..., Any]
Shared = tuple[Any, ...]  # what the loss is given beside the batch


class BatchInParts(NamedTuple):
    """A batch in microbatches of ``size`` rows, the last one perhaps shorter.

    A graph that is given this does not hold the number of rows of the whole batch.
    """

    pieces: Sequence[Tree]
    size: int | list[int] | None
    untouched: bool  # whether there is only one

    @property
    def sizes(self) -> Sequence[Tree]:
        """One entry for each microbatch."""
        return self.pieces

    @property
    def unit(self) -> float:
        """What sums of the gradients of means are multiples of."""
        return power_of_two(self.size if isinstance(self.size, int) and not self.untouched else 1)

    def parts(self) -> Iterator[tuple[Tree, int, int]]:
        """Each microbatch, the rows that it holds, and the rows that its mean counts for."""
        for part in self.pieces:
            rows = read_batch(part).rows or 0
            yield part, rows, 1 if self.untouched else rows


def programs(plan: Plan, settings: Mapping[str, Any]) -> Callable[..., Program]:
    """``get(name, in_place, key)``, which makes each graph once for each key.

    Graphs with separate keys never count towards one another's limit of recompilations.
    """
    plan = plan._replace(donate=False, group=None)
    size, unit = size_of(plan) or 1, unit_of(plan)
    made: dict[Any, Program] = {}

    def scan(
        state: TrainState, shared: Shared, some: Tree, rest: Tree, tail: Tree, together: int
    ) -> Any:
        cut = Stacked(microbatches=some, rest=rest, tail=tail, size=size, together=together)
        return step_over(plan._replace(shared=shared), state, cut, fold_scanned)

    def unrolled(state: TrainState, shared: Shared, *pieces: Tree) -> Any:
        cut = BatchInParts(pieces, plan.size, len(pieces) == 1)
        return step_over(plan._replace(shared=shared), state, cut)

    def more(
        window: StepWindow, state: TrainState, shared: Shared, part: Tree, unit: Any = None
    ) -> Any:
        own = plan._replace(shared=shared)
        new, entry, _ = updated_window(own, state, window, part, unit)
        return new, seen_of(plan, entry)

    def first_of_a_batch(state: TrainState, shared: Shared, part: Tree) -> Any:
        # The compiler sees that the sums begin with zeros: nothing is filled, and nothing added.
        return more(begin_window(plan, state), state, shared, part, unit)

    def more_of_a_batch(window: StepWindow, state: TrainState, shared: Shared, part: Tree) -> Any:
        return more(window, state, shared, part, unit)

    def applied(state: TrainState, window: StepWindow, aux: Tree) -> Any:
        return applied_window(plan, state, window, 1.0, aux)

    def applied_of_a_batch(state: TrainState, window: StepWindow, aux: Tree) -> Any:
        return applied_window(plan, state, window, unit, aux)

    of_batches = (scan, unrolled, first_of_a_batch, more_of_a_batch, applied_of_a_batch)
    functions = {function.__name__: function for function in (*of_batches, more, applied)}

    def get(name: str, in_place: bool, key: Any, cpp: bool = False) -> Program:
        kind = name, in_place, key
        if (known := made.get(kind)) is None:
            function = _in_place(functions[name]) if in_place else functions[name]
            known = compile_anew(function, cpp, settings)
            if has_cuda_graphs(settings):
                known = _kept(known)
            made[kind] = known
        return known

    return get


def seen_of(plan: Plan, entry: Microbatch) -> tuple[Tree, Any, Any]:
    """What is kept of a microbatch to reduce its aux: that, its share, and whether it is finite."""
    if not plan.has_aux:
        return (), (), ()
    return entry.aux, share_of(entry), () if entry.finite is None else entry.finite


def unit_of(plan: Plan) -> float:
    """What the sums of a batch that is looped over are still to be multiplied by."""
    return power_of_two(size_of(plan) or 1) if plan.rule.reduction == "mean" else 1.0


def has_cuda_graphs(settings: Mapping[str, Any]) -> bool:
    """Whether the compiler may record the kernels of a graph, and replay them."""
    return settings.get("mode") in ("reduce-overhead", "max-autotune")


def _kept(program: Program) -> Program:
    """A program that returns clones: a recording writes the next results over these."""

    def run(*args: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return tree_map(_clone, program(*args))

    return run


def _clone(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x


# In place ------------------------------------------------------------------------------------


def _in_place(function: Program) -> Program:
    """A program that writes what a function makes of its first argument into that argument."""

    def run(old: Tree, *rest: Any) -> tuple[list[Tensor | None], Any]:
        new, more = function(old, *rest)
        # Clones, because aux may be a parameter or a buffer as it was before the step.
        more = tree_map(_clone, more)
        return written(old, new), more

    return run


def written(old: Tree, new: Tree) -> list[Tensor | None]:
    """Inside a graph, write a new tree into an old one; what cannot be written is returned."""
    left: list[Tensor | None] = []
    for x, y in zip(tree_leaves(old), tree_leaves(new), strict=True):
        alike = x.dim() > 0 and x.shape == y.shape and x.dtype == y.dtype
        left.append(None if alike else y)
        if alike:
            x.copy_(y)
    return left


def renewed(old: Flat, left: list[Tensor | None]) -> Tree:
    """After a graph, the new tree: what was written to under new names, and what came back."""
    leaves, spec = old
    new = [x.detach() if y is None else y for x, y in zip(leaves, left, strict=True)]
    return unflatten(spec, new)


# Forms and recipes ---------------------------------------------------------------------------


TINY, SMALL = 2**20, 2**23  # bytes of gradients, of which a scan holds three
FEW, SHORT = 4, 64  # microbatches, and leaves times microbatches: longer graphs compile for minutes


class Freedom(NamedTuple):
    """What a graph leaves open."""

    several: int  # how many microbatches go together
    sizes: bool = True  # how many microbatches, how many rows in the last one, and the like


class Recipe(NamedTuple):
    """How batches of one shape go through the compiler."""

    form: str
    key: int  # of its graphs
    arrange: Callable[[list[Any]], Sequence[Any]]  # from the leaves of a batch
    tiny: bool  # whether the gradients are
    cpp: bool  # whether in C++, which halves a small step's time, and compiles half as long again
    free: Freedom


class BatchForm(NamedTuple):
    """A form, how many whole microbatches there are, and the rows that are left."""

    name: str
    whole: int
    rest: int
    tiny: bool  # whether the gradients are


class Shapes(NamedTuple):
    """What a step has been compiled for."""

    first: dict[Any, tuple[int, ...]]  # the sizes that came first with each of them
    graphs: dict[Any, int]  # the number of each graph
    told_apart: bool  # False where shapes share graphs, as the user said by dynamic=True


def form_of(plan: Plan, state: TrainState, flat: Batch) -> BatchForm:
    """The form that follows from the sizes."""
    leaves = tree_leaves(state.params)
    held = sum(x.numel() * accumulation_dtype(x.dtype).itemsize for x in leaves)
    tiny = held <= TINY
    if plan.group is not None or not plan.optimizer.in_graphs:  # what follows sums is no graph
        count, rest = divmod(flat.rows or 0, size_of(plan) or flat.rows or 1)
        return BatchForm("loop", count, rest, tiny)
    size = size_of(plan)
    if size is None or flat.rows is None or flat.rows <= size:
        return BatchForm("unrolled", 1, 0, tiny)
    count, rest = divmod(flat.rows, size)
    parts = count + (rest > 0)
    few = parts <= FEW and parts * len(leaves) <= SHORT
    if count == 1 or (few and not tiny):
        return BatchForm("unrolled", count, rest, tiny)
    return BatchForm("scan" if held <= SMALL else "loop", count, rest, tiny)


def recipe_for(
    plan: Plan, state: TrainState, flat: Batch, shapes: Shapes, free: Freedom | None = None
) -> Recipe:
    """How batches like this one go through the compiler."""
    name, count, rest, tiny = form_of(plan, state, flat)
    size, device = size_of(plan) or 1, state.samples.device
    cpp = len(tree_leaves(state.params)) * FEW <= SHORT and has_cpp_wrapper(device.type)
    free = free or Freedom(together(plan, state, flat) if name == "scan" else 1)
    alone = count + (rest > 0) == 1
    if name == "scan":
        sizes = *grouped(count, free.several), rest
    else:
        sizes = (flat.rows or 0,) if alone else (rest,)
    (beside, shared_spec), (held, held_spec) = flatten(plan.shared), flatten(state)
    apart = shapes.told_apart
    looks = *looks_of(flat.leaves, apart, 1), *looks_of([*beside, *held], apart)
    told = name, free, flat.spec, shared_spec, held_spec, *looks
    # A graph that knows its sizes is faster: only the second one takes any.
    first = shapes.first.setdefault(told, sizes)
    usual = [plan.size or first[0]] if alone else [*first[:-1], 0]
    vary = [free.sizes and n > 1 and n != m for n, m in zip(sizes, usual, strict=True)]
    # torch makes other graphs for zero and for one than for any number of at least two.
    each = [min(n, 2) for n in sizes] if free.sizes else sizes
    parts = count if name == "unrolled" else 0
    key = shapes.graphs.setdefault((*told, parts, *each), len(shapes.graphs))
    flat = flat._replace(leaves=[])  # a recipe outlives the batch

    def arrange(leaves: list[Any]) -> Sequence[Any]:
        here = flat._replace(leaves=leaves)
        if name == "scan":
            stacked = stacks(here, size, free.several, sizes, vary)
            tail = rows_of(here, count * size, vary[-1]) if rest else None
            return *stacked, tail, free.several
        if alone:
            return [rows_of(here, 0, vary[0])]
        pieces = list(cut_batch(here, size))
        if rest:
            pieces[-1] = rows_of(here, count * size, vary[-1])
        return pieces

    return Recipe(form=name, key=key, arrange=arrange, tiny=tiny, cpp=cpp, free=free)


def narrowed(recipe: Recipe) -> Freedom | None:
    """What another graph leaves open where the compiler failed on the graph of this recipe."""
    free = recipe.free
    if free.several > 1:
        return free._replace(several=1)
    return free._replace(sizes=False) if free.sizes else None


def together(plan: Plan, state: TrainState, flat: Batch) -> int:
    """How many microbatches go through a scan at once."""
    rule = plan.rule
    if plan.has_aux or plan.buffers or rule.nonfinite != "propagate" or rule.squares:
        return 1
    params, spec = flatten(state.params)
    like, size = unflatten(flat.spec, flat.leaves), size_of(plan) or 1
    first, _ = stacks(flat, size, 1, (2, 0), (False, False))
    one = one_of(caller(plan, state, spec), like, size)
    return how_many(one, params, tensors_of(first))


def grouped(count: int, several: int) -> tuple[int, int]:
    """How many groups of microbatches there are, and how many microbatches are left."""
    groups, single = divmod(count, several)
    return (0, count) if groups == 1 else (groups, single)  # one group is no loop


def stacks(
    flat: Batch, size: int, several: int, sizes: Sequence[int], vary: Sequence[bool]
) -> tuple[Tree, Tree]:
    """Whole microbatches, stacked, in groups where several go together, and those that are left."""
    groups, single, *_ = sizes
    end = groups * several * size

    def of(at: slice, any_number: bool, *shape: int) -> Tree:
        leaves = [
            x[at].view(*shape, *x.shape[1:]) if isinstance(x, Tensor) else x for x in flat.leaves
        ]
        return unflatten(flat.spec, [open_to(x, any_number) for x in leaves])

    shape = (groups,) if several == 1 else (groups, several)
    return (
        of(slice(end), vary[0], *shape, size) if groups else None,
        of(slice(end, end + single * size), vary[1], single, size) if single else None,
    )


def rows_of(flat: Batch, start: int, any_number: bool) -> Tree:
    """The rows from ``start`` on, of which there may be any number."""
    leaves = [
        x[start:] if isinstance(x, Tensor) and (start or any_number) else x for x in flat.leaves
    ]
    return unflatten(flat.spec, [open_to(x, any_number) for x in leaves])


def open_to(x: Any, any_number: bool) -> Any:
    """A leaf, so marked that the graph made for it takes any number of rows."""
    return let_vary(x) if any_number and isinstance(x, Tensor) else x


def cuda_toolkit() -> str | None:
    """The folder of CUDA's toolkit, which has its compiler and does not come with torch."""
    from torch.utils import cpp_extension  # takes a third of a second

    return cpp_extension.CUDA_HOME


def has_cpp_wrapper(device: str, toolkit: Callable[[], str | None] = cuda_toolkit) -> bool:
    """Whether inductor can build its C++ wrapper for a type of device."""
    return device == "cpu" or (device == "cuda" and toolkit() is not None)
