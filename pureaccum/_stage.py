"""One stage of a loss: how its function sees the batch.

rowwise(f)   x = f(params, x, *values)       on each microbatch
pooled(r)    value += r(params, x, *values)  summed over the microbatches, for others to read
full(f)      x = f(params, x, *values)       on the whole batch at once
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ._tree import Tree, flatten, paths


class Stage(NamedTuple):
    """One stage: see ``rowwise``, ``pooled`` and ``full``, which make them.

    Attributes:
        kind: Which of them made it.
        func: ``func(params, x, *values)``
        reads: The names of the values that it is given.
        name: Of a pooled value.
        merge: What makes a pooled value of the shares; None adds them.
        uses: The entries of params that it may use; None is any.
        fixed: Which of the values that it reads are constants to it.
    """

    kind: Literal["rowwise", "pooled", "full"]
    func: Callable[..., Any]
    reads: tuple[str, ...]
    name: str = ""
    merge: Callable[[Tree], Tree] | None = None
    uses: frozenset[str] | None = None
    fixed: frozenset[str] = frozenset()


def rowwise(func: Callable[..., Any], reads: str | Sequence[str] = ()) -> Stage:
    """Make a stage that looks at each row by itself, and so may be given microbatches.

    The rule: ``x = func(params, x, *values)``, on each microbatch.

    Args:
        func: ``func(params, x, *values)`` gives the next boundary: tensors with one row for each
            of ``x``. As the last stage it gives what a loss does: a scalar, ``Weighted``, either
            with aux.
        reads: The names of the values that it is given: pooled before, or keyword arguments of
            the loss.

    Returns:
        A stage, for ``staged``.

    Example:
        >>> from pureaccum import staged
        >>> embed, score = rowwise(lambda w, x: w * x), rowwise(lambda w, h: h.square().mean())
        >>> staged([embed, score])(torch.tensor(2.0), torch.tensor([1.0, 2.0]))
        tensor(10.)

    References:
        ``staged``, which runs it; ``pooled`` and ``full``, for what couples rows.
    """
    return _stage("rowwise", func, reads)


def pooled(
    func: Callable[..., Any],
    name: str | None = None,
    reads: str | Sequence[str] = (),
    merge: Callable[[Tree], Tree] | None = None,
) -> Stage:
    """Make a stage that sums something over the batch, for later stages to read.

    The rule: ``value += func(params, x, *values)``, over all microbatches; ``x`` stays what it is.

    Later stages that name the value in ``reads`` are given it for the whole batch, and their
    gradients with respect to it go back into every microbatch.

    Args:
        func: ``func(params, x, *values)`` gives a tree of tensors or numbers: the microbatch's
            share.
        name: What later stages call it; by default the name of the function.
        reads: As for ``rowwise``.
        merge: In place of adding: makes the value out of the shares of all microbatches, whose
            tensors are stacked along a new dim 0. How the batch was cut must not matter to it.

    Returns:
        A stage, for ``staged``.

    Example:
        >>> from pureaccum import staged
        >>> total = pooled(lambda w, x: x.sum(), "total")
        >>> loss = staged([total, rowwise(lambda w, x, total: w * (x / total).max(), "total")])
        >>> loss(torch.tensor(1.0), torch.tensor([1.0, 3.0]))
        tensor(0.7500)

    References:
        ``staged``, which runs it; ``batch_norm``, which is a pooled and a rowwise stage.
    """
    stage = _stage("pooled", func, reads)
    name = getattr(func, "__name__", "<lambda>") if name is None else name
    if not isinstance(name, str) or not name or name == "<lambda>":  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"name is {name!r}; expected the name by which later stages read this pooled value: "
            "pooled(func, 'moments'), rowwise(other, reads='moments')."
        )
    if merge is not None and not callable(merge):
        raise TypeError(f"merge is {merge!r}; expected a function of stacked shares, or None.")
    return stage._replace(name=name, merge=merge)


def full(func: Callable[..., Any], reads: str | Sequence[str] = ()) -> Stage:
    """Make a stage that sees all rows at once, and so has to be small.

    The rule: ``x = func(params, x, *values)``, once, on the whole batch.

    Args:
        func: ``func(params, x, *values)`` is given the boundary of the whole batch. As the last
            stage it gives the loss, otherwise the next boundary.
        reads: As for ``rowwise``.

    Returns:
        A stage, for ``staged``.

    Example:
        >>> from pureaccum import grad, staged
        >>> contrast = full(lambda w, h: (h[:, None] - h).square().mean())
        >>> loss = staged([rowwise(lambda w, x: w * x), contrast])
        >>> grad(loss, microbatch_size=1)(torch.tensor(1.0), torch.tensor([1.0, 3.0]))
        tensor(4.)

    References:
        Gao et al., `Scaling deep contrastive learning batch size under memory limited setup
        <https://arxiv.org/abs/2101.06983>`_ (GradCache), 2021.
    """
    return _stage("full", func, reads)


# For whoever runs it --------------------------------------------------------------------


def run_stage(
    stages: Sequence[Stage], i: int, params: Tree, x: Tree, values: Mapping[str, Any], rows: int
) -> tuple[Any, dict[str, Tree]]:
    """The boundary after a stage (of the last, the loss), and the share that it pooled."""
    stage = stages[i]
    try:
        out = stage.func(params, x, *(values[name] for name in stage.reads))
        if stage.kind == "pooled":
            _check_share(out, stage.name)
            return x, {stage.name: out}
        if i + 1 < len(stages):
            _check_boundary(out, rows)
        return out, {}
    except Exception as error:
        error.add_note(f"pureaccum: in {label(stages, i)}")
        raise


def label(stages: Sequence[Stage], i: int) -> str:
    """A stage as an error names it: ``stage 2, rowwise(normalise)``."""
    stage = stages[i]
    func = stage.name or getattr(stage.func, "__name__", type(stage.func).__name__)
    return f"stage {i}, {stage.kind}({func})"


def _check_boundary(x: Any, rows: int) -> None:
    leaves, spec = flatten(x)
    for at, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"{paths(spec, 'boundary')[at]} is a {type(leaf).__name__}; what a stage hands to "
                "the next is tensors with one row per sample, in any pytree. What all rows share "
                "goes into params, into a keyword argument of the loss, or into a pooled value."
            )
        if leaf.dim() == 0 or leaf.shape[0] != rows:
            raise ValueError(
                f"{paths(spec, 'boundary')[at]} has shape {tuple(leaf.shape)} for {rows} rows; "
                "what a stage hands to the next has one row per sample along dim 0. A sum over the "
                "rows is a pooled value; only the last stage gives the loss."
            )
    if not leaves:
        raise TypeError(
            f"the stage returned {x!r}, which holds no tensor; expected the next boundary. It has "
            "no return statement, perhaps."
        )


def _check_share(share: Any, name: str) -> None:
    leaves, spec = flatten(share)
    for at, leaf in enumerate(leaves):
        truth = isinstance(leaf, bool) or (isinstance(leaf, Tensor) and leaf.dtype == torch.bool)
        if truth or not isinstance(leaf, (Tensor, int, float)):
            what = "a truth value" if truth else f"a {type(leaf).__name__}"
            raise TypeError(
                f"{paths(spec, name)[at]} is {what}; expected tensors or numbers, which are summed "
                "over the microbatches. Count what is true: (x > 0).sum(0)."
            )
    if not leaves:
        raise TypeError(
            f"the stage returned {share!r}, which holds no tensor; expected what is to be pooled. "
            "It has no return statement, perhaps."
        )


def _stage(kind: Any, func: Any, reads: Any) -> Stage:
    if not callable(func):
        raise TypeError(f"{kind}() got {func!r}; expected a function of (params, x, *values).")
    names = (reads,) if isinstance(reads, str) else tuple(reads)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"reads is {reads!r}; expected names of values: 'moments'.")
    return Stage(kind, func, names)
