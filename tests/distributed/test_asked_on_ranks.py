"""A coupled loss over ranks: all of them raise, and are in step afterwards."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

import pureaccum as pa
from pureaccum import CoupledLossError
from pureaccum.distributed import psum
from pureaccum.testing import assert_trees_bitwise_equal
from tests.problems import forget_losses
from tests.ranks import cases_on_ranks


pytestmark = [pytest.mark.transforms, pytest.mark.promise("ranks"), pytest.mark.promise("refused")]
SIZE = 4
W = torch.tensor([0.5, -1.0, 0.25])
FEW = {"one row": (1, 9), "no rows": (0, 9), "uneven": (5, 12), "even": (8, 8)}


def rows(n, bad=False):
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(n))
    return {"x": x, "mask": torch.arange(n) % 3 + 1.0 if bad else torch.ones(n)}


def fits(w, batch):
    return ((batch["x"] @ w) ** 2).mean()


def masked(w, batch):
    return ((batch["x"] @ w) ** 2 * batch["mask"]).sum() / batch["mask"].sum()


def standardised(w, batch):
    """Over all ranks; within this one it would be refused."""
    total, count = psum((batch["x"].sum(0), torch.tensor(float(len(batch["x"])))))
    return (((batch["x"] - total / count) @ w) ** 2).mean()


def making(loss, **options):
    forget_losses()  # cases are one loss
    step = pa.make_step(loss, pa.sgd(0.1), group=dist.group.WORLD, **options)
    return step, step.init(W)


def agree_again():
    """A step of all ranks, which are in step again."""
    step, state = making(lambda w, batch: fits(w, batch), microbatch_size=SIZE)
    new, info = step(state, rows(8))
    assert info.weight == 8 * dist.get_world_size()
    assert info.applied
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, new.params)
    assert_trees_bitwise_equal(*every)


def own(mine):
    return mine[dist.get_rank()]


def refused_on_all(counts, **options):
    """By its own samples where a rank has some to cut, and by the word of the other elsewhere."""
    step, state = making(masked, microbatch_size=SIZE, **options)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"does not add up|rank") as caught:
            step(state, rows(own(counts), bad=True))
        if own(counts) > SIZE:
            assert isinstance(caught.value, CoupledLossError)
    assert torch.equal(state.params, W)
    agree_again()


def refused_by_one(**options):
    """The samples of the last rank alone show it."""
    last = dist.get_rank() == dist.get_world_size() - 1
    step, state = making(masked, microbatch_size=SIZE, **options)
    for _ in range(2):
        with pytest.raises(CoupledLossError if last else ValueError) as caught:
            step(state, rows(12, bad=last))
        assert isinstance(caught.value, CoupledLossError) == last
        if not last:
            assert f"rank {dist.get_world_size() - 1}" in str(caught.value)
    step(state, rows(12))
    agree_again()


def refused_in_a_stream():
    step, state = making(masked)
    window = step.begin(state)
    window = step.update(state, window, rows(own((4, 7))))
    with pytest.raises(CoupledLossError):
        step.update(state, window, rows(8, bad=True))
    window = step.update(state, window, rows(4))
    _, info = step.apply(state, window)
    assert info.weight == 4 + 7 + 8
    agree_again()


def fits_on_all(counts, **options):
    """And the bits are those of ranks that nobody asks."""
    states = []
    for check in (True, False):
        step, state = making(fits, microbatch_size=SIZE, check=check, **options)
        for _ in range(9):
            state, _ = step(state, rows(own(counts)))
        states.append(state.params)
    assert_trees_bitwise_equal(*states)


def reaches_others():
    """Each call of it is one of all ranks: nobody asks, and nobody waits."""
    step, state = making(standardised, microbatch_size=SIZE)
    for _ in range(5):
        state, info = step(state, rows(8))
        assert info.applied
    agree_again()


def rank_0_evaluates():
    """It calls the loss more often than the others, in values and with a setting of its own."""
    step, state = making(fits, microbatch_size=SIZE)
    for i in range(9):
        if dist.get_rank() == 0:
            with pa.checks("always" if i % 2 else "off"):
                pa.value(fits, microbatch_size=SIZE)(state.params, rows(10))
                pa.grad(fits, microbatch_size=SIZE)(state.params, rows(8 + i))
        with pa.checks("off" if dist.get_rank() else "always"):
            state, info = step(state, rows(8 + i * dist.get_rank()))
        assert bool(info.checked) == (dist.get_rank() == 0)
    agree_again()


CASES = {
    "refused by one": refused_by_one,
    "rank 0 evaluates": rank_0_evaluates,
    "refused in a stream": refused_in_a_stream,
    "reaches others": reaches_others,
    **{f"refused, {name}": partial(refused_on_all, counts) for name, counts in FEW.items()},
    **{f"fits, {name}": partial(fits_on_all, counts) for name, counts in FEW.items()},
}
COMPILED = {
    "refused": partial(refused_on_all, (8, 8), compile={"backend": "eager"}),
    "refused by one": partial(refused_by_one, compile={"backend": "eager"}),
    "fits": partial(fits_on_all, (5, 12), compile={"backend": "eager"}),
}


@pytest.fixture(scope="module")
def outcomes():
    return cases_on_ranks(2, CASES)


@pytest.mark.slow
@pytest.mark.table  # all run at once
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.given_up("cut collectives"))
        if name == "reaches others"
        else name
        for name in CASES
    ],
)
def test_ranks_raise_together_and_go_on_together(name, outcomes):
    assert not any(outcomes[name]), "\n".join(outcomes[name])


@pytest.mark.nightly
def test_compiled_steps_raise_together_and_go_on_together():
    for name, texts in cases_on_ranks(2, COMPILED).items():
        assert not any(texts), f"{name}: " + "\n".join(texts)
