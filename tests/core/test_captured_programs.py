"""Programs whose microbatched functions capture what requires grad, under plain ``.backward()``.

There autograd's graph tells what is captured, and no operation is watched. Each program is what it
is without ``pa.microbatch``: gradients of first and higher order, calls of hooks, random numbers.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from weakref import ref

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

import pureaccum as pa
from pureaccum._core.watch import Watch
from tests.problems import ROOT, end
from tests.refusals import saying


pytestmark = [pytest.mark.transforms, pytest.mark.promise("closure")]
X = torch.arange(15.0, dtype=torch.float64).view(5, 3) / 7 - 1
SIZE = 2


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def leaf(*numbers):
    return torch.tensor(numbers, dtype=torch.float64, requires_grad=True)


def grads(*modules):
    return [p.grad for module in modules for p in module.parameters()]


def which(x):
    """The microbatch of some samples."""
    return 0 if x[0, 0] < -0.9 else 1 if x[0, 0] < 0.1 else 2


def plainly(func, **_):
    """Microbatch for microbatch, without ``pa.microbatch``."""
    return lambda x, *whole: torch.cat([func(part, *whole) for part in x.split(SIZE)])


def cut(func, **options):
    return pa.microbatch(func, microbatch_size=SIZE, batch_argnums=0, **options)


class Mixture(nn.Module):
    """Cuts its batch inside of ``forward``, by a function that holds no more than the module."""

    def __init__(self, cut):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 3)
        self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.register_buffer("scale", torch.tensor(1.0))
        self.double()
        self.cut = cut

    def forward(self, x):
        both = torch.cat([x, self.first(x)], 1)
        return self.cut(lambda z: self.experts[which(z)](z[:, 3:]) * self.scale)(both)


def put_in(cut, trained):
    """The gradients of parameters that another call has put in: those with such a name."""
    mixture = Mixture(cut)
    params = {
        name: torch.randn(p.shape, dtype=p.dtype).requires_grad_(trained in name)
        for name, p in mixture.named_parameters()
    }
    scale = torch.tensor(3.0, dtype=torch.float64)
    end(functional_call(mixture, {**params, "scale": scale}, (X,))).backward()
    return [p.grad for p in params.values() if p.requires_grad]


class Doubled(torch.autograd.Function):
    """Keeps its graph alive: a cycle leads through what it notes."""

    @staticmethod
    def forward(ctx, x):
        ctx.noted, ctx.itself = x * 2, ctx
        return ctx.noted

    @staticmethod
    def backward(ctx, g):
        return g * 2


def hooked(cut, register):
    """What a hook of a parameter sees, and how often."""
    net, came = network(), []
    register(net[0].weight, came)
    end(cut(net)(X)).backward()
    return [torch.tensor(float(len(came))), *came, *grads(net)]


def drawn(cut, of):
    """Random numbers between the two passes, and where the generator stands at the end."""
    net = network()
    torch.manual_seed(3)
    total = end(cut(lambda x: of(net, x))(X))
    torch.rand(5)
    total.backward()
    return [*grads(net), torch.rand(2)]


def forked(net, x):
    with torch.random.fork_rng():
        return dropout(net(x))


def between(cut, module, change, of=lambda module: module):
    """A module that is changed between the two passes."""
    own = [*module.parameters()]
    total = end(cut(of(module))(X))
    change(module)
    total.backward()
    return [p.grad for p in own]


# Whose total is a number of one leaf (1, 2, 3), or of a network.
OF_A_LEAF = {
    "beside an argument": lambda cut, w: end(cut(lambda x: x * w + x.sin())(w * X)),
    "as an output": lambda cut, w: end(cut(lambda x: w.expand(len(x), 3))(X) * X),
    "a constant beside it": lambda cut, w: end(cut(lambda x: x * w.detach() * 2 + x * w[0])(X)),
}
OF_A_NETWORK = {
    "with a checkpoint inside": lambda cut, net: end(
        cut(lambda x: checkpoint(net, x, use_reentrant=False))(X)
    ),
    "in a parametrization": lambda cut, net: end(
        cut(nn.utils.parametrizations.weight_norm(net[0]))(X)
    ),
}


class Programs:
    """Each as a function of how it is cut; what comes out is compared."""

    # What is captured

    def experts_in_a_list(cut):
        experts = [network(i) for i in range(3)]
        end(cut(lambda x: experts[which(x)](x))(X)).backward()
        return grads(*experts)

    def experts_that_another_call_has_put_in(cut):
        """Frozen ones too, of which no graph tells: the first microbatch calls none of them."""
        return put_in(cut, "weight")

    def frozen_experts_that_another_call_has_put_in(cut):
        return put_in(cut, "first")

    def what_another_tensor_was_computed_of(cut):
        log = leaf(0.3)
        rate = log.exp()
        rate.retain_grad()
        (end(cut(lambda x: (x * rate).sin())(X)) + rate.square().sum()).backward()
        return log.grad, rate.grad

    def what_another_thread_has_computed(cut):
        """Operations are counted per thread: here by more than in this one."""
        log, made = leaf(0.3), []

        def work():
            y = log
            for _ in range(3000):
                y = y * 1
            made.append(y.exp())

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        (rate,) = made
        total = end(cut(lambda x: (x * rate).sin())(X)) + rate.sum()
        return torch.autograd.grad(total, [rate, log])

    def in_another_thread(cut):
        w = leaf(1, 2, 3)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: [w * 1 for _ in range(3000)]).result()
            end(cut(lambda x: pool.submit(lambda: (x * w).sin()).result())(X)).backward()
        return [w.grad]

    def as_a_sum_that_nobody_sees(cut):
        """It is the caller's own tensor, and is not written to."""
        w = leaf(1, 2, 3)
        twice = w * 2
        out = cut(lambda x: twice + 0 * x if cut is plainly else twice, reduce="sum")(X)
        ((out.sum(0) if cut is plainly else out * 5 / 3) * twice).sum().backward()
        return w.grad, twice.detach()

    def under_no_grad_alone(cut):
        v, w = leaf(1, 2, 3), leaf(1, 2, 3)

        def of(x):
            with torch.no_grad():
                constant = v.exp()
            return x * constant * w

        end(cut(of)(X) / 8).backward()
        return v.grad, w.grad

    def a_large_one(cut):
        """Whose gradients are added in place."""
        w = torch.ones(400, 400, dtype=torch.float64, requires_grad=True)
        end(cut(lambda x: x @ w[:3, :3])(X) / 8).backward()
        return [w.grad]

    def in_a_cut_inside(cut):
        net, k = network(), leaf(0.5)

        def of(x):
            rate = k.exp()
            return pa.microbatch(lambda y: net(y) * rate * k, microbatch_size=1, batch_argnums=0)(x)

        end(cut(of)(X)).backward()
        return [k.grad, *grads(net)]

    def leaves_in_a_cut_inside(cut):
        net, k = network(), leaf(0.5)
        inside = lambda y: net(y) * k  # noqa: E731
        of = lambda x: pa.microbatch(inside, microbatch_size=1, batch_argnums=0)(x)  # noqa: E731
        end(cut(of)(X)).backward()
        return [k.grad, *grads(net)]

    def in_a_scripted_module(cut):
        scripted = torch.jit.script(network())
        end(cut(scripted)(X)).backward()
        return grads(scripted)

    def in_a_sparse_embedding(cut):
        torch.manual_seed(1)
        table = nn.Embedding(10, 3, sparse=True).double()
        end(cut(table)(torch.tensor([1, 2, 3, 1, 2]))).backward()
        return [table.weight.grad.to_dense()]

    def a_sparse_one(cut):
        w = torch.eye(3, dtype=torch.float64).to_sparse().requires_grad_()
        end(cut(lambda x: torch.sparse.mm(w, x.T).T)(X)).backward()
        return [w.grad.to_dense()]

    def in_a_sparse_embedding_of_later_rows(cut):
        """Its gradient is none at first, and then a sparse one."""
        torch.manual_seed(1)
        table, w = nn.Embedding(10, 3, sparse=True).double(), leaf(1, 2, 3)
        rows = lambda x: x if which(x) == 0 else table(which(x) + x[:, 0].long() * 0)  # noqa: E731
        end(cut(lambda x: rows(x) * w)(X)).backward()
        return [table.weight.grad.to_dense(), w.grad]

    def in_a_transform_inside(cut):
        net, w = network(), leaf(1, 2, 3)
        each = torch.func.vmap(torch.func.grad(lambda row: net(row).sin().sum()))
        end(cut(lambda x: each(x * w))(X)).backward()
        return [w.grad, *grads(net)]

    def beside_leaves_that_are_made_inside(cut):
        """A gradient penalty; and one whose leaves outlive the microbatch."""
        net, other = network(), network(1)

        def penalty(x, f):
            y = x.detach().requires_grad_()
            (g,) = torch.autograd.grad(f(y).square().sum(), y, create_graph=True)
            return g.square().sum(1, keepdim=True) + f(x)

        end(cut(lambda x: penalty(x, net))(X)).backward()
        end(cut(lambda x: penalty(x, lambda y: Doubled.apply(other(y))))(X)).backward()
        return grads(net, other)

    # How it is differentiated

    def a_hook_sees_the_whole_gradient(cut):
        return hooked(cut, lambda w, came: w.register_hook(lambda g: came.append(g) or g * 2))

    def a_hook_after_the_gradient_runs_once(cut):
        return hooked(
            cut,
            lambda w, came: w.register_post_accumulate_grad_hook(
                lambda p: came.append(p.grad.clone())
            ),
        )

    def by_rows_alone(cut):
        x = X.clone().requires_grad_()
        return torch.autograd.grad(end(cut(network())(x)), x)

    def twice_over_one_graph(cut):
        net = network()
        total = end(cut(net)(X))
        total.backward(retain_graph=True)
        total.backward()
        return grads(net)

    def the_second_order(cut):
        net = network()
        found = torch.autograd.grad(end(cut(net)(X)), [*net.parameters()], create_graph=True)
        torch.stack([g.square().sum() for g in found]).sum().backward()
        return grads(net)

    def the_third_order(cut):
        w = leaf(0.3, 0.2, 0.1)
        g = end(cut(lambda x: (x * w).sin())(X))
        for _ in range(2):
            (g,) = torch.autograd.grad(g.square().sum(), w, create_graph=True)
        g.square().sum().backward()
        return [w.grad]

    def through_steps_of_a_learner(cut):
        """Whose functions capture what the step before has computed."""
        net = network()
        params = first = dict(net.named_parameters())
        for _ in range(2):
            f = cut(lambda x, params=params: functional_call(net, params, (x,)))
            found = torch.autograd.grad(end(f(X)), [*params.values()], create_graph=True)
            params = {name: p - g / 8 for (name, p), g in zip(params.items(), found, strict=True)}
        end(cut(lambda x: functional_call(net, params, (x,)))(X)).backward()
        return [p.grad for p in first.values()]

    def levels_in_levels(cut):
        """Of torch.func, and under them plain autograd: each has its own graph."""
        net = network()
        params = {name: p.detach() for name, p in net.named_parameters()}
        sizes = [p.numel() for p in params.values()]

        def of(flat, x):
            parts = zip(params.items(), flat.split(sizes), strict=True)
            return functional_call(net, {name: v.view_as(p) for (name, p), v in parts}, (x,))

        def total(flat, x):
            return end(cut(lambda x: of(flat, x))(x)) + end(cut(partial(of, flat))(x * 2))

        flat = torch.cat([p.flatten() for p in params.values()])

        def outer(s):
            inner = torch.func.grad(lambda t: total(flat * t, X * s))(torch.ones_like(s))
            return inner + torch.func.grad(lambda v: total(v * s, X))(flat).square().sum()

        s = torch.tensor(0.7, dtype=torch.float64)
        leaf = s.clone().requires_grad_()
        outer(leaf).backward()
        return [torch.func.grad(outer)(s), torch.func.grad(torch.func.grad(outer))(s), leaf.grad]

    def without_a_history(cut):
        """A gradient of torch.func in no_grad mode, by what requires grad."""
        net = network()
        f = cut(lambda x, p: functional_call(net, p, (x,)))
        with torch.no_grad():
            found = torch.func.grad(lambda p: end(f(X, p)))(dict(net.named_parameters()))
        return [*found.values()]

    def many_cotangents_at_once(cut):
        net = network()
        each = torch.eye(15, dtype=torch.float64).view(15, 5, 3)
        return torch.autograd.grad(cut(net)(X), [*net.parameters()], each, is_grads_batched=True)

    def inside_of_a_checkpoint(cut):
        net, w = network(), leaf(1, 2, 3)
        f = cut(net)
        end(checkpoint(lambda w: f(X * w), w, use_reentrant=False)).backward()
        return [w.grad, *grads(net)]

    def with_saved_tensors_elsewhere(cut):
        net = network()
        with torch.autograd.graph.save_on_cpu():
            total = end(cut(net)(X))
        total.backward()
        return grads(net)

    # What happens between

    def draws_between(cut):
        return drawn(cut, lambda net, x: dropout(net(x)))

    def draws_of_a_later_microbatch_alone(cut):
        """Of which nobody knows when the first one has been called."""
        return drawn(cut, lambda net, x: dropout(net(x)) if which(x) else net(x))

    def draws_that_leave_the_generator(cut):
        """Where it stood, so that it tells of none."""
        return drawn(cut, forked)

    def another_parameter_between(cut):
        new = nn.Parameter(torch.zeros(4, 3, dtype=torch.float64))
        return between(cut, network(), lambda net: setattr(net[0], "weight", new))

    def another_mode_between(cut):
        return between(cut, nn.Sequential(network(), nn.Dropout()).eval(), nn.Module.train)

    def a_write_to_what_it_does_not_use(cut):
        """A queue of the module whose method is cut."""
        net = network()
        net.register_buffer("queue", torch.zeros(3))
        return between(cut, net, lambda net: net.queue.add_(1), lambda net: net.forward)


PROGRAMS = {name.replace("_", " "): f for name, f in vars(Programs).items() if callable(f)}
CAPTURED = pytest.mark.given_up("captured")
RESTORED = pytest.mark.given_up("restored modes")
GIVEN_UP = {
    "what another tensor was computed of": CAPTURED,
    "what another thread has computed": CAPTURED,
    "as a sum that nobody sees": CAPTURED,
    "in a cut inside": CAPTURED,
    "through steps of a learner": CAPTURED,
    "levels in levels": CAPTURED,
    "experts that another call has put in": RESTORED,
    "frozen experts that another call has put in": RESTORED,
    "another mode between": RESTORED,
}


def run(name, cut):
    if name in PROGRAMS:
        return PROGRAMS[name](cut)
    if name in OF_A_NETWORK:
        net = network()
        OF_A_NETWORK[name](cut, net).backward()
        return [p.grad for p in net.parameters() if p.grad is not None]
    w = leaf(1, 2, 3)
    OF_A_LEAF[name](cut, w).backward()
    return [w.grad]


@pytest.mark.table
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=GIVEN_UP.get(name, ()))
        for name in [*PROGRAMS, *OF_A_LEAF, *OF_A_NETWORK]
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_program_is_what_it_is_without_microbatches(name):
    compare(*(run(name, by) for by in (cut, plainly)))


@pytest.mark.promise("followed")
@pytest.mark.promise("second run")
@pytest.mark.parametrize("name", GIVEN_UP)
def test_a_program_that_is_hard_to_follow_is_never_another_one(name):
    """It is what it is without microbatches, or raises."""
    want = run(name, plainly)
    try:
        got = run(name, cut)
    except RuntimeError:
        return
    compare(got, want)


class Owner:
    def __init__(self, net):
        self.nets = [net]

    def call(self, x):
        return self.nets[0](x)


def of_a_weak_reference(net):
    weak = ref(net)
    return lambda x: weak()(x)


HOLDERS = {
    "a closure": lambda net: lambda x: net(x),
    "a closure in a closure": lambda net: (lambda f: lambda x: f(x))(lambda x: net(x)),
    "a default": lambda net: lambda x, net=net: net(x),
    "a partial": lambda net: partial(lambda net, x: net(x), net),
    "a bound method": lambda net: Owner(net).call,
    "an object that is called": lambda net: partial(Owner.call, Owner(net)),
    "a container": lambda net: (lambda nets: lambda x: nets["a"][0](x))({"a": (net,)}),
    "an attribute": lambda net: (lambda it: lambda x: it.net(x))(SimpleNamespace(net=net)),
    "a weak reference": of_a_weak_reference,
}


@pytest.mark.promise("second run")
@pytest.mark.parametrize("name", HOLDERS)
def test_a_mode_that_changes_between_is_never_that_of_another_function(name):
    """Wherever a function holds the module."""
    net, x = nn.Sequential(network(), nn.Dropout()).eval(), X.clone().requires_grad_()
    wrt = [x, *net.parameters()]
    want = torch.autograd.grad(end(net(x)), wrt)
    total = end(cut(HOLDERS[name](net))(x))
    net.train()
    try:
        got = torch.autograd.grad(total, wrt)
    except RuntimeError:
        return
    compare(got, want)


def compare(got, want):
    assert len(got) == len(want) > 0
    for x, y in zip(got, want, strict=True):
        assert (x is None) == (y is None)
        if x is not None and y is not None:
            assert x.requires_grad == y.requires_grad
            assert (x - y).norm() <= ROOT * (1 + y.norm())
            assert y.norm() > 0


@pytest.mark.promise("second run")
def test_a_write_to_what_a_later_microbatch_alone_uses_is_refused():
    """It needs no gradient, and the first microbatch, which is observed, does not read it."""
    w = leaf(1, 2, 3)
    constants = [torch.full((3,), i + 1.0, dtype=torch.float64) for i in range(3)]
    total = end(cut(lambda x: x * w.sin() * constants[which(x)])(X))
    constants[2].mul_(5)
    with saying(RuntimeError, "has been written to in place since", "(3,)"):
        total.backward()


@pytest.mark.promise("second run")
def test_what_is_frozen_before_the_backward_pass_is_refused_and_stays_frozen():
    net = network()
    total = end(cut(net)(X))
    net.requires_grad_(False)
    with saying(RuntimeError, "was frozen since"):
        total.backward()
    assert not any(p.requires_grad for p in net.parameters())


@pytest.mark.promise("second run")
def test_what_is_no_longer_reached_is_refused_and_watched_from_then_on():
    """A function that is not pure, and whose next call is right."""
    w, ran = leaf(1, 2, 3), []
    f = cut(lambda x: x if ran == [True] else x * w)
    total = end(f(X))
    ran.append(True)
    with saying(RuntimeError, "did not use a captured tensor"):
        total.backward()
    ran.clear()
    end(f(X)).backward()
    assert w.grad is not None


@pytest.mark.mechanism
@pytest.mark.parametrize("around", ["backward", "torch.func"])
def test_no_operation_is_watched(around, monkeypatch):
    """Where a graph tells all: at top level what is captured too, under grad what is given."""
    net = network()
    fn = pa.functional(net)

    def refuse(*_):
        raise AssertionError

    monkeypatch.setattr(Watch, "__init__", refuse)
    if around == "backward":
        end(cut(net)(X)).backward()
        assert all(p.grad is not None for p in net.parameters())
    else:
        apply = pa.microbatch(lambda p, x: fn.apply(p, (), x)[0], microbatch_size=SIZE)
        found = torch.func.grad(lambda p: end(apply(p, X)))(fn.params)
        assert all(g.norm() > 0 for g in found.values())
