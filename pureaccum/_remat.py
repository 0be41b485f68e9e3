"""Keep the inputs of a function for its backward pass, and run it again there.

    out = func(*detached inputs)  # nothing is recorded
    attach(out, inputs, func)  # ``func`` again, when gradients are asked for

with the random numbers and under the autocast of the first time.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import wraps
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ._attach import attach
from ._inputs import check_int
from ._replay import noting, replaying
from ._torch import version
from ._tree import Tree, flatten, leaves, unflatten


def remat(func: Callable[..., Tree]) -> Callable[..., Tree]:
    """Make a function that keeps its inputs and not what it computes on the way.

    The rule: ``remat(func)(*args, **kwargs)`` is ``func(*args, **kwargs)``, and so are its
    gradients, to the bit. Between the forward and the backward pass only the arguments are held;
    ``func`` is run again in the backward pass, with the random numbers and under the autocast of
    the first time. It composes with torch.func's transforms, which ``torch.utils.checkpoint`` does
    not.

    The first run records nothing: a module with another way for inference takes it there, and its
    value is off by a rounding (``nn.TransformerEncoderLayer`` in ``eval()`` mode).

    What needs a gradient has to be an argument: a captured tensor that needs one is an error.
    Other captured tensors (a key, a mask, one that is mapped by a ``vmap`` around the
    differentiation) are constants. Under ``torch.compile`` it is ``func`` itself, since the
    compiler merges what is computed twice and decides by itself what to keep.

    Args:
        func: Any function of pytrees, with a pytree as its result. Tensors in them that have no
            gradient, and leaves that are no tensors, pass through.

    Returns:
        A function with the arguments of ``func``.

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

    @wraps(func)
    def rematerialised(*args: Any, **kwargs: Any) -> Tree:
        if torch.compiler.is_dynamo_compiling() or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        rest, spec = flatten((args, kwargs))
        where = [i for i, leaf in enumerate(rest) if isinstance(leaf, Tensor)]
        inputs: list[Tensor] = [rest[i] for i in where]
        for i in where:
            rest[i] = None

        def call(inputs: Sequence[Tensor]) -> Tree:
            filled = list(rest)
            for i, x in zip(where, inputs, strict=True):
                filled[i] = x
            args, kwargs = unflatten(spec, filled)
            return func(*args, **kwargs)

        out, as_then = _noted(call, inputs)
        outs, out_spec = flatten(out)
        found = [i for i, x in enumerate(outs) if isinstance(x, Tensor) and _continuous(x)]

        def rerun(*inputs: Tensor) -> tuple[Tensor, ...]:
            with as_then():
                again = leaves(call(inputs))
            return tuple(again[i] for i in found)

        attached = attach([outs[i] for i in found], inputs, rerun)
        for i, x in zip(found, attached, strict=True):
            outs[i] = x
        return unflatten(out_spec, outs)

    return rematerialised


def remat_sequential(
    fs: Sequence[Callable[[Tree, Tree], Tree]], segments: int | None = None
) -> Callable[[Sequence[Tree], Tree], Tree]:
    """Make a chain ``x = f(p, x)`` of functions that keeps ``x`` at the ends of its segments.

    The rule: consecutive functions are cut into segments as even as can be, and each segment is
    rematerialised. With as many segments as a segment has functions, the memory of n functions
    is that of 2 * sqrt(n), for one more forward pass.

    Args:
        fs: The functions, each of its own parameters and of what the one before returned.
        segments: How many; None for about the square root of the number of functions.

    Returns:
        ``chain(params, x)``, where ``params`` is a sequence of trees, one for each function.

    Example:
        >>> double = lambda p, x: 2 * p * x
        >>> chain = remat_sequential([double] * 4)
        >>> chain([torch.ones(())] * 4, torch.ones(2))
        tensor([16., 16.])

    References:
        Chen et al., `Training deep nets with sublinear memory cost
        <https://arxiv.org/abs/1604.06174>`_, 2016;
        `torch.utils.checkpoint <https://docs.pytorch.org/docs/stable/checkpoint.html>`_
    """
    fs = list(fs)
    for i, f in enumerate(fs):
        if not callable(f):
            raise TypeError(f"fs[{i}] is {f!r}; expected a function of (params, x).")
    if not fs:
        raise ValueError("fs is empty; expected at least one function of (params, x).")
    expected = f"an int from 1 to {len(fs)}, the number of functions"
    count = math.ceil(math.sqrt(len(fs))) if segments is None else segments
    count = check_int(count, "segments", expected, 1, len(fs))

    def segment(start: int, stop: int) -> Callable[[Sequence[Tree], Tree], Tree]:
        def run(params: Sequence[Tree], x: Tree) -> Tree:
            for f, p in zip(fs[start:stop], params, strict=True):
                x = f(p, x)
            return x

        return remat(run)

    cuts = [len(fs) * i // count for i in range(count + 1)]
    runs = [(start, stop, segment(start, stop)) for start, stop in pairwise(cuts)]

    def chain(params: Sequence[Tree], x: Tree) -> Tree:
        if len(params) != len(fs):
            raise ValueError(
                f"params has {len(params)} trees; expected {len(fs)}, one for each function."
            )
        for start, stop, run in runs:
            x = run(params[start:stop], x)
        return x

    return chain


def _noted(
    call: Callable[[Sequence[Tensor]], Tree], inputs: Sequence[Tensor]
) -> tuple[Tree, Callable[[], ExitStack]]:
    """What ``call`` returns for inputs without history, and how to be again as it was then."""
    detached = [x.detach() for x in inputs]
    versions = [version(x) for x in detached]
    devices = {x.device for x in inputs if hasattr(getattr(torch, x.device.type, None), "Stream")}
    casts = [_autocast(kind) for kind in {"cpu", *(device.type for device in devices)}]
    cached = torch.is_autocast_cache_enabled()
    out, drawn = noting(lambda: call(detached), devices)
    if versions != [version(x) for x in detached]:
        raise RuntimeError(
            "func changed one of its arguments in place, and would find it changed when it is "
            "run again in the backward pass. Write x = x + y for x += y."
        )

    def as_then() -> ExitStack:
        with ExitStack() as stack:
            for kind, on, dtype in casts:
                if on or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype, on, cached))
                    # Where another region is around, leaving this one lets no cast go.
                    stack.callback(torch.clear_autocast_cache)
            if drawn:
                stack.enter_context(replaying(drawn))
            return stack.pop_all()

    return out, as_then


def _autocast(kind: str) -> tuple[str, bool, torch.dtype]:
    return kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _continuous(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()
