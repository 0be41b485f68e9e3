"""Run an optimizer's kernel so that a step which is not applied leaves every bit as it was.

At eager top level the arithmetic is torch's own kernel, in place on copies, or on the state
itself where that was donated. Kernels read numbers on the host and have no derivative with
respect to the learning rate, so under a transform or a compiler the same formula runs in plain
tensor operations.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._donation import hand_over, mark, taking
from ._inputs import check_fits, check_state, read_params
from ._kernels import Columns, Method
from ._schedules import Schedule, rate_at
from ._torch import transform_active
from ._tree import Tree, as_scalar_of, flatten, known, map, unflatten
from ._tree import leaves as leaves_of


Rate = float | Tensor | Schedule


class Optimizer(NamedTuple):
    """``init(params) -> state`` and ``apply(grads, state, params) -> (params, state)``.

    ``apply`` also takes ``applied``, a 0-d bool tensor: where it is false, params and state come
    back bit for bit as they were; and ``donate=True``: params and state are given up, and grads
    too if a gradient map changes them. ``check(state, params, root)`` raises where a state does not
    fit, and calls it ``root``.
    """

    init: Callable[[Tree], Any]
    apply: Callable[..., tuple[Tree, Any]]
    check: Callable[[Any, Tree, str], None] = lambda state, params, root: None


class Begun(NamedTuple):
    """What the states of all methods begin with."""

    steps: Tensor
    lr: Any


def begin(lr: Rate, params: Tree) -> Begun:
    """No step applied yet. A learning rate that is a number becomes a part of the state."""
    leaves, _ = read_params(params)
    steps = torch.zeros((), dtype=torch.int64, device=leaves[0].device)
    # On a CPU, where a kernel can read it without waiting.
    rate = torch.full((), lr, dtype=torch.float64) if isinstance(lr, (int, float)) else ()
    return Begun(steps, rate)


def zeros(params: Tree) -> Tree:
    """A moment, in the dtypes of the parameters, as in torch."""
    return map(lambda x: torch.zeros_like(x, requires_grad=False), params)


class Keeping(NamedTuple):
    """What the state of a method looks like: it begins as ``Begun`` does, and trees follow."""

    owner: str
    kind: type
    lr: Rate
    trees: tuple[str, ...]  # the names of those that are kept; the others hold ()

    @property
    def rate_is_kept(self) -> bool:
        """Whether the learning rate is a number, which stands in the state."""
        return isinstance(self.lr, (int, float))


def check_kept(keeping: Keeping, state: Any, params: Tree, root: str = "state") -> None:
    """Check that a state is of that look and of these params."""
    check_state(state, keeping.kind, keeping.owner, root)
    if keeping.rate_is_kept != isinstance(state.lr, Tensor):
        raise ValueError(
            f"{root}.lr is {state.lr!r}, but this optimizer was made with lr={keeping.lr!r}. A "
            "number is kept in the state; with a tensor or a schedule the state holds () there. A "
            "state of another configuration?"
        )
    leaves, spec = read_params(params)
    for name in state._fields[len(Begun._fields) :]:
        column, column_spec = flatten(getattr(state, name))
        if name in keeping.trees:
            check_fits(column, column_spec, leaves, spec, (f"{root}.{name}", "params"), _FOREIGN)
        elif column:
            raise ValueError(
                f"{root}.{name} holds tensors, but this optimizer keeps none there. A state of "
                "another configuration?"
            )


def apply_method(
    method: Method,
    keeping: Keeping,
    grads: Tree,
    state: Any,
    params: Tree,
    *,
    applied: Tensor | None = None,
    donate: bool = False,
) -> tuple[Tree, Any]:
    """One step of a method."""
    check_kept(keeping, state, params)
    rate = state.lr if keeping.rate_is_kept else rate_at(keeping.lr, state.steps)
    in_place = donate and not transform_active()
    trees = [getattr(state, name) for name in keeping.trees]
    new_params, new_trees = update(
        method, grads, params, trees, state.steps, rate, applied, in_place
    )
    steps = state.steps + (1 if applied is None else applied.to(state.steps.device))
    lr = state.lr.clone() if keeping.rate_is_kept else ()
    if in_place:
        hand_over([state.steps, *leaves_of(state.lr)], ())
    changed = dict(zip(keeping.trees, new_trees, strict=True))
    # not _replace, from which torch 2.11's compiler returns broken tuples
    rest = (changed.get(name, ()) for name in state._fields[len(Begun._fields) :])
    return new_params, state.__class__(steps, lr, *rest)


def update(
    method: Method,
    grads: Tree,
    params: Tree,
    trees: list[Tree],
    count: Tensor,
    rate: Tensor,
    applied: Tensor | None,
    donate: bool,
) -> tuple[Tree, list[Tree]]:
    """New parameters and new state trees.

    Args:
        method: The kernel and the formula.
        grads: Gradients, a tree like params.
        params: Parameters.
        trees: The trees of the optimizer's state, which fit.
        count: How many steps were applied before this one.
        rate: The learning rate.
        applied: Whether this step is; None: it is.
        donate: Whether params and trees are given up.
    """
    leaves, spec = read_params(params)
    terms, terms_spec = flatten(grads)
    check_fits(terms, terms_spec, leaves, spec, ("grads", "params"), _FOREIGN)
    columns = [leaves, *(leaves_of(tree) for tree in trees)]
    terms = [
        (g.to_dense() if g.is_sparse else g).to(x.dtype) for g, x in zip(terms, leaves, strict=True)
    ]
    step = count + 1
    if transform_active():
        new = _by_formula(method, terms, columns, step, rate, applied)
    else:
        with torch.no_grad():
            new = _by_kernel(method, terms, columns, step, rate, applied, donate)
    rest = [unflatten(spec, column) for column in new]
    return rest[0], rest[1:]


_FOREIGN = "An optimizer's state belongs to the params that it was made from by init."


def _by_formula(
    method: Method,
    grads: list[Tensor],
    columns: Columns,
    step: Tensor,
    rate: Tensor,
    applied: Tensor | None,
) -> Columns:
    rows: list[tuple[Tensor, ...]] = []
    for grad, *row in zip(grads, *columns, strict=True):
        new = method.formula(grad, step, as_scalar_of(row[0], rate), *row)
        if applied is not None:
            keep = applied.to(row[0].device)
            new = tuple(torch.where(keep, x, y) for x, y in zip(new, row, strict=True))
        rows.append(new)
    return [list(column) for column in zip(*rows, strict=True)]


def _by_kernel(
    method: Method,
    grads: list[Tensor],
    columns: Columns,
    step: Tensor,
    rate: Tensor,
    applied: Tensor | None,
    donate: bool,
) -> Columns:
    # Donated memory is written under new names, which take over if all goes well.
    take = taking(donate)
    work = [[take(x) for x in column] for column in columns]
    certain = True if applied is None else known(applied)
    number = known(rate)
    rate_ = rate if number is None else number
    if certain is False:
        pass
    elif (kernel := method.kernel(step, rate_)) is None:
        work = _by_formula(method, grads, columns, step, rate, applied)
    elif certain or method.fused:
        kernel(work, grads, step, rate_, None if certain else (~applied).float())  # pyright: ignore
    elif donate:
        for grad, *row in zip(grads, *work, strict=True):
            new = [[x.clone()] for x in row]
            kernel(new, [grad], step, rate_, None)
            _select(applied, new, [[x] for x in row], into=1)
    else:
        kernel(work, grads, step, rate_, None)
        _select(applied, work, columns, into=0)
    if donate:
        mark(x for column in columns for x in column)
    return work


def _select(applied: Any, new: Columns, old: Columns, into: int) -> None:
    for pair in zip((x for c in new for x in c), (x for c in old for x in c), strict=True):
        torch.where(applied.to(pair[0].device), *pair, out=pair[into])
