"""What parts of a step are compiled, and the form in which the compiler gets a batch.

Each of these functions becomes a graph when it is first called:

    whole     a step over a batch: a window is begun, each microbatch added, and the window applied
    first     a window of one microbatch
    more      one more microbatch, added to a window
    applied   the next state, from a window

They are what a stream consists of, and nothing else.

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

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base.torch_internals import compile_anew, let_vary
from .._base.trees import Flat, Tree, accumulation_dtype, flatten, tree_leaves, tree_map, unflatten
from .._core.batches import Batch, cut_batch, read_batch
from .._core.reductions import AuxState, Stack, finish_aux, fold_stack, share_of, stack_of_one
from .._core.weights import Microbatch, power_of_two
from .constants import looks_of
from .microbatch_loss import caller
from .scan import add_together, how_many, one_of, scanned, tensors_of
from .state import Plan, StepInfo, StepWindow, TrainState, size_of
from .windows import applied_window, begin_window, scale_of, updated_window


Program = Callable[..., Any]
Shared = tuple[Any, ...]  # what the loss is given beside the batch
Seen = tuple[Tree, Any, Any]  # see seen_of


def programs(plan: Plan, settings: Mapping[str, Any]) -> Callable[..., Program]:
    """``get(name, in_place, key)``, which makes each graph once for each key.

    Graphs with separate keys never count towards one another's limit of recompilations.
    """
    plan = plan._replace(donate=False, group=None)
    made: dict[Any, Program] = {}

    def whole(
        state: TrainState,
        shared: Shared,
        groups: Tree,
        group: Tree,
        pieces: list[Tree],
        several: int,
    ) -> Any:
        own, unit = plan._replace(shared=shared), unit_of(plan)
        window, aux = begin_window(own, state), None
        if groups is None and group is None and len(pieces) == 1:
            return untouched(own, state, window, pieces[0])
        call, scale = caller(own, state, flatten(state.params)[1]), scale_of(own, state)

        def one(window: StepWindow, part: Tree) -> tuple[StepWindow, Tree]:
            window, entry, _ = updated_window(own, state, window, part, unit)
            return window, seen_of(own, entry)

        def together(window: StepWindow, part: Tree) -> tuple[StepWindow, Tree]:
            how = own.rule.reduction
            return add_together(call, state.params, window, part, how, unit, scale), ()

        if groups is not None:
            window, seen = scanned(one if several == 1 else together, window, groups)
            aux = reduced(own, None, seen, size_of(own) or 1, stacked=True)
        if group is not None:
            window, _ = together(window, group)
        for piece in pieces:
            window, seen = one(window, piece)
            aux = reduced(own, aux, seen, read_batch(piece).rows or 0)
        return applied_window(own, state, window, unit, finished_aux(aux))

    def more(
        window: StepWindow, state: TrainState, shared: Shared, part: Tree, unit: float | None
    ) -> Any:
        own = plan._replace(shared=shared)
        new, entry, _ = updated_window(own, state, window, part, unit)
        return new, seen_of(own, entry)

    def first(state: TrainState, shared: Shared, part: Tree, unit: float | None) -> Any:
        # The compiler sees that the sums begin with zeros: nothing is filled, and nothing added.
        return more(begin_window(plan, state), state, shared, part, unit)

    def applied(state: TrainState, window: StepWindow, unit: float, aux: Tree) -> Any:
        return applied_window(plan, state, window, unit, aux)

    functions = {function.__name__: function for function in (whole, first, more, applied)}

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


def untouched(
    plan: Plan, state: TrainState, window: StepWindow, batch: Tree
) -> tuple[TrainState, StepInfo]:
    """A step over a batch that the loss sees at once: it passes through, and its mean weighs 1."""
    window, entry, held = updated_window(plan, state, window, batch, 1.0, counts=1)
    aux = reduced(plan, None, seen_of(plan, entry), held)
    rows = 1.0 if entry.weighted else float(held or 1)
    return applied_window(plan, state, window, 1.0, finished_aux(aux), rows)


def seen_of(plan: Plan, entry: Microbatch) -> Seen:
    """What is kept of a microbatch to reduce its aux: that, its share, and whether it is finite."""
    if not plan.has_aux:
        return (), (), ()
    return entry.aux, share_of(entry), () if entry.finite is None else entry.finite


def reduced(
    plan: Plan, aux: AuxState | None, seen: Seen, rows: int, *, stacked: bool = False
) -> AuxState | None:
    """What has been reduced of aux, with that of one more microbatch, or of some, stacked."""
    if not plan.has_aux:
        return None
    out, share, finite = seen
    finite = finite if isinstance(finite, Tensor) else None
    if not stacked:
        return fold_stack(aux, stack_of_one(out, share, finite), rows, plan.aux_reduction)
    leaves, spec = flatten(out)
    return fold_stack(aux, Stack(spec, leaves, share, finite), rows, plan.aux_reduction)


def finished_aux(aux: AuxState | None) -> Tree:
    """The reduced aux, if there is any."""
    return () if aux is None else finish_aux(aux)


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


class Arranged(NamedTuple):
    """A batch as a graph is given it. What it has none of is None."""

    groups: Tree  # of as many microbatches each, stacked along a new dim; if several, along two
    group: Tree  # microbatches that are too few to be one of these, stacked
    pieces: list[Tree]  # microbatches by themselves
    several: int  # microbatches of each of the groups, which go through at once


class Recipe(NamedTuple):
    """How batches of one shape go through the compiler."""

    form: str
    key: int  # of its graphs
    arrange: Callable[[list[Any]], Arranged]  # from the leaves of a batch
    tiny: bool  # whether the gradients are
    cpp: bool  # whether in C++, which halves a small step's time, and compiles half as long again
    free: Freedom


class BatchForm(NamedTuple):
    """A form, how many whole microbatches there are, and the rows of a last one that may vary."""

    name: str
    whole: int
    last: int | None  # None where there is no other
    tiny: bool  # whether the gradients are


class Cut(NamedTuple):
    """How the rows of a batch are arranged."""

    groups: int  # of microbatches that a scan takes together, one by one or several at once
    several: int  # microbatches of a group
    left: int  # microbatches that are too few to be a group
    pieces: int  # microbatches that stand in the graph by themselves
    last: int | None  # the rows of one that may be of any length


class Shapes(NamedTuple):
    """What a step has been compiled for."""

    first: dict[Any, tuple[int, ...]]  # the sizes that came first with each of them
    graphs: dict[Any, int]  # the number of each graph
    told_apart: bool  # False where shapes share graphs, as the user said by dynamic=True


def form_of(plan: Plan, state: TrainState, flat: Batch) -> BatchForm:
    """The form that follows from the sizes."""
    leaves = tree_leaves(state.params)
    held = sum(x.numel() * accumulation_dtype(x.dtype).itemsize for x in leaves)
    rows, tiny = flat.rows or 0, held <= TINY
    count, rest = divmod(rows, size_of(plan) or rows or 1)
    parts = count + (rest > 0)
    whole, last = (count, rest or None) if parts > 1 else (0, rows)
    if plan.group is not None or not plan.optimizer.in_graphs:  # what follows sums is no graph
        name = "loop"
    elif count <= 1 or (not tiny and parts <= FEW and parts * len(leaves) <= SHORT):
        name = "unrolled"
    else:
        name = "scan" if held <= SMALL else "loop"
    return BatchForm(name, whole, last, tiny)


def recipe_for(
    plan: Plan, state: TrainState, flat: Batch, shapes: Shapes, free: Freedom | None = None
) -> Recipe:
    """How batches like this one go through the compiler."""
    form = form_of(plan, state, flat)
    name, device, apart = form.name, state.samples.device, shapes.told_apart
    free = free or Freedom(together(plan, state, flat) if name == "scan" else 1)
    cut = cut_of(form, free.several)
    (beside, shared_spec), (held, held_spec) = flatten(plan.shared), flatten(state)
    looks = *looks_of(flat.leaves, apart, 1), *looks_of([*beside, *held], apart)
    told = name, free, flat.spec, shared_spec, held_spec, *looks
    sizes = cut.groups, cut.left, cut.last or 0
    # A graph that knows its sizes is faster: only the second one takes any.
    first = shapes.first.setdefault(told, sizes)
    usual = *first[:-1], 0 if form.whole else plan.size or first[-1]
    vary = [free.sizes and n > 1 and n != m for n, m in zip(sizes, usual, strict=True)]
    # torch makes other graphs for zero and for one than for any number of at least two.
    each = [min(n, 2) for n in sizes] if free.sizes else sizes
    pieces = cut.pieces if name == "unrolled" else 0
    key = shapes.graphs.setdefault((*told, pieces, *each), len(shapes.graphs))
    arrange = partial(arranged, flat._replace(leaves=[]), size_of(plan) or 1, cut, vary)
    cpp = len(tree_leaves(state.params)) * FEW <= SHORT and has_cpp_wrapper(device.type)
    return Recipe(form=name, key=key, arrange=arrange, tiny=form.tiny, cpp=cpp, free=free)


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
    first, _ = stacks(flat, size, Cut(2, 1, 0, 0, None), (False, False))
    one = one_of(caller(plan, state, spec), like, size)
    return how_many(one, params, tensors_of(first))


def cut_of(form: BatchForm, several: int) -> Cut:
    """How the rows of a batch are arranged for a form."""
    if form.name != "scan":
        return Cut(groups=0, several=1, left=0, pieces=form.whole, last=form.last)
    groups, left = divmod(form.whole, several)
    if groups == 1:  # one group is no loop
        groups, left = 0, form.whole
    return Cut(groups=groups, several=several, left=left, pieces=0, last=form.last)


def arranged(flat: Batch, size: int, cut: Cut, vary: Sequence[bool], leaves: list[Any]) -> Arranged:
    """The leaves of a batch as a graph is given them, of which some may be of any length."""
    flat = flat._replace(leaves=leaves)
    pieces = [*cut_batch(flat, size)][: cut.pieces] if cut.pieces else []
    if cut.last is not None:
        start = (cut.groups * cut.several + cut.left + cut.pieces) * size
        pieces.append(rows_of(flat, start, vary[-1]))
    return Arranged(*stacks(flat, size, cut, vary), pieces, cut.several)


def stacks(flat: Batch, size: int, cut: Cut, vary: Sequence[bool]) -> tuple[Tree, Tree]:
    """Whole microbatches, stacked, in groups where several go together, and those that are left."""
    groups, several, left, *_ = cut
    end = groups * several * size

    def of(at: slice, any_number: bool, *shape: int) -> Tree:
        leaves = [
            x[at].view(*shape, *x.shape[1:]) if isinstance(x, Tensor) else x for x in flat.leaves
        ]
        return unflatten(flat.spec, [open_to(x, any_number) for x in leaves])

    shape = (groups,) if several == 1 else (groups, several)
    return (
        of(slice(end), vary[0], *shape, size) if groups else None,
        of(slice(end, end + left * size), vary[1], left, size) if left else None,
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
