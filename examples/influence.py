"""Find the training samples that cause a network's errors, with conjugate gradients.

A tenth of the labels is wrong. To first order, leaving a sample out changes the loss on clean
samples by its gradient times the inverse of the curvature times the gradient of that loss. The
curvature is the Gauss-Newton matrix of the whole training set, in microbatches, and is never
written out. Its products solve one linear system, and each sample's gradient is reduced to one
number.

    Run:   python examples/influence.py
    Needs: no extra
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.profiler import profile

import pureaccum as pa


Tensors = dict[str, Tensor]
DAMPING = 1e-2


def peak(run: Callable[[], object]) -> int:
    """The peak of allocated bytes during a call, beyond those before it."""
    with profile(profile_memory=True) as seen:
        run()
    live = most = 0
    for event in seen.profiler.kineto_results.events():
        live += event.nbytes() if event.name() == "[memory]" else 0
        most = max(most, live)
    return most


def main(rows: int = 4000, size: int = 100, width: int = 64, steps: int = 60) -> dict[str, float]:
    """The share of wrong labels found, that of chance, and how far off the solution is."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, width), nn.GELU(), nn.Linear(width, 10)).double()
    fn, centres = pa.functional(net), torch.randn(10, 20).double()

    def drawn(rows: int) -> Tensors:
        y = torch.arange(rows) % 10
        return {"x": centres[y] + torch.randn(rows, 20).double(), "y": y}

    right, clean = drawn(rows), drawn(500)
    wrong = torch.rand(rows) < 0.1
    other = (right["y"] + torch.randint(1, 10, (rows,))) % 10
    batch = right | {"y": torch.where(wrong, other, right["y"])}

    def forward(params: Tensors, batch: Tensors) -> Tensor:
        return fn.apply(params, (), batch["x"])[0]

    def criterion(out: Tensor, batch: Tensors) -> Tensor:
        return cross_entropy(out, batch["y"])

    def loss(params: Tensors, batch: Tensors) -> Tensor:
        return criterion(forward(params, batch), batch)

    step = pa.make_step(loss, pa.adamw(1e-2), microbatch_size=size)
    state = step.init(fn.params)
    for _ in range(steps):
        state, _ = step(state, batch)
    params = state.params

    # The inverse of the curvature times the gradient of the loss on clean samples.
    gradient = pa.grad(loss, microbatch_size=size)(params, clean)
    curvature = pa.curvature.ggnvp(forward, criterion, microbatch_size=size)
    solver = pa.curvature.cg(lambda v: curvature(params, batch, v), damping=DAMPING, rtol=1e-6)
    solved = solver.run(solver.init(gradient))

    # Each sample's gradient, reduced to one number: leaving the sample out adds it to the loss.
    def along(grad: Tensors) -> Tensor:
        return sum((grad[name] * x).sum() for name, x in solved.x.items()) / rows

    of_samples = pa.per_sample_grad(loss, chunk_size=size, transform=along, keep_batch_dim=True)
    influence = of_samples(params, batch)

    worst = influence.argsort()[: int(wrong.sum())]  # leaving them out lowers the loss most
    found = float(wrong[worst].double().mean())
    print(f"{int(wrong.sum())} of {rows} labels are wrong; {int(solved.steps)} steps of CG")
    print(f"  of the {len(worst)} most harmful samples, {found:.0%} have a wrong label")

    whole = pa.curvature.ggnvp(forward, criterion)
    v = gradient
    of_parts = peak(lambda: curvature(params, batch, v))
    of_all = peak(lambda: whole(params, batch, v))
    numbers = sum(p.numel() for p in params.values())
    print(f"  {f'product in {rows // size} microbatches':29}{of_parts / 1e6:9.1f} MB")
    print(f"  {'product of the whole batch':29}{of_all / 1e6:9.1f} MB")
    print(f"  {'matrix, if written out':29}{8 * numbers**2 / 1e6:9.1f} MB")
    print(f"  {'gradients of all samples':29}{8 * numbers * rows / 1e6:9.1f} MB")

    product = curvature(params, batch, solved.x)
    left = {name: product[name] + DAMPING * x - gradient[name] for name, x in solved.x.items()}
    off = float(pa.global_norm(left) / pa.global_norm(gradient))
    return {"found": found, "chance": float(wrong.double().mean()), "off": off}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
