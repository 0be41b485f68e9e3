"""A microbatch with an inf or NaN is left out, and takes its weight along.

Whether it counts has to be known before anything is added, so its gradients wait. Whoever still
holds the sums as they were lets everything be added, and takes it back.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..._base.trees import finite, known
from ..seams import Seams, Window, judged_below, taking
from ..weights import Microbatch, Weighing, judged, without_skipped


def skip(seams: Seams, window: Window) -> Seams:
    """Leave microbatches out that are not finite."""
    return _waiting(seams, window) if window.before is None else _taking_back(seams, window)


def _waiting(seams: Seams, window: Window) -> Seams:
    gradients: dict[int, Tensor] = {}
    inner, layouts = taking(seams, window), window.sink.kinds.layouts

    def take(which: Sequence[int], grads: Sequence[Tensor], weighing: Weighing) -> None:
        gradients.update(zip(which, grads, strict=True))

    def judge(entry: Microbatch, weighing: Weighing | None) -> Microbatch:
        if weighing is None:
            return judged_below(seams, entry, weighing)
        entry = judged(entry, map(finite, gradients.values()), weighing.keep, layouts)
        ok = entry.finite
        assert ok is not None
        selected = weighing._replace(keep=ok if weighing.keep is None else ok & weighing.keep)
        if not gradients:
            inner([], [], selected)
        for i in [*gradients]:  # one at a time: each is dropped before the next is selected
            inner([i], [gradients.pop(i)], selected)
        return without_skipped(judged_below(seams, entry, weighing), ok)

    return seams._replace(take=take, judge=judge)


def _taking_back(seams: Seams, window: Window) -> Seams:
    flags: dict[int, Tensor] = {}
    inner, sink = taking(seams, window), window.sink
    before = window.before or []

    def take(which: Sequence[int], grads: Sequence[Tensor], weighing: Weighing) -> None:
        flags.update(zip(which, map(finite, grads), strict=True))
        inner(which, grads, weighing)

    def judge(entry: Microbatch, weighing: Weighing | None) -> Microbatch:
        if weighing is None:
            return judged_below(seams, entry, weighing)
        entry = judged(entry, flags.values(), weighing.keep, sink.kinds.layouts)
        ok = entry.finite
        assert ok is not None
        if not known(ok):
            for new, old in zip(sink.tensors, before, strict=True):
                torch.where(ok.to(new.device), new, old, out=new)
        return without_skipped(judged_below(seams, entry, weighing), ok)

    return seams._replace(take=take, judge=judge)
