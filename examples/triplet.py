"""Learn an embedding with a batch-hard triplet loss over the whole batch.

For each sample, the loss takes the farthest sample of its own class and the nearest of another
class, among all samples. The network runs in microbatches. The loss, which sees embeddings only,
runs once over the whole batch. The classes pass through the microbatches unchanged: an output need
not depend on the parameters.

    Run:   python examples/triplet.py
    Needs: no extra
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import normalize, softplus

import pureaccum as pa


torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 8))
Batch = dict[str, Tensor]


def embed(params: Batch, batch: Batch) -> Batch:
    return {"at": normalize(functional_call(NET, params, (batch["x"],))), "of": batch["of"]}


def batch_hard(embedded: Batch) -> Tensor:
    """The loss of Hermans, Beyer and Leibe, 2017, with a soft margin."""
    at, of = embedded["at"], embedded["of"]
    # not torch.cdist, which has no derivative at a distance of zero
    squared = (2 - 2 * at @ at.T).clamp(min=1e-6)
    same = of[:, None] == of[None, :]
    farthest = squared.masked_fill(~same, 0).amax(1).sqrt()
    nearest = squared.masked_fill(same, 8).amin(1).sqrt()
    return softplus(farthest - nearest).mean()


def main(steps: int = 60, rows: int = 240) -> tuple[float, float]:
    centres = torch.randn(6, 20)
    of = torch.arange(rows) % 6
    batch = {"x": centres[of] + 1.5 * torch.randn(rows, 20), "of": of}

    embed_all = pa.microbatch(embed, microbatch_size=16)
    step = pa.make_step(lambda params, batch: batch_hard(embed_all(params, batch)), pa.adamw(3e-3))
    state = step.init(pa.functional(NET).params)
    losses = []
    for i in range(steps):
        state, info = step(state, batch)
        losses.append(float(info.loss))
        if i % 20 == 0:
            print(f"step {i}: loss {losses[-1]:.3f}")
    print(f"end: loss {losses[-1]:.3f}")
    return losses[0], losses[-1]


if __name__ == "__main__":
    torch.set_num_threads(1)  # the tensors are small
    main()
