"""Networks that checkpoint a part of themselves, and the gradients that they should have."""

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint


Params = dict[str, Tensor]


class Checkpointed(nn.Module):
    """A block that is computed again in the backward pass, while ``on``, and a head."""

    def __init__(self, block):
        super().__init__()
        self.block, self.head, self.on = block, nn.Linear(3, 1), True

    def forward(self, x):
        again = checkpoint(self.block, x, use_reentrant=False) if self.on else self.block(x)
        return self.head(torch.tanh(again))


class Direct(nn.Module):
    """Checkpoints a method, which uses the module's own weight and calls no other module."""

    def __init__(self):
        super().__init__()
        self.weight, self.on = nn.Parameter(torch.ones(3, 3)), True

    def product(self, x):
        return torch.tanh(x @ self.weight)

    def forward(self, x):
        return checkpoint(self.product, x, use_reentrant=False) if self.on else self.product(x)


class Of(nn.Module):
    """A forward that is a function of the module and of what it is given; parts have names."""

    def __init__(self, func, **parts):
        super().__init__()
        self.func = func
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args, **kwargs):
        return self.func(self, *args, **kwargs)


class Recurrent(nn.Module):
    """Keeps a list of its weights, beside the weights."""

    def __init__(self, kind=nn.LSTM, width=3):
        super().__init__()
        self.cell = kind(3, width, batch_first=True)

    def forward(self, x):
        return self.cell(x[:, None])[0][:, 0]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class Generated(nn.Module):
    """Calls the network below with weights that it makes itself."""

    def __init__(self):
        super().__init__()
        self.scale, self.below = nn.Parameter(torch.ones(())), Direct()

    def forward(self, x):
        return functional_call(self.below, {"weight": self.below.weight * self.scale}, x)


def _linear():
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))


NETWORKS = {
    "linear": lambda: Checkpointed(_linear()),
    "a method": lambda: nn.Sequential(Direct(), nn.Linear(3, 1)),
    "lstm": lambda: Checkpointed(Recurrent()),
    "parametrized": lambda: Checkpointed(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))),
    "batch norm": lambda: Checkpointed(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))),
    "tied": lambda: Checkpointed(Tied()),
    "nested": lambda: Checkpointed(nn.Sequential(Checkpointed(_linear()), nn.Linear(1, 3))),
    "frozen below": lambda: Checkpointed(nn.Sequential(_linear().requires_grad_(False))),
    "twice in a row": lambda: nn.Sequential(Direct(), Direct()),
}


def make(name, seed=0):
    torch.manual_seed(seed)
    return NETWORKS[name]().double()


def other_params(net, seed=1):
    """Parameters that are not the module's own."""
    g = torch.Generator().manual_seed(seed)
    made = {k: torch.randn(p.shape, generator=g) for k, p in net.named_parameters()}
    return {k: x.double() for k, x in made.items()}


def inputs(rows, seed=2):
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(seed)).double()


def call(net, params, x):
    """The network with these parameters, and with buffers that it may write to."""
    return functional_call(net, params | {k: b.clone() for k, b in net.named_buffers()}, x)


def square(net):
    return lambda params, x: (call(net, params, x) ** 2).mean()


def squares(fn):
    """The mean square of what a functional gives for samples."""
    return lambda params, x: fn.apply(params, fn.buffers, x)[0].square().mean()


def backward(loss, params, *rest):
    """As ``torch.func.grad_and_value(loss, has_aux=True)`` does, by ``.backward()``."""
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    value, aux = loss(leaves, *rest)
    if value.requires_grad:
        value.backward()
    grads = {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in leaves.items()}
    return grads, (value.detach(), aux)


def switch(nets, on):
    """Checkpoints on or off, and no cache left of parameters that the module was lent before."""
    for net in nets:
        for module in net.modules():
            if hasattr(module, "on"):
                module.on = on
            if isinstance(module, nn.RNNBase):
                module._init_flat_weights()


def by_hand(loss, nets, params, x, size):
    """The loop that the engine stands for, by ``torch.autograd`` and without checkpoints.

    In float64 the engine's powers of two change no bit; a single microbatch passes untouched.
    """
    switch(nets, on=False)
    totals = [{k: torch.zeros_like(p) for k, p in tree.items()} for tree in params]
    whole = 1 if size >= len(x) else len(x)
    for part in x.split(size):
        leaves = [{k: p.detach().requires_grad_() for k, p in tree.items()} for tree in params]
        value = loss(*leaves, part)
        weight = torch.tensor(float(min(len(part), whole)), dtype=value.dtype)
        flat = [p for tree in leaves for p in tree.values()]
        grads = iter(torch.autograd.grad(value, flat, weight))
        totals = [{k: total + next(grads) for k, total in tree.items()} for tree in totals]
    switch(nets, on=True)
    return tuple({k: total / whole for k, total in tree.items()} for tree in totals)
