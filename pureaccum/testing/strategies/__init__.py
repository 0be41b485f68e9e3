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

from .data import batches, dtypes, exact_trees, seeds, shapes, trees, weights
from .histories import (
    Fault,
    History,
    MergeTree,
    compositions,
    faults,
    histories,
    merge_along,
    merge_trees,
    pieces,
)
from .losses import KINDS, ExactModel, Kind, losses, reduction


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
