"""Losses that are no functions of what they are given, or not of every batch."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.laws.zoo import ROWS, affine, bad, linear, normal, squared


Case = tuple[Any, Any, Any]


# Randomness ------------------------------------------------------------------------------


@bad("randomness", says="Dropout")
def dropout(dtype: torch.dtype) -> Case:
    return squared(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)), dtype, 6)


@bad("randomness", says="dropout")
def dropout_as_a_function(dtype: torch.dtype) -> Case:
    return lambda p, b: F.dropout(affine(p, b["x"]), 0.5).square().mean(), *linear(dtype)


@bad("randomness", says="self_attn")
def dropout_in_an_encoder(dtype: torch.dtype) -> Case:
    """A tenth, unless told otherwise."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    return squared(nn.Sequential(layer, nn.Linear(4, 3)), dtype, 5, 4)


@bad("randomness", says="scaled_dot_product_attention")
def dropout_of_attention(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        q, k, v = (batch @ params).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3).square().mean()

    return loss, torch.randn(6, 12).to(dtype), normal(dtype, 5, 6)


@bad("randomness", says="rrelu")
def leaks_at_random(dtype: torch.dtype) -> Case:
    return lambda p, b: F.rrelu(affine(p, b["x"]), training=True).mean(), *linear(dtype)


def _noisy(dtype: torch.dtype, noise: Callable[[Tensor], Any]) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        return (affine(params, batch["x"]) + noise(batch["y"])).square().mean()

    return loss, *linear(dtype)


@bad("randomness", says="randn_like")
def noise(dtype: torch.dtype) -> Case:
    return _noisy(dtype, torch.randn_like)


@bad("randomness", says="normal_")
def noise_in_place(dtype: torch.dtype) -> Case:
    return _noisy(dtype, lambda y: torch.empty_like(y).normal_())


@bad("randomness")
def noise_of_numpy(dtype: torch.dtype) -> Case:
    return _noisy(dtype, lambda y: torch.from_numpy(np.random.randn(*y.shape)).to(y))


@bad("state", says="generator")
def noise_of_a_numpy_generator(dtype: torch.dtype) -> Case:
    """Nobody can seed it."""
    draw = np.random.default_rng(0)
    return _noisy(dtype, lambda y: torch.from_numpy(draw.normal(size=y.shape)).to(y))


@bad("randomness")
def noise_of_python(dtype: torch.dtype) -> Case:
    return _noisy(dtype, lambda y: random.random())


@bad("randomness")
def noise_of_its_own_generator(dtype: torch.dtype) -> Case:
    generator = torch.Generator().manual_seed(0)
    return _noisy(dtype, lambda y: torch.rand(y.shape, generator=generator))


@bad("randomness")
def noise_seeded_anew(dtype: torch.dtype) -> Case:
    """Every call draws the same numbers, so every microbatch has those of the first rows."""

    def draw(y: Tensor) -> Tensor:
        torch.manual_seed(7)
        return torch.randn(y.shape)

    return _noisy(dtype, draw)


@bad("randomness", says="randint")
def diffusion(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        x = batch["x"]
        step = (torch.randint(1, 9, (len(x), 1)) / 10).to(x.dtype)
        added = torch.randn_like(x)
        return F.mse_loss(affine(params, (1 - step) * x + step * added), added[:, :3])

    return loss, *linear(dtype)


@bad("randomness", says="randperm")
def mixed_with_any_row(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        other = torch.randperm(len(batch["x"]))
        x, y = (0.7 * batch[k] + 0.3 * batch[k][other] for k in "xy")
        return F.mse_loss(affine(params, x), y)

    return loss, *linear(dtype)


# State -----------------------------------------------------------------------------------


@bad("state", says="steps")
def counts_in_a_tensor(dtype: torch.dtype) -> Case:
    steps = torch.zeros(())

    def loss(params: Any, batch: Any) -> Tensor:
        steps.add_(1)
        return affine(params, batch["x"]).square().mean() * (1 + 0.1 * steps)

    return loss, *linear(dtype)


@bad("state")
def counts_in_python(dtype: torch.dtype) -> Case:
    calls = 0

    def loss(params: Any, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return affine(params, batch["x"]).square().mean() * 0.99**calls

    return loss, *linear(dtype)


@bad("state", says="center")
def centred_by_what_it_saw(dtype: torch.dtype) -> Case:
    """As in DINO."""
    center = torch.zeros(3, dtype=dtype)

    def loss(params: Any, batch: Any) -> Tensor:
        out = affine(params, batch["x"])
        with torch.no_grad():
            center.mul_(0.9).add_(out.mean(0), alpha=0.1)
        return (out - center).square().mean()

    return loss, *linear(dtype)


@bad("state")
def compared_with_the_last_batch(dtype: torch.dtype) -> Case:
    """A queue of what came before, as in MoCo."""
    queue = [torch.zeros(3, dtype=dtype)]

    def loss(params: Any, batch: Any) -> Tensor:
        out = affine(params, batch["x"])
        value = (out - queue[-1].to(out.dtype)).square().mean()
        queue.append(out.detach().mean(0))
        return value

    return loss, *linear(dtype)


@bad("state", says="batch['x']")
def centres_its_batch_in_place(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        return affine(params, batch["x"].sub_(batch["x"].mean())).square().mean()

    return loss, *linear(dtype)


@bad("state", says="batch['x']")
def doubles_its_batch_in_place(dtype: torch.dtype) -> Case:
    return lambda p, b: affine(p, b["x"].mul_(2)).square().mean(), *linear(dtype)


@bad("state", says="parametrizations")
def spectral_norm(dtype: torch.dtype) -> Case:
    """Each forward pass in training mode is one more step of the power iteration."""
    net = nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 3)))
    return squared(net, dtype, 6)


# Not for every batch ---------------------------------------------------------------------


@bad("overflow", dtypes=(torch.float16,))
def squares_that_overflow(dtype: torch.dtype) -> Case:
    params, batch = linear(dtype)
    return lambda p, b: (affine(p, b["x"]) * 64).square().sum(1).mean(), params, batch


@bad("overflow", dtypes=(torch.float16,))
def exponentials_that_overflow(dtype: torch.dtype) -> Case:
    return lambda p, b: (affine(p, b["x"]).abs() * 9).exp().mean(), *linear(dtype)


@bad("raises")
def needs_two_rows(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        if len(batch["x"]) < 2:
            raise ValueError("expected more than one row")
        return affine(params, batch["x"]).square().mean()

    return loss, *linear(dtype)


@bad("raises")
def knows_the_size_of_its_batch(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        return affine(params, batch["x"].view(ROWS, 2, 3).flatten(1)).square().mean()

    return loss, *linear(dtype)
