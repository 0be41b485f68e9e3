"""Train three tasks that disagree, with one gradient in memory at a time.

PCGrad removes from each task's gradient the parts that oppose another task. It needs only inner
products: from the Gramian of the tasks' gradients follow the coefficients of their sum, and one
more backward pass, with the coefficients as cotangents, computes that sum. A column of the Gramian
is the derivative of all losses along the gradient of one. It is computed in microbatches, so memory
holds one gradient and one microbatch at a time.

    Run:   python examples/several_objectives.py
    Needs: no extra
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import jacrev, jvp, vjp
from torch.profiler import profile

import pureaccum as pa


Tensors = dict[str, Tensor]
TASKS = 3


def peak(run: Callable[[], object]) -> int:
    """The peak of allocated bytes during a call, beyond those before it."""
    with profile(profile_memory=True) as seen:
        run()
    live = most = 0
    for event in seen.profiler.kineto_results.events():
        live += event.nbytes() if event.name() == "[memory]" else 0
        most = max(most, live)
    return most


def gramian(losses: Callable[[Tensors], Tensor], params: Tensors) -> Tensor:
    """The inner products of the losses' gradients: a backward pass and a jvp per loss."""
    _, pull = vjp(losses, params)
    each = torch.eye(TASKS, dtype=torch.float64)
    return torch.stack([jvp(losses, (params,), pull(one))[1] for one in each], 1)


def by_pcgrad(gram: Tensor) -> Tensor:
    """The coefficients of the gradients in a sum in which none opposes another."""
    numbers = torch.eye(TASKS, dtype=torch.float64)  # row i: what is left of gradient i
    for i in range(TASKS):
        for j in range(TASKS):
            against = numbers[i] @ gram[j]  # what is left of i, times gradient j
            if i != j and against < 0:
                numbers[i, j] -= against / gram[j, j]
    return numbers.sum(0)


def main(rows: int = 2048, size: int = 128, width: int = 256, steps: int = 30) -> dict[str, float]:
    """The losses before and after, how far off the Gramian is, and its memory."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, TASKS)).double()
    fn = pa.functional(net)
    x = torch.randn(rows, 16).double()
    wants = x @ torch.randn(16, TASKS).double()
    wants[:, 1] -= 2 * wants[:, 0]  # this task disagrees with task 0
    batch = {"x": x, "y": wants.sin()}

    def of_tasks(params: Tensors, batch: Tensors) -> Tensor:  # sums over samples
        return (fn.apply(params, (), batch["x"])[0] - batch["y"]).square().sum(0)

    cut = pa.microbatch(of_tasks, microbatch_size=size, reduce="sum")

    def losses(params: Tensors) -> Tensor:
        return cut(params, batch) / rows

    params, optimizer = fn.params, pa.adam(1e-2)
    state, first = optimizer.init(params), losses(params)
    for _ in range(steps):
        numbers = by_pcgrad(gramian(losses, params))
        (gradient,) = vjp(losses, params)[1](numbers)
        params, state = optimizer.apply(gradient, state, params)
    last = losses(params)
    print("losses of the tasks:")
    for i in range(TASKS):
        print(f"  task {i}: {float(first[i]):.3f} at the start, {float(last[i]):.3f} at the end")

    def written_out() -> Tensor:
        each = jacrev(lambda params: of_tasks(params, batch) / rows)(params)
        flat = torch.cat([x.flatten(1) for x in each.values()], 1)
        return flat @ flat.T

    ours, theirs = gramian(losses, params), written_out()
    off = float((ours - theirs).norm() / theirs.norm())
    held = {
        "Jacobian of the whole batch": peak(written_out),
        "one gradient, in microbatches": peak(lambda: gramian(losses, params)),
    }
    for name, bytes_ in held.items():
        print(f"  Gramian, {name + ':':31}{bytes_ / 1e6:6.1f} MB")
    ratio = held["one gradient, in microbatches"] / held["Jacobian of the whole batch"]
    return {"first": float(first.sum()), "last": float(last.sum()), "off": off, "memory": ratio}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
