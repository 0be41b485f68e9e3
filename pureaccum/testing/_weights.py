"""Other weights for the rows of a batch: some of them nothing."""

import torch
from torch import Tensor

from .._batches import Batch
from .._tree import paths
from ._subject import Subject


def find_leaf(batch: Batch, name: str) -> int:
    """Which leaf of the batch is called so: by its path, or by the last key of it."""
    names = paths(batch.spec, "batch")
    endings = (name, f"batch{name}", f"batch[{name!r}]")
    found = [i for i, path in enumerate(names) if path in endings]
    if not found or not isinstance(batch.leaves[found[0]], Tensor):
        raise ValueError(
            f"weights is {name!r}, which is no tensor of the batch; expected one of "
            f"{', '.join(names)}."
        )
    return found[0]


def redrawn(subject: Subject, leaf: int, random: torch.Generator) -> Subject:
    """The same loss on a batch in which some rows of a leaf are zero, and some are not."""
    keep = torch.randint(0, 2, (subject.rows,), generator=random)
    one, other = torch.randperm(subject.rows, generator=random)[:2].tolist()
    keep[one], keep[other] = 0, 1
    leaves = list(subject.batch.leaves)
    x = leaves[leaf]
    factor = keep.to(x.device, x.dtype).reshape(-1, *[1] * (x.dim() - 1))
    leaves[leaf] = x * factor
    return subject._replace(batch=subject.batch._replace(leaves=leaves))
