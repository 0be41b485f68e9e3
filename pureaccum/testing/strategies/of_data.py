"""A loss that normalises its data by the batch: with the statistics of the whole one, does it fit?

Means, deviations and extremes over rows are noted while the loss sees the whole batch, where they
are the same for other parameters. Then each microbatch is told these in place of its own.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..._base.trees import leaves, map
from ..._core.loss import Reduction
from .._check.caller import Call, users_line
from .._check.cuts import Parts
from .._check.report import Diagnosis
from .._check.subject import Subject
from .._check.trials import Trial, trial_of


STATISTICS = {"mean", "nanmean", "std", "var", "std_mean", "var_mean", "amax", "amin", "max", "min"}
TRIES: tuple[tuple[set[str], Reduction | None], ...] = (  # what is told, and what the loss is then
    (STATISTICS, None),
    (STATISTICS | {"sum"}, None),
    (STATISTICS | {"sum"}, "sum"),  # divided by a count of the whole batch
)
Noted = list[tuple[Call, Any]]


def of_data(trial: Trial, outcomes: Iterable[Parts], seeds: Iterator[int]) -> list[Diagnosis]:
    """What it normalises with, if nothing else is wrong."""
    if trial.subject.dtype is None:
        return []
    found = (_fits(trial.subject, names, then, outcomes, seeds) for names, then in TRIES)
    where = next((where for where in found if where), "")
    if not where:
        return []
    return [
        Diagnosis(
            "data statistics",
            f"the loss takes statistics of its data over the rows of a microbatch: {where}. With "
            "those of the whole batch it fits.",
            'batch["gain"] = (gain - gain.mean()) / gain.std()  # before the batch is cut, not in '
            "the loss",
        )
    ]


def _fits(
    subject: Subject,
    names: set[str],
    then: Reduction | None,
    outcomes: Iterable[Parts],
    seeds: Iterator[int],
) -> str:
    """What it takes of its data, if it fits with those of the whole batch; else nothing."""
    seed = next(seeds)
    try:
        noted = _noted(subject, names, seed)
        others = _noted(subject._replace(params=map(lambda x: -x, subject.params)), names, seed)
        if not noted or not _same(noted, others):
            return ""

        def told(params: Any, part: Any) -> Any:
            rest = iter(noted)
            with _Statistics(names, lambda call, own: next(rest)[1]):
                return subject.loss_fn(params, part)

        fixed = subject._replace(loss_fn=told, reduction=then or subject.reduction)
        trial = trial_of(fixed, subject.dtype or torch.float64, seeds)
        if any(max(trial.outcome(parts).errors) > 1 for parts in outcomes):
            return ""
    except Exception:
        return ""
    return ", ".join(dict.fromkeys(call.where for call, _ in noted))


def _noted(subject: Subject, names: set[str], seed: int) -> Noted:
    """The statistics that a loss takes of the whole batch."""
    noted: Noted = []

    def note(call: Call, own: Callable[[], Any]) -> Any:
        noted.append((call, own()))
        return noted[-1][1]

    def noting(params: Any, part: Any) -> Any:
        with _Statistics(names, note):
            return subject.loss_fn(params, part)

    subject._replace(loss_fn=noting).sums(subject.everything(), seed)
    return noted


def _same(noted: Noted, others: Noted) -> bool:
    values, more = (leaves([own for _, own in each]) for each in (noted, others))
    pairs = zip(values, more, strict=True)
    return all(x.equal(y) for x, y in pairs)


class _Statistics(TorchFunctionMode):
    """Hands on what ``told`` makes of each statistic over rows of what has no gradient."""

    def __init__(self, names: set[str], told: Callable[[Call, Callable[[], Any]], Any]) -> None:
        super().__init__()
        self.names, self.told = names, told

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name not in self.names or not _over_rows(*args, **kwargs):
            return func(*args, **kwargs)
        return self.told(Call(name, "", "", "", users_line()), lambda: func(*args, **kwargs))


def _over_rows(input: Any, dim: Any = None, *args: Any, **kwargs: Any) -> bool:
    if not isinstance(input, Tensor) or isinstance(dim, Tensor) or input.requires_grad:
        return False
    dim = kwargs.get("axis", dim)
    if dim is None or isinstance(dim, bool):  # or it is the correction
        return True
    dims = dim if isinstance(dim, (tuple, list)) else (dim,)
    return any(each % max(input.dim(), 1) == 0 for each in dims)
