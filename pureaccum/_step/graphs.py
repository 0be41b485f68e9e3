"""What parts of a step are compiled: what a stream consists of, and nothing else.

Each of these functions becomes a graph when it is first called:

    whole     a step over a batch: a window is begun, each microbatch added, and the window applied
    counted   the weights of a microbatch, of a sum of ``Weighted``: see _core/denominators.py
    first     a window of one microbatch
    more      one more microbatch, added to a window
    applied   the next state, from a window

A Python number is a constant of a graph: see constants.py. What a graph leaves open, and the form
in which it gets a batch, is a recipe: see recipes.py.

In place, a graph writes the new tensors into the memory of the old ones. It returns only those
without dimensions, because torch 2.13 loses what a graph writes to a 0-d tensor on a CPU.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .._base import trees
from .._base.torch_internals import compiler
from .._core import batches, reductions, terms, weights
from . import microbatch_loss, next_state, plans, recipes, scan, windows
from .state import StepInfo, StepWindow, TrainState


Program = Callable[..., Any]
Beside = tuple[tuple[Any, ...], terms.Whole]  # see ``beside_batch``
Seen = tuple[trees.Tree, Any, Any]  # see seen_of
NOTHING: Seen = (), (), ()


def programs(plan: plans.Plan, settings: Mapping[str, Any]) -> Callable[..., Program]:
    """``get(name, in_place, key)``, which makes each graph once for each key.

    Graphs with separate keys never count towards one another's limit of recompilations.
    """
    plan = plan._replace(donate=False, group=None)
    made: dict[Any, Program] = {}

    def whole(state: TrainState, beside: Beside, batch: recipes.Arranged) -> Any:
        return whole_step(microbatch_loss.with_shared(plan, *beside), state, batch)

    def counted(state: TrainState, beside: Beside, part: trees.Tree, before: Tensor) -> Any:
        own = microbatch_loss.with_shared(plan, *beside)
        window = windows.begin_window(plan, state)._replace(rows=before)
        # The compiler sees that nobody uses the gradient.
        return windows.updated_window(own, state, window, part, 1.0)[1].terms

    def more(
        window: StepWindow, state: TrainState, beside: Beside, part: trees.Tree, unit: float | None
    ) -> Any:
        own = microbatch_loss.with_shared(plan, *beside)
        new, entry, _ = windows.updated_window(own, state, window, part, unit)
        return new, seen_of(own, entry)

    def first(state: TrainState, beside: Beside, part: trees.Tree, unit: float | None) -> Any:
        # The compiler sees that the sums begin with zeros: nothing is filled, and nothing added.
        return more(windows.begin_window(plan, state), state, beside, part, unit)

    def applied(state: TrainState, window: StepWindow, unit: float, aux: trees.Tree) -> Any:
        return windows.applied_window(plan, state, window, unit, aux)

    functions = {function.__name__: function for function in (whole, counted, first, more, applied)}

    def get(name: str, in_place: bool, key: Any, cpp: bool = False) -> Program:
        kind = name, in_place, key
        if (known := made.get(kind)) is None:
            function = _in_place(functions[name]) if in_place else functions[name]
            known = compiler.compile_anew(function, cpp, settings)
            if has_cuda_graphs(settings):
                known = _kept(known)
            made[kind] = known
        return known

    return get


def whole_step(
    plan: plans.Plan, state: TrainState, batch: recipes.Arranged
) -> tuple[TrainState, StepInfo]:
    """A step over a batch: its microbatches as a stream."""
    unit, aux, window = unit_of(plan), None, windows.begin_window(plan, state)
    if batch.groups is None and batch.group is None and len(batch.pieces) == 1:
        # What the loss sees at once passes through untouched, and its mean weighs 1.
        window, entry, held = windows.updated_window(
            plan, state, window, batch.pieces[0], 1.0, counts=1
        )
        aux = next_state.finished_aux(reduced_aux(plan, None, seen_of(plan, entry), held))
        rows = 1.0 if entry.weighted else float(held or 1)
        return windows.applied_window(plan, state, window, 1.0, aux, rows)
    call, scale = (
        microbatch_loss.caller(plan, state, trees.flatten(state.params)[1]),
        next_state.scale_of(plan, state),
    )

    def one(window: StepWindow, part: trees.Tree) -> tuple[StepWindow, trees.Tree]:
        window, entry, _ = windows.updated_window(plan, state, window, part, unit)
        return window, seen_of(plan, entry)

    def several(window: StepWindow, group: trees.Tree) -> tuple[StepWindow, trees.Tree]:
        how = plan.rule.reduction
        return scan.add_together(call, state.params, window, group, how, unit, scale), NOTHING

    if batch.groups is not None:
        more, like = several, NOTHING
        if batch.several == 1:
            # Traced to see what is kept, and because no scan enters a mode of torch's that was
            # never entered outside. The compiler drops what nobody uses.
            part = trees.tree_map(lambda x: x[0] if isinstance(x, Tensor) else x, batch.groups)
            more, (_, like) = one, one(window, part)
        window, seen = scan.scanned(more, window, batch.groups, like)
        aux = reduced_aux(plan, aux, seen, plans.size_of(plan) or 1, stacked=True)
    if batch.group is not None:
        window, _ = several(window, batch.group)
    for piece in batch.pieces:
        window, seen = one(window, piece)
        aux = reduced_aux(plan, aux, seen, batches.read_batch(piece).rows or 0)
    return windows.applied_window(plan, state, window, unit, next_state.finished_aux(aux))


def seen_of(plan: plans.Plan, entry: weights.Microbatch) -> Seen:
    """What is kept of a microbatch to reduce its aux: that, its share, and whether it is finite."""
    if not plan.calling.has_aux:
        return NOTHING
    return entry.aux, reductions.share_of(entry), () if entry.finite is None else entry.finite


def reduced_aux(
    plan: plans.Plan,
    aux: reductions.AuxState | None,
    seen: Seen,
    rows: int,
    *,
    stacked: bool = False,
) -> reductions.AuxState | None:
    """What has been reduced of aux, with that of one more microbatch, or of some, stacked."""
    if not plan.calling.has_aux:
        return None
    out, share, finite = seen
    finite = finite if isinstance(finite, Tensor) else None
    stack = (reductions.Stack if stacked else reductions.stack_of_one)(out, share, finite)
    return reductions.fold_stack(aux, stack, rows, plan.calling.aux_reduction)


def unit_of(plan: plans.Plan) -> float:
    """What the sums of a batch that is looped over are still to be multiplied by."""
    return weights.power_of_two(plans.size_of(plan) or 1) if plan.rule.reduction == "mean" else 1.0


def has_cuda_graphs(settings: Mapping[str, Any]) -> bool:
    """Whether the compiler may record the kernels of a graph, and replay them."""
    return settings.get("mode") in ("reduce-overhead", "max-autotune")


def _kept(program: Program) -> Program:
    """A program that returns clones: a recording writes the next results over these."""

    def run(*args: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return cloned(program(*args))

    return run


def cloned(tree: trees.Tree) -> trees.Tree:
    return trees.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, tree)


# In place ------------------------------------------------------------------------------------


def _in_place(function: Program) -> Program:
    """A program that writes what a function makes of its first argument into that argument."""

    def run(old: trees.Tree, *rest: Any) -> tuple[list[Tensor | None], Any]:
        new, more = function(old, *rest)
        # Clones, because aux may be a parameter or a buffer as it was before the step.
        more = cloned(more)
        return written(old, new), more

    return run


def written(old: trees.Tree, new: trees.Tree) -> list[Tensor | None]:
    """Inside a graph, write a new tree into an old one; what cannot be written is returned."""
    left: list[Tensor | None] = []
    for x, y in zip(trees.tree_leaves(old), trees.tree_leaves(new), strict=True):
        alike = x.dim() > 0 and x.shape == y.shape and x.dtype == y.dtype
        left.append(None if alike else y)
        if alike:
            x.copy_(y)
    return left


def renewed(old: trees.Flat, left: list[Tensor | None]) -> trees.Tree:
    """After a graph, the new tree: what was written to under new names, and what came back."""
    leaves, spec = old
    new = [x.detach() if y is None else y for x, y in zip(leaves, left, strict=True)]
    return trees.unflatten(spec, new)
