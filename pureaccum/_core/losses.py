"""What a loss may return, and what it says about a microbatch.

A scalar is the mean (or, with ``reduction="sum"``, the sum) of its microbatch; a ``Weighted``
itself says what it is a mean over. Either is read as a total and a weight, because totals and
weights add up where means do not.
"""

import re
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Literal, NamedTuple

import optree
import torch
from torch import Tensor

from .._base import containers, dtensors, refusals, trees
from .._base.torch_internals import functorch


Reduction = Literal["mean", "sum"]


class Weighted(NamedTuple):
    """A loss that is ``total / weight``: the mean over tokens, over a mask, over anything.

    The rule, for the microbatches of a batch::

        value = Σ total / Σ weight        gradient = Σ d total / d params / Σ weight

    A loss returns it in place of a scalar, and it overrides ``reduction``. However unevenly the
    weight is spread, that is the mean over the whole batch. A microbatch of weight zero adds its
    total where that is a number other than zero (the sum over all anchors, say, over the number of
    positives), and else exactly nothing, even where it is NaN. A batch of no weight has no value:
    it is NaN, and a step over it is not applied. The weight is a constant of the gradient; a
    transform around it (a meta-gradient with respect to the weights of samples) sees what it
    depends on.

    ``number * Weighted``, ``-Weighted`` and ``Weighted / number`` scale the total.

    Attributes:
        total: The sum of the losses, a 0-d tensor.
        weight: What to divide by: a 0-d tensor or a number, not negative.

    Example:
        >>> import torch
        >>> from pureaccum import value
        >>> def loss(w, batch):
        ...     return Weighted((w * batch["x"] * batch["mask"]).sum(), batch["mask"].sum())
        >>> batch = {"x": torch.tensor([1.0, 3.0, 7.0]), "mask": torch.tensor([1, 1, 0])}
        >>> value(loss, microbatch_size=1)(torch.tensor(2.0), batch)
        tensor(4.)
    """

    total: Tensor
    weight: Tensor | float

    def __mul__(self, factor: Any) -> "Weighted":  # pyright: ignore[reportIncompatibleMethodOverride]
        return Weighted(self.total * _number(factor, "*"), self.weight)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> "Weighted":
        return Weighted(self.total / _number(divisor, "/"), self.weight)

    def __neg__(self) -> "Weighted":
        return Weighted(-self.total, self.weight)

    def __add__(self, other: Any) -> Any:
        raise TypeError(
            f"{_describe(other)} and a Weighted were added or subtracted. A sum of means over "
            "different weights is no mean over any weight. With both weights of the whole batch "
            "counted beforehand it is a plain sum: return total_a / all_a + total_b / all_b, with "
            "reduction='sum'. A term that has no weight, such as a penalty on params, goes into "
            "the total: Weighted(total + weight * penalty, weight)."
        )

    __radd__ = __sub__ = __rsub__ = __add__


class Read(NamedTuple):
    """A loss as it was read: a differentiable total, a float64 weight or ``()``, tensors of aux."""

    total: Tensor
    weight: Tensor | tuple[()]
    aux: list[Tensor]


class Shape(NamedTuple):
    """What a loss returned beside tensors, and no transform sees."""

    dtype: torch.dtype
    weighted: bool
    aux: optree.PyTreeSpec | None
    static: list[Any]


def read(out: Any, has_aux: bool = False, several: bool = False) -> tuple[Read, Shape]:
    """Check what a loss returned and take it apart; it may be a tensor of ``several`` numbers."""
    if has_aux and not is_pair(out):
        raise TypeError(
            f"the loss returned {_describe(out)}; with has_aux=True it returns a pair "
            "(loss, aux), the loss a 0-d tensor or Weighted."
        )
    loss, aux = out if has_aux else (out, ())
    if weighted := isinstance(loss, Weighted):
        total = _numbers(loss.total, "the total of Weighted", several, weighted)
        weight: Tensor | tuple[()] = _weight(loss.weight, total)
    else:
        total, weight = loss, ()
        if type(loss) is not Tensor or loss.dim() or not loss.is_floating_point():
            total = _numbers(loss, "the loss", several)
    dtype = total.dtype
    if dtype in (torch.float16, torch.bfloat16):
        total = total.float()  # 65536, a common loss scale, is inf in fp16
    if not has_aux:
        return Read(total, weight, []), Shape(dtype, weighted, None, [])
    leaves, spec = trees.flatten(aux)
    if not all(isinstance(leaf, Tensor) for leaf in leaves):  # a model's outputs, say
        leaves, spec = containers.open_tree(aux, "aux")  # a dataclass or a mapping
    tensors, static = tensors_apart(leaves)
    return Read(total, weight, tensors), Shape(dtype, weighted, spec, static)


def in_one_list(seen: Read) -> list[Tensor]:
    """The total and all else in one list: of a deeper tree torch.func makes much work."""
    weight = () if isinstance(seen.weight, tuple) else (seen.weight,)
    return [seen.total, *weight, *seen.aux]


def read_again(total: Tensor, rest: list[Tensor], shape: Shape) -> Read:
    """A loss as it was read, from what ``in_one_list`` gave."""
    return Read(total, rest[0], rest[1:]) if shape.weighted else Read(total, (), rest)


def known_to_all_ranks(seen: Read) -> Read:
    """A loss whose total and weight all ranks know: what is pulled and kept depends on them."""
    total, weight, aux = seen
    if isinstance(weight, tuple) or not dtensors.any_sharded([total, weight]):
        return seen
    known, value = dtensors.with_all_terms([weight, total])
    return Read(dtensors.replicated(value, total), sane(known), aux)


def is_pair(out: Any) -> bool:
    """Whether a loss returned two things; a ``Weighted`` is one thing."""
    return isinstance(out, tuple) and not isinstance(out, Weighted) and len(out) == 2  # pyright: ignore[reportUnknownArgumentType]


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


def counts(total: Tensor, weight: Tensor) -> Tensor:
    """Whether a ``Weighted`` adds anything: it has a weight, or else a total that is a number.

    A total without a weight is the numerator of a ratio whose denominator is elsewhere in the
    batch. A total that is zero or not finite comes from a microbatch that is masked throughout.
    """
    # all ranks know that of a DTensor: see known_to_all_ranks
    total = dtensors.local(total.detach())
    return (weight != 0) | ((total != 0) & ((total - total) == 0))


def divisor(weight: Any, plain: Any = False) -> Any:
    """What sums are divided by: their weight, or 1 if they are plain sums.

    Where nothing had any weight it is inf, which makes gradients zero.
    """
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
            f"the total of {name()}, a Weighted, is {shape or _describe(total)}; expected a real "
            "0-d tensor or a number: one sum for the microbatch."
        )
    if not total.is_floating_point():
        total = total.double()
    weight = _weight(mean.weight, total)
    return (total.float() if total.dtype.itemsize < 4 else total), weight


def dtype_of_mean(mean: Weighted) -> torch.dtype:
    """The dtype of what a ``Weighted`` is a mean of; counts are divided in float64."""
    total = mean.total
    is_real = isinstance(total, Tensor) and total.is_floating_point()  # pyright: ignore[reportUnnecessaryIsInstance]
    return total.dtype if is_real else torch.float64


def is_weighted(x: Any) -> bool:
    """Whether something is a ``Weighted``, which as a tuple would be a tree."""
    return isinstance(x, Weighted)


def settled(aux: trees.Tree) -> trees.Tree:
    """The aux of a batch in one piece, with the mean in place of each ``Weighted``."""

    def mean(x: Any) -> Any:
        return mean_of(*terms_of(x, lambda: "aux")).to(dtype_of_mean(x)) if is_weighted(x) else x

    return optree.tree_map(mean, aux, is_leaf=is_weighted, namespace=trees.NAMESPACE)


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


def advise_on_arguments(
    error: Exception, args: Any, kwargs: Any, batches: Any = (1,), wrt: tuple[int, ...] = (0,)
) -> None:
    """Add to the error of a loss what may be the matter with what it was given."""
    cut = [kwargs.get(i) if isinstance(i, str) else args[i:][:1] for i in batches]
    rows, own = _rows_said(error, cut), {*batches, *wrt}
    whole = [(i, x) for i, x in enumerate(args) if own.isdisjoint((i, i - len(args)))]
    for i, x in (*whole, *((i, x) for i, x in kwargs.items() if i not in own)):
        if rows and (more := _rows_said(error, x) - rows):
            refusals.add_once(
                error,
                f"argument {i!r} has {max(more)} samples, which go to each microbatch whole. For "
                "samples of the batch set batch_argnums; of a step, put them into it.",
            )
    if NO_GRAPH in str(error):
        refusals.add_once(
            error,
            "nothing is recorded of what this function is given. Take a gradient in it by "
            "torch.func.grad, or call it in a loss with engine='autograd'.",
        )
    if isinstance(error, (TypeError, AttributeError)) and "tuple" in str(error):
        refusals.add_once(error, "functional(module).apply returns a pair: out, new_buffers.")


NO_GRAPH = "does not require grad"  # in what torch says of a tensor that is differentiated


def _rows_said(error: Exception, tree: trees.Tree) -> set[int]:
    """The rows of tensors, where an error says how many."""
    tensors = [x for x in trees.tree_leaves(tree) if isinstance(x, Tensor) and x.dim()]
    return {len(x) for x in tensors} & {int(n) for n in re.findall(r"\d+", str(error))}


def _numbers(loss: Any, what: str, several: bool, weighted: bool = False) -> Tensor:
    if not isinstance(loss, Tensor):
        kind = "" if several else "0-d "
        cause = (
            "Perhaps it has no return statement."
            if loss is None
            else "With an auxiliary output, pass has_aux=True."
            + several * " Several outputs go into one tensor: torch.stack or torch.cat."
            if isinstance(loss, tuple)
            else ""
        )
        raise TypeError(
            f"{what} is {_describe(loss)}; expected a {kind}floating-point tensor. {cause}".rstrip()
        )
    if loss.dim() != 0 and (weighted or not several):
        cause = (
            "Weighted is one number and its weight; a Jacobian is taken of a plain tensor."
            if several
            else "Reduce it over its microbatch: .mean() (or .sum() with reduction='sum'), or "
            "Weighted(total, weight) for a mean over anything but samples."
        )
        raise ValueError(f"{what} has shape {tuple(loss.shape)}; expected a 0-d tensor. {cause}")
    if not loss.is_floating_point():
        cause = (
            ("Take torch.view_as_real of it, " if several else "Take ")
            + "its real part or its absolute value."
            if loss.is_complex()
            else "An integer has no gradient: an accuracy, or a cast on the way?"
        )
        raise TypeError(f"{what} is {loss.dtype}; expected a real floating-point tensor. {cause}")
    return loss


def _weight(weight: Any, total: Tensor) -> Tensor:
    if isinstance(weight, (bool, int, float)):
        known = float(weight) if 0 <= weight < float("inf") else float("nan")
        return torch.full((), known, dtype=torch.float64, device=total.device)
    if not isinstance(weight, Tensor) or weight.dim() != 0 or weight.is_complex():
        came = (
            f"a {weight.dtype} tensor of shape {tuple(weight.shape)}"
            if isinstance(weight, Tensor)
            else _describe(weight)
        )
        raise TypeError(
            f"the weight of Weighted is {came}; expected a real 0-d tensor or a number: the sum of "
            "the mask, say, and not the mask itself."
        )
    weight = weight.to(total.device, torch.float64)
    return weight if dtensors.is_sharded(functorch.innermost(weight)) else sane(weight)


def sane(weight: Tensor) -> Tensor:
    """A weight; NaN in place of one that is negative or infinite.

    There is no mean over such a weight, and nothing may stop to look at it: so the result is NaN.
    """
    return torch.where((weight >= 0) & (weight < torch.inf), weight, torch.nan)


def _number(factor: Any, sign: str) -> Any:
    if isinstance(factor, (int, float)) or (isinstance(factor, Tensor) and factor.dim() == 0):
        return factor
    raise TypeError(
        f"Weighted {sign} {_describe(factor)}: expected a number or a 0-d tensor, which scales the "
        "total."
    )


def _describe(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, Weighted):
        return "a Weighted"
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"  # pyright: ignore[reportUnknownArgumentType]
    return f"a {type(value).__name__}"
