"""Losses of practice that couple samples: plain code over microbatches, and over the full batch.

Each is written once, of functions of samples. ``cut`` makes those microbatched; over the full batch
it is the identity, and then nothing of the package is used.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import pureaccum as pa
from tests.draws import generator


WIDTH = 5
ROWS = 12
Params = dict[str, Tensor]
Batch = dict[str, Tensor]
Cut = Callable[..., Any]


def whole(func, **_):
    """No cut: a function of the full batch."""
    return func


def pieces(size):
    """A cut into microbatches."""
    return partial(pa.microbatch, microbatch_size=size)


def params_of(seed, dtype=torch.float64, wide=8):
    """One tree for all: what a loss does not use has gradient zero."""
    shapes = {
        "a1": (WIDTH, wide),
        "a2": (wide, wide),
        "b1": (WIDTH, wide),
        "b2": (wide, wide),
        "gain": (3, wide),
        "bias": (3, wide),
        "router": (WIDTH, 4),
        "experts": (4, WIDTH, 3),
        "out": (wide, 3),
    }
    random = generator(seed)
    params = {k: torch.randn(s, generator=random, dtype=dtype) / 2 for k, s in shapes.items()}
    return params | {"temperature": torch.tensor(1.5, dtype=dtype)}


def batch_of(seed, rows=ROWS, dtype=torch.float64):
    random = generator(seed + 1)
    x = torch.randn(rows, WIDTH, generator=random, dtype=dtype)
    noise = torch.randn(rows, WIDTH, generator=random, dtype=dtype)
    return {"x": x, "other": x + noise / 2, "y": torch.randint(0, 3, (rows,), generator=random)}


# Contrastive: InfoNCE both ways, with a learned temperature ----------------------------------


def tower(params, x, name):
    return F.normalize(torch.tanh(x @ params[name + "1"]) @ params[name + "2"], dim=1)


def towers(params, batch):
    return tower(params, batch["x"], "a"), tower(params, batch["other"], "b")


def contrastive(params, batch, cut=whole):
    a, b = cut(towers)(params, batch)
    logits = params["temperature"].exp() * a @ b.T
    right = torch.arange(len(a))
    return (F.cross_entropy(logits, right) + F.cross_entropy(logits.T, right)) / 2


# Triplets: the hardest positive and the hardest negative of the batch -------------------------


def triplets(params, batch, cut=whole):
    at = cut(lambda params, batch: tower(params, batch["x"], "a"))(params, batch)
    same = batch["y"].unsqueeze(0) == batch["y"].unsqueeze(1)
    distance = ((at.unsqueeze(0) - at.unsqueeze(1)) ** 2).sum(-1)
    far = torch.where(same, distance, 0.0).amax(1)
    near = torch.where(same, torch.inf, distance).amin(1)
    near = torch.where(near.isinf(), 4.0, near)  # all of one label
    return F.softplus(params["temperature"] + far - near).mean()


# Mixture of experts, with the loss that keeps them in balance over the batch ------------------


def routed(params, batch):
    """The task's loss, how many samples an expert gets, and how probable it was:

    sums over samples.
    """
    gates = (batch["x"] @ params["router"]).softmax(1)
    gate, expert = gates.max(1)
    out = torch.einsum("ni,nij->nj", batch["x"], params["experts"][expert])
    task = F.cross_entropy(gate.unsqueeze(1) * out, batch["y"], reduction="sum")
    return task, (expert.unsqueeze(1) == torch.arange(4)).sum(0), gates.sum(0)


def experts(params, batch, cut=whole):
    task, chosen, probability = cut(routed, reduce="sum")(params, batch)
    rows = len(batch["y"])
    return task / rows + 0.5 * 4 * (chosen / rows * probability / rows).sum()


# Barlow Twins: the correlation of two views over the batch ---------------------------------------


def twins(params, batch, cut=whole):
    def views(params, batch):
        pairs = (batch["x"], "a"), (batch["other"], "b")
        return [torch.tanh(x @ params[k + "1"]) @ params[k + "2"] for x, k in pairs]

    a, b = [F.batch_norm(z, None, None, training=True) for z in cut(views)(params, batch)]
    products = cut(lambda a, b: a.T @ b, batch_argnums=(0, 1), reduce="sum")(a, b)
    correlation = products / len(a)
    off = correlation - torch.eye(len(correlation), dtype=correlation.dtype)
    return (off.diagonal() ** 2).sum() + 0.1 * (off**2).sum()


# An MLP with three batch norms, one behind the other ------------------------------------------


def batch_norms(params, batch, cut=whole):
    h = cut(lambda p, batch: batch["x"] @ p["a1"])(params, batch)
    for i, name in enumerate(("a2", "b2", "out")):
        affine = params["gain"][i] + 1, params["bias"][i]
        h = F.batch_norm(h, None, None, *affine, training=True)
        h = cut(lambda p, h, name=name: h.tanh() @ p[name])(params, h)
    return F.cross_entropy(h, batch["y"])


FAMILIES = {f.__name__: f for f in (contrastive, triplets, experts, twins, batch_norms)}
