"""The gradient of one microbatch, added to sums while the backward pass runs.

    total, pull = forward(loss, leaves)
    sums += pull(weight)

with one refinement that does not change a bit of it: a large leaf's gradient is added by a hook
as soon as it exists and then dropped, so that a second gradient tree never exists.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from .._base import Spoiled, check_choice, finite, known, mark, norm, refuse_sharded
from .engines import PASSES, Engine, Hook, Loss, Wrt
from .loss import Reduction
from .microbatch import Arguments, call_microbatched
from .outputs import Counted, Whole
from .weights import (
    Microbatch,
    add_gradient_,
    add_gradients_,
    enter,
    judged,
    nothing_like,
    total_finite,
    weigh,
    with_gradient_added,
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


def check_sharded(leaves: Sequence[Tensor], rule: Rule) -> None:
    """Refuse for DTensors what needs the gradient of each microbatch as a whole, at once."""
    if rule.nonfinite != "propagate":
        refuse_sharded(
            leaves,
            "params",
            f"nonfinite={rule.nonfinite!r} would have to communicate the gradient of every "
            "microbatch. Use 'propagate': a step whose gradient is not finite is not applied, on "
            "any rank.",
        )
    if rule.squares:
        refuse_sharded(
            leaves,
            "params",
            "squares=True (noise=True of a step) would have to communicate the gradient of every "
            "microbatch.",
        )


def add_microbatch(
    loss: Loss,
    wrt: Wrt,
    sums: list[Tensor],
    rows: int | None,
    rule: Rule,
    *,
    before: list[Tensor] | None = None,
    label: Callable[[int | None], str] | None = None,
) -> tuple[list[Tensor], Microbatch]:
    """Add the gradient of one microbatch to ``sums``.

    Args:
        loss: The loss of the microbatch as a function of the leaves.
        wrt: What to differentiate with respect to.
        sums: One sum per leaf. They are changed in place, except under a transform or a compiler,
            where every sum is a new tensor.
        rows: The rows of the microbatch, if a tensor tells.
        rule: How gradients are taken and summed.
        before: The sums as they were, if the caller still holds them: then ``"skip"`` can take
            an addition back, and needs no gradient tree of its own.
        label: Names the loss (None) or the gradient of a leaf in an error.

    Returns:
        The new sums, and the entry of the microbatch.
    """
    if wrt.records is None:
        return _collected(loss, wrt, sums, rows, rule, in_place=False)
    with torch.no_grad():
        if rule.nonfinite == "skip" and before is None:
            return _collected(loss, wrt, sums, rows, rule, in_place=True)
        return _streamed(loss, wrt, sums, rows, rule, before, label)


def _streamed(
    loss: Loss,
    wrt: Wrt,
    sums: list[Tensor],
    rows: int | None,
    rule: Rule,
    before: list[Tensor] | None,
    label: Callable[[int | None], str] | None,
) -> tuple[list[Tensor], Microbatch]:
    """Add each gradient in place as it comes."""
    watched = rule.nonfinite != "propagate"
    flags: dict[int, Tensor] = {}
    norms: dict[int, Tensor] = {}
    begun = False

    def hook_for(i: int) -> Hook:
        def hook(grad: Tensor) -> Tensor:
            nonlocal begun
            begun = True
            if watched:
                flags[i] = finite(grad)
            if rule.squares:
                norms[i] = norm(grad)
            add_gradient_(sums[i], grad, how)
            return nothing_like(grad)

        return hook

    large = {i: hook_for(i) for i in wrt.large}
    seen, shape, pull, push = PASSES[rule.engine](loss, wrt, large, rule.has_aux)
    entry = enter(seen, shape, rows, rule.reduction, rule.squares)
    if rule.nonfinite == "raise" and not total_finite(entry):
        raise FloatingPointError(_not_finite(label, [None]))
    weighing = weigh(seen, rows, rule.reduction, wrt.unit, wrt.cotangents, wrt.scale)
    if weighing is None:
        return sums, entry
    if wrt.straight and push is not None and weighing.keep is None:
        return push(weighing.cotangent, sums), entry
    how = weighing
    try:
        grads = pull(how.cotangent)
        small = {i: g for i, g in enumerate(grads) if g is not None and i not in large}
        begun = True
        add_gradients_([sums[i] for i in small], list(small.values()), how)
    except BaseException:
        if begun and before is None:
            mark(sums, Spoiled)
        raise
    if rule.squares:
        norms |= {i: norm(grad) for i, grad in small.items()}
        entry = with_squares(entry, [norms.get(i) for i in range(len(sums))], how, wrt.unit)
    if not watched:
        return sums, entry
    flags |= {i: finite(grad) for i, grad in small.items()}
    entry = judged(entry, flags.values(), how.keep)
    ok = entry.finite
    assert ok is not None
    if rule.nonfinite == "raise":
        if not ok:
            if before is None:
                mark(sums, Spoiled)
            where = [i for i, flag in sorted(flags.items()) if not flag]
            raise FloatingPointError(_not_finite(label, where))
    elif before is not None:
        entry = without_skipped(entry, ok)
        if not known(ok):
            for new, old in zip(sums, before, strict=True):
                torch.where(ok.to(new.device), new, old, out=new)
    return sums, entry


def _collected(
    loss: Loss, wrt: Wrt, sums: list[Tensor], rows: int | None, rule: Rule, *, in_place: bool
) -> tuple[list[Tensor], Microbatch]:
    """Take all gradients first and add them afterwards, when it is known whether they count.

    Under a transform a microbatch is a function of one piece, of which nothing is kept.
    """
    if rule.nonfinite == "raise" and not in_place:
        refuse_to_look()

    def gradients(leaves: list[Tensor]) -> Counted:
        engine = PASSES[rule.engine]
        seen, shape, pull, _ = engine(loss, wrt._replace(leaves=leaves), {}, rule.has_aux)
        entry = enter(seen, shape, rows, rule.reduction, rule.squares)
        shared = wrt.cotangents if in_place else None  # made on one level, and of use on no other
        weighing = weigh(seen, rows, rule.reduction, wrt.unit, shared, wrt.scale)
        if weighing is None:
            return Counted(([], entry, None), None)
        grads = list(pull(weighing.cotangent))
        if rule.squares:
            norms = [None if g is None else norm(g) for g in grads]
            entry = with_squares(entry, norms, weighing, wrt.unit)
        if rule.nonfinite == "skip":
            entry = judged(entry, [finite(g) for g in grads if g is not None], weighing.keep)
            ok = entry.finite
            assert ok is not None
            weighing = weighing._replace(keep=ok if weighing.keep is None else ok & weighing.keep)
            entry = without_skipped(entry, ok)
        return Counted((grads, entry, weighing), weighing.keep)

    if in_place:
        grads, entry, weighing = gradients(wrt.leaves).tree
        for i in range(len(grads)):
            if (grad := grads[i]) is not None:
                add_gradient_(sums[i], grad, weighing)
            grads[i] = None
        return sums, entry

    kinds = [(x.dtype, x.device) for x in sums]

    def terms(leaves: list[Tensor]) -> Counted:
        (grads, entry, weighing), keep = gradients(leaves)
        zeros = [torch.zeros((), dtype=dtype, device=device) for dtype, device in kinds]
        pairs = zip(zeros, grads, strict=False)
        return Counted(
            ([g if g is None else with_gradient_added(z, g, weighing) for z, g in pairs], entry),
            keep,
        )

    added, entry = call_microbatched(terms, Arguments.of((wrt.leaves,), {}), Whole(), None)
    if not added:
        return [x.clone() for x in sums], entry
    return [x if term is None else x + term for x, term in zip(sums, added, strict=True)], entry


def _not_finite(label: Callable[[int | None], str] | None, where: Sequence[int | None]) -> str:
    return not_finite([label(i) for i in where] if label else ["a microbatch"])


def refuse_to_look() -> None:
    """Raise what ``nonfinite="raise"`` says under a transform, where nobody can look."""
    raise RuntimeError(
        "nonfinite='raise' has to look at the numbers, which cannot be done under a torch.func "
        "transform or torch.compile; use 'skip' or 'propagate' there, and look afterwards."
    )


def not_finite(what: list[str]) -> str:
    """What ``nonfinite="raise"`` says."""
    return (
        f"{', '.join(what)}: inf or NaN, and nonfinite='raise' was asked for. Likely causes: a "
        "learning rate too high, fp16 overflow without a loss scale, log or division at zero, a "
        "mean over a microbatch in which all is masked (return Weighted instead)."
    )
