"""What cannot run where it was called says so, and what can instead."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from tests.faults.refusals import (
    PARAMS,
    Loss,
    Old,
    Receiver,
    Tensors,
    make_batch,
    receivers,
    refused,
    saying,
    squares,
)
from tests.laws.exactly import same


KINDS = ("grad", "stream", "donated stream")


def gradient(loss: Any, params: Any, batch: Any, kind: str = "grad", **knobs: Any) -> Any:
    if kind == "grad":
        return pa.grad(loss, microbatch_size=2, **knobs)(params, batch)
    acc = pa.accumulator(loss, **knobs)
    state = acc.init(params)
    for part in pa.microbatches(batch, 2):
        state = acc.update(state, params, part, donate=kind == "donated stream")
    return acc.finalize(state)[0]


# Autocast ------------------------------------------------------------------------------


@receivers("microbatches", "value")
def test_autocast_around_a_call_holds_on_to_weights(to: Receiver) -> None:
    loss, batch = Loss(squares), make_batch()
    words = ("autocast for 'cpu'", "every microbatch", "inside the loss", "cache_enabled=False")
    with (
        torch.autocast("cpu", torch.bfloat16),
        refused(RuntimeError, *words, given=(PARAMS, batch), loss=loss),
    ):
        to.run(loss, PARAMS, batch)


@receivers("microbatches")
def test_autocast_without_a_cache_or_inside_the_loss_is_welcome(to: Receiver) -> None:
    def inside(params: Tensors, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return squares(params, batch)

    expected = to.run(inside, PARAMS, make_batch())
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        assert_trees_bitwise_equal(to.run(squares, PARAMS, make_batch()), expected)
    assert not same(to.run(squares, PARAMS, {"x": make_batch()["x"] + 2**-9}), expected)


SAMPLES: dict[str, Any] = {
    "per_sample_grad": lambda size: pa.per_sample_grad(squares, chunk_size=size),
    "clipped_sum": lambda size: pa.clipped_sum(squares, 1.0, chunk_size=size),
    "per_sample_accumulator": lambda size: (
        lambda params, batch: pa.per_sample_accumulator(squares, chunk_size=size).update(
            pa.accumulator(squares).init(params), params, batch
        )
    ),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_autocast_around_chunks_of_samples_holds_on_to_weights(name: str) -> None:
    """Around a single chunk it holds no more than it does around any call."""
    words = ("autocast for 'cpu'", "inside the loss", "cache_enabled=False")
    with torch.autocast("cpu", torch.bfloat16):
        with refused(RuntimeError, *words, given=(PARAMS, make_batch())):
            SAMPLES[name](2)(PARAMS, make_batch())
        SAMPLES[name](None)(PARAMS, make_batch())


# Transforms ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transform", ["vmap", "grad"])
@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"nonfinite": "raise"}, ("nonfinite='raise'", "'skip' or 'propagate'")),
        ({"engine": "autograd"}, ("engine='autograd'", "engine='func'")),
    ],
)
def test_what_has_to_look_cannot_under_a_transform(
    kind: str, transform: str, knobs: Any, words: Any
) -> None:
    loss, batch = Loss(squares), make_batch()

    def inner(params: Any) -> Any:
        return gradient(loss, params, batch, kind, **knobs)["w"].sum()

    run: dict[str, Any] = {
        "vmap": lambda: torch.func.vmap(inner)(
            {k: torch.stack([x] * 3) for k, x in PARAMS.items()}
        ),
        "grad": lambda: torch.func.grad(inner)(PARAMS),
    }
    with refused(RuntimeError, *words, "transform", given=(PARAMS, batch), loss=loss):
        run[transform]()


# What torch.func itself refuses ----------------------------------------------------------


def doubled(params: Tensors, batch: Any) -> Tensor:
    return squares(params | {"w": 2 * params["w"]}, batch)


UNCOMPOSABLE: dict[str, tuple[Any, str]] = {
    "an old Function": (
        lambda p, b: squares(p | {"w": Old.apply(p["w"])}, b),
        "setup_context staticmethod",
    ),
    "a checkpoint": (
        lambda p, b: checkpoint(doubled, p, b, use_reentrant=False),
        "saved tensor hooks",
    ),
    "a reentrant checkpoint": (
        lambda p, b: squares(p | {"w": checkpoint(lambda w: 2 * w, p["w"], use_reentrant=True)}, b),
        "setup_context staticmethod",
    ),
}
ADVICE = "engine='autograd'"


@pytest.mark.parametrize(("loss", "words"), UNCOMPOSABLE.values(), ids=UNCOMPOSABLE)
@pytest.mark.parametrize("kind", KINDS)
def test_the_error_of_torch_func_comes_with_our_advice(kind: str, loss: Any, words: str) -> None:
    batch = make_batch()
    with unchanged(PARAMS, batch), saying(RuntimeError, words) as caught:
        gradient(loss, PARAMS, batch, kind)
    assert ADVICE in "".join(caught.value.__notes__)


@pytest.mark.parametrize(("loss", "words"), UNCOMPOSABLE.values(), ids=UNCOMPOSABLE)
@pytest.mark.parametrize("transform", [pa.grad, pa.grad_and_value])
def test_also_where_nothing_is_cut(transform: Any, loss: Any, words: str) -> None:
    with saying(RuntimeError, words) as caught:
        transform(loss)(PARAMS, make_batch())
    assert ADVICE in "".join(getattr(caught.value, "__notes__", []))


@pytest.mark.parametrize("loss", [UNCOMPOSABLE[k][0] for k in ("an old Function", "a checkpoint")])
@pytest.mark.parametrize("kind", KINDS)
def test_the_advice_is_good(kind: str, loss: Any) -> None:
    expected = gradient(doubled, PARAMS, make_batch(), kind)
    assert_trees_bitwise_equal(
        gradient(loss, PARAMS, make_batch(), kind, engine="autograd"), expected
    )


@pytest.mark.parametrize("kind", KINDS)
def test_other_errors_come_without_advice(kind: str) -> None:
    def loss(params: Any, batch: Any) -> Tensor:
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match=r"^boom$") as caught:
        gradient(loss, PARAMS, make_batch(), kind)
    assert not hasattr(caught.value, "__notes__")
