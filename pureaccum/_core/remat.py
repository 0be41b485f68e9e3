"""Store only the inputs of a function for its backward pass, and run it again there.

A rematerialised function is a microbatched function with a single, uncut piece.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from .._base import trees
from . import losses, microbatch, outputs, writes
from .arguments import Arguments


P = ParamSpec("P")
R = TypeVar("R")


def remat(func: Callable[P, R]) -> Callable[P, R]:
    """Make a function store its inputs instead of intermediate results, and recompute those.

    The rule: ``remat(func)(*args, **kwargs)`` equals ``func(*args, **kwargs)``, and so do its
    gradients, to the bit. Between the forward and the backward pass only the arguments are stored.
    The backward pass runs ``func`` again, with the random numbers and the autocast of the first
    run. It composes with torch.func's transforms, and ``torch.utils.checkpoint`` does not.

    The first run records no graph. A module with a fast path for inference takes it there, and its
    value then differs by rounding (``nn.TransformerEncoderLayer`` in ``eval()`` mode).

    Captured tensors get gradients too. Under ``torch.compile`` it is ``func`` itself, because the
    compiler merges repeated computations and decides itself what to store.

    Args:
        func: Any function of pytrees that returns a pytree. Tensors without a gradient, and leaves
            that are not tensors, pass through.

    Example:
        >>> from pureaccum import functional
        >>> fn = functional(torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Linear(8, 2)))
        >>> lean = remat(lambda params, x: fn.apply(params, (), x)[0].sum())
        >>> torch.func.grad(lean)(fn.params, torch.ones(3, 2))["1.bias"]
        tensor([3., 3.])

    References:
        Chen et al., `Training deep nets with sublinear memory cost
        <https://arxiv.org/abs/1604.06174>`_, 2016;
        `jax.checkpoint <https://docs.jax.dev/en/latest/_autosummary/jax.checkpoint.html>`_
    """
    if not callable(func):
        raise TypeError(f"func is {func!r}; expected a function.")

    known, told = writes.known_of(func), losses.advising(func)

    @wraps(func)
    def rematerialised(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **kwargs)
        return call_rematerialised(told, args, kwargs, known)

    return rematerialised


def call_rematerialised(
    func: Callable[..., trees.Tree],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    known: writes.Known,
    guards: bool = True,
) -> trees.Tree:
    """A function as a single piece, of which nothing is kept but what it returns."""
    given = Arguments.of(args, kwargs)
    return microbatch.call_microbatched(func, given, outputs.Whole(), known, guards)
