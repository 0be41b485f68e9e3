"""A bad value is no error: it makes the result NaN. And a batch of nothing has a result, too."""

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
from tests.refusals import PARAMS, Loss, make_batch, refused, squares


pytestmark = [
    pytest.mark.faults,
    pytest.mark.promise("applied"),
    pytest.mark.promise("batches"),
]
BAD = (-1.0, -0.5, -1e300, torch.nan, torch.inf, -torch.inf)
engines = pytest.mark.parametrize("engine", ENGINES)
modes = pytest.mark.parametrize("nonfinite", NONFINITE)


def weighing(params, batch):
    """Samples of which two weigh what the batch says of each."""
    return pa.Weighted((batch["x"] @ params["w"] + params["b"]).sum(), batch["weight"].sum() / 2)


def all_nan(tree):
    return all(bool(x.isnan().all()) for x in optree.tree_leaves(tree))


def all_zero(grads):
    same = lambda x, like: x.dtype == like.dtype and torch.equal(x, 0 * like)  # noqa: E731
    return optree.tree_all(optree.tree_map(same, grads, PARAMS))


good = st.sampled_from([0.0, 1.0, 3.0, 2.0**40])


@engines
@modes
@given(
    weights=st.lists(good, min_size=0, max_size=4),
    bad=st.sampled_from(BAD),
    at=st.integers(0, 4),
    size=st.sampled_from([None, 2, 100]),
)
def test_a_weight_that_is_none_makes_all_nan(engine, nonfinite, weights, bad, at, size):
    """Negative, infinite or NaN; also where the sum of all weights would be positive."""
    weights.insert(at, bad)
    at = weights.index(bad) if bad == bad else [w != w for w in weights].index(True)
    if size != 2:  # one microbatch, which weighs what the first sample says
        weights = [weights[at]]
    batch = {
        "x": torch.ones(2 * len(weights), 2),
        "weight": torch.tensor(weights, dtype=torch.float64).repeat_interleave(2),
    }
    options = {"engine": engine, "nonfinite": nonfinite, "microbatch_size": size, "check": False}
    assert all_nan(pa.grad_and_value(weighing, **options)(PARAMS, batch))
    assert all_nan(pa.grad(weighing, **options)(PARAMS, batch))
    assert all_nan(pa.value(weighing, microbatch_size=size, check=False)(PARAMS, batch))
    acc = pa.accumulator(weighing, engine=engine, nonfinite=nonfinite)
    state = in_parts(acc, PARAMS, pa.microbatches(batch, 2), donate=True)
    assert all_nan(acc.finalize(acc.merge(acc.init(PARAMS), state)))


@pytest.mark.parametrize("bad", BAD)
def test_a_python_number_that_is_no_weight_makes_all_nan(bad):
    loss = lambda params, batch: pa.Weighted(squares(params, batch), bad)  # noqa: E731
    assert all_nan(pa.grad_and_value(loss, microbatch_size=2)(PARAMS, make_batch()))


@engines
@modes
@pytest.mark.parametrize(("size", "reduction"), [(1, "mean"), (3, "mean"), (2, "sum")])
def test_a_mean_over_no_rows_is_nan_and_a_sum_zero_both_with_gradient_zero(
    engine, nonfinite, size, reduction
):
    """The loss is not called: nobody promised that it stands an empty batch."""
    for returns in (squares, weighing) if reduction == "mean" else (squares,):
        loss, batch = Loss(returns), make_batch(0)
        options = {"microbatch_size": size, "reduction": reduction}
        both = pa.grad_and_value(loss, engine=engine, nonfinite=nonfinite, **options)
        grads, value = both(PARAMS, batch)
        assert all_zero(grads)
        for came in (value, pa.value(loss, **options)(PARAMS, batch)):
            assert came.isnan() if reduction == "mean" else came == 0
        assert loss.calls == 0


@pytest.mark.parametrize(("reduction", "value"), [("mean", torch.nan), ("sum", 0.0)])
@pytest.mark.parametrize("donate", [False, True])
def test_a_state_that_saw_nothing_has_gradient_zero(reduction, value, donate):
    acc = pa.accumulator(squares, reduction=reduction)
    grads, came = acc.finalize(acc.init(PARAMS), donate=donate)
    assert all_zero(grads)
    torch.testing.assert_close(float(came), value, rtol=0, atol=0, equal_nan=True)


@engines
@modes
@pytest.mark.parametrize("donate", [False, True])
def test_an_empty_microbatch_of_a_stream_changes_no_mean(engine, nonfinite, donate):
    """Its own mean is NaN; it is counted, as one that was finite, and weighs nothing."""
    acc = pa.accumulator(squares, engine=engine, nonfinite=nonfinite)
    state = acc.update(acc.init(PARAMS), PARAMS, make_batch(3))
    expected = acc.finalize(state)
    state = acc.update(state, PARAMS, make_batch(0), donate=donate)
    assert optree.tree_all(optree.tree_map(torch.equal, acc.finalize(state), expected))
    assert (int(state.microbatches), int(state.skipped), int(state.nonfinite)) == (2, 0, 0)


@pytest.mark.parametrize("batch", [torch.ones(0), {"x": torch.ones(0, 3), "training": True}])
def test_a_batch_without_rows_has_no_microbatches(batch):
    assert list(pa.microbatches(batch, 2)) == []


# Batches without any tensor, which have no rows: taken whole, or refused, and never cut --------


ABC = {"a": torch.tensor([1.0, -2.0, 4.0]), "b": torch.tensor(3.0)}

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
    leaves = {name: x.clone().requires_grad_() for name, x in ABC.items()}
    value = torch.stack([total(leaves, batch) for batch in batches]).sum()
    grads = torch.autograd.grad(value, list(leaves.values()))
    weight = 2 * len(batches) if kind == "weighted" else 1
    return {k: g / weight for k, g in zip(leaves, grads, strict=True)}, value.double() / weight


class Form(NamedTuple):
    """A way to give batches, ``run(loss, batches, **options)``; the gradients and the value."""

    run: Callable[..., Any]
    stream: bool = False
    sizes: tuple[Any, ...] = (1, 2, "auto")


def _step(loss, batches, stream=False, **options):
    """One of length 1 shows the gradients."""
    step = pa.make_step(loss, pa.sgd(1.0), **options)
    if stream:
        new, info = in_a_window(step, step.init(ABC), batches)
    else:
        new, info = once(step, ABC, batches[0])
    assert info.applied
    assert new.samples == 0
    assert info.microbatches == (len(batches) if stream else 1)
    return {name: x - new.params[name] for name, x in ABC.items()}, info.loss


def _accumulated(loss, batches, donate=False, **options):
    acc = pa.accumulator(loss, **options)
    state = in_parts(acc, ABC, batches, donate)
    assert state.microbatches == len(batches)
    return acc.finalize(acc.merge(acc.init(ABC), state))


def _grads(loss, batches, **options):
    grads = pa.grad(loss, **options)(ABC, batches[0])
    options = {name: options[name] for name in ("microbatch_size", "reduction") if name in options}
    return grads, pa.value(loss, **options)(ABC, batches[0])


FORMS = {
    "grad, value": Form(_grads, sizes=(1, 2, [1], "auto")),
    "grad_and_value": Form(
        lambda f, b, **options: pa.grad_and_value(f, **options)(ABC, b[0]),
        sizes=(1, 2, [1], "auto"),
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
    options = {"engine": engine, "nonfinite": nonfinite}
    options["reduction"] = "sum" if kind == "sum" else "mean"
    if stream and kind == "mean":
        words = ("no batch argument holds a tensor", "Weighted", "reduction='sum'", "batch_argnums")
        with refused(ValueError, *words, loss=loss, calls=1):
            run(loss, batches, **options)
        return
    grads, value = run(loss, batches, **options)
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
    options = {"microbatch_size": data.draw(st.sampled_from(sizes)), "engine": engine}
    options["reduction"] = "sum" if kind == "sum" else "mean"
    with refused(ValueError, "holds no tensor", "one row per sample", given=ABC, loss=loss):
        run(loss, [batch], **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("word", ["sum", "mean", "stack", "last"])
def test_the_aux_of_a_batch_without_tensors_is_that_of_one_microbatch(kind, word):
    """And of a batch that is not cut, what the loss returned."""
    loss = loss_of(kind)
    with_aux = lambda params, batch: (loss(params, batch), params["a"] * 2)  # noqa: E731
    options = {"has_aux": True, "aux_reduction": word}
    options["reduction"] = "sum" if kind == "sum" else "mean"
    step = pa.make_step(with_aux, pa.sgd(1.0), **options)
    _, info = once(step, ABC, {"weight": 2.0})
    _, aux = pa.grad(with_aux, engine="autograd", **options)(ABC, {"weight": 2.0})
    expected = ABC["a"] * 2
    assert_trees_bitwise_equal(info.aux, expected[None] if word == "stack" else expected)
    assert_trees_bitwise_equal(aux, expected)
