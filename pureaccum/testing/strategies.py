"""Strategies of hypothesis for data, losses and histories: ``pip install 'pureaccum[testing]'``.

    @given(losses(rows=8), histories(8))
    def test_the_bits_of_the_full_batch(model, history):
        acc = accumulator(model.loss("mean"))
        grads, _ = acc.finalize(history.run(acc, model.params, model.batch))
        assert_trees_bitwise_equal(grads, model.full_batch("mean")[0])

The data are exact, so that bits can be compared and no tolerance hides a fault, and a failing
example shrinks to one that a person would have written.
"""

try:
    import hypothesis as _  # noqa: F401
except ModuleNotFoundError:
    raise ModuleNotFoundError(
        "pureaccum.testing.strategies needs hypothesis: pip install 'pureaccum[testing]'"
    ) from None

from ._exact_data import batches as batches
from ._exact_data import dtypes as dtypes
from ._exact_data import exact_trees as exact_trees
from ._exact_data import seeds as seeds
from ._exact_data import shapes as shapes
from ._exact_data import trees as trees
from ._exact_data import weights as weights
from ._exact_losses import KINDS as KINDS
from ._exact_losses import ExactModel as ExactModel
from ._exact_losses import Kind as Kind
from ._exact_losses import losses as losses
from ._exact_losses import reduction as reduction
from ._faults import Fault as Fault
from ._faults import faults as faults
from ._histories import History as History
from ._histories import MergeTree as MergeTree
from ._histories import compositions as compositions
from ._histories import histories as histories
from ._histories import merge_along as merge_along
from ._histories import merge_trees as merge_trees
from ._histories import pieces as pieces
