"""Sharpness-aware minimisation: an optimizer that evaluates two gradients per step."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base import checks, dtensors, states, trees
from .._base.settings import records
from .._base.trees import Tree, scalar
from .minimizer import Minimizer, asked, check_function, plainly
from .users import as_optimizer


@states.loadable
class SAMState(NamedTuple):
    """The state of sharpness-aware minimisation.

    Attributes:
        optimizer: The state of the inner optimizer.
        value: The value at the params passed to the last call; NaN before the first call.
        applied: Whether the last call was applied: the value and both gradients were finite.
    """

    optimizer: Any
    value: Tensor
    applied: Tensor


@records
def sam(optimizer: Any, rho: float = 0.05) -> Minimizer:
    """Return sharpness-aware minimisation, which steps by the gradient at a point uphill of params.

    The rule, where the norm is over all leaves as one vector::

        g, value = func(params)
        g, _ = func(params + rho * g / |g|)     # where g is zero: at params
        params, state = optimizer.apply(g, state, params)

    Gradients and value are those of the whole batch. If the value or a gradient is not finite,
    params and the state of the optimizer are returned bit for bit unchanged.

    Args:
        optimizer: Any gradient-based optimizer: ``sgd``, ``adam``, ``adamw``, a ``chain`` …
        rho: The distance from params to the uphill point, at least 0.

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
    rho, inner = checks.check_number(rho, "rho"), as_optimizer(optimizer)

    def init(params: Tree) -> SAMState:
        """Return the state before the first step."""
        device = checks.read_params(params)[0][0].device
        value, applied = scalar(torch.nan, torch.float64, device), scalar(False, torch.bool, device)
        return SAMState(inner.init(params), value, applied)

    def apply(
        func: Callable[[Tree], Any], state: SAMState, params: Tree, *, donate: bool = False
    ) -> tuple[Tree, SAMState]:
        """Return the next params and state, or the old ones if anything is not finite."""
        check_function(func, "sam")
        flat = checks.read_params(params)
        checks.check_state(state, SAMState, "sam")
        inner.check(state.optimizer, flat, "state.optimizer")
        with checks.outside_inference_mode(), plainly():
            grads, value = asked(func, [x.clone() for x in flat[0]], flat)
            finite = trees.all_finite(grads)
            grads, _ = asked(func, _uphill(flat[0], grads, rho), flat)
            value = scalar(value, torch.float64, finite.device)
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
