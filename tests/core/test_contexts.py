"""What cannot run where it was called says so, and what can instead."""

import copy
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from tests.exactly import same
from tests.problems import in_parts
from tests.refusals import (
    PARAMS,
    Loss,
    Old,
    Tensors,
    make_batch,
    receivers,
    refused,
    saying,
    squares,
)
from tests.tables import each_once


pytestmark = pytest.mark.faults
KINDS = {kind: kind for kind in ("grad", "stream", "donated stream")}
LossOf = Callable[[Tensors, Any], Tensor]


def gradient(loss, params, batch, kind="grad", **knobs):
    if kind == "grad":
        return pa.grad(loss, microbatch_size=2, **knobs)(params, batch)
    acc = pa.accumulator(loss, **knobs)
    return acc.finalize(
        in_parts(acc, params, pa.microbatches(batch, 2), donate=kind == "donated stream")
    )[0]


# Autocast ------------------------------------------------------------------------------


@receivers("microbatches", "value")
def test_autocast_around_a_call_holds_on_to_weights(to):
    loss, batch = Loss(squares), make_batch()
    words = ("autocast for 'cpu'", "every microbatch", "inside the loss", "cache_enabled=False")
    with (
        torch.autocast("cpu", torch.bfloat16),
        refused(RuntimeError, *words, given=(PARAMS, batch), loss=loss),
    ):
        to.run(loss, PARAMS, batch)


@receivers("microbatches")
def test_autocast_without_a_cache_or_inside_the_loss_is_welcome(to):
    def inside(params, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return squares(params, batch)

    expected = to.run(inside, PARAMS, make_batch())
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        assert_trees_bitwise_equal(to.run(squares, PARAMS, make_batch()), expected)
    assert not same(to.run(squares, PARAMS, {"x": make_batch()["x"] + 2**-9}), expected)


SAMPLES = {
    "per_sample_grad": lambda size: pa.per_sample_grad(squares, chunk_size=size),
    "clipped_sum": lambda size: pa.clipped_sum(squares, 1.0, chunk_size=size),
    "per_sample_accumulator": lambda size: (
        lambda params, batch: pa.per_sample_accumulator(squares, chunk_size=size).update(
            pa.accumulator(squares).init(params), params, batch
        )
    ),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_autocast_around_chunks_of_samples_holds_on_to_weights(name):
    """Around a single chunk it holds no more than it does around any call."""
    words = ("autocast for 'cpu'", "inside the loss", "cache_enabled=False")
    with torch.autocast("cpu", torch.bfloat16):
        with refused(RuntimeError, *words, given=(PARAMS, make_batch())):
            SAMPLES[name](2)(PARAMS, make_batch())
        SAMPLES[name](None)(PARAMS, make_batch())


# Transforms ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_the_engine_of_loss_backward_is_refused_under_a_transform(kind, transform):
    loss, batch = Loss(squares), make_batch()

    def inner(params):
        return gradient(loss, params, batch, kind, engine="autograd")["w"].sum()

    run = {
        "vmap": lambda: torch.func.vmap(inner)(
            {k: torch.stack([x] * 3) for k, x in PARAMS.items()}
        ),
        "grad": lambda: torch.func.grad(inner)(PARAMS),
    }
    words = ("engine='autograd'", "engine='func'", "transform")
    with refused(RuntimeError, *words, given=(PARAMS, batch), loss=loss):
        run[transform]()


# What torch.func itself refuses ----------------------------------------------------------


class Refused(NamedTuple):
    """A loss that torch.func refuses, its words, those of our advice, and the same loss plainly."""

    loss: LossOf
    words: str
    advice: tuple[str, ...]
    plain: LossOf | None = None  # None where engine="autograd" is no way out


def doubled(params, batch):
    return squares(params | {"w": 2 * params["w"]}, batch)


def in_a_checkpoint(params, batch, reentrant=False):
    if reentrant:
        return squares(
            params | {"w": checkpoint(lambda w: 2 * w, params["w"], use_reentrant=True)}, batch
        )
    return checkpoint(doubled, params, batch, use_reentrant=False)


def kept_elsewhere(params, batch):
    with torch.autograd.graph.save_on_cpu():
        return squares(params, batch)


def slope(params, x):
    rows = torch.autograd.grad(squares(params, {"x": x}), x, create_graph=True)[0] * len(x)
    return rows.square().sum(1).mean()


def gradient_penalty(params, batch):
    return slope(params, batch["x"].clone().requires_grad_())


def gradient_penalty_by_an_attribute(params, batch):
    x = batch["x"].clone()
    x.requires_grad = True
    return slope(params, x)


def retained(params, batch):
    w = 2 * params["w"]
    w.retain_grad()
    return squares(params | {"w": w}, batch)


def differentiates_itself(params, batch):
    loss = squares(params, batch)
    loss.backward(retain_graph=True)
    return loss


RNN = torch.nn.GRU(2, 2)
STATE = {"weight_hh_l0": torch.randn(6, 2), "weight_ih_l0": torch.randn(6, 2)}


def recurrent(params, x):
    own = {name: w * params["b"] for name, w in STATE.items()}
    return torch.func.functional_call(RNN, own, (x,))[1].square().mean()


def packed(params, batch):
    rows = (batch["x"] * params["w"]).repeat(3, 1, 1)
    return recurrent(params, pack_padded_sequence(rows, torch.full((len(batch["x"]),), 3)))


def not_packed(params, batch):
    return recurrent(params, (batch["x"] * params["w"]).repeat(3, 1, 1))


def scaled_by_numpy(params, batch):
    return squares(params, batch) * float(params["w"].detach().numpy().max())


def scaled_by_an_item(params, batch):
    return squares(params, batch) * params["w"].detach().max().item()


def copied(params, batch):
    copy.deepcopy(params)
    return squares(params, batch)


def swaps_data(params, batch):
    w = 1 * params["w"]
    w.data = 2 * w.data
    return squares(params | {"w": w}, batch)


def swaps_numbers(params, batch):
    w = params["w"]
    return squares(params | {"w": w + w.detach()}, batch)


def nested(params, batch):
    rows = [row * params["w"] for row in batch["x"]]
    return torch.nested.as_nested_tensor(rows).to_padded_tensor(0.0).square().mean()


# torch keeps a part of the first that it sees, and warns of the first that is not jagged
torch.nested.nested_tensor([torch.ones(1, 2)], layout=torch.jagged)
with warnings.catch_warnings(action="ignore"):
    torch.nested.nested_tensor([torch.ones(1, 2)])


def jagged(params, batch):
    rows = torch.nested.nested_tensor_from_jagged(batch["x"] * params["w"], torch.tensor([0, 1, 2]))
    return rows.values().square().mean()


def not_nested(params, batch):
    return (batch["x"] * params["w"]).square().mean()


NORM = torch.nn.BatchNorm1d(2)


def counts_in_a_module(params, batch):
    return NORM(batch["x"] * params["w"]).square().mean()


def writes_to_the_batch(params, batch):
    return squares(params, {"x": batch["x"].mul_(2)})


ENGINE = "engine='autograd' can"
REFUSED = {
    "an old Function": Refused(
        lambda p, b: squares(p | {"w": Old.apply(p["w"])}, b),
        "setup_context staticmethod",
        (ENGINE, "a custom Function"),
        doubled,
    ),
    "a checkpoint": Refused(
        in_a_checkpoint, "saved tensor hooks", (ENGINE, "use_reentrant=False", "pa.remat"), doubled
    ),
    "a reentrant checkpoint": Refused(
        lambda p, b: in_a_checkpoint(p, b, reentrant=True),
        "setup_context staticmethod",
        (ENGINE, "use_reentrant=False"),
    ),
    "activations elsewhere": Refused(
        kept_elsewhere, "saved tensor hooks", (ENGINE, "save_on_cpu"), squares
    ),
    "requires_grad_": Refused(
        gradient_penalty,
        "Tensor.requires_grad_()",
        (ENGINE, "gradient_checkpointing_enable", "use_reentrant", "torch.func.grad"),
        gradient_penalty_by_an_attribute,
    ),
    "retain_grad": Refused(retained, "Tensor.retain_grad()", (ENGINE,), doubled),
    "its own backward": Refused(
        differentiates_itself, "backward() called", ("leave .backward() out",), squares
    ),
    "packed sequences": Refused(packed, "doesn't have storage", (ENGINE, "packed"), not_packed),
    "numpy": Refused(
        scaled_by_numpy, "doesn't have storage", (ENGINE, ".item()"), scaled_by_an_item
    ),
    "a deep copy": Refused(
        copied, "Cannot access storage", (ENGINE, "deepcopy", "nested tensors"), squares
    ),
    "an assignment to data": Refused(swaps_data, "`.data`", (ENGINE,), swaps_numbers),
    "nested tensors": Refused(nested, "NestedTensorImpl", (ENGINE, "pad"), not_nested),
    "jagged tensors": Refused(jagged, "values backward", (ENGINE, "pad"), not_nested),
    "a module's buffers": Refused(
        counts_in_a_module, "mutate a captured Tensor", ("functional(module)", "aux", "eval()")
    ),
    "the batch": Refused(
        writes_to_the_batch, "mutate a captured Tensor", ("x = x.clone()", "was given")
    ),
}


def advised(case, run):
    with saying(RuntimeError, case.words) as caught:
        run()
    [note] = caught.value.__notes__
    assert not [word for word in case.advice if word not in note], note


@each_once("kind, case", KINDS, REFUSED)
def test_the_error_of_torch_func_comes_with_our_advice(kind, case):
    batch = make_batch()
    with unchanged(PARAMS, batch, NORM):
        advised(case, lambda: gradient(case.loss, PARAMS, batch, kind))


@each_once("transform, case", {"grad": pa.grad, "grad_and_value": pa.grad_and_value}, REFUSED)
def test_the_advice_comes_also_where_nothing_is_cut(transform, case):
    advised(case, lambda: transform(case.loss)(PARAMS, make_batch()))


@each_once("kind, case", KINDS, {name: case for name, case in REFUSED.items() if case.plain})
def test_the_advice_is_good(kind, case):
    found = gradient(case.loss, PARAMS, make_batch(), kind, engine="autograd")
    assert_trees_bitwise_equal(found, gradient(case.plain, PARAMS, make_batch(), kind))


@pytest.mark.parametrize("kind", KINDS)
def test_other_errors_come_without_advice(kind):
    def loss(params, batch):
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match=r"^boom$") as caught:
        gradient(loss, PARAMS, make_batch(), kind)
    assert not hasattr(caught.value, "__notes__")
