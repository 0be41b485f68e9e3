"""A batch that is spread over ranks: sums and samples of all ranks, inside a function or after it.

    state = all_reduce(state)  # on every rank: sums of gradients, totals, weights and counts

Accumulation is a monoid, so ranks are one more way to cut a batch. They may have different numbers
of samples and of microbatches, or none, and the result is the state of one process with all of
them. ``make_step(..., group=...)`` does this at the end of each step. ``psum`` and ``gather`` (see
``_core/exchange.py``) reach other ranks from inside a function that is differentiated. Along the
way ranks check that they hold the same things (see ``_base/claims.py``).
"""

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Classes that users find here are of this module.
from ._base import claims, dtensors, reprs, states, trees
from ._base.torch_internals import modes
from ._core import batches, buckets, ledger
from ._core.exchange import exchange, gather_one


__all__ = ["Pending", "all_reduce", "gather", "psum", "shard_batch"]


# Inside of a function ------------------------------------------------------------------------


def psum(tree: trees.Tree, group: Any = None) -> trees.Tree:
    """Sum a tree over ranks, inside a function that is differentiated.

    The rule: every rank gets the sum of each tensor over all ranks. For the mean of a batch that is
    spread over ranks, compute ``s, n = psum((x.sum(0), count))`` and divide: ``s / n``.

    Derivatives of any order are those of the sum of the results of all ranks, which is what a step
    with ``group`` sums. You can call it in a loss, under torch.func's transforms, and in a
    microbatched function if all ranks have the same number of microbatches. All ranks must call it
    in the same order. Tensors of one dtype travel together.

    Args:
        tree: A pytree of tensors, with the same shapes and dtypes on all ranks.
        group: A process group; None is all processes.

    Returns:
        New tensors. Float16 and bfloat16 are summed in float32 and rounded once.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> torch.func.grad(lambda x: psum(x).square())(torch.tensor(3.0))
        tensor(6.)
        >>> dist.destroy_process_group()

    References:
        `jax.lax.psum <https://docs.jax.dev/en/latest/_autosummary/jax.lax.psum.html>`_
    """
    _check_tensors(tree, "psum")
    return exchange("psum", tree, group)


def gather(samples: trees.Tree, group: Any = None) -> trees.Tree:
    """Concatenate the samples of all ranks, inside a function that is differentiated.

    The rule: ``torch.cat`` of the samples of rank 0, 1, 2, …, on every rank. A contrastive loss
    over a batch that is spread over ranks compares a rank's own samples with those of all ranks::

        z = microbatch(embed)(params, batch)  # this rank's samples
        loss = of_pairs(z, gather(z))

    Ranks may have different numbers of samples, or none. Derivatives are as for ``psum``: a
    sample's cotangents are summed over ranks and returned to the rank that has the sample.

    Args:
        samples: A pytree of tensors with one row per sample along dim 0. Except for the number of
            samples, shapes and dtypes are the same on all ranks.
        group: A process group; None is all processes.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> gather({"z": torch.tensor([[1.0, 2.0]])})
        {'z': tensor([[1., 2.]])}
        >>> dist.destroy_process_group()

    References:
        `jax.lax.all_gather <https://docs.jax.dev/en/latest/_autosummary/jax.lax.all_gather.html>`_
    """
    _check_tensors(samples, "gather")
    batches.need_rows(batches.read_batch(samples, "samples"), "samples")
    return exchange("gather", samples, group)


def _check_tensors(tree: trees.Tree, call: str) -> None:
    leaves, spec = trees.flatten(tree)
    for i, x in enumerate(leaves):
        if not isinstance(x, Tensor) or (x.dtype == torch.bool and call == "psum"):
            came = x.dtype if isinstance(x, Tensor) else reprs.kind(x)
            raise TypeError(
                f"{trees.paths(spec, 'tree')[i]}, given to {call}, is {came}; expected a tensor"
                f"{' of numbers' if call == 'psum' else ''}."
            )
    dtensors.refuse_sharded(
        leaves, "the tree", f"{call} needs values that each rank holds whole. Pass x.full_tensor()."
    )


# After it ------------------------------------------------------------------------------------


_AGREED = claims.agreement({})  # among ranks that call all_reduce


class Pending(NamedTuple):
    """A reduction in progress, which ``all_reduce(..., async_op=True)`` returns.

    Attributes:
        wait: ``wait()`` waits for the reduction and returns the merged state.

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
    """

    wait: Callable[[], ledger.AccumState]

    __repr__ = reprs.of_record


def all_reduce(
    state: ledger.AccumState,
    group: Any = None,
    *,
    merge: Callable[[ledger.AccumState, ledger.AccumState], ledger.AccumState] | None = None,
    donate: bool = False,
    async_op: bool = False,
) -> Any:
    """Merge the accumulator states of all ranks, and return the result on every rank.

    The rule: the ``merge`` of the states of rank 0, 1, 2, …

    Totals, weights, counts and the gradients of a small model travel in one collective. Other
    gradients travel in flat buckets of up to 25 MiB, separately for each dtype and device. The
    result has the same bits on all ranks. If states differ in structure, all ranks raise a
    ``ValueError`` that names the difference.

    Args:
        state: The state of any accumulator; one without updates adds nothing.
        group: A process group; None is all processes.
        merge: The ``merge`` of an accumulator whose ``reduce`` is a ``Reducer`` of your own, if
            adding its numbers would be wrong. Every rank then gathers the states of all ranks
            first.
        donate: Whether the reduction reuses the memory of ``state``.
        async_op: Whether to return a ``Pending`` while the reduction runs; its ``wait()`` returns
            the state. On a CPU the call returns once all ranks have called it.

    Example:
        >>> from pureaccum import accumulator
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> acc = accumulator(lambda w, x: (w * x).mean())
        >>> w = torch.tensor(2.0)
        >>> state = acc.update(acc.init(w), w, torch.tensor([1.0, 3.0]))  # this rank's samples
        >>> acc.finalize(all_reduce(state))
        (tensor(2.), tensor(4., dtype=torch.float64))
        >>> dist.destroy_process_group()

    References:
        `torch.distributed.all_reduce <https://docs.pytorch.org/docs/stable/distributed.html>`_
    """
    ledger.read_state(state)
    if modes.transform_active():
        raise RuntimeError(
            "all_reduce does not work under a transform or torch.compile. Reduce the result "
            "outside of it, or use psum, which transforms differentiate."
        )
    group = buckets.group_of(group)
    leaves, spec = trees.flatten(state.grads)
    dtensors.refuse_sharded(
        leaves,
        "state.grads",
        "finalize and the end of a step sum those over their mesh, so leave out all_reduce.",
    )
    for i, leaf in enumerate(leaves):
        if merge is None and leaf.dtype == torch.bool:
            raise TypeError(
                f"{trees.paths(spec, 'state.grads')[i]} is torch.bool, which has no sum. Pass "
                "merge=acc.merge, the accumulator's own, which knows how to add it."
            )
    if merge is not None and async_op:
        raise ValueError(
            "async_op=True does not work with merge, which has to wait for every rank."
        )
    call = "all_reduce" if merge is None else "all_reduce(merge=...)"
    cause = (
        "Sum states of the same params, and call the same functions in the same order on all "
        "ranks. Likely cause: another model or another accumulator on one of them."
    )
    kinds, device = {"state": state}, state.total.device
    claimed = claims.claim(_AGREED, call, kinds, {}, device, cause, whole=False)
    if merge is not None:
        buckets.meet(claimed, group)
        merged = reduce(merge, _states_of_all(state, group))
        if donate:
            states.mark(trees.tree_leaves(state))
        return merged
    given = trees.tree_leaves(state)
    if hasattr(state.grads, "around"):  # moments, around the mean of this rank
        buckets.meet(claimed, group)
        first, weight = psum((state.grads.first, state.grads.weight), group)
        state = state._replace(grads=state.grads.around(first, weight))
    own = [x.detach() if donate else x.clone() for x in trees.tree_leaves(state)]
    work = trees.unflatten(trees.flatten(state)[1], own)._replace(grads=own[: len(leaves)])
    if donate:  # before anything is written, so that an error leaves nothing half added
        states.mark(given)
    ahead = len(own) if async_op else buckets.AHEAD
    del own  # work has them, and drops them one by one
    wait = begin_sum(work, group, claimed, ahead=ahead)

    def finish() -> ledger.AccumState:
        merged, _ = wait()
        return merged._replace(grads=trees.unflatten(spec, merged.grads))

    return Pending(finish) if async_op else finish()


def shard_batch(batch: trees.Tree, rank: int, world: int) -> trees.Tree:
    """Return the samples of a batch that one of several ranks takes.

    The rule: ``torch.tensor_split(x, world)[rank]`` of every tensor ``x``: consecutive samples. If
    the number of samples is not divisible by ``world``, the first ranks have one more. If there are
    fewer samples than ranks, the last ranks have none.

    Args:
        batch: A pytree whose tensors have one row per sample along dim 0, the same on all ranks.
        rank: The index of the part to return, from 0.
        world: The number of parts.

    Returns:
        A tree like ``batch``, of views.

    Example:
        >>> [shard_batch(torch.arange(5), rank, 3).tolist() for rank in range(3)]
        [[0, 1], [2, 3], [4]]

    References:
        `torch.tensor_split
        <https://docs.pytorch.org/docs/stable/generated/torch.tensor_split.html>`_, leaf by leaf.
    """
    flat = batches.read_batch(batch)
    rows = batches.rows_to_cut(flat)
    if not 0 <= rank < world:
        raise ValueError(
            f"rank is {rank!r} and world {world!r}; expected a rank from 0 to world - 1, as "
            "torch.distributed.get_rank() and get_world_size() give."
        )
    return list(
        batches.cut_batch(flat, [rows // world + (i < rows % world) for i in range(world)])
    )[rank]


# Pieces that a step shares --------------------------------------------------------------


def begin_sum(
    state: ledger.AccumState,
    group: Any,
    claimed: claims.Claim,
    *more: Tensor,
    unit: Any = 1.0,
    ahead: int = buckets.AHEAD,
) -> Callable[[], tuple[ledger.AccumState, Tensor]]:
    """Begin to sum the states of all ranks, whose gradients are lists that it may overwrite.

    If nobody has checked whether ranks agree, and they do not, the total becomes NaN.

    Args:
        state: The state of this rank.
        group: The ranks.
        claimed: What this rank holds that all should hold.
        more: Further 0-d numbers of this rank, at most one.
        unit: The factor that the gradients of this rank must still be multiplied by.
        ahead: See ``sum_over_ranks_``.

    Returns:
        A function that waits, and returns the sum and the further numbers of all ranks.
    """
    amounts = {
        "total": state.total,
        "weight": state.weight if state.weight.dim() == 0 else state.weight.sum(),
        "microbatches": state.microbatches,
        "skipped": state.skipped,
        "nonfinite": state.nonfinite,
        "weighted": state.weighted,
    }
    numbers = torch.stack([x.double() for x in (*amounts.values(), *more)])
    sums, times = state.grads, [unit] * len(state.grads)  # the list itself: nothing is held twice
    vectors = [x for x in (state.weight, state.squares) if isinstance(x, Tensor) and x.dim()]
    sums += [x.clone() for x in vectors]
    times += [1.0] * len(vectors)
    with torch.no_grad():
        wait = buckets.sum_over_ranks_(sums, numbers, group, claimed, times=times, ahead=ahead)

    def finish() -> tuple[ledger.AccumState, Tensor]:
        with torch.no_grad():
            of_all, agreed = wait()
        of_ranks = of_all[:, : len(amounts)].sum(0).unbind()
        pairs = zip(amounts.items(), of_ranks, strict=True)
        summed = {name: new.to(old.dtype, copy=True) for (name, old), new in pairs}
        if agreed is not None:
            summed["total"] = torch.where(agreed, summed["total"], torch.nan)
        squares = sums.pop() if isinstance(state.squares, Tensor) else ()
        if state.weight.dim():
            summed["weight"] = sums.pop()
        return state._replace(squares=squares, **summed), of_all[:, len(amounts) :]

    return finish


def _states_of_all(state: ledger.AccumState, group: Any) -> list[ledger.AccumState]:
    leaves, spec = trees.flatten(state)
    with torch.no_grad():
        columns = [gather_one(leaf, group) for leaf in leaves]
    return [trees.unflatten(spec, list(row)) for row in zip(*columns, strict=True)]
