"""A batch that cannot be cut is refused before the loss is called, and its leaf is named."""

from typing import Any

import numpy as np
import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pureaccum as pa
from tests.faults.refusals import PARAMS, Loss, Receiver, make_batch, receivers, refused, squares


X = make_batch()["x"]
UNCUT: dict[str, tuple[Any, type[Exception], tuple[str, ...]]] = {
    "fewer rows": (
        {"x": X, "y": torch.ones(3, 5)},
        ValueError,
        ("['y'] has 3 rows (shape (3, 5))", "['x'] has 4 (shape (4, 2))", "one row per sample"),
    ),
    "0-d": ({"x": X, "y": torch.tensor(2.0)}, ValueError, ("['y'] is a 0-d tensor", "scalar")),
    "only 0-d": (torch.tensor(2.0), ValueError, (" is a 0-d tensor", "one row per sample")),
    "deep": (
        {"x": X, "y": [(X, torch.tensor(1.0))]},
        ValueError,
        ("['y'][0][1] is a 0-d tensor",),
    ),
    "array": (
        {"x": X, "y": np.ones(4)},
        TypeError,
        ("['y'] is a numpy.ndarray", "tensors, Python scalars and None", "torch.as_tensor"),
    ),
    "only an array": (np.ones((4, 2)), TypeError, (" is a numpy.ndarray", "torch.as_tensor")),
    "number of numpy": ({"x": X, "y": np.int64(3)}, TypeError, ("['y'] is a numpy.int64",)),
    "string": ({"x": X, "y": "abcd"}, TypeError, ("['y'] is a builtins.str", "another argument")),
    "strings": ({"x": X, "y": ["a", "b", "c", "d"]}, TypeError, ("['y'][0] is a builtins.str",)),
    "a set": ({"x": X, "y": {1, 2}}, TypeError, ("['y'] is a builtins.set",)),
}
UNCOUNTED = {
    "a number": (3.0, "float"),
    "numbers": ({"x": 1, "y": True}, "int, bool"),
    "None": (None, "no leaf"),
    "nothing": ({}, "no leaf"),
}


@receivers()
@pytest.mark.parametrize(("batch", "error", "words"), UNCUT.values(), ids=UNCUT)
def test_a_leaf_that_cannot_be_cut(to: Receiver, batch: Any, error: Any, words: Any) -> None:
    loss = Loss(squares)
    named = (to.batch + words[0], *words[1:])
    with refused(error, *named, given=(PARAMS, batch), loss=loss):
        to.run(loss, PARAMS, batch)


@receivers("update", "donated update")
@pytest.mark.parametrize(("batch", "came"), UNCOUNTED.values(), ids=UNCOUNTED)
def test_a_batch_without_rows_to_cut(to: Receiver, batch: Any, came: str) -> None:
    loss = Loss(squares)
    with refused(ValueError, "holds no tensor", came, "one row per sample", loss=loss):
        to.run(loss, PARAMS, batch)


@pytest.mark.parametrize(("batch", "came"), UNCOUNTED.values(), ids=UNCOUNTED)
@pytest.mark.parametrize("donate", [False, True])
def test_a_mean_over_rows_that_nobody_counts(batch: Any, came: str, donate: bool) -> None:
    """A stream need not cut: only a mean asks for rows, once the loss is seen to be one."""
    loss = Loss(lambda params, batch: params["b"] * 2)
    acc = pa.accumulator(loss)
    state = acc.init(PARAMS)
    words = ("no batch argument holds a tensor", "Weighted", "reduction='sum'", "batch_argnums")
    with refused(ValueError, *words, given=state, loss=loss, calls=1):
        acc.update(state, PARAMS, batch, donate=donate)
    weighted = pa.accumulator(lambda params, batch: pa.Weighted(params["b"] * 6, 3))
    assert weighted.finalize(weighted.update(state, PARAMS, batch))[0]["b"] == 2


@receivers()
@given(data=st.data())
def test_whichever_leaf_disagrees_is_named(to: Receiver, data: st.DataObject) -> None:
    """One leaf of a random tree has other rows than the rest: the error says which."""
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
        to.run(squares, PARAMS, batch)


def test_several_batches_disagree_by_the_names_of_their_arguments() -> None:
    with refused(ValueError, "args[2] has 3 rows", "args[1]['x'] has 4"):
        pa.grad(squares, batch_argnums=(1, 2), microbatch_size=2)(
            PARAMS, make_batch(), torch.ones(3)
        )
