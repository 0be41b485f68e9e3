"""What a step decides once for a structure of a state and a batch: see ``_core/structures.py``."""

from typing import Any, NamedTuple

from .._base.trees import Flat, Tree, accumulation_dtype, flatten
from .._core.batches import Batch
from .._core.coupling import Question
from .._core.structures import ask_autocast, devices_of, structure_of
from .._core.sums import Kinds, kinds_of
from .._core.whole_batch import CutBatch, question_about, read_cut
from .._optim.updates import Begin
from .microbatch_loss import check_keys
from .plans import Plan, begun_by, read_train_state
from .state import TrainState


class Prepared(NamedTuple):
    """Parameters and a batch that were checked, and how gradients are summed."""

    params: Flat
    cut: CutBatch
    kinds: Kinds
    question: Question | None


class Structure(NamedTuple):
    """What is decided for all states and batches of one structure."""

    begin: Begin  # the optimizer's step
    cut: CutBatch  # without its leaves
    kinds: Kinds
    question: Any  # the kind of it
    devices: frozenset[str]


def prepare(plan: Plan, state: TrainState, batch: Tree) -> tuple[Prepared, Begin]:
    """Check a state and a batch; give what follows, and what begins the optimizer's step."""
    flat = flatten((state, batch))
    size = tuple(plan.size) if isinstance(plan.size, list) else plan.size
    key = structure_of(size, flat)
    # A compiler, for which there is no key, is not to look into what was decided.
    known: Structure | None = None if key is None else plan.structures.known.get(key)
    if known is None:
        return _examined(plan, state, batch, key)
    leaves, both = flat
    # Structures that are equal may have their keys in another order.
    spec, rows = both.child(0).child(0), both.child(1)
    begin, cut, kinds, kind, devices = known
    params = leaves[: spec.num_leaves]  # which come first in a state
    ask_autocast(devices, params)
    read = Batch(leaves[len(leaves) - rows.num_leaves :], rows, cut.batch.rows)
    question = None if kind is None else Question(read, len(cut.sizes), kind)
    return Prepared((params, spec), cut._replace(batch=read), kinds, question), begin


def _examined(plan: Plan, state: TrainState, batch: Tree, key: Any) -> tuple[Prepared, Begin]:
    params = read_train_state(plan, state)
    begin = begun_by(plan, state, params)
    prepared = examined(plan, plan.size, params, batch)
    cut, question = prepared.cut, prepared.question
    if key is not None:
        structure = Structure(
            begin=begin,
            cut=cut._replace(batch=cut.batch._replace(leaves=[])),
            kinds=prepared.kinds,
            question=question and question.kind,
            devices=devices_of(params[0]),
        )
        plan.structures.keep(key, structure)
    return prepared, begin


def examined(
    plan: Plan, size: int | list[int] | None, params: Flat, batch: Tree, root: str = "batch"
) -> Prepared:
    """Parameters, and a batch that is checked; other ranks may have rows of it, too."""
    alone = plan.group is None and root == "batch"
    cut = read_cut(batch, size, plan.calling.has_aux and alone, root, alone=alone)
    check_keys(plan, cut.batch)
    question = question_about(cut, plan.rule) if plan.calling.check else None
    dtypes = [accumulation_dtype(x.dtype) for x in params[0]]
    return Prepared(params, cut, kinds_of(params[0], dtypes), question)
