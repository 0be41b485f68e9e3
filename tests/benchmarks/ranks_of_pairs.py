"""A contrastive loss of all pairs: the memory of each of two ranks, and of one process with all.

Rule: both cut their own rows into microbatches, and both are measured in processes of their own, in
float64. A rank scores its own rows against those of all, both ways.
"""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing import spawn

import pureaccum as pa
from pureaccum.distributed import gather, psum

from .apart import answer, ask
from .memory import RETURNING, high_water, reset
from .networks import Towers


PAIRS, ROWS, WIDTH, DEPTH, EMBEDDED = 4096, 32, 512, 4, 128
PAIRS_OF_RANKS = f"two towers, {DEPTH} x {WIDTH} wide, {PAIRS} pairs in {ROWS}s"
APART, ALONE, DIFFERENCE = "one of two ranks", "one process", "difference"

Batch = tuple[Tensor, Tensor]


def pairs_of_ranks() -> dict[str, Any]:
    """The bytes of a rank, those of one process, and how far gradients are off, relatively."""
    return ask("ranks_of_pairs", env={"OMP_NUM_THREADS": "1"} | RETURNING)


def measured() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        for world in (1, 2):
            spawn(_rank, args=(world, folder), nprocs=world)
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


def _rank(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = Towers(256, WIDTH, DEPTH, EMBEDDED).double()
    batch = tuple(torch.randn(PAIRS, 256, dtype=torch.float64) for _ in range(2))
    if world > 1:
        store = dist.FileStore(f"{folder}/store", world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        batch = tuple(x.chunk(world)[rank].clone() for x in batch)
    fn = pa.functional(net)
    embed = pa.microbatch(
        lambda params, batch: fn.apply(params, fn.buffers, *batch)[0], microbatch_size=ROWS
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
    answer(measured)
