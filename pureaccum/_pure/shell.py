"""A module called with other tensors than its own.

A shell is a copy of a module, and of the modules in it, that shares their code, hooks and
attributes, and has slots of its own for parameters and buffers:

    shell = one that nobody uses in this thread, or a new one
    bring its attributes up to date with the module's: modes, counters, caches
    put tensors into its slots, call it, and put the module's own back
    assign to the module what ``forward`` assigned to attributes, as a call of the module does

So threads do not meet, and the module's parameters and buffers stay where they are. A checkpoint
that will run a part of a shell again holds on to it: such a shell keeps its tensors and is not used
a second time, and the recomputation sees what the first run saw.

A module whose attributes lead back to itself (a bound method, a closure), or whose code Python
cannot share (scripted, compiled), would compute with its own tensors in a shell. It is called
itself, with the other tensors put in for the length of the call, by one thread at a time. There a
checkpoint is refused, which would be recomputed with the module's own tensors, except in a loss
whose engine puts the right ones back.
"""

import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.func import functional_call

from .._base import checks, observation, trees
from .._base.torch_internals import autograd, modes, module_slots
from .._core import called_modules, closures


Vars = dict[str, Any]
Tensors = Mapping[str, Tensor]
Called = tuple[Any, Mapping[str, Any]]  # what a module returned, and tensors that it holds then
Slot = tuple[int, str, str]  # the number of a module, its table, and a key in that

TABLES = (module_slots.PARAMETERS, module_slots.BUFFERS, module_slots.CHILDREN)
# a buffer may be assigned anew between two calls
FIXED = (module_slots.PARAMETERS, module_slots.CHILDREN)


class Idle(threading.local):
    """The shells of this thread that nobody uses; a pickled copy begins with none."""

    def __init__(self) -> None:
        self.shells: list[Shell] = []

    def __reduce__(self) -> Any:
        return Idle, ()


# Where a module keeps its tensors ---------------------------------------------------------------


class Places(NamedTuple):
    """The modules in a module, where they keep their tensors, and what is known of them."""

    modules: list[nn.Module]  # each once, the module itself first
    paths: list[str]
    were: list[dict[str, Vars]]  # for each module, copies of its tables
    kept: "TableContents"  # of the fixed tables
    slots: dict[str, list[Slot]]  # all places of each tensor, by its first name
    idle: Idle
    safe_modes: set[bool]  # modes in which a shell was seen to use no tensor of the module's own
    leads_back: set[str]  # what leads back to the module: its "code", or a "name"


closures.telling[Places] = lambda places: places.modules[:1]


def places_of(module: nn.Module) -> Places:
    """Look where a module keeps its tensors."""
    paths, modules = map(list, zip(*module.named_modules(), strict=True))
    slots: dict[Tensor, list[Slot]] = {}
    for i, part in enumerate(modules):
        for table in (module_slots.PARAMETERS, module_slots.BUFFERS):
            for key, tensor in vars(part)[table].items():
                if tensor is not None:
                    slots.setdefault(tensor, []).append((i, table, key))
    scripted = any(map(module_slots.is_compiled_module, modules))
    return Places(
        modules=modules,
        paths=paths,
        were=[{table: dict(vars(m)[table]) for table in TABLES} for m in modules],
        kept=contents_of([] if scripted else _fixed_tables(modules)),
        slots={full_name(paths[i], key): its for its in slots.values() for i, _, key in its[:1]},
        idle=Idle(),
        safe_modes=set(),
        leads_back={"code"} if scripted else set(),
    )


def full_name(path: str, key: str) -> str:
    """What ``named_parameters`` calls a tensor of the module at a path."""
    return f"{path}.{key}" if path else key


def own_tensor(places: Places, name: str) -> Tensor:
    """The tensor that the module itself has under a name."""
    i, table, key = places.slots[name][0]
    return vars(places.modules[i])[table][key]


def check_unchanged(places: Places) -> None:
    """Raise where the module has other parameters or modules in it than it had."""
    if not changed(places.kept):
        return
    for path, module, were in zip(places.paths, places.modules, places.were, strict=True):
        was = contents_of(map(were.__getitem__, FIXED))
        if changed(was._replace(views=contents_of(_fixed_tables([module])).views)):
            path = f"module.{path}" if path else "module"
            raise RuntimeError(
                f"{path} ({type(module).__name__}) has other parameters or modules than when "
                "functional(module) was called. Call functional(module) again, after the last "
                "change."
            )


def _fixed_tables(modules: Iterable[nn.Module]) -> list[Vars]:
    return [vars(module)[name] for module in modules for name in FIXED]


class TableContents(NamedTuple):
    """What stood in some dicts."""

    views: Sequence[Any]  # the values that stand in each of them now
    lengths: list[int]
    values: list[Any]  # those that stood there, of all dicts one after the other


def contents_of(dicts: Iterable[Vars]) -> TableContents:
    """Remember what stands in some dicts."""
    views = [*map(dict.values, dicts)]
    return TableContents(views, [*map(len, views)], [*chain(*views)])


NEVER = TableContents([()], [-1], [])  # what no dict holds


def changed(contents: TableContents) -> bool:
    """Whether other objects stand there now. The loop is C's: each call asks twice."""
    views, lengths, values = contents
    return [*map(len, views)] != lengths or not all(map(is_, chain(*views), values))


# A call -----------------------------------------------------------------------------------------


def call_module(
    places: Places, tensors: Tensors, wanted: Iterable[str], args: tuple[Any, ...], kwargs: Any
) -> Called:
    """Call a module with some tensors, by name, in place of its own.

    Returns what the module returned, and the tensors whose names are ``wanted``, of which it may
    have assigned some anew.
    """
    if torch.compiler.is_dynamo_compiling():
        return call_itself(places, tensors, args, kwargs)
    shells = places.idle.shells
    shell = shells.pop() if shells else None
    if shell is None or places.leads_back or changed(shell.theirs):
        shell = take_shell(places, shell)
    if shell is not None:
        training = places.modules[0].training
        if training in places.safe_modes:
            return _call_shell(places, shell, tensors, wanted, args, kwargs)
        if checks.here.observed is not None:
            return _call_and_look(places, shell, tensors, wanted, args, kwargs)
        shells.append(shell)
        if not modes.dispatched():
            _look(places, shell, tensors, wanted, args, kwargs)
            return call_module(places, tensors, wanted, args, kwargs)
    with called_modules.ALONE, _nothing_run_again(places, tensors, args, kwargs):
        return call_itself(places, tensors, args, kwargs)


def _look(
    places: Places, shell: "Shell", tensors: Tensors, wanted: Iterable[str], args: Any, kwargs: Any
) -> None:
    """Find out by an observed call whether a shell uses a tensor of the module's own."""
    copies = {**tensors, **{name: tensors[name].clone() for name in wanted}}
    call = partial(call_module, places, copies, wanted, args, kwargs)
    _, end = observation.observed(call, {x.device for x in tensors.values()})
    if end == "failed":  # so does this, but for what fails only where it is observed
        shell = take_shell(places, None) or shell
        _call_shell(places, shell, copies, wanted, args, kwargs)
        places.leads_back.add("name")
    if end == "at ranks":  # DTensors do not mix with a module's own tensors unnoticed
        places.safe_modes.add(places.modules[0].training)


def _call_and_look(
    places: Places, shell: "Shell", tensors: Tensors, wanted: Iterable[str], args: Any, kwargs: Any
) -> Called:
    """Call a shell, and note whether an operation was given a tensor of the module's own."""
    training, found = places.modules[0].training, set[int]()
    own = {id(own_tensor(places, name)) for name in tensors} - {*map(id, tensors.values())}
    with modes.seeing(
        before=lambda *x: found.update(own.intersection(map(id, trees.tree_leaves(x))))
    ):
        result = _call_shell(places, shell, tensors, wanted, args, kwargs)
    places.leads_back.add("name") if found else places.safe_modes.add(training)
    return result


def _nothing_run_again(
    places: Places, tensors: Tensors, args: Any, kwargs: Any
) -> AbstractContextManager[Any]:
    """Refuse what the backward pass would run again, when the module has its own tensors back."""
    # Saved-tensor hooks show it. A compiler too has them, and takes a checkpoint into its graph.
    allowed = torch.is_grad_enabled() and autograd.saved_tensors_hooks_allowed()
    restored = checks.here.backward is not None and checks.here.backward.restores
    if not allowed or restored or "code" in places.leads_back:
        return nullcontext()
    own = [own_tensor(places, name) for name in places.slots.keys() - tensors.keys()]
    given = trees.tree_leaves(([*tensors.values()], own, args, kwargs))
    if not any(isinstance(x, Tensor) and x.requires_grad for x in given):
        return nullcontext()
    refused = (
        f"forward of module ({type(places.modules[0]).__name__}) saves tensors through hooks, as "
        "torch.utils.checkpoint does, and reaches the module through more than self (a bound "
        "method, a closure, a global name). The backward pass would run a part of it again with "
        "the module's own tensors. Use make_step, or grad with engine='autograd', or reach the "
        "module through self alone."
    )
    around = autograd.saved_tensors_hooks()
    if around is None:
        return disable_saved_tensors_hooks(refused)

    def look(*_: Any) -> None:
        if autograd.saved_tensors_hooks() != around:
            raise RuntimeError(refused)

    return modes.Asking(look)  # slower; torch refuses none without those that are around


def call_itself(places: Places, tensors: Tensors, args: Any, kwargs: Any) -> Called:
    """Call a module with other tensors put into it for the length of the call."""
    # One dict: a buffer that the module assigns anew is written back to it and no other.
    held: dict[str, Any] = {}
    for name, tensor in tensors.items():
        for i, _, key in places.slots[name]:
            held[full_name(places.paths[i], key)] = tensor
    # torch's own way with ties would leave our tensors in a module that has two names.
    out = functional_call(places.modules[0], held, args, dict(kwargs), tie_weights=False)
    return out, held


def _call_shell(
    places: Places, shell: "Shell", tensors: Tensors, wanted: Iterable[str], args: Any, kwargs: Any
) -> Called:
    slots = shell.slots
    for name, tensor in tensors.items():
        for table, key in slots[name]:
            table[key] = tensor
    out = shell.modules[0](*args, **kwargs)
    held: dict[str, Any] = {}
    for name in wanted:
        table, key = slots[name][0]
        held[name] = table[key]
    if changed(shell.ours):
        observation.put_back_attributes(places.modules)
        _assign(places, shell)
    if [*map(len, shell.tables)] != shell.lengths:
        pairs = zip(shell.tables, chain(*map(dict.values, places.were)), strict=True)
        made = next((key for table, were in pairs for key in table if key not in were), "one")
        raise RuntimeError(
            f"forward made {made!r}, a parameter, buffer or module that did not exist when "
            "functional(module) was called. Call the module once, on one batch, before that."
        )
    # One that failed, or that a checkpoint holds on to, is left as it is.
    if [*map(sys.getrefcount, shell.modules)] == shell.references:
        for table, between in shell.filled:
            table.update(between)
        places.idle.shells.append(shell)
    else:  # a recomputation will write to the buffers again, but not to those that are returned
        for name in wanted:
            again = None if held[name] is None else held[name].clone()
            for table, key in slots[name]:
                table[key] = again
    return out, held


# Shells -----------------------------------------------------------------------------------------


class Shell:
    """Copies of all modules in a module, which have its tables and no attributes yet."""

    def __init__(self, places: Places) -> None:
        copies = {id(module): object.__new__(type(module)) for module in places.modules}
        self.modules: list[nn.Module] = [*copies.values()]
        # The modules' attributes and fixed tables, and the attributes of the copies.
        self.theirs = self.ours = NEVER
        self.references: list[int] = []  # how many there are to each copy between two calls
        self.tables: list[Vars] = []  # of the copies
        self.filled: list[tuple[Vars, Vars]] = []  # with what stands there between two calls
        for module, were in zip(places.modules, places.were, strict=True):
            copy = copies[id(module)]
            children = {
                key: copies.get(id(child)) for key, child in were[module_slots.CHILDREN].items()
            }
            for name, contents in (were | {module_slots.CHILDREN: children}).items():
                vars(copy)[name] = table = dict(contents)
                self.tables.append(table)
                if contents:
                    self.filled.append((table, dict(contents)))
            called_modules.origins[copy] = module
        self.lengths = [*map(len, self.tables)]
        self.slots = {
            name: [(vars(self.modules[i])[table], key) for i, table, key in slots]
            for name, slots in places.slots.items()
        }


def take_shell(places: Places, shell: Shell | None) -> Shell | None:
    """A shell with the attributes that the modules have now; None for a module that has none."""
    if places.leads_back:
        return None
    check_unchanged(places)
    modules = {*map(id, places.modules)}
    theirs = contents_of([*map(vars, places.modules), *_fixed_tables(places.modules)])
    attributes = [x for m in places.modules for key, x in vars(m).items() if key not in TABLES]
    if any(_reaches(x, modules, 3) for x in attributes):
        places.leads_back.add("name")
        return None
    shell = shell or Shell(places)
    ours = [*map(vars, shell.modules)]
    for now, mine in zip(map(vars, places.modules), ours, strict=True):
        tables = {name: mine[name] for name in TABLES}
        mine.clear()
        mine.update({**now, **tables})
    shell.theirs, shell.ours = theirs, contents_of(ours)
    shell.references = [*map(sys.getrefcount, shell.modules)]
    return shell


def _assign(places: Places, shell: Shell) -> None:
    """Assign to the modules what their copies were assigned."""
    for module, part in zip(places.modules, shell.modules, strict=True):
        theirs, mine = vars(module), vars(part)
        for key in theirs.keys() - mine.keys():
            del theirs[key]
        for key, value in mine.items():
            if (
                key not in TABLES
                and not module_slots.is_cache(key)
                and theirs.get(key, _ABSENT) is not value
            ):
                theirs[key] = value
    shell.theirs = NEVER  # so that the attributes are copied anew before the next call


_ABSENT = object()


# Ways back --------------------------------------------------------------------------------------


def _reaches(value: Any, modules: set[int], depth: int) -> bool:
    """Whether an attribute leads to one of some modules, given by their ids."""
    if id(value) in modules:
        return True
    if not depth or isinstance(value, (Tensor, nn.Module, Places, type, str, int, float)):
        return False  # what holds Places calls their module in a shell
    return any(_reaches(x, modules, depth - 1) for x in [*closures.held_in(value, named=False)])
