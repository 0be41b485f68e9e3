"""A loss scale rides on the cotangent: no loss in float16 is ever multiplied."""

from typing import Any

from torch import Tensor

from .. import weights
from ..seams import Seams, Window


def scale(seams: Seams, window: Window) -> Seams:
    """Let the sums be those of the scaled loss."""
    # microbatches of as many samples have one cotangent
    made: tuple[Tensor | None, Any] = (None, None)

    def term(*given: Any) -> Any:
        nonlocal made
        weighing, entry = seams.term(*given)
        if weighing is None:
            return weighing, entry
        if made[0] is not weighing.cotangent:
            made = weighing.cotangent, weights.scaled(weighing.cotangent, window.scale)
        return weighing._replace(cotangent=made[1]), entry

    return seams._replace(term=term)
