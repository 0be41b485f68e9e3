"""Losses whose samples see each other: no way of cutting them is right."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from tests.zoo.fits_programs import Captured
from tests.zoo.species import (
    DTYPES,
    affine,
    fails,
    linear,
    normal,
    parameters,
    ragged_mask,
    squared,
)


# Statistics of the batch -----------------------------------------------------------------


@fails("batch statistics", says="stem")
def batch_norm(dtype):
    net = nn.Sequential()
    for name, layer in {"in": nn.Linear(6, 8), "stem": nn.BatchNorm1d(8)}.items():
        net.add_module(name, layer)
    return squared(net.append(nn.Linear(8, 3)), dtype, 6)


@fails("batch statistics", of=linear, says="batch_norm")
def batch_norm_as_a_function(params, batch):
    h = F.batch_norm(affine(params, batch["x"]), None, None, training=True)
    return F.cross_entropy(h, batch["label"])


@fails("batch statistics", says="BatchNorm1d")
def batch_norm_without_running_statistics(dtype):
    norm = nn.BatchNorm1d(8, track_running_stats=False)
    return squared(nn.Sequential(nn.Linear(6, 8), norm, nn.Linear(8, 3)).eval(), dtype, 6)


@fails("batch statistics", says="BatchNorm1d")
def batch_norm_in_a_teacher(dtype):
    """It was never switched to eval mode."""
    teacher = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).to(dtype).requires_grad_(False)

    def loss(params, batch):
        return F.mse_loss(affine(params, batch["x"]), teacher(batch["x"]))

    return loss, *linear(dtype)


@fails("batch statistics", says="BatchNorm2d")
def batch_norm_half_frozen(dtype):
    """Its module is in eval mode, one layer was set back to training."""
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4)).eval()
    net = net.append(nn.Conv2d(4, 2, 2))
    net[2].train()
    return squared(net, dtype, 2, 5, 5)


# Statistics of the data ------------------------------------------------------------------


@fails("data statistics", of=linear, says="mean")
def standardised_targets(params, batch):
    return F.mse_loss(affine(params, batch["x"]), batch["y"] - batch["y"].mean(0))


@fails("data statistics", of=linear, says="std")
def standardised_advantages(params, batch):
    """As in PPO."""
    chosen = torch.log_softmax(affine(params, batch["x"]), -1).gather(1, batch["label"][:, None])
    ratio, gain = (chosen[:, 0] - chosen[:, 0].detach()).exp(), batch["y"][:, 0]
    gain = (gain - gain.mean()) / (gain.std() + 1e-8)
    return -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()


@fails("data statistics", says="sum")
def whitened_advantages(dtype):
    """As TRL whitens them: over all tokens that are no padding, which the loss is a mean over."""

    def loss(params, batch):
        gain, mask = batch["y"], batch["mask"]
        apart = gain - (gain * mask).sum() / mask.sum()
        gain = apart * ((apart**2 * mask).sum() / mask.sum() + 1e-8).rsqrt()
        return -(affine(params, batch["x"]).tanh() * gain * mask).sum() / mask.sum()

    params, batch = linear(dtype)
    mask = ragged_mask(3)
    mask[:, 0] = True
    return loss, params, batch | {"mask": mask.to(dtype)}


@fails("data statistics", says="max")
def padding_counts(dtype):
    """Samples are trimmed to the longest; the mean is over what is left, padding and all."""
    params, _ = linear(dtype, 5, 3)

    def loss(params, batch):
        mask = batch["mask"][:, : int(batch["mask"].sum(1).max())]
        out = affine(params, batch["x"][:, : mask.shape[1]])
        return (out * mask[..., None]).square().mean()

    mask = ragged_mask(4)
    mask[:, 0] = True
    return loss, params, {"x": normal(dtype, 4, 5), "mask": mask}


@fails("data statistics", of=linear, says="mean")
def in_the_value_alone(params, batch):
    return affine(params, batch["x"]).square().mean() + batch["x"].mean(0).square().sum()


# Samples that see each other ----------------------------------------------------------------


def _unit(x):
    return F.normalize(x, dim=-1)


@fails("batch coupling", of=linear)
def in_batch_negatives(params, batch):
    scores = _unit(affine(params, batch["x"])) @ _unit(batch["y"]).T
    return F.cross_entropy(scores * 10, torch.arange(len(scores)))


@fails("batch coupling", of=linear)
def rows_against_columns(params, batch):
    """(n, 1) minus (n,) is (n, n), and nobody complains."""
    return (affine(params, batch["x"])[:, :1] - batch["y"][:, 0]).square().mean()


@fails("batch coupling")
def maximum_of_the_batch(dtype):
    return lambda p, b: affine(p, b["x"]).square().mean(1).max(), *linear(dtype)


@fails("batch coupling", of=linear)
def variance_of_the_batch(params, batch):
    out = affine(params, batch["x"])
    return F.mse_loss(out, batch["y"]) + (1 - out.var(0, correction=0)).relu().sum()


@fails("batch coupling", of=linear)
def balance_of_experts(params, batch):
    gate = torch.softmax(affine(params, batch["x"]), -1)
    share = F.one_hot(gate.argmax(-1), 3).to(gate.dtype).mean(0)
    return gate.amax(1).mean() + 3 * (gate.mean(0) * share).sum()


@fails("batch coupling", of=linear)
def no_more_than_three_a_head(params, batch):
    """An expert has a capacity, and the samples that come too late are dropped."""
    out = affine(params, batch["x"])
    chosen = F.one_hot(out.argmax(1), 3)
    kept = (chosen.cumsum(0) * chosen).sum(1) <= 3
    return (out * kept[:, None]).square().mean()


@fails("batch coupling", of=linear)
def hardest_half(params, batch):
    rows = (affine(params, batch["x"]) - batch["y"]).square().mean(1)
    return rows.topk(max(1, len(rows) // 2)).values.mean()


@fails("batch coupling")
def root_of_a_mean(dtype):
    return lambda p, b: F.mse_loss(affine(p, b["x"]), b["y"]).sqrt(), *linear(dtype)


@fails("batch coupling", of=linear)
def dice(params, batch):
    got, wanted = torch.sigmoid(affine(params, batch["x"])), (batch["y"] > 0).to(torch.float32)
    return 1 - (2 * (got * wanted).sum() + 1) / (got.sum() + wanted.sum() + 1)


@fails("batch coupling", of=linear)
def mixed_with_the_next_row(params, batch):
    x, y = (0.7 * batch[k] + 0.3 * batch[k].roll(1, 0) for k in "xy")
    return F.mse_loss(affine(params, x), y)


@fails("batch coupling", of=linear)
def pairs_of_rows(params, batch):
    """The better and the worse answer stand side by side in the batch."""
    score = affine(params, batch["x"]).sum(1)
    better, worse = score[: len(score) // 2 * 2].view(-1, 2).unbind(1)
    return F.softplus(worse - better).sum() / max(1, len(better))


@fails("batch coupling", of=linear)
def position_in_the_batch(params, batch):
    rows = affine(params, batch["x"]).square().mean(1)
    return (rows * torch.arange(len(rows))).mean()


@fails("batch coupling")
def attention_over_the_batch(dtype):
    """``batch_first`` was forgotten."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)
    return squared(nn.Sequential(layer, nn.Linear(4, 3)), dtype, 5, 4)


# A little, or in one place only ----------------------------------------------------------


@fails("batch coupling", of=linear, dtypes=DTYPES)
def by_a_millionth(params, batch):
    out = affine(params, batch["x"])
    return out.square().mean() + 1e-6 * out.var(0, correction=0).sum()


@fails("batch coupling", of=linear)
def in_the_gradient_alone(params, batch):
    out = affine(params, batch["x"])
    return out.square().mean() + ((out - out.detach()) * out.detach().mean(0)).mean()


@fails("batch coupling", of=linear)
def in_the_backward_pass_alone(params, batch):
    """A hook clips the gradient of the features, over the batch."""
    out = affine(params, batch["x"])
    if out.requires_grad:
        out.register_hook(lambda g: g / g.norm())
    return out.square().mean()


# Whatever else they keep -----------------------------------------------------------------


def _against_the_others(net, dtype, *shape):
    net.to(dtype)

    def loss(params, batch):
        out = functional_call(net, params, (batch["x"],))
        out = out[0][:, -1] if isinstance(out, tuple) else out
        return (out @ out.T).logsumexp(1).mean()

    return loss, parameters(net), {"x": normal(dtype, *shape)}


@fails("batch coupling")
def in_batch_negatives_of_an_lstm(dtype):
    """It holds its weights twice, and another list of them after a functional call."""
    return _against_the_others(nn.LSTM(6, 4, batch_first=True), dtype, 3, 6)


class Positions(nn.Module):
    table: Tensor | None = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(6.0).to(x.dtype)
        return x + self.table


@fails("batch coupling")
def in_batch_negatives_and_a_table(dtype):
    """The table is made in the first call, and of no sample."""
    return _against_the_others(nn.Sequential(Positions(), nn.Linear(6, 4)), dtype, 6)


@fails("batch coupling")
def in_batch_negatives_and_a_hook(dtype):
    return _against_the_others(Captured(), dtype, 6)
