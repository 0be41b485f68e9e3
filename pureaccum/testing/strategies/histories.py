"""Ways to accumulate a batch: any cut, any order, any number of states, any tree of merges.

And what may go wrong on the way: a microbatch of NaN, inf, or numbers that overflow later.
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

    The rule: the lists of numbers whose sum is n, all above zero unless ``empty``.

    Args:
        n: How many samples.
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
    """Cut a batch into microbatches of those sizes.

    The rule: ``torch.split(x, sizes)`` of every tensor ``x``; the parts are views.

    Args:
        batch: A tree whose tensors have one row per sample; what is no tensor goes to each part.
        sizes: The samples of each microbatch, as ``compositions`` draws them: their sum is the
            samples of the batch, and some may be 0.

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

    It shrinks to merging one after the other: ``((0, 1), 2)``. One state is the int 0.

    Args:
        n: How many states, at least one.

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
    """Merge states as a tree says.

    The rule: an int ``i`` stands for ``states[i]``, and a pair ``(a, b)`` for ``merge`` of what
    ``a`` and ``b`` stand for.

    Args:
        tree: Nested pairs of positions in ``states``, as ``merge_trees`` draws them.
        states: The states to merge.
        merge: ``merge(a, b)`` gives one state of two.

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
    """A way to accumulate a batch.

    The rule: cut it, accumulate each group of microbatches into a state, and merge the states.

    Attributes:
        sizes: The samples of each microbatch, in the order of the batch.
        groups: For each state, which microbatches it accumulates, and in which order.
        merges: How the states are merged, as ``merge_trees`` draws it.

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
        """Accumulate a batch in that way.

        Args:
            acc: An accumulator of ``loss_fn(params, batch)``, without aux.
            params: What is differentiated.
            batch: A tree with ``sum(sizes)`` samples.
            donate: Whether each state is given up to the next ``update``.
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

    Microbatches may have no samples, come in any order, and go into any number of states, some of
    which may stay as ``init`` made them.

    Args:
        n: How many samples.

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
    """What goes wrong, and in which microbatch.

    Attributes:
        microbatch: The microbatch, counted from 0.
        kind: ``"nan"`` or ``"inf"``; or ``"overflow"``, the largest number of its dtype, which is
            finite where its square, or the sum of two, is not.

    Example:
        >>> fault = Fault(1, "inf")
        >>> fault.spoil([torch.tensor([1.0]), torch.tensor([2.0, 3.0])])
        [tensor([1.]), tensor([inf, inf])]
    """

    microbatch: int
    kind: Literal["nan", "inf", "overflow"]

    def spoil(self, microbatches: Sequence[trees.Tree]) -> list[trees.Tree]:
        """Replace all numbers in the floating-point tensors of one microbatch.

        Integers stay, tokens as well as a mask. Not every loss changes with them: where the weight
        is zero or the microbatch has no samples, it need not.

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
    """One microbatch that goes wrong; it shrinks to a NaN in the first.

    Args:
        parts: How many microbatches there are, at least one.

    Example:
        >>> from hypothesis import find
        >>> find(faults(3), lambda fault: fault.kind != "nan")
        Fault(microbatch=0, kind='inf')
    """
    if parts < 1:
        raise ValueError(f"parts is {parts}; expected at least one microbatch to spoil.")
    return st.builds(Fault, st.integers(0, parts - 1), st.sampled_from(["nan", "inf", "overflow"]))
