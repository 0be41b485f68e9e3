"""The state that a function may keep between calls: tensors it writes to, and names it assigns.

Names are assigned in a closure, among the globals that its code mentions, in a dict or a list, or
as the attributes of an object. A snapshot records them, so that they can be compared and restored.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..._base.torch_internals import module_slots
from .._assertions import dense, same
from .._pure import captured, contents, elsewhere, global_names


_Kind = Literal["names", "attributes", "tensors", "grads", "cache"]


class Held(NamedTuple):
    """A tensor, and the numbers that it held."""

    tensor: Tensor
    numbers: Tensor


class Namespace(NamedTuple):
    """Some names, what is under them now, and what was there before."""

    owner: str  # "net.1", "counts", or "" for variables
    kind: _Kind
    now: Callable[[], dict[Any, Any]]
    put: Callable[[dict[Any, Any]], object]
    before: dict[Any, Any]

    def assigned(self) -> list[str]:
        """The names under which there is another object now."""
        now, before = self.now(), self.before
        if now.keys() == before.keys() and all(map(_is, now.values(), before.values())):
            return []
        none = object()
        differ = (k for k in before | now if not _is(now.get(k, none), before.get(k, none)))
        return [self.called(k) for k in differ]

    def called(self, key: Any) -> str:
        """A name as a user would write it."""
        if not self.owner or key == "":
            return self.owner or str(key)
        return f"{self.owner}.{key}" if isinstance(key, str) else f"{self.owner}[{key!r}]"

    def items(self) -> list[tuple[str, Any]]:
        """What was there, by the names that a user would write."""
        return [(self.called(key), x) for key, x in self.before.items()]


def _is(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, (int, float, str, bytes)) and a == b)


class Kept(NamedTuple):
    """Everything that is put back."""

    tensors: tuple[Held, ...] = ()
    names: tuple[Namespace, ...] = ()

    def put_back(self) -> None:
        """Put everything back, behind the version counters: these numbers were there before."""
        for held in self.tensors:
            if held.tensor.shape != held.numbers.shape:
                held.tensor.data = held.numbers.clone()
            elif differs(held.tensor, held.numbers):
                held.tensor.data.copy_(held.numbers)
        for names in self.names:
            if names.assigned():
                names.put(names.before)


def differs(x: Tensor, numbers: Tensor) -> bool:
    """Whether a tensor holds other numbers; a NaN is the same as a NaN."""
    return not same(dense(x), dense(numbers))


# Where names are -------------------------------------------------------------------------


def names_of(*functions: Any) -> list[Namespace]:
    """All names that functions may assign and find again in their next call."""
    seen: set[int] = set()
    return [names for fn in functions for names in _below("", fn, seen, 5)]


def _below(path: str, x: Any, seen: set[int], depth: int) -> Iterator[Namespace]:
    if id(x) in seen or not depth:
        return
    seen.add(id(x))
    own, inside = _looked_into(path, x)
    yield from own
    for name, it in inside:
        yield from _below(name, it, seen, depth - 1)


def _looked_into(path: str, x: Any) -> tuple[list[Namespace], Iterable[tuple[str, Any]]]:
    """The names in a thing itself, and what has to be looked into next."""
    if isinstance(x, nn.Module):
        return [*_of_module(path or type(x).__name__, x)], ()
    if isinstance(x, partial):
        return [], [(path, it) for it in (x.func, *x.args, *x.keywords.values())]
    if isinstance(x, MethodType):
        return [], [("self", x.__self__), (path, x.__func__)]
    if isinstance(x, FunctionType):
        return [*_of_function(x)], captured(x)
    if hasattr(x, "cache_clear"):
        return [_of_cache(path, x)], ()
    if isinstance(x, torch.optim.Optimizer):
        return [], [(f"{path}.state", x.state)]
    names = _of_container(path, x) or _of_attributes(path, x)
    return ([names], names.items()) if names else ([], ())


def _of_module(path: str, root: nn.Module) -> Iterator[Namespace]:
    paths = {module: f"{path}.{name}" if name else path for name, module in root.named_modules()}
    for module, name in paths.items():
        yield _of_dict(name, vars(module), "attributes")
        for key, value in vars(module).items():  # hooks are in dicts, too
            if not key.startswith("_") or "hooks" in key:
                inside = _of_container(f"{name}.{key}", value)
                if inside is not None:
                    yield inside._replace(kind="attributes")
    for module, attributes, kind in module_slots.tensor_places(root):
        yield _of_dict(paths[module], attributes[kind], "tensors")
    yield _of_grads(path, dict(root.named_parameters()))


def _of_grads(path: str, parameters: dict[str, nn.Parameter]) -> Namespace:
    """Gradients by identity: those that are there already are tensors like others."""

    def grads() -> dict[str, Tensor | None]:
        return {f"{name}.grad": p.grad for name, p in parameters.items()}

    def put(before: dict[str, Tensor | None]) -> None:
        for name, p in parameters.items():
            p.grad = before[f"{name}.grad"]

    return _snapshot(path, "grads", grads, put)


def _of_container(path: str, x: Any) -> Namespace | None:
    """A container of any kind by its contents; a whole data set is data, and no state."""
    numpy = sys.modules.get("numpy")
    if numpy and isinstance(x, numpy.ndarray) and x.size <= _MOST:
        return _of_array(path, x)
    if not isinstance(x, (dict, list, deque, set)) or len(x) > _MOST:
        return None
    if isinstance(x, dict):
        return _of_dict(path, x)

    def now() -> dict[Any, Any]:
        return {it: it for it in x} if isinstance(x, set) else dict(enumerate(x))

    def put(before: dict[Any, Any]) -> None:
        x.clear()
        (x.update if isinstance(x, set) else x.extend)(before.values())

    return _snapshot(path, "names", now, put)


_MOST = 10_000


def _of_attributes(path: str, x: Any) -> Namespace | None:
    """The attributes of an object, if it is of a class of the user's."""
    if isinstance(x, SimpleNamespace) or not (
        isinstance(x, (Tensor, type)) or elsewhere(type(x).__module__)
    ):
        return _of_dict(path, getattr(x, "__dict__", {}))
    return None


def _of_dict(path: str, x: dict[Any, Any], kind: _Kind = "names") -> Namespace:
    def put(before: dict[Any, Any]) -> None:
        x.clear()
        x.update(before)

    return _snapshot(path, kind, lambda: dict(x), put)


def _of_array(path: str, value: Any) -> Namespace:
    copy = value.copy()

    def put(before: dict[str, bytes]) -> None:
        value[...] = copy

    return _snapshot(path, "names", lambda: {"": value.tobytes()}, put)


def _of_cache(path: str, function: Any) -> Namespace:
    """What a function remembers, which is not state, but may have been made in another dtype."""

    def misses() -> dict[str, int]:
        return {"": function.cache_info().misses}

    return _snapshot(path, "cache", misses, lambda before: function.cache_clear())


def _of_function(fn: FunctionType) -> Iterator[Namespace]:
    cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
    known, mentioned = fn.__globals__, global_names(fn)

    def closed_over() -> dict[str, Any]:
        return dict(contents(cells))

    def put(before: dict[str, Any]) -> None:
        for name, content in before.items():
            cells[name].cell_contents = content

    def found() -> dict[str, Any]:
        return {name: known[name] for name in mentioned if name in known}

    if cells:
        yield _snapshot("", "names", closed_over, put)
    if mentioned:
        yield _snapshot("", "names", found, known.update)


def _snapshot(
    owner: str,
    kind: _Kind,
    now: Callable[[], dict[Any, Any]],
    put: Callable[[dict[Any, Any]], object],
) -> Namespace:
    return Namespace(owner=owner, kind=kind, now=now, put=put, before=now())
