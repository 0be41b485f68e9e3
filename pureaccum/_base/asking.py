"""Decide at which calls a loss is checked: at 1, 2, 3, 5 and 8 of a kind, then at one in 32.

    history = of a loss object: kind of call -> Answer
    kind    = structure and dtypes of what the loss is given, modes of its modules, numbers of
              samples, reduction, and which function of ours calls it

Which of 32 calls is checked is pseudo-random, so that what comes with every n-th batch is met soon.
Nothing that ranks decide together depends on it.
"""

import os
import warnings
from functools import partial
from random import Random
from types import FunctionType
from typing import Any, Literal, Self, get_args

from torch.utils.weak import WeakIdKeyDictionary

from .checks import Here, check_choice, here


FIRST_CALLS = 1, 2, 3, 5, 8
PERIOD = 32
NUMBERS = 8  # of samples, each of which is a kind of its own
UNANSWERED = 8  # questions without an answer, after which the schedule goes on
LOSSES = 50  # of one function, each made anew, that are checked without a warning

Mode = Literal["off", "first", "always"]


class Answer:
    """The answers of a loss to questions of one kind."""

    def __init__(self) -> None:
        self.calls, self.due = 0, 1  # those so far, and the one that asks next
        self.questions = 0
        self.coupled = self.settled = False  # refused, and seen to add up

    def note(self, coupled: bool | None, rows: int) -> None:
        """Note an answer about some samples, or None; two of them settle nothing."""
        self.questions += 1
        self.coupled = self.coupled or bool(coupled)
        self.settled = self.settled or (coupled is False and rows > 2)
        soon = self.coupled or not (self.settled or self.questions >= UNANSWERED)
        self.due = self.calls + 1 if soon else next_call(self.calls)

    def asks_at(self, call: int) -> bool:
        """Return whether a call asks, as the schedule or ``checks`` says."""
        return call >= self.due or here.checks == "always"


def next_call(calls: int) -> int:
    """Return the call that asks next, after so many."""
    block = calls // PERIOD
    later = (PERIOD * each + Random(each).randrange(PERIOD) for each in (block, block + 1))
    return next(call for call in (*FIRST_CALLS, *later) if call > calls)


# Settings ------------------------------------------------------------------------------------


class checks:
    """Set when losses are checked: in this thread as a context manager, else in the process.

    ``"first"``, the default, checks calls 1, 2, 3, 5 and 8 of each kind, and then one in 32.
    ``"always"`` checks every call. In ``"off"`` nothing is checked, and a loss (a mean, a sum or
    one ``Weighted``) at top level runs exactly once for each microbatch: what you wrote is what
    runs. The environment variable ``PUREACCUM_CHECKS`` is the setting at the start of a program;
    ``check=False`` of a function goes before all of these.

    Args:
        mode: ``"off"``, ``"first"`` or ``"always"``.

    Example:
        >>> with checks("off"):
        ...     pass  # here, in this thread
        >>> checks("first")  # from here on, in all threads
        checks('first')
    """

    entered = True  # until it is made

    def __init__(self, mode: Mode) -> None:
        check_choice(mode, get_args(Mode), "mode")
        self.mode, self.before = mode, [vars(here).get("checks")]
        here.checks, self.entered = mode, False

    def __enter__(self) -> Self:
        """Set it in this thread alone."""
        if self.entered:
            self.before.append(vars(here).get("checks"))
            here.checks = self.mode
        self.entered = True
        return self

    def __exit__(self, *_: object) -> None:
        """Set what was set before."""
        vars(here).pop("checks")
        if (before := self.before.pop()) is not None:
            here.checks = before

    def __del__(self) -> None:
        """Set it in the process, if no thread has entered it."""
        if not self.entered:
            self.__exit__()
            Here.checks = self.mode

    def __repr__(self) -> str:
        return f"checks({self.mode!r})"


Here.checks = os.environ.get("PUREACCUM_CHECKS") or "first"
check_choice(Here.checks, get_args(Mode), "PUREACCUM_CHECKS")


# Losses that are made anew at each call ------------------------------------------------------


_checked: "WeakIdKeyDictionary" = WeakIdKeyDictionary()  # by code, the losses made of it


def count_loss(loss: Any) -> None:
    """Warn, once for each function, where a program makes its loss anew again and again."""
    while isinstance(loss, partial):
        loss = loss.func
    if not isinstance(loss, FunctionType) or str(loss.__module__).startswith("pureaccum."):
        return
    code = loss.__code__
    count: int = (_checked.get(code) or 0) + 1
    _checked[code] = count
    if count == LOSSES:
        warnings.warn(
            f"{LOSSES} losses made of {code.co_qualname} ({code.co_filename}:"
            f"{code.co_firstlineno}) were checked, each at its first call, because a loss that is "
            "made anew is another loss. Make the loss once, outside of the loop, and pass what "
            "changes as an argument.",
            stacklevel=2,
        )
