"""Whether a loss may be cut into microbatches: it is asked, by value, before anything is added.

    whole         the total and the weight of a microbatch, which are computed anyway
    one, other    those of two parts of it, which nothing records

    coupled  <=>  |whole - one - other| > 1e-6 (|whole| + |one| + |other|)

in the loss's own dtypes, and in float64 of the larger sizes of both: there rounding is gone, and
what is coupled is as far off. No threshold in the loss's own dtypes separates the two. A miss that
a share of 1e-12 in a leaf explains, as in a chaotic loss, is none.

Where the whole batch is at hand, a part of the microbatch is also compared with samples of the far
end of the batch, because samples that weigh alike may lie side by side.

Of a loss that draws random numbers the whole is computed once more, too: nothing is drawn in these
runs. Each check takes another microbatch, since one ignored target need not be in the first; which
calls check says asking.py. A loss that was refused is checked at every call. What cannot be
computed is no proof, nor is NaN in a part of fewer than four samples: then the next call checks,
eight times at most.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base import checks, dtensors, observation, trees
from .._base.asking import Answer
from .._base.deterministic import cast_tree, deterministic
from .._base.torch_internals import autograd, functorch, modes
from . import batches, causes, losses, terms, weights
from .weighted import WeightedSum


FEW = 4  # samples: fewer may hold nothing that a mean is over

# Of leaves, a microbatch, its samples, and what is carried.
LossOfPart = Callable[[Any, Any, int, Any], Any]
Found = list[list[tuple[float, float]]]  # of each piece, the total and weight of each term
Piece = tuple[Any, int, int]  # some samples, how many, and how many of the batch come before them


class Question(NamedTuple):
    """What a call is about to cut, or is given a microbatch of."""

    batch: batches.Batch
    parts: int  # into how many microbatches it is cut
    # Whether the loss has aux, what it is of its samples, who calls it, and the samples of a
    # microbatch and of the batch.
    kind: tuple[bool, losses.Reduction, str, int, int]


def question_of(
    batch: batches.Batch, rule: Any, caller: str, size: int | None = None, parts: int = 1
) -> Question:
    """The question of a caller about a microbatch, or about a batch that is cut into such."""
    rows = batch.rows if type(batch.rows) is int else 0  # None, or a symbol of make_fx
    size = rows if size is None else size
    return Question(batch, parts, (rule.has_aux, rule.reduction, caller, size, rows))


class Totals(NamedTuple):
    """The totals, and the weights, of a whole and of its parts; of one term, if it has several."""

    totals: tuple[float, ...]
    weights: tuple[float, ...]

    def missing(self) -> list[float]:
        """By how much the parts do not add up to the whole."""
        return [abs(whole - sum(parts)) for whole, *parts in self]

    def apart(self, other: "Totals") -> list[float]:
        """By how much they differ from those of nudged leaves."""
        pairs = zip(self, other, strict=True)
        return [sum(abs(x - y) for x, y in zip(*each, strict=True)) for each in pairs]

    def sizes(self) -> list[float]:
        """How much was added."""
        return [sum(map(abs, each)) for each in self]

    def off(self, *others: "Totals") -> float:
        """What is missing as a share of what was added here, or elsewhere where that is more."""
        sizes = map(max, zip(self.sizes(), *(x.sizes() for x in others), strict=True))
        shares = [d / size if size else d for d, size in zip(self.missing(), sizes, strict=True)]
        return max(x if x == x else torch.inf for x in shares)


def may_be_asked() -> bool:
    """Whether a loss that is called now may be called once more, and its numbers be looked at."""
    if (
        checks.here.observed is not None
        or checks.here.seeks is not None
        or not modes.at_top_level()
    ):
        return False
    return not (modes.dispatched() or autograd.in_backward())


class Inquiry:
    """A question as it is put in one call: to the loss of one of its microbatches."""

    def __init__(
        self, question: Question, answer: Answer, draws: bool, modules: Sequence[Any]
    ) -> None:
        self.question, self.answer, self.draws, self.modules = question, answer, draws, modules
        self.target = answer.questions % max(question.parts, 1)
        self.microbatches = self.rows = 0  # so far

    def __call__(self, loss: LossOfPart, args: tuple[Any, ...]) -> Any:
        """What the loss returns for a microbatch, once it is sure that it may be cut."""
        rows, number, start = args[2], self.microbatches, self.rows
        self.microbatches, self.rows = number + 1, start + rows
        if number != self.target and not self.answer.coupled:
            return loss(*args)
        asked = Asked(loss, args, self.question, start, self.draws)
        for whole, *parts in _cuts(self.question.batch, start, rows):
            computed = whole[1] == rows and not self.draws  # the whole, by the call itself
            found = asked.sums(parts if computed else [whole, *parts])
            if found is None and rows == 1:
                asked.refuse_uncut()
            if found is None or not _is_proof([*parts] if computed else [whole, *parts], found):
                continue  # a part raises, or nothing in it counts: perhaps others do not
            far, out = self.far(asked, parts, found[-2]), None
            if computed:
                out = loss(*args)
                found.insert(0, asked.amount(out, rows))
            if not all(map(_adds_up, (found, *far))):
                out = None  # its graph would be in memory beside what follows
            fit = [self.fits(asked, [whole, *parts], found)]
            fit += [_adds_up(x) or self.fits(asked, self.ends(parts), x) for x in far]
            self.answer.note(None if None in fit else False, whole[1])
            return loss(*args) if out is None else out
        self.answer.note(None, rows)
        return loss(*args)

    def far(
        self, asked: "Asked", parts: list[Piece], of_one: list[tuple[float, float]]
    ) -> list[Found]:
        """What samples come to that lie far apart, if they are at hand and can be computed."""
        pieces = self.ends(parts)
        found = asked.sums([pieces[0], pieces[2]]) if pieces else None
        return [[found[0], of_one, found[1]]] if found else []

    def ends(self, parts: list[Piece]) -> list[Piece]:
        """Samples that lie far apart, if they can be joined; nothing keeps them."""
        if self.question.parts > 1:
            with suppress(Exception):  # a tensor of a class that cannot be joined
                return _far_apart(self.question.batch, *parts) or []
        return []

    def fits(self, asked: "Asked", pieces: list[Piece], found: Found) -> bool | None:
        """Whether parts add up to the whole, or None; raises where they do not."""
        if _adds_up(found):
            return True
        if not _is_proof(pieces, found):
            return None
        coupled, sums = _judged(asked, pieces, _of_terms(found))
        asked.put_back()
        if coupled:
            self.answer.note(coupled, pieces[0][1])
            raise causes.coupled_error(asked, pieces, sums, self.modules)
        return None if coupled is None else True


def _is_proof(pieces: list[Piece], found: Found) -> bool:
    """Whether every part of few samples has a number: a mean over nothing is NaN."""
    return all(
        rows >= FEW or all(isfinite(total) for total, _ in terms)
        for (_, rows, _), terms in zip(pieces, found, strict=True)
    )


def _cuts(batch: batches.Batch, start: int, rows: int) -> Iterator[list[Piece]]:
    """Some samples, and two parts of them: of a microbatch, or of two where it has few samples."""
    try:
        total = batches.rows_to_cut(batch)
    except (TypeError, ValueError):
        return
    if dtensors.any_sharded(batch.leaves):
        return
    if rows > 1:
        first = 2 if rows == 4 else max(1, 2 * rows // 5)
        for one in dict.fromkeys((first, rows // 2)):  # pairs may belong together
            yield batches.cut_at(batch, start, rows) + batches.cut_at(batch, start, one, rows - one)
    if 0 < rows < 4 and total >= 2 * rows:  # of a batch at hand
        start = min(start, total - 2 * rows)
        yield batches.cut_at(batch, start, 2 * rows) + batches.cut_at(batch, start, rows, rows)


def _far_apart(batch: batches.Batch, one: Piece, other: Piece) -> list[Piece] | None:
    """A part of a microbatch, another one from the far end of the batch, and both together.

    Samples that weigh alike may lie side by side, as in a batch that is sorted by label or by
    length: there every microbatch adds up, and the batch does not.
    """
    (near, rows, start), (_, others, _), total = one, other, batch.rows or 0
    ((far, _, _),) = batches.cut_at(batch, total - others if 2 * start < total else 0, others)
    pairs = [*zip(*map(batch.spec.flatten_up_to, (near, far)), strict=True)]
    if any(isinstance(x, Tensor) and x.is_nested for x, _ in pairs):
        return None
    joined = [
        torch.cat([x, y]) if isinstance(x, Tensor) else x + y if type(x) in (list, tuple) else x
        for x, y in pairs
    ]
    # numbered as neighbours are, so that keys are the same in the whole and in its parts
    parts = [one, (far, others, start + rows)]
    return [(trees.unflatten(batch.spec, joined), rows + others, start), *parts]


class Asked:
    """A loss that is called for numbers alone: nothing is recorded, and nothing is left of it.

    Its microbatch has ``rows`` samples of the batch, and the batch so many ``before`` them.
    """

    def __init__(
        self, loss: LossOfPart, args: tuple[Any, ...], question: Question, before: int, draws: bool
    ) -> None:
        leaves, _, self.rows, self.carried = args
        self.loss, self.question, self.before, self.draws = loss, question, before, draws
        self.leaves = [functorch.innermost(x) if isinstance(x, Tensor) else x for x in leaves]
        self.dtype, self.weighted = torch.float64, False  # the narrowest that it has returned
        self.failure: Exception | None = None  # of the last run
        tensors = (x for x in question.batch.leaves if isinstance(x, Tensor))
        # what draws, as it stands now
        self.put_back = observation.random_states(x.device for x in tensors)

    def sums(
        self,
        pieces: Sequence[Piece],
        dtype: torch.dtype | None = None,
        mode: Any = None,
        *,
        records: bool = False,
        nudged: bool = False,
    ) -> Found | None:
        """The total and the weight of each piece; None where that cannot be told.

        It is computed in a dtype, and under a mode, if these are given. Nothing is random then, or
        where the loss is known to draw. Leaves may be ``nudged``.
        """
        without_chance = deterministic(dtype) if dtype or self.draws else nullcontext()
        given: Any = self.leaves, self.carried, [x for x, _, _ in pieces]
        try:
            range_ = modes.named_range("check")
            with (
                range_,
                _apart(self.put_back) as undo,
                torch.set_grad_enabled(records),
                without_chance,
            ):
                leaves, carried, parts = cast_tree(given, dtype) if dtype else given
                leaves = [*map(_nudged, leaves)] if nudged else leaves
                with mode or nullcontext():
                    found = self.amounts(leaves, carried, parts, pieces)
            return None if undo.reached else found
        except Exception as error:
            self.failure = error.with_traceback(None)  # which holds what was computed
            error.add_note("pureaccum: raised in the check of the loss, for a part of its samples.")
            takes_gradient = not records and losses.NO_GRAPH in str(error)
        if not takes_gradient:
            return None
        return self.sums(pieces, dtype, mode, records=True, nudged=nudged)

    def refuse_uncut(self) -> None:
        """Raise where a loss takes one sample, but not two, beside an argument of all samples.

        One sample broadcasts against targets that are not cut, which is no error of torch's.
        """
        samples, advice = getattr(self.failure, losses.UNCUT, (None, ""))
        if samples is not None and samples == self.question.batch.rows:
            raise ValueError(
                f"the loss accepts a microbatch of one sample, but not two samples: {advice} "
                "check=False skips this check."
            ) from self.failure

    def amounts(
        self, leaves: Any, carried: Any, parts: list[Any], pieces: Sequence[Piece]
    ) -> Found:
        """Those of each part: the pieces as they are now computed."""
        found: Found = []
        for part, piece in zip(parts, pieces, strict=True):
            if not found or piece is not pieces[0]:  # … again: what differs then?
                self.put_back()  # what is drawn once a call is the same in each
            _, rows, start = piece
            its = carried and (carried[0], carried[1] + (start - self.before))
            found.append(self.amount(self.loss(leaves, part, rows, its), rows))
        return found

    def amount(self, out: Any, rows: int) -> list[tuple[float, float]]:
        """The total and the weight of what the loss returned for so many samples, of each term."""
        has_aux, reduction, *_ = self.question.kind
        loss = losses.loss_in(out, has_aux)
        if isinstance(loss, WeightedSum):
            return [self.amount_of(term, rows, False, reduction) for term in loss.terms]
        return [self.amount_of(out, rows, has_aux, reduction)]

    def amount_of(
        self, out: Any, rows: int, has_aux: bool, reduction: losses.Reduction
    ) -> tuple[float, float]:
        """The total and the weight of one mean, or of a sum."""
        with torch.no_grad():
            seen, shape = losses.read(out, has_aux)
            entry = weights.enter(seen, shape, rows, reduction)
            self.dtype, self.weighted = _narrower(self.dtype, shape.dtype), shape.weighted
            divides = shape.weighted or reduction == "mean"
            numbers = entry.value, entry.weight if divides else 0.0
            value, weight = (
                functorch.innermost(x) if isinstance(x, Tensor) else x for x in numbers
            )
            return float(value) * entry.times, float(weight)

    def unit(self, piece: Piece) -> float:
        """The rounding unit of the narrowest dtype in which anything is computed."""
        dtypes = {self.dtype}

        def note(_: object, args: tuple[Any, ...], kwargs: Any) -> None:
            tensors = (x for x in trees.tree_leaves((args, kwargs)) if isinstance(x, Tensor))
            dtypes.update(x.dtype for x in tensors if x.is_floating_point())

        self.sums([piece], None, modes.seeing(before=note))
        return max(torch.finfo(dtype).eps for dtype in dtypes)


def _nudged(x: Any) -> Any:
    is_real = isinstance(x, Tensor) and x.is_floating_point()
    return x * (1 + 2.0**-40) if is_real else x


def _narrower(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    return max(one, other, key=lambda dtype: torch.finfo(dtype).eps)


@contextmanager
def _apart(put_back: Callable[[], None]) -> Generator[observation.Undo]:
    """Run something at top level, in no call of ours, and undo it."""
    with observation.leaving_nothing() as undo, functorch.down_to(0):
        undo.callback(put_back)
        for name in "look", "backward":
            undo.callback(setattr, checks.here, name, getattr(checks.here, name))
            setattr(checks.here, name, None)
        yield undo


def _judged(asked: Asked, pieces: list[Piece], own: list[Totals]) -> tuple[bool | None, Totals]:
    """Whether a loss is coupled that does not fit by its own numbers, and by which numbers.

    None where nobody can tell.
    """
    worst = max(own, key=Totals.off)
    if not all(isfinite(each.totals[0]) for each in own):
        return None, worst
    if not _repeats(asked.sums([pieces[0], pieces[0]])):
        return None, worst  # before what it keeps is in float64
    double = asked.dtype == torch.float64
    found = asked.sums([*pieces, pieces[0]], torch.float32 if double else torch.float64)
    if found is None:  # an operation that has no such kernel, say
        return worst.off() > max(terms.MOST, 64 * asked.unit(pieces[0])), worst
    if not _repeats([found[0], found.pop()]):
        return None, worst
    others = _of_terms(found)
    offs = [(a if double else b).off(a, b) for a, b in zip(own, others, strict=True)]
    at = offs.index(max(offs))
    exact = (own if double else others)[at]
    if not offs[at] > terms.MOST:
        return False, exact
    found = asked.sums(pieces, torch.float64, nudged=True)
    nudged = exact if found is None else _of_terms(found)[at]
    # Of a chaotic loss nothing is left but rounding, in float64 too.
    pairs = zip(exact.missing(), exact.apart(nudged), strict=True)
    return (True if any(not d <= 4 * rounding for d, rounding in pairs) else None), exact


def _repeats(found: Found | None) -> bool:
    """Whether two calls with the same samples, and other random numbers, came to the same."""
    return found is not None and _adds_up(found)


def _adds_up(found: Found) -> bool:
    return all(each.off() <= terms.MOST for each in _of_terms(found))


def _of_terms(found: Found) -> list[Totals]:
    return [Totals(*zip(*term, strict=True)) for term in zip(*found, strict=False)]
