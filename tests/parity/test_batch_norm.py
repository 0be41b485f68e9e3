"""``batch_norm`` in stages beside ``F.batch_norm`` over the full batch: as near to the truth.

The truth is the same in float64. Where torch itself is off by e, the stages may be off by a few e:
they round the same numbers a few times more. Far from zero, at 1000 deviations, e is large, and
sums of squares would be off by a third of the variance.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import pureaccum as pa
from pureaccum._batch_norm import Share, merge, moments_of, share_of
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import compositions, merge_trees, seeds
from tests.bounds.rounding import UNIT, gamma
from tests.strategies import every, generator


ROWS, CHANNELS = 12, 3
SHAPES = {"1d": (), "3d": (5,), "2d": (4, 3)}
FACTOR = 4.0  # as many roundings as that, where torch has one
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def data(seed: int, shape: tuple[int, ...], shift: float, dtype: torch.dtype) -> Any:
    """The numbers themselves are what they are in the dtype: float64 gets the same ones."""
    g = generator(seed)
    x = torch.randn(ROWS, CHANNELS, *shape, generator=g, dtype=torch.float64) + shift
    y = torch.randn(ROWS, CHANNELS, *shape, generator=g, dtype=torch.float64)
    params = {
        "weight": 1 + torch.rand(CHANNELS, generator=g, dtype=torch.float64),
        "bias": torch.randn(CHANNELS, generator=g, dtype=torch.float64),
        "scale": 1 + torch.rand(CHANNELS, *shape, generator=g, dtype=torch.float64),
    }
    return {k: p.to(dtype) for k, p in params.items()}, {"x": x.to(dtype), "y": y.to(dtype)}


def whole(params: Any, batch: Any) -> Tensor:
    """Something before the norm whose gradient passes through the moments, and a loss after it."""
    h = batch["x"] * params["scale"]
    h = F.batch_norm(h, None, None, params["weight"], params["bias"], training=True)
    return (h * batch["y"]).sum() / h.numel() + (h**3).mean()


def in_stages() -> Any:
    def last(params: Any, x: Any) -> Tensor:
        return (x["h"] * x["y"]).sum() / x["h"].numel() + (x["h"] ** 3).mean()

    return pa.staged(
        [
            pa.rowwise(lambda p, b: {"h": b["x"] * p["scale"], "y": b["y"]}),
            *pa.batch_norm("bn", lambda p: (p["weight"], p["bias"]), at="h"),
            pa.rowwise(last),
        ]
    )


def distance(got: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    return float(sum((got[k].double() - truth[k]).norm() ** 2 for k in truth) ** 0.5)


@shapes
@every(2)
@given(st.data(), seeds(), st.sampled_from([0.0, 3.0]), st.sampled_from(["func", "autograd"]))
def test_in_float64_it_is_the_full_batch_s(
    shape: Any, data_: st.DataObject, seed: int, shift: float, engine: Any
) -> None:
    params, batch = data(seed, shape, shift, torch.float64)
    want, want_value = torch.func.grad_and_value(whole)(params, batch)
    sizes = data_.draw(compositions(ROWS))
    run = pa.grad_and_value(in_stages(), microbatch_size=sizes, engine=engine)
    grads, value = run(params, batch)
    assert distance(grads, want) <= 1e-10 * distance(want, {k: 0 * x for k, x in want.items()})
    assert (value - want_value).abs() <= 1e-10


@shapes
@pytest.mark.parametrize("size", [1, 5, 12])
def test_a_thousand_deviations_from_zero(shape: Any, size: int) -> None:
    """Over seeds, since one may be lucky; both are compared with the truth in float64."""
    ours = full = 0.0
    for seed in range(8):
        params, batch = data(seed, shape, 1000.0, torch.float32)
        wide = [{k: t.double() for k, t in tree.items()} for tree in (params, batch)]
        truth = torch.func.grad(whole)(*wide)
        run = pa.grad(in_stages(), microbatch_size=size)
        ours += distance(run(params, batch), truth) ** 2
        full += distance(torch.func.grad(whole)(params, batch), truth) ** 2
    assert ours <= FACTOR**2 * full


@dtypes
@every(2)
@given(
    compositions(ROWS).flatmap(lambda sizes: st.tuples(st.just(sizes), merge_trees(len(sizes)))),
    seeds(),
    st.sampled_from([0.0, 1000.0]),
    st.sampled_from([*SHAPES.values()]),
)
def test_moments_in_any_grouping(
    dtype: torch.dtype, cut: Any, seed: int, shift: float, shape: Any
) -> None:
    """Of numbers of size A, each mean is off by u A; squares of deviations by a few u of them."""
    sizes, tree = cut
    x = data(seed, shape, shift, dtype)[1]["x"]
    columns = x.double().transpose(0, 1).flatten(1)

    def at(tree: Any) -> Share:
        if isinstance(tree, int):
            return share_of(x.split(sizes)[tree])
        pair = zip(*(at(side) for side in tree), strict=True)
        return merge(Share(*(torch.stack(x) for x in pair)))

    got = moments_of(Share(*(x.unsqueeze(0) for x in at(tree))), 1e-5)
    assert got.mean.dtype == got.var.dtype == torch.float64
    assert got.elements == columns.shape[1]
    u, largest = float(UNIT[dtype]), columns.abs().amax(1)
    n, squares = columns.shape[1], ((columns - columns.mean(1, keepdim=True)) ** 2).sum(1)
    # a mean within a microbatch is rounded once or, summed in the dtype itself, a few times
    mean_error = 4 * u * largest
    assert ((got.mean - columns.mean(1)).abs() <= mean_error).all()
    # as tests/bounds/test_pooled.py derives it
    allowed = 8 * u * squares + 4 * mean_error * (n * squares).sqrt() + 5 * n * mean_error**2
    assert ((got.var * n - squares).abs() <= allowed).all()


def test_sums_of_squares_would_not_do() -> None:
    """The control for the two above: a third of the variance is lost."""
    x = data(0, (), 1000.0, torch.float32)[1]["x"]
    var = x.double().var(0, correction=0)
    naive = (x**2).mean(0) - x.mean(0) ** 2
    assert ((naive - var).abs() / var).max() > 0.02
    got = moments_of(Share(*(y.unsqueeze(0) for y in share_of(x))), 1e-5)
    assert ((got.var - var).abs() / var).max() < 1e-6


# Running statistics ---------------------------------------------------------------------------


@dtypes
@shapes
@every(4)
@given(st.data(), seeds(), st.sampled_from([0.0, 1000.0]), st.sampled_from([0.1, 0.75, 1.0]))
def test_running_statistics_are_the_full_batch_s(
    dtype: torch.dtype,
    shape: Any,
    data_: st.DataObject,
    seed: int,
    shift: float,
    momentum: float,
) -> None:
    """Through a step, with what the buffers held before."""
    params, batch = data(seed, shape, shift, dtype)
    g = generator(seed)
    buffers = {
        "mean": torch.randn(CHANNELS, generator=g).to(dtype),
        "var": torch.rand(CHANNELS, generator=g).to(dtype) + 0.5,
    }

    def last(params: Any, x: Any, pooled: Any, buffers: Any) -> Any:
        mean, var = pooled.running(buffers["mean"], buffers["var"], momentum)
        return (x * params["scale"]).mean(), {"mean": mean, "var": var}

    stages = [pa.rowwise(lambda p, b: b["x"]), *pa.batch_norm("bn")]
    loss = pa.staged([*stages, pa.rowwise(last, reads=("bn", "buffers"))])
    size = data_.draw(st.integers(1, ROWS + 1))
    step = pa.make_step(loss, pa.sgd(0.0), microbatch_size=size, buffers="pooled")
    state, _ = step(step.init(params, buffers), batch)
    full = {k: b.clone() for k, b in buffers.items()}
    F.batch_norm(batch["x"], full["mean"], full["var"], training=True, momentum=momentum)
    columns = batch["x"].double().transpose(0, 1).flatten(1)
    n, var, unit = columns.shape[1], columns.var(1), float(UNIT[dtype])
    # as tests/bounds/test_pooled.py derives it
    own, largest = float(gamma(2 * n + 8, UNIT[torch.float64])), columns.abs().amax(1)
    off = (unit + own) * largest
    spread = (n * var * (n - 1)).sqrt()
    squares = (unit + own) * var + (4 * off * spread + 5 * n * off**2) / (n - 1)
    for name, error, size in (("mean", off, largest), ("var", squares, var)):
        assert (got := state.buffers[name]).dtype == dtype
        allowed = 2 * momentum * error + 8 * unit * (buffers[name].double().abs() + size)
        assert ((got.double() - full[name].double()).abs() <= allowed).all(), name


def test_a_step_without_weight_leaves_the_statistics() -> None:
    def last(params: Any, x: Any, pooled: Any, buffers: Any) -> Any:
        new = pooled.running(buffers["mean"], buffers["var"])
        return pa.Weighted((x * params).sum(), 0.0), dict(zip(("mean", "var"), new, strict=True))

    loss = pa.staged([*pa.batch_norm("bn"), pa.rowwise(last, reads=("bn", "buffers"))])
    step = pa.make_step(loss, pa.sgd(0.1), microbatch_size=2, buffers="pooled")
    buffers = {"mean": torch.zeros(3), "var": torch.ones(3)}
    state = step.init(torch.ones(3), buffers)
    new, info = step(state, torch.randn(6, 3))
    assert not info.applied
    assert_trees_bitwise_equal(new.buffers, buffers)


def test_frozen_buffers_are_read_and_stay() -> None:
    def last(params: Any, x: Any, pooled: Any, buffers: Any) -> Any:
        new = pooled.running(buffers["mean"], buffers["var"])
        return (x * params * buffers["var"]).mean(), dict(zip(("mean", "var"), new, strict=True))

    loss = pa.staged([*pa.batch_norm("bn"), pa.rowwise(last, reads=("bn", "buffers"))])
    step = pa.make_step(loss, pa.sgd(0.1), microbatch_size=2, buffers="freeze")
    buffers = {"mean": torch.zeros(3), "var": torch.full((3,), 2.0)}
    new, info = step(step.init(torch.ones(3), buffers), torch.randn(6, 3))
    assert info.applied
    assert_trees_bitwise_equal(new.buffers, buffers)


# Narrow boundaries, and other arguments --------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@shapes
def test_narrow_boundaries(dtype: torch.dtype, shape: Any) -> None:
    """Moments are wide, whatever stands between the stages; rows are rounded once."""
    params, batch = data(0, shape, 3.0, torch.float32)
    batch = {k: x.to(dtype) for k, x in batch.items()}
    seen: list[Any] = []

    def last(params: Any, x: Tensor, pooled: Any) -> Tensor:
        seen.append((x, pooled))
        return (x.float() * params["scale"]).square().mean()

    loss = pa.staged(
        [
            pa.rowwise(lambda p, b: b["x"]),
            *pa.batch_norm("bn", lambda p: (p["weight"], p["bias"])),
            pa.rowwise(last, reads="bn"),
        ]
    )
    want = F.batch_norm(
        batch["x"].double(), None, None, params["weight"].double(), params["bias"].double(), True
    )
    pa.value(loss, microbatch_size=5)(params, batch)
    got = torch.cat([x for x, _ in seen])
    assert got.dtype == dtype
    unit = float(torch.finfo(dtype).eps) / 2
    assert ((got.double() - want).abs() <= 1.01 * unit * want.abs() + 1e-5).all()
    assert seen[0][1].mean.dtype == seen[0][1].var.dtype == torch.float64

    grads = pa.grad(loss, microbatch_size=5)(params, batch)
    wide = [{k: t.double() for k, t in tree.items()} for tree in (params, batch)]
    truth = torch.func.grad(
        lambda p: (
            (F.batch_norm(wide[1]["x"], None, None, p["weight"], p["bias"], True) * p["scale"])
            .square()
            .mean()
        )
    )(wide[0])
    size = distance(truth, {k: 0 * x for k, x in truth.items()})
    assert distance(grads, truth) <= 4 * unit * size


@pytest.mark.parametrize("affine", ["both", "weight", "bias", "neither"])
@pytest.mark.parametrize("eps", [1e-5, 0.3])
@pytest.mark.parametrize("at", [None, "h"])
def test_affine_eps_and_at(affine: str, eps: float, at: Any) -> None:
    params, batch = data(1, (2,), 1.0, torch.float64)
    names = {"both": ("weight", "bias"), "neither": ()}.get(affine, (affine,))

    def given(p: Any) -> Any:
        return tuple(p[k] if k in names else None for k in ("weight", "bias"))

    def norm(p: Any, h: Tensor) -> Tensor:
        return F.batch_norm(h, None, None, *given(p), training=True, eps=eps)

    stages = [
        pa.rowwise(lambda p, b: b["x"] * p["scale"] if at is None else {at: b["x"] * p["scale"]}),
        *pa.batch_norm("bn", given if names else None, at=at, eps=eps),
        pa.rowwise(lambda p, x: ((x if at is None else x[at]) ** 3).mean()),
    ]
    grads = pa.grad(pa.staged(stages), microbatch_size=5)(params, batch)
    want = torch.func.grad(lambda p: (norm(p, batch["x"] * p["scale"]) ** 3).mean())(params)
    assert distance(grads, want) <= 1e-10


def test_one_value_a_channel_is_refused_as_torch_does() -> None:
    loss = pa.staged([*pa.batch_norm("bn"), pa.rowwise(lambda w, x: (w * x).mean())])
    with pytest.raises(ValueError, match="more than one value per channel"):
        pa.grad(loss)(torch.ones(3), torch.ones(1, 3))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        F.batch_norm(torch.ones(1, 3), None, None, training=True)
    two = pa.grad(loss, microbatch_size=1)(torch.ones(3), torch.tensor([[1.0] * 3, [2.0] * 3]))
    assert two.isfinite().all()
