"""Ways to differentiate a function of one tensor at a point, whatever it returns.

Each goes over our function and over the plain one, and what comes out is one tensor each time.
"""

import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from tests.problems import leaf, near_together, pulled


FACTORS = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)


def real(t):
    return torch.view_as_real(t) if t.is_complex() else t


def number(t):
    """One number of all entries, of which no two count alike."""
    t = real(t).flatten()
    return (t.sin() * torch.arange(1.0, len(t) + 1).to(t).cos()).sum()


def numbered(f):
    return lambda p: number(f(p))


def like(t):
    """A direction, or a cotangent, that depends on nothing that is followed."""
    steps = torch.linspace(0.5, 2, t.numel(), dtype=torch.float64).view(t.shape).to(t)
    return steps * (1 - 0.5j if t.is_complex() else 1)


def pushed(f, p):
    return jvp(f, (p,), (like(p),))[1]


def backward(f, p):
    return pulled(numbered(f), p)


def double_backward(f, p):
    p = leaf(p)
    first = torch.autograd.grad(number(f(p)), p, create_graph=True)[0]
    return torch.autograd.grad(number(first), p)[0]


def dual_numbers(f, p):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(p, like(p)))).tangent


OPERATORS = {
    "grad": lambda f, p: grad(numbered(f))(p),
    "vjp": lambda f, p: vjp(f, p)[1](like(f(p)))[0],
    "jvp": pushed,
    "backward": backward,
    "double backward": double_backward,
    "dual numbers": dual_numbers,
    "jvp of grad": lambda f, p: pushed(grad(numbered(f)), p),
    "grad of jvp": lambda f, p: grad(lambda p: number(pushed(f, p)))(p),
    "grad of grad": lambda f, p: grad(numbered(grad(numbered(f))))(p),
    "jvp of jvp": lambda f, p: pushed(lambda p: pushed(f, p), p),
    "vmap": lambda f, p: vmap(lambda k: f(p * k))(FACTORS),
    "vmap of grad": lambda f, p: vmap(lambda k: grad(numbered(f))(p * k))(FACTORS),
    "vmap of hvp": lambda f, p: vmap(lambda k: jvp(grad(numbered(f)), (p * k,), (like(p) * k,))[1])(
        FACTORS
    ),
}
JACOBIANS = {  # which torch has for real tensors
    "jacrev": lambda f, p: jacrev(lambda p: real(f(p)))(p),
    "jacfwd": lambda f, p: jacfwd(lambda p: real(f(p)))(p),
    "hessian": lambda f, p: hessian(numbered(f))(p),
    "jacfwd twice": lambda f, p: jacfwd(jacfwd(numbered(f)))(p),
    "jacrev twice": lambda f, p: jacrev(jacrev(numbered(f)))(p),
}
DERIVATIVES = OPERATORS | JACOBIANS


def check(name, ours, plain, p):
    """That one of them is what it is of plain code."""
    near_together(*(DERIVATIVES[name](f, p) for f in (ours, plain)))
