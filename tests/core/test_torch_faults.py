"""What torch has wrong in silence; each fails when torch is mended, and a page can forget it.

A function of torch stands beside one by hand, of which torch differentiates each operation right.
The page is gotchas.md, "Bugs in torch".
"""

from collections.abc import Callable
from functools import reduce

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, jvp
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import pureaccum as pa
from pureaccum._base.torch_internals.functorch import VERSION
from pureaccum.testing import assert_trees_bitwise_equal
from tests.core.models import MODELS, problem
from tests.draws import generator
from tests.problems import Around, Operations, normal


pytestmark = [pytest.mark.parity, pytest.mark.promise("documented")]
Function = Callable[[Tensor], Tensor]


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
    with Operations():
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


# What the design leans on or works around ------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_lean_vjp_is_grad_bit_for_bit(name):
    """``retain_graph=False`` frees activations as the pass goes and changes no number."""
    given_ = problem(name, 0, 4)
    value, pull = torch.func.vjp(lambda p: given_.mean(p, given_.batch), given_.params)
    (lean,) = pull(torch.ones_like(value), retain_graph=False)
    assert_trees_bitwise_equal(lean, torch.func.grad(given_.mean)(given_.params, given_.batch))


def test_a_hook_on_a_primal_runs_outside_its_level_and_may_fill_a_buffer():
    """What holds the memory at one gradient tree; the gradient is handed on as nothing."""
    buffer, x = torch.zeros(3), torch.tensor([1.0, 2.0, 3.0])

    def hook(grad):
        buffer.add_(grad)
        return grad.new_zeros(()).expand_as(grad)

    def loss(w):
        w.register_hook(hook)
        return (w * x).sum() + (w * w).sum()

    w = torch.ones(3)
    value, pull = torch.func.vjp(loss, w)
    (rest,) = pull(torch.ones_like(value), retain_graph=False)
    assert torch.equal(buffer, x + 2)  # once, with the sum over both uses
    assert not rest.any()


@pytest.mark.promise("closure")
def test_create_graph_false_loses_second_order_terms_without_an_error():
    """Why it is left at its default, and pa.grad's second derivative is right."""
    cube = lambda w, x: (w**3 * x).sum()  # noqa: E731

    def gradient(w, **options):
        value, pull = torch.func.vjp(lambda w: cube(w, x), w)
        return pull(torch.ones_like(value), retain_graph=False, **options)[0]

    w, x = torch.tensor(2.0), torch.ones(4)
    assert torch.func.grad(lambda w: gradient(w))(w) == 48
    assert torch.func.grad(lambda w: gradient(w, create_graph=False))(w) == 0
    ours = pa.grad(cube, microbatch_size=2, reduction="sum")
    assert torch.func.grad(ours)(w, x) == 48


def test_a_batched_gradient_cannot_be_added_to_an_unbatched_sum():
    """Why sums are new tensors under a transform."""

    def gradient(add):
        def each(w, x):
            value, pull = torch.func.vjp(lambda w: (w * x).sum(), w)
            return add(torch.zeros(3), pull(torch.ones_like(value))[0])

        return torch.func.vmap(each, (None, 0))(torch.ones(3), torch.ones(2, 3))

    with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
        gradient(torch.Tensor.add_)
    assert torch.equal(gradient(torch.add), torch.ones(2, 3))


def checkpointed():
    body = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh())
    lean = lambda x, body, head: head(checkpoint(body, x, use_reentrant=False))  # noqa: E731
    modules = (
        Around(lean, body, head := nn.Linear(3, 1)),
        Around(lambda x, f, g: g(f(x)), body, head),
    )
    params = {name: torch.randn_like(p) for name, p in modules[0].named_parameters()}

    def loss(params, x, remat=True):
        module = modules[0 if remat else 1]
        return (torch.func.functional_call(module, params, (x,)) ** 2).mean()

    return params, torch.randn(5, 3), loss


def test_torch_alone_recomputes_with_the_wrong_parameters():
    """No error, a wrong gradient: functional_call is over when the recomputation begins."""
    params, x, loss = checkpointed()
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    grads = torch.autograd.grad(loss(leaves, x), list(leaves.values()))
    right = torch.func.grad(lambda p: loss(p, x, False))(params)
    wrong = dict(zip(leaves, grads, strict=True))
    assert (wrong["parts.0.0.weight"] - right["parts.0.0.weight"]).norm() > 1e-3


@pytest.mark.promise("narrow")
def test_a_float16_loss_of_65536_is_infinite():
    """Why a loss is widened before it is pulled or scaled."""
    assert torch.tensor(65536.0).half().isinf()
    w = torch.tensor(1.0, dtype=torch.float16)
    value = pa.grad_and_value(lambda w, x: (w * x).sum(), microbatch_size=1, reduction="sum")
    grad, total = value(w, torch.full((2,), 30000.0, dtype=torch.float16))
    assert grad == 60000
    assert total == 60000


def test_functional_call_spoils_a_submodule_that_is_shared():
    """pytorch #164759: the module keeps the tensors of the call. Nothing that we could undo."""
    shared = nn.Linear(2, 2)
    module = nn.Sequential(shared, shared)
    own, other = shared.weight, {"0.weight": torch.zeros(2, 2), "0.bias": torch.zeros(2)}
    torch.func.functional_call(module, other, (torch.ones(1, 2),))
    assert shared.weight is other["0.weight"]
    assert shared.weight is not own


def test_backward_adds_to_a_gradient_that_two_leaves_share():
    """autograd begins .grad with the first gradient itself. Hence sums begin with zeros of ours."""
    a, b = torch.ones(2, 3, requires_grad=True), torch.ones(3, 2, requires_grad=True)
    for _ in range(2):
        ((a.view(-1) + b.view(-1)) * torch.arange(6.0)).sum().backward()
    assert a.grad is not None
    assert torch.equal(a.grad.view(-1), 3 * torch.arange(6.0))  # 2 would be right
