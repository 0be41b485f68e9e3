"""A function run in a wider dtype than it was written for.

Whatever it touches that is narrower (an argument, a captured constant, the weights of a frozen
module, a cast such as ``x.float()``, a ``dtype=`` or the default one) takes part in the wider
dtype. What is written to a captured tensor so is written to a copy, and forgotten.
"""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._tree import map


NARROWER = {
    torch.float64: {
        torch.float32: torch.float64,
        torch.float16: torch.float64,
        torch.bfloat16: torch.float64,
        torch.complex64: torch.complex128,
    },
    torch.float32: {torch.float16: torch.float32, torch.bfloat16: torch.float32},
}
_CASTS = {"float", "half", "bfloat16"}


@contextmanager
def wide(dtype: torch.dtype, without: Iterable[str] = ()) -> Generator[None]:
    """Run what is inside in ``dtype``; calls of ``without`` hand their first argument on."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with _Wide(dtype, frozenset(without)):
            yield
    finally:
        torch.set_default_dtype(default)


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """Copies of a tree's tensors, those that are narrower in ``dtype``."""
    wider = NARROWER[dtype]

    def copy(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.detach().to(wider.get(x.dtype, x.dtype), copy=True)

    return map(copy, tree)


class _Wide(TorchFunctionMode):
    def __init__(self, dtype: torch.dtype, without: frozenset[str]) -> None:
        super().__init__()
        self.dtype, self.wider, self.without = dtype, NARROWER[dtype], without
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
            return self.wider.get(out, out) if isinstance(out, torch.dtype) else out
        args = map(self._widened, args)
        kwargs = {key: map(self._widened, arg) for key, arg in kwargs.items()}
        if name in self.without and is_active(name, args, kwargs):
            return args[0] if args else kwargs["input"]
        if name in _CASTS:
            return args[0].to(self.dtype)
        return func(*args, **kwargs)

    def _widened(self, x: Any) -> Any:
        if isinstance(x, torch.dtype):
            return self.wider.get(x, x)
        if not isinstance(x, Tensor) or x.dtype not in self.wider:
            return x
        if id(x) not in self.held:  # one copy for the whole call, so that it can be written to
            self.held[id(x)] = x, x.to(self.wider[x.dtype])
        return self.held[id(x)][1]


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
        return bool(kwargs.get("training", args[2] if len(args) > 2 else True))
    return False
