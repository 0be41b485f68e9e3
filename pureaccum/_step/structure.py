"""What follows from the structure of a state and a batch, decided once for each structure.

    key = their trees, and the dtype, shape, device and layout of each tensor

A call whose key is known checks nothing that its structure decides. It asks what no structure
tells: transforms and modes, autocast, what was given up, what requires a gradient, versions, the
modes of modules, every number. A structure holds decisions, and no tensor. What holds anything but
plain tensors has none, and is checked at each call; so is everything under a transform.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base.checks import refuse_autocast_cache
from .._base.dtensors import PLAIN
from .._base.torch_internals import transform_active
from .._base.trees import Flat, Tree, accumulation_dtype, flatten
from .._core.batches import Batch
from .._core.coupling import Question
from .._core.sums import Kinds, kinds_of
from .._core.whole_batch import CutBatch, question_about, read_cut
from .._optim.update import Begin
from .microbatch_loss import check_keys
from .state import Plan, TrainState, begun_by, read_train_state


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


class Structures:
    """Those that a step has met. No tuple: a compiler would look into that."""

    def __init__(self) -> None:
        self.known: dict[Any, Structure] = {}


MOST = 1000  # structures that are remembered


def prepare(plan: Plan, state: TrainState, batch: Tree) -> tuple[Prepared, Begin]:
    """Check a state and a batch; give what follows, and what begins the optimizer's step."""
    params, rows = flatten(state.params), flatten(batch)
    key = (
        None if transform_active() else _key(plan, params, rows, flatten(state._replace(params=())))
    )
    known = None if key is None else plan.structures.known.get(key)
    if known is None:
        return _examined(plan, state, batch, key)
    begin, cut, kinds, kind, devices = known
    if any(map(torch.is_autocast_enabled, devices)):
        refuse_autocast_cache(params[0])
    read = Batch(*rows, cut.batch.rows)
    question = None if kind is None else Question(read, len(cut.sizes), kind)
    return Prepared(params, cut._replace(batch=read), kinds, question), begin


def _key(plan: Plan, *trees: Flat) -> Any:
    leaves = [x for tree, _ in trees for x in tree]
    if not PLAIN.issuperset(map(type, leaves)):
        return None
    try:
        size = tuple(plan.size) if isinstance(plan.size, list) else plan.size
        return size, *[spec for _, spec in trees], *map(_LOOKS, leaves)
    except RuntimeError:  # a nested tensor has no shape
        return None


_LOOKS: Callable[[Tensor], Any] = attrgetter("dtype", "shape", "device", "layout")


def _examined(plan: Plan, state: TrainState, batch: Tree, key: Any) -> tuple[Prepared, Begin]:
    params = read_train_state(plan, state)
    begin = begun_by(plan, state, params)
    prepared = examined(plan, plan.size, params, batch)
    if key is not None:
        structures, cut, question = plan.structures.known, prepared.cut, prepared.question
        if len(structures) >= MOST:
            structures.clear()
        structures[key] = Structure(
            begin=begin,
            cut=cut._replace(batch=cut.batch._replace(leaves=[])),
            kinds=prepared.kinds,
            question=question and question.kind,
            devices=frozenset(x.device.type for x in params[0]),
        )
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
