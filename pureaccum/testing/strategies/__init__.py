"""Hypothesis strategies for data, losses and histories: ``pip install 'pureaccum[testing]'``.

``data`` draws trees and batches, ``losses`` models with exact arithmetic, and ``histories`` every
way to accumulate a batch. Read ``histories`` first:

    @given(losses(samples=8), histories(8))
    def test_the_bits_of_the_full_batch(model, history):
        acc = accumulator(model.loss("mean"))
        grads, _ = acc.finalize(history.run(acc, model.params, model.batch))
        assert_trees_bitwise_equal(grads, model.full_batch("mean")[0])

Sums of the data are exact, so tests compare bits and no tolerance hides a fault. Failing examples
shrink to ones that a person would have written.
"""

try:
    import hypothesis as _  # noqa: F401
except ModuleNotFoundError:
    raise ModuleNotFoundError(
        "pureaccum.testing.strategies needs hypothesis: pip install 'pureaccum[testing]'."
    ) from None

from .data import batches as batches
from .data import dtypes as dtypes
from .data import exact_trees as exact_trees
from .data import seeds as seeds
from .data import shapes as shapes
from .data import trees as trees
from .data import weights as weights
from .histories import Fault as Fault
from .histories import History as History
from .histories import MergeTree as MergeTree
from .histories import compositions as compositions
from .histories import faults as faults
from .histories import histories as histories
from .histories import merge_along as merge_along
from .histories import merge_trees as merge_trees
from .histories import pieces as pieces
from .losses import KINDS as KINDS
from .losses import ExactModel as ExactModel
from .losses import Kind as Kind
from .losses import losses as losses
from .losses import reduction as reduction


__all__ = [
    "KINDS",
    "ExactModel",
    "Fault",
    "History",
    "Kind",
    "MergeTree",
    "batches",
    "compositions",
    "dtypes",
    "exact_trees",
    "faults",
    "histories",
    "losses",
    "merge_along",
    "merge_trees",
    "pieces",
    "reduction",
    "seeds",
    "shapes",
    "trees",
    "weights",
]
