"""Exchanges between ranks inside a function, and their derivatives.

    psum(x)      the sum over all ranks, on each of them      its transpose: psum
    gather(x)    the samples of all ranks, on each of them    its transpose: scatter
    scatter(x)   the sum over all ranks, of own samples       its transpose: gather
    total(x)     the sum (or the samples) of all ranks, of    its transpose: copy
                 which they hold one copy together
    copy(x)      a rank's own copy (or samples) of what       its transpose: total
                 all hold

The function that is differentiated is the sum of the results of all ranks. A sum that each rank
receives therefore has a cotangent on each rank, and the transpose sums these. So
``make_step(..., group=...)``, which sums the gradients of all ranks, gives the gradient of the sum
of their losses.

All ranks exchange the same tensors in the same order, and first compare what they are about to
exchange. A mismatch raises on all of them. An exchange is not compared again if a module fixes its
shapes, or if the host would wait for a device, unless a batch is cut around the call.

Each rank pulls the gradient of a microbatch with its own cotangent: a weight divided by some power
of two. A rank multiplies that back before it sends a cotangent, and divides what it receives. So an
exchange must know which backward pass it belongs to. Under nested transforms it is recorded once
per level: a loss is pulled at one level, and a function inside or around it that takes its own
gradient at another.
"""

import threading
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from .._base import checks, claims, containers, trees
from .._base.torch_internals import autograd, functorch
from . import batches, buckets, watch


def exchange(kind: "Kind", tree: trees.Tree, group: Any) -> trees.Tree:
    """Exchange a tree of tensors with the ranks of a group, differentiably.

    Tensors that are differentiated are copied, and constants stay constants.
    """
    leaves, spec = containers.open_tree(tree)
    at = [i for i, x in enumerate(leaves) if kind != "copy" or functorch.differentiated(x)]
    found = Exchange(kind, buckets.group_of(group)).of([leaves[i] for i in at])
    for i, x in zip(at, found, strict=True):
        leaves[i] = x
    return trees.unflatten(spec, leaves)


def any_rank(flags: Sequence[bool], device: torch.device, group: Any) -> list[bool]:
    """Which of some things are so on any rank; the host waits for that."""
    with functorch.down_to(0):
        (counts,) = Exchange("total", group).run([torch.tensor(flags, device=device).double()])
        return [count > 0 for count in counts.tolist()]


def gather_one(x: Tensor, group: Any, kind: "Kind" = "gather") -> Tensor:
    """Stack the tensors of all ranks along a new dim 0; their shape does not depend on data."""
    each = [1] * dist.get_world_size(group := buckets.group_of(group))
    (rows,) = Exchange(kind, group, each, fixed=True).of([x.unsqueeze(0)])
    return rows


# What travels ----------------------------------------------------------------------------


Kind = Literal["psum", "gather", "scatter", "total", "copy"]
TRANSPOSED: dict[Kind, Kind] = {
    "psum": "psum",
    "gather": "scatter",
    "scatter": "gather",
    "total": "copy",
    "copy": "total",
}

# what each group has exchanged
_agreed: WeakKeyDictionary[Any, claims.Agreement] = WeakKeyDictionary()
_CAUSE = (
    "All ranks must call psum and gather in the same order, equally often, with tensors of the "
    "same shapes and dtypes. Likely causes: one rank took another branch, split its batch around "
    "the call into another number of microbatches, or left out a microbatch because it had no "
    "samples."
)


class Exchange:
    """A linear map of what all ranks hold. No tuple: transforms would copy it."""

    def __init__(self, kind: Kind, group: Any, each: Any = None, fixed: bool = False) -> None:
        self.kind: Kind = kind
        self.group, self.fixed = group, fixed  # fixed: no data can decide what shapes there are
        self.each: list[int] | None = (
            each  # the samples of each rank, if it is of samples and once known
        )
        self.of_rows = each is not None or kind in ("gather", "scatter")
        self.gathers = self.of_rows and kind in ("gather", "total")

    @property
    def transposed(self) -> "Exchange":
        """From the cotangents of all ranks' results to those of their tensors."""
        return Exchange(TRANSPOSED[self.kind], self.group, self.each, self.fixed)

    def of(self, tensors: list[Tensor]) -> list[Tensor]:
        """Apply it to tensors, differentiably."""
        if not tensors:
            return []
        note_reached(self.group)
        found: Any = _Exchange.apply(self, *watch.exchanged(tensors))
        watch.note_made(found)
        return list(found)

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Apply it to tensors that no transform follows."""
        if self.kind == "copy":
            at, each = dist.get_rank(self.group), self.each
            return [(x if each is None else x.split(each)[at]).clone() for x in tensors]
        # other ranks may not observe, and what comes is dropped
        if checks.here.observed is not None:
            checks.here.observed.reached = True
            return [*map(self.alone, tensors)]
        self.agree(tensors)
        reals = [*map(trees.real_parts, tensors)]
        blocks = [self.blocks_of(x) for x in reals]
        for members in buckets.buckets_of([x if x.numel() else None for x in blocks]):
            flat = self.sent(torch.cat([blocks[i] for i in members], 1))
            pieces = flat.split([blocks[i].shape[1] for i in members], 1)
            for i, piece in zip(members, pieces, strict=True):
                blocks[i] = piece
        outs: list[Tensor] = []
        for x, real, block in zip(tensors, reals, blocks, strict=True):
            out = self.out_of(block, real.shape)
            if x.is_complex():
                outs.append(torch.view_as_complex(out).to(x.dtype, copy=True))
            else:
                outs.append(out.to(x.dtype))
        return outs

    def alone(self, x: Tensor) -> Tensor:
        """What it gives, but for the numbers, if all ranks hold the same."""
        if self.kind == "gather":
            self.each = [len(x)] * dist.get_world_size(self.group)
            return torch.cat([x] * len(self.each))
        return (x if self.each is None else x[: self.each[dist.get_rank(self.group)]]).clone()

    def blocks_of(self, x: Tensor) -> Tensor:
        """A tensor as it travels: a row for the numbers of each rank that they go to."""
        if not self.gathers:
            x = _wide(x)
        if self.each is None:
            return x.reshape(1, -1)
        most, wide = max(self.each), prod(x.shape[1:])
        each = [len(x)] if self.gathers else self.each
        if all(n == most for n in each):
            return x.reshape(len(each), most * wide)
        padded = x.new_zeros(len(each), most * wide)
        for to, rows in zip(padded, x.split(each), strict=True):
            to[: rows.numel()] = rows.reshape(-1)
        return padded

    def sent(self, flat: Tensor) -> Tensor:
        """What comes of the blocks of several tensors, side by side."""
        group, empty = self.group, flat.new_empty
        with claims.between_ranks():
            if self.each is None:
                dist.all_reduce(flat, group=group)
                return flat
            if self.gathers:
                of_all = empty(dist.get_world_size(group), flat.shape[1])
                dist.all_gather([*of_all], flat[0], group=group)
                return of_all
            own = empty(1, flat.shape[1])
            dist.reduce_scatter(own[0], [*flat], group=group)
            return own

    def out_of(self, came: Tensor, shape: torch.Size) -> Tensor:
        """The result for a tensor of some shape: no view, which torch would let nobody write to."""
        if self.each is None:
            return came.view(shape).clone()
        each = self.each if self.gathers else [self.each[dist.get_rank(self.group)]]
        wide = prod(shape[1:])
        if not came.numel():
            return came.new_empty(sum(each), *shape[1:])
        pairs = zip(came, each, strict=True)
        return torch.cat([block[: n * wide].view(n, *shape[1:]) for block, n in pairs])

    def agree(self, tensors: Sequence[Tensor]) -> None:
        """Compare with the other ranks what is about to travel."""
        known = _agreed.setdefault(self.group, claims.agreement({}))
        parts = batches.parts_of_batch()
        call = self.kind if parts < 2 else f"{self.kind} in one of {parts} microbatches"
        likes = [x[:0] if self.of_rows else x for x in tensors]
        kind = call, *((x.shape, x.dtype) for x in likes)
        counted, device = self.each is not None or not self.of_rows, tensors[0].device
        trusted = counted and (self.fixed or device.type != "cpu")
        if trusted and not parts and kind in known.kinds:
            return
        claimed = claims.claim(known, call, {"tensors": likes}, {}, device, _CAUSE, whole=False)
        rows = len(tensors[0]) if self.of_rows else 0
        of_all = buckets.meet(claimed, self.group, rows)
        known.kinds[kind] = claimed.kind
        if not counted:
            self.each = [*map(int, of_all.tolist())]


def _wide(x: Tensor) -> Tensor:
    return x.to(trees.accumulation_dtype(x.dtype)) if trees.continuous(x) else x


_UNKNOWN = (
    "{} was called in a Weighted loss that grad splits into microbatches. The divisor of its "
    "gradient is known only at the end, and differs between ranks. Pass microbatch_size=None, and "
    "call microbatch inside the loss. Or sum the gradients over ranks: make_step(..., group=...), "
    "or an accumulator and all_reduce."
)


class _Exchange(Function):
    """An exchange of tensors, called with (exchange, *tensors)."""

    @staticmethod
    def forward(how: Exchange, *tensors: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore
        return tuple(how.run(tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.how, *tensors = inputs
        ctx.pulled = recorded_here()
        ctx.wrt = [i for i, x in enumerate(tensors) if trees.continuous(x)]
        ctx.given = [(x.shape, x.dtype, x.device) for x in tensors]
        ctx.likes = [(x.shape, x.dtype, x.device) for x in output]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x in output if not trees.continuous(x)))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        how, pulled = ctx.how, ctx.pulled
        # A rank by itself pulls no zeros, which would be NaN where what they meet is not finite.
        wrt = [i for i in ctx.wrt if how.kind != "total" or cotangents[i] is not None]
        given = [_wide(c) for c in _filled(cotangents, wrt, ctx.likes)]
        if pulled is not None:
            if (times := pulled.times) is None:
                raise RuntimeError(_UNKNOWN.format(how.kind))
            given = [c * times for c in given]
        found = how.transposed.of(given)
        if pulled is not None:
            found = [g / pulled.times for g in found]
        grads: list[Tensor | None] = [None] * len(ctx.given)
        for i, g in zip(wrt, found, strict=True):
            grads[i] = g.to(ctx.given[i][1])
        return None, *grads

    @staticmethod
    def jvp(ctx: Any, _how: Any, *tangents: Tensor | None) -> Any:  # pyright: ignore
        with functorch.forward_ad():  # torch turns it off in the rules of Functions
            found = ctx.how.of(_filled(tangents, ctx.wrt, ctx.given))
        outs: list[Tensor | None] = [None] * len(ctx.given)
        for i, t in zip(ctx.wrt, found, strict=True):
            outs[i] = t
        return tuple(outs)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], how: Exchange, *tensors: Tensor) -> Any:  # pyright: ignore
        to = 1 if how.of_rows else 0  # behind the samples
        dims = [None if d is None else to for d in in_dims[1:]]
        pairs = zip(tensors, in_dims[1:], strict=True)
        moved = [x if d is None else x.movedim(d, to) for x, d in pairs]
        return _Exchange.apply(how, *moved), tuple(dims)


def _filled(
    given: Sequence[Tensor | None], at: Sequence[int], likes: Sequence[Any]
) -> list[Tensor]:
    """What is given at some places, and zeros where that is nothing.

    All ranks exchange as much, whether or not what they return depends on all of it.
    """
    found: list[Tensor] = []
    for i in at:
        shape, dtype, device = likes[i]
        x = given[i]
        found.append(torch.zeros(shape, dtype=dtype, device=device) if x is None else x)
    return found


# Whose cotangents ------------------------------------------------------------------------


class Backward:
    """The backward pass of what a level of transforms records."""

    outer: "Backward | None" = None  # that of what is around, at another level
    level: int | None = None  # None: plain autograd
    plain: bool = False  # recorded by plain autograd, to which what keeps no graph is a constant
    times: Any = None  # what its gradients are yet to be multiplied by; None until that is known
    group: Any = None  # the ranks that were reached from inside of it, if any were
    restores: bool = False  # whether modules hold again in it what they held when they were called


_NO_LEVEL = -1  # of transforms: None is that of plain autograd
_elsewhere: list[int] = []  # the threads that run backward passes in which losses run again


def recorded_here() -> Backward | None:
    """The backward pass of what is recorded now, at this level; None for one that is not ours."""
    backward, level = checks.here.backward, functorch.transform_level()
    if backward is None and _elsewhere and autograd.in_backward():
        raise RuntimeError(
            "a checkpoint runs a call to other ranks again, in a thread of torch where its weight "
            "is not known. Use pa.remat instead of torch.utils.checkpoint."
        )
    while backward is not None and backward.level != level:
        backward = backward.outer
    return backward


def note_reached(group: Any) -> None:
    """Say that what runs in this thread has reached other ranks."""
    backward = checks.here.backward
    while backward is not None:
        if checks.here.observed is not None:
            checks.here.observed.callback(setattr, backward, "group", backward.group)
        backward.group = group
        backward = backward.outer


def begun(times: Any = None) -> Backward:
    """The backward pass of what is recorded at this level from now on."""
    backward = Backward()
    backward.outer, backward.level, backward.times = (
        checks.here.backward,
        functorch.transform_level(),
        times,
    )
    backward.plain = backward.level is None
    return backward


def onlooker(plain: bool = False) -> Backward:
    """A note of which ranks are reached, and no backward pass: nothing is recorded as its part."""
    backward = begun()
    backward.level, backward.plain = _NO_LEVEL, plain
    return backward


@contextmanager
def inside_of(backward: Backward) -> Generator[Backward]:
    """Say that what this thread records inside is pulled by a backward pass."""
    before, checks.here.backward = checks.here.backward, backward
    try:
        yield backward
    finally:
        checks.here.backward = before


def pulled_by(backward: Backward | None) -> AbstractContextManager[Any]:
    """Say that what is recorded at this level is pulled with the cotangents of another pass."""
    if torch.compiler.is_dynamo_compiling():  # no graph reaches other ranks
        return nullcontext()
    return inside_of(begun(1.0 if backward is None else backward.times))


@contextmanager
def running_again(backward: Backward) -> Generator[None]:
    """Say that a backward pass begins in which parts of the loss are run again."""
    _elsewhere.append(threading.get_ident())
    try:
        with inside_of(backward):
            yield
    finally:
        _elsewhere.remove(threading.get_ident())
