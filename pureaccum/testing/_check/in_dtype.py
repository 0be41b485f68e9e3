"""A function run in another dtype than it was written for.

Whatever floating-point number it touches (an argument, a captured constant, the weights of a
frozen module, a cast such as ``x.float()``, a ``dtype=`` or the default one) takes part in that
dtype. What is written to a captured tensor so is written to a copy, and forgotten.
"""

import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..._base.trees import map


_REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}
_CASTS = {"float", "double", "half", "bfloat16"}


def _dtypes(dtype: torch.dtype) -> dict[torch.dtype, torch.dtype]:
    """What becomes of every other dtype."""
    becomes = dict.fromkeys(_REAL, dtype) | dict.fromkeys(_COMPLEX.values(), _COMPLEX[dtype])
    return {old: new for old, new in becomes.items() if old != new}


@contextmanager
def computing_in(dtype: torch.dtype, without: Iterable[str] = ()) -> Generator[None]:
    """Run what is inside in ``dtype``; functions ``without`` hand their first argument on."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with _InDtype(dtype, frozenset(without)):
            yield
    finally:
        torch.set_default_dtype(default)


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """Copies of a tree's tensors, those of floating-point numbers in ``dtype``."""
    becomes = _dtypes(dtype)

    def copy(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.detach().to(becomes.get(x.dtype, x.dtype), copy=True)

    return map(copy, tree)


class _InDtype(TorchFunctionMode):
    def __init__(self, dtype: torch.dtype, without: frozenset[str]) -> None:
        super().__init__()
        self.dtype, self.becomes, self.without = dtype, _dtypes(dtype), without
        self.held: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), {} if kwargs is None else kwargs
        if name in ("__get__", "__set__"):
            out = func(*args, **kwargs)
            return self.becomes.get(out, out) if isinstance(out, torch.dtype) else out
        args = map(self.recast, args)
        kwargs = {key: map(self.recast, arg) for key, arg in kwargs.items()}
        if name in self.without and is_active(name, args, kwargs):
            return args[0] if args else kwargs["input"]
        if name in _CASTS:
            return args[0].to(self.dtype)
        return func(*args, **kwargs)

    def recast(self, x: Any) -> Any:
        """A tensor or a dtype, in the dtype; everything else as it is."""
        if isinstance(x, torch.dtype):
            return self.becomes.get(x, x)
        if not isinstance(x, Tensor) or x.dtype not in self.becomes:
            return x
        if id(x) not in self.held:  # one copy for the whole call, so that it can be written to
            with torch.enable_grad():  # whatever the mode in which it is first used
                self.held[id(x)] = x, x.to(self.becomes[x.dtype])
        return self.held[id(x)][1]


def uncompiled() -> AbstractContextManager[Any]:
    """Compiled code runs as it is written: a compiler would trace our modes, too."""
    if "torch._dynamo" not in sys.modules:  # whose import takes seconds
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


# Functions that a check may leave out ----------------------------------------------------


BATCH_NORM = "batch_norm"
DROPOUTS = {
    *("dropout", "dropout1d", "dropout2d", "dropout3d"),
    *("alpha_dropout", "feature_alpha_dropout", "feature_dropout"),
}


def is_active(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of batch_norm or dropout does what it does in training."""
    if name == BATCH_NORM:  # (input, running_mean, running_var, weight, bias, training, …)
        return bool(kwargs.get("training", args[5] if len(args) > 5 else False))
    if name in DROPOUTS:
        default = "alpha" not in name  # torch is of two minds
        return bool(kwargs.get("training", args[2] if len(args) > 2 else default))
    return False
