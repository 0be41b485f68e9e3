"""A function of leaves and of other tensors, and the way back: gradients of leaves into sums.

    outs, rest, pull = pullback(func, ...)
    sums, grads = pull(cotangents, weighing)

It is ``vjp`` by one of the two engines, for functions that are no whole loss: what comes out are
several tensors, and the gradients of those inputs that are no parameters come back.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._held import call_watched, holding
from ._passes import Engine, Wrt, advise
from ._sums import Weighing, add_, add_all_, added_to, nothing_like


Func = Callable[[list[Tensor], list[Tensor]], tuple[list[Tensor], Any]]
Cotangents = Sequence[Tensor | None]
Pull = Callable[[Cotangents, Weighing], tuple[list[Tensor], list[Tensor | None]]]


class Pullback(NamedTuple):
    """What a function gave, and the way back from its cotangents; None is a zero."""

    outs: list[Tensor]
    rest: Any
    pull: Pull


def pullback(
    func: Func,
    wrt: Wrt,
    at: Sequence[int],
    others: list[Tensor],
    sums: list[Tensor],
    engine: Engine,
) -> Pullback:
    """Call a function, and prepare the way back.

    Args:
        func: ``func(leaves, others)`` gives floating-point tensors, and a tree of tensors that
            have no cotangent.
        wrt: The leaves.
        at: Which of them the function may use.
        others: What else to differentiate with respect to.
        sums: One sum a leaf, changed in place but under a transform.
        engine: Which of the two.
    """
    return (_by_func if engine == "func" else _by_autograd)(func, wrt, at, others, sums)


def _by_func(
    func: Func, wrt: Wrt, at: Sequence[int], others: list[Tensor], sums: list[Tensor]
) -> Pullback:
    in_place = wrt.records is not None
    large = set(wrt.large if in_place else ()) & set(at)
    how: Weighing | None = None

    def hook_for(i: int) -> Callable[[Tensor], Tensor]:
        def hook(grad: Tensor) -> Tensor:
            assert how is not None
            add_(sums[i], grad, how)
            return nothing_like(grad)

        return hook

    def on_primals(*primals: Tensor) -> tuple[tuple[Tensor, ...], Any]:
        leaves = list(wrt.leaves)
        for i, primal in zip(at, primals, strict=False):
            leaves[i] = primal
            if i in large:
                primal.register_hook(hook_for(i))
        outs, rest = func(leaves, list(primals[len(at) :]))
        return tuple(outs), rest

    inputs = [*(wrt.leaves[i] for i in at), *others]
    mode = torch.set_grad_enabled(wrt.records) if wrt.records is not None else nullcontext()
    try:
        with mode:
            outs, vjp, rest = torch.func.vjp(on_primals, *inputs, has_aux=True)  # pyright: ignore
    except RuntimeError as error:
        advise(error)
        raise

    def pull(
        cotangents: Cotangents, weighing: Weighing
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        nonlocal how
        how = weighing
        given = tuple(
            nothing_like(out) if c is None else c for out, c in zip(outs, cotangents, strict=True)
        )
        grads = vjp(given, retain_graph=False)
        small = {i: g for i, g in zip(at, grads, strict=False) if i not in large}
        back = list(grads[len(at) :])
        if in_place:
            add_all_([sums[i] for i in small], list(small.values()), weighing)
            return sums, back
        new = list(sums)
        for i, grad in small.items():
            new[i] = added_to(new[i], grad, weighing)
        return new, back

    return Pullback([x.detach() for x in outs] if in_place else list(outs), rest, pull)


def _by_autograd(
    func: Func, wrt: Wrt, at: Sequence[int], others: list[Tensor], sums: list[Tensor]
) -> Pullback:
    others = [x.detach().requires_grad_() for x in others]
    with torch.enable_grad():
        (outs, rest), held = call_watched(
            lambda: func(wrt.leaves, others), wrt.recomputes, wrt.devices
        )
    inputs = [*(wrt.leaves[i] for i in at), *others]

    def pull(
        cotangents: Cotangents, weighing: Weighing
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        roots: list[Tensor] = []
        given: list[Tensor] = []
        for out, c in zip(outs, cotangents, strict=True):
            if c is not None and out.requires_grad:
                roots.append(out)
                given.append(c)
        if not roots:
            return sums, [None] * len(others)
        plain = not isinstance(weighing.factor, Tensor) and weighing.factor == 1.0
        if wrt.straight and plain and weighing.keep is None:
            for leaf, sum_ in zip(wrt.leaves, sums, strict=True):
                if leaf.grad is not sum_:
                    leaf.grad = sum_
            with holding(held):
                torch.autograd.backward(roots, given, inputs=inputs)
            return sums, [x.grad for x in others]
        large = set(wrt.large) & set(at)
        handles: list[Any] = []
        for i in large:

            def hook(grad: Tensor, i: int = i) -> Tensor:
                add_(sums[i], grad, weighing)
                return nothing_like(grad)

            handles.append(wrt.leaves[i].register_hook(hook))
        try:
            with holding(held):
                grads = torch.autograd.grad(roots, inputs, given, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        pairs: Any = zip(at, grads, strict=False)  # None where the function did not use it
        small = {i: g for i, g in pairs if g is not None and i not in large}
        add_all_([sums[i] for i in small], list(small.values()), weighing)
        return sums, list(grads[len(at) :])

    return Pullback([x.detach() for x in outs], rest, pull)
