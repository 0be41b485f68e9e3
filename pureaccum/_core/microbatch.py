"""The primitive: a function of rows, one microbatch after the other.

    for part in microbatches:
        out = func(shared, part)      # rows are laid end to end, sums are added
    its derivatives: the same, of functions that rule.py makes of func

Everything else that takes a batch in parts is an instance of it.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial, wraps
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .._base.checks import check_argnums, check_choice, here, positions
from .._base.random_state import generators, restore
from .._base.sharded_rows import NOWHERE
from .._base.torch_internals.autograd import in_backward, sequence_number
from .._base.torch_internals.functorch import (
    differentiating,
    forward_ad_active,
    functionalizing,
    graphs_tell,
    innermost,
    transform_depth,
    transform_level,
    wants_gradient,
)
from .._base.torch_internals.modes import at_top_level, transform_active
from .._base.trees import Tree, continuous, flatten
from .arguments import Arguments, with_rows_on_host
from .attachment import attach
from .auto_size import by_memory, is_auto
from .batches import check_sizes, cutting, read_batch, rows_to_cut, sizes_of_batch
from .exchange import inside_of, onlooker
from .gathered import OWN, WHOLE, Cut, Rows
from .losses import NO_GRAPH, advising
from .outputs import Outputs, Whole
from .recomputation import Again
from .reductions import check_reduce
from .rule import Form, Outs, Pieces, Tensors, run
from .watch import Finding, UnseenError, exchanged, note_made
from .writes import Given, Known, guarding, known_of


MicrobatchSize = int | Sequence[int] | str
Keep = Literal["device", "host"]
Piece = Callable[..., Outs]


def microbatch(
    func: Callable[..., Tree],
    *,
    microbatch_size: MicrobatchSize,
    batch_argnums: int | tuple[int, ...] = 1,
    batch_argnames: str | Sequence[str] = (),
    reduce: Tree = "concat",
    dim: int = 0,
    keep: Keep = "device",
) -> Callable[..., Tree]:
    """Make a function take its batch one microbatch after the other, and so all its derivatives.

    The rule::

        outs = [func(shared, part) for part in microbatches(batch, microbatch_size)]
        return outs, leaf by leaf concatenated, summed or whatever reduce says

    It is differentiable as the function of the whole batch is, with respect to all that it is given
    and captures, and in the memory of one microbatch: under every nest of torch.func's transforms
    and under ``.backward()``, at any order. Only inputs and outputs are kept, and ``func`` is run
    again for a derivative, with the random numbers, under the autocast and modes and with the
    modules' tensors of the first time. Full-batch code (a contrastive loss, any function of sums)
    is plain code over what it returns; for the gradient of a mean there is ``grad``.

    Inside ``torch.compile`` it is the loop as it stands: that compiler decides by itself what to
    keep.

    Args:
        func: Any pure function of pytrees, with a pytree as its result.
        microbatch_size: Rows per microbatch; the last one may be shorter. Or a list, the rows of
            each; or ``"auto"``, as many as memory allows, outside of any transform.
        batch_argnums: Which positional arguments are batches: their tensors have one row per
            sample along ``dim``. All others are handed to every microbatch whole.
        batch_argnames: The same by name; where all batches are, ``batch_argnums`` is ``()``.
        reduce: What becomes of each output: ``"concat"`` for leaves with one row per sample along
            ``dim``; ``"sum"``; ``"mean"``, over rows; ``"stack"``, one entry per microbatch along a
            new dim 0; ``"max"`` and ``"min"``, ``amax`` and ``amin`` of such entries; ``"last"``;
            or a ``Reducer``, which has no derivative and raises where one is used.
            One of them, or a tree of them that is a prefix of the output. A ``Weighted`` anywhere
            in the output becomes total / weight of the whole batch, whatever stands here.
        dim: Along which dim the rows of every batch argument lie, and those of the output.
        keep: Where rows lie, and what is kept of them for the backward pass: ``"device"``, or
            ``"host"`` for pinned memory of the host, to and from which each microbatch is copied
            while the device computes.

    Returns:
        A function with the arguments of ``func``.

    Example:
        >>> embed = microbatch(lambda w, x: w * x, microbatch_size=1)
        >>> def loss(w, x):  # of all pairs of rows
        ...     z = embed(w, x)
        ...     return (z[:, None] - z).square().mean()
        >>> torch.func.grad(loss)(torch.tensor(1.0), torch.tensor([1.0, 3.0]))
        tensor(4.)

    References:
        Gao et al., `Scaling deep contrastive learning batch size under memory limited setup
        <https://arxiv.org/abs/2101.06983>`_ (GradCache), 2021.
    """
    if not callable(func):
        raise TypeError(f"func is {func!r}; expected a function.")
    at = check_argnums(batch_argnums, "batch_argnums")
    names = (batch_argnames,) if isinstance(batch_argnames, str) else tuple(batch_argnames)
    check_reduce(reduce)
    check_choice(keep, get_args(Keep), "keep")
    known = known_of(func)
    if is_auto(microbatch_size):
        given = partial(microbatch, func, batch_argnums=at, batch_argnames=names)

        def of_size(size: int, /, *args: Any, **kwargs: Any) -> Tree:
            return given(microbatch_size=size, reduce=reduce, dim=dim, keep=keep)(*args, **kwargs)

        def look(*args: Any, **kwargs: Any) -> tuple[Tree, Tree]:
            return _batch_of(args, kwargs, at, names), [args, kwargs]

        return wraps(func)(by_memory(of_size, look, root="args").run)
    size, told = check_sizes(microbatch_size), advising(func, *at, *names)

    @wraps(func)
    def microbatched(*args: Any, **kwargs: Any) -> Tree:
        batch = _batch_of(args, kwargs, at, names)
        rows = rows_to_cut(read_batch(batch, "args", dim), "args", one_by_one=True)
        sizes = sizes_of_batch(rows, size) or [0]
        arguments = Arguments.of(args, kwargs, batch, dim)
        device = None
        if keep == "host":
            arguments, device = with_rows_on_host(arguments)
        over = next((cut.over for cut in arguments.cuts if isinstance(cut, Rows)), NOWHERE)
        outputs = Outputs(reduce, sizes, dim, device, over)
        with cutting(len(sizes), sized=True):
            return call_microbatched(told, arguments, outputs, known)

    return microbatched


def _batch_of(
    args: tuple[Any, ...], kwargs: dict[str, Any], at: tuple[int, ...], names: tuple[str, ...]
) -> dict[Any, Tree]:
    for name in names:
        if name not in kwargs:
            raise ValueError(
                f"batch_argnames names {name!r}, but the function got no such argument by name; "
                "what is passed by position goes into batch_argnums."
            )
    at = positions(at, len(args), "batch_argnums", missing=bool(names))
    return {**{i: args[i] for i in at}, **{name: kwargs[name] for name in names}}


def call_microbatched(
    func: Callable[..., Tree],
    arguments: Arguments,
    outputs: Outputs | Whole,
    known: Known,
    guards: bool = True,
) -> Tree:
    """A microbatched function of some arguments.

    It runs in one of four ways: compiled; plainly, where nothing is differentiated; recorded as it
    stands, where what follows all operations does not differentiate; else so that each microbatch
    can be run again. ``guards`` is false for a function that nobody else has written.
    """
    call = _Call(func, arguments, outputs)
    if torch.compiler.is_dynamo_compiling():
        return _compiled(call, arguments.tensors, guards)
    tensors = exchanged(arguments.tensors)
    with guarding(known if guards else None, Given("args", *flatten(tensors))) as guarded:
        piece = guarded(call.piece, call.bare)
        if not (transform_active() or torch.is_grad_enabled() or forward_ad_active()):
            return outputs.finish(call.loop(piece, tensors), ())
        mapped = transform_active() and not differentiating()
        if functionalizing() or (mapped and not any(innermost(x).requires_grad for x in tensors)):
            return outputs.finish(call.loop(piece, tensors, recorded=True), tensors)
        outs, operands = _rerunnable(call, piece, tensors, known)
    return outputs.finish(outs, operands)


class _Call:
    """A call of a microbatched function. The rule keeps it, so it holds none of the tensors."""

    def __init__(self, func: Callable[..., Tree], arguments: Arguments, outputs: Any) -> None:
        _, self.cuts, self.filled = arguments
        self.func, self.outputs = func, outputs

    def bare(self, _p: int, operands: Tensors, *_: Any) -> Tree:
        """What the function returns for a piece."""
        args, kwargs = self.filled(operands)
        return self.func(*args, **kwargs)

    def piece(self, p: int, operands: Tensors, around: Any = None, repeated: bool = False) -> Outs:
        """The outputs for a piece."""
        args, kwargs = self.filled(operands)
        if around is None:
            return self.outputs.take(p, self.func(*args, **kwargs), repeated)
        with around:
            return self.outputs.take(p, self.func(*args, **kwargs), repeated)

    def loop(self, piece: Piece, tensors: Tensors, recorded: bool = False) -> list[Tensor]:
        """The outputs for all pieces, whose form is known once the first has been run."""

        def learned() -> Form:
            return self.outputs.form._replace(operands=cuts)

        cuts = tuple(self.cuts)
        pieces = Pieces(piece, Form(cuts, (), ()), self.outputs.sizes, learned)
        return run(pieces, tensors, recorded=recorded)


def _compiled(call: _Call, tensors: Tensors, guards: bool) -> Tree:
    if guards and not transform_depth() and any(x.requires_grad for x in tensors):
        call.func = partial(checkpoint, call.func, use_reentrant=False)  # it keeps no more
    return call.outputs.finish(call.loop(call.piece, tensors, recorded=True), ())


# Functions that can be run again --------------------------------------------------------------


Followed = tuple[list[Tensor], list[Tensor]]  # outputs, and what they are functions of


def _rerunnable(call: _Call, piece: Piece, tensors: list[Tensor], known: Known) -> Followed:
    """Outputs whose derivatives are those of the rule, in the first of three ways that goes.

    Autograd's graph tells what is captured; else its operations do; else the loop is recorded.
    """
    before, top_level = generators({x.device for x in tensors}), transform_level() is None

    def begin() -> None:
        restore(before)
        call.outputs.begin()

    def attempt(way: Callable[..., Followed]) -> Followed:
        try:
            return way(call, piece, tensors, Again(before, known), False)
        except RuntimeError as error:
            if NO_GRAPH not in str(error) or transform_active():
                raise
        begin()  # it differentiates what it is given, by torch.autograd.grad
        return way(call, piece, tensors, Again(before, known), True)

    if here.seeks is None and graphs_tell() and top_level not in known.watched:
        with suppress(UnseenError):
            return attempt(_by_graph)
        known.watched.add(top_level)
        begin()
    with suppress(UnseenError):
        return attempt(_by_watch)
    begin()
    plain = any(x.requires_grad for x in tensors) and not (transform_active() or in_backward())
    with inside_of(onlooker(plain=True)) if plain else nullcontext():
        return call.loop(call.piece, tensors, recorded=True), tensors


def _by_graph(
    call: _Call, piece: Piece, tensors: list[Tensor], then: Again, records: bool
) -> Followed:
    def first(p: int, operands: Tensors) -> Outs:
        begun = sequence_number()
        outs, keeps = piece(p, operands)
        if call.outputs.followed:  # by a reducer, whose states no rule differentiates
            raise UnseenError
        then.note_reached(outs, operands, begun)
        return [x.detach() if x.requires_grad else x for x in outs], keeps

    outs = call.loop(first, _constants(tensors, records))
    then.end()
    operands = [*tensors, *then.captured]
    if any(map(wants_gradient, operands)):
        then.hold(call.func, watched=False)
    return _attached(call, then, outs, operands, OWN), operands


def _by_watch(
    call: _Call, piece: Piece, tensors: list[Tensor], then: Again, records: bool
) -> Followed:
    watch = Finding(records)

    def first(p: int, operands: Tensors) -> Outs:
        outs, keeps = piece(p, operands, then.finding(operands, watch))
        return [x.detach() for x in outs] if records else outs, keeps

    outs = call.loop(first, _constants(tensors, records))
    then.end()
    then.hold(call.func, watched=True)
    operands = [*tensors, *then.captured]
    return _attached(call, then, outs, operands, WHOLE), operands


def _constants(tensors: Tensors, records: bool) -> list[Tensor]:
    """Tensors that nothing follows, of which a function may record what it does."""
    own = [x.detach() for x in tensors]
    if records:
        own = [x.requires_grad_(y.requires_grad) for x, y in zip(own, tensors, strict=True)]
    return own


def _attached(
    call: _Call, then: Again, outs: list[Tensor], operands: Tensors, captured: Cut
) -> list[Tensor]:
    """Outputs that were computed, made a function of the arguments and of what is captured."""
    found = [i for i, x in enumerate(outs) if continuous(x)]
    if not found:
        return outs
    form, count = call.outputs.form, len(call.cuts)

    def rerun(p: int, operands: Tensors) -> Outs:
        given, instead, begun = operands[:count], operands[count:], sequence_number()
        outs, keeps = call.piece(p, given, then.as_then(p, instead), repeated=True)
        if captured == OWN and at_top_level() and then.are_own(instead):
            then.check_reached(p, outs, given, begun)
        return [outs[i] for i in found], keeps

    form = Form(
        operands=(*call.cuts, *(captured for _ in operands[count:])),
        outs=tuple(form.outs[i] for i in found),
        groups=tuple(form.groups[i] for i in found),
    )
    pieces = Pieces(rerun, form, call.outputs.sizes)
    note_made(attached := attach(pieces, operands, [outs[i] for i in found]))
    rest = iter(attached)
    return [next(rest) if continuous(x) else x for x in outs]
