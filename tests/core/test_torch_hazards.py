"""What torch does that the design leans on or works around; each fails when torch changes it."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from tests.core.models import MODELS, problem
from tests.problems import Around


pytestmark = pytest.mark.parity


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


def test_create_graph_false_loses_second_order_terms_without_an_error():
    """Why it is left at its default, and pa.grad's second derivative is right."""
    cube = lambda w, x: (w**3 * x).sum()  # noqa: E731

    def gradient(w, **knobs):
        value, pull = torch.func.vjp(lambda w: cube(w, x), w)
        return pull(torch.ones_like(value), retain_graph=False, **knobs)[0]

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
