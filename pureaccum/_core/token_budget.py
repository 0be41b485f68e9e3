"""Group samples so that no microbatch has more tokens than a limit.

    the longest samples first, each into the fullest microbatch that has room for it
    as many microbatches as that makes, or a few more, so that each rank has the same number
    then again, each sample into the emptiest microbatch, if all of them fit that way too

The first pass makes few microbatches, the last one evens out their work. The host does it all.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heapify, heapreplace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base import checks, reprs


Bin = list[int]  # the samples of a microbatch


class Cut(NamedTuple):
    """A grouping of samples into microbatches: their order, and the samples of each microbatch.

    Attributes:
        order: An int64 tensor with the indices of the samples: cut ``x[order]`` by ``sizes``.
        sizes: The samples of each microbatch, for ``microbatches`` or ``make_step``.

    Example:
        >>> order, sizes = cut([5, 2, 3], max_tokens=6)
        >>> order.tolist(), sizes
        ([0, 1, 2], [1, 2])
    """

    order: Tensor
    sizes: list[int]

    __repr__ = reprs.of_record


def cut(
    lengths: Sequence[int] | Tensor,
    *,
    max_tokens: int,
    ranks: int | None = None,
    padded: bool = False,
) -> Any:
    """Group samples into microbatches of at most ``max_tokens`` tokens.

    The rule: best fit, the longest samples first. Then, with that number of microbatches, each
    sample goes into the one with the fewest tokens, if all samples fit that way too.

    Every sample is in exactly one microbatch, and samples keep their order within it. The gradient
    is that of any other cut, and of the whole batch.

    Args:
        lengths: The tokens of each sample. A tensor on a device is copied to the host, which waits.
        max_tokens: The most tokens that a microbatch may have.
        ranks: The number of ranks that share the samples. Each rank gets the same number of
            microbatches. Some are empty if there are too few samples.
        padded: Whether samples are padded to the longest of their microbatch. If so, tokens are
            samples times that length. Otherwise they are the sum of the lengths.

    Returns:
        A ``Cut``; with ``ranks`` a list with one for each rank, whose ``order`` indexes the whole
        batch.

    Example:
        >>> x = torch.arange(4.0)
        >>> order, sizes = cut([7, 2, 6, 1], max_tokens=8)
        >>> [part.tolist() for part in x[order].split(sizes)]
        [[0.0, 3.0], [1.0, 2.0]]
        >>> [it.sizes for it in cut([7, 2, 6, 1], max_tokens=8, ranks=2)]
        [[2], [2]]

    References:
        Johnson, Near-optimal bin packing algorithms, 1973; Graham, `Bounds on multiprocessing
        timing anomalies <https://doi.org/10.1137/0117039>`_, 1969.
    """
    expected = "the most tokens of a microbatch, an int of at least 1"
    most = checks.check_int(max_tokens, "max_tokens", expected, 1, checks.LARGEST_INT)
    each = _read(lengths, most)
    several = 1
    if ranks is not None:
        several = checks.check_int(ranks, "ranks", "a number of ranks, an int of at least 1", 1)
    longest_first = sorted(range(len(each)), key=lambda i: -each[i])
    pack = _side_by_side if padded else _best_fit
    bins = pack(each, longest_first, most)
    count = -(-len(bins) // several) * several
    even = None if padded else _evenly(each, longest_first, most, count)
    bins = even or _split(bins, count)
    bins = [sorted(its) for its in bins]
    device = lengths.device if isinstance(lengths, Tensor) else torch.device("cpu")
    if ranks is None:
        return _as_cut(sorted(bins), device)
    return [_as_cut(its, device) for its in _dealt(each, bins, several)]


def _read(lengths: Any, most: int) -> list[int]:
    """The lengths as ints, if each of them fits."""
    if isinstance(lengths, Tensor):
        integral = not (lengths.is_floating_point() or lengths.is_complex())
        if lengths.dim() != 1 or not integral or lengths.dtype == torch.bool:
            raise TypeError(
                f"lengths is a tensor of shape {tuple(lengths.shape)} and {lengths.dtype}; "
                "expected one integer per sample. For a mask of tokens, pass mask.sum(1)."
            )
        lengths = lengths.tolist()
    try:
        given: list[Any] = list(lengths)
    except TypeError:
        raise TypeError(
            f"lengths is {reprs.kind(lengths)}; expected the tokens of each sample, ints or "
            "an integer tensor."
        ) from None
    expected = "the tokens of a sample, an int of at least 0"
    each = [
        checks.check_int(x, f"lengths[{i}]", expected, 0, checks.LARGEST_INT)
        for i, x in enumerate(given)
    ]
    for i, length in enumerate(each):
        if length > most:
            raise ValueError(
                f"lengths[{i}] is {length}; expected at most max_tokens={most}, because that "
                "sample alone is too long for a microbatch. Truncate or split it, or allow more "
                "tokens."
            )
    return each


def _best_fit(each: list[int], longest_first: list[int], most: int) -> list[Bin]:
    """Each sample in the fullest microbatch that has room for it."""
    bins: list[Bin] = []
    room: list[tuple[int, int]] = []  # what is left in each, the least first, and which it is
    for i in longest_first:
        at = bisect_left(room, (each[i], -1))
        if at < len(room):
            left, its = room.pop(at)
        else:
            left, its = most, len(bins)
            bins.append([])
        bins[its].append(i)
        insort(room, (left - each[i], its))
    return bins


def _side_by_side(each: list[int], longest_first: list[int], most: int) -> list[Bin]:
    """Samples of like length together, as many as fit when padded to the longest of them."""
    bins: list[Bin] = []
    for i in longest_first:
        if not bins or (len(bins[-1]) + 1) * each[bins[-1][0]] > most:
            bins.append([])
        bins[-1].append(i)
    return bins


def _evenly(each: list[int], longest_first: list[int], most: int, count: int) -> list[Bin] | None:
    """Each sample in the microbatch with the fewest tokens, and samples; None where it is too full.

    Where the emptiest one has no room, none has.
    """
    bins: list[Bin] = [[] for _ in range(count)]
    loads = [(0, 0, b) for b in range(count)]
    heapify(loads)
    for i in longest_first:
        tokens, rows, b = loads[0]
        if tokens + each[i] > most:
            return None
        bins[b].append(i)
        heapreplace(loads, (tokens + each[i], rows + 1, b))
    return bins


def _split(bins: list[Bin], count: int) -> list[Bin]:
    """More microbatches: the longest ones halved, and empty ones where samples are too few."""
    while len(bins) < count:
        longest = max(bins, key=len, default=[])
        half = len(longest) // 2 or 1
        bins.append(longest[half:])
        del longest[half:]
    return bins


def _dealt(each: list[int], bins: list[Bin], ranks: int) -> list[list[Bin]]:
    """As many microbatches for each rank, the fullest first, each to the rank with the least."""
    share = len(bins) // ranks
    its: list[list[Bin]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    work = {b: sum(each[i] for i in rows) for b, rows in enumerate(bins)}
    for b in sorted(work, key=lambda b: (-work[b], bins[b])):
        rank = min((r for r in range(ranks) if len(its[r]) < share), key=lambda r: (loads[r], r))
        its[rank].append(bins[b])
        loads[rank] += work[b]
    return its


def _as_cut(bins: list[Bin], device: torch.device) -> Cut:
    order = [i for its in bins for i in its]
    return Cut(torch.tensor(order, dtype=torch.int64, device=device), [len(its) for its in bins])
