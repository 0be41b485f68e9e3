"""Who calls a function of torch: a module, or a line that is the user's."""

import inspect
import linecache
from pathlib import Path
from typing import NamedTuple

import torch


class Call(NamedTuple):
    """A call of a torch function: its name, and the module or the line that made it."""

    function: str
    module: str  # "net.1 (BatchNorm1d)", or ""
    root: str  # "net"
    path: str  # "1"
    line: str  # "loss.py:12: x = net(x)"

    @property
    def where(self) -> str:
        """For a sentence."""
        return self.module or f"torch's {self.function} at {self.line}"


NOBODY = Call("", "", "", "", "")


def users_line() -> str:
    """The innermost line that is neither torch's nor ours."""
    frame = inspect.currentframe()
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if not any(ours in file.parents for ours in _NOT_THE_USERS):
            text = linecache.getline(str(file), frame.f_lineno).strip()
            text = text if len(text) <= 60 else f"{text[:59]}…"
            return f"{file.name}:{frame.f_lineno}" + (f" ({text})" if text else "")
        frame = frame.f_back
    return "an unknown line"


_NOT_THE_USERS = (Path(torch.__file__).parent, Path(__file__).parents[2])
