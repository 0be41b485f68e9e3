"""The engines: a loss forwards, and back to gradients.

    "func"      torch.func, which composes with every transform
    "autograd"  torch.autograd, for what torch.func refuses: custom Functions without
                ``setup_context``, and checkpointed modules
    "auto"      autograd at top level, where it is faster, and torch.func under a transform, and for
                a loss that calls what plain autograd cannot follow, such as a gradient of its own

All give the same bits. At top level both record a graph of autograd's: torch.func on a level of its
own, which is over when the backward pass begins.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base import checks, dtensors
from .._base.torch_internals import autograd, functorch, kernels
from . import called_modules, exchange, losses, weights
from .seams import Portion, Recorded, Seams, Take
from .sums import Sums


Forward = Callable[[Seams, Portion, "Way"], Recorded]
Around = Callable[[], AbstractContextManager[Any]]


class Way(NamedTuple):
    """How the losses of a window are called."""

    forward: Forward
    leaves: list[Tensor]
    detach: Callable[[Tensor], Tensor] | None = Tensor.detach  # from what was recorded
    remembers: bool = False  # whether modules hold again in the backward pass what they held
    around: Around | None = None  # the backward pass


# Forwards ------------------------------------------------------------------------------------


def by_autograd(seams: Seams, part: Portion, way: Way) -> Recorded:
    """A loss that plain autograd records."""
    leaves, backward = way.leaves, exchange.Backward()  # of no level, and as ``inside_of`` says it
    backward.restores = way.remembers
    backward.outer, backward.plain, checks.here.backward = checks.here.backward, True, backward
    try:
        out = seams.loss(leaves, part.tree, part.rows, part.carried)
    finally:
        checks.here.backward = backward.outer
    seen, shape = seams.read(out, whole=part.whole)
    return Recorded(
        total=seen.total, leaves=leaves, seen=outside(seen, way), shape=shape, backward=backward
    )


def by_func(seams: Seams, part: Portion, way: Way) -> Recorded:
    """A loss under torch.func, at top level."""
    call, shapes, backwards = _on_primals(seams, part)
    leaves, (total, *_), outs = functorch.on_a_level(call, way.leaves)
    (shape,) = shapes
    seen = outside(losses.read_again(outs[0], outs[1:], shape), way)
    return Recorded(total=total, leaves=leaves, seen=seen, shape=shape, backward=backwards[0])


def under_transforms(seams: Seams, part: Portion, way: Way) -> Recorded:
    """A loss whose gradients other transforms follow."""
    call, shapes, backwards = _on_primals(seams, part)
    if torch.compiler.is_dynamo_compiling():  # which takes torch's own functions alone

        def first_and_rest(*leaves: Tensor) -> tuple[Tensor, list[Tensor]]:
            first, *rest = call([*leaves])
            return first, rest

        # pyright cannot tell the two lengths of vjp's result apart
        total, vjp, rest = torch.func.vjp(first_and_rest, *way.leaves, has_aux=True)  # pyright: ignore
        pull = partial(vjp, retain_graph=False)
    else:
        leaves, (recorded, *_), (total, *rest) = functorch.on_a_level(call, way.leaves)
        pull = partial(_pulled_through, recorded, leaves)
    shape = shapes[-1]
    seen = outside(losses.read_again(total, rest, shape), way)
    return Recorded(
        total=total,
        leaves=way.leaves,
        seen=seen,
        shape=shape,
        backward=backwards[-1],
        pull=pull,
    )


def _pulled_through(total: Tensor, leaves: list[Tensor], cotangent: Tensor) -> list[Tensor]:
    """As ``torch.func.vjp`` pulls back: recorded in grad mode, for terms of second order."""
    if not total.requires_grad:
        return [*map(torch.zeros_like, leaves)]
    given = (total,), leaves, (cotangent,)
    grads = autograd.gradients_of(*given, create_graph=torch.is_grad_enabled())
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]


def _on_primals(
    seams: Seams, part: Portion
) -> tuple[Any, list[losses.Shape], list[exchange.Backward | None]]:
    """A function of leaves that lists what a loss returned, and notes what is no tensor."""
    shapes: list[losses.Shape] = []
    backwards: list[exchange.Backward | None] = []

    def call(primals: list[Tensor]) -> list[Tensor]:
        # no graph reaches other ranks
        backward = None if torch.compiler.is_dynamo_compiling() else exchange.begun()
        with nullcontext() if backward is None else exchange.inside_of(backward):
            out = seams.loss(primals, part.tree, part.rows, part.carried)
            seen, shape = seams.read(out, whole=part.whole)
        shapes.append(shape)
        backwards.append(backward)
        return losses.in_one_list(seen)

    return call, shapes, backwards


def outside(seen: losses.Read, way: Way) -> losses.Read:
    """What a loss returned, without what was recorded of it, and as all ranks know it.

    Whoever follows the results of the call looks at it first: see history.py.
    """
    if type(seen.total) is not Tensor:
        seen = losses.known_to_all_ranks(seen)
    if (detach := way.detach) is None:
        return seen
    total, weight, aux, terms = seen
    if checks.here.look is not None:
        checks.here.look((total, weight, *aux), way.leaves)
    kept = weight if isinstance(weight, tuple) else detach(weight)
    each = terms if isinstance(terms, tuple) else detach(terms)
    return losses.Read(detach(total), kept, [*map(detach, aux)], each)


def detached(x: Tensor) -> Tensor:
    """A tensor without what autograd recorded, but with its tangent."""
    return autograd.without_history([x])[0] if x.requires_grad else x


# Back ----------------------------------------------------------------------------------------


def pulled(recorded: Recorded, cotangent: Tensor, way: Way) -> Sequence[Tensor | None]:
    """The gradients of all leaves; None of those that the total does not depend on."""
    if recorded.pull is not None:
        return recorded.pull(cotangent)
    if not recorded.total.requires_grad:
        return [None] * len(recorded.leaves)
    with nullcontext() if way.around is None else way.around():
        # a total of several numbers is pulled back several times
        kept = recorded.total.dim() > 0
        return autograd.gradients(recorded.total, recorded.leaves, cotangent, kept)


def adding(seams: Seams, sums: Sums, way: Way) -> Callable[[Portion], weights.Microbatch]:
    """A function that adds the gradient of a microbatch to sums while the backward pass runs."""
    forward, around = way.forward, way.around
    term, take, judge = seams.term, seams.take, seams.judge
    each = _each_into(sums, take or sums.add)
    straight = take is None and forward is by_autograd and sums.kinds.alike
    enter = _straight_into(sums, each) if straight else each

    def add(part: Portion) -> weights.Microbatch:
        recorded = forward(seams, part, way)
        weighing, entry = term(recorded, part.counts)
        if weighing is not None and recorded.total.requires_grad:
            if around is None:
                enter(recorded, weighing)
            else:
                with around():
                    enter(recorded, weighing)
        return entry if judge is None else judge(entry, weighing)

    return add


Enter = Callable[[Recorded, weights.Weighing], None]


def _straight_into(sums: Sums, otherwise: Enter) -> Enter:
    """Let gradients enter sums of their dtypes as they come: autograd itself adds large ones."""
    added = sums.kinds.added

    def enter(recorded: Recorded, weighing: weights.Weighing) -> None:
        factor = weighing.factor
        if weighing.keep is not None or isinstance(factor, Tensor) or factor != 1.0:
            otherwise(recorded, weighing)
            return
        total, leaves, *_ = recorded
        tensors, cotangent = sums.tensors, weighing.cotangent
        if not sums.begun:
            into = {i: x for i, x in enumerate(tensors) if x is not None}
            sums.adopt(autograd.gradients_into(into, total, leaves, cotangent))
            return
        if added:
            sums.written = True
            into = {i: tensors[i] for i in added}
            grads: Any = autograd.gradients_into(into, total, leaves, cotangent)
        else:
            grads = autograd.gradients(total, leaves, cotangent)
        if NoneType in map(type, grads):
            which = [i for i, grad in enumerate(grads) if grad is not None]
            tensors, grads = [tensors[i] for i in which], [grads[i] for i in which]
        if tensors:
            sums.written = True
            kernels.foreach_add_(tensors, grads)

    return enter


def _each_into(sums: Sums, take: Take) -> Enter:
    """Let gradients be taken as they come: large ones one by one, so that no second tree exists."""
    large = sums.kinds.large

    def enter(recorded: Recorded, weighing: weights.Weighing) -> None:
        total, leaves, *_ = recorded

        def hook(i: int, grad: Tensor | None) -> Tensor | None:
            if grad is None:  # a Function that was given the leaf says that it has none
                return None
            take([i], [grad], weighing)
            return weights.nothing_like(grad)

        handles = [leaves[i].register_hook(partial(hook, i)) for i in large]
        try:
            grads = autograd.gradients(total, leaves, weighing.cotangent)
        finally:
            for handle in handles:
                handle.remove()
        if large or NoneType in map(type, grads):
            small = {i: g for i, g in enumerate(grads) if g is not None and i not in large}
            if small:
                take([*small], [*small.values()], weighing)
        else:
            take(range(len(grads)), grads, weighing)

    return enter


# What wraps an engine ------------------------------------------------------------------------


def landing(seams: Seams, take: Take, layouts: dtensors.Layouts) -> Seams:
    """Let only this rank's part of a gradient of a DTensor be taken, if it has one."""

    def land(which: Sequence[int], grads: Sequence[Tensor], weighing: weights.Weighing) -> None:
        parts = [(i, dtensors.landed(g, layouts[i])) for i, g in zip(which, grads, strict=True)]
        own = [(i, part) for i, part in parts if part is not None]
        take([i for i, _ in own], [part for _, part in own], weighing)

    return seams._replace(take=land)


def remembering_modules(seams: Seams, way: Way) -> tuple[Seams, Way]:
    """Let modules hold again in the backward pass what they held in the forward pass.

    That is for a loss whose backward pass computes it again: see called_modules.py.
    """
    last: list[Any] = []

    def loss(*args: Any) -> Any:
        with called_modules.remembering() as held:
            out = seams.loss(*args)
        last[:] = held, checks.here.backward
        return out

    @contextmanager
    def around() -> Generator[None]:
        held, backward = last
        with (
            called_modules.holding(called_modules.with_own_buffers(held)),
            exchange.running_again(backward),
        ):
            yield

    return seams._replace(loss=loss), way._replace(around=around)
