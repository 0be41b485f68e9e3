"""A loop of the user's own in place of the accumulator: which weights it gives its microbatches.

With ``g_k`` the gradient of the loss of microbatch ``k``, the loop's result is

    Σ a_k g_k,   right if a_k is the share of microbatch k in the whole weight

Least squares finds the ``a_k``, and they tell one mistake from another.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..._base import checks, trees
from ..._core import ledger, losses
from . import report, trials
from .subject import Subject, uneven


Loop = Callable[[Callable[..., Any], Any, list[Any]], Any]


# One call --------------------------------------------------------------------------------


def trial_of_loop(loop: Loop, own: trials.Trial) -> trials.Trial:
    """A trial of a loop against what our own trial knows; without the value, which it hides."""

    def accumulate(split: report.Split) -> trials.Result:
        return trials.Result(run_loop(loop, own.subject, split), own.accumulate(split).sizes[1:])

    def whole(rows: report.Indices) -> list[Tensor]:
        return own.whole(rows)[1:]

    bound = trials.Bound(own.bound.share, own.bound.floor[1:])
    return own._replace(accumulate=accumulate, whole=whole, bound=bound, known={})


def run_loop(
    loop: Loop, subject: Subject, split: report.Split, seed: int | None = None
) -> list[Tensor]:
    """The leaves of the gradient that a loop returns."""
    params = subject.arguments(())[0]
    microbatches = [subject.arguments(rows)[1] for rows in split]
    with subject.running(seed):
        grads = loop(subject.loss_fn, params, microbatches)
    (came, spec), (like, like_spec) = trees.flatten(grads), trees.flatten(params)
    cause = "Return the gradient of the whole batch from the loop, a tree like params."
    checks.check_same_structure(like_spec, spec, "params", "the result of the loop", cause)
    for path, x, y in zip(trees.paths(spec, "grads"), came, like, strict=True):
        if not isinstance(x, Tensor) or x.shape != y.shape:
            shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"the loop returned {shape} for {path}; expected {tuple(y.shape)}. {cause}"
            )
        if x.dtype.itemsize < y.dtype.itemsize:
            raise TypeError(
                f"the loop returned {path} as {x.dtype}; expected {y.dtype}, as in params. Likely "
                "cause: it computes with a module's own parameters, so it cannot be compared in "
                "this dtype. Pass reference='native'."
            )
    return [x.detach() for x in came]


# What is wrong with it -------------------------------------------------------------------


def of_loop(loop: Loop, trial: trials.Trial, wrong: bool) -> report.Diagnosis | None:
    """What the loop makes of a few microbatches of different sizes."""
    rows = trial.subject.everything()
    split = uneven(rows)
    raw = trial.subject._replace(reduction="sum")  # the gradient of a loss as it came
    try:
        if impure := _impure(loop, trial, split):
            return impure
        if not wrong:
            return None
        states = [raw.sums(part) for part in split]
        result = trial.accumulate(split).leaves
    except Exception:
        return None  # which the report tells
    own = [float(losses.divisor(state.weight, ledger.plain_sum(state, "sum"))) for state in states]
    grads = [
        [x / by for x in trees.tree_leaves(state.grads)]
        for state, by in zip(states, own, strict=True)
    ]
    is_sum = not trial.subject.weighted and trial.subject.reduction == "sum"
    if trial.subject.weighted:
        shares = [float(state.weight) / sum(own) for state in states]
    else:
        shares = [1.0 if is_sum else len(part) / len(rows) for part in split]
    found = fitted(grads, result)
    certain = sum(x.numel() for x in result) > len(split)  # or any result would fit
    return None if found is None else mistake(found, shares, is_sum, certain)


def _impure(loop: Loop, trial: trials.Trial, split: report.Split) -> report.Diagnosis | None:
    sizes = trial.accumulate(split).sizes

    def call(subject: Subject, seed: int) -> trials.Result:
        return trials.Result(run_loop(loop, subject, split, seed), sizes)

    draws, keeps = trials.repeats(trial.subject, call, trial.bound, 2)
    if keeps:
        return report.Diagnosis(
            "state",
            "two calls of the loop with the same arguments differ: gradients of an earlier call "
            "are still there, or parameters were changed.",
            "optimizer.zero_grad()  # before the first microbatch of every step",
        )
    if draws:
        return report.Diagnosis(
            "randomness",
            "two calls of the loop with different random numbers differ.",
            "generator = torch.Generator().manual_seed(seed)  # or no random numbers",
        )
    return None


def fitted(grads: list[list[Tensor]], result: list[Tensor]) -> list[float] | None:
    """The factors, or None where the result is no combination of the gradients."""

    def column(tree: list[Tensor]) -> Tensor:
        wide = [torch.view_as_real(x) if x.is_complex() else x for x in tree]
        return torch.cat([x.double().flatten() for x in wide])

    matrix, target = torch.stack([column(g) for g in grads], 1), column(result)[:, None]
    found = torch.linalg.lstsq(matrix, target).solution
    gap, size = (matrix @ found - target).norm(), target.norm()
    return found.flatten().tolist() if gap <= _ALIKE * size else None


_ALIKE = 1e-6  # tells one mistake from another, and not right from wrong


def mistake(
    found: list[float], shares: list[float], is_sum: bool, certain: bool
) -> report.Diagnosis | None:
    """The mistake that such factors show; None where they are right."""

    def are(*wanted: float) -> bool:
        pairs = zip(found, wanted, strict=True)
        return all(abs(a - b) <= _ALIKE * max(1.0, abs(b)) for a, b in pairs)

    k, last = len(found), found[-1]
    ratios = [a / b if b else 1.0 for a, b in zip(found, shares, strict=True)]
    if are(*shares):
        return None
    if are(*[0.0] * (k - 1), last):
        return _ZEROED
    if are(*found[:-1], 0.0):
        return _TAIL_DROPPED
    if are(*[1 / k] * k):
        return _sums_divided(k) if is_sum else _ALL_ALIKE
    if not is_sum and are(*[1.0] * k):
        return _ADDED
    if max(ratios) - min(ratios) <= _ALIKE * max(map(abs, ratios)):
        return _factor(ratios[0])
    return _weighted_wrongly(found, shares) if certain else None


_BY_ROWS = "grads += grad * (rows_of_microbatch / rows_of_batch)"
_ZEROED = report.Diagnosis(
    "gradients zeroed",
    "only the last microbatch is in the result: the gradients are zeroed in every iteration, or "
    "overwritten.",
    "optimizer.zero_grad()  # once, before the loop over microbatches; and grad += g",
)
_TAIL_DROPPED = report.Diagnosis(
    "tail dropped",
    "the last, shorter microbatch is not in the result.",
    "for part in pa.microbatches(batch, size): ...  # the ragged tail is kept",
)
_ALL_ALIKE = report.Diagnosis(
    "mean of means",
    "every microbatch counts alike, whatever its samples or its weight: right where all "
    "microbatches are equal, wrong where one is shorter.",
    f"{_BY_ROWS}  # not / number_of_microbatches",
)
_ADDED = report.Diagnosis(
    "mean as sum",
    "means of microbatches are added and not divided: with k equal microbatches the result is k "
    "times the full batch's.",
    _BY_ROWS,
)


def _sums_divided(k: int) -> report.Diagnosis:
    return report.Diagnosis(
        "sum as mean",
        f"sums of microbatches are added and divided by their number, {k}: the result is 1/k of "
        "the full batch's.",
        "grads += grad  # sums need no division",
    )


def _factor(ratio: float) -> report.Diagnosis:
    return report.Diagnosis(
        "factor",
        f"every microbatch counts {ratio:.6g} times as much as it should. Likely cause: a scale "
        "that is not undone, a division that is done twice, or a clipped gradient.",
        f"grads = grads / {ratio:.6g}",
    )


def _weighted_wrongly(found: list[float], shares: list[float]) -> report.Diagnosis:
    counted = ", ".join(f"{a:.4g} (right: {b:.4g})" for a, b in zip(found, shares, strict=True))
    return report.Diagnosis(
        "wrong weights",
        f"the microbatches count as {counted}. (Clipping each of them does that, too.)",
        _BY_ROWS,
    )
