"""Norms and clipped sums of samples' gradients: those of Opacus, on the same network and batch.

Its hooks take other kernels to the same terms. How far apart a network's two graphs are is below
the square root of the unit, of the norms of what is added, in float32 and in float64.
"""

from copy import deepcopy
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pureaccum as pa


# of the hooks of Opacus on modules whose inputs need no gradient
pytestmark = [
    pytest.mark.parity,
    pytest.mark.skipif(
        not find_spec("opacus"), reason="opacus, which is compared with, is missing"
    ),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
    pytest.mark.promise("samples"),
]
ROWS = 9
ROOT_OF_UNIT = {torch.float32: 2.0**-12, torch.float64: 2.0**-26.5}
DTYPES = pytest.mark.parametrize("dtype", ROOT_OF_UNIT, ids=["float32", "float64"])
OPTIONS = {"batch_argnums": (1, 2), "keep_batch_dim": True}

NETWORKS = {
    "mlp": (
        lambda: [nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 3)],
        (6,),
    ),
    "convnet with group norm": (
        lambda: [
            *(nn.Conv2d(2, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.Softplus(), nn.AvgPool2d(2)),
            *(nn.Conv2d(8, 6, 3, 2), nn.GroupNorm(2, 6), nn.Flatten(), nn.Linear(24, 3)),
        ],
        (2, 10, 10),
    ),
    "embedding and layer norm": (
        lambda: [nn.Embedding(11, 8), nn.LayerNorm(8), nn.Tanh(), nn.Flatten(), nn.Linear(32, 3)],
        (4,),
    ),
}


def setup(name, dtype):
    """A network that the loss does not use, since Opacus leaves its hooks on it; and the loss."""
    build, shape = NETWORKS[name]
    torch.manual_seed(3)
    net, x = nn.Sequential(*build()).to(dtype), torch.randn(ROWS, *shape)
    params = {name: p.detach().clone() for name, p in net.named_parameters()}
    scale = 10.0 ** torch.arange(ROWS).remainder(3)[:, None]  # norms that are far apart
    y = (torch.randn(ROWS, 3) * scale).to(dtype)

    def loss(params, x, y):
        return F.mse_loss(torch.func.functional_call(net, params, (x,)), y, reduction="sum")

    x = (x.abs() * 4).long() % 11 if "embedding" in name else x.to(dtype)
    return deepcopy(net), params, (x, y), loss


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("engine", ["vmap", "autograd"])
@DTYPES
def test_norms_and_clipped_sums_are_those_of_opacus(name, engine, dtype):
    from opacus import GradSampleModule
    from opacus.optimizers.optimizer import DPOptimizer

    net, params, (x, y), loss = setup(name, dtype)
    hooked = GradSampleModule(net, loss_reduction="sum")
    F.mse_loss(hooked(x), y, reduction="sum").backward()
    theirs = [p.grad_sample.flatten(1) for p in net.parameters()]
    norms = torch.cat(theirs, 1).norm(dim=1)
    max_norm = float(norms.median())

    clipped = pa.clipped_sum(loss, max_norm, chunk_size=4, engine=engine, **OPTIONS)
    sums, seen = clipped(params, x, y)

    assert ((seen - norms).abs() <= ROOT_OF_UNIT[dtype] * norms).all()
    assert 0 < int((seen > max_norm).sum()) < ROWS
    sgd, how = torch.optim.SGD(net.parameters(), 1.0), {"loss_reduction": "sum"}
    how |= {"noise_multiplier": 0.0, "max_grad_norm": max_norm, "expected_batch_size": None}
    DPOptimizer(sgd, **how).clip_and_accumulate()
    near = ROOT_OF_UNIT[dtype] * norms.clamp(max=max_norm).sum()
    assert all((sums[k] - p.summed_grad).norm() <= near for k, p in net.named_parameters())
    whole = {k: p.grad_sample.sum(0) for k, p in net.named_parameters()}
    assert any((sums[k] - g).norm() > near for k, g in whole.items())  # a control


@pytest.mark.parametrize("name", NETWORKS)
@DTYPES
def test_a_norm_for_each_leaf_is_that_of_opacus(name, dtype):
    from opacus import GradSampleModule
    from opacus.optimizers.perlayeroptimizer import DPPerLayerOptimizer

    net, params, (x, y), loss = setup(name, dtype)
    hooked = GradSampleModule(net, loss_reduction="sum")
    F.mse_loss(hooked(x), y, reduction="sum").backward()
    theirs = {k: p.grad_sample.flatten(1).norm(dim=1) for k, p in net.named_parameters()}
    max_norms = {k: float(norms.median()) for k, norms in theirs.items()}
    sums, seen = pa.clipped_sum(loss, max_norms, chunk_size=4, **OPTIONS)(params, x, y)

    root = ROOT_OF_UNIT[dtype]
    whole = torch.stack([*theirs.values()]).norm(dim=0)
    assert all(((seen[k] - norms).abs() <= root * whole).all() for k, norms in theirs.items())
    sgd, how = torch.optim.SGD(net.parameters(), 1.0), {"loss_reduction": "sum"}
    how |= {"noise_multiplier": 0.0, "expected_batch_size": None}
    optimizer = DPPerLayerOptimizer(sgd, max_grad_norm=[*max_norms.values()], **how)
    optimizer.clip_and_accumulate()
    for k, p in net.named_parameters():
        assert (sums[k] - p.summed_grad).norm() <= root * whole.sum()
        assert (sums[k] - p.grad_sample.sum(0)).norm() > root * whole.sum()  # a control


@pytest.mark.parametrize("name", NETWORKS)
@DTYPES
def test_ghost_norms_are_those_of_opacus(name, dtype):
    """Of what goes into a layer and what comes back: a third way, without gradients of samples."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    net, params, (x, y), loss = setup(name, dtype)
    ghost = GradSampleModuleFastGradientClipping(net, max_grad_norm=1.0, loss_reduction="sum")
    F.mse_loss(ghost(x), y, reduction="sum").backward()
    norms = ghost.get_norm_sample()
    for reduce in ("sum", "concat"):  # as they are, and of gradients that are written out
        ours = pa.per_sample_grad(loss, reduce=reduce, metrics="norm", chunk_size=2, **OPTIONS)
        assert ((ours(params, x, y)[1] - norms).abs() <= ROOT_OF_UNIT[dtype] * norms).all()
