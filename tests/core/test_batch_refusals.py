"""A batch that cannot be cut is refused before the loss is called, and its leaf is named.

A microbatch of a stream needs no samples unless its loss is a mean over them, which only it can
tell.
"""

import warnings
from collections import UserDict
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import pureaccum as pa
from pureaccum._base.torch_internals.functorch import VERSION
from tests.refusals import PARAMS, RECEIVERS, Loss, make_batch, receivers, refused, squares
from tests.runs import RUNS
from tests.tables import each_once


pytestmark = [pytest.mark.faults, pytest.mark.promise("errors"), pytest.mark.table]
X = make_batch()["x"]
UNCUT = {
    "fewer rows": (
        {"x": X, "y": torch.ones(3, 5)},
        ValueError,
        ("['y'] has 3 samples (shape (3, 5))", "['x'] has 4 (shape (4, 2))", "one row per sample"),
    ),
    "0-d": ({"x": X, "y": torch.tensor(2.0)}, ValueError, ("['y'] is a 0-d tensor", "scalar")),
    "only 0-d": (torch.tensor(2.0), ValueError, (" is a 0-d tensor", "one row per sample")),
    "deep": ({"x": X, "y": [(X, torch.tensor(1.0))]}, ValueError, ("['y'][0][1] is a 0-d tensor",)),
    "array": (
        {"x": X, "y": np.ones(4)},
        TypeError,
        ("['y'] is a numpy.ndarray", "expected a tensor", "torch.as_tensor"),
    ),
    "only an array": (np.ones((4, 2)), TypeError, (" is a numpy.ndarray", "torch.as_tensor")),
    "number of numpy": ({"x": X, "y": np.int64(3)}, TypeError, ("['y'] is a numpy.int64",)),
    "an iterator": ({"x": X, "y": iter("ab")}, TypeError, ("['y'] is a builtins.", "yields items")),
    "a loader": (
        DataLoader(X),
        TypeError,
        (" is a torch.utils.data", "yields items", "loader one"),
    ),
}
HELD = {
    "numbers": (
        {"x": X, "y": [1, 2, 3, 4]},
        ValueError,
        ("['y'] is a list of 4 numbers", "torch.tensor(x)", "another argument"),
    ),
    "an object": (
        {"x": X, "y": SimpleNamespace(mask=X)},
        TypeError,
        ("['y'] is a types.SimpleNamespace", "holds a tensor at .mask", "dataclass"),
    ),
    "a set": ({"x": X, "y": {X}}, TypeError, ("['y'] is a builtins.set", "one of its elements")),
}
STREAMS = RECEIVERS["update"], RECEIVERS["donated update"]
UNCOUNTED = {
    "a number": (3.0, "float"),
    "numbers": ({"x": 1, "y": True}, "int, bool"),
    "None": (None, "no leaf"),
    "nothing": ({}, "no leaf"),
}


@each_once("to, batch, error, words", RECEIVERS, UNCUT)
def test_a_leaf_that_cannot_be_cut_is_refused(to, batch, error, words):
    loss = Loss(lambda params, batch: params["w"].sum())
    named = (to.batch + words[0], *words[1:])
    calls = int(error is ValueError and to in STREAMS)
    with refused(error, *named, given=(PARAMS, batch), loss=loss, calls=calls):
        to.run(loss, PARAMS, batch)


@receivers("update", "donated update")
@pytest.mark.parametrize(("batch", "came"), UNCOUNTED.values(), ids=UNCOUNTED)
def test_a_batch_without_rows_to_cut_is_refused(to, batch, came):
    loss = Loss(squares)
    with refused(ValueError, "holds no tensor", came, "one row per sample", loss=loss):
        to.run(loss, PARAMS, batch)


# Tensors that torch does not split ---------------------------------------------------------


PARTS = [torch.full((rows, 2), float(rows)) for rows in (2, 3, 1, 2)]
JAGGED = torch.nested.nested_tensor(PARTS, layout=torch.jagged)
DENSE = torch.tensor([[1.0, 0.0], [0.0, 0.0], [2.0, 3.0], [0.0, 4.0]])
PADDED = ("is a nested tensor of layout torch.", "x.to_padded_tensor(0.0)", "mask", "Weighted")
SPARSE = ("is a tensor of layout torch.", "x.to_dense()")
COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr)
CHANNELS = torch.tensor([0.5, 0.25])
with warnings.catch_warnings(action="ignore"):  # of prototypes
    WHOLE = {
        "jagged": (JAGGED, PADDED),
        "strided nested": (torch.nested.nested_tensor(PARTS), PADDED),
        "COO": (DENSE.to_sparse(), SPARSE),
        "COO of rows": (DENSE.to_sparse(1), SPARSE),
        "CSR": (DENSE.to_sparse_csr(), SPARSE),
        "CSC": (DENSE.to_sparse_csc(), SPARSE),
        "BSR": (DENSE.to_sparse_bsr((2, 2)), SPARSE),
        "quantized by channel": (
            torch.quantize_per_channel(DENSE, CHANNELS, torch.zeros(2), 1, torch.qint8),
            ("is quantized by channel", "x.dequantize()"),
        ),
    }


def plain(x):
    if x.is_nested:
        return x.values() if x.layout == torch.jagged else x.to_padded_tensor(0.0)
    return x.dequantize() if x.is_quantized else x.to_dense()


def scaled(params, batch):
    return (params["b"] * plain(batch["x"])).sum()


SUMMED = partial(RUNS["step"], reduction="sum")
CUTTING = {  # and how it calls its batch
    "one row": ("args[1]", partial(RUNS["grad"], size=1)),
    "all rows": ("args[1]", partial(RUNS["grad"], size=9)),
    "a list": ("args[1]", partial(RUNS["grad"], size=[1, 3])),
    "auto": ("args[1]", partial(RUNS["grad"], size="auto")),
    "value": ("args[1]", RUNS["value"]),
    "step": ("batch", SUMMED),
    "samples": ("args[1]", partial(RUNS["samples"], size=None)),
    "microbatches": ("batch", lambda f, p, b: pa.microbatches(b, 2)),
    "ranks": ("batch", lambda f, p, b: pa.distributed.shard_batch(b, 0, 2)),
}
UNCUTTING = {
    "a value": lambda *given, **k: RUNS["grad_and_value"](*given, **k)[1],
    "a step": lambda *given, **k: RUNS["step"](*given, **k)[1].loss,
    "a stream": lambda *given, **k: RUNS["accumulator"](*given, **k)[1],
    "a stream of a step": lambda *given, **k: RUNS["stream"](*given, **k)[1].loss,
}


@each_once("root, run, x, words", CUTTING, {k: x for k, x in WHOLE.items() if k != "jagged"})
def test_a_tensor_that_torch_does_not_split_is_refused(root, run, x, words):
    loss = Loss(scaled)
    first, *rest = words
    with refused(TypeError, f"{root}['x'] {first}", *rest, "microbatch_size=None", loss=loss):
        run(loss, PARAMS, {"x": x})


@pytest.mark.parametrize("x", [JAGGED, DENSE.to_sparse()])
def test_a_tensor_that_torch_does_not_split_is_refused_by_a_compiled_step(x):
    with refused(TypeError, "batch['x'] is a", f"layout {x.layout}", "compile" * x.is_nested):
        RUNS["compiled step"](scaled, PARAMS, {"x": x}, reduction="sum")


@each_once("x, whole", {name: x for name, (x, _) in WHOLE.items()}, UNCUTTING)
def test_a_tensor_that_torch_does_not_split_is_taken_whole(x, whole):
    """By the engine that can: the error of the other one names it, and "auto" takes it."""
    run = lambda engine: whole(  # noqa: E731
        scaled, PARAMS, {"x": x}, size=None, reduction="sum", engine=engine
    )
    compressed = VERSION < (2, 15) and x.layout in COMPRESSED  # since then torch.func takes them
    if (x.is_nested and x.layout != torch.jagged) or compressed:
        with pytest.raises(RuntimeError) as caught:
            run("func")
        assert "Use engine='autograd'" in "".join(caught.value.__notes__)
    assert run("auto") == plain(x).sum()


def test_a_nested_tensor_of_other_rows_is_named():
    for nested in (JAGGED, torch.nested.nested_tensor(PARTS)):
        with refused(ValueError, "['y'] has 3 samples (shape (3,)), but", "['x'] has 4 ("):
            SUMMED(squares, PARAMS, {"x": nested, "y": torch.ones(3)}, size=None)


@receivers()
@given(data=st.data())
def test_whichever_leaf_disagrees_is_named(to, data):
    """One leaf of a random tree has other samples than the rest: the error says which."""
    trees = st.recursive(
        st.just(3),
        lambda t: st.lists(t, min_size=1, max_size=3) | st.dictionaries(st.sampled_from("abc"), t),
        max_leaves=5,
    )
    tree = data.draw(trees.filter(lambda t: len(optree.tree_leaves(t)) > 1))
    leaves, spec = optree.tree_flatten(tree)
    odd = data.draw(st.integers(0, len(leaves) - 1))
    leaves[odd] = data.draw(st.sampled_from([0, 1, 2, 4]))
    batch = optree.tree_unflatten(spec, [torch.ones(rows, 2) for rows in leaves])
    with refused(ValueError, spec.accessors()[odd].codify(to.batch), f"({leaves[odd]}, 2)"):
        to.run(lambda params, batch: params["w"].sum(), PARAMS, batch)


# What is no tensor --------------------------------------------------------------------------


@each_once("to, batch, error, words", RECEIVERS, HELD)
def test_what_might_be_rows_and_is_not_cut_is_refused(to, batch, error, words):
    loss = Loss(lambda params, batch: params["w"].sum())
    if to in STREAMS:  # in which nothing is cut
        to.run(loss, PARAMS, batch)
        return
    with refused(error, to.batch + words[0], *words[1:], given=(PARAMS, batch), loss=loss):
        to.run(loss, PARAMS, batch)


class Strange(UserDict[str, Any]):
    """A mapping that cannot be made of its items alone."""

    def __init__(self, items, needed):
        super().__init__(items)


def test_a_mapping_that_cannot_be_made_again_is_refused():
    with refused(TypeError, "args holds a tests", "Strange({...})", "needed", "dict(...)"):
        pa.grad(squares, microbatch_size=2)(PARAMS, Strange({"x": X}, 1))


@pytest.mark.parametrize("loader", [(X, X), X, {"x": X}, 3])
def test_a_batch_is_no_loader(loader):
    with refused(TypeError, "loader is a", "iterable of microbatches", "microbatches(batch, n)"):
        pa.windows(loader, 2)


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ([(torch.ones(2, 3), torch.ones(2)), (torch.ones(1, 3), torch.ones(1))], ValueError),
        ([(torch.ones(2, 3), torch.ones(2))] * 2, AttributeError),
        ([{"x": torch.ones(2, 3)}] * 2, TypeError),
    ],
)
def test_microbatches_in_place_of_a_batch_are_named(parts, error):
    def loss(w, batch):
        x, _ = batch if isinstance(parts[0], tuple) else (batch["x"], None)
        return (x.sum(1) * w).mean()

    step = pa.make_step(loss, pa.sgd(0.1), microbatch_size=2)
    with pytest.raises(error) as caught:
        step(step.init(torch.tensor(1.0)), parts)
    told = "".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert "to step.window" in told
    assert "Unpack it" not in told


def test_what_no_graph_can_be_given_is_refused_by_a_compiled_step():
    texts = {"x": X, "y": [*"abcd"]}
    graphs = {"compile": {"backend": "eager"}}
    for size in (2, None):
        step = pa.make_step(squares, pa.sgd(0.1), microbatch_size=size, **graphs)
        state = step.init(PARAMS)
        with refused(TypeError, "batch['y'] is a list of", "one for each sample", "compile"):
            step(state, texts)
    with refused(TypeError, "microbatch['y'] is a list of 4 strs"):
        step.window(state, [texts])


def test_several_batches_that_disagree_are_named_by_their_arguments():
    with refused(ValueError, "args[2] has 3 samples", "args[1]['x'] has 4"):
        pa.grad(squares, batch_argnums=(1, 2), microbatch_size=2)(
            PARAMS, make_batch(), torch.ones(3)
        )
