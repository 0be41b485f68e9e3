"""Forty random networks of layers that keep rows apart: none is refused, at any size."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import pureaccum as pa
from pureaccum import CoupledLossError
from pureaccum._core import coupling


pytestmark = [pytest.mark.parity]
NETWORKS = 40
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
ROWS, LENGTH = 33, 4
WIDTHS = (4, 8, 12)


@pytest.fixture(autouse=True)
def _nobody_was_asked():
    """Calls are counted for each loss, and all of these are one if their networks are gone."""
    coupling._answers.clear()


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        out = self.inner(x)
        return x + (out[0] if isinstance(out, tuple) else out)


class Attending(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Along(nn.Module):
    """A layer over the positions of a row."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.mT).mT


LAYERS = [
    lambda n: nn.Linear(n, n),
    lambda n: Residual(nn.Sequential(nn.Linear(n, 2 * n), nn.GELU(), nn.Linear(2 * n, n))),
    nn.LayerNorm,
    lambda n: Residual(nn.GRU(n, n, batch_first=True)),
    lambda n: Residual(nn.LSTM(n, n, batch_first=True)),
    lambda n: Residual(Attending(n)),
    lambda n: Along(nn.Conv1d(n, n, 3, padding=1)),
    lambda n: Along(nn.GroupNorm(2, n)),
    lambda n: Along(nn.InstanceNorm1d(n, affine=True)),
    lambda n: Along(nn.BatchNorm1d(n).eval()),
    lambda n: nn.TransformerEncoderLayer(n, 2, n, batch_first=True),
    lambda _: nn.Dropout(0.2),
    lambda _: nn.SiLU(),
    lambda _: nn.RReLU(),
    lambda _: nn.Softmax(-1),
]
LOSSES = {
    "mean": lambda out, y: F.cross_entropy(out.float().mean(1), y),
    "squares": lambda out, y: (out.mean(1) ** 2).mean(),
    "weighted": lambda out, y: pa.Weighted((out.square().mean((1, 2)) * y).sum(), y.sum()),
    "small beside large": lambda out, y: 1e3 + 1e-3 * out.mean(),
    "about zero": lambda out, y: (out - out.detach()).mean(),
}


def network(seed):
    random.seed(seed)
    torch.manual_seed(seed)
    width = random.choice(WIDTHS)
    layers = [random.choice(LAYERS)(width) for _ in range(random.randint(1, 5))]
    return nn.Sequential(nn.Linear(3, width), *layers, nn.Linear(width, 3))


def sizes(seed, dtype):
    """Of a network that is quick, a few; of the others each size, in one of the dtypes."""
    at = DTYPES.index(dtype)
    return (
        [1, 2, 3, 4, 7, 32] if seed < 6 and seed % 3 == at else [*range(1 + (at + seed) % 3, 33, 3)]
    )


@pytest.mark.parametrize(
    ("seed", "dtype"),
    [
        pytest.param(
            seed,
            dtype,
            id=f"{seed}-{str(dtype).removeprefix('torch.')}",
            marks=() if seed < 6 and DTYPES[seed % 3] == dtype else pytest.mark.slow,
        )
        for seed in range(NETWORKS)
        for dtype in DTYPES
    ],
)
def test_a_network_whose_rows_are_apart_is_not_refused(seed, dtype):
    net = network(seed).to(dtype)
    params = {name: p.detach() for name, p in net.named_parameters()}
    kind = [*LOSSES][seed % len(LOSSES)]
    batch = {"x": torch.randn(ROWS, LENGTH, 3).to(dtype), "y": torch.arange(ROWS) % 3}

    def loss(params, batch):
        return LOSSES[kind](functional_call(net, params, (batch["x"],)), batch["y"])

    for size in sizes(seed, dtype):
        coupling._answers.clear()
        value = pa.value(loss, microbatch_size=size)
        for _ in range(3):
            value(params, batch)
        pa.grad(loss, microbatch_size=size, engine="auto")(params, batch)


def test_a_batch_norm_among_them_is_refused():
    """The control."""
    for seed in range(10):
        net = nn.Sequential(network(seed), nn.BatchNorm1d(LENGTH, track_running_stats=False))
        params = {name: p.detach() for name, p in net.named_parameters()}

        def loss(params, x, net=net):
            return (functional_call(net, params, (x,)) ** 4).mean()

        with pytest.raises(CoupledLossError):
            pa.value(loss, microbatch_size=4)(params, torch.randn(ROWS, LENGTH, 3))
