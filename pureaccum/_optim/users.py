"""Optimizers and gradient maps of the user's own: called, and not believed.

    new = apply(grads, state, params)       # of any object
    written to what it was given?           raise: return new tensors
    other structure, shapes or dtypes?      raise
    next = where(applied, new, old)

A write in place, which is how every optimizer of torch works, would change the state before the
step, and apply a step that is not to be applied. Versions of tensors show it, but for writes to
``.data`` and by fused kernels: at the calls that asking.py names, the sum of each leaf shows those.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from .._base import asking, checks, dtensors, reprs, settings, trees
from .._base.states import hand_over
from .._base.torch_internals import autograd, functorch, modes
from . import updates
from .minimizer import Minimizer


def as_optimizer(optimizer: Any, what: str = "optimizer") -> updates.Optimizer:
    """Return an optimizer itself, or a user's as one that keeps all where a step is not applied."""
    if isinstance(optimizer, updates.Optimizer):
        return optimizer
    _refuse(optimizer, what)
    cause = (
        "apply(grads, state, params) must return (params, state) like those that it gets. "
        "Gradients may be wider: x.to(p.dtype)."
    )
    name = f"apply of {reprs.kind(optimizer)}"
    plain = _pure(optimizer.apply, name, ("grads", "state", "params"))

    def begin(state: Any, params: trees.Flat) -> updates.Ready:
        return updates.Ready(True, partial(step, state, params), ())  # its rate is unknown

    def step(
        state: Any,
        params: trees.Flat,
        grads: list[Tensor],
        applied: updates.Applied,
        donate: bool,
        norm: Tensor | None,
    ) -> tuple[trees.Tree, Any]:
        leaves, spec = params
        old = trees.unflatten(spec, leaves), state
        new: Any = plain(trees.unflatten(spec, grads), state, old[0])
        after = _check_alike(new, old, ("the result of apply", "the input of apply"), cause)
        new = trees.where(applied, tuple(new), old)
        if donate and modes.may_write():
            new = trees.unflatten(after, hand_over(trees.tree_leaves(old), trees.tree_leaves(new)))
        return new

    made = updates.optimizer_of(partial(optimizer.init), lambda state, params, root: begin)
    kind = type(optimizer).__qualname__
    settings.note_maker(made, settings.MadeBy(kind, {"apply": optimizer.apply}))
    return made


def pure_map(gradient_map: Any) -> Callable[..., tuple[trees.Tree, Any]]:
    """Return the update of a user's gradient map, which raises where that writes in place."""
    name = f"update of {reprs.kind(gradient_map)}"
    plain = _pure(gradient_map.update, name, ("grads", "state"))

    def update(grads: trees.Tree, state: Any) -> tuple[trees.Tree, Any]:
        new, later = plain(grads, state)
        cause = f"{name} must return (grads, state) like those that it gets."
        _check_alike(later, state, ("the state that update returned", "its state"), cause)
        return new, later

    return update


def has(thing: Any, *methods: str) -> bool:
    """Return whether an object, not the class of one, has these methods."""
    return not isinstance(thing, type) and all(callable(getattr(thing, m, None)) for m in methods)


def named(thing: Any) -> str:
    """Return the words of an error for a thing that is no optimizer, or no gradient map."""
    return f"the class {thing.__name__}" if isinstance(thing, type) else reprs.kind(thing)


def _refuse(optimizer: Any, what: str) -> None:
    if isinstance(optimizer, Minimizer):
        raise TypeError(
            f"{what} is {optimizer!r}, whose apply takes a function of the parameters, because it "
            "needs gradients again, whereas a step passes gradients. Call it yourself: params, "
            "state = opt.apply(lambda params: fn(params, batch), state, params), where fn = "
            "pa.grad_and_value(loss, microbatch_size=...)."
        )
    if isinstance(optimizer, torch.optim.Optimizer) or (
        isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)
    ):
        cls = optimizer if isinstance(optimizer, type) else type(optimizer)
        raise TypeError(
            f"{what} is torch's {cls.__name__}, which changes parameters in place; expected "
            f"pureaccum's sgd, adam or adamw, or from_torch({cls.__name__}, lr=...)."
        )
    if isinstance(optimizer, FunctionType):
        name = optimizer.__name__
        raise TypeError(
            f"{what} is the function {name}; expected an optimizer. Likely cause: the function was "
            f"not called. Write {name}(...)."
        )
    if not has(optimizer, "init", "apply"):
        raise TypeError(
            f"{what} is {named(optimizer)}; expected an optimizer, which has init(params) and "
            "apply(grads, state, params) -> (params, state): sgd, adam, adamw, from_torch(...), "
            "or chain(*maps, optimizer) for gradient maps."
        )


# What it writes and returns --------------------------------------------------------------------


def _pure(call: Callable[..., Any], name: str, roots: Sequence[str]) -> Callable[..., Any]:
    """Return a function that raises where it has written to its arguments."""
    history = asking.Answer()

    def called(*given: trees.Tree) -> Any:
        if torch.compiler.is_dynamo_compiling():  # a graph drops copies that nobody writes to
            return call(*trees.tree_map(torch.clone, given))
        history.calls += 1
        sums = modes.at_top_level() and checks.here.checks != "off"
        if sums := sums and history.asks_at(history.calls):
            history.note(False, rows=3)
        leaves = trees.tree_leaves(given)
        at = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        tensors = [functorch.innermost(dtensors.local(leaves[i])) for i in at]
        before = _looks(tensors, sums)
        try:
            result = call(*given)
        except Exception as error:
            error.add_note(f"pureaccum: raised by {name}, after the gradients of a step.")
            raise
        if (now := _looks(tensors, sums)) != before:
            changed = next(i for i, x, y in zip(at, now, before, strict=True) if x != y)
            named = [
                path
                for root, tree in zip(roots, given, strict=True)
                for path in trees.paths(trees.flatten(tree)[1], root)
            ]
            raise RuntimeError(
                f"{name} has written to {named[changed]} in place; expected new tensors, because a "
                "step that is not applied keeps the old ones, and so may the caller. Write x - y, "
                "not x.sub_(y). What it was given holds changed numbers now."
            )
        return result

    return called


def _looks(tensors: list[Tensor], sums: bool) -> list[tuple[int, str]]:
    """Return the version of each tensor, and its sum in words: NaN is not itself."""

    def number(x: Tensor) -> str:
        wide = torch.complex128 if x.is_complex() else torch.float64
        return str(x.sum(dtype=wide).item()) if sums and x.layout is torch.strided else ""

    return [*zip(autograd.versions(tensors), map(number, tensors), strict=True)]


def _check_alike(new: Any, old: Any, names: tuple[str, str], cause: str) -> Any:
    """Check that a result has the structure, shapes and dtypes of what it replaces."""
    leaves, spec = checks.read_tensors(new, names[0], cause)
    like, like_spec = trees.flatten(old)
    checks.check_fits(leaves, spec, like, like_spec, names, cause)
    for i, (x, y) in enumerate(zip(leaves, like, strict=True)):
        if x.dtype != y.dtype:
            raise ValueError(
                f"{trees.paths(spec, names[0])[i]} is {x.dtype}; expected {y.dtype}, as in "
                f"{names[1]}. {cause}"
            )
    return spec
