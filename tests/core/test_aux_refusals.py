"""An aux that cannot be reduced as asked is refused, by its path and with what else there is."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import pureaccum as pa
from tests.refusals import PARAMS, Loss, make_batch, refused, squares


pytestmark = [pytest.mark.faults, pytest.mark.promise("errors")]
Aux = Callable[[Tensor], Any]
ELSE = ("'sum'", "'mean'", "'stack'", "'last'")
NOT_REDUCED = {
    "0-d": ("concat", lambda x: x.sum(), ValueError, ("shape ()", "2 rows", *ELSE)),
    "other rows": ("concat", lambda x: x[:1], ValueError, ("shape (1, 2)", "2 rows", *ELSE)),
    "columns": ("concat", lambda x: x.new_ones(3), ValueError, ("shape (3,)", "2 rows", *ELSE)),
    "a word": ("concat", lambda x: "rows", ValueError, ("is a str", *ELSE)),
    "a number": ("concat", lambda x: 1.5, ValueError, ("is a float", *ELSE)),
    "a stacked word": ("stack", lambda x: "rows", ValueError, ("is a str", "a tensor", "'last'")),
    "a summed word": ("sum", lambda x: "rows", TypeError, ("is a str", "no sum", "'last'")),
    "the mean of a word": ("mean", lambda x: "rows", TypeError, ("is a str", "no mean", "'last'")),
    "the sum of an object": ("sum", lambda x: object(), TypeError, ("is a object", "no sum")),
}
# Good in the first microbatch, of two rows; not in the last, of one.
NOT_ALIKE = {
    "sum of rows": ("sum", lambda x: x, "(1, 2) after (2, 2)"),
    "mean of rows": ("mean", lambda x: x[:, 0], "(1,) after (2,)"),
    "stack of rows": ("stack", lambda x: x, "(1, 2) after (2, 2)"),
    "rows of other lengths": (
        "concat",
        lambda x: x.new_ones(len(x), len(x)),
        "(1, 1) after (2, 2)",
    ),
    "rows of more axes": (
        "concat",
        lambda x: x if len(x) == 2 else x[..., None],
        "(1, 2, 1) after (2, 2)",
    ),
}


def transforms(*names):
    return pytest.mark.parametrize("transform", [pa.grad, pa.grad_and_value, pa.value])


def with_aux(aux):
    return Loss(lambda p, b: (squares(p, b), {"ok": b["x"].sum(1), "a": [aux(b["x"])]}))


def run(transform, loss, how, rows):
    reductions = how if isinstance(how, dict) else {"ok": "concat", "a": how}
    return transform(loss, has_aux=True, microbatch_size=2, aux_reduction=reductions)(
        PARAMS, make_batch(rows)
    )


@transforms()
@pytest.mark.parametrize(("how", "aux", "error", "words"), NOT_REDUCED.values(), ids=NOT_REDUCED)
def test_a_leaf_that_is_not_of_its_kind_is_refused(transform, how, aux, error, words):
    loss = with_aux(aux)
    with refused(error, "aux['a'][0]", *words, given=PARAMS, loss=loss, calls=1):
        run(transform, loss, how, 5)


@transforms()
@pytest.mark.parametrize(("how", "aux", "shapes"), NOT_ALIKE.values(), ids=NOT_ALIKE)
def test_a_leaf_whose_shape_changes_is_refused(transform, how, aux, shapes):
    """Broadcasting two rows against one would be silently wrong."""
    words = (f"aux['a'][0] has shape {shapes}", repr(how), "one row per sample takes 'concat'")
    with refused(ValueError, *words, given=PARAMS):
        run(transform, with_aux(aux), how, 3)


@transforms()
@pytest.mark.parametrize("how", [{"ok": "sum"}, {"ok": "sum", "b": "sum"}, {"ok": ["sum"]}])
def test_a_tree_of_words_that_is_no_prefix_is_refused(transform, how):
    loss = with_aux(lambda x: x.sum())
    words = (f"aux_reduction={how!r} is no prefix", "aux")
    with refused(ValueError, *words, given=PARAMS, loss=loss, calls=1):
        run(transform, loss, how, 5)


def test_a_tree_of_words_without_an_aux_is_refused():
    """A loss with buffers returns a pair all the same."""
    loss = lambda params, batch, buffers: (squares(params, batch), buffers)  # noqa: E731
    how = {"loss": "mean"}
    step = pa.make_step(loss, pa.sgd(0.1), microbatch_size=2, buffers="freeze", aux_reduction=how)
    state = step.init(PARAMS, {"n": torch.ones(1)})
    with refused(ValueError, f"aux_reduction={how!r}", "no aux", "has_aux=True", given=state):
        step(state, make_batch())


@transforms()
@pytest.mark.parametrize(
    "changed", [lambda a: {"a": a, "b": a}, lambda a: [a], lambda a: None], ids=["leaf", "list", ""]
)
def test_an_aux_that_changes_its_structure_is_refused(transform, changed):
    loss = Loss(lambda p, b: (squares(p, b), changed(b["x"]) if loss.calls > 1 else {"a": b["x"]}))
    with refused(ValueError, "another structure", "aux", given=PARAMS, loss=loss, calls=2):
        transform(loss, has_aux=True, microbatch_size=2)(PARAMS, make_batch(5))


@transforms()
def test_an_aux_of_no_rows_is_refused(transform):
    """The loss is never called: nobody knows what its aux would look like."""
    loss = with_aux(lambda x: x)
    words = ("no rows", "no aux", "has_aux=True")
    with refused(ValueError, *words, given=PARAMS, loss=loss):
        run(transform, loss, "concat", 0)
