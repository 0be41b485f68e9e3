"""Train a mixture of experts whose balance loss counts over the whole batch.

The balance loss multiplies, for each expert, the share of samples that go to it with the mean of
its probability: a product of two means over the batch, which is no mean of the products over its
microbatches. So both are summed over microbatches, beside the error, and the loss is a function of
the sums.

    python examples/mixture_of_experts.py
"""

import torch
from torch import Tensor
from torch.nn.functional import one_hot

import pureaccum as pa


EXPERTS, WIDTH = 4, 16
Batch = dict[str, Tensor]


def sums(params: Batch, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """The error; for each expert, how many samples go to it and their sum of its probability."""
    probability = (batch["x"] @ params["router"]).softmax(1)
    highest, to = probability.max(1)
    out = torch.einsum("nd,nde->ne", batch["x"], params["experts"][to])  # an expert is a matrix
    error = (out * highest[:, None] - batch["y"]) ** 2
    return error.sum(), one_hot(to, EXPERTS).sum(0), probability.sum(0)


def loss_of(params: Batch, batch: Batch) -> tuple[Tensor, Tensor]:
    summed = pa.microbatch(sums, microbatch_size=16, reduce="sum")
    error, to, probability = summed(params, batch)
    rows = len(batch["x"])
    balance = EXPERTS * ((to / rows) * (probability / rows)).sum()  # 1 where all is even
    return error / batch["y"].numel() + 0.1 * balance, balance


def main(steps: int = 60, rows: int = 256) -> tuple[float, float]:
    torch.manual_seed(0)
    params = {
        "router": torch.randn(WIDTH, EXPERTS) / 4,
        "experts": torch.randn(EXPERTS, WIDTH, WIDTH) / 4,
    }
    x = torch.randn(rows, WIDTH) + 1.0
    batch = {"x": x, "y": x.abs()}

    step = pa.make_step(loss_of, pa.adamw(1e-2), has_aux=True, aux_reduction="last")
    state = step.init(params)
    losses = []
    for i in range(steps):
        state, info = step(state, batch)
        losses.append(float(info.loss))
        if i % 20 == 0:
            print(f"step {i}: loss {losses[-1]:.3f}, balance {float(info.aux):.3f}")
    print(f"at last: loss {losses[-1]:.3f}, balance {float(info.aux):.3f}")
    return losses[0], losses[-1]


if __name__ == "__main__":
    torch.set_num_threads(1)  # tensors are too small for more
    main()
