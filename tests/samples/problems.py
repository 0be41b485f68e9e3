"""What tests of samples share:

the same of a loop over the samples, by torch.autograd or torch.func.
"""

import pytest
import torch
from hypothesis import strategies as st
from optree import tree_leaves, tree_map

import pureaccum as pa
from pureaccum._core.auto_size import counting


engines = pytest.mark.parametrize("engine", ["vmap", "autograd"])
chunks = st.none() | st.integers(1, 8)
# Norms of whole numbers: squares add up exactly, and what is rounded is a root of each leaf, its
# square, their sum and its root, on both sides.
ROOTS = 8 * 2.0**-24


def stacked(trees):
    return tree_map(lambda *xs: torch.stack(xs), *trees)


def looped(func, params, rows):
    """The gradients of samples by torch.autograd, and of one number of each after the other."""
    leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
    options = {"retain_graph": True, "materialize_grads": True}

    def gradient(number):
        found = torch.autograd.grad(number, [*leaves.values()], **options)
        return dict(zip(leaves, found, strict=True))

    def of(row):
        out = func(leaves, row)
        out = out.total if isinstance(out, pa.Weighted) else out
        return gradient(out) if out.dim() == 0 else stacked(map(gradient, out))

    return stacked(map(of, rows))


def rows_of(batch):
    """The samples of a batch, one by one."""
    count = len(tree_leaves(batch)[0])
    return [tree_map(lambda x, i=i: x[i], batch) for i in range(count)]


def jacobians(func, params, batch):
    """Those of all samples by torch.func, stacked."""
    return stacked(torch.func.jacrev(func)(params, row) for row in rows_of(batch))


def peak_of(way):
    with counting() as live:
        way()
    return live.peak
