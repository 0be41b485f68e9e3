"""A step is the full-batch update, to the bit, however its batch is cut or streamed.

Exact data, and a learning rate and loss scales that are powers of two.
"""

import itertools
from typing import NamedTuple

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import KINDS, compositions, losses, pieces, reduction
from tests.draws import examples, few, powers_of_two, slices, take
from tests.exactly import copied, same
from tests.problems import in_a_window as streamed
from tests.tables import each_once


pytestmark = [pytest.mark.exact, pytest.mark.promise("applied")]
scales = st.integers(-10, 60).map(lambda e: 2.0**e)
rates = st.integers(-8, 3).map(lambda e: 2.0**e)
kinds = pytest.mark.parametrize("kind", KINDS)
engines = st.sampled_from(["func", "autograd"])
not_finite = st.sampled_from([torch.inf, -torch.inf, torch.nan])


def models(kind):
    """Means over a power of two are exact also where torch itself takes them."""
    return (powers_of_two if kind == "mean" else few).flatmap(losses)


def weight_of(kind, batch):
    return {"sum": 0.0, "mean": len(batch["y"]), "weighted": float(batch["mask"].sum())}[kind]


def updated(params, grads, lr):
    """Rounded once: the product is exact."""
    return optree.tree_map(lambda p, g: p - lr * g, params, grads)


def dense(grads):
    return optree.tree_map(lambda g: g.to_dense(), grads)


class Fields(NamedTuple):
    """What a StepInfo says, as numbers."""

    weight: float
    microbatches: int
    skipped: int
    applied: bool
    scale: float


def fields(info):
    return Fields(*(getattr(info, name).item() for name in Fields._fields))


def stays(old, new, rows):
    """What a step that is not applied may change: two counts, and the loss scale."""
    assert_trees_bitwise_equal(new[:3], old[:3])
    assert_trees_bitwise_equal(new.key, old.key)
    assert new.attempts == old.attempts + 1
    assert new.applied == old.applied
    assert new.samples == old.samples + rows


# The full batch ---------------------------------------------------------------------------


@kinds
@examples(1 / 2)
@given(data=st.data(), lr=rates, scale=st.none() | scales, engine=engines, donate=st.booleans())
def test_any_cut_is_the_full_batch_update(kind, data, lr, scale, engine, donate):
    """Whole in microbatches of any size, and streamed in any cut, empty microbatches included."""
    model = data.draw(models(kind))
    grads, value = model.full_batch(kind)
    grads = dense(grads)
    weight = weight_of(kind, model.batch)
    options = {
        "reduction": reduction(kind),
        "loss_scale": scale and pa.dynamic_loss_scale(scale, min_scale=2.0**-20),
        "engine": engine,
        "donate": donate,
    }
    want = updated(model.params, grads, lr) if weight or kind == "sum" else model.params

    def check(new, info, microbatches, exact):
        assert_trees_bitwise_equal(new.params, want)
        assert_trees_bitwise_equal(info.grad_norm, pa.global_norm(grads))
        if exact:
            assert_trees_bitwise_equal(info.loss, value)
        applied = bool(weight) or kind == "sum"
        assert fields(info) == Fields(weight, microbatches, 0, applied, scale or 1.0)
        assert info.aux == ()
        counts = (new.attempts.item(), new.applied.item(), new.samples.item())
        assert counts == (1, applied, model.samples)
        if scale:
            assert new.loss_scale.scale == scale
            assert new.loss_scale.growth_tracker == applied

    sizes = data.draw(compositions(model.samples, empty=True))
    step = pa.make_step(model.loss(kind), pa.sgd(lr), **options)
    new, info = streamed(step, step.init(model.params), pieces(model.batch, sizes))
    check(new, info, len(sizes), kind != "mean" or all(n & (n - 1) == 0 for n in sizes))

    for size in (None, *range(1, model.samples + 2)):
        step = pa.make_step(model.loss(kind), pa.sgd(lr), microbatch_size=size, **options)
        new, info = step(step.init(model.params), model.batch)
        exact = kind != "mean" or size is None or size & (size - 1) == 0 or size >= model.samples
        check(new, info, 1 if size is None else -(-model.samples // size), exact)


@examples(1 / 2)
@given(losses(13, sparse=True), st.data())
def test_all_cuts_of_a_mean_over_13_rows_agree_to_the_bit(model, data):
    sums, _ = model.full_batch("sum")
    want = updated(model.params, optree.tree_map(lambda g: g / 13, dense(sums)), 0.25)
    options = {"loss_scale": pa.static_loss_scale(data.draw(scales))}
    step = pa.make_step(model.loss("mean"), pa.sgd(0.25), **options)
    parts = pieces(model.batch, data.draw(compositions(13)))
    assert_trees_bitwise_equal(streamed(step, step.init(model.params), parts)[0].params, want)
    size = data.draw(st.integers(1, 12))
    step = pa.make_step(model.loss("mean"), pa.sgd(0.25), microbatch_size=size, **options)
    new, info = step(step.init(model.params), model.batch)
    assert_trees_bitwise_equal(new.params, want)
    assert info.weight == 13


@examples(1 / 2)
@given(losses(13, sparse=True), st.integers(13, 15))
def test_a_step_of_one_microbatch_is_torch_func_untouched(model, size):
    step = pa.make_step(model.loss("mean"), pa.sgd(0.25), microbatch_size=size)
    grads, value = model.full_batch("mean")
    new, info = step(step.init(model.params), model.batch)
    assert_trees_bitwise_equal(new.params, updated(model.params, dense(grads), 0.25))
    assert_trees_bitwise_equal(info.loss, value)
    assert fields(info) == Fields(13, 1, 0, True, 1.0)


@pytest.mark.parametrize(
    "optimizer",
    [
        pa.sgd(0.1, momentum=0.9, nesterov=True),
        pa.adamw(pa.linear_warmup(0.1, 3)),
        pa.chain(pa.clip_by_global_norm(2.0), pa.adam(0.1, amsgrad=True)),
        pa.from_torch(torch.optim.Adagrad, lr=0.1),
    ],
    ids=["momentum", "adamw", "clipped adam", "adagrad"],
)
@kinds
@examples(1 / 6)
@given(data=st.data(), scale=scales)
def test_no_optimizer_sees_the_cut_or_the_scale(kind, optimizer, data, scale):
    model = data.draw(models(kind))
    options = {"reduction": reduction(kind)}
    plain = pa.make_step(model.loss(kind), optimizer, **options)
    want, _ = plain(plain.init(model.params), model.batch)

    size = data.draw(st.integers(1, model.samples + 1))
    scaled = pa.make_step(
        model.loss(kind),
        optimizer,
        microbatch_size=size,
        loss_scale=pa.dynamic_loss_scale(scale, min_scale=2.0**-20),
        **options,
    )
    parts = pieces(model.batch, data.draw(compositions(model.samples)))
    for new, _ in (
        scaled(scaled.init(model.params), model.batch),
        streamed(scaled, scaled.init(model.params), parts),
    ):
        assert_trees_bitwise_equal((new.params, new.opt_state), (want.params, want.opt_state))


def test_the_norm_is_unscaled_and_from_before_clipping():
    step = pa.make_step(
        lambda w, x: (w * x).sum(),
        pa.chain(pa.clip_by_global_norm(0.5), pa.sgd(1.0)),
        reduction="sum",
        microbatch_size=1,
        loss_scale=pa.static_loss_scale(2.0**10),
    )
    state = step.init(torch.zeros(2))
    new, info = step(state, torch.tensor([[1.0, 4.0], [2.0, 0.0]]))
    assert info.grad_norm == 5
    assert torch.allclose(new.params.norm(), torch.tensor(0.5), atol=0, rtol=1e-5)  # 1e-6 / 5


# Aux --------------------------------------------------------------------------------------


@pytest.mark.promise("values")
@kinds
@examples(1 / 2)
@given(data=st.data())
def test_aux_of_a_step_is_reduced(kind, data):
    model = data.draw(models(kind))
    plain = model.loss(kind)

    def loss(params, batch):
        rows = model.per_row(params, batch)
        at = batch["index"]
        aux = {"all": rows, "count": len(at), "last": at[-1], "each": at[0], "mean": at.amax()}
        return plain(params, batch), aux

    how = {"all": "concat", "count": "sum", "last": "last", "each": "stack", "mean": "mean"}
    batch = model.batch | {"index": torch.arange(1.0, model.samples + 1)}
    size = data.draw(st.integers(1, model.samples))
    step = pa.make_step(
        loss,
        pa.sgd(0.5),
        has_aux=True,
        aux_reduction=how,
        reduction=reduction(kind),
        microbatch_size=size,
        loss_scale=pa.static_loss_scale(2.0**20),
    )
    state = step.init(model.params)
    _, info = step(state, batch)
    assert_trees_bitwise_equal(info.aux["all"], model.per_row(model.params, batch))
    starts = range(0, model.samples, size)
    assert info.aux["count"].item() == model.samples
    assert info.aux["last"].item() == model.samples
    assert info.aux["each"].tolist() == [start + 1.0 for start in starts]
    ends = [min(start + size, model.samples) for start in starts]
    shares = [
        float(batch["mask"][a:b].sum()) if kind == "weighted" else b - a
        for a, b in zip(starts, ends, strict=True)
    ]
    top = sum(share * end for share, end in zip(shares, ends, strict=True))
    want = torch.tensor(top).div(sum(shares))
    assert_trees_bitwise_equal(info.aux["mean"], want)

    window, seen = step.begin(state), []
    for start, end in zip(starts, ends, strict=True):
        window, aux = step.update(state, window, take(batch, slice(start, end)))
        assert aux["count"] == end - start
        seen.append(aux["all"])
    assert_trees_bitwise_equal(torch.cat(seen), info.aux["all"])
    assert step.apply(state, window)[1].aux == ()


# Skip -------------------------------------------------------------------------------------


@pytest.mark.promise("skip")
@kinds
@examples(1 / 2)
@given(
    data=st.data(),
    number=not_finite,
    scale=st.none() | scales,
    engine=engines,
    donate=st.booleans(),
)
def test_skip_leaves_a_microbatch_out_with_its_weight(kind, data, number, scale, engine, donate):
    """As if it had never come, but that it is counted and the loss scale backs off."""
    model = data.draw((st.sampled_from([4, 8]) if kind == "mean" else st.just(7)).flatmap(losses))
    bad = data.draw(st.lists(st.integers(0, model.samples - 1), max_size=2))
    batch = model.batch | {"y": model.batch["y"].clone()}
    batch["y"][bad] = number

    def split(parts):
        """Those that are left, and how many are skipped."""
        left = []
        for rows in parts:
            none = kind == "weighted" and batch["mask"][rows].sum() == 0
            if none or batch["y"][rows].isfinite().all():
                left.append(rows)
        return left, len(parts) - len(left)

    def make(nonfinite, size=None):
        return pa.make_step(
            model.loss(kind),
            pa.sgd(0.5, momentum=0.5),
            microbatch_size=size,
            reduction=reduction(kind),
            nonfinite=nonfinite,
            loss_scale=scale and pa.dynamic_loss_scale(scale, min_scale=2.0**-30),
            engine=engine,
            donate=donate,
        )

    def check(old, new, info, parts):
        left, skipped = split(parts)
        clean = make("propagate")
        start = clean.init(model.params)
        want, what = streamed(clean, start, [take(batch, rows) for rows in left])
        assert_trees_bitwise_equal(new[:3], want[:3])
        applied = bool(what.applied)
        assert fields(info) == Fields(
            what.weight.item(), len(parts), skipped, applied, scale or 1.0
        )
        assert_trees_bitwise_equal(info.grad_norm, what.grad_norm)
        assert_trees_bitwise_equal(info.loss, what.loss)
        if not applied:
            stays(old, new, model.samples)
        assert new.samples == model.samples  # skipped ones included
        if scale:
            assert new.loss_scale.scale == (scale / 2 if skipped else scale)
            assert new.loss_scale.growth_tracker == (applied and not skipped)

    step = make("skip")
    parts = slices(data.draw(compositions(model.samples, empty=True)))
    old = copied(step.init(model.params))
    check(old, *streamed(step, copied(old), [take(batch, rows) for rows in parts]), parts)
    size = data.draw(st.integers(1, model.samples - 1))
    step = make("skip", size)
    whole = [slice(i, min(i + size, model.samples)) for i in range(0, model.samples, size)]
    if kind != "mean" or size & (size - 1) == 0 or not bad:
        check(old, *step(copied(old), batch), whole)


@pytest.mark.promise("skip")
@kinds
@pytest.mark.parametrize("size", [None, 2, 6])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_batch_that_is_skipped_whole_is_not_applied(kind, size, scaled):
    """The loss scale hears of it."""

    def loss(w, x):
        rows = (w * x) ** 2
        if kind == "weighted":
            return pa.Weighted(rows.sum(), torch.tensor(float(len(x))))
        return rows.sum() if kind == "sum" else rows.mean()

    step = pa.make_step(
        loss,
        pa.adamw(0.1),
        reduction=reduction(kind),
        microbatch_size=size,
        nonfinite="skip",
        loss_scale=pa.dynamic_loss_scale(8.0) if scaled else None,
    )
    state, _ = step(step.init(torch.tensor(3.0)), torch.ones(6))
    x = torch.full((6,), torch.inf)
    count = len(list(pa.microbatches(x, size or 6)))
    for new, info in (step(state, x), streamed(step, state, list(pa.microbatches(x, size or 6)))):
        stays(state, new, 6)
        assert fields(info) == Fields(0, count, count, False, 8.0 if scaled else 1.0)
        if scaled:
            assert (new.loss_scale.scale, new.loss_scale.growth_tracker) == (4, 0)


# Not applied ------------------------------------------------------------------------------


BUFFERS = {"seen": torch.tensor([2.0, torch.nan]), "count": torch.tensor(3)}


def with_buffers(params, batch, buffers):
    """A buffer that always changes, and takes NaN on."""
    total = (batch["mask"] * (params["w"] * batch["x"] + params["b"]) ** 2).sum()
    seen = {"seen": buffers["seen"] + batch["x"].sum(), "count": buffers["count"] + 1}
    return pa.Weighted(total, batch["mask"].sum()), seen


class Average:
    """A gradient map that keeps what it saw."""

    def init(self, params):
        return optree.tree_map(torch.zeros_like, params)

    def update(self, grads, state):
        mean = optree.tree_map(lambda m, g: (m + g) / 2, state, grads)
        return mean, mean


OPTIMIZERS = {
    "sgd": pa.sgd(0.5, momentum=0.5),
    "fused sgd": pa.sgd(0.5, momentum=0.5, fused=True),
    "adamw": pa.adamw(pa.cosine_decay(0.1, 10)),
    "fused adamw": pa.adamw(0.1, amsgrad=True, fused=True),
    "chain": pa.chain(
        pa.clip_by_global_norm(1.0),
        pa.partition({"a": pa.sgd(0.5), "b": pa.adam(0.1)}, lambda p: "a" if p == "w" else "b"),
    ),
    "map with a state": pa.chain(Average(), pa.sgd(0.5)),
    "from_torch": pa.from_torch(torch.optim.RMSprop, lr=0.1, momentum=0.5),
}


OPTIONS = {
    f"{scaled}-{donate}-{buffers}": (scaled, donate, buffers)
    for scaled, donate, buffers in itertools.product(
        (False, True), (False, True), ("freeze", "sequential", "pooled")
    )
}


@each_once("optimizer, scaled, donate, buffers", OPTIMIZERS, OPTIONS)
def test_a_step_not_applied_changes_no_bit(optimizer, scaled, donate, buffers):
    step = pa.make_step(
        with_buffers,
        optimizer,
        microbatch_size=2,
        buffers=buffers,
        loss_scale=pa.dynamic_loss_scale(8.0, growth_interval=3) if scaled else None,
        donate=donate,
    )
    good = {"x": torch.tensor([1.0, 2.0, 3.0]), "mask": torch.ones(3)}
    bad = good | {"x": torch.tensor([1.0, 2.0, torch.nan])}
    masked = good | {"mask": torch.zeros(3)}
    nothing = {name: x[:0] for name, x in good.items()}
    params = {"w": torch.tensor(2.0), "b": torch.tensor(-1.0)}
    state, info = step(step.init(params, BUFFERS), good)
    assert info.applied
    assert same(state.buffers, BUFFERS) is (buffers == "freeze")

    tracker = 1
    for batch, rows in ((bad, 3), (masked, 3), (nothing, 0), (good | bad | masked, 3)):
        parts = list(pa.microbatches(batch, 2))
        for run in (lambda s, b: step(s, b), lambda s, _, p=parts: streamed(step, s, p)):
            old = copied(state)
            state, info = run(state, batch)
            stays(old, state, rows)
            assert not info.applied
            assert info.loss.isnan()
            if scaled and batch is bad:  # the others say nothing about the scale
                assert state.loss_scale.scale == old.loss_scale.scale / 2
                tracker = 0
            elif scaled:
                assert_trees_bitwise_equal(state.loss_scale, old.loss_scale)
            if scaled:
                assert state.loss_scale.growth_tracker == tracker
    old = copied(state)
    state, info = step(state, good)
    assert info.applied
    assert not same(state.params, old.params)


@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
def test_an_overflow_by_the_scale_alone_is_not_applied(nonfinite):
    """And the next step, with half the scale, is the step that was meant."""
    step = pa.make_step(
        lambda w, x: (w * x).sum(),
        pa.sgd(1.0),
        reduction="sum",
        nonfinite=nonfinite,
        microbatch_size=1,
        loss_scale=pa.dynamic_loss_scale(2.0**127, backoff_factor=2.0**-10),
    )
    state = step.init(torch.tensor(1.0))
    x = torch.tensor([4.0, 1.0])
    new, info = step(state, x)
    if nonfinite == "skip":  # the other microbatch has no overflow
        assert fields(info) == Fields(0, 2, 1, True, 2.0**127)
        assert new.params == 0
    else:
        stays(state, new, 2)
    assert new.loss_scale.scale == 2.0**117
    last, info = step(new, x)
    assert last.params == new.params - 5
    assert (info.applied, info.grad_norm) == (True, 5)
