"""An error at the first inf or NaN, which names the leaf."""

from typing import Any

import torch

from ..._base import trees
from ..._base.torch_internals import modes
from .. import weights
from ..seams import Seams, Window, handing_on, judged_below


def raising(seams: Seams, window: Window) -> Seams:
    """Raise where the total of a microbatch, or anything in its gradient, is not finite."""
    if torch.compiler.is_dynamo_compiling():
        _refuse_to_look()
    take, flags = handing_on(seams, window, trees.finite)

    def term(*given: Any) -> Any:
        weighing, entry = seams.term(*given)
        if not _told(trees.is_finite(entry.value)):
            raise FloatingPointError(_sentence([window.name(None)]))
        return weighing, entry

    def judge(entry: weights.Microbatch, weighing: weights.Weighing | None) -> weights.Microbatch:
        entry = judged_below(seams, entry, weighing)
        if weighing is None:
            return entry
        ok = weights.finite_wholly(entry, flags.values(), weighing.keep, window.sink.kinds.layouts)
        if not _told(ok):
            where = [window.name(i) for i, flag in sorted(flags.items()) if not _told(flag)]
            raise FloatingPointError(_sentence(where or ["the gradient on another rank"]))
        flags.clear()
        return entry._replace(finite=ok)

    return seams._replace(term=term, take=take, judge=judge)


def _told(flag: torch.Tensor) -> bool:
    """Whether a flag is true, for all members of a vmap; the host waits for it."""
    if not modes.transform_active():
        return bool(flag)
    numbers = trees.numbers_in(flag.cpu())
    return _refuse_to_look() if numbers is None else all(numbers)


def _refuse_to_look() -> bool:
    raise RuntimeError(
        "nonfinite='raise' has to look at the numbers, which is impossible inside torch.compile "
        "or make_fx. Use 'skip' or 'propagate' there, and look afterwards."
    )


def _sentence(what: list[str]) -> str:
    return (
        f"{', '.join(what)}: inf or NaN, and nonfinite='raise' is set. Likely causes: a learning "
        "rate that is too high, fp16 overflow without a loss scale, a log or division at zero, or "
        "a mean over a microbatch in which everything is masked (return Weighted instead)."
    )
