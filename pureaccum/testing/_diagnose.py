"""Why a loss does not fit: what it draws, keeps and normalises with, then what it is of its rows.

Random numbers and state make experiments worthless, so they come first; dropout and batch
normalisation are left out to see whether they alone are to blame.
"""

from collections.abc import Iterator
from typing import NamedTuple

from ._in_dtype import BATCH_NORM, DROPOUTS
from ._of_rows import of_rows
from ._report import Diagnosis
from ._subject import Subject
from ._trials import Outcome, Parts, Trial, repeats, trial_of
from ._watch import Call, Seen


class Case(NamedTuple):
    """What a check found out."""

    subject: Subject  # in its own dtypes
    trial: Trial
    seen: Seen
    seeds: Iterator[int]
    outcomes: dict[Parts, Outcome]
    draws: bool  # other random numbers give another result
    keeps: bool  # a second call gives another result
    overflow: str  # what is not finite in the loss's own dtypes


def diagnose(case: Case) -> tuple[Diagnosis, ...]:
    """The causes; none where all is well."""
    causes = [*_state(case), *_random(case), *_overflow(case)]
    if not any(max(outcome.errors) > 1 for outcome in case.outcomes.values()):
        return tuple(causes)
    rest, fits = _rest(case)
    causes += _batch_statistics(case, fits)
    if rest is not None and not fits:
        causes += of_rows(rest, case.seen.weighted, case.seeds, case.outcomes)
    if not causes:
        causes.append(
            Diagnosis(
                "unknown",
                "no experiment tells why.",
                "pa.grad(loss, microbatch_size=None)  # the full batch at once",
            )
        )
    return tuple(causes)


def _rest(case: Case) -> tuple[Trial | None, bool]:
    """The loss without dropout and batch norms, if that can be told; whether it fits."""
    without = {BATCH_NORM} if case.seen.batch_norms else set()
    without |= {call.function for call in case.seen.draws} & DROPOUTS
    trial = case.trial
    if not without or trial.subject.dtype is None:
        return (None if case.draws or case.keeps else trial), False
    subject = case.subject._replace(without=frozenset(without))
    try:
        trial = trial_of(subject, trial.subject.dtype, case.seeds)
        if any(repeats(trial, case.seeds)):
            return None, False
        outcomes = [trial.outcome(parts) for parts in case.outcomes]
    except Exception:
        return None, False
    return trial, all(max(outcome.errors) <= 1 for outcome in outcomes)


def _state(case: Case) -> Iterator[Diagnosis]:
    norms = {call.module for call in case.seen.batch_norms}
    for written in case.seen.written:
        if written.by.function == BATCH_NORM or written.by.module in norms - {""}:
            continue  # running statistics, which have a diagnosis of their own
        if written.given:
            yield Diagnosis(
                "state",
                f"the loss changes {written.name}, which it was given, in place: microbatches are "
                "views, so the caller's batch changes with it.",
                "x = x.clone()  # or the operation without its underscore: x.mul(2) for x.mul_(2)",
            )
        else:
            yield Diagnosis(
                "state",
                f"the loss writes to {written.name}, which it captured: once for every "
                "microbatch, in place of once for the batch.",
                "out, new_buffers = pa.functional(module).apply(params, buffers, x)  # state goes "
                "in and comes out: make_step(..., buffers=...)",
            )
    if case.keeps:
        yield Diagnosis(
            "state",
            "two calls with the same arguments and the same random numbers differ: the loss keeps "
            "something from call to call (a counter, a list, a generator of its own).",
            "def loss(params, batch): ...  # what changes goes in as an argument",
        )


def _random(case: Case) -> Iterator[Diagnosis]:
    calls = _listed(case.seen.draws)
    if case.draws:
        yield Diagnosis(
            "randomness",
            "two calls with the same arguments differ, and agree with the same random seed: "
            f"{calls or 'a generator that is not torch’s'} draws other numbers for other "
            "microbatches.",
            "x = pa.dropout(x, 0.5, keys)  # a key a row: make_step(..., keys=True); or "
            "module.eval()",
        )


def _batch_statistics(case: Case, fits: bool) -> Iterator[Diagnosis]:
    if not case.seen.batch_norms:
        return
    first = case.seen.batch_norms[0]
    other = "; without it the loss fits" if fits else ""
    eval_ = f"{first.root}.get_submodule({first.path!r})" if first.path else first.root or "module"
    yield Diagnosis(
        "batch statistics",
        f"{_listed(case.seen.batch_norms)} normalises with the mean and variance of its "
        f"microbatch, which are not the batch's{other}.",
        f"{eval_}.eval()  # its running statistics; or torch.nn.GroupNorm in its place",
    )


def _overflow(case: Case) -> Iterator[Diagnosis]:
    if case.overflow:
        yield Diagnosis(
            "overflow",
            f"{case.overflow} of a microbatch is inf or NaN in "
            f"{str(case.seen.dtype).removeprefix('torch.')}, and finite in float64.",
            "out = out.float()  # before the loss; or bfloat16: "
            "make_step(..., policy=pa.Policy(compute=torch.bfloat16))",
        )


def _listed(calls: list[Call]) -> str:
    places = list(dict.fromkeys(call.where for call in calls))
    more = f" and {len(places) - 3} more" if len(places) > 3 else ""
    return ", ".join(places[:3]) + more
