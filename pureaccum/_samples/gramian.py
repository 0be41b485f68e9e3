"""Inner products of per-sample gradients, without materialising the gradients.

    for a in blocks of samples:
        for b in blocks of the others:
            K[a, b] = Σ over leaves of <gradients of a, gradients of b>

For each block only what its layers saw is stored, see ``layers``. Outer products are never written
out, because <a ⊗ d, a' ⊗ d'> = <a, a'> <d, d'>.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NamedTuple, ParamSpec

import torch
from torch import Tensor

from .._base import checks, dtensors, reprs, trees
from .._core import batches, history, writes
from . import by_layers, chunks, outer_products


P = ParamSpec("P")


def gramian(
    func: Callable[P, Any],
    argnums: int | tuple[int, ...] = 0,
    *,
    batch_argnums: int | tuple[int, ...] = 1,
    chunk_size: int | None = None,
    keep_batch_dim: bool = False,
    engine: chunks.SampleEngine = "vmap",
) -> Callable[P, Tensor]:
    """Compute the inner products of per-sample gradients, the empirical neural tangent kernel.

    The rule, where the rows of J are the gradients of samples, over all leaves as one vector::

        J(batch) @ J(other).T

    If the function returns several numbers, each of them has a gradient. Sums are float32 or wider.
    For linear layers and embeddings gradients are not materialised: the product of two outer
    products follows from the layer inputs and the cotangents. If a parameter is used in another way
    that cannot be followed, the gradients of a block of samples are materialised, as they are under
    transforms and by ``engine="autograd"``. The matrix is the same up to rounding, and detecting
    this calls the function once more. torch.func's transforms and ``.backward()`` differentiate
    through it.

    Args:
        func: The loss of one sample, as for ``per_sample_grad``, or a network's output for it: a
            number, ``Weighted``, or a tensor of several numbers. If it draws random numbers, draw
            them from keys in the batch, so that each sample has one gradient.
        argnums: Which positional arguments to differentiate with respect to.
        batch_argnums: Which positional arguments are batches: their tensors have one row per
            sample along dim 0.
        chunk_size: The number of samples of either batch to process at a time; None takes all. With
            a size, only the matrix and the layer inputs and cotangents of two blocks are in memory,
            and each block of the other batch is recomputed for every block of this batch.
        keep_batch_dim: Whether ``func`` receives each sample as a batch of one, with its dim 0.
        engine: As for ``per_sample_grad``.

    Returns:
        A function of ``func``'s arguments and of ``other=``, a second batch (a tuple of batches, in
        order, if ``batch_argnums`` is a tuple). It returns the products of each sample of the batch
        with each sample of ``other``, or of the batch itself without ``other``: a tensor of shape
        (samples, samples of other). If ``func`` returns k numbers, the shape is (samples, samples
        of other, k, k), and likewise for outputs of any shape.

    Example:
        >>> x, y = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0])
        >>> kernel = gramian(lambda w, x: torch.sin(w * x))
        >>> kernel(torch.tensor(0.0), x)
        tensor([[1., 2., 3.],
                [2., 4., 6.],
                [3., 6., 9.]])
        >>> kernel(torch.tensor(0.0), x, other=y).shape
        torch.Size([3, 1])

    References:
        Jacot et al., `Neural tangent kernel <https://arxiv.org/abs/1806.07572>`_, 2018; Novak et
        al., `Fast finite width neural tangent kernel <https://arxiv.org/abs/2206.08720>`_, 2022;
        `Neural tangent kernels
        <https://docs.pytorch.org/tutorials/intermediate/neural_tangent_kernels.html>`_ by
        torch.func
    """
    mapped = chunks.Mapped(keep_batch_dim, randomness="error")
    how = by_layers.with_factors(
        chunks.check_sampling(chunks.Sampling(chunk_size=chunk_size, mapped=mapped, engine=engine))
    )
    wrt, cut = (
        checks.check_argnums(argnums, "argnums"),
        checks.check_argnums(batch_argnums, "batch_argnums"),
    )
    checks.check_disjoint(wrt, cut)
    alone, known = not isinstance(argnums, tuple), writes.known_of(func)

    def by(how: chunks.Sampling, *args: Any, other: trees.Tree = None, **kwargs: Any) -> Tensor:
        at = checks.positions(wrt, len(args), "argnums")
        cut_at = checks.positions(cut, len(args), "batch_argnums")
        dtensors.refuse_sharded(
            trees.tree_leaves([*args, *kwargs.values(), other]), "an argument", _DTENSORS
        )
        params, call = chunks.of_arguments(func, at, alone, args, kwargs)
        leaves, _ = checks.read_params(params)

        def block(part: Part) -> Block:
            its = tuple(part.get(i, x) for i, x in enumerate(args))
            (chunk,) = chunks.sampled(call, params, its, at, cut_at, how, known)[0]
            return _block(chunk)

        its = {i: args[i] for i in cut_at}
        batch, second = batches.read_batch(its, "args"), None
        if other is not None:
            second = _read_other(other, its, isinstance(batch_argnums, tuple))
        rows = batches.rows_to_cut(batch, "args", one_by_one=True)
        columns = rows if second is None else batches.rows_to_cut(second, "other", one_by_one=True)
        if not (rows and columns):
            wide = trees.accumulation_dtype(leaves[0].dtype).to_real()
            return leaves[0].new_empty(rows, columns, dtype=wide)
        parts = [*batches.cut_batch(batch, how.chunk_size or rows)]
        others = (
            parts if second is None else [*batches.cut_batch(second, how.chunk_size or columns)]
        )
        with checks.outside_inference_mode():
            return _matrix(parts, others, (rows, columns), how.chunk_size or 0, block)

    plain = partial(by, how._replace(engine="vmap"))
    return wraps(func)(history.with_history(partial(by, how), known, plain))


_DTENSORS = "A Gramian covers the numbers of one rank. Pass x.full_tensor()."

Part = dict[int, trees.Tree]  # of a batch, by the positions of arguments


class Block(NamedTuple):
    """The gradients of some samples."""

    # of each leaf; a tensor is (samples, numbers of each, *leaf.shape)
    grads: list[Tensor | outer_products.Outer]
    keep: Tensor | tuple[()]  # which samples have any, where not all do
    shape: torch.Size  # of what func gives for a sample
    many: int  # numbers of all samples together
    like: Tensor


def _read_other(other: trees.Tree, its: Part, several: bool) -> batches.Batch:
    """The other batch, by the positions of the arguments in whose place it stands."""
    found = other if several else (other,)
    if not isinstance(found, tuple) or len(found) != len(its):  # pyright: ignore
        raise ValueError(
            f"other is {reprs.kind(other)}; expected a tuple of {len(its)}, one for each "
            "batch argument."
        )
    # of which an error says where it is
    batches.need_rows(batches.read_batch(other, "other"), "other")
    batch, expected = (
        batches.read_batch(dict(zip(its, found, strict=True)), "other"),
        trees.flatten(its)[1],
    )
    if batch.spec != expected:
        raise ValueError(
            f"other has the structure {batch.spec}; expected {expected}, as in the batch."
        )
    return batch


def _block(chunk: chunks.Chunk) -> Block:
    value, shape = chunk.value, chunk.value.shape[1:]

    def with_numbers(x: Tensor) -> Tensor:
        return x.reshape(value.shape[0], shape.numel(), *x.shape[value.dim() :])

    return Block(
        grads=[x if isinstance(x, outer_products.Outer) else with_numbers(x) for x in chunk.grads],
        keep=chunk.keep,
        shape=shape,
        many=value.numel(),
        like=value,
    )


def _matrix(
    lines: list[Part],
    columns: list[Part],
    rows: tuple[int, int],
    size: int,
    block: Callable[[Part], Block],
) -> Tensor:
    """All inner products; those of a batch with itself are computed once, and mirrored.

    ``rows`` are the samples of either batch, and ``size`` those of a part, where there are several.
    """
    column, alike = _last_one_kept(block, columns), lines is columns
    whole, shapes = None, ((), ())
    for i, line in enumerate(lines):
        a = column(i) if alike else block(line)
        order = [*range(i if alike else 0, len(columns))]
        # to and fro, so that the block that ends this line begins the next one
        for j in order[:1] + order[:0:-1] if alike else order[:: -1 if i % 2 else 1]:
            b = column(j)
            products = _inner_products(a, b)
            if whole is None:
                shapes = (rows[0], *a.shape), (rows[1], *b.shape)
                whole = products.new_zeros([torch.Size(shape).numel() for shape in shapes])
            top, left = size * i * a.shape.numel(), size * j * b.shape.numel()
            whole[top : top + a.many, left : left + b.many] = products
            if alike and j > i:
                whole[left : left + b.many, top : top + a.many] = products.T
            del b, products  # before the next ones
        del a
    assert whole is not None
    return whole.view(*shapes[0], *shapes[1]).movedim(len(shapes[0]), 1)


def _last_one_kept(block: Callable[[Part], Block], parts: list[Part]) -> Callable[[int], Block]:
    """The blocks of a batch by number, of which the last one is not computed again."""
    kept: dict[int, Block] = {}

    def of(i: int) -> Block:
        if i not in kept:
            kept.clear()
            kept[i] = block(parts[i])
        return kept[i]

    return of


def _inner_products(a: Block, b: Block) -> Tensor:
    """Those of all gradients of two blocks, zero where a sample has none."""
    wide = trees.accumulation_dtype(torch.promote_types(a.like.dtype, b.like.dtype))
    total = a.like.new_zeros(a.many, b.many, dtype=wide)
    for x, y in zip(a.grads, b.grads, strict=True):
        unused = any(
            isinstance(it, outer_products.Outer) and it.right.shape[-2] == 0 for it in (x, y)
        )
        if not unused:
            total = total + outer_products.inner_products(x, y).to(total.device)
    for keep, at in ((a.keep, 0), (b.keep, 1)):
        if isinstance(keep, Tensor):  # of one number each: it is Weighted that leaves samples out
            total = torch.where(keep.unsqueeze(1 - at), total, 0.0)
    return total
