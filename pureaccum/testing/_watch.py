"""What a loss does beside computing: what it writes to, where it draws, what it normalises with.

It is called once, under a mode that sees every call of a torch function, with hooks that see every
module begin and end.
"""

import inspect
import linecache
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from .._loss import Weighted, is_pair
from .._tree import flatten, leaves, paths
from ._in_dtype import BATCH_NORM, is_active
from ._subject import Subject


class Call(NamedTuple):
    """A call of a torch function: its name, and the module or the line that made it."""

    function: str
    module: str  # "net.1 (BatchNorm1d)", or ""
    root: str  # "net"
    path: str  # "1"
    line: str  # "loss.py:12: x = net(x)"

    @property
    def where(self) -> str:
        """For a sentence."""
        return self.module or f"torch's {self.function} at {self.line}"


_NOBODY = Call("", "", "", "", "")


class Written(NamedTuple):
    """A tensor that the loss wrote to."""

    name: str
    tensor: Tensor
    held: Tensor  # what it held before
    given: bool  # handed to the loss, not captured by it
    by: Call  # the first function that saw it


class Seen(NamedTuple):
    """All that was seen."""

    written: list[Written]
    draws: list[Call]
    batch_norms: list[Call]  # in training mode
    generators: list[tuple[torch.Generator, Tensor]]  # the loss's own, and their states
    weighted: bool
    dtype: torch.dtype


def watch(subject: Subject, seed: int) -> Seen:
    """Call a loss on its whole batch; what it wrote to is as it was afterwards."""
    mode = _Watch(_names(subject.loss_fn))
    loss: Any = None

    def loss_fn(params: Any, part: Any) -> Any:
        nonlocal loss
        mode.give(params, "params")
        mode.give(part, "batch")
        with mode, mode.modules():
            out = subject.loss_fn(params, part)
        loss = out[0] if subject.has_aux and is_pair(out) else out
        return out

    try:
        subject._replace(loss_fn=loss_fn).sums(subject.everything(), seed)
        written = [w for w in mode.noted.values() if _changed(w.tensor, w.held)]
        written = [w._replace(name=w.name or mode.name(w)) for w in written]
    finally:
        for noted in mode.noted.values():
            if _changed(noted.tensor, noted.held):
                noted.tensor.data.copy_(noted.held)
    weighted = isinstance(loss, Weighted)
    return Seen(
        written,
        list(mode.draws),
        list(mode.batch_norms),
        list(mode.generators.values()),
        weighted,
        (loss.total if weighted else loss).dtype,
    )


class _Watch(TorchFunctionMode):
    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.names = names  # of the objects that the loss captures
        self.made: dict[int, weakref.ref[Tensor]] = {}
        self.noted: dict[int, Written] = {}
        self.draws: dict[Call, None] = {}
        self.batch_norms: dict[Call, None] = {}
        self.generators: dict[int, tuple[torch.Generator, Tensor]] = {}
        self.roots: dict[int, nn.Module] = {}
        self.stack: list[nn.Module] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        for x in leaves((args, kwargs)):
            if isinstance(x, torch.Generator):
                self.generators.setdefault(id(x), (x, x.get_state()))
            elif isinstance(x, Tensor) and not self._knows(x):
                self.noted[id(x)] = Written("", x, x.detach().clone(), False, self._call(name))
        if name == BATCH_NORM and is_active(name, args, kwargs):
            self.batch_norms[self._call(name)] = None
        before = _random_state()
        out = func(*args, **kwargs)
        if not before.equal(_random_state()):
            self.draws[self._call(name)] = None
        for x in leaves(out):
            if isinstance(x, Tensor) and not self._knows(x):
                self.made[id(x)] = weakref.ref(x)
        return out

    def _knows(self, x: Tensor) -> bool:
        made = self.made.get(id(x))
        return id(x) in self.noted or (made is not None and made() is x)

    def give(self, tree: Any, root: str) -> None:
        """Note what is handed to the loss."""
        given, spec = flatten(tree)
        for path, x in zip(paths(spec, root), given, strict=True):
            if isinstance(x, Tensor):
                held = x.detach().clone()
                self.noted[id(x)] = Written(path, x, held, True, _NOBODY)

    def name(self, written: Written) -> str:
        """What the user calls a captured tensor."""
        x = written.tensor
        if id(x) in self.names:
            return self.names[id(x)]
        for root in self.roots.values():
            for named in (root.named_parameters(), root.named_buffers()):
                for name, tensor in named:
                    if tensor is x:
                        return f"{self._root(root)}.{name}"
        return f"a tensor of shape {tuple(x.shape)}, first used at {written.by.line}"

    def _root(self, root: nn.Module) -> str:
        return self.names.get(id(root), type(root).__name__)

    def _call(self, function: str) -> Call:
        if not self.stack:
            return Call(function, "", "", "", _line())
        root, inner = self.stack[0], self.stack[-1]
        path = next((name for name, part in root.named_modules() if part is inner), "")
        of, kind = self._root(root), type(inner).__name__
        module = f"{of}.{path} ({kind})" if path else of if of == kind else f"{of} ({kind})"
        return Call(function, module, of, path, _line())

    @contextmanager
    def modules(self) -> Generator[None]:
        """See modules begin and end."""

        def begin(module: nn.Module, args: Any) -> None:
            if not self.stack:
                self.roots[id(module)] = module
            self.stack.append(module)

        def end(module: nn.Module, args: Any, out: Any) -> None:
            self.stack.pop()

        handles = [
            register_module_forward_pre_hook(begin),
            register_module_forward_hook(end, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _random_state() -> Tensor:
    state = torch.get_rng_state()
    return torch.cat([state, torch.cuda.get_rng_state()]) if torch.cuda.is_initialized() else state


def _changed(x: Tensor, held: Tensor) -> bool:
    x = x.detach()
    return x.shape != held.shape or not ((x == held) | ((x != x) & (held != held))).all()


def _line() -> str:
    """The innermost line that is neither torch's nor ours."""
    frame = inspect.currentframe()
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if not any(ours in file.parents for ours in _NOT_THE_USERS):
            text = linecache.getline(str(file), frame.f_lineno).strip()
            return f"{file.name}:{frame.f_lineno}" + (f": {text}" if text else "")
        frame = frame.f_back
    return "an unknown line"


_NOT_THE_USERS = (Path(torch.__file__).parent, Path(__file__).parents[1])


def _names(loss_fn: Any) -> dict[int, str]:
    """The names under which a function holds modules and tensors."""
    found: dict[int, str] = {}

    def add(name: str, value: Any, deep: bool = True) -> None:
        if isinstance(value, (Tensor, nn.Module)):
            found.setdefault(id(value), name)
        elif isinstance(value, (dict, list, tuple)) and deep:
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, inside in items:
                add(f"{name}[{key!r}]", inside, deep=False)
        elif isinstance(value, partial):
            for key, inside in [*enumerate(value.args), *value.keywords.items()]:
                add(str(key), inside)
            add(name, value.func)
        elif inspect.isfunction(value) and deep:
            for key, inside in _variables(value):
                add(key, inside, deep=False)
        elif inspect.ismethod(value):
            for key, inside in vars(value.__self__).items():
                add(f"self.{key}", inside)

    add("loss_fn", loss_fn)
    return found


def _variables(function: Any) -> Iterator[tuple[str, Any]]:
    seen = inspect.getclosurevars(function)
    yield from {**seen.nonlocals, **seen.globals}.items()
