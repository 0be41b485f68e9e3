"""Random numbers on the device: drawn again where a microbatch is, and as a plain loop draws them.

That nothing else moves a generator is seen by ``features``, whose calls change nothing at all.
"""

import pytest
import torch
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from tests.device.world import errors, moved, whole_numbers


ENGINES = pytest.mark.parametrize("engine", ["func", "autograd"])


def dropped(w, x):
    return dropout(w * x, 0.5)


AGAIN = {
    "remat": pa.remat(dropped),
    "microbatch": pa.microbatch(dropped, microbatch_size=4),
    "checkpoint": lambda w, x: checkpoint(dropped, w, x, use_reentrant=False),
}


@ENGINES
@pytest.mark.parametrize("name", AGAIN)
def test_a_recomputation_draws_the_same_numbers(name, engine):
    """The gradient of a sum of kept elements is the number of those that were seen as kept."""
    if name == "checkpoint" and engine == "func":
        pytest.skip("torch.func refuses torch's checkpoint")
    w, x = torch.ones((), device="cuda"), torch.ones(64, 8, device="cuda")
    before = torch.get_rng_state()
    got, value = pa.grad_and_value(
        lambda w, x: AGAIN[name](w, x).sum(), reduction="sum", microbatch_size=16, engine=engine
    )(w, x)
    assert 0 < value < 2 * x.numel()
    assert torch.equal(got, value)
    assert torch.equal(torch.get_rng_state(), before)


@ENGINES
def test_numbers_are_those_of_a_plain_loop(engine):
    w, x = torch.ones((), device="cuda"), torch.ones(64, 8, device="cuda")
    torch.cuda.manual_seed(1)
    want = sum(dropped(w, part).sum() for part in x.split(16))
    after = torch.cuda.get_rng_state()
    torch.cuda.manual_seed(1)
    got = pa.grad(
        lambda w, x: dropped(w, x).sum(), reduction="sum", microbatch_size=16, engine=engine
    )(w, x)
    assert torch.equal(got, torch.as_tensor(want))
    assert torch.equal(torch.cuda.get_rng_state(), after)


def test_a_generator_of_the_loss_moves_as_in_a_plain_loop():
    random = torch.Generator("cuda").manual_seed(1)
    w, x = torch.ones((), device="cuda"), torch.ones(8, device="cuda")
    before = torch.cuda.get_rng_state()

    def loss(w, x):
        return (w * x * torch.rand(len(x), generator=random, device="cuda")).sum()

    pa.grad(loss, reduction="sum", microbatch_size=2)(w, x)
    after, random = random.get_state(), random.manual_seed(1)
    for part in x.split(2):
        loss(w, part)
    assert torch.equal(random.get_state(), after)
    assert torch.equal(torch.cuda.get_rng_state(), before)


@ENGINES
@pytest.mark.parametrize("size", [1, 3, 11])
def test_keyed_numbers_are_those_of_the_cpu_however_a_batch_is_cut(size, engine):
    params, batch = whole_numbers()

    def loss(p, b, keys):
        error = errors(p, {**b, "x": pa.dropout(b["x"], 0.5, keys)})
        return pa.Weighted((error * b["mask"]).sum(), b["mask"].sum())

    def after_one(device, size):
        step = pa.make_step(loss, pa.sgd(2.0**-3), microbatch_size=size, keys=True, engine=engine)
        state, _ = step(step.init(moved(params, device), seed=3), moved(batch, device))
        return moved(state, "cpu")

    assert_trees_bitwise_equal(after_one("cuda", size), after_one("cpu", 11))
