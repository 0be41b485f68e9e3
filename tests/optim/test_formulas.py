"""The plain formula, which runs under transforms and compilers, beside torch's kernel.

One step from the same numbers. Both round, in different orders, and each result is off by at most

    u * (the number of roundings on the way * the sizes of the terms that are added)

to first order, u being half an ulp of one; ``SLACK`` is more than what the higher orders add. What
is asserted is that the two are apart by no more than twice that. The number of roundings is
counted below, line by line, for whichever of the two rounds more: a Python number that is brought
to the tensor's dtype counts as one, so do a product, a sum, a quotient and a root.
"""

import optree
import pytest
import torch
from hypothesis import given, target
from hypothesis import strategies as st
from torch import Tensor

import pureaccum as pa
from pureaccum.testing.strategies import seeds
from tests.draws import examples, generator
from tests.optimizers import clones, normal, unread


pytestmark = [pytest.mark.bounds, pytest.mark.promise("optimizers")]
UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}
SLACK = 1.001
FEW = 2.0**-18  # some 64 roundings of float32, of numbers near one
DTYPES = pytest.mark.parametrize("dtype", UNIT, ids=["float32", "float64"])
Bounds = dict[str, Tensor]


# Bounds ---------------------------------------------------------------------------------


def sgd_bounds(grad, x, state, lr, flags):
    """What one side may be off by, in units of u, and in float64."""
    m, d, decay = flags["momentum"], flags["dampening"], flags["weight_decay"]
    size = grad.abs() + decay * x.abs()
    roundings = 3  # the decay, its product with x, the sum
    found = {}
    if m:
        first = state.steps == 0
        size = size if first else m * state.momentum.double().abs() + abs(1 - d) * size
        roundings += 0 if first else 3  # a factor, a product, the sum
        found["momentum"] = roundings * size
        if flags["nesterov"]:
            size = grad.abs() + decay * x.abs() + m * size
            roundings += 3  # the factor, the product, the sum
    roundings += 3  # the rate, the product, the difference
    return {"params": roundings * (x.abs() + lr * size), **found}


def adam_bounds(grad, x, state, lr, flags, decoupled, u):
    """What one side may be off by, in units of u, and in float64.

    An absolute error e of v becomes one of min(e / sqrt(v), sqrt(e)) of its root, since
    |sqrt(v + e) - sqrt(v)| = |e| / (sqrt(v + e) + sqrt(v)).
    """
    (b1, b2), eps, decay = flags["betas"], flags["eps"], flags["weight_decay"]
    m, v = state.exp_avg.double(), state.exp_avg_sq.double()
    t = state.steps.item() + 1
    bias1, bias2 = 1 - b1**t, 1 - b2**t
    # The power is good to one ulp in float64, and its difference from 1 cancels.
    off1, off2 = (3 * 2.0**-53 / u / bias for bias in (bias1, bias2))
    g = grad.abs() + (0 if decoupled else decay) * x.abs()  # 3: the decay, the product, the sum
    sign = -1 if flags["maximize"] else 1
    exact = sign * grad + (0 if decoupled else decay) * x
    # A kernel's lerp from the other end: the weight, 1 - it, a difference, a product, a sum.
    mean = m.abs() + (1 - b1) * (m.abs() + g)
    off_mean = (3 + 5) * mean
    # Each factor g is off by 3; two factors, two products and the sum.
    square = b2 * v + (1 - b2) * g * g
    off_square = (2 * 3 + 5) * square
    top, found = b2 * v + (1 - b2) * exact * exact, {"exp_avg": off_mean, "exp_avg_sq": off_square}
    if flags["amsgrad"]:
        most = state.max_exp_avg_sq.double()
        top, found = torch.maximum(most, top), found | {"max_exp_avg_sq": off_square}
    off_root = torch.minimum(u * off_square / top.sqrt(), (u * off_square).sqrt()) / u
    off_root = torch.where(off_square > 0, off_root, 0.0)
    # root, root of the bias and its cast, quotient; eps, sum
    root = top.sqrt() / bias2**0.5
    denominator = root + eps
    off = off_root / bias2**0.5 + (4 + off2) * root + 2 * denominator
    least = (denominator - u * off).clamp(min=0)
    # the rate, the bias, their quotient, its cast; the product, the quotient
    step = lr / bias1 * mean / denominator
    off_step = lr / bias1 * off_mean / denominator + (6 + off1) * step + step * off / least
    # the rate times the decay, from 1, times x: 5; the last difference
    kept = x.abs() * (1 + lr * decay if decoupled else 1)
    found["params"] = 5 * kept + off_step + kept + step
    return found


# Problems -------------------------------------------------------------------------------


magnitudes = st.floats(1e-4, 1.0)
decays = st.just(0.0) | magnitudes


@st.composite
def sgd_flags(draw):
    nesterov = draw(st.booleans())
    momentum = draw(magnitudes if nesterov else decays)
    dampening = 0.0 if nesterov else draw(st.floats(0.0, 1.0))
    return {
        "momentum": momentum,
        "dampening": dampening,
        "nesterov": nesterov,
        "weight_decay": draw(decays),
        "maximize": draw(st.booleans()),
    }


adam_flags = st.fixed_dictionaries(
    {
        "betas": st.tuples(st.floats(0.0, 0.9999), st.floats(0.0, 0.9999)),
        "eps": st.floats(1e-12, 1e-2),
        "weight_decay": decays,
        "amsgrad": st.booleans(),
        "maximize": st.booleans(),
    }
)


def begin(opt, dtype, steps, random):
    """Random parameters and moments, as after so many steps; before the first they are zeros."""
    x = normal((40,), random, dtype)
    state = opt.init(x)
    if not steps:
        return x, state
    fields = {
        name: normal((40,), random, dtype)
        for name in state._fields
        if name not in ("steps", "lr") and isinstance(getattr(state, name), Tensor)
    }
    fields |= {name: v * v for name, v in fields.items() if "sq" in name}
    return x, state._replace(steps=torch.tensor(steps), **fields)


def one_member(opt, *args, **options):
    """One step under vmap over one member."""
    stacked = optree.tree_map(lambda x: x[None], args, namespace="pureaccum")
    new = torch.func.vmap(lambda *args: opt.apply(*args, **options))(*stacked)
    return optree.tree_map(lambda x: x[0], new, namespace="pureaccum")


def assert_within(got, want, bounds, u, aim=False):
    """Apart by no more than twice the bound of each; counts and rates the same."""
    (x, state), (y, other) = got, want
    worst = 0.0
    for name, bound in bounds.items():
        a, b = (x, y) if name == "params" else (getattr(state, name), getattr(other, name))
        assert a.dtype == b.dtype
        apart, allowed = (a.double() - b.double()).abs() / u, 2 * SLACK * bound
        assert (apart <= allowed).all(), (name, a, b, apart / allowed)
        worst = max(worst, (apart / allowed).nan_to_num().max().item())
    assert state.steps == other.steps
    if aim:
        target(worst)


def bounds_of(kind, args, lr, flags, u):
    grad, state, x = args
    if kind == "sgd":
        return sgd_bounds(grad.double(), x.double(), state, lr, flags)
    return adam_bounds(grad.double(), x.double(), state, lr, flags, kind == "adamw", u)


MAKE = {"sgd": pa.sgd, "adam": pa.adam, "adamw": pa.adamw}
KINDS = pytest.mark.parametrize("kind", MAKE)


# The same numbers up to rounding --------------------------------------------------------


@KINDS
@DTYPES
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@examples(1 / 2)
@given(
    st.data(),
    st.floats(1e-6, 1.0),
    st.integers(0, 3) | st.integers(0, 10**6),
    seeds(),
    st.booleans(),
)
def test_vmap_is_the_kernel_up_to_rounding(kind, dtype, fused, data, lr, steps, seed, whole):
    flags = data.draw(sgd_flags() if kind == "sgd" else adam_flags)
    opt, random = MAKE[kind](lr, fused=fused, **flags), generator(seed)
    x, state = begin(opt, dtype, steps, random)
    args = (normal((40,), random, dtype), state, x)
    got = one_member(opt, *args, applied=torch.tensor(True) if whole else None)
    bounds = bounds_of(kind, args, lr, flags, UNIT[dtype])
    assert_within(got, opt.apply(*args), bounds, UNIT[dtype], aim=True)


COMPILED = [
    ("sgd", {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    ("sgd", {"momentum": 0.9, "nesterov": True, "maximize": True}),
    ("adam", {"weight_decay": 0.1, "amsgrad": True}),
    ("adamw", {"weight_decay": 0.1, "maximize": True}),
]


@pytest.mark.slow
@pytest.mark.promise("compiled")
@pytest.mark.parametrize(("kind", "given"), COMPILED, ids=str)
def test_one_compiled_graph_is_the_kernel_up_to_rounding(kind, given):
    """For the first step and for others, for steps applied or not, without another graph."""
    off = {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0}
    if kind != "sgd":
        off = {"betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False}
    flags = off | {"maximize": False} | given
    opt, random = MAKE[kind](0.1, **flags), generator(0)
    torch.compiler.reset()
    compiled = torch.compile(opt.apply, backend="aot_eager", fullgraph=True)
    for steps in (0, 1, 50):
        x, state = begin(opt, torch.float32, steps, random)
        args = (normal((40,), random), state, x)
        bounds = bounds_of(kind, args, 0.1, flags, 2.0**-24)
        with torch._dynamo.config.patch(error_on_recompile=steps > 0):
            got = compiled(*args, applied=torch.tensor(True))
            assert_within(got, opt.apply(*args), bounds, 2.0**-24)
            kept, _ = compiled(*args, applied=torch.tensor(False))
            assert torch.equal(kept, x)


@pytest.mark.promise("ensembles")
@pytest.mark.parametrize("kind", MAKE)
def test_several_members_under_vmap_are_each_as_if_alone(kind):
    """Learning rates, counts and flags of their own, in one vmap. Powers may be rounded apart."""
    opt, random = MAKE[kind](0.1), generator(1)
    members = []
    for n, lr in enumerate((0.1, 0.01, 1.0)):
        x, state = begin(opt, torch.float32, n, random)
        state = state._replace(lr=torch.tensor(lr, dtype=torch.float64))
        members.append((normal((40,), random), state, x, torch.tensor(n != 1)))

    def step(grad, state, x, applied):
        return opt.apply(grad, state, x, applied=applied)

    def stacked(trees):
        return optree.tree_map(lambda *xs: torch.stack(xs), *trees, namespace="pureaccum")

    together = torch.func.vmap(step)(*stacked(members))
    alone = stacked([one_member(opt, *m[:3], applied=m[3]) for m in members])
    torch.testing.assert_close(together, alone, rtol=FEW, atol=FEW)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("kind", MAKE)
def test_the_parts_of_a_complex_number_are_parameters_of_their_own(kind, maximize):
    """As in torch's kernels; the first moments of both and the second are such pairs."""
    options = {"momentum": 0.9} if kind == "sgd" else {"amsgrad": True}
    opt = MAKE[kind](0.1, weight_decay=0.1, maximize=maximize, **options)
    random = generator(2)
    x = torch.randn(6, dtype=torch.complex64, generator=random)
    pair = torch.view_as_real(x)
    state, states = opt.init(x), opt.init(pair)
    for _ in range(3):
        grad = torch.randn(6, dtype=torch.complex64, generator=random)
        x, state = one_member(opt, grad, state, x)
        pair, states = one_member(opt, torch.view_as_real(grad), states, pair)
        parts = optree.tree_map(
            lambda y: torch.view_as_real(y) if y.is_complex() else y,
            (x, state),
            namespace="pureaccum",
        )
        torch.testing.assert_close(parts, (pair, states), rtol=FEW, atol=FEW)


@pytest.mark.promise("launches")
def test_a_rate_that_nobody_may_read_takes_the_formula():
    """sgd's kernel would wait for a device: the bits are those under a transform."""
    x, grad = torch.randn(9), torch.randn(9)
    rate = unread(torch.tensor(0.1, dtype=torch.float64))
    opt, plain = pa.sgd(rate, 0.9), pa.sgd(0.1, 0.9)
    got, _ = opt.apply(grad, opt.init(x), x)
    want, _ = one_member(plain, grad, plain.init(x), x)
    assert torch.equal(got.as_subclass(Tensor), want)


# Derivatives of a step ------------------------------------------------------------------


SMOOTH = {
    "sgd": lambda lr: pa.sgd(lr, 0.9, 0.1, 0.01),
    "nesterov": lambda lr: pa.sgd(lr, 0.9, nesterov=True),
    "adam": lambda lr: pa.adam(lr, eps=1e-3, weight_decay=0.1),
    "adamw": lambda lr: pa.adamw(lr, eps=1e-3, weight_decay=0.1),
    "amsgrad": lambda lr: pa.adam(lr, eps=1e-3, amsgrad=True),
}


def three_steps(make, lr, x, grads):
    opt = make(lr)
    state = opt.init(x)
    for grad in grads:
        x, state = opt.apply(grad, state, x)
    return (x * torch.arange(1.0, 1 + len(x), dtype=x.dtype)).sum()


def differences(func, at, h):
    """Central ones, number by number."""
    found = torch.zeros_like(at)
    for i in range(at.numel()):
        step = torch.zeros_like(at)
        step.view(-1)[i] = h
        found.view(-1)[i] = (func(at + step) - func(at - step)) / (2 * h)
    return found


@pytest.mark.parametrize("kind", SMOOTH)
@pytest.mark.parametrize("zeros", ["none", "one number", "all"])
def test_derivatives_are_those_of_differences(kind, zeros):
    """Also where gradients, and with them the second moments, are exactly zero.

    There the step is odd in the gradient, g / (|g| + eps) to a factor, and has the derivative
    1 / eps. Central differences are off by a share of h * wd / eps, here 1e-6; where x is zero and
    decays, each step makes the difference nine times larger, and after two of them the share is
    below 2e-4. Rounding puts them off by some 1e-15 / h = 1e-7.
    """
    random = generator(2)
    lr, x = torch.tensor(0.1, dtype=torch.float64), torch.randn(4, generator=random).double()
    grads = torch.randn(3, 4, generator=random).double()
    if zeros == "one number":
        grads[:, 1] = 0
    elif zeros == "all":
        grads[:] = 0
        x[2] = 0  # where nothing decays either
    args = (lr, x, grads)
    # The maximum of amsgrad, and a mean that passes zero, have kinks: not differentiated there.
    for i in (0, 1) if zeros != "none" and kind == "amsgrad" else (0, 1, 2):

        def func(part, i=i):
            return three_steps(SMOOTH[kind], *args[:i], part, *args[i + 1 :])

        got = torch.func.grad(func)(args[i])
        assert got.isfinite().all()
        if i == 2 and zeros != "none" and kind.startswith("adam"):
            # Second and third steps feel |g| of the first: differentiable in the last one only.
            def func(part):
                return three_steps(SMOOTH[kind], lr, x, torch.cat([grads[:-1], part]))

            got, at = torch.func.grad(func)(grads[-1:]), grads[-1:]
        else:
            at = args[i]
        want = differences(func, at, 1e-8)
        allowed = 2e-4 * want.abs() + 1e-6
        assert ((got - want).abs() <= allowed).all(), (i, got, want)


@pytest.mark.parametrize("dtype", UNIT)
def test_a_meta_gradient_through_zero_gradients_is_not_nan(dtype):
    """Of parameters that no sample of a batch has touched."""

    def tuned(lr, x):
        opt = pa.adamw(lr)
        state = opt.init(x)
        for _ in range(2):
            grads = torch.func.grad(lambda x: (x[:2] ** 2).sum())(x)
            x, state = opt.apply(grads, state, x)
        return (x**2).sum()

    x = torch.tensor([1.0, -2.0, 3.0, 0.0], dtype=dtype)
    rate = torch.tensor(0.1, dtype=dtype)
    for order in (torch.func.grad, lambda f: torch.func.grad(torch.func.grad(f))):
        assert order(tuned)(rate, x).isfinite()
    assert torch.func.grad(tuned, argnums=1)(rate, x).isfinite().all()


def test_derivatives_reach_the_rate_in_the_state():
    """Under torch.func.grad the state's own rate is a variable like any other."""
    opt, x = pa.adam(0.1), torch.tensor([1.0, 2.0])
    state = opt.init(x)
    for kept in (state, clones(state)):
        found = torch.func.grad(lambda lr, s=kept: opt.apply(x, s._replace(lr=lr), x)[0].sum())(
            state.lr
        )
        assert found.item() == pytest.approx(-2.0, abs=2e-6)  # -1 for each number, but for eps
