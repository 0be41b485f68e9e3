"""The squared norms of each microbatch's gradients, which tell how much these scatter.

The norm of a gradient that lies on several ranks is known once all of it is there.
"""

from typing import Any

from torch import Tensor

from ..._base import dtensors, trees
from .. import weights
from ..seams import Seams, Window, handing_on, judged_below


def squares(seams: Seams, window: Window) -> Seams:
    """Let the entry of a microbatch have |s|² / w for each s that it adds to a sum."""
    sink = window.sink
    sharded = sink.kinds.layouts is not None
    take, noted = handing_on(seams, window, (lambda grad: grad) if sharded else trees.norm)

    def term(*given: Any) -> Any:
        weighing, entry = seams.term(*given)
        if isinstance(entry.terms, Tensor):
            raise ValueError(
                "squares=True (noise=True of a step) does not work with a sum of Weighted, "
                "because the noise of a gradient is that of one mean. Measure the noise of one "
                "term."
            )
        if window.rule.reduction == "sum" and not entry.weighted:
            raise ValueError(
                "squares=True (noise=True of a step) does not work with reduction='sum', because "
                "the noise of a gradient is that of a mean, and a plain sum does not tell over "
                "what. Use reduction='mean', or return Weighted."
            )
        return weighing, entry

    def judge(entry: weights.Microbatch, weighing: weights.Weighing | None) -> weights.Microbatch:
        entry = judged_below(seams, entry, weighing)
        if weighing is None:
            return entry
        each: Any = [noted.get(i) for i in range(len(sink.leaves))]
        noted.clear()
        if sharded:
            each = dtensors.norms_of_sums(each, sink.leaves)
        return weights.with_squares(entry, each, weighing, window.unit)

    return seams._replace(term=term, take=take, judge=judge)
