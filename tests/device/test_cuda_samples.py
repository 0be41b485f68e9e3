"""On CUDA: what is made of single samples has the bits of the CPU, and nothing waits for it."""

import optree
import pytest
import torch

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal


pytestmark = [pytest.mark.parity, pytest.mark.cuda, pytest.mark.promise("samples")]


def moved(tree, device):
    return optree.tree_map(lambda x: x.to(device), tree, namespace="pureaccum")


def problem(rows=11):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randint(-3, 4, shape, generator=generator).float()  # noqa: E731
    return {"w": draw(5, 4), "b": draw(4)}, {"x": draw(rows, 5), "y": draw(rows, 4)}


def loss(params, sample):
    return ((sample["x"] @ params["w"] + params["b"] - sample["y"]) ** 2).sum()


@pytest.mark.parametrize("reduce", ["concat", "sum", "moments"])
@pytest.mark.parametrize("engine", ["vmap", "autograd"])
def test_samples_on_cuda_have_the_bits_of_the_cpu(reduce, engine):
    params, batch = problem()
    of = pa.per_sample_grad(loss, chunk_size=4, reduce=reduce, engine=engine)
    got = of(moved(params, "cuda"), moved(batch, "cuda"))
    assert_trees_bitwise_equal(moved(got, "cpu"), of(params, batch))


@pytest.mark.promise("launches")
@pytest.mark.promise("samples")
def test_samples_do_not_wait_for_the_device():
    params, batch = (moved(tree, "cuda") for tree in problem())
    acc = pa.per_sample_accumulator(loss, chunk_size=4, transform="normalize", squares=True)
    options = {"microbatch_size": 4, "noise": True, "check": False}
    step = pa.make_step(lambda p, b: loss(p, b) / 11, pa.sgd(0.1), **options)
    running, key = pa.running_noise_scale(), pa.key(0, "cuda")
    first, averages = step.init(params), running.init(params)

    def everything():
        sums = acc.update(acc.init(params), params, batch, donate=True)
        clipped, _ = pa.clipped_sum(loss, 1.0, chunk_size=4)(params, batch)
        pa.add_noise(clipped, 1.0, key)
        state, info = step(first, batch)
        pa.noise_scale(sums, like=params)
        pa.unstack(pa.stack([state, state]))
        return running.read(running.update(averages, info.noise))

    everything()  # kernels load and wait
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        read = everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert read.noise > 0
