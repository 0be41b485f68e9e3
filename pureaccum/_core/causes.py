"""Why a loss must not be cut into microbatches, and the fix: the error that states both.

The functions that the loss calls reveal some causes (batch norm, a mean over some targets, samples
compared with others). How its values for subsets of samples add up reveals others.
"""

import inspect
from collections.abc import Sequence
from math import isfinite, nan
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .._base import refusals
from . import batches, called_modules


class Cause(NamedTuple):
    """A kind of loss that may not be cut, what it does, and a line of code that is right for it."""

    kind: str
    says: str
    way: str


CAUSES = {
    cause.kind: cause
    for cause in (
        Cause(
            "batch statistics",
            "it normalises with the mean and variance of a microbatch, not with those of the batch",
            "fn = pa.functional(module, microbatch_size={rows})  # and no microbatch_size outside\n"
            '    step = pa.make_step(loss, ..., buffers="pooled")  # loss(params, batch, buffers) '
            "returns (value, new_buffers)",
        ),
        Cause(
            "mean of means",
            "it is a mean over weights, targets or tokens, and samples have different numbers of "
            "them (if their number depends on params, divide two sums of pa.microbatch instead)",
            "return pa.Weighted(per_token.sum(), mask.sum())  # the total and its count",
        ),
        Cause(
            "weight",
            "its total and its weight are not both sums over samples",
            "return pa.Weighted(per_token.sum(), mask.sum())  # two sums",
        ),
        Cause(
            "sum as mean",
            "it is a sum over its samples, but is declared a mean",
            'reduction="sum"  # or .mean() in the loss',
        ),
        Cause(
            "mean as sum",
            "it is a mean over its samples, but is declared a sum",
            'reduction="mean"  # or .sum() in the loss',
        ),
        Cause(
            "constant term",
            "it holds a term that does not depend on the samples, such as a penalty on "
            "parameters, and every microbatch adds that term again",
            "return (per_row + penalty / rows_of_batch).sum()  # a share for every sample",
        ),
        Cause(
            "several means",
            "no single weight makes it a mean: it adds means over different things, divides a "
            "total by a count that leaves out some samples, or is a function of a mean, such as "
            "its root (then apply that function to pa.microbatch(..., reduce='mean'), in a loss "
            "that is not cut)",
            "return pa.Weighted(a.sum(), len(a)) + pa.Weighted(b.sum(), mask.sum())  # each term "
            "over its own count",
        ),
        Cause(
            "batch coupling",
            "the contribution of a sample depends on the other samples",
            "z = pa.microbatch(encode, microbatch_size={rows})(params, batch)  # and the loss "
            "of all samples in plain code, with no microbatch_size outside",
        ),
    )
}


class CoupledLossError(ValueError):
    """A loss whose microbatches do not add up to the batch, so that it must not be cut.

    Args:
        message: What is wrong and how to fix it.
        told: The attributes below.

    Attributes:
        whole: The loss of some samples together.
        parts: The losses of two parts of these samples.
        percent: The difference between the parts and the whole, in percent.
        kind: The kind of loss, one of the kinds of ``testing.check_accumulation``.
        where: The module or the line that couples samples, if known.
        way: A correct line of code, often with ``Weighted``, ``microbatch`` or ``functional``.

    Example:
        >>> import torch
        >>> from pureaccum import CoupledLossError, grad
        >>> def loss(w, batch):  # a mean over a mask
        ...     return (w * batch["x"] * batch["mask"]).sum() / batch["mask"].sum()
        >>> batch = {"x": torch.arange(6.0), "mask": torch.tensor([1, 1, 0, 1, 1, 1])}
        >>> try:
        ...     grad(loss, microbatch_size=3)(torch.tensor(1.0), batch)
        ... except CoupledLossError as error:
        ...     print(error.kind, error.whole, error.parts)
        mean of means 0.5 (0.0, 1.0)
    """

    def __init__(self, message: str = "", **told: Any) -> None:
        super().__init__(message)
        self.whole: float = told.get("whole", nan)
        self.parts: tuple[float, ...] = told.get("parts", ())
        self.percent: float = told.get("percent", nan)
        self.kind: str = told.get("kind", "")
        self.where: str = told.get("where", "")
        self.way: str = told.get("way", "")


def coupled_error(
    asked: Any, pieces: list[Any], sums: Any, modules: Sequence[nn.Module]
) -> CoupledLossError:
    """The error for a loss that calls some modules, from some samples and two parts of these.

    ``asked`` calls the loss (see coupling.py), and ``sums`` are their totals and weights.
    """
    rows = [n for _, n, _ in pieces]
    weights = sums.weights if any(sums.weights) else [1.0] * 3
    pairs = [*zip(sums.totals, weights, strict=True)]
    whole, *parts = (total / weight if weight else nan for total, weight in pairs)
    (kind, says, way), where = _cause(asked, pieces, sums, modules)
    way = way.format(rows=asked.rows)
    shares = [
        d / max(*map(abs, each), 1e-300) for d, each in zip(sums.missing(), sums, strict=True)
    ]
    percent = 100 * max(shares)
    apart = f", {percent:.2g} % apart" if isfinite(percent) else ""
    told = [f"{x:.6g}" for x in (whole, *parts)]
    if kind == "weight":
        told = [f"{total:.6g} / {weight:.6g}" for total, weight in pairs]
    return CoupledLossError(
        f"the loss does not add up over samples: it is {told[0]} for {rows[0]} samples, and "
        f"{told[1]} and {told[2]} for two parts of them ({rows[1]} and {rows[2]} samples){apart}. "
        "So microbatches do not give the gradient of the full batch. Likely cause "
        f"({kind}{where and f', in {where}'}): {says}. Use:\n\n    {way}\n\n"
        "check=False adds up microbatches anyway, as a hand-written loop does.",
        whole=whole,
        parts=tuple(parts),
        percent=percent,
        kind=kind,
        where=where,
        way=way,
    )


def _cause(
    asked: Any, pieces: list[Any], sums: Any, modules: Sequence[nn.Module]
) -> tuple[Cause, str]:
    whole, part = _Calls(modules, pieces[0][1]), _Calls(modules, pieces[2][1])
    for calls, piece in ((whole, pieces[0]), (part, pieces[2])):
        asked.sums([piece], None, calls)
    if whole.norms:
        return CAUSES["batch statistics"], whole.norms[0]
    if both := [where for number, where in whole.beside.items() if number in part.beside]:
        return CAUSES["batch coupling"], both[0]
    if asked.weighted:
        return CAUSES["weight"], ""
    kind = _kind_of_sum(asked, pieces[0])
    if whole.means and kind in ("", "mean of means", "several means"):
        where, way = whole.means[0]
        if kind == "several means":
            way += " + pa.Weighted(b.sum(), len(b))  # each term over its own count"
        return CAUSES[kind or "mean of means"]._replace(way=way), where
    return CAUSES[kind or "several means"], ""


def _kind_of_sum(asked: Any, piece: Any) -> str:
    """What a loss is of its samples, by how three parts, and neighbours among them, add up.

    Nothing where these cannot be computed.
    """
    sizes, totals = _thirds(asked, piece)
    if totals is None:
        return ""
    if any(x != x for x in totals):
        return "mean of means"  # 0 / 0: nothing in a part counts
    is_mean, (m, n, o, *_) = asked.question.kind[1] == "mean", sizes
    pairs = zip(totals, sizes, strict=True)
    a, b, c, ab, bc, abc = (x / rows if is_mean else x for x, rows in pairs)
    if is_mean and ab and bc and _equal(ab, a + b) and _equal(bc, b + c):
        return "sum as mean"
    means = (a * m + b * n) / (m + n), (b * n + c * o) / (n + o)
    if not is_mean and _equal(means[0], ab) and _equal(means[1], bc):
        return "mean as sum"
    excess = a + b - ab
    if _equal(excess, b + c - bc) and _equal(excess, (a + b + c - abc) / 2):
        return "constant term"
    v, w = _weight(a, b, ab), _weight(b, c, bc)
    weighted = _equal(abc * (1 + v + v * w), a + v * b + v * w * c)
    return "mean of means" if weighted else "several means"


def _thirds(asked: Any, piece: Any) -> tuple[list[int], list[float] | None]:
    """The samples and the losses of three parts, of each two neighbours, and of all of them."""
    (_, rows, start), batch = piece, asked.question.batch
    rows = min(max(rows, 6), batch.rows)
    start = min(start, batch.rows - rows)
    ends = [start + i * rows // 3 for i in range(4)]
    spans = [(ends[i], ends[i + n] - ends[i]) for n in (1, 2, 3) for i in range(4 - n)]
    cuts = [batches.cut_at(batch, at, size)[0] for at, size in spans]
    found = asked.sums(cuts, torch.float64) if rows >= 3 else None
    return [size for _, size in spans], found and [terms[0][0] for terms in found]


def _weight(a: float, b: float, both: float) -> float:
    """How much ``b`` weighs beside ``a`` where a mean of them is ``both``; NaN if none is."""
    share = (both - a) / (b - a) if a != b else nan
    return share / (1 - share) if 0 < share < 1 else nan


def _equal(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-6 * (abs(a) + abs(b))


class _Calls(TorchFunctionMode):
    """Notes the calls of torch's functions that couple samples."""

    def __init__(self, modules: Sequence[nn.Module], rows: int) -> None:
        super().__init__()
        self.modules, self.rows, self.number = modules, rows, 0
        self.norms: list[str] = []
        self.means: list[tuple[str, str]] = []
        self.beside: dict[
            int, str
        ] = {}  # by their number, those of which a sample needs the others

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        out, self.number = func(*args, **kwargs), self.number + 1
        if name == "batch_norm" and kwargs.get("training", args[5] if len(args) > 5 else False):
            self.norms.append(self.where(name))
        if name in ("cross_entropy", "nll_loss") and (way := _way_of_targets(*args, **kwargs)):
            self.means.append((self.where(name), way))
        beside = self.compares(out) and not any(map(self.compares, args))
        if beside or (name in _OVER_ROWS and self.over_rows(args, kwargs)):
            self.beside[self.number] = self.where(name)
        return out

    def compares(self, x: Any) -> bool:
        """Whether a tensor has a number for each pair of samples, or for each by its place."""
        return isinstance(x, Tensor) and [*x.shape].count(self.rows) > 1

    def over_rows(self, args: Any, kwargs: Any) -> bool:
        """Whether a statistic is one of each column, over the samples."""
        x, dim = [*args, None, None][:2]
        dim = kwargs.get("dim", kwargs.get("axis", dim))
        dims = dim if isinstance(dim, (tuple, list)) else (dim,)
        is_first = any(type(d) is int and d == 0 for d in dims)
        return isinstance(x, Tensor) and [*x.shape[:1]] == [self.rows] and is_first

    def where(self, name: str) -> str:
        """The module that calls, by its path, or the user's line."""
        frame: Any = inspect.currentframe()
        while frame is not None:
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module):
                own = called_modules.origins.get(module, module)
                paths = (path for m in self.modules for path, x in m.named_modules() if x is own)
                path = next(filter(None, paths), "")
                return f"{path and f'module {path!r}, a '}{type(own).__name__}"
            frame = frame.f_back
        return f"torch's {name} at {refusals.users_line()}"


_OVER_ROWS = {
    *("mean", "std", "var", "std_mean", "var_mean", "amax", "amin", "max", "min", "cumsum", "roll"),
    *("softmax", "log_softmax", "logsumexp", "normalize", "sort", "argsort", "topk", "median"),
}


def _way_of_targets(
    input: Any, target: Any, weight: Any = None, *_: Any, ignore_index: int = -100, **named: Any
) -> str:
    """The right line for a mean over targets of which some weigh more, or nothing."""
    if named.get("reduction", "mean") != "mean" or target.is_floating_point():
        return ""
    if weight is not None:  # a later batch may have ignored targets, which weigh nothing
        total, over = "weight=w, reduction='sum'", f"w[y[y != {ignore_index}]].sum()"
    elif bool((target == ignore_index).any()):
        total, over = "reduction='sum'", f"(y != {ignore_index}).sum()"
    else:
        return ""
    return f"return pa.Weighted(F.cross_entropy(out, y, {total}), {over})"
