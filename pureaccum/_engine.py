"""The gradient of one microbatch, added to sums while the backward pass runs.

    total, pull = vjp(loss, leaves)
    sums += pull(weight)

with two refinements that do not change a bit of it. A large leaf's gradient is added by a hook
as soon as it exists and then dropped, so that no second gradient tree ever does. And a sum over
2,000 tokens overflows in fp16 where their mean does not, so the cotangent is the weight divided
by a power of two that goes back in where float32 sums take the gradient up.

``"func"`` differentiates with torch.func and so composes with every transform. ``"autograd"``
is the same pure function by ``torch.autograd.grad``, for what torch.func refuses: custom
Functions without ``setup_context``, and checkpointed modules.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ._donation import Spoiled, mark
from ._held import Known, holding, remembering
from ._inputs import check_choice
from ._loss import Read, Reduction, Shape, read
from ._sums import add_, add_all_, added_to, nothing_like
from ._torch import transform_active
from ._tree import finite
from ._weights import Microbatch, judged, kept, known_true, weigh


Nonfinite = Literal["propagate", "skip", "raise"]
Engine = Literal["func", "autograd"]

LARGE = 2**20  # bytes; smaller gradients are added in one foreach call, which is faster


class Rule(NamedTuple):
    """How gradients are taken and summed: what stays the same for all microbatches."""

    has_aux: bool
    reduction: Reduction
    nonfinite: Nonfinite
    engine: Engine


def check_rule(rule: Rule) -> Rule:
    """The rule itself, or an error that says which words it may hold."""
    check_choice(rule.reduction, get_args(Reduction), "reduction")
    check_choice(rule.nonfinite, get_args(Nonfinite), "nonfinite")
    check_choice(rule.engine, get_args(Engine), "engine")
    return rule


class Wrt(NamedTuple):
    """What to differentiate with respect to, prepared once for all microbatches of a window."""

    leaves: list[Tensor]
    large: list[int]  # the leaves whose gradients are added one by one
    known: Known
    records: bool | None  # the grad mode of the forward pass; None under a transform: the caller's


def prepare(leaves: list[Tensor], engine: Engine) -> Wrt:
    """Prepare leaves for an engine."""
    large = [i for i, leaf in enumerate(leaves) if leaf.nbytes >= LARGE]
    if transform_active():
        if engine == "func":
            return Wrt(leaves, [], {}, None)
        raise RuntimeError(
            "engine='autograd' cannot run under a torch.func transform or torch.compile; "
            "engine='func', the default, can."
        )
    leaves = [leaf.detach() for leaf in leaves]
    if engine == "autograd":
        return Wrt([leaf.requires_grad_() for leaf in leaves], large, {}, True)
    # Detached leaves record nothing below torch.func's own level, but tensors that the loss
    # captured may. So that nothing does, no_grad; except on a CPU, where the kernel of LSTM asks
    # for the grad mode down there and without it saves nothing for its backward pass.
    return Wrt(leaves, large, {}, leaves[0].device.type == "cpu")


Loss = Callable[[list[Tensor]], Any]
Hook = Callable[[Tensor], Tensor]
Pull = Callable[[Tensor], Sequence[Tensor | None]]


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
        sums: One sum a leaf. They are changed in place, except under a transform or a compiler,
            where every sum is a new tensor.
        rows: Rows in the microbatch, where a tensor tells.
        rule: What stays the same for all microbatches.
        before: The sums as they were, where the caller still holds them: then ``"skip"`` can
            take an addition back, and needs no gradient tree of its own.
        label: Names the loss (None) or the gradient of a leaf in an error.

    Returns:
        The new sums, and what the microbatch came to.
    """
    if transform_active():
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
    """In place, each gradient as it comes."""
    watched = rule.nonfinite != "propagate"
    flags: dict[int, Tensor] = {}
    begun = False

    def hook_for(i: int) -> Hook:
        def hook(grad: Tensor) -> Tensor:
            nonlocal begun
            begun = True
            if watched:
                flags[i] = finite(grad)
            add_(sums[i], grad, how)
            return nothing_like(grad)

        return hook

    large = {i: hook_for(i) for i in wrt.large}
    seen, shape, pull = _ENGINES[rule.engine](loss, wrt, large, rule.has_aux)
    weighing, added = weigh(seen, shape, rows, rule.reduction)
    if rule.nonfinite == "raise" and not added.finite:
        raise FloatingPointError(_not_finite(label, [None]))
    if weighing is None:
        return sums, added
    how = weighing
    try:
        grads = pull(how.cotangent)
        small = {i: g for i, g in enumerate(grads) if g is not None and i not in large}
        begun = True
        add_all_([sums[i] for i in small], list(small.values()), how)
    except BaseException:
        if begun and before is None:
            mark(sums, Spoiled)
        raise
    if watched:
        flags |= {i: finite(grad) for i, grad in small.items()}
        added = judged(added, flags.values(), how.keep)
        if rule.nonfinite == "raise":
            if not added.finite:
                if before is None:
                    mark(sums, Spoiled)
                raise FloatingPointError(
                    _not_finite(label, [i for i, flag in sorted(flags.items()) if not flag])
                )
        elif before is not None:
            added = kept(added)
            if not known_true(added.finite):
                for new, old in zip(sums, before, strict=True):
                    torch.where(added.finite.to(new.device), new, old, out=new)
    return sums, added


def _collected(
    loss: Loss,
    wrt: Wrt,
    sums: list[Tensor],
    rows: int | None,
    rule: Rule,
    *,
    in_place: bool,
) -> tuple[list[Tensor], Microbatch]:
    """All gradients first, then the sums: where nothing may be added before all is known."""
    if rule.nonfinite == "raise" and not in_place:
        raise RuntimeError(
            "nonfinite='raise' has to look at the numbers, which cannot be done under a torch.func "
            "transform or torch.compile; use 'skip' or 'propagate' there, and look afterwards."
        )
    seen, shape, pull = _ENGINES[rule.engine](loss, wrt, {}, rule.has_aux)
    weighing, added = weigh(seen, shape, rows, rule.reduction)
    if weighing is None:
        return sums if in_place else [x.clone() for x in sums], added
    grads = list(pull(weighing.cotangent))
    if rule.nonfinite == "skip":
        added = judged(added, [finite(g) for g in grads if g is not None], weighing.keep)
        keep = added.finite if weighing.keep is None else added.finite & weighing.keep
        weighing = weighing._replace(keep=keep)
        added = kept(added)
    if in_place:
        for i, total in enumerate(sums):
            if (grad := grads[i]) is not None:
                add_(total, grad, weighing)
            grads[i] = None
        return sums, added
    return [
        total if grad is None else added_to(total, grad, weighing)
        for total, grad in zip(sums, grads, strict=True)
    ], added


# The two engines: the loss read, and a function from its cotangent to the gradients --------


def _by_func(
    loss: Loss, wrt: Wrt, hooks: dict[int, Hook], has_aux: bool
) -> tuple[Read, Shape, Pull]:
    shape: Shape | None = None

    def on_primals(*primals: Tensor) -> tuple[Tensor, tuple[Any, list[Tensor]]]:
        nonlocal shape
        for i, hook in hooks.items():
            primals[i].register_hook(hook)
        seen, shape = read(loss(list(primals)), has_aux)
        return seen.total, (seen.weight, seen.aux)

    try:
        with nullcontext() if wrt.records is None else torch.set_grad_enabled(wrt.records):
            # pyright cannot tell the two lengths of vjp's result apart
            total, vjp, (weight, aux) = torch.func.vjp(on_primals, *wrt.leaves, has_aux=True)  # pyright: ignore
    except RuntimeError as error:
        if "saved tensor hooks" in str(error) or "setup_context" in str(error):
            error.add_note(
                "pureaccum: torch.func cannot differentiate this loss (a checkpoint, or a custom "
                "Function without setup_context). engine='autograd' can."
            )
        raise
    assert shape is not None
    if wrt.records:
        total, aux = total.detach(), [x.detach() for x in aux]
    # retain_graph=False frees activations as the pass goes. create_graph stays at its default:
    # False would silently drop second-order terms under an outer transform.
    return Read(total, weight, aux), shape, lambda cotangent: vjp(cotangent, retain_graph=False)


def _by_autograd(
    loss: Loss, wrt: Wrt, hooks: dict[int, Hook], has_aux: bool
) -> tuple[Read, Shape, Pull]:
    leaves = wrt.leaves
    handles = [leaves[i].register_hook(hook) for i, hook in hooks.items()]
    with torch.enable_grad(), remembering(wrt.known) as held:
        (total, weight, aux), shape = read(loss(leaves), has_aux)

    def pull(cotangent: Tensor) -> Sequence[Tensor | None]:
        try:
            if not total.requires_grad:
                return [None] * len(leaves)
            with holding(held):
                return torch.autograd.grad(total, leaves, cotangent, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()

    return Read(total.detach(), weight, [x.detach() for x in aux]), shape, pull


_ENGINES = {"func": _by_func, "autograd": _by_autograd}


def _not_finite(label: Callable[[int | None], str] | None, where: Sequence[int | None]) -> str:
    what = [label(i) for i in where] if label else ["a microbatch"]
    return (
        f"{', '.join(what)}: inf or NaN, and nonfinite='raise' was asked for. Likely causes: a "
        "learning rate too high, fp16 overflow without a loss scale, log or division at zero, a "
        "mean over a microbatch in which all is masked (return Weighted instead)."
    )
