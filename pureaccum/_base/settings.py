"""The arguments that optimizers, steps and the like were made with: to print, and to compare ranks.

    @records                 on a maker: its results remember the maker's name and arguments
    settings_of(it, name)    these, and those of whatever other makers made among them

A function of the user's own counts by its name, and a partial by what it binds, too. What such a
function closes over may differ between ranks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, wraps
from inspect import Parameter, signature
from typing import Any, NamedTuple, TypeVar, cast

import torch


Maker = TypeVar("Maker", bound=Callable[..., Any])


class MadeBy(NamedTuple):
    """A maker, its arguments, and those to print: all but defaults, of which only the first."""

    maker: str
    settings: dict[str, Any]
    given: tuple[tuple[Parameter, Any], ...] = ()


def records(maker: Maker) -> Maker:
    """A maker whose results remember what they were made with."""
    form = signature(maker)
    first = next(iter(form.parameters))

    @wraps(maker)
    def make(*args: Any, **kwargs: Any) -> Any:
        # adamw(net.parameters(), lr=0.1): the maker names what came first, Python only the clash.
        if args and first in kwargs:
            maker(*args, **{name: x for name, x in kwargs.items() if name != first})
        made = maker(*args, **kwargs)
        bound = form.bind(*args, **kwargs)
        bound.apply_defaults()
        given = tuple(
            (parameter, value)
            for i, (parameter, value) in enumerate(
                zip(form.parameters.values(), bound.arguments.values(), strict=True)
            )
            if i == 0 or not _is_default(parameter, value)
        )
        note_maker(made, MadeBy(maker.__name__, dict(bound.arguments), given))
        return made

    return cast(Maker, make)


def note_maker(made: Any, made_by: MadeBy) -> None:
    """Note who made a function, or a record of functions, and with which settings."""
    function = made[0] if isinstance(made, tuple) else made
    function.made_by = made_by


def _is_default(parameter: Parameter, value: Any) -> bool:
    if parameter.kind is Parameter.VAR_KEYWORD:
        return not value
    same_kind = type(value) is type(parameter.default)  # a tensor compares to a tensor
    return same_kind and value == parameter.default


def settings_of(thing: Any, name: str) -> dict[str, str]:
    """What a thing was made with, by name; under its own name stands who made it."""
    return dict(_read(thing, name))


def _read(thing: Any, name: str) -> Iterator[tuple[str, str]]:
    is_record = isinstance(thing, tuple) and hasattr(thing, "_fields")
    function: Any = thing[0] if is_record and thing else thing
    made_by: MadeBy | None = getattr(function, "made_by", None)
    parts: dict[str, Any] = {}
    if made_by is not None:
        yield name, made_by.maker
        parts = _named(made_by.settings)
    elif is_record:
        parts = _named(cast(Any, thing)._asdict())
    elif isinstance(thing, Mapping):
        parts = _named(thing)
    elif isinstance(thing, (tuple, list)) and not _is_plain(thing):
        parts = _numbered(thing)
    elif isinstance(thing, partial):
        parts = {"": thing.func} | _numbered(thing.args) | _named(thing.keywords)
    elif not isinstance(thing, torch.device):  # ranks have devices of their own
        yield name, _said(thing)
    for key, value in parts.items():
        yield from _read(value, f"{name}{key}")


def _named(parts: Mapping[Any, Any]) -> dict[str, Any]:
    return {f".{key}": value for key, value in parts.items()}


def _numbered(parts: Sequence[Any]) -> dict[str, Any]:
    return {f"[{i}]": value for i, value in enumerate(parts)}


def _said(thing: Any) -> str:
    if isinstance(thing, torch.Tensor):
        return str(thing.item()) if thing.ndim == 0 else f"a tensor of shape {tuple(thing.shape)}"
    if _is_plain(thing):
        return repr(thing)
    kind = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_plain(thing: Any) -> bool:
    if isinstance(thing, (tuple, list)):
        return not hasattr(thing, "_fields") and all(map(_is_plain, thing))
    return thing is None or isinstance(thing, (bool, int, float, complex, str, torch.dtype))
