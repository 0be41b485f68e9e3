"""What functions hold: what they close over, are bound to, name, or have as a default."""

import itertools
import sys
from collections import deque
from collections.abc import Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from .._base.trees import flatten, paths


def reachable(roots: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The leaves of trees by their paths, and the tensors and modules that functions there hold."""
    waiting = deque((name, tree, True) for name, tree in roots.items())
    seen: set[int] = set()
    while waiting:
        root, tree, given = waiting.popleft()
        leaves, spec = flatten(tree)
        if not given and not any(map(_matters, leaves)):
            continue  # a list of a million words has a million paths
        for path, leaf in zip(paths(spec, root), leaves, strict=True):
            if given or (isinstance(leaf, (Tensor, nn.Module)) and id(leaf) not in seen):
                yield path, leaf
            if id(leaf) not in seen and _matters(leaf):
                seen.add(id(leaf))
                waiting.extend((name, held, False) for name, held in _held(path, leaf))


def _matters(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) or callable(leaf)


def _held(path: str, leaf: Any) -> Iterator[tuple[str, Any]]:
    """What a leaf holds: modules and tensors are looked at as a whole, and not here."""
    if isinstance(leaf, partial):
        for name in ("func", "args", "keywords"):
            yield f"{path}.{name}", getattr(leaf, name)
    elif isinstance(leaf, MethodType):
        owner = leaf.__self__
        if isinstance(owner, nn.Module):
            yield f"{path}.__self__", owner
        else:
            yield from _attributes(f"{path}.__self__", owner)
        yield path, leaf.__func__
    elif isinstance(leaf, FunctionType):
        for name, held in _captured(leaf):
            yield f"{leaf.__name__}'s {name}", held
    elif not isinstance(leaf, (Tensor, nn.Module, type)):
        yield from _attributes(path, leaf)


def _attributes(path: str, owner: Any) -> Iterator[tuple[str, Any]]:
    if not elsewhere(type(owner).__module__):
        yield from (
            (f"{path}.{name}", held) for name, held in getattr(owner, "__dict__", {}).items()
        )


def _captured(fn: FunctionType) -> Iterator[tuple[str, Any]]:
    code = fn.__code__
    for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    positional = code.co_varnames[: code.co_argcount]
    yield from zip(reversed(positional), reversed(fn.__defaults__ or ()), strict=False)
    yield from (fn.__kwdefaults__ or {}).items()
    if not elsewhere(fn.__globals__.get("__name__", "")):
        known = fn.__globals__
        yield from ((name, known[name]) for name in global_names(code) if name in known)


def global_names(code: CodeType) -> list[str]:
    """The globals that code may look up, that of functions inside it too."""
    inside = [const for const in code.co_consts if isinstance(const, CodeType)]
    names = itertools.chain(code.co_names, *map(global_names, inside))
    return list(dict.fromkeys(names))


_ELSEWHERE = {"torch", "optree", "numpy", __name__.partition(".")[0], *sys.stdlib_module_names}
_ELSEWHERE.discard("__main__")


def elsewhere(module: str) -> bool:
    """Whether code is torch's or Python's own, whose globals are not the caller's to keep still."""
    return module.partition(".")[0] in _ELSEWHERE
