"""Losses that are sums over rows, whatever they are divided by."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import pureaccum as pa
from tests.laws.zoo import ROWS, affine, good, linear, normal, ragged_mask


Case = tuple[Any, Any, Any]


@good(reduction="sum")
def a_sum(dtype: torch.dtype) -> Case:
    return lambda p, b: F.mse_loss(affine(p, b["x"]), b["y"], reduction="sum"), *linear(dtype)


@good(reduction="sum")
def a_sum_over_items_counted_before(dtype: torch.dtype) -> Case:
    """The number of tokens of the whole batch comes with it."""
    params, batch = linear(dtype)
    batch |= {"mask": ragged_mask(3), "items": int(ragged_mask(3).sum())}

    def loss(params: Any, batch: Any) -> Tensor:
        error = (affine(params, batch["x"]) - batch["y"]) ** 2
        return (error * batch["mask"]).sum() / batch["items"]

    return loss, params, batch


@good()
def masked_tokens(dtype: torch.dtype) -> Case:
    params, batch = linear(dtype)

    def loss(params: Any, batch: Any) -> pa.Weighted:
        error, mask = (affine(params, batch["x"]) - batch["y"]) ** 2, batch["mask"]
        return pa.Weighted((error * mask).sum(), mask.sum())

    return loss, params, batch | {"mask": ragged_mask(3)}


@good()
def weighted_by_a_number(dtype: torch.dtype) -> Case:
    params, batch = linear(dtype)

    def loss(params: Any, batch: Any) -> pa.Weighted:
        kept = batch["mask"].any(1)
        total = F.cross_entropy(affine(params, batch["x"])[kept], batch["label"][kept])
        return pa.Weighted(total * kept.sum() if kept.any() else total * 0, kept.sum().item())

    return loss, params, batch | {"mask": ragged_mask(3)}


@good()
def no_weight_and_nan(dtype: torch.dtype) -> Case:
    """A row without tokens has a mean of its own that is NaN."""
    params, batch = linear(dtype)

    def loss(params: Any, batch: Any) -> pa.Weighted:
        weight = batch["weight"].sum()
        rows = ((affine(params, batch["x"]) - batch["y"]) ** 2).mean(1)
        return pa.Weighted((rows * batch["weight"]).sum() / weight * weight, weight)

    return loss, params, batch | {"weight": torch.arange(ROWS) % 3}


@good()
def class_weights(dtype: torch.dtype) -> Case:
    params, batch = linear(dtype)
    weights = torch.tensor([0.5, 1.0, 3.0]).to(dtype)

    def loss(params: Any, batch: Any) -> pa.Weighted:
        out, label = affine(params, batch["x"]), batch["label"]
        total = F.cross_entropy(out, label, weights.to(out.dtype), reduction="sum")
        return pa.Weighted(total, weights[label].sum())

    return loss, params, batch


@good()
def ignored_tokens_in_every_row_alike(dtype: torch.dtype) -> Case:
    """A mean over tokens, but all rows have the same number of them."""
    labels = torch.randint(0, 3, (ROWS, 4)).scatter(1, torch.randint(0, 4, (ROWS, 1)), -100)
    params, _ = linear(dtype, 5, 3)

    def loss(params: Any, batch: Any) -> Tensor:
        return F.cross_entropy(affine(params, batch["x"]).flatten(0, 1), batch["label"].flatten())

    return loss, params, {"x": normal(dtype, 4, 5), "label": labels}


@good()
def trimmed_to_the_longest(dtype: torch.dtype) -> Case:
    """Columns that are padding in all rows at hand are cut away; nothing depends on it."""
    params, _ = linear(dtype, 5, 3)

    def loss(params: Any, batch: Any) -> pa.Weighted:
        mask = batch["mask"][:, : int(batch["mask"].sum(1).max())]
        rows = affine(params, batch["x"][:, : mask.shape[1]]).square().mean(-1)
        return pa.Weighted((rows * mask).sum(), mask.sum())

    return loss, params, {"x": normal(dtype, 4, 5), "mask": ragged_mask(4)}


@good()
def weight_decay_in_a_mean(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        return affine(params, batch["x"]).abs().mean() + 0.1 * params["w"].square().sum()

    return loss, *linear(dtype)


@good()
def at_the_optimum(dtype: torch.dtype) -> Case:
    """The gradient is nothing but rounding, those of the rows are not."""
    x = normal(torch.float64, 3)
    x = torch.cat([x[:6], -x[:6]]).to(dtype)
    return lambda p, b: ((p - b) ** 2).mean(), torch.zeros(3, dtype=dtype), x


@good()
def a_huge_range(dtype: torch.dtype) -> Case:
    params, batch = linear(dtype)
    batch["scale"] = torch.logspace(-6, 6, ROWS).to(dtype)
    return lambda p, b: (affine(p, b["x"]).square().mean(1) * b["scale"]).mean(), params, batch


@good()
def kinks_and_ties(dtype: torch.dtype) -> Case:
    whole = {"w": torch.randint(-2, 3, (4, 3)), "b": torch.zeros(3)}

    def loss(params: Any, batch: Any) -> Tensor:
        return (affine(params, batch["x"]).relu().max(-1).values - batch["y"]).abs().mean()

    batch = {"x": torch.randint(-2, 3, (ROWS, 4)), "y": torch.zeros(ROWS)}
    return loss, *({k: v.to(dtype) for k, v in tree.items()} for tree in (whole, batch))


@good()
def maximum_of_each_row(dtype: torch.dtype) -> Case:
    return lambda p, b: affine(p, b["x"]).amax(1).mean(), *linear(dtype)


@good()
def hardest_token_of_each_row(dtype: torch.dtype) -> Case:
    return lambda p, b: affine(p, b["x"]).topk(2, 1).values.square().mean(), *linear(dtype)


@good()
def log_sum_exp_of_each_row(dtype: torch.dtype) -> Case:
    return lambda p, b: (torch.logsumexp(affine(p, b["x"]) * 8, 1)).mean(), *linear(dtype)


@good()
def straight_through(dtype: torch.dtype) -> Case:
    """The nearest entry of a codebook, with the gradient of the identity."""

    def loss(params: Any, batch: Any) -> Tensor:
        h, book = affine(params, batch["x"]), params["book"]
        nearest = book[torch.cdist(h.float(), book.float()).argmin(1)]
        commitment = F.mse_loss(h, nearest.detach()) + F.mse_loss(nearest, h.detach())
        return (h + (nearest - h).detach()).square().mean() + commitment

    params, batch = linear(dtype)
    return loss, params | {"book": torch.randn(4, 3).to(dtype)}, batch
