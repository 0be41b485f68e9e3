"""A module that is called as a function stays as it was, and so does everything it is given."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pureaccum._pure.functional import functional
from pureaccum._step.buffers import begin_buffers, collect_buffers, watching
from pureaccum.testing import unchanged
from tests.calls import BoomError
from tests.pure.networks import Of
from tests.pure.test_functional import MODULES, every_module, own, policies, through


pytestmark = [pytest.mark.purity, pytest.mark.promise("purity")]


# torch cannot map them, or warns that it is slow
NOT_MAPPED = ("cumulative", "weight norm", "spectral norm")


def twice():
    """One layer under two names: torch's own way with ties would leave it changed."""
    layer = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    return Of(lambda self, x: self.second(torch.tanh(self.first(x))), first=layer, second=layer)


ALL = MODULES | {"twice": twice}


def batch(rows=6):
    return torch.randn(rows, 3)


def prepared(make):
    """Hooks, and gradients of a life before; other parameters and buffers to call it with."""
    module = make()
    module.register_forward_hook(lambda *_: None)
    out = module(batch())
    if out.requires_grad:
        out.sum().backward()
    return module, *own(make())


def calls(module):
    fn = functional(module)

    def loss(params, buffers, x):
        out, new_buffers = fn.apply(params, buffers, x)
        return (out * out).sum(), new_buffers

    def backward(params, buffers, x):
        leaves = {k: p.detach().requires_grad_() for k, p in params.items()}
        value, _ = loss(leaves, buffers, x)
        return torch.autograd.grad(value, list(leaves.values())) if leaves else value

    return {
        "plain": fn.apply,
        "grad": torch.func.grad(loss, has_aux=True),
        "vjp": lambda *given: torch.func.vjp(lambda p: loss(p, *given[1:]), given[0], has_aux=True),
        "vmap": lambda p, b, x: torch.func.vmap(fn.apply, (0, 0, None))(
            *({k: torch.stack([y, y]) for k, y in tree.items()} for tree in (p, b)), x
        ),
        "autograd": backward,
    }


@pytest.mark.parametrize(
    ("name", "call"),
    [
        (name, call)
        for name in ALL
        for call in ("plain", "grad", "vjp", "vmap", "autograd")
        if call != "vmap" or name not in NOT_MAPPED
    ],
)
def test_a_call_of_a_functional_changes_nothing(name, call):
    for train in (True, False):
        module, params, buffers = prepared(ALL[name])
        module.train(train)
        x = batch()
        run = calls(module)[call]
        with unchanged(module, params, buffers, x):
            run(params, buffers, x)


@every_module
def test_a_call_with_its_own_tensors_changes_nothing(name):
    module, _, _ = prepared(MODULES[name])
    fn, x = functional(module), batch()
    with unchanged(module, fn.params, fn.buffers, x):
        fn.apply(fn.params, fn.buffers, x)


@pytest.mark.mechanism
@policies
@every_module
def test_microbatches_change_nothing(name, policy):
    if name == "tied" and policy == "pooled":
        pytest.skip("its BatchNorm is called twice")
    for keep in (None, True, False):
        module, params, buffers = prepared(MODULES[name])
        x = batch(9)
        with unchanged(module, params, buffers, x):
            _, new = through(functional(module), policy, params, buffers, x.split(3), [keep] * 3)
        assert new.keys() == buffers.keys()


@pytest.mark.parametrize("name", ALL)
def test_a_call_that_fails_changes_nothing(name):
    module, params, buffers = prepared(ALL[name])

    def fail(*_):
        raise BoomError

    handle, x = module.register_forward_hook(fail), batch()
    with unchanged(module, params, buffers), pytest.raises(BoomError):
        functional(module).apply(params, buffers, x)
    handle.remove()
    with unchanged(params, buffers):
        module(x)  # with its own


@every_module
def test_what_comes_out_shares_no_memory_with_what_went_in(name):
    module, params, buffers = prepared(MODULES[name])
    _, new_buffers = functional(module).apply(params, buffers, batch())
    held = {x.data_ptr() for x in [*buffers.values(), *module.buffers()]}
    assert not held & {x.data_ptr() for x in new_buffers.values()}


def test_params_and_buffers_are_views_of_the_module_s_that_record_nothing():
    module = MODULES["1d"]()
    fn = functional(module)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        view = (fn.params | fn.buffers)[name]
        assert view.data_ptr() == tensor.data_ptr()
        assert not view.requires_grad


@pytest.mark.mechanism
def test_statistics_are_watched_inside_and_no_longer():
    """Inside they are kept, not written; also after an error torch's batch norm is its own."""
    mean, var, x = torch.zeros(3), torch.ones(3), batch()
    with watching("pooled") as seen, unchanged(mean, var):
        F.batch_norm(x, mean, var, training=True)
        torch.batch_norm(x, None, None, mean, var, True, 0.1, 1e-5, False)
    assert [call.elements for call in seen] == [6, 6]
    assert all(torch.equal(call.mean, seen[0].mean) for call in seen)
    with pytest.raises(BoomError), watching("pooled"):
        raise BoomError
    F.batch_norm(x, mean, var, training=True, momentum=1.0)
    assert torch.equal(mean, seen[0].mean)
    assert len(seen) == 2


@pytest.mark.mechanism
def test_batch_norm_that_keeps_nothing_is_let_through():
    mean, var, x = torch.zeros(3), torch.ones(3), batch()
    with watching("pooled") as seen:
        outs = [F.batch_norm(x, mean, var), F.batch_norm(x, None, None, training=True)]
    assert not seen
    assert torch.equal(outs[0], F.batch_norm(x, mean, var))
    assert torch.equal(outs[1], F.batch_norm(x, None, None, training=True))


@pytest.mark.mechanism
def test_what_was_collected_outlives_a_recomputation():
    """A checkpoint runs a module again in the backward pass, and it writes to the same tensors."""
    fn = functional(nn.BatchNorm1d(3))
    carried = begin_buffers("sequential", fn.buffers)
    _, new_buffers = fn.apply(fn.params, carried.values, batch())
    collected = collect_buffers("sequential", [], new_buffers, carried.values)
    with unchanged(collected):
        for buffer in new_buffers.values():
            buffer.add_(1)


@pytest.mark.mechanism
def test_no_two_tensors_of_a_state_share_memory():
    fn = functional(nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)).double())
    carried = begin_buffers("pooled", fn.buffers)
    _, new = through(fn, "pooled", fn.params, fn.buffers, batch(8).double().split(4))
    for tensors in ([*carried.values.values(), *carried.moments], list(new.values())):
        pointers = {x.untyped_storage().data_ptr() for x in tensors}
        assert len(pointers) == len(tensors)
