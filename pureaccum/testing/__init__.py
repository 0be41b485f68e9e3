"""Prove that your loss may be microbatched, and test accumulation math of your own."""

from ._check import assert_accumulates as assert_accumulates
from ._check import check_accumulation as check_accumulation
from ._report import AccumulationMismatch as AccumulationMismatch
from ._report import Diagnosis as Diagnosis
from ._report import Leaf as Leaf
from ._report import Report as Report
