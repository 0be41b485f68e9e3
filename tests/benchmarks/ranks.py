"""Two ranks: what they say to one another in a step, how long it takes, and the memory of a loss of
all pairs.

Rule: the loop is DistributedDataParallel with ``no_sync`` for all microbatches but the last. Both
train the same model on the same rows in the same processes, in turns; what crosses the wire is what
the system counts on its network interfaces meanwhile. For a contrastive loss both cut their own
rows into microbatches, and a rank scores its own rows against those of all, both ways; one process
with all rows is measured beside them, in a process of its own, in float64.
"""

import gc
import sys
import tempfile
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing import spawn
from torch.nn.parallel import DistributedDataParallel

import pureaccum as pa
from pureaccum.distributed import gather, psum

from .models import Batch, Towers
from .process import RETURNING, answer, ask, high_water, reset


OURS, DDP = "autograd step, group", "DDP, no_sync"


COUNTED = "collectives", "bytes to them", "bytes on the wire"


MICROBATCHES, ROWS = 8, 16


class Kind(NamedTuple):
    """A network: square layers with ReLU between them."""

    width: int
    depth: int
    rounds: int  # steps that are timed: some seconds of them, or two runs differ by a quarter

    def __str__(self) -> str:
        megabytes = self.depth * self.width * (self.width + 1) * 4 / 1e6
        return f"{self.depth} layers of width {self.width}, {megabytes:.2g} MB of gradients"


KINDS = (Kind(64, 4, 400), Kind(512, 4, 150), Kind(1024, 8, 30))


def talk(kind: Kind) -> dict[str, Any]:
    """Of each of the two: collectives, bytes given to them, bytes on the wire, seconds a step."""
    return ask("ranks", *map(str, kind), env={"OMP_NUM_THREADS": "1"})


def measured(*kind: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, args=(folder, Kind(*kind)), nprocs=2)
        return torch.load(Path(folder) / "result", weights_only=True)


def _rank(rank: int, folder: str, kind: Kind) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    wait = timedelta(seconds=120)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=wait)
    result = _raced(kind)
    if rank == 0:
        torch.save(result, Path(folder) / "result")
    gc.collect()  # what holds on to the group ends before it: else its threads may end the process
    dist.barrier()
    dist.destroy_process_group()


def _raced(kind: Kind) -> dict[str, Any]:
    torch.manual_seed(0)
    width, depth, rounds = kind
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]
    net = nn.Sequential(*layers)
    x = torch.randn(MICROBATCHES * ROWS, width)
    said: list[int] = []  # bytes of each collective
    result: dict[str, Any] = {}
    for name, step in {DDP: _ddp(net, said), OURS: _ours(net, said)}.items():
        for _ in range(5):  # DDP builds its buckets anew after the first step
            step(x)
        said.clear()
        dist.barrier()
        before = _wire()
        for _ in range(rounds):
            step(x)
        dist.barrier()
        wire = (_wire() - before) / rounds
        counts = len(said) / rounds, sum(said) / rounds, wire
        result[name] = dict(zip(COUNTED, counts, strict=True))
    seconds: dict[str, list[float]] = {name: [] for name in result}
    steps = {DDP: _ddp(net, said), OURS: _ours(net, said)}
    for _ in range(rounds):
        for name, step in steps.items():
            dist.barrier()
            start = perf_counter()
            step(x)
            seconds[name].append(perf_counter() - start)
    for name, each in seconds.items():
        result[name]["seconds"] = median(each[5:])
    return result


def _ddp(net: nn.Module, said: list[int]) -> Any:
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)

    def noted(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        said.append(bucket.buffer().nbytes)
        work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    ddp.register_comm_hook(None, noted)

    def step(x: torch.Tensor) -> None:
        *parts, last = x.split(ROWS)
        with ddp.no_sync():
            for part in parts:
                (ddp(part).square().mean() / MICROBATCHES).backward()
        (ddp(last).square().mean() / MICROBATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _ours(net: nn.Module, said: list[int]) -> Any:
    fn = pa.functional(net)

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return fn.apply(params, (), x)[0].square().mean()

    step = pa.make_step(
        loss,
        pa.sgd(1e-3),
        microbatch_size=ROWS,
        engine="autograd",
        group=dist.group.WORLD,
        donate=True,
    )
    state = step.init(fn.params)
    plain = dist.all_reduce

    def noted(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        said.append(x.nbytes)
        return plain(x, *args, **kwargs)

    def one(x: torch.Tensor) -> None:
        nonlocal state
        dist.all_reduce = noted
        state, _ = step(state, x)
        dist.all_reduce = plain

    return one


def _wire() -> int:
    """Bytes received on all network interfaces so far."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":")[1].split()[0]) for line in lines)


PAIRS, PAIRS_ROWS, TOWER_WIDTH, DEPTH, EMBEDDED = 4096, 32, 512, 4, 128


PAIRS_OF_RANKS = f"two towers, {DEPTH} x {TOWER_WIDTH} wide, {PAIRS} pairs in {PAIRS_ROWS}s"


APART, ALONE, DIFFERENCE = "one of two ranks", "one process", "difference"


def pairs_of_ranks() -> dict[str, Any]:
    """The bytes of a rank, those of one process, and how far gradients are off, relatively."""
    return ask("ranks", env={"OMP_NUM_THREADS": "1"} | RETURNING)


def measured_pairs() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        for world in (1, 2):
            spawn(_rank_of_pairs, args=(world, folder), nprocs=world)
        alone, first, second = (torch.load(Path(folder) / name) for name in ("01", "02", "12"))
    off = [
        (x - y).norm() / y.norm()
        for rank in (first, second)
        for x, y in zip(rank["grads"], alone["grads"], strict=True)
    ]
    peak = max(first["peak"], second["peak"])
    return {
        APART: {"peak": peak},
        ALONE: {"peak": alone["peak"]},
        DIFFERENCE: float(max(off)),
    }


def _rank_of_pairs(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = Towers(256, TOWER_WIDTH, DEPTH, EMBEDDED).double()
    batch = tuple(torch.randn(PAIRS, 256, dtype=torch.float64) for _ in range(2))
    if world > 1:
        store = dist.FileStore(f"{folder}/store", world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        batch = tuple(x.chunk(world)[rank].clone() for x in batch)
    fn = pa.functional(net)
    embed = pa.microbatch(
        lambda params, batch: fn.apply(params, fn.buffers, *batch)[0], microbatch_size=PAIRS_ROWS
    )
    loss = partial(of_ranks if world > 1 else of_all, embed)
    # A step without a rate of its own: what changed in the parameters is the gradient.
    step = pa.make_step(loss, pa.sgd(1.0), group=dist.group.WORLD if world > 1 else None)
    state = step.init(fn.params)
    step(state, batch)
    before = reset("cpu")
    new, _ = step(state, batch)
    peak = high_water("cpu") - before
    grads = [old - x for old, x in zip(state.params.values(), new.params.values(), strict=True)]
    torch.save({"peak": peak, "grads": grads}, Path(folder) / f"{rank}{world}")
    if world > 1:
        dist.destroy_process_group()


def of_all(embed: Any, params: Any, batch: Batch) -> Tensor:
    x, y = map(F.normalize, embed(params, batch))
    scores, own = x @ y.T / 0.05, torch.arange(len(x))
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2


def of_ranks(embed: Any, params: Any, batch: Batch) -> Tensor:
    x, y = map(F.normalize, embed(params, batch))
    every_x, every_y = gather((x, y))
    own = dist.get_rank() * len(x) + torch.arange(len(x))
    both = F.cross_entropy(x @ every_y.T / 0.05, own, reduction="sum")
    both = both + F.cross_entropy(y @ every_x.T / 0.05, own, reduction="sum")
    return psum(both) / (2 * len(every_x))


if __name__ == "__main__":
    if sys.argv[1:]:
        answer(measured, *map(int, sys.argv[1:]))
    else:
        answer(measured_pairs)
