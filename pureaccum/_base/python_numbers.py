"""Python's numbers, which may be larger than those of any tensor."""

import math
from numbers import Real
from typing import Any


MOST = 2**63 - 1  # that torch counts to: of rows, sizes and steps


def shown(number: int) -> str:
    """An int in a message; Python writes out no more than 4,300 digits, and nobody reads 40."""
    bits = number.bit_length()
    return str(number) if bits <= 128 else f"an int of {bits} bits"


def as_float(value: Any) -> Any:
    """Any real number as a float, one that is too large for it as inf; the rest as it is."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    number: Any = value
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf
