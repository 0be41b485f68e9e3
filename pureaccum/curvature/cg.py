"""Conjugate gradients: solve ``product(x) + damping * x = b`` for trees.

    q = product(p) + damping * p
    a = <r, z> / <p, q>
    x, r = x + a p, r - a q
    z, before = preconditioner(r), z
    p = z + <r, z> / <before r, before> p

A step is a function of the state, which you can save after any step. The inner products, which
decide everything and cost little, are summed in float64.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base import checks, reprs, states, trees
from .._base.settings import records
from . import derivatives


@states.loadable
class CGState(NamedTuple):
    """The state of a conjugate-gradient solve.

    Attributes:
        x: The solution so far, a tree like b.
        residual: b - product(x) - damping * x, as updated by the steps.
        direction: The direction of the next step.
        energy: <residual, preconditioner(residual)>, 0-d float64.
        norm: |residual|, 0-d float64.
        target: The norm at which x counts as a solution, 0-d float64.
        curvature: <p, product(p) + damping * p> for the direction p of the last step, 0-d float64.
            If it is not above zero, that step was not taken, and no later one will be.
        steps: The number of steps taken, 0-d int64.

    Example:
        >>> import torch
        >>> solver = cg(lambda v: 2 * v)
        >>> state = solver.run(solver.init(torch.tensor([2.0, 4.0])))
        >>> state.x, state.steps
        (tensor([1., 2.]), tensor(1))
    """

    x: trees.Tree
    residual: trees.Tree
    direction: trees.Tree
    energy: Tensor
    norm: Tensor
    target: Tensor
    curvature: Tensor
    steps: Tensor


class CG(NamedTuple):
    """The three functions that ``cg`` makes.

    Attributes:
        init: ``init(b, x=None)`` returns the state before the first step. ``x`` is the starting
            point, zero by default.
        update: ``update(state)`` takes one step. It returns the state unchanged if it is solved, or
            if the curvature is not positive.
        run: ``run(state, steps=None)`` takes at most ``steps`` steps, until the state is solved. It
            synchronises with the device at each step. Without ``steps`` it raises an
            ``ArithmeticError`` if ten steps per number in b do not solve it.

    Example:
        >>> import torch
        >>> solver = cg(lambda v: 2 * v)
        >>> solver.run(solver.init(torch.tensor([2.0, 4.0]))).x
        tensor([1., 2.])
    """

    init: Callable[..., CGState]
    update: Callable[[CGState], CGState]
    run: Callable[..., CGState]

    __repr__ = reprs.of_made


@records
def cg(  # noqa: D417
    product: Callable[[trees.Tree], trees.Tree],
    *,
    damping: float = 0.0,
    preconditioner: Callable[[trees.Tree], trees.Tree] | None = None,
    rtol: float = 1e-5,
    atol: float = 0.0,
) -> CG:
    """Solve a positive definite linear system, given products of its matrix with vectors.

    The rule::

        product(x) + damping * x = b        until |residual| <= max(rtol * |b|, atol)

    The solution is ``state.x``. If a step finds that the matrix is not positive definite, ``run``
    raises an ``ArithmeticError`` and ``update`` leaves x unchanged. A Hessian is positive definite
    at most near a minimum. Gauss-Newton and Fisher matrices are positive definite with some
    damping.

    Args:
        product: ``product(v)`` returns a tree like ``v``: the product with a symmetric matrix that
            is the same at every call, such as ``lambda v: ggnvp(...)(params, batch, v)``.
        damping: The number added to the diagonal.
        preconditioner: ``preconditioner(r)`` returns a tree like ``r``: the product with an
            approximate inverse of the matrix that is symmetric and positive definite.
        rtol, atol: The relative and absolute tolerance of the residual's norm.

    Example:
        >>> solver = cg(lambda v: torch.tensor([[4.0, 1.0], [1.0, 3.0]]) @ v)
        >>> state = solver.init(torch.tensor([1.0, 2.0]))
        >>> state = solver.update(state)  # torch.save it here, if you like
        >>> solver.run(state).x
        tensor([0.0909, 0.6364])

    References:
        Hestenes and Stiefel, `Methods of conjugate gradients for solving linear systems
        <https://doi.org/10.6028/jres.049.044>`_, 1952.
    """
    damping = checks.check_number(damping, "damping")
    rtol, atol = checks.check_number(rtol, "rtol"), checks.check_number(atol, "atol")
    system = _System(
        product=product, preconditioner=preconditioner, damping=damping, rtol=rtol, atol=atol
    )
    # not the method itself, on which nothing can be noted
    return CG(partial(system.init), system.update, system.run)


class _System(NamedTuple):
    """A system of equations, but for its right side."""

    product: Callable[[trees.Tree], trees.Tree]
    preconditioner: Callable[[trees.Tree], trees.Tree] | None
    damping: float
    rtol: float
    atol: float

    def init(self, b: trees.Tree, x: trees.Tree | None = None) -> CGState:
        leaves, spec = checks.read_params(b, "b")
        if x is None:
            x, residual = trees.tree_map(torch.zeros_like, b), trees.tree_map(torch.clone, b)
        else:
            given = _like(x, leaves, spec, "x")
            x = trees.unflatten(spec, [each.clone() for each in given])
            pairs = zip(leaves, self.times(x), strict=True)
            residual = trees.unflatten(spec, [one - other for one, other in pairs])
        z = self.conditioned(residual)
        norm = derivatives.inner(leaves, leaves, torch.float64).sqrt()
        return CGState(
            x=x,
            residual=residual,
            direction=trees.unflatten(spec, [each.clone() for each in z]),
            energy=derivatives.inner(trees.flatten(residual)[0], z, torch.float64),
            norm=trees.global_norm(residual).double(),
            target=(self.rtol * norm).clamp(min=self.atol),
            curvature=torch.full_like(norm, torch.inf),
            steps=torch.zeros_like(norm, dtype=torch.int64),
        )

    def update(self, state: CGState) -> CGState:
        checks.check_state(state, CGState, "cg")
        xs, spec = trees.flatten(state.x)
        rs, ps = trees.flatten(state.residual)[0], trees.flatten(state.direction)[0]
        qs = self.times(state.direction)
        curvature = derivatives.inner(ps, qs, torch.float64)
        goes = (state.norm > state.target) & (state.curvature > 0)
        curvature = torch.where(goes, curvature, state.curvature)
        goes = goes & (curvature > 0)
        length = state.energy / torch.where(goes, curvature, 1.0)
        residual = trees.unflatten(spec, _plus(rs, -length, qs))
        zs = self.conditioned(residual)
        energy = derivatives.inner(trees.flatten(residual)[0], zs, torch.float64)
        ratio = energy / torch.where(goes, state.energy, 1.0)
        new = CGState(
            x=trees.unflatten(spec, _plus(xs, length, ps)),
            residual=residual,
            direction=trees.unflatten(spec, _plus(zs, ratio, ps)),
            energy=energy,
            norm=trees.global_norm(residual).double(),
            target=state.target,
            curvature=curvature,
            steps=state.steps + goes,
        )
        # Selected, and never multiplied: what is not taken may not be finite.
        kept = trees.tree_map(lambda a, b: torch.where(goes.to(a.device), a, b), new, state)
        return kept._replace(curvature=curvature)

    def run(self, state: CGState, steps: int | None = None) -> CGState:
        checks.check_state(state, CGState, "cg")
        numbers = sum(x.numel() for x in trees.flatten(state.x)[0])
        most = (
            10 * numbers if steps is None else checks.check_int(steps, "steps", "an int from 0", 0)
        )
        while most > 0 and _unsolved(state):
            state, most = self.update(state), most - 1
        if _unsolved(state) and steps is None:
            raise ArithmeticError(
                f"{int(state.steps)} steps of conjugate gradients left a residual of "
                f"{float(state.norm):.3g}; expected at most {float(state.target):.3g}. Likely "
                "causes: the matrix is badly conditioned for its precision (use float64, damping, "
                "a preconditioner or a larger rtol), is not symmetric, or differs between calls "
                "(a loss with random numbers). To get the state without this error, use "
                "run(state, steps=...)."
            )
        return state

    def times(self, direction: trees.Tree) -> list[Tensor]:
        given, spec = trees.flatten(direction)
        found = _like(self.product(direction), given, spec, "the result of product")
        pairs = zip(found, given, strict=True)
        return [q + self.damping * p if self.damping else q for q, p in pairs]

    def conditioned(self, residual: trees.Tree) -> list[Tensor]:
        given, spec = trees.flatten(residual)
        if self.preconditioner is None:
            return given
        return _like(self.preconditioner(residual), given, spec, "the result of preconditioner")


def _unsolved(state: CGState) -> bool:
    """Whether there is more to do, or an error where nothing can be done."""
    norm, target, curvature = float(state.norm), float(state.target), float(state.curvature)
    if norm <= target:
        return False
    if norm != norm or curvature != curvature or abs(norm) == torch.inf:
        raise ArithmeticError(
            f"step {int(state.steps)} of conjugate gradients met inf or NaN in b, in x, or in the "
            "result of product. Likely cause: a batch without weight has no curvature, and gives "
            "NaN."
        )
    if curvature <= 0 or float(state.energy) <= 0:
        what = f"<p, A p> is {curvature:.3g}" if curvature <= 0 else "<r, M r> is not positive"
        whose = "matrix" if curvature <= 0 else "preconditioner"
        raise ArithmeticError(
            f"step {int(state.steps) + 1} of conjugate gradients: {what}, so the {whose} is not "
            "positive definite, and the iteration cannot converge. Likely cause: a Hessian away "
            "from a minimum. Use ggnvp or fisher_vp, or more damping."
        )
    return True


def _plus(xs: Sequence[Tensor], by: Tensor, ys: Sequence[Tensor]) -> list[Tensor]:
    return [x + trees.as_scalar_of(x, by) * y for x, y in zip(xs, ys, strict=True)]


def _like(tree: trees.Tree, like: Sequence[Tensor], spec: Any, name: str) -> list[Tensor]:
    leaves, came = trees.flatten(tree)
    checks.check_fits(
        leaves, came, like, spec, (name, "b"), "All vectors of a system have the structure of b."
    )
    return leaves
