"""Count what a rank holds and communicates in a step of sharded.py, of DDP and of fully_shard.

All three recompute layers in the backward pass. Memory counts the tensors that are alive. A
collective counts the bytes of the whole tensor: after gathering it, or before scattering it.

    Run:   torchrun --nproc-per-node 4 examples/sharded_costs.py
    Needs: no extra
"""

import gc
import warnings
from collections import Counter, namedtuple
from collections.abc import Callable
from contextlib import nullcontext
from functools import reduce
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from optree import tree_leaves
from sharded import ROWS, Tensors, make_batch, make_net, make_params, make_step, shard, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import pureaccum as pa


# bytes on one rank (the peak: of everything); bytes of the collectives, and how many they are
Cost = namedtuple("Cost", "parameters moments sums peak gathered scattered reduced calls")


def tensors_of(tree: Any) -> list[Any]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


class Watch(TorchDispatchMode):
    """Sees operations on plain tensors; of DTensors, what they do on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.alive, self.peak = WeakValueDictionary(), 0
        self.bytes, self.calls = Counter(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        tensors = tensors_of((args, out))
        storages = (x.untyped_storage() for x in tensors)
        self.alive |= {id(s): s for s in storages if s.device.type != "meta"}  # not shapes alone
        self.peak = max(self.peak, sum(s.nbytes() for s in self.alive.values()))
        kind = next((kind for kind in ("scatter", "gather", "reduce") if kind in str(func)), None)
        if "c10d" in func.namespace and kind:
            self.calls += 1
            self.bytes[kind] += max(x.nbytes for x in tensors)
        return out


class Recomputed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return reduce(lambda x, layer: checkpoint(layer, x, use_reentrant=False), self, x)


def by_hand(mesh: DeviceMesh, size: int, sharded: bool) -> Callable[[int], Any]:
    net = model = Recomputed(*make_net())
    if sharded:
        for part in (*net, net):
            fully_shard(part, mesh=mesh)
    else:
        model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, fused=True)

    def step(i: int) -> Any:
        rows = pa.distributed.shard_batch(make_batch(i), mesh.get_rank(), mesh.size())
        weight = rows["mask"].sum()
        dist.all_reduce(weight)
        *parts, last = pa.microbatches(rows, size)
        for part in (*parts, last):
            with nullcontext() if sharded or part is last else model.no_sync():
                errors = cross_entropy(model(part["x"]).mT, part["y"], reduction="none")
                total = (errors * part["mask"]).sum()
                (mesh.size() * total / weight).backward()  # ranks average it
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        grads = [p.grad for p in net.parameters()]
        optimizer.zero_grad()
        return dict(net.named_parameters()), optimizer.state_dict()["state"], grads

    return step


def held(tree: Any) -> int:
    return sum((x.to_local() if isinstance(x, DTensor) else x).nbytes for x in tensors_of(tree))


def measure(name: str, mesh: DeviceMesh, microbatches: int) -> tuple[Cost, Tensors]:
    """The costs of the second step, and the parameters after it."""
    size = -(-ROWS // (mesh.size() * microbatches))
    if name == "sharded.py":
        ours = make_step(mesh, size)
        state, _ = ours(ours.init(make_params(mesh)), shard(make_batch(0), mesh))
        batch = shard(make_batch(1), mesh)
        peak = sum(pa.memory_report(ours, state, batch).measured)
        with Watch() as seen:  # under a mode a step writes nothing in place
            state, _ = ours(state, batch)
        trees = state.params, state.opt_state, ours.begin(state).accum.grads
    else:
        step = by_hand(mesh, size, name == "fully_shard")
        step(0)
        with Watch() as seen:
            trees = step(1)
        peak = seen.peak
    through = (seen.bytes[kind] for kind in ("gather", "scatter", "reduce"))
    cost = Cost(*map(held, trees), peak, *through, seen.calls)
    return cost, {name: whole(p.detach()) for name, p in trees[0].items()}


def main() -> None:
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # about writing to what it returns
    dist.init_process_group("gloo")
    world, names = dist.get_world_size(), ("replica", "shard")
    lines = [f"MB on each of {world} ranks     k" + "".join(f"{it:>11}" for it in Cost._fields)]
    for replicas in (1, 2) if world > 2 else (1,):
        mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=names)
        for name in ("DDP", "fully_shard", "sharded.py")[replicas > 1 :]:
            for k in (1, 5):
                cost, _ = measure(name, mesh if replicas > 1 else mesh["shard"], k)
                numbers = "".join(f"{it / 1e6:11.2f}" for it in cost[:-1])
                what = name + f", {replicas} replicas" * (replicas > 1)
                lines.append(f"{what:24}{k:3}{numbers}{cost.calls:11}")
    if dist.get_rank() == 0:
        print("\n".join(lines))
    gc.collect()  # gloo may abort a process in which something outlives the group
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
