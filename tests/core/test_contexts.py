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
from tests.refusals import (
    PARAMS,
    Loss,
    Old,
    Tensors,
    advice_on,
    make_batch,
    receivers,
    refused,
    saying,
    squares,
)
from tests.runs import RUNS
from tests.tables import each_once


pytestmark = [pytest.mark.faults, pytest.mark.promise("errors")]
KINDS = {kind: kind for kind in ("grad", "accumulator", "donated accumulator")}
LossOf = Callable[[Tensors, Any], Tensor]


def gradient(loss, params, batch, kind="grad", **options):
    if kind == "grad":
        return RUNS["grad"](loss, params, batch, **options)
    return RUNS[kind](loss, params, batch, **options)[0]


# Autocast ------------------------------------------------------------------------------


@pytest.mark.promise("policy")
@receivers("microbatches", "value")
def test_autocast_around_a_call_holds_on_to_weights(to):
    loss, batch = Loss(squares), make_batch()
    words = ("autocast for 'cpu'", "every microbatch", "inside the loss", "cache_enabled=False")
    with (
        torch.autocast("cpu", torch.bfloat16),
        refused(RuntimeError, *words, given=(PARAMS, batch), loss=loss),
    ):
        to.run(loss, PARAMS, batch)


@pytest.mark.promise("policy")
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


@pytest.mark.promise("policy")
@pytest.mark.parametrize("name", SAMPLES)
def test_autocast_around_chunks_of_samples_holds_on_to_weights(name):
    """Around a single chunk it holds no more than it does around any call."""
    words = ("autocast for 'cpu'", "inside the loss", "cache_enabled=False")
    with torch.autocast("cpu", torch.bfloat16):
        with refused(RuntimeError, *words, given=(PARAMS, make_batch())):
            SAMPLES[name](2)(PARAMS, make_batch())
        SAMPLES[name](None)(PARAMS, make_batch())


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


def of_weight(change):
    return lambda p, b: squares(p | {"w": change(p["w"])}, b)


def of_rows(end):
    return lambda p, b: end(b["x"] * p["w"])


doubled = of_weight(lambda w: 2 * w)


def kept_elsewhere(params, batch):
    with torch.autograd.graph.save_on_cpu():
        return squares(params, batch)


def slope(params, x):
    rows = torch.autograd.grad(squares(params, {"x": x}), x, create_graph=True)[0] * len(x)
    return rows.square().sum(1).mean()


def gradient_penalty_by_an_attribute(params, batch):
    x = batch["x"].clone()
    x.requires_grad = True
    return slope(params, x)


def retained(w):
    w = 2 * w
    w.retain_grad()
    return w


def swapped(w):
    w = 1 * w
    w.data = 2 * w.data
    return w


def differentiates_itself(params, batch):
    loss = squares(params, batch)
    loss.backward(retain_graph=True)
    return loss


RNN, NORM = torch.nn.GRU(2, 2), torch.nn.BatchNorm1d(2)
STATE = {"weight_hh_l0": torch.randn(6, 2), "weight_ih_l0": torch.randn(6, 2)}


def recurrent(pack):
    def loss(params, batch):
        own = {name: w * params["b"] for name, w in STATE.items()}
        rows = pack((batch["x"] * params["w"]).repeat(3, 1, 1))
        return torch.func.functional_call(RNN, own, (rows,))[1].square().mean()

    return loss


# torch keeps a part of the first that it sees, and warns of the first that is not jagged
torch.nested.nested_tensor([torch.ones(1, 2)], layout=torch.jagged)
with warnings.catch_warnings(action="ignore"):
    torch.nested.nested_tensor([torch.ones(1, 2)])


def nested(params, batch):
    rows = [row * params["w"] for row in batch["x"]]
    return torch.nested.as_nested_tensor(rows).to_padded_tensor(0.0).square().mean()


def jagged(rows):
    rows = torch.nested.nested_tensor_from_jagged(rows, torch.tensor([0, 1, 2]))
    return rows.values().square().mean()


not_nested = of_rows(lambda rows: rows.square().mean())
ENGINE = "Use engine='autograd'"
REFUSED = {
    "an old Function": Refused(
        of_weight(Old.apply), "setup_context staticmethod", (ENGINE, "a custom Function"), doubled
    ),
    "a checkpoint": Refused(
        lambda p, b: checkpoint(doubled, p, b, use_reentrant=False),
        "saved tensor hooks",
        (ENGINE, "use_reentrant=False", "pa.remat"),
        doubled,
    ),
    "a reentrant checkpoint": Refused(
        of_weight(lambda w: checkpoint(lambda w: 2 * w, w, use_reentrant=True)),
        "setup_context staticmethod",
        (ENGINE, "use_reentrant=False"),
    ),
    "activations elsewhere": Refused(
        kept_elsewhere, "saved tensor hooks", (ENGINE, "save_on_cpu"), squares
    ),
    "requires_grad_": Refused(
        lambda p, b: slope(p, b["x"].clone().requires_grad_()),
        "Tensor.requires_grad_()",
        (ENGINE, "gradient_checkpointing_enable", "use_reentrant", "torch.func.grad"),
        gradient_penalty_by_an_attribute,
    ),
    "retain_grad": Refused(of_weight(retained), "Tensor.retain_grad()", (ENGINE,), doubled),
    "its own backward": Refused(
        differentiates_itself, "backward() called", ("Remove .backward()",), squares
    ),
    "packed sequences": Refused(
        recurrent(lambda rows: pack_padded_sequence(rows, torch.full((rows.shape[1],), 3))),
        "doesn't have storage",
        (ENGINE, "packed"),
        recurrent(lambda rows: rows),
    ),
    "numpy": Refused(
        lambda p, b: squares(p, b) * float(p["w"].detach().numpy().max()),
        "doesn't have storage",
        (ENGINE, ".item()"),
        lambda p, b: squares(p, b) * p["w"].detach().max().item(),
    ),
    "a deep copy": Refused(
        of_weight(lambda w: (copy.deepcopy(w), w)[1]),
        "Cannot access storage",
        (ENGINE, "deepcopy", "nested tensors"),
        squares,
    ),
    "an assignment to data": Refused(
        of_weight(swapped), "`.data`", (ENGINE,), of_weight(lambda w: w + w.detach())
    ),
    "nested tensors": Refused(nested, "NestedTensorImpl", (ENGINE, "Padding"), not_nested),
    "jagged tensors": Refused(of_rows(jagged), "values backward", (ENGINE, "Padding"), not_nested),
    "a module's buffers": Refused(
        of_rows(lambda rows: NORM(rows).square().mean()),
        "mutate a captured Tensor",
        ("functional(module)", "aux", "eval()"),
    ),
    "the batch": Refused(
        lambda p, b: squares(p, {"x": b["x"].mul_(2)}),
        "mutate a captured Tensor",
        ("x = x.clone()", "got as an argument"),
    ),
}


def advised(case, run):
    with saying(RuntimeError, case.words) as caught:
        run()
    [note] = advice_on(caught.value)
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

    with pytest.raises(RuntimeError, match="boom") as caught:
        gradient(loss, PARAMS, make_batch(), kind)
    assert not advice_on(caught.value)
