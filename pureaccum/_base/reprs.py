"""How records print themselves: by the call that made them, or by what they are made of.

    adamw(lr=0.001)
    TrainState(params=4 tensors of 9,610 numbers, opt_state=AdamState(...), ..., applied=12)

A text has at most 600 characters, and never an address or the numbers of a tensor; but a single
number is shown if reading it need not wait for a device.
"""

from collections.abc import Mapping
from functools import partial
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor

from . import trees


LONGEST = 600
LONGEST_VALUE = 80


def of_record(self: Any) -> str:
    """The text of a record: every field, in its order."""
    parts = zip(self._fields, self, strict=True)
    fields = ", ".join(f"{name}={_of(value)}" for name, value in parts)
    return _short(f"{type(self).__name__}({fields})")


def of_made(self: Any) -> str:
    """The text of a record of functions: the call that made it, if a maker has noted that."""
    call = _call(self[0])
    return of_record(self) if call is None else call


def kind(value: Any) -> str:
    """The class of a value with its article: "an int", "a Tensor"."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIO' else 'a'} {name}"


def of_value(value: Any) -> str:
    """A value that an error names: what it prints, if that is short, and its kind."""
    text = repr(value)
    plain = len(text) <= LONGEST_VALUE and " at 0x" not in text and "\n" not in text
    return f"{text}, {kind(value)}" if plain else kind(value)


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 2] + " …"


def _call(function: Any) -> str | None:
    """How a function, or a record of which it is the first, was made: see settings.records."""
    made_by = getattr(function, "made_by", None)
    if made_by is None:
        return None
    given = ", ".join(_argument(*it) for it in made_by.given)
    return _short(f"{made_by.maker}({given})")


def _argument(parameter: Parameter, value: Any) -> str:
    if parameter.kind is Parameter.VAR_POSITIONAL:
        return ", ".join(map(_of, value))
    if parameter.kind is Parameter.VAR_KEYWORD:
        return ", ".join(f"{name}={_of(x)}" for name, x in value.items())
    bare = parameter.default is Parameter.empty
    return _of(value) if bare else f"{parameter.name}={_of(value)}"


def _of(value: Any) -> str:
    """What a value is, in few words."""
    if isinstance(value, Tensor):
        return _of_tensor(value)
    if isinstance(value, float):
        text = f"{value:.6g}"
        return f"{text}.0" if text.lstrip("-").isdigit() else text
    if value is None or isinstance(value, (bool, int, complex, str, torch.dtype, torch.device)):
        return repr(value)
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, (tuple, list, Mapping)):
        return _of_container(value)
    return _of_function(value)


def _of_tensor(x: Any) -> str:
    if hasattr(x, "reason"):  # see states.Refusing
        return "given up"
    if not x.dim() and (number := trees.known(x)) is not None:
        return _of(number)
    on = "" if x.device.type == "cpu" else f" on {x.device}"
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}{on}"


def _of_container(value: Any) -> str:
    if _is_record(value):
        ours = type(value).__module__.startswith("pureaccum")
        return repr(value) if ours else of_record(value)
    parts = [*value.values()] if isinstance(value, Mapping) else [*value]
    leaves = trees.tree_leaves(parts)
    if leaves and all(isinstance(x, Tensor) for x in leaves) and not any(map(_is_record, parts)):
        given_up = any(hasattr(x, "reason") for x in leaves)
        of = "given up" if given_up else f"of {sum(x.numel() for x in leaves):,} numbers"
        return f"{len(leaves)} tensor{'s' * (len(leaves) != 1)} {of}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_of(x)}" for key, x in value.items()) + "}"
    text = ", ".join(map(_of, parts))
    return f"[{text}]" if isinstance(value, list) else f"({text}{',' * (len(parts) == 1)})"


def _is_record(value: Any) -> bool:
    return hasattr(value, "_fields")


def _of_function(value: Any) -> str:
    if (call := _call(value)) is not None:
        return call
    if isinstance(value, partial):
        return _of_function(value.func)
    name = getattr(value, "__name__", None) or type(value).__name__
    return str(name)
