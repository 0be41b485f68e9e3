"""Learn what each sample is worth, and a learning rate, by differentiating through training.

A third of the labels is wrong. A network is trained for a few accumulated steps on all of them,
each with a weight; then its loss on a few clean rows is differentiated through all these steps,
microbatches and optimizer included, with respect to the weights and the learning rate. The
weights of the wrong labels go down. `pa.remat` around a step keeps its state and computes the
rest again, so memory grows by a state a step.

    python examples/meta_gradients.py
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value
from torch.nn.functional import cross_entropy

import pureaccum as pa


NET = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 3))
Tensors = dict[str, Tensor]


def loss(params: Tensors, batch: Tensors) -> pa.Weighted:
    each = cross_entropy(functional_call(NET, params, (batch["x"],)), batch["y"], reduction="none")
    return pa.Weighted((batch["weight"] * each).sum(), batch["weight"].sum())


def one_step(state: pa.TrainState, batch: Tensors, rate: Tensor) -> pa.TrainState:
    # What is differentiated is an argument, and so the step is made here, where the rate is known.
    return pa.make_step(loss, pa.sgd(rate, momentum=0.9), microbatch_size=32)(state, batch)[0]


def after_training(learned: Tensors, start: Tensors, batch: Tensors, clean: Tensors) -> Tensor:
    rate = learned["log_rate"].exp()
    weighted = batch | {"weight": learned["worth"].sigmoid()}
    state = pa.make_step(loss, pa.sgd(rate, momentum=0.9)).init(start)
    for _ in range(5):
        state = pa.remat(one_step)(state, weighted, rate)
    return cross_entropy(functional_call(NET, state.params, (clean["x"],)), clean["y"])


def main(steps: int = 40, rows: int = 150) -> tuple[float, float]:
    torch.manual_seed(0)
    centres = torch.randn(3, 10)

    def drawn(rows: int) -> Tensors:
        y = torch.arange(rows) % 3
        return {"x": centres[y] + 0.7 * torch.randn(rows, 10), "y": y}

    batch, clean = drawn(rows), drawn(30)
    wrong = torch.arange(rows) < rows // 3
    batch["y"] = torch.where(wrong, (batch["y"] + 1) % 3, batch["y"])

    start = pa.functional(NET).params
    learned = {"worth": torch.zeros(rows), "log_rate": torch.tensor(-2.0)}
    adam = pa.adam(0.3)
    adam_state = adam.init(learned)
    losses = []
    for i in range(steps):
        grads, value = grad_and_value(after_training)(learned, start, batch, clean)
        learned, adam_state = adam.apply(grads, adam_state, learned)
        losses.append(float(value))
        if i % 10 == 0 or i == steps - 1:
            worth = learned["worth"].sigmoid()
            print(
                f"{i:3}: loss on clean rows {losses[-1]:.3f}, weight of wrong labels "
                f"{worth[wrong].mean():.2f}, of right ones {worth[~wrong].mean():.2f}, "
                f"learning rate {learned['log_rate'].exp():.3f}"
            )
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
