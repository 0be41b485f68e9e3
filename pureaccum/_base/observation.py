"""A run that is observed supplies no number: it is dropped, and the same is run again.

torch has operations that give other numbers under a dispatch mode, even under one that only looks
(pytorch#198118). Nothing is left of the observed run: generators stand where they stood, what it
assigned to attributes of modules is put back, and hooks on saved tensors are not asked.

Other ranks may not observe theirs, since a rank decides by what it has seen so far. So there it
exchanges nothing: ``psum`` and ``gather`` give what they would if all ranks held the same (see
exchange.py), and at a collective of torch's, or an operation on DTensors, the run ends.
"""

import random
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from . import checks, dtensors, random_state, trees
from .torch_internals import autograd, modes, module_slots, operations


class _ReachedRanksError(BaseException):
    """An observed run is about to reach other ranks. Only ``observed`` may catch this."""


class Undo(ExitStack):
    """What undoes a run, and whether it was about to exchange something with other ranks."""

    reached = False


@contextmanager
def leaving_nothing() -> Generator[Undo]:
    """Say that what runs inside is dropped: its end undoes what it does."""
    with Undo() as undo:
        undo.callback(setattr, checks.here, "observed", checks.here.observed)
        checks.here.observed = undo
        undo.callback(random_states())
        with _following_modules():
            yield undo


def random_states(devices: Iterable[torch.device] | None = None) -> Callable[[], None]:
    """A function that puts generators back to where they stand now.

    These are Python's and numpy's, and torch's of the CPU and some devices, if these are given.
    """
    numpy, python = sys.modules.get("numpy.random"), random.getstate()
    words = None if numpy is None else numpy.get_state()
    drawn = [] if devices is None else random_state.generators(devices)

    def put_back() -> None:
        random.setstate(python)
        if numpy is not None:
            numpy.set_state(words)
        random_state.restore(drawn)

    return put_back


def observed(
    run: Callable[[], Any],
    devices: Iterable[torch.device],
    before: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], None] = lambda *_: None,
    see: Callable[[tuple[Any, ...], Any], None] | None = None,
) -> tuple[Any, Literal["whole", "reaching", "at ranks", "failed"]]:
    """What a run returns, or None, and how it ended; lack of memory is raised.

    One that is "reaching" called ``psum`` or ``gather``, and went on; "at ranks" it was ended.

    ``before(operation, args, kwargs)`` and ``see(operands, out)`` are called around each operation.
    Where the run has failed, and not because of the observer, so will the one that counts. Of
    torch's generators those that operations draw from are put back: other threads draw, too.
    """

    def look(operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        before(operation, args, kwargs)
        given = trees.tree_leaves((args, kwargs))
        if operation.namespace in operations.COLLECTIVES or dtensors.any_sharded(given):
            raise _ReachedRanksError
        if torch.Tag.nondeterministic_seeded in operation.tags:  # the first is undone last
            own = next((x for x in given if isinstance(x, torch.Generator)), None)
            with modes.unseen():
                if own is None:
                    undo.callback(random_state.restore, random_state.generators(devices))
                else:
                    undo.callback(own.set_state, own.get_state())

    with leaving_nothing() as undo:
        if autograd.saved_tensors_hooks() is not None:  # a checkpoint counts what is saved
            undo.enter_context(torch.autograd.graph.saved_tensors_hooks(_itself, _itself))
        try:
            with modes.seeing(see, look):
                out = run()
            return out, "reaching" if undo.reached else "whole"
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except _ReachedRanksError:
            return None, "at ranks"
        except Exception:
            return None, "failed"


def _itself(x: Any) -> Any:
    return x


def put_back_attributes(modules: Iterable[torch.nn.Module]) -> None:
    """Let an observed run leave the attributes of modules as they are now."""
    if (undo := checks.here.observed) is not None:
        for module in modules:
            undo.callback(_put_back, vars(module), dict(vars(module)))


def _put_back(attributes: dict[str, Any], then: dict[str, Any]) -> None:
    for name in attributes.keys() - then.keys():  # "I have my hooks", of hooks that are undone
        attributes.pop(name, None)
    attributes.update(then)


@contextmanager
def _following_modules() -> Generator[None]:
    """Let modules that are called inside, in this thread, be left as they are now.

    Buffers count that a module itself replaces: others may have put theirs into it for the call.
    """
    undo, held = checks.here.observed, dict[torch.nn.Module, dict[str, Any]]()

    def before(module: torch.nn.Module, _: object) -> None:
        if checks.here.observed is undo and not module_slots.is_compiled_module(module):
            put_back_attributes([module])
            if not held:  # those below it follow
                _put_back_hooks(module.modules())
            held[module] = vars(module)[module_slots.BUFFERS].copy()

    def after(module: torch.nn.Module, *_: object) -> None:
        if checks.here.observed is undo and module in held:
            table = vars(module)[module_slots.BUFFERS]
            for name, old in held.pop(module).items():
                if (new := table.get(name)) is not old:
                    undo.callback(_replace, table, name, new, old)

    with ExitStack() as hooks:
        hooks.callback(register_module_forward_pre_hook(before).remove)
        hooks.callback(register_module_forward_hook(after).remove)
        yield


def _replace(table: dict[str, Any], name: str, new: Any, old: Any) -> None:
    if table.get(name) is new:
        table[name] = old


def _put_back_hooks(modules: Iterable[torch.nn.Module]) -> None:
    """Let an observed run leave the hooks of modules as they are now, which shells share."""
    if (undo := checks.here.observed) is not None:
        tables = [x for m in modules for name, x in vars(m).items() if "hooks" in name]
        undo.callback(_refill, [(x, x.copy()) for x in tables if isinstance(x, dict)])


def _refill(tables: Iterable[tuple[dict[Any, Any], dict[Any, Any]]]) -> None:
    for table, then in tables:
        if table != then:
            table.clear()
            table.update(then)
