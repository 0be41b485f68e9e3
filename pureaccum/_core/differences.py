"""Whether derivatives are those of the numbers: differences along a line, at five points.

    D(h) = (f(h) - f(-h)) / 2h        S(h) = (f(h) - 2 f(0) + f(-h)) / 2h

A derivative that is right misses D(h/2), leaf by leaf, by no more than what these points show:

    2 |D(h) - D(h/2)|            what is cut off (a third of it), or a jump of f at 0 (all of it)
    |S(h)| + |S(h/2)|            a jump of f beside 0, or a bend (the second of the two); rounding
    2 u (|f(0)| / h + |claim|)   the last rounding, which five points may hide
    u^(3/4) of all leaves        rounding, where a leaf is zero on paper

The step is √u at first, which crosses the fewest kinks. It grows where that shows too little, since
f is rounded more coarsely than by its dtype, say. A miss counts that is there on three lines, each
with a point and a direction of its own: what a kink, or chance, does to one of them does not.
"""

import inspect
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.overrides import TorchFunctionMode

from .._base import checks, random_state, trees
from .._base.torch_internals import autograd


Leaves = Sequence[Tensor]
Line = Callable[[float], list[Tensor]]  # the value and the gradients at some point of it
_STEPS = 2.0**-26, 2.0**-17, 2.0**-8, 2.0**-4
_ENOUGH = 2.0**-10  # of a leaf


class SecondOrder(NamedTuple):
    """A product of second derivatives, and what it is of."""

    forward: Callable[[trees.Tree], Any]  # what the product takes as linear, a function of params
    loss: Callable[[Any], Tensor]  # what is differentiated twice, a function of what forward gives
    product: Callable[[trees.Tree, trees.Tree], trees.Tree]  # of params and a vector like them
    around: Callable[[], AbstractContextManager[Any]] = nullcontext  # for each call


class Miss(NamedTuple):
    """A derivative that is not that of the numbers, by its norms."""

    came: float
    expected: float
    missing: float
    bound: float
    functions: Sequence[str] = ()  # the custom Functions that were called


def misses(claim: SecondOrder, params: trees.Tree) -> dict[int, Miss] | None:
    """Where a product is not the derivative of gradients; None where nothing can be said.

    i + 1 stands for leaf i, and 0 for the value, if its derivative is not its gradient. What is
    detached is a constant, as for the product; but not where the value has the derivative that its
    gradient says all the same: there detaching hides one of second order. Lines lead through points
    near params, where nothing has a kink on purpose.
    """
    trials = _Trials(claim, params)
    if not trees.all_finite(trials.leaves):
        return None
    try:
        spread, found = 2.0**-8, trials.missed(0, 2.0**-8, nullcontext())
        if found is None:  # such a point may be out of bounds
            spread, found = 0.0, trials.missed(0, 0.0, nullcontext())
        for trial, inside in (1, nullcontext()), (2, nullcontext()), (2, _Constants()):
            if found and (0 in found or not isinstance(inside, _Constants)):
                others = trials.missed(trial, spread, inside) or {}
                found = {i: x for i, x in found.items() if i in others}
        return found
    finally:
        random_state.restore(trials.drawn)


class _Trials:
    """A product beside the differences of gradients, on lines near params."""

    def __init__(self, claim: SecondOrder, params: trees.Tree) -> None:
        self.claim, (self.like, self.spec) = claim, trees.flatten(params)
        self.leaves = [trees.real_parts(x.detach()) for x in self.like]
        self.drawn = random_state.generators({x.device for x in self.like})

    def missed(self, trial: int, spread: float, inside: Any) -> dict[int, Miss] | None:
        """The misses on one line."""
        point, along, sizes = _line(self.leaves, trial, spread)
        functions = list[str]()

        def f(t: float) -> list[Tensor]:
            moved = [x.detach() + t * v for x, v in zip(point, along, strict=True)]
            with self.claim.around(), inside:
                value, outs, grads = self.gradients(point, moved)
            functions[:] = autograd.custom_functions([value, *outs])
            return [*map(_wide, (value, *grads))]

        zero = f(0.0)
        for v, g in zip(along, zero[1:], strict=True):  # a padding token has no gradient by design
            v.mul_((g != 0) | ~g.any())
        with self.claim.around():
            random_state.restore(self.drawn)
            claimed, _ = trees.flatten(self.claim.product(self.tree(point), self.tree(along)))
        slope = torch.stack([(g * v).sum() for g, v in zip(zero[1:], along, strict=True)]).sum()
        claims = [slope, *map(_wide, claimed)]
        unit = max(torch.finfo(x.dtype).eps for x in self.leaves) / 2
        found = _compared(f, zero, claims, [1.0, *sizes], unit)
        return found and {i: x._replace(functions=functions) for i, x in found.items()}

    def tree(self, leaves: Leaves) -> trees.Tree:
        """A tree like params, of the real parts of its leaves."""
        pairs = [(x, y.is_complex()) for x, y in zip(leaves, self.like, strict=True)]
        whole = [torch.view_as_complex(x) if is_pair else x for x, is_pair in pairs]
        return trees.unflatten(self.spec, whole)

    def gradients(self, point: Leaves, moved: Leaves) -> tuple[Tensor, Leaves, Leaves]:
        """The value, outputs and gradients, of which what is linear is taken at a point."""
        random_state.restore(self.drawn)
        there = self.claim.forward(self.tree([x.requires_grad_() for x in moved]))
        outs, spec = checks.read_tensors(there, "", "")
        apart = [x.detach().requires_grad_(trees.continuous(x)) for x in outs]
        value = self.claim.loss(trees.unflatten(spec, apart))
        bent = _pulled([value], [None], [x for x in apart if x.requires_grad])
        random_state.restore(self.drawn)
        outs, _ = checks.read_tensors(self.claim.forward(self.tree(point)), "", "")
        outs = [x for x in outs if trees.continuous(x)]
        return value, outs, _pulled(outs, bent, point)


def _line(
    leaves: Leaves, trial: int, spread: float
) -> tuple[list[Tensor], list[Tensor], list[float]]:
    """A point near by, a direction, and its sizes: powers of two, so that steps are exact."""
    random = torch.Generator().manual_seed(trial)
    point, along = list[Tensor](), list[Tensor]()
    means = [float(x.abs().double().mean()) if x.numel() else 0.0 for x in leaves]
    sizes = [2.0 ** round(math.log2(x or max(means) or 1.0)) for x in means]
    for x, size in zip(leaves, sizes, strict=True):
        bits = torch.randint(0, 256, (2, *x.shape), generator=random, dtype=torch.uint8)
        if x.dim() > 1 and x.shape[-1] == x.shape[-2] and x.equal(x.mT):  # and is to stay symmetric
            bits = bits.triu() + bits.triu(1).mT
        far, sign = bits.to(x.device)
        point.append(far.to(x).sub_(128).mul_(spread * size / 128).add_(x).requires_grad_())
        along.append(torch.where(sign < 128, -size, size).to(x))
    return point, along, sizes


def _compared(
    f: Line, zero: Leaves, claims: Leaves, sizes: list[float], unit: float
) -> dict[int, Miss] | None:
    """The misses on one line, each by its smallest bound; None where gradients are nothing."""
    starts, came = _norms(zero), _norms(claims)
    if not any(0 < x < math.inf for x in starts[1:]):
        return None
    floor, best = _floor(came[1:], sizes[1:], unit), dict[int, tuple[Miss, Tensor]]()
    left = {i for i, x in enumerate(zero) if x.numel()}
    for i, step, half, expected, far, bend in _slopes(f, zero, starts, unit, left):
        missing = float(vector_norm(claims[i] - half))
        bound = 2 * (far + unit * (starts[i] / step + came[i])) + bend + floor / sizes[i]
        if i in best and bound >= best[i][0].bound:
            finer, at_finer = best[i]  # than a rounding inside of f, if the two disagree
            if not i or missing > bound or vector_norm(half - at_finer) <= bound + finer.bound:
                continue
        best[i] = Miss(came=came[i], expected=expected, missing=missing, bound=bound), half
        if missing <= bound <= _ENOUGH * max(came[i], expected, starts[i]):
            left.discard(i)
    found = {i: miss for i, (miss, _) in best.items() if miss.missing > miss.bound}
    if 0 not in best or best[0][0].bound > came[0] / 2:  # nobody knows of the value
        found[0] = Miss(came=came[0], expected=math.nan, missing=math.inf, bound=0.0)
    return found


def _slopes(
    f: Line, zero: Leaves, starts: list[float], unit: float, left: set[int]
) -> Generator[tuple[int, float, Tensor, float, float, float]]:
    """The slopes of what is left: the leaf, the step, the slope, its norm, error and bend."""
    for step in _STEPS:
        if not left or step < unit**0.5:
            continue
        wholes, low, bends = f(step), f(-step), list[float]()
        for high, z in zip(wholes, zero, strict=True):
            bends.append(float(vector_norm(high - 2 * z + low[0])) / 2)
            high.sub_(low.pop(0)).div_(2 * step)
        upper, lower = f(step / 2), f(-step / 2)
        for i in [*left]:
            half = (upper[i] - lower[i]) / step
            bend = (bends[i] + float(vector_norm(upper[i] - 2 * zero[i] + lower[i]))) / step
            far, size = _norms([wholes[i] - half, half])
            still = not (bend or far or size)  # a coarse rounding, perhaps
            # No difference follows what is so fast, or not finite.
            if bend <= max(starts[i], size / 4) and not (still and step < _STEPS[-1]):
                yield i, step, half, size, far, bend


def _floor(came: list[float], sizes: list[float], unit: float) -> float:
    """The rounding of all leaves together, which one that is zero on paper may have."""
    known = [s * x for s, x in zip(sizes, came, strict=True) if x < math.inf]
    return unit**0.75 * math.hypot(*known)


def _norms(some: Leaves) -> list[float]:
    return [float(vector_norm(x)) for x in some]


def _wide(x: Tensor) -> Tensor:
    x = x.detach()
    return trees.real_parts(x.to_dense() if x.is_sparse else x).double()


def _pulled(outs: Leaves, cotangents: Sequence[Any], leaves: Leaves) -> Leaves:
    pairs = [(x, y) for x, y in zip(outs, cotangents, strict=True) if x.requires_grad]
    if not pairs:
        return [*map(torch.zeros_like, leaves)]
    options: Any = {"allow_unused": True, "materialize_grads": True}
    return torch.autograd.grad([x for x, _ in pairs], leaves, [y for _, y in pairs], **options)


class _Constants(TorchFunctionMode):
    """Gives, whenever it is entered again, what was detached the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def __enter__(self) -> Any:
        self.rest = iter([*self.kept])
        return super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        frame: Any = inspect.currentframe()
        frame = frame.f_back
        ours = frame.f_globals.get("__name__", "").startswith(("pureaccum.", "torch."))
        if func not in _DETACHING or (ours and frame.f_code is not as_constant.__code__):
            return out
        if not (args[0].requires_grad and torch.is_grad_enabled()):  # in a custom Function, say
            return out
        kept = next(self.rest, None)
        if kept is None:
            self.kept.append(out)
        return out if kept is None or kept.shape != out.shape else kept


def as_constant(x: Any) -> Any:
    """What a user would have detached."""
    return x.detach() if isinstance(x, Tensor) else x


_DETACHING = Tensor.detach, torch.detach, Tensor.data.__get__  # pyright: ignore
