"""Who looks on: transforms, compilers and tracers, and torch's function and dispatch modes."""

import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from . import functorch


_C: Any = torch._C  # pyright: ignore


def transform_active() -> bool:
    """Whether code runs under a torch.func transform, or is being compiled or traced.

    The compiler is asked first, since dynamo cannot trace the second question; and dynamo itself is
    asked, since ``torch.compiler.is_compiling`` is true in all threads while one of them compiles.
    """
    if torch.compiler.is_dynamo_compiling() or functorch.transform_level() is not None:
        return True
    return bool(_MODES() or function_modes()) and get_proxy_mode() is not None


def may_write() -> bool:
    """Whether tensors of ours may be written in place: nobody follows or traces operations."""
    if torch.compiler.is_dynamo_compiling() or functorch.transform_level() is not None:
        return False
    return not (_MODES() or function_modes()) or not traced()


def may_add_in_place() -> bool:
    """Whether sums may be written to: nobody follows what is computed, nor its tangents."""
    return may_write() and not functorch.forward_ad_active()


def untraced() -> AbstractContextManager[Any]:
    """Compute what no tracer writes down."""
    return disable_proxy_modes_tracing()


def at_top_level() -> bool:
    """Whether no transform, compiler or tracer is at work, nor torch's forward AD."""
    if torch.compiler.is_dynamo_compiling() or torch.autograd.forward_ad._current_level >= 0:  # pyright: ignore
        return False
    modes = _MODES() or function_modes()
    return functorch.transform_level() is None and not (modes and get_proxy_mode() is not None)


def traced() -> bool:
    """Whether a mode that is not ours sees operations: it may record them, or keep what they give.

    Of torch's own function modes only those of a tracer do; others choose a device.
    """
    count = _MODES()
    if count and not _is_of(_C._get_dispatch_stack_at(count - 1), "pureaccum"):
        return True
    functions = map(_C._get_function_stack_at, range(function_modes()))
    its = [mode for mode in functions if not _is_of(mode, "pureaccum", "torch")]
    return bool(its) or get_proxy_mode() is not None


def modes_around() -> list[list[Any]]:
    """The function and dispatch modes that are on: those of the user, and the one of a device."""
    if not (_MODES() or function_modes()):
        return [[], []]
    return [
        [x for x in stack() if isinstance(x, DeviceContext) or not _is_of(x, "pureaccum", "torch")]
        for stack, _, _ in _STACKS
    ]


@contextmanager
def within(then: list[list[Any]]) -> Generator[None]:
    """Run under modes that ``modes_around`` gave, and under none that came later."""
    held, later = [stack() for stack, _, _ in _STACKS], modes_around()

    def put(stacks: Iterable[list[Any]]) -> None:
        for modes, (stack, pop, push) in zip(stacks, _STACKS, strict=True):
            for _ in stack():
                pop()
            for mode in modes:
                push(mode)

    put([x for x in a if x not in b] + c for a, b, c in zip(held, later, then, strict=True))
    try:
        yield
    finally:
        put(held)


def _is_of(mode: Any, *packages: str) -> bool:
    return type(mode).__module__.partition(".")[0] in packages


function_modes, _MODES = _C._len_torch_function_stack, _C._len_torch_dispatch_stack


_STACKS: Any = [
    [getattr(kind, name) for name in (stack, "_pop_mode", "_push_mode")]
    for kind, stack in (
        (torch.overrides, "_get_current_function_mode_stack"),
        (torch.utils._python_dispatch, "_get_current_dispatch_mode_stack"),  # pyright: ignore
    )
]


# A context in which tensors themselves are looked at: no torch function mode takes notice.
unnoticed: Callable[[], AbstractContextManager[None]] = _C.DisableTorchFunction


def unseen() -> AbstractContextManager[Any]:
    """Run operations that no dispatch mode sees."""
    return torch._C._DisableTorchDispatch()  # pyright: ignore


def seeing(
    see: Callable[[tuple[Any, ...], Any], None] | None = None,
    before: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], None] | None = None,
    below: tuple[type, ...] = (),
) -> TorchDispatchMode:
    """A mode that calls ``before(operation, args, kwargs)`` and ``see(operands, out)``.

    It does so around each operation, below torch.func's transforms and autograd: it sees forward,
    backward, in-place and foreach operations, all of them with plain tensors. Of an operation on
    tensors of the classes ``below`` it sees what they do in its place.
    """
    return (_Uncompiled if "torch._dynamo" in sys.modules else _Seeing)(see, before, below)


def answering(answer: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]) -> Any:
    """A mode in which an operation gives ``answer(operation, args, kwargs)``."""
    mode: Any = seeing()
    mode.answer = answer
    return mode


class _Seeing(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Say no: by default torch imports its compiler, which takes a second, to keep it out."""
        return False

    def __init__(self, see: Any, before: Any, below: tuple[type, ...] = ()) -> None:
        super().__init__()
        self.see, self.before, self.below, self.answer = see, before, below, None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.below and any(issubclass(kind, self.below) for kind in types):
            return NotImplemented
        if self.before is not None:
            self.before(func, args, kwargs)
        if self.answer is not None:
            return self.answer(func, args, kwargs)
        out = func(*args, **kwargs)
        if self.see is not None:
            self.see((*args, *kwargs.values()), out)
        return out


class _Uncompiled(_Seeing):
    """The mode for where the compiler has been imported: it would compile this code otherwise."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    __torch_dispatch__ = _Seeing.__torch_dispatch__


class Asking(TorchFunctionMode):
    """A mode that calls ``before(function, args, kwargs)`` before each function of torch.

    It changes no number (tests/core/test_operations.py), unlike one that sees operations.
    """

    def __init__(self, before: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], None]) -> None:
        super().__init__()
        self.before = before

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.before(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def pre_dispatching() -> bool:
    """Whether a tracer records what is called above autograd and torch.func."""
    if torch.compiler.is_dynamo_compiling():
        return False
    return _C._dispatch_tls_is_dispatch_key_included(_C.DispatchKey.PreDispatch)


def dispatched() -> bool:
    """Whether a dispatch mode sees each operation: a tracer, a counter, or one of ours."""
    return _MODES() > 0 or get_proxy_mode() is not None


@contextmanager
def imagining() -> Generator[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]]:
    """Compute nothing: tensors have shapes and no numbers, and code that reads a number gets 1.

    Yields two functions. One makes such a tensor from another one, on a CPU if that is on no
    device; the other says which such tensor stands for a captured one.
    """
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    def taken_for(x: Tensor) -> Tensor:
        return x if isinstance(x, FakeTensor) else mode.from_tensor(x)

    def imagined(x: Tensor) -> Tensor:
        device = "cpu" if x.is_meta else x.device
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, Telling():
        yield imagined, taken_for


class Telling(TorchDispatchMode):
    """Gives 1 to code that reads a number where there is none, and calls compared tensors equal."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        from torch._subclasses.fake_tensor import DataDependentOutputException

        try:
            return func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if func is torch.ops.aten.equal.default:
                return True
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            dtype = args[0].dtype
            return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1


def named_range(name: str) -> AbstractContextManager[Any]:
    """Name what runs inside in a profile, where a profiler is active; otherwise do nothing."""
    if torch.compiler.is_dynamo_compiling() or not torch.autograd._profiler_enabled():  # pyright: ignore
        return nullcontext()
    return torch.profiler.record_function(f"pureaccum: {name}")
