"""A microbatch with an inf or NaN is left out, and takes its weight along.

Whether it counts has to be known before anything is added, so its gradients wait. Whoever still
holds the sums as they were lets everything be added, and takes it back.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ..._base import trees
from .. import weights
from ..seams import Seams, Take, Window, handing_on, judged_below, taking


# How gradients are taken; whether each is finite; and what lets all of them in, or none.
Selecting = tuple[Take, Callable[[], Iterable[Tensor]], Callable[[Tensor, weights.Weighing], None]]


def skip(seams: Seams, window: Window) -> Seams:
    """Leave microbatches out that are not finite."""
    take, flags, select = (_waiting if window.before is None else _taking_back)(seams, window)

    def judge(entry: weights.Microbatch, weighing: weights.Weighing | None) -> weights.Microbatch:
        if weighing is None:
            return judged_below(seams, entry, weighing)
        layouts = window.sink.kinds.layouts
        ok = weights.finite_wholly(entry, flags(), weighing.keep, layouts)
        select(ok, weighing)
        return weights.without_skipped(judged_below(seams, entry, weighing), ok)

    return seams._replace(take=take, judge=judge)


def _waiting(seams: Seams, window: Window) -> Selecting:
    gradients: dict[int, Tensor] = {}
    inner = taking(seams, window)

    def take(which: Sequence[int], grads: Sequence[Tensor], _: weights.Weighing) -> None:
        gradients.update(zip(which, grads, strict=True))

    def select(ok: Tensor, weighing: weights.Weighing) -> None:
        selected = weighing._replace(keep=ok if weighing.keep is None else ok & weighing.keep)
        if not gradients:
            inner([], [], selected)
        for i in [*gradients]:  # one at a time: each is dropped before the next is selected
            inner([i], [gradients.pop(i)], selected)

    return take, lambda: map(trees.finite, gradients.values()), select


def _taking_back(seams: Seams, window: Window) -> Selecting:
    take, flags = handing_on(seams, window, trees.finite)

    def select(ok: Tensor, _: weights.Weighing) -> None:
        if not trees.known(ok):
            for new, old in zip(window.sink.tensors, window.before or [], strict=True):
                torch.where(ok.to(new.device), new, old, out=new)

    return take, flags.values, select
