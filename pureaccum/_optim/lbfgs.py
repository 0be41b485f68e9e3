"""L-BFGS: quasi-Newton steps from recent moves and gradient changes, over a function of the batch.

    remember    s, y = the last move, and the change of the gradient over it
    direction   d = -H @ gradient, by two loops over the stored moves and changes
    length      t, the learning rate, or the result of a line search that begins there
    move        params = params + t * d

Operations have the order of ``torch.optim.LBFGS``, on flat vectors as there, so float64 parameters
are bit for bit the same. The host makes every decision, with float64 numbers.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .._base import checks, dtensors, states, trees
from .._base.settings import records
from .._base.torch_internals import functorch, modes
from . import from_torch, line_search, minimizer, schedules, updates


@states.loadable
class LBFGSState(NamedTuple):
    """The state of L-BFGS.

    Attributes:
        steps: The number of applied calls.
        iterations: The number of iterations in all calls, one search direction each.
        evaluations: The number of evaluations of ``func`` in all calls.
        lr: The learning rate if it is a number, otherwise ``()``.
        value: The value at the params passed to the last call; NaN before the first call.
        applied: Whether the last call was applied. False if value, gradient or learning rate was
            not finite, or if the first line search found no lower value.
        gradient: The gradient at the start of the last iteration, as a flat vector.
        move: The change of the parameters in the last iteration, as a flat vector.
        moves: The stored moves, the newest last; zeros for those that do not exist yet.
        changes: The change of the gradient over each stored move.
        weights: 1 / (move · change) for each stored pair; 0 for those that do not exist yet.
        scale: The factor between the two loops that compute a direction.
    """

    steps: Tensor
    iterations: Tensor
    evaluations: Tensor
    lr: Any
    value: Tensor
    applied: Tensor
    gradient: Tensor
    move: Tensor
    moves: tuple[Tensor, ...]
    changes: tuple[Tensor, ...]
    weights: Tensor
    scale: Tensor


class Rules(NamedTuple):
    """When a call ends, and how it finds the length of a step."""

    max_iter: int
    max_eval: int
    tolerance_grad: float
    tolerance_change: float
    history_size: int
    searches: bool


@records
def lbfgs(
    lr: updates.Rate = 1.0,
    max_iter: int = 20,
    max_eval: int | None = None,
    tolerance_grad: float = 1e-7,
    tolerance_change: float = 1e-9,
    history_size: int = 10,
    line_search_fn: Literal["strong_wolfe"] | None = "strong_wolfe",
) -> minimizer.Minimizer:
    """Return ``torch.optim.LBFGS`` as a pair of pure functions, over a function of the whole batch.

    The rule, for at most ``max_iter`` iterations per call, with g the gradient at params::

        d = -H @ g  # H from the stored moves and gradient changes
        t = lr  # in the first iteration of a run min(1, 1 / sum(|g|)) * lr
        t = strong_wolfe(func, params, d, t)  # with a line search
        params = params + t * d

    ``func`` must be deterministic within a call and cover the whole batch. ``grad_and_value`` makes
    such a function in the memory of one microbatch. In float64, parameters match torch's class bit
    for bit. As there, the host reads numbers to decide, which synchronises with the device. Under
    vmap, torch.func and torch.compile it raises. Ranks stay identical if ``func`` returns the same
    numbers on all of them. If only ``max_iter`` ends them and no search is cut short, n calls of
    one iteration equal one call of n, bit for bit. Each call evaluates ``func`` once more, at its
    start.

    Args:
        lr: A float, a tensor or a schedule: see ``sgd``. A line search starts from it.
        max_iter: The largest number of iterations per call.
        max_eval: The number of evaluations after which a call starts no iteration and stops its
            search; ``max(25, max_iter * 5 // 4)`` by default. torch's is 1 if ``max_iter`` is 1.
        tolerance_grad: A call ends once no gradient entry is larger in absolute value.
        tolerance_change: A call ends once the value changes by less, or no parameter by more.
        history_size: The number of stored pairs, each twice the size of the parameters. torch's
            default is 100.
        line_search_fn: ``"strong_wolfe"``, or None for steps of ``lr``, torch's default.

    Example:
        >>> import torch
        >>> from pureaccum import grad_and_value
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 7.0]])
        >>> y = torch.tensor([5.0, 11.0, 19.0])
        >>> fn = grad_and_value(lambda w, b: ((b[0] @ w - b[1]) ** 2).mean(), microbatch_size=2)
        >>> opt, w = lbfgs(), torch.zeros(2)
        >>> w, state = opt.apply(lambda w: fn(w, (x, y)), opt.init(w), w)
        >>> w, state.value
        (tensor([1.0000, 2.0000]), tensor(169., dtype=torch.float64))

    References:
        Liu and Nocedal, `On the limited memory BFGS method
        <https://doi.org/10.1007/BF01589116>`_, 1989; `torch.optim.LBFGS
        <https://docs.pytorch.org/docs/stable/generated/torch.optim.LBFGS.html>`_
    """
    lr, many = schedules.check_rate(lr), "an int of at least 1"
    max_iter = checks.check_int(max_iter, "max_iter", many, 1)
    most = max(25, max_iter * 5 // 4) if max_eval is None else max_eval
    checks.check_choice(line_search_fn, ("strong_wolfe", None), "line_search_fn")
    rules = Rules(
        max_iter=max_iter,
        max_eval=checks.check_int(most, "max_eval", many, 1),
        tolerance_grad=checks.check_number(tolerance_grad, "tolerance_grad"),
        tolerance_change=checks.check_number(tolerance_change, "tolerance_change"),
        history_size=checks.check_int(history_size, "history_size", many, 1),
        searches=line_search_fn is not None,
    )

    def init(params: trees.Tree) -> LBFGSState:
        """Return the state before the first step."""
        return _first_state(_read(params), lr, rules.history_size)

    def apply(
        func: Callable[[trees.Tree], Any],
        state: LBFGSState,
        params: trees.Tree,
        *,
        donate: bool = False,
    ) -> tuple[trees.Tree, LBFGSState]:
        """Return the params and the state after at most ``max_iter`` iterations."""
        minimizer.check_function(func, "lbfgs")
        flat = _read(params)
        _check(state, flat[0], lr, rules)
        with checks.outside_inference_mode(), minimizer.plainly():
            rate = state.lr if isinstance(lr, float) else schedules.rate_at(lr, state.steps)
            new = _minimized(func, state, flat, float(rate), rules)
            leaves, spec = trees.flatten(new)
            held = trees.tree_leaves(state)
            if donate:
                return trees.unflatten(spec, states.hand_over([*flat[0], *held], leaves))
            copy: Any = {id(x): _copy for x in held} | {id(x): Tensor.clone for x in flat[0]}
            return trees.unflatten(spec, [copy[id(x)](x) if id(x) in copy else x for x in leaves])

    return minimizer.Minimizer(init, apply)


def _first_state(params: trees.Flat, lr: Any, size: int) -> LBFGSState:
    """A state with zeros for all that will be remembered."""
    leaves, spec = params
    zero = partial(leaves[0].new_zeros, (), dtype=_dtype(leaves))
    # Each in the memory of one number: writing so many of them takes the time of evaluations.
    zeros = [zero().expand(_size(leaves)) for _ in range(2 * size + 2)]
    return LBFGSState(
        steps=_number(0),
        iterations=_number(0),
        evaluations=_number(0),
        lr=schedules.kept_rate(lr, leaves, spec),
        value=_number(math.nan),
        applied=_number(False),
        gradient=zeros[-2],
        move=zeros[-1],
        moves=tuple(zeros[:size]),
        changes=tuple(zeros[size:-2]),
        weights=torch.zeros(size, dtype=torch.float64, device="cpu"),
        scale=_number(1.0),
    )


def _read(params: trees.Tree) -> trees.Flat:
    """The parameters, taken apart, if L-BFGS can work with them here."""
    leaves, spec = checks.read_params(params)
    way_out = "Use sgd, adam, adamw or sam."
    dtensors.refuse_sharded(
        leaves, "params", f"lbfgs keeps flat vectors and does not work with them. {way_out}"
    )
    if modes.transform_active() or functorch.any_tangent(leaves):
        raise RuntimeError(
            "lbfgs cannot run under a torch.func transform, vmap, torch.compile or forward AD, "
            f"because it decides by numbers that the host reads. {way_out}"
        )
    return leaves, spec


def _check(state: Any, leaves: list[Tensor], lr: Any, rules: Rules) -> None:
    """Check that a state is one of these settings and of these params."""
    checks.check_state(state, LBFGSState, "lbfgs")
    schedules.check_kept(lr, state.lr, "state")
    if len(state.moves) != rules.history_size:
        raise ValueError(
            f"state remembers {len(state.moves)} moves, but this optimizer was made with "
            f"history_size={rules.history_size}. Likely cause: the state comes from another "
            "configuration."
        )
    came = len(state.move), state.move.dtype, state.move.device
    expected = _size(leaves), _dtype(leaves), leaves[0].device
    if came != expected:
        raise ValueError(
            f"state.move is {came[0]} numbers in {came[1]} on {came[2]}; expected {expected[0]} "
            f"in {expected[1]} on {expected[2]}, as in params. {updates.BELONGS}"
        )


# Iterations ------------------------------------------------------------------------------------


class _Function:
    """The function of a call as flat gradients and numbers of the host; it counts evaluations."""

    def __init__(self, func: Callable[[trees.Tree], Any], params: trees.Flat) -> None:
        self.func, self.params, self.evaluations = func, params, 0

    def at(self, leaves: list[Tensor]) -> tuple[float, Tensor]:
        self.evaluations += 1
        grads, value = minimizer.asked(self.func, leaves, self.params)
        return float(value), _joined(grads, self.params[0])

    def along(self, line: line_search.Line, t: Any) -> line_search.Point:
        """A point on a line, which is infinitely high where anything is not finite."""
        value, gradient = self.at(line.at(float(t)))
        slope = _on_host(gradient.dot(line.d))  # not finite where any number of the gradient is not
        finite = math.isfinite(value) and math.isfinite(slope)
        return line_search.Point(t, value if finite else math.inf, gradient, slope)


def _minimized(
    func: Callable[[trees.Tree], Any],
    state: LBFGSState,
    given: trees.Flat,
    rate: float,
    rules: Rules,
) -> tuple[trees.Tree, LBFGSState]:
    """The next params and state; what stays as it was are the old tensors themselves."""
    x, spec = given
    function = _Function(func, given)
    value, gradient = function.at(states.copies([x])[0])
    first, steepest = value, _largest(gradient)
    applied = all(map(math.isfinite, (value, steepest, rate)))
    begins = applied and rate > 0 and steepest > rules.tolerance_grad
    iterations, before, move = int(state.iterations), state.gradient, state.move
    for n in range(1, rules.max_iter + 1 if begins else 1):
        t = rate
        if iterations:
            state = _remember(state, move, gradient - before)
        else:
            t *= min(1.0, 1.0 / _on_host(gradient.abs().sum()))
        d = _direction(state, gradient)
        start = line_search.Point(0, value, gradient, _on_host(gradient.dot(d)))
        line = line_search.Line(x, d, _pieces(d, x))
        end = _found(function, line, start, t, n == rules.max_iter, rules)
        if end.t > 0:
            t = float(end.t)
            x, move = line.at(t), d.mul_(t)
        else:  # and it was at a minimum, or found no way from where this call began
            move = torch.zeros_like(d)
            applied = n > 1 or bool(abs(start.slope) < rules.tolerance_change)
        iterations, before, value, gradient = iterations + 1, gradient, end.value, end.gradient
        if function.evaluations >= rules.max_eval or _settled(start, end, move, rules):
            break

    return trees.unflatten(spec, x), state._replace(
        steps=state.steps + applied,
        iterations=_number(iterations),
        evaluations=state.evaluations + function.evaluations,
        value=_number(first),
        applied=_number(applied),
        gradient=before,
        move=move,
    )


def _found(
    function: _Function,
    line: line_search.Line,
    start: line_search.Point,
    t: Any,
    is_last: bool,
    rules: Rules,
) -> line_search.Point:
    """Where an iteration ends on its line: at the start if there is no way down."""
    if not start.slope <= -rules.tolerance_change:
        return start
    at = partial(function.along, line)
    if rules.searches:
        return line_search.strong_wolfe(
            at, start, t, _largest(line.d), rules.max_eval - function.evaluations
        )
    if is_last:
        return start._replace(t=t)  # as in torch, nobody looks there
    there = at(t)
    return there if there.value < math.inf else start


def _settled(start: line_search.Point, end: line_search.Point, move: Tensor, rules: Rules) -> bool:
    """Whether gradient, parameters or value say that a call has nothing more to do."""
    return (
        _largest(end.gradient) <= rules.tolerance_grad
        or _largest(move) <= rules.tolerance_change
        or abs(end.value - start.value) < rules.tolerance_change
    )


def _remember(state: LBFGSState, move: Tensor, change: Tensor) -> LBFGSState:
    """The state with one more pair, in place of the oldest, if the function curves upwards."""
    product = change.dot(move).item()
    scale = line_search.divide(product, change.dot(change).item()) if product > 1e-10 else 0.0
    if not 0 < scale < math.inf:  # it curves downwards, or numbers overflowed
        return state
    return state._replace(
        moves=(*state.moves[1:], move),
        changes=(*state.changes[1:], change),
        weights=torch.cat([state.weights[1:], _number(1.0 / product).view(1)]),
        scale=_number(scale),
    )


def _direction(state: LBFGSState, gradient: Tensor) -> Tensor:
    """Minus the approximate inverse of the Hessian times the gradient."""
    d = gradient.neg()
    every = zip(state.moves, state.changes, state.weights.tolist(), strict=True)
    pairs = [(move, change, weight) for move, change, weight in every if weight]
    factors: list[float] = []
    for move, change, weight in reversed(pairs):
        factors.append(move.dot(d).item() * weight)
        d.add_(change, alpha=-factors[-1])
    d.mul_(state.scale.item())
    for move, change, weight in pairs:
        d.add_(move, alpha=factors.pop() - change.dot(d).item() * weight)
    return d


# Numbers and vectors ---------------------------------------------------------------------------


def _largest(x: Tensor) -> float:
    """The largest of all numbers without their signs; NaN where there is one."""
    if not x.numel():
        return 0.0
    least, most = torch.stack(torch.aminmax(x)).tolist()  # half the time of x.abs().max()
    return max(-least, most)


def _joined(tensors: list[Tensor], like: list[Tensor]) -> Tensor:
    """One vector of what is shaped like some leaves; complex numbers are pairs."""
    device, dtype = like[0].device, _dtype(like)
    pairs = zip(tensors, like, strict=True)
    parts = [trees.real_parts(x.to(y.dtype) if y.is_complex() else x) for x, y in pairs]
    return torch.cat([x.reshape(-1).to(device, dtype) for x in parts])


def _pieces(vector: Tensor, like: list[Tensor]) -> list[Tensor]:
    """What of a vector belongs to each leaf."""
    real = [trees.real_parts(x) for x in like]
    parts = zip(vector.split([x.numel() for x in real]), real, strict=True)
    return [part.view(x.shape).to(x.device) for part, x in parts]


def _copy(x: Tensor) -> Tensor:
    return x[:1].clone().expand_as(x) if x.stride() == (0,) else x.clone()


def _size(leaves: list[Tensor]) -> int:
    return sum(trees.real_parts(x).numel() for x in leaves)


def _dtype(leaves: list[Tensor]) -> torch.dtype:
    """The real dtype that holds the numbers of all leaves."""
    return trees.accumulation_dtype(trees.widest_dtype(x.real for x in leaves))


def _on_host(scalar: Tensor) -> Tensor:
    return scalar.to("cpu", torch.float64)


def _number(value: float) -> Tensor:
    """A number of the host as a 0-d tensor, which stays there."""
    return torch.full((), value, dtype=from_torch.DTYPES[type(value)], device="cpu")
