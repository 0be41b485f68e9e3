"""What a loss may return, and what it says about a microbatch.

A scalar is the mean (or, with ``reduction="sum"``, the sum) of its microbatch; a ``Weighted``
itself says what it is a mean over. Either is read as a total and a weight, because totals and
weights add up where means do not.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, Literal, NamedTuple

import optree
import torch
from torch import Tensor, nn

from .._base import containers, dtensors, refusals, reprs, trees
from .._base.torch_internals import autograd
from . import terms
from .weighted import Weighted, WeightedSum, checked_total, checked_weight, counts, describe, sane


Reduction = Literal["mean", "sum"]


class Read(NamedTuple):
    """A loss as it was read: a differentiable total, a float64 weight or ``()``, tensors of aux.

    Of a sum of ``Weighted``, ``terms`` says what it has of each term's weight: see denominators.py.
    """

    total: Tensor
    weight: Tensor | tuple[()]
    aux: list[Tensor]
    terms: Tensor | tuple[()] = ()


class Shape(NamedTuple):
    """What a loss returned beside tensors, and no transform sees."""

    dtype: torch.dtype
    weighted: bool
    aux: optree.PyTreeSpec | None
    static: list[Any]
    several: bool = False  # whether it is a sum of ``Weighted``


def read(
    out: Any, has_aux: bool = False, several: bool = False, *, whole: terms.Whole = None
) -> tuple[Read, Shape]:
    """Check what a loss returned and take it apart; it may be a tensor of ``several`` numbers."""
    if has_aux and not is_pair(out):
        raise TypeError(
            f"the loss returned {describe(out)}; expected a pair (loss, aux), because "
            "has_aux=True. The loss is a 0-d tensor or Weighted."
        )
    loss, aux = out if has_aux else (out, ())
    weight: Tensor | tuple[()] = ()
    each: Tensor | tuple[()] = ()
    is_sum = isinstance(loss, WeightedSum)
    if is_sum:
        total, weight, each, dtype = terms.read_sum(loss, whole)
    elif isinstance(loss, Weighted):
        total = checked_total(loss.total, "the total of Weighted", several, True)
        weight, dtype = checked_weight(loss.weight, total), total.dtype
    else:
        total = loss
        if type(loss) is not Tensor or loss.dim() or not loss.is_floating_point():
            total = checked_total(loss, "the loss", several)
        dtype = total.dtype
    if isinstance(whole, Tensor) and not is_sum:
        raise terms.other_terms(1, len(whole))
    if total.dtype in (torch.float16, torch.bfloat16):
        total = total.float()  # 65536, a common loss scale, is inf in fp16
    shape = Shape(
        dtype=dtype, weighted=isinstance(weight, Tensor), aux=None, static=[], several=is_sum
    )
    if not has_aux:
        return Read(total, weight, [], each), shape
    leaves, spec = trees.flatten(aux)
    if not all(isinstance(leaf, Tensor) for leaf in leaves):  # a model's outputs, say
        leaves, spec = containers.open_tree(aux, "aux")  # a dataclass or a mapping
    tensors, static = tensors_apart(leaves)
    return Read(total, weight, tensors, each), shape._replace(aux=spec, static=static)


def in_one_list(seen: Read) -> list[Tensor]:
    """The total and all else in one list: of a deeper tree torch.func makes much work."""
    beside = [x for x in (seen.weight, seen.terms) if isinstance(x, Tensor)]
    return [seen.total, *beside, *seen.aux]


def read_again(total: Tensor, rest: list[Tensor], shape: Shape) -> Read:
    """A loss as it was read, from what ``in_one_list`` gave."""
    if shape.several:
        return Read(total, rest[0], rest[2:], rest[1])
    return Read(total, rest[0], rest[1:]) if shape.weighted else Read(total, (), rest)


def known_to_all_ranks(seen: Read) -> Read:
    """A loss whose total and weight all ranks know: what is pulled and kept depends on them."""
    total, weight, aux, each = seen
    if isinstance(weight, tuple) or not dtensors.any_sharded([total, weight]):
        return seen
    known, value = dtensors.with_all_terms([weight, total])
    return Read(dtensors.replicated(value, total), sane(known), aux, each)


def is_pair(out: Any) -> bool:
    """Whether a loss returned two things; a ``Weighted`` is one thing."""
    return isinstance(out, tuple) and not isinstance(out, Weighted) and len(out) == 2  # pyright: ignore[reportUnknownArgumentType]


def loss_in(out: Any, has_aux: bool) -> Any:
    """The loss in what a loss returned, which may be a pair."""
    return out[0] if has_aux and is_pair(out) else out


def join_aux(tensors: list[Tensor], shape: Shape) -> Any:
    """The aux tree made again of its tensors, as they came out of a transform."""
    return () if shape.aux is None else trees.unflatten(shape.aux, filled(shape.static, tensors))


def tensors_apart(leaves: list[Any]) -> tuple[list[Tensor], list[Any]]:
    """The tensors among leaves, and the leaves with None, which is never one, in place of them."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return tensors, [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def filled(static: list[Any], tensors: Sequence[Tensor]) -> list[Any]:
    """The leaves again, from what ``tensors_apart`` gave."""
    rest = iter(tensors)
    return [next(rest) if leaf is None else leaf for leaf in static]


def divisor(weight: Any, plain: Any = False) -> Any:
    """What sums are divided by: their weight, or 1 if they are plain sums.

    Where nothing had any weight it is inf, which makes gradients zero.
    """
    if isinstance(weight, Tensor) and weight.dim():
        weight = terms.whole_weight(weight)
    by = trees.select(weight == 0, torch.inf, weight)
    return by if plain is False else trees.select(plain, 1.0, by)


def mean_value(total: Any, by: Any) -> Any:
    """A total divided by what ``divisor`` says: NaN where there was no weight."""
    return trees.select(by == torch.inf, torch.nan, total / by)


def mean_of(total: Tensor, weight: Tensor | tuple[()]) -> Tensor:
    """The value of a loss: NaN over no weight, as over no samples, whatever the total."""
    if not isinstance(weight, Tensor):
        return total
    return mean_value(torch.where(counts(total, weight), total, 0.0), divisor(weight))


def terms_of(mean: Weighted, name: Callable[[], str]) -> tuple[Tensor, Tensor]:
    """The total and the weight of a ``Weighted`` beside a loss, whose total may be a count."""
    total = mean.total
    if isinstance(total, (bool, int, float)):  # pyright: ignore[reportUnnecessaryIsInstance]
        total = torch.tensor(float(total), dtype=torch.float64)
    if not isinstance(total, Tensor) or total.dim() or total.is_complex():  # pyright: ignore[reportUnnecessaryIsInstance]
        shape = f"a tensor of shape {tuple(total.shape)}" if isinstance(total, Tensor) else ""  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"the total of {name()}, a Weighted, is {shape or describe(total)}; expected a real "
            "0-d tensor or a number: one sum for the microbatch."
        )
    if not total.is_floating_point():
        total = total.double()
    weight = checked_weight(mean.weight, total)
    return (total.float() if total.dtype.itemsize < 4 else total), weight


def dtype_of_mean(mean: Weighted) -> torch.dtype:
    """The dtype of what a ``Weighted`` is a mean of; counts are divided in float64."""
    total = mean.total
    is_real = isinstance(total, Tensor) and total.is_floating_point()  # pyright: ignore[reportUnnecessaryIsInstance]
    return total.dtype if is_real else torch.float64


def is_weighted(x: Any) -> bool:
    """Whether something beside a loss is a ``Weighted``, which as a tuple would be a tree."""
    if isinstance(x, WeightedSum):
        raise TypeError(
            f"aux, or the result of a microbatched function, holds a sum of {len(x.terms)} "
            "Weighted; expected single ones, which become means over the whole batch. Return each "
            "term separately, and add up their means afterwards: sum(means)."
        )
    return isinstance(x, Weighted)


def settled(aux: trees.Tree) -> trees.Tree:
    """The aux of a batch in one piece, with the mean in place of each ``Weighted``."""

    def mean(x: Any) -> Any:
        return mean_of(*terms_of(x, lambda: "aux")).to(dtype_of_mean(x)) if is_weighted(x) else x

    return optree.tree_map(mean, aux, is_leaf=is_weighted, namespace=trees.NAMESPACE)


def check_depends(
    out: Any, leaves: list[Any], trained: Sequence[nn.Module], uses: Callable[..., bool] | None
) -> None:
    """Raise for a loss of other parameters than it gets, and for a weight that depends on these.

    ``trained`` are modules that it called with parameters of their own, and ``uses`` says whether
    it used any leaves, or others of their shapes.
    """
    loss = out[0] if type(out) is tuple and out else out
    one = [loss] if isinstance(loss, Weighted) else []
    means = loss.terms if isinstance(loss, WeightedSum) else one
    for weight in (x.weight for x in means):
        if isinstance(weight, Tensor) and autograd.leads_to(weight, leaves):
            raise ValueError(
                "the weight of Weighted depends on the parameters, but a gradient treats a weight "
                "as a constant. If that is right, pass weight.detach(). Otherwise compute total "
                "and weight with pa.microbatch(..., reduce='sum'), and divide them."
            )
    totals = [x.total for x in means] or trees.tree_leaves(out)[:1]
    totals = [x for x in totals if isinstance(x, Tensor)]
    if not totals or any(autograd.leads_to(x, leaves) for x in totals):
        return
    begins = "the loss depends on none of the parameters that it gets"
    if trained:
        raise ValueError(
            f"{begins}, but calls {reprs.kind(trained[0])} with its own. Call it with the given "
            "ones: functional(net).apply(params, buffers, x), or functional_call(net, params, "
            "(x,)). For a module that is not trained, set requires_grad_(False)."
        )
    plain = [x for x in totals if x.is_floating_point() and not x.dim()]
    # an exact zero may stand for a microbatch in which nothing counts
    counting = any(trees.known(x) != 0 for x in plain)
    if uses is not None and counting and uses(leaves):
        raise ValueError(
            f"{begins}, so its gradient is zero. Likely causes: it uses other parameters in place "
            "of its first argument (fn.params, for example), or torch.no_grad(), .detach() or "
            ".item() cut the graph."
        )


def advising(func: Callable[..., Any], *batches: int | str, wrt: tuple[int, ...] = (0,)) -> Any:
    """A loss whose errors tell of an argument that may have to be cut, and of a pair."""

    @wraps(func)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except Exception as error:
            advise_on_arguments(error, args, kwargs, batches, wrt)
            raise

    return called


UNCUT = "pureaccum_uncut"  # of an error: the samples of an argument that is not cut, and advice


def advise_on_arguments(
    error: Exception, args: Any, kwargs: Any, batches: Any = (1,), wrt: tuple[int, ...] = (0,)
) -> None:
    """Add to the error of a loss what may be the matter with what it was given."""
    cut = [kwargs.get(i) if isinstance(i, str) else args[i:][:1] for i in batches]
    rows, own = _rows_said(error, cut), {*batches, *wrt}
    whole = [(i, x) for i, x in enumerate(args) if own.isdisjoint((i, i - len(args)))]
    for i, x in (*whole, *((i, x) for i, x in kwargs.items() if i not in own)):
        if rows and (more := _rows_said(error, x) - rows):
            by_name = any(isinstance(j, str) for j in (*batches, i))
            named = "name it in batch_argnums, or in batch_argnames of microbatch"
            way_out = named if by_name else f"pass batch_argnums={(*batches, i)}"
            advice = (
                f"argument {i!r} has {max(more)} samples, and every microbatch gets all of them. "
                f"If they belong to the batch, {way_out}. For a step, put them into the batch."
            )
            refusals.add_once(error, advice)
            setattr(error, UNCUT, (max(more), advice))  # see coupling.py
    if NO_GRAPH in str(error):
        refusals.add_once(
            error,
            "autograd does not record inside this function. Take gradients in it with "
            "torch.func.grad, or call it in a loss with engine='autograd'.",
        )
    lists = [x for i in batches if type(i) is int for x in args[i:][:1] if isinstance(x, list)]
    if any(isinstance(x, (tuple, list, Mapping)) for each in lists for x in each):
        refusals.add_once(
            error, "The batch is a list. If it holds microbatches, pass it to step.window."
        )
    elif isinstance(error, (TypeError, AttributeError)) and "tuple" in str(error):
        refusals.add_once(
            error,
            "functional(module).apply returns a pair. Unpack it: out, new_buffers = fn.apply(...).",
        )


NO_GRAPH = "does not require grad"  # in what torch says of a tensor that is differentiated


def _rows_said(error: Exception, tree: trees.Tree) -> set[int]:
    """The rows of tensors, where an error says how many."""
    tensors = [x for x in trees.tree_leaves(tree) if isinstance(x, Tensor) and x.dim()]
    return {len(x) for x in tensors} & {int(n) for n in re.findall(r"\d+", str(error))}
