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

from .._base import checks, containers, dtensors, random_state, refusals, states, trees
from .._core import batches, coupling, losses, reductions, terms, writes
from . import constants, graphs, microbatch_loss, plans, ranks, recipes, whole_step, windows
from .buffers import begin_buffers
from .next_state import finished_aux
from .state import StepInfo, StepWindow, TrainState


SHAPES_REMEMBERED = 1000  # kinds of batches, and of microbatches


class CompiledStep:
    """The functions of a step that compiles itself; each graph is made when it is first needed."""

    def __init__(self, plan: plans.Plan, settings: Mapping[str, Any]) -> None:
        self.plan = plan
        # For what is run without the compiler: on this rank alone, since others may not fail.
        self.alone = plan._replace(donate=False, group=None)
        self.graph = graphs.programs(plan, settings)
        # DTensors are summed by each rank where they lie, which no graph of torch's does: of a
        # step over them the loss alone is compiled.
        compiled = torch.compile(plan.calling.loss_fn, **settings)
        self.of_dtensors = plan._replace(calling=plan.calling._replace(loss_fn=compiled))
        self.recorded = graphs.has_cuda_graphs(settings)
        told_apart = not settings.get("dynamic")
        self.of_batches = recipes.Shapes({}, {}, told_apart)
        self.of_microbatches = recipes.Shapes({}, {}, told_apart)
        self.recipes: dict[Any, recipes.Recipe] = {}
        self.values: constants.Values = {}
        self.fitting: set[Any] = set()  # kinds of states and windows
        self.asked: dict[Any, Any] = {}  # the kind of question about a kind of batch, or None
        self.looks = count()

    def form(self, state: TrainState, batch: trees.Tree, *_: Any) -> str:
        """The form in which the compiler gets a batch."""
        checks.check_state(state, TrainState, "this step")
        if dtensors.any_sharded([*trees.tree_leaves(state), *trees.tree_leaves(batch)]):
            return "loss"
        return recipes.form_of(self.plan, state, batches.read_batch(batch))

    @partial(plans.recording, eager=whole_step.step_whole)
    def whole(
        self, state: TrainState, batch: trees.Tree, *shared: Any
    ) -> tuple[TrainState, StepInfo]:
        """One step over a whole batch."""
        plan = microbatch_loss.sharing(self.plan, shared)
        leaves, spec = containers.open_tree(batch)
        old = trees.flatten(state)
        if dtensors.any_sharded([*old[0], *leaves]):
            return whole_step.step_whole(self.of_dtensors, state, batch, *shared)
        given = *microbatch_loss.what_is_shared(plan), writes.Given("batch", leaves, spec)
        kind = kind_of(old, *given)
        if kind not in self.asked and not self.check_batch(plan, state, batch, given):
            return whole_step.step_whole(plan, state, batch)
        checks.refuse_autocast_cache([state.samples])
        began = state
        if plan.group is not None and plan.calling.keys:
            rows = batches.read_batch(batch).rows or 0
            first = state.samples + ranks.before_this_rank(plan, state, rows)
            began = state._replace(samples=first)
        flat = batches.read_batch(batch)
        asked = checks.here.asked
        self.ask(kind, plan, state, flat, given)
        checked = checks.here.asked > asked
        eagerly = partial(whole_step.step_whole, self.alone, state, batch, *shared)
        plan = self.counted(kind, plan, began, flat, eagerly)
        kind = kind, plan.calling.whole is None

        def make(free: recipes.Freedom | None) -> recipes.Recipe:
            return recipes.recipe_for(plan, state, flat, self.of_batches, free)

        def call(recipe: recipes.Recipe) -> Any:
            parts = recipe.arrange(leaves)
            if recipe.form == "loop":
                return self.looped(recipe, plan, began, parts.pieces, eagerly)
            beside = microbatch_loss.beside_batch(plan)
            return self.finished(state, old, (beside, parts), eagerly, recipe)

        came = self.run(kind, make, call)
        if self.recipes[kind].form == "loop":
            (window, aux), unit = came, graphs.unit_of(plan)
            if plan.group is not None:
                window, unit = ranks.window_of_all_ranks(plan, state, window, unit), 1.0
            came = self.finished(state, old, (window, unit, aux), eagerly)
        new, info = came
        return new, info._replace(checked=torch.ones_like(info.checked)) if checked else info

    def check_batch(
        self,
        plan: plans.Plan,
        state: TrainState,
        batch: trees.Tree,
        given: tuple[writes.Given, ...],
    ) -> bool:
        """Check a batch of a new kind, and give whether it has anything to compile: samples.

        All of that is the same for the next batch of this kind.
        """
        plans.begun_by(plan, state, plans.read_train_state(plan, state))
        flat = batches.read_batch(batch)
        microbatch_loss.check_keys(plan, flat)
        if plan.size is not None:
            batches.rows_to_cut(flat, "batch")
        if flat.rows == 0:
            return False
        batches.refuse_in_graphs(flat, "batch", plans.size_of(plan))
        constants.check_values(self.values, *given)
        return True

    @partial(plans.recording, eager=windows.update_window)
    def update(
        self,
        state: TrainState,
        window: StepWindow,
        microbatch: trees.Tree,
        *shared: Any,
        offset: int | None = None,
        weights: Any = None,
    ) -> Any:
        """The window with one more microbatch, or ``(window, aux)``."""
        plan = windows.with_weights(self.plan, state, weights)
        new, seen, _ = self.updated(plan, state, window, microbatch, shared, offset)
        return (new, seen[0]) if self.plan.calling.has_aux else new

    @partial(plans.recording, eager=windows.folded_window)
    def folded(
        self,
        state: TrainState,
        window: StepWindow,
        aux: reductions.AuxState | None,
        microbatch: trees.Tree,
        *shared: Any,
        weights: Any = None,
    ) -> tuple[StepWindow, reductions.AuxState | None]:
        """The window with one more microbatch, and what has been reduced of aux with its own."""
        plan = windows.with_weights(self.plan, state, weights)
        new, seen, rows = self.updated(plan, state, window, microbatch, shared)
        return new, graphs.reduced_aux(self.plan, aux, seen, rows)

    def updated(
        self,
        plan: plans.Plan,
        state: TrainState,
        window: StepWindow,
        microbatch: trees.Tree,
        shared: tuple[Any, ...],
        offset: int | None = None,
    ) -> tuple[StepWindow, graphs.Seen, int]:
        """The window with one more microbatch, what is kept of its aux, and its samples."""
        sharded = dtensors.any_sharded([*trees.tree_leaves(state), *trees.tree_leaves(microbatch)])
        old = trees.flatten(state) if sharded else self.checked(state, window)
        flat = batches.read_microbatch(microbatch, "microbatch")
        plan = microbatch_loss.sharing(plan, shared)
        if sharded or not flat.rows:
            if sharded:
                of_loss = self.of_dtensors.calling.loss_fn
                plan = plan._replace(calling=plan.calling._replace(loss_fn=of_loss))
            new, entry, rows = windows.updated_window(
                plan, state, window, microbatch, offset=offset
            )
            return new, graphs.seen_of(plan, entry), rows
        batches.refuse_in_graphs(flat, "microbatch", None)
        at = windows.first_row(plan, window, offset)
        told = (
            *microbatch_loss.what_is_shared(plan),
            writes.Given("microbatch", flat.leaves, flat.spec),
        )
        kind = "more", plan.calling.whole is None, *kind_of(old, *told)
        if kind not in self.recipes:
            constants.check_values(self.values, *told)
        asked = checks.here.asked
        self.ask(kind, plan, state, flat, told)
        rows = window.rows + flat.rows
        own = window if plan.donate else trees.tree_map(torch.clone, window)
        own = own._replace(rows=at)
        if checks.here.asked > asked:
            own = own._replace(checked=torch.ones_like(own.checked))
        given = trees.flatten(own)
        alone = plan._replace(donate=False, group=None)
        eagerly = partial(windows.update_window, alone, state, window, microbatch)

        def make(free: recipes.Freedom | None) -> recipes.Recipe:
            as_it_is = plan._replace(donate=False, group=None, size=None)
            return recipes.recipe_for(as_it_is, state, flat, self.of_microbatches, free)

        def call(recipe: recipes.Recipe) -> Any:
            (part,) = recipe.arrange(flat.leaves).pieces
            args = own, state, microbatch_loss.beside_batch(plan), part, None
            return refusals.attempt(
                self.graph("more", True, (recipe.key, None)), args, eagerly, plan.donate
            )

        left, seen = self.run(kind, make, call)
        new = graphs.renewed(given, left)
        if offset is not None:
            new = new._replace(rows=rows)
        if plan.donate:
            states.mark(given[0])
        return new, seen, flat.rows

    @partial(plans.recording, eager=windows.apply_window)
    def apply(self, state: TrainState, window: StepWindow) -> tuple[TrainState, StepInfo]:
        """The next state, and what happened."""
        if dtensors.any_sharded(trees.tree_leaves(state)):
            return windows.apply_window(self.of_dtensors, state, window)
        plan, old = self.plan, self.checked(state, window)
        given = window
        if plan.group is not None:
            own = window if plan.donate else trees.tree_map(torch.clone, window)
            given = ranks.window_of_all_ranks(plan, state, own)
        eagerly = partial(windows.apply_window, self.alone, state, window)
        result = self.finished(state, old, (given, 1.0, ()), eagerly)
        if plan.donate:
            states.mark(trees.tree_leaves(window))
        return result

    def checked(self, state: TrainState, window: StepWindow) -> trees.Flat:
        """Check that a graph may be given a state and a window, and flatten the state."""
        old = trees.flatten(state)
        kind = old[1], trees.flatten(window)[1]
        if kind not in self.fitting:
            params = plans.read_train_state(self.plan, state)
            plans.begun_by(self.plan, state, params)
            plans.check_window(self.plan, state, window, params)
            self.fitting.add(kind)
        checks.refuse_autocast_cache([state.samples])
        return old

    def ask(
        self,
        kind: Any,
        plan: plans.Plan,
        state: TrainState,
        batch: batches.Batch,
        given: tuple[writes.Given, ...],
    ) -> None:
        """Call the loss of a microbatch, to see what it writes to, or couples: no graph can tell.

        Of a batch at hand it is another one each time, and each of them once the loss was refused.
        """
        calling, answered = plan.calling, kind in self.asked
        unread = calling.known.terms is None
        asked, keeps = self.asked.get(kind), calling.keeps_buffers
        known = answered and writes.knows(calling.known, *given, asked=asked, keeps_buffers=keeps)
        if known and not unread:
            return
        (leaves, spec), parts, cut = trees.flatten(state.params), [batch], calling.check
        at_hand = given[-1].root == "batch"
        if at_hand:
            size = plans.size_of(plan)
            if size is not None:
                parts = [*map(batches.read_batch, batches.cut_batch(batch, size))]
            cut = cut and len(parts) > 1
            if not any(answer.coupled for answer in calling.known.answers.values()):
                parts = [parts[next(self.looks) % len(parts)]]
        told = writes.Given("state.params", leaves, spec), *given
        call = microbatch_loss.caller(plan, state, spec)
        carried = begin_buffers(calling.buffers, state.buffers)
        asked = coupling.question_of(batch, plan.rule, "step").kind if cut else None
        self.asked[kind] = asked
        with ranks.telling_ranks(plan, state) if at_hand else nullcontext():
            for own in parts:
                asks = writes.Asks(coupling.Question(own, 1, asked) if asked else None, keeps)
                with writes.guarding(calling.known, *told, asks=asks) as guarded:
                    if (watched := guarded(call)) is not call or unread:
                        with random_state.put_back(state.samples.device), torch.enable_grad():
                            part = trees.unflatten(own.spec, own.leaves)
                            wrt = [x.detach().requires_grad_() for x in leaves]
                            out = watched(wrt, part, own.rows or 1, (carried, 0))
                            has_aux = calling.has_aux or calling.buffers is not None
                            calling.known.terms = terms.number_of(losses.loss_in(out, has_aux))

    def counted(
        self,
        kind: Any,
        plan: plans.Plan,
        state: TrainState,
        flat: batches.Batch,
        eagerly: Callable[[], object],
    ) -> plans.Plan:
        """The plan with the weights of the whole batch, of a loss that is a sum of ``Weighted``."""
        if not plan.calling.known.terms:
            return plan
        if recipes.takes_whole(plan, flat):
            return microbatch_loss.with_shared(plan, plan.calling.shared, "alone")
        if plan.rule.nonfinite == "skip":
            raise terms.skipping_error()
        counting = microbatch_loss.with_shared(plan, plan.calling.shared, "counted")
        before, beside = torch.zeros_like(state.samples), microbatch_loss.beside_batch(counting)
        found: list[torch.Tensor] = []
        with random_state.put_back(state.samples.device):  # what is drawn is drawn once more
            for part in batches.cut_batch(flat, plans.size_of(plan) or flat.rows or 1):
                rows = batches.read_batch(part).rows or 0
                program = self.graph("counted", False, (kind, rows))
                found.append(refusals.attempt(program, (state, beside, part, before), eagerly))
                before = before + rows
        whole = torch.stack(found).sum(0)
        whole = whole if plan.group is None else ranks.weights_of_all(plan, whole)
        return microbatch_loss.with_shared(plan, plan.calling.shared, whole)

    def run(
        self,
        kind: Any,
        make: Callable[[recipes.Freedom | None], recipes.Recipe],
        call: Callable[[recipes.Recipe], Any],
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
            except refusals.CompileError as error:
                free = None if refusals.is_limit(error.__cause__) else recipes.narrowed(recipe)
                if free is None:
                    raise
            recipe = self.recipes[kind] = make(free)

    def looped(
        self,
        recipe: recipes.Recipe,
        plan: plans.Plan,
        state: TrainState,
        parts: Sequence[trees.Tree],
        eagerly: Callable[[], object],
    ) -> tuple[StepWindow, trees.Tree]:
        """The window of all microbatches, and their aux."""
        unit, aux = graphs.unit_of(self.plan), None
        key, window = (recipe.key, unit), None
        beside = microbatch_loss.beside_batch(plan)
        for part in parts:
            args = state, beside, part, unit
            if window is None:
                window, seen = refusals.attempt(self.graph("first", False, key), args, eagerly)
            else:
                args = window, *args
                left, seen = refusals.attempt(self.graph("more", True, key), args, eagerly)
                window = graphs.renewed(trees.flatten(window), left)
            rows = batches.read_batch(part).rows if self.plan.calling.has_aux else 0
            aux = graphs.reduced_aux(self.plan, aux, seen, rows or 0)
        assert window is not None
        return window, finished_aux(aux)

    def finished(
        self,
        state: TrainState,
        old: trees.Flat,
        rest: tuple[Any, ...],
        eagerly: Callable[[], object],
        recipe: recipes.Recipe | None = None,
    ) -> tuple[TrainState, StepInfo]:
        """The next state and what happened, from a graph: in place where that saves anything.

        ``rest`` is what the graph is given beside the state: a batch that is arranged by a recipe,
        or else a window, the unit of its sums, and aux.
        """
        leaves, spec = old
        if not self.plan.optimizer.in_graphs:
            return windows.applied_window(self.plan._replace(group=None), state, *rest)
        # Not where a tensor stands twice (tied leaves), nor in a recording of CUDA's, which would
        # have to write where it was recorded.
        distinct = len({*map(id, leaves)}) == len(leaves)
        tiny = recipe is not None and recipe.tiny
        in_place = self.plan.donate and not tiny and not self.recorded and distinct
        if recipe is None:
            looks = constants.looks_of(leaves, self.of_batches.told_apart)
            program = self.graph("applied", in_place, (spec, rest[1], *looks))
        else:
            program = self.graph("whole", in_place, recipe.key, recipe.cpp)
        new, info = refusals.attempt(program, (state, *rest), eagerly)
        if in_place:
            new = graphs.renewed(old, new)
        if self.plan.donate:
            states.mark(leaves)
        return new, info


def kind_of(state: trees.Flat, *given: writes.Given) -> tuple[Any, ...]:
    """What decides how a batch goes through the compiler, of the state and of what is given."""
    leaves = [*state[0], *(x for each in given for x in each.leaves)]
    return state[1], *[each.spec for each in given], *constants.looks_of(leaves)
