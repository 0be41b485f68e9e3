"""Train on several ranks that share each batch, with the result of a single process.

Each rank takes its own samples, and one rank may have more than another. Masked tokens make their
weights uneven too. Sums and weights are added up over the ranks once per step. Dropout has a key
for each sample, so its masks are also those of a single process.

    Run:   torchrun --nproc-per-node 2 examples/distributed.py
    Needs: no extra
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pureaccum as pa


ROWS, WORDS, WIDTH = 37, 12, 16  # 37 rows: 19 on one of two ranks, 18 on the other


def make_batch(step: int) -> dict[str, Tensor]:
    """The whole batch, on every rank; a real loader reads only its own rank's samples."""
    g = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, WORDS, WIDTH, generator=g, dtype=torch.float64)
    lengths = torch.randint(1, WORDS + 1, (ROWS, 1), generator=g)
    return {"x": x, "y": x.cumsum(1).tanh(), "mask": torch.arange(WORDS) < lengths}


def train(group: dist.ProcessGroup | None, rank: int, world: int, steps: int) -> pa.TrainState:
    torch.manual_seed(0)  # the same parameters on every rank; init checks that
    net = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)).double()
    fn = pa.functional(net)

    def loss(params: dict[str, Tensor], batch: dict[str, Tensor], keys: Tensor) -> pa.Weighted:
        out, _ = fn.apply(params, (), pa.dropout(batch["x"], 0.1, keys))
        error = ((out - batch["y"]) ** 2).mean(-1)
        return pa.Weighted((error * batch["mask"]).sum(), batch["mask"].sum())

    optimizer = pa.chain(pa.clip_by_global_norm(1.0), pa.adamw(3e-3))
    step = pa.make_step(loss, optimizer, microbatch_size=4, keys=True, group=group)
    state = step.init(fn.params, seed=1)
    for i in range(steps):
        rows = pa.distributed.shard_batch(make_batch(i), rank, world)
        state, info = step(state, rows)
        if rank == 0 and i % 10 == 0:
            parts = f"{info.microbatches} microbatches on {world} rank{'s' * (world > 1)}"
            print(f"step {i:2}: loss {info.loss:.4f} over {int(info.weight)} words in {parts}")
    return state


def main(steps: int = 31) -> float:
    """How far the parameters of several ranks are from those of one process."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        train(None, 0, 1, steps)
        print("this was one process; for two: torchrun --nproc-per-node 2 examples/distributed.py")
        return 0.0
    dist.init_process_group("gloo")  # "nccl" where each rank has a GPU
    state = train(dist.group.WORLD, rank, world, steps)
    apart = 0.0
    if rank == 0:
        alone = train(None, 0, 1, steps)
        pairs = zip(state.params.values(), alone.params.values(), strict=True)
        apart = max(float((a - b).abs().max()) for a, b in pairs)
        print(f"largest difference of a parameter from the one process: {apart:.1e}")
    dist.destroy_process_group()
    return apart


if __name__ == "__main__":
    main()
