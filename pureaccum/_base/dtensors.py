"""What the package knows of DTensors, but for batches of them: see sharded_rows.

Every rank of a mesh holds its own part of such a tensor:

    leaf            sums of its gradients           the end of a window
    Replicate()     Partial(): a sum on each rank   one reduction
    Shard(d)        Shard(d)                        nothing

A sum of gradients is a sum over ranks too, so it may wait: whatever a microbatch gives is added to
this rank's part, without communication wherever possible. All arithmetic is on local parts, which
are plain tensors; ``opened`` and ``closed`` are the way there and back. Every rank runs the same
program; what is decided (is it finite? is there any weight?) is decided by all of them together.

Anyone who has a DTensor has imported its module, so nothing is imported here.
"""

import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn


class Layout(NamedTuple):
    """How a tensor lies on its mesh, and what it is as a whole."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]


PLAIN = {Tensor, nn.Parameter}  # no subclass
Layouts = list[Layout | None]  # None: a plain tensor


def module() -> Any:
    """Torch's module of DTensors, if anybody has imported it."""
    return sys.modules.get("torch.distributed.tensor")


def classes() -> tuple[type, ...]:
    """The class of DTensors, if anybody has imported it."""
    tensor = module()
    return () if tensor is None else (tensor.DTensor,)


def is_sharded(x: object) -> TypeGuard[Any]:
    """Whether something is a DTensor."""
    return any_sharded([x])


def any_sharded(leaves: Sequence[Any]) -> bool:
    """Whether there is a DTensor among the leaves. Steps that compile themselves have none."""
    if torch.compiler.is_dynamo_compiling():
        return False
    if PLAIN.issuperset(map(type, leaves)):
        return False
    tensor = module()
    return tensor is not None and any(isinstance(x, tensor.DTensor) for x in leaves)


def first_partial(leaves: Sequence[Any]) -> int | None:
    """The position of the first DTensor of which no rank has the numbers themselves."""
    if not any_sharded(leaves):
        return None
    partial = (
        i
        for i, x in enumerate(leaves)
        if is_sharded(x) and any(p.is_partial() for p in x.placements)
    )
    return next(partial, None)


def layout_of(x: Any) -> Layout | None:
    """The layout of a DTensor; None for any other."""
    if not is_sharded(x):
        return None
    return Layout(x.device_mesh, tuple(x.placements), x.shape, x.stride())


def is_cut(at: Layout) -> bool:
    """Whether no rank of some dimension of the mesh has the whole tensor."""
    return not all(p.is_replicate() for p in at.placements)


# There and back ----------------------------------------------------------------------------


def local(x: Any) -> Tensor:
    """This rank's part of a tensor: for a DTensor, the very tensor that it holds."""
    if not is_sharded(x):
        return x
    with torch.no_grad():  # otherwise it is a view of that tensor
        return x.to_local()


def block_of(x: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where in a tensor this rank's block begins, and the shape of the block."""
    if not is_sharded(x):
        return (0,) * x.dim(), tuple(x.shape)
    (block,) = x.__create_chunk_list__()  # as torch's own checkpoints ask
    if tuple(block.sizes) != tuple(local(x).shape):
        raise ValueError(
            f"a DTensor of shape {tuple(x.shape)}, {', '.join(map(str, x.placements))}, is not "
            f"split into blocks: this rank holds {tuple(local(x).shape)}; expected {block.sizes} "
            f"from {block.offsets} on. Redistribute it to Shard or Replicate first."
        )
    return tuple(block.offsets) or (0,) * x.dim(), tuple(block.sizes)


def opened(leaves: list[Tensor]) -> tuple[list[Tensor], Layouts | None]:
    """The local parts of leaves and their layouts, which are None if all leaves are plain."""
    if not any_sharded(leaves):
        return leaves, None
    return [local(x) for x in leaves], [layout_of(x) for x in leaves]


def closed(parts: list[Tensor], layouts: Layouts | None) -> list[Tensor]:
    """The tensors of which ``parts`` are the local parts."""
    if layouts is None:
        return parts
    return [close(x, at) for x, at in zip(parts, layouts, strict=True)]


def close(part: Tensor, at: Layout | None) -> Tensor:
    """The tensor of which ``part`` is the local part."""
    if at is None:
        return part
    dtensor = module().DTensor
    return dtensor.from_local(
        part, at.mesh, at.placements, run_check=False, shape=at.shape, stride=at.stride
    )


def placed_like(leaves: list[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Leaves in the placements of others, where those are DTensors."""
    if not any_sharded(like):
        return leaves
    return [_placed(x, layout_of(y)) for x, y in zip(leaves, like, strict=True)]


def _placed(x: Any, at: Layout | None) -> Tensor:
    if at is None or x.placements == at.placements:
        return x
    with torch.no_grad():
        return x.redistribute(at.mesh, at.placements)


def whole(x: Any) -> Any:
    """The full tensor of a DTensor; any other thing as it is."""
    return x.full_tensor() if is_sharded(x) else x


# Sums of gradients ---------------------------------------------------------------------------


def sum_layout(x: Any) -> Layout | None:
    """The layout of the sums of a leaf's gradients: what is replicated may be a sum over ranks."""
    at = layout_of(x)
    if at is None:
        return None
    partial = module().Partial()
    return at._replace(placements=tuple(partial if p.is_replicate() else p for p in at.placements))


def zeros_of_sum(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros, to which the gradients of a leaf are added."""
    return close(torch.zeros_like(local(x), dtype=dtype), sum_layout(x))


def sum_layouts(leaves: list[Tensor]) -> Layouts | None:
    """The layouts of the sums of the leaves' gradients; None if all leaves are plain."""
    return [sum_layout(x) for x in leaves] if any_sharded(leaves) else None


def landed(grad: Any, at: Layout | None) -> Tensor | None:
    """This rank's part of what a gradient adds to a sum; None where this rank adds nothing."""
    if at is None:
        return grad
    if not is_sharded(grad):
        raise TypeError(
            f"the gradient of a DTensor is a {type(grad).__name__}; expected a DTensor."
        )
    replicate = module().Replicate()
    coordinate = at.mesh.get_coordinate()
    wanted: list[Any] = []
    mine = True
    for i, (came, sum_) in enumerate(zip(grad.placements, at.placements, strict=True)):
        if sum_.is_partial() and came != sum_:
            # All ranks have the same: the first one adds it, since a division would lose bits.
            wanted.append(replicate)
            mine = mine and coordinate[i] == 0
        else:
            wanted.append(sum_)
    grad = _placed(grad, at._replace(placements=tuple(wanted)))
    return local(grad) if mine else None


def resolved(sums: list[Tensor]) -> list[Tensor]:
    """Sums over all ranks: one reduction for each sum that is ``Partial``.

    What waited until the end of a window is communicated here and nowhere else. Each sum takes the
    place of its parts in the list, so that there are never two trees of them.
    """
    if any_sharded(sums):
        for i, x in enumerate(sums):
            sums[i] = _placed(x, whole_layout(layout_of(x)))
    return sums


def whole_layout(at: Layout | None) -> Layout | None:
    """The layout of a sum once it is one over all ranks."""
    if at is None:
        return None
    replicate = module().Replicate()
    placements = [replicate if p.is_partial() else p for p in at.placements]
    return at._replace(placements=tuple(placements))


# Scalars that all ranks agree on ---------------------------------------------------------------


def with_all_terms(scalars: list[Tensor]) -> list[Tensor]:
    """0-d tensors as plain ones, the same on all ranks, by one reduction for each layout."""
    if not any_sharded(scalars):
        return scalars
    found = list(scalars)
    groups: dict[Any, list[int]] = {}
    for i, x in enumerate(scalars):
        if is_sharded(x):
            groups.setdefault((x.device_mesh, tuple(x.placements)), []).append(i)
    for (mesh, placements), members in groups.items():
        parts = torch.stack([local(scalars[i]).double() for i in members])
        for i, x in zip(members, full_of(parts, mesh, placements).unbind(), strict=True):
            found[i] = x.to(scalars[i].dtype)
    return found


def replicated(x: Tensor, like: Any) -> Tensor:
    """A plain tensor, the same on all ranks, as one on the mesh of ``like``, if that has one."""
    at = layout_of(like)
    if at is None or is_sharded(x):
        return x
    everywhere = [module().Replicate()] * at.mesh.ndim
    return close(x, Layout(at.mesh, tuple(everywhere), x.shape, x.stride()))


def full_of(part: Tensor, mesh: Any, placements: Sequence[Any]) -> Tensor:
    with torch.no_grad():  # a part that requires grad makes torch warn, on one rank
        part = part.detach()
        return module().DTensor.from_local(part, mesh, placements, run_check=False).full_tensor()


def true_on_all_ranks(flag: Tensor, layouts: Layouts) -> Tensor:
    """Whether a flag is true on all ranks of all meshes."""
    return largest(1 - flag.to(torch.int32), layouts) == 0  # not every backend reduces bools


def largest(number: Tensor, layouts: Layouts) -> Tensor:
    """The largest value that a number has on any rank of any mesh."""
    most = module().Partial("max")
    for mesh in dict.fromkeys(at.mesh for at in layouts if at is not None):
        if mesh.get_coordinate() is None:  # this rank is not in the mesh
            continue
        number = full_of(number.to(mesh.device_type), mesh, [most] * mesh.ndim)
    return number


def norms_over_ranks(norms: list[Tensor], layouts: Layouts) -> list[Tensor]:
    """The norms of which the whole norm is made, one for each layout, from norms of local parts.

    A part that several ranks hold counts once. The squares are float64, and do not overflow.
    """
    found = [x for x, at in zip(norms, layouts, strict=True) if at is None]
    for kind, members in _alike(layouts).items():
        square = torch.stack([norms[i].double() for i in members]).square().sum()
        found.append(_summed(square, kind).sqrt())
    return found


def norms_of_parts(parts: Sequence[Tensor], layouts: Layouts) -> list[Tensor]:
    """The norm of each tensor of which these are this rank's parts."""
    norms = [torch.linalg.vector_norm(x).double() for x in parts]
    for kind, members in _alike(layouts).items():
        squares = _summed(torch.stack([norms[i] for i in members]).square(), kind)
        for i, square in zip(members, squares.unbind(), strict=True):
            norms[i] = square.sqrt()
    return norms


def norms_of_sums(parts: Sequence[Tensor | None], like: Sequence[Any]) -> list[Tensor]:
    """The norms of what all ranks add to sums of the leaves' gradients; None adds nothing.

    What is a sum over ranks has to be added up for that.
    """
    layouts = [sum_layout(x) for x in like]
    own = [torch.zeros_like(local(x)) if y is None else y for x, y in zip(like, parts, strict=True)]
    sums = resolved([close(x, at) for x, at in zip(own, layouts, strict=True)])
    return norms_of_parts([local(x) for x in sums], [whole_layout(at) for at in layouts])


Kind = tuple[Any, tuple[bool, ...]]  # a mesh, and over which of its dimensions tensors are sharded


def _alike(layouts: Layouts) -> dict[Kind, list[int]]:
    """The DTensors that are sharded over the same dimensions of a mesh."""
    groups: dict[Kind, list[int]] = {}
    for i, at in enumerate(layouts):
        if at is not None:
            apart = tuple(not p.is_replicate() for p in at.placements)
            groups.setdefault((at.mesh, apart), []).append(i)
    return groups


def _summed(x: Tensor, kind: Kind) -> Tensor:
    tensor = module()
    return full_of(x, kind[0], [tensor.Partial() if yes else tensor.Replicate() for yes in kind[1]])


# Refusals --------------------------------------------------------------------------------------


@cache
def refusing(reason: str) -> type:
    """A class of DTensors that refuse every use with a reason: what is left of donated ones."""

    def refuse(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(reason)

    body = {"__slots__": (), "__torch_function__": classmethod(refuse)}
    return type("Refusing", (module().DTensor,), body)


def refuse_sharded(leaves: Sequence[Any], root: str, what: str) -> None:
    """Raise where a leaf is a DTensor; ``what`` says what is not for DTensors, and what is."""
    if any_sharded(leaves):
        i = next(i for i, x in enumerate(leaves) if is_sharded(x))
        at = layout_of(leaves[i])
        assert at is not None
        raise ValueError(
            f"{root} holds DTensors (leaf {i}, of shape {tuple(at.shape)}, is "
            f"{', '.join(map(str, at.placements))}). {what}"
        )
