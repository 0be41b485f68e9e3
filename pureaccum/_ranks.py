"""A step over several ranks: each accumulates its own rows, and one reduction makes it whole.

    rows of the ranks before this one, where rows have keys
    ... the window, as in one process ...
    sums, totals, weights, counts, rows, buffers over all ranks

All that follows (division, clipping, what is applied and what the loss scale learns) is computed
from the same bits on every rank, and so every rank comes to the same state.
"""

from functools import reduce
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from ._accumulator import AccumState
from ._buckets import between_ranks
from ._buffers import Carried
from ._inputs import read_params
from ._moments import Moments, layers, merged
from ._sharded import refuse_sharded
from ._train_state import Plan, StepWindow, TrainState
from ._tree import Tree, flatten, paths, unflatten
from .distributed import begin_sum


def before_this_rank(plan: Plan, samples: Tensor, rows: int) -> Tensor:
    """How many rows the ranks before this one have in the batch."""
    of_all = _gathered(torch.full_like(samples, rows), plan.group)
    return torch.stack(of_all)[: dist.get_rank(plan.group)].sum()


def of_all_ranks(
    plan: Plan,
    state: TrainState,
    accum: AccumState,
    carried: tuple[Any, Tensor],
    first: Tensor,
    unit: Any,
) -> tuple[AccumState, tuple[Any, Tensor]]:
    """What was accumulated on all ranks, from what was on this one.

    Args:
        plan: What the step is made of.
        state: The state before, the same on all ranks.
        accum: Of this rank; its gradients are a list, and are written to.
        carried: Buffers of this rank, and the number of its last row in the run.
        first: That before its first row.
        unit: What the gradients of this rank are still to be multiplied by: ranks may differ.
    """
    buffers, last = carried
    for grad in accum.grads:
        if isinstance(unit, Tensor) or unit != 1:
            grad.mul_(unit)
    wait = begin_sum(accum, plan.group, last - first)
    buffers = buffers if plan.buffers in (None, "freeze") else _pooled(buffers, plan.group)
    accum, of_all = wait()
    return accum, (buffers, state.samples + of_all.sum().to(torch.int64))


def window_of_all_ranks(
    plan: Plan, state: TrainState, window: StepWindow, first: Tensor, unit: Any = 1.0
) -> StepWindow:
    """The same for a window, whose sums are written to."""
    sums, spec = flatten(window.accum.grads)
    accum, buffers, samples = window
    accum = accum._replace(grads=sums)
    accum, carried = of_all_ranks(plan, state, accum, (buffers, samples), first, unit)
    return StepWindow(accum._replace(grads=unflatten(spec, sums)), *carried)


def check_same(params: Tree, group: Any) -> None:
    """Check that all ranks begin with the same parameters; an error comes on all of them."""
    leaves, spec = read_params(params)
    refuse_sharded(
        leaves,
        "params",
        "group adds up what every rank holds whole. Leave group out: a batch that is sharded over "
        "the mesh (distribute_tensor) is added up over its ranks.",
    )
    names = paths(spec, "params")
    looks = [f"{name} {x.dtype} {tuple(x.shape)}" for name, x in zip(names, leaves, strict=True)]
    kind = crc32("\n".join(looks).encode())
    device = leaves[0].device
    alike = torch.tensor([kind, -kind], device=device)
    dist.all_reduce(alike, dist.ReduceOp.MAX, group=group)
    if alike[0] != -alike[1]:
        raise ValueError(
            "the ranks of the group have parameters of different names, shapes or dtypes; expected "
            f"the same on all. On rank {dist.get_rank(group)} there are {len(looks)}, the first "
            f"{looks[0]}. Another configuration of the model on one of them?"
        )
    differs: list[Tensor] = []
    for leaf in leaves:
        mine = leaf.detach().contiguous().view(-1).view(torch.uint8)
        first = mine.clone()
        dist.broadcast(first, group=group, group_src=0)
        differs.append((mine != first).any().to(device))
    flags = torch.stack(differs).to(torch.int64)
    dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
    wrong = [name for name, flag in zip(names, flags.tolist(), strict=True) if flag]
    if wrong:
        raise ValueError(
            f"{wrong[0]} is not the same on all ranks of the group ({len(wrong)} of {len(names)} "
            "leaves differ); every rank makes the same steps from the same parameters. Seed all "
            "ranks alike before the model is made (torch.manual_seed), or send those of one rank "
            "to the others (torch.distributed.broadcast)."
        )


def _pooled(carried: Carried, group: Any) -> Carried:
    """Moments merged, in the order of the ranks; every other buffer as rank 0 has it."""
    leaves, spec = flatten(carried.values)
    pooled = {i for at in layers(leaves, spec) for i in at if i is not None}
    for i, leaf in enumerate(leaves):
        if i not in pooled:
            leaves[i] = leaf.clone(memory_format=torch.contiguous_format)
            with between_ranks():
                dist.broadcast(leaves[i], group=group, group_src=0)
    moments = carried.moments
    if moments:
        of_all = _gathered(torch.stack(moments), group)
        moments = reduce(merged, (Moments(*each) for each in of_all))
    return Carried(unflatten(spec, leaves), moments)


def _gathered(mine: Tensor, group: Any) -> list[Tensor]:
    of_all = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    with between_ranks():
        dist.all_gather(of_all, mine, group=group)
    return of_all
