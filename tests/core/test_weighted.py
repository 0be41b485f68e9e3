"""``Weighted`` is total / weight of the whole batch, in every form, whatever it is cut into."""

import itertools
from functools import reduce
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import seeds
from tests.draws import examples
from tests.exactly import RATIO, ROWS, copied, full_batch, make_batch, make_params
from tests.problems import in_a_window, in_parts, once
from tests.refusals import refused


pytestmark = [pytest.mark.laws, pytest.mark.promise("weights")]


def taken(loss, size, params, batch, **options):
    """A step whose next parameters are the gradients."""
    optimizer = SimpleNamespace(init=lambda _: (), apply=lambda grads, state, _: (grads, state))
    step = pa.make_step(loss, optimizer, microbatch_size=size, **options)
    state, info = once(step, params, batch)
    return state.params, info.loss


def under_vmap(loss, size, params, batch, **options):
    gradient = pa.grad_and_value(loss, microbatch_size=size, **options)
    return pa.unstack(torch.func.vmap(gradient, (0, None))(pa.stack([params]), batch))[0]


def stream(loss, size, params, batch, **options):
    acc = pa.accumulator(loss, **options)
    return acc.finalize(in_parts(acc, params, pa.microbatches(batch, size), donate=True))


def merged(loss, size, params, batch, **options):
    acc = pa.accumulator(loss, **options)
    states = [in_parts(acc, params, [part]) for part in pa.microbatches(batch, size)]
    return acc.finalize(reduce(lambda a, b: acc.merge(b, a), states, acc.init(params)), donate=True)


FORMS = {
    "cut": lambda f, n, p, b, **options: pa.grad_and_value(f, microbatch_size=n, **options)(p, b),
    "uncut": lambda f, _, p, b, **options: pa.grad_and_value(f, **options)(p, b),
    "under vmap": under_vmap,
    "stream": stream,
    "merged": merged,
    "step": taken,
}
forms = pytest.mark.parametrize("form", FORMS)


@forms
@examples(1 / 4)
@given(seeds(), st.integers(2, ROWS), st.integers(1, ROWS), st.sampled_from(["mean", "sum"]))
@example(0, 7, 1, "mean")
def test_a_ratio_whose_denominator_is_elsewhere(form, seed, rows, size, reduction):
    """Detection: the sum over all anchors, divided by the number of positives."""
    params, batch = make_params(seed), make_batch(seed, rows)
    batch["mask"][0] = 3  # one positive at least
    grads, value = FORMS[form](RATIO.call, size, params, batch, reduction=reduction)
    assert_trees_bitwise_equal(grads, full_batch(RATIO, params, batch))
    total, weight = RATIO.total(params, batch), RATIO.weight(batch)
    assert value == (total.double() / weight).to(value.dtype)


def masked(w, batch):
    return pa.Weighted((w * batch["x"] * batch["mask"]).sum(), batch["mask"].sum())


def unmasked(w, batch):
    return pa.Weighted((w * batch["x"]).sum(), batch["mask"].sum())


@forms
@pytest.mark.parametrize("loss", [masked, unmasked])
def test_a_batch_of_no_weight_has_no_value(form, loss):
    """Nor a gradient, and no step is applied; both whatever the cut and the reduction."""
    w, batch = torch.tensor(2.0), {"x": torch.arange(1.0, 6.0), "mask": torch.zeros(5)}
    for reduction, size in itertools.product(("mean", "sum"), (1, 4, 9)):
        grads, value = FORMS[form](loss, size, w, batch, reduction=reduction)
        assert value.isnan()
        assert grads == (w if form == "step" else 0.0)
        assert pa.value(loss, microbatch_size=size, reduction=reduction)(w, batch).isnan()
        assert pa.value(loss, reduction=reduction)(w, batch).isnan()


@pytest.mark.parametrize("form", [form for form in FORMS if form != "uncut"])
def test_a_total_without_weight_adds_nothing_where_it_is_no_number(form):
    """One that is a number adds it."""
    batch = {"x": torch.tensor([1.0, torch.inf, 3.0, 4.0]), "mask": torch.tensor([1.0, 0, 1, 0])}
    grads, value = FORMS[form](unmasked, 1, torch.tensor(2.0), batch, check=False)
    assert (grads, value) == (4.0, 8.0)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss", [masked, unmasked])
def test_a_step_over_no_weight_is_not_applied(loss, reduction):
    step = pa.make_step(loss, pa.adamw(0.1), microbatch_size=2, reduction=reduction)
    state = step.init(torch.tensor(1.0))
    before = copied(state)
    batch = {"x": torch.ones(6), "mask": torch.zeros(6)}
    for after, said in step(state, batch), in_a_window(step, state, pa.microbatches(batch, 2)):
        assert not said.applied
        assert said.loss.isnan()
        assert_trees_bitwise_equal(after[:3], before[:3])


def test_samples_without_a_weight_add_their_totals():
    """Each is a microbatch of one sample."""
    w, batch = torch.tensor(2.0), {"x": torch.arange(1.0, 6.0), "mask": torch.arange(5.0) % 2}
    want = torch.func.grad(lambda w: unmasked(w, batch).total / 2)(w)
    for engine in ("vmap", "autograd"):
        got = pa.per_sample_grad(unmasked, reduce="mean", chunk_size=2, engine=engine)(w, batch)
        assert torch.equal(got, want)
    acc = pa.per_sample_accumulator(unmasked, reduce="mean")
    grads, value = acc.finalize(acc.update(acc.init(w), w, batch))
    assert torch.equal(grads, want)
    assert value == unmasked(w, batch).total.double() / 2


# Numbers times Weighted --------------------------------------------------------------------

SCALED = {
    "number *": lambda x: -4 * x,
    "* number": lambda x: x * -4.0,
    "tensor *": lambda x: torch.tensor(-4.0) * x,
    "* tensor": lambda x: x * torch.tensor(-4),
    "/": lambda x: x / -0.25,
    "negative": lambda x: -(4 * x),
}


@pytest.mark.parametrize("scale", SCALED.values(), ids=SCALED)
def test_a_number_times_weighted_scales_the_mean(scale):
    w, batch = torch.tensor(2.0), {"x": torch.arange(1.0, 6.0), "mask": torch.ones(5)}
    want = [-4 * x for x in pa.grad_and_value(masked)(w, batch)]
    gradient = pa.grad_and_value(lambda w, b: scale(masked(w, b)), microbatch_size=2)
    assert [*gradient(w, batch)] == want


@pytest.mark.parametrize("factor", ["2", None, torch.ones(2), pa.Weighted(torch.tensor(1.0), 2)])
def test_weighted_is_scaled_by_numbers_alone(factor):
    for scale in (lambda x: x * factor, lambda x: x / factor):
        with refused(TypeError, "Weighted ", "expected a number or a 0-d tensor"):
            scale(pa.Weighted(torch.tensor(1.0), 2))


# Division ----------------------------------------------------------------------------------


@examples(1 / 2)
@given(seeds(), st.integers(1, 7), st.sampled_from([torch.complex64, torch.complex128]))
def test_complex_sums_are_divided_as_pairs(seed, size, dtype):
    """In every form: torch's own complex division has other bits."""
    random = torch.Generator().manual_seed(seed)
    w = torch.zeros(50, dtype=dtype)
    x, y = torch.randint(-9, 10, (2, 7, 50), generator=random).to(dtype.to_real())
    batch = torch.complex(x, y)

    loss = lambda w, x: pa.Weighted((w * x).real.sum(), 0.75 * len(x))  # noqa: E731
    want = torch.stack([x.sum(0) / 5.25, -y.sum(0) / 5.25], -1)
    for form in FORMS:
        got = FORMS[form](loss, size, w, batch)[0]
        assert torch.equal(torch.view_as_real(got), want.to(got.dtype.to_real())), form
