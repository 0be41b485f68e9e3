"""Run an optimizer's kernel so that a step which is not applied leaves every bit as it was.

At eager top level the arithmetic is torch's own kernel, in place on copies, or on the state
itself where that was donated. Kernels read numbers on the host and have no derivative with
respect to the learning rate, so under a transform or a compiler the same formula runs in plain
tensor operations.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from ._donation import mark, taken
from ._inputs import check_fits, check_state, read_params
from ._kernels import Columns, Method
from ._schedules import Schedule, rate_at
from ._sharded import Layouts, any_sharded, closed, opened, placed_like
from ._torch import transform_active
from ._tree import Tree, as_scalar_of, flatten, known, map, unflatten
from ._tree import leaves as leaves_of


Rate = float | Tensor | Schedule


class Optimizer(NamedTuple):
    """An optimizer as two pure functions; whatever has these two is one.

    Attributes:
        init: ``init(params)`` gives the first state.
        apply: ``apply(grads, state, params, applied=None, donate=False)`` gives
            ``(params, state)``. Where ``applied``, a 0-d bool tensor, is false, both come back bit
            for bit as they were; with ``donate`` they are given up, and grads too if a gradient map
            changes them.
        check: ``check(state, params, root="state")`` raises where a state, named so, does not fit.
    """

    init: Callable[[Tree], Any]
    apply: Callable[..., tuple[Tree, Any]]
    check: Callable[[Any, Tree, str], object] = lambda state, params, root: None


class Begun(NamedTuple):
    """What the states of all methods begin with."""

    steps: Tensor
    lr: Any


def begin(lr: Rate, params: Tree) -> Begun:
    """No step applied yet. A learning rate that is a number becomes a part of the state."""
    leaves, _ = read_params(params)
    steps = torch.zeros((), dtype=torch.int64, device=leaves[0].device)
    if not isinstance(lr, (int, float)):
        return Begun(steps, ())
    # On a CPU, where a kernel can read it without waiting.
    return Begun(steps, torch.full((), lr, dtype=torch.float64, device="cpu"))


def moment(params: Tree) -> Tree:
    """Zeros in the dtypes of the parameters, as in torch."""
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


class Fitted(NamedTuple):
    """Parameters and the trees of a state that fits them, flattened."""

    columns: Columns
    spec: optree.PyTreeSpec


def check_kept(keeping: Keeping, state: Any, params: Tree, root: str = "state") -> Fitted:
    """Check that a state is of that look and of these params."""
    check_state(state, keeping.kind, keeping.owner, root)
    if keeping.rate_is_kept != isinstance(state.lr, Tensor):
        raise ValueError(
            f"{root}.lr is {state.lr!r}, but this optimizer was made with lr={keeping.lr!r}. A "
            "number is kept in the state; with a tensor or a schedule the state holds () there. A "
            "state of another configuration?"
        )
    leaves, spec = read_params(params)
    columns = [leaves]
    for name in state._fields[len(Begun._fields) :]:
        column, column_spec = flatten(getattr(state, name))
        if name in keeping.trees:
            check_fits(column, column_spec, leaves, spec, (f"{root}.{name}", "params"), _FOREIGN)
            columns.append(column)
        elif column:
            raise ValueError(
                f"{root}.{name} holds tensors, but this optimizer keeps none there. A state of "
                "another configuration?"
            )
    return Fitted(columns, spec)


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
    """The next params and state of a method, or where ``applied`` is false the same again."""
    columns, spec = check_kept(keeping, state, params)
    terms, terms_spec = flatten(grads)
    check_fits(terms, terms_spec, columns[0], spec, ("grads", "params"), _FOREIGN)
    terms = [_dense(g, x.dtype) for g, x in zip(terms, columns[0], strict=True)]
    rate = state.lr if keeping.rate_is_kept else rate_at(keeping.lr, state.steps)
    given_up = columns
    columns, terms, layouts = _on_this_rank(columns, terms)
    given = terms, columns, state.steps + 1, rate, applied
    in_place = donate and not transform_active()
    if transform_active():
        new = _by_formula(method, *given)
    else:
        with torch.no_grad():
            new = _by_kernel(method, *given, donate)
    steps = state.steps + (1 if applied is None else applied.to(state.steps.device))
    lr = state.lr.clone() if keeping.rate_is_kept else ()
    if in_place:
        mark([state.steps, *leaves_of(state.lr)])
    if layouts is not None:
        new = [closed(column, layouts) for column in new]
        if in_place:
            mark(x for column in given_up for x in column)
    new_params, *trees = (unflatten(spec, column) for column in new)
    changed = dict(zip(keeping.trees, trees, strict=True))
    # not _replace, from which torch 2.11's compiler returns broken tuples
    rest = (changed.get(name, ()) for name in state._fields[len(Begun._fields) :])
    return new_params, state.__class__(steps, lr, *rest)


def _on_this_rank(
    columns: Columns, grads: list[Tensor]
) -> tuple[Columns, list[Tensor], Layouts | None]:
    """Local parts, which is all that a method looks at: it goes element by element."""
    params = columns[0]
    if not any_sharded(params):
        return columns, grads, None
    parts, layouts = opened(params)
    rest = [opened(placed_like(column, params))[0] for column in columns[1:]]
    return [parts, *rest], opened(placed_like(grads, params))[0], layouts


def _dense(grad: Tensor, dtype: torch.dtype) -> Tensor:
    dense = grad.to_dense() if grad.is_sparse else grad
    return dense if dense.dtype == dtype else dense.to(dtype)


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
    certain = True if applied is None else known(applied)
    number = known(rate)
    rate_ = rate if number is None else number
    kernel = method.kernel(step, rate_)
    by_formula = kernel is None and certain is not False
    # Donated memory is written under new names, which take over if all goes well.
    work = (
        _by_formula(method, grads, columns, step, rate, applied)
        if by_formula
        else taken(columns, donate)
    )
    if certain is False or kernel is None:
        pass
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
