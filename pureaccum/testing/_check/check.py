"""Can this loss be cut into microbatches?

    for split in ways of cutting the batch:
        accumulated(split) == full batch, in float64, but for rounding

And is it a pure function, which draws no hidden random numbers and writes to nothing?
"""

import itertools
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..._base import checks, trees
from ..._core import batches, losses, terms
from . import diagnosis, kept, trials
from .loop import Loop, of_loop, run_loop, trial_of_loop
from .report import AccumulationMismatch, Diagnosis, Report, Split
from .subject import Subject, one_term, preserving_random, redrawn, split_at, uncompiled, ways
from .watch import Seen, watch


Reference = Literal["float64", "native"]


def check_accumulation(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    *,
    has_aux: bool = False,
    reduction: losses.Reduction = "mean",
    loop: Loop | None = None,
    splits: int | Sequence[Sequence[int]] = 8,
    weights: str | None = None,
    reference: Reference = "float64",
    finite_differences: bool = False,
    seed: int = 0,
    raise_on_mismatch: bool = True,
) -> Report:
    """Find out whether a loss can be cut into microbatches, and if not, why.

    The rule, for the microbatches' sums c of any split, leaf by leaf in float64::

        it fits: ‖Σ c − full‖ <= √u₆₄ Σ ‖c‖ + √(u₆₄/u₃₂) ‖full₃₂ − full‖

    u₆₄ and u₃₂ are the rounding units of float64 and float32. The batch is cut into halves,
    quarters and single samples (at most 16 microbatches), into all samples but one and that one,
    and at random in random order. Then experiments look for the cause. Nothing is changed: captured
    tensors that the loss writes to, and random generators, are restored. (``grad`` and its kin
    compare values only, for one microbatch: see their ``check``.)

    Args:
        loss_fn: ``loss_fn(params, batch)`` returns a scalar loss, ``Weighted``, or a sum of these,
            each of whose terms is then checked separately.
        params: The pytree of tensors to differentiate with respect to.
        batch: A pytree whose tensors have one row per sample along dim 0; at least two samples.
            8 to 64 samples of real data show more than many.
        has_aux: Whether the loss returns ``(loss, aux)``.
        reduction: What a scalar loss is of its samples, ``"mean"`` or ``"sum"``.
        loop: A loop of your own to check, in place of this package's accumulator:
            ``loop(loss_fn, params, microbatches) -> grads``. It receives a list, and returns only
            the gradient of the whole batch, already divided.
        splits: The number of random splits to try besides the fixed ones; or the splits
            themselves, lists of sizes that sum to the samples.
        weights: The leaf of the batch that holds weights or a mask, such as ``"mask"`` or
            ``"['tokens'][1]"``. Batches in which random samples of it are zero are then tried too.
        reference: The dtype of the comparison, ``"float64"``. Or ``"native"``, for a loss that runs
            only in its own dtype, with ``√u`` of that dtype as the bound (6 % for bfloat16).
        finite_differences: Whether to compare the loss's gradient, and the derivative of that, with
            central differences. This finds errors of torch that are the same on both sides. Kinks
            and detached tensors do not count as errors.
        seed: The seed of the splits, and of the random numbers that the loss draws.
        raise_on_mismatch: False returns the report even if the loss does not fit.

    Raises:
        AccumulationMismatch: The loss does not fit; ``error.report`` is the report.

    Example:
        >>> def token_mean(w, batch):
        ...     return ((batch["x"] * w) ** 2 * batch["mask"]).sum() / batch["mask"].sum()
        >>> batch = {"x": torch.arange(4.0), "mask": torch.tensor([1.0, 1.0, 0.0, 1.0])}
        >>> report = check_accumulation(token_mean, torch.ones(()), batch, raise_on_mismatch=False)
        >>> report.fits, report.diagnoses[0].kind
        (False, 'mean of means')

    References:
        `torch.autograd.gradcheck
        <https://docs.pytorch.org/docs/stable/generated/torch.autograd.gradcheck.gradcheck.html>`_,
        which asks the same of a derivative.
    """
    given = locals()
    __tracebackhide__ = True  # of pytest
    checks.check_choice(reduction, get_args(losses.Reduction), "reduction")
    checks.check_choice(reference, get_args(Reference), "reference")
    if not (loop is None or callable(loop)):
        raise TypeError(
            f"loop is of type {type(loop).__name__}; expected "
            "loop(loss_fn, params, microbatches) -> grads, or None."
        )
    subject = read_subject(loss_fn, params, batch, itertools.count(seed))
    subject = subject._replace(has_aux=has_aux, reduction=reduction)
    masked = None if weights is None else find_leaf(subject.batch, weights)
    random = torch.Generator().manual_seed(seed)
    read = read_splits(subject.rows, splits, random)
    with torch.inference_mode(False), preserving_random(), uncompiled():
        seen = _watched(subject, loop)
        if isinstance(seen, int):
            return _of_terms(seen, **given)
        setting = subject.setting._replace(generators=seen.generators)
        subject = subject._replace(weighted=seen.weighted, kept=seen.kept, setting=setting)
        subjects = [subject]
        if masked is not None:
            subjects += [redrawn(subject, masked, random) for _ in range(3)]
        with preserving_random(seen.generators):
            report = _examine(subjects, seen, loop, read, reference, finite_differences)
    if raise_on_mismatch and not report.fits:
        raise AccumulationMismatch(report)
    return report


def _watched(subject: Subject, loop: Loop | None) -> Seen | int:
    """What was seen of a loss; of a sum of ``Weighted`` how many terms it has."""
    try:
        return watch(subject, kept.names_of(subject.loss_fn, loop))
    except terms.UncountedError as error:
        if loop is not None:
            raise
        return error.args[0]


def _of_terms(count: int, loss_fn: Any, raise_on_mismatch: bool, **given: Any) -> Report:
    """Of a sum of ``Weighted``: the first term that does not fit, or the one that is worst."""
    __tracebackhide__ = True  # of pytest
    found: list[Report] = []
    for i in range(count):
        one = one_term(loss_fn, i, count, given["has_aux"])
        try:
            found.append(check_accumulation(one, raise_on_mismatch=False, **given))
        except Exception as error:
            error.add_note(f"pureaccum: this is term {i} of the loss, a sum of {count} Weighted.")
            raise
        if not found[-1].fits:
            said = [x._replace(says=f"in term {i}, {x.says}") for x in found[-1].diagnoses]
            found[-1] = found[-1]._replace(diagnoses=tuple(said))
            break
    worst = max(found, key=lambda it: (not it.fits, max(leaf.error for leaf in it.leaves)))
    worst = worst._replace(loss="sum of Weighted")
    if raise_on_mismatch and not worst.fits:
        raise AccumulationMismatch(worst)
    return worst


def assert_accumulates(  # noqa: D417
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    *,
    has_aux: bool = False,
    reduction: losses.Reduction = "mean",
    loop: Loop | None = None,
    splits: int | Sequence[Sequence[int]] = 8,
    weights: str | None = None,
    reference: Reference = "float64",
    finite_differences: bool = False,
    seed: int = 0,
) -> None:
    """Raise ``AccumulationMismatch`` if a loss cannot be cut into microbatches.

    The rule: ``check_accumulation(loss_fn, params, batch, ...)``, without the report.

    Args:
        loss_fn, params, batch, has_aux, reduction, loop, splits, weights, reference,
            finite_differences, seed: As for ``check_accumulation``.

    Raises:
        AccumulationMismatch: The loss does not fit; ``error.report`` says why.

    Example:
        >>> x = torch.arange(6.0).reshape(3, 2)
        >>> assert_accumulates(lambda w, x: ((x @ w) ** 2).mean(), torch.ones(2), x)
        >>> assert_accumulates(lambda w, x: (x @ w).mean() ** 2, torch.ones(2), x)
        Traceback (most recent call last):
        pureaccum.testing.AccumulationMismatch: does not fit: 2 of 2 leaves are off ...
    """
    given = locals()
    __tracebackhide__ = True  # of pytest
    check_accumulation(**given)


# What is given ---------------------------------------------------------------------------


def read_subject(loss_fn: Any, params: Any, batch: Any, seeds: Iterator[int]) -> Subject:
    """The loss and its arguments, or what is wrong with them."""
    if not callable(loss_fn):
        raise TypeError(
            f"loss_fn is of type {type(loss_fn).__name__}; expected a function of (params, batch)."
        )
    checks.read_params(params)
    flat = batches.read_batch(batch)
    layouts = {x.layout for x in flat.leaves if isinstance(x, Tensor)}
    # A check takes samples one by one, which torch can do of COO tensors, too.
    need_two(
        batches.need_rows(flat)
        if torch.sparse_coo in layouts
        else batches.rows_to_cut(flat, one_by_one=True)
    )
    return Subject(loss_fn=loss_fn, params=params, batch=flat, seeds=seeds)


def need_two(rows: int) -> None:
    """Raise where there are too few samples to cut."""
    if rows < 2:
        raise ValueError(
            f"batch has {rows} sample{'s' * (rows != 1)}; expected at least two, because one "
            "cannot be split."
        )


def read_splits(rows: int, splits: Any, random: torch.Generator) -> list[Split]:
    """The splits that are asked for, or what is wrong with them."""
    if isinstance(splits, int) and splits > 0 and not isinstance(splits, bool):
        return ways(rows, splits, random)
    if not isinstance(splits, Sequence) or isinstance(splits, str) or not splits:
        raise ValueError(
            f"splits is {splits!r}; expected a number of random splits to try, or the splits "
            "themselves: [[4, 4], [7, 1]]."
        )
    for sizes in splits:  # pyright: ignore[reportUnknownVariableType]
        whole = isinstance(sizes, Sequence) and all(isinstance(size, int) for size in sizes)
        if not whole or len(sizes) < 2 or min(sizes) < 1 or sum(sizes) != rows:
            raise ValueError(
                f"splits holds {sizes!r}; expected sizes of at least two microbatches that add up "
                f"to {rows}, the samples of the batch."
            )
    return [split_at(tuple(range(rows)), itertools.accumulate(sizes)) for sizes in splits]


def find_leaf(batch: batches.Batch, name: str) -> int:
    """The position of the leaf of a batch that a path, or the last key of a path, names."""
    names = trees.paths(batch.spec, "batch")
    endings = (name, f"batch{name}", f"batch[{name!r}]")
    found = [i for i, path in enumerate(names) if path in endings]
    if not found or not isinstance(batch.leaves[found[0]], Tensor):
        raise ValueError(
            f"weights is {name!r}, which is not a tensor of the batch; expected one of "
            f"{', '.join(names)}."
        )
    return found[0]


# What is done ----------------------------------------------------------------------------


def _examine(
    subjects: list[Subject],
    seen: Seen,
    loop: Loop | None,
    splits: list[Split],
    reference: Reference,
    finite_differences: bool,
) -> Report:
    """Try all splits of one loss on some batches, find the causes, and then try the loop."""
    subject, names = (
        subjects[0],
        ["value", *trees.paths(trees.flatten(subjects[0].params)[1], "params")],
    )
    tried = [_comparable_trial(each, seen.narrowest, reference) for each in subjects]
    sound = _try_all(tried, splits)
    times = 12 if seen.draws or seen.assigned else 1
    draws, keeps = trials.repeats(tried[0].subject, trials.whole_batch, tried[0].bound, times)
    found, overflow = _compared(
        tried,
        splits,
        sound,
        lambda split: trials.accumulated(subject, split).leaves,
        lambda: trials.whole_batch(subject).leaves,
    )
    case = diagnosis.Case(
        subject=subject,
        trial=next((trial for trial in tried if not trial.fits(splits)), tried[0]),
        seen=seen,
        splits=splits,
        draws=draws,
        keeps=keeps,
        overflow="" if overflow is None else names[overflow],
        worst=found.worst,
    )
    causes = diagnosis.diagnose(case)
    if finite_differences and not causes:
        causes = tuple(diagnosis.wrong_derivatives(tried[0].subject))
    if loop is not None:
        with _advising(reference):
            run_loop(loop, tried[0].subject, splits[0])  # what it raises comes through
        found, names = _loop_compared(loop, tried, splits, sound, subject), names[1:]
        cause = None if causes else _cause_of_loop(loop, found, case, reference)
        causes = (cause,) if cause else causes
    if reference == "native":  # the full batch's own error is not known
        found = found._replace(native=[math.nan] * len(names))
    loss = "Weighted" if seen.weighted else subject.reduction
    return found.report(
        names,
        causes,
        loss,
        seen.dtype,
        trials.name_of(seen.dtype) if reference == "native" else reference,
    )


def _compared(
    tried: list[trials.Trial],
    splits: list[Split],
    sound: list[Split],
    run: Callable[[Split], list[Tensor]],
    alone: Callable[[], list[Tensor]],
) -> tuple[trials.Comparison, int | None]:
    """All splits beside the full batch, and the sound ones in the loss's own dtypes."""
    full = tried[0].whole(tried[0].subject.everything())
    worst = trials.worst_of(tried, splits, len(full))
    native, overflow = trials.compare_natively(run, alone, full, sound)
    return trials.Comparison(tried, splits, worst, native), overflow


def _loop_compared(
    loop: Loop, own: list[trials.Trial], splits: list[Split], sound: list[Split], subject: Subject
) -> trials.Comparison:
    tried = [trial_of_loop(loop, trial) for trial in own]
    return _compared(
        tried,
        splits,
        [split for split in _try_all(tried, splits) if split in sound],
        lambda split: run_loop(loop, subject, split),
        lambda: trials.whole_batch(subject).leaves[1:],
    )[0]


def _comparable_trial(
    subject: Subject, narrowest: torch.dtype, reference: Reference
) -> trials.Trial:
    with _advising(reference):
        native = reference == "native"
        trial = trials.native_trial(subject, narrowest) if native else trials.trial_of(subject)
    full: list[Tensor] = trial.whole(subject.everything())
    if not trees.all_finite(full):
        raise ValueError(
            f"the loss of the whole batch is {float(full[0]):g} in {reference}, and its gradient "
            f"is {'' if trees.all_finite(full[1:]) else 'not '}finite, so there is nothing to "
            "compare with."
        )
    return trial


def _try_all(tried: list[trials.Trial], splits: list[Split]) -> list[Split]:
    """Try all splits; returns those among the fixed ones that give finite numbers."""
    for trial in tried:
        for split in splits:
            trial.outcome(split)
    return [split for split in splits[:3] if max(tried[0].outcome(split).errors) < math.inf]


def _cause_of_loop(
    loop: Loop, found: trials.Comparison, case: diagnosis.Case, reference: Reference
) -> Diagnosis | None:
    """What is wrong with a loop where nothing is wrong with the loss."""
    cause = of_loop(loop, found.trials[0], wrong=not found.fits)
    if cause or found.fits:
        return cause
    if reference == "float64" and trials.is_rounding(found.native):
        raise ValueError(
            f"the loop computes in {trials.name_of(case.seen.dtype)} whatever it gets, and is as "
            "near to float64 as that can be. Likely cause: it uses a module's own parameters. To "
            "compare it in its own dtype, pass reference='native'."
        )
    return trials.raises(found.trials[0], case.splits) or diagnosis.UNKNOWN


@contextmanager
def _advising(reference: Reference) -> Generator[None]:
    """Add to what a loss raises in float64 what to do about it."""
    try:
        yield
    except Exception as error:
        if reference == "float64":
            error.add_note(
                "pureaccum: the loss runs in its own dtypes, but not in float64, in which the "
                "check compares gradients. Likely cause: it checkpoints, or keeps or needs its "
                "own dtype. Switch that off for the check, or pass reference='native'."
            )
        raise
