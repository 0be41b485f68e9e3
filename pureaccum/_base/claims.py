"""What all ranks should hold alike, and an error on all of them where they do not.

    each rank makes a claim: three numbers, which travel with the first reduction
    the claims agree?  go on
    else               each rank tells the others in words what it holds, and all raise one error

All ranks see the claims of all, and so they all take the same branch.
"""

import ctypes
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, reduce
from itertools import count
from typing import Any, NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from . import containers, dtensors, trees
from .torch_internals import functorch


CLAIM_NUMBERS = 3  # in a claim
FEW = 2  # numbers at most in a leaf that is compared at every call: a count, scale, rate or key
NOT_READ = -1
Table = dict[str, str]  # what a rank holds, by name


class Agreement(NamedTuple):
    """What is known between the calls of one function that several ranks call together.

    Attributes:
        settings: What the function was made with, by name.
        calls: Counts the calls; calls 1, 2, 4, 8, … compare more than the others.
        kinds: The checksums of structures that were met before.
    """

    settings: Table
    calls: Any
    kinds: dict[Any, int]


def agreement(settings: Table) -> Agreement:
    """What is known before the first call."""
    return Agreement(settings, count(1), {})


class Claim(NamedTuple):
    """What a rank holds that all should hold alike: as numbers below 2**53, and in words.

    Attributes:
        kind: A checksum of the call, of its settings, and of names, shapes and dtypes.
        bits: A checksum of all values; ``NOT_READ`` at most calls.
        few: A checksum of the small leaves, for which the host reads nothing from a device: a 0-d
            float64 tensor on the device of the reduction.
        look: Whether the host compares at this call, and waits for that.
        words: ``words()`` gives what the checksums are of, from the outside to the inside.
        cause: What may have happened where ranks differ.
    """

    kind: int
    bits: int
    few: Tensor
    look: bool
    words: Callable[[], list[Table]]
    cause: str

    def numbers(self) -> Tensor:
        """The three numbers, on the device of the reduction."""
        host = torch.tensor([self.kind, self.bits], dtype=torch.float64, device="cpu")
        return torch.cat([self.few[None], host.to(self.few.device, non_blocking=True)])


def claim(
    agreed: Agreement,
    call: str,
    kinds: Mapping[str, trees.Tree],
    values: Mapping[str, trees.Tree],
    device: torch.device,
    cause: str,
    *,
    whole: bool | None = None,
) -> Claim:
    """The claim of this rank.

    Args:
        agreed: What is known from earlier calls.
        call: Where in the program this rank is.
        kinds: Trees that have one structure on all ranks, by their names.
        values: Trees that have the same bits on all ranks, by their names.
        device: The device of the reduction with which the numbers travel.
        cause: What may have happened where ranks differ.
        whole: Whether to read all values. None reads them at the first call, and at calls 2, 4, 8,
            … too where nobody waits for that.
    """
    flat = {root: trees.flatten(tree) for root, tree in (*values.items(), *kinds.items())}
    looks = tuple((root, spec, *map(_look, leaves)) for root, (leaves, spec) in flat.items())
    flat = {root: flat[root] for root in values}  # what is summed is given up, and must be free
    kind = agreed.kinds.get((call, looks))
    new, turn, here = kind is None, False, device.type == "cpu"
    if whole is None:
        number = next(agreed.calls)
        turn = number & (number - 1) == 0
        whole = new or (turn and here)

    def told() -> list[Table]:
        return [{"the call": call, **agreed.settings}, _kinds_in_words(looks)]

    if kind is None:
        kind = agreed.kinds[call, looks] = crc32(repr(told()).encode())
    leaves = [x for of_tree, _ in flat.values() for x in of_tree if isinstance(x, Tensor)]
    return Claim(
        kind=kind,
        bits=reduce(lambda check, x: checksum(dtensors.local(x), check), leaves, 0)
        if whole
        else NOT_READ,
        few=_small([x for x in leaves if x.numel() <= FEW], device),
        look=new or turn or here,
        words=lambda: [*told(), _values_in_words(flat)],
        cause=cause,
    )


def _look(leaf: Any) -> Any:
    return (leaf.dtype, leaf.shape) if isinstance(leaf, Tensor) else type(leaf)


def _kinds_in_words(looks: Iterable[tuple[Any, ...]]) -> Table:
    """What each leaf is, and their order."""
    alike = {
        name: f"{look[0]} of shape {tuple(look[1])}" if isinstance(look, tuple) else str(look)
        for root, spec, *of_tree in looks
        for name, look in zip(trees.paths(spec, root), of_tree, strict=True)
    }
    return {**alike, "the order of the leaves": ", ".join(alike)}


def _values_in_words(flat: Mapping[str, trees.Flat]) -> Table:
    """Counts, scales and rates first: they say more than checksums."""
    named = [
        pair
        for root, (leaves, spec) in flat.items()
        for pair in zip(trees.paths(spec, root), leaves, strict=True)
    ]
    named.sort(key=lambda it: it[1].numel() if isinstance(it[1], Tensor) else 0)
    return {name: value_in_words(leaf) for name, leaf in named}


def compare(mine: Claim, of_all: Tensor, group: Any) -> Tensor | None:
    """Raise on all ranks if claims differ.

    Args:
        mine: The claim of this rank.
        of_all: The claims of all, (rank, number).
        group: The ranks.

    Returns:
        None where the host has compared; otherwise whether the claims agree, as a 0-d tensor.
    """
    if not mine.look:
        return (of_all[:, :2] == of_all[0, :2]).all()
    few, kind, bits = map(set, of_all.t().tolist())
    if len(kind) == len(few) == 1 and len(bits - {NOT_READ}) <= 1:
        return None
    tables: list[Any] = [None] * len(of_all)
    with between_ranks():
        dist.all_gather_object(tables, mine.words(), group=group)
    found = next(filter(None, map(differences, zip(*tables, strict=True))), "their bits differ.")
    raise ValueError(f"the ranks of the group do not hold the same values: {found} {mine.cause}")


def differences(of_ranks: tuple[Table, ...]) -> str:
    """What differs, if anything does: "lr is 0.1 on ranks 0, 2, 3 and 0.2 on rank 1."."""
    found: list[str] = []
    for name in {name: None for table in of_ranks for name in table}:
        by_text: dict[str, list[str]] = {}
        for rank, table in enumerate(of_ranks):
            by_text.setdefault(table.get(name, "absent"), []).append(str(rank))
        if len(by_text) > 1:
            each = [
                f"{text if len(text) < 80 else text[:77] + '...'} on "
                f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks)}"
                for text, ranks in by_text.items()
            ]
            found.append(f"{name} is {' and '.join(each)}")
    more = f" {len(found) - 3} more differ." if len(found) > 3 else ""
    return f"{'; '.join(found[:3])}.{more}" if found else ""


@contextmanager
def between_ranks(
    what: str = "the ranks could not add up their sums",
    after: str = "The training state before this step is unchanged.",
) -> Generator[None]:
    """Add to an error of a collective what it means here."""
    try:
        yield
    except RuntimeError as error:
        error.add_note(
            f"pureaccum: {what}. Likely cause: another rank died, raised an error, or did not "
            "reach this point within the timeout of this group. Its own message says more. "
            f"{after}"
        )
        raise


# One form on all ranks -------------------------------------------------------------------


def nothing_of(held: trees.Tree, device: torch.device) -> Tensor:
    """A zero that every transform follows which maps or follows one of some tensors."""
    zero = functorch.zero_of_all_levels(device)
    for x in containers.open_tree(held)[0]:
        if isinstance(x, Tensor) and functorch.followed(x, functorch.transform_level() or 0)[0]:
            zero = zero + trees.real_parts(x).reshape(-1)[:0].sum().to(zero)
    return zero


def tied(tree: trees.Tree, zero: Tensor) -> trees.Tree:
    """The same numbers in one form on all ranks: transforms follow them as they do a zero.

    What a rank computes from no samples no transform would follow, and the others would wait for
    it.
    """
    return trees.tree_map(lambda x: torch.where(zero == 0, x, zero.to(x.device, x.dtype)), tree)


# Tensors as numbers and as words ---------------------------------------------------------


def value_in_words(x: Any) -> str:
    """The numbers of a small tensor, and of a larger one its shape and checksum."""
    if not isinstance(x, Tensor):
        return repr(x)
    x = x.detach()
    if x.numel() <= FEW and bool((x == x).all()):  # NaN has many bits, and one name
        return str(x.tolist())
    return f"{tuple(x.shape)} with checksum {checksum(dtensors.local(x)):08x}"


def _small(tensors: list[Tensor], device: torch.device) -> Tensor:
    """A checksum of small tensors, on a device; the host reads only those that lie on a CPU."""
    here = crc32(repr([x.tolist() for x in tensors if x.device.type == "cpu"]).encode())
    checksum = torch.tensor(here, dtype=torch.float64, device="cpu").to(device, non_blocking=True)
    there = [x for x in tensors if x.device.type != "cpu"]
    return checksum + _mixed(there, device) if there else checksum


@cache
def _factors(size: int, device: torch.device) -> Tensor:
    """An odd number for each place, so that what differs in two places does not cancel."""
    odd = torch.arange(1, 2 * size, 2, dtype=torch.int64, device=device)
    return odd * 0x1E3779B97F4A7C15


def _mixed(tensors: list[Tensor], device: torch.device) -> Tensor:
    """A checksum that no host reads: of integers, which wrap in the same way everywhere."""
    integers: list[Tensor] = []
    for x in tensors:
        x = trees.real_parts(x.detach())
        x = x.double().view(torch.int64) if x.is_floating_point() else x.to(torch.int64)
        integers.append(x.to(device).reshape(-1))
    numbers = torch.cat(integers)
    mixed = numbers * _factors(len(numbers), device)
    mixed = (mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9
    return (mixed.sum() >> 12).double()  # 52 bits: float64 holds their sum with the 32 of a crc


# The bytes of a tensor -------------------------------------------------------------------------


# A piece of that size is still in the core's cache when it is written after its checksum was taken.
STEP = 2**20


def rows_as_bytes(x: Tensor) -> Tensor:
    """The numbers of a tensor, or their bits, on the host and row by row; copied if need be."""
    x = x.detach().resolve_conj().resolve_neg()
    return (x if x.is_contiguous() else bits(x).contiguous()).cpu()


def bits(x: Tensor) -> Tensor:
    """The same memory as integers: torch can hold numbers of some dtypes, and not copy them."""
    as_wide = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.view(as_wide.get(x.itemsize, x.dtype))


def memory(x: Tensor) -> Iterator[memoryview]:
    """The memory of a tensor that ``rows_as_bytes`` gave, or of an empty one that is filled."""
    size = x.nbytes
    if size:
        whole = memoryview((ctypes.c_ubyte * size).from_address(x.data_ptr()))
        for i in range(0, size, STEP):
            yield whole[i : i + STEP] if size > STEP else whole


def checksum(x: Tensor, before: int = 0) -> int:
    """The crc32 of a tensor's bytes, continued from that of other bytes."""
    for part in memory(rows_as_bytes(x)):
        before = crc32(part, before)
    return before
