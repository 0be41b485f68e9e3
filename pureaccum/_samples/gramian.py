"""The inner products of samples' gradients, without their Jacobian.

    for a in blocks of rows:
        for b in blocks of the other batch's rows:
            for leaf in leaves, as one backward pass over the rows of both comes by:
                K[a, b] += gradients of a by the leaf @ gradients of b by the leaf, transposed

A leaf's gradients are dropped before those of the next one. Those of a matrix are outer products
of what a layer saw (see ``layers``), whose inner products are products of inner products.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._base import (
    Tree,
    accumulation_dtype,
    at_top_level,
    check_argnums,
    flatten,
    positions,
    read_params,
    refuse_autocast_cache,
    refuse_sharded,
    tree_map,
    unflatten,
)
from .._core import (
    Batch,
    Given,
    Known,
    Weighted,
    check_size,
    cut,
    guarding,
    known_of,
    read_batch,
    rows_to_cut,
)
from .by_layers import totals_by_layers
from .chunks import SampleLoss, Sampling
from .outer_products import Outer, is_short, is_table, written_out
from .per_sample import per_sample_grad


def gramian(
    func: Callable[..., Any],
    *,
    batch_argnums: int | tuple[int, ...] = 1,
    chunk_size: int | None = None,
    keep_batch_dim: bool = False,
) -> Callable[..., Tensor]:
    """Take the inner products of samples' gradients, without keeping the gradients.

    The rule, with g the gradient of a sample, all leaves as one vector::

        K[i, j] = <g(sample i), g(sample j)>

    Of a function that returns several numbers it is the empirical neural tangent kernel: ``K[i, j,
    p, q]`` is of number p of sample i and number q of sample j.

    No more is held than what one backward pass over the rows of two blocks keeps, and the gradients
    by one leaf: of a matrix in a linear layer or an embedding not even these. A function that
    does with its parameters what cannot be followed has its Jacobian written out, block by block,
    as it has under transforms.

    Args:
        func: ``func(params, *args)`` gives one number of a sample, or a tensor of several. It is
            given the batch's tensors without their dim 0.
        batch_argnums: Which positional arguments are batches: their tensors have one row per
            sample along dim 0. All others are handed to every microbatch whole.
        chunk_size: How many samples of each batch make a block; None takes all of them.
        keep_batch_dim: Hand each sample to ``func`` as a batch of one row, so that the loss of a
            batch can be used as it is.

    Returns:
        ``kernel(params, *args, other=None)``, of shape (n, m) or (n, m, *output, *output): of the
        samples of the batch and those of ``other``, which stands in its place (of several batch
        arguments a tuple); None is the batch itself. In float32 at least.

    Example:
        >>> w, x = torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 0.0], [1.0, 3.0]])
        >>> gramian(lambda w, x: (w * x).sum())(w, x)
        tensor([[ 1.,  1.],
                [ 1., 10.]])

    References:
        Jacot, Gabriel and Hongler, `Neural tangent kernel <https://arxiv.org/abs/1806.07572>`_,
        2018; torch's `tutorial
        <https://docs.pytorch.org/tutorials/intermediate/neural_tangent_kernels.html>`_ on them.
    """
    batches, known = check_argnums(batch_argnums, "batch_argnums"), known_of(func)
    size = None if chunk_size is None else check_size(chunk_size, "chunk_size")
    how = Sampling(
        has_aux=False,
        chunk_size=size,
        transform=None,
        metrics=None,
        keep_batch_dim=keep_batch_dim,
        randomness="error",
        engine="vmap",
        several=True,
    )

    def kernel(params: Tree, *args: Any, other: Any = None) -> Tensor:
        leaves, spec = read_params(params)
        refuse_sharded(leaves, "params", "per_sample_grad is what takes them, with reduce=...")
        refuse_autocast_cache(leaves)
        at = positions(batches, 1 + len(args), "batch_argnums")
        rows = _read({i: args[i - 1] for i in at}, "args")
        second = None
        if other is not None:
            its = other if isinstance(batch_argnums, tuple) else (other,)
            if not isinstance(its, tuple) or len(its) != len(at):  # pyright: ignore
                raise ValueError(
                    f"other is a {type(other).__name__}; expected a tuple of {len(at)}, which "
                    "stands in the place of the batch arguments."
                )
            second = _read(dict(zip(at, its, strict=True)), "other")
            if second.spec != rows.spec:
                raise ValueError(
                    f"other has the structure {second.spec}, and the batch {rows.spec}; expected "
                    "another batch of the same kind."
                )

            for x, y in zip(rows.leaves, second.leaves, strict=True):
                if not isinstance(x, Tensor) and x != y:
                    raise ValueError(
                        f"other has {y!r} where the batch has {x!r}; expected the same: what is no "
                        "tensor is for all samples of both."
                    )

        def call(leaves: Any, sample: Tree) -> Any:
            given = (sample.get(i + 1, x) for i, x in enumerate(args))
            out = func(unflatten(spec, leaves), *given)
            if isinstance(out, Weighted):
                raise TypeError(
                    "func gave a Weighted; expected a number or a tensor of several. Return its "
                    "total, whose gradient is what a sample adds to a sum."
                )
            return out

        givens = [Given("params", leaves, spec), Given("args", rows.leaves, rows.spec)]
        with guarding(known, *givens) as guarded:
            by_layers = partial(_by_layers, guarded(call), leaves, how)
            by_hand = partial(_by_hand, call, leaves, keep_batch_dim)
            return _of_blocks(rows, second, size, known, by_layers, by_hand)

    return kernel


def _read(batch: Tree, root: str) -> Batch:
    read = read_batch(batch, root)
    rows_to_cut(read, root)
    return read


Way = Callable[[Tree, Tree | None], Tensor]  # the products of the samples of one or two blocks


def _of_blocks(
    rows: Batch, other: Batch | None, size: int | None, known: Known, by_layers: Way, by_hand: Way
) -> Tensor:
    """All blocks side by side; of a batch with itself those below the diagonal are seen twice."""
    blocks = _cut(rows, size)
    others = blocks if other is None else _cut(other, size)
    found: dict[tuple[int, int], Tensor] = {}
    for i, j in itertools.product(range(len(blocks)), range(len(others))):
        if other is None and j < i:
            n = (found[j, i].dim() - 2) // 2
            swapped = found[j, i].transpose(0, 1)
            found[i, j] = swapped.permute(0, 1, *range(2 + n, 2 + 2 * n), *range(2, 2 + n))
            continue
        its = blocks[i], None if other is None and i == j else others[j]
        if known.unseen or not at_top_level():
            found[i, j] = by_hand(*its)
            continue
        try:
            found[i, j] = by_layers(*its)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError):
            found[i, j] = by_hand(*its)
            known.unseen = True  # and so it is not tried in vain again
    return torch.cat(
        [torch.cat([found[i, j] for j in range(len(others))], 1) for i in range(len(blocks))]
    )


def _cut(batch: Batch, size: int | None) -> list[Tree]:
    return [*cut(batch, max(size or batch.rows or 1, 1))] or [unflatten(batch.spec, batch.leaves)]


# One block -------------------------------------------------------------------------------------


def _by_layers(
    call: SampleLoss, leaves: list[Tensor], how: Sampling, part: Tree, other: Tree | None
) -> Tensor:
    """In one backward pass over the rows of both."""
    both = part if other is None else tree_map(_joined, part, other)
    count = _rows(part)
    layers, totals, *_ = totals_by_layers(call, leaves, both, how, torch.float32)
    shape, k = totals.shape[1:], totals[0].numel()
    basis = torch.eye(k, dtype=totals.dtype, device=totals.device).view(k, 1, *shape)
    found: list[Tensor] = []  # one, the sum so far

    def see(i: int, grads: Outer | Tensor) -> None:
        if isinstance(grads, Outer) and grads.right.shape[-2] == 0:
            return  # nothing depends on the leaf
        if isinstance(grads, Outer) and (is_table(grads) or not is_short(grads)):
            grads = written_out(grads)
        factors = grads[:2] if isinstance(grads, Outer) else (_as_vectors(grads, leaves[i]),)
        dtype = accumulation_dtype(leaves[i].real.dtype)
        pairs = [_inner_products(x, count, 0 if other is None else count, dtype) for x in factors]
        products = (pairs[0] * pairs[1] if len(pairs) > 1 else pairs[0]).sum((-2, -1))
        found[:] = [products + found[0].to(products.device) if found else products]

    layers.pull(totals, see, basis.expand(k, *totals.shape) if shape else None)
    rows = totals.shape[0]
    sums = (
        found[0]
        if found
        else totals.new_zeros(k, count, k, rows if other is None else rows - count)
    )
    return _in_order(sums, shape)


def _as_vectors(grads: Tensor, leaf: Tensor) -> Tensor:
    """Gradients as (…, rows, 1, numbers), as if they were a factor."""
    if grads.is_complex():
        grads = torch.view_as_real(grads.resolve_conj())
        return grads.flatten(grads.dim() - leaf.dim() - 1).unsqueeze(-2)
    flat = grads.flatten(grads.dim() - leaf.dim()) if leaf.dim() else grads.unsqueeze(-1)
    return flat.unsqueeze(-2)


def _inner_products(x: Tensor, count: int, start: int, dtype: torch.dtype) -> Tensor:
    """Of all pairs of vectors of a factor: (cotangents, rows, cotangents, others, t, t)."""
    x = (x if x.dim() == 4 else x.unsqueeze(0)).to(dtype)
    return torch.einsum("patw,qbsw->paqbts", x[:, :count], x[:, start:])


def _by_hand(
    call: SampleLoss, leaves: list[Tensor], keep_batch_dim: bool, part: Tree, other: Tree | None
) -> Tensor:
    """From both Jacobians, written out."""

    def of(part: Tree) -> list[Tensor]:
        size = max(_rows(part), 1)  # with a size nothing is recorded, but what transforms see
        return per_sample_grad(call, chunk_size=size, keep_batch_dim=keep_batch_dim)(leaves, part)

    def as_factor(x: Tensor, leaf: Tensor) -> Tensor:
        return _as_vectors(x.flatten(1, len(shape)).movedim(1, 0) if shape else x[None], leaf)

    one = of(part)
    two = one if other is None else of(other)
    sums = 0.0
    shape = one[0].shape[1 : one[0].dim() - leaves[0].dim()]
    for x, y, leaf in zip(one, two, leaves, strict=True):
        a, b = as_factor(x, leaf), as_factor(y, leaf)
        dtype = accumulation_dtype(leaf.real.dtype)
        products = torch.einsum("patw,qbtw->paqb", a.to(dtype), b.to(dtype))
        sums = products + sums
    assert isinstance(sums, Tensor)
    return _in_order(sums, shape)


def _in_order(sums: Tensor, shape: torch.Size) -> Tensor:
    """From (outputs, rows, outputs, others) to (rows, others, *output, *output)."""
    return sums.permute(1, 3, 0, 2).reshape(sums.shape[1], sums.shape[3], *shape, *shape)


def _rows(part: Tree) -> int:
    return next(x.shape[0] for x in flatten(part)[0] if isinstance(x, Tensor))


def _joined(a: Any, b: Any) -> Any:
    return torch.cat([a, b]) if isinstance(a, Tensor) else a
