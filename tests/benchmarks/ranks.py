"""Two ranks: what they say to one another in a step, and how long it takes.

Rule: the loop is DistributedDataParallel with ``no_sync`` for all microbatches but the last. Both
train the same model on the same rows in the same processes, in turns; what crosses the wire is what
the system counts on its network interfaces meanwhile.
"""

import gc
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing import spawn
from torch.nn.parallel import DistributedDataParallel

import pureaccum as pa

from .apart import answer, ask


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


if __name__ == "__main__":
    answer(measured, *map(int, sys.argv[1:]))
