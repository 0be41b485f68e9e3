"""Losses that are no functions of what they are given, or not of every batch."""

import random
from collections import deque

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations

from tests.zoo.species import DTYPES, ROWS, affine, fails, linear, normal, parameters, squared


# Randomness ------------------------------------------------------------------------------


@fails("randomness", says="Dropout")
def dropout(dtype):
    return squared(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)), dtype, 6)


@fails("randomness", says="dropout")
def dropout_as_a_function(dtype):
    return lambda p, b: F.dropout(affine(p, b["x"]), 0.5).square().mean(), *linear(dtype)


@fails("randomness", says="self_attn")
def dropout_in_an_encoder(dtype):
    """A tenth, unless told otherwise."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    return squared(nn.Sequential(layer, nn.Linear(4, 3)), dtype, 5, 4)


@fails("randomness", says="scaled_dot_product_attention")
def dropout_of_attention(dtype):
    def loss(params, batch):
        q, k, v = (batch @ params).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3).square().mean()

    return loss, torch.randn(6, 12).to(dtype), normal(dtype, 5, 6)


def _noisy(dtype, noise):
    def loss(params, batch):
        return (affine(params, batch["x"]) + noise(batch["y"])).square().mean()

    return loss, *linear(dtype)


@fails("randomness", says="randn_like")
def noise(dtype):
    return _noisy(dtype, torch.randn_like)


@fails("randomness", says="normal_")
def noise_in_place(dtype):
    return _noisy(dtype, lambda y: torch.empty_like(y).normal_())


@fails("randomness")
def noise_of_numpy(dtype):
    return _noisy(dtype, lambda y: torch.from_numpy(np.random.randn(*y.shape)).to(y))


@fails("state", says="generator")
def noise_of_a_numpy_generator(dtype):
    """Nobody can seed it."""
    draw = np.random.default_rng(0)
    return _noisy(dtype, lambda y: torch.from_numpy(draw.normal(size=y.shape)).to(y))


@fails("randomness")
def noise_of_python(dtype):
    return _noisy(dtype, lambda y: random.random())


@fails("randomness")
def noise_of_its_own_generator(dtype):
    generator = torch.Generator().manual_seed(0)
    return _noisy(dtype, lambda y: torch.rand(y.shape, generator=generator))


@fails("randomness")
def noise_seeded_anew(dtype):
    """Every call draws the same numbers, so every microbatch has those of the first samples."""

    def draw(y):
        torch.manual_seed(7)
        return torch.randn(y.shape)

    return _noisy(dtype, draw)


@fails("randomness", of=linear, says="randn", dtypes=DTYPES)
def noise_of_a_millionth(params, batch):
    out = affine(params, batch["x"])
    return (out + 1e-6 * torch.randn(out.shape)).square().mean()


@fails("randomness", of=linear, says="randperm")
def mixed_with_any_row(params, batch):
    other = torch.randperm(len(batch["x"]))
    x, y = (0.7 * batch[k] + 0.3 * batch[k][other] for k in "xy")
    return F.mse_loss(affine(params, x), y)


@fails("randomness", of=linear)
def a_layer_dropped_now_and_then(params, batch):
    out = affine(params, batch["x"])
    return (out if random.random() < 0.1 else out.tanh()).square().mean()


# State -----------------------------------------------------------------------------------


@fails("state", says="steps")
def counts_in_a_tensor(dtype):
    steps = torch.zeros(())

    def loss(params, batch):
        steps.add_(1)
        return affine(params, batch["x"]).square().mean() * (1 + 0.1 * steps)

    return loss, *linear(dtype)


@fails("state")
def counts_in_python(dtype):
    calls = 0

    def loss(params, batch):
        nonlocal calls
        calls += 1
        return affine(params, batch["x"]).square().mean() * 0.99**calls

    return loss, *linear(dtype)


@fails("state")
def every_tenth_call(dtype):
    calls = [0]

    def loss(params, batch):
        calls[0] += 1
        penalty = 0 if calls[0] % 10 else params["w"].abs().mean()
        return affine(params, batch["x"]).square().mean() + penalty

    return loss, *linear(dtype)


class Warm(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 3), 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x) * min(1.0, self.calls / 1000)


@fails("state")
def warms_up(dtype):
    return squared(Warm(), dtype, 6)


class Shift(nn.Module):
    """Made from the first batch that it sees."""

    def __init__(self):
        super().__init__()
        self.layer, self.ready = nn.Linear(6, 3), False
        self.register_buffer("shift", torch.zeros(3))

    def forward(self, x):
        out = self.layer(x)
        if not self.ready:
            self.shift.copy_(out.detach().mean(0))
            self.ready = True
        return out - self.shift


@fails("state", says="ready")
def made_from_the_first_batch(dtype):
    return squared(Shift(), dtype, 6)


@fails("state")
def negatives_in_a_deque(dtype):
    seen = deque([torch.randn(3).to(dtype)], maxlen=20)

    def loss(params, batch):
        out = affine(params, batch["x"])
        scores = out @ torch.stack(list(seen)).T
        seen.extend(out.detach())
        return scores.logsumexp(1).mean()

    return loss, *linear(dtype)


@fails("state", says="queue")
def queue_that_wraps_around(dtype):
    """After two batches the pointer is where it was."""
    net = nn.Linear(6, 3).to(dtype)
    net.register_buffer("queue", torch.randn(2 * ROWS, 3, dtype=dtype))
    net.register_buffer("pointer", torch.zeros(1, dtype=torch.int64))

    def loss(params, batch):
        keys = functional_call(net, params, (batch["x"],))
        own = (keys * keys.detach()).sum(1, keepdim=True)
        scores = torch.cat([own, keys @ net.queue.clone().T], 1)
        at = (torch.arange(len(keys)) + int(net.pointer)) % len(net.queue)
        net.queue[at] = keys.detach().to(net.queue.dtype)
        net.pointer[0] = (int(net.pointer) + len(keys)) % len(net.queue)
        return (scores.logsumexp(1) - own[:, 0]).mean()

    return loss, parameters(net), {"x": normal(dtype, 6)}


@fails("state", says="batch['x']")
def doubles_its_batch_in_place(dtype):
    return lambda p, b: affine(p, b["x"].mul_(2)).square().mean(), *linear(dtype)


@fails("state", of=linear, says="params['w']")
def changes_its_parameters(params, batch):
    """To do it twice is to do it once, so that no second call differs from the first."""
    with torch.no_grad():
        params["w"].clamp_(-0.5, 0.5)
    return affine(params, batch["x"]).square().mean()


@fails("state", says="parametrizations")
def spectral_norm(dtype):
    """Each forward pass in training mode is one more step of the power iteration."""
    net = nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 3)))
    return squared(net, dtype, 6)


@fails("state", says="running_mean")
def statistics_nobody_reads(dtype):
    """The gradient is right; the running statistics see every microbatch."""
    norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    return squared(nn.Sequential(nn.Conv2d(2, 4, 2), norm, nn.Conv2d(4, 2, 2)), dtype, 2, 4, 4)


# Not for every batch ---------------------------------------------------------------------


@fails("raises", of=linear)
def needs_two_rows(params, batch):
    if len(batch["x"]) < 2:
        raise ValueError("expected more than one row")
    return affine(params, batch["x"]).square().mean()


@fails("raises", of=linear)
def squeezed(params, batch):
    """Of a single sample, the sample itself is squeezed away."""
    out = affine(params, batch["x"])[:, None].squeeze()
    return F.cross_entropy(out, batch["label"])


@fails("raises", of=linear)
def knows_the_size_of_its_batch(params, batch):
    return affine(params, batch["x"].view(ROWS, 2, 3).flatten(1)).square().mean()


@fails("raises")
def captured_rows(dtype):
    """Weights of the samples that are not in the batch."""
    weights = torch.rand(ROWS, 1).to(dtype)
    return lambda p, b: (affine(p, b["x"]) * weights).square().mean(), *linear(dtype)


@fails("overflow", dtypes=(torch.float16,))
def squares_that_overflow(dtype):
    params, batch = linear(dtype)
    return lambda p, b: (affine(p, b["x"]) * 64).square().sum(1).mean(), params, batch


@fails("overflow", dtypes=(torch.float16,))
def gradient_that_overflows(dtype):
    """The value does not."""
    return lambda p, b: (affine(p, b["x"]) * 0.01).float().square().mean() * 1e7, *linear(dtype)
