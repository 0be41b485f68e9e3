"""How far a gradient that was accumulated is from the full batch's.

    bits:   log2 of the largest difference, in units in the last place of the leaf's largest number
    bound:  |difference| / (sqrt(u) * (|g_1| + ... + |g_k|)), leaf by leaf, where u is the rounding
            unit and g_i what microbatch i adds: above 1, half of the digits are wrong

Measured on the parameters that a run begins and ends with.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import pureaccum as pa

from ._race import ROWS, Tensors


class Distance(NamedTuple):
    """Of a gradient from the full batch's, in the worst of its leaves.

    Args:
        bits: How many of the last bits differ, at most.
        bound: The error over its bound.
    """

    bits: int
    bound: float


Loss = Callable[[Tensors, Tensors], Tensor]


def worst(
    loss: Loss,
    points: list[Tensors],
    batch: Tensors,
    parts: list[Tensors],
    *,
    half: bool,
    usual: bool,
) -> Distance:
    """The larger of the distances at several points.

    Args:
        loss: A mean over rows.
        points: Parameters.
        batch: The full batch.
        parts: The same rows, cut.
        half: Compute in float16.
        usual: Weigh all parts the same, in place of this package's sum.
    """
    of, unit = (_in_half(loss), 2.0**-11) if half else (loss, 2.0**-24)
    sizes = [len(part["x"]) for part in parts]
    found: list[Distance] = []
    for params in points:
        added = [torch.func.grad(of)(params, part) for part in parts]
        shares = [1 / len(parts) if usual else size / ROWS for size in sizes]
        terms = [
            {name: share * g for name, g in grads.items()}
            for share, grads in zip(shares, added, strict=True)
        ]
        if usual:
            grads = {name: torch.stack([term[name] for term in terms]).sum(0) for name in params}
        else:
            grads = pa.grad(of, microbatch_size=sizes)(params, batch)
        found.append(_distance(grads, torch.func.grad(of)(params, batch), terms, unit))
    return Distance(max(it.bits for it in found), max(it.bound for it in found))


def _in_half(loss: Loss) -> Loss:
    """The loss in float16, scaled by a power of two, which changes no bit of its gradient."""

    def scaled(params: Tensors, batch: Tensors) -> Tensor:
        narrow = {name: p.half() for name, p in params.items()}
        return 1024 * loss(narrow, {"x": batch["x"].half(), "y": batch["y"]})

    return scaled


def _distance(grads: Tensors, full: Tensors, terms: list[Tensors], unit: float) -> Distance:
    last = bound = 0.0
    for name, exact in full.items():
        off = grads[name].double() - exact.double()
        last = max(last, float(off.abs().max() / (2 * unit * exact.double().abs().max())))
        together = sum(float(term[name].double().norm()) for term in terms)
        bound = max(bound, float(off.norm()) / (math.sqrt(unit) * together))
    digits = round(-math.log2(unit))
    return Distance(min(digits, math.ceil(math.log2(1 + last))), bound)


def on_whole_numbers(batch: Tensors, parts: list[Tensors]) -> int:
    """How many numbers of the gradient differ where arithmetic is exact; none may.

    Black and white digits, weights of -1, 0 and 1, and a squared error, summed.
    """
    g = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, generator=g).float()

    params = {"in": drawn(64, 128), "out": drawn(128, 10)}
    sharp = {"x": (batch["x"] > 0.5).float(), "y": batch["y"]}

    def squares(params: Tensors, batch: Tensors) -> Tensor:
        out = (batch["x"] @ params["in"]).relu() @ params["out"]
        return ((out - torch.nn.functional.one_hot(batch["y"], 10)) ** 2).sum()

    full = torch.func.grad(squares)(params, sharp)
    sizes = [len(part["x"]) for part in parts]
    grads = pa.grad(squares, reduction="sum", microbatch_size=sizes)(params, sharp)
    return sum(int((grads[name] != full[name]).sum()) for name in full)
