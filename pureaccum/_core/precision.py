"""The dtypes that parameters are kept in, that a loss computes in, and that its aux comes back in.

    master parameters --cast--> compute dtype --loss--> output dtype

The cast is done inside the microbatch, so that the gradient comes back through it in the master's
dtype. Autocast too is opened inside each microbatch: around all of them, its cache would keep one
low-precision copy of the weights for every microbatch.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base import Tree, tree_leaves, tree_map
from .recomputation import cast


class Policy(NamedTuple):
    """Mixed precision: float32 masters with float16 or bfloat16 inside, or autocast.

    The rule::

        master parameters --cast--> compute dtype --loss--> output dtype

    Only floating-point tensors are cast. Integers, masks, complex tensors and what is no tensor
    stay as they are.

    Attributes:
        param: The dtype to which ``step.init`` casts parameters; None leaves them.
        compute: The dtype in which the loss gets parameters, batch and what else it is given by
            position; None leaves them. Buffers, such as running statistics, are not cast.
        output: The dtype of aux; None leaves it. The loss itself is always widened to float32.
        autocast: In place of ``compute``: the dtype of an autocast region around the loss.

    Example:
        >>> import torch
        >>> policy = Policy(compute=torch.bfloat16)
        >>> policy.cast_to_compute({"w": torch.ones(2), "steps": torch.tensor(3)})
        {'w': tensor([1., 1.], dtype=torch.bfloat16), 'steps': tensor(3)}

    References:
        `jmp.Policy <https://github.com/google-deepmind/jmp>`_;
        `torch.autocast <https://docs.pytorch.org/docs/stable/amp.html>`_
    """

    param: torch.dtype | None = torch.float32
    compute: torch.dtype | None = None
    output: torch.dtype | None = torch.float32
    autocast: torch.dtype | None = None

    def cast_to_param(self, tree: Tree) -> Tree:
        """The floating-point tensors of a tree in the dtype of master parameters.

        Args:
            tree: Parameters.

        Returns:
            A tree like ``tree``.
        """
        return _cast(tree, self.param)

    def cast_to_compute(self, tree: Tree) -> Tree:
        """The floating-point tensors of a tree in the dtype of computation.

        Args:
            tree: Parameters or a batch.

        Returns:
            A tree like ``tree``.
        """
        return _cast(tree, self.compute)

    def cast_to_output(self, tree: Tree) -> Tree:
        """The floating-point tensors of a tree in the dtype of results.

        Args:
            tree: Aux.

        Returns:
            A tree like ``tree``.
        """
        return _cast(tree, self.output)


def check_precision(policy: Any) -> Policy:
    """The policy itself, if it is one, and its dtypes go together."""
    if not isinstance(policy, Policy):
        raise TypeError(f"policy is {policy!r}; expected pureaccum.Policy(compute=...) or None.")
    for name, dtype in policy._asdict().items():
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"Policy({name}={dtype!r}): expected a floating-point dtype or None.")
    if policy.compute is not None and policy.autocast is not None:
        raise ValueError(
            f"Policy(compute={policy.compute}, autocast={policy.autocast}): expected one of the "
            "two. compute casts everything; autocast lets torch choose, operation by operation."
        )
    return policy


def _checked(make: Any) -> Any:
    return wraps(make)(lambda *args, **named: check_precision(make(*args, **named)))


Policy.__new__ = _checked(Policy.__new__)


def under(policy: Policy | None, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """A loss that is computed as a policy says."""
    if policy is None:
        return loss_fn
    check_precision(policy)  # which _replace may have made

    @wraps(loss_fn)
    def loss(params: Tree, *rest: Tree, **named: Any) -> Any:
        given = [policy.cast_to_compute(x) for x in (params, *rest)]
        with _region(policy, params):
            return loss_fn(*given, **named)

    return loss


def _region(policy: Policy, params: Tree) -> AbstractContextManager[Any]:
    if policy.autocast is None:
        return nullcontext()
    device = tree_leaves(params)[0].device.type
    return torch.autocast(device, dtype=policy.autocast)


def _cast(tree: Tree, dtype: torch.dtype | None) -> Tree:
    if dtype is None:
        return tree
    return tree_map(
        lambda x: cast(x, dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, tree
    )
