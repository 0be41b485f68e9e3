"""Plain ``.backward()`` follows what requires grad, through whatever gives derivatives, or raises.

All losses are polynomials on whole numbers in float64, and samples are a power of two: every result
is exact, and so are its derivatives. The other side is torch.func's transform of plain torch.
"""

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import grad, jvp, vjp, vmap

import pureaccum as pa
from pureaccum.curvature import fisher_vp, ggnvp, hvp
from tests.draws import examples, generator
from tests.exactly import integers
from tests.problems import in_parts, together
from tests.refusals import saying


pytestmark = [pytest.mark.transforms, pytest.mark.promise("closure")]
G = generator(0)
W, V = integers(G, 3, bound=2).double(), integers(G, 3, bound=2).double()
X, C = integers(G, 8, 3, bound=2).double(), torch.tensor(3.0, dtype=torch.float64)


def rows(w, x, c):
    return (x @ w) ** 2 * c + c**2 * (x @ w)


def mean(w, x, c):
    return rows(w, x, c).mean()


def descended(w, x, c):
    return w - 0.5 * grad(mean)(w, x, c)


def gauss_newton(w, v, x, c):
    out, moved = jvp(lambda w: rows(w, x, c), (w,), (v,))
    bent = jvp(grad(lambda out: (out**2 * c).mean()), (out,), (moved,))[1]
    return vjp(lambda w: rows(w, x, c), w)[1](bent)[0]


def fisher(w, v, x, c):
    moved = jvp(lambda w: rows(w, x, c), (w,), (v,))[1]
    return vjp(lambda w: rows(w, x, c), w)[1](moved / len(x))[0]


each = vmap(grad(rows), (None, 0, None))
PLAIN = {  # of w, v, x, and of what the loss captures
    "value": lambda w, v, x, c: mean(w, x, c),
    "grad": lambda w, v, x, c: grad(mean)(w, x, c),
    "grad_and_value": lambda w, v, x, c: grad(mean)(w, x, c) * mean(w, x, c),
    "aux": lambda w, v, x, c: torch.cat([grad(mean)(w, x, c), rows(w, x, c)]),
    "per_sample_grad": lambda w, v, x, c: each(w, x, c),
    "per_sample_grad, summed": lambda w, v, x, c: each(w, x, c).sum(0),
    "gramian": lambda w, v, x, c: each(w, x, c) @ each(w, x, c).T,
    "hvp": lambda w, v, x, c: jvp(grad(lambda w: mean(w, x, c)), (w,), (v,))[1],
    "ggnvp": gauss_newton,
    "fisher_vp": fisher,
}


def called(name, size, engine):
    """The same by what gives derivatives of a loss that captures ``c``."""
    by_size = {"microbatch_size": size}
    options = by_size | {"engine": engine}
    chunks = {"engine": "autograd" if engine == "autograd" else "vmap"}
    chunks |= {"chunk_size": size if isinstance(size, int) else 3}

    def run(w, v, x, c):
        loss, of_row = lambda w, x: mean(w, x, c), lambda w, x: rows(w, x, c)
        both = lambda w, x: (loss(w, x), of_row(w, x))  # noqa: E731
        squared = lambda out, x: (out**2 * c).mean()  # noqa: E731
        return {
            "value": lambda: pa.value(loss, **by_size)(w, x),
            "grad": lambda: pa.grad(loss, **options)(w, x),
            "grad_and_value": lambda: torch.mul(*pa.grad_and_value(loss, **options)(w, x)),
            "aux": lambda: torch.cat(pa.grad(both, has_aux=True, **options)(w, x)),
            "per_sample_grad": lambda: pa.per_sample_grad(of_row, **chunks)(w, x),
            "per_sample_grad, summed": lambda: pa.per_sample_grad(of_row, reduce="sum", **chunks)(
                w, x
            ),
            "gramian": lambda: pa.gramian(of_row, **chunks)(w, x),
            "hvp": lambda: hvp(loss, **by_size)(w, x, v)[1],
            "ggnvp": lambda: ggnvp(of_row, squared, **by_size)(w, x, v),
            "fisher_vp": lambda: fisher_vp(of_row, **by_size)(w, x, v),
        }[name]()

    return run


def close(found, want):
    """Beyond 2**53 numbers are rounded: then an error is at most sqrt(u) of what it is of."""
    assert (found - want).norm() <= 2.0**-26 * want.norm()


ENGINES = dict.fromkeys(PLAIN, ("func",)) | dict.fromkeys(
    ("grad", "aux", "per_sample_grad", "gramian"), ("func", "autograd", "auto")
)
AUTO = pytest.mark.given_up("auto engine")
CASES = [
    pytest.param(name, engine, marks=AUTO if engine == "auto" else ())
    for name, engines in ENGINES.items()
    for engine in engines
]


def number(out):
    return (out**2).sum()


def requiring(which):
    return [x.clone().requires_grad_(i in which) for i, x in enumerate((W, V, X, C))]


@pytest.mark.parametrize("which", [(0,), (2,), (3,), (0, 1, 2, 3)])
@pytest.mark.parametrize(("name", "engine"), CASES)
def test_first_and_second_derivatives(name, engine, which):
    plain = PLAIN[name]
    first = grad(lambda *xs: number(plain(*xs)), which)
    second = grad(lambda *xs: sum(map(number, first(*xs))), which)
    for size in (3, [1, 4, 3], 8, None):
        operands = requiring(which)
        wrt = [operands[i] for i in which]
        out = called(name, size, engine)(*operands)
        assert torch.equal(out, plain(W, V, X, C))
        unused = {"materialize_grads": True}
        found = torch.autograd.grad(number(out), wrt, create_graph=True, **unused)
        assert all(map(torch.equal, found, first(W, V, X, C)))
        again = torch.autograd.grad(sum(map(number, found)), wrt, **unused)
        for a, b in zip(again, second(W, V, X, C), strict=True):
            close(a, b)


@pytest.mark.parametrize(("name", "engine"), CASES)
def test_without_anything_that_requires_grad_there_is_no_history(name, engine):
    run = called(name, 3, engine)
    assert not run(W, V, X, C).requires_grad
    with torch.no_grad():
        out = run(*requiring((0, 1, 2, 3)))
    assert not out.requires_grad
    assert torch.equal(out, PLAIN[name](W, V, X, C))


@pytest.mark.parametrize("engine", ["func", "autograd"])
def test_parameters_of_modules_that_a_loss_captures(engine):
    net = nn.Linear(3, 3, dtype=torch.float64)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(integers(G, *p.shape, bound=2))

    loss = lambda w, x: ((net(x) @ w) ** 2).mean()  # noqa: E731
    own = [*net.parameters()]
    want = torch.autograd.grad(number(grad(loss)(W, X)), own)
    for _ in range(2):  # the second call knows
        found = torch.autograd.grad(
            number(pa.grad(loss, microbatch_size=3, engine=engine)(W, X)), own
        )
        assert all(map(torch.equal, found, want))
    assert all(p.grad is None for p in own)


def test_what_only_a_later_microbatch_captures():
    c = C.clone().requires_grad_()

    def new_loss():
        def loss(w, x):
            out = ((x @ w) ** 2).sum()
            return out * c if x[0, 0] == X[6, 0] and torch.equal(x, X[6:]) else out

        return loss

    want = torch.autograd.grad(new_loss()(W, X[6:]), c)[0]
    options = {"microbatch_size": 3, "reduction": "sum", "check": False}
    value = pa.value(new_loss(), **options)(W, X)
    assert torch.equal(torch.autograd.grad(value, c)[0], want)
    for engine in ("func", "auto", "autograd"):
        grads = pa.grad(new_loss(), engine=engine, **options)(W, X)
        assert grads.requires_grad


@pytest.mark.promise("second run")
@pytest.mark.parametrize("captured", [False, True])
def test_what_a_later_microbatch_alone_draws_is_drawn_again(captured):
    """Nobody knows of it when the first one has been called."""
    w = W.clone().requires_grad_()

    def total(w, x):
        drawn = torch.rand(2, dtype=torch.float64).sum() if bool(x[0, 0] == 2) else 1.0
        return (x @ w).sum() * drawn

    x = torch.tensor([[1.0, 0, 1], [1, 1, 0], [2, 1, 1], [2, 0, 1]], dtype=torch.float64)
    torch.manual_seed(0)
    (expected,) = torch.autograd.grad(total(w, x[:2]) + total(w, x[2:]), w)
    torch.manual_seed(0)
    loss = (lambda _, x: total(w, x)) if captured else total
    value = pa.value(loss, microbatch_size=2, reduction="sum", check=False)(W if captured else w, x)
    torch.rand(5)
    value.backward()
    assert torch.equal(w.grad, expected)


@pytest.mark.given_up("restored modes")
def test_history_remembers_draws_and_modes():
    net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(), nn.Linear(8, 1)).double()
    fn = pa.functional(net)
    x = X.clone().requires_grad_()
    loss = lambda params, x: (fn.apply(params, fn.buffers, x)[0] ** 2).mean()  # noqa: E731
    torch.manual_seed(0)
    value = pa.value(loss, microbatch_size=4)(fn.params, x)
    state = torch.get_rng_state()
    net.eval()
    value.backward()
    assert torch.equal(torch.get_rng_state(), state)
    net.train()
    torch.manual_seed(0)
    y = X.clone().requires_grad_()
    sum(loss(fn.params, part) / 2 for part in y.split(4)).backward()
    assert torch.equal(torch.get_rng_state(), state)
    close(x.grad, y.grad)


@pytest.mark.promise("second run")
def test_history_remembers_draws_and_leaves_the_generator():
    net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(), nn.Linear(8, 1)).double()
    fn = pa.functional(net)
    loss = lambda params, x: (fn.apply(params, fn.buffers, x)[0] ** 2).mean()  # noqa: E731
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    torch.manual_seed(0)
    value = pa.value(loss, microbatch_size=4, check=False)(fn.params, x)
    state = torch.get_rng_state()
    torch.rand(5)
    later = torch.get_rng_state()
    value.backward()
    assert torch.equal(torch.get_rng_state(), later)
    torch.manual_seed(0)
    sum(loss(fn.params, part) / 2 for part in y.split(4)).backward()
    assert torch.equal(torch.get_rng_state(), state)
    close(x.grad, y.grad)


@pytest.mark.promise("second run")
@pytest.mark.parametrize("changed", ["w", "x", "c", "a constant"])
def test_an_operand_that_is_written_to_before_the_backward_pass_raises(changed):
    w, _, x, c = requiring((0,) if changed == "a constant" else (0, 3))
    value = pa.value(lambda w, x: mean(w, x, c), microbatch_size=3)(w, x)
    with torch.no_grad():
        {"w": w, "x": x}.get(changed, c).add_(1)
    said = "inplace operation|" * (changed != "a constant") + "written to in place since"
    with pytest.raises(RuntimeError, match=said):
        value.backward()


# Streams and states --------------------------------------------------------------------------


def streamed(w, x, c, donate):
    acc = pa.accumulator(lambda w, x: mean(w, x, c))
    return acc, in_parts(acc, w, x.split(3), donate)


@pytest.mark.promise("followed")
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("which", [(0,), (2,), (3,)])
def test_a_stream_raises_when_a_gradient_is_asked(which, donate):
    w, _, x, c = requiring(which)
    acc, state = streamed(w, x, c, donate)
    grads, value = acc.finalize(state)
    assert torch.equal(grads, grad(mean)(W, X, C))
    merged = acc.merge(state, acc.update(acc.init(W), W, X))
    for out in (grads.sum(), value, state.total, merged.total, acc.finalize(merged)[1]):
        with saying(RuntimeError, "the state of an accumulator", "no graph is kept", "x.detach()"):
            (out + out.detach()).backward()


@pytest.mark.slow
def test_a_stream_keeps_nothing_of_what_it_has_seen():
    w = W.clone().requires_grad_()
    acc, state = streamed(w, X, C, True)
    batches = list[weakref.ref[Tensor]]()
    for _ in range(20):
        batches.append(weakref.ref(batch := X.clone()))
        state = acc.update(state, w, batch, donate=True)
    del batch
    gc.collect()
    assert not [x for x in batches if x() is not None]


@pytest.mark.promise("followed")
def test_a_value_over_a_stream_raises_too():
    for which in ((0,), (2,), (3,)):
        w, _, x, c = requiring(which)
        of = pa.value(lambda w, x, c=c: mean(w, x, c), stream=True)
        value = of(w, iter(x.split(4)))
        assert torch.equal(value, mean(W, X, C))
        with saying(RuntimeError, "value over a stream", "used up by then"):
            value.backward()


@pytest.mark.parametrize("compile", [False, {"backend": "eager"}])
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("form", ["whole", "window", "generator", "pieces"])
def test_a_step_follows_its_state_its_batch_and_what_is_shared(form, donate, compile):
    loss = lambda w, x, c: mean(w, x, c)  # noqa: E731
    step = pa.make_step(loss, pa.sgd(0.5), microbatch_size=4, donate=donate, compile=compile)
    w, _, x, c = requiring((0, 2, 3))
    state = step.init(W)._replace(params=w)
    if form == "whole":
        state, info = step(state, x, c)
    elif form == "pieces":
        window = step.begin(state)
        for part in x.split(4):
            window = step.update(state, window, part, c)
        state, info = step.apply(state, window)
    else:
        parts = list(x.split(4)) if form == "window" else (part for part in x.split(4))
        state, info = step.window(state, parts, c)
    want = grad(lambda w, x, c: number(descended(w, x, c)) + mean(w, x, c), (0, 1, 2))(W, X, C)
    found = torch.autograd.grad(number(state.params) + info.loss, (w, x, c))
    assert all(map(torch.equal, found, want))


@pytest.mark.given_up("captured")
@pytest.mark.parametrize("engine", ["auto", "func"])
def test_a_step_refuses_what_its_loss_captures_but_parameters_of_modules(engine):
    net = nn.Linear(3, 3, dtype=torch.float64)
    c, beside = C.clone().requires_grad_(), net(X)
    losses = {
        "leaf": lambda w, x: mean(w, x, c),
        "computed": lambda w, x: ((beside[: len(x)] @ w) ** 2).mean(),
    }
    for loss in losses.values():
        step = pa.make_step(loss, pa.sgd(0.5), microbatch_size=4, engine=engine, check=False)
        for _ in range(2):
            with saying(RuntimeError, "captures a tensor", "shared argument", "detach()"):
                step(step.init(W), X)
    step = pa.make_step(
        lambda w, x: ((net(x) @ w) ** 2).mean(), pa.sgd(0.5), microbatch_size=4, engine=engine
    )
    assert not step(step.init(W), X)[0].params.requires_grad


@pytest.mark.promise("followed")
@pytest.mark.parametrize("engine", ["auto", "func"])
def test_a_step_refuses_what_was_computed_before_and_its_loss_captures(engine):
    beside = nn.Linear(3, 3, dtype=torch.float64)(X)
    loss = lambda w, x: ((beside[: len(x)] @ w) ** 2).mean()  # noqa: E731
    step = pa.make_step(loss, pa.sgd(0.5), microbatch_size=4, engine=engine, check=False)
    for _ in range(2):
        with saying(RuntimeError, "argument"):
            step(step.init(W), X)


@pytest.mark.promise("documented")
@pytest.mark.parametrize("engine", ["auto", "func"])
def test_a_step_takes_parameters_of_captured_modules_for_constants(engine):
    """A teacher: it is not trained, and no graph of it stays."""
    net = nn.Linear(3, 3, dtype=torch.float64)
    loss = lambda w, x: ((net(x) @ w) ** 2).mean()  # noqa: E731
    step = pa.make_step(loss, pa.sgd(0.5), microbatch_size=4, engine=engine)
    got = step(step.init(W), X)[0].params
    assert not got.requires_grad
    assert all(p.grad is None for p in net.parameters())
    close(got, W - 0.5 * grad(loss)(W, X).detach())


@pytest.mark.given_up("captured")
def test_a_tensor_that_a_step_captures_later():
    held = {"c": C}
    step = pa.make_step(lambda w, x: mean(w, x, held["c"]), pa.sgd(0.5), microbatch_size=4)
    state, _ = step(step.init(W), X)
    held["c"] = C.clone().requires_grad_()
    with saying(RuntimeError, "captures a tensor"):
        step(state, X)


@pytest.mark.promise("errors")
def test_a_run_begins_with_numbers():
    step = pa.make_step(lambda w, x: mean(w["w"], x, C), pa.sgd(0.5))
    leaf = W.clone().requires_grad_()
    with saying(ValueError, "params['w'] was computed from", "state._replace(params=params)"):
        step.init({"w": leaf * 1})
    assert not step.init({"w": leaf}).params["w"].requires_grad


@pytest.mark.slow
def test_steps_with_gradients_in_grad_stay_flat():
    net = nn.Linear(3, 1, dtype=torch.float64)
    own = dict(net.named_parameters())
    of = pa.grad(
        lambda p, x: (torch.func.functional_call(net, p, (x,)) ** 2).mean(), microbatch_size=4
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def run(steps):
        for _ in range(steps):
            for name, g in of(own, X.clone()).items():
                own[name].grad = g
            optimizer.step()
        gc.collect()
        return sum(issubclass(type(x), Tensor) for x in gc.get_objects())

    assert run(3) == run(30)


# Together with others ------------------------------------------------------------------------


@examples(0.5)
@given(st.data())
def test_programs_of_several(data):
    """What one gives, the next one is given, inside of a loss of a third."""
    names = st.sampled_from(["value", "grad", "hvp", "ggnvp", "fisher_vp"])
    first, second = data.draw(names), data.draw(names)
    size = data.draw(st.sampled_from([2, 3, 8]))
    which = data.draw(st.sampled_from([(0,), (3,), (0, 1, 2, 3)]))

    def program(a, b):
        def run(w, v, x, c):
            z = a(w, v, x, c).sum() * v
            return number(b(w + z * 2.0**-8, v, x, c) * 2.0**-8)

        return run

    of_ours = program(called(first, size, "func"), called(second, size, "func"))
    plain = program(PLAIN[first], PLAIN[second])
    operands = requiring(which)
    found = torch.autograd.grad(of_ours(*operands), [operands[i] for i in which])
    want = grad(plain, which)(W, V, X, C)
    for a, b in zip(found, want, strict=True):
        close(a, b)


def test_inside_of_a_microbatched_function():
    inner = lambda w, x: pa.grad(lambda w, x: mean(w, x, C), microbatch_size=1)(w, x)  # noqa: E731
    w = W.clone().requires_grad_()
    outer = pa.microbatch(lambda w, x: inner(w, x), microbatch_size=4, reduce="sum")
    number(outer(w, X)).backward()
    want = grad(lambda w: number(sum(grad(mean)(w, part, C) for part in X.split(4))))(W)
    assert torch.equal(w.grad, want)


@pytest.mark.parametrize("vectorize", [False, True])
def test_autograd_functional(vectorize):
    """torch.autograd.functional goes by plain autograd, and maps cotangents where it vectorizes."""
    functional = torch.autograd.functional
    want = torch.func.hessian(lambda w: mean(w, X, C))(W)
    value = pa.value(lambda w, x: mean(w, x, C), microbatch_size=3)
    grad = pa.grad(lambda w, x: mean(w, x, C), microbatch_size=3)
    assert torch.equal(functional.hessian(lambda w: value(w, X), W, vectorize=vectorize), want)
    assert torch.equal(functional.jacobian(lambda w: grad(w, X), W, vectorize=vectorize), want)


@pytest.mark.parametrize("name", ["value", "grad", "hvp"])
def test_a_backward_pass_takes_the_memory_of_one_microbatch(name):
    alive = []
    made = []

    def of_one(w, x, c):
        out = rows(w, x, c)
        made.append(weakref.ref(out))
        alive.append(sum(x() is not None for x in made))
        return (out * C).mean()

    w = W.clone().requires_grad_()
    loss = lambda w, x: of_one(w, x, C)  # noqa: E731
    calls = {
        "value": lambda: pa.value(loss, microbatch_size=1)(w, X),
        "grad": lambda: number(pa.grad(loss, microbatch_size=1)(w, X)),
        "hvp": lambda: number(hvp(loss, microbatch_size=1)(w, X, V)[1]),
    }
    (found,) = torch.autograd.grad(calls[name](), w, create_graph=True)
    number(found).backward()
    assert max(alive) <= 2


@pytest.mark.slow
@pytest.mark.promise("threads")
def test_in_several_threads():
    want = grad(lambda w: number(grad(mean)(w, X, C)))(W)

    def work():
        found = []
        for _ in range(10):
            w, c = W.clone().requires_grad_(), C.clone().requires_grad_()
            out = pa.grad(lambda w, x, c=c: mean(w, x, c), microbatch_size=3)(w, X)
            found.append(torch.autograd.grad(number(out), w)[0])
        return found

    assert all(torch.equal(x, want) for found in together(work, work, work) for x in found)


def test_a_vmap_in_a_loss_twice_backwards():
    """What a piece is given is its operand, not captured: levels are over by the backward pass."""
    mapped = torch.func.vmap(rows, (None, 0, None))
    of = pa.grad(lambda w, x: mapped(w, x, C).sum(), microbatch_size=3, reduction="sum")
    plain = grad(lambda w: rows(w, X, C).sum())
    w = W.clone().requires_grad_()
    (first,) = torch.autograd.grad((of(w, X) * V).sum(), w, create_graph=True)
    (second,) = torch.autograd.grad((first * V).sum(), w)
    along = grad(lambda w: (plain(w) * V).sum())
    assert torch.equal(first, along(W))
    assert torch.equal(second, grad(lambda w: (along(w) * V).sum())(W))
    _, pull = vjp(grad(lambda w: (of(w, X) * V).sum()), W)
    assert torch.equal(pull(V)[0], second)


def dropping(made, c):
    def loss(w, x):
        tensors = [*x.expand(made, *x.shape)]
        del tensors[::2]
        return mean(w, x, c) + grad(lambda w: mean(w, x, C))(w).sum()

    return loss


@pytest.mark.slow
@pytest.mark.promise("followed")
def test_what_a_product_s_loss_captures_is_never_a_constant():
    """Its derivative is right, or something raises."""
    c = C.clone().requires_grad_()
    plain = jvp(grad(lambda w: dropping(1, c)(w, X)), (W,), (V,))[1]
    (want,) = torch.autograd.grad(plain.sum(), c)
    for made in range(1, 2000, 100):
        try:
            _, product = hvp(dropping(made, c), microbatch_size=4)(W, X, V)
            assert product.requires_grad
            (found,) = torch.autograd.grad(product.sum(), c, allow_unused=True)
        except RuntimeError:
            continue
        close(found, want)


@pytest.mark.slow
@pytest.mark.given_up("captured")
def test_what_is_refused_is_refused_to_who_asks_for_one_gradient():
    c = C.clone().requires_grad_()

    # A tensor that the loss drops leaves its id to another one, which the loss has not made.
    for made in range(1, 2000, 100):
        _, product = hvp(dropping(made, c), microbatch_size=4)(W, X, V)
        for unused in (False, True):  # None would be a silent constant
            with saying(RuntimeError, "captures a tensor that requires grad"):
                torch.autograd.grad(product.sum(), c, allow_unused=unused)


@pytest.mark.parametrize("name", ["accumulator", "stream", "value"])
def test_a_refusal_hangs_on_the_arguments(name):
    """Who asks for the gradient of one, and allows it to be unused, is told too."""

    def accumulated(w):
        acc = pa.accumulator(lambda w, x: mean(w, x, C))
        return acc.finalize(acc.update(acc.update(acc.init(w), w, X), w, X))[1]

    def unseen(w, x):
        z = x.detach().clone().requires_grad_()
        (g,) = torch.autograd.grad((z @ w).square().sum(), z, create_graph=True)
        return (x @ w).mean() + g.norm(dim=1).mean()

    run = {
        "accumulator": accumulated,
        "stream": lambda w: pa.value(lambda w, x: mean(w, x, C), stream=True)(w, [X, X]),
        "value": lambda w: pa.value(unseen, microbatch_size=2)(w, X),
    }[name]
    w = W.clone().requires_grad_()
    for argument in (w, w * 2):
        with pytest.raises(RuntimeError, match=r"no graph is kept|cannot be followed"):
            torch.autograd.grad(run(argument), argument, allow_unused=True)


@pytest.mark.slow
def test_states_of_an_accumulator_form_no_chain():
    w = W.clone().requires_grad_()
    acc = pa.accumulator(lambda w, x: mean(w, x, C))
    state, dead = acc.init(w), []
    for _ in range(5):
        state = acc.update(state, w, X)
        dead.append(weakref.ref(state.grads))
    gc.collect()
    assert [at() is None for at in dead] == [True] * 4 + [False]
