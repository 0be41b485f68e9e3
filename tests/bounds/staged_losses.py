"""Losses of practice whose rows are coupled: as a user writes them in stages, and as one function.

Each knows its parameters and its batch. ``whole`` uses nothing of the package.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import pureaccum as pa
from tests.strategies import generator


WIDTH = 5
ROWS = 12
Params = dict[str, Tensor]
Batch = dict[str, Tensor]


class Family(NamedTuple):
    """A loss in both forms; both are means over rows, or over the batch as a whole."""

    stages: Callable[[], list[Any]]
    whole: Callable[[Params, Batch], Tensor]

    def loss(self) -> Any:
        return pa.staged(self.stages())


def params_of(seed: int, dtype: torch.dtype = torch.float64, wide: int = 8) -> Params:
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


def batch_of(seed: int, rows: int = ROWS, dtype: torch.dtype = torch.float64) -> Batch:
    random = generator(seed + 1)
    x = torch.randn(rows, WIDTH, generator=random, dtype=dtype)
    noise = torch.randn(rows, WIDTH, generator=random, dtype=dtype)
    return {
        "x": x,
        "other": x + noise / 2,
        "y": torch.randint(0, 3, (rows,), generator=random),
    }


# Contrastive: InfoNCE both ways, with a learned temperature ----------------------------------


def tower(params: Params, x: Tensor, name: str) -> Tensor:
    return F.normalize(torch.tanh(x @ params[name + "1"]) @ params[name + "2"], dim=1)


def towers(params: Params, batch: Batch) -> Any:
    return tower(params, batch["x"], "a"), tower(params, batch["other"], "b")


def info_nce(params: Params, pair: Any) -> Tensor:
    a, b = pair
    logits = params["temperature"].exp() * a @ b.T
    right = torch.arange(len(a))
    return (F.cross_entropy(logits, right) + F.cross_entropy(logits.T, right)) / 2


def _clip() -> list[Any]:
    return [pa.rowwise(towers), pa.full(info_nce)]


# Triplets: the hardest positive and the hardest negative of the batch -------------------------


def embedded(params: Params, batch: Batch) -> Any:
    return {"at": tower(params, batch["x"], "a"), "y": batch["y"]}


def hardest(params: Params, x: Any) -> Tensor:
    at, same = x["at"], x["y"].unsqueeze(0) == x["y"].unsqueeze(1)
    distance = ((at.unsqueeze(0) - at.unsqueeze(1)) ** 2).sum(-1)
    far = torch.where(same, distance, 0.0).amax(1)
    near = torch.where(same, torch.inf, distance).amin(1)
    near = torch.where(near.isinf(), 4.0, near)  # all of one label
    return F.softplus(params["temperature"] + far - near).mean()


def _triplet() -> list[Any]:
    return [pa.rowwise(embedded), pa.full(hardest)]


# Mixture of experts, with the loss that keeps them in balance over the batch ------------------


def routed(params: Params, batch: Batch) -> Any:
    gates = (batch["x"] @ params["router"]).softmax(1)
    return {"x": batch["x"], "y": batch["y"], "gates": gates}


def load(params: Params, x: Any) -> Any:
    """How many rows an expert gets, and how probable it was for all of them."""
    chosen = (x["gates"].argmax(1, keepdim=True) == torch.arange(4)).sum(0)
    return {"rows": len(x["y"]), "chosen": chosen, "probability": x["gates"].sum(0)}


def mixed(params: Params, x: Any, load: Any) -> Tensor:
    gate, expert = x["gates"].max(1)
    out = torch.einsum("ni,nij->nj", x["x"], params["experts"][expert])
    task = F.cross_entropy(gate.unsqueeze(1) * out, x["y"])
    fractions, probabilities = load["chosen"] / load["rows"], load["probability"] / load["rows"]
    return task + 0.5 * 4 * (fractions * probabilities).sum()


def _experts() -> list[Any]:
    return [pa.rowwise(routed), pa.pooled(load), pa.rowwise(mixed, reads="load")]


def experts(params: Params, batch: Batch) -> Tensor:
    x = routed(params, batch)
    return mixed(params, x, load(params, x))


# Barlow Twins: the correlation of two views over the batch ---------------------------------------


def twins(params: Params, batch: Batch) -> Any:
    pairs = (batch["x"], "a"), (batch["other"], "b")
    return {k: torch.tanh(x @ params[k + "1"]) @ params[k + "2"] for x, k in pairs}


def redundancy(correlation: Tensor) -> Tensor:
    off = correlation - torch.eye(len(correlation), dtype=correlation.dtype)
    return (off.diagonal() ** 2).sum() + 0.1 * (off**2).sum()


def _twins() -> list[Any]:
    return [
        pa.rowwise(twins),
        *pa.batch_norm("bn a", at="a"),
        *pa.batch_norm("bn b", at="b"),
        pa.pooled(lambda params, x: (x["a"].T @ x["b"], len(x["a"])), "products"),
        pa.rowwise(lambda params, x, sums: redundancy(sums[0] / sums[1]), reads="products"),
    ]


def twins_whole(params: Params, batch: Batch) -> Tensor:
    x = {k: F.batch_norm(z, None, None, training=True) for k, z in twins(params, batch).items()}
    return redundancy(x["a"].T @ x["b"] / len(x["a"]))


# An MLP with three batch norms, one behind the other ------------------------------------------


LAYERS = ("a1", "a2", "b2")


def _normed() -> list[Any]:
    stages: list[Any] = [pa.rowwise(lambda p, batch: {"h": batch["x"] @ p["a1"], "y": batch["y"]})]
    for i in range(3):
        stages += pa.batch_norm(f"bn{i}", lambda p, i=i: (p["gain"][i] + 1, p["bias"][i]), at="h")
        name = LAYERS[i + 1] if i < 2 else "out"
        stages.append(pa.rowwise(lambda p, x, name=name: {**x, "h": x["h"].tanh() @ p[name]}))
    return [*stages, pa.rowwise(lambda p, x: F.cross_entropy(x["h"], x["y"]))]


def normed(params: Params, batch: Batch) -> Tensor:
    h = batch["x"]
    for i, name in enumerate(LAYERS):
        affine = params["gain"][i] + 1, params["bias"][i]
        h = F.batch_norm(h @ params[name], None, None, *affine, training=True).tanh()
    return F.cross_entropy(h @ params["out"], batch["y"])


FAMILIES = {
    "contrastive": Family(_clip, lambda p, b: info_nce(p, towers(p, b))),
    "triplets": Family(_triplet, lambda p, b: hardest(p, embedded(p, b))),
    "experts": Family(_experts, experts),
    "twins": Family(_twins, twins_whole),
    "batch norms": Family(_normed, normed),
}
