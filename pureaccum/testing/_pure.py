"""What a call must not change: a snapshot before it is compared with one after it.

A snapshot records bits, versions, hooks and attributes of everything that the call reaches: its
arguments, and whatever functions among them close over, are bound to, name, or have as a default.
It also records torch's modes and the global random generators.
"""

import random
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .._base import trees
from .._base.states import Refusing
from .._base.torch_internals import autograd, functorch, module_slots
from .._core import closures
from ._assertions import dense


T = TypeVar("T")
Looks = dict[str, Any]  # what can be seen of one thing: bits, version, ...
Picture = dict[str, Looks]  # of things by their names: args[0]['w'], torch, ...


def assert_pure(fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Call a function, assert that it changed nothing, and return its result.

    The rule: a snapshot of everything that the call reaches is the same before and after it.

    The snapshot records its arguments, and the modules and tensors that it closes over, is bound to
    or names: their bits, versions, ``.grad`` and hooks, and the contents of modules. It also
    records torch's modes and the global random generators of torch, Python and NumPy.

    Args:
        fn: A function, a method, a ``functools.partial``, a module.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Raises:
        AssertionError: Something changed; the message names all of it. An error of ``fn``
            propagates unchanged, or is the cause of this one if something changed as well.

    Example:
        >>> assert_pure(torch.add, torch.tensor(1.0), torch.tensor(2.0))
        tensor(3.)
        >>> assert_pure(lambda tree: tree["w"].add_(1), {"w": torch.tensor(1.0)})
        Traceback (most recent call last):
        AssertionError: the call changed args[0]['w']: bits, version (0 before, 1 after). \
Likely cause: an operation in place, such as add_, +=, copy_ or out=.

    References:
        `Pure functions in JAX
        <https://docs.jax.dev/en/latest/notebooks/Common_Gotchas_in_JAX.html>`_
    """
    __tracebackhide__ = True  # of pytest
    with _watched({"fn": fn, "args": args, "kwargs": kwargs}, draws=False):
        return fn(*args, **kwargs)


@contextmanager
def unchanged(*things: Any, draws: bool = False) -> Generator[None]:
    """Assert that a block changes neither the given things nor the modes of torch.

    The rule: the assertion of ``assert_pure``, for a block, whether or not the block raises.

    Args:
        things: Tensors, modules, functions, and trees of them.
        draws: Whether drawing from the global random generators is allowed.

    Raises:
        AssertionError: Something changed; the message names all of it.

    Example:
        >>> x = torch.tensor([1.0, 2.0])
        >>> with unchanged(x):
        ...     y = x + 1
        >>> with unchanged():
        ...     y = torch.dropout(x, 0.5, train=True)
        Traceback (most recent call last):
        AssertionError: the call changed torch's generator: state. \
Likely cause: a draw without a generator or a key of its own.
    """
    __tracebackhide__ = True  # of pytest
    with _watched({"things": things}, draws):
        yield


@contextmanager
def _watched(roots: dict[str, Any], draws: bool) -> Generator[None]:
    __tracebackhide__ = True  # of pytest
    before = _picture(roots, draws)
    try:
        yield
    except BaseException as error:
        if said := _changes(before, _picture(roots, draws)):
            raise AssertionError(said) from error
        raise
    if said := _changes(before, _picture(roots, draws)):
        raise AssertionError(said)


# What has changed ------------------------------------------------------------------------


_CAUSES = {
    "class": "a state that was donated, or a lazy module that now has its parameters",
    "identity": "another object was put in its place",
    "bits": "an operation in place, such as add_, +=, copy_ or out=",
    "version": "an operation in place that wrote the same numbers",
    "grad": "a backward pass: torch.func and torch.autograd.grad leave no .grad",
    "training": "train() or eval() that was not undone",
    "hooks": "a hook that was not removed",
    "state": "a draw without a generator or a key of its own",
}
_GENERATORS = ("torch's generator", "CUDA's generators", "Python's generator", "NumPy's generator")
_PLAIN = (bool, int, str, type, type(None), torch.dtype, torch.device, torch.Size)


def _changes(before: Picture, after: Picture) -> str:
    """The differences of two pictures in words; empty where there are none."""
    said: list[str] = []
    causes: list[str] = []
    for name in before | after:
        was, now = before.get(name), after.get(name)
        if was is None or now is None:
            # a generator that is new was seeded, and not drawn from
            if was is not None or name not in _GENERATORS:
                said.append(f"{name}, which is {'new' if was is None else 'gone'}")
        elif changed := _changed(was, now):
            said.append(f"{name}: " + ", ".join(_change(what, was, now) for what in changed))
            causes += (_CAUSES.get("hooks" if "hooks" in what else what, "") for what in changed)
    because = next((f" Likely cause: {cause}." for cause in causes if cause), "")
    return f"the call changed {'; '.join(said)}.{because}" if said else ""


def _changed(was: Looks, now: Looks) -> list[str]:
    """Which looks differ: of another object, or of one of another class, only that it is."""
    changed = [what for what in was | now if was.get(what, _Is(was)) != now.get(what, _Is(now))]
    return next(([what] for what in ("class", "identity") if what in changed), changed)


def _change(what: str, was: Looks, now: Looks) -> str:
    if what not in was or what not in now:
        return f"{what} ({'new' if what in now else 'gone'})"
    values = [was[what], now[what]]
    if not all(isinstance(value, _PLAIN) for value in values):
        return what
    before, after = (getattr(value, "__name__", value) for value in values)
    return f"{what} ({before} before, {after} after)"


# Pictures --------------------------------------------------------------------------------


class _Is:
    """Equal only to the same object, which it keeps alive so that no other takes its address."""

    def __init__(self, it: object) -> None:
        self.it = it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Is) and self.it is other.it


class _Bits:
    """A copy of the numbers of a tensor, equal to the same bits: NaN and -0 included."""

    def __init__(self, x: Tensor) -> None:
        x = x.detach()
        if x.layout == torch.sparse_coo:
            parts = [x.coalesce().indices(), x.coalesce().values()]
        else:
            parts = [dense(x)] if x.device.type != "meta" else []
        flat = (part.clone(memory_format=torch.contiguous_format).reshape(-1) for part in parts)
        self.parts = [part.view(torch.uint8) for part in flat]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Bits) or len(self.parts) != len(other.parts):
            return False
        return all(map(torch.equal, self.parts, other.parts))


def _picture(roots: dict[str, Any], draws: bool) -> Picture:
    seen = {"torch": _modes()} | ({} if draws else _generators())
    for name, leaf in reachable(roots):
        if isinstance(leaf, nn.Module):
            seen |= _module(name, leaf)
        else:
            seen[name] = _tensor(leaf) if isinstance(leaf, Tensor) else {"identity": _Is(leaf)}
    return seen


def _tensor(x: Tensor) -> Looks:
    looks: Looks = {"identity": _Is(x), "class": type(x)}
    if isinstance(x, Refusing) or torch.nn.parameter.is_lazy(x):
        return looks  # it holds no numbers
    looks |= {
        "bits": _Bits(x),
        "version": autograd.version(x),
        "dtype": x.dtype,
        "shape": x.shape,
        "device": x.device,
        "requires_grad": x.requires_grad,
        "grad_fn": _Is(x.grad_fn),
        "hooks": autograd.tensor_hooks(x),
    }
    if x.layout == torch.strided:
        looks["memory"] = (x.data_ptr(), x.stride())
    else:
        looks["layout"] = (x.layout, x.layout == torch.sparse_coo and x.is_coalesced())
    if x.is_leaf:
        looks["grad"] = None if x.grad is None else _tensor(x.grad)
    return looks


def _module(path: str, root: nn.Module) -> Picture:
    seen: Picture = {}
    tensors = [*root.named_parameters(), *root.named_buffers()]
    for name, module in root.named_modules():
        dot = f"{name}." if name else ""
        looks = seen[f"{path}.{name}".rstrip(".")] = {"identity": _Is(module)}
        for key, value in module_slots.module_vars(module).items():
            looks[key] = value if isinstance(value, _PLAIN) else _Is(value)
            if isinstance(value, (dict, list, set)):
                looks[f"what is in {key}"] = _inside(value)
            elif isinstance(value, Tensor):
                tensors.append((dot + key, value))
    return seen | {f"{path}.{name}": _tensor(tensor) for name, tensor in tensors}


def _inside(container: Any) -> Any:
    if isinstance(container, dict):
        return {key: _Is(value) for key, value in container.items()}
    return [*map(_Is, container)] if isinstance(container, list) else set(container)


def _generators() -> Picture:
    states = {"torch's generator": _Bits(torch.get_rng_state()), **generators_beside_torch()}
    if torch.cuda.is_initialized():
        states["CUDA's generators"] = [*map(_Bits, torch.cuda.get_rng_state_all())]
    return {name: {"state": state} for name, state in states.items()}


def generators_beside_torch() -> dict[str, Any]:
    """The states of Python's generator and of NumPy's, to be compared with later ones."""
    states: dict[str, Any] = {"Python's generator": random.getstate()}
    if numpy_random := sys.modules.get("numpy.random"):
        state: Any = numpy_random.get_state(legacy=False)
        words = [bytes(x) if hasattr(x, "tobytes") else x for x in state.pop("state").values()]
        states["NumPy's generator"] = (words, state)
    return states


def _modes() -> Looks:
    kinds = ("cpu", "cuda")
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": [(torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds],
        "autocast cache": torch.is_autocast_cache_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic warn-only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "saved-tensor hooks": autograd.saved_tensors_hooks_allowed(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "threads": torch.get_num_threads(),
        "transform level": functorch.transform_level(),
        "hooks of all modules": module_slots.hooks_of_all_modules(),
    }


# What can be reached -------------------------------------------------------------------------


def reachable(roots: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The leaves of trees by their paths, and the tensors and modules that functions there hold."""
    waiting = deque((name, tree, True) for name, tree in roots.items())
    seen: set[int] = set()
    while waiting:
        root, tree, given = waiting.popleft()
        leaves, spec = trees.flatten(tree)
        if not given and not any(map(_matters, leaves)):
            continue  # a list of a million words has a million paths
        for path, leaf in zip(trees.paths(spec, root), leaves, strict=True):
            if given or (isinstance(leaf, (Tensor, nn.Module)) and id(leaf) not in seen):
                yield path, leaf
            if id(leaf) not in seen and _matters(leaf):
                seen.add(id(leaf))
                waiting.extend((name, held, False) for name, held in _held(path, leaf))


def _matters(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) or callable(leaf)


def _held(path: str, leaf: Any) -> Iterator[tuple[str, Any]]:
    """What a function holds; a module or a tensor is one thing."""
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
        yield from ((f"{leaf.__name__}'s {name}", held) for name, held in captured(leaf))
    elif not isinstance(leaf, (Tensor, nn.Module, type)):
        yield from _attributes(path, leaf)


def _attributes(path: str, owner: Any) -> Iterator[tuple[str, Any]]:
    if not elsewhere(type(owner).__module__):
        attributes = getattr(owner, "__dict__", {})
        yield from ((f"{path}.{name}", held) for name, held in attributes.items())


def captured(fn: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function closes over, has as a default, or finds among its globals, by their names."""
    yield from contents(dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)))
    positional = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    yield from zip(reversed(positional), reversed(fn.__defaults__ or ()), strict=False)
    yield from (fn.__kwdefaults__ or {}).items()
    known = fn.__globals__
    yield from ((name, known[name]) for name in global_names(fn) if name in known)


def contents(cells: dict[str, CellType]) -> Iterator[tuple[str, Any]]:
    """The variables that a function closes over, but for those that are not assigned yet."""
    for name, cell in cells.items():
        with suppress(ValueError):
            yield name, cell.cell_contents


def global_names(fn: FunctionType) -> list[str]:
    """The globals that a function may look up, itself or in functions inside it."""
    if elsewhere(fn.__globals__.get("__name__", "")):
        return []
    return list(dict.fromkeys(closures.names_in(fn.__code__)))


_ELSEWHERE = {"torch", "optree", "numpy", __name__.partition(".")[0], *sys.stdlib_module_names}
_ELSEWHERE.discard("__main__")


def elsewhere(module: str) -> bool:
    """Whether a module is torch's, Python's or ours: what it holds is not the caller's."""
    return module.partition(".")[0] in _ELSEWHERE
