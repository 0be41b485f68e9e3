"""Out of memory on CUDA: the allocator's own error, its own record, and its cache given back."""

import pytest
import torch

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal


pytestmark = [pytest.mark.parity, pytest.mark.cuda, pytest.mark.promise("one buffer")]
ROWS, WIDTH = 64, 2**20  # an activation of the whole batch is 256 MiB


def loss(params, batch):
    hidden = torch.nn.functional.dropout(torch.tanh(batch * params))
    return (torch.tanh(hidden) ** 2).mean()


def given():
    return torch.linspace(1, 2, WIDTH, device="cuda"), torch.ones(ROWS, WIDTH, device="cuda")


@pytest.mark.promise("sizes")
def test_a_size_is_found_and_the_result_is_that_of_the_size():
    params, batch = given()
    step = pa.make_step(loss, pa.adamw(1e-3), microbatch_size="auto")
    state = step.init(params)
    step(state, batch[:1])  # kernels are loaded, and their memory is taken
    torch.cuda.empty_cache()
    torch.cuda.manual_seed(0)
    total = torch.cuda.get_device_properties("cuda").total_memory
    held = torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction((held + 600 * 2**20) / total)
    try:
        found, info = step(state, batch)
        after = torch.cuda.get_rng_state()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    size = ROWS // int(info.microbatches)
    assert 1 <= size < ROWS
    torch.cuda.manual_seed(0)
    explicit = pa.make_step(loss, pa.adamw(1e-3), microbatch_size=size)
    assert_trees_bitwise_equal((found, info), explicit(state, batch))
    assert torch.equal(torch.cuda.get_rng_state(), after)


def test_what_is_predicted_is_allocated_on_cuda():
    """Up to the allocator's blocks of 512 bytes, for some hundred tensors."""
    params, batch = given()
    step = pa.make_step(loss, pa.adamw(1e-3), microbatch_size=16)
    state = step.init(params)
    step(state, batch)
    report = pa.memory_report(step, state, batch)
    predicted, measured = report.predicted.beyond_arguments, report.measured.beyond_arguments
    assert abs(predicted - measured) <= 512 * 1000
