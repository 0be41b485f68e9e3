"""How per-sample gradients are reduced, a chunk at a time.

    state = init(one gradient)
    state = add(state, chunk)
    state = merge(state, another)
    result = finalize(state, weight)

Sums are float32 or wider, and nothing else of a chunk is stored. A sample without weight adds
exactly nothing, even if its gradient is NaN.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base import checks, reprs, states, trees
from .._base.torch_internals import modes
from .._base.trees import add
from .._core import losses, reductions
from .._core.weights import divided, quotient
from . import chunks, outer_products, scaling


@states.loadable
class Moments(NamedTuple):
    """The first two moments of per-sample gradients.

    The rule, for gradients g of weight w (1, or the weight of ``Weighted``)::

        mean = Σ w g / Σ w
        centred = Σ w |g - mean|² / Σ w     # which cancels nothing, where the mean is large

    Attributes:
        mean: The full-batch gradient, a tree like params, float32 or wider.
        centred: The elementwise mean of |gradient - mean|², a real tree like params.
        weight: The number of samples, or the sum of their weights if the loss is ``Weighted``.
        samples: The number of samples with a non-zero weight.

    Example:
        >>> import torch
        >>> from pureaccum import per_sample_grad
        >>> moments = per_sample_grad(lambda w, x: w * x, reduce="moments")
        >>> moments(torch.tensor(2.0), torch.tensor([1.0, 3.0])).variance()
        tensor(2.)
    """

    mean: trees.Tree
    centred: trees.Tree
    weight: Tensor
    samples: Tensor

    @property
    def second(self) -> trees.Tree:
        """The elementwise mean of |gradient|²."""
        return trees.tree_map(lambda m, c: c + _power(m), self.mean, self.centred)

    def variance(self) -> trees.Tree:
        """Return the unbiased elementwise variance of a sample's gradient, NaN for one sample."""
        if self.weight.dim() != 0:
            raise ValueError("the Moments are stacked. Use torch.func.vmap(Moments.variance)(...).")
        each = torch.where(self.samples > 1, self.weight / (self.samples - 1), torch.nan)
        return trees.tree_map(lambda x: x * trees.as_scalar_of(x, each), self.centred)


@states.loadable
class MomentSums(NamedTuple):
    """What ``Moments`` are made of, before any division: sums around the mean so far."""

    first: trees.Tree
    centred: trees.Tree
    weight: Tensor
    samples: Tensor

    def around(self, first: trees.Tree, weight: Tensor) -> "MomentSums":
        """Return the sums around the mean of more samples; such sums of parts may be added."""

        def moved(own: Tensor, whole: Tensor, centred: Tensor) -> Tensor:
            away = _power(_mean(own, self.weight) - _mean(whole, weight))
            return centred + away * trees.as_scalar_of(away, self.weight)

        return self._replace(centred=trees.tree_map(moved, self.first, first, self.centred))


class ChunkReducer(NamedTuple):
    """A way to reduce chunks."""

    # of a tree like one gradient, and the least dtype
    init: Callable[[trees.Tree, torch.dtype], Any]
    add: Callable[[Any, chunks.Chunk], Any]  # writes to the state, except under a transform
    merge: Callable[[Any, Any], Any]
    finalize: Callable[[Any, Tensor], Any]  # of a state, and the weight


def read_reduce(reduce: Any) -> ChunkReducer:
    """The reducer that a reduction stands for, or one of the user's."""
    if isinstance(reduce, str) and reduce in REDUCERS:
        return REDUCERS[reduce]
    if reductions.is_reducer(reduce):
        return _of_user(reduce)
    raise ValueError(
        f"reduce is {reduce!r}; expected {', '.join(map(repr, REDUCERS))} or Reducer(init, "
        "update, merge, finalize). per_sample_grad also takes 'concat'."
    )


def reduced(
    seen: Iterable[chunks.Chunk],
    reducer: ChunkReducer,
    transform: scaling.Transform | scaling.Clip,
    params: trees.Tree,
    at_least: torch.dtype,
) -> tuple[Any, Tensor]:
    """What the gradients of all samples come to before the end, and their weight."""
    sums = None
    weight = torch.zeros((), dtype=torch.float64, device=trees.tree_leaves(params)[0].device)
    for chunk in seen:
        if sums is None:  # only now is it known how many numbers the loss has
            given = chunks.need_leaves(chunk.grads)
            like = [
                x.right.new_zeros(x.shape)
                if isinstance(x, outer_products.Outer)
                else torch.zeros_like(x[0])
                for x in given
            ]
            sums = reducer.init(trees.unflatten(chunk.spec, like), at_least)
            del given, like
        weight = weight + weights(chunk).sum()
        sums = reducer.add(sums, chunk)
    if sums is None:
        sums = reducer.init(chunks.like_transformed(transform, params), at_least)
    return sums, weight


def weights(chunk: chunks.Chunk) -> Tensor:
    """The weight of each sample: 1, or what ``Weighted`` says."""
    if isinstance(chunk.weight, Tensor):
        return chunk.weight
    return chunk.value.new_ones(len(chunk.value), dtype=torch.float64)


def terms(chunk: chunks.Chunk) -> list[Tensor]:
    """What each sample adds to a sum, all written out; the chunk is used up."""
    each = (
        outer_products.written_out(x) if isinstance(x, outer_products.Outer) else x
        for x in _leaf_by_leaf(chunk)
    )
    if isinstance(chunk.factor, tuple):
        return list(each)
    pairs = zip(each, _factors(chunk), strict=True)
    return [x * trees.as_scalar_of(x, _broadcast(factor, x)) for x, factor in pairs]


def squares_of(chunk: chunks.Chunk) -> Tensor:
    """The sum of |term|² / weight for each leaf, and last how many samples had any weight."""
    weight = weights(chunk)
    sums: list[Tensor] = []
    for x, factor in zip(chunk.grads, _factors(chunk), strict=True):
        norms = outer_products.norms_of(x).to(weight.device).double() * factor.double()
        sums.append(quotient(norms**2, weight).sum())
    return torch.stack([*sums, (weight != 0).double().sum()])


# The reducers --------------------------------------------------------------------------


def _add_to_sums(sums: trees.Tree, chunk: chunks.Chunk) -> trees.Tree:
    _check_kind(sums, moments=False)
    _check_fits(sums, chunk)
    columns = zip(trees.tree_leaves(sums), _leaf_by_leaf(chunk), _factors(chunk), strict=True)
    return trees.unflatten(
        chunk.spec, [_plus_rows(total, x, factor) for total, x, factor in columns]
    )


def _no_moments(like: trees.Tree, dtype: torch.dtype) -> MomentSums:
    first = trees.zeros(like, dtype)
    centred = trees.tree_map(lambda x: torch.zeros_like(x.real if x.is_complex() else x), first)
    none = torch.zeros((), dtype=torch.float64, device=trees.tree_leaves(like)[0].device)
    return MomentSums(first, centred, none, none.clone())


def _add_to_moments(state: Any, chunk: chunks.Chunk) -> MomentSums:
    _check_kind(state, moments=True)
    _check_fits(state.first, chunk)
    each, ones, twos = weights(chunk), list[Tensor](), list[Tensor]()
    more, some = each.sum(), state.weight != 0
    shares = [trees.scalars_of(quotient(1.0, w)) for w in (state.weight, more, state.weight + more)]
    before, here, after = shares
    sums = trees.tree_leaves(state.first), trees.tree_leaves(state.centred)
    for total, centred, x, factor in zip(*sums, _leaf_by_leaf(chunk), _factors(chunk), strict=True):
        x = outer_products.written_out(x) if isinstance(x, outer_products.Outer) else x
        factor = factor.double()
        one = _plus_rows(torch.zeros_like(total), x, factor)
        # Squares around the mean so far, or that of the first chunk, cancel next to nothing.
        pivot = torch.where(some.to(one.device), total * before(one), one * here(one))
        x = x.to(one.dtype)
        if isinstance(chunk.factor, Tensor) or isinstance(chunk.weight, Tensor):
            x = x * _broadcast(trees.as_scalar_of(one, quotient(factor, each)), x)
        off, away = x - pivot, one - pivot * trees.as_scalar_of(one, more)
        off = off.square_() if modes.may_write() and not off.is_complex() else _power(off)
        twos.append(_plus_rows(centred, off, each) - _power(away) * after(centred))
        ones.append(total.add_(one) if modes.may_write() else total + one)
    first, centred = (trees.unflatten(chunk.spec, column) for column in (ones, twos))
    samples = state.samples + (each != 0).sum()
    return MomentSums(first, centred, state.weight + more, samples)


def _pooled(a: MomentSums, b: MomentSums) -> MomentSums:
    first, weight = add((a.first, a.weight), (b.first, b.weight))
    return add(a.around(first, weight), b.around(first, weight))


def _mean(total: Tensor, weight: Tensor) -> Tensor:
    return quotient(total, trees.as_scalar_of(total, weight))


def _of_user(reducer: reductions.Reducer) -> ChunkReducer:
    def add(state: Any, chunk: chunks.Chunk) -> Any:
        return reducer.update(state, trees.unflatten(chunk.spec, terms(chunk)), weights(chunk))

    def finalize(state: Any, _: Tensor) -> Any:
        return reducer.finalize(state)

    return ChunkReducer(lambda like, _: reducer.init(like), add, reducer.merge, finalize)


def _merged(a: trees.Tree, b: trees.Tree, moments: bool) -> trees.Tree:
    _check_kind(a, moments)
    names = "the second state's grads", "the first state's grads"
    checks.check_fits(*trees.flatten(b), *trees.flatten(a), names)
    return _pooled(a, b) if moments else add(a, b)


_merge_sums, _merge_moments = partial(_merged, moments=False), partial(_merged, moments=True)


def _finish_sums(sums: trees.Tree, _: Tensor) -> trees.Tree:
    _check_kind(sums, moments=False)
    return trees.tree_map(torch.clone, sums)


def _finish_mean(sums: trees.Tree, weight: Tensor) -> trees.Tree:
    _check_kind(sums, moments=False)
    leaves, spec = trees.flatten(sums)
    return trees.unflatten(spec, divided(leaves, losses.divisor(weight), own=False))


def _finish_moments(state: MomentSums, weight: Tensor) -> Moments:
    _check_kind(state, moments=True)
    mean, centred = _finish_mean((state.first, state.centred), weight)
    return Moments(mean, centred, weight.clone(), state.samples.clone())


REDUCERS = {
    "sum": ChunkReducer(trees.zeros, _add_to_sums, _merge_sums, _finish_sums),
    "mean": ChunkReducer(trees.zeros, _add_to_sums, _merge_sums, _finish_mean),
    "moments": ChunkReducer(_no_moments, _add_to_moments, _merge_moments, _finish_moments),
}


# Pieces --------------------------------------------------------------------------------


def _check_kind(state: Any, moments: bool) -> None:
    if isinstance(state, MomentSums) != moments:
        came, expected = ("'sum' or 'mean'", "'moments'")[:: 1 if moments else -1]
        raise ValueError(
            f"state.grads is {reprs.kind(state)}, of a state made with reduce={came}, but "
            f"this accumulator was made with {expected}. Pass a state from its own init."
        )


def _check_fits(sums: trees.Tree, chunk: chunks.Chunk) -> None:
    leaves, spec = trees.flatten(sums)
    shapes = [x.shape if isinstance(x, outer_products.Outer) else x.shape[1:] for x in chunk.grads]
    if spec != chunk.spec or shapes != [x.shape for x in leaves]:
        one = [chunk.value.new_zeros(()).expand(shape) for shape in shapes]
        names = "state.grads", "a sample's gradient"
        checks.check_fits(leaves, spec, one, chunk.spec, names)


def _leaf_by_leaf(chunk: chunks.Chunk) -> Any:
    """The gradients, zero for samples that are not kept; each is dropped before the next one."""
    none = chunk.value.new_empty(0)
    for i, x in enumerate(chunk.grads):
        chunk.grads[i] = none
        if isinstance(chunk.keep, Tensor):
            if isinstance(x, outer_products.Outer):
                x = outer_products.only_kept(x, chunk.keep)
            else:
                x = torch.where(_broadcast(chunk.keep.to(x.device), x), x, 0.0)
        yield x


def _factors(chunk: chunks.Chunk) -> Sequence[Tensor]:
    """By what each leaf of the gradients is multiplied: one number per sample."""
    factor = chunk.factor
    if isinstance(factor, tuple):
        factor = chunk.value.new_ones(len(chunk.value))
    return factor.unbind(-1) if factor.dim() == 2 else [factor] * len(chunk.grads)


def _plus_rows(total: Tensor, x: Tensor | outer_products.Outer, factor: Tensor) -> Tensor:
    """``total + (factor * x).sum(0)``, without another tensor as large as x."""
    if isinstance(x, outer_products.Outer):
        return outer_products.add_weighted_(total, x, factor)
    rows = x.reshape(len(x), -1).to(total.dtype)
    term = torch.mv(rows.T, factor.to(total.device, total.dtype)).view(total.shape)
    return total.add_(term) if modes.may_write() else total + term


def _power(x: Tensor) -> Tensor:
    return (x * x.conj()).real if x.is_complex() else x * x


def _broadcast(each: Tensor, x: Tensor) -> Tensor:
    """One number per sample, in a shape that fits the gradients of all."""
    return each.view(-1, *[1] * (x.dim() - 1))
