"""Where a module keeps its tensors, and whether it still does.

A module is a tree of modules, each with a table of parameters, one of buffers and one of children.
"""

import threading
from collections.abc import Iterator
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor, nn

from .._base.torch_internals import BUFFERS, CHILDREN, PARAMETERS, is_compiled_module


Vars = dict[str, Any]
Slot = tuple[int, str, str]  # the number of a module, its table, and a key in that

TABLES = (PARAMETERS, BUFFERS, CHILDREN)


class Idle(threading.local):
    """The shells of this thread that nobody uses; a copy in another process begins with none."""

    def __init__(self) -> None:
        self.shells: list[Any] = []

    def __reduce__(self) -> Any:
        return Idle, ()


class Places(NamedTuple):
    """The modules in a module, where they keep their tensors, and what is known of them."""

    modules: list[nn.Module]  # each once, the module itself first
    paths: list[str]
    were: list[list[Vars]]  # copies of the tables of each
    kept: "Picture"  # the tables of parameters and modules; buffers are assigned anew by any call
    slots: dict[str, list[Slot]]  # of each tensor
    idle: Idle
    seen: set[bool]  # the modes in which no part of a shell used a tensor of the module's own
    leads_back: set[bool]  # not empty where one did


def places_of(module: nn.Module) -> Places:
    """Where a module keeps its tensors: each by its first name, with all the places it has."""
    paths, modules = map(list, zip(*module.named_modules(), strict=True))
    slots: dict[Tensor, list[Slot]] = {}
    names: dict[Tensor, str] = {}
    for i, (path, part) in enumerate(zip(paths, modules, strict=True)):
        for table in (PARAMETERS, BUFFERS):
            for key, tensor in vars(part)[table].items():
                if tensor is not None:
                    names.setdefault(tensor, full_name(path, key))
                    slots.setdefault(tensor, []).append((i, table, key))
    scripted = any(map(is_compiled_module, modules))
    tables = [] if scripted else [vars(m)[table] for m in modules for table in TABLES[::2]]
    return Places(
        modules=modules,
        paths=paths,
        were=[[dict(vars(m)[table]) for table in TABLES] for m in modules],
        kept=picture(tables),
        slots={names[tensor]: its for tensor, its in slots.items()},
        idle=Idle(),
        seen=set(),
        leads_back={True} if scripted else set(),
    )


def full_name(path: str, key: str) -> str:
    """What ``named_parameters`` calls a tensor of the module at a path."""
    return f"{path}.{key}" if path else key


def own_tensor(places: Places, name: str) -> Tensor:
    """The tensor that a module itself has under a name."""
    i, table, key = places.slots[name][0]
    return vars(places.modules[i])[table][key]


def what_changed(places: Places) -> str:
    """An error for a module that has other parts than it had."""
    for path, module, were in zip(places.paths, places.modules, places.were, strict=True):
        if changed(Picture([vars(module)[name] for name in TABLES[::2]], *picture(were[::2])[1:])):
            path = f"module.{path}" if path else "module"
            return (
                f"{path} ({type(module).__name__}) has other parameters or modules in it than when "
                "functional(module) was called, which would go unnoticed: expected the same. Call "
                "functional(module) again, after the last change."
            )
    raise AssertionError


# Pictures of dicts ------------------------------------------------------------------------


class Picture(NamedTuple):
    """What stood in some dicts."""

    dicts: list[Vars]
    lengths: list[int]
    values: list[Any]  # of all of them, one after the other


def picture(dicts: list[Vars]) -> Picture:
    """Remember what stands in some dicts."""
    return Picture(dicts, [*map(len, dicts)], [*_values(dicts)])


def changed(of: Picture) -> bool:
    """Whether other objects stand there now. A loop in C: it is asked four times a call."""
    dicts, lengths, values = of
    return [*map(len, dicts)] != lengths or not all(map(is_, _values(dicts), values))


def _values(dicts: list[Vars]) -> Iterator[Any]:
    return chain.from_iterable(map(dict.values, dicts))
