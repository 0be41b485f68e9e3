"""The weights of a sum of ``Weighted`` over a whole batch, counted before the first gradient.

    for part in microbatches: weights += those of loss(part)       # nothing is kept of it
    for part in microbatches: gradients += those of Σ total / weight of loss(part)

So there is one gradient tree, for one more forward pass. A generator draws the same numbers both
times. What each term has of its weight is summed again with the gradients: where that is not all of
it, since a loss is another one the second time, gradients and value are NaN (``whole_weight`` in
losses.py).

A microbatch that "skip" leaves out takes its weights along. Which these are is known of a total the
first time, and of a gradient the second: then that is done once more, without its weights.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._base import random_state
from .._base.torch_internals import modes
from . import terms, windows, writes
from .weights import Microbatch


T = TypeVar("T")

Known = terms.Whole | list[Tensor]  # the weights of a batch, for all microbatches or for each
# What is summed of a batch whose weights are these, and the entries of its microbatches.
Sums = Callable[[Known], tuple[T, Sequence[Microbatch]]]


def summed(
    sums: Sums[T],
    count: Callable[[], Sequence[Microbatch]],
    loss: windows.GuardedLoss,
    of_all_ranks: Callable[[Tensor], Tensor],
    *,
    skips: bool,
) -> T:
    """What ``sums`` gives of a batch that is cut; ``count`` only reads its microbatches.

    Whether there is anything to count shows once the loss was called. Then that call is undone.
    """
    known = writes.Known() if torch.compiler.is_dynamo_compiling() else loss.known  # no guards
    leaves = loss.given[0].leaves
    if not known.terms:
        before = _generators(leaves) if known.terms is None else []
        try:
            result, entries = sums(None)
            known.terms = 0 if entries else None
            return result
        except terms.UncountedError as error:
            known.terms = error.args[0]
        random_state.restore(before)
    if skips and not modes.at_top_level():
        raise terms.skipping_error()
    before = _generators(leaves)
    entries = count()
    each: list[Any] = [x.terms for x in entries]
    counts = {len(x) if isinstance(x, Tensor) else 1 for x in each}
    if len(counts) > 1:
        raise terms.other_terms(*sorted(counts)[:2])
    if entries and not isinstance(each[0], Tensor):  # it is another loss by now
        known.terms = 0
        random_state.restore(before)
        return sums(None)[0]
    keep = [not skips or bool(torch.isfinite(x.value)) for x in entries]
    while True:
        kept = [x for x, its in zip(each, keep, strict=True) if its]
        zero = torch.zeros(len(each[0]) if each else known.terms or 0, device=leaves[0].device)
        whole = of_all_ranks(torch.stack([zero.double(), *kept]).sum(0))
        random_state.restore(before)
        if not skips:
            return sums(whole)[0]
        # what is left out of the weights is not to be finite
        result, entries = sums([whole if its else whole * torch.nan for its in keep])
        finite = [x.finite is None or bool(x.finite) for x in entries]
        now = [a and b for a, b in zip(keep, finite, strict=True)]
        changed = of_all_ranks(torch.tensor([float(now != keep)], device=whole.device))
        if not changed:
            return result
        keep = now


def _generators(leaves: list[Tensor]) -> list[random_state.Drawn]:
    """How generators stand; what a compiler draws is its own."""
    if torch.compiler.is_dynamo_compiling():
        return []
    return random_state.generators({x.device for x in leaves})
