"""Train a mixture of experts whose balance loss counts over the whole batch.

The balance loss multiplies, for each expert, the share of rows that go to it with the mean of its
probability: a product of two means over the batch, which is no mean of the products over its
microbatches. Both are pooled, and read when the loss is computed.

    python examples/mixture_of_experts.py
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

import pureaccum as pa


EXPERTS, WIDTH = 4, 16
Batch = dict[str, Tensor]


def route(params: Batch, batch: Batch) -> Batch:
    """Each row to the expert that is most probable."""
    probability = (batch["x"] @ params["router"]).softmax(1)
    return {**batch, "probability": probability, "to": probability.argmax(1)}


def load(params: Batch, routed: Batch) -> Any:
    """Rows, how many of them go to each expert, and the sum of the probabilities."""
    to = one_hot(routed["to"], EXPERTS).sum(0)
    return len(routed["to"]), to, routed["probability"].sum(0)


def loss_of(params: Batch, routed: Batch, load: Any) -> tuple[Tensor, Tensor]:
    chosen = params["experts"][routed["to"]]  # an expert is a matrix
    out = torch.einsum("nd,nde->ne", routed["x"], chosen)
    out = out * routed["probability"].gather(1, routed["to"][:, None])
    rows, to, probability = load
    balance = EXPERTS * ((to / rows) * (probability / rows)).sum()  # 1 where all is even
    return ((out - routed["y"]) ** 2).mean() + 0.1 * balance, balance


def main(steps: int = 60, rows: int = 256) -> tuple[float, float]:
    torch.manual_seed(0)
    params = {
        "router": torch.randn(WIDTH, EXPERTS) / 4,
        "experts": torch.randn(EXPERTS, WIDTH, WIDTH) / 4,
    }
    x = torch.randn(rows, WIDTH) + 1.0
    batch = {"x": x, "y": x.abs()}

    loss = pa.staged([pa.rowwise(route), pa.pooled(load), pa.rowwise(loss_of, reads="load")])
    step = pa.make_step(
        loss, pa.adamw(1e-2), has_aux=True, aux_reduction="last", microbatch_size=16
    )
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
