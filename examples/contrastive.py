"""Train two towers with a contrastive loss, on a batch larger than memory would hold.

An InfoNCE loss compares every sample with every other. Split into microbatches, it compares a
sample only with those in its microbatch, which is another loss. So only the towers run in
microbatches. The loss sees the embeddings of all samples, which are small, and the gradient is that
of the full batch.

    Run:   python examples/contrastive.py
    Needs: no extra
"""

from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, normalize

import pureaccum as pa


torch.manual_seed(0)
IMAGES = nn.Sequential(nn.Linear(48, 128), nn.GELU(), nn.Linear(128, 32))
TEXTS = nn.Sequential(nn.Embedding(64, 32), nn.Flatten(), nn.Linear(8 * 32, 32))
Batch = dict[str, Tensor]


def embed(params: Any, batch: Batch) -> Batch:
    """Unit vectors for the images and texts of one microbatch."""
    return {
        "images": normalize(functional_call(IMAGES, params["images"], (batch["image"],))),
        "texts": normalize(functional_call(TEXTS, params["texts"], (batch["text"],))),
    }


def info_nce(params: Any, embedded: Batch) -> Tensor:
    """Find each image's text among all texts, and each text's image among all images."""
    logits = embedded["images"] @ embedded["texts"].T * params["scale"].exp()
    right = torch.arange(len(logits))
    return (cross_entropy(logits, right) + cross_entropy(logits.T, right)) / 2


def pairs(rows: int) -> Batch:
    """Texts, and images that are noisy functions of them."""
    text = torch.randint(64, (rows, 8))
    seen = torch.sin(text[:, :, None] * torch.arange(1, 7) / 3).flatten(1)
    return {"image": seen + 0.1 * torch.randn_like(seen), "text": text}


def loss_of(params: Any, batch: Batch) -> Tensor:
    return info_nce(params, pa.microbatch(embed, microbatch_size=16)(params, batch))


def off(grads: Any, exact: Any) -> float:
    """The distance from the exact gradient, relative to its norm."""
    apart = optree.tree_map(torch.sub, grads, exact)
    return float(pa.global_norm(apart) / pa.global_norm(exact))


def main(steps: int = 40, rows: int = 512) -> tuple[float, float]:
    params = {
        "images": {name: p.detach() for name, p in IMAGES.named_parameters()},
        "texts": {name: p.detach() for name, p in TEXTS.named_parameters()},
        "scale": torch.tensor(1.0),
    }
    batch = pairs(rows)
    exact = torch.func.grad(lambda p: info_nce(p, embed(p, batch)))(params)
    for name, size in (("the towers in microbatches", None), ("the loss in microbatches", 16)):
        # without check=False the second one raises
        grads = pa.grad(loss_of, microbatch_size=size, check=False)(params, batch)
        print(f"{name}: off by {off(grads, exact):.1e} of the full batch's gradient")

    step = pa.make_step(loss_of, pa.adamw(3e-3))
    state = step.init(params)
    losses = []
    for i in range(steps):
        state, info = step(state, pairs(rows))
        losses.append(float(info.loss))
        if i % 10 == 0:
            print(f"step {i}: loss {losses[-1]:.3f}")
    print(f"end: loss {losses[-1]:.3f}, scale {float(state.params['scale'].exp()):.2f}")
    return losses[0], losses[-1]


if __name__ == "__main__":
    torch.set_num_threads(1)  # the tensors are small
    main()
