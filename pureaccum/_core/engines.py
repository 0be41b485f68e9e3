"""The two engines: a loss forwards, and back to gradients.

``"func"`` differentiates with torch.func and so composes with every transform. ``"autograd"``
is the same pure function by ``torch.autograd``, for what torch.func refuses: custom Functions
without ``setup_context``, and checkpointed modules.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .._base import (
    Layout,
    Layouts,
    advise_on_vjp,
    innermost,
    landed,
    local,
    refuse_sharded,
    sum_layouts,
    transform_active,
    without_history,
)
from .called_modules import call_watched, holding
from .loss import Read, Shape, detached, in_one_list, known_to_all_ranks, read, read_again
from .weights import LARGE, nothing_like


Engine = Literal["func", "autograd"]


class Wrt(NamedTuple):
    """What to differentiate with respect to, prepared once for all microbatches of a window."""

    leaves: list[Tensor]
    large: list[int]  # the leaves whose gradients are added one by one
    records: bool | None  # the grad mode of the forward pass; None under a transform: the caller's
    recomputes: set[bool]  # what is known of the loss: see called_modules.py
    layouts: Layouts | None = None  # where the gradients of DTensors are summed
    devices: frozenset[torch.device] = frozenset()
    unit: float | None = None  # the sums of a window are multiples of this: see weights.py
    cotangents: dict[float, Tensor] | None = None
    scale: Tensor | None = None  # a loss scale
    straight: bool = False  # autograd itself may add to the sums

    def at(self, i: int) -> Layout | None:
        """Where the gradient of a leaf is summed, if it is a DTensor."""
        return None if self.layouts is None else self.layouts[i]


def prepare(leaves: list[Tensor], engine: Engine, recomputes: set[bool]) -> Wrt:
    """Prepare leaves for an engine."""
    if transform_active():
        refuse_sharded([innermost(x) for x in leaves], "params", _TRANSFORMS)
        if engine == "func":
            return Wrt(leaves=leaves, large=[], records=None, recomputes=recomputes)
        raise RuntimeError(
            "engine='autograd' cannot run under a torch.func transform or torch.compile; "
            "engine='func', the default, can."
        )
    layouts = sum_layouts(leaves)
    parts = leaves if layouts is None else [local(leaf) for leaf in leaves]
    large = [i for i, part in enumerate(parts) if part.nbytes >= LARGE]
    wrt = Wrt(
        leaves=without_history(leaves),
        large=large,
        records=True,
        recomputes=recomputes,
        layouts=layouts,
    )
    if engine == "autograd":
        # An inference tensor takes no gradient; its clone outside of that mode is a normal one.
        leaves = [x.clone() if x.is_inference() else x for x in wrt.leaves]
        devices = frozenset(leaf.device for leaf in leaves)
        return wrt._replace(leaves=[leaf.requires_grad_() for leaf in leaves], devices=devices)
    # Detached leaves record nothing below torch.func's own level, but tensors that the loss
    # captured may: hence no_grad. Not on a CPU, where the kernel of LSTM asks for the grad mode
    # down there, and without it saves nothing for its backward pass.
    return wrt._replace(records=leaves[0].device.type == "cpu")


_TRANSFORMS = "torch.func's transforms do not see through them: call this outside of any."

Loss = Callable[[list[Tensor]], Any]
Hook = Callable[[Tensor], Tensor]
Pull = Callable[[Tensor], Sequence[Tensor | None]]
Push = Callable[[Tensor, list[Tensor]], list[Any]]


class Forward(NamedTuple):
    """A forward pass: what the loss returned, and two ways back from its cotangent."""

    seen: Read
    shape: Shape
    pull: Pull  # to the gradients
    push: Push | None  # into the sums, by autograd itself


def _by_func(loss: Loss, wrt: Wrt, hooks: dict[int, Hook], has_aux: bool) -> Forward:
    shape: Shape | None = None

    def on_primals(*primals: Tensor) -> tuple[Tensor, list[Tensor]]:
        nonlocal shape
        for i, hook in hooks.items():
            primals[i].register_hook(_landing(hook, wrt.at(i)))
        seen, shape = read(loss(list(primals)), has_aux)
        total, *rest = in_one_list(seen)
        return total, rest

    mode = nullcontext() if wrt.records is None else torch.set_grad_enabled(wrt.records)
    try:
        with mode:
            # pyright cannot tell the two lengths of vjp's result apart
            total, vjp, rest = torch.func.vjp(on_primals, *wrt.leaves, has_aux=True)  # pyright: ignore
    except RuntimeError as error:
        advise_on_vjp(error)
        raise
    assert shape is not None
    seen = read_again(total, rest, shape)
    seen = detached(seen, shape) if wrt.records else seen
    # retain_graph=False frees activations as the pass goes. create_graph stays at its default:
    # False would silently drop second-order terms under an outer transform.

    def pull(cotangent: Tensor) -> Sequence[Tensor | None]:
        try:
            grads = vjp(cotangent, retain_graph=False)
        except RuntimeError as error:
            advise_on_vjp(error)
            raise
        return grads if wrt.layouts is None else _all_landed(grads, wrt.layouts, hooks)

    return Forward(known_to_all_ranks(seen), shape, pull, None)


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


def _by_autograd(loss: Loss, wrt: Wrt, hooks: dict[int, Hook], has_aux: bool) -> Forward:
    leaves = wrt.leaves
    with torch.enable_grad():
        out, held = call_watched(lambda: loss(leaves), wrt.recomputes, wrt.devices)
        seen, shape = read(out, has_aux)
        total = seen.total

    def pull(cotangent: Tensor) -> Sequence[Tensor | None]:
        if not total.requires_grad:
            return [None] * len(leaves)
        handles = [leaves[i].register_hook(_landing(h, wrt.at(i))) for i, h in hooks.items()]
        try:
            with holding(held):
                grads = torch.autograd.grad(total, leaves, cotangent, allow_unused=True)
            return grads if wrt.layouts is None else _all_landed(grads, wrt.layouts, hooks)
        finally:
            for handle in handles:
                handle.remove()

    def push(cotangent: Tensor, sums: list[Tensor]) -> list[Any]:
        if not total.requires_grad:
            return sums
        for leaf, sum_ in zip(leaves, sums, strict=True):
            # The leaves are the window's own, and so is their .grad. It is never None: autograd
            # would begin it with the first gradient itself, which may be a view of the cotangent
            # or share its memory with another leaf's, and go on adding to that.
            leaf.grad = sum_
        with holding(held):
            torch.autograd.backward(total, cotangent, inputs=leaves)
        new = [leaf.grad for leaf in leaves]
        for leaf in leaves:  # else a loss that calls .backward() would add to the sums as well
            leaf.grad = None
        return new

    return Forward(known_to_all_ranks(detached(seen, shape)), shape, pull, push)


PASSES = {"func": _by_func, "autograd": _by_autograd}
