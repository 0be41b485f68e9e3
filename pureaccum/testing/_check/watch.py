"""What a loss does beside computing: what it writes to, where it draws, what it normalises with."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..._base.torch_internals import leads_to
from ..._base.trees import leaves
from ..._core.loss import Weighted, is_pair
from .._reach import reachable
from .caller import NOBODY, Call
from .kept import Kept, Names
from .sight import Sight, Written
from .subject import Subject


class Seen(NamedTuple):
    """All that was seen."""

    written: list[Written]
    assigned: list[str]  # what is another object, or holds other numbers, after a first call
    kept: Kept  # what has to be put back
    draws: list[Call]
    batch_norms: list[Call]  # in training mode
    generators: list[tuple[torch.Generator, Tensor]]  # the loss's own, and their states
    weighted: bool
    dtype: torch.dtype  # of the loss
    narrowest: torch.dtype  # … and of all that it computes with


def watch(subject: Subject, names: list[Names], seeds: Iterator[int]) -> Seen:
    """Call a loss on its batch, and on its batch in reverse; afterwards all is as it was.

    A tensor that only the first call writes to is a cache and no state.
    """
    held = list(reachable({"loss_fn": subject.loss_fn}))
    mode = Sight({id(x): path.rpartition("'s ")[2] for path, x in held})
    modules = [x for _, x in held if isinstance(x, nn.Module)]
    mode.note_held(modules)
    totals: list[tuple[bool, torch.dtype, bool]] = []

    def loss_fn(params: Any, part: Any) -> Any:
        mode.give(params, "params")
        mode.give(part, "batch")
        with mode, mode.modules(), mode.others():
            out = subject.loss_fn(params, part)
        loss = out[0] if subject.has_aux and is_pair(out) else out
        weighted = isinstance(loss, Weighted)
        total = loss.total if weighted else loss
        if isinstance(total, Tensor):
            totals.append((weighted, total.dtype, leads_to(total, leaves(params))))
        return out

    watched, before = subject._replace(loss_fn=loss_fn), names
    try:
        state = watched.sums(subject.everything(), next(seeds))
        weighted, dtype, leads = totals[0]
        if not leads and not any(g.any() for g in leaves(state.grads)):
            raise ValueError(
                "the loss does not depend on params: no gradient leads to them. Was it detached "
                "(detach, item, float, no_grad), or did it use a module's own parameters? "
                "torch.func.functional_call(module, params, (x,)) uses these."
            )
        first, changed = mode.written(), mode.changed()
        names = [n.again() for n in before]
        mode.begin_again(modules)
        try:
            watched.sums(subject.everything()[::-1], next(seeds))
        except Exception:  # a batch in another order is no batch for every loss
            watched.sums(subject.everything(), next(seeds))
        written = [w for w in first if w.given] + [w for w in mode.written() if not w.given]
        anew = [name for n in names if n.kind == "tensors" for name in n.assigned()]
        written += [Written(name, False, NOBODY) for name in anew]
        assigned = [w.name for w in first if not w.given]
        plain = (n for n in before if n.kind in ("names", "attributes"))
        assigned += [name for n in plain for name in n.assigned()]
    except BaseException:
        Kept(mode.changed(), tuple(before)).put_back()
        raise
    # A large model has thousands of attributes, and a loss changes few.
    kept_names = (n for n in before if n.kind != "attributes" or n.assigned())
    kept = Kept((*changed, *mode.changed()), tuple(kept_names))
    kept.put_back()
    return Seen(
        written,
        [name for name in assigned if not any(word in name for word in _CACHES)],
        kept,
        list(mode.draws),
        list(mode.batch_norms),
        list(mode.generators.values()),
        weighted,
        dtype,
        min(mode.dtypes, key=lambda dtype: torch.finfo(dtype).bits, default=dtype),
    )


_CACHES = (".training", "_flat_weight")  # a mode; what recurrent modules make anew in every call
