"""Sums over ranks in few collectives: tensors lie end to end in flat buckets.

    first = [claims and numbers of every rank, few gradients]
    all_reduce(first)
    the claims agree? else all ranks raise
    for bucket in buckets(many gradients):  # of one dtype and device, closed at 25 MiB
        all_reduce(bucket)
        what was in it is a view of it from now on

Each rank writes its numbers into a slot of its own, to which all others add zeros: so every rank
has the numbers of all, bit for bit, and adds them up in one order.

gloo ends a process whose collective is longer than that of another. So the first has one length on
all ranks, whatever they are about to sum: the one that they agreed on in the call before. Where
another length is needed, they agree on it first.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from .._base import claims, reprs
from .._base.torch_internals import kernels


CAP = 25 * 2**20  # bytes, where DistributedDataParallel too closes a bucket
AHEAD = 2  # buckets filled while another is under way: more would be a second gradient tree
RANK_NUMBERS = 7  # of a rank, beside its claim
# The most bytes of gradients that travel with those: a collective of 256 KiB takes gloo 396 us, one
# of a few bytes 290.
RIDING = 2**18
FLOATS = torch.float32, torch.float64
# For each group, the room for gradients in its first collective, on which all its ranks agreed: no
# more than these need. Where gradients lie decides in which order ranks are added up, and a run
# that begins anew has to add them up as one that goes on.
Room = tuple[int, torch.dtype]
_rooms: WeakKeyDictionary[Any, Room] = WeakKeyDictionary()


def sum_over_ranks_(
    tensors: list[Tensor],
    numbers: Tensor,
    group: Any,
    claimed: claims.Claim,
    *,
    times: Sequence[Any] | None = None,
    ahead: int = AHEAD,
) -> Callable[[], tuple[Tensor, Tensor | None]]:
    """Begin to sum tensors over the ranks of a group; the sums take their places in the list.

    Tensors have the same shapes and dtypes on every rank, and are given up: a sum may be a view of
    what has travelled, or the tensor itself, written to. Nothing is written to where ranks claim
    different things. ``numbers`` is a float64 vector, at most ``RANK_NUMBERS`` long; each tensor is
    first multiplied by its entry of ``times``; ``ahead`` buckets may be under way at a time. The
    function that is returned waits, and gives the numbers of all ranks, one sample each, and
    whether ranks agree if nobody has looked yet.
    """
    group = dist.group.WORLD if group is None else group
    sums = _Sums(tensors, numbers, group, claimed, times)
    few, need = _riding(sums.parts, numbers.device)
    room = _rooms.setdefault(group, (0, torch.float32))
    if few and need != room:
        sums.send_first(room, [])
        sums.land()
        room = _rooms[group] = need
    sums.send_first(room, few)
    if claimed.look:  # nothing of a length of its own before all ranks are known to agree
        sums.land()
    riding = {*few}
    for members in buckets_of([None if i in riding else x for i, x in enumerate(sums.parts)]):
        if len(sums.sent) == ahead:
            sums.land()
        sums.send(members)
    return sums.wait


def _riding(parts: list[Tensor], device: torch.device) -> tuple[list[int], Room]:
    """Which tensors travel with the numbers, and the room that these need."""
    able = [i for i, x in enumerate(parts) if x.dtype in FLOATS and x.device == device]
    few = [i for i in able if parts[i].dtype == parts[able[0]].dtype]
    need = sum(parts[i].numel() for i in few), parts[few[0]].dtype if few else torch.float32
    return few if need[0] * need[1].itemsize <= RIDING else [], need


class _Sums:
    """Tensors that are sent to be summed, some at a time, and land in the same order."""

    def __init__(
        self, tensors: list[Tensor], numbers: Tensor, group: Any, claimed: claims.Claim, times: Any
    ) -> None:
        self.tensors, self.numbers, self.group, self.claimed = tensors, numbers, group, claimed
        self.parts = [torch.view_as_real(x) if x.is_complex() else x for x in tensors]
        self.times = [1.0] * len(tensors) if times is None else times
        # The members of each, what travels, the numbers of all ranks if they are in it, the work.
        self.sent: deque[tuple[list[int], Tensor, Tensor | None, Any]] = deque()

    def send_first(self, room: Room, members: list[int]) -> None:
        """Send the numbers of this rank, and with them some tensors in as much room."""
        numbers, claimed = self.numbers, self.claimed.numbers()
        unused = numbers.new_zeros(RANK_NUMBERS - len(numbers))
        mine = _encode(torch.cat([claimed, numbers, unused]))
        world, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        flat = torch.zeros(world * len(mine) + room[0], dtype=room[1], device=numbers.device)
        first = flat[: world * len(mine)].view(world, -1)
        first[rank] = mine
        self.begin(members, flat, first)

    def send(self, members: list[int]) -> None:
        one, size = self.parts[members[0]], sum(self.parts[i].numel() for i in members)
        alone = len(members) == 1 and one.is_contiguous()
        self.begin(members, one.view(-1) if alone else one.new_empty(size))

    def begin(self, members: list[int], flat: Tensor, first: Tensor | None = None) -> None:
        """Fill what travels, behind what is first in it, and let it go."""
        rest = flat if first is None else flat[first.numel() :]
        for i, piece in self.pieces(members, rest):
            part, times = self.parts[i], self.times[i]
            if isinstance(times, Tensor) or times != 1:
                torch.mul(part, times, out=piece)
            elif piece.data_ptr() != part.data_ptr():
                piece.copy_(part)
        with claims.between_ranks():
            work: Any = dist.all_reduce(flat, group=self.group, async_op=True)
        self.sent.append((members, rest, first, work))

    def land(self) -> None:
        """Wait for what was sent first, and let its sums take their places."""
        members, flat, first, work = self.sent.popleft()
        with claims.between_ranks():
            work.wait()
        if first is not None:
            self.of_all = _decode(first)
            self.agreed = claims.compare(
                self.claimed, self.of_all[:, : claims.CLAIM_NUMBERS], self.group
            )
        for i, piece in self.pieces(members, flat):
            part = self.parts[i]
            if piece.data_ptr() == part.data_ptr():
                continue
            # Not where that would not free it, or would change strides; numbers may be complex.
            if part.is_contiguous() and kernels.owns_its_memory(part):
                self.tensors[i] = self.parts[i] = piece
            else:
                part.copy_(piece)

    def pieces(self, members: list[int], flat: Tensor) -> list[tuple[int, Tensor]]:
        """The first pieces of a flat tensor, each with the number of the tensor that it is like."""
        likes = [self.parts[i] for i in members]
        sizes = [x.numel() for x in likes]
        pieces = flat[: sum(sizes)].split(sizes)
        return [(i, x.view_as(y)) for i, x, y in zip(members, pieces, likes, strict=True)]

    def wait(self) -> tuple[Tensor, Tensor | None]:
        """Wait for all; the numbers of all ranks, and whether they agree if nobody has looked."""
        while self.sent:
            self.land()
        return self.of_all[
            :, claims.CLAIM_NUMBERS : claims.CLAIM_NUMBERS + len(self.numbers)
        ], self.agreed


def group_of(group: Any) -> Any:
    """A group of which this process is one, or an error that says why it is none."""
    if torch.compiler.is_dynamo_compiling():
        raise RuntimeError(
            "a compiled graph cannot communicate with other ranks. Omit torch.compile, or "
            "compile=True of a step."
        )
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialised. Call torch.distributed.init_process_group(...) "
            "first, in a program that torchrun starts."
        )
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "this process is not a rank of the group. Leave the call to the ranks of the group."
        )
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group is {reprs.kind(group)}; expected a process group. Pass dist.group.WORLD, "
            "or the result of dist.new_group(...) or mesh.get_group(...)."
        )
    try:
        dist.get_rank(group)
    except ValueError as error:
        raise RuntimeError(
            "the process group was destroyed, or belongs to another init_process_group(...). Make "
            "the step again with a group of the current one."
        ) from error
    return dist.group.WORLD if group is None else group


def meet(claimed: claims.Claim, group: Any, number: int = 0) -> Tensor:
    """Compare claims, and give the numbers of all ranks, a float64 vector."""
    numbers = torch.full((1,), number, dtype=torch.float64, device=claimed.few.device)
    with torch.no_grad():
        return sum_over_ranks_([], numbers, group, claimed)()[0][:, 0]


def buckets_of(tensors: Sequence[Tensor | None]) -> list[list[int]]:
    """Where tensors stand that travel together: of one dtype and device, closed beyond the cap."""
    buckets: list[list[int]] = []
    still_open: dict[Any, tuple[list[int], int]] = {}  # a bucket, and its bytes
    for i, x in enumerate(tensors):
        if x is not None:
            bucket, filled = still_open.pop((x.dtype, x.device), ([], 0))
            if not bucket:
                buckets.append(bucket)
            bucket.append(i)
            if filled + x.nbytes < CAP:
                still_open[x.dtype, x.device] = bucket, filled + x.nbytes
    return buckets


# Float64 numbers as integers below 2**16, which float32 holds exactly, and adds to zero exactly.
@cache
def _shifts(device: torch.device) -> Tensor:
    return torch.arange(0, 64, 16, device=device)


def _encode(numbers: Tensor) -> Tensor:
    bits = numbers.view(torch.int64).unsqueeze(1)
    return ((bits >> _shifts(numbers.device)) & 0xFFFF).view(-1)


def _decode(slots: Tensor) -> Tensor:
    pieces = slots.to(torch.int64).view(len(slots), -1, 4)
    return (pieces << _shifts(slots.device)).sum(-1).view(torch.float64)
