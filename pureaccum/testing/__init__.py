"""Check that your loss can be cut into microbatches, and test your own accumulation code.

``check_accumulation``, ``assert_accumulates``: can this loss, or this loop, be cut, and why not?
``check_training_loop``: the same for a loop over a module and an optimizer of torch.
``assert_pure``, ``unchanged``: check that a call, or a block, changes nothing.
``assert_trees_bitwise_equal``, ``assert_trees_within_bound``: what differs, where, and why.
``strategies``: data, losses and histories for hypothesis (``pip install 'pureaccum[testing]'``).
``fixtures``: the checks as pytest fixtures.

To read the source, begin with ``_check``, the checker. ``_assertions`` and ``_pure`` stand alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .._base.states import make_public as _make_public
from ._assertions import assert_trees_bitwise_equal, assert_trees_within_bound
from ._check.check import assert_accumulates, check_accumulation
from ._check.report import AccumulationMismatch, Diagnosis, Leaf, Report
from ._check.training_loop import check_training_loop
from ._pure import assert_pure, unchanged


__all__ = [
    "AccumulationMismatch",
    "Diagnosis",
    "Leaf",
    "Report",
    "assert_accumulates",
    "assert_pure",
    "assert_trees_bitwise_equal",
    "assert_trees_within_bound",
    "check_accumulation",
    "check_training_loop",
    "strategies",
    "unchanged",
]
_make_public(globals(), __name__)

if TYPE_CHECKING:
    from . import strategies as strategies


def __getattr__(name: str) -> Any:
    """Import strategies only when they are asked for: hypothesis takes half a second."""
    if name == "strategies":
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
