"""What was accumulated on several ranks, merged: the sums of all, once a window.

    state = all_reduce(state)  # on every rank: sums of gradients, totals, weights and counts

Accumulation is a monoid, so ranks are one more way to cut a batch: they may have had different
numbers of rows and of microbatches, or none, and what comes out is the state of one process that
had all of them. ``make_step(..., group=...)`` does this at the end of each step.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._base import (
    Claim,
    Tree,
    agreement,
    between_ranks,
    claim,
    flatten,
    mark,
    paths,
    refuse_sharded,
    transform_active,
    tree_leaves,
    unflatten,
)
from .._core import AccumState, cut, read_batch, read_state, rows_to_cut
from .buckets import AHEAD, sum_over_ranks_


_AGREED = agreement({})  # among ranks that call all_reduce


class Pending(NamedTuple):
    """A reduction under way, which ``all_reduce(..., async_op=True)`` began.

    Attributes:
        wait: ``wait()`` gives the merged state.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from pureaccum import accumulator
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> state = accumulator(lambda w, x: (w * x).mean()).init(torch.tensor(2.0))
        >>> pending = all_reduce(state, async_op=True)  # until wait(), other work
        >>> pending.wait().weight
        tensor(0., dtype=torch.float64)
        >>> dist.destroy_process_group()

    References:
        ``all_reduce``, which makes it.
    """

    wait: Callable[[], AccumState]


def all_reduce(
    state: AccumState,
    group: Any = None,
    *,
    merge: Callable[[AccumState, AccumState], AccumState] | None = None,
    donate: bool = False,
    async_op: bool = False,
) -> Any:
    """Merge the states of all ranks; every rank gets the whole.

    The rule: what ``merge`` gives for the states of rank 0, 1, 2, …

    Totals, weights and counts travel in one collective with the gradients of a small model; other
    gradients travel in flat buckets, one for each dtype, device and 25 MiB. What comes out has the
    same bits on all ranks. Where states differ in structure, all ranks raise a ``ValueError`` that
    names what differs.

    Args:
        state: The state of any accumulator; one without updates adds nothing.
        group: A process group; None is all processes.
        merge: The ``merge`` of an accumulator whose ``reduce`` is the user's own functions, for
            which adding numbers may not be right: the states of all ranks come together first.
        donate: The state is given up, and its memory is used.
        async_op: Return while the reduction is under way; ``.wait()`` gives the state. On a CPU it
            returns once all ranks have called, with states of one structure.

    Returns:
        The merged state.

    Example:
        >>> from pureaccum import accumulator
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> acc = accumulator(lambda w, x: (w * x).mean())
        >>> w = torch.tensor(2.0)
        >>> state = acc.update(acc.init(w), w, torch.tensor([1.0, 3.0]))  # this rank's rows
        >>> acc.finalize(all_reduce(state))
        (tensor(2.), tensor(4., dtype=torch.float64))
        >>> dist.destroy_process_group()

    References:
        `torch.distributed.all_reduce <https://docs.pytorch.org/docs/stable/distributed.html>`_
    """
    read_state(state)
    check_group(group)
    leaves, spec = flatten(state.grads)
    refuse_sharded(
        leaves, "state.grads", "finalize and the step's end add those up over their mesh."
    )
    for i, leaf in enumerate(leaves):
        if merge is None and leaf.dtype == torch.bool:
            raise TypeError(
                f"{paths(spec, 'state.grads')[i]} is torch.bool, which has no sum. Pass the "
                "accumulator's own merge=acc.merge, which knows what becomes of it."
            )
    if merge is not None and async_op:
        raise ValueError("async_op=True came with merge, which has to wait for every rank.")
    call = "all_reduce" if merge is None else "all_reduce(merge=...)"
    cause = (
        "States that are added up are of the same params, and ranks call the same functions in the "
        "same order. Another model, or another accumulator, on one of them?"
    )
    kinds, device = {"state": state}, state.total.device
    claimed = claim(_AGREED, call, kinds, {}, device, cause, whole=False)
    if merge is not None:
        meet(claimed, group)
        merged = reduce(merge, _states_of_all(state, group))
        if donate:
            mark(tree_leaves(state))
        return merged
    own = [x.detach() if donate else x.clone() for x in tree_leaves(state)]
    work = unflatten(flatten(state)[1], own)._replace(grads=own[: len(leaves)])
    if donate:  # before anything is written, so that an error leaves nothing half added
        mark(tree_leaves(state))
    ahead = len(own) if async_op else AHEAD
    wait = begin_sum(work, group, claimed, ahead=ahead)

    def finish() -> AccumState:
        merged, _ = wait()
        return merged._replace(grads=unflatten(spec, merged.grads))

    return Pending(finish) if async_op else finish()


def shard_batch(batch: Tree, rank: int, world: int) -> Tree:
    """The rows of a batch that one of several ranks takes.

    The rule: ``torch.tensor_split(x, world)[rank]`` of every tensor ``x``: consecutive rows; where
    they do not divide, the first ranks have one more; where there are too few, the last have none.

    Args:
        batch: A pytree whose tensors have one row per sample along dim 0, the same on all ranks.
        rank: Which part to take.
        world: How many parts there are.

    Returns:
        A tree like ``batch``, of views.

    Example:
        >>> [shard_batch(torch.arange(5), rank, 3).tolist() for rank in range(3)]
        [[0, 1], [2, 3], [4]]

    References:
        `torch.tensor_split
        <https://docs.pytorch.org/docs/stable/generated/torch.tensor_split.html>`_, leaf by leaf.
    """
    flat = read_batch(batch)
    if not 0 <= rank < world:
        raise ValueError(
            f"rank is {rank!r} and world {world!r}; expected a rank from 0 to world - 1, as "
            "torch.distributed.get_rank() and get_world_size() give."
        )
    rows = rows_to_cut(flat)
    return list(cut(flat, [rows // world + (i < rows % world) for i in range(world)]))[rank]


# Pieces that a step shares --------------------------------------------------------------


def begin_sum(
    state: AccumState, group: Any, claimed: Claim, *more: Tensor, ahead: int = AHEAD
) -> Callable[[], tuple[AccumState, Tensor]]:
    """Begin to add up the states of all ranks, whose gradients are lists and are written to.

    If nobody has looked whether ranks agree, and they do not, the total becomes NaN.

    Args:
        state: The state of this rank.
        group: The ranks.
        claimed: What this rank holds that all should hold.
        more: Further 0-d numbers of this rank, at most one.
        ahead: See ``sum_over_ranks_``.

    Returns:
        A function that waits, and gives the sum and the further numbers of all ranks.
    """
    amounts = {
        "total": state.total,
        "weight": state.weight,
        "microbatches": state.microbatches,
        "skipped": state.skipped,
        "nonfinite": state.nonfinite,
        "weighted": state.weighted,
    }
    numbers = torch.stack([x.double() for x in (*amounts.values(), *more)])
    squares = state.squares.clone() if isinstance(state.squares, Tensor) else ()
    tensors = [*state.grads, *([squares] if isinstance(squares, Tensor) else [])]
    with torch.no_grad():
        wait = sum_over_ranks_(tensors, numbers, group, claimed, ahead=ahead)

    def finish() -> tuple[AccumState, Tensor]:
        with torch.no_grad():
            of_all, agreed = wait()
        sums = of_all[:, : len(amounts)].sum(0).unbind()
        pairs = zip(amounts.items(), sums, strict=True)
        summed = {name: new.to(old.dtype, copy=True) for (name, old), new in pairs}
        if agreed is not None:
            summed["total"] = torch.where(agreed, summed["total"], torch.nan)
        return state._replace(squares=squares, **summed), of_all[:, len(amounts) :]

    return finish


def meet(claimed: Claim, group: Any, number: int = 0) -> Tensor:
    """Compare claims, and give the numbers of all ranks, a float64 vector."""
    numbers = torch.full((1,), number, dtype=torch.float64, device=claimed.few.device)
    with torch.no_grad():
        return sum_over_ranks_([], numbers, group, claimed)()[0][:, 0]


def check_group(group: Any) -> None:
    """Check that this process is one of a group."""
    if transform_active():
        raise RuntimeError(
            "ranks cannot be reached from under a torch.func transform or torch.compile; reduce "
            "what comes out of it."
        )
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialised: call torch.distributed.init_process_group(...) "
            "first, in a program that torchrun starts."
        )
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "this process is not a rank of the group that was passed; leave the call to those that "
            "are."
        )
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group is a {type(group).__name__}; expected a process group: dist.group.WORLD, what "
            "dist.new_group(...) returned, or mesh.get_group(...)."
        )
    try:
        dist.get_rank(group)
    except ValueError as error:
        raise RuntimeError(
            "the process group was destroyed, or belongs to another init_process_group(...). Make "
            "the step again, with a group of this one."
        ) from error


def gathered(mine: Tensor, group: Any) -> list[Tensor]:
    """The tensors of all ranks, which have one shape."""
    of_all = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    with between_ranks():
        dist.all_gather(of_all, mine, group=group)
    return of_all


def _states_of_all(state: AccumState, group: Any) -> list[AccumState]:
    leaves, spec = flatten(state)
    columns = [gathered(leaf.contiguous(), group) for leaf in leaves]
    return [unflatten(spec, list(row)) for row in zip(*columns, strict=True)]
