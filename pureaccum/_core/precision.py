"""The dtypes of stored parameters, of the loss computation, and of the aux that it returns.

    master parameters --cast--> compute dtype --loss--> output dtype

The cast is inside the microbatch, so the gradient comes back through it in the master's dtype.
Autocast is opened inside each microbatch too. Around all of them, its cache would keep one
low-precision copy of the weights per microbatch.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._base import deterministic, trees
from .._base.torch_internals import autograd


class Policy(NamedTuple):
    """Mixed precision: float32 master weights with float16 or bfloat16 compute, or autocast.

    The rule::

        master parameters --cast--> compute dtype --loss--> output dtype

    Only floating-point tensors are cast. Integers, masks, complex tensors and other objects stay as
    they are.

    Attributes:
        param: The dtype to which ``step.init`` casts parameters; None leaves them.
        compute: The dtype of parameters, batch and other positional arguments inside the loss; None
            leaves them. Buffers, such as running statistics, are not cast.
        output: The dtype of aux; None leaves it. The loss itself is always widened to float32.
        autocast: The dtype of an autocast region around the loss, as an alternative to ``compute``.

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

    def cast_to_param(self, tree: trees.Tree) -> trees.Tree:
        """Cast the floating-point tensors of a tree to the ``param`` dtype.

        Args:
            tree: Parameters.
        """
        return _cast(tree, self.param)

    def cast_to_compute(self, tree: trees.Tree) -> trees.Tree:
        """Cast the floating-point tensors of a tree to the ``compute`` dtype.

        Args:
            tree: Parameters or a batch.
        """
        return _cast(tree, self.compute)

    def cast_to_output(self, tree: trees.Tree) -> trees.Tree:
        """Cast the floating-point tensors of a tree to the ``output`` dtype.

        Args:
            tree: Aux.
        """
        return _cast(tree, self.output)


def check_precision(policy: Any) -> Policy:
    """The policy itself, if it is one, and its dtypes go together."""
    if not isinstance(policy, Policy):
        raise TypeError(f"policy is {policy!r}; expected pureaccum.Policy(compute=...) or None.")
    for name, dtype in policy._asdict().items():
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"policy.{name} is {dtype!r}; expected a floating-point dtype or None.")
    if policy.compute is not None and policy.autocast is not None:
        raise ValueError(
            f"policy has compute={policy.compute} and autocast={policy.autocast}; expected only "
            "one of the two. compute casts everything. autocast lets torch choose for each "
            "operation."
        )
    return policy


_make: Any = Policy.__new__
_checked: Any = wraps(_make)(lambda *args, **named: check_precision(_make(*args, **named)))
Policy.__new__ = _checked


def under(policy: Policy | None, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """A loss that is computed as a policy says."""
    if policy is None:
        return loss_fn
    check_precision(policy)  # which _replace may have made

    @wraps(loss_fn)
    def loss(params: trees.Tree, *rest: trees.Tree, **named: Any) -> Any:
        given = [policy.cast_to_compute(x) for x in (params, *rest)]
        if policy.autocast is None:
            return loss_fn(*given, **named)
        with torch.autocast(trees.tree_leaves(params)[0].device.type, dtype=policy.autocast):
            return loss_fn(*given, **named)

    return loss


def _cast(tree: trees.Tree, dtype: torch.dtype | None) -> trees.Tree:
    if dtype is None:
        return tree
    return trees.tree_map(
        lambda x: cast(x, dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, tree
    )


# In another dtype ------------------------------------------------------------------------


_CASTS = {"float", "double", "half", "bfloat16"}


class InDtype(TorchFunctionMode):
    """Whatever floating-point number is touched inside takes part in one dtype.

    An argument, a captured constant, the weights of a frozen module, a cast such as ``x.float()``,
    or a ``dtype=``. What is written to a captured tensor is written to a copy, which is forgotten.
    A call that is ``left_out`` returns its first argument.
    """

    def __init__(self, dtype: torch.dtype, left_out: Callable[..., bool] | None = None) -> None:
        super().__init__()
        self.dtype, self.becomes, self.left_out = dtype, deterministic.becomes(dtype), left_out
        self.copies: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in ("__get__", "__set__"):
            out = func(*args, **kwargs)
            return self.becomes.get(out, out) if isinstance(out, torch.dtype) else out
        if name.startswith("_amp_"):
            return _narrowly(func, args)
        args = trees.tree_map(self.recast, args)
        kwargs = {key: trees.tree_map(self.recast, arg) for key, arg in kwargs.items()}
        if self.left_out is not None and self.left_out(name, args, kwargs):
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
        if id(x) not in self.copies:  # one copy for the whole call, so that it can be written to
            with torch.enable_grad():  # whatever the mode in which it is first used
                self.copies[id(x)] = x, x.to(self.becomes[x.dtype])
        return self.copies[id(x)][1]


def _narrowly(func: Any, args: Any) -> Any:
    """A kernel of a GradScaler, which takes its scale and its flags in float32 alone."""
    narrow = [x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args]
    out = func(*narrow)
    for x, y in zip(args, narrow, strict=True):
        if x is not y:
            x.copy_(y)
    return out


# Casts that know what they were made from ------------------------------------------------------


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in another dtype, of which ``original`` gives the tensor that was cast."""
    low = x.to(dtype)
    if low is not x and not torch.compiler.is_dynamo_compiling():
        setattr(low, _ORIGINAL, (x, autograd.versions([x, low])))
    return low


def original(x: Tensor) -> Tensor:
    """The tensor that was cast to this one, if neither was written to since; else the tensor."""
    if (cast_from := getattr(x, _ORIGINAL, None)) is None:
        return x
    first, then = cast_from
    return first if then == autograd.versions([first, x]) else x


_ORIGINAL = "cast_from"
