"""What a function may keep from call to call: tensors that it writes to, and names that it assigns.

Names are assigned in a closure, among the globals that its code mentions, in a dict or a list, or
as the attributes of an object. A snapshot says what was there, so that it can be compared and put
back.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn

from .._torch import tensor_places
from ._reach import elsewhere, global_names


class Held(NamedTuple):
    """A tensor, and the numbers that it held."""

    tensor: Tensor
    numbers: Tensor


class Names(NamedTuple):
    """Some names, what is under them now, and what was there before."""

    owner: str  # "net.1", "counts", or "" for variables
    of_tensors: bool  # the parameters or buffers of a module
    now: Callable[[], dict[Any, Any]]
    set: Callable[[dict[Any, Any]], None]
    before: dict[Any, Any]

    def assigned(self) -> list[str]:
        """The names under which there is another object now."""
        now, missing = self.now(), object()
        keys = [
            k
            for k in {**self.before, **now}
            if now.get(k, missing) is not self.before.get(k, missing)
        ]
        return [self.called(key) for key in keys]

    def called(self, key: Any) -> str:
        """How a user would write it."""
        if not self.owner:
            return str(key)
        return f"{self.owner}.{key}" if isinstance(key, str) else f"{self.owner}[{key!r}]"

    def again(self) -> "Names":
        """A later snapshot."""
        return self._replace(before=self.now())


class Kept(NamedTuple):
    """Everything that is put back."""

    tensors: tuple[Held, ...] = ()
    names: tuple[Names, ...] = ()

    def put_back(self) -> None:
        """As it was. Version counters are not told: these are the numbers that were there."""
        for held in self.tensors:
            if differs(held.tensor, held.numbers):
                held.tensor.data.copy_(held.numbers)
        for names in self.names:
            if names.assigned():
                names.set(names.before)


def differs(x: Tensor, numbers: Tensor) -> bool:
    """Whether a tensor holds other numbers; NaN is NaN."""
    x = x.detach()
    if x.shape != numbers.shape:
        return True
    return not ((x == numbers) | ((x != x) & (numbers != numbers))).all()


# Where names are -------------------------------------------------------------------------


def names_of(fn: Any) -> list[Names]:
    """All names that a function may assign and find again in its next call."""
    return list(_of("", fn, set(), 4))


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
    elif isinstance(value, dict):
        yield _of_dict(path, value)
        inside = [(f"{path}[{key!r}]", x) for key, x in value.items()]
    elif isinstance(value, list):
        yield _of_list(path, value)
        inside = [(f"{path}[{i}]", x) for i, x in enumerate(value)]
    elif not (isinstance(value, (Tensor, type)) or elsewhere(type(value).__module__)):
        attributes = getattr(value, "__dict__", {})
        yield _of_dict(path, attributes)
        inside = [(f"{path}.{key}", x) for key, x in attributes.items()]
    for name, x in inside:
        yield from _of(name, x, seen, depth - 1)


def _of_module(path: str, root: nn.Module) -> Iterator[Names]:
    paths = {module: f"{path}.{name}" if name else path for name, module in root.named_modules()}
    for module, name in paths.items():
        yield _of_dict(name, vars(module))
    for module, attributes, kind in tensor_places(root):
        yield _of_dict(paths[module], attributes[kind])._replace(of_tensors=True)


def _of_dict(path: str, value: dict[Any, Any]) -> Names:
    def put(before: dict[Any, Any]) -> None:
        value.clear()
        value.update(before)

    return Names(path, False, lambda: dict(value), put, dict(value))


def _of_list(path: str, value: list[Any]) -> Names:
    def put(before: dict[Any, Any]) -> None:
        value[:] = before.values()

    return Names(path, False, lambda: dict(enumerate(value)), put, dict(enumerate(value)))


def _of_function(fn: FunctionType) -> Iterator[Names]:
    cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))

    def held() -> dict[str, Any]:
        return {name: _content(cell) for name, cell in cells.items()}

    def put_cells(before: dict[str, Any]) -> None:
        for name, content in before.items():
            if content is not _EMPTY:
                cells[name].cell_contents = content

    if cells:
        yield Names("", False, held, put_cells, held())
    if elsewhere(fn.__globals__.get("__name__", "")):
        return
    known, mentioned = fn.__globals__, global_names(fn.__code__)

    def found() -> dict[str, Any]:
        return {name: known[name] for name in mentioned if name in known}

    yield Names("", False, found, known.update, found())


_EMPTY = object()


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _EMPTY
