"""What a function was made with: the numbers and names that its closures hold.

Settings live in closures, where nothing shows them. This reads them, so that ranks can compare
theirs: through partials, NamedTuples and functions of this package. A function of a user's counts
by its name alone, because what it closes over may well be a rank's own.
"""

from collections.abc import Mapping
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor


PACKAGE = __name__.partition(".")[0]


def settings_of(thing: Any, name: str) -> dict[str, str]:
    """What a thing was made with, by name; the name itself says by which functions it was made."""
    found: dict[str, list[str]] = {}
    _read(thing, name, name, found, set())
    return {name: ", ".join(texts) for name, texts in found.items()}


def _read(thing: Any, name: str, inside: str, found: dict[str, list[str]], seen: set[int]) -> None:
    """Note a thing under its name; what has settings of its own notes them ``inside``."""
    if isinstance(thing, (FunctionType, partial)):
        if id(thing) in seen:  # a function may close over itself
            return
        seen.add(id(thing))
    if isinstance(thing, partial):
        for part in (thing.func, *thing.args):
            _read(part, inside, inside, found, seen)
        _read(thing.keywords, inside, inside, found, seen)
    elif isinstance(thing, FunctionType):
        if thing.__module__.partition(".")[0] != PACKAGE:
            _note(f"{thing.__module__}.{thing.__qualname__}", name, found)
            return
        factory, _, made = thing.__qualname__.partition(".<locals>")
        if made:  # the first is what a user called; others are how that is made
            found.setdefault(inside, [factory.lstrip("_")])
        cells = zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True)
        for free, cell in cells:
            _read(cell.cell_contents, f"{inside}.{free}", inside, found, seen)
    elif isinstance(thing, Mapping):
        for key, value in thing.items():
            if isinstance(key, str):  # other keys are of what was learned, and no settings
                _read(value, f"{inside}.{key}", f"{inside}.{key}", found, seen)
    elif isinstance(thing, tuple) and hasattr(thing, "_fields"):
        for field, value in zip(thing._fields, thing, strict=True):  # pyright: ignore
            _read(value, f"{inside}.{field}", inside, found, seen)
    elif isinstance(thing, (tuple, list)) and not all(map(_is_plain, thing)):
        for i, value in enumerate(thing):
            _read(value, f"{name}[{i}]", f"{name}[{i}]", found, seen)
    elif isinstance(thing, Tensor):
        text = thing.item() if thing.ndim == 0 else f"a tensor of shape {tuple(thing.shape)}"
        _note(str(text), name, found)
    elif hasattr(thing, "__qualname__"):
        _note(f"{thing.__module__}.{thing.__qualname__}", name, found)  # pyright: ignore
    elif not isinstance(thing, torch.device):  # ranks have devices of their own
        _note(repr(thing) if _is_plain(thing) else f"a {type(thing).__qualname__}", name, found)


def _note(text: str, name: str, found: dict[str, list[str]]) -> None:
    texts = found.setdefault(name, [])
    if text not in texts:
        texts.append(text)


def _is_plain(thing: Any) -> bool:
    if isinstance(thing, (tuple, list)):
        return not hasattr(thing, "_fields") and all(map(_is_plain, thing))
    return thing is None or isinstance(thing, (bool, int, float, complex, str, torch.dtype))
