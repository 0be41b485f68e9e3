"""SGD, Adam and AdamW as pure functions of (grads, state, params).

At eager top level torch's own kernels do the arithmetic, so results match the same variant of
``torch.optim`` bit for bit. ``fused=True`` is torch's fused kernel. Otherwise the CPU uses the
single-tensor kernel and other devices the foreach kernel (as with ``capturable=True``). These two
agree for real float32 and float64 numbers. Under vmap, outer transforms and torch.compile the same
formula runs in plain tensor operations and agrees to a few units in the last place.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam as torch_adam
from torch.optim.sgd import sgd as torch_sgd

from .._base import checks, states, trees
from .._base.settings import records
from .._base.torch_internals import functorch, kernels
from . import schedules, updates


@states.loadable
class SGDState(NamedTuple):
    """The state of SGD: applied steps, learning rate (``()`` unless it is a number), momentum."""

    steps: Tensor
    lr: Any
    momentum: trees.Tree = ()  # where there is momentum


@states.loadable
class AdamState(NamedTuple):
    """The state of Adam: applied steps, learning rate (``()`` unless it is a number), moments."""

    steps: Tensor
    lr: Any
    exp_avg: trees.Tree
    exp_avg_sq: trees.Tree
    max_exp_avg_sq: trees.Tree = ()  # with amsgrad


@records
def sgd(
    lr: updates.Rate = 1e-3,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    *,
    maximize: bool = False,
    fused: bool = False,
) -> updates.Optimizer:
    """Return ``torch.optim.SGD`` as a pair of pure functions, ``init`` and ``apply``.

    The rule, with -grads for grads if ``maximize``::

        g = grads + weight_decay * params
        m = momentum * m + (1 - dampening) * g  # in the first step g; without momentum m is g
        params = params - lr * (g + momentum * m if nesterov else m)

    Args:
        lr: A float, stored in the state (replace ``state.lr`` to change it, or stack states with
            different rates). Or a tensor, which is not copied and may be differentiated. Or a
            schedule, a function of the number of applied steps. A training step with a rate that
            is not finite is not applied; ``apply`` itself does not check the rate.
        momentum: The factor that decays the momentum buffer; 0 stores no buffer.
        dampening: The share of each gradient that does not enter the momentum buffer.
        weight_decay: The factor of the parameters that is added to the gradient.
        nesterov: Whether to use Nesterov momentum.
        maximize: Whether to step up the gradient instead of down.
        fused: Whether to use torch's fused kernel. It is the fastest, and with ``donate=True`` it
            needs no copy to undo a step that is not applied. It differs from the other kernels in
            the last place.

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
    return updates.by_method(_sgd(lr, momentum, dampening, weight_decay, nesterov, maximize, fused))


def _sgd(
    lr: updates.Rate,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    fused: bool,
) -> updates.Method:
    """SGD, with one tree in its state where there is momentum."""
    lr, momentum = schedules.check_rate(lr), checks.check_number(momentum, "momentum")
    dampening = checks.check_number(dampening, "dampening", "a finite number", math.isfinite)
    weight_decay = checks.check_number(weight_decay, "weight_decay")
    if nesterov and (momentum <= 0 or dampening != 0):
        raise ValueError(
            "nesterov=True needs a momentum above zero and no dampening; got "
            f"momentum={momentum!r} and dampening={dampening!r}."
        )
    settings: Any = {"momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
    settings |= {"nesterov": nesterov, "maximize": maximize}
    rule = _SGD(**settings, fused=fused)
    return updates.Method(
        kernel=rule.kernel,
        runs=rule.runs,
        formula=rule.formula,
        fused=fused,
        lr=lr,
        state=SGDState,
        columns=("momentum",) if momentum else (),
        owner="sgd",
        settings=settings,
    )


class _SGD(NamedTuple):
    """The arithmetic of SGD."""

    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool
    fused: bool

    def formula(self, step: Tensor, rate: Tensor, leaf: Tensor) -> updates.Row:
        rate, count = trees.as_scalar_of(leaf, rate), trees.known(step)
        first = (trees.moved(step, leaf.device) if count is None else count) == 1
        momentum, undamped = self.momentum, 1 - self.dampening

        def row(grad: Tensor, param: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
            if self.maximize:
                grad = -grad
            if self.weight_decay:
                grad = grad + self.weight_decay * param
            if not momentum:
                return (param - rate * grad,)
            if first is True:
                buffer = grad.clone()
            else:
                later = momentum * rest[0] + (undamped * grad if self.dampening else grad)
                buffer = later if first is False else torch.where(first, grad, later)
            return param - rate * (grad + momentum * buffer if self.nesterov else buffer), buffer

        return row

    def runs(self, step: Tensor, rate: float | Tensor) -> bool:
        if isinstance(rate, Tensor) and not self.fused:
            return False  # the kernel would read it on the host
        # the first gradient is not dampened, and nobody may know whether it is the first
        return not (self.momentum and self.dampening and trees.known(step) is None)

    def kernel(
        self,
        columns: updates.Columns,
        grads: list[Tensor],
        step: Tensor,
        rate: Any,
        found_inf: Tensor | None,
        foreach: bool,
    ) -> None:
        params, *rest = columns
        later = rest and trees.known(step) != 1
        momenta: list[Any] = rest[0] if later else [None] * len(params)
        if foreach and self.nesterov and not (self.weight_decay or self.maximize):
            grads = [x.clone() for x in grads]  # torch adds the momentum to what it is given
        settings: Any = self._asdict()
        settings |= {"foreach": foreach, "found_inf": found_inf, "lr": _in_float32(rate)}
        torch_sgd(params, grads, momenta, **settings)
        if rest and not later:
            # where the first step is not applied, the kernel leaves memory as it found it
            stays = None if found_inf is None else found_inf.bool()
            for mine, first in zip(rest[0], momenta, strict=True):
                mine.copy_(first if stays is None else torch.where(stays, mine, first))


@records
def adam(
    lr: updates.Rate = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    *,
    maximize: bool = False,
    fused: bool = False,
) -> updates.Optimizer:
    """Return ``torch.optim.Adam`` as a pair of pure functions, ``init`` and ``apply``.

    The rule for step ``t`` from 1, with b1, b2 = ``betas`` and -grads for grads if ``maximize``::

        g = grads + weight_decay * params
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        params = params - lr * (m / (1 - b1**t)) / (sqrt(v / (1 - b2**t)) + eps)

    Args:
        lr: A float, a tensor or a schedule: see ``sgd``.
        betas: The decay factors of the two moments, each from 0 to less than 1.
        eps: The number added to the square root.
        weight_decay: The factor of the parameters that is added to the gradient.
        amsgrad: Whether to divide by the largest ``v`` so far.
        maximize: Whether to step up the gradient instead of down.
        fused: Whether to use torch's fused kernel: see ``sgd``.

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
    settings = lr, betas, eps, weight_decay, amsgrad, maximize, fused
    return updates.by_method(_adam(*settings, decoupled=False))


@records
def adamw(
    lr: updates.Rate = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    amsgrad: bool = False,
    *,
    maximize: bool = False,
    fused: bool = False,
) -> updates.Optimizer:
    """Return ``torch.optim.AdamW`` as a pair of pure functions, ``init`` and ``apply``.

    The rule: ``params = params * (1 - lr * weight_decay)``, then ``adam`` without weight decay.

    Args:
        lr: A float, a tensor or a schedule: see ``sgd``.
        betas: The decay factors of the two moments, each from 0 to less than 1.
        eps: The number added to the square root.
        weight_decay: The decay of the parameters per step, as a multiple of ``lr``. To leave out
            biases and norms see ``partition``.
        amsgrad: Whether to divide by the largest ``v`` so far.
        maximize: Whether to step up the gradient instead of down.
        fused: Whether to use torch's fused kernel: see ``sgd``.

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
    settings = lr, betas, eps, weight_decay, amsgrad, maximize, fused
    return updates.by_method(_adam(*settings, decoupled=True))


def _adam(
    lr: updates.Rate,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    amsgrad: bool,
    maximize: bool,
    fused: bool,
    decoupled: bool,
) -> updates.Method:
    """Adam, or AdamW where the weight decay is decoupled."""
    lr, owner = schedules.check_rate(lr), "adamw" if decoupled else "adam"
    eps, weight_decay = (
        checks.check_number(eps, "eps"),
        checks.check_number(weight_decay, "weight_decay"),
    )
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:  # pyright: ignore[reportUnnecessaryIsInstance,reportUnnecessaryComparison]
        raise ValueError(f"betas is {betas!r}; expected two numbers from 0 to less than 1.")
    beta1, beta2 = (
        checks.check_number(
            beta, f"betas[{i}]", "a number from 0 to less than 1", lambda it: 0 <= it < 1
        )
        for i, beta in enumerate(betas)
    )

    settings: Any = {"weight_decay": weight_decay, "eps": eps}
    settings |= {"amsgrad": amsgrad, "maximize": maximize}
    rule = _Adam(beta1=beta1, beta2=beta2, **settings, fused=fused, decoupled=decoupled)
    return updates.Method(
        kernel=rule.kernel,
        formula=rule.formula,
        fused=fused,
        lr=lr,
        state=AdamState,
        columns=("exp_avg", "exp_avg_sq", *["max_exp_avg_sq"] * amsgrad),
        owner=owner,
        settings=settings | {"betas": (beta1, beta2), "decoupled_weight_decay": decoupled},
    )


class _Adam(NamedTuple):
    """The arithmetic of Adam, or of AdamW where the weight decay is decoupled."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    amsgrad: bool
    maximize: bool
    fused: bool
    decoupled: bool

    def formula(self, step: Tensor, rate: Tensor, leaf: Tensor) -> updates.Row:
        rate = trees.as_scalar_of(leaf, rate)
        wide = trees.moved(step, leaf.device, torch.float64)
        first, second = 1 - self.beta1**wide, 1 - self.beta2**wide
        decays = bool(self.weight_decay)
        decay = 1 - rate * self.weight_decay if decays and self.decoupled else None
        by_first, root_of_second = rate / first.to(rate.dtype), second.sqrt().to(rate.dtype)
        differentiated = functorch.may_be_differentiated()

        def row(grad: Tensor, param: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
            if param.is_complex():  # its parts are parameters of their own
                new = row(*(torch.view_as_real(x) for x in (grad, param, *rest)))
                return tuple(torch.view_as_complex(x) for x in new)
            mean, square, *most = rest
            if self.maximize:
                grad = -grad
            if decay is not None:
                param = param * decay
            elif decays:
                grad = grad + self.weight_decay * param
            mean = torch.lerp(mean, grad, 1 - self.beta1)
            square = torch.addcmul(self.beta2 * square, grad, grad, value=1 - self.beta2)
            if self.amsgrad:
                most = [torch.maximum(most[0], square)]
            top = most[0] if self.amsgrad else square
            if differentiated:
                # The root has no derivative at zero, where a meta-gradient would turn into NaN.
                positive = top > 0
                root = torch.where(positive, torch.where(positive, top, 1.0).sqrt(), 0.0)
            else:
                root = top.sqrt()
            denominator = root / root_of_second + self.eps
            return param - by_first * mean / denominator, mean, square, *most

        return row

    def kernel(
        self,
        columns: updates.Columns,
        grads: list[Tensor],
        step: Tensor,
        rate: Any,
        found_inf: Tensor | None,
        foreach: bool,
    ) -> None:
        params, exp_avg, exp_avg_sq, *most = columns
        columns = [params, grads, exp_avg, exp_avg_sq, most[0] if most else []]
        settings: Any = self._asdict() | {"found_inf": found_inf}
        fused, decoupled = settings.pop("fused"), settings.pop("decoupled")
        if fused and len({(x.device, x.dtype) for x in params}) == 1:
            if isinstance(rate, Tensor):
                rate = trees.moved(rate, params[0].device, torch.float32)
            kernels.fused_adam(
                decoupled, *columns, [step.float()] * len(params), lr=rate, **settings
            )
            return
        # The kernel counts for itself, once for every leaf.
        steps = (step - 1).float().expand(len(params)).clone().unbind()
        torch_adam(
            *columns,
            list(steps),  # pyright: ignore[reportCallIssue]
            foreach=foreach,
            fused=fused,
            capturable=params[0].device.type != "cpu",
            has_complex=any(x.is_complex() for x in params),
            decoupled_weight_decay=decoupled,
            lr=_in_float32(rate),
            **settings,
        )


def _in_float32(rate: float | Tensor) -> Any:
    return rate.float() if isinstance(rate, Tensor) else rate
