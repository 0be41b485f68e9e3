"""How values are reduced over microbatches: by a named reduction, or by a custom reducer.

The same reductions apply to the outputs of a microbatched function, the aux of a loss, and the
gradients of single samples. The aux of a stream is folded microbatch by microbatch: ``"mean"``
weights each as the loss does, and only ``"concat"`` and ``"stack"`` store the values of all.
"""

from collections.abc import Callable
from functools import partial
from operator import add
from typing import Any, NamedTuple, TypeGuard

import optree
import torch
from torch import Tensor

from .._base import dtensors, reprs, sharded_rows
from .._base.sharded_rows import NOWHERE, Over
from .._base.trees import NAMESPACE, Tree, paths, sum_dtype, tree_leaves, tree_map, unflatten
from . import losses
from .weighted import Weighted, counts
from .weights import Microbatch


class Reducer(NamedTuple):
    """A custom reduction over microbatches or samples: a commutative monoid.

    The rule, where ``microbatch`` or ``per_sample_grad`` takes it for ``reduce``::

        state = init(like one)
        state = update(state, several, their weights)
        state = merge(state, another)
        result = finalize(state)

    Attributes:
        init: ``init(like)`` returns the first state, for a tree like the value of one.
        update: ``update(state, values, weights)`` returns the state with more values. Their tensors
            are stacked along a new dim 0. Each has a weight: its samples, or the weight of
            ``Weighted``.
        merge: ``merge(a, b)`` returns one state of two.
        finalize: ``finalize(state)`` returns the result. You can ignore, compare or detach the
            result of a microbatched function under any transform. Using its derivative raises.

    Example:
        >>> import torch
        >>> from pureaccum import microbatch
        >>> longest = Reducer(
        ...     lambda like: like.new_zeros(()),
        ...     lambda state, values, weights: torch.maximum(state, values.norm(dim=1).amax()),
        ...     torch.maximum,
        ...     lambda state: state,
        ... )
        >>> microbatch(lambda x: x.sum(0), microbatch_size=1, batch_argnums=0, reduce=longest)(
        ...     torch.tensor([[3.0, 4.0], [1.0, 0.0]])
        ... )
        tensor(5.)
    """

    init: Callable[[Tree], Any]
    update: Callable[[Any, Tree, Any], Any]
    merge: Callable[[Any, Any], Any]
    finalize: Callable[[Any], Any]

    __repr__ = reprs.of_record


class Fold(NamedTuple):
    """What a reduction makes of aux, whose values come stacked along dim 0, each with a weight."""

    of: Callable[[Tensor, Tensor], Any]
    merge: Callable[[Any, Any], Any]
    end: Callable[[Any], Any] = lambda state: state


def _weighed(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    terms = values.to(sum_dtype(values))
    each = weights.to(terms.device).view(-1, *[1] * (terms.dim() - 1))
    return torch.where(each != 0, terms * each, 0.0).sum(0), weights.sum()


REDUCTIONS = {
    "concat": Fold(lambda x, _: [x.flatten(0, 1)], add, torch.cat),
    "sum": Fold(lambda x, _: x.to(sum_dtype(x)).sum(0), add),
    "mean": Fold(
        _weighed,
        lambda a, b: (a[0] + b[0], a[1] + b[1]),
        lambda state: state[0] / state[1].to(state[0].device),
    ),
    "max": Fold(lambda x, _: x.amax(0), torch.maximum),
    "min": Fold(lambda x, _: x.amin(0), torch.minimum),
    "stack": Fold(lambda x, _: [x], add, torch.cat),
    "last": Fold(lambda x, _: x[-1], lambda _, b: b),
}


def check_reduce(reduce: Tree, name: str = "reduce") -> None:
    """Check the reductions of a prefix tree."""
    reductions: list[Any] = optree.tree_leaves(reduce, is_reducer, namespace=NAMESPACE)
    if not reductions:
        raise ValueError(f"{name} is {reduce!r}; expected a reduction, or a tree of reductions.")
    for reduction in reductions:
        known = isinstance(reduction, str) and reduction in REDUCTIONS
        if not (known or is_reducer(reduction)):
            expected = " or ".join(map(repr, REDUCTIONS))
            raise ValueError(f"{name} is {reduction!r}; expected {expected}, or a Reducer.")


def is_reducer(x: Any) -> TypeGuard[Reducer]:
    """Whether something is a ``Reducer``, which as a tuple would be a tree."""
    return isinstance(x, Reducer)


# What is below the reductions ------------------------------------------------------------------


class Look(NamedTuple):
    """What a tensor looked like in the first microbatch."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Subtree(NamedTuple):
    """The leaves below a reduction: a ``Weighted`` is one, and so is all that a Reducer takes."""

    reduction: Any
    leaves: list[Any]
    spec: optree.PyTreeSpec


class Subtrees:
    """What is returned for each microbatch, in parts: one for each reduction of a prefix tree.

    Attributes:
        looks: The parts of the first microbatch, with a ``Look`` in place of each tensor: those of
            all others have to be like them.
        stacked: Whether tensors come stacked along dim 0. Then dtypes may differ.
    """

    def __init__(
        self, reduce: Tree, option: str, root: str, returned: str, stacked: bool = False
    ) -> None:
        self.reduce, self.stacked = reduce, stacked
        self.option, self.root, self.returned = option, root, returned  # as errors call them
        self.looks: list[Subtree] = []

    def of(self, tree: Tree, where: str = "") -> list[Subtree]:
        """What is below each reduction; by a map, since dynamo takes no treespec of a dict."""
        parts: list[Subtree] = []

        def take(reduction: Any, part: Tree) -> None:
            is_leaf = (lambda _: True) if isinstance(reduction, Reducer) else losses.is_weighted
            flat = optree.tree_flatten(part, is_leaf, namespace=NAMESPACE)
            parts.append(Subtree(reduction, *flat))

        try:
            _map(take, self.reduce, tree)
        except ValueError as error:
            raise ValueError(
                f"{self.option}={self.reduce!r} is not a prefix of {self.returned}: {error}"
            ) from error
        if not self.looks:
            for reduction, leaves, spec in parts:  # what a Reducer takes has no look
                looks = [None if isinstance(reduction, Reducer) else self.look(x) for x in leaves]
                self.looks.append(Subtree(reduction, looks, spec))
        elif not torch.compiler.is_dynamo_compiling():  # 2.11 compiles no ==
            for part, like in zip(parts, self.looks, strict=True):
                if part.spec != like.spec or _means(part) != _means(like):
                    raise ValueError(
                        f"{self.returned} has another structure{where} than before: {part.spec} "
                        f"after {like.spec}; expected one structure for all microbatches."
                    )
        return parts

    def look(self, x: Any) -> Any:
        """What is kept of a leaf: no tensor, and of a ``Weighted`` the dtype of its mean."""
        if isinstance(x, Weighted):
            return Weighted(losses.dtype_of_mean(x), 0)  # pyright: ignore
        return Look(tuple(x.shape[self.stacked :]), x.dtype) if isinstance(x, Tensor) else x

    def check(self, x: Any, n: int, i: int, rows: int, dim: int = 0) -> None:
        """Raise where reduction ``n`` cannot reduce leaf ``i`` below it, or would broadcast it."""
        reduction, like, its = self.looks[n].reduction, self.looks[n].leaves[i], self.look(x)
        self.check_alone(x, its, n, i, rows, dim)
        if reduction == "last" or not (isinstance(its, Look) and isinstance(like, Look)):
            return
        shape, before = [*its.shape], [*like.shape]
        if reduction == "concat" and len(shape) == len(before):
            del shape[dim], before[dim]
        kind = "shape" if shape != before else "" if its.dtype == like.dtype else "dtype"
        if kind == "shape" or (kind and not self.stacked):
            raise ValueError(
                f"{self.name_of(n, i)} has {kind} {getattr(its, kind)}, but {getattr(like, kind)} "
                f"in an earlier microbatch. {self.option}={reduction!r} needs one {kind} in all "
                "of them. Use 'concat' for a leaf with one row per sample."
            )

    def check_alone(self, x: Any, its: Any, n: int, i: int, rows: int, dim: int) -> None:
        """Raise where the reduction cannot reduce a leaf of this look, whatever it was before."""
        reduction, wrong = self.looks[n].reduction, ""
        if reduction in ("concat", "stack") and not isinstance(its, Look):
            wrong = f"is {reprs.kind(x)}"
        elif reduction == "concat":
            dims = len(its.shape)
            if not (-dims <= dim < dims and its.shape[dim] == rows):
                wrong = f"has shape {its.shape} for a microbatch of {rows} samples"
        if wrong:
            needed = f"one row per sample along dim {dim}" if reduction == "concat" else "a tensor"
            raise ValueError(
                f"{self.name_of(n, i)} {wrong}, but {self.option}={reduction!r} needs {needed}. "
                f"Pass another reduction in {self.option}, for all leaves or as a tree: 'sum', "
                "'mean', 'max', 'min', 'stack' (one entry per microbatch) or 'last'. Or return "
                "Weighted(total, weight)."
            )
        if not isinstance(its, (Look, int, float)):
            raise TypeError(
                f"{self.name_of(n, i)} is {reprs.kind(x)}, which has no {reduction}. Pass "
                f"'last' for it in {self.option}."
            )

    def name_of(self, n: int, i: int) -> str:
        """The path to leaf ``i`` below reduction ``n``, as a user would write it."""
        reductions = optree.tree_structure(self.reduce, is_reducer, namespace=NAMESPACE)
        return paths(self.looks[n].spec, paths(reductions, self.root)[n])[i]

    def replaced(self, results: list[Any]) -> Tree:
        """The prefix tree, with a result in place of each reduction."""
        rest = iter(results)
        return _map(lambda _: next(rest), self.reduce)


def _map(func: Callable[..., Any], reduce: Tree, *trees: Tree) -> Tree:
    return optree.tree_map(func, reduce, *trees, is_leaf=is_reducer, namespace=NAMESPACE)


def _means(part: Subtree) -> list[bool]:
    return [*map(losses.is_weighted, part.leaves)]


def dtype_of_number(x: float) -> torch.dtype:
    """The dtype of a Python number, where a reduction makes a tensor of it."""
    return torch.float64 if isinstance(x, float) else torch.int64


def with_dtype_of(like: Any, x: Tensor) -> Tensor:
    """A sum or a mean in the dtype of its terms, unless these are integers."""
    wide = isinstance(like, Look) and (like.dtype.is_floating_point or like.dtype.is_complex)
    return x.to(like.dtype) if wide else x


# The aux of a loss ---------------------------------------------------------------------------


class AuxState(NamedTuple):
    """What has been reduced so far."""

    parts: Subtrees
    states: list[list[Any]]  # of the leaves of each part
    over: Over  # the ranks of which each cuts its own samples


class Stack(NamedTuple):
    """The aux of several microbatches: their tensors stacked along a new dim 0."""

    aux: Tree
    share: Tensor  # of each in a mean
    finite: Tensor | None  # whether each is, where those that are not are left out


def fold_aux(
    state: AuxState | None,
    added: Microbatch,
    rows: int,
    reduction: Tree,
    skipping: bool,
    over: Over = NOWHERE,
) -> AuxState:
    """The state with the aux of one more microbatch."""
    stack = stack_of_one(added.aux, share_of(added), added.finite if skipping else None)
    return fold_stack(state, stack, rows, reduction, over)


def share_of(added: Microbatch) -> Tensor:
    """What a microbatch weighs in a mean of its aux."""
    weight = torch.nan if isinstance(added.terms, Tensor) else added.weight  # it has several
    x = dtensors.local(added.value)
    return weight if isinstance(weight, Tensor) else torch.full_like(x, weight, dtype=torch.float64)


def stack_of_one(aux: Tree, share: Tensor, finite: Tensor | None) -> Stack:
    """The aux of a single microbatch."""
    aux = tree_map(lambda x: x.unsqueeze(0) if isinstance(x, Tensor) else x, aux)
    return Stack(aux, share.unsqueeze(0), None if finite is None else finite.unsqueeze(0))


def fold_stack(
    state: AuxState | None,
    stack: Stack,
    rows: int,
    reduction: Tree,
    over: Over = NOWHERE,
) -> AuxState:
    """The state with the aux of several more microbatches, each of so many samples."""
    if state is not None:
        parts = state.parts.of(stack.aux)
    else:
        returned = "the aux that the loss returned"
        if not tree_leaves(stack.aux):
            returned = "an aux without leaves (with has_aux=True, a loss returns (loss, aux))"
        made = Subtrees(reduction, "aux_reduction", "aux", returned, stacked=True)
        parts = made.of(stack.aux)
        state = AuxState(made, [[None] * len(part.leaves) for part in parts], over)
    states = [
        [_reduced(state, n, i, leaf, stack, rows) for i, leaf in enumerate(part.leaves)]
        for n, part in enumerate(parts)
    ]
    return AuxState(state.parts, states, state.over)


def finish_aux(state: AuxState) -> Tree:
    """The reduced aux."""
    results: list[Any] = []
    for (reduction, looks, spec), states in zip(state.parts.looks, state.states, strict=True):
        pairs = zip(states, looks, strict=True)
        results.append(unflatten(spec, [_finished(reduction, *pair, state.over) for pair in pairs]))
    return state.parts.replaced(results)


def _reduced(state: AuxState, n: int, i: int, leaf: Any, stack: Stack, rows: int) -> Any:
    """What has been reduced of leaf ``i`` below reduction ``n``, with several more values."""
    parts, before = state.parts, state.states[n][i]
    reduction = parts.looks[n].reduction
    if is_reducer(reduction):
        leaf = tree_map(lambda x: _numbers(x, stack.share), leaf)
        before = reduction.init(tree_map(lambda x: x[0], leaf)) if before is None else before
        return reduction.update(before, leaf, stack.share)
    if isinstance(leaf, Weighted):
        return _terms(before, leaf, stack, partial(parts.name_of, n, i))
    if reduction == "last" and not isinstance(leaf, Tensor):
        return leaf
    if reduction != "concat" and dtensors.is_sharded(leaf):
        leaf = leaf.full_tensor()
    parts.check(leaf, n, i, rows)
    leaf = _numbers(leaf, stack.share)
    if stack.finite is not None and reduction in ("sum", "max", "min"):
        finite = stack.finite.view(-1, *[1] * (leaf.dim() - 1))
        leaf = torch.where(finite, leaf, _neutral(leaf.dtype, reduction))
    fold = REDUCTIONS[reduction]
    more = fold.of(leaf, stack.share)
    return more if before is None else fold.merge(before, more)


def _terms(state: Any, leaf: Weighted, stack: Stack, name: Callable[[], str]) -> Any:
    """The total and the weight of a mean that has a weight of its own, summed."""
    its: Any = leaf
    if not all(isinstance(x, (Tensor, int, float)) for x in its):
        losses.terms_of(leaf, name)  # says what is the matter
    totals, weights = state or (0.0, 0.0)
    each = zip(*[_numbers(x, stack.share) for x in leaf], strict=True)
    for i, (total, weight) in enumerate(each):
        total, weight = losses.terms_of(Weighted(total, weight), name)
        keep = counts(total, weight)
        if stack.finite is not None:
            keep, weight = keep & stack.finite[i], torch.where(stack.finite[i], weight, 0.0)
        totals = totals + torch.where(keep, total, 0.0).double()
        weights = weights + weight
    return totals, weights


def _neutral(dtype: torch.dtype, reduction: str) -> Any:
    """The value that changes nothing, in place of one that is skipped."""
    if reduction == "sum":
        return 0
    if dtype == torch.bool:
        return reduction == "min"
    if dtype.is_floating_point:
        return -torch.inf if reduction == "max" else torch.inf
    return torch.iinfo(dtype).min if reduction == "max" else torch.iinfo(dtype).max


def _numbers(leaf: Any, like: Tensor) -> Any:
    """A leaf as a tensor; a Python number as one number for each microbatch."""
    if isinstance(leaf, Tensor):
        return leaf
    return torch.full(like.shape, leaf, dtype=dtype_of_number(leaf), device=like.device)


def _finished(reduction: Any, state: Any, like: Any, over: Over) -> Any:
    if is_reducer(reduction):
        return reduction.finalize(state)
    if isinstance(like, Weighted):
        return losses.mean_value(state[0], losses.divisor(state[1])).to(like.total)
    if reduction == "last" and not isinstance(like, Look):
        return state
    joined = reduction == "concat" and len(state) > 1
    if joined and over != NOWHERE and dtensors.is_sharded(state[0]):
        return sharded_rows.join_rows(state, over)
    result = REDUCTIONS[reduction].end(state)
    return with_dtype_of(like, result) if reduction in ("sum", "mean") else result
