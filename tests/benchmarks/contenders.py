"""The contenders: ways to get the mean gradient of one window of microbatches.

Rule: each is the code that its user would write. ``CONTENDERS[name](problem)`` does what is done
once; what it returns takes the batch of a window, gives its gradients, and keeps nothing.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import pureaccum as pa

from .curvature import PRODUCTS
from .gradcache import PAIRS, PAIRS_STEPS
from .head import HEADS
from .models import Batch, Problem
from .nests import NESTS
from .norms import NORMS, VIEWS
from .per_sample import SAMPLES
from .primitive import LOOPS
from .programs import PROGRAMS
from .rematerialised import CHAINS
from .rivals import RIVALS
from .steps import STEPS, Read


# A gradient is given as it is, the parameters of a training run to whoever asks for them.
Window = Callable[[Batch], dict[str, Tensor] | Read]


def read(got: dict[str, Tensor] | Read) -> dict[str, Tensor]:
    return got() if callable(got) else got


def microbatches(batch: Batch, rows: int) -> Iterator[Batch]:
    return zip(*(t.split(rows) for t in batch), strict=True)


def hand(problem: Problem) -> Window:
    """The loop over an ``nn.Module`` with ``.backward()``; its accumulation buffer is ``.grad``."""
    net, rows = problem.net, problem.rows
    named = list(net.named_parameters())

    def window(batch: Batch) -> dict[str, Tensor]:
        k = -(-len(batch[0]) // rows)
        for x, y in microbatches(batch, rows):
            (F.mse_loss(net(x), y) / k).backward()
        grads = {name: parameter.grad for name, parameter in named}
        # zero_grad(set_to_none=True) for the next window, done here so that nothing stays behind.
        for _, parameter in named:
            parameter.grad = None
        return grads

    return window


def torch_func(problem: Problem) -> Window:
    """``torch.func.grad_and_value`` for each microbatch, summed by hand."""
    params, rows = problem.params, problem.rows
    grad_and_value = torch.func.grad_and_value(problem.loss)

    def window(batch: Batch) -> dict[str, Tensor]:
        first, *rest = microbatches(batch, rows)
        sums, total = grad_and_value(params, first)
        for microbatch in rest:
            grads, value = grad_and_value(params, microbatch)
            torch._foreach_add_(list(sums.values()), list(grads.values()))
            total = total + value
        torch._foreach_div_(list(sums.values()), 1 + len(rest))
        return sums

    return window


def whole(engine: str, *, weighted: bool = False, **knobs: Any) -> Callable[[Problem], Window]:
    """``pa.grad_and_value`` over the whole batch."""

    def build(problem: Problem) -> Window:
        loss = with_weight(problem) if weighted else problem.loss
        fn = pa.grad_and_value(loss, microbatch_size=problem.rows, engine=engine, **knobs)
        return lambda batch: fn(problem.params, batch)[0]

    return build


def stream(engine: str, **knobs: Any) -> Callable[[Problem], Window]:
    """``pa.accumulator`` fed microbatch by microbatch, each old state donated."""

    def build(problem: Problem) -> Window:
        params, rows = problem.params, problem.rows
        accumulator = pa.accumulator(problem.loss, engine=engine, **knobs)

        def window(batch: Batch) -> dict[str, Tensor]:
            state = accumulator.init(params)
            for microbatch in microbatches(batch, rows):
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


HAND, TORCH_FUNC = "hand loop", "torch.func"
ENGINES = ("func", "autograd")

CONTENDERS: dict[str, Callable[[Problem], Window]] = {HAND: hand, TORCH_FUNC: torch_func}
for _engine in ENGINES:
    CONTENDERS[_engine] = whole(_engine)
    CONTENDERS[f"{_engine}, streamed"] = stream(_engine)
    CONTENDERS[f"{_engine}, skip"] = whole(_engine, nonfinite="skip")
    CONTENDERS[f"{_engine}, streamed, skip"] = stream(_engine, nonfinite="skip")
    CONTENDERS[f"{_engine}, Weighted"] = whole(_engine, weighted=True)

ALL = tuple(CONTENDERS)
MAIN = (HAND, TORCH_FUNC, *ENGINES)

CONTENDERS |= STEPS | RIVALS | NESTS | NORMS | PAIRS | PAIRS_STEPS | HEADS | CHAINS | SAMPLES
CONTENDERS |= PROGRAMS | PRODUCTS | VIEWS | LOOPS
