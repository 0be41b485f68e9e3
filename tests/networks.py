"""Ordinary networks on ordinary floats; none couples the samples of a batch."""

import torch
import torch.nn.functional as F

import pureaccum as pa
from tests.draws import generator


ROWS, WIDTH, LENGTH = 7, 4, 3


def gelu_mlp(p, x):
    return F.gelu(x.flatten(1) @ p["into"] + p["bias"]) @ p["out"]


def layer_norm(p, x):
    h = x.flatten(1) @ p["into"] + p["bias"]
    return torch.tanh(F.layer_norm(h, h.shape[1:], p["gain"], p["bias"])) @ p["out"]


def attention(p, x):
    q, k, v = (x @ p[name] for name in ("q", "k", "v"))
    h = torch.softmax(q @ k.mT / WIDTH**0.5, -1) @ v
    return F.silu(h.sum(1) @ p["q"] + p["gain"][:WIDTH]) @ p["out"][:WIDTH]


def convolution(p, x):
    h = F.softplus(F.conv1d(x.mT, p["filters"], p["bias"], padding=1))
    return F.group_norm(h, 2, p["gain"], p["bias"]).mean(-1) @ p["out"]


NETWORKS = {f.__name__: f for f in (gelu_mlp, layer_norm, attention, convolution)}


def params_of(seed, dtype):
    """One tree for all networks: what one does not use has gradient zero."""
    shapes = {
        "into": (LENGTH * WIDTH, 8),
        "out": (8, 2),
        "bias": (8,),
        "gain": (8,),
        "filters": (8, WIDTH, 3),
        "q": (WIDTH, WIDTH),
        "k": (WIDTH, WIDTH),
        "v": (WIDTH, WIDTH),
    }
    random = generator(seed)
    return {name: torch.randn(s, generator=random, dtype=dtype) for name, s in shapes.items()}


def batch_of(seed, dtype, rows=ROWS):
    """Samples of very different loss, and weights that are no round numbers."""
    random = generator(seed)
    size = 10.0 ** torch.randint(-1, 2, (rows, 1), generator=random)
    return {
        "x": torch.randn(rows, LENGTH, WIDTH, generator=random, dtype=dtype),
        "y": (torch.randn(rows, 2, generator=random, dtype=dtype) * size).to(dtype),
        "weights": torch.rand(rows, generator=random, dtype=dtype),
    }


def loss_of(network, kind):
    def loss(params, batch):
        rows = ((NETWORKS[network](params, batch["x"]) - batch["y"]) ** 2).sum(-1)
        if kind == "weighted":
            return pa.Weighted((rows * batch["weights"]).sum(), batch["weights"].sum())
        return rows.mean() if kind == "mean" else rows.sum()

    return loss
