"""What modules held when they were called, for a backward pass that calls them again.

A checkpointed module runs its forward pass again during the backward pass. By then
``functional_call`` has put the module's own parameters back, and the recomputation would use
those: a wrong gradient, without an error. So what every module held while it was called is
remembered in the forward pass and put back for the length of the backward pass.

That costs small networks a tenth of their time, and only checkpoints need it: see ``run_window``
in windows.py.
"""

import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from .._base.checks import here
from .._base.states import Refusing
from .._base.torch_internals import BUFFERS, PARAMETERS, Place, tensor_places


# The module that each part of a shell stands for. A shell keeps its tensors: see shell.py.
origins: "WeakKeyDictionary[torch.nn.Module, torch.nn.Module]" = WeakKeyDictionary()

# Anyone who puts tensors into a module itself does so alone. One lock for all modules, because some
# are parts of others.
ALONE = threading.RLock()

# By module and name, a copy of the table that was there.
HeldTensors = dict[tuple[torch.nn.Module, str], tuple[Place, dict[str, Any]]]


class Called(NamedTuple):
    """A module that was called."""

    training: bool
    places: list[Place]


Modules = dict[torch.nn.Module, Called]


class Ambiguous(Refusing):
    """What a module holds while nobody can tell what it should."""

    reason: ClassVar[str] = (
        "a checkpointed module was called with two different sets of parameters in one "
        "microbatch, so its recomputation cannot tell which is meant. Checkpoint a function that "
        "calls functional_call itself: checkpoint(lambda p, x: functional_call(module, p, x), p, x)"
    )


@contextmanager
def remembering(
    held: HeldTensors | None = None, modules: Modules | None = None
) -> Generator[HeldTensors]:
    """Remember what is held by the modules that are called inside, and by those below them.

    It goes into ``held``, and the modules themselves into ``modules``.
    """
    held = {} if held is None else held
    seen: Modules = {} if modules is None else modules
    ambiguous: set[tuple[torch.nn.Module, str]] = set()
    thread = threading.get_ident()

    def before(module: torch.nn.Module, _args: object) -> None:
        if torch.compiler.is_dynamo_compiling() or threading.get_ident() != thread:
            return
        if here.observed is not None:  # what is called there is called again
            return
        if module in origins:  # its mode is that of the module that it stands for
            seen.setdefault(origins[module], Called(origins[module].training, []))
            return
        if module not in seen:
            seen[module] = Called(module.training, tensor_places(module))
        for place in seen[module].places:
            owner, attributes, name = place
            now = attributes[name]
            if (owner, name) not in held:
                held[owner, name] = place, now.copy()
            elif name == "_parameters":
                then = held[owner, name][1]
                ambiguous.update([(owner, x) for x in then if then[x] is not now.get(x)])

    watch = register_module_forward_pre_hook(before)
    try:
        yield held
    finally:
        watch.remove()
        for key, (place, then) in held.items():
            if place[2] == "_parameters":
                # A tensor for each name: torch would take one for all of them for tied weights.
                refusing = {
                    name: torch.empty(0).as_subclass(Ambiguous)
                    for name in then
                    if (place[0], name) in ambiguous
                }
                held[key] = (place, then | refusing)


def hold(held: HeldTensors, seen: Modules, modules: Iterable[torch.nn.Module]) -> None:
    """Note what modules hold now by themselves, and what mode they are in."""
    for module in modules:
        attributes = vars(module)
        seen[module] = Called(module.training, [])
        for name in (PARAMETERS, BUFFERS):
            if attributes.get(name):
                held[module, name] = (module, attributes, name), attributes[name].copy()


def with_own_buffers(held: HeldTensors) -> HeldTensors:
    """The same with copies of all buffers, since what is run again writes to them again."""
    buffers = [x for (_, name), (_, then) in held.items() if name == BUFFERS for x in then.values()]
    copies = {id(x): x.clone() for x in buffers if x is not None}
    return {
        key: (place, {name: copies.get(id(x), x) for name, x in then.items()})
        for key, (place, then) in held.items()
    }


@contextmanager
def in_modes(modules: Modules) -> Generator[None]:
    """Let modules be in training as they were when they were called."""
    others = {x: then.training for x, then in modules.items() if x.training != then.training}
    with ALONE if others else nullcontext():
        try:
            for module, then in others.items():
                module.training = then
            yield
        finally:
            for module, then in others.items():
                module.training = not then


@contextmanager
def holding(held: HeldTensors) -> Generator[None]:
    """Let every module hold again what it held when it was called."""
    with ALONE if held else nullcontext():
        own = [(attributes, name, attributes[name]) for (_, attributes, name), _ in held.values()]
        try:
            for (_, attributes, name), tensors in held.values():
                attributes[name] = tensors
            yield
        finally:
            for attributes, name, tensors in own:
                attributes[name] = tensors
