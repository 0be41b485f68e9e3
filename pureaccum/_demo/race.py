"""Eight ways of training on one batch of scanned digits, one step at a time.

    full batch                 all 1,440 samples at once
    ragged                     cut anew in every step, into some 14 microbatches of 1 to 200 samples
    usual loop                 the same microbatches, ``(loss / k).backward()``
    full batch, ragged, fp16   in float16, with a loss scale
    BatchNorm, …               a network whose samples are coupled: all at once, 100 samples at a
                               time by ``pa.functional(net, microbatch_size=100)``, and the usual
                               loop

A step that overflowed is not applied, and is taken again: after equally many applied steps, all
runs have seen the same. How far an accumulated gradient is from the full batch's, on the parameters
that a run begins and ends with:

    bits     log2 of the largest difference, in units in the last place of the leaf's largest number
    bound    |difference| / (√u (|g_1| + ... + |g_k|)) for each leaf, with u the rounding unit and
             g_i what microbatch i adds by itself: above 1, half of the digits are wrong
"""

import math
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import pureaccum as pa

from .._core import auto_size


Tensors = dict[str, Tensor]
Microbatches = Callable[[int], list[Tensors]]  # those of a step, after so many applied ones
BatchLoss = Callable[[Tensors, Tensors], Tensor]

ROWS, SIZE = 1440, 100  # of the batch, and of a microbatch through BatchNorm
RATE = 3e-3
# It begins too high, so that the first steps overflow, and doubles often, so that later ones do.
SCALE = pa.dynamic_loss_scale(init_scale=2.0**22, growth_interval=12)


class Run(NamedTuple):
    """One way of training: how the batch is cut, by what, in which dtype, with which network."""

    name: str
    cut: Literal["whole", "ragged", "even"]
    usual: bool = False  # the loop that everybody writes
    half: bool = False
    normed: bool = False


RUNS = (
    Run(name="full batch", cut="whole"),
    Run(name="ragged", cut="ragged"),
    Run(name="usual loop", cut="ragged", usual=True),
    Run(name="full batch, fp16", cut="whole", half=True),
    Run(name="ragged, fp16", cut="ragged", half=True),
    Run(name="BatchNorm, full batch", cut="whole", normed=True),
    Run(name="BatchNorm, in 100s", cut="even", normed=True),
    Run(name="BatchNorm, usual loop", cut="even", usual=True, normed=True),
)


def beside(run: Run) -> Run:
    """The run that takes the full batch with the same network, in the same dtype."""
    alike = (it for it in RUNS if (it.half, it.normed) == (run.half, run.normed))
    return next(it for it in alike if it.cut == "whole")


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
        """Samples per second."""
        return ROWS * (self.attempts - 1) / self.seconds if self.seconds else 0.0


def digits() -> tuple[Tensors, Tensors]:
    """1,440 samples to train on and 357 to test with, of numbers from 0 to 1."""
    from sklearn.datasets import load_digits  # pyright: ignore[reportMissingTypeStubs]

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    return {"x": x[:ROWS], "y": y[:ROWS]}, {"x": x[ROWS:], "y": y[ROWS:]}


def network(normed: bool = False) -> nn.Module:
    """The network, always with the same parameters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # Statistics of the batch, in the test too: there are no running ones to hand on. It takes
        # away the mean, and with it any bias before it, whose gradient would be rounding alone.
        norm = [nn.BatchNorm1d(128, track_running_stats=False)] if normed else []
        first = nn.Linear(64, 128, bias=not normed)
        return nn.Sequential(first, *norm, nn.ReLU(), nn.Linear(128, 10))


def loss_of(net: nn.Module, size: int | None = None) -> BatchLoss:
    """The loss, as a function of parameters; cross entropy is in float32, as it should be.

    With a size the network takes so many samples at a time, and BatchNorm the statistics of all.
    """
    fn = pa.functional(net, microbatch_size=size)

    def loss(params: Tensors, batch: Tensors) -> Tensor:
        return cross_entropy(fn.apply(params, (), batch["x"])[0].float(), batch["y"])

    return loss


def microbatches(run: Run, batch: Tensors) -> Microbatches:
    """What a run's step is given one after the other, after so many applied steps."""
    if run.cut == "ragged":
        return ragged(batch)
    # Samples that meet in a BatchNorm are cut inside of the loss, and not before it.
    parts = list(pa.microbatches(batch, SIZE)) if run.cut == "even" and run.usual else [batch]
    return lambda applied: parts


def ragged(batch: Tensors) -> Microbatches:
    """Microbatches of 1 to 200 samples, cut anew in every step."""

    def cut(applied: int) -> list[Tensors]:
        g = torch.Generator().manual_seed(applied)
        sizes: list[int] = []
        while (left := ROWS - sum(sizes)) > 0:
            sizes.append(min(left, int(torch.randint(1, 201, (), generator=g))))
        return list(pa.microbatches(batch, sizes))

    return cut


def train(run: Run, batch: Tensors) -> Iterator[Progress]:
    """Train, without end."""
    return (usual_loop if run.usual else by_step)(run, microbatches(run, batch))


def by_step(run: Run, cut: Microbatches) -> Iterator[Progress]:
    """Train by this package, with one step for all of it."""
    net = network(run.normed)
    step = pa.make_step(
        loss_of(net, SIZE if run.cut == "even" else None),
        pa.adamw(RATE),
        policy=pa.Policy(compute=torch.float16) if run.half else None,
        loss_scale=SCALE if run.half else None,
        check=not run.normed,  # a window may be the whole batch, which BatchNorm is to see at once
    )
    state = step.init(pa.functional(net).params)
    losses: list[float] = []

    def attempt() -> float:
        nonlocal state
        state, info = step.window(state, cut(len(losses)))
        if info.applied:
            losses.append(float(info.loss))
        return float(info.scale)

    yield from _timed(attempt, losses, lambda: state.params)


def usual_loop(run: Run, cut: Microbatches) -> Iterator[Progress]:
    """Train as everybody does: short microbatches weigh too much; each has its own BatchNorm."""
    net = network(run.normed)
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
    with auto_size.counting() as live:  # the first attempt warms up as well
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


def worst(run: Run, points: list[Tensors], batch: Tensors) -> Distance:
    """The largest distance at some parameters, of this package's gradient or the usual loop's."""
    net, unit = network(run.normed), 2.0**-11 if run.half else 2.0**-24

    def of(size: int | None) -> BatchLoss:
        return _in_half(loss_of(net, size)) if run.half else loss_of(net, size)

    parts = ragged(batch)(0) if run.cut == "ragged" else list(pa.microbatches(batch, SIZE))
    sizes = [len(part["x"]) for part in parts]
    found: list[Distance] = []
    for params in points:
        added = [torch.func.grad(of(None))(params, part) for part in parts]
        shares = [1 / len(parts) if run.usual else size / ROWS for size in sizes]
        terms = [
            {name: share * g for name, g in grads.items()}
            for share, grads in zip(shares, added, strict=True)
        ]
        if run.usual:
            grads = {name: torch.stack([term[name] for term in terms]).sum(0) for name in params}
        elif run.normed:
            grads = pa.grad(of(SIZE))(params, batch)
        else:
            grads = pa.grad(of(None), microbatch_size=sizes)(params, batch)
        found.append(_distance(grads, torch.func.grad(of(None))(params, batch), terms, unit))
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
