"""Captured tensors, found in the operations that use them.

    with active(finding):
        func(...)  # is given captured tensors that are followed detached, and they are remembered
    with active(Giving(...)):
        func(...)  # is given others in their place

So a tensor is found wherever it comes from: a closure, a module, a function that calls this one.
Each operation takes some 10 µs for it, which is why recomputation.py asks autograd's graph first.
"""

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._base import checks
from .._base.torch_internals import autograd, functorch, kernels, modes
from . import precision


# Tensors by their ids. An id alone may be that of one that has died.
References = dict[int, ReferenceType[Tensor]]


class UnseenError(BaseException):
    """Something captured is followed and cannot be exchanged. Only the caller may catch this."""


def captures_are_sought() -> bool:
    """Whether a function runs here whose captured tensors are looked for in its operations."""
    return checks.here.seeks is not None


def note_made(tensors: Iterable[Tensor], watch: "Watch | None" = None) -> None:
    """Say that tensors were made inside of the functions that run now, where they cannot see it."""
    watch = watch or checks.here.seeks
    while watch is not None:
        watch.note(tensors)
        watch = watch.outer


def exchanged(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors that the function around gives in place of some, as to an operation."""
    watch: Watch | None = checks.here.seeks
    if watch is None:
        return tensors
    with modes.unnoticed():
        given = [watch.given_for(x) for x in tensors]
        watch.settle(True)
    return given


@contextmanager
def active(watch: "Watch") -> Generator[None]:
    """Let operations be watched."""
    before, checks.here.seeks = checks.here.seeks, watch
    watch.outer = before
    try:
        with watch:
            yield
    finally:
        checks.here.seeks = before


class Watch(TorchFunctionMode):
    """Exchanges tensors in the arguments of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.outer: Watch | None = None
        self.made: References = {}  # what was made inside, or given to the function
        self.used: set[int] = set()  # which captured tensors
        self.used_now: set[int] = set()  # by the operation that runs

    def given_for(self, x: Tensor) -> Tensor:
        """What an operation is given in place of a tensor."""
        raise NotImplementedError

    def is_made(self, x: Tensor) -> bool:
        """Whether a tensor was made inside of the function, or given to it."""
        return _holds(self.made, x)

    def from_outside(self, x: Tensor) -> Tensor:
        """The tensor that the function around this one is given in place of one."""
        return x if self.outer is None or self.is_made(x) else self.outer.given_for(x)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") == "__get__" and not isinstance(
            out := func(*args), Tensor
        ):
            return out  # to ask for a shape or a dtype is no computation
        # else the function around would take these for operations of its own
        with modes.unnoticed():
            args = tuple([self.each_of(x) for x in args])
            kwargs = {key: self.each_of(x) for key, x in (kwargs or {}).items()}
        before, checks.here.seeks = checks.here.seeks, self.outer
        try:  # a backward pass may run functions inside, which this mode does not see
            out = func(*args, **kwargs)
        finally:
            checks.here.seeks = before
        several = out if isinstance(out, (tuple, list)) else (out,)
        made = [x for x in several if isinstance(x, Tensor)]  # pyright: ignore
        with modes.unnoticed():
            self.settle(bool(made) or out is None)  # one that returns nothing has written
            self.note(args[:1] if func is Tensor.__setitem__ else made)
        return out

    def settle(self, used: bool) -> None:
        """Note that an operation has used what it was given, or only looked at its shape."""
        if used:
            self.used |= self.used_now
        self.used_now = set()

    def note(self, made: Iterable[Tensor]) -> None:
        """Note tensors that were made inside of the function, or given to it."""

    def each_of(self, x: Any) -> Any:
        """An argument, with its tensors exchanged."""
        if isinstance(x, Tensor):
            return self.given_for(x)
        if type(x) is tuple or type(x) is list:
            return type(x)([self.each_of(each) for each in x])
        return x


class Found(NamedTuple):
    """A captured tensor that is followed."""

    captured: Tensor
    from_outside: Tensor  # what a function around gives in its place
    detached: Tensor


class Finding(Watch):
    """Remembers captured tensors that are followed, and gives them detached.

    With ``records`` what is given in their place requires grad.
    """

    def __init__(self, records: bool) -> None:
        super().__init__()
        self.level = functorch.transform_level() or 0
        self.begun = autograd.sequence_number()
        self.places: dict[int, int] = {}
        self.found: list[Found] = []
        self.settled = 0  # how many of them were used
        self.others: References = {}  # captured tensors that are not followed
        self.records = records
        self.wraps = False  # whether a transform that may be over by then wraps one of the others
        self.memory: set[int | None] = set()  # the memory of what was made inside
        self.foreign: set[int | None] = {None}

    def given_for(self, x: Tensor) -> Tensor:
        if self.is_made(x):
            return x
        at = self.places.get(id(x))
        if at is None:
            own = self.from_outside(x)
            if not self.is_captured(x, own):
                return own
            at = self.remember(x, own)
        self.used_now.add(at)
        return _like(self.found[at].detached, x)

    def is_captured(self, x: Tensor, own: Tensor) -> bool:
        """Whether a tensor that was not made here is followed; others are noted."""
        is_followed, above = functorch.followed(own, self.level)
        if self.level and functorch.is_wrapped(own) and kernels.memory_of(x) in self.memory:
            return False  # made inside, and handed out by a transform inside
        if not is_followed:
            self.wraps = self.wraps or functorch.is_wrapped(own)
            self.others[id(x)] = ref(x)  # pyright: ignore
        elif above or autograd.recorded_at(own) >= self.begun:
            raise UnseenError  # it is inside of another transform, or was made unseen
        return is_followed

    def remember(self, x: Tensor, own: Tensor) -> int:
        """A new place for a captured tensor."""
        self.foreign.add(kernels.memory_of(own))
        with functorch.down_to(self.level):
            whole = precision.original(own)
            detached = whole.detach()
            detached = detached.requires_grad_() if self.records else detached
            self.found.append(Found(x, whole, detached))
        note_made([detached], self)
        self.places[id(x)] = len(self.found) - 1
        return self.places[id(x)]

    def settle(self, used: bool) -> None:
        super().settle(used)
        while not used and len(self.found) > self.settled:
            del self.places[id(self.found.pop().captured)]
        self.settled = len(self.found)

    def note(self, made: Iterable[Tensor]) -> None:
        self.made.update((id(x), ref(x)) for x in made)
        if self.level:
            self.memory |= {kernels.memory_of(x) for x in made} - self.foreign


class Giving(Watch):
    """Gives other tensors in place of the captured ones that are followed.

    Other captured tensors are given without wrappers, which belong to levels that may be over;
    those that were written to are refused.
    """

    def __init__(
        self,
        places: Mapping[int, int],
        instead: Sequence[Tensor],
        others: References,
        written: Mapping[int, Tensor],
    ) -> None:
        super().__init__()
        self.places, self.instead, self.others, self.written = places, instead, others, written
        self.recording = torch.is_grad_enabled()

    def given_for(self, x: Tensor) -> Tensor:
        at = self.places.get(id(x))
        if at is not None:
            # What runs inside of a Function is recorded as of what that was given itself.
            if torch.is_grad_enabled() or not self.recording:
                self.used_now.add(at)
            return _like(self.instead[at], x)
        if self.written.get(id(x)) is x:
            raise RuntimeError(WRITTEN_TO.format(tuple(x.shape), x.dtype))
        own = self.from_outside(x)
        return functorch.innermost(own) if _holds(self.others, x) else own


WRITTEN_TO = (
    "a microbatched function must run again for its derivative, but a tensor that it captures (of "
    "shape {} and {}) has been written to in place since. Likely cause: an optimizer's step or a "
    "running statistic between a loss and its backward pass. Take the derivative first, or pass "
    "the function a copy."
)


def _like(instead: Tensor, x: Tensor) -> Tensor:
    return instead if instead.dtype == x.dtype else instead.to(x.dtype)


def _holds(references: References, x: Tensor) -> bool:
    at = references.get(id(x))
    return at is not None and at() is x
