"""How values are reduced over microbatches: a word for each leaf, or a reducer of the user's own.

The same words and reducers serve what a microbatched function returns, the aux of a loss, and the
gradients of single samples. The aux of a stream is folded as the microbatches come: ``"mean"``
weighs each of them as the loss does, and only ``"concat"`` and ``"stack"`` keep what they saw.
"""

from collections.abc import Callable
from operator import add
from typing import Any, NamedTuple, TypeGuard

import optree
import torch
from torch import Tensor

from .._base.dtensors import NOWHERE, Over, is_sharded, join_rows, local
from .._base.trees import (
    NAMESPACE,
    Tree,
    flatten,
    paths,
    sum_dtype,
    tree_leaves,
    tree_map,
    unflatten,
)
from .loss import Weighted, counts, divisor, dtype_of_mean, is_weighted, mean_value, terms_of
from .weights import Microbatch


class Reducer(NamedTuple):
    """A way to reduce what microbatches, or samples, give: a commutative monoid.

    The rule, where ``microbatch`` or ``per_sample_grad`` takes it for ``reduce``::

        state = init(like one)
        state = update(state, several, their weights)
        state = merge(state, another)
        result = finalize(state)

    Attributes:
        init: From a tree like what one of them gives, the state before the first.
        update: ``update(state, values, weights)``: the state with some more values, whose tensors
            are stacked along a new dim 0, and a weight for each: its rows, its samples, or what
            ``Weighted`` says.
        merge: One state of two.
        finalize: The result, from a state. That of a microbatched function may be ignored, compared
            or detached under every transform; whatever uses its derivative raises.

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


# What the words mean. None is the state before the first.


def _folding(
    found: Callable[[Tensor, Tensor], Any],
    merge: Callable[[Any, Any], Any],
    finalize: Callable[[Any], Any] = lambda state: state,
) -> Reducer:
    def merged(a: Any, b: Any) -> Any:
        return b if a is None else a if b is None else merge(a, b)

    return Reducer(
        lambda _like: None,
        lambda state, values, weights: merged(state, found(values, weights)),
        merged,
        finalize,
    )


def _summed(values: Tensor, _: Any = None) -> Tensor:
    return values.to(sum_dtype(values)).sum(0)


def _weighed(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    terms = values.to(sum_dtype(values))
    each = weights.to(terms.device).view(-1, *[1] * (terms.dim() - 1))
    return torch.where(each != 0, terms * each, 0.0).sum(0), weights.sum()


WORDS: dict[str, Reducer] = {
    "concat": _folding(lambda x, _: [x.flatten(0, 1)], add, torch.cat),
    "sum": _folding(_summed, add),
    "mean": _folding(
        _weighed,
        lambda a, b: (a[0] + b[0], a[1] + b[1]),
        lambda state: state[0] / state[1].to(state[0].device),
    ),
    "max": _folding(lambda x, _: x.amax(0), torch.maximum),
    "min": _folding(lambda x, _: x.amin(0), torch.minimum),
    "stack": _folding(lambda x, _: [x], add, torch.cat),
    "last": _folding(lambda x, _: x[-1], lambda _, b: b),
}


def reducer_of(word: Any) -> Reducer:
    """The reducer that a word means, or the reducer itself."""
    return word if is_reducer(word) else WORDS[word]


def check_reduce(reduce: Tree, name: str = "reduce") -> None:
    """Check the words of a prefix tree."""
    if not words_of(reduce):
        raise ValueError(
            f"{name} is {reduce!r}, which holds no word; expected one, or a tree of them."
        )
    for word in words_of(reduce):
        if not is_reducer(word) and (not isinstance(word, str) or word not in WORDS):
            expected = " or ".join(map(repr, WORDS))
            raise ValueError(f"{name} is {word!r}; expected {expected}, or a Reducer.")


def is_reducer(x: Any) -> TypeGuard[Reducer]:
    """Whether something is a ``Reducer``, which as a tuple would be a tree."""
    return isinstance(x, Reducer)


def words_of(reduce: Tree) -> list[Any]:
    """The words of a prefix tree, and the reducers among them."""
    return optree.tree_leaves(reduce, is_reducer, namespace=NAMESPACE)


def below(reduce: Tree, tree: Tree) -> list[tuple[Any, Any]]:
    """Each word of a prefix tree, and the part of a tree that it is for; ValueError if none fits.

    With ``tree_map``: torch's compiler takes no treespec of a dict.
    """
    pairs: list[tuple[Any, Any]] = []
    _map(lambda word, part: pairs.append((word, part)), reduce, tree)
    return pairs


def replaced(reduce: Tree, parts: list[Any]) -> Tree:
    """A prefix tree with something in place of each word."""
    rest = iter(parts)
    return _map(lambda _word: next(rest), reduce)


def _map(func: Callable[..., Any], reduce: Tree, *trees: Tree) -> Tree:
    return optree.tree_map(func, reduce, *trees, is_leaf=is_reducer, namespace=NAMESPACE)


# The aux of a loss ---------------------------------------------------------------------------


class AuxState(NamedTuple):
    """What has been reduced so far."""

    reduction: Tree
    spec: optree.PyTreeSpec  # of the aux
    states: list[Any]  # one for each leaf, or for each Reducer
    likes: list[Any]  # for each, what the first microbatch had there
    specs: list[tuple[Any, Any]]  # each word, and the structure of what is below it
    over: Over = NOWHERE  # the ranks of which each cuts its own rows


class Stack(NamedTuple):
    """The aux of several microbatches: their tensors stacked along a new dim 0."""

    spec: optree.PyTreeSpec
    leaves: list[Any]
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
    weight = added.weight
    if isinstance(weight, Tensor):
        return weight
    return torch.full_like(local(added.value), weight, dtype=torch.float64)


def stack_of_one(aux: Tree, share: Tensor, finite: Tensor | None) -> Stack:
    """The aux of a single microbatch."""
    leaves, spec = flatten(aux)
    leaves = [x.unsqueeze(0) if isinstance(x, Tensor) else x for x in leaves]
    return Stack(spec, leaves, share.unsqueeze(0), None if finite is None else finite.unsqueeze(0))


def fold_stack(
    state: AuxState | None, stack: Stack, rows: int, reduction: Tree, over: Over = NOWHERE
) -> AuxState:
    """The state with the aux of several more microbatches, each of so many rows."""
    tree = unflatten(stack.spec, stack.leaves)
    if state is None:
        pairs = _below(reduction, tree)
    elif torch.compiler.is_dynamo_compiling() or stack.spec == state.spec:  # 2.11 compiles no ==
        pairs = below(reduction, tree)
    else:
        raise ValueError(
            f"the loss returned an aux of another structure than before: {stack.spec} after "
            f"{state.spec}; what is reduced over microbatches has one structure."
        )
    states: list[Any] = []
    likes: list[Any] = []
    specs: list[Any] = []
    names = iter(paths(optree.tree_flatten(tree, is_weighted, namespace=NAMESPACE)[1], "aux"))
    for word, part in pairs:
        leaves, spec = optree.tree_flatten(part, is_weighted, namespace=NAMESPACE)
        specs.append((word, spec))
        named = [*zip(leaves, names, strict=False)]
        if is_reducer(word):
            named = [(tree_map(lambda x: _numbers(x, stack.share), part), "")]
        for leaf, name in named:
            before = None if state is None else state.states[len(states)]
            like = leaf if state is None else state.likes[len(likes)]
            states.append(_reduced(before, leaf, like, word, stack, rows, name))
            likes.append(like)
    return AuxState(
        reduction=reduction, spec=stack.spec, states=states, likes=likes, specs=specs, over=over
    )


def finish_aux(state: AuxState) -> Tree:
    """The reduced aux."""
    done = iter(zip(state.states, state.likes, strict=True))
    parts: list[Any] = []
    for word, spec in state.specs:
        if is_reducer(word):
            parts.append(word.finalize(next(done)[0]))
        else:
            pairs = [next(done) for _ in range(spec.num_leaves)]
            parts.append(unflatten(spec, [_finished(word, *it, state.over) for it in pairs]))
    return replaced(state.reduction, parts)


def _reduced(state: Any, leaf: Any, like: Any, how: Any, stack: Stack, rows: int, name: str) -> Any:
    reducer = reducer_of(how)
    if isinstance(leaf, Weighted):
        return _terms(state, leaf, stack, name)
    if is_reducer(how):
        first = tree_map(lambda x: x[0], leaf)
        return reducer.update(reducer.init(first) if state is None else state, leaf, stack.share)
    if how != "concat" and is_sharded(leaf):
        leaf = leaf.full_tensor()
    if how == "last" and not isinstance(leaf, Tensor):
        return leaf
    _check(leaf, like, how, rows, name)
    leaf = _numbers(leaf, stack.share)
    if stack.finite is not None and how in ("sum", "max", "min"):
        finite = stack.finite.view(-1, *[1] * (leaf.dim() - 1))
        leaf = torch.where(finite, leaf, _neutral(leaf, how))
    return reducer.update(state, leaf, stack.share)


def _check(leaf: Any, like: Any, word: str, rows: int, name: str) -> None:
    """Raise for a leaf that a word cannot reduce."""
    shape, wrong = leaf.shape[1:] if isinstance(leaf, Tensor) else (), ""
    if word in ("concat", "stack") and not isinstance(leaf, Tensor):
        wrong = f"is a {type(leaf).__name__}"
    elif word == "concat" and shape[:1] != (rows,):
        wrong = f"has shape {tuple(shape)} for a microbatch of {rows} rows"
    if wrong:
        expected = "one row per sample" if word == "concat" else "a tensor"
        raise ValueError(
            f"{name} {wrong}, and aux_reduction={word!r} needs {expected}. Name what is meant in "
            "aux_reduction: 'sum', 'mean' (weighted as the loss is), 'stack' (one per microbatch) "
            "or 'last', for all of aux or as a tree of words."
        )
    if not isinstance(leaf, (Tensor, int, float)):
        raise TypeError(
            f"{name} is a {type(leaf).__name__}, which has no {word}; name 'last' for it in "
            "aux_reduction."
        )
    at = 1 if word == "concat" else 0
    if word != "last" and isinstance(like, Tensor) and like.shape[1 + at :] != shape[at:]:
        raise ValueError(
            f"{name} has shape {tuple(shape)} after {tuple(like.shape[1:])} in a microbatch "
            f"before, and aux_reduction={word!r} needs one shape. A leaf with one row per sample "
            "takes 'concat'."
        )


def _terms(state: Any, leaf: Weighted, stack: Stack, name: str) -> tuple[Any, Any]:
    """The total and the weight of a mean that has a weight of its own, summed."""
    its: Any = leaf
    if not all(isinstance(x, (Tensor, int, float)) for x in its):
        terms_of(leaf, name)  # says what is the matter
    totals, weights = state or (0.0, 0.0)
    each = zip(*[_numbers(x, stack.share) for x in leaf], strict=True)
    for i, (total, weight) in enumerate(each):
        total, weight = terms_of(Weighted(total, weight), name)
        keep = counts(total, weight)
        if stack.finite is not None:
            keep, weight = keep & stack.finite[i], torch.where(stack.finite[i], weight, 0.0)
        totals = totals + torch.where(keep, total, 0.0).double()
        weights = weights + weight
    return totals, weights


def _neutral(leaf: Tensor, how: str) -> Any:
    """The value that changes nothing, in place of one that is skipped."""
    if how == "sum" or leaf.dtype == torch.bool:
        return torch.zeros_like(leaf) if how != "min" else torch.ones_like(leaf)
    if leaf.is_floating_point():
        return torch.full_like(leaf, -torch.inf if how == "max" else torch.inf)
    limits = torch.iinfo(leaf.dtype)
    return torch.full_like(leaf, limits.min if how == "max" else limits.max)


def _numbers(leaf: Any, like: Tensor) -> Any:
    """A leaf as a tensor; a Python number as one number for each microbatch."""
    if isinstance(leaf, Tensor):
        return leaf
    dtype = torch.float64 if isinstance(leaf, float) else torch.int64
    return torch.full(like.shape, leaf, dtype=dtype, device=like.device)


def _finished(how: str, state: Any, like: Any, over: Over) -> Any:
    if isinstance(like, Weighted):
        return mean_value(state[0], divisor(state[1])).to(dtype_of_mean(like))
    if how == "last" and not isinstance(like, Tensor):
        return state
    if how == "concat" and len(state) > 1 and over != NOWHERE and is_sharded(state[0]):
        return join_rows(state, over)
    result = reducer_of(how).finalize(state)
    if how in ("sum", "mean") and isinstance(like, Tensor):
        kind = like.dtype
        return result.to(kind) if kind.is_floating_point or kind.is_complex else result
    return result


def _below(reduction: Tree, aux: Tree) -> list[tuple[Any, Any]]:
    try:
        return below(reduction, aux)
    except ValueError as error:
        if not tree_leaves(aux):
            raise ValueError(
                f"aux_reduction={reduction!r} is a tree, and the loss returned no aux that has "
                "leaves. With has_aux=True it returns some beside the loss; without, leave "
                "aux_reduction out."
            ) from error
        raise ValueError(
            f"aux_reduction={reduction!r} is no prefix of the aux that the loss returned: {error}"
        ) from error
