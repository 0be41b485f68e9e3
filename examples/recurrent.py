"""Compute the gradient of an LSTM through 4,096 steps, and compare it with truncation.

Each step has a value and perhaps a mark. All marks are in the first half of the sequence. At the
end the LSTM has to give the sum of the marked values. Truncated backpropagation cuts the gradient
between chunks, so it reaches only the steps of the last chunk, which has no marks. `pa.scan` keeps
the carries between chunks and goes back through all chunks, in the memory of one. Plain autograd
keeps every step. Gradients are compared in float64; memory and time are those of a float32 step.

    Run:   python examples/recurrent.py
    Needs: no extra
"""

import math
import time
from collections.abc import Callable

import optree
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import pureaccum as pa


Params = dict[str, dict[str, Tensor]]
Batch = dict[str, Tensor]
Carry = tuple[Tensor, Tensor]
Run = Callable[[dict[str, Tensor], Carry, Tensor], tuple[Carry, tuple[()]]]


def make_net(width: int, length: int, dtype: torch.dtype) -> nn.ModuleDict:
    """An LSTM that starts as a sum and forgets 1 / length per step, then a linear head."""
    torch.manual_seed(0)
    net = nn.ModuleDict({"lstm": nn.LSTM(2, width), "head": nn.Linear(width, 1)})
    _, recurrent, bias, _ = lstm = [*net["lstm"].parameters()]
    with torch.no_grad():
        recurrent.zero_()
        for part in lstm:
            part[width : 2 * width] = 0.0  # the input of the forget gate
        bias[:width], bias[width : 2 * width] = -2.0, math.log(length)
    return net.to(dtype)


def make_batch(rows: int, length: int, dtype: torch.dtype) -> Batch:
    torch.manual_seed(1)
    value = torch.randn(length, rows, dtype=dtype)
    mark = (torch.rand(length, rows) < 0.5) * (torch.arange(length) < length // 2)[:, None]
    marked = (value * mark).sum(0) / (length / 4) ** 0.5
    return {"x": torch.stack([value, mark.to(dtype)], -1).transpose(0, 1), "y": marked}


def make_loss(net: nn.ModuleDict, way: str, size: int) -> Callable[[Params, Batch], Tensor]:
    """The loss of the last step; ``way`` says how the LSTM runs through the sequence."""
    lstm, head = pa.functional(net["lstm"]), pa.functional(net["head"])

    def chunk(params: dict[str, Tensor], carry: Carry, x: Tensor) -> tuple[Carry, tuple[()]]:
        (_, carry), _ = lstm.apply(params, (), x, carry)
        return carry, ()

    def cut_off(params: dict[str, Tensor], carry: Carry, x: Tensor) -> tuple[Carry, tuple[()]]:
        return chunk(params, optree.tree_map(torch.detach, carry), x)

    ways: dict[str, Run] = {
        "autograd": chunk,  # the whole sequence is one chunk
        "scan": pa.scan(chunk, chunk_size=size),
        "truncated": pa.scan(cut_off, chunk_size=size),
    }

    def loss(params: Params, batch: Batch) -> Tensor:
        zeros = batch["x"].new_zeros(1, len(batch["y"]), net["lstm"].hidden_size)
        (last, _), () = ways[way](params["lstm"], (zeros, zeros), batch["x"].transpose(0, 1))
        out, _ = head.apply(params["head"], (), last[0])
        return mse_loss(out[:, 0], batch["y"])

    return loss


def params_of(net: nn.ModuleDict) -> Params:
    return {name: pa.functional(part).params for name, part in net.items()}


def main(
    rows: int = 16, length: int = 4096, width: int = 32, size: int = 128
) -> dict[str, tuple[float, float]]:
    """How far the gradient of the LSTM is off, and the ratio of the memory."""
    ways = {"autograd": length, "scan": size, "truncated": size, "truncated at half": length // 2}
    exact, most, seen = {}, 0, {}
    print(f"{rows} sequences of {length} steps, an LSTM of width {width}")
    for name, each in ways.items():
        way = name.partition(" ")[0]
        net = make_net(width, length, torch.float64)
        grads = pa.grad(make_loss(net, way, each))(
            params_of(net), make_batch(4, length, torch.float64)
        )["lstm"]
        exact = exact or grads
        off = pa.global_norm(optree.tree_map(torch.sub, grads, exact)) / pa.global_norm(exact)

        net, batch = make_net(width, length, torch.float32), make_batch(rows, length, torch.float32)
        step = pa.make_step(make_loss(net, way, each), pa.adam(1e-3))
        state = step.init(params_of(net))
        held = pa.memory_report(step, state, batch).measured.beyond_arguments
        most = most or held
        before = time.process_time()
        step(state, batch)
        took = time.process_time() - before
        print(
            f"  {name:18} {each:4} steps per chunk: {held / 1e6:6.1f} MB, {1000 * took:4.0f} ms, "
            f"gradient of the LSTM off by {float(off):.2g} of its norm"
        )
        seen[name] = float(off), held / most
    return seen


if __name__ == "__main__":
    torch.set_num_threads(1)  # times are those of one core
    main()
