"""The loss over a whole batch, or over a stream of them, without gradients: to evaluate.

for part in microbatches of all batches:
    total, weight, metrics += those of func(part)
return total / weight, metrics
"""

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

from torch import Tensor

from .._base.checks import check_argnums, positions
from .._base.dtensors import with_all_terms
from .._base.torch_internals import transform_active
from .._base.trees import Tree, flatten, tree_map, unflatten
from .arguments import Arguments
from .auto_size import Size, automatic
from .batches import Batch, check_sizes, cutting, parts_of_streams, read_microbatch
from .coupling import LossOfPart, question_of
from .history import refusing_backward, with_history
from .layers.order import check_rule
from .loss import Reduction, advising, counts, is_pair, known_to_all_ranks, mean_of, read, settled
from .microbatch import call_microbatched
from .outputs import Counted, Whole
from .precision import Policy, under
from .reductions import check_reduce
from .seams import Rule
from .weights import NoRowsError
from .whole_batch import evaluate, read_cut
from .writes import Given, guarding, known_of


@automatic
def value(  # noqa: D417
    func: Callable[..., Any],
    has_aux: bool = False,
    *,
    batch_argnums: int | tuple[int, ...] = 1,
    microbatch_size: Size = None,
    reduction: Reduction = "mean",
    aux_reduction: Tree = "concat",
    policy: Policy | None = None,
    stream: bool = False,
    check: bool = True,
) -> Callable[..., Any]:
    """The loss over a whole batch in the memory of one microbatch.

    The rule: total / weight, summed as in ``grad_and_value``: to evaluate, or for a line search.
    With a size, or a stream, nothing is recorded for a later backward pass: see
    ``grad_and_value``. Metrics go into aux, each a ``Weighted`` of its own, or a word.

    Args:
        func, has_aux, batch_argnums, microbatch_size, reduction, aux_reduction: As for
            ``grad_and_value``; without a size ``func`` is called once.
        policy: Mixed precision, as a step has it: what ``func`` is given by position is cast, or
            autocast is opened around it.
        stream: Whether the batch arguments are iterables of batches, such as a loader, which are
            gone through once. A batch of a stream need not have rows where ``func`` is no mean over
            rows, and is not cut.
        check: Whether ``func`` is asked if microbatches add up: see ``grad_and_value``.

    Returns:
        A function of ``func``'s arguments giving the value, or ``(value, aux)``.

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
    rule = check_rule(
        Rule(has_aux=has_aux, reduction=reduction, nonfinite="propagate", engine="func")
    )
    batches = check_argnums(batch_argnums, "batch_argnums")
    check_reduce(aux_reduction, "aux_reduction")
    size = None if microbatch_size is None else check_sizes(microbatch_size)
    known = known_of(func)
    told = advising(func, *batches)
    run = told if policy is None else _under(policy, told, has_aux)

    def judged(*args: Any, **kwargs: Any) -> Counted:
        out = run(*args, **kwargs)
        seen, _ = read(out, has_aux)
        keep = None if isinstance(seen.weight, tuple) else counts(seen.total, seen.weight)
        return Counted(out, keep)

    def each_of(
        args: tuple[Any, ...], kwargs: Any, batch: dict[int, Any]
    ) -> tuple[LossOfPart, tuple[Any, ...]]:
        """What the loss returns for a microbatch of the batch arguments; and the other leaves."""
        leaves, spec = flatten({i: x for i, x in enumerate(args) if i not in batch})

        def one_of(leaves: Sequence[Any], part: Tree, *_: Any) -> Any:
            whole = unflatten(spec, leaves)
            given = [part[i] if i in part else whole[i] for i in range(len(args))]
            if transform_active():  # a function of one piece, of which nothing is kept
                return call_microbatched(
                    judged, Arguments.of(given, kwargs), Whole(), known, guards=False
                )
            return run(*given, **kwargs)

        return one_of, tuple(leaves)

    def at_once(*args: Any, **kwargs: Any) -> Any:
        with guarding(known, _given(args)) as guarded:
            out = guarded(lambda: run(*args, **kwargs))()
        seen, shape = read(out, has_aux)
        total, weight, _ = known_to_all_ranks(seen)
        loss = with_all_terms([mean_of(total, weight)])[0].to(shape.dtype)
        return (loss, settled(out[1])) if has_aux else loss

    def over_batch(*args: Any, **kwargs: Any) -> Any:
        batch = {i: args[i] for i in positions(batches, len(args), "batch_argnums")}
        cut = read_cut(batch, size, has_aux)
        question = None
        if check and not cut.untouched:
            question = question_of(cut.batch, rule, cut.sizes[0], len(cut.sizes))
        with guarding(known, _given(args), question=question) as guarded:
            loss, leaves = each_of(args, kwargs, batch)
            one, parts = guarded(loss), cut.parts()
            outs = ((one(leaves, part, rows, ()), rows, counted) for part, rows, counted in parts)
            with cutting(len(cut.sizes), sized=cut.size is not None):
                result, aux = evaluate(outs, rule, aux_reduction)
        return (result, aux) if has_aux else result

    def over_stream(*args: Any, **kwargs: Any) -> Any:
        batch = {i: args[i] for i in positions(batches, len(args), "batch_argnums")}
        last: list[Batch] = []

        def outs() -> Iterator[tuple[Any, int, int | None]]:
            for part in parts_of_streams(batch, size, "value", stream=True):
                last[:] = [its := read_microbatch(part, "args")]
                given = _given(args), Given("args", its.leaves, its.spec)
                question = question_of(its, rule) if check else None
                with guarding(known, *given, question=question) as guarded:
                    loss, leaves = each_of(args, kwargs, batch)
                    out = guarded(loss)(leaves, part, its.rows or 0, ())
                yield out, its.rows or 0, its.rows

        try:
            result, aux = evaluate(outs(), rule, aux_reduction)
        except NoRowsError as error:
            raise last[0].problem or error from None
        return (result, aux) if has_aux else result

    if stream:
        return wraps(func)(refusing_backward(over_stream, "the value over a stream", _GONE))
    return wraps(func)(at_once if size is None else with_history(over_batch, known))


def _given(args: tuple[Any, ...]) -> Given:
    return Given("args", *flatten(dict(enumerate(args))))


_GONE = (
    "The stream is gone by then: take the value of each batch, and add these up. As a constant "
    "it is value.detach()."
)


def _under(policy: Policy, func: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """A loss as a policy says, as in a step: the loss is wide, and aux has its output dtype."""
    run = under(policy, func)

    def wide(x: Any) -> Any:
        narrow = isinstance(x, Tensor) and x.is_floating_point() and x.dtype.itemsize < 4
        return x.float() if narrow else x

    def computed(*args: Any, **kwargs: Any) -> Any:
        out = run(*args, **kwargs)
        if not has_aux:
            return tree_map(wide, out)
        return (tree_map(wide, out[0]), policy.cast_to_output(out[1])) if is_pair(out) else out

    return computed
