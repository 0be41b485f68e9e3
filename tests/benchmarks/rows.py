"""From the table to what is measured, and from the numbers to the rows that are published.

Rule: ours over theirs within one run, and a row for each pair that was to be measured: where there
is no number, it says why.
"""

from collections.abc import Iterable, Iterator, Mapping
from statistics import geometric_mean, median, quantiles
from typing import Any, NamedTuple

from . import ranks
from .clock import MEGABYTES, SAFETENSORS, SAVE
from .models import Model, gpt
from .table import COMPILED, FIVE, HAND, HEAVY, ONE_GRADIENT, PAIRS, Pair


class Race(NamedTuple):
    """Contenders that run in turns. The first says what is right."""

    part: str
    model: Model
    contenders: tuple[str, ...]
    keeping: bool  # in a process that keeps its memory

    def __str__(self) -> str:
        return f"{self.model}, memory kept" if self.keeping else str(self.model)


def pairs_of(part: str | None, text: str | None, full: bool) -> list[Pair]:
    """What is asked for: a part, or what has the text in ``who, where``."""
    found = [x for x in PAIRS if part in (None, x.part) and (full or not x.full)]
    if text is None:
        return found
    return [
        pair._replace(where=where)
        for pair in found
        if (where := tuple(x for x in pair.where if text in f"{pair.ours}, {place(pair, x)}"))
    ]


def place(pair: Pair, model: Model) -> str:
    """Where a row of the table was measured."""
    if pair.measure.endswith("kept"):
        return f"{model}, memory kept"
    if (pair.part, pair.measure) == ("gradients", "memory"):
        return next(name for name, heavy in HEAVY.items() if heavy == model)
    return str(model)


def races(pairs: Iterable[Pair]) -> list[Race]:
    """Everybody who is timed at one place runs in one race, if he computes the same."""
    found: dict[tuple[Any, ...], dict[str, None]] = {}
    for pair in pairs:
        if pair.measure.startswith("time"):
            for model in pair.where:
                key = pair.part, model, pair.race, pair.measure.endswith("kept")
                found.setdefault(key, {}).update({pair.theirs: None, pair.ours: None})
    return [
        Race(part=part, model=model, contenders=tuple(names), keeping=kept)
        for (part, model, _, kept), names in found.items()
    ]


def peaks(pairs: Iterable[Pair]) -> list[tuple[Model, str]]:
    """Whose memory is measured, and where."""
    found = [
        (model, name)
        for pair in pairs
        if pair.measure == "memory"
        for model in pair.where
        for name in (pair.theirs, pair.ours)
    ]
    # What memory is counted in is the result of a sum.
    named = [(m, "per_sample_grad, sum" if n == ONE_GRADIENT else n) for m, n in found]
    return list(dict.fromkeys(named))


def growing() -> list[tuple[Model, str]]:
    """The memory of a step, the larger the batch: at once, by the loop, and by us."""
    models = [gpt("mini", 2, 2**n) for n in range(5)]
    named = [(at_once(model), HAND) for model in models]
    named += [(model, name) for name in (HAND, "default step") for model in models]
    return list(dict.fromkeys(named))


def at_once(model: Model) -> Model:
    """The same batch in one microbatch."""
    return model._replace(rows=model.rows * model.microbatches, microbatches=1)


FLAT = Model(2048, 16, 2, depth=4), Model(2048, 16, 64, depth=4)


def flat(full: bool) -> list[str]:
    """Whose memory has to be the same with few and with many microbatches."""
    streamed = ("func, streamed", "autograd, streamed") if full else ()
    return ["hand loop", "func", "autograd", *streamed]


FEW = Model(64, 16, 2, depth=4)
MANY_CALLS = FEW._replace(microbatches=1024)


def compiling(full: bool) -> list[str]:
    """Whose first call is timed, with few and with many microbatches."""
    return [COMPILED, "compiled hand step", "JAX"] if full else [COMPILED]


class Row(NamedTuple):
    """One line of a table. ``ratio`` is ours over theirs; None where ``failure`` says why."""

    part: str
    device: str
    measure: str
    where: str
    ours: str
    theirs: str
    target: float | None
    why: str = ""
    ratio: float | None = None
    quartiles: tuple[float, float] | None = None
    amounts: tuple[float, float] | None = None
    faults: tuple[float, float] | None = None
    failure: str = ""

    @property
    def absent(self) -> bool:
        return self.failure.startswith("absent: ")

    @property
    def reached(self) -> bool | None:
        """None where there is nothing to reach, or nothing to measure it with."""
        if self.target is None or self.absent:
            return None
        return self.ratio is not None and self.ratio <= self.target


def row_of(pair: Pair, model: Model, device: str) -> Row:
    goal = pair.goal(model) if device == "cpu" else cuda_goal(pair, model)
    measure, where = pair.measure.partition(",")[0], place(pair, model)
    return Row(pair.part, device, measure, where, pair.ours, pair.theirs, goal, pair.why)


def cuda_goal(pair: Pair, model: Model) -> float | None:
    """A GPT in half precision, against the loop."""
    if (pair.theirs, model.kind) != (HAND, "small") or model.precision == "fp32":
        return None
    return {"default step": 1.03, COMPILED: 0.9}.get(pair.ours)


def compared(row: Row, ours: dict, theirs: dict, what: str) -> Row:
    if failure := ours.get("failure") or theirs.get("failure"):
        return row._replace(failure=failure)
    a, b = ours[what], theirs[what]
    return row._replace(ratio=a / b, amounts=(a, b))


def time_rows(pairs: Iterable[Pair], results: Mapping[Race, dict], device: str) -> Iterator[Row]:
    races_of = {(race.part, str(race), name): race for race in results for name in race.contenders}
    for pair in (pair for pair in pairs if pair.measure.startswith("time")):
        for model in pair.where:
            row = row_of(pair, model, device)
            race = races_of[pair.part, row.where, pair.ours]
            seconds, faults, failures = (
                results[race][x] for x in ("seconds", "faults", "failures")
            )
            ours, theirs = pair.ours, pair.theirs
            if row.target is None and failures.get(theirs, "").startswith("absent: "):
                continue  # the absent one has a line of its own
            if failure := failures.get(ours) or failures.get(theirs):
                yield row._replace(failure=failure)
                continue
            k = 1 if pair.part == "gradients" else model.microbatches  # of a microbatch, or a call
            a, b = seconds[ours], seconds[theirs]
            ratios = [x / y for x, y in zip(a, b, strict=True)]
            low, _, high = quantiles(ratios, n=4)
            yield row._replace(
                ratio=median(ratios),
                quartiles=(low, high),
                amounts=(k * median(a), k * median(b)),
                faults=(k * median(faults[ours]), k * median(faults[theirs])),
            )


def mean_rows(rows: Iterable[Row]) -> Iterator[Row]:
    """The geometric mean over the five cells, where all of them were run."""
    pair = ("cpu", "time", COMPILED, "compiled hand step")
    of = {x.where: x for x in rows if (x.device, x.measure, x.ours, x.theirs) == pair}
    five = [of[str(model)] for model in FIVE if str(model) in of]
    if len(five) < len(FIVE):
        return
    row = five[0]._replace(where="geometric mean of the five", target=0.6, ratio=None)
    row = row._replace(quartiles=None, amounts=None, faults=None)
    failure = next((x.failure for x in five if x.failure), "")
    ratio = None if failure else geometric_mean(x.ratio for x in five if x.ratio is not None)
    yield row._replace(ratio=ratio, failure=failure)


def memory_rows(
    pairs: Iterable[Pair], numbers: Mapping[tuple[Model, str], dict], device: str
) -> Iterator[Row]:
    for pair in (pair for pair in pairs if pair.measure == "memory"):
        for model in pair.where:
            theirs = numbers.get((model, pair.theirs))
            if pair.theirs == ONE_GRADIENT:  # as large as a sum
                one = numbers[model, "per_sample_grad, sum"]
                theirs = one if "failure" in one else {"peak": one["result"]}
            yield compared(row_of(pair, model, device), numbers[model, pair.ours], theirs, "peak")


def growth_rows(numbers: Mapping[tuple[Model, str], dict], device: str) -> Iterator[Row]:
    """Beside the loop that takes the batch at once."""
    for (model, name), ours in numbers.items():
        whole = at_once(model), HAND
        if (model, name) != whole:
            where = f"{model.name}, a batch of {model.rows * model.microbatches}"
            row = Row("batch", device, "memory", where, name, "the whole batch", None)
            yield compared(row, ours, numbers[whole], "peak")


def flat_rows(numbers: Mapping[tuple[Model, str], dict], device: str) -> Iterator[Row]:
    """Many microbatches beside few."""
    few, many = FLAT
    for model, name in numbers:
        if model == many:
            target = None if "," in name or name == "hand loop" else 1.02
            where, theirs = f"{many.microbatches} microbatches", f"{name} at {few.microbatches}"
            row = Row("gradients", device, "memory", where, name, theirs, target)
            yield compared(row, numbers[many, name], numbers[few, name], "peak")


def first_call_rows(numbers: Mapping[tuple[Model, str], dict]) -> Iterator[Row]:
    """Many microbatches beside few."""
    why = "the first step itself has 1,024 microbatches to compute."
    for model, name in numbers:
        if model == MANY_CALLS:
            target = 1.2 if name == COMPILED else None
            names = name, f"{name} at {FEW.microbatches}"
            row = Row("steps", "cpu", "first call", str(model), *names, target, why)
            yield compared(row, numbers[model, name], numbers[FEW, name], "seconds")


def sync_rows(numbers: Mapping[tuple[Model, str], dict], device: str) -> Iterator[Row]:
    """A number and no ratio: none, or why not."""
    for (model, name), result in numbers.items():
        target = None if name == HAND else 0.0
        row = Row("steps", device, "syncs", str(model), name, "", target)
        yield row._replace(ratio=result.get("syncs"), failure=result.get("failure", ""))


def saving_row(result: dict, device: str) -> Row:
    """The ratio of the medians, since disks have moods; three quarters of their speed."""
    where = f"{MEGABYTES} MB of float32"
    row = Row("checkpoint", device, "saving", where, SAVE, SAFETENSORS, 1 / 0.75)
    if failure := result.get("failure"):
        return row._replace(failure=failure)
    a, b = (result["seconds"][name] for name in (SAVE, SAFETENSORS))
    low, _, high = quantiles([x / y for x, y in zip(a, b, strict=True)], n=4)
    ratio = median(a) / median(b)
    return row._replace(ratio=ratio, quartiles=(low, high), amounts=(median(a), median(b)))


def rank_rows(numbers: Mapping[ranks.Kind, dict]) -> Iterator[Row]:
    """What two ranks say in a step, and how long it takes: no more than DDP."""
    said = (
        "weights, counts and a checksum of what ranks hold: 320 bytes, and at 34 MB one small "
        "collective, since nothing else may be sent before ranks are known to agree."
    )
    spent = (
        "the Python of microbatches, as without ranks (0.5 ms beside a loop of 1.4 at 0.07 MB), "
        "and what is packed and compared (0.6 ms beside 0.35 of the collective)."
    )
    for kind, result in numbers.items():
        for measure in (*ranks.COUNTED, "seconds"):
            target = None if measure == "bytes to them" else 1.0
            name, why = ("time", spent) if measure == "seconds" else (measure, said)
            row = Row("ranks", "cpu", name, str(kind), ranks.OURS, ranks.DDP, target, why)
            if failure := result.get("failure"):
                yield row._replace(failure=failure)
            else:
                yield compared(row, result[ranks.OURS], result[ranks.DDP], measure)


def pairs_of_ranks_rows(result: dict) -> Iterator[Row]:
    """What a rank holds for a loss of all pairs, and how far its gradients are off."""
    names = ranks.APART, ranks.ALONE
    row = Row("ranks", "cpu", "memory", ranks.PAIRS_OF_RANKS, *names, 0.6)
    off = row._replace(measure=ranks.DIFFERENCE, target=1e-12)
    if failure := result.get("failure"):
        yield from (row._replace(failure=failure), off._replace(failure=failure))
    else:
        yield compared(row, result[ranks.APART], result[ranks.ALONE], "peak")
        yield off._replace(ratio=result[ranks.DIFFERENCE])
