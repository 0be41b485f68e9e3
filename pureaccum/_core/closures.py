"""What a function holds: the modules and tensors that it can reach without being given them.

    closures, defaults, partials, bound methods, containers, attributes, global names in code

It is looked at where a function is to be called again later, when others may have put something
else there. What a function finds in other ways (a registry of its own, a module that is imported)
is not held.
"""

import sys
from collections.abc import Callable, Iterable
from functools import partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor, nn


MOST = 2000  # things that are looked at in each call


def held_by(func: Any, most: int = MOST) -> tuple[list[nn.Module], list[Tensor]] | None:
    """The modules and tensors that a function holds; None where it holds more than so much."""
    modules: list[nn.Module] = []
    tensors: list[Tensor] = []
    rest, known = [func], dict[int, Any]()
    while rest:
        x = rest.pop()
        if type(x) in _NOTHING or id(x) in known:
            continue
        known[id(x)] = x  # which keeps its id
        if len(known) > most or (isinstance(x, _CONTAINERS) and len(x) > most):
            return None
        if isinstance(x, Tensor):
            tensors.append(x)
        elif isinstance(x, nn.Module):
            modules.append(x)  # what is in it is its own
        elif not isinstance(x, type):
            rest += held_in(x)
    return modules, tensors


# What says by itself what it holds: types, and functions that tell.
telling: dict[type, Callable[[Any], Iterable[Any]]] = {}

# What holds nothing, or nothing that another one could exchange.
_NOTHING = frozenset((
    bool, int, float, complex, str, bytes, type(None), type, ModuleType, BuiltinFunctionType,
    CodeType, torch.dtype, torch.device, torch.Size, torch.layout, torch.Generator,
))  # fmt: skip


_CONTAINERS = (list, tuple, set, frozenset, dict)


def held_in(x: Any, named: bool = True) -> Iterable[Any]:
    """What a function, a container or another object holds; ``named``: what its code names too."""
    if (tell := telling.get(type(x))) is not None:
        return tell(x)
    if isinstance(x, FunctionType):
        own = [
            *_contents(x.__closure__ or ()),
            *(x.__defaults__ or ()),
            *(x.__kwdefaults__ or {}).values(),
        ]
        if named and not (x.__module__ or "").startswith(_LIBRARIES):
            own += map(x.__globals__.get, names_in(x.__code__))
        return [*own, *x.__dict__.values()]
    if isinstance(x, _CONTAINERS):
        return x.values() if isinstance(x, dict) else x
    if isinstance(x, MethodType):
        return x.__func__, x.__self__
    if isinstance(x, partial):
        return x.func, *x.args, *x.keywords.values()
    if isinstance(x, ReferenceType):
        return (x(),)
    if type(x).__module__.partition(".")[0] in _PYTHON:
        return ()
    slots = (getattr(x, name, None) for name in getattr(type(x), "__slots__", ()))
    return [*getattr(x, "__dict__", {}).values(), *slots]


def _contents(cells: Iterable[CellType]) -> Iterable[Any]:
    for cell in cells:
        try:
            yield cell.cell_contents
        except ValueError:  # it is empty
            continue


def names_in(code: CodeType) -> Iterable[str]:
    """The names in a function's code, and in that of functions inside of it."""
    inside = [name for x in code.co_consts if isinstance(x, CodeType) for name in names_in(x)]
    return [*code.co_names, *inside]


# Whose objects hold nothing of a user's: a logger holds all others.
_PYTHON = sys.stdlib_module_names - {"types", "collections"}
_LIBRARIES = ("pureaccum.", "torch.")  # whose functions name nothing of a user's


def is_ours(x: Any) -> bool:
    """Whether a function was defined in this package."""
    return (getattr(x, "__module__", None) or "").startswith("pureaccum.")
