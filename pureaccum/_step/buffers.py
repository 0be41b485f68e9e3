"""How buffers go through the microbatches of one step.

    "freeze"      they stay what they were
    "sequential"  each microbatch is given what the one before it left
    "pooled"      BatchNorm's running statistics are updated once, from the moments of all
                  microbatches together; every other buffer goes sequentially

"pooled" gives a BatchNorm the running statistics that the full batch would have given it, if no
other BatchNorm lies above it in the network: what reaches it then does not depend on the cut. One
below another sees what that one normalised with the statistics of a microbatch. Only a module that
takes the whole batch gives it the full batch's (``functional(module, microbatch_size=...)``).

    carried = begin_buffers(policy, buffers)
    for each microbatch:
        with watching(policy) as seen:
            ..., new_buffers = loss(..., buffers=carried.values)
        collected = collect_buffers(policy, seen, new_buffers, carried.values)
        carried = advance_buffers(policy, carried, collected, keep)
    buffers = finish_buffers(carried)
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any, Literal, NamedTuple, get_args

import optree
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._base import checks, states, trees


Threading = Literal["freeze", "sequential", "pooled"]


# What batch norm saw, layer by layer, as moments that can be merged --------------------------


@states.loadable
class LayerMoments(NamedTuple):
    """What batch norm saw so far: one float64 number per channel, all its layers end to end.

    Attributes:
        elements: How many elements there were; zero for a layer that was not called.
        mean: Their mean.
        squares: The sum of their squared distances from it, which does not cancel.
        momentum: What the last call was to update the running statistics with.
    """

    elements: Tensor
    mean: Tensor
    squares: Tensor
    momentum: Tensor


class BatchNormCall(NamedTuple):
    """A call of batch norm: whose running statistics it was to update, and with what."""

    running_mean: Tensor
    elements: int
    mean: Tensor
    var: Tensor
    momentum: float


class BatchNormBuffers(NamedTuple):
    """Where the buffers of one batch norm lie among the leaves."""

    mean: int
    var: int
    tracked: int | None


def batch_norm_buffers(leaves: list[Tensor], spec: optree.PyTreeSpec) -> list[BatchNormBuffers]:
    """Find every ``…running_mean`` that has a ``…running_var`` of its shape beside it."""
    at: dict[Any, int] = {path: i for i, path in enumerate(spec.paths())}
    found: list[BatchNormBuffers] = []
    for path, mean in at.items():
        *above, name = path or ("",)
        if isinstance(name, str) and name.endswith("running_mean"):
            stem = name.removesuffix("running_mean")
            var = at.get((*above, stem + "running_var"))
            if var is not None and leaves[var].shape == leaves[mean].shape:
                found.append(
                    BatchNormBuffers(mean, var, at.get((*above, stem + "num_batches_tracked")))
                )
    return found


def layer_moments(
    calls: Sequence[BatchNormCall | None], means: list[Tensor]
) -> LayerMoments | tuple[()]:
    """The moments of some layers; the variance that batch norm keeps is the unbiased one."""
    if not means:
        return ()
    rows: list[tuple[Tensor, ...]] = []
    for call, mean in zip(calls, means, strict=True):
        zeros = torch.zeros_like(mean, dtype=torch.float64)
        if call is None:
            rows.append((zeros,) * 4)
        else:
            squares = call.var.double() * (call.elements - 1)
            rows.append((zeros + call.elements, call.mean, squares, zeros + call.momentum))
    return LayerMoments(*(joined(column) for column in zip(*rows, strict=True)))


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """The numbers of some tensors in one float64 vector, on the device of the first."""
    device = tensors[0].device
    return torch.cat([x.to(device).reshape(-1) for x in tensors]).double()


def merged_moments(a: LayerMoments, b: LayerMoments) -> LayerMoments:
    """The moments of two groups together (Chan, Golub and LeVeque, 1983)."""
    elements = a.elements + b.elements
    share = b.elements / elements.clamp(min=1)
    apart = b.mean - a.mean
    return LayerMoments(
        elements,
        a.mean + apart * share,
        a.squares + b.squares + apart * apart * (a.elements * share),
        torch.where(b.elements > 0, b.momentum, a.momentum),
    )


# How buffers go through -------------------------------------------------------------------------


@states.loadable
class Carried(NamedTuple):
    """What one microbatch hands to the next, all of it tensors.

    Attributes:
        values: The buffers that the next microbatch is given.
        moments: For ``"pooled"``, what was seen for the pairs of running statistics among
            them, if there are any; otherwise ``()``.
    """

    values: trees.Tree
    moments: LayerMoments | tuple[()]


def check_policy(policy: Threading | None) -> None:
    """Check that a policy is one of the three, or None for no buffers."""
    if policy is not None:
        checks.check_choice(policy, get_args(Threading), "buffers")


def takes_buffers(loss_fn: Callable[..., Any]) -> bool:
    """Return whether a loss can be given ``buffers=``."""
    try:
        parameters = signature(loss_fn).parameters
    except (TypeError, ValueError):  # a builtin
        return True
    return "buffers" in parameters or any(x.kind is x.VAR_KEYWORD for x in parameters.values())


def begin_buffers(policy: Threading | None, buffers: trees.Tree) -> Any:
    """What the first microbatch is given: ``Carried``, or ``()`` where none are configured."""
    if policy is None:
        return ()
    leaves, spec = checks.read_tensors(buffers, "buffers", _CAUSE)
    found = batch_norm_buffers(leaves, spec) if policy == "pooled" else []
    return Carried(buffers, layer_moments([None] * len(found), [leaves[at.mean] for at in found]))


def collect_buffers(
    policy: Threading, seen: list[BatchNormCall], new_buffers: trees.Tree, buffers: trees.Tree
) -> Carried:
    """What one microbatch makes of buffers: from those that its loss got, and those it returned.

    This is called at the transform level of the loss.
    """
    given, given_spec = trees.flatten(buffers)
    leaves, spec = checks.read_tensors(new_buffers, "new_buffers", _CAUSE)
    checks.check_fits(leaves, spec, given, given_spec, ("new_buffers", "buffers"), _CAUSE)
    for i, (leaf, other) in enumerate(zip(leaves, given, strict=True)):
        if leaf.dtype != other.dtype:
            raise ValueError(
                f"{trees.paths(spec, 'new_buffers')[i]} is {leaf.dtype}; expected {other.dtype}, "
                f"as in buffers. {_CAUSE}"
            )
    if policy == "freeze":
        return Carried((), ())
    # Clones: a checkpointed module writes to these again when the backward pass recomputes it.
    values = [leaf.clone() for leaf in leaves]
    if policy == "sequential":
        return Carried(trees.unflatten(spec, values), ())
    calls: list[BatchNormCall | None] = []
    for at in (found := batch_norm_buffers(leaves, spec)):
        its = [call for call in seen if call.running_mean is leaves[at.mean]]
        if len(its) > 1:
            raise ValueError(
                f"{trees.paths(spec, 'new_buffers')[at.mean]} got updates from {len(its)} calls "
                "of batch norm in one microbatch, but buffers='pooled' needs one. Use "
                "buffers='sequential' for a layer that is called more than once."
            )
        calls.append(its[0] if its else None)
        if its and at.tracked is not None:
            values[at.tracked] = given[at.tracked]  # the one update is counted at the end
    if strangers := len(seen) - len(calls) + calls.count(None):
        raise ValueError(
            f"batch norm updated {strangers} running mean(s) that are not in new_buffers. Call "
            "each module once in a microbatch, through functional(module).apply, and return its "
            "new_buffers unchanged, 'running_mean' with 'running_var'."
        )
    return Carried(
        trees.unflatten(spec, values), layer_moments(calls, [leaves[at.mean] for at in found])
    )


def advance_buffers(
    policy: Threading,
    carried: Carried,
    collected: Carried,
    keep: Tensor | None = None,
    reached: bool = False,
) -> Carried:
    """What the next microbatch is given: where ``keep`` is false, what this one was given.

    It is selected and never multiplied: statistics of a microbatch that does not count may be NaN.
    A loss that reached other ranks may have made its buffers of the samples of all of them, and all
    of them keep these: then only the moments are selected.
    """
    if policy == "freeze":
        return carried
    a, b, new = carried.moments, collected.moments, collected
    if a and b:
        new = new._replace(moments=merged_moments(a, b))
    if keep is None:
        return new
    kept = carried._replace(values=new.values) if reached else carried
    (leaves, spec), (old, _) = trees.flatten(new), trees.flatten(kept)
    chosen = [torch.where(keep.to(x.device), x, y) for x, y in zip(leaves, old, strict=True)]
    return trees.unflatten(spec, chosen)


def finish_buffers(carried: Carried) -> trees.Tree:
    """The new buffers, after the last microbatch.

    A layer that was called by no microbatch, or by none that counts, keeps what it has.
    """
    moments = carried.moments
    if not moments:
        return carried.values
    leaves, spec = trees.flatten(carried.values)
    found = batch_norm_buffers(leaves, spec)
    sizes = [leaves[at.mean].numel() for at in found]
    called, var = moments.elements > 0, moments.squares / (moments.elements - 1)
    for statistic, at in ((moments.mean, [x.mean for x in found]), (var, [x.var for x in found])):
        old = joined([leaves[i] for i in at])
        new = torch.where(called, torch.lerp(old, statistic, moments.momentum), old)
        for i, part in zip(at, new.split(sizes), strict=True):
            x = leaves[i]
            leaves[i] = part.view_as(x).to(x.device, x.dtype, copy=True)  # memory of its own
    for at, flags in zip(found, called.split(sizes), strict=True):
        if at.tracked is not None:
            leaves[at.tracked] = leaves[at.tracked] + flags.any().to(leaves[at.tracked].device)
    return trees.unflatten(spec, leaves)


# Batch norm, watched --------------------------------------------------------------------


@contextmanager
def watching(policy: Threading) -> Generator[list[BatchNormCall]]:
    """Keep the moments of every batch norm that is called inside, for ``"pooled"``.

    Its running statistics are not updated then: each microbatch finds them as they were before
    the first. Other kernels (SyncBatchNorm over several ranks, InstanceNorm) are not watched, and
    their statistics go sequentially.
    """
    seen: list[BatchNormCall] = []
    if policy != "pooled":
        yield seen
        return
    with _Watch(seen):
        yield seen


_STATISTICS, _AFFINE = ("running_mean", "running_var"), ("weight", "bias")
_KNOBS = ("training", "momentum", "eps")
_SIGNATURES = {
    F.batch_norm: ("input", *_STATISTICS, *_AFFINE, *_KNOBS),
    torch.batch_norm: ("input", *_AFFINE, *_STATISTICS, *_KNOBS, "cudnn_enabled"),
}


class _Watch(TorchFunctionMode):
    """Hands batch norm zeros to update, with momentum 1: they become the batch's own moments."""

    def __init__(self, seen: list[BatchNormCall]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        observed = checks.here.observed is not None  # what is called there is called again
        if observed or (func is not F.batch_norm and func is not torch.batch_norm):
            return func(*args, **(kwargs or {}))
        call = dict(zip(_SIGNATURES[func], args, strict=False)) | (kwargs or {})
        running_mean, x = call["running_mean"], call["input"]
        if not call.get("training") or running_mean is None:
            return func(**call)
        mean, var = torch.zeros_like(running_mean), torch.zeros_like(call["running_var"])
        out = func(**(call | {"running_mean": mean, "running_var": var, "momentum": 1.0}))
        elements = x.numel() // max(x.shape[1], 1)
        self.seen.append(
            BatchNormCall(
                running_mean=running_mean,
                elements=elements,
                mean=mean,
                var=var,
                momentum=call.get("momentum", 0.1),
            )
        )
        return out


# Checks ---------------------------------------------------------------------------------


_CAUSE = (
    "With buffers, aux is (new_buffers, aux), and new_buffers are like buffers. Return the "
    "new_buffers of functional(module).apply."
)
