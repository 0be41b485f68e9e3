"""SGD, Adam and AdamW as pure functions of (grads, state, params).

At eager top level the arithmetic is that of torch's own kernels, so the numbers are bit for bit
those of ``torch.optim`` with the same variant: ``fused=True`` is torch's fused kernel; otherwise
the single-tensor kernel serves on a CPU and the foreach kernel elsewhere (as ``capturable=True``);
the two agree for real numbers in float32 and float64. Under vmap, outer transforms and
torch.compile the same formula runs in plain tensor operations, and agrees to a few units in the
last place.
"""

from functools import partial
from typing import Any, NamedTuple, cast

from torch import Tensor

from .._base import Tree, as_float, check_at_least, loadable
from .kernels import adam_method, sgd_method
from .schedules import check_rate
from .update import Keeping, Optimizer, Rate, check_kept, moment, optimizer_of, ready_method, start


@loadable
class SGDState(NamedTuple):
    """How many steps were applied, the learning rate if it was a number, and the momentum."""

    steps: Tensor
    lr: Any
    momentum: Tree


@loadable
class AdamState(NamedTuple):
    """How many steps were applied, the learning rate if it was a number, and the moments."""

    steps: Tensor
    lr: Any
    exp_avg: Tree
    exp_avg_sq: Tree
    max_exp_avg_sq: Tree  # () without amsgrad


def sgd(
    lr: Rate = 1e-3,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    *,
    maximize: bool = False,
    fused: bool = False,
) -> Optimizer:
    """``torch.optim.SGD`` as a pair of pure functions.

    The rule, with -grads where ``maximize``::

        g = grads + weight_decay * params
        m = momentum * m + (1 - dampening) * g  # in the first step g; without momentum m is g
        params = params - lr * (g + momentum * m if nesterov else m)

    Args:
        lr: A float, which the state then holds (``state.lr``: replace it there, or stack states
            of several); a tensor, which is used as it is and may be differentiated; or a
            schedule, a function of the number of applied steps. Where it is not finite a training
            step is not applied; ``apply`` alone computes with it as it is.
        momentum: How much of the last direction is kept; without any there is no such state.
        dampening: How much of a gradient the momentum leaves out.
        weight_decay: How much of the parameters is added to the gradient.
        nesterov: Whether to look one step of momentum ahead.
        maximize: Whether to go up.
        fused: torch's fused kernel: the fastest, and the one that can leave donated memory as it
            was when a step turns out not to be applied. It differs from the others in the last
            place.

    Returns:
        ``init(params) -> state`` and ``apply(grads, state, params) -> (params, state)``.

    Example:
        >>> import torch
        >>> opt = sgd(0.5)
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> new, state = opt.apply({"w": torch.tensor([2.0, 2.0])}, opt.init(params), params)
        >>> new["w"], state.steps
        (tensor([0., 1.]), tensor(1))

    References:
        `torch.optim.SGD <https://docs.pytorch.org/docs/stable/generated/torch.optim.SGD.html>`_
    """
    lr, momentum = as_float(lr), as_float(momentum)
    dampening, weight_decay = as_float(dampening), as_float(weight_decay)
    check_rate(lr)
    check_at_least(0, momentum=momentum, weight_decay=weight_decay)
    if nesterov and (momentum <= 0 or dampening != 0):
        raise ValueError(
            f"nesterov=True came with momentum={momentum!r} and dampening={dampening!r}; it needs "
            "a momentum above zero and no dampening."
        )
    method = sgd_method(momentum, dampening, weight_decay, nesterov, maximize, fused)

    def init(params: Tree) -> SGDState:
        """The state before the first step."""
        return SGDState(*start(lr, params), moment(params) if momentum else ())

    keeping = Keeping("sgd", SGDState, lr, ("momentum",) if momentum else ())
    ready = partial(ready_method, method, keeping)
    return optimizer_of(init, ready, partial(check_kept, keeping))


def adam(
    lr: Rate = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    *,
    maximize: bool = False,
    fused: bool = False,
) -> Optimizer:
    """``torch.optim.Adam`` as a pair of pure functions.

    The rule for step ``t`` from 1, with -grads where ``maximize``, and b1, b2 the ``betas``::

        g = grads + weight_decay * params
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        params = params - lr * (m / (1 - b1**t)) / (sqrt(v / (1 - b2**t)) + eps)

    Args:
        lr: A float, a tensor or a schedule: see ``sgd``.
        betas: How much of the old moments is kept, each from 0 to less than 1.
        eps: Added to the root.
        weight_decay: How much of the parameters is added to the gradient.
        amsgrad: Whether to divide by the largest ``v`` so far.
        maximize: Whether to go up.
        fused: torch's fused kernel: see ``sgd``.

    Returns:
        ``init(params) -> state`` and ``apply(grads, state, params) -> (params, state)``.

    Example:
        >>> import torch
        >>> opt = adam(0.5)
        >>> params = torch.tensor([1.0, 2.0])
        >>> new, state = opt.apply(torch.tensor([3.0, -0.1]), opt.init(params), params)
        >>> new
        tensor([0.5000, 2.5000])

    References:
        Kingma and Ba, `Adam <https://arxiv.org/abs/1412.6980>`_, 2014;
        `torch.optim.Adam <https://docs.pytorch.org/docs/stable/generated/torch.optim.Adam.html>`_
    """
    return _adam(lr, betas, eps, weight_decay, amsgrad, maximize, fused, decoupled=False)


def adamw(
    lr: Rate = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    amsgrad: bool = False,
    *,
    maximize: bool = False,
    fused: bool = False,
) -> Optimizer:
    """``torch.optim.AdamW`` as a pair of pure functions.

    The rule: ``params = params * (1 - lr * weight_decay)``, then ``adam`` without weight decay.

    Args:
        lr: A float, a tensor or a schedule: see ``sgd``.
        betas: How much of the old moments is kept, each from 0 to less than 1.
        eps: Added to the root.
        weight_decay: How much of the parameters decays at a rate of 1. For none on biases and
            norms see ``partition``.
        amsgrad: Whether to divide by the largest ``v`` so far.
        maximize: Whether to go up.
        fused: torch's fused kernel: see ``sgd``.

    Returns:
        ``init(params) -> state`` and ``apply(grads, state, params) -> (params, state)``.

    Example:
        >>> import torch
        >>> opt = adamw(0.5, weight_decay=0.1)
        >>> params = torch.tensor([1.0, 2.0])
        >>> new, state = opt.apply(torch.tensor([3.0, -0.1]), opt.init(params), params)
        >>> new
        tensor([0.4500, 2.4000])

    References:
        Loshchilov and Hutter, `Decoupled weight decay regularization
        <https://arxiv.org/abs/1711.05101>`_, 2017;
        `torch.optim.AdamW <https://docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html>`_
    """
    return _adam(lr, betas, eps, weight_decay, amsgrad, maximize, fused, decoupled=True)


def _adam(
    lr: Rate,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    amsgrad: bool,
    maximize: bool,
    fused: bool,
    decoupled: bool,
) -> Optimizer:
    lr, eps, weight_decay = as_float(lr), as_float(eps), as_float(weight_decay)
    check_rate(lr)
    check_at_least(0, eps=eps, weight_decay=weight_decay)
    if isinstance(betas, (tuple, list)):  # pyright: ignore[reportUnnecessaryIsInstance]
        betas = cast("tuple[float, float]", tuple(map(as_float, betas)))
    numbers = isinstance(betas, tuple) and all(isinstance(b, (int, float)) for b in betas)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not numbers or len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas is {betas!r}; expected two numbers from 0 to less than 1.")

    method = adam_method(betas, eps, weight_decay, amsgrad, maximize, fused, decoupled)

    def init(params: Tree) -> AdamState:
        """The state before the first step."""
        begun = start(lr, params)
        most = moment(params) if amsgrad else ()
        return AdamState(*begun, moment(params), moment(params), most)

    trees = ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else []))
    keeping = Keeping("adamw" if decoupled else "adam", AdamState, lr, trees)
    ready = partial(ready_method, method, keeping)
    return optimizer_of(init, ready, partial(check_kept, keeping))
