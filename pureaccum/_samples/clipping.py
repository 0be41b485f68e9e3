"""The core of DP-SGD: bound the norm that each sample adds, and add noise to the sum.

Neither function does privacy accounting. The privacy spent follows from the sampling rate,
``std / max_norm`` and the number of steps; ``opacus.accountants`` computes it.
"""

from collections.abc import Callable
from typing import Any, ParamSpec

import torch
from torch import Tensor

from .._base import checks, trees
from .._optim import combinators
from .._pure import keys
from . import chunks, per_sample
from .scaling import Clip


P = ParamSpec("P")


def clipped_sum(  # noqa: D417
    func: Callable[P, Any],
    max_norm: trees.Tree,
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    batch_argnums: int | tuple[int, ...] = 1,
    chunk_size: int | None = None,
    keep_batch_dim: bool = False,
    randomness: chunks.Randomness = "error",
    engine: chunks.SampleEngine = "vmap",
    dtype: torch.dtype | None = None,
) -> Callable[P, Any]:
    """Sum per-sample gradients, each scaled down to a norm of at most ``max_norm``.

    The rule, where the norm is over all leaves as one vector::

        Σ over samples of gradient * min(1, max_norm / (|gradient| + 1e-6))

    If ``max_norm`` is a tree, each part of params follows that rule with its own norm. A sample
    whose norm is not finite adds exactly nothing to any part. Its norm is returned as it is, so
    ``(~norms.isfinite()).sum()`` counts such samples. An empty batch, which Poisson sampling draws
    now and then, gives sums of zero. For privacy accounting see ``opacus.accountants``.

    A sample may consist of several rows, such as all the data of one user. Give the batch one more
    dim with ``x.unflatten(0, (-1, k))``, and write the loss for k rows.

    Outside transforms, ``engine="vmap"`` computes norms and sums for linear layers and embeddings
    from their inputs and output gradients (ghost norms): one backward pass, in the memory of
    activations. If a large parameter is used in another way, per-sample gradients are materialised,
    as they are under transforms. Detecting this calls the loss once more, with the same random
    numbers.

    Args:
        func, argnums, has_aux, batch_argnums, chunk_size, keep_batch_dim, randomness, engine,
            dtype: As for ``per_sample_grad``; ``func`` is the loss of one sample.
        max_norm: The largest norm that a sample adds, above zero. Or a tree of such numbers that is
            a prefix of params, ``{"embed": 1.0, "blocks": 0.5}``; a sample then adds a norm of at
            most ``sqrt(Σ max_norm²)``.

    Returns:
        A function of ``func``'s arguments that returns ``(sums, norms)``, or
        ``(sums, (aux, norms))``. Sums are float32 or wider. ``norms`` has the norm of each sample's
        gradient before clipping, of shape (samples,), or is a tree of these like ``max_norm``.

    Example:
        >>> summed = clipped_sum(lambda w, x: w * x, 2.0, chunk_size=2)
        >>> summed(torch.tensor(0.0), torch.tensor([1.0, 3.0, 4.0]))
        (tensor(5.0000), tensor([1., 3., 4.]))
        >>> summed(torch.tensor(0.0), torch.tensor([1.0, float("nan")]))
        (tensor(1.), tensor([1., nan]))

    References:
        Abadi et al., `Deep learning with differential privacy <https://arxiv.org/abs/1607.00133>`_,
        2016; `Opacus <https://github.com/pytorch/opacus>`_, whose formula it is; Li et al., `Large
        language models can be strong differentially private learners
        <https://arxiv.org/abs/2110.05679>`_, 2022, for ghost norms; Bu et al., `Differentially
        private optimization on large model at small cost
        <https://arxiv.org/abs/2210.00038>`_, 2023, for one backward pass.
    """
    return per_sample.per_sample_grad(
        func,
        argnums,
        has_aux,
        batch_argnums=batch_argnums,
        chunk_size=chunk_size,
        transform=_read_max_norm(max_norm),
        reduce="sum",
        metrics="norm",
        keep_batch_dim=keep_batch_dim,
        randomness=randomness,
        engine=engine,
        dtype=dtype,
    )


def _read_max_norm(max_norm: trees.Tree) -> Any:
    """The transform that a number stands for, or a tree of numbers."""
    numbers, spec = trees.flatten(max_norm)
    names = trees.paths(spec, "max_norm") if numbers else ["max_norm"]
    expected = "a number above zero, or a tree of such that is a prefix of params"
    each = [
        checks.check_number(x, name, expected, lambda it: it > 0)
        for x, name in zip(numbers or [max_norm], names, strict=True)
    ]
    scalings = [combinators.clip_by_global_norm(x).factor for x in each]
    order = trees.unflatten(spec, range(len(each)))
    return Clip(order, [scaling for scaling in scalings if scaling is not None])


def add_noise(tree: trees.Tree, std: float | Tensor, key: Tensor) -> trees.Tree:
    """Add independent normal noise to every number in a tree.

    The rule, for leaf ``i`` of the tree, drawn in float32 or wider::

        leaf + std * normal(fold_in(key, i), leaf.shape)

    Use it for research only. Its generator does not withstand an attacker, and its noise does not
    withstand attacks on floating-point rounding.

    Args:
        tree: Sums, such as those of ``clipped_sum``. Complex numbers get noise in both parts.
        std: The standard deviation; for DP-SGD the noise multiplier times ``max_norm``.
        key: A key for this draw alone: ``fold_in(key, step)``.

    Example:
        >>> from pureaccum import key
        >>> add_noise({"w": torch.zeros(3)}, 2.0, key(0))
        {'w': tensor([-1.1624,  1.0674,  4.3052])}

    References:
        Abadi et al., `Deep learning with differential privacy <https://arxiv.org/abs/1607.00133>`_,
        2016.
    """
    if not isinstance(std, Tensor):
        std = checks.check_number(std, "std")
    else:  # NaN, and no error: a look at a number would wait for the device
        std = torch.where(std >= 0, std, torch.nan)
    if not isinstance(key, Tensor) or key.shape != (2,):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"key is {key!r}; expected one key of shape (2,): pureaccum.key(seed).")
    leaves, spec = checks.read_params(tree, "tree")

    def noisy(i: int, x: Tensor) -> Tensor:
        parts = trees.real_parts(x)
        wide = trees.accumulation_dtype(parts.dtype)
        noise = keys.normal(keys.fold_in(key.to(x.device), i), tuple(parts.shape), wide)
        by = trees.as_scalar_of(noise, std) if isinstance(std, Tensor) else std
        parts = (parts.to(wide) + noise * by).to(parts.dtype)
        return torch.view_as_complex(parts) if x.is_complex() else parts

    return trees.unflatten(spec, [noisy(i, x) for i, x in enumerate(leaves)])
