"""What of a step is compiled: each function here becomes a graph when it is first called.

    scanned, unrolled   a whole step
    more                one microbatch, added to a window
    applied             a window, applied to the state

In place, a graph writes the new tensors into the memory of the old ones and returns only those
without dimensions, because torch 2.13 loses what a graph writes to a 0-d tensor on a CPU.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .._base.torch_internals import compile_anew
from .._base.trees import Tree, map
from .._base.trees import leaves as leaves_of
from .._core.auxiliary import share_of
from .._core.weights import power_of_two
from .._core.whole_batch import Pieces
from .numbers import Numbers, with_numbers
from .run import apply, begin_window, over, updated_window
from .scan import Stacked
from .state import Plan, StepWindow, TrainState


Program = Callable[..., Any]


def programs(plan: Plan, settings: Mapping[str, Any]) -> Callable[..., Program]:
    """``get(name, in_place, *key)``: each graph is made once, for each key of its own.

    Graphs with separate keys never count towards one another's limit of recompilations.
    """
    plan = plan._replace(donate=False, group=None)
    size, unit = plan.size or 1, unit_of(plan)
    made: dict[Any, Program] = {}

    def scanned(
        state: TrainState, some: Tree, rest: Tree, tail: Tree, together: int, numbers: Numbers
    ) -> Any:
        cut = Stacked(some, rest, tail, size, together)
        return over(with_numbers(plan, numbers), state, cut)

    def unrolled(state: TrainState, pieces: list[Tree], numbers: Numbers) -> Any:
        cut = Pieces(pieces, plan.size, len(pieces) == 1)
        return over(with_numbers(plan, numbers), state, cut)

    def more(window: StepWindow, state: TrainState, part: Tree, numbers: Numbers) -> Any:
        new, entry = updated_window(with_numbers(plan, numbers), state, window, part)
        return new, entry.aux

    def first_of_a_batch(state: TrainState, part: Tree, numbers: Numbers) -> Any:
        # The compiler sees that the sums begin with zeros: nothing is filled, and nothing added.
        return more_of_a_batch(begin_window(plan, state), state, part, numbers)

    def more_of_a_batch(window: StepWindow, state: TrainState, part: Tree, numbers: Numbers) -> Any:
        new, entry = updated_window(with_numbers(plan, numbers), state, window, part, unit)
        finite = () if entry.finite is None else entry.finite
        return new, (entry.aux, share_of(entry), finite)

    def applied(state: TrainState, window: StepWindow, aux: Tree) -> Any:
        return apply(plan, state, window, 1.0, aux)

    def applied_of_a_batch(state: TrainState, window: StepWindow, aux: Tree) -> Any:
        return apply(plan, state, window, unit, aux)

    of_batches = (scanned, unrolled, first_of_a_batch, more_of_a_batch, applied_of_a_batch)
    functions = {function.__name__: function for function in (*of_batches, more, applied)}

    def get(
        name: str, in_place: bool, *key: Any, cpp: bool = False, static: bool = False
    ) -> Program:
        if (known := made.get((name, in_place, *key))) is None:
            function = functions[name]
            # Inductor's C++ wrapper halves the time where kernels are small, and compiles for
            # half as long again.
            given = {"dynamic": False, **settings} if static else settings
            known = compile_anew(_in_place(function) if in_place else function, cpp, given)
            if has_cuda_graphs(settings):
                known = _kept(known)
            made[name, in_place, *key] = known
        return known

    return get


def unit_of(plan: Plan) -> float:
    """What the sums of a batch that is looped over are still to be multiplied by."""
    return power_of_two(plan.size or 1) if plan.rule.reduction == "mean" else 1.0


def has_cuda_graphs(settings: Mapping[str, Any]) -> bool:
    """Whether the compiler may record the kernels of a graph, and replay them."""
    return settings.get("mode") in ("reduce-overhead", "max-autotune")


def _kept(program: Program) -> Program:
    """Clones, because a recording writes the next results over these."""

    def run(*args: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return map(_clone, program(*args))

    return run


def _clone(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x


def _in_place(function: Program) -> Program:
    """Write what a function makes of its first argument into that."""

    def run(old: Tree, *rest: Any) -> tuple[list[Tensor | None], Any]:
        new, more = function(old, *rest)
        # Clones, because aux may be a parameter or a buffer, as it was before.
        more = map(_clone, more)
        return written(old, new), more

    return run


def written(old: Tree, new: Tree) -> list[Tensor | None]:
    """Inside a graph: write what can be written; what cannot is returned."""
    left: list[Tensor | None] = []
    for x, y in zip(leaves_of(old), leaves_of(new), strict=True):
        alike = x.dim() > 0 and x.shape == y.shape and x.dtype == y.dtype
        left.append(None if alike else y)
        if alike:
            x.copy_(y)
    return left


def renewed(old: list[Tensor], left: list[Tensor | None]) -> list[Tensor]:
    """After it: the new tensors, those that were written to under new names."""
    return [x.detach() if y is None else y for x, y in zip(old, left, strict=True)]
