"""A batch without any tensor has no rows: it can be taken whole, or refused, and never cut.

Python numbers, None and empty containers: what a loss over a fixed data set is given, or one that
draws its own batch.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from tests.calls import ENGINES, NONFINITE
from tests.problems import in_a_window, in_parts, once
from tests.refusals import Loss, refused


pytestmark = pytest.mark.faults
PARAMS = {"a": torch.tensor([1.0, -2.0, 4.0]), "b": torch.tensor(3.0)}

numbers = st.integers(-8, 8) | st.booleans() | st.sampled_from([0.5, -4.0]) | st.none()
without_tensors = st.recursive(
    numbers,
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from("xyz"), x) | st.tuples(x),
    max_leaves=5,
)
# As many as no weight rounds by.
streams = st.sampled_from([1, 2, 4]).flatmap(
    lambda n: st.lists(without_tensors, min_size=n, max_size=n)
)
KINDS = ("mean", "sum", "weighted")


def total(params, batch):
    """Of integers, so that no sum of several of them is rounded."""
    factor = 2 * sum(optree.tree_leaves(batch)) + 4
    return factor * params["a"].sum() - params["b"]


def loss_of(kind):
    if kind == "weighted":
        return Loss(lambda params, batch: pa.Weighted(total(params, batch), 2))
    return Loss(total)


def by_hand(kind, batches):
    """The gradients and the value: sums, which nothing rounds, divided once."""
    leaves = {name: x.clone().requires_grad_() for name, x in PARAMS.items()}
    value = torch.stack([total(leaves, batch) for batch in batches]).sum()
    grads = torch.autograd.grad(value, list(leaves.values()))
    weight = 2 * len(batches) if kind == "weighted" else 1
    return {k: g / weight for k, g in zip(leaves, grads, strict=True)}, value.double() / weight


class Form(NamedTuple):
    """A way to give batches, ``run(loss, batches, **knobs)``; the gradients and the value."""

    run: Callable[..., Any]
    stream: bool = False
    sizes: tuple[Any, ...] = (1, 2, "auto")


def _step(loss, batches, stream=False, **knobs):
    """One of length 1 shows the gradients."""
    step = pa.make_step(loss, pa.sgd(1.0), **knobs)
    if stream:
        new, info = in_a_window(step, step.init(PARAMS), batches)
    else:
        new, info = once(step, PARAMS, batches[0])
    assert info.applied
    assert new.samples == 0
    assert info.microbatches == (len(batches) if stream else 1)
    return {name: x - new.params[name] for name, x in PARAMS.items()}, info.loss


def _accumulated(loss, batches, donate=False, **knobs):
    acc = pa.accumulator(loss, **knobs)
    state = in_parts(acc, PARAMS, batches, donate)
    assert state.microbatches == len(batches)
    return acc.finalize(acc.merge(acc.init(PARAMS), state))


def _grads(loss, batches, **knobs):
    grads = pa.grad(loss, **knobs)(PARAMS, batches[0])
    knobs = {name: knobs[name] for name in ("microbatch_size", "reduction") if name in knobs}
    return grads, pa.value(loss, **knobs)(PARAMS, batches[0])


FORMS = {
    "grad, value": Form(_grads, sizes=(1, 2, [1], "auto")),
    "grad_and_value": Form(
        lambda f, b, **knobs: pa.grad_and_value(f, **knobs)(PARAMS, b[0]), sizes=(1, 2, [1], "auto")
    ),
    "step": Form(_step),
    "accumulator": Form(_accumulated, True),
    "donated accumulator": Form(lambda *given, **k: _accumulated(*given, donate=True, **k), True),
    "stream of a step": Form(lambda *given, **k: _step(*given, stream=True, **k), True),
}
WHOLE = [name for name, form in FORMS.items() if not form.stream]


@pytest.mark.parametrize("form", FORMS)
@given(
    batches=streams,
    kind=st.sampled_from(KINDS),
    engine=st.sampled_from(ENGINES),
    nonfinite=st.sampled_from(NONFINITE),
)
def test_a_batch_without_tensors_counts_as_one_microbatch(form, batches, kind, engine, nonfinite):
    run, stream, _ = FORMS[form]
    loss = loss_of(kind)
    knobs = {"engine": engine, "nonfinite": nonfinite}
    knobs["reduction"] = "sum" if kind == "sum" else "mean"
    if stream and kind == "mean":
        words = ("no batch argument holds a tensor", "Weighted", "reduction='sum'", "batch_argnums")
        with refused(ValueError, *words, loss=loss, calls=1):
            run(loss, batches, **knobs)
        return
    grads, value = run(loss, batches, **knobs)
    wanted, expected = by_hand(kind, batches if stream else batches[:1])
    assert_trees_bitwise_equal(grads, wanted)
    assert value == expected.to(value.dtype)


@pytest.mark.parametrize("form", WHOLE)
@given(
    batch=without_tensors,
    kind=st.sampled_from(KINDS),
    engine=st.sampled_from(ENGINES),
    data=st.data(),
)
def test_a_batch_without_tensors_is_never_cut(form, batch, kind, engine, data):
    run, _, sizes = FORMS[form]
    loss = loss_of(kind)
    knobs = {"microbatch_size": data.draw(st.sampled_from(sizes)), "engine": engine}
    knobs["reduction"] = "sum" if kind == "sum" else "mean"
    with refused(ValueError, "holds no tensor", "one row per sample", given=PARAMS, loss=loss):
        run(loss, [batch], **knobs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("word", ["sum", "mean", "stack", "last"])
def test_the_aux_of_a_batch_without_tensors_is_that_of_one_microbatch(kind, word):
    """And of a batch that is not cut, what the loss returned."""
    loss = loss_of(kind)
    with_aux = lambda params, batch: (loss(params, batch), params["a"] * 2)  # noqa: E731
    knobs = {"has_aux": True, "aux_reduction": word}
    knobs["reduction"] = "sum" if kind == "sum" else "mean"
    step = pa.make_step(with_aux, pa.sgd(1.0), **knobs)
    _, info = once(step, PARAMS, {"weight": 2.0})
    _, aux = pa.grad(with_aux, engine="autograd", **knobs)(PARAMS, {"weight": 2.0})
    expected = PARAMS["a"] * 2
    assert_trees_bitwise_equal(info.aux, expected[None] if word == "stack" else expected)
    assert_trees_bitwise_equal(aux, expected)
