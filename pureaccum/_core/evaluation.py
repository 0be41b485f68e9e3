"""A loss over a whole batch, or over a stream of batches, without gradients: to evaluate.

    for part in microbatches of all batches:
        total, weight, metrics += those of func(part)
    return total / weight, metrics

The parts are summed as in ``grad_and_value``, in the memory of one microbatch.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, wraps
from itertools import zip_longest
from typing import Any, NamedTuple

from torch import Tensor

from .._base import checks, dtensors, trees
from .._base.torch_internals import modes
from . import (
    auto_size,
    batches,
    coupling,
    history,
    losses,
    outputs,
    precision,
    terms,
    weighted,
    whole_batch,
    writes,
)
from .layers import order
from .reductions import check_reduce
from .remat import call_rematerialised
from .seams import Rule
from .weighted import WeightedSum
from .weights import NoRowsError


@auto_size.automatic
def value(
    func: Callable[..., Any],
    has_aux: bool = False,
    *,
    batch_argnums: int | tuple[int, ...] = 1,
    microbatch_size: auto_size.Size = None,
    reduction: losses.Reduction = "mean",
    aux_reduction: trees.Tree = "concat",
    policy: precision.Policy | None = None,
    stream: bool = False,
    check: bool = True,
) -> Callable[..., Any]:
    """Evaluate a loss over a whole batch in the memory of one microbatch.

    The rule: total / weight, summed as in ``grad_and_value``: to evaluate, or for a line search.
    Metrics go into aux, each with a reduction, or as a ``Weighted`` with a weight of its own.

    A batch can be differentiated through the value, as ``grad_and_value`` says; a stream cannot.

    Args:
        func: Returns a scalar loss or ``Weighted``; with ``has_aux``, a pair of that and anything
            else. Without a size it is called once.
        has_aux: Whether the loss returns ``(loss, aux)``.
        batch_argnums: Which positional arguments are batches: their tensors have one row per
            sample along dim 0. Every microbatch receives all other arguments whole.
        microbatch_size: Samples per microbatch; the last one may be shorter. Or a list, the samples
            of each; or ``"auto"``, as many as memory allows: see ``make_step``.
        reduction: What a scalar loss is of its samples, ``"mean"`` or ``"sum"``.
        aux_reduction: What becomes of aux: see ``grad_and_value``.
        policy: Mixed precision, as in a step: it casts the positional arguments of ``func``, or
            opens autocast around it.
        stream: Whether the batch arguments are iterables of batches, such as a loader; each call
            goes through them once. A batch of a stream may have no samples if ``func`` is not a
            mean over samples, and then is not cut.
        check: Whether to check that microbatches add up to the batch: see ``grad_and_value``.

    Returns:
        A function of ``func``'s arguments that returns the value, or ``(value, aux)``.

    Example:
        >>> import torch
        >>> from pureaccum import Weighted
        >>> def loss(w, batch):
        ...     error = w * batch["x"] - batch["y"]
        ...     right = (error.abs() < 1).sum()
        ...     return (error**2).mean(), {"right": Weighted(right, len(error))}
        >>> data = {"x": torch.tensor([1.0, 2.0, 3.0]), "y": torch.tensor([1.0, 2.5, 1.0])}
        >>> value(loss, has_aux=True, microbatch_size=2)(torch.tensor(1.0), data)
        (tensor(1.4167), {'right': tensor(0.6667, dtype=torch.float64)})
    """
    rule = order.check_rule(
        Rule(has_aux=has_aux, reduction=reduction, nonfinite="propagate", engine="func")
    )
    cut = checks.check_argnums(batch_argnums, "batch_argnums")
    check_reduce(aux_reduction, "aux_reduction")
    size = None if microbatch_size is None else batches.check_sizes(microbatch_size)
    told = losses.advising(func, *cut)
    making = Evaluating(
        run=told if policy is None else _under(policy, told, has_aux),
        known=writes.known_of(func),
        batches=cut,
        size=size,
        rule=rule,
        aux_reduction=aux_reduction,
        check=check,
    )
    if stream:
        over_stream = partial(_over_stream, making)
        return wraps(func)(history.refusing_backward(over_stream, "the value over a stream", _GONE))
    if size is None:
        return wraps(func)(partial(_at_once, making))
    return wraps(func)(history.with_history(partial(_over_batch, making), making.known))


class Evaluating(NamedTuple):
    """What a value is made of: the loss, what is known of it, which arguments are batches."""

    run: Callable[..., Any]  # the loss
    known: writes.Known
    batches: tuple[int, ...]
    size: int | list[int] | None
    rule: Rule
    aux_reduction: trees.Tree
    check: bool


def _at_once(making: Evaluating, /, *args: Any, **kwargs: Any) -> Any:
    has_aux = making.rule.has_aux
    with writes.guarding(making.known, _given(args)) as guarded:
        out = guarded(lambda: making.run(*args, **kwargs))()
    if isinstance(loss := losses.loss_in(out, has_aux), WeightedSum):
        pair, dtype = terms.taken_apart(loss)
        value = terms.sum_of_means(pair).to(dtype)
    else:
        seen, shape = losses.read(out, has_aux)
        total, weight, *_ = losses.known_to_all_ranks(seen)
        value = dtensors.with_all_terms([losses.mean_of(total, weight)])[0].to(shape.dtype)
    return (value, losses.settled(out[1])) if has_aux else value


def _over_batch(making: Evaluating, /, *args: Any, **kwargs: Any) -> Any:
    known, rule = making.known, making.rule
    batch = {i: args[i] for i in checks.positions(making.batches, len(args), "batch_argnums")}
    cut = whole_batch.read_cut(batch, making.size, rule.has_aux)
    question = whole_batch.question_about(cut, rule, "value") if making.check else None
    with writes.guarding(known, _given(args), asks=writes.Asks(question)) as guarded:
        loss, leaves = _of_part(making, args, kwargs, batch)
        one = guarded(loss)

        def outs() -> Iterator[tuple[Any, int, int | None]]:
            for i, (part, rows, counted) in enumerate(cut.parts()):
                try:
                    out = one(leaves, part, rows, ())
                except Exception as error:
                    at = f"microbatch {i} (from sample {sum(cut.sizes[:i])}), of {rows} samples"
                    error.add_note(f"pureaccum: raised by the loss of {at}, in a value.")
                    raise
                yield out, rows, counted

        with batches.cutting(len(cut.sizes), sized=cut.size is not None):
            return whole_batch.evaluate(outs(), rule, making.aux_reduction)


def _over_stream(making: Evaluating, /, *args: Any, **kwargs: Any) -> Any:
    known, rule = making.known, making.rule
    batch = {i: args[i] for i in checks.positions(making.batches, len(args), "batch_argnums")}
    last: list[batches.Batch] = []

    def outs() -> Iterator[tuple[Any, int, int | None]]:
        for part in parts_of_streams(batch, making.size, "value", stream=True):
            last[:] = [its := batches.read_microbatch(part, "args")]
            given = _given(args), writes.Given("args", its.leaves, its.spec)
            question = coupling.question_of(its, rule, "value") if making.check else None
            with writes.guarding(known, *given, asks=writes.Asks(question)) as guarded:
                loss, leaves = _of_part(making, args, kwargs, batch)
                out = guarded(loss)(leaves, part, its.rows or 0, ())
            yield out, its.rows or 0, its.rows

    try:
        return whole_batch.evaluate(outs(), rule, making.aux_reduction)
    except NoRowsError as error:
        raise last[0].problem or error from None


def _of_part(
    making: Evaluating, args: tuple[Any, ...], kwargs: Any, batch: dict[int, Any]
) -> tuple[coupling.LossOfPart, tuple[Any, ...]]:
    """The loss of a part of the batch arguments and of the leaves of the others, and these."""
    leaves, spec = trees.flatten({i: x for i, x in enumerate(args) if i not in batch})

    def judged(*args: Any, **kwargs: Any) -> outputs.Counted:
        out = making.run(*args, **kwargs)
        seen, _ = losses.read(out, making.rule.has_aux, whole="counted")
        keep = None
        if isinstance(seen.weight, Tensor) and not isinstance(seen.terms, Tensor):
            keep = weighted.counts(seen.total, seen.weight)
        return outputs.Counted(out, keep)

    def loss(leaves: Sequence[Any], part: trees.Tree, *_: Any) -> Any:
        filled = trees.unflatten(spec, leaves) | part
        given = [filled[i] for i in range(len(args))]
        if not modes.transform_active():
            return making.run(*given, **kwargs)
        return call_rematerialised(judged, given, kwargs, making.known, guards=False)

    return loss, tuple(leaves)  # a list would be leaves to differentiate with respect to


def _given(args: tuple[Any, ...]) -> writes.Given:
    return writes.Given("args", *trees.flatten(dict(enumerate(args))))


_GONE = (
    "The stream is used up by then. Take the value of each batch, and add these up. For a "
    "constant, use value.detach()."
)


def _under(policy: precision.Policy, func: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """A loss as a policy says, as in a step: the loss is wide, and aux has its output dtype."""
    run = precision.under(policy, func)

    def wide(x: Any) -> Any:
        narrow = isinstance(x, Tensor) and x.is_floating_point() and x.dtype.itemsize < 4
        return x.float() if narrow else x

    def computed(*args: Any, **kwargs: Any) -> Any:
        out = run(*args, **kwargs)
        if not has_aux:
            return trees.tree_map(wide, out)
        return (
            (trees.tree_map(wide, out[0]), policy.cast_to_output(out[1]))
            if losses.is_pair(out)
            else out
        )

    return computed


# Streams of batches, such as a loader ----------------------------------------------------------


def parts_of_streams(
    batch: dict[int, Any], size: int | list[int] | None, nothing: str, *, stream: bool
) -> Iterator[dict[int, trees.Tree]]:
    """The microbatches of a batch, by the positions of its arguments; or of a stream of batches.

    Where that gives no batch, ``nothing`` says what there is none of, if it is an error.
    """
    if stream:
        for i, its in batch.items():
            advice = "stream=True takes several batches. Pass one with stream=False."
            checks.check_stream(its, f"args[{i}]", "batches", advice)
        given = (dict(zip(batch, x, strict=True)) for x in _side_by_side(batch))
    else:
        given = iter([batch])
    some = False
    for whole in given:
        some = True
        if size is None:
            yield whole
        else:
            flat = batches.read_batch(whole, "args")
            batches.rows_to_cut(flat, "args")
            yield from batches.cut_batch(flat, size)
    if not some and nothing:
        raise ValueError(
            f"the stream gave no batch, so there is no {nothing}. Likely cause: an iterator that "
            "is used up. Each call goes through the stream once, so pass a list or a DataLoader."
        )


def _side_by_side(streams: dict[int, Any]) -> Iterable[tuple[Any, ...]]:
    """The batches of streams that end together, or an error that says which ended first."""
    over = object()
    for n, together in enumerate(zip_longest(*streams.values(), fillvalue=over)):
        ended = [i for i, x in zip(streams, together, strict=True) if x is over]
        if ended:
            goes_on = next(i for i in streams if i not in ended)
            raise ValueError(
                f"args[{ended[0]}] has no batch {n}, counted from 0, but args[{goes_on}] has one; "
                "expected as many batches of each stream. Likely cause: a loader that drops its "
                "last batch."
            )
        yield together
