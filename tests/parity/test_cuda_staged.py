"""On CUDA: stages give the bits of the full batch, with boundaries on either side, and no wait."""

from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal


pytestmark = pytest.mark.cuda
where = pytest.mark.parametrize("boundaries", ["device", "host"])
engines = pytest.mark.parametrize("engine", ["func", "autograd"])


def on_cuda(tree: Any) -> Any:
    return optree.tree_map(lambda x: x.cuda(), tree)


def problem(rows: int = 12) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randint(-3, 4, shape, generator=generator).float()  # noqa: E731
    return {"a": draw(5, 6), "b": draw(6, 4)}, {"x": draw(rows, 5), "y": draw(rows, 4)}


def exact(boundaries: Any) -> Any:
    """Whole numbers all the way, a skip connection, a pooled value and the whole batch at once."""
    return pa.staged(
        [
            pa.rowwise(lambda p, b: {"h": (b["x"] @ p["a"]).relu(), "x": b["x"], "y": b["y"]}),
            pa.pooled(lambda p, x: x["h"].sum(0), "sum"),
            pa.rowwise(lambda p, x, s: x | {"h": (x["h"] + s) @ p["b"]}, reads="sum"),
            pa.full(lambda p, x: ((x["h"] - x["y"].flip(0)) ** 2).sum()),
        ],
        boundaries=boundaries,
    )


@where
@engines
@pytest.mark.parametrize("size", [1, 5, 11])
def test_the_full_batch_in_bits(size: int, boundaries: Any, engine: Any) -> None:
    params, batch = problem()
    want = pa.grad(exact("device"), reduction="sum")(params, batch)
    gradient = pa.grad(exact(boundaries), reduction="sum", microbatch_size=size, engine=engine)
    got = gradient(on_cuda(params), on_cuda(batch))
    assert all(x.is_cuda for x in got.values())
    assert_trees_bitwise_equal(optree.tree_map(Tensor.cpu, got), want)


@where
def test_nothing_waits_for_the_device(boundaries: Any) -> None:
    net = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.ReLU()).cuda()
    params = {name: p.detach() for name, p in net.named_parameters()}
    loss = pa.staged(
        [
            pa.rowwise(lambda p, x: functional_call(net, p, (x,))),
            *pa.batch_norm("moments"),
            pa.rowwise(lambda p, x: pa.Weighted((x**2).sum(), (x > 0).sum())),
        ],
        boundaries=boundaries,
    )
    x = torch.randn(64, 5, device="cuda")
    pa.grad(loss, microbatch_size=16)(params, x)  # allocates, and loads kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        pa.grad(loss, microbatch_size=16)(params, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@where
def test_a_stage_draws_the_same_numbers_again(boundaries: Any) -> None:
    """The gradient of a sum of kept elements is the number of those that were seen as kept."""
    loss = pa.staged(
        [
            pa.rowwise(lambda w, x: torch.nn.functional.dropout(w * x, 0.5)),
            pa.pooled(lambda w, x: x.sum(), "total"),  # so that there are two legs
            pa.rowwise(lambda w, x, total: x.sum() + 0 * total, reads="total"),
        ],
        boundaries=boundaries,
    )
    w, x = torch.ones((), device="cuda"), torch.ones(64, 8, device="cuda")
    got, value = pa.grad_and_value(loss, reduction="sum", microbatch_size=16)(w, x)
    assert torch.equal(got, value.float())


def test_memory_on_the_host_is_less() -> None:
    """Boundaries of the whole batch are not on the device."""
    weights = torch.ones(4, device="cuda")
    x = torch.ones(256, 64, 64, device="cuda")
    peaks = {}
    for boundaries in ("device", "host"):
        stages: list[Any] = []
        for i in range(4):
            stages += [
                pa.rowwise(lambda w, x, i=i: torch.tanh(w[i] * x)),
                pa.pooled(lambda w, x: x.mean(), f"mean {i}"),
                pa.rowwise(lambda w, x, m: x - m, reads=f"mean {i}"),
            ]
        stages.append(pa.rowwise(lambda w, x: x.square().mean()))
        loss = pa.staged(stages, boundaries=boundaries)
        pa.grad(loss, microbatch_size=8)(weights, x)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        pa.grad(loss, microbatch_size=8)(weights, x)
        peaks[boundaries] = torch.cuda.max_memory_allocated() - before
    assert peaks["host"] < peaks["device"] / 2
