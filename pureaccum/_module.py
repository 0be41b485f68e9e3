"""A module as a pure function of its parameters and buffers.

    out, new_buffers = apply(params, buffers, *args, **kwargs)

It is ``torch.func.functional_call`` with what that leaves to its caller: buffers are cloned, so
that nothing is written to what was given; what the module wrote is returned; a name that belongs
to no tensor of the module, or to one of another shape, is an error and not ignored.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy


class Functional(NamedTuple):
    """A module as ``functional`` sees it.

    ``params`` and ``buffers`` are detached views of the module's tensors: a step that writes to
    one writes to the other. ``step.init`` copies them.

    Attributes:
        apply: ``apply(params, buffers, *args, **kwargs)`` calls the module with these in place of
            its own, and returns what it returned and its new buffers.
        params: The module's parameters by name; tied ones once, under their first name.
        buffers: The module's buffers by name, those that are not persistent included.
    """

    apply: Callable[..., tuple[Any, Any]]
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]


def functional(module: nn.Module) -> Functional:
    """Make a pure function of a module; the module itself is never changed.

    The rule::

        out, new_buffers = apply(params, buffers, *args, **kwargs)
        # out is module(*args, **kwargs) with ``params`` and ``buffers`` in place of its own

    The mode (``train()`` or ``eval()``) is the one that the module has when ``apply`` is called;
    names, shapes and ties are those that it has now. ``params`` may be some of the parameters:
    for the others, say a frozen part, the module's own values are used. ``buffers`` are all of
    them, or ``()`` where the module has none.

    ``apply`` works under torch.func's transforms and in torch.compile. Under ``vmap`` a BatchNorm
    in training mode needs buffers that are mapped too.

    Args:
        module: Any module but DistributedDataParallel, DataParallel or FSDP.

    Returns:
        ``apply``, and the module's ``params`` and ``buffers``.

    Example:
        >>> fn = functional(torch.nn.BatchNorm1d(2, affine=False))
        >>> x = torch.tensor([[0.0, 10.0], [2.0, 30.0]])
        >>> out, new_buffers = fn.apply(fn.params, fn.buffers, x)
        >>> new_buffers["running_mean"], fn.buffers["running_mean"]
        (tensor([0.1000, 2.0000]), tensor([0., 0.]))

    References:
        `torch.func.functional_call
        <https://docs.pytorch.org/docs/stable/generated/torch.func.functional_call.html>`_
    """
    _refuse(module)
    params, tied_params = _named(module, "parameters")
    buffers, tied_buffers = _named(module, "buffers")
    param_shapes = {name: tensor.shape for name, tensor in params.items()}
    buffer_shapes = {name: tensor.shape for name, tensor in buffers.items()}
    tied = tied_params | tied_buffers

    def apply(params: Any, buffers: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """What the module returns with these in place of its own, and its new buffers."""
        _check(params, param_shapes, tied_params, "params", "parameter")
        _check(buffers, buffer_shapes, tied_buffers, "buffers", "buffer")
        if len(buffers) < len(buffer_shapes):
            missing = next(name for name in buffer_shapes if name not in buffers)
            raise ValueError(
                f"buffers[{missing!r}] is missing; all {len(buffer_shapes)} buffers of the module "
                "were expected, since it would write to its own in place of a missing one. They "
                "are functional(module).buffers, or the new_buffers of an earlier call."
            )
        # One dict: a buffer that the module assigns anew is written back to it and no other.
        held = {**params, **{name: buffer.clone() for name, buffer in dict(buffers).items()}}
        for name, owner in tied.items():
            if owner in held:
                held[name] = held[owner]
        # torch's own way with ties would leave our tensors in a module that has two names.
        out = functional_call(module, held, args, kwargs, tie_weights=False)
        return out, {name: held[name] for name in buffers} if buffers else buffers

    return Functional(apply, params, buffers)


def _named(module: nn.Module, kind: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Detached tensors by name, and for every other place of one of them the name it goes by."""
    names: dict[Tensor, str] = {}
    tied: dict[str, str] = {}
    for prefix, owner in module.named_modules():
        named: Callable[..., Iterable[tuple[str, Tensor]]] = getattr(owner, f"named_{kind}")
        for name, tensor in named(prefix, recurse=False, remove_duplicate=False):
            if is_lazy(tensor):
                raise ValueError(
                    f"{name} has no shape yet; call the lazy module once, on one batch, before "
                    "functional(module)."
                )
            if (first := names.setdefault(tensor, name)) != name:
                tied[name] = first
    return {name: tensor.detach() for tensor, name in names.items()}, tied


def _check(
    given: Any, shapes: dict[str, torch.Size], tied: dict[str, str], root: str, kind: str
) -> None:
    """Check names and shapes, at the price of a dict look-up each."""
    if isinstance(given, tuple) and not given:
        return
    if not isinstance(given, dict):
        raise TypeError(
            f"{root} is a {type(given).__name__}; expected a dict of tensors by name, as "
            f"functional(module).{root} is."
        )
    for name, tensor in given.items():
        shape = shapes.get(name)
        if shape is None:
            raise ValueError(f"{root}[{name!r}] {_stranger(name, shapes, tied, kind)}")
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{root}[{name!r}] is a {type(tensor).__name__}; expected a tensor.")
        if tensor.shape != shape:
            raise ValueError(
                f"{root}[{name!r}] has shape {tuple(tensor.shape)}; the module has {tuple(shape)} "
                "there. The state of another model, or of several that are stacked? Those go "
                "through torch.func.vmap."
            )


def _stranger(name: str, shapes: dict[str, torch.Size], tied: dict[str, str], kind: str) -> str:
    if name in tied:
        return f"is tied to {tied[name]!r} in the module; give that one alone."
    wrong = f"is no {kind} of the module"
    for own in shapes:
        if name.endswith("." + own):
            prefix = name.removesuffix(own)
            return (
                f"{wrong}, which has {own!r}. Is the prefix {prefix!r} left from a wrapper "
                "(DistributedDataParallel, torch.compile)? Take it off."
            )
    has = f"; the first of its {len(shapes)} is {next(iter(shapes))!r}" if shapes else ""
    return f"{wrong}{has}. The state of another model?"


def _refuse(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"functional() got a {type(module).__name__}; expected a torch.nn.Module.")
    # Who has an FSDP module has imported it; to import it here would cost everybody else.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    names = ("FSDPModule", "FullyShardedDataParallel")
    sharded = tuple(getattr(fsdp, name) for name in names if hasattr(fsdp, name))
    for name, part in module.named_modules():
        path = f"module.{name}" if name else "module"
        if isinstance(part, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            raise TypeError(
                f"{path} is a {type(part).__name__}; pass {path}.module, which it wraps: "
                "functional_call on it gives unsynchronised gradients. To add them up over the "
                "ranks, make_step(..., group=torch.distributed.group.WORLD), or "
                "distributed.all_reduce of an accumulator's state."
            )
        if isinstance(part, sharded):
            raise TypeError(
                f"{path} is sharded by FSDP ({type(part).__name__}): functional_call ignores the "
                "parameters passed to it. Pass the module without fully_shard, and shard its "
                "parameters instead: {name: distribute_tensor(x, mesh, [Shard(0)]) for name, x in "
                "functional(module).params.items()}, with a batch sharded over the same mesh."
            )
