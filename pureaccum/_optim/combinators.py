"""Optimizers built from others: a chain of gradient maps, and a partition of the leaves.

    chain:      for map in maps:
                    grads, state = map.update(grads, state)
                params, state = optimizer.apply(grads, state, params)
    partition:  each optimizer steps the leaves of its label, a flat dict from path to leaf

A gradient map is anything with ``init(params)`` and ``update(grads, state)``, as in optax. An
optimizer is anything with ``init(params)`` and ``apply(grads, state, params)``.
"""

from collections.abc import Callable, Mapping
from functools import partial, reduce
from typing import Any, NamedTuple

import optree
from torch import Tensor

from .._base import checks, dtensors, reprs, settings, trees
from .._base.states import Spoiled, hand_over, mark
from .._base.torch_internals import kernels, modes
from . import updates, users


# Gradient maps -------------------------------------------------------------------------------


class GradientMap(NamedTuple):
    """A map that changes gradients before an optimizer uses them.

    Attributes:
        init: ``init(params)`` returns the first state.
        update: ``update(grads, state, donate=False)`` returns ``(grads, state)``. ``donate=True``
            lets it reuse the memory of ``grads``.
        factor: ``factor(norm)`` returns the number that multiplies gradients of this global norm.
            None if the map does more than multiply by such a number.
    """

    init: Callable[[trees.Tree], Any]
    update: Callable[..., tuple[trees.Tree, Any]]
    factor: Callable[[Tensor], Tensor] | None = None

    __repr__ = reprs.of_made


@settings.records
def clip_by_global_norm(max_norm: float) -> GradientMap:
    """Scale gradients down to a global norm, as ``torch.nn.utils.clip_grad_norm_`` does.

    The rule, where the norm is over all leaves as one vector::

        grads = grads * min(1, max_norm / (|grads| + 1e-6))

    Args:
        max_norm: The largest norm that stays unscaled, above zero.

    Example:
        >>> import torch
        >>> clip = clip_by_global_norm(1.0)
        >>> grads, _ = clip.update({"w": torch.tensor([3.0, 4.0])}, ())
        >>> grads["w"]
        tensor([0.6000, 0.8000])

    References:
        `torch.nn.utils.clip_grad_norm_
        <https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_norm_.html>`_
    """
    max_norm = checks.check_number(max_norm, "max_norm", "a number above zero", lambda it: it > 0)

    def init(params: trees.Tree) -> tuple[()]:
        """Return the empty state."""
        return ()

    def factor_of(norm: Tensor) -> Tensor:
        """Return the number that multiplies gradients of this global norm."""
        # torch's formula, small constant included: the same bits
        return (max_norm / (norm + 1e-6)).clamp(max=1.0)

    def update(
        grads: trees.Tree, state: tuple[()], *, donate: bool = False
    ) -> tuple[trees.Tree, tuple[()]]:
        """Return the scaled gradients and the empty state."""
        leaves, spec = trees.flatten(grads)
        scaled = _scaled(leaves, factor_of(trees.global_norm(grads)), donate)
        own = donate and modes.may_write()
        return trees.unflatten(spec, hand_over(leaves, scaled) if own else scaled), ()

    return GradientMap(init, update, factor_of)


def _scaled(grads: list[Tensor], factor: Tensor, donate: bool) -> list[Tensor]:
    """Gradients times a number, in their own memory where they are given up."""
    of, own = trees.scalars_of(factor), donate and modes.may_write()
    if own and trees.at_once(grads) and not dtensors.any_sharded(grads):
        kernels.foreach_mul_(grads, of(grads[0]))
        return grads
    return [x.mul_(of(x)) if own else x * of(x) for x in grads]


# A chain -------------------------------------------------------------------------------------


@settings.records
def chain(*parts: Any) -> updates.Optimizer:
    """Apply gradient maps before an optimizer: ``chain(clip_by_global_norm(1.0), adamw(3e-4))``.

    The rule::

        for map in maps:
            grads, state = map.update(grads, state)
        params, state = optimizer.apply(grads, state, params)

    The state is the tuple of the parts' states. A map's state changes only if the step is applied.

    Args:
        parts: Any number of gradient maps, with ``init(params)`` and
            ``update(grads, state) -> (grads, state)``, then one optimizer.

    Example:
        >>> import torch
        >>> from pureaccum import sgd
        >>> opt = chain(clip_by_global_norm(1.0), sgd(1.0))
        >>> params = torch.tensor([1.0, 1.0])
        >>> opt.apply(torch.tensor([30.0, 40.0]), opt.init(params), params)[0]
        tensor([0.4000, 0.2000])

    References:
        ``optax.chain``: `Combining optimizers
        <https://optax.readthedocs.io/en/latest/api/combining_optimizers.html>`_
    """
    if not parts:
        raise ValueError("chain got no parts; expected gradient maps and, last, an optimizer.")
    for i, part in enumerate(parts[:-1]):
        if not users.has(part, "init", "update"):
            cause = " Pass an optimizer last." if users.has(part, "init", "apply") else ""
            raise TypeError(
                f"part {i} of chain is {users.named(part)}; expected a gradient map, which has "
                f"init(params) and update(grads, state) -> (grads, state).{cause}"
            )
    *maps, last = parts
    pure = [x.update if isinstance(x, GradientMap) else users.pure_map(x) for x in maps]
    optimizer = users.as_optimizer(last, "the last part of chain")

    def init(params: trees.Tree) -> tuple[Any, ...]:
        """Return the tuple of the parts' first states."""
        return (*(map.init(params) for map in maps), optimizer.init(params))

    def check(state: Any, params: trees.Flat, root: str) -> updates.Begin:
        """Check that a state belongs to this chain, and that its last part fits these params."""
        if not isinstance(state, tuple) or len(state) != len(parts):
            came = f"a tuple of {len(state)}" if isinstance(state, tuple) else users.named(state)  # pyright: ignore
            raise TypeError(
                f"{root} is {came}; a chain of {len(parts)} parts expects the tuple of states that "
                "its init or its last call returned. Likely cause: the state comes from another "
                "configuration."
            )
        return partial(begin, optimizer.check(state[-1], params, f"{root}[{len(maps)}]"))

    def begin(begin_last: updates.Begin, state: Any, params: trees.Flat) -> updates.Ready:
        """Return a step of the chain that is ready to take."""
        last = begin_last(state[-1], params)
        return updates.Ready(last.sound, partial(step, state, params, last), last.rate)

    def step(
        state: tuple[Any, ...],
        params: trees.Flat,
        last: updates.Ready,
        grads: list[Tensor],
        applied: updates.Applied,
        donate: bool,
        norm: Tensor | None,
    ) -> tuple[trees.Tree, tuple[Any, ...]]:
        new: list[Any] = []
        for map, update, old in zip(maps, pure, state, strict=False):
            norm, known = None, norm
            if isinstance(map, GradientMap) and map.factor is not None and known is not None:
                grads, later = _scaled(grads, map.factor(known), donate), old
            else:
                options = {"donate": donate} if isinstance(map, GradientMap) else {}
                tree, later = update(trees.unflatten(params[1], grads), old, **options)
                cause = f"update of {users.named(map)} must return gradients like those it gets."
                grads = updates.fitting_gradients(tree, params, "its grads", cause)
            new.append(trees.where(applied, later, old))
        stepped, kept = last.apply(grads, applied, donate, norm)
        return stepped, (*new, kept)

    return updates.optimizer_of(init, check, in_graphs=optimizer.in_graphs)


# A partition ---------------------------------------------------------------------------------


@settings.records
def partition(
    optimizers: Mapping[str, Any], label_of_path: Callable[[str], str]
) -> updates.Optimizer:
    """Step each leaf with the optimizer of its label, say without decay on biases and norms.

    The rule::

        for label, optimizer in optimizers.items():
            of_label = leaves whose label_of_path(path) is label
            given = grads[of_label], state[label], params[of_label]
            params[of_label], state[label] = optimizer.apply(*given)

    Args:
        optimizers: The optimizer for each label. The state is a dict from label to its state.
        label_of_path: Maps the path of a leaf to its label. The path joins the leaf's keys with
            dots. In a dict of a module's ``named_parameters()`` it is the parameter's name.

    Example:
        >>> import torch
        >>> from pureaccum import sgd
        >>> opt = partition(
        ...     {"slow": sgd(0.1), "fast": sgd(1.0)},
        ...     lambda path: "slow" if path.endswith("bias") else "fast",
        ... )
        >>> params = {"out.weight": torch.tensor(1.0), "out.bias": torch.tensor(1.0)}
        >>> opt.apply(params, opt.init(params), params)[0]
        {'out.weight': tensor(0.), 'out.bias': tensor(0.9000)}

    References:
        ``optax.partition``: `Combining optimizers
        <https://optax.readthedocs.io/en/latest/api/combining_optimizers.html>`_
    """
    if not optimizers:
        raise ValueError("partition got no optimizers; expected one for each label.")
    known = {
        label: users.as_optimizer(optimizer, f"the optimizer labelled {label!r}")
        for label, optimizer in optimizers.items()
    }
    positions = partial(_positions, known, label_of_path)

    def init(params: trees.Tree) -> dict[str, Any]:
        """Return the first state of each label that is in use."""
        leaves, spec = checks.read_params(params)
        return {
            label: known[label].init({path: leaves[i] for path, i in at.items()})
            for label, at in positions(spec).items()
        }

    def check(state: Any, params: trees.Flat, root: str) -> updates.Begin:
        """Check that a state has an entry for each label in use, and that all fit these params."""
        of_label = positions(params[1])
        if not isinstance(state, dict) or set(state) != set(of_label):
            came = sorted(state) if isinstance(state, dict) else reprs.kind(state)  # pyright: ignore
            raise TypeError(
                f"{root} of partition holds {came}; expected a dict with a state for each label "
                f"in use, {sorted(of_label)}. Likely cause: the state comes from another "
                "configuration."
            )
        begins = {
            label: known[label].check(state[label], _picked(params[0], at), f"{root}[{label!r}]")
            for label, at in of_label.items()
        }
        return partial(_begin_all, of_label, begins)

    in_graphs = all(it.in_graphs for it in known.values())
    return updates.optimizer_of(init, check, in_graphs=in_graphs)


Positions = dict[str, dict[str, int]]  # of the leaves of each label: from path to position


def _positions(
    labels: Mapping[str, Any], label_of_path: Callable[[str], str], spec: optree.PyTreeSpec
) -> Positions:
    found: Positions = {}
    for i, keys in enumerate(spec.paths()):
        path = ".".join(str(key) for key in keys)
        label = label_of_path(path)
        if label not in labels:
            raise ValueError(
                f"label_of_path({path!r}) returned {label!r}; expected one of {sorted(labels)}."
            )
        before = found.setdefault(label, {})
        if path in before:
            one, other = (trees.paths(spec, "params")[j] for j in (before[path], i))
            raise ValueError(
                f"{one} and {other} have the same path, {path!r}; expected keys whose names, "
                "joined by dots, differ."
            )
        before[path] = i
    return found


def _begin_all(
    of_label: Positions, begins: dict[str, updates.Begin], state: Any, params: trees.Flat
) -> updates.Ready:
    """The steps of all labels before any is taken: all of them are, or none."""
    leaves, spec = params
    begun = {
        label: begins[label](state[label], _picked(leaves, at)) for label, at in of_label.items()
    }

    def step(
        grads: list[Tensor], applied: updates.Applied, donate: bool, norm: Tensor | None
    ) -> tuple[trees.Tree, dict[str, Any]]:
        new = list(leaves)
        states: dict[str, Any] = {}
        given_up = [*leaves, *trees.tree_leaves(state)]
        # tied leaves may have several labels, and the second reads what the first would write to
        own = donate and modes.may_write() and kernels.lie_apart(dtensors.opened(leaves)[0])
        try:
            for label, at in of_label.items():
                given = _picked(grads, at)[0], applied, own, None
                updated, states[label] = begun[label].apply(*given)
                for path, i in at.items():
                    new[i] = updated[path]
        except BaseException:
            if states and own:  # what the first ones gave up is lost
                mark(given_up, Spoiled)
            raise
        if donate and not own and modes.may_write():
            mark(leaves)
        return trees.unflatten(spec, new), states

    sound = reduce(updates.both_sound, (one.sound for one in begun.values()))
    return updates.Ready(sound, step, {label: one.rate for label, one in begun.items()})


def _picked(leaves: list[Tensor], at: Mapping[str, int]) -> trees.Flat:
    """The leaves at some positions, as a dict of them by their paths that is taken apart."""
    return trees.flatten({path: leaves[i] for path, i in at.items()})
