"""A linear loss, whose gradients are known, over a tree with every kind of leaf.

The gradient of sample i is ``s[i] * first + t[i] * second``, each leaf being used twice; of a
weighted loss, ``mask[i]`` times that. ``sound[i, k] = 0`` makes the gradient of leaf k NaN
while the loss stays finite; ``offset[i]`` goes into the loss and into no gradient.
"""

import torch
from torch import Tensor

import pureaccum as pa
from tests.draws import generator


Batch = dict[str, Tensor]

# 1.2 MB: added by a hook, and in two pieces where it is weighted; the others by one foreach call
LARGE = (512, 600)
ROWS = 8


def every_kind_of_leaf(narrow=True):
    """Zeros, so that the loss of any of them is exact; without ``narrow``, none of 16 bits.

    (Where every leaf has the dtype of its sum, autograd itself may add to the sums.)
    """
    leaves = {
        "bfloat16": torch.zeros(3, dtype=torch.bfloat16),
        "column": torch.zeros(6, 4)[:, 1],
        "double": torch.zeros(2, 2, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "large": torch.zeros(LARGE),
        "large_turned": torch.zeros(LARGE).t(),
        "scalar": torch.zeros(()),
        "turned": torch.zeros(5, 4).t(),
    }
    return {k: x for k, x in leaves.items() if narrow or k != "bfloat16"}


KINDS_OF_LEAF = sorted(every_kind_of_leaf())


def _pattern(seed):
    random = generator(seed)

    def like(leaf):
        high = 1 if leaf.dtype == torch.bfloat16 else 15
        return torch.randint(-high, high + 1, leaf.shape, generator=random).to(leaf.dtype)

    return {name: like(leaf) for name, leaf in every_kind_of_leaf().items()}


FIRST, SECOND = _pattern(1), _pattern(2)


def linear_batch(seed, rows=ROWS):
    random = generator(seed)
    s, t = (torch.randint(-7, 16, (rows,), generator=random).float() for _ in range(2))
    mask = torch.randint(-2, 4, (rows,), generator=random).relu().float()
    sound = torch.ones(rows, len(KINDS_OF_LEAF))
    return {"s": s, "t": t, "mask": mask, "sound": sound, "offset": torch.zeros(rows)}


def linear_loss(kind):
    def total(params, batch, by):
        s, t = batch["s"] * by, batch["t"] * by
        loss = s.sum() + (batch["offset"] * by).sum()
        for name, leaf in params.items():
            loss = loss + (leaf * FIRST[name]).sum() * s.sum()
            loss = loss + (leaf * SECOND[name]).sum() * t.sum()
            # of slope 0 where sound is 1, and of slope inf * 0 where it is 0
            sound = batch["sound"][:, KINDS_OF_LEAF.index(name)]
            loss = loss + ((leaf.sum() * 0 + sound).sqrt() * by).sum()
        return loss

    def loss(params, batch):
        if kind == "weighted":  # of no weight a total of 0 or NaN, whose gradient is what it is
            return pa.Weighted(total(params, batch, batch["mask"]), batch["mask"].sum())
        sum_ = total(params, batch, torch.ones_like(batch["s"]))
        return sum_ / len(batch["s"]) if kind == "mean" else sum_

    return loss


def gradient_sums(kind, batch, counted=None):
    """The sum of the gradients of the samples that count, in the dtypes of an accumulator."""
    by = batch["mask"] if kind == "weighted" else torch.ones(len(batch["s"]))
    if counted is not None:
        by = torch.where(counted, by, 0.0)
    s, t = ((torch.where(by != 0, batch[x], 0.0) * by).sum() for x in "st")

    def sum_of(name):
        dtype = torch.float64 if name == "double" else torch.float32
        return s * FIRST[name].to(dtype) + t * SECOND[name].to(dtype)

    return {name: sum_of(name) for name in every_kind_of_leaf()}


def weight_of(kind, batch, counted=None):
    """What those sums are divided by."""
    counted = torch.ones(len(batch["s"]), dtype=torch.bool) if counted is None else counted
    weights = {"sum": 0, "mean": counted.sum(), "weighted": batch["mask"][counted].sum()}
    return float(weights[kind])
