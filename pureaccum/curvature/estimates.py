"""The diagonal and the trace of a matrix of which only products with vectors are known.

    for i in range(samples):
        z = signs drawn from fold_in(key, i)
        seen += z * product(z)            # its mean is the diagonal, and the sum of that the trace

Random signs have less variance than any other draws, and none if the matrix is diagonal. Mean and
standard error are updated sample by sample, so only one product is in memory.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base import checks, states, trees
from .._pure import keys
from . import derivatives


@states.loadable
class Estimate(NamedTuple):
    """An unbiased estimate and its standard error.

    Attributes:
        mean: The estimate: a tree like params, or a number.
        error: Its standard error, of the same structure; NaN for one sample.

    Example:
        >>> import torch
        >>> from pureaccum import key
        >>> trace(lambda v: 2 * v, torch.zeros(3), key=key(0), samples=4)
        Estimate(mean=6.0, error=0.0)
    """

    mean: trees.Tree
    error: trees.Tree


def diagonal(
    product: Callable[[trees.Tree], trees.Tree],
    like: trees.Tree,
    *,
    key: Tensor,
    samples: int,
    check: bool = True,
) -> Estimate:
    """Estimate the diagonal of a symmetric matrix from its products with random signs.

    The rule, for signs z drawn from the key::

        mean over samples of z * product(z)

    The estimate is unbiased, a tree like ``like`` in float32 or wider. The variance of an entry is
    the sum of the squares of the other entries in its row, divided by ``samples``. For the exact
    diagonal of an empirical Fisher matrix use
    ``per_sample_grad(..., reduce="moments")(params, batch).second``.

    Args:
        product: ``product(v)`` returns a tree like ``v``: the product with a symmetric matrix, such
            as ``lambda v: ggnvp(...)(params, batch, v)``.
        like: A tree like ``v``, such as params.
        key: A key for this estimate alone; the same key draws the same signs.
        samples: The number of products, computed one after another. An estimate with more samples
            begins with the same signs as one with fewer.
        check: For a product made by ``hvp``, ``ggnvp`` or ``fisher_vp``: whether to compare it with
            finite differences, as there.

    Example:
        >>> from pureaccum import key
        >>> like, factors = torch.zeros(2), torch.tensor([1.0, 5.0])
        >>> diagonal(lambda v: factors * v, like, key=key(0), samples=2).mean
        tensor([1., 5.])

    References:
        Bekas, Kokiopoulou and Saad, `An estimator for the diagonal of a matrix
        <https://doi.org/10.1016/j.apnum.2007.01.003>`_, 2007.
    """
    leaves, spec = checks.read_params(like, "like")

    def sample(signs: list[Tensor], found: list[Tensor]) -> list[Tensor]:
        return [_by_parts(z, x) for z, x in zip(signs, found, strict=True)]

    means, errors = _estimate(product, leaves, spec, key, samples, check, sample)
    return Estimate(trees.unflatten(spec, means), trees.unflatten(spec, errors))


def trace(  # noqa: D417
    product: Callable[[trees.Tree], trees.Tree],
    like: trees.Tree,
    *,
    key: Tensor,
    samples: int,
    check: bool = True,
) -> Estimate:
    """Estimate the trace of a symmetric matrix from its products with random signs.

    The rule, for signs z drawn from the key::

        mean over samples of <z, product(z)>

    The estimate is unbiased, and a 0-d float64 tensor. Its variance is twice the sum of the squares
    of all entries off the diagonal, divided by ``samples``.

    Args:
        product, like, key, samples, check: As for ``diagonal``.

    Example:
        >>> from pureaccum import key
        >>> trace(lambda v: torch.tensor([1.0, 5.0]) * v, torch.zeros(2), key=key(0), samples=2)
        Estimate(mean=6.0, error=0.0)

    References:
        Hutchinson, `A stochastic estimator of the trace of the influence matrix
        <https://doi.org/10.1080/03610918908812806>`_, 1989.
    """
    leaves, spec = checks.read_params(like, "like")

    def sample(signs: list[Tensor], found: list[Tensor]) -> list[Tensor]:
        return [derivatives.inner(signs, found, torch.float64)]

    (mean,), (error,) = _estimate(product, leaves, spec, key, samples, check, sample)
    return Estimate(mean, error)


def _estimate(
    product: Callable[[trees.Tree], trees.Tree],
    leaves: list[Tensor],
    spec: Any,
    key: Tensor,
    samples: int,
    check: bool,
    sample: Callable[[list[Tensor], list[Tensor]], list[Tensor]],
) -> tuple[list[Tensor], list[Tensor]]:
    """The mean of what samples give, and its standard error."""
    samples = checks.check_int(samples, "samples", "an int of at least 1", 1)
    means: list[Tensor] = []
    spread: list[Tensor] = []  # of real numbers: Σ (x - mean)² after each sample
    for i in range(samples):
        signs = [_signs(keys.fold_in(keys.fold_in(key, i), n), x) for n, x in enumerate(leaves)]
        before, checks.here.compares = checks.here.compares, checks.here.compares and check
        try:
            found, found_spec = trees.flatten(product(trees.unflatten(spec, signs)))
        finally:
            checks.here.compares = before
        names = "the result of product", "like"

        checks.check_fits(
            found, found_spec, leaves, spec, names, "Return a tree like v from product(v)."
        )
        seen = sample(signs, found)
        if not means:
            means, spread = seen, [torch.zeros_like(x) for x in seen]
            continue
        for n, x in enumerate(seen):
            off = x - means[n]
            means[n] = means[n] + off / (i + 1)
            spread[n] = spread[n] + _by_parts(off, x - means[n])
    by = float(samples * (samples - 1)) or torch.nan
    return means, [_by_root(x / by) for x in spread]


def _by_parts(z: Tensor, x: Tensor) -> Tensor:
    """The product of two tensors, of complex ones part by part."""
    product = (trees.real_parts(z) * trees.real_parts(x)).to(
        trees.accumulation_dtype(trees.real_parts(x).dtype)
    )
    return torch.view_as_complex(product) if x.is_complex() else product


def _by_root(x: Tensor) -> Tensor:
    root = trees.real_parts(x).sqrt()
    return torch.view_as_complex(root) if x.is_complex() else root


def _signs(key: Tensor, like: Tensor) -> Tensor:
    """1 or -1 for each number, and for both parts of a complex one."""
    signs = torch.where(
        keys.uniform(key.to(like.device), trees.real_parts(like).shape) < 0.5, -1.0, 1.0
    )
    return torch.view_as_complex(signs).to(like.dtype) if like.is_complex() else signs.to(like)
