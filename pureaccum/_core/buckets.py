"""Sums over ranks in few collectives: tensors lie end to end in flat buckets.

    first = [claims and numbers of every rank, few gradients]
    all_reduce(first)
    the claims agree? else all ranks raise
    for bucket in buckets(many gradients):  # of one dtype and device, closed at 25 MiB
        all_reduce(bucket)
        split it back

Each rank writes its numbers into a slot of its own, to which all others add zeros: so every rank
has the numbers of all, bit for bit, and adds them up in one order.

gloo ends a process whose collective is longer than that of another. So the first has one length on
all ranks, whatever they are about to sum: the one that they agreed on in the call before. Where
another length is needed, they agree on it first.
"""

from collections import deque
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from .._base import CLAIM_NUMBERS as CLAIMED
from .._base import Claim, between_ranks, compare, patience, shared_store


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


class Bucket(NamedTuple):
    """Tensors that travel together."""

    members: list[Tensor]
    dtype: torch.dtype
    device: torch.device


class Sent(NamedTuple):
    """A collective under way, and where in it the numbers of all ranks are, if they are in it."""

    members: list[Tensor]
    flat: Tensor
    numbers: Tensor | None
    work: Any


def sum_over_ranks_(
    tensors: list[Tensor], numbers: Tensor, group: Any, claimed: Claim, *, ahead: int = AHEAD
) -> Callable[[], tuple[Tensor, Tensor | None]]:
    """Begin to sum tensors over the ranks of a group, in place.

    Nothing is written to where ranks turn out to claim different things.

    Args:
        tensors: Of the same shapes and dtypes on every rank; they belong to the caller.
        numbers: A float64 vector, at most ``RANK_NUMBERS`` long.
        group: The ranks.
        claimed: What this rank holds that all should hold.
        ahead: How many buckets may be under way at a time.

    Returns:
        A function that waits until all is done, and gives the numbers of all ranks, one row each,
        and whether ranks agree if nobody has looked yet.
    """
    group = dist.group.WORLD if group is None else group
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    if group not in _rooms:
        _arrive(group, numbers.device)
        _rooms[group] = 0, torch.float32
    room = _rooms.get(group, (0, torch.float32))
    parts = [torch.view_as_real(x) if x.is_complex() else x for x in tensors]
    able = [x for x in parts if x.dtype in FLOATS and x.device == numbers.device]
    few = [x for x in able if x.dtype == able[0].dtype]
    need = sum(x.numel() for x in few), few[0].dtype if few else torch.float32
    if sum(x.nbytes for x in few) > RIDING:
        few = []
    riding = {*map(id, few)}
    slots = torch.cat([claimed.numbers(), numbers, numbers.new_zeros(RANK_NUMBERS - len(numbers))])
    sent: deque[Sent] = deque()
    of_all, agreed = slots, None

    def send_first(room: Room, members: list[Tensor]) -> None:
        """Send the numbers of this rank, and with them gradients in as much room."""
        mine = _encode(slots)
        before = world * len(mine)
        flat = torch.zeros(before + room[0], dtype=room[1], device=slots.device)
        first, rest = flat[:before].view(world, -1), flat[before:]
        first[rank] = mine
        _fill(rest, members)
        sent.append(Sent(members, rest, first, _summed(flat, group)))

    def land() -> None:
        nonlocal of_all, agreed
        members, flat, first, work = sent.popleft()
        with between_ranks():
            work.wait()
        if first is not None:
            of_all = _decode(first)
            agreed = compare(claimed, of_all[:, :CLAIMED], group)
        at = 0
        for x in members:
            piece = flat[at : at + x.numel()]
            at += x.numel()
            if piece.data_ptr() != x.data_ptr():
                x.copy_(piece.view(x.shape))

    if few and need != room:
        send_first(room, [])
        land()
        _rooms[group] = room = need
    send_first(room, few)
    if claimed.look:  # nothing of a length of its own before all ranks are known to agree
        land()
    for bucket in buckets_of([x for x in parts if id(x) not in riding]):
        if len(sent) == ahead:
            land()
        flat = _filled(bucket)
        sent.append(Sent(bucket.members, flat, None, _summed(flat, group)))

    def wait() -> tuple[Tensor, Tensor | None]:
        while sent:
            land()
        return of_all[:, CLAIMED : CLAIMED + len(numbers)], agreed

    return wait


def group_of(group: Any) -> Any:
    """A group of which this process is one, or an error that says why it is none."""
    if torch.compiler.is_dynamo_compiling():
        raise RuntimeError(
            "ranks cannot be reached from inside of a graph: leave torch.compile, or compile=True "
            "of a step, out."
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
    return dist.group.WORLD if group is None else group


def _arrive(group: Any, device: torch.device) -> None:
    """Wait until all ranks of a group are about to use it for the first time.

    Ranks that were given different groups would wait for one another without end: one that finds
    another waiting for it elsewhere tells it so, and both raise. Whoever does not come in the time
    of the group is left to the collective that follows, which then says so.
    """
    store, me, ranks = shared_store(), dist.get_rank(), dist.get_process_group_ranks(group)
    if len(ranks) == 1:
        return
    here = f"{group.group_name!r}, of ranks {', '.join(map(str, ranks))}"
    mine = f"pureaccum/wait {store.add(f'pureaccum/waits of {me}', 1)} of {me}"
    arrived = store.add(f"pureaccum/{here}", 1)
    store.set(f"pureaccum/{me}", f"{mine}|{here}")
    until, pause, told = monotonic() + patience(group, device), 0.001, ""
    while arrived < len(ranks) and not told and monotonic() < until:
        sleep(pause)
        pause = min(2 * pause, 1.0)
        arrived = store.add(f"pureaccum/{here}", 0)
        # Many ranks ask one store: not before it is likely, which is after half a second.
        waiting = _waiting(store, ranks) if pause > 0.25 else []
        if store.check([mine]):  # a rank that has gone on had told this one before
            told = store.get(mine).decode()
        for rank, its, there in waiting:
            those = there.partition(", of ranks ")[2].split(", ")
            apart = there != here and str(me) in those
            if not told and apart and store.add(f"pureaccum/{there}", 0) < len(those):
                told = f"rank {rank} at {there}"
                _tell(store, its, there, f"rank {me} at {here}")
    store.set(f"pureaccum/{me}", "")
    if told:
        _tell(store, mine, here, told)
        raise ValueError(
            f"the ranks do not use the same group: rank {me} is at {here}, and {told}, and each "
            "waits for the other. Give all ranks the same group, in the same order."
        )


def _tell(store: Any, its: str, there: str, text: str) -> None:
    """End a wait, which counts no more where it was."""
    if store.add(f"{its}, told", 1) == 1:  # one rank may be told by several
        store.add(f"pureaccum/{there}", -1)
        store.set(its, text)


def _waiting(store: Any, ranks: list[int]) -> list[tuple[int, str, str]]:
    """The ranks that wait and have not been told: which wait it is, and at which group."""
    known = [r for r in ranks if store.check([f"pureaccum/{r}"])]
    waits = [(r, *store.get(f"pureaccum/{r}").decode().split("|")) for r in known]
    return [(wait[0], wait[1], wait[2]) for wait in waits if wait[1] and not store.check([wait[1]])]


def meet(claimed: Claim, group: Any, number: int = 0) -> Tensor:
    """Compare claims, and give the numbers of all ranks, a float64 vector."""
    numbers = torch.full((1,), number, dtype=torch.float64, device=claimed.few.device)
    with torch.no_grad():
        return sum_over_ranks_([], numbers, group, claimed)()[0][:, 0]


def _summed(flat: Tensor, group: Any) -> Any:
    with between_ranks():
        return dist.all_reduce(flat, group=group, async_op=True)


def buckets_of(tensors: list[Tensor]) -> list[Bucket]:
    """The tensors in order, those of one dtype and device together, closed beyond the cap."""
    buckets: list[Bucket] = []
    still_open: dict[Any, int] = {}
    filled: dict[int, int] = {}  # bytes
    for x in tensors:
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


def _filled(bucket: Bucket) -> Tensor:
    members, dtype, device = bucket
    if len(members) == 1 and members[0].is_contiguous():
        return members[0].view(-1)
    flat = torch.empty(sum(x.numel() for x in members), dtype=dtype, device=device)
    _fill(flat, members)
    return flat


def _fill(flat: Tensor, members: list[Tensor]) -> None:
    at = 0
    for x in members:
        flat[at : at + x.numel()].view(x.shape).copy_(x)
        at += x.numel()


# Float64 numbers as integers below 2**16, which float32 holds exactly, and adds to zero exactly.
_SHIFTS = (0, 16, 32, 48)


def _encode(numbers: Tensor) -> Tensor:
    bits = numbers.view(torch.int64)
    return torch.stack([(bits >> shift) & 0xFFFF for shift in _SHIFTS], 1).view(-1)


def _decode(slots: Tensor) -> Tensor:
    pieces = slots.to(torch.int64).view(len(slots), -1, len(_SHIFTS))
    shifted = [pieces[..., i] << shift for i, shift in enumerate(_SHIFTS)]
    return torch.stack(shifted).sum(0).view(torch.float64)
