"""Gradients of single samples, reduced chunk by chunk.

    for chunk in chunks of the batch:
        state += reduce(transform(vmap(gradient)(chunk)))

``vmap`` with a ``chunk_size`` concatenates, so it holds (batch, parameters) numbers however small
the chunk. Here only one chunk and the state are in memory. The state is the accumulator's monoid,
with each sample as a microbatch.
"""

from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any, ParamSpec

import torch
from torch import Tensor

from .._base import checks, dtensors, sharded_rows, states, trees
from .._base.settings import records
from .._base.torch_internals import modes
from .._core import accumulator, history, ledger, losses, reductions, weighted, writes
from .._core.ledger import AccumState
from . import by_layers, chunks, reducers, scaling


P = ParamSpec("P")


def per_sample_grad(
    func: Callable[P, Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    batch_argnums: int | tuple[int, ...] = 1,
    chunk_size: int | None = None,
    transform: scaling.Transform = None,
    reduce: Any = "concat",
    metrics: chunks.Metrics = None,
    keep_batch_dim: bool = False,
    randomness: chunks.Randomness = "error",
    engine: chunks.SampleEngine = "vmap",
    dtype: torch.dtype | None = None,
) -> Callable[P, Any]:
    """Compute ``torch.func.vmap(torch.func.grad(func))`` in chunks, and reduce each chunk at once.

    The rule::

        for chunk in chunks of the batch:
            state += reduce(transform(vmap(gradient)(chunk)))

    By default it is ``vmap(grad)``, with ``in_dims`` 0 for the batches and None for the rest. If
    ``func`` returns several numbers, it is ``vmap(jacrev)``: a sample's gradient is its Jacobian,
    with the dims of the output before those of the parameter, and a chunk takes one forward pass
    and one vmapped backward pass. With ``reduce``, at most ``chunk_size`` gradients exist at a
    time. torch.func's transforms and ``.backward()`` differentiate through it. A sample's gradient
    is its term in the sum over the batch: that of its loss, or of the total of ``Weighted``. So
    their mean is the full-batch gradient.

    Args:
        func: The loss of one sample. It receives the batch's tensors without their dim 0, and
            returns a number, ``Weighted``, or a tensor of several numbers. With ``has_aux`` it
            returns ``(loss, aux)``, with a tree of tensors as aux.
        argnums: Which positional arguments to differentiate with respect to.
        has_aux: Whether the loss returns ``(loss, aux)``.
        batch_argnums: Which positional arguments are batches: their tensors have one row per
            sample along dim 0.
        chunk_size: The number of samples to process at a time; None takes all.
        transform: How to change each gradient before it is reduced: ``"normalize"``, ``"sign"``,
            ``clip_by_global_norm(...)``, or a function from one gradient to any tree of tensors,
            such as a projection.
        reduce: ``"concat"`` returns all gradients; ``"sum"``; ``"mean"``, weighted if the loss is
            ``Weighted``; ``"moments"``: see ``Moments``; or a ``Reducer`` of gradients.
        metrics: ``metrics(grad, value)`` returns a tree of tensors for each sample, computed before
            the transform. ``"norm"`` is the norm of the gradient over all leaves.
        keep_batch_dim: Whether ``func`` receives each sample as a batch of one, with its dim 0, so
            that you can use the loss of a batch as it is.
        randomness: As for ``torch.func.vmap``.
        engine: ``"vmap"``, or ``"autograd"``, which runs losses that vmap or torch.func refuses:
            it differentiates the samples of a chunk, and the outputs of each, one at a time.
        dtype: Sums are at least this wide: ``torch.float32`` (the default) or ``torch.float64``.

    Returns:
        A function of ``func``'s arguments that returns the reduced gradients; sums stay in float32
        or wider. With aux or metrics it returns ``(grads, aux)`` or ``(grads, metrics)``, with both
        ``(grads, (aux, metrics))``. Aux and metrics have one row per sample, whatever ``reduce``
        is. For an empty batch ``func`` is not called, and one number per sample is assumed.

    Example:
        >>> loss, value = lambda w, x: (w * x) ** 2, lambda grad, value: value
        >>> w, x = torch.tensor(1.0), torch.tensor([1.0, 2.0, 3.0])
        >>> per_sample_grad(loss)(w, x)
        tensor([ 2.,  8., 18.])
        >>> per_sample_grad(loss, chunk_size=2, reduce="sum", metrics=value)(w, x)
        (tensor(28.), tensor([1., 4., 9.]))
        >>> per_sample_grad(lambda w, x: torch.stack([w * x, w * w]))(w, x)  # two numbers a sample
        tensor([[1., 2.],
                [2., 2.],
                [3., 2.]])

    References:
        `Per-sample gradients
        <https://docs.pytorch.org/tutorials/intermediate/per_sample_grads.html>`_ by torch.func
    """
    how = chunks.Sampling(
        chunk_size=chunk_size,
        mapped=chunks.Mapped(keep_batch_dim, randomness),
        engine=engine,
        has_aux=has_aux,
        transform=transform,
        metrics=metrics,
        several=True,
        carries_graph=chunk_size is None,
    )
    how, at_least = _read(how, reduce, dtype)
    reducer = None if reduce == "concat" else reducers.read_reduce(reduce)
    wrt, batches = (
        checks.check_argnums(argnums, "argnums"),
        checks.check_argnums(batch_argnums, "batch_argnums"),
    )
    checks.check_disjoint(wrt, batches)
    alone, known = not isinstance(argnums, tuple), writes.known_of(func)

    def by(how: chunks.Sampling, *args: Any, **kwargs: Any) -> Any:
        at = checks.positions(wrt, len(args), "argnums")
        given, over = args, sharded_rows.NOWHERE
        if dtensors.any_sharded(trees.tree_leaves([*args, *kwargs.values()])):
            args, kwargs, over = _on_this_rank(args, kwargs, batches, reduce)
        params, call = chunks.of_arguments(func, at, alone, args, kwargs)
        seen, beside = chunks.sampled(call, params, args, at, batches, how, known)
        with checks.outside_inference_mode():
            if reducer is None:
                result = chunks.with_beside(_joined(seen, params, how), beside, how)
                return trees.tree_map(lambda x: sharded_rows.close_rows(x, over), result)
            sums = reducers.reduced(seen, reducer, how.transform, params, at_least)
            if isinstance(sums[0], reducers.MomentSums):
                part = sums[0].first, sums[0].weight
                whole = trees.tree_map(lambda x: sharded_rows.sum_over(x, over), part)
                sums = sums[0].around(*whole), sums[1]
            sums = trees.tree_map(lambda x: sharded_rows.sum_over(x, over), sums)
            result = _placed_like(reducer.finalize(*sums), [given[i] for i in at])
            if beside and over != sharded_rows.NOWHERE:
                beside[:] = [
                    trees.tree_map(lambda *x: sharded_rows.close_rows(torch.cat(x), over), *beside)
                ]
            return chunks.with_beside(result, beside, how)

    call = partial(by, how)
    if not (how.carries_graph and engine == "vmap"):  # torch records what it does by itself
        call = history.with_history(call, known, partial(by, how._replace(engine="vmap")))
    return wraps(func)(call)


@records
def per_sample_accumulator(  # noqa: D417
    func: Callable[..., Any],
    has_aux: bool = False,
    *,
    batch_argnums: int | tuple[int, ...] = 1,
    chunk_size: int | None = None,
    transform: scaling.Transform = None,
    reduce: Any = "mean",
    metrics: chunks.Metrics = None,
    keep_batch_dim: bool = False,
    randomness: chunks.Randomness = "error",
    engine: chunks.SampleEngine = "vmap",
    dtype: torch.dtype | None = None,
    squares: bool = False,
) -> accumulator.Accumulator:
    """Make an accumulator of per-sample gradients, for a stream of batches.

    The rule: its state is an ``AccumState`` that counts each sample as a microbatch, and whose
    ``grads`` is the state of ``reduce``. So states merge over chunks, microbatches and ranks.

    Args:
        func, has_aux, batch_argnums, chunk_size, transform, metrics, keep_batch_dim, randomness,
            engine, dtype: As for ``per_sample_grad``. The first argument of ``func`` is params, and
            it returns one number, because the state is made before ``func`` is called.
        reduce: As for ``per_sample_grad``, without ``"concat"``.
        squares: Whether to sum the squared norms of the samples' gradients too, for
            ``noise_scale``.

    Returns:
        The four functions of ``accumulator``. ``update(state, params, *args, donate=False)``
        returns the state, or ``(state, aux)``, ``(state, metrics)`` or ``(state, (aux, metrics))``
        if there are any, and ``finalize(state)`` returns ``(reduced gradients, value)``.

    Example:
        >>> acc = per_sample_accumulator(lambda w, x: (w * x) ** 2, transform="sign", reduce="sum")
        >>> w, state = torch.tensor(1.0), acc.init(torch.tensor(1.0))
        >>> for part in (torch.tensor([1.0, 2.0]), torch.tensor([3.0])):
        ...     state = acc.update(state, w, part)
        >>> acc.finalize(state)
        (tensor(3.), tensor(14., dtype=torch.float64))
    """
    how = chunks.Sampling(
        chunk_size=chunk_size,
        mapped=chunks.Mapped(keep_batch_dim, randomness),
        engine=engine,
        has_aux=has_aux,
        transform=transform,
        metrics=metrics,
    )
    (how, at_least), reducer = _read(how, reduce, dtype), reducers.read_reduce(reduce)
    batches, known = checks.check_argnums(batch_argnums, "batch_argnums"), writes.known_of(func)

    def init(params: trees.Tree) -> AccumState:
        """Return the state of no samples."""
        leaves, _ = checks.read_params(params)
        taker = "Use per_sample_grad with reduce=..., which takes them."
        dtensors.refuse_sharded(leaves, "params", taker)
        with checks.outside_inference_mode():
            like = chunks.like_transformed(how.transform, params)
            count = len(trees.tree_leaves(like)) if squares else None
            return ledger.empty(reducer.init(like, at_least), leaves[0].device, count)

    def update(state: AccumState, params: trees.Tree, *args: Any, donate: bool = False) -> Any:
        """Return the state with one more batch, and aux and metrics if there are any."""
        ledger.check_squares(ledger.read_state(state), squares)
        given = params, *args
        _, call = chunks.of_arguments(func, (0,), True, given, {})
        seen, beside = chunks.sampled(call, params, given, (0,), batches, how, known)
        in_place = donate and modes.may_write()
        with checks.outside_inference_mode():
            new = _with_chunks(state, reducer, seen, in_place)
        return chunks.with_beside(_handed_over(state, new) if in_place else new, beside, how)

    def merge(a: AccumState, b: AccumState) -> AccumState:
        """Merge two states into one, in any order and grouping."""
        for state in (a, b):
            ledger.check_squares(ledger.read_state(state), squares)
        grads = reducer.merge(a.grads, b.grads)
        return trees.add(a._replace(grads=()), b._replace(grads=()))._replace(grads=grads)

    def finalize(state: AccumState) -> tuple[Any, Tensor]:
        """Return the reduced gradients and the value."""
        value = losses.mean_value(ledger.read_state(state).total, losses.divisor(state.weight))
        result = reducer.finalize(state.grads, state.weight)
        return result, state.total.clone() if reduce == "sum" else value

    return accumulator.Accumulator(init, *map(accumulator.not_followed, (update, merge, finalize)))


# DTensors: each rank takes the samples that it has, with whole parameters ----------------------


def _on_this_rank(
    args: tuple[Any, ...], kwargs: Any, batches: tuple[int, ...], reduce: Any
) -> tuple[tuple[Any, ...], Any, sharded_rows.Over]:
    """This rank's samples of the batches, all else whole, and the ranks over which samples lie."""
    why = ""
    if modes.transform_active():
        why = "torch.func transforms do not see through them. Call this outside of any transform."
    elif reductions.is_reducer(reduce):
        why = "Your own Reducer cannot be summed over ranks. Use 'sum', 'mean' or 'moments'."
    if why:
        raise ValueError(f"the arguments hold DTensors. {why}")
    at = checks.positions(batches, len(args), "batch_argnums")
    over = sharded_rows.rows_over([x for i in at for x in trees.tree_leaves(args[i])])
    its = [
        trees.tree_map(dtensors.local if i in at else dtensors.whole, arg)
        for i, arg in enumerate(args)
    ]
    return tuple(its), trees.tree_map(dtensors.whole, kwargs), over


def _placed_like(result: trees.Tree, params: trees.Tree) -> trees.Tree:
    """What gradients were reduced to, where the parameters lie whose gradients they are."""
    like, (leaves, spec) = trees.tree_leaves(params), trees.flatten(result)
    if not dtensors.any_sharded(like):
        return result
    meshes = next(x for x in like if dtensors.is_sharded(x))
    placed = [dtensors.replicated(x, meshes) if isinstance(x, Tensor) else x for x in leaves]
    copies, rest = divmod(len(leaves), len(like))  # Moments have several
    like = like * copies
    if not rest and all(
        isinstance(x, Tensor) and x.shape == y.shape for x, y in zip(placed, like, strict=True)
    ):
        placed = dtensors.placed_like(placed, like)
    return trees.unflatten(spec, placed)


# Pieces --------------------------------------------------------------------------------


def _read(
    how: chunks.Sampling, reduce: Any, dtype: torch.dtype | None
) -> tuple[chunks.Sampling, torch.dtype]:
    """The options that are shared: how gradients are taken, and the least dtype of sums."""
    at_least = checks.check_dtype(dtype)
    return by_layers.with_shortcut(chunks.check_sampling(how), reduce, at_least), at_least


def _joined(seen: Iterable[chunks.Chunk], params: trees.Tree, how: chunks.Sampling) -> trees.Tree:
    """The gradients of all samples, concatenated."""
    parts: list[list[Tensor]] = []
    spec = None
    for chunk in seen:
        parts.append(reducers.terms(chunk))
        spec = chunk.spec
    if spec is None:
        like = chunks.like_transformed(how.transform, params)
        return trees.tree_map(lambda x: x.new_zeros(0, *x.shape), like)
    if len(parts) == 1:
        return trees.unflatten(spec, parts[0])
    columns = [list(column) for column in zip(*parts, strict=True)]
    parts.clear()  # so that each column is dropped when it has been joined
    return trees.unflatten(spec, [torch.cat(columns.pop(0)) for _ in range(len(columns))])


def _with_chunks(
    state: AccumState,
    reducer: reducers.ChunkReducer,
    given: Iterable[chunks.Chunk],
    in_place: bool,
) -> AccumState:
    """The state with some chunks, one by one; an error after the first spoils a state in place."""
    new, begun = state if in_place else _clone(state), False
    try:
        for chunk in given:
            begun = True
            new = _with_chunk(new, reducer, chunk)
    except BaseException:
        if in_place and begun:
            states.mark(trees.tree_leaves(state.grads), states.Spoiled)
        raise
    return new


def _with_chunk(
    state: AccumState, reducer: reducers.ChunkReducer, chunk: chunks.Chunk
) -> AccumState:
    value, weight, squares = chunk.value, len(chunk.value), state.squares
    if isinstance(chunk.weight, Tensor):
        value = torch.where(weighted.counts(value, chunk.weight), value, 0.0)
        weight = chunk.weight.sum()
    value = value.double()
    if isinstance(squares, Tensor):
        squares = squares + reducers.squares_of(chunk)
    return state._replace(
        grads=reducer.add(state.grads, chunk),
        total=state.total + value.sum(),
        weight=state.weight + weight,
        microbatches=state.microbatches + len(value),
        nonfinite=state.nonfinite + ((value - value) != 0).sum(),
        squares=squares,
    )


def _handed_over(state: AccumState, new: AccumState) -> AccumState:
    """The new state; the old one is marked. A reducer of the user's may hold numbers in it."""
    kept, spec = trees.flatten(new)
    tensors = [
        [x for x in each if isinstance(x, Tensor)] for each in (trees.tree_leaves(state), kept)
    ]
    renewed = iter(states.hand_over(*tensors))
    return trees.unflatten(spec, [next(renewed) if isinstance(x, Tensor) else x for x in kept])


def _clone(state: AccumState) -> AccumState:
    return trees.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, state)
