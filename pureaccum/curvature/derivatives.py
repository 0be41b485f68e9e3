"""Derivatives of a function of one microbatch, used inside the number whose gradient is taken.

gradient    of a number, which can be differentiated again
Pushing     along a vector: by forward AD, or by two backward passes, the second of the pullback,
            where torch has no forward AD (LSTMs on a CPU, checkpoints, custom Functions)
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual

from .._base import random_state, trees
from .._base.torch_internals import autograd, modes


def gradient(
    func: Callable[..., tuple[Tensor, Any]], xs: Sequence[Tensor]
) -> tuple[Tensor, Sequence[Tensor | None], Any]:
    """A number, its gradients, which can be differentiated again, and what comes beside it."""
    # Plain autograd takes a tenth less time. But a loss that may reach other ranks has to tell this
    # backward pass from that of the product, and torch.func gives it a level of its own.
    if modes.transform_active() or (dist.is_available() and dist.is_initialized()):
        total, pull, beside = torch.func.vjp(func, *xs, has_aux=True)  # pyright: ignore
        return total, pull(torch.ones_like(total)), beside
    xs = [x if x.requires_grad else x.detach().requires_grad_() for x in xs]
    total, beside = func(*xs)
    if not total.requires_grad:
        return total, [None] * len(xs), beside
    return total, torch.autograd.grad(total, xs, create_graph=True, allow_unused=True), beside


def inner(
    a: Sequence[Tensor | None], b: Sequence[Tensor], dtype: torch.dtype = torch.float32
) -> Tensor:
    """The inner product of two lists, real, where None is zero; in ``dtype`` at least."""
    terms: list[Tensor] = []
    pairs = [
        (trees.real_parts(x), trees.real_parts(y))
        for x, y in zip(a, b, strict=True)
        if x is not None
    ]
    for x, y in pairs:  # made wide first, since a product has more bits than its factors
        wide = trees.accumulation_dtype(torch.promote_types(x.dtype, y.dtype), dtype)
        terms.append((x.to(wide) * y.to(wide)).sum())
    return sum([x.to(b[0].device) for x in terms], torch.zeros((), device=b[0].device))


# Along a vector -------------------------------------------------------------------------------


class Pushed(NamedTuple):
    """What a function gives, the same as constants, its derivative as constants, and the rest."""

    outs: list[Tensor]
    fixed: list[Tensor]
    moved: list[Tensor]
    beside: list[Tensor]


Function = Callable[..., tuple[list[Tensor], list[Tensor]]]  # what is differentiated, and the rest


class Pushing:
    """Derivatives along vectors, which remember whether torch has forward AD of what is called."""

    has_forward_ad: bool | None = None  # None until a call has shown it

    def __call__(
        self,
        func: Function,
        leaves: Sequence[Tensor],
        moving: Sequence[Tensor],
        again: Sequence[Tensor],
    ) -> Pushed:
        """What a function of the leaves gives, and its derivative along ``moving``.

        Constants are detached, but not where a transform around the call may differentiate them:
        there they come of leaves that were given ``again``, which the gradient of a product leaves
        alone.
        """
        outs, moved, beside = self.found(func, again or leaves, moving)
        if again:
            return Pushed(func(*leaves)[0], outs, moved, beside)
        return Pushed(outs, constants(outs, again), constants(moved, again), beside)

    def found(self, func: Function, at: Sequence[Tensor], moving: Sequence[Tensor]) -> "Found":
        """By forward AD, unless torch has none, or a checkpoint would forget tangents."""
        if not modes.transform_active() and autograd.saved_tensors_hooks_allowed():
            return _by_pulling_twice(func, at, moving)
        if torch.compiler.is_compiling() or self.has_forward_ad:
            return _by_forward_ad(func, at, moving)
        if self.has_forward_ad is None:
            before = random_state.generators({x.device for x in at})
            try:
                found = _by_forward_ad(func, at, moving)
            except Exception as error:
                if not any(words in str(error) for words in _NO_FORWARD_AD):
                    raise
                random_state.restore(before)
            else:
                self.has_forward_ad = True
                return found
        found = _by_pulling_twice(func, at, moving)
        self.has_forward_ad = False
        return found


def constants(tensors: Sequence[Any], again: Sequence[Tensor]) -> list[Any]:
    """Tensors that are not differentiated, unless a transform around the call may do so."""
    return [x if again or x is None else x.detach() for x in tensors]


Found = tuple[list[Tensor], list[Tensor], list[Tensor]]
# What torch says of operations without forward AD, and of expanded leaves, which get no tangent.
_NO_FORWARD_AD = "forward AD", "forward mode AD", "refers to a single memory location"
_ALONE = threading.RLock()  # torch has one forward AD for all threads, and mixes up two of them


def _by_forward_ad(func: Function, leaves: Sequence[Tensor], moving: Sequence[Tensor]) -> Found:
    with nullcontext() if torch.compiler.is_compiling() else _ALONE:
        if modes.transform_active():
            return torch.func.jvp(func, tuple(leaves), tuple(moving), has_aux=True)  # pyright: ignore
        with dual_level():  # in three quarters of the time
            outs, beside = func(*map(make_dual, leaves, moving))
            pairs = [*map(unpack_dual, outs)]
    moved = [torch.zeros_like(x.primal) if x.tangent is None else x.tangent for x in pairs]
    return [x.primal for x in pairs], moved, beside


def _by_pulling_twice(func: Function, leaves: Sequence[Tensor], moving: Sequence[Tensor]) -> Found:
    """A pullback is linear in its cotangents, and its own derivative in them is what is wanted."""
    if modes.transform_active():
        outs, pull, beside = torch.func.vjp(func, *leaves, has_aux=True)  # pyright: ignore
        zeros = [torch.zeros_like(x) for x in outs]
        _, pull_again = torch.func.vjp(lambda *c: pull([*c]), *zeros)  # pyright: ignore
        return outs, [*pull_again(tuple(moving))], beside
    outs, beside = func(*leaves)
    zeros = [torch.zeros_like(x, requires_grad=True) for x in outs]
    pairs = [(x, zero) for x, zero in zip(outs, zeros, strict=True) if x.requires_grad]
    moved: Any = [None] * len(outs)
    if pairs:
        depending, cotangents = zip(*pairs, strict=True)
        options: Any = {"create_graph": True, "allow_unused": True}
        pulled: Any = torch.autograd.grad(depending, leaves, cotangents, **options)
        both = zip(pulled, moving, strict=True)
        reached = [(g, v) for g, v in both if g is not None and g.requires_grad]
        if reached:
            grads, given = zip(*reached, strict=True)
            moved = torch.autograd.grad(grads, zeros, given, retain_graph=True, allow_unused=True)
    both = zip(outs, moved, strict=True)
    return outs, [torch.zeros_like(x) if t is None else t for x, t in both], beside
