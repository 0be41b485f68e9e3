"""Optimizers that look again, and the simplest of them: sharpness-aware minimisation.

    opt.init(params) -> state
    opt.apply(func, state, params) -> (params, state)      # func(params) -> (grads, value)

They are given a function of the whole batch in place of its gradient. The function is given copies
of the parameters, so that whatever it does, and where it raises, nothing of the caller's is lost.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base import checks, dtensors, states, trees
from .._base.torch_internals import modes
from . import combinators, updates


class Minimizer(NamedTuple):
    """An optimizer that asks a function for gradients, as often as it needs them.

    Attributes:
        init: ``init(params)`` gives the first state.
        apply: ``apply(func, state, params, donate=False)`` gives ``(params, state)``, where
            ``func(params)`` gives ``(grads, value)``; with ``donate`` state and params are given
            up.
    """

    init: Callable[[trees.Tree], Any]
    apply: Callable[..., tuple[trees.Tree, Any]]


@states.loadable
class SAMState(NamedTuple):
    """The state of sharpness-aware minimisation.

    Attributes:
        optimizer: The state of the optimizer that takes the steps.
        value: The value at the params that the last call was given; NaN before the first.
        applied: Whether the last call was applied: value and both gradients were finite.
    """

    optimizer: Any
    value: Tensor
    applied: Tensor


def sam(optimizer: Any, rho: float = 0.05) -> Minimizer:
    """Sharpness-aware minimisation: step by the gradient of a point that lies uphill.

    The rule, with the norm of all leaves as one vector::

        g, value = func(params)
        g, _ = func(params + rho * g / |g|)     # where g is zero: at params
        params, state = optimizer.apply(g, state, params)

    The gradients and the value are those of the whole batch. Where one is not finite, params and
    the state of the optimizer come back bit for bit as they were.

    Args:
        optimizer: Any optimizer of gradients: ``sgd``, ``adam``, ``adamw``, a ``chain`` …
        rho: How far the other point lies from params, a number of at least 0.

    Example:
        >>> import torch
        >>> from pureaccum import grad_and_value, sgd
        >>> x = torch.tensor([1.0, 2.0, 3.0])
        >>> fn = grad_and_value(lambda w, x: ((w * x) ** 2).mean(), microbatch_size=2)
        >>> opt, w = sam(sgd(0.25), rho=0.5), torch.tensor(1.5)
        >>> opt.apply(lambda w: fn(w, x), opt.init(w), w)[0]
        tensor(-3.1667)

    References:
        Foret et al., `Sharpness-aware minimization <https://arxiv.org/abs/2010.01412>`_, 2020.
    """
    rho, inner = checks.check_number(rho, "rho"), combinators.as_optimizer(optimizer)

    def init(params: trees.Tree) -> SAMState:
        """The state before the first step."""
        device = checks.read_params(params)[0][0].device
        value, applied = (
            trees.scalar(torch.nan, torch.float64, device),
            trees.scalar(False, torch.bool, device),
        )
        return SAMState(inner.init(params), value, applied)

    def apply(
        func: Callable[[trees.Tree], Any],
        state: SAMState,
        params: trees.Tree,
        *,
        donate: bool = False,
    ) -> tuple[trees.Tree, SAMState]:
        """The next params and state; where anything is not finite, the old ones."""
        check_function(func, "sam")
        flat = checks.read_params(params)
        checks.check_state(state, SAMState, "sam")
        inner.check(state.optimizer, flat, "state.optimizer")
        with checks.outside_inference_mode(), plainly():
            grads, value = asked(func, [x.clone() for x in flat[0]], flat)
            finite = trees.all_finite(grads)
            grads, _ = asked(func, _uphill(flat[0], grads, rho), flat)
            value = trees.scalar(value, torch.float64, finite.device)
            applied = torch.isfinite(value) & finite & trees.all_finite(grads)
            tree = trees.unflatten(flat[1], grads)
            new, kept = inner.apply(tree, state.optimizer, params, applied=applied, donate=donate)
        return new, SAMState(kept, value, applied)

    return Minimizer(init, apply)


def _uphill(leaves: list[Tensor], grads: list[Tensor], rho: float) -> list[Tensor]:
    """The point that lies ``rho`` from the leaves, along gradients."""
    size = trees.global_norm(grads)
    some = size > 0
    # not where(some, rho / size, 0), whose derivative where size is zero is 0 times infinity
    of = trees.scalars_of(torch.where(some, rho / torch.where(some, size, 1.0), 0.0))
    parts, layouts = dtensors.opened(leaves)
    terms, _ = dtensors.opened(dtensors.placed_like(grads, leaves))
    moved = [(x + of(g) * g).to(x.dtype) for x, g in zip(parts, terms, strict=True)]
    return dtensors.closed(moved, layouts)


# Functions of the parameters ----------------------------------------------------------------------


def check_function(func: Any, owner: str) -> None:
    """Raise where an optimizer is given something else than a function of the parameters."""
    if not callable(func):
        raise TypeError(
            f"func is a {type(func).__name__}; {owner} expects a function of the parameters that "
            "gives (grads, value), since it asks for gradients again: lambda params: fn(params, "
            "batch), where fn is a pa.grad_and_value. Gradients? sgd and adam take those; "
            "make_step, chain and partition hand out nothing else."
        )


def asked(
    func: Callable[[trees.Tree], Any], leaves: list[Tensor], like: trees.Flat
) -> tuple[list[Tensor], Any]:
    """The gradients, leaf by leaf, and the value of a function, a 0-d tensor or a number."""
    with nullcontext() if modes.transform_active() else torch.enable_grad():
        got = func(trees.unflatten(like[1], leaves))
    if not isinstance(got, (tuple, list)) or len(got) != 2:  # pyright: ignore
        came = f"{len(got)} things" if isinstance(got, (tuple, list)) else f"a {type(got).__name__}"  # pyright: ignore
        raise TypeError(
            f"func returned {came}; expected (grads, value), as pa.grad_and_value(loss) gives "
            "them. pa.grad, which gives no value?"
        )
    cause = "func(params) has to return (grads, value), in this order: a gradient for each leaf."
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
                f"the value of func has shape {tuple(value.shape)} and {value.dtype}; expected one "
                "real number, a 0-d tensor, which is minimised. Reduce it with .mean() or .sum()."
            )
        return value
    if isinstance(number := checks.as_float(value), float):
        return number
    aux = " With has_aux it comes with aux: return value[0] alone." * (type(value) is tuple)
    raise TypeError(
        f"the value of func is a {type(value).__name__}; expected a 0-d tensor: func returns "
        f"(grads, value), in this order.{aux}"
    )
