"""The whole zoo, as cases of a test."""

import pytest

from tests.zoo import (  # noqa: F401
    coupled,
    fits_networks,
    fits_programs,
    fits_sums,
    impure,
    loops,
    weights,
)
from tests.zoo.species import ZOO


def residents(wanted):
    """Every species in all its dtypes; where time is short every third one, in its first."""
    return [
        pytest.param(
            species,
            dtype,
            id=f"{species.name}-{str(dtype).removeprefix('torch.')}",
            marks=pytest.mark.slow if i % 3 or dtype != species.dtypes[0] else (),
        )
        for i, species in enumerate(filter(wanted, ZOO))
        for dtype in species.dtypes
    ]
