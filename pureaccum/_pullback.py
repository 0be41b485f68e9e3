"""A function of leaves and of other tensors, and the way back: gradients of leaves into sums.

    outs, rest, pull = pullback(func, ...)
    grads = pull(cotangents, weighing)

It is ``vjp`` by torch.func or by torch.autograd, for functions that are no whole loss: what comes
out are several tensors, and the gradients of those inputs that are no parameters come back.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._held import call_watched, holding
from ._passes import Engine, Wrt, advise
from ._shares import Cotangents
from ._sums import Weighing, add_, add_all_, added_to, nothing_like
from ._tree import flatten, unflatten, zeros


Func = Callable[[list[Tensor], list[Tensor]], tuple[list[Tensor], Any]]
Pull = Callable[[Cotangents, Weighing], Cotangents]


class Sums(dict[int, Tensor]):
    """Sums of gradients by leaf; each is made when it is first asked for, as zeros."""

    def __init__(self, leaves: list[Tensor], at_least: torch.dtype) -> None:
        super().__init__()
        self.leaves, self.at_least = leaves, at_least

    def __missing__(self, i: int) -> Tensor:
        self[i] = zeros(self.leaves[i], self.at_least)
        return self[i]

    def all(self) -> list[Tensor]:
        """The sums of all leaves."""
        return [self[i] for i in range(len(self.leaves))]


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
    sums: Sums,
    engine: Engine,
) -> Pullback:
    """Call a function, and prepare the way back.

    Args:
        func: ``func(leaves, others)`` gives floating-point tensors, and a tree of tensors that
            have no cotangent.
        wrt: The leaves.
        at: Which of them the function may use.
        others: What else to differentiate with respect to.
        sums: What the gradients are added to, in place but under a transform.
        engine: Which of the two.
    """
    return (_by_func if engine == "func" else _by_autograd)(func, wrt, at, others, sums)


def as_torch_func_would(call: Callable[[], Any]) -> Any:
    """What a call returns, made where torch.func refuses what it cannot differentiate.

    It does so before a captured tensor is written to.
    """
    static: list[Any] = []
    spec: Any = None

    def on(nothing: Tensor) -> tuple[Tensor, list[Tensor]]:
        nonlocal static, spec
        leaves, spec = flatten(call())
        static = [None if isinstance(x, Tensor) else x for x in leaves]
        return nothing, [x for x in leaves if isinstance(x, Tensor)]

    try:
        _, _, tensors = torch.func.vjp(on, torch.zeros(()), has_aux=True)  # pyright: ignore
    except RuntimeError as error:
        advise(error)
        raise
    rest = iter(tensors)
    return unflatten(spec, [next(rest) if x is None else x for x in static])


def _by_func(func: Func, wrt: Wrt, at: Sequence[int], others: list[Tensor], sums: Sums) -> Pullback:
    in_place = wrt.records is not None
    how: Weighing | None = None

    def hook_for(i: int) -> Callable[[Tensor], Tensor]:
        def hook(grad: Tensor) -> Tensor:
            assert how is not None
            add_(sums[i], grad, how)
            return nothing_like(grad)

        return hook

    # At top level leaves that require gradients would record a second graph.
    own = [x.detach() for x in wrt.leaves] if in_place else wrt.leaves

    def on_primals(*primals: Tensor) -> tuple[tuple[Tensor, ...], Any]:
        leaves = list(own)
        for i, primal in zip(at, primals, strict=False):
            leaves[i] = primal
            if in_place:
                primal.register_hook(hook_for(i))  # not called where it was not used
        outs, rest = func(leaves, list(primals[len(at) :]))
        return tuple(outs), rest

    inputs = [*(own[i] for i in at), *others]
    mode = torch.set_grad_enabled(wrt.records) if wrt.records is not None else nullcontext()
    try:
        with mode:
            outs, vjp, rest = torch.func.vjp(on_primals, *inputs, has_aux=True)  # pyright: ignore
    except RuntimeError as error:
        advise(error)
        raise

    def pull(cotangents: Cotangents, weighing: Weighing) -> Cotangents:
        nonlocal how
        how = weighing
        given = tuple(
            nothing_like(out) if c is None else c for out, c in zip(outs, cotangents, strict=True)
        )
        grads = vjp(given, retain_graph=False)
        if not in_place:
            for i, grad in zip(at, grads, strict=False):
                sums[i] = added_to(sums[i], grad, weighing)
        return list(grads[len(at) :])

    return Pullback([x.detach() for x in outs] if in_place else list(outs), rest, pull)


def _by_autograd(
    func: Func, wrt: Wrt, at: Sequence[int], others: list[Tensor], sums: Sums
) -> Pullback:
    others = [x.detach().requires_grad_() for x in others]
    with torch.enable_grad():
        (outs, rest), held = call_watched(
            lambda: func(wrt.leaves, others), wrt.recomputes, wrt.devices
        )
    inputs = [*(wrt.leaves[i] for i in at), *others]

    def pull(cotangents: Cotangents, weighing: Weighing) -> Cotangents:
        roots: list[Tensor] = []
        given: list[Tensor] = []
        for out, c in zip(outs, cotangents, strict=True):
            if c is not None and out.requires_grad:
                roots.append(out)
                given.append(c)
        if not roots:
            return [None] * len(others)
        plain = not isinstance(weighing.factor, Tensor) and weighing.factor == 1.0
        if wrt.straight and plain and weighing.keep is None and all(i in sums for i in at):
            for i in at:
                if wrt.leaves[i].grad is not sums[i]:
                    wrt.leaves[i].grad = sums[i]
            with holding(held):
                torch.autograd.backward(roots, given, inputs=inputs)
            return [x.grad for x in others]
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
        return list(grads[len(at) :])

    return Pullback([x.detach() for x in outs], rest, pull)
