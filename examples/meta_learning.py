"""Train many networks as one, and differentiate through training.

A third of the labels is wrong. An ensemble with several learning rates is a stack of states, and
one `vmap` of the step trains all members. Then every sample gets a weight. The loss on a few clean
samples after training is differentiated with respect to these weights and the learning rate,
through all accumulated steps and the optimizer, and the weights of the wrong labels fall. Two
members, slightly below and above a learning rate, confirm the derivative.

Each step keeps its state and its gradient, and computes its microbatches again for the derivative.
So memory grows by a state and a gradient per step, and not by intermediate results.

    Run:   python examples/meta_learning.py
    Needs: no extra
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, vmap
from torch.nn.functional import cross_entropy

import pureaccum as pa


torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 3)).double()
STEPS = 5  # of the training that is differentiated
Tensors = dict[str, Tensor]


def loss(params: Tensors, batch: Tensors) -> pa.Weighted:
    each = cross_entropy(functional_call(NET, params, (batch["x"],)), batch["y"], reduction="none")
    return pa.Weighted((batch["weight"] * each).sum(), batch["weight"].sum())


def one_step(state: pa.TrainState, batch: Tensors, rate: Tensor) -> pa.TrainState:
    # The rate is differentiated, so it is an argument and the step is made here.
    return pa.make_step(loss, pa.sgd(rate, momentum=0.9), microbatch_size=32)(state, batch)[0]


def judged(params: Tensors, clean: Tensors) -> Tensor:
    return cross_entropy(functional_call(NET, params, (clean["x"],)), clean["y"])


def of_members(rates: list[float], start: Tensors, batch: Tensors, clean: Tensors) -> Tensor:
    """The loss on clean samples after training with each learning rate, all at once."""
    # A rate that is a number is stored in the state, so one step serves all.
    steps = [pa.make_step(loss, pa.sgd(rate, momentum=0.9), microbatch_size=32) for rate in rates]
    members = pa.stack([step.init(start) for step in steps])
    for _ in range(STEPS):
        members, _ = vmap(steps[0], in_dims=(0, None))(members, batch)
    return vmap(judged, in_dims=(0, None))(members.params, clean)


def after_training(learned: Tensors, start: Tensors, batch: Tensors, clean: Tensors) -> Tensor:
    """The loss on clean samples after training, as a function of the rate and the weights."""
    rate = learned["log_rate"].exp()
    weighted = batch | {"weight": learned["worth"].sigmoid()}
    state = pa.make_step(loss, pa.sgd(rate, momentum=0.9)).init(start)
    for _ in range(STEPS):
        state = one_step(state, weighted, rate)
    return judged(state.params, clean)


def main(steps: int = 20, rows: int = 150) -> tuple[list[float], Tensor, list[Tensor]]:
    """The losses while weights are learned; the derivative by the rate, and its estimates."""
    centres = torch.randn(3, 10)

    def drawn(rows: int) -> Tensors:
        y = torch.arange(rows) % 3
        return {"x": (centres[y] + 0.7 * torch.randn(rows, 10)).double(), "y": y}

    batch, clean = drawn(rows), drawn(30)
    wrong = torch.arange(rows) < rows // 3
    batch["y"] = torch.where(wrong, (batch["y"] + 1) % 3, batch["y"])
    batch["weight"] = torch.full((rows,), 0.5).double()
    start = pa.functional(NET).params

    print("learning rate   loss on clean samples")
    rates = [0.03, 0.1, 0.3, 1.0, 3.0]
    for rate, value in zip(rates, of_members(rates, start, batch, clean), strict=True):
        print(f"{rate:13}{value:21.3f}")

    log_rate = torch.tensor(-2.0).double()
    learned = {"worth": torch.zeros(rows).double(), "log_rate": log_rate}
    exact = grad(after_training)(learned, start, batch, clean)["log_rate"]
    print(f"\nderivative by the logarithm of the rate, at {log_rate.exp():.3f}: {exact:.8f}")
    differences = []
    for h in (0.1, 0.05, 0.025):
        sides = [float((log_rate + by).exp()) for by in (-h, h)]
        low, high = of_members(sides, start, batch, clean)
        differences.append((high - low) / (2 * h))
        off = (differences[-1] - exact).abs()
        print(f"  from two members {h:5} away: {differences[-1]:.8f}, off by {off:.1e}")
    print("  half the distance gives a quarter of the error\n")

    adam = pa.adam(0.3)
    adam_state, losses = adam.init(learned), []
    for i in range(steps):
        grads, value = grad_and_value(after_training)(learned, start, batch, clean)
        learned, adam_state = adam.apply(grads, adam_state, learned)
        losses.append(float(value))
        if i % 5 == 0 or i == steps - 1:
            worth = learned["worth"].sigmoid()
            print(
                f"{i:2}: loss on clean samples {losses[-1]:.3f}, weight of wrong labels "
                f"{worth[wrong].mean():.2f}, of right labels {worth[~wrong].mean():.2f}, "
                f"learning rate {learned['log_rate'].exp():.3f}"
            )
    return losses, exact, differences


if __name__ == "__main__":
    torch.set_num_threads(1)  # the tensors are small
    main()
