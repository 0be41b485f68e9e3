"""A whole step on CUDA: nothing waits for the device, and torch's optimizers agree in bits."""

import optree
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import pureaccum as pa
from pureaccum._optim import updates
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from tests.optimizers import COMBINATIONS


pytestmark = [pytest.mark.parity, pytest.mark.cuda, pytest.mark.promise("optimizers")]
RATES = {
    "a number": 1e-2,
    "a schedule": pa.join_schedules(
        [pa.linear_warmup(torch.tensor(1e-2), 2), pa.cosine_decay(1e-2, 9)], [2]
    ),
}
MAKE = {
    "sgd": lambda lr, fused: pa.sgd(lr, momentum=0.9, nesterov=True, fused=fused),
    "dampened": lambda lr, fused: pa.sgd(lr, momentum=0.9, dampening=0.5, fused=fused),
    "adam": lambda lr, fused: pa.adam(lr, amsgrad=True, fused=fused),
    "adamw": lambda lr, fused: pa.adamw(lr, fused=fused),
    "chain": lambda lr, fused: pa.chain(pa.clip_by_global_norm(0.1), pa.adamw(lr, fused=fused)),
}


def given():
    random = torch.Generator("cuda").manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=random, device="cuda")

    batch = {"x": draw(24, 32), "y": draw(24, 4), "mask": (draw(24) > 0).float()}
    # so small that no sum of gradients in float16 overflows
    return {"in": draw(32, 16) / 8, "b": draw(16) / 8, "out": draw(16, 4) / 8}, batch


def loss(params, batch, keys):
    h = pa.dropout(torch.relu(batch["x"] @ params["in"] + params["b"]), 0.1, keys)
    error = ((h @ params["out"] - batch["y"]).float() ** 2).sum(-1)
    return pa.Weighted((error * batch["mask"]).sum(), batch["mask"].sum())


@pytest.mark.promise("launches")
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("name", MAKE)
def test_a_step_does_not_wait_for_the_device(name, rate, fused, nonfinite, donate):
    params, batch = given()
    step = pa.make_step(
        loss,
        MAKE[name](RATES[rate], fused),
        microbatch_size=7,
        keys=True,
        policy=pa.Policy(compute=torch.float16),
        loss_scale=pa.dynamic_loss_scale(8.0),
        nonfinite=nonfinite,
        donate=donate,
    )
    poisoned = {**batch, "x": torch.full_like(batch["x"], torch.inf)}
    first = step.init(params)
    step.apply(first, step.update(first, step.begin(first), batch))  # kernels load and wait
    state, _ = step(step.init(params), batch)
    seen = []
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for part in (batch, poisoned, batch):
            state, info = step(state, part)
            seen.append(info.applied)
        window = step.begin(state)
        for part in pa.microbatches(batch, 5):
            window = step.update(state, window, part)
        state, info = step.apply(state, window)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [x.item() for x in seen] == [True, False, True]
    assert state.applied.item() == 4
    assert state.attempts.item() == 5
    assert pa.all_finite(state.params)


@pytest.mark.promise("applied")
@pytest.mark.parametrize(
    "donate", [False, pytest.param(True, marks=pytest.mark.given_up("donation elsewhere"))]
)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("name", MAKE)
def test_a_step_not_applied_changes_no_bit_on_cuda(name, applied, fused, donate):
    params, _ = given()
    grads = optree.tree_map(torch.ones_like, params)
    optimizer = MAKE[name](1e-2, fused)
    params, state = optimizer.apply(grads, optimizer.init(params), params)
    before = optree.tree_map(torch.clone, (params, state))
    flag = torch.full((), applied, device="cuda")
    after = optimizer.apply(grads, state, params, applied=flag, donate=donate)
    same = optree.tree_map(torch.equal, before, after)
    assert all(optree.tree_leaves(same)) is not applied


@pytest.mark.given_up("donation elsewhere")
@pytest.mark.parametrize("group", [1, 3000, 2**30])
@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("name", MAKE)
def test_donated_leaves_are_stepped_in_groups_and_no_bit_is_another(
    name, applied, group, monkeypatch
):
    monkeypatch.setattr(updates, "GROUP", group)
    optimizer, flag, found = MAKE[name](1e-2, False), torch.full((), applied, device="cuda"), []
    for donate in (False, True):
        params, _ = given()
        state = optimizer.init(params)
        for factor in (1, 2):
            grads = optree.tree_map(lambda x, factor=factor: factor * x, given()[0])
            params, state = optimizer.apply(grads, state, params, applied=flag, donate=donate)
        found.append((params, state))
    assert_trees_bitwise_equal(*found)


@pytest.mark.promise("purity")
@pytest.mark.parametrize("fused", [False, True])
@COMBINATIONS
def test_an_update_changes_no_argument(name, switches, fused):
    numbers = {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}
    settings = {flag: numbers.get(flag, True) for flag, on in switches.items() if on}
    optimizer, (params, _) = getattr(pa, name)(1e-2, fused=fused, **settings), given()
    grads, state = optree.tree_map(torch.ones_like, params), optimizer.init(params)
    for flag in (None, torch.ones((), dtype=torch.bool, device="cuda")):
        with unchanged(grads, state, params):
            optimizer.apply(grads, state, params, applied=flag)


@pytest.mark.parametrize(
    ("ours", "theirs", "settings"),
    [
        (pa.sgd, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (pa.sgd, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.0, "weight_decay": 0.1}),
        (pa.adam, torch.optim.Adam, {"weight_decay": 0.1, "amsgrad": True}),
        (pa.adamw, torch.optim.AdamW, {"maximize": True}),
    ],
)
@pytest.mark.parametrize("fused", [False, True])
def test_optimizers_on_cuda_have_the_bits_of_torch(ours, theirs, settings, fused):
    params, _ = given()
    optimizer = ours(1e-2, fused=fused, **settings)
    variant = {"fused": True} if fused else {"foreach": True}
    if theirs is not torch.optim.SGD and not fused:
        variant["capturable"] = True
    mine, state = params, optimizer.init(params)
    leaves = {name: x.clone().requires_grad_() for name, x in params.items()}
    reference = theirs(leaves.values(), lr=1e-2, **settings, **variant)
    for i in range(10):
        random = torch.Generator("cuda").manual_seed(i)
        grads = {
            name: torch.randn(x.shape, generator=random, device="cuda") for name, x in mine.items()
        }
        for name, leaf in leaves.items():
            leaf.grad = grads[name].clone()  # torch's kernels may write to it
        reference.step()
        mine, state = optimizer.apply(grads, state, mine)
        assert all(torch.equal(mine[name], leaf) for name, leaf in leaves.items())


@pytest.mark.promise("optimizers")
@pytest.mark.promise("launches")
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("function", [False, True])
def test_averages_on_cuda_have_the_bits_of_torch_and_wait_for_nothing(function, donate):
    model = nn.ParameterList([nn.Parameter(x) for x in given()[0].values()])
    their = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    average = pa.ema(pa.constant(0.9) if function else 0.9)
    state = average.init([*model])
    yes, no = (torch.full((), flag, device="cuda") for flag in (True, False))
    poison = [torch.full_like(x, torch.nan) for x in model]
    other = average.update(average.update(state, [*model], yes), [*model])  # kernels load and wait
    average.update(other, [*model], yes, donate=donate)
    for _ in range(3):
        with torch.no_grad():
            for x in model:
                x.mul_(-1.7)
        their.update_parameters(model)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            state = average.update(state, [*model], yes, donate=donate)
            state = average.update(state, poison, no, donate=donate)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert_trees_bitwise_equal(state.params, [x.detach() for x in their.parameters()])
