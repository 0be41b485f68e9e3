"""Small modules of the kinds that people train, as functions of their parameters."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

import pureaccum as pa
from tests.problems import Around


Params = dict[str, Tensor]


def attention():
    run = lambda x, attend, head: head(attend(x, x, x, need_weights=False)[0].mean(1))  # noqa: E731
    return Around(run, nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3))


def embedding():
    """One whose weight is large enough for a hook of its own: 1 MiB."""
    run = lambda x, table: table((x.abs() * 1000).long() % 2**14).sum(1)  # noqa: E731
    return Around(run, nn.Embedding(2**14, 16))


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(24, 3))


def convolution():
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))


def normalized():
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))


class Model(NamedTuple):
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of one sample


MODELS = {
    "linear": Model(lambda: nn.Linear(6, 3), (6,)),
    "convolution": Model(convolution, (2, 5, 5)),
    "normalized": Model(normalized, (6,)),
    "encoder": Model(encoder, (3, 8)),
    "attention": Model(attention, (3, 8)),
    "embedding": Model(embedding, (4,)),
}


class Problem(NamedTuple):
    """A module, a copy of its parameters, a batch, and a loss for each sample."""

    module: nn.Module
    params: Params
    batch: dict[str, Tensor]

    def rows(self, params, batch):
        out = torch.func.functional_call(self.module, params, (batch["x"],))
        return ((out - 1) ** 2).flatten(1).sum(1)

    def mean(self, params, batch):
        return self.rows(params, batch).mean()

    def weighted(self, params, batch):
        return pa.Weighted((batch["mask"] * self.rows(params, batch)).sum(), batch["mask"].sum())


def problem(name, seed, rows, dtype=torch.float32, device="cpu"):
    model = MODELS[name]
    torch.manual_seed(seed)
    module = model.build().to(device, dtype)
    params = {name: p.detach().clone() for name, p in module.named_parameters()}
    x = torch.randn(rows, *model.shape, dtype=dtype, device=device)
    mask = torch.randint(0, 3, (rows,), device=device)
    return Problem(module, params, {"x": x, "mask": mask})
