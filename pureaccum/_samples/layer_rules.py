"""How each layer handles a leaf, and how per-sample gradients follow from what the layer sees.

    x @ leaf, F.linear, F.embedding      outer products of the layer's input and the cotangent
    F.conv1d, conv2d, conv3d             the gradients themselves, by torch's grouped kernels
    leaf.T                               a stand-in for the same leaf, transposed
    F.scaled_dot_product_attention       for all samples at once: under vmap it sees no tensor that
                                         requires grad, and some kernels then save nothing
    F.cross_entropy                      for all samples at once: under vmap it is many operations
    anything else                        None, and each sample gets a copy of the leaf

A layer is a Function below the vmap. It returns what torch's own layer returns, and passes what it
sees to ``back`` during the backward pass. The weight itself is not recorded.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from .._base.torch_internals import functorch
from . import outer_products
from .layers import Layers, Rules


INDICES = {torch.int32, torch.int64}


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, weight: Tensor, bias: Any, back: Any, token: Any) -> Tensor:  # pyright: ignore
        ctx.save_for_backward(a, weight)
        ctx.back = back
        if a.dim() == 2:
            return F.linear(a, weight, bias)
        # That would be a view, to which no loss may write.
        out = a.new_empty(*a.shape[:-1], len(weight))
        into, rows = out.view(-1, len(weight)), a.reshape(-1, a.shape[-1])
        if bias is None:
            torch.mm(rows, weight.T, out=into)
        else:
            torch.addmm(bias, rows, weight.T, out=into)
        return out

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:  # pyright: ignore
        a, weight = ctx.saved_tensors
        ctx.back(a.detach(), d)
        return d @ weight if ctx.needs_input_grad[0] else None, None, None, None, None


class _Lookup(Function):
    @staticmethod
    def forward(ctx: Any, index: Tensor, weight: Tensor, back: Any, token: Any) -> Tensor:  # pyright: ignore
        ctx.save_for_backward(index)
        ctx.back = back
        return F.embedding(index, weight)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:  # pyright: ignore
        ctx.back(*ctx.saved_tensors, d)
        return None, None, None, None


class _Convolution(Function):
    @staticmethod
    def forward(  # pyright: ignore
        ctx: Any, a: Tensor, weight: Tensor, bias: Any, options: Any, back: Any, token: Any
    ) -> Tensor:
        ctx.save_for_backward(a, weight)
        ctx.options, ctx.back = options, back
        return torch.convolution(a, weight, bias, *options)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:  # pyright: ignore
        a, weight = ctx.saved_tensors
        ctx.back(a.detach(), d)
        given = None
        if ctx.needs_input_grad[0]:
            given = _convolution_backward(d, a, weight, ctx.options, 0)
        return given, None, None, None, None, None


def _convolution_backward(d: Tensor, a: Tensor, weight: Tensor, options: Any, of: int) -> Tensor:
    """The gradient of what a convolution is given, or of its weight."""
    wanted = [of == 0, of == 1, False]
    return torch.ops.aten.convolution_backward(d, a, weight, None, *options, wanted)[of]


# The layers ------------------------------------------------------------------------------------


def _multiplied(layers: Layers, x: Any, weight: Any, bias: Any, flip: bool) -> Tensor | None:
    """``F.linear``, or with ``flip`` ``x @ weight + bias``."""
    at, a = layers.leaf_of(weight, 2), layers.rows_of(x, 1)
    if at is None or a is None or not layers.fits(at[0], a):
        return None
    i, flip = at[0], at[1] != flip
    leaf = layers.leaves[i]
    weight = leaf.T if flip else leaf
    j = layers.bias_of(bias, weight)

    def back(a: Tensor, d: Tensor) -> None:
        a, d = a.reshape(layers.rows, -1, a.shape[-1]), layers.cotangents(d)
        layers.arrived(i, outer_products.Outer(*((a, d) if flip else (d, a)), leaf.shape))
        if j is not None:
            layers.arrived(j, d.sum(-2))

    added = None if j is None else layers.leaves[j]
    y = layers.below(_Linear.apply, (i, j), a, weight, added, back)
    return y if bias is None or j is not None else torch.add(y, layers.with_copies(bias))


def _linear(layers: Layers, input: Any, weight: Any, bias: Any = None) -> Tensor | None:
    return _multiplied(layers, input, weight, bias, flip=False)


def _matmul(layers: Layers, x: Any, other: Any) -> Tensor | None:
    if layers.leaf_of(other, 2):
        return _multiplied(layers, x, other, None, flip=True)
    if not layers.leaf_of(x, 2) or not isinstance(other, Tensor):
        return None
    if other.dim() < 2:
        return _multiplied(layers, other, x, None, flip=False)
    out = _multiplied(layers, other.mT, x, None, flip=False)
    return None if out is None else out.mT


def _mm(layers: Layers, x: Any, other: Any) -> Tensor | None:
    return _matmul(layers, x, other) if x.dim() == other.dim() == 2 else None


def _addmm(layers: Layers, bias: Any, x: Any, other: Any) -> Tensor | None:
    return _multiplied(layers, x, other, bias, flip=True) if x.dim() == 2 else None


def _looked_up(layers: Layers, index: Any, weight: Any, padding: int | None) -> Tensor | None:
    at, rows = layers.leaf_of(weight, 2), layers.rows_of(index, 0, expand=True)
    if at is None or rows is None or at[1] or rows.dtype not in INDICES:
        return None
    i, leaf = at[0], layers.leaves[at[0]]

    def back(index: Tensor, d: Tensor) -> None:
        left, d = index.reshape(layers.rows, -1), layers.cotangents(d)
        if padding is not None:
            d = torch.where((left == padding).unsqueeze(-1), 0.0, d)
        layers.arrived(i, outer_products.Outer(left, d, leaf.shape))

    return layers.below(_Lookup.apply, (i,), rows.long(), leaf, back)


def _embedding(
    layers: Layers,
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: Any = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    out = None
    padding = None if padding_idx is None else padding_idx % weight.shape[0]
    if not (max_norm is not None or scale_grad_by_freq or sparse):
        out = _looked_up(layers, input, weight, padding)
    if out is None and padding is not None and layers.holds([weight]):
        raise layers.refusal("looks up by a padding, which vmap gives the copies of one sample")
    return out


def _item(layers: Layers, x: Any, index: Any) -> Tensor | None:
    if not layers.leaf_of(x, 2) or not isinstance(index, Tensor) or index.dtype not in INDICES:
        return None
    return _looked_up(layers, torch.where(index < 0, index + x.shape[0], index), x, None)


def _convolution(
    layers: Layers,
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    dims = weight.dim() - 2
    at, a, j = layers.leaf_of(weight), layers.rows_of(input, dims + 1), layers.bias_of(bias, weight)
    if at is None or a is None or not layers.fits(at[0], a) or a.dim() > dims + 3:
        return None
    if isinstance(padding, str) or (j is None and bias is not None):
        return None
    i, leaf = at[0], layers.leaves[at[0]]
    each = [(x,) * dims if isinstance(x, int) else tuple(x) for x in (stride, padding, dilation)]
    options = *each, False, (0,) * dims, groups

    def back(a: Tensor, d: Tensor) -> None:
        def of(a: Tensor, d: Tensor) -> Tensor:
            return _convolution_backward(d, a, leaf, options, 1)

        a, d = (x.reshape(layers.rows, -1, *x.shape[-dims - 1 :]) for x in (a, d))
        layers.arrived(i, layers.lowered(torch.func.vmap(of)(a, d)))
        if j is not None:
            layers.arrived(j, layers.lowered(d.flatten(3).sum((1, 3))))

    def flat(a: Tensor, *rest: Any) -> Tensor:
        batches = a.shape[: -dims - 1]
        y: Any = _Convolution.apply(a.flatten(0, len(batches) - 1), *rest)
        return y.unflatten(0, batches)

    added = None if j is None else layers.leaves[j]
    return layers.below(flat, (i, j), a, leaf, added, options, back)


def _attention(
    layers: Layers,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    given = (query, key, value, attn_mask)
    *found, mask = [layers.rows_of(layers.with_copies(x), 0, expand=True) for x in given]
    tensors = [x for x in found if x is not None]
    like = len({x.dim() for x in tensors}) == 1 and len(tensors) == 3
    if dropout_p or not like or (mask is None) != (attn_mask is None):
        raise layers.refusal("attends in a way that vmap alone knows")
    if mask is not None:  # the dims that it has not are behind the samples
        ones = [1] * (tensors[0].dim() - mask.dim())
        mask = mask.reshape(len(mask), *ones, *mask.shape[1:])

    attend = partial(F.scaled_dot_product_attention, attn_mask=mask, is_causal=is_causal, **options)
    return layers.as_sample(attend, *tensors)


def _cross_entropy(
    layers: Layers,
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """It runs below the vmap, in which sums of small classifiers take a tenth more time."""
    x, y = layers.rows_of(input, 1), layers.rows_of(target, 0)
    if x is None or y is None or y.dtype != torch.int64 or y.dim() != x.dim() - 1:
        return None  # of probabilities, or torch has the words for what is wrong
    usual = weight is size_average is reduce is None and not label_smoothing
    if not usual or reduction not in ("mean", "sum"):
        return None

    def of_all(x: Tensor, y: Tensor) -> Tensor:
        by_sample = len(y), y.shape[1:].numel()
        rows = (x, y) if x.dim() == 2 else (x.flatten(0, 1), y.flatten(0, 1))
        each = F.cross_entropy(*rows, ignore_index=ignore_index, reduction="none")
        totals = each.reshape(by_sample).sum(-1)
        if reduction == "mean":
            totals = totals / (y != ignore_index).reshape(by_sample).sum(-1)
        return totals

    return layers.as_sample(of_all, x, y)


def _requires_grad(layers: Layers, x: Any) -> Any:
    return functorch.wants_gradient(x)  # a wrapper of vmap says no


def _transposed(layers: Layers, x: Any, *dims: Any) -> Tensor | None:
    at = layers.leaf_of(x, 2)
    if at is None or {d % 2 for d in dims} not in (set(), {0, 1}):
        return None
    return layers.standing_in(x.mT, at[0], not at[1])


_RULES: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    torch.mm: _mm,
    Tensor.mm: _mm,
    torch.addmm: _addmm,
    F.embedding: _embedding,
    Tensor.__getitem__: _item,
    F.scaled_dot_product_attention: _attention,
    F.cross_entropy: _cross_entropy,
    F.conv1d: _convolution,
    F.conv2d: _convolution,
    F.conv3d: _convolution,
    Tensor.T.__get__: _transposed,  # pyright: ignore
    Tensor.mT.__get__: _transposed,  # pyright: ignore
    Tensor.requires_grad.__get__: _requires_grad,  # pyright: ignore
    Tensor.t: _transposed,
    torch.t: _transposed,
    Tensor.transpose: _transposed,
    torch.transpose: _transposed,
}
_NAMED = _linear, _embedding, _attention, _cross_entropy, _convolution  # arguments may have names
RULES: Rules = _RULES, {func: rule for func, rule in _RULES.items() if rule in _NAMED}
