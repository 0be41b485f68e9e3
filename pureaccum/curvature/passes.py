"""One pass over a batch: in memory, as a stream of batches, or spread over ranks.

    state = zeros
    for part in microbatches of all batches:
        state += gradient of one number of the part
    return sum of all ranks' states, divided once

The first product for each loss and kind of arguments is compared with finite differences.
"""

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import wraps
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._base import checks, claims, deterministic, dtensors, refusals, trees
from .._base.torch_internals import autograd, modes
from .._core import batches, differences, evaluation, history, losses, precision, transforms, writes
from .._core.accumulator import accumulator
from .._core.auto_size import is_auto
from .._core.exchange import exchange


class Summation(NamedTuple):
    """Over what gradients are summed: the options that all products share."""

    batch_argnums: int | tuple[int, ...]
    microbatch_size: Any = None
    reduction: losses.Reduction = "mean"
    stream: bool = False
    group: Any = None


def gradients_over(func: Callable[..., Any], wrt: tuple[int, ...], over: Summation) -> Any:
    """The gradients of what ``func`` gives, and its value, over a batch, a stream, or ranks."""
    at = checks.check_argnums(over.batch_argnums, "batch_argnums")
    for i in at:
        if i < 0:
            raise ValueError(
                f"batch_argnums names argument {i}; expected a position counted from the left, "
                "where 0 is params, because v comes after all arguments."
            )
    # Products are compared in another way, by ``compared``, and only where that is asked for.
    options: Any = {"reduction": over.reduction, "engine": "auto", "check": False}
    if over.stream or over.group is not None:
        summed = _over_parts(func, wrt, at, over, options)
    else:
        options |= {"batch_argnums": over.batch_argnums, "microbatch_size": over.microbatch_size}
        summed = transforms.grad_and_value(func, wrt, **options)

    def advised(*args: Any) -> Any:
        try:
            return summed(*args)
        except RuntimeError as error:
            refusals.advise_on_curvature(error)
            raise

    return advised


def _over_parts(
    func: Callable[..., Any],
    wrt: tuple[int, ...],
    at: tuple[int, ...],
    over: Summation,
    options: Any,
) -> Callable[..., Any]:
    """The same of what no call has as a whole: by an accumulator, microbatch by microbatch."""
    size, group = over.microbatch_size, over.group
    if is_auto(size):
        raise ValueError(
            "microbatch_size='auto' does not work with a stream or a group, because no call sees "
            "the whole batch; expected a number of samples."
        )
    size = None if size is None else batches.check_size(size)

    def of_moved(moved: list[trees.Tree], *args: Any) -> Any:
        given = [*args]
        for i, x in zip(wrt, moved, strict=True):  # wrt may count from the right
            given[i] = x
        return func(*given)

    def summed(*args: Any) -> tuple[tuple[trees.Tree, ...], Tensor]:
        where = checks.positions(at, len(args), "batch_argnums")
        held = modes.transform_active() and group is not None
        if held:  # by all ranks, each of which is to have the whole derivative of it
            args = tuple(
                x if i in where else exchange("copy", x, group) for i, x in enumerate(args)
            )
        acc = accumulator(of_moved, batch_argnums=tuple(i + 1 for i in where), **options)
        moved = [args[i] for i in wrt]
        state = acc.init(moved)
        nothing = "curvature" if group is None else ""
        batch = {i: args[i] for i in where}
        for part in evaluation.parts_of_streams(batch, size, nothing, stream=over.stream):
            given = [part.get(i, x) for i, x in enumerate(args)]
            state = acc.update(state, moved, *given, donate=modes.may_write())
        if held:
            state = claims.tied(state, claims.nothing_of(args, state.total.device))
        if group is not None:
            state = exchange("total", state, group)
        grads, value = acc.finalize(state)
        leaves, spec = trees.flatten(moved)
        grads = [g.to(x.dtype) for g, x in zip(trees.flatten(grads)[0], leaves, strict=True)]
        return tuple(trees.unflatten(spec, grads)), value

    return summed


def with_history_of(
    product: Callable[..., Any], along: Callable[..., Any], stream: bool
) -> Callable[..., Any]:
    """A product of the gradients of ``along`` that plain autograd follows, but over a stream."""
    if stream:
        return history.refusing_backward(
            product,
            "a product over a stream",
            "The stream is used up by then. Pass a batch instead.",
        )
    return history.with_history(product, writes.known_of(along))


def nan_of_nothing(product: trees.Tree, value: Tensor) -> trees.Tree:
    """The product, or NaN where nothing had any weight, of which there is no mean."""
    nothing = value.isnan()
    leaves, spec = trees.flatten(product)
    return trees.unflatten(spec, [torch.where(nothing.to(x.device), torch.nan, x) for x in leaves])


def check_vector(params: trees.Tree, args: tuple[Any, ...]) -> None:
    """Check that the last argument is a vector for these params."""
    leaves, spec = checks.read_params(params)
    dtensors.refuse_sharded(
        leaves,
        "params",
        "Curvature needs params that each rank holds whole. Pass those, with group.",
    )
    if not args:
        raise TypeError("the product was called with params alone; expected (params, *args, v).")
    its, its_spec = checks.read_params(args[-1], "v")
    cause = "Pass the vector last: product(params, *args, v), with v a tree like params."
    checks.check_fits(its, its_spec, leaves, spec, ("v", "params"), cause)
    for i, (x, leaf) in enumerate(zip(its, leaves, strict=True)):
        if x.dtype != leaf.dtype:
            raise TypeError(
                f"{trees.paths(spec, 'v')[i]} is {x.dtype}; expected {leaf.dtype}, as in params. "
                f"{cause}"
            )


# Compared with differences -------------------------------------------------------------------
#
# A custom Function that makes its gradient in its forward pass has no second derivative, and nobody
# says so: autograd takes that gradient for a constant. So, after the first product of a loss and
# kind, the one of a few rows is computed once more, near by and in float64, beside gradients.


class WrongProductError(ArithmeticError):
    """A product that is not the derivative of gradients."""


_verdicts: "WeakKeyDictionary[Any, WeakKeyDictionary[Any, writes.Known]]" = WeakKeyDictionary()


def noting(along: Callable[..., Any]) -> Callable[..., Any]:
    """Note the arguments of the first call where a product is to be compared."""

    def noted(*args: Any) -> Any:
        if not torch.compiler.is_compiling() and checks.here.first == []:
            checks.here.first.append(args)
        return along(*args)

    return noted


def compared(
    product: Callable[..., Any],
    along: Callable[..., Any],
    forward: Callable[..., Any],
    loss: Callable[..., Any],
    batch_argnums: int | tuple[int, ...],
    check: bool,
) -> Callable[..., Any]:
    """A product that raises where it is not the derivative of gradients.

    ``along`` is the number of a microbatch whose gradient it is, by ``noting``. The product takes
    ``forward`` as linear, and the second derivative of ``loss``, a function of what forward gives.
    """

    @wraps(product)
    def called(params: trees.Tree, *args: Any) -> Any:
        check_vector(params, args)
        (leaves, spec), (rest, rest_spec) = trees.flatten(params), trees.flatten(args)
        if not check or not _can_be_compared(leaves, rest):
            return product(params, *args)
        shapes: Any = (spec, *(x.shape for x in leaves))
        given = writes.Given("params", leaves, shapes), writes.Given("args", rest, rest_spec)
        try:
            known = _verdicts.setdefault(forward, WeakKeyDictionary()).setdefault(
                loss, writes.Known()
            )
        except TypeError:  # one has no hash, or takes no weak reference
            known = writes.Known()
        if writes.knows(known, *given):
            return product(params, *args)
        before, checks.here.first = checks.here.first, list[Any]()
        try:
            out, first = product(params, *args), checks.here.first
        finally:
            checks.here.first = before
        if first:
            found = _misses(
                along, forward, loss, params, first[0][1:], len(args) - 1, batch_argnums
            )
            if found and {*found} - {0} and not (0 in found and found[0].functions):
                raise WrongProductError(_sentence(found, trees.paths(spec, "params")))
            if found is not None:
                known.modules = writes.known_of(along).modules
                writes.remember(known, *given)
        return out

    return called


def _can_be_compared(params: list[Any], args: list[Any]) -> bool:
    """Not under what looks on or differentiates, where ranks would part ways, or of huge params."""
    if (
        not (modes.at_top_level() and modes.may_write())
        or autograd.in_backward()
        or checks.here.backward
        or not checks.here.compares
    ):
        return False
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return False
    kinds = {type(x) for x in (*params, *args) if isinstance(x, Tensor)}
    return kinds <= {Tensor, nn.Parameter} and sum(x.numel() for x in params) <= 2**27


def _misses(
    along: Any,
    forward: Any,
    loss: Any,
    params: trees.Tree,
    args: Any,
    count: int,
    batch_argnums: Any,
) -> dict[int, differences.Miss] | None:
    """Of a few samples, or of all where a loss takes no fewer; perhaps in its own dtypes."""

    def number(*args: Any) -> Tensor:
        return losses.read(along(*args), False)[0].total

    whole = gradients_over(number, (0,), Summation(batch_argnums=batch_argnums, reduction="sum"))

    def few(args: Sequence[Any]) -> list[Any]:
        at = [
            i - 1 for i in checks.positions(checks.check_argnums(batch_argnums, ""), count + 1, "")
        ]
        rows = (
            next(iter(batches.cut_batch(batches.read_batch([args[i] for i in at]), 8)))
            if at
            else []
        )
        return [dict(zip(at, rows, strict=True)).get(i, x) for i, x in enumerate(args)]

    def in_dtype(
        dtype: torch.dtype | None, args: Sequence[Any]
    ) -> dict[int, differences.Miss] | None:
        args, (_, *last) = args[:count], args[count:]
        claim = differences.SecondOrder(
            forward=lambda params: forward(params, *args),
            loss=lambda out: losses.read(loss(out, *args), False)[0].total,
            product=lambda params, v: whole(params, *args, v, *last)[0][0],
            around=nullcontext if dtype is None else lambda: precision.InDtype(dtype),
        )
        return differences.misses(claim, deterministic.cast_tree(params, dtype))

    found: dict[int, differences.Miss] | None = {}
    for rows, dtype in itertools.product((few, list), (torch.float64, None)):
        try:
            with torch.enable_grad(), checks.outside_inference_mode(), writes.unguarded():
                found = in_dtype(dtype, deterministic.cast_tree(rows(args), dtype))
        except Exception:  # it runs in its own dtype alone, or takes no fewer samples
            continue
        if found is not None:
            break
    return found


def _sentence(found: dict[int, differences.Miss], names: list[str]) -> str:
    where = [(miss.missing / miss.bound, i) for i, miss in found.items() if i]
    worst, more = found[i := max(where)[1]], f" and {len(where) - 1} more leaves" * (len(where) > 1)
    cause = (
        f"{', '.join(worst.functions)}, a custom Function that computes its gradient in its "
        "forward pass, has no second derivative, because autograd treats that gradient as a "
        "constant. Compute it in backward from saved inputs, or use the plain formula."
        if worst.functions
        else "something that depends on params is computed under no_grad() or outside of torch, a "
        "hook changes a gradient, or torch itself has a wrong derivative. Use a plain formula."
    )
    return (
        f"the product is not the derivative of the gradient in {names[i - 1]}{more}: its norm is "
        f"{worst.came:.3g} there, but that of central differences is {worst.expected:.3g}. They "
        f"are {worst.missing:.2g} apart, and rounding explains {worst.bound:.1g}. Likely cause: "
        f"{cause} To take the product as it is, pass check=False."
    )
