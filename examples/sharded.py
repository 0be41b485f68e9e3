"""Train parameters that fully_shard has sharded, and resume on another number of ranks.

Each rank holds its shards of parameters, moments and gradient sums. Two ranks resume what four
saved, and end where an uninterrupted run and one process with plain tensors end.

    Run:   torchrun --nproc-per-node 2 examples/sharded.py
           torchrun --nproc-per-node 4 examples/sharded.py run --stop 3  # saves after three steps
           torchrun --nproc-per-node 2 examples/sharded.py run           # resumes
    Needs: no extra
"""

import argparse
import gc
from collections.abc import Callable
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn.functional import cross_entropy

import pureaccum as pa


ROWS, LENGTH, WORDS, WIDTH = 37, 12, 64, 128  # 37 samples: 19 and 18 on two ranks
SIZE, STEPS = 4, 6  # SIZE samples of a microbatch on each rank
Tensors = dict[str, Tensor]


def make_net() -> nn.Sequential:
    torch.manual_seed(0)  # the same on all ranks
    first, last = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
    block = partial(nn.TransformerEncoderLayer, WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True)
    return nn.Sequential(first, *(block() for _ in range(4)), last).double()


def make_params(mesh: DeviceMesh | None) -> Tensors:
    net = make_net()
    for layer in net if mesh else ():
        fully_shard(layer, mesh=mesh)
    return dict(net.named_parameters())  # with a mesh, DTensors


def make_batch(step: int) -> Tensors:
    g = torch.Generator().manual_seed(step)
    words = torch.randint(WORDS, (ROWS, LENGTH), generator=g)  # the task: sort them
    lengths = torch.randint(1, LENGTH + 1, (ROWS, 1), generator=g)
    return {"x": words, "y": words.sort(1).values, "mask": torch.arange(LENGTH) < lengths}


def shard(batch: Tensors, mesh: DeviceMesh) -> Tensors:
    """DTensors of each rank's samples, with samples of weight 0 where a rank has fewer."""
    rows = pa.distributed.shard_batch(batch, mesh.get_rank(), mesh.size())
    for name, x in rows.items():
        x = torch.cat([x, x.new_zeros(-(-ROWS // mesh.size()) - len(x), LENGTH)])
        rows[name] = DTensor.from_local(x, mesh, [Shard(0)] * mesh.ndim)
    return rows


class Gather(torch.autograd.Function):
    """Gathers a parameter for each pass of a layer; sums its gradient into the shards."""

    @staticmethod
    def forward(p: Any) -> Tensor:
        return p.full_tensor()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any], output: Tensor) -> None:
        ctx.mesh, ctx.placements = inputs[0].device_mesh, inputs[0].placements

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        # each replica keeps its own sums, which the step reduces once, at its end
        wanted = [Partial() if p.is_replicate() else p for p in ctx.placements]
        grad = DTensor.from_local(grad, ctx.mesh, [Partial()] * ctx.mesh.ndim)
        return grad.redistribute(placements=wanted)


def whole(p: Tensor) -> Tensor:
    return Gather.apply(p) if isinstance(p, DTensor) else p


def gathered(layer: Any, params: Tensors, x: Tensor) -> Tensor:
    return layer.apply({name: whole(p) for name, p in params.items()}, (), x)[0]


def make_loss(mesh: DeviceMesh | None) -> Callable[[Tensors, Any], pa.Weighted]:
    with torch.device("meta"):  # layers as functions, without parameters
        layers = [pa.functional(layer) for layer in make_net()]
    leans = [pa.remat(partial(gathered, fn)) for fn in layers]

    def loss(params: Tensors, batch: Any) -> pa.Weighted:
        x, y, mask = (batch[n].to_local() if mesh else batch[n] for n in ("x", "y", "mask"))
        of_layers = [{n: params[f"{i}.{n}"] for n in fn.params} for i, fn in enumerate(layers)]
        x = reduce(lambda x, at: at[0](at[1], x), zip(leans, of_layers, strict=True), x)
        errors = cross_entropy(x.mT, y, reduction="none")
        sums = (errors * mask).sum(), mask.sum()
        if mesh:  # each rank has a part of the sums
            sums = (DTensor.from_local(s, mesh, [Partial()] * mesh.ndim) for s in sums)
        return pa.Weighted(*sums)

    return loss


def make_step(mesh: DeviceMesh | None, size: int = SIZE) -> Any:
    optimizer = pa.chain(pa.clip_by_global_norm(1.0), pa.adamw(3e-3, fused=True))
    rows = size * mesh.size() if mesh else size
    return pa.make_step(make_loss(mesh), optimizer, microbatch_size=rows, donate=True)


def train(mesh: DeviceMesh | None, stop: int, folder: Path | None = None) -> Tensors:
    """The parameters after ``stop`` steps, from the start or from the checkpoint in a folder."""
    step = make_step(mesh)
    state = step.init(make_params(mesh))
    if folder and folder.exists():
        state = pa.load(folder, like=state)
    for i in range(int(state.attempts), stop):
        state, info = step(state, shard(make_batch(i), mesh) if mesh else make_batch(i))
        if dist.get_rank() == 0 and i + 1 == stop:
            print(f"step {stop}: loss {info.loss:.9f}, in {info.microbatches} microbatches")
    if folder and stop < STEPS:
        pa.save(folder, state)  # all ranks together: each writes what it holds
    return state.params


def main(folder: str | None, stop: int) -> None:
    dist.init_process_group("gloo")  # "nccl", and "cuda" below, where each rank has a GPU
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    params = train(mesh, stop, Path(folder) if folder else None)
    for name, its in {"one process": None, "an uninterrupted run": mesh}.items():
        end = train(its, stop)
        apart = max(float((whole(p) - whole(end[n])).abs().max()) for n, p in params.items())
        if dist.get_rank() == 0:
            print(f"largest difference of a parameter from {name}: {apart:.1e}")
    gc.collect()  # gloo may abort a process in which something outlives the group
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", help="where the run is saved and resumed")
    parser.add_argument("--stop", type=int, default=STEPS, help="save after this many steps")
    main(**vars(parser.parse_args()))
