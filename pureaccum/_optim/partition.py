"""Different optimizers for different leaves, told apart by their paths.

    partition({"decay": adamw(3e-4), "none": adamw(3e-4, weight_decay=0.0)}, label_of_path)

The state holds one state a label, each over a flat dict from path to leaf.
"""

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import optree
from torch import Tensor

from .._base.checks import check_fits, read_params
from .._base.donation import Spoiled, mark
from .._base.trees import Tree, flatten, paths, unflatten
from .._base.trees import leaves as leaves_of
from .combinators import as_optimizer
from .update import Optimizer, Ready, both_sound, optimizer_of


def partition(optimizers: Mapping[str, Any], label_of_path: Callable[[str], str]) -> Optimizer:
    """Give each leaf the optimizer of its label: no weight decay on biases and norms, say.

    The rule::

        for label, optimizer in optimizers.items():
            of_label = leaves whose label_of_path(path) is label
            given = grads[of_label], state[label], params[of_label]
            params[of_label], state[label] = optimizer.apply(*given)

    Args:
        optimizers: The optimizer of each label.
        label_of_path: Gives the label of a leaf from its path: the keys on the way to it, joined
            by dots. In a dict of a module's ``named_parameters()`` that is the parameter's name.

    Returns:
        An optimizer whose state is a dict from label to state.

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
        label: as_optimizer(optimizer, f"the optimizer labelled {label!r}")
        for label, optimizer in optimizers.items()
    }

    def labels(spec: optree.PyTreeSpec) -> dict[str, dict[str, int]]:
        """The leaves of each label: path to position."""
        found: dict[str, dict[str, int]] = {}
        for i, keys in enumerate(spec.paths()):
            path = ".".join(str(key) for key in keys)
            label = label_of_path(path)
            if label not in known:
                raise ValueError(
                    f"label_of_path({path!r}) is {label!r}; expected one of {sorted(known)}."
                )
            positions = found.setdefault(label, {})
            if path in positions:
                one, other = (paths(spec, "params")[j] for j in (positions[path], i))
                raise ValueError(
                    f"{one} and {other} have the same path, {path!r}; expected keys whose names, "
                    "joined by dots, tell leaves apart."
                )
            positions[path] = i
        return found

    def init(params: Tree) -> dict[str, Any]:
        """The state of each label before the first step."""
        leaves, spec = read_params(params)
        return {
            label: known[label].init({path: leaves[i] for path, i in at.items()})
            for label, at in labels(spec).items()
        }

    def check(state: Any, params: Tree, root: str = "state") -> None:
        """Check that a state has those of all labels in use, and that they fit these params."""
        leaves, spec = read_params(params)
        for label, positions in labels_of_state(state, spec, root).items():
            part = {path: leaves[i] for path, i in positions.items()}
            known[label].check(state[label], part, f"{root}[{label!r}]")

    def labels_of_state(
        state: Any, spec: optree.PyTreeSpec, root: str
    ) -> dict[str, dict[str, int]]:
        """The leaves of each label, if a state is one of these labels."""
        at = labels(spec)
        if not isinstance(state, dict) or set(state) != set(at):
            came = sorted(state) if isinstance(state, dict) else f"a {type(state).__name__}"  # pyright: ignore
            raise TypeError(
                f"{root} of partition holds {came}; expected a dict with a state for each label "
                f"in use, {sorted(at)}. A state of another configuration?"
            )
        return at

    def ready(state: Any, params: Tree, root: str = "state") -> Ready:
        """The steps of all labels before any is taken: all of them are, or none."""
        leaves, spec = read_params(params)
        at = labels_of_state(state, spec, root)
        begun: dict[str, Ready] = {}
        for label, positions in at.items():
            part = {path: leaves[i] for path, i in positions.items()}
            begun[label] = known[label].ready(state[label], part, f"{root}[{label!r}]")
        sound = reduce(both_sound, (one.sound for one in begun.values()))

        def step(grads: Tree, applied: Tensor | None, donate: bool) -> tuple[Tree, dict[str, Any]]:
            terms, terms_spec = flatten(grads)
            check_fits(terms, terms_spec, leaves, spec, ("grads", "params"), "One gradient a leaf.")
            new = list(leaves)
            states: dict[str, Any] = {}
            given = [*leaves, *leaves_of(state)]
            try:
                for label, positions in at.items():
                    part = {path: terms[i] for path, i in positions.items()}
                    updated, states[label] = begun[label].apply(part, applied, donate)
                    for path, i in positions.items():
                        new[i] = updated[path]
            except BaseException:
                if states and donate:  # what the first ones gave up is lost
                    mark(given, Spoiled)
                raise
            return unflatten(spec, new), states

        return Ready(sound, step)

    return optimizer_of(init, ready, check)
