"""States: NamedTuples of tensors, which torch.load reads, and which their owner may give up.

That is donation: a caller gives a state up, its memory is used again, and every later use of one of
its tensors raises an error that says so.
"""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from .dtensors import is_sharded, local, refusing


C = TypeVar("C", bound=type)


# Files ---------------------------------------------------------------------------------------


def loadable(state: C) -> C:
    """Name a class to ``torch.load(file, weights_only=True)``, which makes no other objects.

    States are tuples of tensors, which run nothing when they are made.
    """
    torch.serialization.add_safe_globals([state])
    return state


def make_public(names: dict[str, Any], module: str) -> None:
    """Let classes go by the module that users know, in messages and pickles.

    Otherwise a file that torch.save wrote could not be read after a class has moved.
    """
    ours = module.partition(".")[0]
    for value in names.values():
        if isinstance(value, type) and value.__module__.startswith(f"{ours}."):
            value.__module__ = module


# Donation ------------------------------------------------------------------------------------


class Refusing(torch.Tensor):
    """A tensor that refuses every use with a reason."""

    reason: ClassVar[str]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse."""
        raise RuntimeError(cls.reason)


class Donated(Refusing):
    """A tensor whose memory was given away."""

    reason: ClassVar[str] = (
        "this tensor belongs to a state that was given up with donate=True: its memory now belongs "
        "to the state which that call returned. Use the returned state, or leave donate out where "
        "the old state is still needed."
    )


class Spoiled(Refusing):
    """A donated tensor after an error in the middle of the work on it."""

    reason: ClassVar[str] = (
        "this tensor belongs to a state that was given up with donate=True to a call which failed "
        "in the middle, when some of its numbers had been changed already. Begin again from a "
        "state that was not donated, or from init."
    )


NOTHING = torch.empty(0, device="cpu")


def taken(columns: list[list[Tensor]], donate: bool) -> list[list[Tensor]]:
    """Tensors that may be written to: the donated ones under new names, or copies.

    Where a tensor comes twice (tied leaves) all are copied, so that none is written to twice.
    """
    every = [id(x) for column in columns for x in column]
    if donate and len(set(every)) == len(every):
        return [[x.detach() for x in column] for column in columns]
    return [[x.detach().clone() for x in column] for column in columns]


def hand_over(old: Iterable[Tensor], new: Iterable[Tensor]) -> list[Tensor]:
    """The new tensors, under new names where they are old ones; the old ones are marked."""
    given = {id(tensor): tensor for tensor in old}
    renewed = [tensor.detach() if id(tensor) in given else tensor for tensor in new]
    mark(given.values())
    return renewed


def mark(tensors: Iterable[Tensor], state: type[Refusing] = Donated) -> None:
    """Make tensors refuse every use. Subclasses other than DTensor cannot be marked."""
    for tensor in tensors:
        kind: type = type(tensor)
        if kind is torch.Tensor:
            tensor.data = NOTHING  # a third of the time of set_()
            tensor.__class__ = state
        elif kind is Donated:  # and the call failed later
            tensor.__class__ = state
        elif is_sharded(tensor):  # operations go by the outer tensor, to_local gives the inner one
            mark([local(tensor)], state)
            tensor.__class__ = refusing(state.reason)
