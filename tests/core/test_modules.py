"""Modules whose parameters are not what they seem: tied, parametrized, reused, unused."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from tests.problems import pulled


pytestmark = [pytest.mark.parity, pytest.mark.promise("engines")]
ENGINES = ("func", "autograd")
engines = pytest.mark.parametrize("engine", ENGINES)


class Tied(nn.Module):
    """A head that is the embedding, a layer under two names, and one that nobody calls."""

    def __init__(self, vocabulary=5, width=4):
        super().__init__()
        self.emb = nn.Embedding(vocabulary, width)
        self.first = nn.Linear(width, width)
        self.second = self.first
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.emb.weight
        self.unused = nn.Linear(2, 2)

    def forward(self, tokens):
        return self.head(torch.relu(self.second(torch.relu(self.first(self.emb(tokens))))))


def integer_(module):
    """Small integers for parameters, so that sums are exact."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randint(-3, 4, parameter.shape))
    return module


def summed(module, **options):
    return lambda p, b: (functional_call(module, p, (b["x"],), **options) * b["y"]).sum()


@engines
@pytest.mark.parametrize("vocabulary", [5, 2**16])  # the latter is added by a hook: 1 MiB
def test_tied_and_unused_parameters_have_their_gradients(engine, vocabulary):
    """One key for a tied tensor gets the sum over its uses; what is unused gets zeros."""
    module = integer_(Tied(vocabulary))
    other = deepcopy(
        module
    )  # functional_call spoils modules that are shared: see test_torch_faults
    params = {name: p.detach() for name, p in module.named_parameters()}
    x, y = torch.randint(0, 5, (6,)), torch.randint(-3, 4, (6, vocabulary)).float()
    y[:, 5:] = 0  # the loss stays exact
    gradient = pa.grad(summed(module), microbatch_size=2, reduction="sum", engine=engine)
    grads = gradient(params, {"x": x, "y": y})
    (other(x) * y).sum().backward()
    assert "head.weight" not in grads
    assert "second.weight" not in grads
    for name, p in other.named_parameters():
        expected = torch.zeros_like(p) if p.grad is None else p.grad
        assert torch.equal(grads[name], expected)
    assert not grads["unused.weight"].any()


@engines
@pytest.mark.parametrize("width", [3, 2**18])
def test_one_tensor_under_two_keys_is_two_leaves(engine, width):
    """As for torch.func: each key gets the gradient of its own use."""
    w, x = torch.ones(width), torch.arange(6.0)[:, None]
    params = {"a": w, "b": w, "nested": [w, (w,)]}

    def loss(p, x):
        return (p["a"][:3] * x + p["b"][:3] * x * 2 + p["nested"][1][0][:3] * 3).sum()

    grads = pa.grad(loss, microbatch_size=4, reduction="sum", engine=engine)(params, x)
    assert_trees_bitwise_equal(grads, torch.func.grad(loss)(params, x))


@engines
@pytest.mark.parametrize(
    "parametrization", [parametrizations.weight_norm, parametrizations.orthogonal]
)
def test_parametrized_weights_have_their_gradients(engine, parametrization):
    """Against ``.backward()`` in float64: sqrt(u) of the sum of the norms of the terms."""
    module = parametrization(nn.Linear(4, 4)).double()
    params = {name: p.detach() for name, p in module.named_parameters()}
    assert any("parametrizations" in name for name in params)
    batch = {"x": torch.randn(7, 4).double(), "y": torch.randn(7, 4).double()}
    loss = summed(module)
    grads = pa.grad(loss, microbatch_size=3, reduction="sum", engine=engine)(params, batch)
    (module(batch["x"]) * batch["y"]).sum().backward()
    parts = [torch.func.grad(loss)(params, part) for part in pa.microbatches(batch, 3)]
    for name, p in module.named_parameters():
        scale = sum(part[name].norm() for part in parts)
        assert (grads[name] - p.grad).norm() <= 2**-26.5 * scale


@pytest.mark.promise("narrow")
@engines
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_params_may_have_mixed_dtypes(engine, dtype):
    params = {"a": torch.ones(3, dtype=dtype), "b": torch.ones(3), "c": torch.ones((), dtype=dtype)}
    x = torch.randint(-15, 16, (7, 3)).float()
    loss = lambda p, x: (p["a"] * x + p["b"] * x * x).double().sum() + p["c"] * len(x)  # noqa: E731
    grads = pa.grad(loss, microbatch_size=2, reduction="sum", engine=engine)(params, x)
    want = {"a": x.sum(0).to(dtype), "b": (x * x).sum(0), "c": torch.tensor(7.0, dtype=dtype)}
    assert_trees_bitwise_equal(grads, want)
    assert pa.accumulator(loss).init(params).grads["a"].dtype == (
        torch.float64 if dtype == torch.float64 else torch.float32
    )


@pytest.mark.promise("purity")
@engines
def test_params_that_require_grad_get_no_grad(engine):
    """A module's own parameters may be passed: they are followed, and ``.grad`` stays None."""
    module = integer_(nn.Linear(3, 2))
    params = dict(module.named_parameters())
    batch = {"x": torch.randint(-3, 4, (5, 3)).float(), "y": torch.ones(5, 2)}
    grads = pa.grad(summed(module), microbatch_size=2, reduction="sum", engine=engine)
    result = grads(params, batch)
    assert all(g.requires_grad for g in result.values())
    assert all(p.grad is None and p.requires_grad for p in params.values())
    (module(batch["x"]) * batch["y"]).sum().backward()
    result = {name: g.detach() for name, g in result.items()}
    assert_trees_bitwise_equal(result, {name: p.grad for name, p in params.items()})


def by_func(loss, params, x):
    total, pull = torch.func.vjp(lambda params: loss(params, x), params)
    with torch.no_grad():  # with a graph of the backward pass, torch takes another kernel
        return list(pull(torch.ones_like(total))[0].values())


def by_autograd(loss, params, x):
    return pulled(lambda *its: loss(dict(zip(params, its, strict=True)), x), *params.values())


@pytest.mark.parametrize(("engine", "alone"), [("func", by_func), ("autograd", by_autograd)])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_microbatches_of_recurrent_networks_are_summed_in_bits(kind, mode, engine, alone):
    """Their float32 kernels on a CPU ask for the grad mode below torch.func: under no_grad that of
    the LSTM saves nothing for its backward pass, which then fails.
    """
    net = kind(3, 4, batch_first=True)
    params = {name: p.detach() for name, p in net.named_parameters()}
    x = torch.randn(6, 3, 3)

    def loss(params, x):
        return (torch.func.functional_call(net, params, (x,))[0] ** 2).sum()

    with mode():
        grads = pa.grad(loss, microbatch_size=4, reduction="sum", engine=engine)(params, x)
    first, second = alone(loss, params, x[:4]), alone(loss, params, x[4:])
    for name, a, b in zip(params, first, second, strict=True):
        assert torch.equal(grads[name], a + b), name
