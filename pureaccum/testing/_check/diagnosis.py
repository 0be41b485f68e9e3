"""Why a loss does not fit: randomness, state and normalisation first, then how its samples combine.

Random numbers and state make experiments worthless, so they come first. Dropout and batch
normalisation are disabled to see whether they alone are to blame. If samples depend on each other,
the last question is whether statistics of the data are the cause: those over all samples of the
batch are recorded, and each microbatch gets these in place of its own.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from ..._base import checks, refusals, trees
from ..._core import differences, losses
from ...curvature import hvp
from . import kept, report, rows, trials, watch
from .subject import BATCH_NORM, DROPOUTS, Subject


class Case(NamedTuple):
    """What a check found out."""

    subject: Subject  # in its own dtypes
    trial: trials.Trial
    seen: watch.Seen
    splits: Sequence[report.Split]
    draws: bool  # other random numbers give another result
    keeps: bool  # a second call gives another result
    overflow: str  # the leaf that is not finite in the loss's own dtypes
    worst: Sequence[tuple[float, trials.Trial, report.Split]]  # of each leaf

    @property
    def shown(self) -> list[report.Split]:
        """Small splits that show what is wrong."""
        return list(dict.fromkeys(it for _, its, it in self.worst if it and its is self.trial))


UNKNOWN = report.Diagnosis(
    "unknown",
    "no experiment tells why.",
    "pa.grad(loss, microbatch_size=None)  # the full batch at once",
)


def diagnose(case: Case) -> tuple[report.Diagnosis, ...]:
    """The causes; none where all is well."""
    causes = [*_state(case), *_random(case), *_overflow(case)]
    if case.trial.fits(case.splits):
        return tuple(causes)
    rest, fits = _rest(case)
    causes += _batch_statistics(case, fits)
    if rest is not None and not fits:
        found = rows.of_rows(rest, case.splits, case.shown)
        if any(cause.kind == "batch coupling" for cause in found):
            found = [*_suspects(case)] or [*_data_statistics(rest, case.splits)] or found
        causes += found
    return tuple(causes) or (UNKNOWN,)


def _rest(case: Case) -> tuple[trials.Trial | None, bool]:
    """A trial of the loss without dropout and batch norms, and whether it fits.

    None where that cannot be told.
    """
    without = {BATCH_NORM} if case.seen.batch_norms else set()
    without |= {call.function for call in case.seen.draws} & DROPOUTS
    if not without or case.trial.subject.dtype is None:
        return None if case.draws or case.keeps else case.trial, False
    subject = case.subject.leaving_out(frozenset(without))
    try:
        trial = trials.trial_of(subject)
        if any(trials.repeats(trial.subject, trials.whole_batch, trial.bound, 1)):
            return None, False
        return trial, trial.fits(case.splits)
    except Exception:
        return None, False


# What it draws, keeps and normalises with -----------------------------------------------


_ARGUMENT = "def loss(params, batch): ...  # what changes comes in as an argument, or in the batch"


def _written(case: Case) -> list[watch.Written]:
    """What is written to, but for running statistics, which have a diagnosis of their own."""
    norms = {call.module for call in case.seen.batch_norms} - {""}
    found = (w for w in case.seen.written if w.by.module not in norms)
    return [w for w in found if w.by.function != BATCH_NORM]


def _state(case: Case) -> Iterator[report.Diagnosis]:
    written = _written(case)
    held = [w for w in written if not w.given]
    if given := _listed([w.name for w in written if w.given]):
        yield report.Diagnosis(
            "state",
            f"the loss changes its argument {given} in place: microbatches are views, so the "
            "caller's batch changes with them.",
            "x = x.clone()  # or the operation without its underscore: x.mul(2) for x.mul_(2)",
        )
    if held:
        by_module = all(w.by.module for w in held)
        yield report.Diagnosis(
            "state",
            f"the loss writes to {_listed([w.name for w in held])}, which it holds: once for "
            "every microbatch, instead of once for the batch.",
            "out, new_buffers = pa.functional(module).apply(params, buffers, x)  # in and out: "
            "make_step(..., buffers=...)"
            if by_module
            else "return loss, aux  # has_aux=True: hand out what it needs, and write after the "
            "step, outside of the loss",
        )
    if case.keeps:
        what = _listed(case.seen.assigned) or "a generator of its own?"
        yield report.Diagnosis(
            "state",
            "calls with the same arguments and the same random numbers differ: the loss keeps "
            f"something from call to call ({what}).",
            _ARGUMENT,
        )


def _random(case: Case) -> Iterator[report.Diagnosis]:
    if case.draws:
        yield report.Diagnosis(
            "randomness",
            "two calls with the same arguments differ, and agree with the same random seed: other "
            "microbatches get other numbers from "
            f"{_callers(case.seen.draws) or 'a generator that is not torch’s'}.",
            _keys(case),
        )


def _keys(case: Case) -> str:
    if any(call.function in DROPOUTS for call in case.seen.draws):
        return "x = pa.dropout(x, 0.5, keys)  # a key per row: make_step(..., keys=True); or eval()"
    return 'batch["noise"] = torch.randn(...)  # drawn before the batch is cut; or pa.normal, keys'


def _overflow(case: Case) -> Iterator[report.Diagnosis]:
    if case.overflow:
        yield report.Diagnosis(
            "overflow",
            f"{case.overflow} of a microbatch is inf or NaN in "
            f"{str(case.seen.dtype).removeprefix('torch.')}, and finite in float64.",
            "out = out.float()  # before the loss; or bfloat16: "
            "make_step(..., policy=pa.Policy(compute=torch.bfloat16))",
        )


def _batch_statistics(case: Case, fits: bool) -> Iterator[report.Diagnosis]:
    if not case.seen.batch_norms:
        return
    first = case.seen.batch_norms[0]
    other = "; without it the loss fits" if fits else ""
    eval_ = f"{first.root}.get_submodule({first.path!r})" if first.path else first.root or "module"
    yield report.Diagnosis(
        "batch statistics",
        "the mean and variance of a microbatch are not the batch's, and normalise what goes "
        f"through {_callers(case.seen.batch_norms)}{other}.",
        f"{eval_}.eval()  # its running statistics; or torch.nn.GroupNorm in its place; or "
        "pa.functional(module, microbatch_size=...), which gives it the statistics of the whole "
        "batch",
    )


def _suspects(case: Case) -> Iterator[report.Diagnosis]:
    """What may make samples depend on each other besides the loss's own formula."""
    # dropout has been left out already
    if draws := [call for call in case.seen.draws if call.function not in DROPOUTS]:
        yield report.Diagnosis(
            "randomness",
            f"every call gets the same numbers from {_callers(draws)}: every microbatch gets those "
            "of the first samples.",
            _keys(case),
        )
    elif case.seen.assigned and _fits_after_a_call(case):
        yield report.Diagnosis(
            "state",
            f"the first call assigns {_listed(case.seen.assigned)}, made of the samples that it "
            "sees: made of another microbatch, it would differ. Once it is there, the loss fits.",
            _ARGUMENT,
        )


def _fits_after_a_call(case: Case) -> bool:
    """Whether all is well where the loss keeps what a call with the whole batch made."""
    try:
        return trials.trial_of(case.subject._replace(kept=kept.Kept())).fits(case.splits)
    except Exception:
        return False
    finally:
        case.subject.kept.put_back()


def _callers(calls: Sequence[watch.Call]) -> str:
    return _listed([call.where for call in calls])


def _listed(names: list[str]) -> str:
    different = list(dict.fromkeys(names))
    more = f" and {len(different) - 3} more" if len(different) > 3 else ""
    return ", ".join(different[:3]) + more


# Statistics of the data ------------------------------------------------------------------


_STATISTICS = {
    *("mean", "nanmean", "std", "var", "std_mean", "var_mean", "amax", "amin", "max", "min")
}
_TRIES: tuple[
    tuple[set[str], losses.Reduction | None], ...
] = (  # what is told, and what the loss is then
    (_STATISTICS, None),
    (_STATISTICS | {"sum"}, None),
    (_STATISTICS | {"sum"}, "sum"),  # divided by a count of the whole batch
)
_Answers = list[tuple[watch.Call, Any]]


def _data_statistics(
    trial: trials.Trial, splits: Sequence[report.Split]
) -> Iterator[report.Diagnosis]:
    """The statistics of its data that a loss takes, if it fits with those of the whole batch."""
    tries = _TRIES if trial.subject.dtype is not None else ()
    found = (_told(trial.subject, names, then, splits) for names, then in tries)
    if where := next(filter(None, found), ""):
        yield report.Diagnosis(
            "data statistics",
            f"the loss takes statistics of its data over the samples of a microbatch: {where}. "
            "With those of the whole batch it fits.",
            'batch["gain"] = (gain - gain.mean()) / gain.std()  # before the batch is cut, not in '
            "the loss",
        )


def _told(
    subject: Subject, names: set[str], then: losses.Reduction | None, splits: Sequence[report.Split]
) -> str:
    """Where the loss takes these statistics, if it fits with those of the whole batch."""
    seed = next(subject.seeds)
    try:
        noted = _noted(subject, names, seed)
        negated = subject._replace(params=trees.tree_map(lambda x: -x, subject.params))
        if not noted or not _same(noted, _noted(negated, names, seed)):
            return ""  # statistics of the data are the same for other parameters

        def loss_fn(params: Any, part: Any) -> Any:
            rest = iter(noted)
            with _Statistics(names, lambda call, own: next(rest)[1]):
                return subject.loss_fn(params, part)

        told = subject._replace(loss_fn=loss_fn, reduction=then or subject.reduction)
        if not trials.trial_of(told).fits(splits):
            return ""
    except Exception:
        return ""
    return ", ".join(dict.fromkeys(call.where for call, _ in noted))


def _noted(subject: Subject, names: set[str], seed: int) -> _Answers:
    """The statistics that a loss takes of the whole batch."""
    noted: _Answers = []

    def note(call: watch.Call, own: Callable[[], Any]) -> Any:
        noted.append((call, own()))
        return noted[-1][1]

    def loss_fn(params: Any, part: Any) -> Any:
        with _Statistics(names, note):
            return subject.loss_fn(params, part)

    subject._replace(loss_fn=loss_fn).sums(subject.everything(), seed)
    return noted


def _same(noted: _Answers, others: _Answers) -> bool:
    values, more = (trees.tree_leaves([own for _, own in each]) for each in (noted, others))
    return all(x.equal(y) for x, y in zip(values, more, strict=True))


class _Statistics(TorchFunctionMode):
    """Returns what ``answer`` makes of each statistic over samples of what has no gradient."""

    def __init__(
        self, names: set[str], answer: Callable[[watch.Call, Callable[[], Any]], Any]
    ) -> None:
        super().__init__()
        self.names, self.answer = names, answer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        observed = checks.here.observed is not None  # what is called there is called again
        if observed or name not in self.names or not _over_rows(*args, **kwargs):
            return func(*args, **kwargs)
        return self.answer(
            watch.Call(function=name, line=refusals.users_line()), lambda: func(*args, **kwargs)
        )


def _over_rows(input: Any, dim: Any = None, *args: Any, **kwargs: Any) -> bool:
    if not isinstance(input, torch.Tensor) or isinstance(dim, torch.Tensor) or input.requires_grad:
        return False
    dim = kwargs.get("axis", dim)
    if dim is None or isinstance(dim, bool):  # or it is the correction
        return True
    dims = dim if isinstance(dim, (tuple, list)) else (dim,)
    return any(each % max(input.dim(), 1) == 0 for each in dims)


# Derivatives, beside differences ---------------------------------------------------------


def wrong_derivatives(subject: Subject) -> Iterator[report.Diagnosis]:
    """What is not the derivative of the loss, or not that of its gradient, by differences."""
    seed, (leaves, spec) = next(subject.seeds), trees.flatten(subject.params)
    _, batch = subject.arguments(subject.everything())

    def total(params: Any) -> torch.Tensor:
        return losses.read(subject.loss_fn(params, batch), subject.has_aux)[0].total

    def missed(params: Any, whole: Callable[[Any], Any]) -> dict[int, differences.Miss]:
        def product(params: Any, v: Any) -> Any:
            try:
                return hvp(lambda x: total(whole(x)), batch_argnums=(), check=False)(params, v)[1]
            except RuntimeError:  # there is no second derivative, and torch says so
                return trees.tree_map(lambda x: torch.full_like(x, torch.nan), v)

        return (
            differences.misses(
                differences.SecondOrder(whole, total, product, partial(subject.running, seed)),
                params,
            )
            or {}
        )

    def of_leaf(i: int) -> dict[int, differences.Miss]:
        return missed(
            leaves[i], lambda x: trees.unflatten(spec, [*leaves[:i], x, *leaves[i + 1 :]])
        )

    found, names = missed(subject.params, lambda params: params), trees.paths(spec, "params")
    where, what = [names[i - 1] for i in found if i], "its gradient"
    if 0 in found and found[0].bound:
        where, what = [name for i, name in enumerate(names) if 0 in of_leaf(i)], "the loss"
    if where:
        by = ", ".join(found[min(found)].functions) or "an operation of torch itself"
        yield report.Diagnosis(
            "wrong derivative",
            f"central differences of {what} differ from the derivative that is computed for it, in "
            f"{_listed(where)}; likely by {by}.",
            "...  # a plain formula in its place; torch.autograd.gradgradcheck tells what is wrong",
        )
