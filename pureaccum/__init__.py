"""The exact full-batch gradient, as a pure function, in the memory of one microbatch."""

from ._accumulator import AccumState as AccumState
from ._accumulator import accumulator as accumulator
from ._batches import microbatches as microbatches
from ._loss import Weighted as Weighted
from ._transforms import grad as grad
from ._transforms import grad_and_value as grad_and_value
from ._transforms import value as value
from ._tree import all_finite as all_finite
from ._tree import global_norm as global_norm


__version__ = "0.1.0"
