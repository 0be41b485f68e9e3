"""Losses that are sums over samples, with something unusual inside."""

import functools
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

import pureaccum as pa
from tests.zoo.species import ROWS, WIDE, affine, fits, linear, normal, parameters, squared


# Ways to compute -------------------------------------------------------------------------


@fits()
def checkpointed(dtype):
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)

    def loss(params, batch):
        def forward(x):
            return functional_call(net, params, (x,))

        return checkpoint(forward, batch["x"], use_reentrant=False).square().mean()

    return loss, parameters(net), {"x": normal(dtype, 6)}


class Cube(torch.autograd.Function):
    """Of the old kind, without ``setup_context``."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, *gs):
        (x,) = ctx.saved_tensors
        return gs[0] * 3 * x**2


@fits()
def custom_function(dtype):
    return lambda p, b: Cube.apply(affine(p, b["x"])).mean(), *linear(dtype)


@fits(of=linear)
def vmap_inside(params, batch):
    return vmap(lambda x, y: ((affine(params, x) - y) ** 2).mean())(batch["x"], batch["y"]).mean()


@fits(of=linear)
def jvp_inside(params, batch):
    x = batch["x"]
    return jvp(lambda x: affine(params, x).tanh(), (x,), (torch.ones_like(x),))[1].abs().mean()


@fits(WIDE)
def residuals_of_an_equation(dtype):
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)

    def loss(params, batch):
        def u(x):
            return functional_call(net, params, (x,))[0]

        first, second = vmap(jacrev(u))(batch["x"]), vmap(hessian(u))(batch["x"])
        inside, edge = first[:, 1] - second[:, 0, 0], vmap(u)(batch["edge"])
        return inside.square().mean() + edge.square().mean()

    return loss, parameters(net), {"x": normal(dtype, 2), "edge": normal(dtype, 2)}


@fits(of=linear)
def differential_equation(params, batch):
    x = batch["x"].clone().requires_grad_()
    u = affine(params, x).tanh().sum(1)
    (slope,) = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)
    (bend,) = torch.autograd.grad(slope[:, 0], x, torch.ones_like(u), create_graph=True)
    return (bend[:, 0] + u.sin()).square().mean()


@fits()
def learns_from_each_row_first(dtype):
    """As in MAML."""

    def loss(params, batch):
        def error(params, x, y):
            return ((affine(params, x) - y) ** 2).mean()

        def after_a_step(x, y):
            slope = grad(error)(params, x, y)
            return error({k: params[k] - 0.1 * slope[k] for k in params}, x + 1, y)

        return vmap(after_a_step)(batch["x"], batch["y"]).mean()

    return loss, *linear(dtype)


@fits()
def keyed_dropout(dtype):
    def loss(params, batch):
        return affine(params, pa.dropout(batch["x"], 0.5, batch["keys"])).square().mean()

    params, batch = linear(dtype)
    return loss, params, batch | {"keys": pa.split_key(pa.key(0), ROWS)}


@fits(of=linear)
def draws_and_forgets(params, batch):
    """A module is initialised for its structure alone."""
    layer = nn.Linear(6, 3)
    w = dict(zip(dict(layer.named_parameters()), (params["w"].T, params["b"]), strict=True))
    random.random()
    return torch.func.functional_call(layer, w, (batch["x"],)).square().mean()


@fits()
def every_token_once(dtype):
    """How many there are depends on the batch, nothing else does."""

    def loss(params, batch):
        found, place = batch.unique(return_inverse=True)
        return (params[found] @ params.T)[place].square().mean()

    return loss, torch.randn(7, 3).to(dtype), torch.randint(0, 7, (ROWS, 3))


@fits(of=linear)
def matched_by_numpy(params, batch):
    out = affine(params, batch["x"])
    best = torch.from_numpy(out.detach().float().numpy().argmin(1))
    return out.gather(1, best[:, None]).square().mean()


@fits(of=linear)
def writes_to_what_it_made(params, batch):
    out = torch.zeros_like(batch["y"])
    out[:, :2] = affine(params, batch["x"])[:, :2]
    columns = torch.from_numpy(np.ones(3, dtype=np.float32))
    columns[1] = 2
    return (out.add_(1).relu_() * columns.mul_(3)).square().mean()


# What is given and returned --------------------------------------------------------------


@fits()
def a_nested_batch(dtype):
    def loss(params, batch):
        (x, more), y = batch["in"]["x"], batch["out"]
        assert more is None
        out = affine(params, x) * batch["scale"] if batch["train"] else affine(params, x)
        return ((out - y[0]) ** 2).mean()

    params, flat = linear(dtype)
    batch = {"in": {"x": (flat["x"], None)}, "out": [flat["y"]], "scale": 0.5, "train": True}
    return loss, params, batch


@fits()
def a_batch_that_requires_grad(dtype):
    params, batch = linear(dtype)
    batch["x"].requires_grad_()
    return lambda p, b: affine(p, b["x"]).square().mean(), params, batch


@fits(of=linear, has_aux=True)
def with_aux(params, batch):
    out = affine(params, batch["x"])
    return ((out - batch["y"]) ** 2).mean(), {"out": out.detach(), "rows": len(out)}


@fits()
def only_some_columns_of_a_view(dtype):
    """Parameters and batch are views, expanded and transposed."""
    params = {"w": torch.randn(3, 6).to(dtype).T, "b": torch.randn(1).to(dtype).expand(3)}
    batch = {"x": torch.randn(6, ROWS).to(dtype).T, "y": torch.ones(1, 3).to(dtype)}
    batch["y"] = batch["y"].expand(ROWS, 3)
    return lambda p, b: F.huber_loss(affine(p, b["x"]), b["y"]), params, batch


class Criterion(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("columns", torch.rand(3))

    def forward(self, params, batch):
        return ((affine(params, batch["x"]) - batch["y"]) ** 2 * self.columns).mean()

    def twice(self, params, batch):
        return 2 * self(params, batch)


@fits()
def a_module_for_a_loss(dtype):
    return Criterion().to(dtype), *linear(dtype)


@fits()
def a_method_for_a_loss(dtype):
    return Criterion().to(dtype).twice, *linear(dtype)


# Kept from call to call, without effect --------------------------------------------------


@fits()
def a_log_of_its_own(dtype):
    """It remembers its values, and uses them nowhere."""
    history = []

    def loss(params, batch):
        value = (affine(params, batch["x"]) ** 2).mean()
        history.append(value.detach().item())
        return value

    return loss, *linear(dtype)


@fits()
def a_table_made_once(dtype):
    """Rotary angles are made at the first call, in the dtype of the first call."""
    tables = {}

    def loss(params, batch):
        out = affine(params, batch["x"])
        if out.shape[1] not in tables:
            tables[out.shape[1]] = torch.cos(torch.arange(out.shape[1], dtype=out.dtype))
        return (out * tables[out.shape[1]]).square().mean()

    return loss, *linear(dtype)


@fits(WIDE)
def a_table_for_every_number_of_rows(dtype):
    """What is cached while it computes in another dtype is not of its own."""

    @functools.lru_cache
    def table(rows):
        return torch.eye(rows, dtype=dtype)

    def loss(params, batch):
        out = affine(params, batch["x"])
        return (table(len(out)) @ out).square().mean()

    return loss, *linear(dtype)


class FirstState(nn.Module):
    """Keeps zeros for as many samples as it saw last."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.first = None

    def forward(self, x):
        if self.first is None or len(self.first) != len(x):
            self.first = torch.zeros(len(x), 6, dtype=x.dtype)
        return self.layer(x + self.first)


@fits()
def zeros_kept_for_as_many_rows(dtype):
    return squared(FirstState(), dtype, 6)


class Captured(nn.Module):
    """Hooks that it installs in its first call, as output-capturing libraries do."""

    def __init__(self):
        super().__init__()
        self.inner, self.ready = nn.Linear(6, 4), False

    def forward(self, x):
        if not self.ready:
            self.inner.register_forward_hook(lambda module, args, out: None)
            self.ready = True
        assert len(self.inner._forward_hooks) == 1
        return self.inner(x)


@fits(WIDE)
def a_hook_installed_once(dtype):
    return squared(Captured(), dtype, 6)
