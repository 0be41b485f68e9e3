"""Conversion between our states and those of torch.optim and GradScaler, by parameter name.

    import_state    {"state": {0: {"exp_avg": …}}, "param_groups": …}  ->  opt_state, steps, rates
    export_state    the same in the other direction, into a ``state_dict`` as a template

torch numbers parameters in the order of its groups. Names map these numbers to our parameters.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base import checks, named_leaves, reprs, states, trees
from .._optim import from_torch, optimizers
from . import loss_scale
from .state import TrainState


SETTINGS = {  # of torch, which decide what a state means; others' d changes, unlike Adafactor's
    name
    for cls in (torch.amp.GradScaler, *vars(torch.optim).values())
    if isinstance(cls, type)
    for name in inspect.signature(cls).parameters
} - {"params", "lr", "d", "foreach", "fused", "capturable", "differentiable"}
KEPT = {  # what torch calls the trees of our states
    optimizers.AdamState: {tree: tree for tree in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")},
    optimizers.SGDState: {"momentum": "momentum_buffer"},
}


class Theirs(NamedTuple):
    """A parameter of torch's."""

    number: int
    kept: dict[str, Any]  # what its optimizer keeps for it
    group: dict[str, Any]


def import_state(
    state: TrainState,
    *,
    optimizer: Mapping[str, Any] | None = None,
    scaler: Mapping[str, Any] | None = None,
    names: Sequence[str] | None = None,
    steps: int | None = None,
) -> TrainState:
    """Continue a run that ``torch.optim`` and ``GradScaler`` began.

    The rule: the optimizer state that torch has for a parameter's name becomes ours. Learning rates
    that our state stores are taken from the param groups, and the step count continues.

    Take the parameters over with ``step.init(pa.functional(model).params)``. Settings that no state
    stores (betas, weight decay, a growth interval) must be the same in your new optimizer. The new
    state shares no memory with the arguments.

    Args:
        state: The result of ``step.init``, whose params are a dict by the names of a module.
        optimizer: The ``state_dict()`` of SGD, Adam or AdamW, or of the class of ``from_torch``.
        scaler: The ``state_dict()`` of a ``torch.amp.GradScaler``.
        names: The names of the optimizer's parameters, in the order in which it received them. Not
            needed if it received ``named_parameters()``.
        steps: The number of applied steps, for schedules. SGD does not count them.

    Example:
        >>> from pureaccum import functional, make_step, sgd
        >>> model = torch.nn.Linear(1, 1)
        >>> theirs = torch.optim.SGD(model.named_parameters(), lr=0.5, momentum=0.9)
        >>> model(torch.ones(1)).backward()
        >>> theirs.step()
        >>> step = make_step(lambda params, batch: params["weight"].sum(), sgd(0.1, momentum=0.9))
        >>> state = step.init(functional(model).params)
        >>> state = import_state(state, optimizer=theirs.state_dict(), steps=1)
        >>> state.opt_state.lr, state.opt_state.momentum["weight"], state.applied
        (tensor(0.5000, dtype=torch.float64), tensor([[1.]]), tensor(1))

    References:
        `torch.optim.Optimizer.state_dict
        <https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.state_dict.html>`_
    """
    checks.check_state(state, TrainState, "import_state")
    if steps is not None:
        steps = checks.check_int(
            steps, "steps", "a number of applied steps, an int of at least 0", 0
        )
    if optimizer is not None:
        theirs = _by_name(optimizer, names)
        ours = _names_of(state.params)
        _check_names(theirs, ours)
        if steps is None:
            steps = max((int(x.kept.get("step", 0)) for x in theirs.values()), default=0) or None
        counts: set[int] = set()
        visit = partial(_imported, theirs, steps, counts)
        opt_state = _visited(state.opt_state, ours, "state.opt_state", visit)
        if len(counts) == 1:
            (count,) = counts
            state = named_leaves.tree_set(state, {".applied": count, ".attempts": count})
        state = state._replace(opt_state=opt_state)
    if scaler is not None:
        new = loss_scale.scale_of_scaler(state.loss_scale, scaler)
        _check_settings(state.loss_scale.scale, scaler, "the GradScaler", "state.loss_scale")
        state = state._replace(loss_scale=new)
    return state


def export_state(
    state: TrainState,
    *,
    optimizer: Mapping[str, Any] | None = None,
    scaler: Mapping[str, Any] | None = None,
    names: Sequence[str] | None = None,
) -> dict[str, dict[str, Any]]:
    """Return the state dicts with which a torch optimizer and a ``GradScaler`` continue a run.

    The rule: the reverse of ``import_state``. Each ``state_dict`` that you pass is returned with
    our numbers in place of its own. The call synchronises with the device.

    Args:
        state: A training state, whose params are a dict by the names of a module. Load these with
            ``functional(model).load(state.params)``.
        optimizer: The ``state_dict()`` of an optimizer like ours, such as a new one. Its groups and
            settings stay, except for learning rates that our state stores.
        scaler: The ``state_dict()`` of a ``GradScaler``.
        names: As for ``import_state``.

    Returns:
        A dict with ``"optimizer"`` and ``"scaler"``, as far as passed, for their
        ``load_state_dict``.

    Example:
        >>> from pureaccum import adamw, make_step
        >>> step = make_step(lambda params, batch: (params["weight"] * batch).mean(), adamw(0.5))
        >>> state, _ = step(step.init({"weight": torch.ones(1, 1)}), torch.ones(2))
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> theirs = torch.optim.AdamW(model.named_parameters(), lr=0.1)
        >>> theirs.load_state_dict(export_state(state, optimizer=theirs.state_dict())["optimizer"])
        >>> theirs.param_groups[0]["lr"], theirs.state[model.weight]["exp_avg"]
        (0.5, tensor([[0.1000]]))

    References:
        `torch.optim.Optimizer.load_state_dict
        <https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.load_state_dict.html>`_
    """
    checks.check_state(state, TrainState, "export_state")
    if optimizer is None and scaler is None:
        raise ValueError("optimizer and scaler are both None; expected a state_dict() to fill.")
    made: dict[str, dict[str, Any]] = {}
    if optimizer is not None:
        theirs, ours = _by_name(optimizer, names), _names_of(state.params)
        _check_names(theirs, ours)
        groups = [dict(group) for group in optimizer["param_groups"]]
        kept: dict[int, Any] = {}

        def visit(node: State, its: list[str], _root: str) -> State:
            for name, entry, rate in _exported(node, its):
                number = theirs[name].number
                if entry:
                    kept[number] = entry
                for group in groups:
                    if rate is not None and number in group["params"]:
                        group["lr"] = rate
            return node

        _visited(state.opt_state, ours, "state.opt_state", visit)
        made["optimizer"] = {**optimizer, "state": kept, "param_groups": groups}
    if scaler is not None:
        loss_scale.scale_of_scaler(state.loss_scale, scaler)
        scale = state.loss_scale
        tracker = int(scale.growth_tracker.item())
        made["scaler"] = {**scaler, "scale": scale.scale.item(), "_growth_tracker": tracker}
    return made


# What torch has, by name ----------------------------------------------------------------------


def _by_name(state_dict: Any, names: Sequence[str] | None) -> dict[str, Theirs]:
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= {*state_dict}:
        came = type(state_dict).__name__
        raise TypeError(f"optimizer is a {came}; expected its state_dict(), with 'param_groups'.")
    groups: list[dict[str, Any]] = state_dict["param_groups"]
    order = [(number, group) for group in groups for number in group["params"]]
    named = [name for group in groups for name in group.get("param_names", ())]
    if names is None and len(named) != len(order):
        raise ValueError(
            "optimizer has no names for its parameters. Pass names, in the order in which it got "
            "the parameters: [name for name, _ in model.named_parameters()]. Or make it with "
            "named_parameters()."
        )
    known = named if names is None else list(names)
    if len(known) != len(order) or len({*known}) != len(known):
        raise ValueError(
            f"names has {len(known)} names, {len({*known})} of them different; expected "
            f"{len(order)} different names, one for each parameter of the optimizer."
        )
    kept = state_dict["state"]
    pairs = zip(known, order, strict=True)
    return {name: Theirs(number, kept.get(number, {}), group) for name, (number, group) in pairs}


def _names_of(tree: Any) -> list[str]:
    return [".".join(map(str, path)) for path in trees.flatten(tree)[1].paths()]


def _check_names(theirs: dict[str, Theirs], ours: list[str]) -> None:
    missing = [name for name in ours if name not in theirs]
    strangers = {name: it.kept for name, it in theirs.items() if name not in ours and it.kept}
    moved = [name for name, kept in strangers.items() if kept.get("step", 1)]
    if missing or moved:
        which = (
            f"state.params has {missing[0]!r}" if missing else f"torch has steps of {moved[0]!r}"
        )
        other = "the optimizer has no such name" if missing else "state.params has no such name"
        raise ValueError(
            f"{which}, but {other}. Likely causes: names of another module or of a wrapper "
            "('module.', '_orig_mod.'), or a parameter that is frozen here and was not there."
        )


# Each part of our optimizer's state ------------------------------------------------------------


State = optimizers.AdamState | optimizers.SGDState | from_torch.TorchState


def _visited(
    node: Any, names: list[str], root: str, visit: Callable[[State, list[str], str], Any]
) -> Any:
    """A state of ours with what ``visit`` makes of each part, given the names of its leaves."""
    if isinstance(node, State):
        return visit(node, _own_names(node) or names, root)
    if isinstance(node, dict):
        shares = _shares(node, names, root).items()
        return {x: _visited(node[x], its, f"{root}[{x!r}]", visit) for x, its in shares}
    if type(node) is tuple and node:  # of a chain
        *maps, last = node
        return (*maps, _visited(last, names, f"{root}[{len(maps)}]", visit))
    raise ValueError(
        f"{root} is {reprs.kind(node)}, which has no counterpart in torch; expected a state "
        "of sgd, adam, adamw or from_torch, or of a chain or partition of these."
    )


def _own_names(node: Any) -> list[str] | None:
    """The names of the leaves that a state is of, if it says."""
    if isinstance(node, (optimizers.AdamState, optimizers.SGDState)):
        held = [x for field in KEPT[type(node)] if (x := getattr(node, field)) != ()]
        return _names_of(held[0]) if held else None
    its = node if type(node) is tuple else node.values() if isinstance(node, dict) else ()
    found = [names for x in its if (names := _own_names(x)) is not None]
    return [name for names in found for name in names] if found else None


def _shares(node: dict[str, Any], names: list[str], root: str) -> dict[str, list[str]]:
    """The names of each label of a partition: one that does not say has those that are left."""
    said = {label: _own_names(its) for label, its in node.items()}
    silent = [label for label, its in said.items() if its is None]
    if len(silent) > 1:
        raise ValueError(
            f"{root} has the labels {', '.join(map(repr, silent))}, whose states keep no names (a "
            "sgd without momentum, or a from_torch); expected at most one such label, which gets "
            "all leaves that are left."
        )
    taken = {name for its in said.values() if its is not None for name in its}
    left = [name for name in names if name not in taken]
    return {label: left if its is None else its for label, its in said.items()}


def _imported(
    theirs: dict[str, Theirs],
    steps: int | None,
    counts: set[int],
    node: State,
    names: list[str],
    root: str,
) -> State:
    """A state of ours with what torch has for its leaves."""
    its = [theirs[name] for name in names]
    for name, it in zip(names, its, strict=True):
        _check_settings(node.steps, it.group, f"the optimizer of {name!r}", root)
    count = _count(names, its, root, steps)
    counts.add(count)
    changes: dict[str, Any] = {"steps": torch.full_like(node.steps, count)}
    if isinstance(node, from_torch.TorchState):
        return node._replace(**changes, **_of_class(node, names, its, root))
    if isinstance(node.lr, Tensor):
        changes["lr"] = torch.full_like(node.lr, _rate(names, its, root))
    for field, key in KEPT[type(node)].items():
        changes[field] = _tree(getattr(node, field), key, names, its, f"{root}.{field}", count)
    return node._replace(**changes)


def _check_settings(x: Tensor, theirs: Mapping[str, Any], whose: str, root: str) -> None:
    """Check that torch's settings are those of the new state that a tensor is of."""
    ours = states.made_with.get(x, {})
    for key in sorted(SETTINGS & {*theirs, *ours}):
        if trees.flatten(theirs.get(key))[0] != trees.flatten(ours.get(key))[0]:
            a, b = (f"{key}={of[key]!r}" if key in of else f"no {key}" for of in (theirs, ours))
            raise ValueError(
                f"{whose} has {a}, but {root} was made with {b}; expected the same settings. Make "
                "the step's optimizer with torch's settings, and pass import_state the result of "
                "step.init itself, because a copy does not store them."
            )


def _count(names: list[str], its: list[Theirs], root: str, otherwise: int | None) -> int:
    """How many steps were applied, the same for all leaves of one state."""
    least = 1 if otherwise is None else otherwise  # SGD counts none
    pairs = zip(names, its, strict=True)
    counts = {int(it.kept.get("step", least if it.kept else 0)): name for name, it in pairs}
    if len(counts) > 1:
        (few, one), (many, other) = sorted(counts.items())[:: len(counts) - 1]
        raise ValueError(
            f"torch has {few} steps of {one!r} and {many} of {other!r}, but {root} has one count "
            "for all. Likely cause: a parameter that got no gradient in some steps. Put it into "
            "its own label (partition)."
        )
    return next(iter(counts), 0) or otherwise or 0


def _rate(names: list[str], its: list[Theirs], root: str) -> float:
    rates = {float(it.group["lr"]): name for name, it in zip(names, its, strict=True)}
    if len(rates) > 1:
        (a, one), (b, other), *_ = rates.items()
        raise ValueError(
            f"torch has a learning rate of {a} for {one!r} and of {b} for {other!r}, but {root} "
            "has one for both. Use a label for each of torch's groups (partition)."
        )
    return next(iter(rates))


def _tree(held: Any, key: str, names: list[str], its: list[Theirs], root: str, count: int) -> Any:
    """A tree of the state, of what torch calls ``key``."""
    leaves, spec = trees.flatten(held)
    for i, (old, name, it) in enumerate(zip(leaves, names, its, strict=False)):
        new = it.kept.get(key)
        if new is None and count == 0:
            continue
        if not isinstance(new, Tensor) or new.shape != old.shape:
            shape = tuple(new.shape) if isinstance(new, Tensor) else new
            raise ValueError(
                f"torch keeps {shape} as {key!r} for {name!r}; expected a tensor of "
                f"{tuple(old.shape)}, as in {root}. Likely cause: another class or other "
                "settings, another model, or a parameter that never got a gradient."
            )
        leaves[i] = new.detach().to(old.device, old.dtype, copy=True)
    return trees.unflatten(spec, leaves)


def _of_class(
    node: from_torch.TorchState, names: list[str], its: list[Theirs], root: str
) -> dict[str, Any]:
    """What a class of torch keeps, and the settings of its group that are numbers."""
    kept: list[dict[str, Any]] = []
    for old, name, it in zip(node.per_leaf, names, its, strict=True):
        if it.kept and {*it.kept} != {*old}:
            raise ValueError(
                f"torch keeps {sorted(it.kept)} for {name!r}; expected {sorted(old)}, as in "
                f"{root}. Likely cause: another class, or other settings."
            )
        kept.append(
            {key: _like(it.kept.get(key, x), x, f"{root}, {name!r}") for key, x in old.items()}
        )
    _rate(names, its, root)
    group = its[0].group
    settings = {key: _like(group.get(key, x), x, root) for key, x in node.group.items()}
    return {"per_leaf": kept, "group": settings}


def _like(new: Any, old: Any, where: str) -> Any:
    """What torch keeps in one place, as the state of ours does: numbers as 0-d tensors."""
    if isinstance(old, Tensor) and isinstance(new, (Tensor, bool, int, float)):
        its = new.detach() if isinstance(new, Tensor) else torch.tensor(new, dtype=old.dtype)
        if its.shape == old.shape:
            return its.to(old.device, old.dtype, copy=True)
    elif isinstance(old, tuple) and (old == () or len(old) == len(new or ())):
        pairs = zip(new or (), old, strict=False)
        return tuple(_like(x, y, where) for x, y in pairs)  # pyright: ignore[reportUnknownVariableType]
    raise ValueError(f"torch keeps {new!r} in {where}; expected a value like {old!r}.")


def _exported(node: State, names: list[str]) -> Iterator[tuple[str, dict[str, Any], float | None]]:
    """For each leaf: its name, what torch keeps for it, and its learning rate."""
    count = int(node.steps.item())
    if isinstance(node, from_torch.TorchState):
        rate = node.group["lr"].item() if "lr" in node.group else None
        for name, kept in zip(names, node.per_leaf, strict=True):
            own = {k: x.detach().clone() if isinstance(x, Tensor) else x for k, x in kept.items()}
            yield name, own if count else {}, rate
        return
    rate = node.lr.item() if isinstance(node.lr, Tensor) else None
    columns = {key: trees.flatten(getattr(node, f))[0] for f, key in KEPT[type(node)].items()}
    for i, name in enumerate(names):
        kept = {key: leaves[i].detach().clone() for key, leaves in columns.items() if leaves}
        if isinstance(node, optimizers.AdamState):
            kept = {"step": torch.tensor(float(count)), **kept}
        yield name, kept if count else {}, rate
