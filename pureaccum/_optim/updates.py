"""The optimizer protocol, and how our optimizers take a step or leave every bit as it was.

    init      zeros, and the learning rate if it is a number
    check     whether the state fits, decided by its structure alone
    begin     get the learning rate from the schedule
    step      the next columns, by torch's kernel or by the formula, as trees again

At eager top level torch's own kernel does the arithmetic, in place on copies, or on a donated state
itself. Kernels read numbers on the host and have no derivative with respect to the learning rate,
so under a transform or a compiler the same formula runs in plain tensor operations.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .._base import checks, dtensors, reprs, states, trees
from .._base.torch_internals import functorch, modes
from . import schedules


Rate = float | Tensor | schedules.Schedule
Applied = bool | Tensor


class Ready(NamedTuple):
    """A step of an optimizer that is ready to take.

    Attributes:
        sound: Whether the learning rate is usable: a bool if the host knows the rate, otherwise a
            0-d bool tensor. The caller decides what to do with an unusable rate.
        apply: ``apply(grads, applied, donate, norm)`` takes the step, with a list of gradients.
            ``applied`` is a bool if the host knows it. ``norm`` is their global norm if it has
            been computed, otherwise None.
        rate: The learning rate, a 0-d tensor; a dict with one per label; ``()`` if unknown.
    """

    sound: bool | Tensor
    apply: Callable[[list[Tensor], Applied, bool, Tensor | None], tuple[trees.Tree, Any]]
    rate: Any


Begin = Callable[[Any, trees.Flat], Ready]


def both_sound(a: bool | Tensor, b: bool | Tensor) -> bool | Tensor:
    """Whether two learning rates can both be used."""
    if isinstance(a, bool):
        return a and b
    return both_sound(b, a) if isinstance(b, bool) else a & trees.moved(b, a.device)


class Optimizer(NamedTuple):
    """An optimizer as pure functions; any object with ``init`` and ``apply`` is one.

    Attributes:
        init: ``init(params)`` returns the first state.
        apply: ``apply(grads, state, params, applied=None, donate=False)`` returns
            ``(params, state)``. ``applied`` is a 0-d bool tensor. If it is false, both are returned
            bit for bit unchanged. ``donate=True`` reuses the memory of params and state, and of
            grads if a gradient map changes them. It does not check the learning rate: a rate of NaN
            gives NaN parameters, whereas a training step does not apply such a step.
        check: ``check(state, params, root)`` raises if a state does not fit; ``root`` names it in
            errors, and ``params`` is a pair of leaves and structure. It returns
            ``begin(state, params)``, which gets the learning rate and returns a ``Ready``.
        in_graphs: Whether it can be compiled. If not, a compiled step compiles everything else.
    """

    init: Callable[[trees.Tree], Any]
    apply: Callable[..., tuple[trees.Tree, Any]]
    check: Callable[[Any, trees.Flat, str], Begin]
    in_graphs: bool = True

    __repr__ = reprs.of_made


def optimizer_of(
    init: Callable[[trees.Tree], Any],
    check: Callable[[Any, trees.Flat, str], Begin],
    *,
    in_graphs: bool = True,
) -> Optimizer:
    """An optimizer whose ``apply`` checks the state, begins, and takes the step."""

    def apply(
        grads: trees.Tree,
        state: Any,
        params: trees.Tree,
        *,
        applied: Tensor | None = None,
        donate: bool = False,
    ) -> tuple[trees.Tree, Any]:
        """The next params and state; where ``applied`` is false, the old ones bit for bit."""
        flat = checks.read_params(params)
        begun = check(state, flat, "state")(state, flat)
        terms = fitting_gradients(
            grads, flat, "grads", "Pass one gradient for each leaf of params."
        )
        told = True if applied is None else trees.known(applied)
        return begun.apply(terms, cast(Applied, applied if told is None else told), donate, None)

    return Optimizer(init=init, apply=apply, check=check, in_graphs=in_graphs)


BELONGS = "Pass a state that init made from these params."


def fitting(
    tree: trees.Tree, like: trees.Flat, names: tuple[str, str], cause: str = BELONGS
) -> list[Tensor]:
    """The leaves of a tree that has the structure and shapes of another."""
    leaves, spec = checks.read_tensors(tree, names[0], cause)
    checks.check_fits(leaves, spec, *like, names, cause)
    return leaves


def fitting_gradients(grads: trees.Tree, params: trees.Flat, root: str, cause: str) -> list[Tensor]:
    """The leaves of gradients that fit the parameters; errors call them by ``root``."""
    terms = fitting(grads, params, (root, "params"), cause)
    for i, (g, x) in enumerate(zip(terms, params[0], strict=True)):
        if g.is_complex() and not x.is_complex():  # a cast would drop half of it
            raise TypeError(
                f"{trees.paths(params[1], root)[i]} is {g.dtype}; expected a real gradient, "
                f"because params has {x.dtype} there."
            )
    return terms


def refuse_graph(what: str, tensors: list[Tensor]) -> None:
    """Raise where a loss that plain autograd records would take a result for a constant."""
    if any(x.requires_grad for x in tensors):
        checks.refuse_without_graph(what)


# Optimizers of ours ------------------------------------------------------------------------


Columns = list[list[Tensor]]  # parameters, then each tree of the state, leaf by leaf
Row = Callable[..., tuple[Tensor, ...]]  # row(grad, param, *state) is the next row of one leaf


class Method(NamedTuple):
    """What an optimizer of ours keeps, and its arithmetic: torch's kernel, and the formula of it.

    Attributes:
        kernel: ``kernel(columns, grads, step, rate, found_inf, foreach)`` writes the next columns
            in place. ``step`` counts this step; ``rate`` is a number if the host knows it;
            ``foreach`` is torch's variant for all leaves at once.
        formula: ``formula(step, rate, leaf)`` gives the rule of all leaves of that device and
            dtype.
        fused: Whether the kernel itself leaves everything as it was where ``found_inf`` is 1.
        lr: The learning rate; one that is a number becomes part of the state.
        state: The class of the state: steps, learning rate and trees.
        columns: The names of the trees that are kept; others are ``()``.
        owner, settings: What errors call the optimizer; its other arguments, as torch calls them.
        runs: ``runs(step, rate)``: whether the kernel runs without waiting for a device.
    """

    kernel: Callable[[Columns, list[Tensor], Tensor, Any, Tensor | None, bool], None]
    formula: Callable[[Tensor, Tensor, Tensor], Row]
    fused: bool
    lr: Rate
    state: Any
    columns: tuple[str, ...]
    owner: str
    settings: dict[str, Any]
    runs: Callable[[Tensor, float | Tensor], bool] = lambda step, rate: True


def by_method(method: Method) -> Optimizer:
    """An optimizer of ours."""
    return optimizer_of(partial(_init, method), partial(_check, method))


def _init(method: Method, params: trees.Tree) -> Any:
    """The state before the first step: zeros in the dtypes of the parameters, as in torch."""
    leaves, spec = checks.read_params(params)
    lr = schedules.kept_rate(method.lr, leaves, spec)
    steps = torch.zeros((), dtype=torch.int64, device=leaves[0].device)
    zeros = partial(torch.zeros_like, requires_grad=False)
    zero = {name: trees.tree_map(zeros, params) for name in method.columns}
    return method.state(steps=states.with_settings(steps, method.settings), lr=lr, **zero)


def _check(method: Method, state: Any, params: trees.Flat, root: str) -> Begin:
    """Check that a state is one of this method and fits these params."""
    checks.check_state(state, method.state, method.owner, root)
    schedules.check_kept(method.lr, state.lr, root)
    for name in method.state._fields[2:]:  # beside steps and learning rate
        if name in method.columns:
            fitting(getattr(state, name), params, (f"{root}.{name}", "params"))
        elif trees.tree_leaves(getattr(state, name)):
            raise ValueError(
                f"{root}.{name} holds tensors, but this optimizer keeps none there. Likely cause: "
                "the state comes from another configuration."
            )
    return partial(_begin, method)


def _begin(method: Method, state: Any, params: trees.Flat) -> Ready:
    """A step of a method before it is taken."""
    rate = state.lr if isinstance(method.lr, float) else schedules.rate_at(method.lr, state.steps)
    if modes.transform_active():  # a graph moves it once, and not for every dtype
        rate = trees.moved(rate, params[0][0].device)
    old = [trees.tree_leaves(getattr(state, name)) for name in method.columns]
    begun = _Begun(method=method, state=state, params=params, columns=old, rate=rate)
    return Ready(sound=schedules.is_sound(rate, params[0]), apply=begun.take, rate=rate)


class _Begun(NamedTuple):
    """A step that knows its learning rate; columns are those of the state."""

    method: Method
    state: Any
    params: trees.Flat
    columns: Columns
    rate: Tensor

    def take(
        self, grads: list[Tensor], applied: Applied, donate: bool, norm: Tensor | None
    ) -> tuple[trees.Tree, Any]:
        """The next params and state, from the columns of both."""
        method, state, (leaves, spec), old, rate = self
        own = (writes := modes.may_write()) and donate
        given_up = [*leaves, *trees.tree_leaves(state)] if own else []
        columns, terms, layouts = _on_this_rank([leaves, *old], grads)
        # What the next state holds beside the columns is made before anything is written.
        step, lr = state.steps + 1, state.lr.clone() if isinstance(method.lr, float) else ()
        more = applied if isinstance(applied, bool) else trees.moved(applied, state.steps.device)
        count = step if applied is True else state.steps + more
        tensors = [*terms, *chain(*columns)]
        # no numbers
        imagined = not writes and (modes.transform_active() or type(step) is not Tensor)
        if imagined or functorch.any_tangent([rate, *tensors]):  # kernels lose them
            new = by_formula(method, terms, columns, step, rate, applied)
        else:
            if checks.here.backward is not None:
                refuse_graph(f"a step of {method.owner}", tensors)
            foreach = columns[0][0].device.type != "cpu"
            with torch.no_grad():
                new = by_kernel(method, terms, columns, step, rate, applied, given_up, foreach)
        if own:
            states.mark(given_up)
        new = new if layouts is None else [dtensors.closed(column, layouts) for column in new]
        new_params, *later = [trees.unflatten(spec, column) for column in new]
        held = dict(zip(method.columns, later, strict=True))
        # not _replace, from which torch 2.11's compiler returns broken tuples
        return new_params, method.state(steps=count, lr=lr, **held)


def _on_this_rank(
    columns: Columns, grads: list[Tensor]
) -> tuple[Columns, list[Tensor], dtensors.Layouts | None]:
    """Local parts, which are all that a method looks at, and dense gradients of their dtypes."""
    params = columns[0]
    dense = [g.to_dense() if g.is_sparse else g for g in grads]
    terms = [g if g.dtype == x.dtype else g.to(x.dtype) for g, x in zip(dense, params, strict=True)]
    if not dtensors.any_sharded(params):
        return columns, terms, None
    parts, layouts = dtensors.opened(params)
    rest = [dtensors.opened(dtensors.placed_like(column, params))[0] for column in columns[1:]]
    return [parts, *rest], dtensors.opened(dtensors.placed_like(terms, params))[0], layouts


# The next columns, in two ways ---------------------------------------------------------------


def by_formula(
    method: Method,
    grads: list[Tensor],
    columns: Columns,
    step: Tensor,
    rate: Tensor,
    applied: Applied,
) -> Columns:
    """The next columns, in plain tensor operations."""
    if applied is False:  # a derivative through what is not finite would be NaN
        return [[x.clone() for x in column] for column in columns]
    step, rate = trees.in_common(step), trees.in_common(rate)
    rows: list[tuple[Tensor, ...]] = []
    made: dict[Any, tuple[Row, Any]] = {}  # for each device and dtype, and not for every leaf
    for grad, *row in zip(grads, *columns, strict=True):
        kind = row[0].device, row[0].dtype
        if kind not in made:
            keep = None if applied is True else trees.moved(applied, row[0].device)
            made[kind] = method.formula(step, rate, row[0]), keep
        rule, keep = made[kind]
        new = rule(grad, *row)
        if keep is not None:
            new = tuple(torch.where(keep, x, y) for x, y in zip(new, row, strict=True))
        rows.append(new)
    return [list(column) for column in zip(*rows, strict=True)]


# Donated leaves are stepped in groups, and of one group at a time there is a copy: groups of so
# many bytes, the state included, or of the largest leaf.
GROUP = 64 * 2**20


def by_kernel(
    method: Method,
    grads: list[Tensor],
    columns: Columns,
    step: Tensor,
    rate: Tensor,
    applied: Applied,
    given_up: list[Tensor],
    foreach: bool,
) -> Columns:
    """The next columns, by torch's kernel if that need not wait.

    It writes to the columns where something was given up, and all of that is refused after an
    error in the middle.
    """
    number = trees.known(rate)
    rate_ = rate if number is None else number
    foreach = foreach and not method.fused
    if method.fused:
        refuse_fused(method.owner, columns[0])
    if not method.runs(step, rate_) and applied is not False:
        return by_formula(method, grads, columns, step, rate, applied)
    # Donated memory is written under new names, which take over if all goes well.
    work, written = states.taken(columns, bool(given_up)), False
    try:
        if applied is False:
            pass
        elif applied is True or method.fused:
            found_inf = None if applied is True else (~applied).float()
            written = True
            method.kernel(work, grads, step, rate_, found_inf, foreach)
        elif given_up:
            for part in groups(work):
                old = [column[part] for column in work]
                new = states.copies(old)
                method.kernel(new, grads[part], step, rate_, None, foreach)
                written = True
                _select(applied, new, old, into=old)
                del new  # before there is a copy of the next
        else:
            method.kernel(work, grads, step, rate_, None, foreach)
            _select(applied, work, columns, into=work)
    except BaseException:
        if written:
            states.mark(given_up, states.Spoiled)
        raise
    return work


def groups(columns: Columns) -> Iterator[slice]:
    """Neighbouring leaves, as many as may be copied at a time."""
    sizes = [sum(x.nbytes for x in row) for row in zip(*columns, strict=True)]
    most, start, held = max(GROUP, *sizes), 0, 0
    for i, size in enumerate(sizes):
        if held + size > most:
            yield slice(start, i)
            start, held = i, 0
        held += size
    yield slice(start, len(sizes))


def _select(applied: Any, new: Columns, old: Columns, into: Columns) -> None:
    """Write the new numbers where ``applied``, and else the old ones, into one of the two."""
    keep: dict[torch.device, Tensor] = {}
    for x, y, out in zip(chain(*new), chain(*old), chain(*into), strict=True):
        if x.device not in keep:
            keep[x.device] = trees.moved(applied, x.device)
        torch.where(keep[x.device], x, y, out=out)


# What torch's fused kernels take ----------------------------------------------------------------


def refuse_fused(name: str, params: list[Tensor]) -> None:
    """Raise where torch's fused kernel is none for such parameters."""
    for x in params:
        if x.is_complex():
            raise ValueError(
                f"{name}(fused=True) does not work with parameters in {x.dtype}, because torch's "
                "fused kernels have no complex numbers. Use fused=False."
            )
        half = x.dtype in (torch.bfloat16, torch.float16)
        if name == "sgd" and half and x.device.type == "cpu":
            raise ValueError(
                f"sgd(fused=True) does not work with parameters in {x.dtype} on a CPU. Up to "
                "torch 2.13, torch's kernel leaves most of them unchanged, without an error "
                "(github.com/pytorch/pytorch/issues/191763). Use fused=False."
            )
