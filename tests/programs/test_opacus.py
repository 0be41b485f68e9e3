"""Opacus' examples/cifar10.py, on digits: Poisson batches, samples clipped, noise, momentum.

github.com/pytorch/opacus
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from tests.programs.data import digits, near


pytestmark = [pytest.mark.parity, pytest.mark.promise("programs")]
ROWS, RATE, STEPS, CLIP = 200, 0.2, 3, 0.5
EXPECTED = ROWS * RATE


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(64, 12), nn.GroupNorm(3, 12), nn.Tanh(), nn.Linear(12, 10)
    return nn.Sequential(*layers).double()


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """Each sample with a probability of its own; perhaps none."""
    taken = torch.rand(ROWS, generator=torch.Generator().manual_seed(step)) < RATE
    x, y = digits()
    return x[:ROWS][taken].double(), y[:ROWS][taken]


def noise_of(step: int, shape: Any, index: int) -> Tensor:
    drawn = torch.Generator().manual_seed(100 * step + index)
    return torch.randn(shape, generator=drawn, dtype=torch.float64)


def original(sigma: float) -> dict[str, Tensor]:
    model = network()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.5, momentum=0.9)
    for step in range(STEPS):
        x, y = batch_of(step)
        sums = [torch.zeros_like(p) for p in parameters]
        for image, label in zip(x, y, strict=True):  # what its hooks do, sample by sample
            loss = F.cross_entropy(model(image[None]), label[None])
            grads = torch.autograd.grad(loss, parameters)
            norm = torch.cat([g.flatten() for g in grads]).norm()
            factor = (CLIP / (norm + 1e-6)).clamp(max=1.0)
            for total, g in zip(sums, grads, strict=True):
                total += g * factor
        for i, (p, total) in enumerate(zip(parameters, sums, strict=True)):
            noise = sigma * CLIP * noise_of(step, p.shape, i)
            p.grad = (total + noise) / EXPECTED
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def ported(sigma: float, path: str = "", stop: int = STEPS) -> dict[str, Tensor]:
    fn, optimizer = pa.functional(network()), pa.sgd(0.5, momentum=0.9)

    def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(fn.apply(params, (), x)[0], y)

    clipped = pa.clipped_sum(loss, CLIP, batch_argnums=(1, 2), keep_batch_dim=True, chunk_size=16)
    params, state = fn.params, optimizer.init(fn.params)
    if path and Path(path).exists():
        params, state = pa.load(path, like=(params, state))
    names = [name for name, _ in network().named_parameters()]
    for step in range(int(state.steps), stop):
        sums = clipped(params, *batch_of(step))[0]
        grads = {
            n: (g + sigma * CLIP * noise_of(step, g.shape, names.index(n))) / EXPECTED
            for n, g in sums.items()
        }
        params, state = optimizer.apply(grads, state, params)
    if path:
        pa.save(path, (params, state))
    return params


ORIGINAL, PORTED = [original], [ported]


@pytest.mark.parametrize("sigma", [0.0, 1.0])
def test_it_is_the_original(sigma: float) -> None:
    assert near(ported(sigma), original(sigma)) <= 2.0**-26.5


def test_it_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    ported(1.0, path, stop=1)
    assert_trees_bitwise_equal(ported(1.0, path), ported(1.0))
