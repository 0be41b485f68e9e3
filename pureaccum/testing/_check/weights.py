"""Other weights for the rows of a batch: some of them nothing."""

import torch
from torch import Tensor

from ..._base.trees import paths
from ..._core.batches import Batch
from .subject import Subject


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
    """The same loss on a batch in which more rows of a leaf are zero; one that was not, is not."""
    leaves = list(subject.batch.leaves)
    x: Tensor = leaves[leaf]
    weigh = x.detach().reshape(subject.rows, -1).any(1).nonzero()[:, 0].cpu()
    keep = torch.randint(0, 2, (subject.rows,), generator=random)
    order = weigh[torch.randperm(len(weigh), generator=random)]
    keep[order[1:2]], keep[order[:1]] = 0, 1
    factor = keep.to(x.device, x.dtype).reshape(-1, *[1] * (x.dim() - 1))
    leaves[leaf] = x * factor
    return subject._replace(batch=subject.batch._replace(leaves=leaves))
