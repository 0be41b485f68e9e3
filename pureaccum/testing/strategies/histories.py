"""Ways to accumulate a batch: any cut, any order, any number of states, any tree of merges.

Faults can happen on the way: a microbatch of NaN, inf, or numbers that overflow later.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import torch
from hypothesis import strategies as st

from ..._base import trees
from ..._core import accumulator, ledger


MergeTree: TypeAlias = "int | tuple[MergeTree, MergeTree]"
State = TypeVar("State")


# Cuts ------------------------------------------------------------------------------------


def compositions(n: int, empty: bool = False) -> st.SearchStrategy[list[int]]:
    """Every way to cut n samples into microbatches; it shrinks to one microbatch.

    The rule: the lists of ints whose sum is n, all above zero unless ``empty``.

    Args:
        n: The number of samples.
        empty: Whether microbatches may have no samples.

    Example:
        >>> from hypothesis import find
        >>> find(compositions(3), lambda sizes: len(set(sizes)) > 1)
        [1, 2]
    """
    if n < 0:
        raise ValueError(f"n is {n}; expected a number of samples, at least 0.")
    if empty:
        cuts = st.lists(st.integers(0, n))
    elif n > 1:
        cuts = st.lists(st.integers(1, n - 1), unique=True)
    else:
        return st.just([n] * n)
    return cuts.map(lambda cuts: [b - a for a, b in itertools.pairwise([0, *sorted(cuts), n])])


def pieces(batch: trees.Tree, sizes: Sequence[int]) -> list[trees.Tree]:
    """Cut a batch into microbatches of the given sizes.

    The rule: ``torch.split(x, sizes)`` of every tensor ``x``; the parts are views.

    Args:
        batch: A tree whose tensors have one row per sample. Other leaves go to every part.
        sizes: The samples of each microbatch, as ``compositions`` draws them: some may be 0, and
            their sum is the number of samples.

    Example:
        >>> import torch
        >>> pieces({"x": torch.arange(3)}, [1, 0, 2])
        [{'x': tensor([0])}, {'x': tensor([], dtype=torch.int64)}, {'x': tensor([1, 2])}]
    """
    leaves, spec = trees.flatten(batch)
    columns = [
        x.split(list(sizes)) if isinstance(x, torch.Tensor) else [x] * len(sizes) for x in leaves
    ]
    return [trees.unflatten(spec, [column[i] for column in columns]) for i in range(len(sizes))]


# Merges ----------------------------------------------------------------------------------


def merge_trees(n: int) -> st.SearchStrategy[MergeTree]:
    """Every way to merge n states, two at a time and in any order, as nested pairs.

    It shrinks to merging one after another: ``((0, 1), 2)``. A single state is the int 0.

    Args:
        n: The number of states, at least one.

    Example:
        >>> from hypothesis import find
        >>> find(merge_trees(3), lambda tree: tree != ((0, 1), 2))
        (0, (1, 2))
    """
    if n < 1:
        raise ValueError(f"n is {n}; expected at least one state to merge.")
    return _merge_trees(n)


@st.composite
def _merge_trees(draw: st.DrawFn, n: int) -> MergeTree:
    def tree(states: list[int]) -> MergeTree:
        if len(states) == 1:
            return states[0]
        right = draw(st.integers(1, len(states) - 1))
        return tree(states[:-right]), tree(states[-right:])

    return tree(draw(st.permutations(range(n))))


def merge_along(
    tree: MergeTree, states: Sequence[State], merge: Callable[[State, State], State]
) -> State:
    """Merge states in the order of a merge tree.

    The rule: an int ``i`` is ``states[i]``, and a pair ``(a, b)`` is ``merge`` of the results of
    ``a`` and ``b``.

    Args:
        tree: Nested pairs of positions in ``states``, as ``merge_trees`` draws them.
        states: The states to merge.
        merge: ``merge(a, b)`` returns one state of two.

    Example:
        >>> merge_along(((0, 2), 1), ["a", "b", "c"], lambda a, b: f"({a} {b})")
        '((a c) b)'
    """
    if isinstance(tree, int):
        return states[tree]
    left, right = tree
    return merge(merge_along(left, states, merge), merge_along(right, states, merge))


# Histories -------------------------------------------------------------------------------


class History(NamedTuple):
    """One way to accumulate a batch.

    The rule: cut it, accumulate each group of microbatches into a state, and merge the states.

    Attributes:
        sizes: The samples of each microbatch, in the order of the batch.
        groups: For each state, the indices of its microbatches, in the order of their updates.
        merges: The order in which the states are merged, as ``merge_trees`` draws it.

    Example:
        >>> import torch
        >>> from pureaccum import accumulator
        >>> acc = accumulator(lambda w, x: (w * x).mean())
        >>> w, x = torch.tensor(1.0), torch.tensor([1.0, 2.0, 6.0])
        >>> history = History(sizes=[1, 2], groups=[[1], [0]], merges=(0, 1))
        >>> acc.finalize(history.run(acc, w, x))
        (tensor(3.), tensor(3., dtype=torch.float64))
    """

    sizes: list[int]
    groups: list[list[int]]
    merges: MergeTree

    def run(
        self,
        acc: accumulator.Accumulator,
        params: trees.Tree,
        batch: trees.Tree,
        donate: bool = False,
    ) -> ledger.AccumState:
        """Accumulate a batch in this way, and return the merged state.

        Args:
            acc: An accumulator of ``loss_fn(params, batch)``, without aux.
            params: The parameters to differentiate with respect to.
            batch: A tree with ``sum(sizes)`` samples.
            donate: Whether each ``update`` reuses the memory of the state before it.
        """
        parts = pieces(batch, self.sizes)
        states: list[ledger.AccumState] = []
        for group in self.groups:
            state = acc.init(params)
            for i in group:
                state = acc.update(state, params, parts[i], donate=donate)
            states.append(state)
        return merge_along(self.merges, states, acc.merge)


@st.composite
def histories(draw: st.DrawFn, n: int) -> History:  # noqa: D417
    """Every way to accumulate n samples; it shrinks to one microbatch and one state.

    Microbatches may be empty, come in any order, and go into any number of states. Some states may
    receive no microbatch.

    Args:
        n: The number of samples.

    Example:
        >>> from hypothesis import find
        >>> find(histories(2), lambda history: len(history.groups) == 2)
        History(sizes=[2], groups=[[], [0]], merges=(0, 1))
    """
    sizes = draw(compositions(n, empty=True))
    rest = iter(draw(st.permutations(range(len(sizes)))))
    counts = draw(compositions(len(sizes), empty=True))
    groups = [list(itertools.islice(rest, count)) for count in counts]
    return History(sizes, groups, draw(merge_trees(len(groups))))


# Faults ----------------------------------------------------------------------------------


class Fault(NamedTuple):
    """A fault in the data of one microbatch.

    Attributes:
        microbatch: The index of the microbatch, from 0.
        kind: ``"nan"``, ``"inf"`` or ``"overflow"``. The last is the largest number of the dtype,
            which is finite, but whose square, or sum with itself, is not.

    Example:
        >>> fault = Fault(1, "inf")
        >>> fault.spoil([torch.tensor([1.0]), torch.tensor([2.0, 3.0])])
        [tensor([1.]), tensor([inf, inf])]
    """

    microbatch: int
    kind: Literal["nan", "inf", "overflow"]

    def spoil(self, microbatches: Sequence[trees.Tree]) -> list[trees.Tree]:
        """Return microbatches in which the floating-point numbers of the faulty one are replaced.

        Integers stay, both tokens and masks. The loss may still be finite, for example if the
        weight is zero or the microbatch is empty.

        Args:
            microbatches: Trees; none is changed.
        """

        def spoilt(x: Any) -> Any:
            if not isinstance(x, torch.Tensor) or not (x.is_floating_point() or x.is_complex()):
                return x
            number = {"nan": torch.nan, "inf": torch.inf, "overflow": torch.finfo(x.dtype).max}
            return torch.full_like(x, number[self.kind])

        new = list(microbatches)
        new[self.microbatch] = trees.tree_map(spoilt, new[self.microbatch])
        return new


def faults(parts: int) -> st.SearchStrategy[Fault]:
    """Faults in one of several microbatches; they shrink to a NaN in the first.

    Args:
        parts: The number of microbatches, at least one.

    Example:
        >>> from hypothesis import find
        >>> find(faults(3), lambda fault: fault.kind != "nan")
        Fault(microbatch=0, kind='inf')
    """
    if parts < 1:
        raise ValueError(f"parts is {parts}; expected at least one microbatch to spoil.")
    return st.builds(Fault, st.integers(0, parts - 1), st.sampled_from(["nan", "inf", "overflow"]))
