"""Losses in stages under the transforms of torch.func, and under two of them, and compiled.

As everywhere in this folder both sides are float64, and what a transform gives of the stages is
what it gives of the same function over the full batch. A way forward that records nothing easily
loses a term of second order, without an error.
"""

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import pureaccum as pa
from pureaccum.testing.strategies import compositions, seeds
from tests.bounds.staged_losses import FAMILIES, batch_of, params_of
from tests.strategies import every
from tests.transforms.problems import (
    FACTORS,
    grad,
    grad_batch,
    jvp,
    times,
    vmap_params,
)


BOUND = 1e-10
ROWS = 6


# One loss with everything: rows that move, sums that are read by two, all rows in the middle ----


def encoded(p: Any, batch: Any) -> Any:
    return {"h": torch.tanh(batch["x"] @ p["a1"]), "y": batch["y"]}


def first(p: Any, x: Any) -> Any:
    return {"sum": x["h"].sum(0), "rows": len(x["y"])}


def centred(p: Any, x: Any, mean: Any) -> Any:
    return {**x, "h": (x["h"] - mean["sum"] / mean["rows"]) @ p["a2"]}


def second(p: Any, x: Any, mean: Any) -> Any:
    return (x["h"] ** 2 * mean["sum"]).sum(0)


def mixed(p: Any, x: Any) -> Any:
    return {**x, "h": x["h"] + (x["h"] @ x["h"].T).softmax(1) @ x["h"]}


def last(p: Any, x: Any, spread: Any) -> Any:
    rows = (x["h"] * torch.tanh(spread)).sum(1) ** 2 * (x["y"] + 1)
    return rows.mean(), {"rows": rows, "spread": spread.sum()}


def without_aux(p: Any, x: Any, spread: Any) -> Any:
    return last(p, x, spread)[0]


def stages(aux: bool = False) -> Any:
    return pa.staged(
        [
            pa.rowwise(encoded),
            pa.pooled(first, "mean"),
            pa.rowwise(centred, reads="mean"),
            pa.pooled(second, "spread", reads="mean"),
            pa.full(mixed),
            pa.rowwise(last if aux else without_aux, reads="spread"),
        ]
    )


def whole(p: Any, batch: Any, aux: bool = False) -> Any:
    x = encoded(p, batch)
    mean = first(p, x)
    x = centred(p, x, mean)
    spread = second(p, x, mean)
    out = last(p, mixed(p, x), spread)
    return out if aux else out[0]


LOSSES: dict[str, tuple[Callable[[], Any], Callable[..., Any]]] = {
    "all kinds": (stages, whole),
    "contrastive": (FAMILIES["contrastive"].loss, FAMILIES["contrastive"].whole),
    "batch norms": (FAMILIES["batch norms"].loss, FAMILIES["batch norms"].whole),
    "experts": (FAMILIES["experts"].loss, FAMILIES["experts"].whole),
}
losses = pytest.mark.parametrize("name", LOSSES)
drawn = given(seeds(), st.integers(1, ROWS) | compositions(ROWS))


def data(seed: int) -> tuple[Any, Any]:
    params, batch = params_of(seed, wide=4), batch_of(seed, ROWS)
    return params, {**batch, "y": batch["y"].clamp(max=2)}


def near(got: Any, want: Any) -> None:
    """Against the norm of all leaves: a gradient that is zero is one only to the bound."""
    xs, spec = optree.tree_flatten(got)
    ys, other = optree.tree_flatten(want)
    assert spec == other
    assert [x.shape for x in xs] == [y.shape for y in ys]
    size = torch.stack([y.norm() for y in ys]).norm()
    assert size > 0
    assert torch.stack([(x - y).norm() for x, y in zip(xs, ys, strict=True)]).norm() <= BOUND * size


def stretched(batch: Any, factor: Tensor) -> Any:
    """Not by much: batch norms would take a factor out again."""
    return {**batch, "x": batch["x"] + factor * batch["other"] / 3}


# Each makes another function out of one of (params, batch) ---------------------------------------


def vmap_batch(f: Any) -> Any:
    return lambda p, b: torch.func.vmap(lambda c: f(p, stretched(b, c)))(FACTORS)


def vmap_both(f: Any) -> Any:
    return lambda p, b: torch.func.vmap(lambda c: f(times(p, c), stretched(b, c)))(FACTORS)


TRANSFORMS = (grad, grad_batch, jvp, vmap_params, vmap_batch, vmap_both)
each = pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda f: f.__name__)


@each
@losses
@every(7)
@drawn
def test_one_transform(transform: Any, name: str, seed: int, size: Any) -> None:
    """Of the gradient: ``jvp`` is the Hessian times a vector, ``grad`` a meta-gradient."""
    loss, full = LOSSES[name][0](), LOSSES[name][1]
    ours = pa.grad(loss, microbatch_size=size)
    near(transform(ours)(*data(seed)), transform(torch.func.grad(full))(*data(seed)))


@each
@losses
@every(20)
@drawn
def test_one_transform_of_the_value(transform: Any, name: str, seed: int, size: Any) -> None:
    loss, full = LOSSES[name][0](), LOSSES[name][1]
    ours = pa.value(loss, microbatch_size=size)
    near(transform(ours)(*data(seed)), transform(full)(*data(seed)))


@pytest.mark.parametrize("inner", TRANSFORMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("outer", TRANSFORMS, ids=lambda f: f.__name__)
@every(20)
@drawn
def test_two_transforms(outer: Any, inner: Any, seed: int, size: Any) -> None:
    ours = pa.grad(stages(), microbatch_size=size)
    want = outer(inner(torch.func.grad(whole)))(*data(seed))
    near(outer(inner(ours))(*data(seed)), want)


@each
@pytest.mark.parametrize("by", ["gradient", "value"])
def test_aux_goes_through_transforms_too(transform: Any, by: str) -> None:
    """It is no constant to an outer transform."""
    make = pa.grad if by == "gradient" else pa.value
    words = {"rows": "concat", "spread": "last"}
    ours = make(stages(aux=True), has_aux=True, microbatch_size=4, aux_reduction=words)
    near(
        transform(lambda p, b: ours(p, b)[1])(*data(0)),
        transform(lambda p, b: whole(p, b, aux=True)[1])(*data(0)),
    )


@each
def test_a_given_value_goes_through_transforms_too(transform: Any) -> None:
    """With respect to what all rows share, such as a temperature."""
    loss = pa.staged(
        [
            pa.rowwise(lambda p, b, t: torch.tanh(b["x"] @ p["a1"] * t), reads="t"),
            pa.pooled(lambda p, x, t: (x * t).sum(0), "sum", reads="t"),
            pa.rowwise(lambda p, x, s, t: ((x * s).sum(1) ** 2 / t).mean(), reads=("sum", "t")),
        ]
    )

    def full(p: Any, batch: Any, t: Tensor) -> Tensor:
        x = torch.tanh(batch["x"] @ p["a1"] * t)
        return ((x * (x * t).sum(0)).sum(1) ** 2 / t).mean()

    ours = pa.grad(loss, microbatch_size=4)
    t = torch.tensor(0.7, dtype=torch.float64)
    p, b = data(0)
    near(
        transform(lambda t, b: ours(p, b, t=t["x"])["a1"])({"x": t}, b),
        transform(lambda t, b: torch.func.grad(full)(p, b, t["x"])["a1"])({"x": t}, b),
    )


@every(5)
@given(seeds(), st.sampled_from([1, 4]))
def test_a_merge_goes_through_transforms_too(seed: int, size: int) -> None:
    """Its own derivative of second order, as that of a softmax that is merged."""

    def parts(p: Any, x: Tensor) -> Any:
        top = x.amax(0).detach()
        return {"top": top, "sum": (x - top).exp().sum(0)}

    def merge(s: Any) -> Any:
        top = s["top"].amax(0)
        return {"top": top, "sum": (s["sum"] * (s["top"] - top).exp()).sum(0)}

    def total(s: Any) -> Tensor:
        return s["top"] + s["sum"].log()

    loss = pa.staged(
        [
            pa.rowwise(lambda p, b: b["x"] @ p["a1"]),
            pa.pooled(parts, "parts", merge=merge),
            pa.rowwise(lambda p, x, s: ((x - total(s)).exp() * x).sum(1).mean(), reads="parts"),
        ]
    )

    def full(p: Any, b: Any) -> Tensor:
        x = b["x"] @ p["a1"]
        return (x.softmax(0) * x).sum(1).mean()

    for transform in TRANSFORMS:
        ours = transform(pa.grad(loss, microbatch_size=size))(*data(seed))
        near(ours, transform(torch.func.grad(full))(*data(seed)))


def test_hessian_and_jacobians() -> None:
    p, b = data(1)
    ours = pa.value(stages(), microbatch_size=4)

    def of(f: Any) -> Any:
        return lambda a: f({**p, "a1": a}, b)

    want = torch.func.hessian(of(whole))(p["a1"])
    near(torch.func.hessian(of(ours))(p["a1"]), want)
    gradient = pa.grad(stages(), microbatch_size=4)
    for jacobian in (torch.func.jacrev, torch.func.jacfwd):
        near(jacobian(lambda a: gradient({**p, "a1": a}, b)["a1"])(p["a1"]), want)


# Ensembles and a compiler --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["all kinds", "batch norms"])
@pytest.mark.parametrize("optimizer", [pa.sgd(0.1), pa.adamw(0.01)], ids=["sgd", "adamw"])
def test_an_ensemble_of_states_is_its_members(name: str, optimizer: Any) -> None:
    def stepped(size: int | None, loss: Any) -> Any:
        chain = pa.chain(pa.clip_by_global_norm(0.5), optimizer)
        step = pa.make_step(loss, chain, microbatch_size=size)
        _, batch = data(0)
        batches = {k: torch.stack([x, x.flip(0) + 0]) for k, x in batch.items()}
        batches["x"] = batches["x"] * torch.tensor([1.0, 2.0], dtype=torch.float64).view(2, 1, 1)
        states = [step.init(data(seed)[0]) for seed in range(2)]
        stack = optree.tree_map(lambda *x: torch.stack(x), *states, namespace="pureaccum")
        return torch.func.vmap(step)(stack, batches)

    loss, full = LOSSES[name][0](), LOSSES[name][1]
    (got, info), (want, wanted) = stepped(4, loss), stepped(None, full)
    near(got.params, want.params)
    near((info.loss, info.grad_norm, info.weight), (wanted.loss, wanted.grad_norm, wanted.weight))
    assert info.applied.all()


@pytest.mark.nightly
def test_it_is_one_graph() -> None:
    """For a compiler, as a plain loss over microbatches is: with aux, weights and given values."""

    def end(p: Any, x: Any, s: Any, t: Any) -> Any:
        rows = (x["h"] * s * t).sum(1)
        return pa.Weighted((rows * x["y"]).sum(), x["y"].sum()), {"rows": rows}

    loss = pa.staged(
        [
            pa.rowwise(encoded),
            *pa.batch_norm("bn", lambda p: (p["gain"][0], None), at="h"),
            pa.pooled(lambda p, x: x["h"].relu().sum(0), "s"),
            pa.full(mixed),
            pa.rowwise(end, reads=("s", "t")),
        ]
    )
    run = pa.grad_and_value(loss, has_aux=True, microbatch_size=[2, 4])
    torch.compiler.reset()
    compiled = torch.compile(run, backend="eager", fullgraph=True)
    t = torch.tensor(2.0, dtype=torch.float64)
    near(compiled(*data(0), t=t), run(*data(0), t=t))
