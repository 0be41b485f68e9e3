"""A loss that reaches other ranks: its microbatches are pulled there too.

One that does not count is not left out: it is of no weight to the total of this rank, and what
other ranks made of it may be of some to theirs.
"""

from typing import Any

import torch
import torch.distributed as dist

from .. import weights
from ..seams import Seams, Window


def ranks_exist() -> bool:
    """Whether there are ranks that a loss could reach."""
    if torch.compiler.is_dynamo_compiling():  # no graph reaches any
        return False
    return dist.is_available() and dist.is_initialized()


def reaching_ranks(seams: Seams, window: Window) -> Seams:
    """Tell the backward pass of a loss that reached ranks what its gradients are multiplied by."""
    rule, unit, divides = window.rule, window.unit or 1.0, window.divides

    def term(*given: Any) -> Any:
        weighing, entry = seams.term(*given)
        recorded = given[0]
        if recorded.backward is None or recorded.backward.group is None:
            return weighing, entry
        if weighing is None:
            weighing = weights.Weighing(torch.zeros_like(recorded.seen.total), 1.0, None)
        elif weighing.keep is not None:
            cotangent = torch.where(weighing.keep, weighing.cotangent, 0.0)
            weighing = weighing._replace(cotangent=cotangent, keep=None)
        weight, times = recorded.seen.weight, weighing.factor * unit
        if isinstance(entry.terms, torch.Tensor):
            pass  # its total is divided already
        elif divides is not None and not isinstance(weight, tuple):
            # unless the batch is whole, its weight is not known yet
            times = times / weight.detach() if divides == 1.0 else None
        elif divides is not None and rule.reduction == "mean":
            times = times / divides
        recorded.backward.times = times
        return weighing, entry._replace(reached=True)

    return seams._replace(term=term)
