"""The engines: a loss forwards, and back to gradients.

    "func"      torch.func, which composes with every transform
    "autograd"  torch.autograd, for what torch.func refuses: custom Functions without
                ``setup_context``, and checkpointed modules
    "auto"      autograd at top level, where it is faster, and torch.func under a transform, and for
                a loss that calls what plain autograd cannot follow, such as a gradient of its own

All give the same bits.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks

from .._base.checks import NoGraphError, here
from .._base.dtensors import Layout, Layouts, landed, local, refuse_sharded, sum_layouts
from .._base.generators import generators, restore
from .._base.refusals import advise_on_vjp, refuse_pre_dispatch
from .._base.torch_internals import (
    forward_ad_active,
    gradients,
    innermost,
    may_write,
    on_a_level,
    transform_active,
    without_history,
)
from .called_modules import holding, remembering, with_own_buffers
from .exchange import Backward, begun, inside_of, running_again
from .loss import Read, Shape, in_one_list, known_to_all_ranks, read, read_again
from .weights import LARGE, Weighing, nothing_like
from .writes import Known


Engine = Literal["auto", "func", "autograd"]


class Wrt(NamedTuple):
    """What to differentiate with respect to, prepared once for all microbatches of a window."""

    leaves: list[Tensor]
    forward: "Callable[..., Forward]"
    known: Known  # of the loss
    large: list[int]  # the leaves whose gradients are added one by one …
    # … and those to whose sums autograd can add them. On a CPU, which launches nothing, all if any:
    # small gradients that live on between large ones would keep these from each other's memory.
    adding: Sequence[int]
    records: bool | None  # the grad mode of a window; None under a transform: the caller's
    detach: Callable[[Tensor], Tensor] | None = None  # from what a window records
    layouts: Layouts | None = None  # where the gradients of DTensors are summed
    unit: float | None = None  # the sums of a window are multiples of this: see weights.py
    # So far, by the rows and dtype of means and sums; None where all is made anew, sums included.
    weighings: dict[Any, Weighing] | None = None
    scale: Tensor | None = None  # a loss scale
    rows: float | None = None  # of the whole batch: see exchange.py
    at_least: torch.dtype = torch.float32  # the dtype of sums that are begun
    remembers: bool = False  # whether what modules held is put back for the backward pass
    auto: bool = False  # whether the engine is ours to choose
    several: bool = False  # whether a loss may be a tensor, pulled back number by number
    whole: bool = (
        False  # whether the batch is taken whole, and so may be recorded under a transform
    )

    def at(self, i: int) -> Layout | None:
        """Where the gradient of a leaf is summed, if it is a DTensor."""
        return None if self.layouts is None else self.layouts[i]

    def mode(self) -> AbstractContextManager[Any]:
        """The grad mode in which a window runs."""
        return nullcontext() if self.records is None else torch.set_grad_enabled(self.records)


def prepare(leaves: list[Tensor], engine: Engine, known: Known) -> Wrt:
    """Prepare leaves for an engine."""
    writes = may_write()
    if not writes and transform_active():
        refuse_sharded([innermost(x) for x in leaves], "params", _TRANSFORMS)
        if engine == "autograd":
            raise RuntimeError(
                "engine='autograd' cannot run under a torch.func transform, torch.compile or "
                "make_fx; engine='func' and 'auto' can."
            )
        return as_they_are(leaves)
    layouts = sum_layouts(leaves)
    parts = leaves if layouts is None else [local(leaf) for leaf in leaves]
    dual = forward_ad_active()
    by_func = engine == "func" or (engine == "auto" and (dual or known.by_func))
    large = [i for i, part in enumerate(parts) if part.nbytes >= LARGE]
    wrt = Wrt(
        leaves=without_history(leaves),
        forward=_by_func if by_func else _by_autograd,
        known=known,
        large=large,
        adding=range(len(leaves)) if large and leaves[0].device.type == "cpu" else large,
        records=not by_func or _records(leaves),
        detach=detached if dual else Tensor.detach,
        layouts=layouts,
        weighings={} if writes else None,
        auto=engine == "auto",
    )
    if by_func:
        return wrt
    # An inference tensor takes no gradient; its clone outside of that mode is a normal one.
    leaves = [x.clone() if x.is_inference() else x for x in wrt.leaves]
    return wrt._replace(leaves=[leaf.requires_grad_() for leaf in leaves])


def _records(leaves: list[Tensor]) -> bool:
    """Whether torch.func runs in grad mode.

    Detached leaves record nothing below torch.func's own level, but tensors that the loss captured
    may: hence none. Not on a CPU, where the kernel of LSTM asks for that mode down there, and
    without it saves nothing for its backward pass.
    """
    return leaves[0].device.type == "cpu"


def detached(x: Tensor) -> Tensor:
    return without_history([x])[0] if x.requires_grad else x


def as_they_are(leaves: list[Tensor]) -> Wrt:
    """Leaves of a result that carries an outer graph: nothing is detached, or done in place."""
    if leaves:
        refuse_pre_dispatch()
    return Wrt(leaves=leaves, forward=_by_func, known=Known(), large=[], adding=[], records=None)


_TRANSFORMS = "torch.func's transforms do not see through them: call this outside of any."

Loss = Callable[..., Any]  # of the leaves, and of what goes with a microbatch
Hook = Callable[[Tensor], Tensor]
Pull = Callable[[Tensor], Sequence[Tensor | None]]
T = TypeVar("T")


class Forward(NamedTuple):
    """A forward pass: what the loss returned, and the way back from its cotangent to gradients."""

    seen: Read
    shape: Shape
    pull: Pull | None  # None: plain autograd, of the total with respect to the leaves
    backward: Backward | None  # None inside of a graph


def _by_func(
    loss: Loss, args: Sequence[Any], wrt: Wrt, hooks: dict[int, Hook], has_aux: bool
) -> Forward:
    shapes: list[Shape] = []
    backward: Backward | None = None

    def on_primals(primals: list[Tensor]) -> list[Tensor]:
        for i, hook in hooks.items():
            primals[i].register_hook(_landing(hook, wrt.at(i)))
        nonlocal backward
        if not torch.compiler.is_dynamo_compiling():  # no graph reaches other ranks
            backward = begun()
        with nullcontext() if backward is None else inside_of(backward):
            seen, shape = read(loss(primals, *args), has_aux, wrt.several)
        shapes.append(shape)
        return in_one_list(seen)

    try:
        if wrt.records is None:
            outs, pulled = _under_transforms(on_primals, wrt.leaves)
        else:
            outs, pulled = _on_a_level(on_primals, wrt.leaves, again=wrt.several)
    except RuntimeError as error:
        advise_on_vjp(error)
        raise
    shape = shapes[-1]

    def pull(cotangent: Tensor) -> Sequence[Tensor | None]:
        try:
            grads = pulled(cotangent)
        except RuntimeError as error:
            advise_on_vjp(error)
            raise
        return grads if wrt.layouts is None else _all_landed(grads, wrt.layouts, hooks)

    return Forward(read_again(outs[0], outs[1:], shape), shape, pull, backward)


def _under_transforms(func: Any, leaves: list[Tensor]) -> tuple[list[Tensor], Pull]:
    """All that ``func`` gives, and the way back from the first of it, as transforms follow it."""

    def first_and_rest(*leaves: Tensor) -> tuple[Tensor, list[Tensor]]:
        first, *rest = func([*leaves])
        return first, rest

    # pyright cannot tell the two lengths of vjp's result apart
    total, vjp, rest = torch.func.vjp(first_and_rest, *leaves, has_aux=True)  # pyright: ignore
    # retain_graph=False frees activations as the pass goes. create_graph stays at its default, the
    # grad mode: False would silently drop second-order terms under an outer transform.
    return [total, *rest], lambda cotangent: vjp(cotangent, retain_graph=False)


def _on_a_level(func: Any, leaves: list[Tensor], *, again: bool) -> tuple[list[Tensor], Pull]:
    """The same at top level, where nobody follows it."""
    own, total, outs = on_a_level(func, leaves)

    def pull(cotangent: Tensor) -> Sequence[Tensor | None]:
        if not total.requires_grad:
            return [None] * len(own)
        return gradients(total, own, cotangent, again)

    return outs, pull


def _landing(hook: Hook, at: Layout | None) -> Hook:
    """A hook that is given this rank's part of a gradient."""
    if at is None:
        return hook

    def on_gradient(grad: Tensor) -> Tensor:
        part = landed(grad, at)
        if part is not None:
            hook(part)
        return nothing_like(grad)

    return on_gradient


def _all_landed(
    grads: Sequence[Tensor | None], layouts: Layouts, hooks: dict[int, Hook]
) -> list[Tensor | None]:
    """This rank's parts of the gradients that no hook has taken."""
    return [
        None if grad is None or i in hooks else landed(grad, at)
        for i, (grad, at) in enumerate(zip(grads, layouts, strict=True))
    ]


def _by_autograd(
    loss: Loss, args: Sequence[Any], wrt: Wrt, hooks: dict[int, Hook], has_aux: bool
) -> Forward:
    leaves, held = wrt.leaves, None
    backward = Backward()  # of no level, and as ``inside_of`` says it: each microbatch pays for it
    backward.restores = wrt.remembers
    backward.outer, backward.plain, here.backward = here.backward, True, backward
    try:
        if wrt.remembers:
            with remembering() as held:
                out = loss(leaves, *args)
        else:
            out = loss(leaves, *args)
    finally:
        here.backward = backward.outer
    seen, shape = read(out, has_aux, wrt.several)
    if held is None and wrt.layouts is None:
        return Forward(seen, shape, None, backward)
    total = seen.total

    def pull(cotangent: Tensor) -> Sequence[Tensor | None]:
        if not total.requires_grad:
            return [None] * len(leaves)
        with (
            nullcontext() if held is None else holding(with_own_buffers(held)),
            nullcontext() if held is None else running_again(backward),
        ):
            grads = hooked_gradients(
                total, leaves, cotangent, hooks, wrt.layouts, again=wrt.several
            )
        return grads if wrt.layouts is None else _all_landed(grads, wrt.layouts, hooks)

    return Forward(seen, shape, pull, backward)


def hooked_gradients(
    total: Tensor,
    leaves: list[Tensor],
    cotangent: Tensor,
    hooks: dict[int, Hook],
    layouts: Layouts | None = None,
    again: bool = False,
) -> Sequence[Tensor | None]:
    """The gradients of leaves, some of which hooks are given as they come."""
    places = [(i, None if layouts is None else layouts[i]) for i in hooks]
    handles = [leaves[i].register_hook(_landing(hooks[i], at)) for i, at in places]
    try:
        return gradients(total, leaves, cotangent, again)
    finally:
        for handle in handles:
            handle.remove()


def alone(seen: Read, wrt: Wrt) -> Read:
    """What a loss returned, without what was recorded of it, and as all ranks know it.

    Whoever follows the results of the call looks at it first: see history.py.
    """
    if type(seen.total) is not Tensor:
        seen = known_to_all_ranks(seen)
    if (detach := wrt.detach) is None:
        return seen
    total, weight, aux = seen
    if here.look is not None:
        here.look((total, weight, *aux), wrt.leaves)
    kept = weight if isinstance(weight, tuple) else detach(weight)
    return Read(detach(total), kept, [*map(detach, aux)])


# Losses that are computed again by the backward pass -------------------------------------------


def run_window(window: Callable[[Wrt], T], wrt: Wrt) -> T:
    """Run what calls a loss for some microbatches, in the grad mode that they need.

    A loss whose backward pass computes it again has to be watched: see called_modules.py. It makes
    itself known by saved-tensor hooks. These are refused until a loss has asked for them, which is
    then remembered, and the window is run again: a loss that asks for them from its first window
    on draws the same random numbers, one that begins later draws new ones. So it is with a loss
    that calls what plain autograd cannot follow: the window is run again by torch.func.
    """
    if wrt.forward is _by_func:
        with wrt.mode():
            return window(wrt)
    known = wrt.known
    before = generators({leaf.device for leaf in wrt.leaves}) if known.recomputes is None else []
    try:
        with nullcontext() if torch.is_grad_enabled() else torch.enable_grad():
            if known.recomputes:
                return window(wrt._replace(remembers=True))
            try:
                with disable_saved_tensors_hooks(_WANTED):
                    result = window(wrt)
                if known.recomputes is None:  # another thread may know better
                    known.recomputes = False
                return result
            except RuntimeError as error:
                if _WANTED not in str(error):
                    raise
            known.recomputes = True
            restore(before)
            return window(wrt._replace(remembers=True))
    except NoGraphError:
        if not wrt.auto:
            raise
    known.by_func = True
    restore(before)
    own, records = without_history(wrt.leaves), _records(wrt.leaves)
    return run_window(window, wrt._replace(leaves=own, forward=_by_func, records=records))


_WANTED = "pureaccum: saved-tensor hooks are wanted"
