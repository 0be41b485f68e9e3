"""One pass over a batch: at hand, as a stream of batches, or spread over ranks.

state = zeros
for part in microbatches of all batches:
state += gradient of one number of the part
return sum of all ranks' states, divided once
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._base import (
    Tree,
    advise_on_curvature,
    check_argnums,
    check_fits,
    flatten,
    paths,
    positions,
    read_params,
    real_parts,
    refuse_sharded,
    transform_active,
    tree_map,
    unflatten,
)
from .._core import (
    AccumState,
    Reduction,
    accumulator,
    check_size,
    exchange,
    grad_and_value,
    is_auto,
    known_of,
    parts_of_streams,
    refusing_backward,
    with_history,
)


def gradients_over(
    func: Callable[..., Any],
    wrt: tuple[int, ...],
    batch_argnums: int | tuple[int, ...],
    microbatch_size: Any,
    reduction: Reduction,
    stream: bool,
    group: Any,
) -> Callable[..., Any]:
    """The gradients of what ``func`` gives, and its value, over a batch, a stream, or ranks."""
    at = check_argnums(batch_argnums, "batch_argnums")
    for i in at:
        if i < 0:
            raise ValueError(
                f"batch_argnums names argument {i}; expected one counted from the left, 0 being "
                "params: v comes after all arguments."
            )
    knobs: Any = {"reduction": reduction, "engine": "auto"}
    if stream or group is not None:
        summed = _over_parts(func, wrt, at, microbatch_size, stream, group, knobs)
    else:
        knobs |= {"batch_argnums": batch_argnums, "microbatch_size": microbatch_size}
        summed = grad_and_value(func, wrt, **knobs)

    def advised(*args: Any) -> Any:
        try:
            return summed(*args)
        except RuntimeError as error:
            advise_on_curvature(error)
            raise

    return advised


def _over_parts(
    func: Callable[..., Any],
    wrt: tuple[int, ...],
    at: tuple[int, ...],
    size: Any,
    stream: bool,
    group: Any,
    knobs: Any,
) -> Callable[..., Any]:
    """The same of what no call has as a whole: by an accumulator, microbatch by microbatch."""
    if is_auto(size):
        raise ValueError(
            "microbatch_size='auto' came with a stream or a group, of which no call has the whole; "
            "expected a number of rows."
        )
    size = None if size is None else check_size(size)

    def of_moved(moved: list[Tree], *args: Any) -> Any:
        given = [*args]
        for i, x in zip(wrt, moved, strict=True):
            given[i] = x
        return func(*given)

    def summed(*args: Any) -> tuple[tuple[Tree, ...], Tensor]:
        where = positions(at, len(args), "batch_argnums")
        held = transform_active() and group is not None
        if held:  # by all ranks, each of which is to have the whole derivative of it
            args = tuple(x if i in where else _copied(x, group) for i, x in enumerate(args))
        acc = accumulator(of_moved, batch_argnums=tuple(i + 1 for i in where), **knobs)
        moved = [args[i] for i in wrt]
        state = acc.init(moved)
        nothing = "curvature" if group is None else ""
        batch = {i: args[i] for i in where}
        for part in parts_of_streams(batch, size, nothing, stream=stream):
            given = [part.get(i, x) for i, x in enumerate(args)]
            state = acc.update(state, moved, *given, donate=not transform_active())
        if group is not None:
            state = exchange("total", _varying(state, args) if held else state, group)
        grads, value = acc.finalize(state)
        leaves, spec = flatten(moved)
        grads = [g.to(x.dtype) for g, x in zip(flatten(grads)[0], leaves, strict=True)]
        return tuple(unflatten(spec, grads)), value

    return summed


def _copied(tree: Tree, group: Any) -> Tree:
    leaves, spec = flatten(tree)
    at = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    copies = exchange("copy", [leaves[i] for i in at], group)
    for i, x in zip(at, copies, strict=True):
        leaves[i] = x
    return unflatten(spec, leaves)


def _varying(state: AccumState, args: Tree) -> AccumState:
    """The state as a function of all arguments, as that of a rank without rows is by nothing else.

    A transform then does with it what it does with those of the other ranks.
    """
    zero = torch.zeros_like(state.total)
    for x in flatten(args)[0]:
        if isinstance(x, Tensor):
            number = real_parts(x).sum().to(zero)
            zero = zero + torch.where(torch.zeros_like(number, dtype=torch.bool), number, 0.0)
    return tree_map(lambda x: x + zero.to(x.device, x.dtype), state)


def with_history_of(
    product: Callable[..., Any], along: Callable[..., Any], stream: bool
) -> Callable[..., Any]:
    """A product of the gradients of ``along`` that plain autograd follows, but over a stream."""
    if stream:
        return refusing_backward(product, "a product over a stream", "The stream is gone by then.")
    return with_history(product, known_of(along))


def nan_of_nothing(product: Tree, value: Tensor) -> Tree:
    """The product, or NaN where nothing had any weight, of which there is no mean."""
    nothing = value.isnan()
    leaves, spec = flatten(product)
    return unflatten(spec, [torch.where(nothing.to(x.device), torch.nan, x) for x in leaves])


def check_vector(params: Tree, args: tuple[Any, ...]) -> None:
    """Check that the last argument is a vector for these params."""
    leaves, spec = read_params(params)
    refuse_sharded(leaves, "params", "curvature takes params that each rank has whole, and group=.")
    if not args:
        raise TypeError("the product was called with params alone; expected (params, *args, v).")
    its, its_spec = read_params(args[-1], "v")
    cause = "The last argument is the vector: product(params, *args, v), with v a tree like params."
    check_fits(its, its_spec, leaves, spec, ("v", "params"), cause)
    for i, (x, leaf) in enumerate(zip(its, leaves, strict=True)):
        if x.dtype != leaf.dtype:
            raise TypeError(
                f"{paths(spec, 'v')[i]} is {x.dtype}; params has {leaf.dtype} there. {cause}"
            )
