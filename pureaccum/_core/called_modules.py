"""What modules held when they were called, for a backward pass that calls them again.

A checkpointed module runs its forward pass again during the backward pass. By then
``functional_call`` has put the module's own parameters back, and the recomputation would use
those: a wrong gradient, without an error. So what every module held while it was called is
remembered in the forward pass and put back for the length of the backward pass.

That costs small networks a tenth of their time, and only checkpoints need it: see ``run_window``
in windows.py.
"""

import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import is_
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook

from .._base import checks, dtensors, states, trees
from .._base.torch_internals import functorch, kernels, module_slots


# The module that each part of a shell stands for. A shell keeps its tensors: see shell.py.
origins: "WeakKeyDictionary[torch.nn.Module, torch.nn.Module]" = WeakKeyDictionary()

# Anyone who puts tensors into a module itself does so alone. One lock for all modules, because some
# are parts of others.
ALONE = threading.RLock()

# By module and name, a copy of the table that was there, or the mode.
HeldTensors = dict[tuple[torch.nn.Module, str], Any]
Modules = dict[torch.nn.Module, bool]  # the modes of modules


class Ambiguous(states.Refusing):
    """What a module holds while nobody can tell what it should."""

    reason: ClassVar[str] = (
        "a checkpointed module was called with two different sets of parameters in one "
        "microbatch, so its recomputation cannot tell them apart. Checkpoint a function that "
        "calls functional_call itself: checkpoint(lambda p, x: functional_call(module, p, x), p, "
        "x)."
    )


def name_in(x: Tensor, modules: Iterable[torch.nn.Module]) -> str:
    """The name of a tensor in a module that was called, or else how it looks."""
    memory = kernels.memory_of(dtensors.local(x))
    for module in modules:
        for table in (module_slots.PARAMETERS, module_slots.BUFFERS):
            for key, tensor in vars(module)[table].items():
                if tensor is not None and kernels.memory_of(tensor) == memory:
                    return f"{key!r} of {type(module).__name__}"
    return f"a tensor of shape {tuple(x.shape)} and {x.dtype} that existed before"


class DroppedBuffersError(ValueError):
    """The loss of a step drops new buffers of a module, which would never move."""


class NewBuffers:
    """The new buffers that calls of ``functional(module).apply`` returned, until one is read.

    The values of other calls of the module may be dropped: of an adversarial pass, say.
    """

    def __init__(self) -> None:
        # By memory: the buffer, and a module and a name; and those of which a value was read.
        self.unread: dict[Any, tuple[Tensor, Any]] = {}
        self.read: set[Any] = set()

    def note(self, module: torch.nn.Module, old: dict[str, Tensor], new: dict[str, Tensor]) -> None:
        """Note the buffers that a call has changed; a counter alone says nothing."""
        for name, x in new.items():
            x, before = functorch.innermost(x), functorch.innermost(old[name])
            if not (name.endswith("num_batches_tracked") or torch.equal(x, before)):
                self.unread[kernels.memory_of(x)] = x, (name, module)

    def reads(self, memory: Any) -> None:
        """Note that something reads a memory."""
        if memory in self.unread:
            self.read.add(self.unread.pop(memory)[1])

    def dropped(self, out: Any) -> list[str]:
        """What an error says of each that reaches nothing of what a loss returned."""
        for x in trees.tree_leaves(out) if self.unread else ():
            if isinstance(x, Tensor):
                self.reads(kernels.memory_of(dtensors.local(x)))
        lost = (its for _, its in self.unread.values() if its not in self.read)
        return [_DROPPED.format(f"{name!r} of {type(module).__name__}") for name, module in lost]


_DROPPED = (
    "the loss drops the new buffers of a module: {} changes in each call of apply, but would keep "
    "its first value for ever, and eval() would compute with that (running statistics, or vectors "
    "of a spectral norm). Give the buffers to the loss, and return the new ones:\n\n"
    "    out, new_buffers = fn.apply(params, buffers, x)  # in loss(params, batch, buffers), which "
    "returns (value, new_buffers)\n"
    '    step = pa.make_step(loss, ..., buffers="pooled")  # state = step.init(fn.params, '
    "fn.buffers)\n\n"
    'To leave them as they are, use make_step(..., buffers="freeze"), or call net.eval().'
)


@contextmanager
def noting_calls(note: Callable[[torch.nn.Module], None]) -> Generator[None]:
    """Note each module that this thread is about to call, but for those in a graph."""
    thread = threading.get_ident()

    def before(module: torch.nn.Module, _args: object) -> None:
        if not torch.compiler.is_dynamo_compiling() and threading.get_ident() == thread:
            note(module)

    hook = register_module_forward_pre_hook(before)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def remembering() -> Generator[HeldTensors]:
    """Remember what is held by the modules that are called inside, and by those below them."""
    held: HeldTensors = {}
    places: dict[torch.nn.Module, list[module_slots.Place]] = {}

    def note(module: torch.nn.Module) -> None:
        # What is observed is called again, and a shell keeps its tensors.
        if checks.here.observed is not None or module in origins:
            return
        if module not in places:
            places[module] = module_slots.tensor_places(module)
        for owner, attributes, name in places[module]:
            now = attributes[name]
            if (owner, name) not in held:
                held[owner, name] = now.copy()
            elif name == module_slots.PARAMETERS:
                then = held[owner, name]
                # A tensor for each name: torch would take one for all of them for tied weights.
                for x in [x for x in then if then[x] is not now.get(x)]:
                    then[x] = torch.empty(0).as_subclass(Ambiguous)

    with noting_calls(note):
        yield held


def hold(held: HeldTensors, modes: Modules, roots: Iterable[torch.nn.Module]) -> None:
    """Note what modules hold now, and those in them, by themselves, and what mode they are in."""
    rest: list[Any] = [*roots]
    noted: set[Any] = {None}
    while rest:  # ``Module.modules`` would go through what is in several roots several times
        module = rest.pop()
        if module in noted:
            continue
        noted.add(module)
        attributes = vars(module)
        rest += attributes.get(module_slots.CHILDREN, {}).values()  # a traced module has none there
        if module_slots.is_compiled_module(module):
            continue  # Python cannot put anything else into it
        if module in origins:  # a shell keeps its tensors; its mode is that of its module
            module, attributes = origins[module], {}
        modes[module] = module.training
        for name in (module_slots.PARAMETERS, module_slots.BUFFERS):
            if attributes.get(name):
                held[module, name] = attributes[name].copy()


def replaced_since(held: HeldTensors) -> HeldTensors:
    """What was held by the modules that hold other tensors now."""
    return {
        (module, name): then
        for (module, name), then in held.items()
        if len(now := vars(module)[name]) != len(then)
        or not all(map(is_, now.values(), then.values()))
    }


def with_own_buffers(held: HeldTensors) -> HeldTensors:
    """The same with copies of all buffers, since what is run again writes to them again."""
    buffers = [
        x for (_, kind), then in held.items() if kind == module_slots.BUFFERS for x in then.values()
    ]
    copies = {id(x): x.clone() for x in buffers if x is not None}
    return {
        key: {name: copies.get(id(x), x) for name, x in then.items()} for key, then in held.items()
    }


def in_modes(modules: Modules) -> AbstractContextManager[None]:
    """Let modules be in training as they were when they were called."""
    name, pairs = "training", modules.items()
    return holding({(m, name): then for m, then in pairs if vars(m).get(name, then) != then})


@contextmanager
def holding(held: HeldTensors) -> Generator[None]:
    """Let every module hold again what it held when it was called."""
    with ALONE if held else nullcontext():
        own = {(module, name): vars(module)[name] for module, name in held}
        try:
            for (module, name), tensors in held.items():
                vars(module)[name] = tensors
            yield
        finally:
            for (module, name), tensors in own.items():
                vars(module)[name] = tensors
