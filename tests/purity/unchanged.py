"""What a call may not change: a picture of the world before it, compared with one after it."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module


Picture = dict[str, Any]


@contextmanager
def unchanged(*things: Any, draws: bool = False) -> Iterator[None]:
    """Fail where tensors, trees, modules or global modes are not what they were, error or not.

    Bits and versions, ``.grad`` and ``requires_grad``, hooks, the identity of what a module holds;
    with ``draws`` the global generators may move.
    """
    before = picture(things, draws)
    try:
        yield
    finally:
        after = picture(things, draws)
        assert before.keys() == after.keys(), before.keys() ^ after.keys()
        assert not (changed := [what for what in before if before[what] != after[what]]), changed


def picture(things: Any, draws: bool = False) -> Picture:
    """Everything that can be seen of things and of torch's global state."""
    seen = dict(_world())
    if not draws:
        seen |= {
            "torch's generator": torch.get_rng_state().numpy().tobytes(),
            "Python's generator": random.getstate(),
        }
    for path, thing in _leaves(things):
        pictured = _module if isinstance(thing, nn.Module) else _tensor
        seen |= {f"{path}: {what}": value for what, value in pictured(thing)}
    return seen


def bits(x: Tensor) -> bytes:
    """The numbers of a tensor, NaN and signed zeros included."""
    return x.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def hooks(owner: Any) -> dict[str, Any]:
    """The hooks that an object (a module, or torch's module of modules) holds."""
    held = {name: value for name, value in vars(owner).items() if "hooks" in name}
    return {name: list(value) if hasattr(value, "keys") else value for name, value in held.items()}


def _leaves(things: Any) -> Iterator[tuple[str, Any]]:
    leaves, spec = optree.tree_flatten(things, namespace="pureaccum")
    yield from zip((accessor.codify("") for accessor in spec.accessors()), leaves, strict=True)


def _tensor(x: Any) -> Iterator[tuple[str, Any]]:
    yield "identity", id(x)
    if not isinstance(x, Tensor):
        return
    yield "class", type(x)
    yield "bits", bits(x)
    yield "version", None if x.is_inference() else x._version
    yield "layout", (x.data_ptr(), x.dtype, x.shape, x.stride())
    yield "requires_grad", x.requires_grad
    yield "grad_fn", id(x.grad_fn)
    yield "hooks", (x._backward_hooks and list(x._backward_hooks))
    if x.is_leaf:
        yield "grad", x.grad if x.grad is None else dict(_tensor(x.grad))


def _module(root: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in root.named_modules():
        for key, value in vars(module).items():
            if key.startswith("_flat_weight"):  # a cache that functional_call itself leaves stale
                continue
            yield f"{name}.{key}", id(value)
            if isinstance(value, (dict, list)):
                items = value.items() if isinstance(value, dict) else enumerate(value)
                yield f"{name}.{key} inside", [(k, id(v)) for k, v in items]
        yield f"{name} mode", module.training
    for name, tensor in [*root.named_parameters(), *root.named_buffers()]:
        yield from ((f"{name} {what}", value) for what, value in _tensor(tensor))


def _world() -> Iterator[tuple[str, Any]]:
    yield "grad mode", torch.is_grad_enabled()
    yield "inference mode", torch.is_inference_mode_enabled()
    yield "autocast", (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
    yield "autocast cache", torch.is_autocast_cache_enabled()
    yield "deterministic", torch.are_deterministic_algorithms_enabled()
    yield "warn only", torch.is_deterministic_algorithms_warn_only_enabled()
    yield "saved-tensor hooks", torch._C._autograd._saved_tensors_hooks_is_enabled()
    yield "anomaly mode", torch.is_anomaly_enabled()
    yield "default dtype", torch.get_default_dtype()
    yield "threads", torch.get_num_threads()
    yield "transform level", torch._C._functorch.maybe_current_level()
    yield "hooks of all modules", hooks(torch_module)
