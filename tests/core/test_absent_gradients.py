"""A leaf may have a gradient in some microbatches alone: sums are those of the loop."""

import pytest
import torch

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from tests.exactly import integers


pytestmark = [pytest.mark.exact, pytest.mark.promise("bits")]
SIDE = 300  # none is large alone, and together they are


@pytest.mark.parametrize("engine", ["func", "autograd"])
@pytest.mark.parametrize("donate", [False, True])
def test_a_leaf_that_every_other_microbatch_uses(engine, donate):
    random = torch.Generator().manual_seed(0)
    params = {name: integers(random, SIDE, SIDE, bound=1) for name in "abc"}
    params |= {"bias": integers(random, SIDE, bound=1), "large": torch.ones(512, 512)}
    rows = integers(random, 8, SIDE, bound=1)
    rows[:, 0] = torch.arange(8.0) % 4

    def loss(p, x):
        y = x @ p["a"] + p["bias"]
        some = x @ p["b"] if x[0, 0] == 0 else x @ p["c"] * p["large"][0, 0]
        return (y + some).sum()

    parts = rows.split(2)
    each = [torch.func.grad(loss)(params, part) for part in parts]
    want = {name: sum(x[name] for x in each) for name in params}
    got = pa.grad(loss, microbatch_size=2, reduction="sum", engine=engine, check=False)
    for _ in range(2):
        assert_trees_bitwise_equal(got(params, rows), want)
    step = pa.make_step(
        loss, pa.sgd(1.0), reduction="sum", engine=engine, donate=donate, check=False
    )
    state, _ = step.window(step.init(params), [*parts])
    assert_trees_bitwise_equal(state.params, {name: params[name] - want[name] for name in params})
