"""A step that compiles itself: ``make_step(..., compile=True)``.

Each call looks its batch up by the shapes, arranges it for the graph and calls that. What an eager
step refuses is refused in the same words: where a graph cannot be made, the step is run without
the compiler first, and only if that goes well the compiler is to blame.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base import (
    CompileError,
    Tree,
    attempt,
    check_state,
    flatten,
    is_limit,
    mark,
    refuse_autocast_cache,
    refuse_sharded,
    transform_active,
    tree_leaves,
    tree_map,
    unflatten,
)
from .._core import (
    AuxState,
    Rule,
    finish_aux,
    fold_stack,
    knows,
    read_batch,
    rows_to_cut,
    stack_of_one,
)
from .graphs import (
    Freedom,
    Recipe,
    Shapes,
    form_of,
    has_cuda_graphs,
    is_tensor,
    narrowed,
    programs,
    recipe_for,
    renewed,
    unit_of,
)
from .microbatch_loss import Numbers
from .ranks import before_this_rank, window_of_all_ranks
from .run import apply_window, check_window, first_row, look, step_whole, update_window
from .state import Plan, StepInfo, StepWindow, TrainState, check_train_state


SHAPES_REMEMBERED = 1000  # kinds of batches, and of microbatches

Make = Callable[[Freedom | None], Recipe]


class Compiled(NamedTuple):
    """The functions of a step that compiles itself."""

    update: Callable[..., Any]
    apply: Callable[[TrainState, StepWindow], tuple[TrainState, StepInfo]]
    whole: Callable[[TrainState, Tree], tuple[TrainState, StepInfo]]
    form: Callable[[TrainState, Tree], str]


_SHARDED = "compile=True makes graphs of plain tensors. Leave compile out."


def compiled(plan: Plan, settings: Mapping[str, Any]) -> Compiled:
    """The functions of a plan; each graph is made when it is first needed."""
    get = programs(plan, settings)
    undonated = plan._replace(donate=False)
    alone = undonated._replace(group=None)  # the other ranks do not run eagerly what fails here
    recipes: dict[Any, Recipe] = {}
    told_apart = not settings.get("dynamic")
    of_batches, of_microbatches = Shapes({}, {}, told_apart), Shapes({}, {}, told_apart)
    fitting: set[Any] = set()
    recorded = has_cuda_graphs(settings)

    def remembered(kind: Any, make: Make) -> Recipe:
        if len(recipes) >= SHAPES_REMEMBERED:
            recipes.clear()
        return recipes.setdefault(kind, make(None))

    def trying(kind: Any, recipe: Recipe, make: Make, run: Callable[[Recipe], Any]) -> Any:
        """Run a recipe, and where the compiler fails on it one that leaves less open."""
        while True:
            try:
                return run(recipe)
            except CompileError as error:
                free = None if is_limit(error.__cause__) else narrowed(recipe)
                if free is None:
                    raise
            recipe = recipes[kind] = make(free)

    def whole_compiled(state: TrainState, batch: Tree) -> tuple[TrainState, StepInfo]:
        if transform_active() or not isinstance(state, TrainState):  # pyright: ignore[reportUnnecessaryIsInstance]
            return step_whole(plan, state, batch)
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return whole_compiled(state, batch)
        leaves, spec = flatten(batch)
        flat_state = flatten(state)
        kind = flat_state[1], spec, *[x.shape if is_tensor(x) else type(x) for x in leaves]

        def make(free: Freedom | None) -> Recipe:
            return recipe_for(undonated, state, read_batch(batch), of_batches, free)

        recipe = recipes.get(kind)
        if recipe is None:  # all that is looked at is the same for the next of this kind
            flat = read_batch(batch)
            check_train_state(plan, state)
            refuse_sharded([*leaves, *flat_state[0]], "the state or the batch", _SHARDED)
            if plan.size is not None:
                rows_to_cut(flat, "batch")
            if flat.rows == 0:
                return step_whole(plan, state, batch)
            look(plan, state, flat, "batch", plan.size)
            recipe = remembered(kind, make)
        elif not knows(plan.known, leaves, spec):
            look(plan, state, read_batch(batch), "batch", plan.size)
        refuse_autocast_cache([state.samples])
        began = state
        if plan.group is not None and plan.keys:
            rows = read_batch(batch).rows or 0
            first = state.samples + before_this_rank(plan, state, rows)
            began = state._replace(samples=first)

        def eagerly() -> object:
            return step_whole(alone, state, batch)

        def run(recipe: Recipe) -> Any:
            given = recipe.arrange(leaves)
            if recipe.form == "loop":
                parts, numbers = given
                return looped(began, recipe, parts, numbers, eagerly)
            name = "scanned" if recipe.form == "scan" else "unrolled"
            return finishing(name, recipe, state, flat_state, given, eagerly)

        came = trying(kind, recipe, make, run)
        if isinstance(came[0], TrainState):
            return came
        window, aux = came
        name = "applied_of_a_batch"
        if plan.group is not None:
            window = window_of_all_ranks(plan, state, window, unit_of(plan))
            name = "applied"
        return finishing(name, None, state, flat_state, (window, aux), eagerly)

    def finishing(
        name: str,
        recipe: Recipe | None,
        state: TrainState,
        flat_state: tuple[list[Tensor], Any],
        rest: tuple[Any, ...],
        eagerly: Callable[[], object],
    ) -> tuple[TrainState, StepInfo]:
        """What gives the next state: in place, if this one is given up and that saves anything."""
        leaves, spec = flat_state
        key, tiny = (recipe.key, recipe.tiny) if recipe else ((), False)
        how = {"cpp": recipe.cpp, "static": not recipe.free.sizes} if recipe else {}
        # Not where a tensor stands twice (tied leaves), nor in a recording of CUDA's, which would
        # have to write where it was recorded.
        distinct = len({*map(id, leaves)}) == len(leaves)
        in_place = plan.donate and not tiny and not recorded and distinct
        program = get(name, in_place, *key, **how)
        new, info = attempt(program, (state, *rest), eagerly)
        if in_place:
            new = unflatten(spec, renewed(leaves, new))
        if plan.donate:
            mark(leaves)
        return new, info

    def looped(
        began: TrainState,
        recipe: Recipe,
        pieces: tuple[Tree, ...],
        numbers: Numbers,
        eagerly: Callable[[], object],
    ) -> tuple[StepWindow, Tree]:
        """The sums of all microbatches, and their aux."""
        static = not recipe.free.sizes
        program = get("first_of_a_batch", False, *recipe.key, static=static)
        window, out = attempt(program, (began, pieces[0], numbers), eagerly)
        aux = folded(None, pieces[0], *out) if plan.has_aux else None
        for part in pieces[1:]:
            program = get("more_of_a_batch", True, *recipe.key, static=static)
            left, out = attempt(program, (window, began, part, numbers), eagerly)
            leaves, spec = flatten(window)
            window = unflatten(spec, renewed(leaves, left))
            if plan.has_aux:
                aux = folded(aux, part, *out)
        return window, () if aux is None else finish_aux(aux)

    def folded(aux: AuxState | None, part: Tree, out: Tree, share: Tensor, ok: Any) -> AuxState:
        stack = stack_of_one(out, share, ok if isinstance(ok, Tensor) else None)
        return fold_stack(aux, stack, read_batch(part).rows or 0, plan.aux_reduction)

    def fits(state: Any, window: Any) -> bool:
        """Whether the two are what a graph may be given; the eager step says what is wrong."""
        kind = flatten(state)[1], flatten(window)[1]
        if kind not in fitting:
            if not isinstance(state, TrainState) or not isinstance(window, StepWindow):
                return False
            check_window(plan, state, window)
            refuse_sharded(tree_leaves(state), "the state", _SHARDED)
            fitting.add(kind)
        refuse_autocast_cache([state.samples])
        return True

    def update_compiled(
        state: TrainState, window: StepWindow, microbatch: Tree, offset: int | None = None
    ) -> Any:
        if transform_active() or not fits(state, window):
            return update_window(plan, state, window, microbatch, offset)
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return update_compiled(state, window, microbatch, offset)
        flat = read_batch(microbatch, "microbatch")
        if not flat.rows:
            return update_window(plan, state, window, microbatch, offset)
        at = first_row(plan, state, window, offset)
        if not knows(plan.known, flat.leaves, flat.spec):
            look(plan, state, flat, "microbatch")
        rows = window.rows + flat.rows
        own = window if plan.donate else tree_map(torch.clone, window)
        own = own._replace(rows=at)
        leaves, spec = flatten(own)

        def eagerly() -> object:
            return update_window(alone, state, window, microbatch)

        def make(free: Freedom | None) -> Recipe:
            as_it_is = alone._replace(size=None)
            return recipe_for(as_it_is, state, flat, of_microbatches, free)

        def run(recipe: Recipe) -> Any:
            (part,), numbers = recipe.arrange(flat.leaves)
            args = own, state, part, numbers
            program = get("more", True, *recipe.key, static=not recipe.free.sizes)
            return attempt(program, args, eagerly, plan.donate)

        each = [x.shape if is_tensor(x) else type(x) for x in flat.leaves]
        kind = "more", flatten(state)[1], flat.spec, *each
        left, aux = trying(kind, recipes.get(kind) or remembered(kind, make), make, run)
        new = unflatten(spec, renewed(leaves, left))
        if offset is not None:
            new = new._replace(rows=rows)
        if plan.donate:
            mark(leaves)
        return (new, aux) if plan.has_aux else new

    def apply_compiled(state: TrainState, window: StepWindow) -> tuple[TrainState, StepInfo]:
        if transform_active() or not fits(state, window):
            return apply_window(plan, state, window)
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return apply_compiled(state, window)

        def eagerly() -> object:
            return apply_window(alone, state, window)

        given = window
        if plan.group is not None:
            own = window if plan.donate else tree_map(torch.clone, window)
            given = window_of_all_ranks(plan, state, own)
        result = finishing("applied", None, state, flatten(state), (given, ()), eagerly)
        if plan.donate:
            mark(tree_leaves(window))
        return result

    def form(state: TrainState, batch: Tree) -> str:
        check_state(state, TrainState, "this step")
        return form_of(plan, state, read_batch(batch)).name

    return Compiled(update_compiled, apply_compiled, whole_compiled, form)


def check_compilable(rule: Rule, settings: Any) -> None:
    """Check what a step that compiles itself may be made of."""
    if settings is not True and not isinstance(settings, Mapping):
        raise TypeError(
            f"compile is {settings!r}; expected True, False, or the arguments of torch.compile, "
            'such as {"mode": "reduce-overhead"}.'
        )
    taken = ("backend", "mode", "options", "dynamic")
    strange = [name for name in ({} if settings is True else settings) if name not in taken]
    if strange:
        raise ValueError(
            f"compile has {strange[0]!r}, which is not among what is handed on to torch.compile: "
            f"{', '.join(taken)}."
        )
    if rule.engine == "autograd":
        raise ValueError(
            "engine='autograd' came with compile; a graph is made of torch.func. For checkpoints "
            "leave compile out, or use engine='func' without them: a graph computes again by "
            "itself what is cheap."
        )
    if rule.squares:
        raise ValueError(
            "noise=True came with compile; a graph adds gradients to sums without looking at them. "
            "Measure with an eager step now and then: the state is the same."
        )
    if rule.nonfinite == "raise":
        raise ValueError(
            "nonfinite='raise' came with compile; it has to look at the numbers, which a graph "
            "cannot. Use 'skip' or 'propagate', and look at info.applied afterwards."
        )
