"""What torch has wrong in silence; each fails when torch is mended, and a page can forget it.

A function of torch stands beside one by hand, of which torch differentiates each operation right.
The page is gotchas.md, "What torch itself has wrong".
"""

from collections.abc import Callable
from functools import reduce

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, jvp
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from pureaccum._base.torch_internals import VERSION
from tests.draws import generator


pytestmark = [pytest.mark.parity]
Function = Callable[[Tensor], Tensor]


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=generator(seed), dtype=dtype)


def agree(got, want):
    """Up to rounding: half of the digits of float64."""
    return bool((got - want).norm() <= torch.finfo(torch.float64).eps ** 0.5 * want.norm())


# Forward AD, differentiated again: github.com/pytorch/pytorch/issues/198017 ----------------------


def normalised(*dims):
    def norm(x):
        apart = x - x.mean(dims, keepdim=True)
        return apart / (apart.square().mean(dims, keepdim=True) + 1e-5).sqrt()

    return norm


def products(x):
    return torch.stack([reduce(torch.mul, x[: i + 1].unbind()) for i in range(len(x))])


def inverse(factor):
    lower = factor.tril()  # all that torch reads
    return torch.linalg.inv(lower @ lower.mT)


TAU = torch.rand(2, generator=generator(1), dtype=torch.float64)


def reflections(x):
    rows, columns = x.shape
    product = one = torch.eye(rows, dtype=x.dtype)
    for i in range(columns):
        v = torch.cat([torch.zeros(i, dtype=x.dtype), torch.ones(1, dtype=x.dtype), x[i + 1 :, i]])
        product = product @ (one - TAU[i] * torch.outer(v, v))
    return product[:, :columns]


FORWARD = {
    "LayerNorm": (lambda x: F.layer_norm(x, (5,)), normalised(-1), normal(3, 5)),
    "BatchNorm": (
        lambda x: F.batch_norm(x, None, None, training=True),
        normalised(0),
        normal(6, 3),
    ),
    "InstanceNorm": (F.instance_norm, normalised(-1), normal(2, 3, 5)),
    "cumprod at zero": (lambda x: x.cumprod(0), products, torch.tensor([1.5, 0, -2, 3]).double()),
    "cholesky_inverse": (
        lambda x: torch.cholesky_inverse(x.tril()),
        inverse,
        normal(3, 3).tril(-1) + torch.diag(torch.tensor([1.0, 2.0, 1.5]).double()),
    ),
    "householder_product": (
        lambda x: torch.linalg.householder_product(x, TAU),
        reflections,
        normal(4, 2),
    ),
}


def twice_backwards(f, x):
    c, v = normal(*f(x).shape, seed=2), along(x)
    return grad(lambda x: (grad(lambda x: (f(x) * c).sum())(x) * v).sum())(x)


def twice_forwards(f, x):
    v = along(x)
    return jvp(lambda x: jvp(f, (x,), (v,))[1], (x,), (v,))[1]


def along(x):
    """A direction, within the lower triangle of a square: what a factor has."""
    v = normal(*x.shape, seed=3)
    return v.tril() if x.dim() == 2 and x.shape[0] == x.shape[1] else v


@pytest.mark.parametrize("name", FORWARD)
def test_backwards_twice_is_right(name):
    """And so the formula by hand is of the same function."""
    torchs, by_hand, x = FORWARD[name]
    assert agree(torchs(x), by_hand(x))
    assert agree(twice_backwards(torchs, x), twice_backwards(by_hand, x))


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="pytorch#198017")
@pytest.mark.parametrize("name", FORWARD)
def test_forwards_twice_is_right(name):
    torchs, by_hand, x = FORWARD[name]
    assert agree(twice_forwards(torchs, x), twice_forwards(by_hand, x))


def test_group_norm_is_right_forwards():
    by_hand = lambda x: normalised(-1)(x.reshape(3, 2, 2)).reshape(3, 4)  # noqa: E731
    x = normal(3, 4)
    assert agree(twice_forwards(lambda x: F.group_norm(x, 2), x), twice_forwards(by_hand, x))


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="pytorch#198017")
@pytest.mark.parametrize("name", ["LayerNorm", "BatchNorm", "InstanceNorm"])
def test_a_loss_with_a_jvp_inside_has_the_right_gradient(name):
    """Score matching, and an equation's residual."""
    torchs, by_hand, x = FORWARD[name]
    w, v = normal(x.shape[-1], x.shape[-1], seed=4), along(x)

    def loss(f):
        return lambda w: jvp(lambda x: f(x @ w), (x,), (v,))[1].square().sum()

    assert agree(grad(loss(torchs))(w), grad(loss(by_hand))(w))


# A mode that changes nothing: github.com/pytorch/pytorch/issues/198118 ---------------------------


class Onlooker(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


# polar is there since torch 2.14, and right since 2.15; matrix_sqrth is there since 2.14
UNDER_MODES = ["pinv", "matrix_sqrth", *["polar"] * (VERSION < (2, 15))]


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="pytorch#198118")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=pytest.mark.skipif(not hasattr(torch.linalg, name), reason="not there yet")
        )
        for name in UNDER_MODES
    ],
)
def test_a_mode_that_looks_changes_no_number(name):
    x = normal(3, 3, dtype=torch.complex128)
    x = x @ x.mH if name == "matrix_sqrth" else x

    def call():
        out = getattr(torch.linalg, name)(x)
        return out if isinstance(out, Tensor) else out[0]

    want = call()
    with Onlooker():
        assert agree(call(), want)


# A trace above autograd, by make_fx(pre_dispatch=True) or torch.export ----------------------------


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="not reported yet")
def test_a_trace_above_autograd_takes_other_inputs():
    first, x = grad(lambda x: x.sin().sum()), normal(3)
    assert agree(make_fx(first, pre_dispatch=True)(x)(2 * x), first(2 * x))


# torch._weight_norm, which nn.utils.parametrizations.weight_norm calls ---------------------------


def second(f):
    v, g = normal(3, 4).requires_grad_(), normal(3, 1, seed=1).abs()
    c = normal(3, 4, seed=2)
    (first,) = torch.autograd.grad((f(v, g) * c).sin().sum(), v, create_graph=True)
    return torch.autograd.grad((first * c).sum(), v)[0]


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="not reported yet")
def test_the_double_backward_of_weight_norm_is_right():
    got = second(lambda v, g: torch._weight_norm(v, g, 0))
    assert agree(got, second(lambda v, g: v * (g / v.norm(dim=1, keepdim=True))))
