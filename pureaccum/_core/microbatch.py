"""The primitive: a function of rows, one microbatch after the other.

    for part in microbatches:
        out = func(shared, part)      # rows are laid end to end, sums are added
    its derivatives: the same, of functions that rule.py makes of func

Everything else that takes a batch in parts is an instance of it.
"""

from collections.abc import Callable, Container, Sequence
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .._base.checks import check_argnums, check_choice, positions
from .._base.dtensors import NOWHERE, rows_over
from .._base.generators import generators, restore
from .._base.torch_internals import (
    differentiating,
    forward_ad_active,
    functionalizing,
    in_backward,
    innermost,
    transform_active,
    transform_depth,
)
from .._base.trees import Tree, continuous, flatten, unflatten
from .auto_size import by_memory, is_auto
from .batches import check_sizes, cutting, read_batch, rows_to_cut, sizes_of_batch
from .exchange import inside_of, onlooker
from .gathered import WHOLE, Cut, Rows, to_host
from .loss import NO_GRAPH, advising
from .outputs import Outputs, Whole
from .recomputation import Again, UnseenError, exchanged, note_made, original
from .reductions import check_reduce
from .rule import FollowedError, Form, Outs, Pieces, Tensors, attach, run
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

        def of_size(size: int, *args: Any, **kwargs: Any) -> Tree:
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


class Arguments(NamedTuple):
    """What a function is called with: its tensors, how they are cut, and the way back."""

    tensors: list[Tensor]
    cuts: list[Cut]
    filled: Callable[[Sequence[Tensor]], tuple[list[Any], dict[str, Any]]]

    @staticmethod
    def of(
        args: Sequence[Any], kwargs: dict[str, Any], batches: Container[Any] = (), dim: int = 0
    ) -> "Arguments":
        """The arguments of a call; ``batches`` are the positions and names of what is cut."""
        keys = [*range(len(args)), *kwargs]
        flat = [_flat(x) for x in (*args, *kwargs.values())]
        over = rows_over(
            [x for k, its in zip(keys, flat, strict=True) if k in batches for x in its[0]], dim
        )
        tensors: list[Tensor] = []
        cuts: list[Cut] = []
        dtypes: list[torch.dtype] = []
        for key, (leaves, _) in zip(keys, flat, strict=True):
            for i, leaf in enumerate(leaves):
                if isinstance(leaf, Tensor):
                    tensors.append(leaf if key in batches else original(leaf))
                    dtypes.append(leaf.dtype)
                    cuts.append(Rows(dim % leaf.dim(), over=over) if key in batches else "whole")
                    leaves[i] = _TENSOR
        count, names = len(args), [*kwargs]  # ``filled`` is kept, and must hold no tensor

        def filled(tensors: Sequence[Tensor]) -> tuple[list[Any], dict[str, Any]]:
            pairs = zip(tensors, dtypes, strict=True)  # a vmap asks for the time of each ``to``
            rest = (x if x.dtype == dtype else x.to(dtype) for x, dtype in pairs)
            given = [
                leaves[0]
                if spec is None
                else unflatten(spec, [next(rest) if x is _TENSOR else x for x in leaves])
                for leaves, spec in flat
            ]
            return given[:count], dict(zip(names, given[count:], strict=True))

        return Arguments(tensors, cuts, filled)


_TENSOR = object()


def _flat(x: Any) -> tuple[list[Any], Any]:
    """The leaves of an argument, and its structure; None for one that is handed on as it is.

    torch 2.13 cannot compile optree's functions for an empty dict, such as no buffers are.
    """
    empty = torch.compiler.is_dynamo_compiling() and type(x) is dict and len(x) == 0
    return ([x], None) if empty else flatten(x)


def with_rows_on_host(arguments: Arguments) -> tuple[Arguments, torch.device | None]:
    """Arguments with their rows on the host, and the device that computes if that is no CPU."""
    devices = [x.device for x in arguments.tensors if x.device.type != "cpu"]
    if not devices:
        return arguments, None
    pairs = zip(arguments.tensors, arguments.cuts, strict=True)
    lent = [x if isinstance(cut, str) or x.device.type == "cpu" else to_host(x) for x, cut in pairs]
    cuts = [x if isinstance(x, str) else x._replace(host=devices[0]) for x in arguments.cuts]
    return arguments._replace(tensors=lent, cuts=cuts), devices[0]


def call_microbatched(
    func: Callable[..., Tree], arguments: Arguments, outputs: Outputs | Whole, known: Known | None
) -> Tree:
    """A microbatched function of some arguments.

    In a graph, and where a transform that does not differentiate follows all operations, it is the
    loop, recorded; where nothing is differentiated, the loop; else ``_Call.followed``.
    """
    tensors = arguments.tensors
    if torch.compiler.is_dynamo_compiling():
        if known and not transform_depth() and any(x.requires_grad for x in tensors):
            func = partial(checkpoint, func, use_reentrant=False)  # the compiler keeps no more
        call = _Call(func, arguments, outputs)
        return outputs.finish(call.loop(call.piece, tensors, recorded=True), ())
    call, tensors = _Call(func, arguments, outputs), exchanged(tensors)
    with guarding(known, Given("args", *flatten(tensors))) as guarded:
        piece = guarded(call.piece, call.bare)
        if not (transform_active() or torch.is_grad_enabled() or forward_ad_active()):
            return outputs.finish(call.loop(piece, tensors), ())
        mapped = transform_active() and not differentiating()
        if functionalizing() or (mapped and not any(innermost(x).requires_grad for x in tensors)):
            return outputs.finish(call.loop(piece, tensors, recorded=True), tensors)
        outs, operands = call.followed(piece, tensors)
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
        with around or nullcontext():
            return self.outputs.take(p, self.func(*args, **kwargs), repeated)

    def loop(self, piece: Piece, tensors: Tensors, recorded: bool = False) -> list[Tensor]:
        """The outputs for all pieces, whose form is known once the first has been run."""

        def first(p: int, operands: Tensors) -> Outs:
            outs, keeps = piece(p, operands)
            if unformed:  # once, so that no cycle holds what is guarded
                unformed.pop().form = self.outputs.form._replace(operands=tuple(self.cuts))
            return outs, keeps

        pieces = Pieces(first, Form(tuple(self.cuts), (), ()), self.outputs.sizes)
        unformed = [pieces]
        return run(pieces, tensors, recorded=recorded)

    def followed(self, piece: Piece, tensors: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Outputs whose derivatives are those of the rule, and what they are functions of.

        Where something captured cannot be exchanged, the loop is recorded as it stands.
        """
        before = generators({x.device for x in tensors})
        try:
            try:
                outs, then = self.remembered(piece, tensors, False)
            except RuntimeError as error:
                if NO_GRAPH not in str(error) or transform_active():
                    raise
                restore(before)  # it differentiates what it is given, by torch.autograd.grad
                self.outputs.begin()
                outs, then = self.remembered(piece, tensors, True)
            operands = [*tensors, *then.captured]
            return self.attached(then, outs, operands), operands
        except (UnseenError, FollowedError):
            restore(before)
            self.outputs.begin()
            plain = any(x.requires_grad for x in tensors)
            plain = plain and not (transform_active() or in_backward())
            with inside_of(onlooker(plain=True)) if plain else nullcontext():
                return self.loop(self.piece, tensors, recorded=True), tensors

    def remembered(self, piece: Piece, tensors: Tensors, records: bool) -> tuple[Any, Again]:
        """Outputs that nothing follows, and what the same needs to be run once more."""
        then = Again({x.device for x in tensors})
        then.mode.records = records

        def first(p: int, operands: Tensors) -> Outs:
            outs, keeps = piece(p, operands, then.finding(operands))
            return [x.detach() for x in outs] if records else outs, keeps

        own = [x.detach() for x in tensors]
        if records:
            own = [x.requires_grad_(y.requires_grad) for x, y in zip(own, tensors, strict=True)]
        return self.loop(first, own), then

    def attached(self, then: Again, outs: list[Tensor], operands: Tensors) -> list[Tensor]:
        """Outputs that were computed, made a function of the arguments and of what is captured."""
        found = [i for i, x in enumerate(outs) if continuous(x)]
        if not found:
            return outs
        form, count = self.outputs.form, len(self.cuts)

        def rerun(p: int, operands: Tensors) -> Outs:
            around = then.as_then(p, operands[count:])
            outs, keeps = self.piece(p, operands[:count], around, repeated=True)
            return [outs[i] for i in found], keeps

        form = Form(
            operands=(*self.cuts, *(WHOLE for _ in operands[count:])),
            outs=tuple(form.outs[i] for i in found),
            groups=tuple(form.groups[i] for i in found),
        )
        pieces = Pieces(rerun, form, self.outputs.sizes)
        note_made(attached := attach(pieces, operands, [outs[i] for i in found]))
        rest = iter(attached)
        return [next(rest) if continuous(x) else x for x in outs]
