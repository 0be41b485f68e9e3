"""What a loss returns beside its value."""

from functools import partial
from typing import Any

from .. import losses
from ..seams import Seams, Window


def aux(seams: Seams, _: Window) -> Seams:
    """Let a loss return a pair; the entry of a microbatch has its aux, to be reduced."""

    def term(*given: Any) -> Any:
        weighing, entry = seams.term(*given)
        recorded = given[0]
        return weighing, entry._replace(aux=losses.join_aux(recorded.seen.aux, recorded.shape))

    return seams._replace(read=partial(losses.read, has_aux=True), term=term)
