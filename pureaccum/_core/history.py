"""Results that plain autograd follows, at no cost until a gradient is asked for.

    outs = call(arguments without history)        # nothing is recorded
    its backward pass: torch.func.vjp(call, arguments)(cotangents)

Under torch.func the call is a composition of microbatched functions. So its backward pass takes the
memory of one microbatch; and it is a call like the first one, of the arguments and the cotangents,
which makes every order of derivatives one rule. Only the arguments are kept, and autograd compares
their versions.

What a loss captures is followed too. That there is something shows in what the loss returns: with
nothing recorded of its arguments, it requires grad all the same. Then the call is made again, under
the watch of recomputation.py, which makes arguments of what is captured.

What cannot be followed is refused: its results raise when a backward pass reaches them.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial, wraps
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import optree
import torch
from torch import Tensor, nn

from .._base import checks, random_state, refusals, states, trees
from .._base.torch_internals import autograd, functorch, modes
from . import attachment, exchange, gathered, recomputation, rule, watch, writes
from .arguments import Arguments


Call = Callable[..., Any]
Look = Callable[[Sequence[Any], Sequence[Tensor]], None]  # at what a loss returned, its leaves


class CapturedError(BaseException):
    """A loss captures what requires grad. Only the caller that asked for it may catch this."""


class _Here(threading.local):
    """The backward pass that was around when ``here.look`` began to look."""

    inside_of: exchange.Backward | None = None


_here = _Here()


def looking(look: Look | None, call: Call, /, *args: Any, **kwargs: Any) -> Any:
    """Call something, and look at what the losses in it return."""
    before = checks.here.look, _here.inside_of
    checks.here.look, _here.inside_of = look, checks.here.backward
    try:
        return call(*args, **kwargs)
    finally:
        checks.here.look, _here.inside_of = before


def _passed_on(call: Call, args: Any, kwargs: Any) -> Any:
    """A call whose results are part of those of another one, which is followed as a whole."""
    if any(isinstance(x, Tensor) and x.requires_grad for x in trees.tree_leaves((args, kwargs))):
        arguments = Arguments.of(args, kwargs)
        tensors = watch.exchanged(arguments.tensors)
        checks.here.look(tensors, ())
        args, kwargs = arguments.filled(tensors)
    return call(*args, **kwargs)


def captured_in(outs: Sequence[Any], leaves: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that require grad in which graphs end, but for the leaves of the loss."""
    found: list[Tensor] = []
    own = {*map(id, leaves)}
    for x in outs:
        if isinstance(x, Tensor):
            x = x if x.grad_fn is not None else functorch.innermost(x)
            if x.requires_grad:
                found += [end for end in autograd.ends_of(x) if id(end) not in own]
    return found


def refuse_captured(known: writes.Known, outs: Sequence[Any], leaves: Sequence[Tensor]) -> None:
    """Raise where a loss captures what requires grad, and is no parameter of a module.

    To follow a graph takes time: after a loss's first call, that of one microbatch a call.
    """
    if known.captures is not None:
        checks.here.look = None
    found = captured_in(outs, leaves)
    for at in known.captured:
        if (x := at()) is not None and not isinstance(x, states.Refusing) and x.requires_grad:
            found.append(x)
    for x in found:
        if not isinstance(x, nn.Parameter):
            raise RuntimeError(
                f"the loss of a step captures a tensor of shape {tuple(x.shape)} and {x.dtype} "
                "that requires grad. Derivatives of a step follow its state, its batch and its "
                "shared arguments, and treat the parameters of other modules as constants. Pass "
                "the tensor as a shared argument: step(state, batch, tensor). For a constant, "
                "capture tensor.detach(). If the loss makes the tensor, as for a gradient penalty, "
                "use torch.func.grad inside the loss."
            )


def _stop(known: writes.Known, outs: Sequence[Any], leaves: Sequence[Tensor]) -> None:
    """End the call where a loss captures what requires grad: it is made again, and followed.

    Leaves that require grad are those of an engine that records a graph, which is looked at as
    rarely as by ``refuse_captured``. What torch.func records is below its level: a look is cheap.
    """
    if captured_in(outs, leaves):
        raise CapturedError
    if known.captures is not None and leaves and leaves[0].requires_grad:
        checks.here.look = None


def with_history(call: Call, known: writes.Known, plain: Call | None = None) -> Call:
    """Let plain autograd follow the results of a call, and what the loss in it captures.

    ``plain`` is the same function as torch.func's transforms follow it; by default ``call`` itself.
    """

    @wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if modes.transform_active():
            return call(*args, **kwargs)
        return call_with_history(call, plain or call, known, args, kwargs)

    return wrapped


def call_with_history(
    call: Call, plain: Call, known: writes.Known, args: Any, kwargs: Any, captured: bool = True
) -> Any:
    """The results of a call, which plain autograd follows.

    ``captured`` says whether what the loss captures is followed too: see ``refuse_captured``.
    """
    if not torch.is_grad_enabled():
        return looking(None, call, *args, **kwargs)
    if checks.here.look is not None and _here.inside_of is checks.here.backward:
        return _passed_on(call, args, kwargs)
    stop = partial(_stop if captured else refuse_captured, known)
    captures = captured and known.captures is True
    called: Any = args, kwargs
    leaves = optree.tree_leaves(called, namespace=trees.NAMESPACE)
    given = [x for x in leaves if isinstance(x, Tensor)]
    if not (captures or any(map(_requires_grad, given))):
        before = random_state.generators({x.device for x in given}) if captured else []
        outer = checks.here.look, _here.inside_of
        checks.here.look, _here.inside_of = stop, checks.here.backward
        try:
            result = call(*args, **kwargs)
            known.captures = bool(known.captures)
            return result
        except CapturedError:
            random_state.restore(before)
            captures = known.captures = True
        finally:
            checks.here.look, _here.inside_of = outer
    # A step gives its state up, but for the plain one.
    return _followed(call if captured else plain, plain, captures, stop, known, args, kwargs)


def _followed(
    call: Call, plain: Call, captures: bool, stop: Look, known: writes.Known, args: Any, kwargs: Any
) -> Any:
    arguments = Arguments.of(args, kwargs)
    filled, tensors = arguments.filled, watch.exchanged(arguments.tensors)
    own, count = autograd.without_history(tensors), len(tensors)
    before = random_state.generators({x.device for x in tensors})
    remembered = recomputation.Again(before, known)

    def first(stop: Look | None) -> Any:
        args, kwargs = filled(own)
        result = looking(stop, call, *args, **kwargs)
        if stop is not None:  # it may depend on something captured by itself
            stop(trees.tree_leaves(result), ())
        return result

    try:
        with remembered.finding(own, watch.Finding(False)) if captures else nullcontext():
            result = first(stop)
        if not captures:
            remembered.note_piece(set())
        remembered.end()
        remembered.hold(call, watched=captures)
    except (CapturedError, watch.UnseenError):
        random_state.restore(before)
        if captures:
            found: list[Tensor] = []
            result = first(lambda outs, leaves: found.extend(captured_in(outs, leaves)))
            return refused(result, _UNSEEN, [*found, *tensors])
        known.captures = True
        return _followed(call, plain, True, stop, known, args, kwargs)

    def repeated(*operands: Tensor) -> list[Tensor]:
        with remembered.as_then(0, operands[count:]):
            args, kwargs = filled(operands[:count])
            return [x for x in trees.tree_leaves(plain(*args, **kwargs)) if _has_derivative(x)]

    return _attached(result, repeated, [*tensors, *remembered.captured])


_requires_grad = attrgetter("requires_grad")
_UNSEEN = (
    "a loss captures a tensor that requires grad in an autograd Function, or makes it out of "
    "sight, so its derivative cannot be followed. Pass the tensor as an argument. For a constant, "
    "use x.detach()."
)


def refusing_backward(call: Call, what: str, why: str) -> Call:
    """Let the results of a call raise when a backward pass of plain autograd reaches them.

    Inside of a loss of ours the engine is told at once, which may have another way.
    """

    @wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if modes.transform_active():
            return call(*args, **kwargs)
        if not torch.is_grad_enabled():
            return looking(None, call, *args, **kwargs)
        if checks.here.look is not None and _here.inside_of is checks.here.backward:
            return _passed_on(call, args, kwargs)
        if checks.here.backward is not None:
            checks.refuse_without_graph(what)
        leaves, spec = trees.flatten((args, kwargs))
        captured: list[Tensor] = []

        def note(outs: Sequence[Any], own: Sequence[Tensor]) -> None:
            captured.extend(() if captured else captured_in(outs, own))

        at = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
        given = leaves.copy()
        for i in at:
            given[i] = leaves[i].detach()
        if at:
            args, kwargs = trees.unflatten(spec, given)
        try:
            result = looking(note, call, *args, **kwargs)
        finally:
            for i in at:  # what was given up, the caller may not use either
                if isinstance(given[i], states.Refusing):
                    states.mark([leaves[i]], type(given[i]))
        if not (at or captured):
            return result
        why_not = f"plain autograd cannot differentiate {what}, because no graph is kept. {why}"
        return refused(result, why_not, [*captured, *_origins(leaves[i] for i in at)])

    return wrapped


def refused(result: trees.Tree, why: str, operands: Sequence[Tensor] = ()) -> trees.Tree:
    """A result that raises when a backward pass reaches it, or asks for that of an operand."""

    def repeated(*_: Tensor) -> list[Tensor]:
        raise RuntimeError(why)

    result = _attached(result, repeated, [torch.empty(0, requires_grad=True), *operands])
    for x in trees.tree_leaves(result):
        if isinstance(x, Tensor) and x.grad_fn is not None:
            _origins_of[x.grad_fn] = operands
    return result


# Of the nodes of refused results, what these were computed from.
_origins_of: "WeakKeyDictionary[Any, Sequence[Tensor]]" = WeakKeyDictionary()


def _origins(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the arguments on which a refusal hangs: of refused results, those of theirs.

    So a derivative with respect to an argument meets the refusal, and no chain of states grows.
    """
    found: dict[int, Tensor] = {}
    for x in tensors:
        if not isinstance(x, states.Refusing):
            known = x.grad_fn is not None and x.grad_fn in _origins_of
            found |= {id(at): at for at in (_origins_of[x.grad_fn] if known else [x])}
    return [*found.values()]


def _has_derivative(x: Any) -> bool:
    return isinstance(x, Tensor) and trees.continuous(x)


def _attached(
    result: trees.Tree, repeated: Callable[..., list[Tensor]], operands: Sequence[Tensor]
) -> trees.Tree:
    """A result as a function of operands, of which ``repeated`` computes its tensors again."""
    leaves, spec = trees.flatten(result)
    at = [i for i, x in enumerate(leaves) if _has_derivative(x)]

    def call(_: int, operands: Sequence[Tensor]) -> rule.Outs:
        try:
            return repeated(*operands), ()
        except RuntimeError as error:
            refusals.advise_on_vjp(error)
            raise

    form = rule.Form((gathered.WHOLE,) * len(operands), (gathered.WHOLE,) * len(at), (0,) * len(at))
    piece = rule.Pieces(call, form, (1,), composes=True)
    made = attachment.attach(piece, operands, [leaves[i].detach() for i in at])
    watch.note_made(made)
    for i, x in zip(at, made, strict=True):
        leaves[i] = x
    return trees.unflatten(spec, leaves)
