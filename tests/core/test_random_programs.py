"""Random programs beside plain torch: nests of transforms and tracers around nests of microbatches.

    program = around(... outer(cut(inner(w, rows)), w) ...)

Each is built once, for a ``cut`` that is microbatched or plain. What comes out is the same number,
or an error; every polynomial in it has small whole coefficients, and float64 rounds the rest.
"""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import functionalize, grad, jvp, linearize, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import pureaccum as pa
from tests.core.derivatives import DERIVATIVES, backward
from tests.draws import examples
from tests.problems import ROOT, Functions, Operations, normal


pytestmark = [
    pytest.mark.transforms,
    pytest.mark.promise("closure"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node"),
    pytest.mark.filterwarnings("ignore:Using backward"),
]
W, V, U, X = normal(3, 3), normal(3, 3, seed=1), normal(3, 3, seed=2), normal(7, 3, seed=3)
C = torch.tensor(0.7, dtype=torch.float64)
Point = Callable[[Tensor], Tensor]  # a function of w alone, to a tensor


class Scaling(Functions):
    """Another tanh: what a function gives under this mode is not what it gives without."""

    def __torch_function__(self, func, *given):
        out = super().__torch_function__(func, *given)
        return out * 1.5 if func in (torch.tanh, Tensor.tanh) else out


class Shifting(Operations):
    """The same below autograd."""

    def __torch_dispatch__(self, func, *given):
        out = super().__torch_dispatch__(func, *given)
        return out + 0.25 if func is torch.ops.aten.sin.default else out


# What is cut: a function of (w, rows), and what becomes of its output.
PIECES = {
    "rows": ("concat", lambda w, x: torch.tanh(x @ w)),
    "sum": ("sum", lambda w, x: (torch.sin(x @ w) * x).sum(0)),
    "total": ("sum", lambda w, x: (torch.tanh(x @ w) ** 2).sum()),
    "pair": (("concat", "sum"), lambda w, x: (x @ w, torch.sin(x @ w).sum())),
    "inner gradient": ("concat", lambda w, x: vmap(grad(lambda r: (r @ w).tanh().sum()))(x)),
}
INPUTS = ("w", "rows", "captured")
FOLLOWED = [*INPUTS[:2], pytest.param(INPUTS[2], marks=pytest.mark.given_up("captured"))]


def cut(piece, size, by=1.0):
    """A piece over all samples, in one tensor; it captures what its weight is multiplied by."""
    reduce, func = PIECES[piece]
    scaled = lambda w, x: func(w * by, x)  # noqa: E731

    def joined(w, x):
        whole = scaled
        if size is not None:
            whole = pa.microbatch(scaled, microbatch_size=size, reduce=reduce)
        out = whole(w, x)
        return torch.cat([each.flatten() for each in out]) if isinstance(out, tuple) else out

    return joined


def program(pieces, wrt, size):
    """Pieces after one another, as a function of one thing that they depend on."""

    def of(p):
        w = p if wrt == "w" else W
        x = X @ p if wrt == "rows" else X
        total = torch.zeros((), dtype=torch.float64)
        for piece in pieces:
            out = cut(piece, size, p if wrt == "captured" else 1.0)(w, x)
            total = total + (out * out).sum() * C
            x = x + out if out.shape == x.shape else x * torch.cos(total)
        return total

    return of


def along(f, w):
    """Along several tangents."""
    _, push = linearize(f, w)
    return torch.stack([push(V), push(U), push(V)])


def later(mode, f, w):
    """A backward pass outside of a mode that was around the forward pass."""
    w = w.clone().requires_grad_()
    with mode():
        out = f(w)
    return torch.autograd.grad(out, w)[0]


def within(mode, f, w):
    with mode():
        return backward(f, w)


# What is done with such a function at a point.
ENDS = {
    "value": lambda f, w: f(w),
    "vhp": lambda f, w: vjp(grad(f), w)[1](V)[0],
    "vmap(grad)": lambda f, w: vmap(grad(f))(torch.stack([w, V])),
    "linearize": along,
    "linearize(grad)": lambda f, w: along(grad(f), w),
} | {
    name: DERIVATIVES[name]
    for name in ("grad", "jvp", "jvp of grad", "jacfwd", "jacrev", "backward", "double backward")
}
# What is put around that, or around the function itself.
AROUND = {
    "nothing": lambda f: f,
    "make_fx": lambda f: lambda w: make_fx(f)(V)(w),
    "functionalize": functionalize,
    "jvp": lambda f: lambda w: jvp(f, (w,), (U,))[1],
    "vmap": lambda f: lambda w: vmap(f)(torch.stack([w, U])),
}
MODES = {"within": within, "later": later}


def compared(came, want, name):
    """The numbers of plain torch, to half of the digits, or an error where torch has none."""
    try:
        expected = want()
    except Exception:  # torch itself refuses this nest
        return
    found = came()
    size = expected.norm() + 1
    assert (found - expected).norm() <= ROOT * size, name


programs = st.lists(st.sampled_from([*PIECES]), min_size=1, max_size=2)


@pytest.mark.parametrize("wrt", FOLLOWED)
@examples(0.1)
@given(
    pieces=programs,
    size=st.integers(1, 7),
    end=st.sampled_from([*ENDS]),
    around=st.sampled_from([*AROUND]),
)
@pytest.mark.slow
def test_a_program_under_transforms_and_tracers(pieces, wrt, size, end, around):
    by = lambda size: AROUND[around](  # noqa: E731
        lambda w: ENDS[end](program(pieces, wrt, size), w)
    )(W)
    compared(lambda: by(size), lambda: by(None), f"{pieces} {wrt} {size} {end} {around}")


@pytest.mark.parametrize(
    "way", ["within", pytest.param("later", marks=pytest.mark.given_up("restored modes"))]
)
@examples(0.15)
@given(pieces=programs, wrt=st.sampled_from(INPUTS), size=st.integers(1, 7), below=st.booleans())
@pytest.mark.slow
def test_a_program_under_a_mode_that_changes_numbers(pieces, wrt, size, way, below):
    mode = Shifting if below else Scaling
    by = lambda size: MODES[way](mode, program(pieces, wrt, size), W)  # noqa: E731
    compared(lambda: by(size), lambda: by(None), f"{pieces} {wrt} {size} {way} {below}")


# A step, differentiated, traced or with a history, beside the same by hand.


def steps(size, count):
    loss = lambda w, x, t: (torch.tanh(x @ w) - t).square().sum()  # noqa: E731

    def by_hand(p):
        w, momentum = W, torch.zeros_like(W)
        for _ in range(count):
            momentum = 0.5 * momentum + grad(loss)(w, X, p[0])
            w = w - 0.1 * momentum
        return (w * w).sum()

    def by_steps(p):
        step = pa.make_step(loss, pa.sgd(0.1, momentum=0.5), microbatch_size=size, reduction="sum")
        state = step.init(W)
        for _ in range(count):
            state, _ = step(state, X, p[0])
        return (state.params * state.params).sum()

    return by_hand if size is None else by_steps


@examples(0.2)
@given(st.integers(1, 7), st.integers(1, 2), st.sampled_from([*ENDS]), st.sampled_from([*AROUND]))
@pytest.mark.slow
def test_steps_under_transforms_and_tracers(size, count, end, around):
    by = lambda size: AROUND[around](lambda w: ENDS[end](steps(size, count), w))(W)  # noqa: E731
    compared(lambda: by(size), lambda: by(None), f"{size} {count} {end} {around}")
