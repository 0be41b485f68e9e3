"""Data on which floating-point arithmetic is exact, and what "the same" means.

Integers go through operations that are closed over them, and every partial sum stays below 2**24:
order, split and merge tree then cannot change a bit. The largest gradients are far above 2**11,
so that a sum in half precision would be noticed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from hypothesis import strategies as st
from torch import Tensor

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import compositions
from tests.draws import generator


ROWS = 12  # the most samples for which the loss below stays exact


def but_checked(tree):
    """A tree whose infos and windows do not tell whether a call asked its loss."""
    tells = lambda x: hasattr(x, "checked")  # noqa: E731
    of_record = lambda x: x._replace(checked=()) if tells(x) else x  # noqa: E731
    return optree.tree_map(of_record, tree, is_leaf=tells, namespace="pureaccum")


def same(a, b):
    """Whether two trees have the same bits, for where that is a question."""
    try:
        assert_trees_bitwise_equal(a, b)
    except AssertionError:
        return False
    return True


def copied(tree):
    return optree.tree_map(torch.clone, tree, namespace="pureaccum")


def integers(g, *shape, bound=15):
    return torch.randint(-bound, bound + 1, shape, generator=g).float()


def make_params(seed):
    g = generator(seed)
    return {"w": integers(g, 4, 2, bound=7), "emb": integers(g, 5, 4), "b": integers(g, 2)}


def make_batch(seed, rows):
    g = generator(seed + 1)
    return {
        "y": integers(g, rows, 2),
        "i": torch.randint(0, 5, (rows,), generator=g),
        "mask": torch.randint(0, 4, (rows,), generator=g),
    }


def row_losses(params, batch):
    out = torch.relu(params["emb"][batch["i"]] @ params["w"] + params["b"])
    return ((out - batch["y"]) ** 2).sum(-1)  # at most 2 * 450**2 a sample


class Loss(NamedTuple):
    """A loss, the reduction that goes with it, and the sum and the weight that it stands for."""

    name: str
    call: Callable[..., Any]
    total: Callable[..., Tensor]
    weight: Callable[..., float]

    @property
    def reduction(self):
        return "sum" if self.name == "sum" else "mean"


def _masked(p, b):
    return (b["mask"] * row_losses(p, b)).sum()


def _plain(p, b):
    return row_losses(p, b).sum()


MEAN = Loss("mean", lambda p, b: row_losses(p, b).mean(), _plain, lambda b: len(b["y"]))
SUM = Loss("sum", _plain, _plain, lambda b: 1)
WEIGHTED = Loss(
    "weighted",
    lambda p, b: pa.Weighted(_masked(p, b), b["mask"].sum()),
    _masked,
    lambda b: float(b["mask"].sum()),
)
RATIO = Loss(  # a denominator that is elsewhere in the batch: most microbatches have none of it
    "ratio",
    lambda p, b: pa.Weighted(_plain(p, b), (b["mask"] == 3).sum()),
    _plain,
    lambda b: float((b["mask"] == 3).sum()),
)
LOSSES = (MEAN, SUM, WEIGHTED, RATIO)


def full_batch(loss, params, batch):
    """The gradient as it is defined: of the sum over the whole batch, divided once."""
    weight = loss.weight(batch)
    return optree.tree_map(
        lambda g: g / weight if weight else torch.zeros_like(g),
        torch.func.grad(loss.total)(params, batch),
    )


def folded(acc, state, params, parts):
    for part in parts:
        state = acc.update(state, params, part)
    return state


losses = st.sampled_from(LOSSES)
sizes = st.integers(1, ROWS).flatmap(lambda rows: compositions(rows, empty=True))
