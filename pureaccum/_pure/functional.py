"""A module as a pure function of its parameters and buffers.

    out, new_buffers = apply(params, buffers, *args, **kwargs)

It does what ``torch.func.functional_call`` leaves to its caller. It clones buffers, so that no
argument is changed, and returns those that the module wrote. Frozen parameters stay frozen. Threads
do not share the tensors of a call (see shell.py). A name that belongs to no tensor of the module,
or a tensor of another shape, raises an error.
"""

import sys
from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._base import checks, reprs
from .._base.torch_internals import autograd, functorch, modes, module_slots
from .._core import buckets, closures
from . import loading, microbatched_module, shell


class ModuleApply(Protocol):
    """A module as a function of its parameters and buffers."""

    def __call__(
        self, params: dict[str, Tensor], buffers: Any, /, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """What the module returns, and its new buffers."""
        ...


class Functional(NamedTuple):
    """A module as a pure function, and the tensors that belong to it.

    ``params``, ``frozen`` and ``buffers`` are detached views of the module's tensors, until
    ``load`` copies a state into the module: then they keep the old numbers.

    Attributes:
        apply: ``apply(params, buffers, *args, **kwargs)`` calls the module with these tensors in
            place of its own, and returns the pair ``(out, new_buffers)``.
        params: The parameters that require grad, by name; a tied parameter once, under its first
            name.
        buffers: The module's buffers by name, including those that are not persistent.
        frozen: The other parameters, which ``apply`` adds by itself.
    """

    apply: ModuleApply
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    frozen: dict[str, Tensor]

    def load(self, params: Any, buffers: Any = ()) -> None:
        """Copy a trained state into the module: ``fn.load(state.params, state.buffers)``.

        Tied parameters stay tied, and frozen ones stay what they are unless ``params`` has them.
        Names may have the prefixes of torch.compile and DistributedDataParallel. Whatever is
        missing, unknown, or of another shape raises before anything is copied. ``fn.params``,
        ``fn.buffers`` and ``fn.frozen`` keep the numbers that they have.

        Args:
            params: All parameters that were trained, by name.
            buffers: All buffers by name; ``()`` leaves the module's as they are.
        """
        assert isinstance(self.apply, partial)
        places, names, *_ = self.apply.args
        if [*map(id, places.modules[0].modules())] != [*map(id, places.modules)]:
            shell.check_unchanged(places)
        views = self.params | self.frozen | self.buffers
        targets: list[loading.Target] = []
        for given, shapes, needed, root in (
            (params, names.params, self.params, "params"),
            (buffers, names.buffers, self.buffers if buffers else (), "buffers"),
        ):
            new = loading.by_own_names(given, shapes, root)
            _check(new, shapes, places, root)
            if missing := [name for name in needed if name not in new]:
                raise ValueError(
                    f"{root}[{missing[0]!r}] is missing; expected all {len(needed)} {root} of the "
                    "module. Likely cause: the state of another model."
                )
            for name, x in new.items():
                own = shell.own_tensor(places, name)
                targets.append(loading.Target(f"{root}[{name!r}]", x, own, views[name]))
        loading.copy_into(targets)
        # Other tensors than were handed out, which ``apply`` takes in place of the module's own.
        self.frozen.update({name: x.detach() for name, x in self.frozen.items() if name in params})

    def __repr__(self) -> str:
        """The class of the module, and how much belongs to it: numbers of all its parameters."""
        module = self.apply.args[0].modules[0] if isinstance(self.apply, partial) else self.apply
        counts = [
            f"{len(self.params)} parameters",
            f"{len(self.frozen)} frozen",
            f"{len(self.buffers)} buffers",
        ]
        parts = [part for part in counts if not part.startswith("0 ")]
        numbers = sum(x.numel() for x in [*self.params.values(), *self.frozen.values()])
        whole = self.apply.args[3] if isinstance(self.apply, partial) else None
        size = f", microbatch_size={whole.size}" if whole is not None else ""
        held = ", ".join([type(module).__name__, *parts, f"{numbers:,} numbers"])
        return f"Functional({held}{size})"


def functional(
    module: nn.Module,
    *,
    microbatch_size: int | Sequence[int] | None = None,
    group: Any = None,
) -> Functional:
    """Make a pure function of a module, and leave the module itself as it is.

    The rule::

        out, new_buffers = apply(params, buffers, *args, **kwargs)
        # out is module(*args, **kwargs) with ``params`` and ``buffers`` in place of its own

    ``apply`` uses the modes (``train()`` or ``eval()``) and attributes that the module has at the
    time of the call, and assigns attributes that ``forward`` assigns. Parameters, names, shapes and
    ties are those of the time when ``functional`` was called. Pass all buffers, or ``()`` if the
    module has none. ``params`` may hold some of the parameters; the module's own values serve for
    the others.

    A parameter that does not require grad is frozen: it is not in ``params``, so no optimizer moves
    or decays it. ``apply`` adds it, cast to the dtype of the given parameters if they were cast.
    ``params`` may hold another value for it. Under a ``vmap`` over the parameters it must, because
    the members of an ensemble may have different frozen parameters.

    ``apply`` is safe in threads. It works under torch.func's transforms and in torch.compile. Under
    ``vmap`` a BatchNorm in training mode needs mapped buffers too.

    With a ``microbatch_size``, ``apply`` takes a whole batch in the memory of one microbatch and
    returns what it returns without a size, including BatchNorm's running statistics. All tensors
    that the module takes and returns have one row per sample along dim 0; compute the loss by plain
    code afterwards. Every microbatch runs up to the BatchNorm, its inputs are stored, the
    statistics are merged, then every microbatch continues. Each call first runs the module on one
    microbatch and records what it computes, so its control flow must not depend on tensor values
    or on the number of samples, and every layer but BatchNorm must treat each sample separately.
    (Inside ``torch.compile`` the batch is taken whole.)

    Args:
        module: Any module but DistributedDataParallel, DataParallel or FSDP.
        microbatch_size: Samples per microbatch; the last one may be shorter. Or a list of sizes.
            None calls the module with the whole batch.
        group: The ranks that share each batch. Each rank passes its own samples, perhaps none, and
            BatchNorm uses the statistics of all of them. All ranks call ``apply`` together.
            Derivatives are those of the sum over all ranks' results, as
            ``make_step(..., group=...)`` adds them up. It raises inside ``torch.compile``.

    Example:
        >>> fn = functional(torch.nn.BatchNorm1d(2, affine=False))
        >>> x = torch.tensor([[0.0, 10.0], [2.0, 30.0]])
        >>> out, new_buffers = fn.apply(fn.params, fn.buffers, x)
        >>> new_buffers["running_mean"], fn.buffers["running_mean"]
        (tensor([0.1000, 2.0000]), tensor([0., 0.]))
        >>> cut = functional(torch.nn.BatchNorm1d(2, affine=False), microbatch_size=1)
        >>> torch.allclose(cut.apply(cut.params, cut.buffers, x)[0], out)
        True

    References:
        `torch.func.functional_call
        <https://docs.pytorch.org/docs/stable/generated/torch.func.functional_call.html>`_
    """
    _refuse(module)
    places = shell.places_of(module)
    params: dict[str, Tensor] = {}
    frozen: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    held: dict[str, tuple[Tensor, dict[str, Any], str]] = {}
    for name, ((i, table, key), *_) in places.slots.items():
        tensor = shell.own_tensor(places, name)
        if is_lazy(tensor):
            raise ValueError(
                f"{name} has no shape yet. Call the lazy module once, on one batch, before "
                "functional(module)."
            )
        kind = (
            buffers if table == module_slots.BUFFERS else params if tensor.requires_grad else frozen
        )
        if kind is params and any(autograd.tensor_hooks(tensor)):
            raise ValueError(
                f"{name} has a hook on its gradient, which would never run, because gradients "
                "belong to the tensors that apply gets. Remove it, and change gradients with a "
                "gradient map: chain(it, optimizer), where it has init(params) and update(grads, "
                "state) -> (grads, state)."
            )
        kind[name] = tensor.detach()
        held[name] = kind[name], vars(places.modules[i])[table], key
    names = Names(
        params={name: x.shape for name, x in (params | frozen).items()},
        buffers={name: x.shape for name, x in buffers.items()},
        own=[shell.own_tensor(places, name) for name in params | frozen],
        required=[name in params for name in params | frozen],
        held=held,
    )
    whole = None
    if microbatch_size is not None or group is not None:
        size = checks.LARGEST_INT if microbatch_size is None else microbatch_size
        whole = microbatched_module.WholeBatch(places, size, group)
    loading.note_sums(params.values())
    return Functional(partial(_apply, places, names, frozen, whole), params, buffers, frozen)


class Names(NamedTuple):
    """What ``apply`` may be given, and what the module's parameters have to remain."""

    params: dict[str, torch.Size]  # shapes, those of frozen ones too
    buffers: dict[str, torch.Size]
    own: list[Tensor]  # the module's parameters …
    required: list[bool]  # … and whether each of them required a gradient
    held: dict[str, tuple[Tensor, dict[str, Any], str]]  # what was handed out, and its place


closures.telling[Names] = lambda _: ()  # a function that has these has Places, too


def _apply(
    places: shell.Places,
    names: Names,
    frozen: dict[str, Tensor],
    whole: microbatched_module.WholeBatch | None,
    params: Any,
    buffers: Any,
    /,
    *args: Any,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """Call the module with these tensors; returns what it returned, and its new buffers."""
    compiling = torch.compiler.is_dynamo_compiling()
    if compiling:
        _check_call(places, names, params, buffers, whole)
    else:
        # Unnoticed by the modes around the call: nothing is computed here, and one that puts in
        # other tensors would do so for the module's own.
        with modes.unnoticed():
            fit = _fits(params, names.params)
            fit = fit and (buffers in ((), {}) or _fits(buffers, names.buffers))
            if not fit or [*map(_REQUIRES_GRAD, names.own)] != names.required:
                _check_call(places, names, params, buffers)
    if len(buffers) < len(names.buffers):
        raise _missing_buffer(names, buffers)
    tensors = params or {}
    if frozen:
        tensors = {**tensors, **_frozen(names, frozen, tensors)}
    if whole is not None and not compiling:
        out, held = whole({**tensors, **dict(buffers)}, [*buffers], args, kwargs)
    else:
        if buffers:
            tensors = tensors | {name: buffer.clone() for name, buffer in buffers.items()}
        out, held = shell.call_module(places, tensors, buffers, args, kwargs)
    if not buffers:
        return out, buffers
    new = {name: held[name] for name in buffers}
    if not compiling and (note := checks.here.note_buffers) is not None:
        note(places.modules[0], buffers, new)
    return out, new


def _frozen(
    names: Names, frozen: dict[str, Tensor], params: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The frozen parameters that are not given, cast to the one dtype that the others came in.

    They are what the module holds now, whose ``.data`` may have been assigned, but for those that
    somebody has put into ``frozen``.
    """
    rest: dict[str, Tensor] = {}
    for name, x in frozen.items():
        if name not in params:
            handed_out, table, key = names.held[name]
            rest[name] = table[key] if x is handed_out else x
    if rest and modes.transform_active() and functorch.any_mapped(params.values()):
        raise ValueError(
            f"params[{next(iter(rest))!r}] is frozen and missing, but vmap maps the parameters, "
            "and members of an ensemble may differ in it. If all members share it, call "
            "apply({**fn.frozen, **params}, ...). If each has its own, stack and map it as params "
            "are: stack([fn.frozen for fn in members])."
        )
    floats = [name for name in params if name not in frozen and params[name].is_floating_point()]
    came = {params[name].dtype for name in floats}
    if len(came) != 1 or all(names.held[name][0].dtype in came for name in floats):
        return rest
    (dtype,) = came
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in rest.items()}


def _missing_buffer(names: Names, buffers: Any) -> ValueError:
    missing = next(name for name in names.buffers if name not in buffers)
    return ValueError(
        f"buffers[{missing!r}] is missing; expected all {len(names.buffers)} buffers of the "
        "module, because it would write to its own instead. Pass functional(module).buffers, or "
        "the new_buffers of an earlier call."
    )


def _check_call(
    places: shell.Places,
    names: Names,
    params: Any,
    buffers: Any,
    compiled: microbatched_module.WholeBatch | None = None,
) -> None:
    """Check what ``apply`` is given, and that what is trained or frozen was so from the start."""
    _check(params, names.params, places, "params")
    _check(buffers, names.buffers, places, "buffers")
    if compiled is not None and compiled.group is not None:
        buckets.group_of(compiled.group)  # raises: no graph reaches other ranks
    for name, x, required in zip(names.params, names.own, names.required, strict=True):
        if x.requires_grad != required:
            was, now = ("trained", "frozen") if required else ("frozen", "trained")
            raise RuntimeError(
                f"{name} was {was} when functional(module) was called, but is {now} now "
                f"(requires_grad={not required}). Call functional(module) again, after the last "
                "requires_grad_()."
            )


def _fits(given: Any, shapes: dict[str, torch.Size]) -> bool:
    """Whether a dict holds tensors of these names and shapes. The loops are C's."""
    if type(given) is not dict or not _PLAIN.issuperset(map(type, given.values())):
        return False
    return [*map(_SHAPE, given.values())] == [*map(shapes.get, given)]


_PLAIN = {Tensor, nn.Parameter}
_SHAPE, _REQUIRES_GRAD = attrgetter("shape"), attrgetter("requires_grad")


def _check(given: Any, shapes: dict[str, torch.Size], places: shell.Places, root: str) -> None:
    """Check names and shapes, and say what is wrong with them."""
    if isinstance(given, tuple) and not given:
        return
    if not isinstance(given, dict):
        raise TypeError(
            f"{root} is {reprs.kind(given)}; expected a dict of tensors by name, as "
            f"functional(module).{root} is."
        )
    for name, tensor in given.items():
        shape = shapes.get(name)
        if shape is None:
            raise ValueError(f"{root}[{name!r}] {_stranger(name, shapes, places, root)}")
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{root}[{name!r}] is {reprs.kind(tensor)}; expected a tensor.")
        if tensor.shape != shape:
            raise ValueError(
                f"{root}[{name!r}] has shape {tuple(tensor.shape)}; expected {tuple(shape)}, as "
                "in the module. Likely cause: the state of another model, or of several stacked "
                "ones, which need torch.func.vmap; to load one of them, pa.unstack(state)[i]."
            )


def _stranger(name: str, shapes: dict[str, torch.Size], places: shell.Places, root: str) -> str:
    for own, (_, *others) in places.slots.items():
        if name in [shell.full_name(places.paths[i], key) for i, _, key in others]:
            return f"is tied to {own!r} in the module. Pass that one alone."
    wrong = f"is not a {'parameter' if root == 'params' else 'buffer'} of the module"
    for own in shapes:
        if name.endswith("." + own):
            prefix = name.removesuffix(own)
            return (
                f"{wrong}, which has {own!r}. Likely cause: the prefix {prefix!r} of a wrapper "
                "(DistributedDataParallel, torch.compile). Remove the prefix."
            )
    has = f", whose first of {len(shapes)} is {next(iter(shapes))!r}" if shapes else ""
    return f"{wrong}{has}. Likely cause: the state of another model."


def _refuse(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is {reprs.kind(module)}; expected a torch.nn.Module.")
    # Anyone who has an FSDP module has imported FSDP; an import here would cost all others.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    names = ("FSDPModule", "FullyShardedDataParallel")
    sharded = tuple(getattr(fsdp, name) for name in names if hasattr(fsdp, name))
    for name, part in module.named_modules():
        path = f"module.{name}" if name else "module"
        if isinstance(part, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            raise TypeError(
                f"{path} is {reprs.kind(part)}; expected {path}.module, because "
                "functional_call on the wrapper gives unsynchronised gradients. To sum them over "
                "the ranks, use make_step(..., group=torch.distributed.group.WORLD), or "
                "distributed.all_reduce of an accumulator's state."
            )
        if isinstance(part, sharded):
            raise TypeError(
                f"{path} is sharded by FSDP ({type(part).__name__}), and functional_call would "
                "ignore the parameters passed to it. Pass the module without fully_shard, and "
                "shard its parameters instead: {name: distribute_tensor(x, mesh, [Shard(0)]) for "
                "name, x in functional(module).params.items()}. Shard the batch over the same "
                "mesh."
            )
