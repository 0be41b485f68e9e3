"""A small world on the device: networks, numbers, losses; nothing is made before it is used."""

from functools import cache

import optree
import torch
from torch import Tensor, nn
from torch.func import functional_call

import pureaccum as pa


Tensors = dict[str, Tensor]
ROWS = 22


def leaves(tree):
    return optree.tree_leaves(tree, namespace="pureaccum")


def moved(tree, device):
    return optree.tree_map(lambda x: x.to(device), tree, namespace="pureaccum")


# A network trained in numbers of any kind -------------------------------------------------------


@cache
def network():
    torch.manual_seed(0)
    layers = nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)
    return nn.Sequential(*layers).to("cuda")


@cache
def normed(microbatch_size=None):
    """A pure function with what depends on its samples together, and with what draws."""
    torch.manual_seed(0)
    layers = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4)
    return pa.functional(nn.Sequential(*layers).to("cuda"), microbatch_size=microbatch_size)


def make_params():
    return {name: x.detach().clone() for name, x in network().named_parameters()}


def make_batch(rows=ROWS):
    random = torch.Generator().manual_seed(0)
    x, y = (torch.randn(rows, width, generator=random) for width in (8, 4))
    mask = (torch.rand(rows, generator=random) > 0.4).float()
    return moved({"x": x, "y": y, "mask": mask}, "cuda")


def call(params, x):
    return functional_call(network(), params, (x,))


def mean(params, batch):
    return (call(params, batch["x"]) - batch["y"]).float().square().mean()


def weighted(params, batch):
    error = (call(params, batch["x"]) - batch["y"]).float().square().sum(1)
    return pa.Weighted((error * batch["mask"]).sum(), batch["mask"].sum())


# One whose arithmetic is exact ------------------------------------------------------------------


def whole_numbers(rows=11):
    """On the CPU: what is moved to the device has to come to the same bits there."""
    random = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randint(-2, 3, shape, generator=random).float()

    batch = {"x": draw(rows, 4), "y": draw(rows, 5), "mask": draw(rows).abs()}
    return {"w": draw(4, 5), "b": draw(5)}, batch


def errors(params, batch):
    return (batch["x"] @ params["w"] + params["b"] - batch["y"]).square().sum(-1)


def exact(params, batch):
    return pa.Weighted((errors(params, batch) * batch["mask"]).sum(), batch["mask"].sum())


def exact_pairs(params, batch, microbatch_size):
    """A loss of all pairs of samples, plain code over microbatches."""
    apart = pa.microbatch(
        lambda p, b: b["x"] @ p["w"] + p["b"] - b["y"], microbatch_size=microbatch_size
    )(params, batch)
    return (apart[:, None] - apart).square().sum()
