"""``functional(module).apply`` is a call of the module also in what that keeps beside tensors."""

from functools import partial
from weakref import ref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pureaccum as pa
from pureaccum._pure.shell import places_of, take_shell
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from tests.pure.networks import squares
from tests.refusals import saying


pytestmark = [pytest.mark.purity, pytest.mark.promise("functional")]
X = torch.arange(6.0).view(3, 2)


class Counting(nn.Module):
    """Attributes that forward reads, assigns and deletes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.calls, self.scale = 0, 1.0
        self.once = "there"

    def forward(self, x):
        self.calls += 1
        if hasattr(self, "once"):
            del self.once
        out = self.layer(x) * self.scale * self.calls
        self.penalty = out.square().mean()
        return out


def test_attributes_are_read_and_assigned_as_in_a_call():
    """A loss may read what a layer left behind, with its gradient."""
    net, other = Counting(), Counting()
    other.load_state_dict(net.state_dict())
    fn = pa.functional(net)
    for scale in (1.0, 1.0, 3.0):
        net.scale = other.scale = scale
        assert torch.equal(fn.apply(fn.params, (), X)[0], other(X))
        assert (net.calls, hasattr(net, "once")) == (other.calls, False)

    def loss(p, x):
        fn.apply(p, (), x)
        return net.penalty

    grads = torch.func.grad(loss)(fn.params, X)
    other(X)
    other.penalty.backward()
    own = {name: p.grad for name, p in other.named_parameters()}
    assert_trees_bitwise_equal(grads, own)


def test_a_layer_that_is_made_in_forward_has_to_be_there_before():
    class Late(nn.Module):
        def forward(self, x):
            if not hasattr(self, "layer"):
                self.layer = nn.Linear(2, 2)
            return self.layer(x)

    net = Late()
    with saying(RuntimeError, "forward made 'layer'", "Call the module once"):
        pa.functional(net).apply({}, (), X)
    net(X)
    fn = pa.functional(net)
    assert torch.equal(fn.apply(fn.params, (), X)[0], net(X))


class Again(nn.Module):
    """Computes its layer again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(2, 2), nn.Tanh())

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False)


@pytest.mark.promise("second run")
@pytest.mark.parametrize("calls", [1, 3])
def test_a_recomputation_sees_the_tensors_of_its_own_call(calls):
    """Under plain .backward(), when other calls have come in between."""
    net = Again()
    fn = pa.functional(net)
    leaves = [{k: (i + x).requires_grad_() for k, x in fn.params.items()} for i in range(calls)]
    outs = [fn.apply(p, (), X)[0].square().sum() for p in leaves]
    for out, params in zip(outs, leaves, strict=True):
        out.backward()
        plain = {k.removeprefix("layer."): p.detach() for k, p in params.items()}
        want = torch.func.grad(
            lambda p: torch.func.functional_call(net.layer, p, (X,)).square().sum()
        )(plain)
        got = {k.removeprefix("layer."): p.grad for k, p in params.items()}
        assert_trees_bitwise_equal(got, want)


@pytest.mark.promise("second run")
@pytest.mark.parametrize("leads_back", [False, True])
def test_a_recomputation_writes_to_no_buffer_that_was_returned(leads_back):
    """Neither under plain .backward() nor in the engine."""
    net = Again()
    net.layer.append(nn.BatchNorm1d(2))
    fn = pa.functional(net)
    with torch.no_grad():
        want = fn.apply(fn.params, fn.buffers, X)[1]
    assert want["layer.2.num_batches_tracked"] == 1
    if leads_back:
        net.others = [net]
        fn = pa.functional(net)

    def loss(params, x):
        out, new_buffers = fn.apply(params, fn.buffers, x)
        return out.square().mean(), new_buffers

    options = {"has_aux": True, "aux_reduction": "last", "engine": "autograd"}
    with unchanged(net):
        _, (_, new_buffers) = pa.grad_and_value(loss, microbatch_size=3, **options)(fn.params, X)
    assert_trees_bitwise_equal(new_buffers, want)
    if not leads_back:
        params = {k: x.clone().requires_grad_() for k, x in fn.params.items()}
        value, new_buffers = loss(params, X)
        value.backward()
        assert_trees_bitwise_equal(new_buffers, want)


def test_nothing_of_a_call_is_kept_after_it():
    fn = pa.functional(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    for _ in range(3):
        given = [{k: x.clone() for k, x in tree.items()} for tree in (fn.params, fn.buffers)]
        fn.apply(*given, X)
        kept = [ref(x) for tree in given for x in tree.values()]
        del given
        assert not [x for x in kept if x() is not None]


WAYS_BACK = {
    "bound method": lambda net: net.__setattr__("act", net.scaled),
    "closure": lambda net: net.__setattr__("act", lambda x: x * net.weight),
    "list": lambda net: net.__setattr__("others", [net]),
    "hook": lambda net: net.layer.register_forward_hook(lambda m, a, out: out * net.weight),
    "global": lambda net: HELD.__setitem__("net", net),
}
HELD = {}


class LeadingBack(nn.Module):
    """Reaches its own weight in one of several ways."""

    def __init__(self):
        super().__init__()
        self.weight, self.layer = nn.Parameter(torch.ones(2)), nn.Linear(2, 2)

    def scaled(self, x):
        return x * self.weight

    def forward(self, x):
        if hasattr(self, "act"):
            x = self.act(x)
        for other in [*getattr(self, "others", []), *HELD.values()]:
            x = x * other.weight
        return self.layer(x)


@pytest.mark.parametrize("way", WAYS_BACK)
def test_a_module_that_leads_back_to_itself_sees_what_it_is_given(way):
    HELD.clear()
    net = LeadingBack()
    WAYS_BACK[way](net)
    fn = pa.functional(net)
    own = {k: p.detach().clone() for k, p in net.named_parameters()}
    params = {k: x + 1 for k, x in fn.params.items()}
    with torch.no_grad():
        for _ in range(2):
            got = fn.apply(params, (), X)[0]
            assert_trees_bitwise_equal(dict(net.named_parameters()), own)
            for p in net.parameters():
                p.add_(1)
            assert torch.equal(got, net(X))
            for k, p in net.named_parameters():
                p.copy_(own[k])
    HELD.clear()


@pytest.mark.promise("second run")
@pytest.mark.parametrize("way", ["bound method", "closure"])
def test_a_recomputation_of_a_module_that_leads_back_is_refused_or_right(way):
    """It would see the module's own tensors; the engine puts back those that were given."""
    net = LeadingBack()
    WAYS_BACK[way](net)
    fn = pa.functional(net)
    params = {k: (x + 1).requires_grad_() for k, x in fn.params.items()}

    loss = squares(fn)
    want = torch.autograd.grad(loss(params, X), [*params.values()])
    once_more = checkpoint(loss, params, X, use_reentrant=False)  # around a call, not in it
    got = torch.autograd.grad(once_more, [*params.values()])
    assert_trees_bitwise_equal(got, want)

    net.forward = lambda x: net.layer(checkpoint(net.act, x, use_reentrant=False))
    for wrap in (lambda f: f, pa.remat, lambda f: partial(checkpoint, f, use_reentrant=False)):
        with saying(RuntimeError, "module (LeadingBack) saves tensors through hooks", "make_step"):
            torch.autograd.grad(wrap(loss)(params, X), [*params.values()])
    step = pa.make_step(pa.remat(loss), pa.sgd(1.0), microbatch_size=3)
    with saying(RuntimeError, "module (LeadingBack) saves tensors through hooks"):
        step(step.init(fn.params), X)
    own = {k: x.detach() for k, x in params.items()}
    for engine in ("autograd", "auto"):
        grads, _ = pa.grad_and_value(loss, microbatch_size=3, engine=engine)(own, X)
        assert_trees_bitwise_equal([grads[k] for k in params], [*want])
    with torch.no_grad():
        value = loss(params, X)
    for p in net.parameters():
        p.requires_grad_(False)
    fn = pa.functional(net)  # nothing of it is recorded now
    assert torch.equal(fn.apply(own, (), X)[0].square().mean(), value)


@pytest.mark.mechanism
@pytest.mark.parametrize("size", [None, 2])
def test_a_module_that_holds_a_functional_of_itself_is_called_in_a_shell(size):
    """That calls its module in shells, too: it does not lead back to the module's own tensors."""
    module = nn.Sequential(nn.Linear(3, 3))
    module.fn = pa.functional(module, microbatch_size=size)
    places = places_of(module)
    assert take_shell(places, None) is not None
    assert not places.leads_back
