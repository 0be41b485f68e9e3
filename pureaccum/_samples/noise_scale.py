"""How much gradients scatter, from norms that have been computed anyway.

Let s be a microbatch's term in the sum S, w its weight, and W the sum of the K weights. Let G be
the true gradient, and tr(Σ) the variance of the gradient of one sample. Then, for any weights,

    E sum |s|²/w = W |G|² + K tr(Σ)         E |S|²/W = W |G|² + tr(Σ)

so ``noise`` and ``signal`` of ``noise_scale`` are unbiased estimates of tr(Σ) and of |G|².
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base import checks, reprs, states, trees
from .._base.settings import records
from .._core import ledger
from . import reducers


@states.loadable
class NoiseScale(NamedTuple):
    """How much gradients scatter, as 0-d float64 tensors.

    Attributes:
        scale: ``noise / signal``, the simple noise scale, an estimate of the critical batch size.
            Its unit is samples, or whatever ``Weighted`` counts. Inf if no signal is detected.
        signal: An estimate of the squared norm of the true gradient; may be negative.
        noise: The variance of the gradient of one sample: the trace of its covariance.
        snr: The signal-to-noise ratio of a batch of this size, ``signal / (noise / weight)``.
        cosine: The expected inner product of two microbatch gradients over their mean squared norm.
        low: The lower end of the 95 % confidence interval of ``scale`` by ``running_noise_scale``;
            0 for a single batch.
        high: The upper end of that interval; inf for a single batch.

    Example:
        >>> import torch
        >>> from pureaccum import per_sample_grad
        >>> x = torch.tensor([1.0, 3.0, 2.0, 2.0])
        >>> noise_scale(per_sample_grad(lambda w, x: w * x, reduce="moments")(x[0], x)).signal
        tensor(3.8333, dtype=torch.float64)
    """

    scale: Tensor
    signal: Tensor
    noise: Tensor
    snr: Tensor
    cosine: Tensor
    low: Tensor
    high: Tensor


@states.loadable
class BatchNoise(NamedTuple):
    """The estimates of one batch; a vector has all leaves together first, then each leaf."""

    signal: Tensor
    noise: Tensor
    weight: Tensor
    pieces: Tensor


@states.loadable
class NoiseAverages(NamedTuple):
    """Moving averages of ``signal`` and ``noise``, their products and squares, not yet corrected.

    ``share`` is the same average of ones; reading divides all others by it. ``squares`` is the sum
    of the squared shares of single batches, which gives the effective number of batches.
    """

    signal: Tensor
    noise: Tensor
    signal_signal: Tensor
    signal_noise: Tensor
    noise_noise: Tensor
    weight: Tensor
    pieces: Tensor
    share: Tensor
    squares: Tensor


class RunningNoiseScale(NamedTuple):
    """The three functions of a running noise scale.

    Attributes:
        init: ``init(params)`` returns averages over no batches.
        update: ``update(averages, seen)`` returns averages over one more batch; ``seen`` is
            anything that ``noise_scale`` takes.
        read: ``read(averages, like=None)`` returns a ``NoiseScale`` with a confidence interval.
            ``like`` is as for ``noise_scale``.
    """

    init: Callable[[trees.Tree], NoiseAverages]
    update: Callable[[NoiseAverages, Any], NoiseAverages]
    read: Callable[..., Any]

    __repr__ = reprs.of_made


def noise_scale(seen: Any, like: trees.Tree = None) -> Any:
    """Estimate the gradient noise scale from one batch.

    The rule, for K microbatches with gradient sum s and weight w each, and totals S and W::

        noise  = (Σ |s|²/w - |S|²/W) / (K - 1)    # the variance of one sample's gradient
        signal = (|S|²/W - noise) / W             # the squared norm of the true gradient
        scale  = noise / signal

    ``noise`` and ``signal`` are unbiased. Batches larger than ``scale`` gain little. A single
    microbatch gives NaN.

    Args:
        seen: An ``AccumState`` of an accumulator with ``squares=True`` (of microbatches, or of
            samples), the ``Moments`` of samples, or the ``noise`` of a ``StepInfo``.
        like: Params, for a dict from path to the ``NoiseScale`` of each leaf instead.

    Example:
        >>> from pureaccum import accumulator
        >>> acc = accumulator(lambda w, x: (w * x).mean(), squares=True)
        >>> w, state = torch.tensor(1.0), acc.init(torch.tensor(1.0))
        >>> for part in torch.tensor([1.0, 3.0, 2.0, 2.0]).split(1):
        ...     state = acc.update(state, w, part)
        >>> noise_scale(state).noise, noise_scale(state, like=w)["params"].scale
        (tensor(0.6667, dtype=torch.float64), tensor(0.1739, dtype=torch.float64))

    References:
        McCandlish, Kaplan, Amodei and OpenAI Dota Team, `An empirical model of large-batch training
        <https://arxiv.org/abs/1812.06162>`_, 2018.
    """
    batch = read_noise(seen)
    nowhere = torch.zeros_like(batch.signal)
    return _scales(batch, (nowhere, nowhere + torch.inf), like)


@records
def running_noise_scale(decay: float = 0.99) -> RunningNoiseScale:
    """Estimate the gradient noise scale over many batches, with a confidence interval.

    The rule, corrected for starting at zero::

        average = decay * average + (1 - decay) * of this batch    # separately for signal and noise
        scale   = average of noise / average of signal             # no mean of ratios

    The interval is Fieller's, from the differences between batches. It needs about ten batches or
    more, and a gradient that changes slowly. A batch that is not finite, or that has a single
    microbatch, is left out.

    Args:
        decay: The weight of the old average in each update, in [0, 1).

    Example:
        >>> from pureaccum import per_sample_grad
        >>> moments = per_sample_grad(lambda w, x: (w - x) ** 2 / 2, reduce="moments")
        >>> running, w = running_noise_scale(), torch.tensor(1.0)
        >>> averages = running.init(w)
        >>> for seed in range(100):
        ...     x = torch.randn(64, generator=torch.Generator().manual_seed(seed))
        ...     averages = running.update(averages, moments(w, x))
        >>> read = running.read(averages)
        >>> read.low < 1 < read.high
        tensor(True)

    References:
        McCandlish, Kaplan, Amodei and OpenAI Dota Team, `An empirical model of large-batch training
        <https://arxiv.org/abs/1812.06162>`_, 2018.
    """
    decay = checks.check_number(
        decay, "decay", "a number from 0, and below 1", lambda it: 0 <= it < 1
    )

    def init(params: trees.Tree) -> NoiseAverages:
        """Return averages over no batches."""
        leaves, _ = checks.read_params(params)
        vector = torch.zeros(len(leaves) + 1, dtype=torch.float64, device=leaves[0].device)
        like = _averages_of(BatchNoise(vector, vector, vector[0], vector[0]))
        return trees.tree_map(torch.zeros_like, like)

    def update(averages: NoiseAverages, seen: Any) -> NoiseAverages:
        """Return the averages with one more batch, unless its estimates are not finite."""
        checks.check_state(averages, NoiseAverages, "running_noise_scale", "averages")
        batch = read_noise(seen)
        signal, noise = batch.signal, batch.noise
        if signal.shape != averages.signal.shape:
            raise ValueError(
                f"averages has {len(averages.signal) - 1} leaves; expected {len(signal) - 1}, as "
                "in the batch. Pass averages that init made from these params."
            )
        ok = torch.isfinite(torch.cat([signal, noise])).all()
        later = trees.tree_map(
            lambda old, x: decay * old + (1 - decay) * x, averages, _averages_of(batch)
        )
        squares = decay**2 * averages.squares + (1 - decay) ** 2
        return trees.where(ok, later._replace(squares=squares), averages)

    def read(averages: NoiseAverages, like: trees.Tree = None) -> Any:
        """Return the noise scale of the averages, with a confidence interval."""
        checks.check_state(averages, NoiseAverages, "running_noise_scale", "averages")
        mean = trees.tree_map(lambda x: x / averages.share, averages)
        mean = mean._replace(share=averages.share, squares=averages.squares)
        batch = BatchNoise(mean.signal, mean.noise, mean.weight, mean.pieces)
        return _scales(batch, _interval(mean), like)

    return RunningNoiseScale(init, update, read)


# Pieces --------------------------------------------------------------------------------


def _averages_of(batch: BatchNoise) -> NoiseAverages:
    """The averages of one batch alone."""
    signal, noise, one = batch.signal, batch.noise, torch.ones_like(batch.weight)
    return NoiseAverages(
        signal=signal,
        noise=noise,
        signal_signal=signal * signal,
        signal_noise=signal * noise,
        noise_noise=noise * noise,
        weight=batch.weight,
        pieces=batch.pieces,
        share=one,
        squares=one,
    )


def read_noise(seen: Any) -> BatchNoise:
    """What one batch says: of whatever ``noise_scale`` takes."""
    counted = {BatchNoise: "pieces", reducers.Moments: "samples", ledger.AccumState: "total"}.get(
        type(seen)
    )
    if counted is not None and getattr(seen, counted).dim() != 0:
        raise ValueError(
            f"the {type(seen).__name__} is stacked, and each member has its own noise scale. Use "
            "torch.func.vmap(noise_scale)(...)."
        )
    if isinstance(seen, BatchNoise):
        return seen
    if isinstance(seen, reducers.Moments):
        seconds = (
            torch.stack([x.double().sum() for x in trees.tree_leaves(seen.second)]) * seen.weight
        )
        sums = [trees.norm(x) for x in trees.tree_leaves(seen.mean)]
        return noise_of(sums, seconds, seen.weight, seen.samples)
    if not isinstance(seen, ledger.AccumState):
        raise TypeError(
            f"noise_scale got {reprs.kind(seen)}; expected the AccumState of an accumulator "
            "with squares=True, Moments, or the noise of a StepInfo (with noise=True)."
        )
    sums = trees.tree_leaves(seen.grads)
    if not isinstance(seen.squares, Tensor) or len(seen.squares) != len(sums) + 1:
        raise ValueError(
            "the state has no squared norms of gradients. Make the accumulator with squares=True "
            "(and reduce='sum' or 'mean'). With 'moments', pass the result of finalize."
        )
    means = [trees.norm(x).double() / seen.weight for x in sums]
    return noise_of(means, seen.squares[:-1], seen.weight, seen.squares[-1])


def noise_of(means: list[Tensor], squares: Tensor, weight: Tensor, pieces: Tensor) -> BatchNoise:
    """What a batch says, from the norm of each leaf's mean gradient and its sum of |s|² / w."""
    between = torch.stack([x.to(squares.device).double() for x in means]) ** 2 * weight
    noise = torch.where(pieces > 1, (squares - between) / (pieces - 1), torch.nan)
    signal = (between - noise) / weight
    signal, noise = (torch.cat([x.sum().unsqueeze(0), x]) for x in (signal, noise))
    return BatchNoise(signal, noise, weight.double().clone(), pieces.double().clone())


def _scales(batch: BatchNoise, interval: tuple[Tensor, Tensor], like: trees.Tree) -> Any:
    """The noise scale of all leaves together, or a dict with that of each leaf."""
    signal, noise, weight, pieces = batch
    scale = torch.where(signal > 0, noise / signal, torch.where(signal <= 0, torch.inf, torch.nan))
    snr, cosine = signal * weight / noise, signal / (signal + noise * pieces / weight)
    fields = torch.stack([scale, signal, noise, snr, cosine, *interval])
    if like is None:
        return NoiseScale(*fields[:, 0])
    names = trees.paths(trees.flatten(like)[1], "params")
    if len(names) != len(signal) - 1:
        raise ValueError(
            f"like has {len(names)} leaves; expected params with {len(signal) - 1} leaves."
        )
    return {name: NoiseScale(*fields[:, i + 1]) for i, name in enumerate(names)}


def _interval(mean: NoiseAverages) -> tuple[Tensor, Tensor]:
    """Fieller's: all r for which ``noise - r * signal`` is zero, as far as batches differ."""
    a, b = mean.noise, mean.signal
    # How many batches of equal share would tell as much, less one; rounding leaves 1e-16 of one.
    freedom = mean.share**2 / mean.squares - 1
    told = freedom > 1e-9
    spread = torch.where(told, _student(freedom) ** 2 / freedom, 0.0)
    aa, ab, bb = (
        (second - one * other) * spread
        for second, one, other in (
            (mean.noise_noise, a, a),
            (mean.signal_noise, a, b),
            (mean.signal_signal, b, b),
        )
    )
    p, q, r = b * b - bb, a * b - ab, a * a - aa
    root = (q * q - p * r).clamp(min=0).sqrt()
    low = torch.where(told & (q > 0) & (r > 0), r / (q + root), 0.0)
    high = torch.where(told & (q > 0) & (p > 0), (q + root) / p, torch.inf)
    return low, high


def _student(freedom: Tensor) -> Tensor:
    """Within how much of zero 95 % of Student's distribution lie, by terms of its expansion."""
    z = 1.959964
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2
