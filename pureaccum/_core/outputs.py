"""What becomes of the outputs of a microbatched function, leaf by leaf.

    take    the outputs of one microbatch, as tensors that are summed or laid end to end
    finish  the tree of outputs for the whole batch

Sums, rows and what the last microbatch gives are differentiated by the rule in rule.py. The largest
and the smallest number are ``amax`` and ``amin`` of one row a microbatch, in plain code. What a
user's reducer keeps is a value without a derivative: it may be ignored, compared or detached under
any transform, and whatever uses its derivative raises.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch.autograd import Function

from .._base import sharded_rows, trees
from .._base.torch_internals import functorch, operations
from .._base.torch_internals.functorch import followed
from . import gathered, losses, reductions, rule, weighted
from .weighted import Weighted


# A tensor that is summed or laid end to end, and which of the pieces' ``keeps`` says whether it
# counts, from 1; 0: it does.
Taken = tuple[Tensor, gathered.Cut, int]


_LEAF = trees.flatten(0)[1]


class Alike(NamedTuple):
    """What is decided once for microbatches of tensors: structure, and a reduction for each."""

    spec: optree.PyTreeSpec
    looks: list[reductions.Look]
    reductions: list[str]


class Counted(NamedTuple):
    """The output of a piece, which counts only if ``keep`` is true, or always if that is None."""

    tree: trees.Tree
    keep: Tensor | None


class Whole:
    """The output of a single piece, as it is."""

    sizes: Sequence[int] = (1,)
    form: rule.Form | None = None
    followed: Sequence[Tensor] = ()

    def begin(self) -> None:
        """Forget what was taken."""

    def take(self, _p: int, out: trees.Tree, repeated: bool = False) -> rule.Outs:
        """The tensors of the output."""
        keep = out.keep if isinstance(out, Counted) else None
        leaves, spec = trees.flatten(out.tree if isinstance(out, Counted) else out)
        tensors, static = losses.tensors_apart(leaves)
        if not repeated:
            self.spec, self.static = spec, static
            groups = (0 if keep is None else 1,) * len(tensors)
            self.form = rule.Form((), ("whole",) * len(tensors), groups)
        return tensors, () if keep is None else (keep,)

    def finish(self, outs: Sequence[Tensor], _operands: Sequence[Tensor]) -> trees.Tree:
        """The output again, of its tensors."""
        return trees.unflatten(self.spec, losses.filled(self.static, outs))


class Outputs:
    """The outputs of several microbatches, by the reductions of ``reduce``."""

    def __init__(
        self, reduce: trees.Tree, sizes: Sequence[int], dim: int, over: sharded_rows.Over
    ) -> None:
        self.sizes, self.dim, self.reduce, self.over = sizes, dim, reduce, over
        self.begin()

    def begin(self) -> None:
        """Forget what was taken."""
        self.form: rule.Form | None = None
        self.alike: Alike | None = None
        self.parts = reductions.Subtrees(self.reduce, "reduce", "out", "what func returned")
        self.states: dict[int, Any] = {}  # of the users' reducers
        self.followed: list[Tensor] = []  # what they were given that transforms differentiate

    def take(self, p: int, out: trees.Tree, repeated: bool = False) -> rule.Outs:
        """The tensors of one microbatch, and whether they count."""
        if self.alike is not None and self.sizes[p] == self.sizes[0]:
            leaves, spec = ([out], _LEAF) if type(out) is Tensor else trees.flatten(out)
            if spec == self.alike.spec and all(map(_looks_like, leaves, self.alike.looks)):
                pairs = zip(leaves, self.alike.reductions, strict=True)
                return [
                    x if reduction == "concat" else self.cut(p, x, reduction)[0]
                    for x, reduction in pairs
                ], ()
        taken: list[Taken] = []
        keeps: list[Tensor] = []
        for n, part in enumerate(self.parts.of(out, f" for microbatch {p}")):
            if not reductions.is_reducer(part.reduction):
                for i, x in enumerate(part.leaves):
                    taken += self.take_leaf(p, n, i, x, keeps)
            elif not repeated:
                self.reduce_part(p, n, part.reduction, part.leaves[0])
        outs, cuts, groups = zip(*taken, strict=True) if taken else ((), (), ())
        if not repeated and p == 0:
            self.form = rule.Form((), cuts, groups)
            self.alike = self.alike_of(out)
        return [*outs], tuple(keeps)

    def alike_of(self, out: trees.Tree) -> "Alike | None":
        """The plan of microbatches that look like the first, if they are tensors and no more."""
        if torch.compiler.is_dynamo_compiling():
            return None
        looks = [look for part in self.parts.looks for look in part.leaves]
        chosen = [part.reduction for part in self.parts.looks for _ in part.leaves]
        plain = all(isinstance(look, reductions.Look) for look in looks) and "last" not in chosen
        return Alike(trees.flatten(out)[1], looks, chosen) if plain else None

    def take_leaf(self, p: int, n: int, i: int, x: Any, keeps: list[Tensor]) -> list[Taken]:
        """What is taken of leaf ``i`` below reduction ``n`` of one microbatch."""
        reduction, like = self.parts.looks[n].reduction, self.parts.looks[n].leaves[i]
        if isinstance(x, Weighted):
            total, weight = losses.terms_of(x, partial(self.parts.name_of, n, i))
            keeps.append(weighted.counts(total, weight))
            total = torch.where(keeps[-1], total, 0.0).double()
            return [(total, "whole", len(keeps)), (weight, "whole", 0)]
        if _is_number(x, reduction):
            x = torch.tensor(x, dtype=reductions.dtype_of_number(x))
        if isinstance(x, Tensor):
            self.parts.check(x, n, i, self.sizes[p], self.dim)
            if reduction == "last" and p + 1 < len(self.sizes):
                x = torch.zeros_like(x)  # which leads to nothing, in each run
            return [(*self.cut(p, x, reduction), 0)]
        if x != like:
            raise TypeError(
                f"{self.parts.name_of(n, i)} is {x!r}, but was {like!r} in an earlier microbatch; "
                "expected the same value in all of them, because it is not a tensor."
            )
        return []

    def cut(self, p: int, x: Tensor, reduction: str) -> tuple[Tensor, gathered.Cut]:
        """What is summed or laid end to end of a leaf, and which of these."""
        if reduction == "concat":
            return x, gathered.Rows(self.dim % x.dim(), over=self.over)
        if reduction in ("stack", "max", "min"):
            return x.unsqueeze(0), gathered.Rows(0, each=True)
        if reduction == "last":
            return x, "last"
        if reduction == "mean" and len(self.sizes) > 1:  # that of one microbatch stays, to the bit
            return x.to(trees.sum_dtype(x) if trees.continuous(x) else torch.float64) * self.sizes[
                p
            ], "whole"
        return x if trees.continuous(x) else x.to(torch.int64), "whole"

    def reduce_part(self, p: int, n: int, reducer: reductions.Reducer, part: trees.Tree) -> None:
        """Add what one microbatch gives to the state of a user's reducer."""
        part = trees.tree_map(torch.as_tensor, part)
        if not torch.compiler.is_dynamo_compiling():  # which differentiates the loop as it stands
            self.followed += filter(_is_differentiated, trees.tree_leaves(part))
            part = trees.tree_map(torch.detach, part)
        before = self.states[n] if p else reducer.init(part)
        weight = torch.tensor([float(self.sizes[p])], dtype=torch.float64)
        self.states[n] = reducer.update(
            before, trees.tree_map(lambda x: x.unsqueeze(0), part), weight
        )

    # At the end -----------------------------------------------------------------------------

    def finish(self, outs: Sequence[Tensor], operands: Sequence[Tensor]) -> trees.Tree:
        """The outputs for the whole batch, as functions of ``operands``."""
        results: list[Any] = []
        rest = iter(outs)
        for n, (reduction, looks, spec) in enumerate(self.parts.looks):
            if reductions.is_reducer(reduction):
                by = [*operands, *self.followed]
                result = reduction.finalize(self.states[n])
                results.append(trees.tree_map(lambda x, by=by: _without_gradient(x, by), result))
            else:
                results.append(
                    trees.unflatten(spec, [self.finish_leaf(reduction, x, rest) for x in looks])
                )
        return self.parts.replaced(results)

    def finish_leaf(self, reduction: str, like: Any, rest: Iterator[Tensor]) -> Any:
        """One leaf for the whole batch."""
        if isinstance(like, Weighted):
            total, weight = next(rest), next(rest)
            return losses.mean_value(total, losses.divisor(weight)).to(like.total)
        if not isinstance(like, reductions.Look) and not _is_number(like, reduction):
            return like
        x = next(rest)
        if reduction in ("max", "min"):
            return x.amax(0) if reduction == "max" else x.amin(0)
        if reduction == "mean" and len(self.sizes) > 1:
            return reductions.with_dtype_of(like, x / sum(self.sizes))
        return x


def _looks_like(x: Any, look: reductions.Look) -> bool:
    return isinstance(x, Tensor) and x.shape == look[0] and x.dtype is look[1]


def _is_differentiated(x: Tensor) -> bool:
    """Whether a tensor is followed, though what a function is given is not: through a capture."""
    tangents = functorch.forward_ad_active() and followed(x, functorch.transform_level() or 0)[0]
    return tangents or functorch.wants_gradient(x)


def _is_number(x: Any, reduction: str) -> bool:
    """Whether a leaf is a Python number that a reduction makes a tensor of."""
    return isinstance(x, (bool, int, float)) and reduction in ("sum", "mean", "max", "min")


# What has no derivative -------------------------------------------------------------------------


def _without_gradient(x: Any, operands: Sequence[Tensor]) -> Any:
    """A value that has no gradient, and says so where one is used."""
    if not isinstance(x, Tensor) or not trees.continuous(x) or torch.compiler.is_dynamo_compiling():
        return x
    return _Refusing.apply(False, x, *operands)


class _Refusing(Function):
    """A value, or a tangent like it, whose derivatives by the operands raise where they are used.

    A cotangent arrives only where it is used. A tangent always comes out, so it is a tensor with
    which nothing can be computed; as a function of the operands it refuses too.
    """

    @staticmethod
    def forward(tangent: bool, x: Tensor, *_: Tensor) -> Tensor:  # pyright: ignore
        x = x.detach().contiguous()  # so that its tangent is laid out as it is
        return torch.full_like(x, torch.nan).as_subclass(_Unreadable) if tangent else x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:  # pyright: ignore
        raise RuntimeError(_NO_GRADIENT)

    @staticmethod
    def jvp(ctx: Any, _tangent: Any, _x: Any, *tangents: Tensor | None) -> Any:  # pyright: ignore
        moving = [t for t in tangents if t is not None]
        return _Refusing.apply(True, *ctx.saved_tensors, *moving)

    @staticmethod
    def vmap(_info: Any, in_dims: Any, tangent: bool, *tensors: Tensor) -> Any:  # pyright: ignore
        return _Refusing.apply(tangent, *tensors), in_dims[1]


class _Unreadable(Tensor):
    """A tangent with which nothing can be computed. It may be handed on, and so may its views."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operations.compares_layouts(func):  # as forward AD does with every tangent
            return True
        if not func.is_view:
            raise RuntimeError(_NO_GRADIENT)
        x, *rest = args
        like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        return trees.tree_map(
            lambda view: view.as_subclass(cls), func(like, *rest, **(kwargs or {}))
        )


_NO_GRADIENT = (
    "a Reducer over microbatches has no gradient. Use 'concat', 'sum', 'mean', 'max', 'min', "
    "'stack', 'last' or Weighted, which have one. To differentiate your own reducer, use "
    "reduce='concat' or 'stack' and plain code on the rows. For a constant, use x.detach()."
)
