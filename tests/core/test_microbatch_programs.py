"""Programs as people write them, around and inside of ``pa.microbatch``, beside the plain ones.

Each is written once, for a cut that is ``pa.microbatch`` or nothing. What comes out is the same, or
an error that says what to do; never another number.
"""

import threading

import optree
import pytest
import torch
from torch import nn
from torch.func import grad, jvp, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import pureaccum as pa
from tests.problems import normal, pulled


pytestmark = [
    pytest.mark.transforms,
    pytest.mark.promise("closure"),
    pytest.mark.promise("programs"),
]
W, X, C = normal(3, 4, seed=1), normal(5, 3, seed=2), normal(4, seed=3)


def rows(w, x):
    return torch.tanh(x @ w)


def end(z):
    return (z @ z.T).logsumexp(1).sum()


def of_seed(make, *args, **options):
    torch.manual_seed(0)
    return make(*args, **options).double()


def network():
    return of_seed(lambda: nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)))


def trained(cut, net, x=X, f=None):
    """Gradients by ``.backward()``, of parameters that are captured and of the batch."""
    x = x.clone().requires_grad_()
    end(cut(f or net, batch_argnums=0)(x)).backward()
    return [p.grad for p in net.parameters()], x.grad


def both_ways(cut, of):
    """By torch.func and by plain autograd."""
    loss = lambda w: end(cut(of)(w, X))  # noqa: E731
    return grad(loss)(W), pulled(loss, W)


class Programs:
    """Each as a function of how it is cut; what comes out is compared."""

    # Modules

    def a_network(cut):
        return trained(cut, network())

    def an_lstm(cut):
        net = of_seed(nn.LSTM, 3, 4, batch_first=True)
        return trained(cut, net, normal(5, 6, 3, seed=1), lambda x: net(x)[0][:, -1])

    def attention(cut):
        net = of_seed(nn.TransformerEncoderLayer, 4, 2, 8, 0.0, batch_first=True)
        return trained(cut, net, normal(5, 6, 4, seed=1), lambda x: net(x)[:, -1])

    def a_sparse_embedding(cut):
        net = of_seed(nn.Embedding, 7, 4, sparse=True)
        end(cut(net, batch_argnums=0)(torch.tensor([1, 3, 3, 0, 6]))).backward()
        return net.weight.grad.to_dense()

    def parametrizations_of_weights(cut):
        net = network()
        parametrizations.weight_norm(net[0])
        parametrizations.orthogonal(net[2])
        return trained(cut, net)

    def a_weight_that_is_computed(cut):
        net, scale = network(), torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
        del net[0]._parameters["weight"]
        net[0].weight = normal(6, 3, seed=1) * scale
        return trained(cut, net), scale.grad

    def a_scripted_module(cut):
        net = network()
        scripted = torch.jit.script(net)
        return trained(cut, net, f=lambda x: scripted(x))

    def a_traced_module(cut):
        net = network()
        traced = torch.jit.trace(net, X[:2])
        return trained(cut, net, f=lambda x: traced(x))

    def a_compiled_module(cut):
        torch.compiler.reset()
        net = network()
        return trained(cut, net, f=torch.compile(net, backend="aot_eager"))

    def hooks(cut):
        net = network()
        net[2].register_full_backward_hook(lambda m, grads, _: (grads[0] * 2,))
        net[2].register_forward_hook(lambda m, args, out: out * 2)
        net[0].weight.register_hook(lambda g: g * 3)
        return trained(cut, net)

    def a_network_called_by_functional(cut):
        fn = pa.functional(network())
        return grad(lambda p: end(cut(lambda p, x: fn.apply(p, (), x)[0])(p, X)))(fn.params)

    # What runs inside

    def a_checkpoint_inside(cut):
        net = network()
        return trained(cut, net, f=lambda x: checkpoint(net, x, use_reentrant=False))

    def a_checkpoint_around(cut):
        net = network()
        f = lambda x: checkpoint(cut(net, batch_argnums=0), x, use_reentrant=False)  # noqa: E731
        return trained(lambda f, **_: f, net, f=f)

    def a_cut_in_a_cut(cut):
        inner = lambda w, x: cut(lambda w, x: rows(w, x) * C)(w, x).sin()  # noqa: E731
        return grad(lambda w: end(cut(inner)(w, X)))(W)

    def writes_to_its_own(cut):
        def of(w, x):
            h = x @ w
            h *= C
            h[:, 0].mul_(w[0, 0])
            return h.add_(1).sin()

        return both_ways(cut, of)

    def autograd_inside(cut):
        def of(w, x):
            with torch.enable_grad():
                h = rows(w, x)
                h = h if h.requires_grad else h.requires_grad_()
                (g,) = torch.autograd.grad((h.sin() * C).sum(), h, create_graph=True)
            return g * h

        return pulled(lambda w: end(cut(of)(w, X)), W)

    def per_sample_gradients_inside(cut):
        def of(w, x):
            return vmap(grad(lambda w, r: rows(w, r[None]).square().sum()), (None, 0))(w, x)[:, 0]

        return grad(lambda w: end(cut(of)(w, X)))(W)

    def no_grad_inside(cut):
        def of(w, x):
            with torch.no_grad():
                h = rows(w, x)
            return h * w[0]

        return both_ways(cut, of)

    def a_thread_inside(cut):
        net = network()

        def of(x):
            found = []

            def work(record):
                with torch.set_grad_enabled(record):
                    found.append(torch.tanh(x) * 2)

            thread = threading.Thread(target=work, args=(torch.is_grad_enabled(),))
            thread.start()
            thread.join()
            return net(found[0])

        return trained(cut, net, f=of)

    def a_compiled_function_inside(cut):
        torch.compiler.reset()
        f = torch.compile(lambda w, x: torch.tanh(x @ w) * C, backend="aot_eager")
        return pulled(lambda w: end(cut(f)(w, X)), W)

    def autocast_inside(cut):
        """Of whole numbers that bfloat16 has, as have all their products here."""

        def of(w, x):
            with torch.autocast("cpu", torch.bfloat16):
                return (x @ w).float()

        w, x = W.sign().float(), X.sign().float()
        return grad(lambda w: cut(of)(w, x).square().sum())(w)

    def autocast_around(cut):
        """It is on wherever the function runs, and off around the derivative."""
        w, x = W.sign().float(), X.sign().float()

        def of(w, x):
            assert torch.is_autocast_enabled("cpu")
            return x @ w

        def loss(w):
            with torch.autocast("cpu", torch.bfloat16):
                z = cut(of)(w, x)
            assert z.dtype == torch.bfloat16
            return z.float().square().sum()

        return grad(loss)(w), pulled(loss, w), jvp(grad(loss), (w,), (w,))

    # What is done with it

    def an_output_that_is_written_to(cut):
        def loss(w):
            z = cut(rows)(w, X)
            z = z if cut is not uncut else z * 1  # tanh keeps what it returns
            z.mul_(2)
            z[0] = 0
            return end(z)

        return pulled(loss, W)

    def two_backward_passes(cut):
        w = W.clone().requires_grad_()
        z = end(cut(rows)(w, X))
        z.backward(retain_graph=True)
        z.backward()
        return w.grad

    def under_no_grad(cut):
        with torch.no_grad():
            z = cut(rows)(W.clone().requires_grad_(), X)
            assert not z.requires_grad
            return z, grad(lambda w: end(cut(rows)(w, X)))(W)

    def under_inference_mode(cut):
        with torch.inference_mode():
            found = cut(rows)(W, X), grad(lambda c: end(cut(lambda w, x: rows(w, x) * c)(W, X)))(C)
        return [x.clone() for x in found]

    def a_parameter_that_only_some_rows_need(cut):
        """An expert, and a branch that looks at the batch."""
        experts = [normal(3, 4, seed=s).requires_grad_() for s in range(3)]

        def of(x, i):
            h = torch.zeros(len(x), 4, dtype=x.dtype)
            for k, expert in enumerate(experts):
                if (at := i == k).any():
                    h = h.index_put((at.nonzero()[:, 0],), rows(expert, x[at]))
            return h

        i = torch.tensor([0, 0, 1, 0, 2])
        return torch.autograd.grad(end(cut(of, batch_argnums=(0, 1))(X, i)), experts)

    def a_step_through_a_step(cut):
        """The gradient with respect to a learning rate that a schedule captures."""
        loss = lambda w, x: end(cut(rows)(w, x))  # noqa: E731

        def after(rate):
            step = pa.make_step(loss, pa.chain(pa.clip_by_global_norm(1.0), pa.sgd(lambda _: rate)))
            return loss(step(step.init(W), X)[0].params, X)

        return grad(after)(torch.tensor(0.3, dtype=torch.float64))

    def per_sample_gradients_around(cut):
        of = lambda w, x: cut(rows)(w, x).square().sum()  # noqa: E731
        each = pa.per_sample_grad(lambda w, x: of(w, x[None]))(W, X)
        return vmap(grad(of), (None, 0))(W, X[:, None]), each

    def a_dtype_and_a_device_of_its_own(cut):
        of = lambda w, x: (rows(w, x).float(), (x > 0), x.argmax(1), None, "name")  # noqa: E731
        found = cut(of)(W, X)
        assert found[3:] == (None, "name")
        return found[:3], grad(lambda w: cut(of)(w, X)[0].double().square().sum())(W)


PROGRAMS = {name.replace("_", " "): f for name, f in vars(Programs).items() if callable(f)}


def uncut(func, **_):
    return func


def near(got, want, name):
    xs, ys = optree.tree_leaves(got), optree.tree_leaves(want)
    assert len(xs) == len(ys)
    for x, y in zip(xs, ys, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert (x.double() - y.double()).norm() <= 1e-10 * (1 + y.double().norm()), name


@pytest.mark.parametrize(
    "name",
    [
        # that weight is neither a leaf nor the module's parameter
        pytest.param(name, marks=pytest.mark.given_up("captured") if "computed" in name else ())
        for name in PROGRAMS
    ],
)
@pytest.mark.parametrize("size", [2, [1, 4]], ids=str)
@pytest.mark.filterwarnings("ignore")
def test_every_program_is_the_plain_one(name, size):
    by = 2 if name in ("a cut in a cut", "per sample gradients around") else size
    try:
        got = PROGRAMS[name](
            lambda func, **options: pa.microbatch(func, microbatch_size=by, **options)
        )
    except RuntimeError as error:  # what torch does where Python sees none of it
        unseen = name in ("a scripted module", "a traced module")
        if not unseen or "captured tensor" not in str(error):
            raise
        return
    near(got, PROGRAMS[name](uncut), name)


@pytest.mark.promise("second run")
@pytest.mark.parametrize("randomness", ["different", "same"])
@pytest.mark.parametrize("form", ["vmap of grad", "grad of vmap", "vmap of jvp", "vmap of both"])
def test_dropout_under_vmap_draws_again_what_it_drew(form, randomness):
    """Of torch's own generator: masks are those of a loop over the microbatches."""
    scales = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    over = lambda g: vmap(g, randomness=randomness)(scales)  # noqa: E731
    forms = {
        "vmap of grad": lambda f: over(lambda s: grad(f)(W * s)),
        "grad of vmap": lambda f: grad(lambda w: over(lambda s: f(w * s)).sum())(W),
        "vmap of jvp": lambda f: over(lambda s: jvp(f, (W * s,), (W,))[1]),
        "vmap of both": lambda f: over(lambda s: grad(lambda w: grad(f)(w).pow(3).sum())(W * s)),
    }

    def run(f):
        torch.manual_seed(5)
        return forms[form](lambda w: f(w).sum(0).pow(2).sum())

    dropped = lambda w, x: F.dropout(x @ w, 0.5)  # noqa: E731
    micro = pa.microbatch(dropped, microbatch_size=2)
    loop = run(lambda w: torch.cat([dropped(w, part) for part in X.split(2)]))
    near(run(lambda w: micro(w, X)), loop, form)
