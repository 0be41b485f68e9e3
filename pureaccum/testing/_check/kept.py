"""What a function may keep from call to call: tensors that it writes to, and names that it assigns.

Names are assigned in a closure, among the globals that its code mentions, in a dict or a list, or
as the attributes of an object. A snapshot says what was there, so that it can be compared and put
back.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..._base.torch_internals import tensor_places
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
        keys, none = {**before, **now}, object()
        return [self.called(k) for k in keys if not _is(now.get(k, none), before.get(k, none))]

    def called(self, key: Any) -> str:
        """A name as a user would write it."""
        if not self.owner or key == "":
            return self.owner or str(key)
        return f"{self.owner}.{key}" if isinstance(key, str) else f"{self.owner}[{key!r}]"

    def again(self) -> "Namespace":
        """A later snapshot of these names."""
        return self._replace(before=self.now())


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


def _below(path: str, value: Any, seen: set[int], depth: int) -> Iterator[Namespace]:
    if id(value) in seen or not depth:
        return
    seen.add(id(value))
    inside: Iterable[tuple[str, Any]] = ()
    if isinstance(value, nn.Module):
        yield from _of_module(path or type(value).__name__, value)
    elif isinstance(value, partial):
        inside = [(path, x) for x in (value.func, *value.args, *value.keywords.values())]
    elif isinstance(value, MethodType):
        inside = [("self", value.__self__), (path, value.__func__)]
    elif isinstance(value, FunctionType):
        yield from _of_function(value)
        inside = captured(value)
    elif hasattr(value, "cache_clear"):
        yield _of_cache(path, value)
    elif isinstance(value, torch.optim.Optimizer):
        inside = [(f"{path}.state", value.state)]
    elif (names := _of_container(path, value)) is not None:
        yield names
        inside = [(names.called(key), x) for key, x in names.before.items()]
    elif isinstance(value, SimpleNamespace) or not (
        isinstance(value, (Tensor, type)) or elsewhere(type(value).__module__)
    ):
        attributes = getattr(value, "__dict__", {})
        yield _of_dict(path, attributes)
        inside = [(f"{path}.{key}", x) for key, x in attributes.items()]
    for name, x in inside:
        yield from _below(name, x, seen, depth - 1)


def _of_module(path: str, root: nn.Module) -> Iterator[Namespace]:
    paths = {module: f"{path}.{name}" if name else path for name, module in root.named_modules()}
    for module, name in paths.items():
        yield _of_dict(name, vars(module), "attributes")
        for key, value in vars(module).items():  # hooks are in dicts, too
            if not key.startswith("_") or "hooks" in key:
                inside = _of_container(f"{name}.{key}", value)
                if inside is not None:
                    yield inside._replace(kind="attributes")
    for module, attributes, kind in tensor_places(root):
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


def _of_container(path: str, value: Any) -> Namespace | None:
    """A container of any kind by its contents; a whole data set is data, and no state."""
    numpy = sys.modules.get("numpy")
    if numpy and isinstance(value, numpy.ndarray) and value.size <= _MOST:
        return _of_array(path, value)
    if not isinstance(value, (dict, list, deque, set)) or len(value) > _MOST:
        return None
    if isinstance(value, dict):
        return _of_dict(path, value)

    def now() -> dict[Any, Any]:
        return {x: x for x in value} if isinstance(value, set) else dict(enumerate(value))

    def put(before: dict[Any, Any]) -> None:
        value.clear()
        (value.update if isinstance(value, set) else value.extend)(before.values())

    return _snapshot(path, "names", now, put)


_MOST = 10_000


def _of_dict(path: str, value: dict[Any, Any], kind: _Kind = "names") -> Namespace:
    def put(before: dict[Any, Any]) -> None:
        value.clear()
        value.update(before)

    return _snapshot(path, kind, lambda: dict(value), put)


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
