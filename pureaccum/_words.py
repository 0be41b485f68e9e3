"""How outputs are reduced over microbatches: a word for each leaf, or a reducer of a user's own."""

from collections.abc import Callable
from typing import Any, NamedTuple

import optree

from ._tree import NAMESPACE, Tree


WORDS = ("concat", "sum", "mean", "max", "min", "stack", "last")


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


def check_reduce(reduce: Tree, name: str = "reduce") -> None:
    """Check the words of a prefix tree."""
    for word in optree.tree_leaves(reduce, is_reducer, namespace=NAMESPACE):
        if not is_reducer(word) and word not in WORDS:
            expected = " or ".join(map(repr, WORDS))
            raise ValueError(f"{name} is {word!r}; expected {expected}, or a Reducer.")


def is_reducer(x: Any) -> bool:
    """Whether it is a ``Reducer``, which as a tuple would be a tree."""
    return isinstance(x, Reducer)


def below(reduce: Tree, tree: Tree, name: str, what: str) -> list[Any]:
    """The part of a tree that each word of a prefix tree is for."""
    parts: list[Any] = []
    try:  # by map, which torch's compiler takes where it takes no structure of a dict
        _map(lambda _word, part: parts.append(part), reduce, tree)
    except ValueError as error:
        raise ValueError(f"{name}={reduce!r} is no prefix of {what}: {error}") from error
    return parts


def replaced(reduce: Tree, parts: list[Any]) -> Tree:
    """A prefix tree with something in place of each word."""
    rest = iter(parts)
    return _map(lambda _word: next(rest), reduce)


def _map(func: Callable[..., Any], reduce: Tree, *trees: Tree) -> Tree:
    return optree.tree_map(func, reduce, *trees, is_leaf=is_reducer, namespace=NAMESPACE)
