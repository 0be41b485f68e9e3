"""A loss in stages, for losses that are no sum over rows.

    rowwise(f)   x = f(params, x, *reads)       on each microbatch
    pooled(r)    value += r(params, x, *reads)  summed over the microbatches, for others to read
    full(f)      x = f(params, x, *reads)       on the whole batch at once

What stands between two stages is a boundary: any pytree of tensors with one row per sample. The
first is the batch, and the last stage gives the loss. Called on a batch, the stages simply follow
one another; with a microbatch size they go breadth-first (see ``_staged.py``), which is the same
function: a batch norm is ``pooled`` and ``rowwise``, a contrastive loss ``rowwise`` and ``full``.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from ._batches import need_rows, read_batch
from ._inputs import check_choice
from ._shares import more, pooled_value
from ._stage import Stage, label, run_stage
from ._tree import Tree


Boundaries = Literal["device", "host"]


class Staged(NamedTuple):
    """A loss in stages: see ``staged``.

    Attributes:
        stages: What it goes through.
        boundaries: Where they are kept.
    """

    stages: tuple[Stage, ...]
    boundaries: Boundaries

    def __call__(self, params: Tree, batch: Tree, **given: Any) -> Any:
        """The loss of a batch as a whole."""
        rows = need_rows(read_batch(batch))
        check_call(self, rows, given)
        x, values = batch, given
        for i in range(len(self.stages)):
            x, share = run_stage(self.stages, i, params, x, values, rows)
            for name, its in share.items():
                stage = self.stages[i]
                values = values | {name: pooled_value(stage, more(stage, None, its), its)}
        return x


def staged(stages: Sequence[Stage], *, boundaries: Boundaries = "device") -> Staged:
    """Make a loss out of stages, exact under microbatching although its rows are coupled.

    The rule, in ``grad``, ``grad_and_value``, ``value`` and ``make_step``::

        for stage in stages:
            for part in microbatches:
                x[part] = stage(params, x[part], values)  # x is kept
        for stage in reversed(stages):
            ...  # computed again and pulled back, part by part

    The gradient is that of the full batch, for one more forward pass. Random numbers, keyed or of
    torch's generator, are the same when a stage is computed again. A stage that writes in place to
    what it is given, or captures, is refused: with ``engine="func"`` before it has.

    Args:
        stages: ``rowwise``, ``pooled`` and ``full`` stages; the last gives the loss, and is no
            ``pooled`` one.
        boundaries: Where they are kept: ``"device"``, or ``"host"`` for pinned memory of the
            host, copied while the device computes.

    Returns:
        The loss, ``loss(params, batch, **given)``.

    Example:
        >>> import torch
        >>> from pureaccum import grad_and_value, pooled, rowwise
        >>> loss = staged(
        ...     [
        ...         pooled(lambda w, x: (x.sum(), len(x)), "sums"),
        ...         rowwise(lambda w, x, sums: ((w * x - sums[0] / sums[1]) ** 2).mean(), "sums"),
        ...     ]
        ... )
        >>> w, x = torch.tensor(1.0), torch.tensor([1.0, 2.0, 6.0])
        >>> grad_and_value(loss, microbatch_size=2)(w, x)
        (tensor(9.3333), tensor(4.6667))

    References:
        Gao et al., `Scaling deep contrastive learning batch size under memory limited setup
        <https://arxiv.org/abs/2101.06983>`_ (GradCache), which is ``[rowwise, full]``, 2021.
    """
    check_choice(boundaries, get_args(Boundaries), "boundaries")
    loss = Staged(tuple(stages), boundaries)
    if not loss.stages:
        raise ValueError("staged() got no stages; expected one at least, the last gives the loss.")
    pools: dict[str, int] = {}
    for i, stage in enumerate(loss.stages):
        if not isinstance(stage, Stage):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"stage {i} is a {type(stage).__name__}; expected rowwise(f), pooled(r) or full(f)"
                + (", which says how the function sees the batch." if callable(stage) else ".")
            )
        if stage.name in pools:
            raise ValueError(
                f"{label(loss.stages, i)} pools {stage.name!r}, as stage {pools[stage.name]} does; "
                "expected names of their own: pooled(func, name)."
            )
        if stage.name:
            pools[stage.name] = i
    for i, stage in enumerate(loss.stages):
        for name in stage.reads:
            if pools.get(name, -1) >= i:
                raise ValueError(
                    f"{label(loss.stages, i)} reads {name!r}, which "
                    f"{label(loss.stages, pools[name])} pools, not before it; expected a value "
                    "that is pooled before. Move the pooled stage up."
                )
    if loss.stages[-1].kind == "pooled":
        raise ValueError(
            f"{label(loss.stages, len(loss.stages) - 1)} is the last stage, which gives the loss; "
            "expected a rowwise or a full stage there, which may read the pooled value."
        )
    return loss


# For whoever runs the stages ------------------------------------------------------------------


def check_call(loss: Staged, rows: int, given: Mapping[str, Any]) -> None:
    """Check what a call gives before any stage runs."""
    pools = {stage.name for stage in loss.stages}
    known = pools | set(given)
    for name in pools & set(given):
        raise ValueError(
            f"{name!r} came as a keyword argument, and is the name of a pooled value; expected "
            "another name for one of the two."
        )
    read = {name for stage in loss.stages for name in stage.reads}
    for name in set(given) - read - {"keys", "buffers"}:
        raise ValueError(
            f"{name!r} came as a keyword argument, and no stage reads it; expected a name that "
            f"stands in the reads of a stage. {sorted(read - pools)} do."
        )
    for i, stage in enumerate(loss.stages):
        for name in stage.reads:
            if name not in known:
                raise ValueError(
                    f"{label(loss.stages, i)} reads {name!r}, which no stage pools and this call "
                    "does not give. Is it a keyword argument of the loss, loss(params, batch, "
                    f"{name}=...)? make_step gives 'keys' and 'buffers' where they are configured."
                )
        if stage.kind == "full" and rows == 0:
            raise ValueError(f"{label(loss.stages, i)} would see a batch without rows.")


def check_arguments(
    args: tuple[Any, ...], argnums: tuple[int, ...], batch_argnums: tuple[int, ...]
) -> None:
    """Check how a loss in stages is called."""
    if len(args) != 2 or argnums != (0,) or batch_argnums != (1,):
        raise ValueError(
            "a staged loss is differentiated with respect to argument 0 and cut along argument 1, "
            f"but {len(args)} positional arguments came, with argnums={argnums} and "
            f"batch_argnums={batch_argnums}; expected loss(params, batch), and by name what all "
            "rows share."
        )


def refuse_stream(loss: Any) -> None:
    """A stream of microbatches, each of which is forgotten, is no batch to a loss in stages."""
    if isinstance(loss, Staged):
        raise TypeError(
            "this loss is staged: its rows are coupled, so that microbatches which come one after "
            "the other do not add up. Hand over the batch as a whole, which is cut inside: "
            "grad_and_value(loss, microbatch_size=...), or step(state, batch)."
        )


def refuse_skip() -> None:
    """No microbatch can be left out."""
    raise ValueError(
        "nonfinite='skip' leaves out a microbatch, but in a staged loss every row may be in every "
        "gradient. Use 'propagate': a step whose gradient is not finite is not applied."
    )


def given_the_batch(loss: Staged) -> list[bool]:
    """Of every stage, whether it is given the batch itself, and not a boundary made of it."""
    moved = [stage.kind != "pooled" for stage in loss.stages]
    return [not any(moved[:i]) for i in range(len(moved))]


def sees_all_at_once(loss: Staged) -> bool:
    """Whether the last stage, which gives the loss, is given the whole batch."""
    return loss.stages[-1].kind == "full"
