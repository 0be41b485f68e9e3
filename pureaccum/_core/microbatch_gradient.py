"""The gradient of one microbatch, added to sums while the backward pass runs.

    total, pull = forward(loss, leaves)
    sums += pull(weight)

with one refinement that does not change a bit of it: a large leaf's gradient is added by a hook
as soon as it exists and then dropped, so that a second gradient tree never exists.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from .._base.checks import check_choice
from .._base.dtensors import norms_of_sums, refuse_sharded
from .._base.states import Spoiled, mark
from .._base.torch_internals import gradients, gradients_into, owns_its_memory
from .._base.trees import accumulation_dtype, finite, known, norm, numbers_in, zeros_for_sums
from .engines import Engine, Hook, Loss, Wrt, alone, hooked_gradients
from .exchange import Backward
from .loss import Read, Reduction
from .microbatch import Arguments, call_microbatched
from .outputs import Counted, Whole
from .weights import (
    Microbatch,
    Weighing,
    add_gradient_,
    add_gradients_,
    as_it_comes,
    enter,
    judged,
    nothing_like,
    term_of,
    total_finite,
    weigh,
    with_squares,
    without_skipped,
)


Nonfinite = Literal["propagate", "skip", "raise"]


class Rule(NamedTuple):
    """How gradients are taken and summed, alike for all microbatches."""

    has_aux: bool
    reduction: Reduction
    nonfinite: Nonfinite
    engine: Engine
    squares: bool = False  # whether the squared norms of gradients are summed: see weights.py


def check_rule(rule: Rule) -> Rule:
    """The rule itself, or an error that says which words it may hold."""
    check_choice(rule.reduction, get_args(Reduction), "reduction")
    check_choice(rule.nonfinite, get_args(Nonfinite), "nonfinite")
    check_choice(rule.engine, get_args(Engine), "engine")
    return rule


def add_microbatch(
    loss: Loss,
    args: Sequence[Any],
    wrt: Wrt,
    sums: list[Tensor],
    rows: int | None,
    rule: Rule,
    *,
    before: list[Tensor] | None = None,
    label: Callable[[int | None], str] | None = None,
) -> tuple[list[Tensor], Microbatch]:
    """Add the gradient of one microbatch to ``sums``, in the grad mode of ``wrt``.

    Args:
        loss: The loss as a function of the leaves and of what goes with a microbatch.
        args: What goes with this one.
        wrt: What to differentiate with respect to.
        sums: One sum per leaf, or none at all: then they begin with this microbatch. They are
            changed in place, except under a transform, a compiler or a mode that is not ours,
            where every sum is a new tensor.
        rows: The rows of the microbatch, if a tensor tells.
        rule: How gradients are taken and summed.
        before: The sums as they were, if the caller still holds them: then ``"skip"`` can take
            an addition back, and needs no gradient tree of its own.
        label: Names the loss (None) or the gradient of a leaf in an error.

    Returns:
        The new sums, and the entry of the microbatch.
    """
    if wrt.weighings is None:
        return _collected(loss, args, wrt, sums, rows, rule, in_place=False)
    watched, squares = rule.nonfinite != "propagate", rule.squares
    together = wrt.layouts is not None and squares  # of ranks, which add up what they have
    if together or (rule.nonfinite == "skip" and before is None):
        return _collected(loss, args, wrt, sums, rows, rule, in_place=True, label=label)
    first = len(sums) == 0
    flags: dict[int, Tensor] = {}
    norms: dict[int, Tensor] = {}
    begun = False
    how: Weighing | None = None

    def hook(i: int, grad: Tensor) -> Tensor:
        nonlocal begun
        if how is None:  # the loss itself takes a gradient
            refuse_sharded(wrt.leaves, "params", "Take a gradient in a loss by torch.func.grad.")
            return grad
        begun = True
        if watched:
            flags[i] = finite(grad)
        if squares:
            norms[i] = norm(grad)
        if first:
            _fill(sums, wrt, [i])
        add_gradient_(sums[i], grad, how)
        return nothing_like(grad)

    large: dict[int, Hook] = {i: partial(hook, i) for i in wrt.large} if wrt.large else {}
    seen, shape, pull, backward = wrt.forward(loss, args, wrt, large, rule.has_aux)
    total = seen.total
    seen = alone(seen, wrt)
    entry = enter(seen, shape, rows, rule.reduction, squares)
    if rule.nonfinite == "raise" and not total_finite(entry):
        raise FloatingPointError(_not_finite(label, [None]))
    made = wrt.weighings
    how = made.get((rows, total.dtype)) if made and not shape.weighted else None
    how = how or weigh(seen, rows, rule.reduction, wrt.unit, made, wrt.scale)
    if backward is not None and backward.group is not None:
        how = _on_ranks(backward, how, seen, rule.reduction, wrt.unit, wrt.rows)
        entry = entry._replace(reached=True)
    if how is None:
        return sums, entry
    alike = pull is None and (first or wrt.adding) and not (watched or squares)
    alike = alike and _as_it_comes(wrt, sums, how)
    if first:
        sums = [NONE_YET] * len(wrt.leaves)
    try:
        grads: Sequence[Tensor | None] = ()
        if pull is not None:
            grads = pull(how.cotangent)
        elif not total.requires_grad:
            pass
        elif alike:
            begun = True
            into = {} if first else {i: sums[i] for i in wrt.adding}
            grads = gradients_into(into, total, wrt.leaves, how.cotangent)
        elif large:
            grads = hooked_gradients(total, wrt.leaves, how.cotangent, large)
        else:
            grads = gradients(total, wrt.leaves, how.cotangent)
        begun = True
        if alike and first:
            return _first_sums(wrt, grads), entry
        if first:
            _fill(sums, wrt, range(len(sums)))
        if large or NoneType in map(type, grads):
            small = {i: g for i, g in enumerate(grads) if g is not None and i not in large}
            add_gradients_([sums[i] for i in small], [*small.values()], how)
        else:
            all_of_them: list[Any] = [*grads]
            small = dict(enumerate(all_of_them)) if watched or squares else {}
            if all_of_them:
                add_gradients_(sums, all_of_them, how)
        if squares:
            norms |= {i: norm(grad) for i, grad in small.items()}
            entry = with_squares(entry, [norms.get(i) for i in range(len(sums))], how, wrt.unit)
        if not watched:
            return sums, entry
        flags |= {i: finite(grad) for i, grad in small.items()}
        entry = judged(entry, flags.values(), how.keep, wrt.layouts)
        ok = entry.finite
        assert ok is not None
        if rule.nonfinite == "raise":
            if not ok:
                where = [i for i, flag in sorted(flags.items()) if not flag]
                raise FloatingPointError(_not_finite(label, where))
        elif before is not None:
            entry = without_skipped(entry, ok)
            if not known(ok):
                for new, old in zip(sums, before, strict=True):
                    torch.where(ok.to(new.device), new, old, out=new)
    except BaseException:
        if begun and before is None and not first:
            mark(sums, Spoiled)
        raise
    return sums, entry


def _as_it_comes(wrt: Wrt, sums: list[Tensor], how: Weighing) -> bool:
    """Whether what is added to the sums is the gradient as it comes, so that autograd can add."""
    if not as_it_comes(how) or wrt.detach is not Tensor.detach:
        return False
    if len(sums) == 0:
        dtypes = {x.dtype for x in wrt.leaves}
        return all(accumulation_dtype(dtype, wrt.at_least) == dtype for dtype in dtypes)
    return [wrt.leaves[i].dtype for i in wrt.adding] == [sums[i].dtype for i in wrt.adding]


def _fill(sums: list[Tensor], wrt: Wrt, which: Iterable[int]) -> None:
    """Zeros for some sums, where there are none yet."""
    which = [i for i in which if sums[i] is NONE_YET]
    zeros = zeros_for_sums([wrt.leaves[i] for i in which], wrt.at_least) if which else []
    for i, zero in zip(which, zeros, strict=True):
        sums[i] = zero


NONE_YET = torch.empty(0, device="cpu")


def _first_sums(wrt: Wrt, grads: Sequence[Tensor | None]) -> list[Tensor]:
    """Sums that begin with the gradients of a microbatch, whose memory becomes theirs.

    Unless it is also that of something else: a gradient may be a view of what the loss was given.
    """
    sums: list[Tensor] = []
    for grad, leaf in zip(grads or [None] * len(wrt.leaves), wrt.leaves, strict=True):
        if grad is None or not owns_its_memory(grad):
            zero = torch.zeros_like(leaf, requires_grad=False)
            grad = zero if grad is None else zero.add_(grad)
        sums.append(grad)
    return sums


def _collected(
    loss: Loss,
    args: Sequence[Any],
    wrt: Wrt,
    sums: list[Tensor],
    rows: int | None,
    rule: Rule,
    *,
    in_place: bool,
    label: Callable[[int | None], str] | None = None,
) -> tuple[list[Tensor], Microbatch]:
    """Take all gradients first and add them afterwards, when it is known whether they count.

    Under a transform a microbatch is a function of one piece, of which nothing is kept; a batch
    that is taken whole is left to the transform.
    """
    if rule.nonfinite == "raise" and torch.compiler.is_dynamo_compiling():
        refuse_to_look()

    def pulled(leaves: list[Tensor], args: Sequence[Any]) -> Counted:
        prepared = wrt._replace(leaves=leaves)
        seen, shape, pull, backward = wrt.forward(loss, args, prepared, {}, rule.has_aux)
        total = seen.total
        seen = alone(seen, wrt)
        entry = enter(seen, shape, rows, rule.reduction, rule.squares)
        weighing = weigh(seen, rows, rule.reduction, wrt.unit, wrt.weighings, wrt.scale)
        if backward is not None and backward.group is not None:
            weighing = _on_ranks(backward, weighing, seen, rule.reduction, wrt.unit, wrt.rows)
            entry = entry._replace(reached=True)
        if weighing is None:
            return Counted(([], entry, None), None)
        if pull is not None:
            grads = list(pull(weighing.cotangent))
        elif total.requires_grad:
            grads = list(gradients(total, leaves, weighing.cotangent))
        else:
            grads = [None] * len(leaves)
        if rule.squares:
            if wrt.layouts is None:
                norms = [None if g is None else norm(g) for g in grads]
            else:
                norms: list[Any] = [*norms_of_sums(grads, wrt.leaves)]
            entry = with_squares(entry, norms, weighing, wrt.unit)
        if rule.nonfinite != "propagate":
            flags = {i: finite(g) for i, g in enumerate(grads) if g is not None}
            entry = judged(entry, flags.values(), weighing.keep, wrt.layouts)
            ok = entry.finite
            assert ok is not None
            told = numbers_in(ok.cpu()) if rule.nonfinite == "raise" else [True]
            if told is None:
                refuse_to_look()
            elif not all(told):
                each = [(i, numbers_in(x.cpu())) for i, x in flags.items()]
                where = [i for i, its in each if its and not all(its)]
                raise FloatingPointError(_not_finite(label, where))
            weighing = weighing._replace(keep=ok if weighing.keep is None else ok & weighing.keep)
            entry = without_skipped(entry, ok)
        return Counted((grads, entry, weighing), weighing.keep)

    if in_place:
        grads, entry, weighing = pulled(wrt.leaves, args).tree
        if len(sums) == 0:
            sums = zeros_for_sums(wrt.leaves, wrt.at_least)
        try:
            for i in range(len(grads)):
                if (grad := grads[i]) is not None:
                    add_gradient_(sums[i], grad, weighing)
                grads[i] = None
        except BaseException:
            mark(sums, Spoiled)
            raise
        return sums, entry

    dtypes = [x.dtype for x in sums]
    if len(sums) == 0:
        dtypes = [accumulation_dtype(x.dtype, wrt.at_least) for x in wrt.leaves]

    def terms(leaves: list[Tensor], args: Sequence[Any]) -> Counted:
        (grads, entry, weighing), keep = pulled(leaves, args)
        pairs = zip(grads, dtypes, strict=False)  # no gradients at all where nothing is added
        terms = [g if g is None else term_of(g, dtype, weighing) for g, dtype in pairs]
        return Counted((terms, entry), keep)

    if wrt.whole or wrt.records is not None:
        added, entry = terms(wrt.leaves, args).tree
    else:
        given = Arguments.of((wrt.leaves, args), {})
        added, entry = call_microbatched(terms, given, Whole(), None)
    if not added:
        return [x.clone() for x in sums], entry
    if len(sums) == 0:
        zeros = zeros_for_sums(wrt.leaves, wrt.at_least) if NoneType in map(type, added) else added
        return [zero if g is None else g for g, zero in zip(added, zeros, strict=True)], entry
    return [x if term is None else x + term for x, term in zip(sums, added, strict=True)], entry


def _not_finite(label: Callable[[int | None], str] | None, where: Sequence[int | None]) -> str:
    names = [label(i) for i in where] if label else ["a microbatch"]
    return not_finite(names or ["the gradient on another rank"])


def refuse_to_look() -> None:
    """Raise what ``nonfinite="raise"`` says where nobody can look."""
    raise RuntimeError(
        "nonfinite='raise' has to look at the numbers, which cannot be done inside of "
        "torch.compile or make_fx; use 'skip' or 'propagate' there, and look afterwards."
    )


def not_finite(what: list[str]) -> str:
    """What ``nonfinite="raise"`` says."""
    return (
        f"{', '.join(what)}: inf or NaN, and nonfinite='raise' was asked for. Likely causes: a "
        "learning rate too high, fp16 overflow without a loss scale, log or division at zero, a "
        "mean over a microbatch in which all is masked (return Weighted instead)."
    )


def _on_ranks(
    backward: Backward,
    how: Weighing | None,
    seen: Read,
    reduction: Reduction,
    unit: float | None,
    rows: float | None,
) -> Weighing | None:
    """How a microbatch enters the sums, and a note of that for what reaches other ranks.

    There, one that does not count is not left out: it is of no weight to the total of this rank,
    and what other ranks made of it may be of some to theirs.

    Args:
        backward: Its backward pass.
        how: How its gradient is pulled.
        seen: What the loss returned.
        reduction: What a scalar loss is of its rows.
        unit: What the sums are still to be multiplied by.
        rows: Those of the whole batch, 1 where it is not cut, by which this rank divides what it
            summed; None where it does not divide, but adds its sums to those of other ranks.
    """
    if how is None:
        how = Weighing(torch.zeros_like(seen.total), 1.0, None)
    elif how.keep is not None:
        how = how._replace(cotangent=torch.where(how.keep, how.cotangent, 0.0), keep=None)
    times = how.factor * (unit or 1.0)
    if rows is not None and isinstance(seen.weight, Tensor):
        if rows != 1.0:
            return how  # the weight of the whole batch is not known yet
        times = times / seen.weight.detach()
    elif rows is not None and reduction == "mean":
        times = times / rows
    backward.times = times
    return how
