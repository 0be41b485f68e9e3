"""A window: what its microbatches add to sums, in place or out of place.

    out of place    sums = sums + term(part): a new tensor each, of a function of one microbatch. It
                    runs under transforms, compilers and modes, and says what the other computes
    in place        the same bits at top level, while the backward pass runs

Both are given the same seams and layers. ``run_window`` calls either in the grad mode, and by the
engine, that its loss needs.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks

from .._base import checks, dtensors, random_state, refusals
from .._base.torch_internals import autograd, functorch, modes
from . import coupling, engines, losses, outputs, remat, weights, writes
from .layers import order
from .seams import Engine, Portion, Seams, Window, judged_below, of_total, taking
from .sums import Sums, Terms


T = TypeVar("T")
Add = Callable[[Portion], weights.Microbatch]


class GuardedLoss(NamedTuple):
    """The loss of a microbatch, what is known of it, and all that it is given."""

    call: coupling.LossOfPart
    known: writes.Known
    given: tuple[writes.Given, ...]  # first the leaves that it is differentiated by
    asks: writes.Asks = writes.Asks()


def add_place(error: Exception, loss: str, rows: int, given: Sequence[writes.Given]) -> None:
    """Add a note to what a loss raised: in which call, and for which samples."""
    caller = {"state.params": "a step", "params": "an update"}.get(given[0].root, "a gradient")
    error.add_note(f"pureaccum: raised by {loss}, of {rows} samples, in {caller}.")


def adder(
    call: coupling.LossOfPart,
    known: writes.Known,
    window: Window,
    sums: Sums,
    way: engines.Way,
    *,
    whole: bool = False,
) -> Add:
    """A function that adds a microbatch to sums, and gives what it came to.

    ``whole`` says that a batch is in one piece, which is left to a transform.
    """
    window = window._replace(sink=sums)
    seams = Seams(loss=call, read=losses.read, term=of_total(window.rule, window.unit))
    if modes.may_add_in_place():  # while the backward pass runs
        seams, way = wrapped(seams, window, way)
        return engines.adding(seams, sums, way)
    return out_of_place(seams, known, window, sums, way, whole or not modes.transform_active())


def reader(call: coupling.LossOfPart, known: writes.Known, window: Window, way: engines.Way) -> Add:
    """A function that reads what a microbatch comes to, and takes no gradient."""
    seams = order.layered(
        Seams(loss=call, read=losses.read, term=of_total(window.rule, window.unit)), window
    )

    def entry_of(leaves: list[Tensor], part: Portion) -> outputs.Counted:
        recorded = way.forward(seams, part, way._replace(leaves=leaves))
        return outputs.Counted(seams.term(recorded, part.counts)[1], None)

    def read(part: Portion) -> weights.Microbatch:
        # Nothing is recorded by forward AD; what a Function gives would have a tangent of zero,
        # which torch 2.13 makes float64 where a 0-d one meets a number of Python.
        if not modes.transform_active() or functorch.forward_ad_active():
            return entry_of(way.leaves, part).tree
        given = (way.leaves, part)
        return remat.call_rematerialised(entry_of, given, {}, known, guards=False)

    return read


def wrapped(seams: Seams, window: Window, way: engines.Way) -> tuple[Seams, engines.Way]:
    """Seams with all layers around them, and what wraps an engine."""
    seams, layouts = order.layered(seams, window), window.sink.kinds.layouts
    if way.remembers:
        seams, way = engines.remembering_modules(seams, way)
    if layouts is not None:
        seams = engines.landing(seams, taking(seams, window), layouts)
    return seams, way


def out_of_place(
    seams: Seams, known: writes.Known, window: Window, sums: Sums, way: engines.Way, whole: bool
) -> Add:
    """Add what a microbatch comes to; unless it is whole, nothing above it is kept."""

    def terms_of(leaves: list[Tensor], part: Portion) -> outputs.Counted:
        terms = Terms(leaves, sums.kinds)
        there = window._replace(sink=terms)
        # a cotangent that is kept would be one of a level that is over
        own_term = seams._replace(term=of_total(window.rule, window.unit))
        around, own = wrapped(own_term, there, way._replace(leaves=leaves))
        recorded = way.forward(around, part, own)
        weighing, entry = around.term(recorded, part.counts)
        if weighing is None:
            return outputs.Counted(((), judged_below(around, entry, None)), None)
        grads = engines.pulled(recorded, weighing.cotangent, own)
        some = {i: grad for i, grad in enumerate(grads) if grad is not None}
        taking(around, there)([*some], [*some.values()], weighing)
        return outputs.Counted((terms.tensors, judged_below(around, entry, weighing)), terms.keep)

    def add(part: Portion) -> weights.Microbatch:
        if whole:
            added, entry = terms_of(way.leaves, part).tree
        else:
            given = (way.leaves, part)
            added, entry = remat.call_rematerialised(terms_of, given, {}, known, guards=False)
        if added:
            pairs = zip(sums.tensors, added, strict=True)
            new = [y if x is None else x if y is None else x + y for x, y in pairs]
        else:
            new = [x if x is None else x.clone() for x in sums.tensors]
        sums.tensors = new
        return entry

    return add


# Engines and modes ---------------------------------------------------------------------------


def run_window(
    window: Callable[[engines.Way], T], leaves: list[Tensor], engine: Engine, known: writes.Known
) -> T:
    """Run what calls a loss for some microbatches, in the grad mode that they need.

    A loss whose backward pass computes it again has to be watched: see called_modules.py. It makes
    itself known by saved-tensor hooks. These are refused until a loss has asked for them, which is
    then remembered, and the window is run again: a loss that asks for them from its first window
    on draws the same random numbers, one that begins later draws new ones. So it is with a loss
    that calls what plain autograd cannot follow: the window is run again by torch.func.
    """
    if modes.transform_active():
        return _advised(window, _followed(leaves, engine))
    dual = functorch.forward_ad_active()
    detach = engines.detached if dual else Tensor.detach
    if engine == "func" or (engine == "auto" and (dual or known.by_func)):
        return _by_func(window, leaves, detach)
    before = random_state.generators({x.device for x in leaves}) if known.recomputes is None else []
    try:
        return _by_autograd(window, leaves, detach, known, before)
    except checks.NoGraphError:
        if engine != "auto":
            raise
    known.by_func = True
    random_state.restore(before)
    return _by_func(window, leaves, detach)


def _by_autograd(
    window: Callable[[engines.Way], T],
    leaves: list[Tensor],
    detach: Callable[[Tensor], Tensor],
    known: writes.Known,
    before: list[Any],
) -> T:
    """Run a window in grad mode; again, from these states of generators, where it has to be."""
    # An inference tensor takes no gradient; its clone outside of that mode is a normal one.
    own = [x.clone() for x in leaves] if any(map(Tensor.is_inference, leaves)) else leaves
    own = map(Tensor.detach, own) if detach is Tensor.detach else autograd.without_history(own)
    way = engines.Way(
        forward=engines.by_autograd, leaves=[x.requires_grad_() for x in own], detach=detach
    )
    with nullcontext() if torch.is_grad_enabled() else torch.enable_grad():
        if known.recomputes:
            return window(way._replace(remembers=True))
        try:
            with disable_saved_tensors_hooks(_WANTED):
                result = window(way)
            if known.recomputes is None:  # another thread may know better
                known.recomputes = False
            return result
        except RuntimeError as error:
            if _WANTED not in str(error):
                raise
        known.recomputes = True
        random_state.restore(before)
        return window(way._replace(remembers=True))


_WANTED = "pureaccum: saved-tensor hooks are wanted"


def _by_func(
    window: Callable[[engines.Way], T], leaves: list[Tensor], detach: Callable[[Tensor], Tensor]
) -> T:
    """Run a window under torch.func, in grad mode on a CPU alone.

    Detached leaves record nothing below torch.func's own level, but tensors that the loss captured
    may: hence none. On a CPU the kernel of LSTM asks for that mode down there, and without it saves
    nothing for its backward pass.
    """
    with torch.set_grad_enabled(leaves[0].device.type == "cpu"):
        own = autograd.without_history(leaves)
        return _advised(window, engines.Way(forward=engines.by_func, leaves=own, detach=detach))


def _advised(window: Callable[[engines.Way], T], way: engines.Way) -> T:
    try:
        return window(way)
    except RuntimeError as error:
        refusals.advise_on_vjp(error)
        raise


def _followed(leaves: list[Tensor], engine: Engine) -> engines.Way:
    """Leaves of a result that carries an outer graph: nothing is detached."""
    dtensors.refuse_sharded(
        [functorch.innermost(x) for x in leaves],
        "params",
        "torch.func transforms do not see through them. Call this outside of any transform.",
    )
    if engine == "autograd":
        raise RuntimeError(
            "engine='autograd' cannot run under a torch.func transform, torch.compile or "
            "make_fx. Use engine='func' or 'auto'."
        )
    return as_they_are(leaves)


def as_they_are(leaves: list[Tensor]) -> engines.Way:
    """A way by which what is outside follows the gradients."""
    if leaves:
        refusals.refuse_pre_dispatch()
    return engines.Way(forward=engines.under_transforms, leaves=leaves, detach=None)
