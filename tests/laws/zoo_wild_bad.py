"""Losses that may not be microbatched, and hide it well."""

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pureaccum as pa
from tests.laws.zoo import ROWS, affine, bad, linear, normal, ragged_mask, squared


Case = tuple[Any, Any, Any]


# Small, or seen in one place only --------------------------------------------------------


@bad("batch coupling")
def by_a_millionth(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        out = affine(params, batch["x"])
        return out.square().mean() + 1e-6 * out.var(0, correction=0).sum()

    return loss, *linear(dtype)


@bad("batch coupling")
def in_the_gradient_alone(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        out = affine(params, batch["x"])
        return out.square().mean() + ((out - out.detach()) * out.detach().mean(0)).mean()

    return loss, *linear(dtype)


@bad("data statistics", says="mean")
def in_the_value_alone(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        return affine(params, batch["x"]).square().mean() + batch["x"].mean(0).square().sum()

    return loss, *linear(dtype)


@bad("batch coupling")
def in_the_backward_pass_alone(dtype: torch.dtype) -> Case:
    """A hook clips the gradient of the features, over the batch."""

    def loss(params: Any, batch: Any) -> Tensor:
        out = affine(params, batch["x"])
        if out.requires_grad:
            out.register_hook(lambda g: g / g.norm())
        return out.square().mean()

    return loss, *linear(dtype)


@bad("randomness", says="randn")
def noise_of_a_millionth(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        out = affine(params, batch["x"])
        return (out + 1e-6 * torch.randn(out.shape)).square().mean()

    return loss, *linear(dtype)


@bad("randomness")
def a_layer_dropped_now_and_then(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        out = affine(params, batch["x"])
        return (out if random.random() < 0.1 else out.tanh()).square().mean()

    return loss, *linear(dtype)


@bad("state")
def every_tenth_call(dtype: torch.dtype) -> Case:
    calls = [0]

    def loss(params: Any, batch: Any) -> Tensor:
        calls[0] += 1
        penalty = 0 if calls[0] % 10 else params["w"].abs().mean()
        return affine(params, batch["x"]).square().mean() + penalty

    return loss, *linear(dtype)


# What a mean is over ---------------------------------------------------------------------


@bad("several means", says="counts as")
def two_means_at_once(dtype: torch.dtype) -> Case:
    """One over rows and one over positives, as in detection: no weight is right for both."""

    def loss(params: Any, batch: Any) -> Tensor:
        out, positive = affine(params, batch["x"]), batch["label"] > 0
        boxes = (out.square().mean(1) * positive).sum() / positive.sum().clamp(min=1)
        return F.cross_entropy(out, batch["label"]) + boxes

    return loss, *linear(dtype)


@bad("mean of means")
def targets_that_are_missing(dtype: torch.dtype) -> Case:
    params, batch = linear(dtype)

    def loss(params: Any, batch: Any) -> Tensor:
        error = (affine(params, batch["x"]) - batch["y"].nan_to_num()) ** 2
        return error.masked_fill(batch["y"].isnan(), torch.nan).nanmean()

    missing = ~ragged_mask(3)
    missing[:, 0] = False
    return loss, params, batch | {"y": batch["y"].masked_fill(missing, torch.nan)}


@bad("data statistics", says="max")
def padding_counts(dtype: torch.dtype) -> Case:
    """Rows are trimmed to the longest; the mean is over what is left, padding and all."""
    params, _ = linear(dtype, 5, 3)

    def loss(params: Any, batch: Any) -> Tensor:
        mask = batch["mask"][:, : int(batch["mask"].sum(1).max())]
        out = affine(params, batch["x"][:, : mask.shape[1]])
        return (out * mask[..., None]).square().mean()

    mask = ragged_mask(4)
    mask[:, 0] = True
    return loss, params, {"x": normal(dtype, 4, 5), "mask": mask}


@bad("weight")
def weight_of_one_at_least(dtype: torch.dtype) -> Case:
    """So that nothing is divided by zero; but now a row without tokens weighs something."""
    params, batch = linear(dtype)

    def loss(params: Any, batch: Any) -> pa.Weighted:
        error, mask = affine(params, batch["x"]) ** 2, batch["mask"]
        return pa.Weighted((error * mask).sum(), mask.sum().clamp(min=1))

    return loss, params, batch | {"mask": ragged_mask(3)}


@bad("weight")
def weight_of_rows_for_a_mean_over_tokens(dtype: torch.dtype) -> Case:
    params, batch = linear(dtype)

    def loss(params: Any, batch: Any) -> pa.Weighted:
        error, mask = affine(params, batch["x"]) ** 2, batch["mask"]
        mean = (error * mask).sum() / mask.sum().clamp(min=1)
        return pa.Weighted(mean * len(mask), len(mask))

    return loss, params, batch | {"mask": ragged_mask(3)}


@bad("batch coupling")
def rows_against_columns(dtype: torch.dtype) -> Case:
    """(n, 1) minus (n,) is (n, n), and nobody complains."""

    def loss(params: Any, batch: Any) -> Tensor:
        return (affine(params, batch["x"])[:, :1] - batch["y"][:, 0]).square().mean()

    return loss, *linear(dtype)


@bad("batch coupling")
def no_more_than_three_a_head(dtype: torch.dtype) -> Case:
    """An expert has a capacity, and the rows that come too late are dropped."""

    def loss(params: Any, batch: Any) -> Tensor:
        out = affine(params, batch["x"])
        chosen = F.one_hot(out.argmax(1), 3)
        kept = (chosen.cumsum(0) * chosen).sum(1) <= 3
        return (out * kept[:, None]).square().mean()

    return loss, *linear(dtype)


# Kept from call to call ------------------------------------------------------------------


class Shift(nn.Module):
    """Made from the first batch that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.ready = nn.Linear(6, 3), False
        self.register_buffer("shift", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        if not self.ready:
            self.shift.copy_(out.detach().mean(0))
            self.ready = True
        return out - self.shift


@bad("state", says="ready")
def made_from_the_first_batch(dtype: torch.dtype) -> Case:
    return squared(Shift(), dtype, 6)


class Warm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) * min(1.0, self.calls / 1000)


@bad("state")
def warms_up(dtype: torch.dtype) -> Case:
    return squared(Warm(), dtype, 6)


@bad("state", says="running_mean")
def statistics_nobody_reads(dtype: torch.dtype) -> Case:
    """The gradient is right; the running statistics see every microbatch."""
    norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    return squared(nn.Sequential(nn.Conv2d(2, 4, 2), norm, nn.Conv2d(4, 2, 2)), dtype, 2, 4, 4)


@bad("state", says="scale")
def divided_by_a_running_scale(dtype: torch.dtype) -> Case:
    scale = torch.ones((), dtype=dtype)

    def loss(params: Any, batch: Any) -> Tensor:
        value = affine(params, batch["x"]).square().mean()
        with torch.no_grad():
            scale.lerp_(value.detach(), 0.1)
        return value / scale

    return loss, *linear(dtype)


@bad("state", says="params['w']")
def changes_its_parameters(dtype: torch.dtype) -> Case:
    """To do it twice is to do it once, so that no second call differs from the first."""

    def loss(params: Any, batch: Any) -> Tensor:
        with torch.no_grad():
            params["w"].clamp_(-0.5, 0.5)
        return affine(params, batch["x"]).square().mean()

    return loss, *linear(dtype)


# Not for every batch ---------------------------------------------------------------------


@bad("raises")
def squeezed(dtype: torch.dtype) -> Case:
    """Of a single row, the row itself is squeezed away."""

    def loss(params: Any, batch: Any) -> Tensor:
        out = affine(params, batch["x"])[:, None].squeeze()
        return F.cross_entropy(out, batch["label"])

    return loss, *linear(dtype)


@bad("raises")
def captured_rows(dtype: torch.dtype) -> Case:
    """Weights of the rows that are not in the batch."""
    weights = torch.rand(ROWS, 1).to(dtype)
    return lambda p, b: (affine(p, b["x"]) * weights).square().mean(), *linear(dtype)


@bad("overflow", dtypes=(torch.float16,))
def gradient_that_overflows(dtype: torch.dtype) -> Case:
    """The value does not."""
    return lambda p, b: (affine(p, b["x"]) * 0.01).float().square().mean() * 1e7, *linear(dtype)
