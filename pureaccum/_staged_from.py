"""The stages of a module, cut at its BatchNorm layers.

for each level:                  # see _cut_graph
    rowwise   normalise with the moments that were pooled before, and what follows on it
    pooled    the moments of what each BatchNorm is given next
the last one also gives the loss, and the running statistics after the whole batch
"""

from collections.abc import Callable, Mapping
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from ._arguments import Arguments, check_tensors
from ._batch_norm import Share, moments_of, share_of
from ._cut_graph import INPUTS, Call, Level, cut
from ._held import Held, holding
from ._loss import is_pair
from ._module import Functional, cast_along, functional
from ._stage import Stage, pooled, rowwise
from ._stages import Boundaries, Staged, staged
from ._torch import tensor_places, version
from ._traced import trace, written_to
from ._tree import NAMESPACE, Tree, map, unflatten


def staged_from(
    module: nn.Module,
    loss_fn: Callable[[Any, Tree], Any] | None = None,
    *,
    inputs: Callable[[Tree], Any] | None = None,
    boundaries: Boundaries = "device",
) -> Staged:
    """Make a staged loss out of a module with BatchNorm layers, exact under microbatching.

    The rule, with ``fn = functional(module)``::

        loss, new_buffers = staged_from(module, loss_fn)(fn.params, batch, buffers=fn.buffers)

    Gradients and running statistics are those of the full batch, whatever the size of the
    microbatches. For every BatchNorm in training mode the network is cut in two: all microbatches
    go up to it, what it is given is kept, its moments are merged, and all go on. torch.fx traces
    the module, so what it does may not depend on the numbers in the batch; and everything but
    BatchNorm has to treat each row by itself.

    The modes (``train()`` or ``eval()``) of the module and of all those in it are the ones that
    they have now, and so is everything but parameters and buffers: what is changed in the module
    later changes nothing. A BatchNorm in ``eval()`` stays frozen. An argument of ``forward`` that
    has a default keeps it.

    Args:
        module: A module in training mode. No other buffers may change in its ``forward``.
        loss_fn: ``loss_fn(out, batch)`` gives the loss of a microbatch from what the module
            returned: a scalar, ``Weighted``, or either with aux. None where the module itself
            returns that.
        inputs: ``inputs(batch)`` gives the module's arguments: a tensor, a tuple of positional
            ones, or a dict of arguments by name. By default the batch itself is one of these.
        boundaries: As for ``staged``.

    Returns:
        The loss. It returns ``(loss, new_buffers)``, or ``(loss, (new_buffers, aux))``, for
        ``has_aux=True, aux_reduction="last"`` or for ``make_step(..., buffers="pooled")``; of a
        module that has no buffers, what ``loss_fn`` returns.

    Example:
        >>> from pureaccum import functional, grad_and_value
        >>> module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
        >>> loss = staged_from(module, lambda out, batch: out.square().mean())
        >>> grad = grad_and_value(loss, has_aux=True, microbatch_size=2, aux_reduction="last")
        >>> fn = functional(module)
        >>> grads, (value, new_buffers) = grad(fn.params, torch.randn(7, 3), buffers=fn.buffers)
        >>> new_buffers["1.num_batches_tracked"]
        tensor(1)

    References:
        Ioffe and Szegedy, `Batch normalization <https://arxiv.org/abs/1502.03167>`_, 2015;
        `torch.fx <https://docs.pytorch.org/docs/stable/fx.html>`_
    """
    fn = functional(module)
    for path, part in module.named_modules(prefix="module"):
        if isinstance(part, LazyModuleMixin):
            raise ValueError(
                f"{path} is a {type(part).__name__}, which does not know its shape yet; call the "
                "module once, on one batch, before staged_from."
            )
    for name, func in ("loss_fn", loss_fn), ("inputs", inputs):
        if func is not None and not callable(func):
            raise TypeError(f"{name} is {func!r}; expected a function, or None.")
    arguments = Arguments(module, inputs)
    levels, calls = cut(*trace(module, arguments.positional, arguments.by_name))
    names = {
        id(x): name
        for kind in (module.named_parameters(), module.named_buffers())
        for name, x in kind
    }
    end = _End(calls, names, bool(fn.buffers), loss_fn)
    stages: list[Stage] = []
    for i, level in enumerate(levels):
        begins, ends = arguments if i == 0 else None, end if i + 1 == len(levels) else None
        stages.append(_stage(level, names, fn, begins, ends, loss_fn is not None))
        stages += [_pool(call) for call in calls if call.level == i]
    return staged(stages, boundaries=boundaries)


BATCH = "the batch"  # beside the names of nodes, which have no blanks
Names = Mapping[int, str]  # of parameters and buffers, by id; tied ones by their first


def _stage(
    level: Level,
    names: Names,
    fn: Functional,
    arguments: Arguments | None,
    end: "_End | None",
    carries: bool,
) -> Stage:
    graph = level.module
    places = [
        (
            place,
            {at: names.get(id(x), "") for at, x in place[1][place[2]].items()},
            place[1][place[2]],
        )
        for place in tensor_places(graph)
    ]
    its = {name for _, wanted, _ in places for name in wanted.values()}
    own, states = ([name for name in those if name in its] for those in (fn.params, fn.buffers))
    frozen = {name: x for name, x in fn.frozen.items() if name in its}
    dtypes = {name: x.dtype for name, x in fn.params.items()}
    every = fn.params | fn.frozen, fn.buffers
    shapes = [{name: x.shape for name, x in those.items()} for those in every]
    reads = dict.fromkeys(level.moments)
    if end is not None:
        reads |= dict.fromkeys(call.moments for call in end.updates)
    if fn.buffers and (states or end is not None or arguments is not None):
        reads["buffers"] = None

    def rows(params: Tree, x: Tree, *values: Any) -> Any:
        read = dict(zip(reads, values, strict=True))
        buffers = read.get("buffers", {})
        if arguments is not None:
            known = {**fn.frozen, **params} if isinstance(params, Mapping) else params
            check_tensors(known, shapes[0], "params", "parameter")
            check_tensors(buffers, shapes[1], "buffers", "buffer")
            x = {INPUTS: arguments.of(x), BATCH: _packed(x)}
        taken = [_unpacked(x[name]) for name in level.takes]
        cloned = {name: buffers[name].clone() for name in states}
        before = {name: version(buffer) for name, buffer in cloned.items()}
        given = cast_along(frozen, params, dtypes) | {name: params[name] for name in own} | cloned
        given |= {name: params[name] for name in frozen if name in params}
        held: Held = {}
        for place, wanted, constants in places:  # functional_call takes three times as long
            tensors = {at: given.get(name, constants[at]) for at, name in wanted.items()}
            held[place[0], place[2]] = place, tensors
        with holding(held):
            out = graph.forward(*taken, *(read[name] for name in level.moments))
        for (_, tensors), (_, wanted, _) in zip(held.values(), places, strict=True):
            for at, name in wanted.items():
                if name in cloned and tensors[at] is not cloned[name]:
                    raise RuntimeError(written_to(f"buffers[{name!r}]"))
        for name, buffer in cloned.items():
            if before[name] != version(buffer):
                raise RuntimeError(written_to(f"buffers[{name!r}]"))
        if end is not None:
            return end(out, read, _unpacked(x.get(BATCH)))
        after = {name: _packed(y) for name, y in zip(level.gives, out, strict=True)}
        kept = [*level.passes, *([BATCH] if carries else [])]
        return {name: x[name] for name in kept} | after

    *does, _ = [n.name for n in graph.graph.nodes if n.op not in ("placeholder", "get_attr")]
    rows.__name__ = " to ".join([*does[:1], *does[-1:]])
    fixed = frozenset(reads) - frozenset(level.moments)  # for the running statistics
    return rowwise(rows, reads=tuple(reads))._replace(uses=frozenset(own), fixed=fixed)


# Batch norm -------------------------------------------------------------------------------


_DIMS = {nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,)}


def _pool(call: Call) -> Stage:
    layer = call.layer
    dims = next((dims for cls, dims in _DIMS.items() if isinstance(layer, cls)), None)
    counts = layer.affine or layer.running_mean is not None

    def share(params: Tree, x: Tree) -> Share:
        rows = x[call.x]
        if rows.dim() < 2 or (dims and rows.dim() not in dims):
            expected = " or ".join(f"{n}D" for n in dims or ("at least 2",))
            raise ValueError(f"{call.path}: expected {expected} input (got {rows.dim()}D input)")
        if counts and rows.shape[1] != layer.num_features:
            raise ValueError(
                f"{call.path} normalises {layer.num_features} channels, but its input has shape "
                f"{tuple(rows.shape)}; channels are dim 1."
            )
        return share_of(rows)

    stage = pooled(share, call.moments, merge=lambda shares: moments_of(shares, layer.eps))
    return stage._replace(uses=frozenset())


class _End:
    """What the last level returns."""

    def __init__(
        self,
        calls: list[Call],
        names: Names,
        has_buffers: bool,
        loss_fn: Callable[[Any, Tree], Any] | None,
    ) -> None:
        self.has_buffers, self.loss_fn = has_buffers, loss_fn
        self.updates = [call for call in calls if _tracks(call.layer)]
        self.names = names

    def __call__(self, out: Any, read: Mapping[str, Any], batch: Tree) -> Any:
        loss = out if self.loss_fn is None else self.loss_fn(out, batch)
        if not self.has_buffers:
            return loss
        new = dict(read["buffers"])
        for call in self.updates:  # in the order of the calls, of which one layer may have several
            # Running statistics have no history, whoever differentiates.
            layer, pooled = call.layer, map(torch.detach, read[call.moments])
            mean, var = (self.names[id(x)] for x in (layer.running_mean, layer.running_var))
            momentum = layer.momentum or 0.0
            if layer.num_batches_tracked is not None:
                count = self.names[id(layer.num_batches_tracked)]
                new[count] = new[count] + 1
                if layer.momentum is None:  # the mean over all batches so far
                    momentum = 1.0 / new[count].double()
            new[mean], new[var] = pooled.running(new[mean], new[var], momentum)
        if is_pair(loss):
            return loss[0], (new, loss[1])
        return loss, new


def _tracks(layer: Any) -> bool:
    return layer.track_running_stats and layer.running_mean is not None


# Between levels ----------------------------------------------------------------------------


class _Static:
    """A size, or whatever is no tensor: a part of the structure."""

    def __init__(self, value: Any) -> None:
        self.value = value


_node: Any = optree.register_pytree_node  # whose types know collections only
_node(_Static, lambda it: ((), it.value), lambda value, _: _Static(value), namespace=NAMESPACE)


def _packed(x: Any) -> Any:
    """Tensors as they are, since what is handed on is known by its identity."""
    if isinstance(x, Tensor):
        return x
    return map(lambda leaf: leaf if isinstance(leaf, Tensor) else _Static(leaf), x)


def _unpacked(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x
    leaves, spec = optree.tree_flatten(
        x, is_leaf=lambda it: isinstance(it, _Static), namespace=NAMESPACE
    )
    return unflatten(spec, [it.value if isinstance(it, _Static) else it for it in leaves])
