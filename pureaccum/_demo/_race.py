"""Five ways of training one network on one batch of scanned digits, one step at a time.

    full batch, float32      all 1,440 rows at once
    ragged, float32          cut anew in every step, into some 14 microbatches of 1 to 200 rows
    the usual loop           the same microbatches, ``(loss / k).backward()``
    full batch, float16      with a loss scale
    ragged, float16          with a loss scale

A step that overflowed is not applied, and is taken again: after equally many applied steps, all
runs have seen the same. How far an accumulated gradient is from the full batch's, on the parameters
that a run begins and ends with:

    bits     log2 of the largest difference, in units in the last place of the leaf's largest number
    bound    |difference| / (√u (|g_1| + ... + |g_k|)) for each leaf, with u the rounding unit and
             g_i what microbatch i adds: above 1, half of the digits are wrong
"""

import math
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import pureaccum as pa

from .._core import counting


Tensors = dict[str, Tensor]
Microbatches = Callable[[int], list[Tensors]]  # those of a step, after so many applied ones
BatchLoss = Callable[[Tensors, Tensors], Tensor]

ROWS = 1440
RATE = 3e-3
# It begins too high, so that the first steps overflow, and doubles often, so that later ones do.
SCALE = pa.dynamic_loss_scale(init_scale=2.0**22, growth_interval=12)


class Progress(NamedTuple):
    """Where a run stands."""

    params: Tensors
    losses: tuple[float, ...]  # of the applied steps
    attempts: int  # steps, applied or not
    scale: float  # the loss scale of the last step; 1 where there is none
    seconds: float  # of all steps but the first
    peak: int  # the most bytes that the first step had allocated at a time

    @property
    def rate(self) -> float:
        """Rows per second."""
        return ROWS * (self.attempts - 1) / self.seconds if self.seconds else 0.0


def digits() -> tuple[Tensors, Tensors]:
    """1,440 rows to train on and 357 to test with, of numbers from 0 to 1."""
    from sklearn.datasets import load_digits  # pyright: ignore[reportMissingTypeStubs]

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    return {"x": x[:ROWS], "y": y[:ROWS]}, {"x": x[ROWS:], "y": y[ROWS:]}


def network() -> nn.Module:
    """The network, always with the same parameters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def loss_of(net: nn.Module) -> BatchLoss:
    """The loss, as a function of parameters; cross entropy is in float32, as it should be."""
    fn = pa.functional(net)

    def loss(params: Tensors, batch: Tensors) -> Tensor:
        return cross_entropy(fn.apply(params, (), batch["x"])[0].float(), batch["y"])

    return loss


def whole(batch: Tensors) -> Microbatches:
    """The batch, uncut."""
    return lambda applied: [batch]


def ragged(batch: Tensors) -> Microbatches:
    """Microbatches of 1 to 200 rows, cut anew in every step."""

    def cut(applied: int) -> list[Tensors]:
        g = torch.Generator().manual_seed(applied)
        sizes: list[int] = []
        while (left := ROWS - sum(sizes)) > 0:
            sizes.append(min(left, int(torch.randint(1, 201, (), generator=g))))
        parts = zip(*(batch[name].split(sizes) for name in ("x", "y")), strict=True)
        return [{"x": x, "y": y} for x, y in parts]

    return cut


def train(cut: Microbatches, *, half: bool = False) -> Iterator[Progress]:
    """Train by this package, with one step for a whole batch, ragged microbatches and float16."""
    net = network()
    step = pa.make_step(
        loss_of(net),
        pa.adamw(RATE),
        policy=pa.Policy(compute=torch.float16) if half else None,
        loss_scale=SCALE if half else None,
    )
    state = step.init(pa.functional(net).params)
    losses: list[float] = []

    def attempt() -> float:
        nonlocal state
        window = step.begin(state)
        for part in cut(len(losses)):
            window = step.update(state, window, part)
        state, info = step.apply(state, window)
        if info.applied:
            losses.append(float(info.loss))
        return float(info.scale)

    yield from _timed(attempt, losses, lambda: state.params)


def usual_loop(cut: Microbatches) -> Iterator[Progress]:
    """Train as everybody does; with ragged microbatches, short ones weigh too much."""
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE)
    losses: list[float] = []

    def attempt() -> float:
        parts = cut(len(losses))
        total = 0.0
        for part in parts:
            loss = cross_entropy(net(part["x"]), part["y"]) / len(parts)
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        return 1.0

    yield from _timed(attempt, losses, lambda: dict(net.named_parameters()))


def _timed(
    attempt: Callable[[], float], losses: list[float], params: Callable[[], Tensors]
) -> Iterator[Progress]:
    with counting() as live:  # the first attempt warms up as well
        scale = attempt()
    attempts, seconds = 1, 0.0
    while True:
        now = {name: x.detach() for name, x in params().items()}
        yield Progress(
            params=now,
            losses=tuple(losses),
            attempts=attempts,
            scale=scale,
            seconds=seconds,
            peak=live.peak,
        )
        start = perf_counter()
        scale = attempt()
        attempts, seconds = attempts + 1, seconds + perf_counter() - start


# How far a gradient is off -------------------------------------------------------------------


class Distance(NamedTuple):
    """How far a gradient is from the full batch's, in the worst of its leaves."""

    bits: int  # how many of the last ones differ, at most
    bound: float  # the error relative to it


def worst(
    loss: BatchLoss,
    points: list[Tensors],
    batch: Tensors,
    parts: list[Tensors],
    *,
    half: bool,
    usual: bool,
) -> Distance:
    """The largest distance at some parameters, of this package's sum or of the usual loop's."""
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


def _in_half(loss: BatchLoss) -> BatchLoss:
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

    The digits are black and white, the weights -1, 0 and 1, and the loss a sum of squared errors.
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
