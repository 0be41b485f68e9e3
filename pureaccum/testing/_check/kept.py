"""What a function may keep from call to call: tensors that it writes to, and names that it assigns.

Names are assigned in a closure, among the globals that its code mentions, in a dict or a list, or
as the attributes of an object. A snapshot says what was there, so that it can be compared and put
back.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..._base import tensor_places
from .._pure import elsewhere, global_names


class Held(NamedTuple):
    """A tensor, and the numbers that it held."""

    tensor: Tensor
    numbers: Tensor


class Names(NamedTuple):
    """Some names, what is under them now, and what was there before."""

    owner: str  # "net.1", "counts", or "" for variables
    kind: Literal["names", "attributes", "tensors", "grads", "cache"]
    now: Callable[[], dict[Any, Any]]
    set: Callable[[dict[Any, Any]], None]
    before: dict[Any, Any]

    def assigned(self) -> list[str]:
        """The names under which there is another object now."""
        now, before = self.now(), self.before
        if now.keys() == before.keys() and all(map(_is, now.values(), before.values())):
            return []
        keys, none = {**before, **now}, object()
        return [self.called(k) for k in keys if not _is(now.get(k, none), before.get(k, none))]

    def called(self, key: Any) -> str:
        """How a user would write it."""
        if not self.owner or key == "":
            return self.owner or str(key)
        return f"{self.owner}.{key}" if isinstance(key, str) else f"{self.owner}[{key!r}]"

    def again(self) -> "Names":
        """A later snapshot."""
        return self._replace(before=self.now())


def _is(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, (int, float, str, bytes)) and a == b)


class Kept(NamedTuple):
    """Everything that is put back."""

    tensors: tuple[Held, ...] = ()
    names: tuple[Names, ...] = ()

    def put_back(self) -> None:
        """As it was. Version counters are not told: these are the numbers that were there."""
        for held in self.tensors:
            if held.tensor.shape != held.numbers.shape:
                held.tensor.data = held.numbers.clone()
            elif differs(held.tensor, held.numbers):
                held.tensor.data.copy_(held.numbers)
        for names in self.names:
            if names.assigned():
                names.set(names.before)


def differs(x: Tensor, numbers: Tensor) -> bool:
    """Whether a tensor holds other numbers; NaN is NaN."""
    x, numbers = x.detach().to_dense(), numbers.to_dense()
    if x.shape != numbers.shape:
        return True
    return not ((x == numbers) | ((x != x) & (numbers != numbers))).all()


# Where names are -------------------------------------------------------------------------


def names_of(*functions: Any) -> list[Names]:
    """All names that functions may assign and find again in their next call."""
    seen: set[int] = set()
    return [names for fn in functions for names in _of("", fn, seen, 5)]


def _of(path: str, value: Any, seen: set[int], depth: int) -> Iterator[Names]:
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
        names = [*_of_function(value)]
        yield from names
        inside = [(str(key), x) for each in names for key, x in each.before.items()]
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        inside += [(f"a default of {value.__name__}", x) for x in defaults]
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
        yield from _of(name, x, seen, depth - 1)


def _of_module(path: str, root: nn.Module) -> Iterator[Names]:
    paths = {module: f"{path}.{name}" if name else path for name, module in root.named_modules()}
    for module, name in paths.items():
        yield _of_dict(name, vars(module))._replace(kind="attributes")
        for key, value in vars(module).items():  # hooks are in dicts, too
            if not key.startswith("_") or "hooks" in key:
                inside = _of_container(f"{name}.{key}", value)
                if inside is not None:
                    yield inside._replace(kind="attributes")
    for module, attributes, kind in tensor_places(root):
        yield _of_dict(paths[module], attributes[kind])._replace(kind="tensors")
    yield _of_grads(path, dict(root.named_parameters()))


def _of_grads(path: str, parameters: dict[str, nn.Parameter]) -> Names:
    """Gradients by identity: those that are there already are tensors like others."""

    def grads() -> dict[str, Tensor | None]:
        return {f"{name}.grad": p.grad for name, p in parameters.items()}

    def put(before: dict[str, Tensor | None]) -> None:
        for name, p in parameters.items():
            p.grad = before[f"{name}.grad"]

    return Names(path, "grads", grads, put, grads())


def _of_dict(path: str, value: dict[Any, Any]) -> Names:
    def put(before: dict[Any, Any]) -> None:
        value.clear()
        value.update(before)

    return Names(path, "names", lambda: dict(value), put, dict(value))


def _of_container(path: str, value: Any) -> Names | None:
    """By its contents, whatever it is; a whole data set is data, and no state."""
    if isinstance(value, (dict, list, deque, set)) and len(value) > _MOST:
        return None
    if isinstance(value, dict):
        return _of_dict(path, value)
    if isinstance(value, (list, deque)):

        def put(before: dict[int, Any]) -> None:
            value.clear()
            value.extend(before.values())

        return Names(path, "names", lambda: dict(enumerate(value)), put, dict(enumerate(value)))
    if isinstance(value, set):

        def put_set(before: dict[Any, Any]) -> None:
            value.clear()
            value.update(before)

        return Names(path, "names", lambda: {x: x for x in value}, put_set, {x: x for x in value})
    numpy = sys.modules.get("numpy")
    if numpy and isinstance(value, numpy.ndarray) and value.size <= _MOST:
        copy = value.copy()

        def put_array(before: dict[str, bytes]) -> None:
            value[...] = copy

        return Names(path, "names", lambda: {"": value.tobytes()}, put_array, {"": copy.tobytes()})
    return None


_MOST = 10_000


def _of_cache(path: str, function: Any) -> Names:
    """What a function remembers is not state, but was made in another dtype, perhaps."""

    def misses() -> dict[str, int]:
        return {"": function.cache_info().misses}

    return Names(path, "cache", misses, lambda _: function.cache_clear(), misses())


def _of_function(fn: FunctionType) -> Iterator[Names]:
    cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))

    def held() -> dict[str, Any]:
        return {name: _content(cell) for name, cell in cells.items()}

    def put_cells(before: dict[str, Any]) -> None:
        for name, content in before.items():
            if content is not _EMPTY:
                cells[name].cell_contents = content

    if cells:
        yield Names("", "names", held, put_cells, held())
    if elsewhere(fn.__globals__.get("__name__", "")):
        return
    known, mentioned = fn.__globals__, global_names(fn.__code__)

    def found() -> dict[str, Any]:
        return {name: known[name] for name in mentioned if name in known}

    yield Names("", "names", found, known.update, found())


_EMPTY = object()


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _EMPTY
