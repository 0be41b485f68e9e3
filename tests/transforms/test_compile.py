"""The whole accumulation compiles into one graph that gives the numbers of eager code."""

import pytest
import torch

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from tests.laws.exactly import SUM, WEIGHTED, Loss, full_batch, make_batch, make_params


@pytest.mark.parametrize(("loss", "nonfinite"), [(SUM, "propagate"), (WEIGHTED, "skip")])
def test_one_graph(loss: Loss, nonfinite: str) -> None:
    gradient = pa.grad_and_value(
        loss.call, microbatch_size=3, reduction=loss.reduction, nonfinite=nonfinite
    )
    params, batch = make_params(0), make_batch(0, 8)
    torch.compiler.reset()
    compiled = torch.compile(gradient, fullgraph=True, backend="aot_eager")
    assert_trees_bitwise_equal(compiled(params, batch), gradient(params, batch))
    assert_trees_bitwise_equal(compiled(params, batch)[0], full_batch(loss, params, batch))
