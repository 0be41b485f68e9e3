"""On CUDA: plain code over microbatches gives the bits of the full batch, and waits for nothing."""

import optree
import pytest
import torch
from torch import Tensor, nn

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal


pytestmark = [
    pytest.mark.parity,
    pytest.mark.cuda,
    pytest.mark.promise("bits"),
    pytest.mark.promise("reductions"),
]


def on_cuda(tree):
    return optree.tree_map(lambda x: x.cuda(), tree)


def exact(size):
    """Whole numbers all the way: samples, a sum that others read, and the whole batch at once."""

    def loss(p, b):
        h = pa.microbatch(lambda p, b: (b["x"] @ p["a"]).relu(), microbatch_size=size)(p, b)
        s = pa.microbatch(lambda p, h: h.sum(0), reduce="sum", microbatch_size=size)(p, h)
        h = pa.microbatch(lambda p, h, s: (h + s) @ p["b"], microbatch_size=size)(p, h, s)
        return ((h - b["y"].flip(0)) ** 2).sum()

    return loss


@pytest.mark.parametrize("size", [1, 5, 11])
@pytest.mark.parametrize("gradient", [pa.grad, torch.func.grad], ids=["pa", "torch"])
def test_on_cuda_microbatched_functions_have_the_bits_of_the_full_batch(size, gradient):
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randint(-3, 4, shape, generator=g).float()  # noqa: E731
    params, batch = {"a": draw(5, 6), "b": draw(6, 4)}, {"x": draw(12, 5), "y": draw(12, 4)}
    want = gradient(exact(12))(params, batch)
    got = gradient(exact(size))(on_cuda(params), on_cuda(batch))
    assert all(x.is_cuda for x in got.values())
    assert_trees_bitwise_equal(optree.tree_map(Tensor.cpu, got), want)


@pytest.mark.promise("launches")
def test_a_microbatched_function_does_not_wait_for_the_device():
    """With numbers drawn inside, weights, and a sum that the loss divides."""
    net = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.ReLU()).cuda()
    fn, x = pa.functional(net), torch.randn(64, 5, device="cuda")

    def loss(p, x):
        z = pa.microbatch(lambda p, x: fn.apply(p, (), x)[0], microbatch_size=16)(p, x)
        mean = pa.microbatch(
            lambda p, z: pa.Weighted((z**2).sum(), (z > 0).sum()), reduce="sum", microbatch_size=16
        )(p, z)
        return mean + z.mean(0).square().sum()

    pa.grad(loss)(fn.params, x)  # allocates, and loads kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        pa.grad(loss)(fn.params, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.promise("second run")
def test_a_recomputation_on_cuda_draws_the_same_numbers():
    """The gradient of a sum of kept elements is the number of those that were seen as kept."""
    drop = pa.microbatch(lambda w, x: nn.functional.dropout(w * x, 0.5), microbatch_size=16)
    w, x = torch.ones((), device="cuda"), torch.ones(64, 8, device="cuda")
    got, value = torch.func.grad_and_value(lambda w: drop(w, x).sum())(w)
    assert torch.equal(got, value)
