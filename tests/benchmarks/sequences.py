"""The contenders for a sequence that is taken chunk by chunk, with a carry from one to the next.

Rule: all compute the gradient of the whole sequence. A row is a step in time of all texts, and a
microbatch a chunk. An LSTM that keeps everything is called once, with the whole sequence; linear
attention is in chunks on every side, since it is quadratic within a chunk.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pureaccum as pa

from .models import Batch, Grads, Problem, parts, taken


def total(net: Callable[..., Any], carry: Any, chunk: Batch) -> tuple[Any, Tensor]:
    """The next carry, and the loss of a chunk, which is summed."""
    x, y = chunk
    out, carry = net(x, carry)
    return carry, (out - y).square().sum()


def by_hand(problem: Problem, around: Callable[..., Any] | None = None) -> Grads:
    """``.backward()`` through the loop over chunks, or over one chunk; each may be a checkpoint."""
    net = problem.net
    named, at_once = list(net.named_parameters()), around is None and isinstance(net, nn.LSTM)
    step = partial(total, net) if around is None else partial(around, total, net)

    def window(batch: Batch) -> dict[str, Tensor]:
        carry, loss = begun(net, batch), 0.0
        for chunk in [batch] if at_once else parts(batch, problem.rows):
            carry, term = step(carry, chunk)
            loss = loss + term
        (loss / batch[1].numel()).backward()
        return taken(named)

    return window


def begun(net: nn.Module, batch: Batch) -> Any:
    """The carry before the first chunk."""
    x = batch[0]
    if isinstance(net, nn.LSTM):
        return x.new_zeros(1, *x.shape[1:]), x.new_zeros(1, *x.shape[1:])
    return net.begin(x)


def scanned(problem: Problem, backward: bool = False) -> Grads:
    """``pa.scan``, under ``pa.grad`` or of the module's own parameters under ``.backward()``."""
    net, fn, named = problem.net, pa.functional(problem.net), list(problem.net.named_parameters())

    def chunk(params: dict[str, Tensor], carry: Any, chunk: Batch) -> tuple[Any, Tensor]:
        return total(lambda *args: fn.apply(params, fn.buffers, *args)[0], carry, chunk)

    run = pa.scan(chunk, chunk_size=problem.rows, reduce="sum")

    def loss(params: dict[str, Tensor], batch: Batch) -> Tensor:
        return run(params, begun(net, batch), batch)[1] / batch[1].numel()

    def window(batch: Batch) -> dict[str, Tensor]:
        loss(dict(named), batch).backward()
        return taken(named)

    return window if backward else partial(pa.grad(loss), problem.params)


SEQUENCES: dict[str, Callable[[Problem], Grads]] = {
    "the sequence, all kept": by_hand,
    "a checkpoint a chunk": partial(by_hand, around=partial(checkpoint, use_reentrant=False)),
    "scan": scanned,
    "scan, .backward()": partial(scanned, backward=True),
}
