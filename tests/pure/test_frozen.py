"""What does not require a gradient in a module is never trained, decayed or taken for another's."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from tests.exactly import copied
from tests.pure.networks import Of, squares
from tests.refusals import refused


pytestmark = [pytest.mark.purity, pytest.mark.promise("frozen")]
X, Y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3


def lora():
    """A frozen layer and what is learned beside it."""
    base, down = nn.Linear(4, 3).requires_grad_(False), nn.Linear(4, 2, bias=False)
    up = nn.Linear(2, 3, bias=False)
    return Of(lambda self, x: self.base(x) + self.up(self.down(x)), base=base, down=down, up=up)


def transfer():
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    for part in net[:2]:
        part.requires_grad_(False).eval()
    return net


def bias_only():
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    for name, p in net.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    return net


NETS = {
    "transfer": transfer,
    "lora": lora,
    "biases": bias_only,
    "nothing frozen": lambda: nn.Linear(4, 3),
}
every_net = pytest.mark.parametrize("make", NETS.values(), ids=NETS)


def loss_of(fn):
    return lambda p, b: F.cross_entropy(fn.apply(p, fn.buffers, b[0])[0], b[1])


@every_net
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (pa.adamw(0.01, weight_decay=0.1), lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1)),
        (pa.sgd(0.1, weight_decay=0.1), lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.1)),
    ],
)
def test_a_run_is_the_run_of_torch(make, ours, theirs):
    """In which a gradient is None for what is frozen, and an optimizer leaves that alone."""
    net = make().double()
    fn, other = pa.functional(net), deepcopy(net)
    optimizer = theirs(other.parameters())
    step = pa.make_step(loss_of(fn), ours, microbatch_size=4)
    state, batch = step.init(fn.params), (X.double(), Y)
    with unchanged(net):
        for _ in range(5):
            state, _ = step(state, batch)
            F.cross_entropy(other(batch[0]), Y).backward()
            optimizer.step()
            optimizer.zero_grad()
    want = {k: p for k, p in other.named_parameters() if p.requires_grad}
    assert state.params.keys() == want.keys()
    for k, p in want.items():
        torch.testing.assert_close(state.params[k], p.detach(), rtol=2**-26, atol=2**-30)
    assert_trees_bitwise_equal(
        fn.frozen, {k: p for k, p in other.named_parameters() if not p.requires_grad}
    )


@every_net
def test_params_and_frozen_are_all_parameters_and_detached(make):
    net = make()
    fn = pa.functional(net)
    own = dict(net.named_parameters())
    assert {**fn.params, **fn.frozen}.keys() == own.keys()
    assert not fn.params.keys() & fn.frozen.keys()
    for name, x in {**fn.params, **fn.frozen}.items():
        assert x.data_ptr() == own[name].data_ptr()
        assert not x.requires_grad
        assert (name in fn.params) is own[name].requires_grad


def test_frozen_parameters_that_are_given_are_taken():
    net = lora()
    fn = pa.functional(net)
    for none in ((), {}):
        assert torch.equal(fn.apply(none, (), X)[0], net(X))
    zero = {name: torch.zeros_like(x) for name, x in fn.frozen.items()}
    out, _ = fn.apply({**fn.params, **zero}, (), X)
    delta = fn.apply(fn.params, (), X)[0] - F.linear(X, fn.frozen["base.weight"])
    torch.testing.assert_close(out, delta - fn.frozen["base.bias"], rtol=0, atol=2**-18)
    fn.frozen.update(zero)  # what somebody puts there is taken, too
    assert torch.equal(fn.apply(fn.params, (), X)[0], out)
    with refused(ValueError, "params['base.weight'] has shape (1,)"):
        fn.apply({**fn.params, "base.weight": torch.ones(1)}, (), X)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("engine", ["func", "autograd"])
def test_a_policy_casts_what_is_frozen_too(dtype, engine):
    """LoRA in bf16: as a module that is cast as a whole, with float32 masters."""
    net = lora()
    fn, cast = pa.functional(net), deepcopy(net).to(dtype)

    loss = squares(fn)
    step = pa.make_step(loss, pa.sgd(1.0), policy=pa.Policy(compute=dtype), engine=engine)
    state, info = step(step.init(fn.params), X)
    value = cast(X.to(dtype)).square().mean()
    value.backward()
    assert info.loss == value.double()
    for name, p in cast.named_parameters():
        if p.requires_grad:
            assert torch.equal(state.params[name], fn.params[name] - p.grad.float())


def test_a_teacher_may_be_frozen_as_a_whole():
    student, teacher = (
        pa.functional(nn.Linear(4, 3)),
        pa.functional(transfer().requires_grad_(False)),
    )
    assert teacher.params == {}

    def loss(p, x):
        want, _ = teacher.apply({}, teacher.buffers, x)
        return (student.apply(p, (), x)[0] - want).square().mean()

    got = pa.grad(loss, microbatch_size=4)(student.params, X)
    want = torch.func.grad(loss)(student.params, X)
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=0, atol=2**-20)
    step = pa.make_step(loss, pa.sgd(0.1))
    with refused(ValueError, "no leaves", "frozen"):
        step.init(teacher.params)


@pytest.mark.promise("ensembles")
def test_members_that_are_frozen_apart_are_not_taken_for_one_another():
    members = [pa.functional(lora()) for _ in range(3)]
    apply = members[0].apply
    params = pa.stack([fn.params for fn in members])

    def out(p, *frozen):
        return apply({**(frozen[0] if frozen else {}), **p}, (), X)[0]

    with refused(ValueError, "params['base.weight'] is frozen", "stack([fn.frozen for fn in"):
        torch.func.vmap(out)(params)
    each = torch.func.vmap(out)(params, pa.stack([fn.frozen for fn in members]))
    shared = torch.func.vmap(out, (0, None))(params, members[0].frozen)
    for i, fn in enumerate(members):
        torch.testing.assert_close(each[i], fn.apply(fn.params, (), X)[0])
        torch.testing.assert_close(shared[i], apply(fn.params, (), X)[0])


@pytest.mark.promise("ensembles")
def test_an_ensemble_may_be_frozen_apart():
    """Their frozen parts ride along as samples do not: by an argument of the loss."""
    members = [pa.functional(lora()) for _ in range(2)]
    step = pa.make_step(loss_of(members[0]), pa.sgd(0.1), microbatch_size=4)
    stacked = pa.stack([step.init(fn.params) for fn in members])
    with refused(ValueError, "members of an ensemble may differ in it"):
        torch.func.vmap(step, (0, None))(stacked, (X, Y))


def test_samples_are_not_taken_for_members():
    """Under a vmap over samples alone nobody has to say anything."""
    fn = pa.functional(lora())

    loss = squares(fn)
    each = pa.per_sample_grad(loss)(fn.params, X)
    mean = torch.func.grad(loss)(fn.params, X)
    for name, x in each.items():
        torch.testing.assert_close(x.mean(0), mean[name], rtol=0, atol=2**-20)


def test_a_run_is_saved_and_resumed_without_what_is_frozen(tmp_path):
    net = lora()
    fn = pa.functional(net)
    step = pa.make_step(loss_of(fn), pa.adamw(0.1), microbatch_size=4)
    state, _ = step(step.init(fn.params), (X, Y))
    pa.save(tmp_path / "state", state)
    again = pa.functional(deepcopy(net))
    other = pa.make_step(loss_of(again), pa.adamw(0.1), microbatch_size=4)
    loaded = pa.load(tmp_path / "state", like=other.init(again.params))
    assert_trees_bitwise_equal(other(loaded, (X, Y))[0], step(state, (X, Y))[0])


def test_a_whole_batch_in_microbatches_leaves_frozen_layers_alone():
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    net[0].requires_grad_(False)
    cut, whole = pa.functional(net, microbatch_size=5), pa.functional(net)
    got, want = (
        torch.func.grad(lambda p, fn=fn: fn.apply(p, fn.buffers, X.double())[0].square().mean())(
            fn.params
        )
        for fn in (cut, whole)
    )
    assert got.keys() == want.keys() == {"1.weight", "1.bias", "2.weight", "2.bias"}
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=0, atol=2**-40)


# What is changed afterwards -------------------------------------------------------------


def test_what_is_frozen_or_thawed_later_is_noticed():
    net = lora()
    fn = pa.functional(net)
    net.down.requires_grad_(False)
    words = "down.weight was trained when functional(module) was called, but is frozen now"
    with refused(RuntimeError, words, "Call functional(module) again"):
        fn.apply(fn.params, (), X)
    net.down.requires_grad_(True)
    fn.apply(fn.params, (), X)
    net.base.requires_grad_(True)
    with refused(RuntimeError, "base.weight was frozen", "trained now"):
        pa.grad(loss_of(fn), microbatch_size=4)(fn.params, (X, Y))


CHANGES = {
    "another parameter": (
        lambda net: setattr(net.up, "weight", nn.Parameter(torch.ones(3, 2))),
        "module.up (Linear)",
    ),
    "another module": (lambda net: setattr(net, "up", nn.Linear(2, 3)), "module (Of)"),
    "one more module": (lambda net: setattr(net, "more", nn.Linear(2, 3)), "module (Of)"),
    "one less parameter": (lambda net: net.base.register_parameter("bias", None), "module.base"),
    "assigned weights": (
        lambda net: net.load_state_dict(copied(net.state_dict()), assign=True),
        "module.base (Linear)",
    ),
}


@pytest.mark.parametrize(("change", "where"), CHANGES.values(), ids=CHANGES)
def test_a_module_that_was_changed_since_is_noticed(change, where):
    net = lora()
    fn = pa.functional(net)
    fn.apply(fn.params, (), X)
    change(net)
    with refused(RuntimeError, where, "Call functional(module) again"):
        fn.apply(fn.params, (), X)


@pytest.mark.promise("followed")
def test_hooks_on_parameters_are_refused():
    """Nobody would call them: a masked gradient would not be masked."""
    net = lora()
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        handle = getattr(net.up.weight, register)(lambda g: None)
        with refused(ValueError, "up.weight has a hook on its gradient", "gradient map"):
            pa.functional(net)
        handle.remove()
    pa.functional(net)
