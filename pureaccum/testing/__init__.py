"""Prove that your loss may be microbatched, and test accumulation math of your own.

``strategies`` needs hypothesis (``pip install 'pureaccum[testing]'``), all else nothing further.
"""

from importlib import import_module
from typing import Any

from ._assertions import assert_trees_bitwise_equal as assert_trees_bitwise_equal
from ._assertions import assert_trees_within_bound as assert_trees_within_bound
from ._check import assert_accumulates as assert_accumulates
from ._check import check_accumulation as check_accumulation
from ._pure import assert_pure as assert_pure
from ._pure import unchanged as unchanged
from ._report import AccumulationMismatch as AccumulationMismatch
from ._report import Diagnosis as Diagnosis
from ._report import Leaf as Leaf
from ._report import Report as Report


def __getattr__(name: str) -> Any:
    """Modules that are imported when they are asked for: hypothesis costs half a second."""
    if name in ("mutants", "strategies"):
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
