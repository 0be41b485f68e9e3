"""Sums over ranks in few collectives: tensors lie end to end in flat buckets.

    for bucket in buckets(tensors):  # of one dtype and device, closed at 25 MiB
        flat = join(bucket)
        all_reduce(flat)
        split flat back

A few numbers of each rank ride along with the gradients. Each rank writes its own into a slot of
its own, to which all others add zeros: so every rank has the numbers of all, bit for bit, and adds
them up in one order. A collective of their own would double the latency of a small model.
"""

from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


CAP = 25 * 2**20  # bytes, where DistributedDataParallel too closes a bucket
AHEAD = 2  # buckets filled while another is under way: more would be a second gradient tree


class Bucket(NamedTuple):
    """Tensors that travel together, and how many numbers of the ranks travel with them."""

    members: list[Tensor]
    dtype: torch.dtype
    device: torch.device
    extra: int = 0

    @property
    def numel(self) -> int:
        """Of the members."""
        return sum(x.numel() for x in self.members)


class Sent(NamedTuple):
    """A bucket under way."""

    bucket: Bucket
    flat: Tensor
    work: Any


def sum_over_ranks_(
    tensors: list[Tensor], numbers: Tensor, group: Any, *, ahead: int = AHEAD
) -> Callable[[], Tensor]:
    """Begin to sum tensors over the ranks of a group, in place.

    Args:
        tensors: Of the same shapes and dtypes on every rank; they belong to the caller.
        numbers: A float64 vector, of the same length on every rank.
        group: The ranks.
        ahead: How many buckets may be under way at a time.

    Returns:
        A function that waits until all is done, and gives the numbers of all ranks, (rank, number).
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    carrier, buckets = _with_numbers(_buckets(tensors), numbers, world)
    carried: list[Tensor] = []
    sent: deque[Sent] = deque()

    def land() -> None:
        bucket, flat, work = sent.popleft()
        with between_ranks():
            work.wait()
        if bucket.extra:
            carried.append(_decode(flat[-bucket.extra :], world))
        at = 0
        for x in bucket.members:
            piece = flat[at : at + x.numel()]
            at += x.numel()
            if piece.data_ptr() != x.data_ptr():
                x.copy_(piece.view(x.shape))

    for i, bucket in enumerate(buckets):
        if len(sent) == ahead:
            land()
        flat = _filled(bucket)
        if i == carrier:
            flat[-bucket.extra :] = _encode(numbers.to(bucket.device), rank, world)
        with between_ranks():
            work = dist.all_reduce(flat, group=group, async_op=True)
        sent.append(Sent(bucket, flat, work))

    def wait() -> Tensor:
        while sent:
            land()
        return carried[0].to(numbers.device)

    return wait


def _buckets(tensors: list[Tensor]) -> list[Bucket]:
    """In order, those of one dtype and device together, each closed where it passes the cap."""
    buckets: list[Bucket] = []
    still_open: dict[Any, int] = {}
    filled: dict[int, int] = {}  # bytes
    for x in tensors:
        x = torch.view_as_real(x) if x.is_complex() else x
        kind = x.dtype, x.device
        at = still_open.get(kind)
        if at is None:
            at = still_open[kind] = len(buckets)
            buckets.append(Bucket([], *kind))
        buckets[at].members.append(x)
        filled[at] = filled.get(at, 0) + x.nbytes
        if filled[at] >= CAP:
            del still_open[kind]
    return buckets


def _with_numbers(buckets: list[Bucket], numbers: Tensor, world: int) -> tuple[int, list[Bucket]]:
    """Which bucket takes the numbers along, and all buckets with that one made longer.

    The smallest: a tensor that fills a bucket alone need not be copied into one.
    """
    able = [i for i, it in enumerate(buckets) if it.dtype in (torch.float32, torch.float64)]
    if not able:
        able = [len(buckets)]
        buckets = [*buckets, Bucket([], torch.float32, numbers.device)]
    carrier = min(able, key=lambda i: buckets[i].numel)
    buckets[carrier] = buckets[carrier]._replace(extra=world * len(numbers) * len(_SHIFTS))
    return carrier, buckets


def _filled(bucket: Bucket) -> Tensor:
    if len(bucket.members) == 1 and not bucket.extra and bucket.members[0].is_contiguous():
        return bucket.members[0].view(-1)
    size = bucket.numel + bucket.extra
    flat = torch.empty(size, dtype=bucket.dtype, device=bucket.device)
    at = 0
    for x in bucket.members:
        flat[at : at + x.numel()].view(x.shape).copy_(x)
        at += x.numel()
    return flat


# Float64 numbers as integers below 2**16, which float32 holds exactly, and adds to zero exactly.
_SHIFTS = (0, 16, 32, 48)


def _encode(numbers: Tensor, rank: int, world: int) -> Tensor:
    bits = numbers.view(torch.int64)
    slots = torch.zeros(world, len(numbers), len(_SHIFTS), dtype=torch.int64, device=bits.device)
    for i, shift in enumerate(_SHIFTS):
        slots[rank, :, i] = (bits >> shift) & 0xFFFF
    return slots.view(-1)


def _decode(slots: Tensor, world: int) -> Tensor:
    pieces = slots.to(torch.int64).view(world, -1, len(_SHIFTS))
    shifted = [pieces[..., i] << shift for i, shift in enumerate(_SHIFTS)]
    return torch.stack(shifted).sum(0).view(torch.float64)


@contextmanager
def between_ranks() -> Generator[None]:
    """Say what an error of a collective means here."""
    try:
        yield
    except RuntimeError as error:
        error.add_note(
            "pureaccum: the sums of the ranks could not be added up. Another rank has died or has "
            "raised an error, or did not come to this point within the group's timeout; its own "
            "message says more. The training state before this step is as it was."
        )
        raise
