"""Nests of transforms of a loss of a list of matrices and of rows, whose memory is looked at."""

import torch
from torch.func import grad, jvp, vjp, vmap

import pureaccum as pa


def square(tree):
    return sum(x.square().sum() for x in tree)


def tangent(params):
    return [w.cos() for w in params]


def backward(f, params, x, create_graph=False):
    leaves = [w.clone().requires_grad_() for w in params]
    rows = x.clone().requires_grad_()
    return torch.autograd.grad(f(leaves, rows), [*leaves, rows], create_graph=create_graph)


def meta(f, params, x, gradient):
    def after(params):
        grads = gradient(f)(params, x)
        return f([w - 0.1 * g for w, g in zip(params, grads, strict=True)], x)

    return grad(after)(params)


def meta_step(f, params, x):
    """The gradient of one step of ``make_step``, with respect to its start."""
    step = pa.make_step(f, pa.adamw(0.1))
    return grad(lambda params: f(step(step.init(params), x)[0].params, x))(params)


NESTS = {
    "value": lambda f, p, x: f(p, x),
    "grad": lambda f, p, x: grad(f)(p, x),
    "grad of both": lambda f, p, x: grad(f, (0, 1))(p, x),
    "jvp": lambda f, p, x: jvp(lambda p: f(p, x), (p,), (tangent(p),)),
    "backward": backward,
    "pa.grad": lambda f, p, x: pa.grad(f)(p, x),
    "grad of pa.value": lambda f, p, x: grad(pa.value(f))(p, x),
    "grad of grad": lambda f, p, x: grad(lambda p: square(grad(f)(p, x)))(p),
    "grad of pa.grad": lambda f, p, x: grad(lambda p: square(pa.grad(f)(p, x)))(p),
    "jvp of grad": lambda f, p, x: jvp(lambda p: grad(f)(p, x), (p,), (tangent(p),)),
    "vjp of grad": lambda f, p, x: vjp(lambda p: grad(f)(p, x), p)[1](tangent(p)),
    "grad of jvp": lambda f, p, x: grad(lambda p: jvp(lambda p: f(p, x), (p,), (tangent(p),))[1])(
        p
    ),
    "vmap of grad": lambda f, p, x: vmap(lambda s: grad(f)([w * s for w in p], x))(torch.ones(2)),
    "backward of backward": lambda f, p, x: backward(
        lambda p, x: square(backward(f, p, x, create_graph=True)), p, x
    ),
    "meta-gradient": lambda f, p, x: meta(f, p, x, grad),
    "meta-gradient by pa.grad": lambda f, p, x: meta(f, p, x, pa.grad),
    "meta-gradient of a step": meta_step,
    "third order": lambda f, p, x: grad(lambda p: square(grad(lambda p: square(grad(f)(p, x)))(p)))(
        p
    ),
}
