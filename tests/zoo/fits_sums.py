"""Losses that are sums over samples, whatever they are divided by and however they are rounded."""

import torch
import torch.nn.functional as F
from torch import nn

import pureaccum as pa
from tests.zoo.species import ROWS, WIDE, affine, fits, linear, masked, normal, ragged_mask, squared


# Sums and weights ------------------------------------------------------------------------


@fits(reduction="sum")
def a_sum(dtype):
    return lambda p, b: F.mse_loss(affine(p, b["x"]), b["y"], reduction="sum"), *linear(dtype)


@fits(reduction="sum")
def a_sum_over_items_counted_before(dtype):
    """The number of tokens of the whole batch comes with it."""
    params, batch = linear(dtype)
    batch |= {"mask": ragged_mask(3), "items": int(ragged_mask(3).sum())}

    def loss(params, batch):
        error = (affine(params, batch["x"]) - batch["y"]) ** 2
        return (error * batch["mask"]).sum() / batch["items"]

    return loss, params, batch


@fits(of=masked)
def masked_tokens(params, batch):
    error, mask = (affine(params, batch["x"]) - batch["y"]) ** 2, batch["mask"]
    return pa.Weighted((error * mask).sum(), mask.sum())


@fits(of=masked)
def weighted_by_a_number(params, batch):
    kept = batch["mask"].any(1)
    total = F.cross_entropy(affine(params, batch["x"])[kept], batch["label"][kept])
    return pa.Weighted(total * kept.sum() if kept.any() else total * 0, kept.sum().item())


@fits()
def no_weight_and_nan(dtype):
    """A sample without tokens has a mean of its own that is NaN."""
    params, batch = linear(dtype)

    def loss(params, batch):
        weight = batch["weight"].sum()
        rows = ((affine(params, batch["x"]) - batch["y"]) ** 2).mean(1)
        return pa.Weighted((rows * batch["weight"]).sum() / weight * weight, weight)

    return loss, params, batch | {"weight": torch.arange(ROWS) % 3}


@fits()
def class_weights(dtype):
    params, batch = linear(dtype)
    weights = torch.tensor([0.5, 1.0, 3.0]).to(dtype)

    def loss(params, batch):
        out, label = affine(params, batch["x"]), batch["label"]
        total = F.cross_entropy(out, label, weights.to(out.dtype), reduction="sum")
        return pa.Weighted(total, weights[label].sum())

    return loss, params, batch


@fits()
def ignored_tokens_in_every_row_alike(dtype):
    """A mean over tokens, but all samples have the same number of them."""
    labels = torch.randint(0, 3, (ROWS, 4)).scatter(1, torch.randint(0, 4, (ROWS, 1)), -100)
    params, _ = linear(dtype, 5, 3)

    def loss(params, batch):
        return F.cross_entropy(affine(params, batch["x"]).flatten(0, 1), batch["label"].flatten())

    return loss, params, {"x": normal(dtype, 4, 5), "label": labels}


@fits()
def trimmed_to_the_longest(dtype):
    """Columns that are padding in all samples at hand are cut away; nothing depends on it."""
    params, _ = linear(dtype, 5, 3)

    def loss(params, batch):
        mask = batch["mask"][:, : int(batch["mask"].sum(1).max())]
        rows = affine(params, batch["x"][:, : mask.shape[1]]).square().mean(-1)
        return pa.Weighted((rows * mask).sum(), mask.sum())

    return loss, params, {"x": normal(dtype, 4, 5), "mask": ragged_mask(4)}


def focal(params, batch):
    """All samples add, and the positive ones are counted."""
    out, y = affine(params, batch["x"])[:, 0], batch["y"]
    each = F.binary_cross_entropy_with_logits(out, y, reduction="none")
    return (0.25 * (1 - (-each).exp()) ** 2 * each).sum(), y.sum()


@fits()
def totals_without_a_weight(dtype):
    """Samples that are not positive weigh nothing, and their totals are added all the same."""
    params, batch = linear(dtype)
    batch |= {"y": (torch.arange(ROWS) % 3 == 0).to(dtype)}
    return lambda params, batch: pa.Weighted(*focal(params, batch)), params, batch


@fits(of=masked)
def penalty_for_every_token(params, batch):
    error, tokens = affine(params, batch["x"]) ** 2, batch["mask"].sum()
    penalty = params["w"].square().sum()
    return pa.Weighted((error * batch["mask"]).sum() + tokens * penalty, tokens)


@fits(of=linear)
def weight_decay_in_a_mean(params, batch):
    return affine(params, batch["x"]).abs().mean() + 0.1 * params["w"].square().sum()


@fits(WIDE)
def ctc(dtype):
    """Its mean divides each row by its own length first, so that it is a mean over samples."""
    params, _ = linear(dtype, 6, 5)

    def loss(params, batch):
        scores = affine(params, batch["x"]).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, batch["y"], batch["frames"], batch["letters"])

    batch = {"x": normal(dtype, 9, 6), "y": torch.randint(1, 5, (ROWS, 3))}
    frames, letters = torch.arange(ROWS) % 3 + 7, torch.arange(ROWS) % 3 + 1
    return loss, params, batch | {"frames": frames, "letters": letters}


# Numbers ---------------------------------------------------------------------------------


@fits()
def at_the_optimum(dtype):
    """The gradient is nothing but rounding, those of the samples are not."""
    x = normal(torch.float64, 3)
    x = torch.cat([x[:6], -x[:6]]).to(dtype)
    return lambda p, b: ((p - b) ** 2).mean(), torch.zeros(3, dtype=dtype), x


@fits()
def a_huge_range(dtype):
    params, batch = linear(dtype)
    batch["scale"] = torch.logspace(-6, 6, ROWS).to(dtype)
    return lambda p, b: (affine(p, b["x"]).square().mean(1) * b["scale"]).mean(), params, batch


@fits()
def kinks_and_ties(dtype):
    whole = {"w": torch.randint(-2, 3, (4, 3)), "b": torch.zeros(3)}

    def loss(params, batch):
        return (affine(params, batch["x"]).relu().max(-1).values - batch["y"]).abs().mean()

    batch = {"x": torch.randint(-2, 3, (ROWS, 4)), "y": torch.zeros(ROWS)}
    return loss, *({k: v.to(dtype) for k, v in tree.items()} for tree in (whole, batch))


@fits()
def hardest_token_of_each_row(dtype):
    return lambda p, b: affine(p, b["x"]).topk(2, 1).values.square().mean(), *linear(dtype)


@fits()
def zero_times(dtype):
    return lambda p, b: affine(p, b["x"]).square().mean() * 0, *linear(dtype)


@fits()
def next_to_nothing(dtype):
    return lambda p, b: affine(p, b["x"]).square().mean() * 1e-30, *linear(dtype)


@fits(WIDE)
def cancelling(dtype):
    """Most digits are lost on the way."""
    return lambda p, b: ((1e6 + affine(p, b["x"])) - 1e6).square().mean(), *linear(dtype)


@fits(WIDE, of=linear)
def chaos(params, batch):
    """Each step doubles what rounding did before."""
    x = torch.sigmoid(affine(params, batch["x"]))
    for _ in range(30):
        x = 3.99 * x * (1 - x)
    return x.mean()


@fits()
def lowest_number_as_a_mask(dtype):
    params, batch = linear(dtype)

    def loss(params, batch):
        out = affine(params, batch["x"])
        out = out.masked_fill(batch["mask"], torch.finfo(out.dtype).min)
        return torch.softmax(out, -1).square().mean()

    return loss, params, batch | {"mask": ragged_mask(3) & (torch.arange(3) > 0)}


@fits()
def scores_of_minus_infinity(dtype):
    def loss(params, batch):
        out = affine(params, batch["x"]).masked_fill(batch["mask"], -torch.inf)
        return torch.softmax(out, -1).square().mean()

    params, batch = linear(dtype)
    return loss, params, batch | {"mask": ragged_mask(3) & (torch.arange(3) > 0)}


@fits()
def straight_through(dtype):
    """The nearest entry of a codebook, with the gradient of the identity."""

    def loss(params, batch):
        h, book = affine(params, batch["x"]), params["book"]
        nearest = book[torch.cdist(h.float(), book.float()).argmin(1)]
        commitment = F.mse_loss(h, nearest.detach()) + F.mse_loss(nearest, h.detach())
        return (h + (nearest - h).detach()).square().mean() + commitment

    params, batch = linear(dtype)
    return loss, params | {"book": torch.randn(4, 3).to(dtype)}, batch


@fits(of=linear)
def rounded_weights(params, batch):
    """Fake quantisation, with a scale that comes from the weights."""
    w = params["w"]
    scale = w.detach().abs().max() / 127
    w = w + (torch.round(w / scale) * scale - w).detach()
    return (batch["x"] @ w + params["b"]).square().mean()


# Dtypes ----------------------------------------------------------------------------------


@fits()
def autocast_inside(dtype):
    loss, params, batch = squared(nn.Sequential(nn.Linear(6, 8), nn.ReLU()), dtype, 6)

    def low(params, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return loss(params, batch)

    return low, params, batch


@fits(of=linear)
def casts_inside(params, batch):
    logits = affine(params, batch["x"]).float()
    probability = torch.softmax(logits, -1, dtype=torch.float32).type_as(batch["x"])
    error = probability.to(torch.float32) - batch["y"].to(torch.float32)
    return F.cross_entropy(logits, batch["label"]) + error.to(device="cpu").square().mean()


@fits(of=linear)
def half_inside(params, batch):
    """Activations are kept in bfloat16."""
    h = torch.tanh(batch["x"].bfloat16() @ params["w"].to(torch.bfloat16))
    return (h.type(torch.FloatTensor) + params["b"].to(batch["x"])).float().square().mean()


@fits()
def a_captured_constant(dtype):
    mean, scale = torch.randn(6), torch.rand(6) + 0.5

    def loss(params, batch):
        x = (batch["x"] - mean) / scale
        return affine(params, x.to(params["w"].dtype)).square().mean()

    return loss, *linear(dtype)


@fits(of=linear)
def made_in_the_default_dtype(params, batch):
    columns = torch.arange(1.0, 4.0) / 3 + torch.ones(3) + torch.tensor([0.1, 0.2, 0.3])
    ones = torch.ones(len(batch["x"]), 1, dtype=torch.float32)
    return ((affine(params, batch["x"]) * columns + ones).square()).mean()


@fits(of=linear)
def branches_on_the_dtype(params, batch):
    out = affine(params, batch["x"])
    if out.dtype in (torch.float16, torch.bfloat16):
        out = out.float()
    return (out.square() + torch.finfo(out.dtype).eps).sqrt().mean()


@fits()
def bytes_of_an_image(dtype):
    def loss(params, batch):
        return ((batch.float() / 255).to(params.dtype) @ params).square().mean()

    return loss, torch.randn(6, 2).to(dtype), torch.randint(0, 256, (ROWS, 6), dtype=torch.uint8)


@fits(WIDE)
def spectrum(dtype):
    """Complex numbers on the way, and a window of complex64."""
    turn = torch.exp(torch.linspace(0, 1, 4) * 1j).to(torch.complex64)

    def loss(params, batch):
        return (torch.fft.rfft(batch["x"] * params) * turn).abs().mean()

    return loss, torch.randn(6).to(dtype), {"x": normal(dtype, 6)}


@fits(WIDE)
def complex_parameters(dtype):
    def loss(params, batch):
        return (batch["x"] * params["w"] + params["b"]).abs().square().mean()

    params = {"w": torch.randn(6, dtype=torch.complex64), "b": torch.randn(())}
    params = {"w": params["w"].to(dtype.to_complex()), "b": params["b"].to(dtype)}
    return loss, params, {"x": normal(dtype, 6)}
