"""Fine-tune a mostly frozen network: first a new head, then low-rank adapters in bf16.

Parameters that do not require grad are in ``fn.frozen``, not in ``fn.params``. As with AdamW over
``model.parameters()``, no optimizer moves or decays them. A policy casts them like the others, so
the network with adapters runs in bfloat16 as a whole.

    Run:   python examples/fine_tuning.py
    Needs: no extra
"""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pureaccum as pa


class Adapted(nn.Module):
    """A frozen layer, plus a trained low-rank one."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def pretrained() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())


def loss_of(fn: Any) -> Any:
    return lambda params, batch: F.cross_entropy(fn.apply(params, (), batch[0])[0], batch[1])


def tune(net: nn.Module, batch: Any, steps: int, **options: Any) -> tuple[Any, list[float]]:
    """Parameters and losses after some steps of AdamW, in microbatches of 32."""
    fn = pa.functional(net)
    step = pa.make_step(loss_of(fn), pa.adamw(1e-2), microbatch_size=32, **options)
    state, losses = step.init(fn.params), []
    for _ in range(steps):
        state, info = step(state, batch)
        losses.append(float(info.loss))
    return state.params, losses


def by_torch(net: nn.Module, batch: Any, steps: int) -> dict[str, Tensor]:
    """Parameters after some steps of torch's AdamW, on the whole batch."""
    net = copy.deepcopy(net)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(net(batch[0]), batch[1]).backward()
        optimizer.step()
    return dict(net.named_parameters())


def main(steps: int = 30, rows: int = 256) -> dict[str, float]:
    x = torch.randn(rows, 16, generator=torch.Generator().manual_seed(1))
    batch = x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()

    head = nn.Sequential(*pretrained().requires_grad_(False), nn.Linear(64, 4))
    params, losses = tune(head, batch, steps)
    theirs = by_torch(head, batch, steps)
    apart = max(float((params[k] - theirs[k]).detach().abs().max()) for k in params)
    print(f"new head: {len(params)} of {len(theirs)} parameter tensors trained, ", end="")
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}, {apart:.0e} away from torch's loop")

    base = pretrained()
    adapted = nn.Sequential(Adapted(base[0]), base[1], Adapted(base[2]), base[3], nn.Linear(64, 4))
    bf16 = pa.Policy(compute=torch.bfloat16)
    params, low = tune(adapted, batch, steps, policy=bf16)
    print(f"adapters in bf16: {len(params)} parameter tensors trained, ", end="")
    print(f"loss {low[0]:.3f} to {low[-1]:.3f}")
    return {"first": losses[0], "last": losses[-1], "apart": apart, "adapted": low[-1]}


if __name__ == "__main__":
    torch.set_num_threads(1)  # the tensors are small
    main()
