"""The contenders for derivatives of derivatives, for products with curvature, and for the primitive
alone.

Rule: a nest of transforms is written once, for a loss and its gradient, both of parameters; whose
they are is all that contenders differ in. "a gradient" is what products are counted in, and gives
nothing to compare. The primitive by hand is the loop without any promise: over captured tensors,
random numbers, modes, modules that change, writes. Its backward pass runs each microbatch again.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product as every
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.func import functional_call, grad, jvp, vjp

import pureaccum as pa

from .models import Batch, Grads, Problem, optional


# Nests of transforms.


Params = dict[str, Tensor]


Loss = Callable[[Params], Tensor]


Gradient = Callable[[Params], Params]


Nest = Callable[[Loss, Gradient, Params, Params], Params]


def of_value(loss: Loss, _: Gradient, params: Params, _v: Params) -> Params:
    return grad(loss)(params)


def reverse_over_reverse(_: Loss, gradient: Gradient, params: Params, v: Params) -> Params:
    return vjp(gradient, params)[1](v)[0]


def forward_over_reverse(_: Loss, gradient: Gradient, params: Params, v: Params) -> Params:
    return jvp(gradient, (params,), (v,))[1]


def meta(loss: Loss, gradient: Gradient, params: Params, _v: Params) -> Params:
    """Through one step of gradient descent."""

    def after_a_step(params: Params) -> Tensor:
        grads = gradient(params)
        return loss({name: x - 0.1 * grads[name] for name, x in params.items()})

    return grad(after_a_step)(params)


def squares(problem: Problem, params: Params, batch: Batch) -> Tensor:
    """The loss, without ``F.mse_loss``, which torch cannot take forward over reverse."""
    x, y = batch
    return (functional_call(problem.net, params, (x,)) - y).square().mean()


def whole(problem: Problem, batch: Batch) -> tuple[Loss, Gradient]:
    """By ``torch.func`` alone."""
    loss = partial(squares, problem, batch=batch)
    return loss, grad(loss)


def by_primitive(problem: Problem, batch: Batch) -> tuple[Loss, Gradient]:
    """``pa.microbatch``, and ``torch.func``."""
    mean = pa.microbatch(partial(squares, problem), microbatch_size=problem.rows, reduce="mean")

    def loss(params: Params) -> Tensor:
        return mean(params, batch)

    return loss, grad(loss)


def by_pa(problem: Problem, batch: Batch) -> tuple[Loss, Gradient]:
    """``pa.value`` and ``pa.grad``."""
    return of_pa(partial(squares, problem), problem.rows, batch)


def by_remat(problem: Problem, batch: Batch) -> tuple[Loss, Gradient]:
    """The same of a loss that its user rematerialises."""
    return of_pa(pa.remat(partial(squares, problem)), problem.rows, batch)


def of_pa(loss: Callable[..., Tensor], size: int, batch: Batch) -> tuple[Loss, Gradient]:
    value, gradient = pa.value(loss, microbatch_size=size), pa.grad(loss, microbatch_size=size)
    return lambda params: value(params, batch), lambda params: gradient(params, batch)


def contender(problem: Problem, nest: Nest, make: Callable[..., tuple[Loss, Gradient]]) -> Grads:
    torch.manual_seed(0)
    v = {name: torch.randn_like(x) for name, x in problem.params.items()}
    return lambda batch: nest(*make(problem, batch), problem.params, v)


OF_NEST: dict[str, Nest] = {
    "grad of value": of_value,
    "reverse over reverse": reverse_over_reverse,
    "forward over reverse": forward_over_reverse,
    "meta-gradient": meta,
}


OF_MAKER = {
    "whole": whole,
    "microbatch": by_primitive,
    "pa.grad": by_pa,
    "pa.grad of remat": by_remat,
}


# Products with the Hessian and with the Gauss-Newton matrix.


def vector(problem: Problem) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn_like(x) for name, x in problem.params.items()}


def plain_gradient(problem: Problem) -> Grads:
    """By the engine that is fastest; the same of the loop by hand is within a tenth."""
    of = pa.grad(partial(squares, problem), microbatch_size=problem.rows, engine="auto")

    def window(batch: Batch) -> dict[str, Tensor]:
        of(problem.params, batch)
        return {}

    return window


def product(problem: Problem, kind: str, *, compiled: bool = False, whole: bool = False) -> Grads:
    v, size = vector(problem), None if whole else problem.rows

    def forward(params: dict[str, Tensor], batch: Batch) -> Tensor:
        return functional_call(problem.net, params, (batch[0],))

    def loss(out: Tensor, batch: Batch) -> Tensor:
        return (out - batch[1]).square().mean()

    if kind == "hvp":
        both = pa.curvature.hvp(partial(squares, problem), microbatch_size=size)
        of: Any = lambda batch: both(problem.params, batch, v)[1]  # noqa: E731
    else:
        alone = pa.curvature.ggnvp(forward, loss, microbatch_size=size)
        of = lambda batch: alone(problem.params, batch, v)  # noqa: E731
    return torch.compile(of, fullgraph=True) if compiled else of


def theirs(problem: Problem, operator: str, *, cut: bool = False) -> Grads:
    of = getattr(optional("curvlinops"), operator)
    v = [*vector(problem).values()]
    params = [*problem.net.parameters()]

    def window(batch: Batch) -> dict[str, Tensor]:
        data = [*pa.microbatches(batch, problem.rows)] if cut else [batch]
        it = of(problem.net, nn.MSELoss(), params, data, check_deterministic=False)
        return {n: x.detach() for n, x in zip(problem.params, it @ v, strict=True)}

    return window


# The primitive: small microbatches, in which Python is all there is; and an MLP over many tokens.


Rows = Callable[[Params, Tensor], Tensor]  # of parameters and rows, row by row


class _ByBackward(Function):
    """The loop, called with (pure function, rows of a microbatch, names, rows, *parameters)."""

    @staticmethod
    def forward(ctx: Any, pure: Rows, size: int, names: Any, x: Tensor, *leaves: Tensor) -> Tensor:  # type: ignore[override]
        ctx.pure, ctx.size, ctx.names = pure, size, names
        ctx.save_for_backward(x, *leaves)
        return _loop(pure, size, dict(zip(names, leaves, strict=True)), x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:  # type: ignore[override]
        x, *leaves = ctx.saved_tensors
        sums: Sequence[Tensor] = ()
        of_rows: list[Tensor] = []
        for part, c in zip(x.split(ctx.size), cotangent.split(ctx.size), strict=True):
            with torch.enable_grad():
                own = [p.detach().requires_grad_() for p in leaves]
                tokens = part.detach().requires_grad_(ctx.needs_input_grad[3])
                out = ctx.pure(dict(zip(ctx.names, own, strict=True)), tokens)
            wanted = [*own, tokens] if tokens.requires_grad else own
            grads = [*torch.autograd.grad(out, wanted, c)]
            if tokens.requires_grad:
                of_rows.append(grads.pop())
            if sums:
                torch._foreach_add_(sums, grads)
            sums = sums or grads
        return None, None, None, torch.cat(of_rows) if of_rows else None, *sums


class _ByFunc(Function):
    """The same under torch.func."""

    @staticmethod
    def forward(pure: Rows, size: int, names: Any, x: Tensor, *leaves: Tensor) -> Tensor:  # type: ignore[override]
        return _loop(pure, size, dict(zip(names, leaves, strict=True)), x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.pure, ctx.size, ctx.names, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:  # type: ignore[override]
        x, *leaves = ctx.saved_tensors
        params, sums = dict(zip(ctx.names, leaves, strict=True)), {}
        for part, c in zip(x.split(ctx.size), cotangent.split(ctx.size), strict=True):
            _, pull = vjp(partial(_of_rows, ctx.pure, part), params)  # pyright: ignore
            (grads,) = pull(c)
            sums = {name: sums[name] + g for name, g in grads.items()} if sums else grads
        return None, None, None, None, *sums.values()


def _of_rows(pure: Rows, x: Tensor, params: Params) -> Tensor:
    return pure(params, x)


def _loop(pure: Rows, size: int, params: Params, x: Tensor) -> Tensor:
    return torch.cat([pure(params, part) for part in x.split(size)])


def _by_hand(function: Any, pure: Rows, size: int) -> Rows:
    return lambda params, x: function.apply(pure, size, (*params,), x, *params.values())


def _by_us(_: Any, pure: Rows, size: int) -> Rows:
    return pa.microbatch(pure, microbatch_size=size)


def _without_grad(rows: Rows, params: Params, x: Tensor) -> Params:
    with torch.no_grad():
        return {"out": rows(params, x)}


def _forwards(rows: Rows, params: Params, x: Tensor) -> Params:
    return {"out": rows(params, x)}


def _pairs(rows: Rows, x: Tensor, params: Params) -> Tensor:
    """A loss of all pairs of rows."""
    z = rows(params, x)
    return (z @ z.T).sin().sum()


def _through(rows: Rows, params: Params, x: Tensor) -> Params:
    """From within a network: tokens are followed too."""
    x = x.detach().requires_grad_()
    grads = torch.autograd.grad(rows(params, x).square().sum(), [x, *params.values()])
    return dict(zip(("tokens", *params), grads, strict=True))


def _backwards(rows: Rows, params: Params, x: Tensor) -> Params:
    grads = torch.autograd.grad(_pairs(rows, x, params), [*params.values()])
    return dict(zip(params, grads, strict=True))


def _by_grad(rows: Rows, params: Params, x: Tensor) -> Params:
    return grad(partial(_pairs, rows, x))(params)


ASKED = {
    "forwards, no_grad": (_without_grad, _ByBackward),
    "forwards, in grad mode": (_forwards, _ByBackward),
    "backwards": (_backwards, _ByBackward),
    "torch.func.grad": (_by_grad, _ByFunc),
}


TILED = "an MLP over tokens"


MAKERS = {"the loop": _by_hand, "microbatch": _by_us}


def _contender(asked: str, maker: str, problem: Problem) -> Grads:
    ask, function = (ASKED | {TILED: (_through, _ByBackward)})[asked]

    def pure(params: Params, x: Tensor) -> Tensor:
        return functional_call(problem.net, params, (x,))

    rows = MAKERS[maker](function, pure, problem.rows)
    params = {name: x.detach() for name, x in problem.params.items()}
    if function is _ByBackward:
        params = {name: x.requires_grad_() for name, x in params.items()}

    def window(batch: Batch) -> Params:
        return ask(rows, params, batch[0])

    return window


DERIVATIVES: dict[str, Callable[[Problem], Grads]] = {
    **{
        f"{nest}, {maker}": partial(contender, nest=OF_NEST[nest], make=OF_MAKER[maker])
        for nest, maker in every(OF_NEST, OF_MAKER)
    },
    **{
        f"{asked}, {maker}": partial(_contender, asked, maker)
        for asked, maker in every((*ASKED, TILED), MAKERS)
    },
    "a gradient": plain_gradient,
}
for _kind, _library, _operator in (
    ("hvp", "curvlinops, Hessian", "HessianLinearOperator"),
    ("ggnvp", "curvlinops, GGN", "GGNLinearOperator"),
):
    DERIVATIVES[_kind] = partial(product, kind=_kind)
    DERIVATIVES[f"{_kind}, compiled"] = partial(product, kind=_kind, compiled=True)
    DERIVATIVES[f"{_kind}, whole"] = partial(product, kind=_kind, whole=True)
    DERIVATIVES[_library] = partial(theirs, operator=_operator)
    DERIVATIVES[f"{_library}, cut"] = partial(theirs, operator=_operator, cut=True)
