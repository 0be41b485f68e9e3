"""May this loss be cut into microbatches?

    for parts in ways of cutting the batch:
        accumulated(parts) == full batch, in float64, but for rounding

And is it a pure function: no random numbers but those it is given, and nothing written to?
"""

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from .._batches import need_rows, read_batch
from .._inputs import check_choice, read_params
from .._loss import Reduction
from .._tree import all_finite, flatten, paths
from ._diagnose import UNKNOWN, Case, diagnose
from ._kept import names_of
from ._loop import Loop, of_loop, run_loop, trial_of_loop
from ._natively import natively
from ._report import AccumulationMismatch, Leaf, Report, Split
from ._subject import Subject, preserving_random
from ._trials import (
    Outcome,
    Parts,
    Trial,
    joined,
    native_trial,
    parts_at,
    repeats,
    shrunk,
    trial_of,
    ways,
    whole_batch,
)
from ._watch import Seen, watch
from ._weights import find_leaf, redrawn


Reference = Literal["float64", "native"]


def check_accumulation(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    *,
    has_aux: bool = False,
    reduction: Reduction = "mean",
    loop: Loop | None = None,
    splits: int | Sequence[Sequence[int]] = 8,
    weights: str | None = None,
    reference: Reference = "float64",
    seed: int = 0,
    raise_on_mismatch: bool = True,
) -> Report:
    """Find out whether a loss may be cut into microbatches, and if not, why.

    Rule: the batch is cut into halves, into all rows but one and that one, into single rows (16
    microbatches at most), and at random in random order; what is accumulated is compared with
    the gradient of the full batch, leaf by leaf, in float64. A difference counts where rounding
    cannot explain it:
    ``‖Σ c_k − full‖ > √u₆₄ Σ ‖c_k‖ + √(u₆₄/u₃₂) ‖full₃₂ − full‖``. Then experiments look for the
    cause. Nothing is changed: captured tensors that the loss writes to, and random generators,
    are put back.

    Args:
        loss_fn: ``loss_fn(params, batch)`` gives a scalar loss or ``Weighted``.
        params: What is differentiated, a pytree of tensors.
        batch: A pytree whose tensors have one row per sample along dim 0; two rows at least.
            Some 8 to 64 rows of real data show more than many.
        has_aux: Whether ``loss_fn`` returns ``(loss, aux)``.
        reduction: What a scalar loss is of its rows, ``"mean"`` or ``"sum"``.
        loop: A loop of your own in place of this package's accumulator,
            ``loop(loss_fn, params, microbatches) -> grads``: then it is the loop that is checked.
        splits: How many random splits are tried besides the fixed ones; or the splits
            themselves, lists of sizes that sum to the rows.
        weights: The leaf of the batch that holds weights or a mask, such as ``"mask"`` or
            ``"['tokens'][1]"``: rows of it are then set to zero at random, too.
        reference: The dtype to compare in, ``"float64"``; or ``"native"``, for a loss that runs in
            its own dtype alone, with ``√u`` of that dtype for a bound (for bfloat16, 6 %).
        seed: Of the splits, and of the random numbers that the loss sees.
        raise_on_mismatch: False returns the report also where the loss does not fit.

    Returns:
        A ``Report``: ``report.fits``, ``report.leaves``, ``report.diagnoses``, ``print(report)``.

    Raises:
        AccumulationMismatch: Where the loss does not fit; ``error.report`` is the report.

    >>> def token_mean(w, batch):
    ...     return ((batch["x"] * w) ** 2 * batch["mask"]).sum() / batch["mask"].sum()
    >>> batch = {"x": torch.arange(4.0), "mask": torch.tensor([1.0, 1.0, 0.0, 1.0])}
    >>> report = check_accumulation(token_mean, torch.ones(()), batch, raise_on_mismatch=False)
    >>> report.fits, report.diagnoses[0].kind
    (False, 'mean of means')
    """
    check_choice(reduction, get_args(Reduction), "reduction")
    check_choice(reference, get_args(Reference), "reference")
    subject = _subject(loss_fn, params, batch)._replace(has_aux=has_aux, reduction=reduction)
    masked = None if weights is None else find_leaf(subject.batch, weights)
    random = torch.Generator().manual_seed(seed)
    tried = _ways(subject.rows, splits, random)
    seeds = itertools.count(seed)
    with torch.inference_mode(False), preserving_random(), _uncompiled():
        seen = watch(subject, [*names_of(loss_fn), *names_of(loop)], seeds)
        subject = subject._replace(kept=seen.kept, generators=[g for g, _ in seen.generators])
        subjects = [subject]
        if masked is not None:
            subjects += [redrawn(subject, masked, random) for _ in range(3)]
        try:
            report = _examine(subjects, seen, loop, tried, reference, seeds)
        finally:
            for generator, state in seen.generators:
                generator.set_state(state)
    if raise_on_mismatch and not report.fits:
        raise AccumulationMismatch(report)
    return report


def assert_accumulates(loss_fn: Callable[..., Any], params: Any, batch: Any, **knobs: Any) -> None:
    """Raise ``AccumulationMismatch`` where a loss may not be cut into microbatches.

    Args:
        loss_fn: As all arguments: see ``check_accumulation``.
        params: See there.
        batch: See there.
        **knobs: See there.

    >>> x = torch.arange(6.0).reshape(3, 2)
    >>> assert_accumulates(lambda w, x: ((x @ w) ** 2).mean(), torch.ones(2), x)
    """
    check_accumulation(loss_fn, params, batch, **knobs)


# What is given ---------------------------------------------------------------------------


def _subject(loss_fn: Any, params: Any, batch: Any) -> Subject:
    if not callable(loss_fn):
        raise TypeError(
            f"loss_fn is a {type(loss_fn).__name__}; expected a function of (params, batch)."
        )
    read_params(params)
    flat = read_batch(batch)
    rows = need_rows(flat)
    if rows < 2:
        raise ValueError(
            f"batch has {rows} row{'s' * (rows != 1)}; expected two at least, since one cannot be "
            "cut."
        )
    return Subject(loss_fn, params, flat, rows)


def _uncompiled() -> AbstractContextManager[Any]:
    """Compiled parts of a loss run as they are written: a compiler would trace our modes, too."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def _ways(rows: int, splits: Any, random: torch.Generator) -> list[Parts]:
    if isinstance(splits, int):
        if splits < 1:
            raise ValueError(
                f"splits is {splits}; expected how many random splits to try, or them."
            )
        return ways(rows, splits, random)
    everything = tuple(range(rows))
    for sizes in splits:
        if sum(sizes) != rows or min(sizes, default=0) < 1:
            raise ValueError(
                f"splits holds {list(sizes)}; expected sizes of at least 1 that sum to the "
                f"{rows} rows of the batch."
            )
    return [parts_at(everything, list(itertools.accumulate(sizes))) for sizes in splits]


# What is done ----------------------------------------------------------------------------


class _Tried(NamedTuple):
    """A trial, and how every way of cutting came out."""

    trial: Trial
    outcomes: dict[Parts, Outcome]

    @property
    def wrong(self) -> bool:
        return any(max(outcome.errors) > 1 for outcome in self.outcomes.values())


def _examine(
    subjects: list[Subject],
    seen: Seen,
    loop: Loop | None,
    tried: list[Parts],
    reference: Reference,
    seeds: Iterator[int],
) -> Report:
    subject, names = subjects[0], paths(flatten(subjects[0].params)[1], "params")
    trials = [_trial(subject, seen.narrowest, reference, seeds) for subject in subjects]
    full = trials[0].whole(subject.everything())
    done = [_tried(trial, tried) for trial in trials]
    bad = next((one for one in done if one.wrong), done[0])
    times = 12 if seen.draws or seen.assigned else 1
    again = repeats(trials[0].subject, whole_batch, trials[0].bound, seeds, times)
    found: list[tuple[Trial, Split]] = []
    rows = [_leaf(i, done, found) for i in range(len(full))]
    shown = [split for trial, split in found if trial is bad.trial]
    sound = [parts for parts in tried[:3] if max(done[0].outcomes[parts].errors) < math.inf]

    def own(parts: Parts) -> list[Tensor]:
        sums = [subject.sums(rows, next(seeds)) for rows in parts]
        return joined(sums, subject.reduction).leaves

    native, overflow = natively(own, lambda: own((subject.everything(),)), full, sound)
    over = "" if overflow is None else ["value", *names][overflow]
    causes = diagnose(Case(subject, bad.trial, seen, seeds, bad.outcomes, *again, over, shown))
    if loop is None:
        names = ["value", *names]
    else:
        done = [_tried(trial_of_loop(loop, trial, seeds), tried) for trial in trials]
        rows = [_leaf(i, done, []) for i in range(len(names))]
        causes = causes or of_loop(loop, done[0].trial, seen.weighted, seeds)
        if not causes and any(one.wrong for one in done):
            causes = (UNKNOWN,)
        sound = [parts for parts in sound if max(done[0].outcomes[parts].errors) < math.inf]
        native, _ = natively(
            lambda parts: run_loop(loop, subject, parts, next(seeds)),
            lambda: own((subject.everything(),))[1:],
            full[1:],
            sound,
        )
    if reference == "native":
        native = [math.nan] * len(names)  # the full batch's own error is not known
    leaves = zip(names, rows, native, strict=True)
    dtype = str(seen.dtype).removeprefix("torch.")
    return Report(
        fits=not causes and not any(one.wrong for one in done),
        leaves=tuple(Leaf(name, *row, ratio) for name, row, ratio in leaves),
        diagnoses=tuple(causes),
        rows=subject.rows,
        splits=len(tried) * len(done),
        loss="Weighted" if seen.weighted else subject.reduction,
        dtype=dtype,
        reference=dtype if reference == "native" else reference,
    )


def _trial(
    subject: Subject, narrowest: torch.dtype, reference: Reference, seeds: Iterator[int]
) -> Trial:
    if reference == "native":
        trial = native_trial(subject, narrowest, seeds)
    else:
        try:
            trial = trial_of(subject, torch.float64, seeds)
        except Exception as error:
            error.add_note(
                "pureaccum: the loss runs in its own dtypes, but not in float64, in which it is "
                "compared. Does it checkpoint, or insist on a dtype? Switch that off for the "
                "check, or pass reference='native'."
            )
            raise
    full: list[Tensor] = trial.whole(subject.everything())
    if not all_finite(full):
        raise ValueError(
            f"the loss of the whole batch is {float(full[0]):g} in {reference}, its gradient "
            f"{'' if all_finite(full[1:]) else 'not '}finite: there is nothing to compare with."
        )
    return trial


def _tried(trial: Trial, tried: list[Parts]) -> _Tried:
    return _Tried(trial, {parts: trial.outcome(parts) for parts in tried})


def _leaf(i: int, done: list[_Tried], found: list[tuple[Trial, Split]]) -> tuple[float, Split]:
    """A leaf's worst error, and a small split that shows it, another leaf's where that does."""
    runs = [
        (outcome.errors[i], one.trial, parts)
        for one in done
        for parts, outcome in one.outcomes.items()
    ]
    error, trial, parts = max(runs, key=lambda run: run[0])
    if error <= 1:
        return error, ()
    for other, split in found:
        if other is trial and trial.fails(split, i):
            return error, split
    found.append((trial, shrunk(trial, parts, i)))
    return error, found[-1][1]
