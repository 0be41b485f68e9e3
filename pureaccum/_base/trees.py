"""Trees of tensors, with optree as the only tree library: their structure, dtypes and arithmetic.

optree sorts dict keys and torch's own pytree keeps their order, so leaves of one must never be
paired with leaves of the other. Trees are flattened here, and torch gets lists. Classes that are
registered globally in optree, or under the namespace ``"pureaccum"``, are trees too.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from math import isfinite
from typing import Any

import optree
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from . import dtensors
from .torch_internals import functorch, kernels, modes


Tree = Any  # a pytree; optree.PyTree[Tensor] says no more to a checker and reads worse
Flat = tuple[list[Any], optree.PyTreeSpec]  # a tree taken apart: leaves and structure
NAMESPACE = "pureaccum"


# Structure -----------------------------------------------------------------------------------


def flatten(tree: Tree) -> Flat:
    """The leaves and the structure of a tree; None is structure."""
    return optree.tree_flatten(tree, namespace=NAMESPACE)


# The tree of a structure with these leaves: optree's own function, since each microbatch calls it.
unflatten: Callable[[optree.PyTreeSpec, Iterable[Any]], Tree] = optree.tree_unflatten


def tree_map(func: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """The tree of what ``func`` gives for the leaves of one tree, or of several alike."""
    return optree.tree_map(func, tree, *rest, namespace=NAMESPACE)


def tree_leaves(tree: Tree) -> list[Any]:
    """The leaves of a tree."""
    return optree.tree_leaves(tree, namespace=NAMESPACE)


def paths(spec: optree.PyTreeSpec, root: str) -> list[str]:
    """Each leaf as a user would write it: ``params['layer'][0].weight``."""
    kind: Any = spec.type
    if kind in _WITH_ITEMS:
        names = [f"{root}[{entry!r}]" for entry in spec.entries()]
    elif optree.is_namedtuple_class(kind):
        names = [f"{root}.{field}" for field in kind._fields]
    else:  # a leaf, or a class that somebody registered; accessors make three objects per leaf
        return [accessor.codify(root) for accessor in spec.accessors()]
    if spec.num_nodes == spec.num_leaves + 1:
        return names
    parts = zip(spec.children(), names, strict=True)
    return [path for child, name in parts for path in paths(child, name)]


_WITH_ITEMS = {dict, OrderedDict, defaultdict, list, tuple, deque}


# Dtypes --------------------------------------------------------------------------------


def accumulation_dtype(leaf: torch.dtype, at_least: torch.dtype = torch.float32) -> torch.dtype:
    """The dtype in which gradients of a leaf are summed: never below float32.

    >>> accumulation_dtype(torch.bfloat16), accumulation_dtype(torch.complex64, torch.float64)
    (torch.float32, torch.complex128)
    """
    if leaf is at_least is torch.float32:  # as nearly always, and for every leaf
        return leaf
    return torch.promote_types(torch.promote_types(leaf, torch.float32), at_least)


def widest_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """The dtype that holds the numbers of all tensors; there is one at least."""
    return reduce(torch.promote_types, (x.dtype for x in tensors))


def continuous(x: Tensor) -> bool:
    """Whether a tensor can have a derivative."""
    return x.is_floating_point() or x.is_complex()


def real_parts(x: Tensor) -> Tensor:
    """A complex tensor as pairs of real numbers, along a new last dim; a real one as it is."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def sum_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a tensor is summed: 0-d ones in float64, others in float32 at least."""
    if continuous(x):
        return accumulation_dtype(x.dtype, torch.float64 if x.dim() == 0 else torch.float32)
    return torch.int64


def zeros_for_sums(leaves: list[Tensor], at_least: torch.dtype) -> list[Tensor]:
    """Zeros, to which this rank's parts of the gradients of leaves are added."""
    kinds = {kind: accumulation_dtype(kind, at_least) for kind in {x.dtype for x in leaves}}
    if not modes.may_write():
        parts = leaves if modes.transform_active() else dtensors.opened(leaves)[0]
        return [torch.zeros_like(x, dtype=kinds[x.dtype], requires_grad=False) for x in parts]
    parts = dtensors.opened(leaves)[0]
    sums = [torch.empty_like(x, dtype=kinds[x.dtype], requires_grad=False) for x in parts]
    kernels.foreach_zero_(sums)
    return sums


def zeros(tree: Tree, dtype: torch.dtype = torch.float32) -> Tree:
    """Zeros shaped like a tree, in the dtypes in which its gradients are summed."""
    of = dtensors.zeros_of_sum if dtensors.any_sharded(tree_leaves(tree)) else torch.zeros_like
    return tree_map(lambda x: of(x, dtype=accumulation_dtype(x.dtype, dtype)), tree)


# Arithmetic ----------------------------------------------------------------------------


def add(a: Tree, b: Tree) -> Tree:
    """The sum ``a + b``, a new tree."""
    return tree_map(torch.add, a, b)


def where(condition: bool | Tensor, a: Tree, b: Tree) -> Tree:
    """A copy of one tree or of the other, selected and never multiplied: NaN * 0 is NaN."""
    if isinstance(condition, bool):
        return tree_map(lambda x, y: (x if condition else y).clone(), a, b)
    return tree_map(lambda x, y: torch.where(condition, x, y), a, b)


def apart(tree: Tree, given_up: Tree) -> Tree:
    """A tree that shares no memory with one that is given up and will be written to."""
    # None: several memories
    held = {kernels.memory_of(dtensors.local(x)) for x in tree_leaves(given_up)} | {None}

    def copied(x: Any) -> Any:
        return (
            x.clone()
            if isinstance(x, Tensor) and kernels.memory_of(dtensors.local(x)) in held
            else x
        )

    return tree_map(copied, tree)


# Scalars ---------------------------------------------------------------------------------------


def as_scalar_of(x: Tensor, scalar: Tensor) -> Tensor:
    """A 0-d tensor in the real dtype of ``x``, ready to multiply or divide it.

    A 0-d ``x`` would take on the dtype of another 0-d tensor.
    """
    return moved(scalar, x.device, (x.real if x.is_complex() else x).dtype)


def scalars_of(scalar: Any) -> Callable[[Tensor], Tensor]:
    """Gives ``as_scalar_of`` for many tensors: moved and cast once per device and dtype."""
    made: dict[Any, Tensor] = {}

    def of(x: Tensor) -> Tensor:
        kind = x.device, x.dtype
        if kind not in made:
            # a number is filled in where it is used, and copied from nowhere
            if not isinstance(scalar, Tensor):
                made[kind] = torch.full((), scalar, dtype=x.real.dtype, device=x.device)
            else:
                made[kind] = as_scalar_of(x, scalar)
        return made[kind]

    return of


def moved(scalar: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A 0-d tensor on a device: a copy from the host waits for nothing, one to the host must."""
    ready = scalar.device.type == "cpu"
    return scalar.to(device, dtype or scalar.dtype, non_blocking=ready)


def known(scalar: Tensor) -> Any:
    """The number in a 0-d tensor if it can be read without waiting for a device, else None.

    For the members of a vmap, it is the one that they have in common.
    """
    numbers = numbers_in(scalar)
    return numbers[0] if numbers and numbers.count(numbers[0]) == len(numbers) else None


def numbers_in(scalar: float | Tensor) -> list[Any] | None:
    """The number in a 0-d tensor, or those of all members of a vmap; None where nobody can look.

    Transforms let them be read, a compiler or a tracer has none, and a device would be waited for.
    """
    if type(scalar) is not Tensor or not scalar.is_cpu:
        return [scalar] if isinstance(scalar, float) else None
    if not modes.at_top_level():
        scalar = functorch.innermost(scalar)
        followed = torch.compiler.is_compiling() or get_proxy_mode() is not None
        if followed or type(scalar) is not Tensor:
            return None
        if scalar.dim():
            return scalar.flatten().tolist()
    return [scalar.item()]


def seen_finite(*scalars: float | Tensor) -> bool:
    """Whether the host can see that numbers are finite, for all members of a vmap."""
    for scalar in scalars:
        numbers = numbers_in(scalar)
        if numbers is None or not all(map(isfinite, numbers)):
            return False
    return True


def in_common(scalar: Tensor) -> Tensor:
    """A 0-d tensor, once for all members of a vmap if it is the same for them.

    What is not mapped meets what is mapped at half the cost of what is. Not where a derivative may
    be asked for, which it would not have.
    """
    if (
        not modes.transform_active()
        or functorch.may_be_differentiated()
        or (number := known(scalar)) is None
    ):
        return scalar
    return torch.full((), number, dtype=scalar.dtype, device=scalar.device)


def on_host(*scalars: Tensor) -> list[Any]:
    """0-d tensors as Python numbers where the host has them, and nothing follows what they give.

    The same arithmetic in Python takes a tenth of the time. Tensors of a device stay as they are.
    """
    if not modes.at_top_level():
        return [*scalars]
    return [x.item() if type(x) is Tensor and x.is_cpu else x for x in scalars]


def select(condition: Any, a: Any, b: Any) -> Any:
    """One number or the other, of numbers that may be 0-d tensors."""
    if isinstance(condition, bool):
        return a if condition else b
    return torch.where(condition, a, b)


def is_finite(number: Any) -> Any:
    """Whether a number is finite: a bool, or a 0-d tensor where it is one. inf - inf is NaN."""
    return (number - number) == 0


def scalar(number: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number as a 0-d tensor with memory of its own."""
    if isinstance(number, Tensor):
        return number.to(device, dtype, copy=True)
    return torch.full((), number, dtype=dtype, device=device)


# Norms, and what is finite ---------------------------------------------------------------------


def global_norm(tree: Tree) -> Tensor:
    """Compute the Euclidean norm of all leaves of a tree, as one vector.

    The rule: ``sqrt(Σ |x|²)``, with every leaf summed in float32 or wider.

    For DTensors it is the norm of the whole tensors, on all ranks.

    Args:
        tree: A pytree of tensors.

    Returns:
        A 0-d real tensor; zero for a tree without leaves.

    Example:
        >>> global_norm({"w": torch.tensor([3.0]), "b": torch.tensor([4.0])})
        tensor(5.)

    References:
        `torch.linalg.vector_norm
        <https://docs.pytorch.org/docs/stable/generated/torch.linalg.vector_norm.html>`_, for trees.
    """
    return norm_of_all(*dtensors.opened(dtensors.resolved(tree_leaves(tree))))


def norm_of_all(parts: list[Tensor], layouts: dtensors.Layouts | None = None) -> Tensor:
    """The global norm of leaves, of which these are this rank's parts."""
    if not parts:
        return torch.zeros(())
    if alike := at_once(parts):
        norms = kernels.foreach_norm(parts, 2, dtype=accumulation_dtype(parts[0].dtype))
    else:
        norms = [norm(x) for x in parts]
    if layouts is None and (alike or are_alike(norms)):
        return torch.linalg.vector_norm(torch.stack([*norms]))
    widest = torch.float64 if any(n.dtype == torch.float64 for n in norms) else torch.float32
    if layouts is not None:
        norms = dtensors.norms_over_ranks([*norms], layouts)
    return torch.linalg.vector_norm(torch.stack([n.to(norms[0].device, widest) for n in norms]))


def at_once(leaves: Sequence[Tensor]) -> bool:
    """Whether torch's kernels for many tensors take all of these leaves at once."""
    # These kernels know no transform, and not all of them know tangents.
    return modes.at_top_level() and are_alike(leaves)


def are_alike(leaves: Sequence[Tensor]) -> bool:
    """Whether leaves are dense real numbers of one dtype, on one device."""
    kinds = {(x.device, x.dtype, x.layout) for x in leaves}
    return len(kinds) == 1 and leaves[0].is_floating_point() and not leaves[0].is_sparse


def norm(x: Tensor) -> Tensor:
    """The Euclidean norm of one tensor, summed in float32 at least."""
    x = x.coalesce().values() if x.is_sparse else x
    return torch.linalg.vector_norm(x, dtype=accumulation_dtype(x.dtype))


def all_finite(tree: Tree) -> Tensor:
    """Return whether no number in a tree is inf or NaN, as a 0-d bool tensor on the device.

    The rule: ``isfinite(x).all()`` for every leaf, combined by and. For DTensors the result is the
    same on all ranks: false if any rank holds an inf or NaN.

    Args:
        tree: A pytree of tensors.

    Returns:
        True for a tree without leaves.

    Example:
        >>> all_finite({"w": torch.tensor([1.0, float("inf")])})
        tensor(False)

    References:
        `torch.isfinite <https://docs.pytorch.org/docs/stable/generated/torch.isfinite.html>`_
    """
    return all_finite_of(*dtensors.opened(dtensors.resolved(tree_leaves(tree))))


def all_finite_of(
    parts: list[Tensor], layouts: dtensors.Layouts | None = None, own: bool = False
) -> Tensor:
    """Whether leaves are finite, of which these are this rank's parts; may be written if own."""
    if not parts:
        return torch.ones((), dtype=torch.bool)
    if not are_alike(parts):
        flag = torch.stack([finite(x).to(parts[0].device) for x in parts]).all()
    elif own and modes.at_top_level() and parts[0].dtype in (torch.float32, torch.float64):
        flag = kernels.finite_by_one_kernel(parts)
    else:
        extremes = [each for x in parts if x.numel() for each in torch.aminmax(x.detach())]
        extremes = extremes or [torch.zeros((), device=parts[0].device)]
        flag = torch.isfinite(torch.stack(extremes)).all()
    return flag if layouts is None else dtensors.true_on_all_ranks(flag, layouts)


def finite(x: Tensor) -> Tensor:
    """Whether no number of one tensor is inf or NaN.

    The smallest and the largest number tell, since NaN passes through both: one pass without a
    temporary, ten times faster than ``isfinite(x).all()``.
    """
    x = x.detach()  # a flag has no derivative, and torch 2.11 no forward AD of aminmax
    if x.is_sparse:
        x = x.coalesce().values()
    x = real_parts(x)
    if x.numel() == 0 or not x.is_floating_point():
        return torch.ones((), dtype=torch.bool, device=x.device)
    return torch.isfinite(torch.stack(torch.aminmax(x))).all()
