"""Ways of cutting the rows of a batch into microbatches."""

import itertools
from collections.abc import Iterable, Sequence

import torch


Rows = tuple[int, ...]
Parts = tuple[Rows, ...]


def ways(rows: int, count: int, random: torch.Generator) -> list[Parts]:
    """Halves, all but one row, quarters, single rows; then random parts in random order."""
    everything = tuple(range(rows))
    sizes = [-(-rows // 2), -(-rows // 4), -(-rows // 16)]
    found = [split(everything, [size] * (rows // size)) for size in sizes]
    found.insert(1, split(everything, [rows - 1]))
    for _ in range(count):
        order = torch.randperm(rows, generator=random).tolist()
        cuts = int(torch.randint(1, min(rows, 8), (), generator=random))
        edges = 1 + torch.randperm(rows - 1, generator=random)[:cuts].sort().values
        found.append(parts_at(tuple(order), edges.tolist()))
    return list(dict.fromkeys(parts for parts in found if len(parts) > 1))


def split(rows: Rows, sizes: Iterable[int]) -> Parts:
    """Parts of these sizes, and one of what is left."""
    return parts_at(rows, list(itertools.accumulate(sizes)))


def parts_at(rows: Rows, edges: Sequence[int]) -> Parts:
    """Parts that end at these edges."""
    ends = [0, *edges, len(rows)]
    return tuple(rows[a:b] for a, b in itertools.pairwise(ends) if a < b)
