"""Compute the full batch's gradient of a network with BatchNorm, in microbatches.

BatchNorm normalises with the mean and variance of its input, so a batch in parts is another
function: the usual loop gives another gradient and other running statistics. Here the network is
cut at its BatchNorms. All microbatches run through one part of it before any runs through the next,
and each BatchNorm gets the moments of all samples. GroupNorm looks at one sample at a time and
needs none of this: any two sums of gradients, over other samples or ranks, can be merged.

    Run:   python examples/batchnorm_exact.py
    Needs: no extra
"""

import copy
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import pureaccum as pa


Tensors = dict[str, Tensor]
Result = tuple[Tensors, Tensors]  # gradients and running statistics


def make_net(norm: str) -> nn.Module:
    torch.manual_seed(0)

    def layers(inside: int, out: int, stride: int) -> list[nn.Module]:
        between = nn.BatchNorm2d(out) if norm == "batch" else nn.GroupNorm(4, out)
        return [nn.Conv2d(inside, out, 3, stride, padding=1, bias=False), between, nn.ReLU()]

    body = [*layers(3, 16, 1), *layers(16, 32, 2), *layers(32, 64, 2)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).double()


def error(out: Tensor, batch: Tensors) -> Tensor:
    return cross_entropy(out, batch["label"])


def usual_loop(net: nn.Module, batch: Tensors, size: int) -> Result:
    """The loop that most people write; with one microbatch, the full batch in plain torch."""
    net = copy.deepcopy(net)
    parts = list(pa.microbatches(batch, size))
    for part in parts:
        (error(net(part["image"]), part) / len(parts)).backward()
    return {name: p.grad for name, p in net.named_parameters()}, dict(net.named_buffers())


def one_step(step: Any, net: nn.Module, batch: Tensors) -> Result:
    """The gradient of a step: with a learning rate of 1, the parameters move by it."""
    fn = pa.functional(net)
    state, _ = step(step.init(fn.params, buffers=fn.buffers), batch)
    return optree.tree_map(torch.sub, fn.params, state.params), state.buffers


def off(came: Tensors, exact: Tensors) -> float:
    apart = optree.tree_map(torch.sub, came, exact)
    return float(pa.global_norm(apart) / pa.global_norm(exact))


def statistics(buffers: Tensors) -> Tensors:
    return {name: x for name, x in buffers.items() if not name.endswith("num_batches_tracked")}


def main(rows: int = 128, size: int = 16) -> dict[str, tuple[float, float]]:
    torch.manual_seed(1)
    label = torch.arange(rows) % 10
    image = torch.randn(rows, 3, 16, 16).double() + label[:, None, None, None] / 5
    batch = {"image": image, "label": label}
    told: dict[str, tuple[float, float]] = {}
    print(f"{f'{rows} samples by {size}: error':42}{'gradient':>10}{'statistics':>12}")

    def tell(name: str, came: Result, exact: Result) -> None:
        told[name] = off(came[0], exact[0]), off(statistics(came[1]), statistics(exact[1]))
        print(f"  {name:40}{told[name][0]:>10.1e}{told[name][1]:>12.1e}")

    net = make_net("batch")
    fn, cut = pa.functional(net), pa.functional(net, microbatch_size=size)

    def loss_of(fn: Any) -> Any:
        def loss(params: Tensors, batch: Tensors, buffers: Tensors) -> tuple[Tensor, Tensors]:
            out, new_buffers = fn.apply(params, buffers, batch["image"])
            return error(out, batch), new_buffers

        return loss

    def step_of(fn: Any, size: int | None = None) -> Any:
        sgd = pa.sgd(1.0, momentum=0.9)  # one update of the statistics per step
        options: Any = {"buffers": "pooled", "check": False}  # without it the plain split raises
        return pa.make_step(loss_of(fn), sgd, microbatch_size=size, **options)

    steps = {"full batch": step_of(fn), "plainly cut": step_of(fn, size), "exact": step_of(cut)}
    full = usual_loop(net, batch, rows)
    tell("BatchNorm, usual loop", usual_loop(net, batch, size), full)
    for name, step in steps.items():
        tell(f"BatchNorm, {name}", one_step(step, net, batch), full)

    of_rows = make_net("group")
    params = pa.functional(of_rows).params
    acc = pa.accumulator(
        lambda params, batch: error(
            torch.func.functional_call(of_rows, params, (batch["image"],)), batch
        )
    )
    states = []
    for part in pa.microbatches(batch, 5 * rows // 8):  # as on two ranks: 80 and 48
        states.append(acc.init(params))
        for microbatch in pa.microbatches(part, size):
            states[-1] = acc.update(states[-1], params, microbatch)
    grads, _ = acc.finalize(acc.merge(*states))
    exact = usual_loop(of_rows, batch, rows)[0]
    told["GroupNorm"] = off(grads, exact), 0.0
    print(f"  {'GroupNorm, two uneven sums, merged':40}{told['GroupNorm'][0]:>10.1e}{'none':>12}")

    print(f"{'memory in kB':15}" + "".join(f"{name:>15}" for name in steps))
    reports = {
        name: pa.memory_report(step, step.init(fn.params, buffers=fn.buffers), batch).measured
        for name, step in steps.items()
    }
    for row in ("parameters", "optimizer", "gradients", "activations", "workspace"):
        held = (getattr(report, row) for report in reports.values())
        print(f"  {row:13}" + "".join(f"{number / 1000:>15,.0f}" for number in held))
    return told


if __name__ == "__main__":
    main()
