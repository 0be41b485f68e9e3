"""On CUDA: the same bits, no wait for the device, and half precision inside the loss."""

import optree
import pytest
import torch
from torch import Tensor

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from tests.core.models import MODELS, problem
from tests.exactly import LOSSES, full_batch, make_batch, make_params
from tests.tables import each_once


pytestmark = [pytest.mark.parity, pytest.mark.cuda, pytest.mark.promise("bits")]
engines = pytest.mark.parametrize("engine", ["func", "autograd"])


@pytest.fixture(autouse=True)
def full_precision():
    """TF32 keeps ten bits of an integer."""
    switches = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [switch.allow_tf32 for switch in switches]
    for switch in switches:
        switch.allow_tf32 = False
    yield
    for switch, was in zip(switches, before, strict=True):
        switch.allow_tf32 = was


def on_cuda(tree):
    return optree.tree_map(lambda x: x.cuda(), tree)


@each_once(
    "loss, size, nonfinite, engine",
    {loss.name: loss for loss in LOSSES},
    {f"{size} rows": size for size in (1, 3, 5, 11)},
    {f"{e}-{n}": (n, e) for n in ("propagate", "skip", "raise") for e in ("func", "autograd")},
)
def test_on_cuda_the_gradient_has_the_bits_of_the_full_batch(loss, size, nonfinite, engine):
    params, batch = make_params(size), make_batch(size, 12)
    gradient = pa.grad(
        loss.call,
        microbatch_size=size,
        reduction=loss.reduction,
        nonfinite=nonfinite,
        engine=engine,
    )
    grads = gradient(on_cuda(params), on_cuda(batch))
    assert all(g.is_cuda for g in grads.values())
    assert_trees_bitwise_equal(optree.tree_map(Tensor.cpu, grads), full_batch(loss, params, batch))


@pytest.mark.promise("launches")
@engines
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "attention"])
def test_an_accumulator_does_not_wait_for_the_device(name, nonfinite, donate, engine):
    """Weighted with its weight on the device, one microbatch all masked and one not finite."""
    given = problem(name, 0, 6, device="cuda")
    given.batch["mask"][:2] = 0
    given.batch["x"][2:4] = torch.nan if name != "embedding" else 1.0
    acc = pa.accumulator(given.weighted, nonfinite=nonfinite, engine=engine)
    acc.update(acc.init(given.params), given.params, given.batch)  # kernels load and wait
    parts = list(pa.microbatches(given.batch, 2))
    state = acc.init(given.params)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for part in parts:
            state = acc.update(state, given.params, part, donate=donate)
        grads, value = acc.finalize(state)
        pa.grad(given.weighted, microbatch_size=2, nonfinite=nonfinite, engine=engine)(
            given.params, given.batch
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    poisoned = name != "embedding"
    assert state.skipped.item() == (nonfinite == "skip" and poisoned)
    finite = nonfinite == "skip" or not poisoned
    assert pa.all_finite((grads, value)).item() == finite


@pytest.mark.promise("engines")
@pytest.mark.parametrize("name", [name for name in MODELS if name != "embedding"])
def test_engines_agree_in_bits_on_cuda(name):
    """Without atomics, two runs of the same kernels are the same."""
    given = problem(name, 0, 7, device="cuda")
    grads = [
        pa.grad(given.mean, microbatch_size=3, engine=engine)(given.params, given.batch)
        for engine in ("func", "autograd")
    ]
    assert_trees_bitwise_equal(*grads)


@pytest.mark.promise("narrow")
@pytest.mark.promise("policy")
@engines
@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
def test_fp16_autocast_may_be_inside_the_loss(nonfinite, engine):
    """2,048 tokens of gradient 64 each: their sum overflows fp16, where their mean does not."""
    w, x = torch.ones(4, 1, device="cuda"), torch.full((4096, 4), 64.0, device="cuda")

    def loss(w, x):
        with torch.autocast("cuda", torch.float16):
            out = x @ w
        assert out.dtype == torch.float16
        return pa.Weighted(out.float().sum(), len(x))

    gradient = pa.grad(loss, microbatch_size=2048, nonfinite=nonfinite, engine=engine)
    assert torch.equal(gradient(w, x), torch.full_like(w, 64.0))


@pytest.mark.promise("policy")
@pytest.mark.promise("errors")
@engines
def test_autocast_around_the_microbatches_is_refused(engine):
    """Its cache would keep a copy of every weight for every microbatch."""
    given = problem("linear", 0, 4, device="cuda")
    gradient = pa.grad(given.mean, microbatch_size=2, engine=engine)
    with torch.autocast("cuda", torch.float16), pytest.raises(RuntimeError, match="cache"):
        gradient(given.params, given.batch)
