"""Losses that are sums over rows, with something unusual inside."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

import pureaccum as pa
from tests.laws.zoo import (
    ROWS,
    WIDE,
    affine,
    good,
    linear,
    normal,
    parameters,
    ragged_mask,
    squared,
)


Case = tuple[Any, Any, Any]


# Dtypes ----------------------------------------------------------------------------------


@good()
def autocast_inside(dtype: torch.dtype) -> Case:
    loss, params, batch = squared(nn.Sequential(nn.Linear(6, 8), nn.ReLU()), dtype, 6)

    def low(params: Any, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(params, batch)

    return low, params, batch


@good()
def casts_inside(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        logits = affine(params, batch["x"]).float()
        probability = torch.softmax(logits, -1, dtype=torch.float32).type_as(batch["x"])
        error = probability.to(torch.float32) - batch["y"].to(torch.float32)
        return F.cross_entropy(logits, batch["label"]) + error.to(device="cpu").square().mean()

    return loss, *linear(dtype)


@good()
def half_inside(dtype: torch.dtype) -> Case:
    """Activations are kept in bfloat16."""

    def loss(params: Any, batch: Any) -> Tensor:
        h = torch.tanh(batch["x"].bfloat16() @ params["w"].to(torch.bfloat16))
        return (h.type(torch.FloatTensor) + params["b"].to(batch["x"])).float().square().mean()

    return loss, *linear(dtype)


@good()
def a_captured_constant(dtype: torch.dtype) -> Case:
    mean, scale = torch.randn(6), torch.rand(6) + 0.5

    def loss(params: Any, batch: Any) -> Tensor:
        x = (batch["x"] - mean) / scale
        return affine(params, x.to(params["w"].dtype)).square().mean()

    return loss, *linear(dtype)


@good()
def made_in_the_default_dtype(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        columns = torch.arange(1.0, 4.0) / 3 + torch.ones(3) + torch.tensor([0.1, 0.2, 0.3])
        ones = torch.ones(len(batch["x"]), 1, dtype=torch.float32)
        return ((affine(params, batch["x"]) * columns + ones).square()).mean()

    return loss, *linear(dtype)


@good(WIDE)
def spectrum(dtype: torch.dtype) -> Case:
    """Complex numbers on the way, and a window of complex64."""
    turn = torch.exp(torch.linspace(0, 1, 4) * 1j).to(torch.complex64)

    def loss(params: Any, batch: Any) -> Tensor:
        return (torch.fft.rfft(batch["x"] * params) * turn).abs().mean()

    return loss, torch.randn(6).to(dtype), {"x": normal(dtype, 6)}


@good(WIDE)
def complex_parameters(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        return (batch["x"] * params["w"] + params["b"]).abs().square().mean()

    params = {"w": torch.randn(6, dtype=torch.complex64), "b": torch.randn(())}
    params = {"w": params["w"].to(dtype.to_complex()), "b": params["b"].to(dtype)}
    return loss, params, {"x": normal(dtype, 6)}


@good()
def lowest_number_as_a_mask(dtype: torch.dtype) -> Case:
    params, batch = linear(dtype)

    def loss(params: Any, batch: Any) -> Tensor:
        out = affine(params, batch["x"])
        out = out.masked_fill(batch["mask"], torch.finfo(out.dtype).min)
        return torch.softmax(out, -1).square().mean()

    return loss, params, batch | {"mask": ragged_mask(3) & (torch.arange(3) > 0)}


# What they are made of -------------------------------------------------------------------


@good()
def frozen_teacher(dtype: torch.dtype) -> Case:
    teacher = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).to(dtype)

    def loss(params: Any, batch: Any) -> Tensor:
        with torch.no_grad():
            wanted = torch.softmax(teacher(batch["x"]), -1)
        got = torch.log_softmax(affine(params, batch["x"]), -1)
        return F.kl_div(got, wanted, reduction="batchmean")

    return loss, *linear(dtype)


@good()
def checkpointed(dtype: torch.dtype) -> Case:
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)

    def loss(params: Any, batch: Any) -> Tensor:
        def forward(x: Tensor) -> Tensor:
            return functional_call(net, params, (x,))

        return checkpoint(forward, batch["x"], use_reentrant=False).square().mean()

    return loss, parameters(net), {"x": normal(dtype, 6)}


class Cube(torch.autograd.Function):
    """Of the old kind, without ``setup_context``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *gs: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gs[0] * 3 * x**2


@good()
def custom_function(dtype: torch.dtype) -> Case:
    return lambda p, b: Cube.apply(affine(p, b["x"])).mean(), *linear(dtype)


@good()
def vmap_inside(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        return vmap(lambda x, y: ((affine(params, x) - y) ** 2).mean())(
            batch["x"], batch["y"]
        ).mean()

    return loss, *linear(dtype)


@good()
def jvp_inside(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        x = batch["x"]
        return jvp(lambda x: affine(params, x).tanh(), (x,), (torch.ones_like(x),))[1].abs().mean()

    return loss, *linear(dtype)


@good()
def gradient_penalty(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        slope = vmap(grad(lambda x: affine(params, x).tanh().sum()))(batch["x"])
        return (slope.norm(dim=1) - 1).square().mean()

    return loss, *linear(dtype)


@good()
def gradient_penalty_by_autograd(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        x = batch["x"].clone().requires_grad_()
        out = affine(params, x).tanh().sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    return loss, *linear(dtype)


@good()
def keyed_dropout(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        return affine(params, pa.dropout(batch["x"], 0.5, batch["keys"])).square().mean()

    params, batch = linear(dtype)
    return loss, params, batch | {"keys": pa.split_key(pa.key(0), ROWS)}


@good()
def keyed_noise(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        noise = pa.normal(batch["keys"], (6,)).to(batch["x"].dtype)
        return (affine(params, batch["x"] + noise)).square().mean()

    params, batch = linear(dtype)
    return loss, params, batch | {"keys": pa.split_key(pa.key(0), ROWS)}


@good()
def a_nested_batch(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        (x, more), y = batch["in"]["x"], batch["out"]
        assert more is None
        out = affine(params, x) * batch["scale"] if batch["train"] else affine(params, x)
        return ((out - y[0]) ** 2).mean()

    params, flat = linear(dtype)
    batch = {"in": {"x": (flat["x"], None)}, "out": [flat["y"]], "scale": 0.5, "train": True}
    return loss, params, batch


@good(has_aux=True)
def with_aux(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> tuple[Tensor, Any]:
        out = affine(params, batch["x"])
        return ((out - batch["y"]) ** 2).mean(), {"out": out.detach(), "rows": len(out)}

    return loss, *linear(dtype)


@good()
def a_log_of_its_own(dtype: torch.dtype) -> Case:
    """It remembers its values, and uses them nowhere."""
    history: list[float] = []

    def loss(params: Any, batch: Any) -> Tensor:
        value = (affine(params, batch["x"]) ** 2).mean()
        history.append(value.detach().item())
        return value

    return loss, *linear(dtype)


@good()
def a_table_made_once(dtype: torch.dtype) -> Case:
    """Rotary angles are made at the first call, in the dtype of the first call."""
    tables: dict[int, Tensor] = {}

    def loss(params: Any, batch: Any) -> Tensor:
        out = affine(params, batch["x"])
        if out.shape[1] not in tables:
            tables[out.shape[1]] = torch.cos(torch.arange(out.shape[1], dtype=out.dtype))
        return (out * tables[out.shape[1]]).square().mean()

    return loss, *linear(dtype)


@good()
def numpy_on_the_way(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        phase = torch.from_numpy(np.sin(batch["label"].numpy()))
        return (affine(params, batch["x"]) * phase[:, None]).square().mean()

    return loss, *linear(dtype)


@good()
def only_some_columns_of_a_view(dtype: torch.dtype) -> Case:
    """Parameters and batch are views, expanded and transposed."""
    params = {"w": torch.randn(3, 6).to(dtype).T, "b": torch.randn(1).to(dtype).expand(3)}
    batch = {"x": torch.randn(6, ROWS).to(dtype).T, "y": torch.ones(1, 3).to(dtype)}
    batch["y"] = batch["y"].expand(ROWS, 3)
    return lambda p, b: F.huber_loss(affine(p, b["x"]), b["y"]), params, batch
