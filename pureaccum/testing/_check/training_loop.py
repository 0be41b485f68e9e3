"""Does a user's training loop over a module and an optimizer of torch depend on the cut?

    moved(parts) = parameters after the loop over these microbatches, minus those before
    it fits: moved(any parts of the batch) == moved([the batch]), in float64, but for rounding

The loop is its own reference: its result on the whole batch as one microbatch. The optimizer's step
is part of it, so errors in squares and norms of microbatch gradients show.
"""

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..._base import checks, trees
from ..._core import batches
from . import check, diagnosis, trials
from .loop import fitted, mistake
from .report import AccumulationMismatch, Diagnosis, Report, Split
from .subject import BATCH_NORM, DROPOUTS, Subject, preserving_random, uncompiled, uneven


TrainingLoop = Callable[[nn.Module, torch.optim.Optimizer, list[Any]], object]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def check_training_loop(
    loop: TrainingLoop,
    model: nn.Module,
    batch: Any,
    *,
    optimizer: MakeOptimizer | None = None,
    max_norm: float | None = None,
    splits: int | Sequence[Sequence[int]] = 8,
    seed: int = 0,
    raise_on_mismatch: bool = True,
) -> Report:
    """Find out whether a loop over a module and a torch optimizer depends on how a batch is cut.

    The rule, for copies of the model in float64, parameter by parameter::

        it fits: loop over any microbatches moves it as the loop over the whole batch in one

    The batch is cut as by ``check_accumulation``, which is for losses, and for loops that are
    functions of parameters. Then experiments look for the cause.

    Args:
        loop: ``loop(model, optimizer, microbatches)`` runs one window of your loop, from the first
            forward pass to ``optimizer.step()``. ``microbatches`` is a list, sometimes with the
            whole batch as its only entry.
        model: The module; each call gets a copy of it.
        batch: A pytree whose tensors have one row per sample along dim 0; at least two samples.
        optimizer: ``optimizer(parameters)`` makes a new optimizer for each call. The default is
            ``torch.optim.SGD(parameters, lr=1.0)``, which moves parameters by the gradient.
        max_norm: The norm to which your loop clips. The check is then also that no larger gradient
            reaches the optimizer. Choose a norm that the gradient of this batch exceeds.
        splits: The number of random splits to try besides the fixed ones; or the splits themselves,
            lists of sizes that sum to the samples.
        seed: The seed of the splits, and of the random numbers that the loop draws.
        raise_on_mismatch: False returns the report even if the loop does not fit.

    Returns:
        A ``Report``, whose leaves are the parameters that require a gradient.

    Raises:
        AccumulationMismatch: The loop does not fit; ``error.report`` is the report.

    Example:
        >>> def train(model, optimizer, microbatches):
        ...     for x, y in microbatches:
        ...         loss = ((model(x) - y) ** 2).mean() / len(microbatches)
        ...         loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> batch = torch.arange(12.0).reshape(6, 2).sin(), torch.ones(6, 1)
        >>> report = check_training_loop(
        ...     train, torch.nn.Linear(2, 1), batch, raise_on_mismatch=False
        ... )
        >>> report.fits, report.diagnoses[0].kind
        (False, 'mean of means')
    """
    __tracebackhide__ = True  # of pytest
    given = _read(loop, model, batch, optimizer, max_norm)
    random = torch.Generator().manual_seed(seed)
    split_in = check.read_splits(given.subject.rows, splits, random)
    with torch.inference_mode(False), preserving_random(), uncompiled():
        report = given.examined(split_in)
    if raise_on_mismatch and not report.fits:
        raise AccumulationMismatch(report)
    return report


def _read(
    loop: Any, model: Any, batch: Any, optimizer: Any, max_norm: float | None
) -> "_Examination":
    if not callable(loop):
        raise TypeError(
            f"loop is of type {type(loop).__name__}; expected loop(model, optimizer, microbatches)."
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is of type {type(model).__name__}; expected a torch.nn.Module.")
    if optimizer is not None and (
        isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer)
    ):
        raise TypeError(
            f"optimizer is of type {type(optimizer).__name__}; expected a function that makes a "
            "new one for each call: lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)."
        )
    if max_norm is not None:
        max_norm = checks.check_number(
            max_norm, "max_norm", "a number above zero", lambda it: it > 0
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("model has no parameter that requires a gradient, so nothing would move.")
    flat = batches.read_batch(batch)
    check.need_two(batches.rows_to_cut(flat, one_by_one=True))
    subject = Subject(loss_fn=loop, params={}, batch=flat, seeds=itertools.repeat(0))
    return _Examination(subject, model, cast(Any, optimizer), max_norm)


def _plain_sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


class _Examination:
    """The calls of a loop, and what they show."""

    def __init__(
        self, subject: Subject, model: nn.Module, make: MakeOptimizer | None, max_norm: float | None
    ) -> None:
        self.subject, self.model = subject, model
        self.make, self.max_norm = make or _plain_sgd, max_norm
        named = [name for name, p in model.named_parameters() if p.requires_grad]
        self.names = [f"model.{name}" for name in named]
        self.steps = 0  # of the last call
        self.norm = 0.0  # of the gradients at its last step

    def gradients(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, subject: Subject, split: Split
    ) -> list[list[Tensor]]:
        """Those at each step of a loop over some microbatches."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        seen: list[list[Tensor]] = []

        def note(*_: Any) -> None:
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            seen.append([g.detach().clone() for g in grads])

        microbatches = [subject.arguments(rows)[1] for rows in split]
        with subject.running(0), torch.enable_grad(), optimizer.register_step_pre_hook(note):
            subject.loss_fn(model, optimizer, microbatches)
        return seen

    def moved(self, subject: Subject, split: Split) -> trials.Result:
        """How the parameters move in a loop over some microbatches."""
        model = copy.deepcopy(self.model).to(subject.dtype)
        parameters = [p for p in model.parameters() if p.requires_grad]
        before = [p.detach().clone() for p in parameters]
        grads = self.gradients(model, self.make(parameters), subject, split)
        self.steps = len(grads)
        self.norm = math.hypot(*(float(trees.norm(g)) for g in grads[-1])) if grads else 0.0
        return trials.Result(
            [p.detach() - x for p, x in zip(parameters, before, strict=True)], sizes=[]
        )

    def trial(self, subject: Subject) -> trials.Trial:
        """The loop over microbatches beside the loop over the whole batch, in float64."""
        trial = trials.trial_by(self.moved, subject.in_dtype(torch.float64))
        full = trial.whole(subject.everything())
        lost = trials.lost_in_float32(self.moved, subject, full)
        # A move that is nothing but rounding is not judged: an optimizer that divides by the size
        # of a gradient makes a whole step of one that is zero on paper, such as that of a bias
        # below a softmax.
        sizes = [float(trees.norm(x)) for x in full]
        lost = [math.inf if x > 0.1 * size else x for x, size in zip(lost, sizes, strict=True)]
        return trial._replace(bound=trials.bound_of(lost))

    def examined(self, splits: list[Split]) -> Report:
        """Try all splits, and find the cause."""
        trial = self.trial(self.subject)
        full = trial.whole(self.subject.everything())
        self.moved(trial.subject, (self.subject.everything(),))
        self.check_moved(full)
        alone = [self.unclipped(), self.kept(trial.subject)]  # seen in the whole batch
        worst = trials.worst_of([trial], splits, len(self.names))
        found = trials.Comparison([trial], splits, worst, [math.nan] * len(self.names))
        causes = [it for it in (None if found.fits else self.cause(trial, splits), *alone) if it]
        dtype = next(p for p in self.model.parameters() if p.requires_grad).dtype
        return found.report(self.names, causes, "loop", dtype, "float64")

    def check_moved(self, full: list[Tensor]) -> None:
        if not self.steps:
            raise ValueError(
                "the loop never called optimizer.step() of the optimizer that it got, so there is "
                "nothing to compare. Likely cause: it uses another one."
            )
        if not trees.all_finite(full):
            raise ValueError(
                "the parameters become inf or NaN in float64 over the whole batch, so there is "
                "nothing to compare with."
            )
        if not any(bool(x.any()) for x in full):
            raise ValueError(
                "no parameter moves over the whole batch. Likely cause: the loop trains another "
                "model than the one that it gets, or zeroes the gradients before the step."
            )

    def unclipped(self) -> Diagnosis | None:
        if self.max_norm is None or self.norm <= self.max_norm * (1 + 1e-6):
            return None
        return Diagnosis(
            "clips nothing",
            f"gradients of norm {self.norm:.4g} reach the optimizer, but max_norm is "
            f"{self.max_norm:g}: the loop clips other gradients than those that it steps with.",
            "torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)  # parameters, after the "
            "last backward (and scaler.unscale_), before the step",
        )

    def kept(self, subject: Subject) -> Diagnosis | None:
        """What an earlier window leaves behind: seen where no parameter moves in between."""
        model = copy.deepcopy(self.model).to(subject.dtype)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
        whole = (subject.everything(),)
        try:
            seen = [g for _ in range(2) for g in self.gradients(model, optimizer, subject, whole)]
        except Exception:
            return None  # a loop for another kind of optimizer
        first, last = (torch.cat([g.flatten() for g in grads]) for grads in (seen[0], seen[-1]))
        return None if float(trees.norm(last - first)) <= 1e-6 * float(trees.norm(first)) else _KEPT

    def cause(self, trial: trials.Trial, splits: Sequence[Split]) -> Diagnosis:
        """What is wrong with a loop that does not fit."""
        for functions, found in (
            (frozenset({BATCH_NORM}), _STATISTICS),
            (frozenset(DROPOUTS), _DROPOUT),
        ):
            if self.fits(self.subject.leaving_out(functions), splits):
                return found
        rows = trial.subject.everything()
        split = uneven(rows)
        try:
            result = trial.accumulate(split).leaves
            if self.steps > 1:
                return _STEPS
            each = [trial.whole(part) for part in split]
        except Exception:
            return diagnosis.UNKNOWN
        shares = [len(part) / len(rows) for part in split]
        factors = fitted(each, result)
        if factors is not None:
            certain = sum(x.numel() for x in result) > len(split)
            linear = fitted(each, trial.whole(rows)) is not None
            return mistake(factors, shares, False, certain) or (_BY_ROWS if linear else _CHANGED)
        plain = _Examination(self.subject, self.model, None, None)
        if self.make is not _plain_sgd and plain.fits(self.subject, splits):
            return _OPTIMIZER  # the gradients that reach it are right
        return diagnosis.UNKNOWN

    def fits(self, subject: Subject, splits: Sequence[Split]) -> bool:
        """Whether the loop fits on such a subject; not where it raises."""
        try:
            return self.trial(subject).fits(splits)
        except Exception:
            return False


_STATISTICS = Diagnosis(
    "batch statistics",
    "the mean and variance of a microbatch are not the batch's; without batch norm the loop fits.",
    "norm.eval()  # each batch norm; or GroupNorm; or pa.functional(module, microbatch_size=...)",
)
_DROPOUT = Diagnosis(
    "randomness",
    "other microbatches get other masks from dropout; without it the loop fits.",
    "model.eval()  # for the check; or pa.dropout(x, p, keys), with a key for each sample",
)
_STEPS = Diagnosis(
    "steps",
    "the loop calls optimizer.step() more than once in a window: each microbatch is a batch.",
    "optimizer.step()  # once, after the last microbatch",
)
_KEPT = Diagnosis(
    "state",
    "a second window of the loop, with the same parameters and the same batch, gives the optimizer "
    "other gradients: those of the first are still there.",
    "optimizer.zero_grad()  # before the first microbatch of every window, or after the step",
)
_BY_ROWS = Diagnosis(
    "weight",
    "every microbatch counts by its samples, and the loss is a mean over something else: tokens, "
    "what a mask leaves.",
    "loss = total / tokens_of_the_window  # counted over all microbatches before the first",
)
_CHANGED = Diagnosis(
    "changed one by one",
    "the loop changes the gradient of each microbatch separately (clips, projects or compresses "
    "it), which differs from changing their sum once.",
    "total += grad  # over all microbatches; and then, once, what is done to it",
)
_OPTIMIZER = Diagnosis(
    "optimizer statistics",
    "the gradients that reach the optimizer are right, but its step is not: it gets squares, "
    "norms or projections of microbatches, whose sum is not that of the whole gradient's.",
    "exp_avg_sq += grad**2  # of the sum over all microbatches, once",
)
