"""A step that compiles itself: ``make_step(..., compile=True)``.

Each call looks up the recipe for its batch by the shapes, arranges the batch by it, and calls the
graph. What an eager step refuses is refused in the same words: where a graph fails, the step is run
without the compiler, and only if that goes well is the compiler to blame.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import count
from typing import Any

import torch

from .._base.checks import check_state, refuse_autocast_cache
from .._base.containers import open_tree
from .._base.dtensors import any_sharded
from .._base.random_state import put_back
from .._base.refusals import CompileError, attempt, is_limit
from .._base.states import mark
from .._base.trees import Flat, Tree, flatten, tree_leaves, tree_map, unflatten
from .._core.batches import (
    Batch,
    cut_batch,
    read_batch,
    read_microbatch,
    refuse_in_graphs,
    rows_to_cut,
)
from .._core.coupling import question_of
from .._core.reductions import AuxState
from .._core.writes import Given, guarding, knows
from .buffers import begin_buffers
from .constants import Values, check_values, looks_of
from .graphs import (
    Seen,
    has_cuda_graphs,
    programs,
    reduced_aux,
    renewed,
    seen_of,
    unit_of,
)
from .microbatch_loss import caller, check_keys, sharing, what_is_shared
from .next_state import finished_aux
from .plans import Plan, begun_by, check_window, read_train_state, recording, size_of
from .ranks import before_this_rank, telling_ranks, window_of_all_ranks
from .recipes import Freedom, Recipe, Shapes, form_of, narrowed, recipe_for
from .state import StepInfo, StepWindow, TrainState
from .whole_step import step_whole
from .windows import (
    applied_window,
    apply_window,
    first_row,
    folded_window,
    update_window,
    updated_window,
)


SHAPES_REMEMBERED = 1000  # kinds of batches, and of microbatches


class CompiledStep:
    """The functions of a step that compiles itself; each graph is made when it is first needed."""

    def __init__(self, plan: Plan, settings: Mapping[str, Any]) -> None:
        self.plan = plan
        # For what is run without the compiler: on this rank alone, since others may not fail.
        self.alone = plan._replace(donate=False, group=None)
        self.graph = programs(plan, settings)
        # DTensors are summed by each rank where they lie, which no graph of torch's does: of a
        # step over them the loss alone is compiled.
        compiled = torch.compile(plan.calling.loss_fn, **settings)
        self.of_dtensors = plan._replace(calling=plan.calling._replace(loss_fn=compiled))
        self.recorded = has_cuda_graphs(settings)
        told_apart = not settings.get("dynamic")
        self.of_batches = Shapes({}, {}, told_apart)
        self.of_microbatches = Shapes({}, {}, told_apart)
        self.recipes: dict[Any, Recipe] = {}
        self.values: Values = {}
        self.fitting: set[Any] = set()  # kinds of states and windows
        self.asked: dict[Any, Any] = {}  # the kind of question about a kind of batch, or None
        self.looks = count()

    def form(self, state: TrainState, batch: Tree, *_: Any) -> str:
        """The form in which the compiler gets a batch."""
        check_state(state, TrainState, "this step")
        if any_sharded([*tree_leaves(state), *tree_leaves(batch)]):
            return "loss"
        return form_of(self.plan, state, read_batch(batch))

    @partial(recording, eager=step_whole)
    def whole(self, state: TrainState, batch: Tree, *shared: Any) -> tuple[TrainState, StepInfo]:
        """One step over a whole batch."""
        plan = sharing(self.plan, shared)
        leaves, spec = open_tree(batch)
        old = flatten(state)
        if any_sharded([*old[0], *leaves]):
            return step_whole(self.of_dtensors, state, batch, *shared)
        given = *what_is_shared(plan), Given("batch", leaves, spec)
        kind = kind_of(old, *given)
        if kind not in self.recipes and not self.check_batch(plan, state, batch, given):
            return step_whole(plan, state, batch)
        refuse_autocast_cache([state.samples])
        began = state
        if plan.group is not None and plan.calling.keys:
            rows = read_batch(batch).rows or 0
            first = state.samples + before_this_rank(plan, state, rows)
            began = state._replace(samples=first)
        self.ask(kind, plan, state, read_batch(batch), given)
        eagerly = partial(step_whole, self.alone, state, batch, *shared)

        def make(free: Freedom | None) -> Recipe:
            return recipe_for(plan, state, read_batch(batch), self.of_batches, free)

        def call(recipe: Recipe) -> Any:
            parts = recipe.arrange(leaves)
            if recipe.form == "loop":
                return self.looped(recipe, began, plan.calling.shared, parts.pieces, eagerly)
            return self.finished(state, old, (plan.calling.shared, parts), eagerly, recipe)

        came = self.run(kind, make, call)
        if self.recipes[kind].form != "loop":
            return came
        (window, aux), unit = came, unit_of(plan)
        if plan.group is not None:
            window, unit = window_of_all_ranks(plan, state, window, unit), 1.0
        return self.finished(state, old, (window, unit, aux), eagerly)

    def check_batch(
        self, plan: Plan, state: TrainState, batch: Tree, given: tuple[Given, ...]
    ) -> bool:
        """Check a batch of a new kind, and give whether it has anything to compile: rows.

        All of that is the same for the next batch of this kind.
        """
        begun_by(plan, state, read_train_state(plan, state))
        flat = read_batch(batch)
        check_keys(plan, flat)
        if plan.size is not None:
            rows_to_cut(flat, "batch")
        if flat.rows == 0:
            return False
        refuse_in_graphs(flat, "batch", size_of(plan))
        check_values(self.values, *given)
        return True

    @partial(recording, eager=update_window)
    def update(
        self,
        state: TrainState,
        window: StepWindow,
        microbatch: Tree,
        *shared: Any,
        offset: int | None = None,
    ) -> Any:
        """The window with one more microbatch, or ``(window, aux)``."""
        new, seen, _ = self.updated(state, window, microbatch, shared, offset)
        return (new, seen[0]) if self.plan.calling.has_aux else new

    @partial(recording, eager=folded_window)
    def folded(
        self,
        state: TrainState,
        window: StepWindow,
        aux: AuxState | None,
        microbatch: Tree,
        *shared: Any,
    ) -> tuple[StepWindow, AuxState | None]:
        """The window with one more microbatch, and what has been reduced of aux with its own."""
        new, seen, rows = self.updated(state, window, microbatch, shared)
        return new, reduced_aux(self.plan, aux, seen, rows)

    def updated(
        self,
        state: TrainState,
        window: StepWindow,
        microbatch: Tree,
        shared: tuple[Any, ...],
        offset: int | None = None,
    ) -> tuple[StepWindow, Seen, int]:
        """The window with one more microbatch, what is kept of its aux, and its rows."""
        sharded = any_sharded([*tree_leaves(state), *tree_leaves(microbatch)])
        old = flatten(state) if sharded else self.checked(state, window)
        flat = read_microbatch(microbatch, "microbatch")
        if sharded or not flat.rows:
            plan = sharing(self.of_dtensors if sharded else self.plan, shared)
            new, entry, rows = updated_window(plan, state, window, microbatch, offset=offset)
            return new, seen_of(plan, entry), rows
        refuse_in_graphs(flat, "microbatch", None)
        plan = sharing(self.plan, shared)
        at = first_row(plan, window, offset)
        told = *what_is_shared(plan), Given("microbatch", flat.leaves, flat.spec)
        kind = "more", *kind_of(old, *told)
        if kind not in self.recipes:
            check_values(self.values, *told)
        self.ask(kind, plan, state, flat, told)
        rows = window.rows + flat.rows
        own = window if plan.donate else tree_map(torch.clone, window)
        own = own._replace(rows=at)
        given = flatten(own)
        eagerly = partial(update_window, self.alone, state, window, microbatch, *shared)

        def make(free: Freedom | None) -> Recipe:
            as_it_is = plan._replace(donate=False, group=None, size=None)
            return recipe_for(as_it_is, state, flat, self.of_microbatches, free)

        def call(recipe: Recipe) -> Any:
            (part,) = recipe.arrange(flat.leaves).pieces
            args = own, state, plan.calling.shared, part, None
            return attempt(self.graph("more", True, (recipe.key, None)), args, eagerly, plan.donate)

        left, seen = self.run(kind, make, call)
        new = renewed(given, left)
        if offset is not None:
            new = new._replace(rows=rows)
        if plan.donate:
            mark(given[0])
        return new, seen, flat.rows

    @partial(recording, eager=apply_window)
    def apply(self, state: TrainState, window: StepWindow) -> tuple[TrainState, StepInfo]:
        """The next state, and what happened."""
        if any_sharded(tree_leaves(state)):
            return apply_window(self.of_dtensors, state, window)
        plan, old = self.plan, self.checked(state, window)
        given = window
        if plan.group is not None:
            own = window if plan.donate else tree_map(torch.clone, window)
            given = window_of_all_ranks(plan, state, own)
        eagerly = partial(apply_window, self.alone, state, window)
        result = self.finished(state, old, (given, 1.0, ()), eagerly)
        if plan.donate:
            mark(tree_leaves(window))
        return result

    def checked(self, state: TrainState, window: StepWindow) -> Flat:
        """Check that a graph may be given a state and a window, and flatten the state."""
        old = flatten(state)
        kind = old[1], flatten(window)[1]
        if kind not in self.fitting:
            params = read_train_state(self.plan, state)
            begun_by(self.plan, state, params)
            check_window(self.plan, state, window, params)
            self.fitting.add(kind)
        refuse_autocast_cache([state.samples])
        return old

    def ask(
        self, kind: Any, plan: Plan, state: TrainState, batch: Batch, given: tuple[Given, ...]
    ) -> None:
        """Call the loss of a microbatch, to see what it writes to, or couples: no graph can tell.

        Of a batch at hand it is another one each time, and each of them once the loss was refused.
        """
        calling, answered = plan.calling, kind in self.asked
        if answered and knows(calling.known, *given, asked=self.asked[kind]):
            return
        (leaves, spec), parts, cut = flatten(state.params), [batch], calling.check
        at_hand = given[-1].root == "batch"
        if at_hand:
            size = size_of(plan)
            parts = parts if size is None else [*map(read_batch, cut_batch(batch, size))]
            cut = cut and len(parts) > 1
            if not any(answer.coupled for answer in calling.known.answers.values()):
                parts = [parts[next(self.looks) % len(parts)]]
        told = Given("state.params", leaves, spec), *given
        call, carried = caller(plan, state, spec), begin_buffers(calling.buffers, state.buffers)
        with telling_ranks(plan, state) if at_hand else nullcontext():
            for own in parts:
                question = question_of(own, plan.rule) if cut else None
                self.asked[kind] = question and question.kind  # not the rows
                with guarding(calling.known, *told, question=question) as guarded:
                    if (watched := guarded(call)) is not call:
                        with put_back(state.samples.device), torch.enable_grad():
                            part = unflatten(own.spec, own.leaves)
                            wrt = [x.detach().requires_grad_() for x in leaves]
                            watched(wrt, part, own.rows or 1, (carried, 0))

    def run(
        self, kind: Any, make: Callable[[Freedom | None], Recipe], call: Callable[[Recipe], Any]
    ) -> Any:
        """Call with a kind's recipe; where the compiler fails, with one that leaves less open."""
        recipe = self.recipes.get(kind)
        if recipe is None:
            if len(self.recipes) >= SHAPES_REMEMBERED:
                self.recipes.clear()
            recipe = self.recipes[kind] = make(None)
        while True:
            try:
                return call(recipe)
            except CompileError as error:
                free = None if is_limit(error.__cause__) else narrowed(recipe)
                if free is None:
                    raise
            recipe = self.recipes[kind] = make(free)

    def looped(
        self,
        recipe: Recipe,
        state: TrainState,
        shared: tuple[Any, ...],
        parts: Sequence[Tree],
        eagerly: Callable[[], object],
    ) -> tuple[StepWindow, Tree]:
        """The window of all microbatches, and their aux."""
        unit, aux = unit_of(self.plan), None
        key, window = (recipe.key, unit), None
        for part in parts:
            args = state, shared, part, unit
            if window is None:
                window, seen = attempt(self.graph("first", False, key), args, eagerly)
            else:
                args = window, *args
                left, seen = attempt(self.graph("more", True, key), args, eagerly)
                window = renewed(flatten(window), left)
            rows = read_batch(part).rows if self.plan.calling.has_aux else 0
            aux = reduced_aux(self.plan, aux, seen, rows or 0)
        assert window is not None
        return window, finished_aux(aux)

    def finished(
        self,
        state: TrainState,
        old: Flat,
        rest: tuple[Any, ...],
        eagerly: Callable[[], object],
        recipe: Recipe | None = None,
    ) -> tuple[TrainState, StepInfo]:
        """The next state and what happened, from a graph: in place where that saves anything.

        ``rest`` is what the graph is given beside the state: a batch that is arranged by a recipe,
        or else a window, the unit of its sums, and aux.
        """
        leaves, spec = old
        if not self.plan.optimizer.in_graphs:
            return applied_window(self.plan._replace(group=None), state, *rest)
        # Not where a tensor stands twice (tied leaves), nor in a recording of CUDA's, which would
        # have to write where it was recorded.
        distinct = len({*map(id, leaves)}) == len(leaves)
        tiny = recipe is not None and recipe.tiny
        in_place = self.plan.donate and not tiny and not self.recorded and distinct
        if recipe is None:
            looks = looks_of(leaves, self.of_batches.told_apart)
            program = self.graph("applied", in_place, (spec, rest[1], *looks))
        else:
            program = self.graph("whole", in_place, recipe.key, recipe.cpp)
        new, info = attempt(program, (state, *rest), eagerly)
        if in_place:
            new = renewed(old, new)
        if self.plan.donate:
            mark(leaves)
        return new, info


def kind_of(state: Flat, *given: Given) -> tuple[Any, ...]:
    """What decides how a batch goes through the compiler, of the state and of what is given."""
    leaves = [*state[0], *(x for each in given for x in each.leaves)]
    return state[1], *[each.spec for each in given], *looks_of(leaves)
