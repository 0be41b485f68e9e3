"""A module called with other tensors than its own, of which it sees nothing.

A shell is a copy of a module, and of those in it, that shares their code, hooks and attributes and
has slots of its own for parameters and buffers:

    shell = one that nobody uses in this thread, or a new one
    bring its attributes up to date with the module's: modes, counters, caches
    put tensors into its slots, call it, and put the module's own back
    assign to the module what ``forward`` assigned to attributes, as a call of the module does

So threads do not meet, and the module's parameters and buffers stay where they are. A checkpoint
that will run a part of a shell again holds on to it: such a shell keeps its tensors and is not used
a second time, and the recomputation sees what the first run saw.

A module whose attributes lead back to itself (a bound method, a closure), or whose code is not
Python's to share (scripted, compiled), would compute with its own tensors in a shell. It is called
itself, with the others put in for the time of the call, by one thread at a time.
"""

import inspect
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple
from weakref import ReferenceType

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .._base.generators import generators, restore
from .._base.torch_internals import is_cache, seeing
from .._base.trees import leaves
from .._core.called_modules import ALONE, origins
from .places import (
    TABLES,
    Picture,
    Places,
    Vars,
    changed,
    full_name,
    own_tensor,
    picture,
    what_changed,
)


class Shell(NamedTuple):
    """Copies of some modules, and what they were copied from."""

    modules: list[nn.Module]
    theirs: list[Picture]  # one: the attributes of the modules when they were copied
    ours: list[Picture]  # one: those of the copies then
    tables: list[tuple[Vars, Vars]]  # of the copies, and what stands there between two calls
    slots: dict[str, list[tuple[Vars, str]]]
    references: list[int]  # to each copy between two calls


def call(
    places: Places, tensors: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, Mapping[str, Any]]:
    """Call a module with tensors in place of its own.

    Args:
        places: Of the module.
        tensors: Parameters and buffers by name; for others the module's own are used.
        args: What it is called with.
        kwargs: The same by name.

    Returns:
        What it returned, and the tensors by name, with those among them that it assigned anew.
    """
    if torch.compiler.is_dynamo_compiling():
        return _in_place(places, tensors, args, kwargs)
    if (shell := _taken(places)) is not None:
        training = places.modules[0].training
        if training in places.seen:
            return _in_shell(places, shell, tensors, args, kwargs)
        random = generators(frozenset(x.device for x in tensors.values()))
        strangers = {id(own_tensor(places, name)) for name in tensors} - {
            *map(id, tensors.values())
        }
        try:
            with seeing(before=partial(_look, strangers)):
                result = _in_shell(places, shell, tensors, args, kwargs)
            places.seen.add(training)
            return result
        except LeadsBackError:
            places.leads_back.add(True)
            restore(random)
    with ALONE:
        return _in_place(places, tensors, args, kwargs)


class LeadsBackError(BaseException):
    """A part of a shell uses a tensor of the module itself. Only ``call`` may catch it."""


def _look(strangers: set[int], _: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if any(id(x) in strangers for x in leaves((args, kwargs))):
        raise LeadsBackError


def _in_place(
    places: Places, tensors: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, Mapping[str, Any]]:
    # One dict: a buffer that the module assigns anew is written back to it and no other.
    held: dict[str, Any] = {}
    for name, tensor in tensors.items():
        for i, _, key in places.slots[name]:
            held[full_name(places.paths[i], key)] = tensor
    # torch's own way with ties would leave our tensors in a module that has two names.
    out = functional_call(places.modules[0], held, args, dict(kwargs), tie_weights=False)
    return out, held


def _in_shell(
    places: Places,
    shell: Shell,
    tensors: Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[Any, Mapping[str, Any]]:
    for name, tensor in tensors.items():
        for table, key in shell.slots[name]:
            table[key] = tensor
    out = shell.modules[0](*args, **kwargs)
    held: dict[str, Any] = {}
    for name in tensors:
        table, key = shell.slots[name][0]
        held[name] = table[key]
    if changed(shell.ours[0]):
        _assign(places, shell)
    # One whose call failed, or that a checkpoint holds on to, is left as it is.
    alone = _references(shell.modules) == shell.references
    for table, between in shell.tables:
        if len(table) != len(between):
            made = next((key for key in table if key not in between), "one")
            raise RuntimeError(
                f"forward made {made!r}, a parameter, buffer or module that was not there when "
                "functional(module) was called. Call the module once, on one batch, before that."
            )
        if alone:
            table.update(between)
    if alone:
        places.idle.shells.append(shell)
    return out, held


def _taken(places: Places) -> Shell | None:
    """A shell that is up to date; None for a module that cannot have one."""
    if places.leads_back:
        return None
    if changed(places.kept):
        raise RuntimeError(what_changed(places))
    shell = places.idle.shells.pop() if places.idle.shells else _new(places)
    if not shell.theirs or changed(shell.theirs[0]):
        return _refreshed(places, shell)
    return shell


def _new(places: Places) -> Shell:
    """Copies of all modules that have tables, and nothing else yet."""
    copies = {id(x): object.__new__(type(x)) for x in places.modules}
    shell = Shell([*copies.values()], [], [], [], {}, [])
    for module, (params, buffers, children) in zip(places.modules, places.were, strict=True):
        children = {key: copies.get(id(child)) for key, child in children.items()}
        for name, table in zip(TABLES, (dict(params), dict(buffers), children), strict=True):
            vars(copies[id(module)])[name] = table
            shell.tables.append((table, dict(table)))
        origins[copies[id(module)]] = module
    for name, slots in places.slots.items():
        shell.slots[name] = [(vars(shell.modules[i])[table], key) for i, table, key in slots]
    return shell


def _refreshed(places: Places, shell: Shell) -> Shell | None:
    """Copy the attributes of all modules, if none leads back."""
    modules = {*map(id, places.modules)}
    theirs = picture([*map(vars, places.modules)])
    if any(_leads_back(module, modules) for module in places.modules):
        places.leads_back.add(True)
        return None
    ours = [*map(vars, shell.modules)]
    for now, mine in zip(theirs.dicts, ours, strict=True):
        tables = {name: mine[name] for name in TABLES}
        mine.clear()
        mine.update({**now, **tables})
    shell.theirs[:], shell.ours[:] = [theirs], [picture(ours)]
    shell.references[:] = _references(shell.modules)
    return shell


def _references(modules: list[nn.Module]) -> list[int]:
    return [*map(sys.getrefcount, modules)]


def _assign(places: Places, shell: Shell) -> None:
    """Assign to the modules what their copies were assigned."""
    for module, part in zip(places.modules, shell.modules, strict=True):
        theirs, mine = vars(module), vars(part)
        for key in theirs.keys() - mine.keys():
            del theirs[key]
        for key, value in mine.items():
            if key not in TABLES and not is_cache(key) and theirs.get(key, _NONE) is not value:
                theirs[key] = value
    shell.theirs.clear()  # so that the copies are made anew before the next call


_NONE = object()


# Ways back ------------------------------------------------------------------------------


def _leads_back(module: nn.Module, modules: set[int]) -> bool:
    """Whether an attribute of a module leads to it or to others in the same one."""
    attributes = (value for key, value in vars(module).items() if key not in TABLES)
    return any(_reaches(x, modules, 3) for x in attributes)


def _reaches(value: Any, modules: set[int], depth: int) -> bool:
    if id(value) in modules:
        return True
    if not depth or isinstance(value, (Tensor, nn.Module, Places, type, str, int, float)):
        return False  # by its Places a module is called in a shell
    inside: Iterable[Any] = getattr(value, "__dict__", {}).values()
    if isinstance(value, MethodType):
        inside = (value.__self__,)
    elif isinstance(value, FunctionType):
        cells = inspect.getclosurevars(value).nonlocals.values()
        inside = (*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    elif isinstance(value, partial):
        inside = (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, ReferenceType):
        inside = (value(),)
    elif isinstance(value, dict):
        inside = value.values()
    elif isinstance(value, (list, tuple, set)):
        inside = value
    return any(_reaches(x, modules, depth - 1) for x in [*inside])
