"""Estimate how sure a network is of its predictions: a Laplace approximation, never written out.

After training, the posterior is approximated by a normal distribution, whose covariance is the
inverse of curvature plus prior. The variance of a prediction is its derivative, times that inverse,
times its derivative. That takes a linear system for each new point. All systems are solved at once,
by products with the Gauss-Newton matrix of the whole training set in microbatches.

    Run:   python examples/laplace.py
    Needs: no extra
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.functional import mse_loss
from torch.profiler import profile

import pureaccum as pa


Tensors = dict[str, Tensor]
NOISE, PRIOR = 0.1, 1.0  # standard deviation of a target, precision of a parameter


def peak(run: Callable[[], object]) -> int:
    """The peak of allocated bytes during a call, beyond those before it."""
    with profile(profile_memory=True) as seen:
        run()
    live = most = 0
    for event in seen.profiler.kineto_results.events():
        live += event.nbytes() if event.name() == "[memory]" else 0
        most = max(most, live)
    return most


def main(rows: int = 4096, size: int = 128, width: int = 24, steps: int = 300) -> dict[str, float]:
    """The standard deviation of predictions near data and far away, and how far off it is."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1)).double()
    fn = pa.functional(net)
    x = torch.randn(rows, 1).double().sign() * (0.5 + torch.rand(rows, 1).double())  # none near 0
    batch = {"x": x, "y": (3 * x).sin() + NOISE * torch.randn(rows, 1).double()}

    def forward(params: Tensors, batch: Tensors) -> Tensor:
        return fn.apply(params, (), batch["x"])[0]

    def likelihood(out: Tensor, batch: Tensors) -> Tensor:  # negative logarithm, summed
        return mse_loss(out, batch["y"], reduction="sum") / (2 * NOISE**2)

    def loss(params: Tensors, batch: Tensors) -> Tensor:
        penalty = sum(p.square().sum() for p in params.values()) / rows
        rate = len(batch["x"])
        return likelihood(forward(params, batch), batch) / rate + PRIOR / 2 * penalty

    rate = pa.cosine_decay(3e-2, steps)
    step = pa.make_step(loss, pa.adam(rate), microbatch_size=size)
    state = step.init(fn.params)
    for _ in range(steps):
        state, info = step(state, batch)
    params = state.params

    precision = pa.curvature.ggnvp(forward, likelihood, microbatch_size=size, reduction="sum")
    solver = pa.curvature.cg(lambda v: precision(params, batch, v), damping=PRIOR, rtol=1e-8)

    def predicted(params: Tensors, at: Tensor) -> Tensor:
        return fn.apply(params, (), at[None, None])[0].squeeze()

    points = torch.tensor([-3.0, -1.0, 0.0, 1.0, 3.0]).double()
    slopes = vmap(grad(predicted), in_dims=(None, 0))(params, points)
    states = vmap(solver.init)(slopes)
    while bool((states.norm > states.target).any()):  # until the last is solved
        states = vmap(solver.update)(states)
    terms = [(slopes[name] * x).flatten(1).sum(1) for name, x in states.x.items()]
    spread = sum(terms).sqrt()

    print(f"loss {info.loss:.3f}; {int(states.steps.max())} steps of CG for {len(points)} points")
    for at, s in zip(points.tolist(), spread.tolist(), strict=True):
        guess = float(predicted(params, torch.tensor(at).double()))
        print(f"  at {at:4.1f}: {guess:6.2f} ± {s:.3f}")

    whole = pa.curvature.ggnvp(forward, likelihood, reduction="sum")
    v = {name: x[0] for name, x in slopes.items()}
    print(f"product in microbatches: {peak(lambda: precision(params, batch, v)) / 1e6:.2f} MB")
    print(f"product of the whole batch: {peak(lambda: whole(params, batch, v)) / 1e6:.2f} MB")

    # The same with the matrix, which is small enough to be written out here.
    operator = pa.curvature.Operator(lambda v: precision(params, batch, v), params)
    matrix = operator @ torch.eye(operator.shape[0]).double()
    matrix += PRIOR * torch.eye(len(matrix)).double()
    flat = torch.cat([slopes[name].flatten(1) for name in sorted(slopes)], 1)
    by_hand = (flat * torch.linalg.solve(matrix, flat.T).T).sum(1).sqrt()
    off = float((spread / by_hand - 1).abs().max())
    # An estimate of the trace of the curvature, with its standard error.
    trace = pa.curvature.trace(operator.product, params, key=pa.key(0), samples=32)
    print(f"trace of the curvature: {trace.mean:.3g} ± {trace.error:.1g}")
    return {"near": float(spread[3]), "far": float(spread[4]), "gap": float(spread[2]), "off": off}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
