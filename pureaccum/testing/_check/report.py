"""The result of a check: how far off each leaf is, why, and which line of code fixes it.

``print(report)`` is a table; ``report.fits`` is the verdict.
"""

from textwrap import wrap
from typing import NamedTuple

from ..._base import reprs


Indices = tuple[int, ...]  # of samples of the batch
Split = tuple[Indices, ...]  # the samples of each microbatch


class Leaf(NamedTuple):
    """The error of one leaf of the gradient, or of the value.

    Attributes:
        path: The leaf as you would write it: ``params['layer'].weight``, or ``value``.
        error: The largest difference from the full batch, in units of the bound that
            ``check_accumulation`` states. Above 1 it is not rounding. Inf if a microbatch raised,
            or gave an inf or a NaN.
        split: The smallest split found that still shows the error: for each microbatch, the indices
            of its samples. Their accumulated gradient is compared with the gradient of the same
            samples at once. Empty if the leaf fits.
        native: The error of the accumulated gradient in the loss's own dtypes, relative to the full
            batch's own error. About 1 is as good as possible; NaN if it is not known.

    Example:
        >>> Leaf("params['w']", 250.0, ((0,), (3,)), 1.0).split
        ((0,), (3,))
    """

    path: str
    error: float
    split: Split
    native: float


class Diagnosis(NamedTuple):
    """A cause of a mismatch, found by an experiment.

    Attributes:
        kind: ``"batch statistics"``, ``"randomness"``, ``"state"``, ``"batch coupling"``,
            ``"data statistics"``, ``"several means"``, ``"mean of means"``, ``"weight"``,
            ``"sum as mean"``, ``"mean as sum"``, ``"constant term"``, ``"overflow"``,
            ``"raises"`` or ``"wrong derivative"``. For a loop also ``"gradients zeroed"``, ``"tail
            dropped"``, ``"factor"`` and ``"wrong weights"``. For a loop with an optimizer also
            ``"steps"``, ``"clips nothing"``, ``"changed one by one"`` and ``"optimizer
            statistics"``. Or ``"unknown"``.
        says: The finding of the experiment, as a sentence.
        mend: The line of code that fixes it.

    Example:
        >>> says = "it is a mean and was declared a sum."
        >>> Diagnosis("mean as sum", says, mend='reduction="mean"').kind
        'mean as sum'
    """

    kind: str
    says: str
    mend: str


class Report(NamedTuple):
    """The result of ``check_accumulation``; it prints as a table.

    Attributes:
        fits: Whether the accumulated gradient is the full batch's, and the loss a pure function.
        leaves: The value and every leaf of the gradient.
        diagnoses: The causes, if it does not fit.
        samples: The number of samples in the batch.
        splits: The number of splits tried.
        loss: What the loss is of samples: ``"mean"``, ``"sum"``, ``"Weighted"`` or ``"sum of
            Weighted"``; or ``"loop"``.
        dtype: The loss's own dtype.
        reference: The dtype in which gradients were compared.

    Example:
        >>> import torch
        >>> from pureaccum.testing import check_accumulation
        >>> w, x = torch.ones(()), torch.arange(8.0)
        >>> print(check_accumulation(lambda w, x: (w * x).mean(), w, x))
        fits: every leaf is the full batch's (a mean over 8 samples, 12 splits, in float64)
        <BLANKLINE>
        leaf    error / bound  float32 / full
        value               0               1
        params              0               1
        <BLANKLINE>
        error / bound: above 1, it is not rounding.
        float32 / full: the error in float32, relative to the full batch's own.
    """

    fits: bool
    leaves: tuple[Leaf, ...]
    diagnoses: tuple[Diagnosis, ...]
    samples: int
    splits: int
    loss: str
    dtype: str
    reference: str

    __repr__ = reprs.of_record

    def __str__(self) -> str:
        return "\n".join(_lines(self))


class AccumulationMismatch(AssertionError):
    """The accumulated gradient is not the full batch's; ``report`` says where and why.

    Args:
        report: The result of the check; its text is the message.

    Attributes:
        report: The result of the check.

    Example:
        >>> import torch
        >>> from pureaccum.testing import check_accumulation
        >>> check_accumulation(lambda w, x: (w * x).sum(), torch.ones(()), torch.ones(8))
        Traceback (most recent call last):
        pureaccum.testing.AccumulationMismatch: does not fit: 2 of 2 leaves are off ...
    """

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report


# As a table ------------------------------------------------------------------------------


_MOST_LEAVES = 12
_WIDEST = 48  # characters of a split


def _lines(report: Report) -> list[str]:
    wrong = [leaf for leaf in report.leaves if not leaf.error <= 1]
    kind = "Weighted mean" if report.loss == "Weighted" else report.loss
    over = f"a {kind} over {report.samples} samples, {report.splits} splits, in {report.reference}"
    head = ("leaf", "error / bound", f"{report.dtype} / full", "smallest split that shows it")
    worst = sorted(report.leaves, key=lambda leaf: -leaf.error)[:_MOST_LEAVES]
    rows = [
        (leaf.path, _short(leaf.error), _short(leaf.native), _split_text(leaf.split))
        for leaf in report.leaves
        if leaf in worst
    ]
    if not wrong:
        head, rows = head[:3], [row[:3] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [f"{_verdict(report, wrong)} ({over})", ""]
    for row in (head, *rows):
        path, *numbers = (x.rjust(w) for x, w in zip(row[:3], widths, strict=False))
        lines.append("  ".join([path.strip().ljust(widths[0]), *numbers, *row[3:]]).rstrip())
    if len(report.leaves) > _MOST_LEAVES:
        lines.append(f"… and {len(report.leaves) - _MOST_LEAVES} more, none of them worse")
    lines += [
        "",
        "error / bound: above 1, it is not rounding.",
        f"{report.dtype} / full: the error in {report.dtype}, relative to the full batch's own.",
    ]
    for diagnosis in report.diagnoses:
        lines += ["", *wrap(f"{diagnosis.kind}: {diagnosis.says}", 100), f"    {diagnosis.mend}"]
    return lines


def _verdict(report: Report, wrong: list[Leaf]) -> str:
    if report.fits:
        return "fits: every leaf is the full batch's"
    if wrong:
        return f"does not fit: {len(wrong)} of {len(report.leaves)} leaves are off"
    return "does not fit, though every leaf agrees"


def _short(x: float) -> str:
    return "–" if x != x else f"{x:.3g}" if 0.01 <= x < 1000 or not x else f"{x:.1e}"


def _split_text(split: Split) -> str:
    """``samples 0 3 | 5``, a bar between microbatches; or how many samples, where they are many."""
    rows = " | ".join(" ".join(map(str, part)) for part in split)
    if len(rows) > _WIDEST:
        return " | ".join(f"{len(part)} samples" for part in split)
    return f"samples {rows}" if split else ""
