"""Three ways to train on one batch of scanned digits, in four settings, and what each costs.

    full batch    one backward pass over all samples, in plain PyTorch
    usual loop    ``(loss / k).backward()`` for each of k microbatches, in plain PyTorch
    pureaccum     a step of this package over the same microbatches

All runs begin with the same parameters and take the same number of steps. They take turns, one step
each, so that noise on the machine slows all of them alike.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from statistics import mean
from time import thread_time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

import pureaccum as pa

from .._core import auto_size


Tensors = dict[str, Tensor]

SAMPLES, WIDTH, STEPS, RATE = 1440, 512, 30, 5e-3
RAGGED_SIZES = (197, 3, 150, 41, 12, 180, 90, 66, 8, 120, 175, 31, 99, 140, 57, 71)
SCALE: dict[str, Any] = {"init_scale": 2.0**22, "growth_interval": 12}  # the first steps overflow


class Setting(NamedTuple):
    """How the batch is cut, which network it goes through, and in which dtype."""

    title: str
    sizes: tuple[int, ...]  # of the microbatches
    normed: bool = False  # a BatchNorm after the first layer
    half: bool = False  # float16 by autocast, with a dynamic loss scale

    @property
    def bits(self) -> int:
        """The bits of a number in this dtype."""
        return 11 if self.half else 24


EVEN = Setting("16 microbatches of 90 samples", (90,) * 16)
RAGGED = Setting("16 ragged microbatches of 3 to 197 samples", RAGGED_SIZES)
NORMED = Setting("BatchNorm, 16 microbatches of 90 samples", (90,) * 16, normed=True)
HALF = Setting("float16 with a dynamic loss scale, ragged microbatches", RAGGED_SIZES, half=True)


def digits() -> tuple[Tensors, Tensors]:
    """1,440 samples to train on and 357 to test with, of numbers from 0 to 1."""
    from sklearn.datasets import load_digits  # pyright: ignore[reportMissingTypeStubs]

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    return {"x": x[:SAMPLES], "y": y[:SAMPLES]}, {"x": x[SAMPLES:], "y": y[SAMPLES:]}


@contextmanager
def one_thread() -> Generator[None]:
    """One thread for torch: times do not depend on the number of cores, nor bits on threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# The network and its loss --------------------------------------------------------------------


def network(setting: Setting) -> nn.Module:
    """The network, always with the same parameters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # Test samples are normalised by their own statistics too: there are no running ones.
        # BatchNorm subtracts any bias before it, so its gradient would be rounding error alone.
        norm = [nn.BatchNorm1d(WIDTH, track_running_stats=False)] if setting.normed else []
        first = nn.Linear(64, WIDTH, bias=not setting.normed)
        return nn.Sequential(first, *norm, nn.ReLU(), nn.Linear(WIDTH, 10))


def loss_of(predict: Callable[[Tensor], Tensor], batch: Tensors, half: bool = False) -> Tensor:
    """The mean loss of the samples; cross entropy is always in float32."""
    with torch.autocast("cpu", torch.float16, enabled=half):
        out = predict(batch["x"])
    return cross_entropy(out.float(), batch["y"])


# Training ------------------------------------------------------------------------------------


class Run(ABC):
    """One way of training in one setting, step by step."""

    name: str

    def __init__(self, setting: Setting, batch: Tensors) -> None:
        self.setting, self.batch = setting, batch
        self.net = network(setting)
        self.first = {name: p.clone() for name, p in self.net.state_dict().items()}
        self.losses: list[float] = []  # of the whole batch, after each step
        self.times: list[float] = []  # CPU seconds, of each step
        self.peak = self.skipped = 0
        self.off: tuple[float, float] | None = None  # see `compare`

    @abstractmethod
    def params(self) -> Tensors:
        """The parameters of now."""

    @abstractmethod
    def attempt(self) -> bool:
        """Take a step, unless its gradient overflows; whether it was taken."""

    @abstractmethod
    def gradient(self, params: Tensors) -> Tensors:
        """The gradient, times 1024: float16 would round small numbers to zero."""

    def step(self) -> None:
        """Take a step. One that overflows is skipped and repeated.

        The first step warms up, the bytes of the second are counted, and later ones are timed.
        """
        seconds, applied = 0.0, False
        with auto_size.counting() if len(self.losses) == 1 else nullcontext() as live:
            while not applied:
                start = thread_time()
                applied = self.attempt()
                seconds = thread_time() - start
                self.skipped += not applied
        self.peak = live.peak if live else self.peak
        self.times.append(seconds)
        self.losses.append(float(loss_of(self.predict, self.batch)))

    def predict(self, x: Tensor) -> Tensor:
        """The outputs for the parameters of now, in float32."""
        with torch.no_grad():
            return torch.func.functional_call(self.net, self.params(), x)

    def loss_in_parts(self) -> float:
        """The mean loss of the microbatches, one at a time."""
        parts = pa.microbatches(self.batch, self.setting.sizes)
        return mean(float(loss_of(self.predict, part)) for part in parts)

    def accuracy(self, test: Tensors) -> float:
        """The share of some samples that it gets right."""
        return float((self.predict(test["x"]).argmax(1) == test["y"]).float().mean())

    @property
    def is_near(self) -> bool:
        """Whether at least half of the gradient's bits are the full batch's."""
        return all(off < 2.0 ** (-self.setting.bits / 2) for off in self.off or ())


class Loop(Run):
    """The usual loop, in plain PyTorch; with one microbatch it is the full batch."""

    name = "usual loop"

    def __init__(self, setting: Setting, batch: Tensors) -> None:
        super().__init__(setting, batch)
        self.sizes = setting.sizes
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=RATE)
        self.scaler = torch.amp.GradScaler("cpu", enabled=setting.half, **SCALE)

    def params(self) -> Tensors:
        return dict(self.net.state_dict())

    def attempt(self) -> bool:
        scale = self.scaler.get_scale()
        self.backward(self.net, self.scaler.scale)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return self.scaler.get_scale() >= scale

    def gradient(self, params: Tensors) -> Tensors:
        net = network(self.setting)
        net.load_state_dict(params)
        self.backward(net, lambda loss: loss * 1024)
        return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}

    def backward(self, net: nn.Module, scaled: Callable[[Tensor], Tensor]) -> None:
        """Add up the gradients of all microbatches."""
        for part in pa.microbatches(self.batch, self.sizes):
            scaled(loss_of(net, part, self.setting.half) / len(self.sizes)).backward()


class FullBatch(Loop):
    """One backward pass over all samples."""

    name = "full batch"

    def __init__(self, setting: Setting, batch: Tensors) -> None:
        super().__init__(setting, batch)
        self.sizes = (SAMPLES,)


class Pure(Run):
    """This package."""

    name = "pureaccum"

    def __init__(self, setting: Setting, batch: Tensors) -> None:
        super().__init__(setting, batch)
        # Microbatches that share a BatchNorm are cut inside the network, the others by the step.
        self.sizes = None if setting.normed else setting.sizes
        inside = setting.sizes[0] if setting.normed else None
        self.fn = pa.functional(self.net, microbatch_size=inside)
        self.take = pa.make_step(
            self.loss,
            pa.adamw(RATE),
            microbatch_size=self.sizes,
            loss_scale=pa.dynamic_loss_scale(**SCALE) if setting.half else None,
            donate=True,  # as in the loop, the new parameters replace the old ones
        )
        self.state = self.take.init(self.fn.params)

    def params(self) -> Tensors:
        return self.state.params

    def attempt(self) -> bool:
        self.state, info = self.take(self.state, self.batch)
        return bool(info.applied)

    def gradient(self, params: Tensors) -> Tensors:
        loss = self.loss
        grad = pa.grad(lambda p, batch: loss(p, batch) * 1024, microbatch_size=self.sizes)
        return grad(params, self.batch)

    def loss(self, params: Tensors, batch: Tensors) -> Tensor:
        """The loss, as a pure function of parameters and batch."""
        return loss_of(lambda x: self.fn.apply(params, (), x)[0], batch, self.setting.half)


WAYS = {
    EVEN: (FullBatch, Loop, Pure),
    RAGGED: (Loop, Pure),  # its full batch is that of even microbatches
    NORMED: (FullBatch, Loop, Pure),
    HALF: (FullBatch, Pure),
}
Runs = Mapping[Setting, Mapping[str, Run]]


def all_runs(batch: Tensors) -> Runs:
    """All runs, by setting and name."""
    return {
        setting: {way.name: way(setting, batch) for way in ways} for setting, ways in WAYS.items()
    }


def compare(runs: Runs) -> None:
    """Compare gradients with the full batch's, at its first and its last parameters."""
    for setting, ways in runs.items():
        full = runs[EVEN if setting == RAGGED else setting]["full batch"]
        for run in ways.values():
            first, last = (
                _off(run.gradient(params), full.gradient(params))
                for params in (full.first, full.params())
            )
            run.off = None if run is full else (first, last)


def _off(grads: Tensors, full: Tensors) -> float:
    """The difference relative to the full batch's gradient, in the worst of its leaves."""
    pairs = ((grads[name].double(), g.double()) for name, g in full.items())
    return float(torch.stack([(ours - g).norm() / g.norm() for ours, g in pairs]).max())


def memory_by_size(batch: Tensors) -> dict[str, dict[int, int]]:
    """The bytes that a step allocates, by way and by samples in a microbatch."""
    found: dict[str, dict[int, int]] = {Loop.name: {}, Pure.name: {}}
    for size in (30, 90, 240, 480, SAMPLES):
        for way in (Loop, Pure):
            run = way(Setting("", (size,) * (SAMPLES // size)), batch)
            run.step()
            run.step()
            found[way.name][size] = run.peak
    return found


# Exact arithmetic ------------------------------------------------------------------------------


def on_whole_numbers(batch: Tensors) -> int:
    """How many numbers of the gradient differ where arithmetic is exact; none should.

    The digits are black and white, the weights -1, 0 and 1, and the loss a sum of squared errors.
    """
    g = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, generator=g).float()

    params = {"in": drawn(64, WIDTH), "out": drawn(WIDTH, 10)}
    sharp = {"x": (batch["x"] > 0.5).float(), "y": batch["y"]}

    def squares(params: Tensors, batch: Tensors) -> Tensor:
        out = (batch["x"] @ params["in"]).relu() @ params["out"]
        return ((out - one_hot(batch["y"], 10)) ** 2).sum()

    full = torch.func.grad(squares)(params, sharp)
    grads = pa.grad(squares, reduction="sum", microbatch_size=RAGGED_SIZES)(params, sharp)
    return sum(int((grads[name] != full[name]).sum()) for name in full)
