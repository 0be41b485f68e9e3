"""How outputs are reduced over microbatches: a word for each leaf, or a reducer of a user's own.

The same words and reducers serve what a microbatched function returns, the aux of a loss, and the
gradients of single samples.
"""

from collections.abc import Callable
from operator import add
from typing import Any, NamedTuple, TypeGuard

import optree
import torch
from torch import Tensor

from .._base.trees import NAMESPACE, Tree, sum_dtype


class Reducer(NamedTuple):
    """A way to reduce what microbatches, or samples, give: a commutative monoid.

    The rule::

        state = init(like one)
        state = update(state, several, their weights)
        state = merge(state, another)
        result = finalize(state)

    Attributes:
        init: From a tree like what one of them gives, the state of none.
        update: ``update(state, values, weights)``: the state with some more, whose tensors are
            stacked along a new dim 0, and a weight for each: its rows, its samples, or what
            ``Weighted`` says.
        merge: One state of two.
        finalize: What is wanted, from a state.

    Example:
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

    References:
        ``microbatch`` and ``per_sample_grad``, which take it for ``reduce``.
    """

    init: Callable[[Tree], Any]
    update: Callable[[Any, Tree, Any], Any]
    merge: Callable[[Any, Any], Any]
    finalize: Callable[[Any], Any]


# What the words mean; None is the state of none.


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
    """What a word means, or the reducer itself."""
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
    """Whether it is a ``Reducer``, which as a tuple would be a tree."""
    return isinstance(x, Reducer)


def words_of(reduce: Tree) -> list[Any]:
    """The words of a prefix tree, and the reducers among them."""
    return optree.tree_leaves(reduce, is_reducer, namespace=NAMESPACE)


def below(reduce: Tree, tree: Tree) -> list[tuple[Any, Any]]:
    """Each word of a prefix tree, and the part of a tree that it is for; ValueError if it is none.

    By map: torch's compiler takes no structure of a dict, and sorts its keys in no other way.
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
