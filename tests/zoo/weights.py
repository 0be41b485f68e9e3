"""Losses that are a sum or a mean over something else than they say."""

import torch
import torch.nn.functional as F

import pureaccum as pa
from tests.zoo.fits_sums import focal, totals_without_a_weight
from tests.zoo.species import ROWS, affine, fails, linear, masked, normal, ragged_mask


# Means of means --------------------------------------------------------------------------


@fails("mean of means")
def mean_over_tokens(dtype):
    params, batch = linear(dtype)

    def loss(params, batch):
        error, mask = (affine(params, batch["x"]) - batch["y"]) ** 2, batch["mask"]
        return (error * mask).sum() / mask.sum()

    return loss, params, batch | {"mask": torch.arange(3) < torch.arange(ROWS)[:, None] % 3 + 1}


@fails("mean of means", of=masked)
def mean_over_tokens_if_any(params, batch):
    error, mask = (affine(params, batch["x"]) - batch["y"]) ** 2, batch["mask"]
    return (error * mask).sum() / mask.sum().clamp(min=1)


@fails("mean of means")
def ignored_tokens(dtype):
    params, _ = linear(dtype, 5, 3)

    def loss(params, batch):
        return F.cross_entropy(affine(params, batch["x"]).flatten(0, 1), batch["label"].flatten())

    label = torch.randint(0, 3, (ROWS, 4)).masked_fill(~ragged_mask(4), -100)
    return loss, params, {"x": normal(dtype, 4, 5), "label": label}


@fails("mean of means")
def mean_over_weighted_classes(dtype):
    weights = torch.tensor([0.5, 1.0, 3.0])

    def loss(params, batch):
        out = affine(params, batch["x"])
        return F.cross_entropy(out, batch["label"], weights.to(out.dtype))

    return loss, *linear(dtype)


@fails("mean of means", of=linear)
def mean_over_a_selection(params, batch):
    """Negatives are left out, by indexing."""
    positive = batch["label"] > 0
    return affine(params, batch["x"])[positive].square().mean()


@fails("mean of means")
def targets_that_are_missing(dtype):
    params, batch = linear(dtype)

    def loss(params, batch):
        error = (affine(params, batch["x"]) - batch["y"].nan_to_num()) ** 2
        return error.masked_fill(batch["y"].isnan(), torch.nan).nanmean()

    missing = ~ragged_mask(3)
    missing[:, 0] = False
    return loss, params, batch | {"y": batch["y"].masked_fill(missing, torch.nan)}


@fails("mean of means")
def two_rows_of_different_lengths(dtype):
    def loss(params, batch):
        each = affine(params, batch["x"]).square().sum(1)
        return (each * batch["length"]).sum() / batch["length"].sum()

    params, batch = linear(dtype)
    return loss, params, {"x": batch["x"][:2], "length": torch.tensor([1, 3])}


# Weights ---------------------------------------------------------------------------------


@fails("weight", of=masked)
def divided_already(params, batch):
    error, mask = (affine(params, batch["x"]) - batch["y"]) ** 2, batch["mask"]
    return pa.Weighted((error * mask).sum() / mask.sum().clamp(min=1), mask.sum())


@fails("weight", of=linear)
def weight_of_one(params, batch):
    return pa.Weighted((affine(params, batch["x"]) - batch["y"]).square().sum(), 1)


@fails("weight", of=masked)
def weight_that_does_not_add_up(params, batch):
    error, mask = (affine(params, batch["x"]) - batch["y"]) ** 2, batch["mask"].float()
    return pa.Weighted((error * mask).mean(), mask.mean())


@fails("weight", of=masked)
def weight_of_one_at_least(params, batch):
    """So that nothing is divided by zero; but now a sample without tokens weighs something."""
    error, mask = affine(params, batch["x"]) ** 2, batch["mask"]
    return pa.Weighted((error * mask).sum(), mask.sum().clamp(min=1))


@fails("weight", of=masked)
def weight_of_rows_for_a_mean_over_tokens(params, batch):
    error, mask = affine(params, batch["x"]) ** 2, batch["mask"]
    mean = (error * mask).sum() / mask.sum().clamp(min=1)
    return pa.Weighted(mean * len(mask), len(mask))


# Sums and means --------------------------------------------------------------------------


@fails("sum as mean")
def a_sum_said_to_be_a_mean(dtype):
    return lambda p, b: (affine(p, b["x"]) - b["y"]).square().sum(), *linear(dtype)


@fails("mean as sum", reduction="sum")
def a_mean_said_to_be_a_sum(dtype):
    return lambda p, b: F.cross_entropy(affine(p, b["x"]), b["label"]), *linear(dtype)


@fails("constant term", of=linear, reduction="sum")
def weight_decay_in_a_sum(params, batch):
    return affine(params, batch["x"]).abs().sum() + 0.1 * params["w"].square().sum()


@fails("constant term", of=masked)
def weight_decay_in_a_total(params, batch):
    error, mask = affine(params, batch["x"]) ** 2, batch["mask"]
    return pa.Weighted((error * mask).sum() + params["w"].square().sum(), mask.sum())


# Several means at once -------------------------------------------------------------------


@fails("several means", of=linear, says="counts as")
def two_means_at_once(params, batch):
    """One over samples and one over positives, as in detection: no weight is right for both."""
    out, positive = affine(params, batch["x"]), batch["label"] > 0
    boxes = (out.square().mean(1) * positive).sum() / positive.sum().clamp(min=1)
    return F.cross_entropy(out, batch["label"]) + boxes


@fails("several means", says="sample")
def over_the_positives(dtype):
    def loss(params, batch):
        total, positives = focal(params, batch)
        return total / positives.clamp(min=1)

    _, params, batch = totals_without_a_weight(dtype)
    return loss, params, batch
