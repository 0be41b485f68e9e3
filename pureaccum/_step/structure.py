"""What a step decides once for a structure of a state and a batch: see ``_core/structures.py``."""

from typing import Any, NamedTuple

from .._base import trees
from .._core import batches, coupling, structures, sums, whole_batch
from .._optim import updates
from . import microbatch_loss, plans
from .state import TrainState


class Prepared(NamedTuple):
    """Parameters and a batch that were checked, and how gradients are summed."""

    params: trees.Flat
    cut: whole_batch.CutBatch
    kinds: sums.Kinds
    question: coupling.Question | None


class Structure(NamedTuple):
    """What is decided for all states and batches of one structure."""

    begin: updates.Begin  # the optimizer's step
    cut: whole_batch.CutBatch  # without its leaves
    kinds: sums.Kinds
    question: Any  # the kind of it
    devices: frozenset[str]


def prepare(
    plan: plans.Plan, state: TrainState, batch: trees.Tree
) -> tuple[Prepared, updates.Begin]:
    """Check a state and a batch; give what follows, and what begins the optimizer's step."""
    flat = trees.flatten((state, batch))
    size = tuple(plan.size) if isinstance(plan.size, list) else plan.size
    key = structures.structure_of(size, flat)
    # A compiler, for which there is no key, is not to look into what was decided.
    known: Structure | None = None if key is None else plan.structures.known.get(key)
    if known is None:
        return _examined(plan, state, batch, key)
    leaves, both = flat
    # Structures that are equal may have their keys in another order.
    spec, rows = both.child(0).child(0), both.child(1)
    begin, cut, kinds, kind, devices = known
    params = leaves[: spec.num_leaves]  # which come first in a state
    structures.ask_autocast(devices, params)
    read = batches.Batch(leaves[len(leaves) - rows.num_leaves :], rows, cut.batch.rows)
    question = None if kind is None else coupling.Question(read, len(cut.sizes), kind)
    return Prepared((params, spec), cut._replace(batch=read), kinds, question), begin


def _examined(
    plan: plans.Plan, state: TrainState, batch: trees.Tree, key: Any
) -> tuple[Prepared, updates.Begin]:
    params = plans.read_train_state(plan, state)
    begin = plans.begun_by(plan, state, params)
    prepared = examined(plan, plan.size, params, batch)
    cut, question = prepared.cut, prepared.question
    if key is not None:
        structure = Structure(
            begin=begin,
            cut=cut._replace(batch=cut.batch._replace(leaves=[])),
            kinds=prepared.kinds,
            question=question and question.kind,
            devices=structures.devices_of(params[0]),
        )
        plan.structures.keep(key, structure)
    return prepared, begin


def examined(
    plan: plans.Plan,
    size: int | list[int] | None,
    params: trees.Flat,
    batch: trees.Tree,
    root: str = "batch",
) -> Prepared:
    """Parameters, and a batch that is checked; other ranks may have samples of it, too."""
    alone = plan.group is None and root == "batch"
    cut = whole_batch.read_cut(batch, size, plan.calling.has_aux and alone, root, alone=alone)
    microbatch_loss.check_keys(plan, cut.batch)
    question = whole_batch.question_about(cut, plan.rule, "step") if plan.calling.check else None
    dtypes = [trees.accumulation_dtype(x.dtype) for x in params[0]]
    return Prepared(params, cut, sums.kinds_of(params[0], dtypes), question)
