"""The diagonal and the trace of what is known by its products with vectors alone.

    for i in range(samples):
        z = signs drawn from fold_in(key, i)
        seen += z * product(z)            # its mean is the diagonal, and the sum of that the trace

Signs have less variance than any other draws, and none where the matrix is diagonal. The mean and
its standard error are kept as they come, so that no more than one product is held.
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
    """An estimate that is right on average, and how far it is from that.

    Attributes:
        mean: The estimate: a tree like params, or a number.
        error: Its standard error, of the same structure; NaN of one sample.

    Example:
        >>> import torch
        >>> from pureaccum import key
        >>> trace(lambda v: 2 * v, torch.zeros(3), key=key(0), samples=4)
        Estimate(mean=tensor(6., dtype=torch.float64), error=tensor(0., dtype=torch.float64))
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

    The estimate is a tree like ``like``, float32 at least, and unbiased. The variance of an entry
    is the sum of the squares of all others in its row. ``per_sample_grad(...,
    reduce="moments")(params, batch).second`` is the diagonal of an empirical Fisher matrix,
    exactly.

    Args:
        product: ``product(v)`` gives a tree like ``v``, of a symmetric matrix: ``lambda v:
            ggnvp(...)(params, batch, v)``.
        like: A tree like ``v``, such as params.
        key: A key for this estimate alone; the same key draws the same signs.
        samples: How many products to take, one after the other; an estimate of more samples begins
            with those of fewer.
        check: Whether one product is compared with differences, once a loss and kind, if it is
            made by ``hvp``, ``ggnvp`` or ``fisher_vp``.

    Example:
        >>> from pureaccum import key
        >>> diagonal(lambda v: torch.tensor([1.0, 5.0]) * v, torch.zeros(2), key=key(0), samples=2)
        Estimate(mean=tensor([1., 5.]), error=tensor([0., 0.]))

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

    The estimate is a float64 number, and unbiased. Its variance is twice the sum of the squares of
    all entries off the diagonal.

    Args:
        product, like, key, samples, check: As for ``diagonal``.

    Example:
        >>> from pureaccum import key
        >>> trace(lambda v: torch.tensor([1.0, 5.0]) * v, torch.zeros(2), key=key(0), samples=2)
        Estimate(mean=tensor(6., dtype=torch.float64), error=tensor(0., dtype=torch.float64))

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
