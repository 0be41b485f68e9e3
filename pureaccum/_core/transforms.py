"""``torch.func.grad`` and ``grad_and_value`` over microbatches.

The same monoid as ``accumulator``, for a batch that is at hand as a whole.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, ParamSpec

import torch

from .._base import checks, trees
from . import auto_size, history, ledger, losses, reductions, seams, whole_batch, windows, writes
from .batches import check_sizes
from .layers import order
from .seams import Rule, Window
from .sums import kinds_of
from .writes import Given


P = ParamSpec("P")  # the parameters of a loss, which its transforms have too


@auto_size.automatic
def grad_and_value(
    func: Callable[P, Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    batch_argnums: int | tuple[int, ...] = 1,
    microbatch_size: auto_size.Size = None,
    reduction: losses.Reduction = "mean",
    aux_reduction: trees.Tree = "concat",
    dtype: torch.dtype | None = None,
    nonfinite: seams.Nonfinite = "propagate",
    engine: seams.Engine = "func",
    check: bool = True,
) -> Callable[P, tuple[Any, Any]]:
    """``torch.func.grad_and_value`` in the memory of one microbatch.

    The rule::

        for part in microbatches(batch, microbatch_size):
            t, w = total and weight of func(part)       # a mean's are n * mean and n
            G, T, W = G + dt / dparams, T + t, W + w    # in float32 at least, float64, float64
        return G / W, T / W                             # of a sum: G, T

    Where the batch is one microbatch, the results have the bits of ``torch.func.grad_and_value``,
    except for a few operations that torch.func differentiates by another formula (silu, mish,
    GroupNorm, LSTM on a CPU, binary_cross_entropy_with_logits): those have the bits of
    ``.backward()``.

    The results can be differentiated, by torch.func's transforms and by plain ``.backward()``, with
    respect to every argument, and every tensor that ``func`` captures, that requires grad. That
    computes each microbatch again. Until then such results keep their arguments alive;
    ``.detach()`` releases them.

    Args:
        func: Returns a scalar loss or ``Weighted``; with ``has_aux``, a pair of that and anything
            else.
        argnums: Which positional arguments to differentiate with respect to.
        has_aux: Whether the loss returns ``(loss, aux)``.
        batch_argnums: Which positional arguments are batches: their tensors have one row per
            sample along dim 0. Every microbatch receives all other arguments whole. For
            ``loss(params, x, y)`` it is ``(1, 2)``.
        microbatch_size: Samples per microbatch; the last one may be shorter. Or a list, the samples
            of each; or ``"auto"``, as many as memory allows: see ``make_step``. None takes the
            batch whole.
        reduction: What a scalar loss is of its samples, ``"mean"`` or ``"sum"``.
        aux_reduction: What becomes of aux: ``"concat"`` for leaves with one row per sample,
            ``"sum"``, ``"mean"`` (weighted as the loss is), ``"max"``, ``"min"``, ``"stack"``,
            ``"last"`` or a ``Reducer``; one for all of aux, or a tree of them that is a prefix of
            aux. Without a size aux stays as it is.
        dtype: Sums are at least this wide: ``torch.float32`` (the default) or ``torch.float64``.
        nonfinite: What becomes of a microbatch with an inf or NaN: see ``accumulator``.
        engine: ``"func"`` composes with transforms; ``"autograd"`` runs losses that torch.func
            refuses; ``"auto"`` is autograd at top level and torch.func under a transform: see
            ``make_step``.
        check: Whether to check, at calls 1, 2, 3, 5, 8 of a loss and later at one in 32, that its
            microbatches add up to the batch, and to raise ``CoupledLossError`` if they do not:
            see ``checks``. With False they are added up in any case.

    Returns:
        A function of ``func``'s arguments that returns ``(grads, value)``, or
        ``(grads, (value, aux))``, in the dtypes of the parameters and of the loss.

    Example:
        >>> w, x = torch.tensor(1.0), torch.tensor([1.0, 2.0, 3.0, 4.0])
        >>> grad_and_value(lambda w, x: ((w * x) ** 2).mean(), microbatch_size=3)(w, x)
        (tensor(15.), tensor(7.5000))

    References:
        `torch.func.grad_and_value
        <https://docs.pytorch.org/docs/stable/generated/torch.func.grad_and_value.html>`_
    """
    rule = order.check_rule(
        Rule(has_aux=has_aux, reduction=reduction, nonfinite=nonfinite, engine=engine)
    )
    at_least = checks.check_dtype(dtype)
    wrt = checks.check_argnums(argnums, "argnums")
    cut = checks.check_argnums(batch_argnums, "batch_argnums")
    checks.check_disjoint(wrt, cut)
    reductions.check_reduce(aux_reduction, "aux_reduction")
    size = None if microbatch_size is None else check_sizes(microbatch_size)
    known = writes.known_of(func)
    told = losses.advising(func, *cut, wrt=wrt)

    def by_rule(rule: Rule, /, *args: Any, **kwargs: Any) -> Any:
        at = checks.positions(wrt, len(args), "argnums")
        none = size is None and cut == (1,)  # by default there need not be a batch
        cut_at = checks.positions(cut, len(args), "batch_argnums", missing=none)
        checks.check_disjoint(at, cut_at)
        leaves, spec = checks.read_params({i: args[i] for i in at}, "args")

        def loss_of(leaves: list[torch.Tensor], part: trees.Tree, *_: Any) -> Any:
            filled = list(args)
            for replaced in (trees.unflatten(spec, leaves), part):
                for i, arg in replaced.items():
                    filled[i] = arg
            return told(*filled, **kwargs)

        batch = {i: args[i] for i in cut_at}
        if size is None:
            parts = whole_batch.not_cut(batch)
        else:
            checks.refuse_autocast_cache(leaves)
            parts = whole_batch.read_cut(batch, size, has_aux)
        given = Given("args", leaves, spec), Given("args", parts.batch.leaves, parts.batch.spec)
        question = whole_batch.question_about(parts, rule, "grad") if check else None
        loss = windows.GuardedLoss(loss_of, known, given, writes.Asks(question))
        window = Window(rule=rule, divides=1.0 if parts.untouched else float(sum(parts.sizes)))
        kinds = kinds_of(leaves, [trees.accumulation_dtype(x.dtype, at_least) for x in leaves])
        flow = ledger.Flow(aux_reduction="last" if size is None else aux_reduction)
        with checks.outside_inference_mode():
            sums = whole_batch.accumulate(loss, parts, window, kinds, flow)
            grads, value, aux = whole_batch.means(sums, leaves, reduction)
        tree = trees.unflatten(spec, grads)
        result = tuple(tree[i] for i in at) if isinstance(argnums, tuple) else tree[at[0]]
        return (result, (value, aux)) if has_aux else (result, value)

    plain = partial(by_rule, rule._replace(engine="auto"))
    return wraps(func)(history.with_history(partial(by_rule, rule), known, plain))


def grad(  # noqa: D417
    func: Callable[P, Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    batch_argnums: int | tuple[int, ...] = 1,
    microbatch_size: auto_size.Size = None,
    reduction: losses.Reduction = "mean",
    aux_reduction: trees.Tree = "concat",
    dtype: torch.dtype | None = None,
    nonfinite: seams.Nonfinite = "propagate",
    engine: seams.Engine = "func",
    check: bool = True,
) -> Callable[P, Any]:
    """``torch.func.grad`` in the memory of one microbatch.

    The rule: ``grad_and_value(func, ...)(*args)`` without the value.

    Args:
        func, argnums, has_aux, batch_argnums, microbatch_size, reduction, aux_reduction, dtype,
            nonfinite, engine, check: As for ``grad_and_value``.

    Returns:
        A function of ``func``'s arguments that returns the gradients, or ``(grads, aux)``.

    Example:
        >>> w, x = torch.tensor(1.0), torch.tensor([1.0, 2.0, 3.0, 4.0])
        >>> grad(lambda w, x: ((w * x) ** 2).mean(), microbatch_size=2)(w, x)
        tensor(15.)

    References:
        `torch.func.grad <https://docs.pytorch.org/docs/stable/generated/torch.func.grad.html>`_
    """
    both = grad_and_value(
        func,
        argnums,
        has_aux,
        batch_argnums=batch_argnums,
        microbatch_size=microbatch_size,
        reduction=reduction,
        aux_reduction=aux_reduction,
        dtype=dtype,
        nonfinite=nonfinite,
        engine=engine,
        check=check,
    )

    @wraps(func)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> Any:
        grads, value = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return wrapped
