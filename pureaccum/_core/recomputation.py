"""A function that is called again as it was called the first time.

    for args in pieces:
        with again.finding(args):
            func(*args)
    with again.as_then(p, captured):
        func(*args)  # the args of piece p

It draws the same random numbers, under the same autocast and modes of torch, and its modules hold
what they held.
Whatever it captures that a transform follows, or of which a gradient is asked for, becomes an
argument: while the function runs, such a tensor is found in the operations that use it, and is
exchanged for the one that is given in its place. So it is found in every piece, wherever it comes
from: a closure, a module, a function that calls this one.
"""

from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._base.checks import here
from .._base.generators import Drawn, noted, replaying
from .._base.torch_internals import (
    down_to,
    followed,
    innermost,
    is_wrapped,
    memory_of,
    modes_around,
    recorded_at,
    sequence_number,
    transform_level,
    unnoticed,
    version,
    versions,
    within,
)
from .called_modules import HeldTensors, Modules, hold, holding, in_modes, remembering
from .writes import Known


# Tensors by their ids. An id alone may be that of one that has died.
References = dict[int, ReferenceType[Tensor]]


class UnseenError(BaseException):
    """Something captured is followed and cannot be exchanged. Only the caller may catch this."""


class Again:
    """What is remembered of a first call, for the next one."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self.devices = {x for x in devices if hasattr(getattr(torch, x.type, None), "Stream")}
        self.casts = [_autocast(kind) for kind in {"cpu", *(x.type for x in self.devices)}]
        self.cached = torch.is_autocast_cache_enabled()
        self.drawn: list[list[Drawn]] = []  # for each piece
        self.met: list[set[int]] = []  # for each piece, which captured tensors it used
        self.held: HeldTensors = {}
        self.modules: Modules = {}
        self.mode = _Finding()
        self.around = modes_around()

    @property
    def captured(self) -> list[Tensor]:
        """The captured tensors that are followed."""
        return [found.from_outside for found in self.mode.found]

    @contextmanager
    def finding(self, made: Iterable[Tensor]) -> Generator[None]:
        """Around the first call for the next piece, which is given ``made``."""
        self.mode.note(made)
        self.mode.met = set()
        with noted(self.devices) as drawn, remembering(self.held, self.modules), _active(self.mode):
            yield
        self.mode.look()
        self.drawn.append(drawn)
        self.met.append(self.mode.met)

    @contextmanager
    def keeping(self, known: Known) -> Generator[None]:
        """Around a first call of a loss that captures nothing that is followed."""
        with noted(self.devices) as drawn:
            yield
        self.drawn.append(drawn)
        self.met.append(set())
        self.mode.others = dict(enumerate(known.captured))
        self.mode.look()
        hold(self.held, self.modules, (x for at in known.modules if (x := at()) is not None))

    @contextmanager
    def as_then(self, p: int, captured: Sequence[Tensor]) -> Generator[None]:
        """Restore what was around a piece, with tensors in place of the captured ones."""
        giving = _Giving(self.mode, captured)
        for at, then in self.mode.versions:
            if (x := at()) is not None and version(x) != then:
                raise RuntimeError(WRITTEN_TO.format(tuple(x.shape), x.dtype))
        with ExitStack() as stack:
            if modes_around() != self.around:
                stack.enter_context(within(self.around))
            for kind, on, dtype in self.casts:
                if on or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype, on, self.cached))
                    # Within another region, leaving this one would not free its casts.
                    stack.callback(torch.clear_autocast_cache)
            stack.enter_context(holding({k: v for k, v in self.held.items() if _differs(*v)}))
            stack.enter_context(in_modes(self.modules))
            if self.drawn[p]:
                stack.enter_context(replaying(self.drawn[p]))
            if captured or self.mode.wraps:
                stack.enter_context(_active(giving))
            yield
        if not self.met[p] <= giving.met:
            raise RuntimeError(NOT_FOUND_AGAIN)


WRITTEN_TO = (
    "a microbatched function is to be run again for its derivative, and a tensor that it captures "
    "(of shape {} and {}) has been written to in place since. Take the derivative first, or hand "
    "the function a copy: an optimizer's step, or a running statistic, between a loss and its "
    "backward pass?"
)
NOT_FOUND_AGAIN = (
    "a microbatched function was run again for its derivative, and did not use again a captured "
    "tensor that needs one. Likely causes: it is not pure (it counts its calls, draws from "
    "Python's or numpy's generator), or it makes the tensor in a scripted function. Pass the "
    "tensor as an argument."
)


def captures_are_sought() -> bool:
    """Whether a function runs here whose captured tensors are looked for in its operations."""
    return here.seeks is not None


def note_made(tensors: Iterable[Tensor], mode: "_Mode | None" = None) -> None:
    """Say that tensors were made inside of the functions that run now, where they cannot see it."""
    mode = mode or here.seeks
    while mode is not None:
        mode.note(tensors)
        mode = mode.outer


def exchanged(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors that the function around gives in place of some, as to an operation."""
    mode: _Mode | None = here.seeks
    if mode is None:
        return tensors
    with unnoticed():
        given = [mode.given_for(x) for x in tensors]
        mode.settle(True)
    return given


@contextmanager
def _active(mode: "_Mode") -> Generator[None]:
    before, here.seeks = here.seeks, mode
    mode.outer = before
    try:
        with mode:
            yield
    finally:
        here.seeks = before


class _Mode(TorchFunctionMode):
    """Exchanges tensors in the arguments of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.outer: _Mode | None = None
        self.made: References = {}  # what was made inside, or given to the function
        self.met: set[int] = set()
        self.used: set[int] = set()  # by the operation that runs now

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
        with unnoticed():  # else the function around would take these for operations of its own
            args = tuple([self.each_of(x) for x in args])
            kwargs = {key: self.each_of(x) for key, x in (kwargs or {}).items()}
        before, here.seeks = here.seeks, self.outer
        try:  # a backward pass may run functions inside, which this mode does not see
            out = func(*args, **kwargs)
        finally:
            here.seeks = before
        several = out if isinstance(out, (tuple, list)) else (out,)
        made = [x for x in several if isinstance(x, Tensor)]  # pyright: ignore
        with unnoticed():
            self.settle(bool(made) or out is None)  # one that returns nothing has written
            self.note(args[:1] if func is Tensor.__setitem__ else made)
        return out

    def settle(self, used: bool) -> None:
        """Note that an operation has used what it was given, or only looked at its shape."""
        if used:
            self.met |= self.used
        self.used = set()

    def note(self, made: Iterable[Tensor]) -> None:
        """Note tensors that were made inside of the function, or given to it."""

    def each_of(self, x: Any) -> Any:
        """An argument, with its tensors exchanged."""
        if isinstance(x, Tensor):
            return self.given_for(x)
        if type(x) is tuple or type(x) is list:
            return type(x)([self.each_of(each) for each in x])
        return x


class _Finding(_Mode):
    """Remembers captured tensors that are followed, and gives them detached."""

    def __init__(self) -> None:
        super().__init__()
        self.level = transform_level() or 0
        self.begun = sequence_number()
        self.places: dict[int, int] = {}
        self.found: list[Found] = []
        self.settled = 0  # how many of them were used
        self.others: References = {}  # captured tensors that are not followed
        self.records = False  # whether what is given in place of captured tensors requires grad
        self.wraps = False  # whether a transform that may be over by then wraps one of the others
        self.versions: list[tuple[ReferenceType[Tensor], int | None]] = []  # of the others
        self.memory: set[int | None] = set()  # the memory of what was made inside
        self.foreign: set[int | None] = {None}

    def given_for(self, x: Tensor) -> Tensor:
        if self.is_made(x):
            return x
        at = self.places.get(id(x))
        if at is None:
            own = self.from_outside(x)
            is_followed, above = followed(own, self.level)
            if self.level and is_wrapped(own) and memory_of(x) in self.memory:
                return own  # made inside, and handed out by a transform inside
            if not is_followed:
                self.wraps = self.wraps or is_wrapped(own)
                self.others[id(x)] = ref(x)  # pyright: ignore
                return own
            if above or recorded_at(own) >= self.begun:
                raise UnseenError  # it is inside of another transform, or was made unseen
            self.foreign.add(memory_of(own))
            with down_to(self.level):
                whole = original(own)
                own = whole.detach()
                own = own.requires_grad_() if self.records else own
                self.found.append(Found(x, whole, own))
            note_made([own], self)
            at = self.places[id(x)] = len(self.found) - 1
        self.used.add(at)
        instead = self.found[at].detached
        return instead if instead.dtype == x.dtype else instead.to(x.dtype)

    def look(self) -> None:
        """Note the versions of what a piece captured: they must be the same in a second run."""
        there = [(at, x) for at in self.others.values() if (x := at()) is not None]
        self.versions = [(at, version(x)) for at, x in there]

    def settle(self, used: bool) -> None:
        super().settle(used)
        while not used and len(self.found) > self.settled:
            del self.places[id(self.found.pop().captured)]
        self.settled = len(self.found)

    def note(self, made: Iterable[Tensor]) -> None:
        self.made.update((id(x), ref(x)) for x in made)
        if self.level:
            self.memory |= {memory_of(x) for x in made} - self.foreign


class Found(NamedTuple):
    """A captured tensor that is followed."""

    captured: Tensor
    from_outside: Tensor  # what a function around gives in its place
    detached: Tensor


class _Giving(_Mode):
    """Gives other tensors in place of the captured ones that are followed.

    Other captured tensors are given without wrappers, which belong to levels that may be over.
    """

    def __init__(self, found: _Finding, instead: Sequence[Tensor]) -> None:
        super().__init__()
        self.found, self.instead, self.recording = found, instead, torch.is_grad_enabled()

    def given_for(self, x: Tensor) -> Tensor:
        at = self.found.places.get(id(x))
        if at is not None:
            # What runs inside of a Function is recorded as of what that was given itself.
            if torch.is_grad_enabled() or not self.recording:
                self.used.add(at)
            instead = self.instead[at]
            return instead if instead.dtype == x.dtype else instead.to(x.dtype)
        own = self.from_outside(x)
        return innermost(own) if _holds(self.found.others, x) else own


def _holds(references: References, x: Tensor) -> bool:
    at = references.get(id(x))
    return at is not None and at() is x


def _differs(place: Any, then: dict[str, Any]) -> bool:
    """Whether a module holds other tensors now than then."""
    now = place[1][place[2]]
    return [*map(id, now.values())] != [*map(id, then.values())]


def _autocast(kind: str) -> tuple[str, bool, torch.dtype]:
    return kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


# Casts that know what they were made from ------------------------------------------------------


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in another dtype, of which ``original`` gives the tensor that was cast."""
    low = x.to(dtype)
    if low is not x and not torch.compiler.is_dynamo_compiling():
        setattr(low, _ORIGINAL, (x, versions([x, low])))
    return low


def original(x: Tensor) -> Tensor:
    """The tensor that was cast to this one, if neither was written to since; else the tensor."""
    if (cast_from := getattr(x, _ORIGINAL, None)) is None:
        return x
    first, then = cast_from
    return first if then == versions([first, x]) else x


_ORIGINAL = "cast_from"
