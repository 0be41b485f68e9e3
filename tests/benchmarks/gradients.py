"""The contenders for the gradient of one window, for the gradients of single samples, and for many
training runs as one.

Rule: each is the code that its user would write. A contender is given the problem once; what it
returns takes the batch of a window, gives its gradients, and keeps nothing. Whoever clips gives the
sum of clipped gradients, so that what runs has agreed on it; Opacus does so with its own optimizer,
which is asked for no noise and no step.
"""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, jacrev, vmap

import pureaccum as pa

from .models import Batch, Grads, Problem, Training, optional, parts
from .steps import ADAMW


def hand(problem: Problem) -> Grads:
    """The loop over an ``nn.Module`` with ``.backward()``; its accumulation buffer is ``.grad``."""
    net, rows = problem.net, problem.rows
    named = list(net.named_parameters())

    def window(batch: Batch) -> dict[str, Tensor]:
        k = -(-len(batch[0]) // rows)
        for x, y in parts(batch, rows):
            (F.mse_loss(net(x), y) / k).backward()
        grads = {name: parameter.grad for name, parameter in named}
        # zero_grad(set_to_none=True) for the next window, done here so that nothing stays behind.
        for _, parameter in named:
            parameter.grad = None
        return grads

    return window


def torch_func(problem: Problem) -> Grads:
    """``torch.func.grad_and_value`` for each microbatch, summed by hand."""
    params, rows = problem.params, problem.rows
    grad_and_value = torch.func.grad_and_value(problem.loss)

    def window(batch: Batch) -> dict[str, Tensor]:
        first, *rest = parts(batch, rows)
        sums, total = grad_and_value(params, first)
        for microbatch in rest:
            grads, value = grad_and_value(params, microbatch)
            torch._foreach_add_(list(sums.values()), list(grads.values()))
            total = total + value
        torch._foreach_div_(list(sums.values()), 1 + len(rest))
        return sums

    return window


def whole(engine: str, *, weighted: bool = False, **options: Any) -> Callable[[Problem], Grads]:
    """``pa.grad_and_value`` over the whole batch."""

    def build(problem: Problem) -> Grads:
        loss = with_weight(problem) if weighted else problem.loss
        fn = pa.grad_and_value(loss, microbatch_size=problem.rows, engine=engine, **options)
        return lambda batch: fn(problem.params, batch)[0]

    return build


def stream(engine: str, **options: Any) -> Callable[[Problem], Grads]:
    """``pa.accumulator`` fed microbatch by microbatch, each old state donated."""

    def build(problem: Problem) -> Grads:
        params, rows = problem.params, problem.rows
        accumulator = pa.accumulator(problem.loss, engine=engine, **options)

        def window(batch: Batch) -> dict[str, Tensor]:
            state = accumulator.init(params)
            for microbatch in parts(batch, rows):
                state = accumulator.update(state, params, microbatch, donate=True)
            grads, _ = accumulator.finalize(state, donate=True)
            return grads

        return window

    return build


def with_weight(problem: Problem) -> Callable[[dict[str, Tensor], Batch], pa.Weighted]:
    """The same mean, said as a sum and a count, as a loss over tokens would."""
    net = problem.net

    def loss(params: dict[str, Tensor], batch: Batch) -> pa.Weighted:
        x, y = batch
        out = torch.func.functional_call(net, params, (x,))
        count = torch.full((), y.numel(), dtype=torch.float64, device=y.device)
        return pa.Weighted(F.mse_loss(out, y, reduction="sum"), count)

    return loss


MAX_NORM = 1.0


MEMBERS = 32


SAID = {"loss_reduction": "sum", "max_grad_norm": MAX_NORM}  # twice, to module and optimizer


def streamed(problem: Problem, reduce: str) -> Grads:
    """``pa.per_sample_grad``, reduced; of moments both."""
    gradient = pa.per_sample_grad(
        problem.loss, chunk_size=problem.rows, reduce=reduce, keep_batch_dim=True
    )

    def window(batch: Batch) -> dict[str, Tensor]:
        got = gradient(problem.params, batch)
        if not isinstance(got, pa.Moments):
            return got
        return got.mean | {f"{name}, second": x for name, x in got.second.items()}

    return window


def concatenated(problem: Problem) -> Grads:
    """``torch.func.vmap`` with the same chunks; its user sums afterwards."""

    def one(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return problem.loss(params, (x[None], y[None]))

    gradient = vmap(grad(one), in_dims=(None, 0, 0), chunk_size=problem.rows)
    return lambda batch: gradient(problem.params, *batch)


def clipped(problem: Problem, *, compiled: bool = False) -> Grads:
    """``pa.clipped_sum``."""
    summed = pa.clipped_sum(problem.loss, MAX_NORM, chunk_size=problem.rows, keep_batch_dim=True)
    summed = torch.compile(summed) if compiled else summed
    return lambda batch: summed(problem.params, batch)[0]


def hooks(problem: Problem) -> Grads:
    """Opacus, which keeps a gradient for each sample of the batch."""
    opacus = optional("opacus")
    net = opacus.GradSampleModule(copy.deepcopy(problem.net), loss_reduction="sum")
    optimizer = private(net, opacus.optimizers.DPOptimizer)

    def window(batch: Batch) -> dict[str, Tensor]:
        x, y = batch
        problem.criterion(net(x), y, reduction="sum").backward()
        optimizer.clip_and_accumulate()
        return sums(net, optimizer, "summed_grad")

    return window


def ghost(problem: Problem, *, cut: bool = False) -> Grads:
    """Opacus, which keeps norms alone and goes backwards twice; ``cut`` gives it our chunks."""
    opacus = optional("opacus")
    utils = optional("opacus.utils.fast_gradient_clipping_utils")
    of = optional("opacus.grad_sample").GradSampleModuleFastGradientClipping
    net = of(copy.deepcopy(problem.net), use_ghost_clipping=True, **SAID)
    optimizer = private(net, opacus.optimizers.DPOptimizerFastGradientClipping)
    criterion = utils.DPLossFastGradientClipping(
        net, optimizer, nn.CrossEntropyLoss(reduction="sum"), loss_reduction="sum"
    )

    def window(batch: Batch) -> dict[str, Tensor]:
        rows = problem.rows if cut else len(batch[0])
        total: dict[str, Tensor] = {}
        for x, y in parts(batch, rows):
            criterion(net(x), y).backward()
            each = sums(net, optimizer, "grad")
            total = {name: total[name].add_(x) for name, x in each.items()} if total else each
        return total

    return window


def private(net: nn.Module, optimizer: Callable[..., Any]) -> Any:
    """Opacus' optimizer around one of torch."""
    warnings.filterwarnings("ignore", "Full backward hook is firing")  # the input has no gradient
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    return optimizer(inner, noise_multiplier=0.0, expected_batch_size=None, **SAID)


def sums(net: nn.Module, optimizer: Any, attribute: str) -> dict[str, Tensor]:
    """The clipped sums; nothing stays behind."""
    named = net._module.named_parameters()
    got = {name: getattr(parameter, attribute).detach() for name, parameter in named}
    optimizer.zero_grad(set_to_none=True)
    return got


def kernel_by_tutorial(problem: Problem) -> Grads:
    """The kernel between a fifth of the images and the others, from Jacobians."""

    def of(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(problem.net, params, (x,))

    def window(batch: Batch) -> dict[str, Tensor]:
        new, images = fifth_of(batch)
        one, two = (vmap(jacrev(of), (None, 0))(problem.params, x) for x in (images, new))
        pairs = [(one[name].flatten(2), two[name].flatten(2)) for name in one]
        return {"kernel": sum(torch.einsum("Naf,Mbf->NMab", a, b) for a, b in pairs)}

    return window


def kernel(problem: Problem) -> Grads:
    """The same by ``pa.gramian``, in blocks of rows."""

    def of(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(problem.net, params, (x,))

    both = pa.gramian(of, chunk_size=problem.rows)

    def window(batch: Batch) -> dict[str, Tensor]:
        new, images = fifth_of(batch)
        return {"kernel": both(problem.params, images, other=new)}

    return window


def fifth_of(batch: Batch) -> tuple[Tensor, Tensor]:
    some = max(1, len(batch[0]) // 5)
    return batch[0][:some], batch[0][some:]


def members(problem: Problem) -> tuple[Any, list[pa.TrainState]]:
    """A step, and the states of runs that begin with different parameters."""
    torch.manual_seed(0)  # the same for every contender

    def loss(params: dict[str, Tensor], batch: Batch) -> Tensor:
        return problem.loss(params, batch)

    step = pa.make_step(loss, pa.adamw(**ADAMW), microbatch_size=problem.rows)
    inits = [
        {name: x + 0.01 * torch.randn_like(x) for name, x in problem.params.items()}
        for _ in range(MEMBERS)
    ]
    return step, [step.init(params) for params in inits]


def one_by_one(problem: Problem) -> Training:
    """A loop over the members."""
    step, states = members(problem)

    def training(batch: Batch) -> Callable[[], dict[str, Tensor]]:
        for i, state in enumerate(states):
            states[i], _ = step(state, batch)
        return lambda: pa.stack([state.params for state in states])

    return training


def at_once(problem: Problem) -> Training:
    """All of them as one, compiled."""
    step, states = members(problem)
    every = torch.compile(vmap(step, in_dims=(0, None)))
    stacked = pa.stack(states)

    def training(batch: Batch) -> Callable[[], dict[str, Tensor]]:
        nonlocal stacked
        stacked, _ = every(stacked, batch)
        return lambda: stacked.params

    return training


GRADIENTS: dict[str, Callable[[Problem], Grads | Training]] = {
    "hand loop": hand,
    "torch.func": torch_func,
    "torch.func.vmap": concatenated,
    "per_sample_grad, sum": partial(streamed, reduce="sum"),
    "per_sample_grad, moments": partial(streamed, reduce="moments"),
    "clipped_sum": clipped,
    "clipped_sum, compiled": partial(clipped, compiled=True),
    "Opacus, hooks": hooks,
    "Opacus, ghost": ghost,
    "Opacus, ghost, in chunks": partial(ghost, cut=True),
    f"{MEMBERS} eager steps": one_by_one,
    "vmap(step), compiled": at_once,
    "NTK by Jacobians": kernel_by_tutorial,
    "gramian": kernel,
}
for _engine in ("func", "autograd"):
    GRADIENTS |= {
        _engine: whole(_engine),
        f"{_engine}, streamed": stream(_engine),
        f"{_engine}, skip": whole(_engine, nonfinite="skip"),
        f"{_engine}, streamed, skip": stream(_engine, nonfinite="skip"),
        f"{_engine}, Weighted": whole(_engine, weighted=True),
    }
