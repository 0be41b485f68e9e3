"""Optimizers that evaluate a function of the whole batch themselves, not just its gradient.

    opt.init(params) -> state
    opt.apply(func, state, params) -> (params, state)      # func(params) -> (grads, value)

``func`` receives copies of the parameters, so it can neither change nor lose the caller's tensors,
even if it raises.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base import checks, reprs, trees
from .._base.torch_internals import modes
from . import updates


class Minimizer(NamedTuple):
    """An optimizer that calls a function for gradients as often as it needs them.

    Attributes:
        init: ``init(params)`` returns the first state.
        apply: ``apply(func, state, params, donate=False)`` returns ``(params, state)``, where
            ``func(params)`` returns ``(grads, value)``. ``donate=True`` reuses the memory of state
            and params.
    """

    init: Callable[[trees.Tree], Any]
    apply: Callable[..., tuple[trees.Tree, Any]]

    __repr__ = reprs.of_made


def check_function(func: Any, owner: str) -> None:
    """Raise where an optimizer is given something else than a function of the parameters."""
    if not callable(func):
        raise TypeError(
            f"func is {reprs.kind(func)}; {owner} expects a function of the parameters that "
            "returns (grads, value), because it needs gradients again. Pass lambda params: "
            "fn(params, batch), where fn is a pa.grad_and_value. To pass gradients, use sgd or "
            "adam. make_step, chain and partition only pass gradients."
        )


def asked(
    func: Callable[[trees.Tree], Any], leaves: list[Tensor], like: trees.Flat
) -> tuple[list[Tensor], Any]:
    """The gradients, leaf by leaf, and the value of a function, a 0-d tensor or a number."""
    with nullcontext() if modes.transform_active() else torch.enable_grad():
        got = func(trees.unflatten(like[1], leaves))
    if not isinstance(got, (tuple, list)) or len(got) != 2:  # pyright: ignore
        came = f"{len(got)} values" if isinstance(got, (tuple, list)) else reprs.kind(got)  # pyright: ignore
        raise TypeError(
            f"func returned {came}; expected (grads, value), as pa.grad_and_value(loss) returns "
            "them. pa.grad returns no value."
        )
    cause = "func(params) must return (grads, value), in this order, with a gradient for each leaf."
    terms = updates.fitting_gradients(got[0], like, "the grads of func", cause)
    return [g.to_dense() if g.is_sparse else g for g in terms], _checked(got[1])


def plainly() -> AbstractContextManager[Any]:
    """Record nothing at top level; under a transform all that is computed may be differentiated."""
    return nullcontext() if modes.transform_active() else torch.no_grad()


def _checked(value: Any) -> Any:
    """The value itself, if it is one real number."""
    if isinstance(value, Tensor):
        if value.dim() or value.is_complex():
            raise ValueError(
                f"the value of func has shape {tuple(value.shape)} and {value.dtype}; expected "
                "one real number, a 0-d tensor, to minimise. Reduce it with .mean() or .sum()."
            )
        return value
    if isinstance(number := checks.as_float(value), float):
        return number
    aux = " With has_aux it comes with aux. Return value[0] alone." * (type(value) is tuple)
    raise TypeError(
        f"the value of func is {reprs.kind(value)}; expected a 0-d tensor, because func "
        f"returns (grads, value), in this order.{aux}"
    )
