"""An exponential moving average of parameters as a pure state, like torch's AveragedModel.

    init      a copy of the parameters, in the accumulation dtype
    update    the first copies the parameters; later ones move the average towards them

In bfloat16, 0.999 * x + 0.001 * y is x, so averages are at least float32.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from .._base import checks, dtensors, reprs, states, trees
from .._base.settings import records
from .._base.torch_internals import functorch, kernels, modes
from . import schedules
from . import updates as optimizers
from .updates import fitting, refuse_graph


@states.loadable
class EmaState(NamedTuple):
    """An average of parameters.

    Attributes:
        params: The average, a tree like the parameters, in float32 or wider.
        updates: The number of updates so far, a 0-d int64 tensor.
    """

    params: trees.Tree
    updates: Tensor


class Ema(NamedTuple):
    """The two functions of a parameter average.

    Attributes:
        init: ``init(params)`` returns an average that is a copy of the parameters.
        update: ``update(state, params, applied=None, donate=False)`` returns the next average.
            ``applied`` is a 0-d bool tensor. If it is false, the average is returned bit for bit
            unchanged. ``donate=True`` reuses the memory of the old average.
    """

    init: Callable[[trees.Tree], EmaState]
    update: Callable[..., EmaState]

    __repr__ = reprs.of_made


@records
def ema(decay: float | schedules.Schedule) -> Ema:
    """Average parameters over training steps, with exponentially decaying weights.

    The rule, after a first update that copies the parameters::

        average = decay * average + (1 - decay) * params

    It is computed as ``lerp(average, params, 1 - decay)``, like torch's AveragedModel with
    ``get_ema_multi_avg_fn(decay)``. Averages are float32 or wider, also those of bfloat16 leaves.
    Integer and bool leaves, such as a BatchNorm's batch counter, are not averaged: the latest value
    is copied. So a tree of parameters and buffers is averaged as with ``use_buffers=True``.

    Pass a step's ``info.applied`` to ``update``, so that skipped steps do not count.

    With ``donate=True`` an update has the same bits and needs no memory for a second average. It
    overwrites the old one, and every later use of the old one raises.

    At top level autograd records nothing. In your own ``torch.compile``, call it under ``no_grad``
    if parameters require grad. Otherwise each average keeps the graph of all earlier ones.

    Args:
        decay: The weight of the old average in each update, in [0, 1). Or a function from the
            number of earlier updates, a 0-d tensor, to a 0-d tensor. The usual warm-up is
            ``lambda n: ((1 + n.double()) / (10 + n)).clamp(max=0.999)``.

    Example:
        >>> average_of = ema(0.75)
        >>> average = average_of.init({"w": torch.tensor([0.0])})
        >>> for w in (1.0, 2.0, 2.0):
        ...     average = average_of.update(average, {"w": torch.tensor([w])})
        >>> average.params
        {'w': tensor([1.4375])}

    References:
        `torch.optim.swa_utils.AveragedModel
        <https://docs.pytorch.org/docs/stable/optim.html>`_; Polyak and Juditsky,
        `Acceleration of stochastic approximation by averaging
        <https://doi.org/10.1137/0330046>`_, 1992.
    """
    if not callable(decay):
        expected = "a number from 0, and below 1, or a function of the number of updates"
        decay = checks.check_number(decay, "decay", expected, lambda it: 0 <= it < 1)

    def init(params: trees.Tree) -> EmaState:
        """Return a copy of the parameters, as an average without updates."""
        leaves, spec = _read_leaves(params)
        with _without_graph(leaves):
            parts, layouts = dtensors.opened(leaves)
            copies = [x.to(_kept_dtype(x), copy=True) for x in parts]
        updates = torch.zeros((), dtype=torch.int64, device=leaves[0].device)
        return EmaState(trees.unflatten(spec, dtensors.closed(copies, layouts)), updates)

    def update(
        state: EmaState, params: trees.Tree, applied: Tensor | None = None, *, donate: bool = False
    ) -> EmaState:
        """Return the average after one more set of parameters."""
        checks.check_state(state, EmaState, "ema")
        old, spec = kept = checks.read_tensors(state.params, "state.params", _CAUSE)
        leaves = fitting(params, kept, ("params", "state.params"), _CAUSE)
        _check_kinds(leaves, old, spec)
        counts = True if applied is None else _seen(_check_flag(applied))
        given_up = [*old, state.updates] if donate and modes.may_add_in_place() else []
        with _without_graph([*leaves, *old]):
            parts, layouts = dtensors.opened(old)
            latest, _ = dtensors.opened(dtensors.placed_like(leaves, old))
            keep: Any = decay
            if callable(decay) and counts is not False:
                keep = _decay_at(decay, state.updates)
            # What else the next state holds is made before anything is written.
            more = counts if isinstance(counts, bool) else trees.moved(counts, state.updates.device)
            updates = state.updates + more
            if counts is False:
                new = states.taken([parts], True)[0] if given_up else [x.clone() for x in parts]
            else:
                rule = _Rule(1 - keep, _seen(state.updates == 0), counts)
                new = (
                    _written(rule, parts, latest, given_up) if given_up else rule.of(parts, latest)
                )
        states.mark(given_up)
        return EmaState(trees.unflatten(spec, dtensors.closed(new, layouts)), updates)

    return Ema(init, update)


# The average ---------------------------------------------------------------------------------


class _Rule(NamedTuple):
    """What an average becomes; its flags are bools where the host knows."""

    share: Any  # of the latest parameters
    first: bool | Tensor  # whether this is the first update, which takes the parameters as they are
    counts: bool | Tensor  # whether the update is applied

    def of(self, old: list[Tensor], latest: list[Tensor]) -> list[Tensor]:
        """The next average, leaf by leaf, in new tensors."""
        if self.first is True:
            new = [y.to(x.dtype, copy=True) for x, y in zip(old, latest, strict=True)]
        else:
            new = _averaged(old, latest, self.share)
        if isinstance(self.first, Tensor):
            new = _selected(self.first, latest, new)
        return _selected(self.counts, new, old) if isinstance(self.counts, Tensor) else new


def _written(
    rule: _Rule, old: list[Tensor], latest: list[Tensor], given_up: list[Tensor]
) -> list[Tensor]:
    """The same bits in the memory of the old average, all of which refuses after an error.

    Where nobody knows whether it is to be averaged at all, a group of leaves is computed beside it.
    """
    work, written = states.taken([old], True)[0], False
    try:
        if rule.first is False and rule.counts is True:
            written = True
            return _averaged(work, latest, rule.share, into=work)
        for part in optimizers.groups([work]):
            new = rule.of(work[part], latest[part])
            written = True
            kernels.foreach_copy_(work[part], new)
            del new  # before there is a copy of the next
    except BaseException:
        if written:
            states.mark(given_up, states.Spoiled)
        raise
    return work


def _averaged(
    old: list[Tensor], latest: list[Tensor], share: Any, into: list[Tensor] | None = None
) -> list[Tensor]:
    """The average of each leaf, with such a share of the latest."""
    if isinstance(share, float) and trees.at_once([*old, *latest]):
        if into is None:
            return [*kernels.foreach_lerp(old, latest, share)]
        kernels.foreach_lerp_(into, latest, share)
        return into
    of, outs = trees.scalars_of(share), into or [None] * len(old)
    return [_mean(x, y, of, out) for x, y, out in zip(old, latest, outs, strict=True)]


def _mean(x: Tensor, y: Tensor, share_of: Callable[[Tensor], Tensor], out: Tensor | None) -> Tensor:
    """A leaf's average with a share of the latest; the latest of what is no number to average."""
    if not trees.continuous(x):
        return y.clone() if out is None else out.copy_(y)
    share = share_of(x).to(x.dtype)  # a complex leaf asks for its own
    return torch.lerp(x, y.to(x.dtype), share, out=out)


def _selected(flag: Tensor, new: list[Tensor], old: list[Tensor]) -> list[Tensor]:
    """The new leaves where ``flag``, and else the old ones, in the dtypes of these."""
    pairs = zip(new, old, strict=True)
    return [torch.where(trees.moved(flag, x.device), y.to(x.dtype), x) for y, x in pairs]


def _decay_at(decay: schedules.Schedule, updates: Tensor) -> Any:
    """What an average keeps of itself, by a function: a number where the host has it."""
    return trees.on_host(schedules.rate_at(decay, updates, "decay").double())[0]


def _seen(flag: Tensor) -> Any:
    """A flag as a bool where the host can look, for all members of a vmap."""
    return flag if (told := trees.known(flag)) is None else told


def _check_flag(applied: Any) -> Tensor:
    if not isinstance(applied, Tensor) or applied.ndim or applied.dtype != torch.bool:
        came = reprs.kind(applied)
        if isinstance(applied, Tensor):
            came = f"a tensor of shape {tuple(applied.shape)} and {applied.dtype}"
        raise TypeError(
            f"applied is {came}; expected None or a 0-d bool tensor, such as info.applied."
        )
    return applied


# Leaves --------------------------------------------------------------------------------------


_CAUSE = "Pass an average that init made from these params."


def _read_leaves(params: trees.Tree) -> trees.Flat:
    """Flatten parameters, buffers or both, or say which leaf is no tensor."""
    leaves, spec = checks.read_tensors(
        params, "params", "Leave out settings and modules, which have no average."
    )
    if not leaves:
        raise ValueError("params has no leaves, so there is nothing to average.")
    return leaves, spec


def _kept_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a leaf's average."""
    return trees.accumulation_dtype(x.dtype) if trees.continuous(x) else x.dtype


def _check_kinds(leaves: list[Tensor], old: list[Tensor], spec: optree.PyTreeSpec) -> None:
    """Check that parameters are of the dtypes and devices of their average."""
    for i, (x, kept) in enumerate(zip(leaves, old, strict=True)):
        if _kept_dtype(x) != kept.dtype or x.device != kept.device:
            raise ValueError(
                f"{trees.paths(spec, 'params')[i]} is {x.dtype} on {x.device}, but its average is "
                f"{kept.dtype} on {kept.device}; expected the dtype and device that init got. "
                f"{_CAUSE}"
            )


def _without_graph(leaves: list[Tensor]) -> AbstractContextManager[Any]:
    """Record nothing by plain autograd: every average would keep the graph of all before it."""
    if modes.transform_active() or functorch.any_tangent(leaves):
        return nullcontext()
    if checks.here.backward is not None:
        refuse_graph("an average by ema", leaves)
    return torch.no_grad()
