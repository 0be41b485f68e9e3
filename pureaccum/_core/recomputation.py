"""A function that is called again as it was called the first time.

    for args in pieces:
        outs = func(*args)
        again.note_reached(outs, args, begun)
    again.end()
    again.hold(func)
    with again.as_then(p, captured):
        func(*args)  # the args of piece p

It draws the same random numbers, under the same autocast and modes of torch, and modules hold what
they held.

Whatever it captures that is followed becomes an argument. Autograd's graph tells what that is: the
arguments of the first call are constants to it, so that a graph leads to captured tensors alone.
They are used as they are in the second call, whose graph has to lead there again. No graph tells
what a vmap or forward AD follows, and none can be cut where it leads to what was computed before
the call, or to a large tensor, whose gradients are to be added in place: then the operations of
the function are watched, which is slower (``finding``: see watch.py).
"""

from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from .._base import random_state
from .._base.states import Refusing
from .._base.torch_internals import autograd, functorch, modes
from . import called_modules, closures, weights, writes
from .called_modules import hold
from .watch import Finding, Found, Giving, References, UnseenError, active


Tensors = Sequence[Tensor]


class Again:
    """What is remembered of a first call, for the next one."""

    def __init__(self, before: list[random_state.Drawn], known: writes.Known) -> None:
        self.known = known
        self.casts = [_autocast(it.device.type) for it in before]
        self.cached = torch.is_autocast_cache_enabled()
        self.around = modes.modes_around()
        self.devices = [it.device for it in before]
        self.drawn = [before]  # how generators stand before each piece; none if they never move
        self.used: list[set[int]] = []  # for each piece, which captured tensors
        self.held: called_modules.HeldTensors = {}
        self.modules: called_modules.Modules = {}
        self.wraps = False  # whether a transform that may be over by then wraps one of the others
        self.found: list[Found] = []  # what is captured and followed
        self.places: dict[int, int] = {}  # where, by id
        self.leaves: References = {}  # of the graphs; some are made inside
        self.others: References = {}  # what is captured and not followed
        self.versions: dict[int, int] = {}  # of the others

    @property
    def captured(self) -> list[Tensor]:
        """The captured tensors that are followed."""
        return [found.from_outside for found in self.found]

    # The first call -----------------------------------------------------------------------

    @contextmanager
    def finding(self, given: Iterable[Tensor], watch: Finding) -> Generator[None]:
        """Around the first call for the next piece, whose operations are watched."""
        watch.note(given)
        watch.used = set()
        with active(watch):
            yield
        self.found, self.places, self.others = watch.found, watch.places, watch.others
        self.wraps = watch.wraps
        self.note_piece(watch.used)
        self.note_versions()

    def note_piece(self, used: set[int]) -> None:
        """Note which captured tensors a piece has used, and how it leaves the generators."""
        self.drawn.append(random_state.states(self.devices))
        self.used.append(used)

    def note_reached(self, outs: Sequence[Tensor], given: Tensors, begun: int) -> None:
        """Note a piece that was called on constants, when so many operations were recorded."""
        leaves: dict[int, Tensor] = {}
        if any(map(functorch.wants_gradient, outs)):
            if functorch.transform_level() is not None:
                raise UnseenError
            leaves, older = autograd.leaves_since(outs, begun, given)
            if older or any(map(_has_way_of_its_own, leaves.values())):
                raise UnseenError
            self.leaves.update((at, ref(x)) for at, x in leaves.items())
        self.note_piece({*leaves})

    def end(self) -> None:
        """Note what is captured, once all pieces are noted, and their graphs are gone."""
        # One that is known to draw may have put the generators back by itself.
        if not (self.known.draws or random_state.were_drawn_from(self.drawn[0], self.drawn[-1])):
            self.drawn = [[]] * len(self.drawn)
        if self.leaves:
            alive = {at: x for at, leaf in self.leaves.items() if (x := leaf()) is not None}
            self.found = [Found(x, x, x) for x in alive.values()]
            self.places = {at: n for n, at in enumerate(alive)}
            self.used = [{self.places[at] for at in used if at in alive} for used in self.used]

    def hold(self, func: Any, watched: bool) -> None:
        """Note what a function holds, and its modules; and unless it was watched, which tensors."""
        loss = self.known.loss()
        held = closures.held_by(
            func if loss is None else loss, closures.MOST * 50 if watched else closures.MOST
        )
        if held is None and not watched:
            raise UnseenError
        modules, tensors = held or ([], [])
        called = [x for at in self.known.modules if (x := at()) is not None]
        hold(self.held, self.modules, called + modules)
        if not watched:
            self.note_others(tensors)

    def note_others(self, held: list[Tensor]) -> None:
        """Note the captured tensors that are not followed: all that is held but what is."""
        tables = [x for table in self.held.values() for x in table.values() if x is not None]
        captured = [x for at in self.known.captured if (x := at()) is not None]
        others = {id(x): x for x in (*captured, *held, *tables)}
        if not self.leaves.keys().isdisjoint(self.places.keys() - others.keys()):
            raise UnseenError  # nobody knows whether it was made inside, and is kept there
        mine = {at: x for at, x in others.items() if at not in self.places}
        self.others = {at: ref(x) for at, x in mine.items() if not isinstance(x, Refusing)}
        self.note_versions()

    def note_versions(self) -> None:
        """Note how often was written to what must be the same in the second call."""
        others = self.there()
        self.versions = dict(zip(others, autograd.versions([*others.values()]), strict=True))

    def there(self) -> dict[int, Tensor]:
        """The other captured tensors that are still there."""
        return {at: x for at, other in self.others.items() if (x := other()) is not None}

    # The second call ----------------------------------------------------------------------

    def written(self) -> dict[int, Tensor]:
        """The other captured tensors that have been written to since."""
        others = self.there()
        now = zip(others.items(), autograd.versions([*others.values()]), strict=True)
        return {at: x for (at, x), version in now if version != self.versions[at]}

    def as_then(self, p: int, captured: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Restore what was around a piece, with tensors in place of the captured ones."""
        written = self.written()
        gives = written or self.wraps or not self.are_own(captured)
        replaced = called_modules.replaced_since(self.held)
        restores = gives or replaced or self.drawn[p] or any(map(_is_cast, self.casts))
        in_mode = all(module.training == then for module, then in self.modules.items())
        if in_mode and not restores and modes.modes_around() == self.around:
            return nullcontext()
        giving = Giving(self.places, captured, self.others, written) if gives else None
        return self.restored(p, giving, replaced)

    @contextmanager
    def restored(
        self, p: int, giving: Giving | None, replaced: called_modules.HeldTensors
    ) -> Generator[None]:
        """What was around a piece, where some of it is another one now."""
        with ExitStack() as stack:
            if modes.modes_around() != self.around:
                stack.enter_context(modes.within(self.around))
            for kind, on, dtype in filter(_is_cast, self.casts):
                stack.enter_context(torch.autocast(kind, dtype, on, self.cached))
                # Within another region, leaving this one would not free its casts.
                stack.callback(torch.clear_autocast_cache)
            stack.enter_context(called_modules.holding(replaced))
            stack.enter_context(called_modules.in_modes(self.modules))
            stack.enter_context(random_state.replaying(self.drawn[p]))
            if giving is not None:
                stack.enter_context(active(giving))
            yield
        if giving is not None and not self.used[p] <= giving.used:
            raise RuntimeError(NOT_FOUND_AGAIN)

    def are_own(self, captured: Sequence[Tensor]) -> bool:
        """Whether the captured tensors are to be used as they are."""
        return all(x is found.captured for x, found in zip(captured, self.found, strict=True))

    def check_reached(self, p: int, outs: Tensors, given: Tensors, begun: int) -> None:
        """Raise where a piece, called again, does not lead to what it led to."""
        if self.used[p]:
            new, older = autograd.leaves_since(outs, begun, given)
            at = {self.places.get(at) for at in new}
            if not self.used[p] <= at or not self.places.keys().isdisjoint(older):
                self.known.watched.add(True)  # so that the next call is
                raise RuntimeError(NOT_FOUND_AGAIN)


NOT_FOUND_AGAIN = (
    "the second run of a microbatched function, for its derivative, did not use a captured tensor "
    "that needs one. Likely causes: the function is not pure (it counts its calls, or draws from "
    "Python's or numpy's generator); the tensor was frozen since; a scripted function makes it; "
    "or it goes directly into an autograd.Function. Pass the tensor as an argument."
)


def _has_way_of_its_own(x: Tensor) -> bool:
    """Whether a leaf's gradients are added in place, or looked at by hooks, once for all pieces."""
    return weights.is_large(x) or any(autograd.tensor_hooks(x)[0])


def _is_cast(cast: tuple[str, bool, torch.dtype]) -> bool:
    """Whether autocast was on then, or is now."""
    return cast[1] or torch.is_autocast_enabled(cast[0])


def _autocast(kind: str) -> tuple[str, bool, torch.dtype]:
    return kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
