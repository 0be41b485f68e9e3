"""The whole accumulation compiles into one graph that gives the numbers of eager code."""

import pytest
import torch

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from tests.draws import generator
from tests.laws.exactly import SUM, WEIGHTED, Loss, full_batch, make_batch, make_params


pytestmark = [pytest.mark.core, pytest.mark.optim]


@pytest.mark.parametrize(("loss", "nonfinite"), [(SUM, "propagate"), (WEIGHTED, "skip")])
def test_an_accumulation_compiles_into_one_graph(loss: Loss, nonfinite: str) -> None:
    gradient = pa.grad_and_value(
        loss.call, microbatch_size=3, reduction=loss.reduction, nonfinite=nonfinite
    )
    params, batch = make_params(0), make_batch(0, 8)
    torch.compiler.reset()
    compiled = torch.compile(gradient, fullgraph=True, backend="aot_eager")
    assert_trees_bitwise_equal(compiled(params, batch), gradient(params, batch))
    assert_trees_bitwise_equal(compiled(params, batch)[0], full_batch(loss, params, batch))


def test_a_dict_is_its_keys_and_not_their_order_in_a_graph_too() -> None:
    """Of gradients and of params, in another order than those that the state was made from."""
    random = generator(0)
    params, grads = (
        {name: torch.randn(3, generator=random) for name in order} for order in ("bac", "cab")
    )
    opt = pa.chain(pa.clip_by_global_norm(1.0), pa.sgd(0.5, momentum=0.5))
    alike = [{name: tree[name] for name in "abc"} for tree in (grads, params)]
    state = opt.init(alike[1])
    torch.compiler.reset()
    compiled = torch.compile(opt.apply, fullgraph=True, backend="aot_eager")
    got, _ = compiled(grads, state, params)
    want, _ = compiled(alike[0], state, alike[1])
    assert_trees_bitwise_equal(got, want)
