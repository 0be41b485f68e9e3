"""Metrics beside a loss, each with a weight of its own: those of the whole batch in any cut."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pureaccum as pa
from pureaccum.testing.strategies import compositions, seeds
from tests.draws import generator


pytestmark = [pytest.mark.laws, pytest.mark.promise("values"), pytest.mark.promise("weights")]
ROWS = 7
REDUCTIONS = {
    "accuracy": "concat",
    "each": {"nll": "sum"},
    "top": "max",
    "least": "min",
    "seen": "sum",
}


def tokens(seed):
    """Samples of which some have no token at all."""
    drawn = generator(seed)
    mask = torch.randint(0, 2, (ROWS, 4), generator=drawn).bool()
    mask[torch.randint(0, ROWS, (2,), generator=drawn)] = False
    mask[0, 0] = True
    return {"x": torch.randint(-9, 10, (ROWS, 4), generator=drawn).float(), "mask": mask}


def loss(w, batch):
    x, mask = batch["x"] * w, batch["mask"]
    right = (x > 0) & mask
    metrics = {
        "accuracy": pa.Weighted(right.sum(), mask.sum()),  # a count over a count
        "each": {"nll": pa.Weighted((x * mask).sum(), mask.sum())},
        "top": x.amax(),
        "least": x.amin(),
        "seen": len(x),
    }
    return pa.Weighted((x * mask).sum(), len(x)), metrics


def check(w, batch, metrics):
    x, mask = (batch["x"] * w).double(), batch["mask"]
    count = int(mask.sum())
    accuracy = Fraction(int(((x > 0) & mask).sum()), count)
    assert metrics["accuracy"].dtype == torch.float64
    assert float(metrics["accuracy"]) == float(accuracy)
    assert metrics["each"]["nll"] == ((x * mask).sum() / count).float()
    assert (metrics["top"], metrics["least"], metrics["seen"]) == (x.max(), x.min(), ROWS)


OPTIONS = {"has_aux": True, "aux_reduction": REDUCTIONS}


def by_step(sizes, **options):
    step = pa.make_step(loss, pa.sgd(0.0), **OPTIONS | {"microbatch_size": sizes} | options)
    return lambda w, batch: told(step(step.init(w), batch))


def by_window(sizes, **options):
    step = pa.make_step(loss, pa.sgd(0.0), **OPTIONS, **options)
    return lambda w, batch: told(step.window(step.init(w), pa.microbatches(batch, sizes)))


def told(result):
    return result[1].loss, result[1].aux


def by_stream(sizes):
    of = pa.value(loss, stream=True, **OPTIONS)
    return lambda w, batch: of(w, pa.microbatches(batch, sizes))


WAYS = {
    "value": lambda sizes: pa.value(loss, microbatch_size=sizes, **OPTIONS),
    "stream": by_stream,
    "grad": lambda sizes: (
        lambda w, batch: pa.grad_and_value(loss, microbatch_size=sizes, **OPTIONS)(w, batch)[1]
    ),
    "step": by_step,
    "a step that skips": lambda sizes: by_step(sizes, nonfinite="skip"),
    "window": by_window,
    "window of auto": lambda sizes: by_window(sizes, microbatch_size="auto"),
    "microbatch": lambda sizes: pa.microbatch(
        loss, microbatch_size=sizes, reduce=("sum", REDUCTIONS)
    ),
}


@pytest.mark.parametrize("way", WAYS)
@given(seeds(), compositions(ROWS))
def test_each_metric_is_that_of_the_whole_batch(way, seed, sizes):
    w, batch = torch.tensor(2.0), tokens(seed)
    value, metrics = WAYS[way](sizes)(w, batch)
    check(w, batch, metrics)
    assert value.float() == ((batch["x"] * w * batch["mask"]).double().sum() / ROWS).float()


@pytest.mark.parametrize("transform", [pa.value, pa.grad_and_value])
@given(seeds())
def test_a_batch_that_is_not_cut_has_the_same_metrics(transform, seed):
    w, batch = torch.tensor(2.0), tokens(seed)
    result = transform(loss, has_aux=True)(w, batch)
    metrics = result[1] if transform is pa.value else result[1][1]
    check(w, batch, metrics | {"seen": metrics["seen"]})


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("way", "size"), [(by_step, 2), (by_window, 3), (by_step, 7), (by_window, 7)]
)
def test_a_compiled_step_has_the_same_metrics(way, size):
    w, batch = torch.tensor(2.0), tokens(1)
    options = {"compile": {"backend": "eager"}, "microbatch_size": size}
    sizes = [size] * (ROWS // size) + [ROWS % size] * (ROWS % size > 0)
    check(w, batch, way(sizes, **options)(w, batch)[1])


@given(seeds(), st.sampled_from([0.0, math.nan, math.inf]))
def test_a_microbatch_without_weight_or_that_is_skipped_adds_nothing(seed, bad):
    """A metric that is NaN over no token, and a microbatch that is left out with its weight."""

    def spoiled(w, x):
        mean = pa.Weighted(x[:, 0].sum() * (x[:, 1] > 0).any() / x[:, 1].sum() * x[:, 1].sum(), 1)
        counted = pa.Weighted((x[:, 0] * x[:, 1]).sum() / x[:, 1].sum(), x[:, 1].sum())
        return (x[:, 0] * w).sum(), {"none": counted, "mean": mean}

    x = torch.tensor([[3.0, 1.0], [5.0, 0.0], [bad, 1.0], [7.0, 1.0]])
    step = pa.make_step(
        spoiled, pa.sgd(1.0), has_aux=True, microbatch_size=1, nonfinite="skip", reduction="sum"
    )
    _, info = step(step.init(torch.tensor(1.0)), x)
    finite = math.isfinite(bad)
    assert info.skipped == (not finite)
    assert info.aux["none"] == (3.0 + 7.0 + (bad if finite else 0)) / (2 + finite)


def test_metrics_of_no_weight_are_nan():
    def nothing(w, x):
        return (x * w).sum(), {"mean": pa.Weighted(x.sum(), 0), "int": pa.Weighted(3, 2)}

    for size in (None, 1, 2):
        evaluate = pa.value(nothing, has_aux=True, microbatch_size=size, reduction="sum")
        _, aux = evaluate(torch.ones(()), torch.ones(2))
        assert aux["mean"].isnan()
        assert aux["int"] == 1.5


@pytest.mark.promise("errors")
@pytest.mark.parametrize(
    ("mean", "told"),
    [
        (pa.Weighted(torch.ones(2), 1), "the total of .*'m'.*shape"),
        (pa.Weighted(torch.ones(()), torch.ones(2)), "weight"),
        (pa.Weighted("much", 1), "a str"),
    ],
)
@pytest.mark.parametrize("size", [None, 1])
def test_what_is_no_mean_is_refused(mean, told, size):
    options = {"has_aux": True, "microbatch_size": size, "reduction": "sum"}
    with pytest.raises((TypeError, ValueError), match=told if size else "total|weight"):
        pa.value(lambda w, x: ((w * x).sum(), {"m": mean}), **options)(
            torch.ones(()), torch.ones(2)
        )


# Value: a policy, a stream -----------------------------------------------------------------------


@pytest.mark.promise("policy")
@pytest.mark.parametrize("way", ["whole", "cut", "stream"])
@pytest.mark.parametrize("mode", ["compute", "autocast"])
def test_a_policy_is_that_of_the_step(way, mode):
    seen = set[torch.dtype]()

    def squares(w, x):
        out = x @ w
        seen.add(out.dtype)
        return out.square().mean(), {"out": out.sum(), "mean": pa.Weighted(out.sum(), len(x))}

    w, x = torch.ones(4, 2), torch.arange(24.0).reshape(6, 4) / 7
    policy = pa.Policy(**{mode: torch.bfloat16})
    options = {"policy": policy, "aux_reduction": "sum", "check": False}
    step = pa.make_step(squares, pa.sgd(0.0), has_aux=True, microbatch_size=2, **options)
    _, info = step(step.init(w), x)
    cut = {"whole": {}, "cut": {"microbatch_size": 2}, "stream": {"stream": True}}[way]
    evaluate = pa.value(squares, has_aux=True, **options, **cut)
    loss, aux = evaluate(w, [*x.split(2)] if way == "stream" else x)
    assert seen == {torch.bfloat16}
    assert loss.dtype == aux["out"].dtype == aux["mean"].dtype == torch.float32
    assert abs(loss - info.loss) <= 2**-7 * info.loss  # u of bfloat16, once for each of two sums
    if way != "whole":
        assert loss == info.loss.float()
        assert aux["out"] == info.aux["out"]
        assert aux["mean"] == info.aux["mean"]
    assert w.dtype == torch.float32


@given(seeds(), compositions(ROWS), st.sampled_from([None, 1, 2, [3]]))
def test_a_stream_of_batches_is_one_batch(seed, sizes, size):
    x = torch.randint(-9, 10, (ROWS,), generator=generator(seed)).float()
    size = None if size == [3] else size
    value = pa.value(lambda w, x: (w * x).sum(), reduction="sum", stream=True, microbatch_size=size)
    assert value(torch.tensor(2.0), iter(x.split(sizes))) == 2 * x.sum()
    means = pa.value(lambda w, x: (w * x).mean(), stream=True, microbatch_size=size)
    whole = float(sum(Fraction(int(each)) for each in x) * 2 / ROWS)
    got = float(means(torch.tensor(2.0), [*x.split(sizes)]))
    assert abs(got - whole) <= (ROWS + 2) * 2**-24 * 2 * float(x.abs().sum()) / ROWS


def test_several_streams_go_side_by_side():
    value = pa.value(
        lambda w, x, y: (w * x * y).sum(), batch_argnums=(1, 2), reduction="sum", stream=True
    )
    x = torch.arange(6.0)
    assert value(torch.tensor(1.0), [*x.split(2)], iter(x.split(2))) == x.square().sum()
    with pytest.raises(ValueError, match=r"args\[2\] has no batch 2"):
        value(torch.tensor(1.0), [*x.split(2)], [*x.split(2)[:2]])


@pytest.mark.promise("errors")
def test_what_is_no_stream_is_refused():
    def value(batch, **options):
        return pa.value(lambda w, x: w * x[0].mean(), stream=True, **options)(
            torch.tensor(1.0), batch
        )

    for batch in (torch.ones(4), (torch.ones(4), torch.ones(4)), {"x": torch.ones(4)}, 3):
        with pytest.raises(TypeError, match="expected a list or another iterable of batches"):
            value(batch)
    for batch, options, told in (
        ([], {}, "the stream gave no batch, so there is no value"),
        ([], {"microbatch_size": "auto"}, "'auto' does not work with a stream"),
        ([(torch.ones(3), torch.ones(2))], {}, "has 2 samples"),
    ):
        with pytest.raises(ValueError, match=told):
            value(batch, **options)
    with pytest.raises(TypeError, match="policy is 'bf16'"):
        pa.value(lambda w, x: (w * x).mean(), policy="bf16")


@pytest.mark.promise("writes")
def test_a_write_to_a_later_batch_of_a_stream_is_seen():
    calls = 0

    def writing(w, x):
        nonlocal calls
        calls += 1
        if calls == 3:
            x.mul_(2.0)
        return (w * x).mean()

    with pytest.raises(RuntimeError, match="written to"):
        pa.value(writing, stream=True)(torch.tensor(1.0), [torch.ones(2) for _ in range(4)])
