"""Losses that are hard to judge, and may be microbatched all the same."""

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap

import pureaccum as pa
from tests.laws.zoo import ROWS, WIDE, affine, good, linear, normal, ragged_mask, squared


Case = tuple[Any, Any, Any]


# Numbers ---------------------------------------------------------------------------------


@good()
def zero_times(dtype: torch.dtype) -> Case:
    return lambda p, b: affine(p, b["x"]).square().mean() * 0, *linear(dtype)


@good()
def next_to_nothing(dtype: torch.dtype) -> Case:
    return lambda p, b: affine(p, b["x"]).square().mean() * 1e-30, *linear(dtype)


@good(WIDE)
def cancelling(dtype: torch.dtype) -> Case:
    """Most digits are lost on the way."""
    return lambda p, b: ((1e6 + affine(p, b["x"])) - 1e6).square().mean(), *linear(dtype)


@good(WIDE)
def chaos(dtype: torch.dtype) -> Case:
    """Each step doubles what rounding did before."""

    def loss(params: Any, batch: Any) -> Tensor:
        x = torch.sigmoid(affine(params, batch["x"]))
        for _ in range(30):
            x = 3.99 * x * (1 - x)
        return x.mean()

    return loss, *linear(dtype)


@good()
def scores_of_minus_infinity(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        out = affine(params, batch["x"]).masked_fill(batch["mask"], -torch.inf)
        return torch.softmax(out, -1).square().mean()

    params, batch = linear(dtype)
    return loss, params, batch | {"mask": ragged_mask(3) & (torch.arange(3) > 0)}


@good()
def bytes_of_an_image(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        return ((batch.float() / 255).to(params.dtype) @ params).square().mean()

    return loss, torch.randn(6, 2).to(dtype), torch.randint(0, 256, (ROWS, 6), dtype=torch.uint8)


@good()
def rounded_weights(dtype: torch.dtype) -> Case:
    """Fake quantisation, with a scale that comes from the weights."""

    def loss(params: Any, batch: Any) -> Tensor:
        w = params["w"]
        scale = w.detach().abs().max() / 127
        w = w + (torch.round(w / scale) * scale - w).detach()
        return (batch["x"] @ w + params["b"]).square().mean()

    return loss, *linear(dtype)


@good()
def branches_on_the_dtype(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        out = affine(params, batch["x"])
        if out.dtype in (torch.float16, torch.bfloat16):
            out = out.float()
        return (out.square() + torch.finfo(out.dtype).eps).sqrt().mean()

    return loss, *linear(dtype)


@good()
def penalty_for_every_token(dtype: torch.dtype) -> Case:
    params, batch = linear(dtype)

    def loss(params: Any, batch: Any) -> pa.Weighted:
        error, tokens = affine(params, batch["x"]) ** 2, batch["mask"].sum()
        penalty = params["w"].square().sum()
        return pa.Weighted((error * batch["mask"]).sum() + tokens * penalty, tokens)

    return loss, params, batch | {"mask": ragged_mask(3)}


# Ways to compute -------------------------------------------------------------------------


@good()
def every_token_once(dtype: torch.dtype) -> Case:
    """How many there are depends on the batch, nothing else does."""

    def loss(params: Any, batch: Any) -> Tensor:
        found, place = batch.unique(return_inverse=True)
        return (params[found] @ params.T)[place].square().mean()

    return loss, torch.randn(7, 3).to(dtype), torch.randint(0, 7, (ROWS, 3))


@good()
def matched_by_numpy(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        out = affine(params, batch["x"])
        best = torch.from_numpy(out.detach().float().numpy().argmin(1))
        return out.gather(1, best[:, None]).square().mean()

    return loss, *linear(dtype)


@good()
def writes_to_what_it_made(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        out = torch.zeros_like(batch["y"])
        out[:, :2] = affine(params, batch["x"])[:, :2]
        columns = torch.from_numpy(np.ones(3, dtype=np.float32))
        columns[1] = 2
        return (out.add_(1).relu_() * columns.mul_(3)).square().mean()

    return loss, *linear(dtype)


@good()
def draws_and_forgets(dtype: torch.dtype) -> Case:
    """A module is initialised for its structure alone."""

    def loss(params: Any, batch: Any) -> Tensor:
        layer = nn.Linear(6, 3)
        w = dict(zip(dict(layer.named_parameters()), (params["w"].T, params["b"]), strict=True))
        random.random()
        return torch.func.functional_call(layer, w, (batch["x"],)).square().mean()

    return loss, *linear(dtype)


@good()
def judged_by_a_network_that_trains(dtype: torch.dtype) -> Case:
    """A discriminator whose own parameters still require grad."""
    judge = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)
    return lambda p, b: F.softplus(-judge(affine(p, b["x"]))).mean(), *linear(dtype)


@good()
def a_batch_that_requires_grad(dtype: torch.dtype) -> Case:
    params, batch = linear(dtype)
    batch["x"].requires_grad_()
    return lambda p, b: affine(p, b["x"]).square().mean(), params, batch


@good()
def differential_equation(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        x = batch["x"].clone().requires_grad_()
        u = affine(params, x).tanh().sum(1)
        (slope,) = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)
        (bend,) = torch.autograd.grad(slope[:, 0], x, torch.ones_like(u), create_graph=True)
        return (bend[:, 0] + u.sin()).square().mean()

    return loss, *linear(dtype)


@good()
def learns_from_each_row_first(dtype: torch.dtype) -> Case:
    """As in MAML."""

    def loss(params: Any, batch: Any) -> Tensor:
        def error(params: Any, x: Tensor, y: Tensor) -> Tensor:
            return ((affine(params, x) - y) ** 2).mean()

        def after_a_step(x: Tensor, y: Tensor) -> Tensor:
            slope = grad(error)(params, x, y)
            return error({k: params[k] - 0.1 * slope[k] for k in params}, x + 1, y)

        return vmap(after_a_step)(batch["x"], batch["y"]).mean()

    return loss, *linear(dtype)


# Kept from call to call, without effect --------------------------------------------------


class FirstState(nn.Module):
    """Keeps zeros for as many rows as it saw last."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.first: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.first is None or len(self.first) != len(x):
            self.first = torch.zeros(len(x), 6, dtype=x.dtype)
        return self.layer(x + self.first)


@good()
def zeros_kept_for_as_many_rows(dtype: torch.dtype) -> Case:
    return squared(FirstState(), dtype, 6)


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("columns", torch.rand(3))

    def forward(self, params: Any, batch: Any) -> Tensor:
        return ((affine(params, batch["x"]) - batch["y"]) ** 2 * self.columns).mean()

    def twice(self, params: Any, batch: Any) -> Tensor:
        return 2 * self(params, batch)


@good()
def a_module_for_a_loss(dtype: torch.dtype) -> Case:
    return Criterion().to(dtype), *linear(dtype)


@good()
def a_method_for_a_loss(dtype: torch.dtype) -> Case:
    return Criterion().to(dtype).twice, *linear(dtype)


@good()
def a_batch_without_a_dict(dtype: torch.dtype) -> Case:
    return lambda p, x: (x @ p).square().mean(), torch.randn(6).to(dtype), normal(dtype, 6)
