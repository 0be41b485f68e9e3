"""What tests of a step share: a problem in float64, comparisons, and steps that are compiled."""

import optree
import torch

import pureaccum as pa
from tests.draws import generator
from tests.exactly import but_checked


ROOT_U64 = 2.0**-26.5
EAGER = {"backend": "eager"}
WARMUP = pa.linear_warmup(0.1, 2, 0.05)


def loss(params, batch, keys=None):
    x = batch["x"] if keys is None else pa.dropout(batch["x"], 0.5, keys)
    out = torch.tanh(x @ params["w"] + params["b"])
    return ((out - batch["y"]) ** 2).sum(-1).mean()


def make_params(seed=0):
    g = generator(seed)
    return {name: torch.randn(s, generator=g).double() for name, s in (("w", (3, 2)), ("b", (2,)))}


def make_batch(seed=0, rows=3):
    g = generator(seed + 1)
    return {k: torch.randn(rows, n, generator=g).double() for k, n in (("x", 3), ("y", 2))}


def poisoned(batch, *rows):
    """The batch with NaN in some samples."""
    bad = batch | {"y": batch["y"].clone()}
    bad["y"][list(rows)] = torch.nan
    return bad


# Trees -----------------------------------------------------------------------------------------


def leaves(tree):
    return optree.tree_leaves(but_checked(tree), namespace="pureaccum")


def mapped(function, *trees):
    return optree.tree_map(function, *trees, namespace="pureaccum")


def stacked(trees):
    return mapped(lambda *xs: torch.stack(xs), *trees)


def member(tree, i):
    return mapped(lambda x: x[i], tree)


def assert_close(got, want):
    """Flags and counts alike, NaN where there is NaN, and other numbers to the bound."""
    xs, ys = leaves(got), leaves(want)
    assert len(xs) == len(ys)
    for x, y in zip(xs, ys, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        if not x.is_floating_point() and not x.is_complex():
            assert torch.equal(x, y)
            continue
        here = y.isfinite()
        assert torch.allclose(x[~here], y[~here], rtol=0, atol=0, equal_nan=True)
        assert (x - y)[here].norm() <= ROOT_U64 * y[here].norm()


# Compiled --------------------------------------------------------------------------------------


def pair(loss, optimizer, **options):
    """A step that compiles itself, and the same one that does not."""
    options = {"microbatch_size": 2, "compile": EAGER} | options
    ours = pa.make_step(loss, optimizer, **options)
    return ours, pa.make_step(loss, optimizer, **options | {"compile": False, "donate": False})


def counting():
    """A compiler that changes nothing, and a list of the graphs that it was given."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(len(graphs))
        return graph.forward

    return {"backend": backend}, graphs
