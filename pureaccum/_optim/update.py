"""Run an optimizer's kernel so that a step which is not applied leaves every bit as it was.

At eager top level the arithmetic is torch's own kernel, in place on copies, or on the state
itself where that was donated. Kernels read numbers on the host and have no derivative with
respect to the learning rate, so under a transform or a compiler the same formula runs in plain
tensor operations.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from .._base import (
    Layouts,
    Spoiled,
    Tree,
    any_sharded,
    any_tangent,
    check_fits,
    check_state,
    closed,
    flatten,
    known,
    mark,
    moved,
    opened,
    placed_like,
    read_params,
    taken,
    transform_active,
    tree_leaves,
    tree_map,
    unflatten,
)
from .kernels import Columns, Method
from .schedules import Schedule, check_held, is_sound, rate_at


Rate = float | Tensor | Schedule


class Ready(NamedTuple):
    """A step of an optimizer before it is taken.

    Attributes:
        sound: Whether the learning rate can be used: a bool if the host knows the rate, and else a
            0-d bool tensor. The caller decides what a rate that cannot be used means.
        apply: ``apply(grads, applied, donate)`` takes the step.
    """

    sound: bool | Tensor
    apply: Callable[[Tree, Tensor | None, bool], tuple[Tree, Any]]


def both_sound(a: bool | Tensor, b: bool | Tensor) -> bool | Tensor:
    """Whether two learning rates can both be used."""
    if isinstance(a, bool):
        return a and b
    return both_sound(b, a) if isinstance(b, bool) else a & moved(b, a.device)


class Optimizer(NamedTuple):
    """An optimizer as pure functions; whatever has the first two is one.

    Attributes:
        init: ``init(params)`` gives the first state.
        apply: ``apply(grads, state, params, applied=None, donate=False)`` gives
            ``(params, state)``. Where ``applied``, a 0-d bool tensor, is false, both come back bit
            for bit as they were; with ``donate`` they are given up, and grads too if a gradient map
            changes them. It computes with whatever learning rate there is: one of NaN gives
            parameters of NaN, and it is a training step that does not apply such a step.
        check: ``check(state, params, root="state")`` raises where a state, named so, does not fit.
        ready: ``ready(state, params, root="state")`` is the same up to where the gradients are
            needed: it checks the state, and asks the schedule for the learning rate.
    """

    init: Callable[[Tree], Any]
    apply: Callable[..., tuple[Tree, Any]]
    check: Callable[..., object]
    ready: Callable[..., Ready]


def optimizer_of(
    init: Callable[[Tree], Any],
    ready: Callable[..., Ready],
    check: Callable[..., object] = lambda state, params, root="state": None,
) -> Optimizer:
    """An optimizer whose ``apply`` is ``ready``, and then the step."""

    def apply(
        grads: Tree,
        state: Any,
        params: Tree,
        *,
        applied: Tensor | None = None,
        donate: bool = False,
    ) -> tuple[Tree, Any]:
        """The next params and state, or where ``applied`` is false the same again."""
        return ready(state, params).apply(grads, applied, donate)

    return Optimizer(init, apply, check, ready)


class Begun(NamedTuple):
    """What the states of all methods begin with."""

    steps: Tensor
    lr: Any


def start(lr: Rate, params: Tree) -> Begun:
    """No step applied yet. A learning rate that is a number becomes a part of the state."""
    leaves, spec = read_params(params)
    steps = torch.zeros((), dtype=torch.int64, device=leaves[0].device)
    if not isinstance(lr, (int, float)):
        return Begun(steps, ())
    check_held(lr, leaves, spec)
    # On a CPU, where a kernel can read it without waiting.
    return Begun(steps, torch.full((), lr, dtype=torch.float64, device="cpu"))


def moment(params: Tree) -> Tree:
    """Zeros in the dtypes of the parameters, as in torch."""
    return tree_map(lambda x: torch.zeros_like(x, requires_grad=False), params)


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


def ready_method(
    method: Method, keeping: Keeping, state: Any, params: Tree, root: str = "state"
) -> Ready:
    """A step of a method before it is taken."""
    fitted = check_kept(keeping, state, params, root)
    rate = state.lr if keeping.rate_is_kept else rate_at(keeping.lr, state.steps)
    if transform_active():  # a graph moves it once, and not for every dtype
        rate = moved(rate, fitted.columns[0][0].device)
    step = partial(_apply_method, method, keeping, fitted, rate, state)
    return Ready(is_sound(rate, fitted.columns[0]), step)


def _apply_method(
    method: Method,
    keeping: Keeping,
    fitted: Fitted,
    rate: Tensor,
    state: Any,
    grads: Tree,
    applied: Tensor | None,
    donate: bool,
) -> tuple[Tree, Any]:
    columns, spec = fitted
    terms, terms_spec = flatten(grads)
    check_fits(terms, terms_spec, columns[0], spec, ("grads", "params"), _FOREIGN)
    terms = [_dense(g, x.dtype) for g, x in zip(terms, columns[0], strict=True)]
    own = donate and not transform_active()
    given_up = tree_leaves((columns, state.steps, state.lr)) if own else []
    columns, terms, layouts = _on_this_rank(columns, terms)
    given = terms, columns, state.steps + 1, rate, applied
    if transform_active() or any_tangent([rate, *terms, *chain(*columns)]):  # kernels lose them
        new = by_formula(method, *given)
    else:
        foreach = not method.fused and columns[0][0].device.type != "cpu"
        with torch.no_grad():
            new = by_kernel(method, *given, given_up, foreach)
    steps = state.steps + (1 if applied is None else moved(applied, state.steps.device))
    lr = state.lr.clone() if keeping.rate_is_kept else ()
    mark(given_up)
    if layouts is not None:
        new = [closed(column, layouts) for column in new]
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


def by_formula(
    method: Method,
    grads: list[Tensor],
    columns: Columns,
    step: Tensor,
    rate: Tensor,
    applied: Tensor | None,
) -> Columns:
    """The next columns, in plain tensor operations."""
    rows: list[tuple[Tensor, ...]] = []
    made: dict[Any, tuple[Any, Any]] = {}  # for each device and dtype, and not for every leaf
    for grad, *row in zip(grads, *columns, strict=True):
        kind = row[0].device, row[0].dtype
        if kind not in made:
            keep = None if applied is None else moved(applied, row[0].device)
            made[kind] = method.numbers(step, rate, row[0]), keep
        numbers, keep = made[kind]
        new = method.formula(grad, numbers, *row)
        if keep is not None:
            new = tuple(torch.where(keep, x, y) for x, y in zip(new, row, strict=True))
        rows.append(new)
    return [list(column) for column in zip(*rows, strict=True)]


# Donated leaves are stepped in groups, a copy of which comes beside them: so many bytes with their
# state, or those of the largest leaf.
GROUP = 64 * 2**20


def by_kernel(
    method: Method,
    grads: list[Tensor],
    columns: Columns,
    step: Tensor,
    rate: Tensor,
    applied: Tensor | None,
    given_up: list[Tensor],
    foreach: bool,
) -> Columns:
    """The next columns, by torch's kernel if that need not wait.

    It writes to the columns where something was given up, and all of that is refused after an
    error in the middle.
    """
    certain = True if applied is None else known(applied)
    number = known(rate)
    rate_ = rate if number is None else number
    kernel = method.kernel(columns[0], step, rate_)
    if kernel is None and certain is not False:
        return by_formula(method, grads, columns, step, rate, applied)
    # Donated memory is written under new names, which take over if all goes well.
    work, written = taken(columns, bool(given_up)), False
    try:
        if certain is False or kernel is None:
            pass
        elif certain or method.fused:
            found_inf = None if certain else (~applied).float()  # pyright: ignore
            written = True
            kernel(work, grads, step, rate_, found_inf, foreach)
        elif given_up:
            for part in _groups(work):
                old = [column[part] for column in work]
                new = [[x.clone() for x in column] for column in old]
                kernel(new, grads[part], step, rate_, None, foreach)
                written = True
                _select(applied, new, old, into=1)
                del new  # before there is a copy of the next
        else:
            kernel(work, grads, step, rate_, None, foreach)
            _select(applied, work, columns, into=0)
    except BaseException:
        if written:
            mark(given_up, Spoiled)
        raise
    return work


def _groups(columns: Columns) -> Iterator[slice]:
    """Neighbouring leaves, as many as may be copied at a time."""
    sizes = [sum(x.nbytes for x in row) for row in zip(*columns, strict=True)]
    most, start, held = max(GROUP, *sizes), 0, 0
    for i, size in enumerate(sizes):
        if held + size > most:
            yield slice(start, i)
            start, held = i, 0
        held += size
    yield slice(start, len(sizes))


def _select(applied: Any, new: Columns, old: Columns, into: int) -> None:
    keep: dict[torch.device, Tensor] = {}
    for pair in zip((x for c in new for x in c), (x for c in old for x in c), strict=True):
        device = pair[0].device
        if device not in keep:
            keep[device] = moved(applied, device)
        torch.where(keep[device], *pair, out=pair[into])
