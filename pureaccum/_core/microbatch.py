"""The primitive: a function applied to one microbatch after another.

    for part in microbatches:
        out = func(shared, part)      # rows are concatenated, sums are added
    its derivatives: the same, of functions that rule.py makes of func

Everything else that takes a batch in parts is built on it.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial, wraps
from typing import Any, ParamSpec

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .._base import checks, random_state, trees
from .._base.torch_internals import autograd, functorch, modes
from . import auto_size, batches, exchange, gathered, losses, recomputation, rule, writes
from .arguments import Arguments
from .attachment import attach
from .outputs import Outputs, Whole
from .reductions import check_reduce
from .watch import Finding, UnseenError, exchanged, note_made


P = ParamSpec("P")


MicrobatchSize = int | Sequence[int] | str
Piece = Callable[..., rule.Outs]


def microbatch(
    func: Callable[P, Any],
    *,
    microbatch_size: MicrobatchSize,
    batch_argnums: int | tuple[int, ...] = 1,
    batch_argnames: str | Sequence[str] = (),
    reduce: trees.Tree = "concat",
    dim: int = 0,
) -> Callable[P, trees.Tree]:
    """Make a function, and all its derivatives, process its batch one microbatch at a time.

    The rule::

        outs = [func(shared, part) for part in microbatches(batch, microbatch_size)]
        return outs, leaf by leaf concatenated, summed or whatever reduce says

    You can differentiate the result as you would ``func`` of the whole batch, with respect to all
    arguments and captured tensors, in the memory of one microbatch: under any nesting of
    torch.func's transforms and under ``.backward()``, at any order. Only inputs and outputs are
    stored. A derivative runs ``func`` again, with the random numbers, autocast, modes and module
    tensors of the first run. Code that needs the full batch (a contrastive loss, any function of
    sums) is plain code on the outputs. For the gradient of a mean use ``grad``.

    Inside ``torch.compile`` it is a plain loop, and the compiler decides what to store.

    Args:
        func: Any pure function of pytrees that returns a pytree.
        microbatch_size: Rows per microbatch; the last one may be shorter. Or a list, the rows of
            each; or ``"auto"``, as many as memory allows, outside of any transform.
        batch_argnums: Which positional arguments are batches: their tensors have one row per
            sample along ``dim``. Every microbatch receives all other arguments whole.
        batch_argnames: The keyword arguments that are batches. If all batches are keywords,
            ``batch_argnums`` is ``()``.
        reduce: How to reduce each output over microbatches: ``"concat"`` for leaves with one row
            per sample along ``dim``; ``"sum"``; ``"mean"``, over rows; ``"stack"``, one entry per
            microbatch along a new dim 0; ``"max"`` and ``"min"``, elementwise over such entries;
            ``"last"``; or a ``Reducer``, whose result raises if it is differentiated. One of these,
            or a tree of them that is a prefix of the output. A ``Weighted`` in the output becomes
            total / weight of the whole batch, whatever ``reduce`` is.
        dim: The dim along which the batch arguments are cut and outputs are concatenated.

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
    at = checks.check_argnums(batch_argnums, "batch_argnums")
    names = (batch_argnames,) if isinstance(batch_argnames, str) else tuple(batch_argnames)
    check_reduce(reduce)
    known = writes.known_of(func)
    if auto_size.is_auto(microbatch_size):
        given = partial(microbatch, func, batch_argnums=at, batch_argnames=names)

        def of_size(size: int, /, *args: Any, **kwargs: Any) -> trees.Tree:
            return given(microbatch_size=size, reduce=reduce, dim=dim)(*args, **kwargs)

        def look(*args: Any, **kwargs: Any) -> tuple[trees.Tree, trees.Tree]:
            return _batch_of(args, kwargs, at, names), [args, kwargs]

        return wraps(func)(auto_size.by_memory(of_size, look, root="args").run)
    size, told = batches.check_sizes(microbatch_size), losses.advising(func, *at, *names)

    @wraps(func)
    def microbatched(*args: Any, **kwargs: Any) -> trees.Tree:
        batch = _batch_of(args, kwargs, at, names)
        rows = batches.rows_to_cut(batches.read_batch(batch, "args", dim), "args", one_by_one=True)
        sizes = batches.sizes_of_batch(rows, size) or [0]
        arguments = Arguments.of(args, kwargs, batch, dim)
        outputs = Outputs(reduce, sizes, dim, arguments.over)
        with batches.cutting(len(sizes), sized=True):
            return call_microbatched(told, arguments, outputs, known)

    return microbatched


def _batch_of(
    args: tuple[Any, ...], kwargs: dict[str, Any], at: tuple[int, ...], names: tuple[str, ...]
) -> dict[Any, trees.Tree]:
    for name in names:
        if name not in kwargs:
            raise ValueError(
                f"batch_argnames names {name!r}, but the call passed no such keyword argument. "
                "Name positional arguments in batch_argnums."
            )
    at = checks.positions(at, len(args), "batch_argnums", missing=bool(names))
    return {**{i: args[i] for i in at}, **{name: kwargs[name] for name in names}}


def call_microbatched(
    func: Callable[..., trees.Tree],
    arguments: Arguments,
    outputs: Outputs | Whole,
    known: writes.Known,
    guards: bool = True,
) -> trees.Tree:
    """A microbatched function of some arguments.

    It runs in one of four ways: compiled; plainly, where nothing is differentiated; recorded as it
    stands, where what follows all operations does not differentiate; else so that each microbatch
    can be run again. ``guards`` is false for a function that nobody else has written.
    """
    call = _Call(func, arguments, outputs)
    if torch.compiler.is_dynamo_compiling():
        return _compiled(call, arguments.tensors, guards)
    tensors = exchanged(arguments.tensors)
    with writes.guarding(
        known if guards else None, writes.Given("args", *trees.flatten(tensors))
    ) as guarded:
        piece = guarded(call.piece, call.bare)
        if not (
            modes.transform_active() or torch.is_grad_enabled() or functorch.forward_ad_active()
        ):
            return outputs.finish(call.loop(piece, tensors), ())
        mapped = modes.transform_active() and not functorch.differentiating()
        if functorch.functionalizing() or (
            mapped and not any(functorch.innermost(x).requires_grad for x in tensors)
        ):
            return outputs.finish(call.loop(piece, tensors, recorded=True), tensors)
        outs, operands = _rerunnable(call, piece, tensors, known)
    return outputs.finish(outs, operands)


class _Call:
    """A call of a microbatched function. The rule keeps it, so it holds none of the tensors."""

    def __init__(self, func: Callable[..., trees.Tree], arguments: Arguments, outputs: Any) -> None:
        self.cuts, self.filled = arguments.cuts, arguments.filled
        self.func, self.outputs = func, outputs

    def bare(self, _p: int, operands: rule.Tensors, *_: Any) -> trees.Tree:
        """What the function returns for a piece."""
        args, kwargs = self.filled(operands)
        return self.func(*args, **kwargs)

    def piece(
        self, p: int, operands: rule.Tensors, around: Any = None, repeated: bool = False
    ) -> rule.Outs:
        """The outputs for a piece."""
        args, kwargs = self.filled(operands)
        if around is None:
            return self.outputs.take(p, self.func(*args, **kwargs), repeated)
        with around:
            return self.outputs.take(p, self.func(*args, **kwargs), repeated)

    def loop(self, piece: Piece, tensors: rule.Tensors, recorded: bool = False) -> list[Tensor]:
        """The outputs for all pieces, whose form is known once the first has been run."""

        def learned() -> rule.Form:
            return self.outputs.form._replace(operands=cuts)

        cuts = tuple(self.cuts)
        pieces = rule.Pieces(piece, rule.Form(cuts, (), ()), self.outputs.sizes, learned)
        return rule.run(pieces, tensors, recorded=recorded)


def _compiled(call: _Call, tensors: rule.Tensors, guards: bool) -> trees.Tree:
    if guards and not functorch.transform_depth() and any(x.requires_grad for x in tensors):
        call.func = partial(checkpoint, call.func, use_reentrant=False)  # it keeps no more
    return call.outputs.finish(call.loop(call.piece, tensors, recorded=True), ())


# Functions that can be run again --------------------------------------------------------------


Followed = tuple[list[Tensor], list[Tensor]]  # outputs, and what they are functions of


def _rerunnable(call: _Call, piece: Piece, tensors: list[Tensor], known: writes.Known) -> Followed:
    """Outputs whose derivatives are those of the rule, in the first of three ways that goes.

    Autograd's graph tells what is captured; else its operations do; else the loop is recorded.
    """
    before, top_level = (
        random_state.generators({x.device for x in tensors}),
        functorch.transform_level() is None,
    )

    def begin() -> None:
        random_state.restore(before)
        call.outputs.begin()

    def attempt(way: Callable[..., Followed]) -> Followed:
        try:
            return way(call, piece, tensors, recomputation.Again(before, known), False)
        except RuntimeError as error:
            if losses.NO_GRAPH not in str(error) or modes.transform_active():
                raise
        begin()  # it differentiates what it is given, by torch.autograd.grad
        return way(call, piece, tensors, recomputation.Again(before, known), True)

    if checks.here.seeks is None and functorch.graphs_tell() and top_level not in known.watched:
        with suppress(UnseenError):
            return attempt(_by_graph)
        known.watched.add(top_level)
        begin()
    with suppress(UnseenError):
        return attempt(_by_watch)
    begin()
    plain = any(x.requires_grad for x in tensors) and not (
        modes.transform_active() or autograd.in_backward()
    )
    with exchange.inside_of(exchange.onlooker(plain=True)) if plain else nullcontext():
        return call.loop(call.piece, tensors, recorded=True), tensors


def _by_graph(
    call: _Call, piece: Piece, tensors: list[Tensor], then: recomputation.Again, records: bool
) -> Followed:
    def first(p: int, operands: rule.Tensors) -> rule.Outs:
        begun = autograd.sequence_number()
        outs, keeps = piece(p, operands)
        if call.outputs.followed:  # by a reducer, whose states no rule differentiates
            raise UnseenError
        then.note_reached(outs, operands, begun)
        return [x.detach() if x.requires_grad else x for x in outs], keeps

    outs = call.loop(first, _constants(tensors, records))
    then.end()
    operands = [*tensors, *then.captured]
    if any(map(functorch.wants_gradient, operands)):
        then.hold(call.func, watched=False)
    return _attached(call, then, outs, operands, gathered.OWN), operands


def _by_watch(
    call: _Call, piece: Piece, tensors: list[Tensor], then: recomputation.Again, records: bool
) -> Followed:
    watch = Finding(records)

    def first(p: int, operands: rule.Tensors) -> rule.Outs:
        outs, keeps = piece(p, operands, then.finding(operands, watch))
        return [x.detach() for x in outs] if records else outs, keeps

    outs = call.loop(first, _constants(tensors, records))
    then.end()
    then.hold(call.func, watched=True)
    operands = [*tensors, *then.captured]
    return _attached(call, then, outs, operands, gathered.WHOLE), operands


def _constants(tensors: rule.Tensors, records: bool) -> list[Tensor]:
    """Tensors that nothing follows, of which a function may record what it does."""
    own = [x.detach() for x in tensors]
    if records:
        own = [x.requires_grad_(y.requires_grad) for x, y in zip(own, tensors, strict=True)]
    return own


def _attached(
    call: _Call,
    then: recomputation.Again,
    outs: list[Tensor],
    operands: rule.Tensors,
    captured: gathered.Cut,
) -> list[Tensor]:
    """Outputs that were computed, made a function of the arguments and of what is captured."""
    found = [i for i, x in enumerate(outs) if trees.continuous(x)]
    if not found:
        return outs
    form, count = call.outputs.form, len(call.cuts)

    def rerun(p: int, operands: rule.Tensors) -> rule.Outs:
        given, instead, begun = operands[:count], operands[count:], autograd.sequence_number()
        outs, keeps = call.piece(p, given, then.as_then(p, instead), repeated=True)
        if captured == gathered.OWN and modes.at_top_level() and then.are_own(instead):
            then.check_reached(p, outs, given, begun)
        return [outs[i] for i in found], keeps

    form = rule.Form(
        operands=(*call.cuts, *(captured for _ in operands[count:])),
        outs=tuple(form.outs[i] for i in found),
        groups=tuple(form.groups[i] for i in found),
    )
    pieces = rule.Pieces(rerun, form, call.outputs.sizes)
    note_made(attached := attach(pieces, operands, [outs[i] for i in found]))
    rest = iter(attached)
    return [next(rest) if trees.continuous(x) else x for x in outs]
