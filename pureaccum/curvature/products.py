"""Products of curvature with a vector: each is the gradient of one number per microbatch.

    Hessian         d/dp <g(p), v>            g: the gradient of the loss
    Gauss-Newton    d/dp <out(p), B J v>      J: the derivative of out, B: the loss's Hessian in out
    Fisher          d/dp <losses(p), J v>     J: the derivative of the losses

The second factor is a constant of that gradient. Gradients are summed as ``grad`` sums them, so
masks and their weights, ragged microbatches, streams, ranks and memory work as they do there.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from .._base import checks, reprs, trees
from .._base.torch_internals import functorch, modes
from .._core import differences
from .._core.losses import Reduction, read, sane
from .._core.weighted import Weighted
from .._core.weights import quotient
from . import derivatives, passes


_OUTPUTS = "Return only tensors from forward. A loss gets these outputs and the arguments."
Product = Callable[..., Any]  # of params, the arguments that follow, and a vector


def hvp(
    func: Callable[..., Any],
    *,
    batch_argnums: int | tuple[int, ...] = 1,
    microbatch_size: Any = None,
    reduction: Reduction = "mean",
    stream: bool = False,
    group: Any = None,
    check: bool = True,
) -> Product:
    """Multiply the Hessian of a loss over a whole batch by a vector.

    The rule, with g the gradient that ``grad`` computes::

        H v = d/dparams <g(params), v>        # microbatch after microbatch, divided once

    The product is exact, in the memory of one microbatch, and takes about the time of three
    gradients. The same pass returns the gradient. To multiply several vectors at once, use
    ``torch.func.vmap`` over ``v``. If the batch has no weight, the product is NaN.

    Args:
        func: ``func(params, *args)`` returns a scalar loss or ``Weighted``.
        batch_argnums: Which positional arguments are batches: their tensors have one row per
            sample along dim 0. Every microbatch receives all other arguments whole.
        microbatch_size: Samples per microbatch; the last one may be shorter. Or a list, the samples
            of each; or ``"auto"``, as many as memory allows; None takes the batch whole.
        reduction: What a scalar loss is of its samples, ``"mean"`` or ``"sum"``.
        stream: Whether the batch arguments are iterables of batches, such as a loader. A product is
            then one pass over them, and cuts each batch into microbatches.
        group: A process group. Each rank has some samples of the batch, or none, and every rank
            gets the whole product.
        check: Whether to compare the product with finite differences, at the first call for each
            loss and kind of arguments, and raise an ``ArithmeticError`` if they differ.

    Returns:
        ``product(params, *args, v) -> (grads, Hv)``, with ``v`` and both results like params.

    Example:
        >>> w, x = torch.tensor(1.0), torch.tensor([1.0, 2.0, 3.0])
        >>> product = hvp(lambda w, x: (w**3 * x).mean(), microbatch_size=2)
        >>> product(w, x, torch.tensor(0.5))
        (tensor(6.), tensor(6.))

    References:
        Pearlmutter, `Fast exact multiplication by the Hessian
        <https://doi.org/10.1162/neco.1994.6.1.147>`_, 1994.
    """

    @passes.noting
    def along(params: trees.Tree, *rest: Any) -> Any:
        *args, v = rest
        leaves, spec = trees.flatten(params)

        def loss(*leaves: Tensor) -> tuple[Tensor, Any]:
            seen, _ = read(func(trees.unflatten(spec, leaves), *args), False)
            return seen.total, seen.weight

        total, grads, weight = derivatives.gradient(loss, leaves)
        return _standing_for(total, weight, derivatives.inner(grads, trees.flatten(v)[0]))

    over = passes.Summation(
        batch_argnums=batch_argnums,
        microbatch_size=microbatch_size,
        reduction=reduction,
        stream=stream,
        group=group,
    )
    both = passes.gradients_over(along, (0, -1), over)
    alone = passes.gradients_over(func, (0,), over)

    def product(params: trees.Tree, *args: Any) -> tuple[trees.Tree, trees.Tree]:
        if torch.compiler.is_compiling():  # compilers make least of the derivative along a vector
            *rest, v = args

            def of_params(params: trees.Tree) -> tuple[trees.Tree, Tensor]:
                (grads,), value = alone(params, *rest)
                return grads, value

            grads, found, value = torch.func.jvp(of_params, (params,), (v,), has_aux=True)  # pyright: ignore
        else:
            (found, grads), value = both(params, *args)
        return grads, passes.nan_of_nothing(found, value)

    product = wraps(func)(passes.with_history_of(product, along, stream))
    return passes.compared(product, along, _itself, func, batch_argnums, check)


def ggnvp(  # noqa: D417
    forward: Callable[..., trees.Tree],
    loss: Callable[..., Any],
    *,
    batch_argnums: int | tuple[int, ...] = 1,
    microbatch_size: Any = None,
    reduction: Reduction = "mean",
    stream: bool = False,
    group: Any = None,
    check: bool = True,
) -> Product:
    """Multiply the generalized Gauss-Newton matrix of a loss over a whole batch by a vector.

    The rule, with J the derivative of ``forward`` and B the Hessian of ``loss`` in its outputs::

        G v = Jᵀ B J v

    B includes weights and masks of the loss, and the product is divided by the weight of the whole
    batch. G equals the Hessian if ``forward`` is linear, and is positive semi-definite if the loss
    is convex in the outputs. A product takes about the time of two gradients. If the batch has no
    weight, it is NaN.

    Args:
        forward: ``forward(params, *args)`` returns outputs, any pytree of tensors.
        loss: ``loss(outputs, *args)`` returns a scalar loss or ``Weighted``.
        batch_argnums, microbatch_size, reduction, stream, group, check: As for ``hvp``.

    Returns:
        ``product(params, *args, v) -> Gv``, like params.

    Example:
        >>> w, x = torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 0.0], [1.0, 2.0]])
        >>> squares = lambda out, x: out.square().mean()
        >>> ggnvp(lambda w, x: x @ w, squares, microbatch_size=1)(w, x, torch.tensor([1.0, 1.0]))
        tensor([4., 6.])

    References:
        Schraudolph, `Fast curvature matrix-vector products for second-order gradient descent
        <https://doi.org/10.1162/08997660260028683>`_, 2002.
    """
    pushed = derivatives.Pushing()

    @passes.noting
    def along(params: trees.Tree, *rest: Any) -> Any:
        *args, v, again = rest
        (leaves, of_params), (moving, _) = trees.flatten(params), trees.flatten(v)

        spec: Any = None
        smooth: list[bool] = []

        def outputs(*leaves: Tensor) -> tuple[list[Tensor], list[Tensor]]:
            nonlocal spec, smooth
            out = forward(trees.unflatten(of_params, leaves), *args)
            outs, spec = checks.read_tensors(out, "the result of forward", _OUTPUTS)
            smooth = [*map(trees.continuous, outs)]
            pairs = [*zip(outs, smooth, strict=True)]
            return [x for x, its in pairs if its], [x for x, its in pairs if not its]

        its, fixed, moved, others = pushed(outputs, leaves, moving, again)

        def loss_of(*some: Tensor) -> tuple[Tensor, Any]:
            of_each = iter(others), iter(some)
            out = trees.unflatten(spec, [next(of_each[its]) for its in smooth])
            seen, _ = read(loss(out, *args), False)
            return seen.total, seen.weight

        def along_moved(*some: Tensor) -> tuple[Tensor, Any]:
            total, grads, weight = derivatives.gradient(loss_of, some)
            return derivatives.inner(grads, moved), (total, weight)

        _, bent, (total, weight) = derivatives.gradient(along_moved, fixed)
        return _standing_for(
            total, weight, derivatives.inner(derivatives.constants(bent, again), its)
        )

    over = passes.Summation(
        batch_argnums=batch_argnums,
        microbatch_size=microbatch_size,
        reduction=reduction,
        stream=stream,
        group=group,
    )
    product = _of_constants(forward, along, over)
    return passes.compared(product, along, forward, loss, batch_argnums, check)


def fisher_vp(  # noqa: D417
    losses: Callable[..., Any],
    *,
    batch_argnums: int | tuple[int, ...] = 1,
    microbatch_size: Any = None,
    reduction: Reduction = "mean",
    stream: bool = False,
    group: Any = None,
    draw: Callable[..., Any] | None = None,
    check: bool = True,
) -> Product:
    """Multiply the Fisher matrix of a batch by a vector, without per-sample gradients.

    The rule, with g the gradient of one sample's loss and w its weight, 1 or that of ``Weighted``::

        F v = Σ w g (gᵀ v) / Σ w              # with "sum": Σ g (gᵀ v)

    With the labels of the batch this is the empirical Fisher matrix. With labels drawn from the
    model it is an unbiased estimate of the true one. Draw them with keys in the batch: then they
    are the same for every ``v``, and the product is linear and symmetric::

        def draw(params, batch):
            mean, scale = net(params, batch["x"])
            return batch | {"y": mean + scale * pa.normal(batch["keys"], mean.shape[1:])}


        batch = batch | {"keys": pa.fold_in(pa.key(0), torch.arange(rows))}

    If the outputs are softmax logits, or the mean of a Gaussian of fixed variance, the true Fisher
    matrix is Gauss-Newton's. ``ggnvp`` computes it exactly and for less.

    A product takes about the time of two gradients. If the batch has no weight, it is NaN. For the
    diagonal of the empirical matrix use
    ``per_sample_grad(..., reduce="moments")(params, batch).second``.

    Args:
        losses: ``losses(params, *args)`` returns the loss of each sample, the negative
            log-likelihood, as a tensor of shape (samples,). Or ``Weighted`` of two such tensors:
            totals and weights.
        batch_argnums, microbatch_size, stream, group, check: As for ``hvp``.
        reduction: What a scalar loss is of its samples, ``"mean"`` or ``"sum"``: the samples'
            matrices are averaged or added.
        draw: ``draw(params, *args)`` returns the (first) batch argument with labels drawn from the
            model. No derivative goes through it.

    Returns:
        ``product(params, *args, v) -> Fv``, like params.

    Example:
        >>> w, x = torch.tensor(1.0), torch.tensor([1.0, 2.0, 3.0])
        >>> fisher_vp(lambda w, x: w * x, microbatch_size=2)(w, x, torch.tensor(3.0))
        tensor(14.)

    References:
        Kunstner, Balles and Hennig, `Limitations of the empirical Fisher approximation
        <https://arxiv.org/abs/1905.12558>`_, 2019.
    """
    pushed = derivatives.Pushing()
    if draw is not None:
        first = checks.check_argnums(batch_argnums, "batch_argnums")[0]
        losses = _of_drawn(losses, draw, first)

    @passes.noting
    def along(params: trees.Tree, *rest: Any) -> Any:
        *args, v, again = rest
        (leaves, of_params), (moving, _) = trees.flatten(params), trees.flatten(v)

        def of_rows(*leaves: Tensor) -> tuple[list[Tensor], list[Tensor]]:
            total, *weight = _of_rows(losses(trees.unflatten(of_params, leaves), *args))
            return [total], weight

        (total,), (fixed,), (slope,), weights = pushed(of_rows, leaves, moving, again)
        weight: Any = float(len(slope))
        # selected, and never multiplied: the loss of a sample without weight may be NaN
        if weights:
            keep, slope = weights[0] != 0, quotient(slope, weights[0])
            total, fixed = (torch.where(keep, x, 0.0) for x in (total, fixed))
            weight = weights[0].sum()
        wide = trees.accumulation_dtype(slope.dtype)
        number = (total * slope).sum(dtype=wide)
        if reduction == "sum" and isinstance(weight, float):
            return number
        return _standing_for(fixed.sum(dtype=wide), weight, number)

    over = passes.Summation(
        batch_argnums=batch_argnums,
        microbatch_size=microbatch_size,
        reduction=reduction,
        stream=stream,
        group=group,
    )
    product = _of_constants(losses, along, over)
    return passes.compared(product, along, losses, _half_of_squares, batch_argnums, check)


def _of_drawn(losses: Callable[..., Any], draw: Callable[..., Any], at: int) -> Any:
    """The losses of a batch that is drawn, which is a constant."""

    @wraps(losses)
    def of_drawn(*args: Any) -> Any:
        given = [*args]
        given[at] = trees.tree_map(differences.as_constant, draw(*args))
        return losses(*given)

    return of_drawn


def _of_constants(
    func: Callable[..., Any], along: Callable[..., Any], over: passes.Summation
) -> Product:
    """A product whose constants come of params that are given again where a transform is around."""
    summed = passes.gradients_over(along, (0,), over)

    def product(params: trees.Tree, *args: Any) -> trees.Tree:
        tensors = (x for x in trees.flatten((params, args))[0] if isinstance(x, Tensor))
        if not modes.transform_active() and functorch.any_tangent(tensors):
            raise RuntimeError(
                "an argument has a tangent of torch.autograd.forward_ad, which has only one "
                "level, and the product needs that level. Use torch.func.jvp."
            )
        again = trees.flatten(params)[0] if modes.transform_active() else []
        (found,), value = summed(params, *args, again)
        return passes.nan_of_nothing(found, value)

    return wraps(func)(passes.with_history_of(product, along, over.stream))


def _itself(params: trees.Tree, *_: Any) -> trees.Tree:
    """What a Hessian takes as linear: it is Gauss-Newton's matrix of no network."""
    return params


def _half_of_squares(losses: Any, *_: Any) -> Tensor:
    """What has the Fisher matrix for Gauss-Newton's."""
    total, *weights = _of_rows(losses)
    return (quotient(total**2, weights[0].detach()) if weights else total**2).sum() / 2


# One number per microbatch -------------------------------------------------------------------


def _standing_for(total: Tensor, weight: Any, number: Tensor) -> Any:
    """A loss with the derivative of a number: by its value it counts or not, as it does alone."""
    its = total.detach() + torch.nan_to_num(number - number.detach())
    return its if isinstance(weight, tuple) else Weighted(its, weight)


def _of_rows(out: Any) -> list[Tensor]:
    """The losses of samples, and their weights if they have some."""
    total, *weights = out if isinstance(out, Weighted) else [out]
    if not isinstance(total, Tensor) or total.dim() != 1 or not total.is_floating_point():
        came = tuple(total.shape) if isinstance(total, Tensor) else reprs.kind(total)
        raise ValueError(
            f"losses returned {came}; expected a floating-point tensor of shape (rows,), the loss "
            "of each row. Use reduction='none', and not their mean."
        )
    for weight in weights:
        if not isinstance(weight, Tensor) or weight.shape != total.shape:
            came = tuple(weight.shape) if isinstance(weight, Tensor) else repr(weight)
            raise ValueError(
                f"the weights of the losses are {came}; expected a tensor of shape "
                f"{tuple(total.shape)}, the weight of each sample."
            )
    return [total, *(sane(torch.as_tensor(x).double()) for x in weights)]
