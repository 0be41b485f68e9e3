"""The arithmetic of the optimizers, twice: torch's own kernels, and the same formulas as they are.

A kernel works in place and reads numbers on the host. A formula is plain tensor operations on one
leaf, for vmap, outer transforms and compilers, and where a kernel would have to wait for a device.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from .._base import as_scalar_of, known, moved


Columns = list[list[Tensor]]  # parameters, then each tree of the state, leaf by leaf


class Kernel(Protocol):
    """torch's kernel, in place. ``step`` counts this step; ``rate`` is a number if it is known.

    ``foreach`` is torch's variant for all leaves at once.
    """

    def __call__(
        self,
        columns: Columns,
        grads: list[Tensor],
        step: Tensor,
        rate: float | Tensor,
        found_inf: Tensor | None,
        foreach: bool,
    ) -> None: ...


def _rate(rate: float | Tensor) -> Any:
    return rate.float() if isinstance(rate, Tensor) else rate  # the fused kernels ask for float32


class Method(NamedTuple):
    """One way to compute an update."""

    # (parameters, step, rate); None: it would have to wait
    kernel: Callable[[list[Tensor], Tensor, float | Tensor], Kernel | None]
    # (step, rate, leaf): what the formula of all leaves of one device and dtype needs of them
    numbers: Callable[[Tensor, Tensor, Tensor], Any]
    formula: Callable[..., tuple[Tensor, ...]]  # of one leaf: (grad, numbers, param, *state)
    fused: bool  # the kernel itself leaves everything as it was where found_inf is 1


def sgd_method(
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    fused: bool,
) -> Method:
    """SGD; its state is one tree where there is momentum."""
    settings: dict[str, Any] = {
        "weight_decay": weight_decay,
        "momentum": momentum,
        "dampening": dampening,
        "nesterov": nesterov,
        "maximize": maximize,
    }

    def kernel(leaves: list[Tensor], step: Tensor, rate: float | Tensor) -> Kernel | None:
        if fused:
            _refuse_complex("sgd", leaves)
            _refuse_halves(leaves)
        count = known(step)
        if isinstance(rate, Tensor) and not fused:
            return None  # the kernel would read it on the host
        if count is None and momentum and dampening:
            return None  # the first gradient is not dampened, and nobody knows whether it is it

        def run(
            columns: Columns,
            grads: list[Tensor],
            step: Tensor,
            rate: Any,
            found_inf: Any,
            foreach: bool,
        ) -> None:
            params, *rest = columns
            momenta: list[Any] = [None] * len(params)
            if rest and count != 1:
                momenta = rest[0]
            if foreach and nesterov and not (weight_decay or maximize):
                grads = [x.clone() for x in grads]  # torch adds the momentum to what it is given
            sgd(
                params,
                grads,
                momenta,
                foreach=foreach,
                fused=fused,
                found_inf=found_inf,
                lr=_rate(rate),
                **settings,
            )
            if rest and momenta is not rest[0]:
                for mine, first in zip(rest[0], momenta, strict=True):
                    # where the first step is not applied, the kernel leaves memory as it found it
                    keep = None if found_inf is None else found_inf.bool()
                    mine.copy_(first if keep is None else torch.where(keep, mine, first))

        return run

    def numbers(step: Tensor, rate: Tensor, leaf: Tensor) -> tuple[Tensor, Any]:
        return as_scalar_of(leaf, rate), moved(step, leaf.device) == 1 if momentum else None

    def formula(
        grad: Tensor, numbers: tuple[Tensor, Any], param: Tensor, *rest: Tensor
    ) -> tuple[Tensor, ...]:
        rate, first = numbers
        if maximize:
            grad = -grad
        if weight_decay:
            grad = grad + weight_decay * param
        if not momentum:
            return (param - rate * grad,)
        later = momentum * rest[0] + (1 - dampening) * grad
        buffer = torch.where(first, grad, later)
        return param - rate * (grad + momentum * buffer if nesterov else buffer), buffer

    return Method(kernel, numbers, formula, fused)


def _refuse_complex(name: str, params: list[Tensor]) -> None:
    for x in params:
        if x.is_complex():
            raise ValueError(
                f"{name}(fused=True) came with parameters in {x.dtype}; torch's fused kernels know "
                "no complex numbers. Use fused=False."
            )


def _refuse_halves(params: list[Tensor]) -> None:
    for x in params:
        if x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"sgd(fused=True) came with parameters in {x.dtype} on a CPU; torch's kernel "
                "leaves most of them as they are, without an error, up to torch 2.13 "
                "(github.com/pytorch/pytorch/issues/191763). Use fused=False."
            )


def adam_method(
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    amsgrad: bool,
    maximize: bool,
    fused: bool,
    decoupled: bool,
) -> Method:
    """Adam, or AdamW where the weight decay is decoupled; two trees, with amsgrad three."""
    beta1, beta2 = betas

    def run(
        columns: Columns,
        grads: list[Tensor],
        step: Tensor,
        rate: Any,
        found_inf: Any,
        foreach: bool,
    ) -> None:
        params, exp_avg, exp_avg_sq, *most = columns
        # The kernel counts for itself, once for every leaf.
        steps = (step - 1).float().expand(len(params)).clone().unbind()
        adam(
            params,
            grads,
            exp_avg,
            exp_avg_sq,
            most[0] if most else [],
            list(steps),
            foreach=foreach,
            fused=fused,
            capturable=params[0].device.type != "cpu",
            found_inf=found_inf,
            has_complex=any(x.is_complex() for x in params),
            decoupled_weight_decay=decoupled,
            amsgrad=amsgrad,
            beta1=beta1,
            beta2=beta2,
            lr=_rate(rate),
            weight_decay=weight_decay,
            eps=eps,
            maximize=maximize,
        )

    def numbers(step: Tensor, rate: Tensor, leaf: Tensor) -> tuple[Any, Tensor, Tensor]:
        rate = as_scalar_of(leaf, rate)
        wide = moved(step, leaf.device, torch.float64)
        first, second = (1 - beta**wide for beta in betas)
        decay = 1 - rate * weight_decay if weight_decay and decoupled else None
        return decay, rate / first.to(rate.dtype), second.sqrt().to(rate.dtype)

    def formula(
        grad: Tensor, numbers: tuple[Any, Tensor, Tensor], param: Tensor, *rest: Tensor
    ) -> tuple[Tensor, ...]:
        if param.is_complex():  # its parts are parameters of their own
            pairs = [torch.view_as_real(x) for x in (grad, param, *rest)]
            new = formula(pairs[0], numbers, *pairs[1:])
            return tuple(torch.view_as_complex(x) for x in new)
        decay, rate_by_first, root_of_second = numbers
        mean, square, *most = rest
        if maximize:
            grad = -grad
        if decay is not None:
            param = param * decay
        elif weight_decay:
            grad = grad + weight_decay * param
        mean = mean + (1 - beta1) * (grad - mean)
        square = beta2 * square + (1 - beta2) * grad * grad
        if amsgrad:
            most = [torch.maximum(most[0], square)]
        top = most[0] if amsgrad else square
        # The root has no derivative at zero, where a meta-gradient would turn into NaN.
        positive = top > 0
        root = torch.where(positive, torch.where(positive, top, 1.0).sqrt(), 0.0)
        denominator = root / root_of_second + eps
        return param - rate_by_first * mean / denominator, mean, square, *most

    def kernel(leaves: list[Tensor], step: Tensor, rate: float | Tensor) -> Kernel | None:
        if fused:
            _refuse_complex("adamw" if decoupled else "adam", leaves)
        return run

    return Method(kernel, numbers, formula, fused)
