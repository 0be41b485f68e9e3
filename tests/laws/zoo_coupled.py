"""Losses whose rows see each other: no way of cutting them is right."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.laws.zoo import (
    affine,
    bad,
    linear,
    parameters,
    ragged_mask,
    squared,
)


Case = tuple[Any, Any, Any]


# Statistics of the batch -----------------------------------------------------------------


@bad("batch statistics", says="stem")
def batch_norm(dtype: torch.dtype) -> Case:
    net = nn.Sequential()
    for name, layer in {"in": nn.Linear(6, 8), "stem": nn.BatchNorm1d(8)}.items():
        net.add_module(name, layer)
    return squared(net.append(nn.Linear(8, 3)), dtype, 6)


@bad("batch statistics", says="BatchNorm2d")
def batch_norm_2d(dtype: torch.dtype) -> Case:
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 2))
    return squared(net, dtype, 2, 5, 5)


@bad("batch statistics", says="batch_norm")
def batch_norm_as_a_function(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        h = F.batch_norm(affine(params, batch["x"]), None, None, training=True)
        return F.cross_entropy(h, batch["label"])

    return loss, *linear(dtype)


@bad("batch statistics", says="BatchNorm1d")
def batch_norm_without_running_statistics(dtype: torch.dtype) -> Case:
    norm = nn.BatchNorm1d(8, track_running_stats=False)
    return squared(nn.Sequential(nn.Linear(6, 8), norm, nn.Linear(8, 3)).eval(), dtype, 6)


@bad("batch statistics", says="BatchNorm1d")
def batch_norm_in_a_teacher(dtype: torch.dtype) -> Case:
    """It was never switched to eval mode."""
    teacher = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).to(dtype).requires_grad_(False)

    def loss(params: Any, batch: Any) -> Tensor:
        return F.mse_loss(affine(params, batch["x"]), teacher(batch["x"]))

    return loss, *linear(dtype)


@bad("batch statistics", says="BatchNorm2d")
def batch_norm_half_frozen(dtype: torch.dtype) -> Case:
    """Its module is in eval mode, one layer was set back to training."""
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4)).eval()
    net = net.append(nn.Conv2d(4, 2, 2))
    net[2].train()
    return squared(net, dtype, 2, 5, 5)


# Rows that see each other ----------------------------------------------------------------


def _unit(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


@bad("batch coupling")
def in_batch_negatives(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        scores = _unit(affine(params, batch["x"])) @ _unit(batch["y"]).T
        return F.cross_entropy(scores * 10, torch.arange(len(scores)))

    return loss, *linear(dtype)


@bad("batch coupling")
def two_towers(dtype: torch.dtype) -> Case:
    towers = nn.ModuleDict({"image": nn.Linear(6, 4), "text": nn.Linear(3, 4)}).to(dtype)

    def loss(params: Any, batch: Any) -> Tensor:
        image, text = (
            _unit(F.linear(batch[x], params[f"{name}.weight"], params[f"{name}.bias"]))
            for name, x in (("image", "x"), ("text", "y"))
        )
        scores, own = image @ text.T * 5, torch.arange(len(image))
        return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2

    return loss, parameters(towers), linear(dtype)[1]


@bad("batch coupling")
def hardest_triplets(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        out, label = affine(params, batch["x"]), batch["label"]
        far = (out[:, None] - out).square().sum(-1)
        alike = label[:, None] == label
        pulled, pushed = (far * alike).amax(1), far.masked_fill(alike, 100.0).amin(1)
        return (pulled - pushed + 1).relu().mean()

    return loss, *linear(dtype)


@bad("batch coupling")
def maximum_of_the_batch(dtype: torch.dtype) -> Case:
    return lambda p, b: affine(p, b["x"]).square().mean(1).max(), *linear(dtype)


@bad("batch coupling")
def variance_of_the_batch(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        out = affine(params, batch["x"])
        return F.mse_loss(out, batch["y"]) + (1 - out.var(0, correction=0)).relu().sum()

    return loss, *linear(dtype)


@bad("batch coupling")
def balance_of_experts(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        gate = torch.softmax(affine(params, batch["x"]), -1)
        share = F.one_hot(gate.argmax(-1), 3).to(gate.dtype).mean(0)
        return gate.amax(1).mean() + 3 * (gate.mean(0) * share).sum()

    return loss, *linear(dtype)


@bad("batch coupling")
def hardest_half(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        rows = (affine(params, batch["x"]) - batch["y"]).square().mean(1)
        return rows.topk(max(1, len(rows) // 2)).values.mean()

    return loss, *linear(dtype)


@bad("batch coupling")
def above_the_median(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        rows = (affine(params, batch["x"]) - batch["y"]).square().mean(1)
        return torch.where(rows >= rows.median(), rows, 0).mean()

    return loss, *linear(dtype)


@bad("data statistics", says="mean")
def standardised_targets(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        return F.mse_loss(affine(params, batch["x"]), batch["y"] - batch["y"].mean(0))

    return loss, *linear(dtype)


@bad("data statistics", says="std")
def standardised_advantages(dtype: torch.dtype) -> Case:
    """As in PPO."""

    def loss(params: Any, batch: Any) -> Tensor:
        chosen = torch.log_softmax(affine(params, batch["x"]), -1).gather(
            1, batch["label"][:, None]
        )
        ratio, gain = (chosen[:, 0] - chosen[:, 0].detach()).exp(), batch["y"][:, 0]
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        return -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()

    return loss, *linear(dtype)


@bad("data statistics", says="sum")
def whitened_advantages(dtype: torch.dtype) -> Case:
    """As TRL whitens them: over all tokens that are no padding, which the loss is a mean over."""

    def loss(params: Any, batch: Any) -> Tensor:
        gain, mask = batch["y"], batch["mask"]
        apart = gain - (gain * mask).sum() / mask.sum()
        gain = apart * ((apart**2 * mask).sum() / mask.sum() + 1e-8).rsqrt()
        return -(affine(params, batch["x"]).tanh() * gain * mask).sum() / mask.sum()

    params, batch = linear(dtype)
    mask = ragged_mask(3)
    mask[:, 0] = True
    return loss, params, batch | {"mask": mask.to(dtype)}


@bad("batch coupling")
def root_of_a_mean(dtype: torch.dtype) -> Case:
    return lambda p, b: F.mse_loss(affine(p, b["x"]), b["y"]).sqrt(), *linear(dtype)


@bad("batch coupling")
def exponential_of_a_mean(dtype: torch.dtype) -> Case:
    return lambda p, b: F.cross_entropy(affine(p, b["x"]), b["label"]).exp(), *linear(dtype)


@bad("batch coupling")
def dice(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        got, wanted = torch.sigmoid(affine(params, batch["x"])), (batch["y"] > 0).to(torch.float32)
        return 1 - (2 * (got * wanted).sum() + 1) / (got.sum() + wanted.sum() + 1)

    return loss, *linear(dtype)


@bad("batch coupling")
def redundancy_of_features(dtype: torch.dtype) -> Case:
    """As in Barlow Twins."""

    def loss(params: Any, batch: Any) -> Tensor:
        one, other = (affine(params, x) for x in (batch["x"], batch["x"].flip(1)))
        return ((one.T @ other / len(one) - torch.eye(3)) ** 2).sum()

    return loss, *linear(dtype)


@bad("batch coupling")
def mixed_with_the_next_row(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        x, y = (0.7 * batch[k] + 0.3 * batch[k].roll(1, 0) for k in "xy")
        return F.mse_loss(affine(params, x), y)

    return loss, *linear(dtype)


@bad("batch coupling")
def pairs_of_rows(dtype: torch.dtype) -> Case:
    """The better and the worse answer stand side by side in the batch."""

    def loss(params: Any, batch: Any) -> Tensor:
        score = affine(params, batch["x"]).sum(1)
        better, worse = score[: len(score) // 2 * 2].view(-1, 2).unbind(1)
        return F.softplus(worse - better).sum() / max(1, len(better))

    return loss, *linear(dtype)


@bad("batch coupling")
def position_in_the_batch(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        rows = affine(params, batch["x"]).square().mean(1)
        return (rows * torch.arange(len(rows))).mean()

    return loss, *linear(dtype)


@bad("batch coupling")
def attention_over_the_batch(dtype: torch.dtype) -> Case:
    """``batch_first`` was forgotten."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)
    return squared(nn.Sequential(layer, nn.Linear(4, 3)), dtype, 5, 4)


@bad("batch coupling")
def softmax_over_the_batch(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        return -(affine(params, batch["x"]).log_softmax(0) * batch["y"].abs()).mean()

    return loss, *linear(dtype)
