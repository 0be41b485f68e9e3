"""What layers see of the samples of a chunk: what they are given, and cotangents of their outputs.

    def one(*tensors):                    # for a vmap over samples
        with layers:
            return loss(layers.given, *tensors)

    layers.pull(vmap(one)(*rows), see)    # see(i, the gradients of leaf i), as the pass comes by

It is one forward pass and one backward pass of plain autograd, below the vmap. A matrix that is
multiplied by what a sample has, or whose rows a sample looks up, is not recorded: its gradients are
the outer products of what comes by. For any other use each sample has a copy of the leaf, and the
gradient of the copy is its own; for that, leaves are small: norms, biases, positions.

A use of a leaf that no torch function shows, such as a transform of the leaf itself or a custom
Function, is recorded as one of what stands in for it, which else has no gradient. So it is found.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from .._base import (
    accumulation_dtype,
    as_members,
    below_vmap,
    ends_of,
    gradients,
    members_of,
    transform_level,
)
from .outer_products import Outer, joined, zero_gradients


SMALL = 2**10  # numbers
See = Callable[[int, Outer | Tensor], None]


class Unfit(RuntimeError):
    """What a loss does with its leaves cannot be followed: its gradients are to be had otherwise.

    What was seen until then is worth nothing.
    """


class Layers(TorchFunctionMode):
    """What stands between a loss and its leaves, for one call with a chunk of samples.

    Args:
        leaves: What to differentiate with respect to.
        rows: How many samples there are.
        at_least: The dtype of sums. A leaf is kept out of outer products where its own is narrower,
            since a sum over samples would be taken in that.
    """

    def __init__(self, leaves: Sequence[Tensor], rows: int, at_least: torch.dtype) -> None:
        super().__init__()
        self.leaves = [x.detach() if x.requires_grad else x for x in leaves]
        self.rows = rows
        self.given = tuple(x.detach().requires_grad_() for x in leaves)
        self.wide = [
            x.is_floating_point() and accumulation_dtype(x.dtype, at_least) == x.dtype
            for x in leaves
        ]
        self.level: int | None = None
        self.stand_ins = {id(x): (i, False) for i, x in enumerate(self.given)}
        self.transposes: list[Tensor] = []  # stand-ins too, and so are to live
        self.copies: dict[int, tuple[Tensor, Tensor]] = {}  # below the vmap, and in it
        # Beyond half of all nothing is saved, unless that is next to nothing.
        self.may_copy = max(sum(x.numel() for x in leaves) // 2, SMALL)
        self.uses = [0] * len(leaves)
        self.token = torch.zeros((), requires_grad=True)  # for its sake autograd comes by
        self.unfit = ""
        self.see: See
        self.several: int | None = None  # cotangents
        self.parts: dict[int, list[Outer | Tensor]] = {}  # of leaves with several uses
        self.whole: set[int] = set()

    # Forwards --------------------------------------------------------------------------------

    def __enter__(self) -> Any:
        self.level = transform_level()
        return super().__enter__()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        rule = RULES.get(func)
        if rule is not None and (not kwargs or rule in KEYED):
            if (out := rule(self, *args, **kwargs)) is not None:
                return out
        if func in UNFIT:
            raise self.refusal(f"calls {func.__name__}")
        if self.holds(args) or (kwargs and self.holds(kwargs.values())):
            if func in LOOKS:
                return func(*args, **kwargs)
            args = self.with_copies(args)
            kwargs = {key: self.with_copies(x) for key, x in kwargs.items()}
        return func(*args, **kwargs)

    def refusal(self, why: str) -> Unfit:
        """An error, which is remembered where the loss catches it."""
        self.unfit = f"the loss {why}"
        return Unfit(self.unfit)

    def holds(self, values: Iterable[Any]) -> bool:
        """Whether there is a stand-in among what an operation is given."""
        for x in values:
            if isinstance(x, Tensor):
                if id(x) in self.stand_ins:
                    return True
            elif isinstance(x, (tuple, list)) and self.holds(x):
                return True
        return False

    def with_copies(self, x: Any) -> Any:
        """What an operation is given, with a copy for each sample in place of each stand-in."""
        if isinstance(x, Tensor):
            at = self.stand_ins.get(id(x))
            return x if at is None else self.copy_of(*at)
        if type(x) in (tuple, list):
            return type(x)(map(self.with_copies, x))
        return x

    def copy_of(self, i: int, transposed: bool) -> Tensor:
        """A copy of a leaf for each sample, as one of them sees it."""
        if transform_level() != self.level:
            raise self.refusal("uses a leaf under a transform of its own")
        if i not in self.copies:
            leaf = self.leaves[i]
            self.may_copy -= leaf.numel()
            if self.may_copy < 0:
                raise self.refusal("uses large leaves in other ways than layers do")
            copy = below_vmap(lambda: leaf.expand(self.rows, *leaf.shape).requires_grad_())
            self.copies[i] = copy, as_members(copy, transform_level() or 0)
            self.uses[i] += 1
        copy = self.copies[i][1]
        return copy.mT if transposed else copy

    def rows_of(self, x: Any) -> tuple[Tensor, bool] | None:
        """What a tensor is below the vmap, and whether it is mapped: then dim 0 has the samples."""
        if not isinstance(x, Tensor) or self.level is None or transform_level() != self.level:
            return None
        return members_of(x, self.level)

    def matrix(self, x: Any) -> tuple[int, bool] | None:
        """Which leaf a tensor stands for, and whether transposed, if that is a matrix."""
        at = self.stand_ins.get(id(x))
        if at is None or not self.wide[at[0]] or self.leaves[at[0]].dim() != 2:
            return None
        return at

    def multiplied(self, x: Any, weight: Any, bias: Any, flip: bool = False) -> Tensor | None:
        """``F.linear``, or with ``flip`` ``x @ weight + bias``; None where it goes another way."""
        at, found = self.matrix(weight), self.rows_of(x)
        if at is None or found is None:
            return None
        (i, transposed), (a, mapped) = at, found
        leaf, flip = self.leaves[i], transposed != flip
        like = (a.dtype, a.device) == (leaf.dtype, leaf.device)
        if not mapped or a.dim() < 2 or not like or torch.is_autocast_enabled(leaf.device.type):
            return None
        weight = leaf.T if flip else leaf
        j, _ = self.stand_ins.get(id(bias), (-1, False))
        fused = j >= 0 and self.wide[j] and self.leaves[j].shape == weight.shape[:1]
        for k in (i, j) if fused else (i,):
            self.uses[k] += 1

        def back(a: Tensor, d: Tensor) -> None:
            a, d = a.detach().reshape(self.rows, -1, a.shape[-1]), self.cotangents(d)
            self.arrived(i, Outer(*((a, d) if flip else (d, a)), leaf.shape))
            if fused:
                self.arrived(j, d.sum(-2))

        added = self.leaves[j] if fused else None
        y = below_vmap(_Linear.apply, a, weight, added, self.token, back)
        y = as_members(y, self.level or 0)
        return y if fused or bias is None else torch.add(y, self.with_copies(bias))

    def looked_up(self, index: Any, weight: Any, padding: int | None = None) -> Tensor | None:
        """``F.embedding``; None where it goes another way."""
        at, found = self.matrix(weight), self.rows_of(index)
        if at is None or found is None or at[1] or index.dtype not in INDICES:
            return None
        i, leaf = at[0], self.leaves[at[0]]
        rows, mapped = found[0].long(), found[1]
        rows = rows if mapped else rows.expand(self.rows, *rows.shape)
        self.uses[i] += 1

        def back(index: Tensor, d: Tensor) -> None:
            left, d = index.reshape(self.rows, -1), self.cotangents(d)
            if padding is not None:
                d = torch.where((left == padding).unsqueeze(-1), 0.0, d)
            self.arrived(i, Outer(left, d, leaf.shape))

        return as_members(below_vmap(_Lookup.apply, rows, leaf, self.token, back), self.level or 0)

    def all_of(self, totals: Tensor) -> bool:
        """Whether the graph of what the loss gave ends nowhere but here."""
        own = {id(x) for x in (self.token, *self.given, *(copy for copy, _ in self.copies.values()))}
        return own.issuperset(map(id, ends_of(totals)))

    # Backwards -------------------------------------------------------------------------------

    def pull(self, totals: Tensor, see: See, cotangents: Tensor | None = None) -> None:
        """Go back from the totals of all samples, and hand over the gradients of each leaf once.

        Each comes as soon as it is there, and is dropped before the next one unless it is kept.

        Args:
            totals: What the vmap gave: (rows,), or more dims where there are ``cotangents``.
            see: ``see(i, gradients)``: outer products, or a tensor of (rows, *leaf.shape).
            cotangents: Several of them, shaped like totals, along a dim 0 that gradients then have.
        """
        self.see, self.several = see, None if cotangents is None else len(cotangents)
        if self.unfit:
            raise Unfit(self.unfit)
        copies = [copy for copy, _ in self.copies.values()]
        wrt = [self.token, *copies, *self.given]
        if cotangents is None:
            found = gradients(totals, wrt, torch.ones_like(totals))
        else:
            knobs = {"allow_unused": True, "is_grads_batched": True}
            found = torch.autograd.grad(totals, wrt, cotangents, **knobs)
        if any(x is not None for x in found[1 + len(copies) :]):
            raise self.refusal("uses a leaf in a way that cannot be seen")
        for i, grad in zip(self.copies, found[1:], strict=False):
            if grad is not None:
                self.arrived(i, grad)
        for i, leaf in enumerate(self.leaves):
            if i not in self.whole:
                parts = self.parts.pop(i, None)
                see(i, joined(parts) if parts else zero_gradients(leaf, self.rows))

    def cotangents(self, d: Tensor) -> Tensor:
        """The cotangent of a layer's output: (rows, t, n), or (cotangents, rows, t, n)."""
        if self.several is None:
            return d.reshape(self.rows, -1, d.shape[-1])
        d, mapped = members_of(d, transform_level() or 0) or (d, False)
        d = d if mapped else d.expand(self.several, *d.shape)
        return d.reshape(self.several, self.rows, -1, d.shape[-1])

    def arrived(self, i: int, part: Outer | Tensor) -> None:
        """Take the gradients of one use of a leaf."""
        if self.uses[i] == 1:
            self.whole.add(i)
            self.see(i, part)
        else:
            self.parts.setdefault(i, []).append(part)


class _Linear(Function):
    """``F.linear``, whose backward pass comes by with what it was given and a cotangent."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, weight: Tensor, bias: Any, token: Any, back: Any) -> Tensor:  # pyright: ignore
        ctx.save_for_backward(a, weight)
        ctx.back = back
        return F.linear(a, weight, bias)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:  # pyright: ignore
        a, weight = ctx.saved_tensors
        ctx.back(a, d)
        return d @ weight if ctx.needs_input_grad[0] else None, None, None, None, None


class _Lookup(Function):
    """``F.embedding``, whose backward pass comes by with a cotangent."""

    @staticmethod
    def forward(ctx: Any, index: Tensor, weight: Tensor, token: Any, back: Any) -> Tensor:  # pyright: ignore
        ctx.save_for_backward(index)
        ctx.back = back
        return F.embedding(index, weight)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:  # pyright: ignore
        ctx.back(*ctx.saved_tensors, d)
        return None, None, None, None


# What is done with a leaf ----------------------------------------------------------------------


def _linear(layers: Layers, input: Any, weight: Any, bias: Any = None) -> Tensor | None:
    return layers.multiplied(input, weight, bias)


def _matmul(layers: Layers, x: Any, other: Any) -> Tensor | None:
    if id(other) in layers.stand_ins:
        return layers.multiplied(x, other, None, flip=True)
    if id(x) not in layers.stand_ins or not isinstance(other, Tensor):
        return None
    if other.dim() < 2:
        return layers.multiplied(other, x, None)
    out = layers.multiplied(other.mT, x, None)
    return None if out is None else out.mT


def _mm(layers: Layers, x: Any, other: Any) -> Tensor | None:
    return _matmul(layers, x, other) if x.dim() == other.dim() == 2 else None


def _addmm(layers: Layers, bias: Any, x: Any, other: Any) -> Tensor | None:
    return layers.multiplied(x, other, bias, flip=True)


def _embedding(
    layers: Layers,
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: Any = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    if max_norm is not None or scale_grad_by_freq or sparse:
        return None
    padding = None if padding_idx is None else padding_idx % weight.shape[0]
    return layers.looked_up(input, weight, padding)


def _item(layers: Layers, x: Any, index: Any) -> Tensor | None:
    if id(x) not in layers.stand_ins or not isinstance(index, Tensor) or index.dtype not in INDICES:
        return None
    return layers.looked_up(torch.where(index < 0, index + x.shape[0], index), x)


def _transposed(layers: Layers, x: Any, *dims: Any) -> Tensor | None:
    at = layers.stand_ins.get(id(x))
    if at is None or x.dim() != 2 or {d % 2 for d in dims} not in (set(), {0, 1}):
        return None
    layers.transposes.append(x.mT)
    layers.stand_ins[id(layers.transposes[-1])] = at[0], not at[1]
    return layers.transposes[-1]


RULES: dict[Any, Callable[..., Tensor | None]] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    torch.mm: _mm,
    Tensor.mm: _mm,
    torch.addmm: _addmm,
    F.embedding: _embedding,
    Tensor.__getitem__: _item,
    Tensor.T.__get__: _transposed,
    Tensor.mT.__get__: _transposed,
    Tensor.t: _transposed,
    torch.t: _transposed,
    Tensor.transpose: _transposed,
    torch.transpose: _transposed,
}
KEYED = {_linear, _embedding}  # whose arguments may have names
INDICES = {torch.int32, torch.int64}
LOOKS = {  # what tells nothing of a leaf's numbers
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout")),
    *(getattr(Tensor, name).__get__ for name in ("requires_grad", "is_leaf", "grad")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex),
    *(Tensor.__len__, torch.is_floating_point, torch.is_complex, torch.is_tensor),
}
UNFIT = {
    torch.autograd.grad,
    torch.autograd.backward,
    Tensor.backward,
    Tensor.requires_grad_,
    Tensor.retain_grad,
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
}
