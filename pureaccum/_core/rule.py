"""A function of rows, run piece by piece, and its derivatives, which are such functions again.

    f(shared, rows) -> (sums, rows)     its outputs are summed, or laid end to end
    its vjp:  (shared + cotangents of sums, rows + cotangents of rows)
              -> (gradients of shared: sums, gradients of rows: rows)
    its jvp:  (shared + tangents, rows + tangents) -> (tangents of sums, tangents of rows)
    its vmap: one more dimension, before all others

So nothing above one piece is ever recorded, under any nest of transforms, at any order. A function
is run where it is called, on inputs that no transform follows, and its outputs are attached to its
inputs afterwards: so it sees the levels, modes and random numbers of its caller, and where an
output is followed all the same, something captured is.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.forward_ad import make_dual, unpack_dual

from .._base import sharded_rows
from .._base.torch_internals import autograd, functorch, kernels, modes
from . import batches, exchange, weights
from .gathered import OWN, WHOLE, Cut, Gathered, small_sums


class Form(NamedTuple):
    """How operands are cut into pieces, and how outputs are put together."""

    operands: tuple[Cut, ...]
    outs: tuple[Cut, ...]
    groups: tuple[int, ...]  # for each output, which of ``keeps`` says whether a piece counts


Keeps = tuple[Tensor, ...]  # for each group but 0, whether this piece counts in it
Outs = tuple[list[Tensor], Keeps]
PieceCall = Callable[[int, Sequence[Tensor]], Outs]
Tensors = Sequence[Tensor]
Sums = Sequence[Gathered]
Piece = Callable[[Tensors], tuple[Tensors, Keeps]]  # some outputs of a piece of given operands
Pulled = tuple[list[Tensor | None], Keeps]


class Pieces:
    """A function of one piece, by its number and operands. No tuple: transforms would copy it."""

    def __init__(
        self,
        call: PieceCall,
        form: Form,
        sizes: Sequence[int],
        learned: Callable[[], Form] | None = None,
        composes: bool = False,
    ) -> None:
        self.call, self.form, self.sizes = call, form, sizes
        self.learned = learned  # tells the form, once a piece has been called
        self.composes = composes  # whether only torch.func sees into it: see history.py
        self.gathered: list[Gathered] = []  # what has come out so far
        self.reached: set[int] = set()  # the operands that have had a gradient


def run(f: Pieces, operands: Sequence[Tensor], *, recorded: bool = False) -> list[Tensor]:
    """The loop itself. Where transforms are to see all of it (``recorded``), it writes nothing."""
    recorded = recorded or modes.traced()
    columns = [_cut(f, x, how) for x, how in zip(operands, f.form.operands, strict=True)]
    f.gathered = _gathered(f, recorded)
    sums: list[Tensor] | None = None
    with batches.cutting(len(f.sizes)):
        for p in range(len(f.sizes)):
            outs, _ = f.call(p, [column[p] for column in columns])
            if sums is not None:
                kernels.foreach_add_(sums, outs)
                del outs  # else they would be held while the next piece is computed
                continue
            if p == 0 and f.learned is not None:
                f.form = f.learned()
                f.gathered = _gathered(f, recorded)
            for so_far in f.gathered:
                so_far.take(outs.pop(0))  # each is freed before the next is copied
            sums = small_sums(f.gathered) if p == 0 else None
    gathered, f.gathered = f.gathered, []
    return [so_far.end() for so_far in gathered]


def _gathered(f: Pieces, recorded: bool) -> list[Gathered]:
    return [Gathered(f.sizes, how, recorded) for how in f.form.outs]


def _cut(f: Pieces, x: Tensor, how: Cut) -> Sequence[Tensor]:
    if isinstance(how, str):
        return [x] * len(f.sizes)
    if how.over != sharded_rows.NOWHERE and not how.each and len(f.sizes) > 1:
        return sharded_rows.split_rows(x, f.sizes, how.over, how.dim)
    return x.split(1 if how.each else list(f.sizes), how.dim)


# The derivatives -------------------------------------------------------------------------


def vjp(
    f: Pieces, wrt: Sequence[int], used: Sequence[int], backward: exchange.Backward | None
) -> Pieces:
    """The gradients of some operands, from all operands and the cotangents of some outputs.

    Each group of outputs has gradients of its own. ``backward`` is the pass that pulls.
    """
    count = len(f.form.operands)
    groups = sorted({f.form.groups[i] for i in used})

    def outs_of(p: int, group: int, operands: Tensors) -> tuple[Tensors, Keeps]:
        with exchange.pulled_by(backward):
            outs, keeps = f.call(p, operands)
        return tuple(outs[i] for i in used if f.form.groups[i] == group), keeps

    def call(p: int, operands: Sequence[Tensor]) -> Outs:
        given, cotangents = operands[:count], operands[count:]
        found: list[Tensor] = []
        keeps: Keeps = ()
        for group in groups:
            pairs = zip(used, cotangents, strict=True)
            cs = [c for i, c in pairs if f.form.groups[i] == group]
            piece = partial(outs_of, p, group)
            if functorch.transform_level() is None and not f.composes:
                sums = pieces.gathered[len(found) : len(found) + len(wrt)]
                grads, keeps = _pulled_by_autograd(piece, given, cuts, wrt, cs, group, sums)
            else:
                grads, keeps = _pulled_by_transform(piece, given, wrt, cs, group)
            pieces.reached.update(i for i, g in zip(wrt, grads, strict=True) if g is not None)
            pairs = zip(wrt, grads, strict=True)
            found += [weights.nothing_like(given[i]) if g is None else g for i, g in pairs]
        return found, keeps

    cuts, outs = f.form.operands, f.form.outs
    cotangents: list[Cut] = [WHOLE if outs[i] == "last" else outs[i] for i in used]
    grads: list[Cut] = [WHOLE if cuts[i] == OWN else cuts[i] for i in wrt]
    form = Form(
        operands=(*cuts, *cotangents),
        outs=tuple(grads * len(groups)),
        groups=tuple(group for group in groups for _ in wrt),
    )
    pieces = Pieces(call, form, f.sizes, composes=f.composes)
    return pieces


def selected(x: Tensor, keeps: Keeps, group: int) -> Tensor:
    """A term of a sum, or zero where its piece does not count. Never multiplied: NaN * 0 is NaN."""
    if not group:
        return x
    if x.is_sparse:
        x = x.coalesce()
        values = selected(x.values(), keeps, group)
        return torch.sparse_coo_tensor(
            x.indices(), values, x.shape, is_coalesced=True, check_invariants=False
        )
    keep = keeps[group - 1]
    keep = keep.reshape([*keep.shape, *[1] * (x.dim() - keep.dim())])  # vmaps lead
    return torch.where(keep.to(x.device), x, 0.0)


def _pulled_by_transform(
    f: Piece, given: Tensors, wrt: Sequence[int], cotangents: Tensors, group: int
) -> Pulled:
    """The gradients of some operands of a piece, of one group of outputs."""
    of, counts = _of_some(f, given, wrt), len(cotangents)

    def outs_and_keeps(xs: list[Tensor]) -> list[Tensor]:
        outs, keeps = of(*xs)
        return [*outs, *keeps]

    xs, outs, values = functorch.on_a_level(outs_and_keeps, [given[i] for i in wrt])
    grads = _pulled(outs[:counts], xs, cotangents, False, torch.is_grad_enabled())
    keeps = tuple(values[counts:])
    return [g if g is None else selected(g, keeps, group) for g in grads], keeps


def _pulled(
    outs: Tensors, xs: Tensors, cotangents: Tensors, again: bool, record: bool
) -> Sequence[Any]:
    pairs = [(x, c) for x, c in zip(outs, cotangents, strict=True) if x.requires_grad]
    if not pairs:
        return [None] * len(xs)
    followed, given = zip(*pairs, strict=True)
    return autograd.gradients_of(followed, xs, given, again, record)


def _pulled_by_autograd(
    f: Piece,
    given: Tensors,
    cuts: Sequence[Cut],
    wrt: Sequence[int],
    cotangents: Tensors,
    group: int,
    sums: Sums,
) -> Pulled:
    """The same outside of transforms: with the formulas, hence the bits, of ``.backward()``.

    Large gradients are added to their sums as they come: no two of a piece exist at once.
    """
    record = torch.is_grad_enabled() and any(x.requires_grad for x in (*given, *cotangents))
    with torch.enable_grad():
        inputs = _recorded_anew(given, cuts, wrt, record)
        outs, keeps = f(inputs)
    xs = [inputs[i] for i in wrt]
    adding: list[int] = []
    if not record:  # what is recorded is not written to, and what is captured is not large
        adding = [n for n, so_far in enumerate(sums) if so_far.sums and weights.is_large(xs[n])]
        adding = [n for n in adding if cuts[wrt[n]] != OWN]

    def add(so_far: Gathered, g: Tensor) -> Tensor:
        so_far.add(selected(g, keeps, group))
        so_far.ahead = True
        return weights.nothing_like(g)

    for n in adding:
        xs[n].register_hook(partial(add, sums[n]))
    pairs = enumerate(_pulled(outs, xs, cotangents, record, record))
    return [g if g is None or n in adding else selected(g, keeps, group) for n, g in pairs], keeps


def _recorded_anew(
    given: Tensors, cuts: Sequence[Cut], wrt: Sequence[int], record: bool
) -> list[Tensor]:
    """The operands of a piece with a graph of its own; what is captured is used as it is."""
    anew = [x.view_as(x) for x in given] if record else autograd.without_history(given)
    inputs = [x if how == OWN else y for x, y, how in zip(given, anew, cuts, strict=True)]
    for i in wrt:
        if not (inputs[i].requires_grad or cuts[i] == OWN):  # nobody else's
            inputs[i].requires_grad_()
    return inputs


def jvp(f: Pieces, moved: Sequence[int]) -> Pieces:
    """The tangents of all outputs, from all operands and the tangents of some of them."""
    count = len(f.form.operands)

    def call(p: int, operands: Sequence[Tensor]) -> Outs:
        given, tangents = operands[:count], operands[count:]
        of = _of_some(partial(f.call, p), given, moved)
        with functorch.forward_ad():  # torch turns it off in the rules of Functions
            # The level of the call may be over.
            if functorch.transform_level() is not None or not functorch.forward_ad_active():
                primals = tuple(given[i] for i in moved)
                _, found, keeps = torch.func.jvp(of, primals, tuple(tangents), has_aux=True)  # pyright: ignore
            else:  # the dual level of torch.autograd: there is only one
                duals = [make_dual(given[i], t) for i, t in zip(moved, tangents, strict=True)]
                outs, keeps = of(*duals)
                pairs = map(unpack_dual, outs)
                found = [torch.zeros_like(x) if t is None else t for x, t in pairs]
                keeps = tuple(unpack_dual(x).primal for x in keeps)
        return [selected(x, keeps, at) for x, at in zip(found, f.form.groups, strict=True)], keeps

    operands = (*f.form.operands, *(f.form.operands[i] for i in moved))
    form = f.form._replace(operands=operands)
    return Pieces(call, form, f.sizes, composes=f.composes)


def _of_some(f: Piece, given: Tensors, at: Sequence[int]) -> Callable[..., tuple[Any, Keeps]]:
    """A piece as a function of some of its operands."""

    def of(*some: Tensor) -> tuple[tuple[Tensor, ...], Keeps]:
        operands = list(given)
        for i, x in zip(at, some, strict=True):
            operands[i] = x
        outs, keeps = f(operands)
        return tuple(outs), keeps

    return of


def mapped(
    f: Pieces, dims: Sequence[int | None], out_dims: Sequence[int | None], info: Any
) -> Pieces:
    """The function of operands of which a vmap maps some along dim 0."""
    size = torch.empty(info.batch_size)  # vmap wants at least one operand that is mapped

    def call(p: int, operands: Sequence[Tensor]) -> Outs:
        alike: dict[int, Tensor] = {}  # for all that are mapped

        def of(_: Tensor, *operands: Tensor) -> tuple[list[Tensor], Keeps]:
            outs, keeps = f.call(p, operands)
            level = functorch.transform_level()
            for i, (x, to) in enumerate(zip(outs, out_dims, strict=True)):
                if to is None and level not in functorch.mapped_levels(x):
                    alike[i] = x
            return [x for i, x in enumerate(outs) if i not in alike], keeps

        vmapped: Any = torch.func.vmap(of, (0, *dims), 0, info.randomness)
        outs, keeps = vmapped(size, *operands)
        rest = iter(outs)
        outs = [alike[i] if i in alike else next(rest) for i in range(len(out_dims))]
        # What was not mapped may be here, with one value: a zero is mapped as what it is like.
        one = [i not in alike and to is None for i, to in enumerate(out_dims)]
        return [x[0] if first else x for x, first in zip(outs, one, strict=True)], keeps

    form = f.form._replace(
        operands=tuple(map(_behind, f.form.operands, dims)),
        outs=tuple(map(_behind, f.form.outs, out_dims)),
    )
    return Pieces(call, form, f.sizes, composes=f.composes)


def _behind(how: Cut, dim: int | None) -> Cut:
    return how if isinstance(how, str) or dim is None else how._replace(dim=how.dim + 1)
