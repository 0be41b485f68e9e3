"""Any ``torch.optim.Optimizer`` class as a pair of pure functions.

    make the optimizer on copies of the parameters; put its state back; step; take its state out

``init`` takes one step on copies to find out which tensors and numbers the class stores. The state
has that structure from the start, filled with zeros until the first applied step.
"""

import inspect
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base import checks, states, trees
from .._base.settings import records
from .._base.torch_internals import functorch, modes
from . import schedules, updates


StatePath = tuple[Any, ...]


@states.loadable
class TorchState(NamedTuple):
    """The state of a torch optimizer, with its numbers as 0-d tensors.

    Attributes:
        steps: The number of applied steps, a 0-d int64 tensor.
        per_leaf: For each leaf of params, in order, the dict that the optimizer stores for it.
        group: The numeric settings of its param group, which some optimizers change as they go.
    """

    steps: Tensor
    per_leaf: list[dict[str, Any]]
    group: dict[str, Any]


@records
def from_torch(cls: type[torch.optim.Optimizer], **settings: Any) -> updates.Optimizer:
    """Turn any ``torch.optim.Optimizer`` class, torch's or not, into a pair of pure functions.

    The rule::

        optimizer = cls(copies of params, **settings)
        put its state back; step; take its state out

    The class itself does the arithmetic, so results have its bits. It runs at eager top level only:
    under torch.func transforms, vmap and torch.compile it raises. On an accelerator each step
    synchronises to learn whether it is applied, as ``GradScaler.step`` does. ``sgd``, ``adam`` and
    ``adamw`` have neither limit.

    Args:
        cls: A ``torch.optim.Optimizer`` class whose ``step`` needs no closure.
        settings: Keyword arguments for the class. ``lr`` may also be a schedule.

    Example:
        >>> opt = from_torch(torch.optim.RMSprop, lr=0.1, alpha=0.75)
        >>> params = torch.tensor([1.0, 2.0])
        >>> new, state = opt.apply(torch.tensor([3.0, -1.0]), opt.init(params), params)
        >>> new, state.per_leaf[0]["square_avg"]
        (tensor([0.8000, 2.2000]), tensor([2.2500, 0.2500]))

    References:
        `torch.optim <https://docs.pytorch.org/docs/stable/optim.html>`_
    """
    _check_class(cls)
    schedules.refuse_scheduler(settings.get("lr"))
    made = _Class(cls, settings, settings.get("lr"), {})
    # not the methods themselves, which note no settings
    return updates.optimizer_of(partial(made.init), made.check, in_graphs=False)


@contextmanager
def _plainly() -> Generator[None]:
    """Leave inference mode; what a class makes on no device in particular is on the CPU."""
    here = torch.get_default_device().type == "cpu"
    with checks.outside_inference_mode(), nullcontext() if here else torch.device("cpu"):
        yield


class _Class(NamedTuple):
    """A class of torch with its settings, as pure functions.

    Attributes:
        cls: The class.
        settings: What it takes after the parameters.
        lr: Its learning rate, if it was given one.
        kinds: Which parts of the state of leaves of such shapes are Python numbers, once known.
    """

    cls: Any
    settings: dict[str, Any]
    lr: Any
    kinds: dict[Any, dict[StatePath, Any]]

    def init(self, params: trees.Tree) -> TorchState:
        """The state before the first step, in the structure that it has after that step."""
        leaves, spec = checks.read_params(params)
        _refuse_transforms(self.cls, leaves)
        if isinstance(self.lr, (int, float)):
            schedules.check_held(self.lr, leaves, spec)
        with _plainly():
            per_leaf, group, defaults = self.first_step(leaves)
            count = states.with_settings(torch.zeros((), dtype=torch.int64, device="cpu"), defaults)
            return TorchState(count, trees.tree_map(torch.zeros_like, per_leaf), group)

    def check(self, state: Any, params: trees.Flat, root: str) -> updates.Begin:
        """Check that a state is one of this class and of these params."""
        checks.check_state(state, TorchState, f"from_torch({self.cls.__name__})", root)
        if len(state.per_leaf) != len(params[0]):
            raise ValueError(
                f"{root}.per_leaf has {len(state.per_leaf)} entries; expected {len(params[0])}, "
                f"one for each leaf of params. {updates.BELONGS}"
            )
        return self.begin

    def begin(self, state: Any, params: trees.Flat) -> updates.Ready:
        """A step of the class before it is taken."""
        _refuse_transforms(self.cls, [])
        with _plainly():
            lr = self.lr
            rate = schedules.rate_at(lr, state.steps) if callable(lr) else state.group.get("lr", lr)
            sound = not isinstance(rate, Tensor) or schedules.is_sound(rate, params[0])
            told = () if rate is None else torch.as_tensor(rate, dtype=torch.float64)
        return updates.Ready(sound, partial(self.step, state, params, rate), told)

    @_plainly()
    def step(
        self,
        state: TorchState,
        params: trees.Flat,
        rate: Any,
        terms: list[Tensor],
        applied: updates.Applied,
        donate: bool,
        norm: Tensor | None,
    ) -> tuple[trees.Tree, TorchState]:
        """The next params and state."""
        leaves, spec = params
        _refuse_transforms(self.cls, [*leaves, *terms])
        before, state_spec = trees.flatten(state)
        work, before = states.taken([leaves, before], donate)
        work = [x.clone() if x.is_inference() else x for x in work]  # they may not require grad
        kept = trees.unflatten(state_spec, before)
        if bool(applied):
            optimizer = self.resumed(kept, work, terms, rate)
            try:
                optimizer.step()
                per_leaf = [_encoded(dict(optimizer.state[x]), (), {}) for x in work]
                _check_same(self.cls, per_leaf, kept.per_leaf)
                group = _encoded(_numbers(optimizer, self.lr), (), {})
                kept = TorchState(state.steps + 1, per_leaf, group)
            except BaseException:
                if donate:
                    states.mark([*leaves, *trees.tree_leaves(state)], states.Spoiled)
                raise
        if donate:
            states.mark([*leaves, *trees.tree_leaves(state)])
        return trees.unflatten(spec, [x.detach() for x in work]), kept

    # The class itself, in place

    def made(self, params: list[Tensor], grads: list[Tensor], rate: Any) -> torch.optim.Optimizer:
        """An optimizer of the class over params, which are given these gradients."""
        cls: Any = self.cls
        for param, grad in zip(params, grads, strict=True):
            param.requires_grad_()
            param.grad = grad.to(param.dtype, copy=True)  # some classes write to it, or keep it
            if issubclass(cls, torch.optim.SparseAdam) and not grad.is_sparse:
                param.grad = param.grad.to_sparse(1)
        settings: Any = self.settings | ({"lr": float(rate)} if callable(self.lr) else {})
        return cls(params, **settings)

    def first_step(self, leaves: list[Tensor]) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
        """What the class keeps for each leaf after a step on copies; its settings before that."""
        copies = [x.detach().clone() for x in leaves]
        # A rate that any class takes: a schedule is asked for those of true steps alone.
        optimizer = self.made(copies, [torch.ones_like(x) for x in copies], 1e-3)
        group = _encoded(_numbers(optimizer, self.lr), (), {})
        optimizer.step()
        kinds = self.kinds.setdefault(_likeness(leaves), {})
        kept = [_encoded(dict(optimizer.state[x]), (i,), kinds) for i, x in enumerate(copies)]
        return kept, group, optimizer.defaults

    def resumed(
        self, kept: TorchState, work: list[Tensor], terms: list[Tensor], rate: Any
    ) -> torch.optim.Optimizer:
        """An optimizer of the class over ``work``, with what a state keeps put back into it."""
        started = kept.steps.item() > 0
        if started and _likeness(work) not in self.kinds:
            self.first_step(work)
        optimizer = self.made(work, terms, rate)
        numbers: dict[StatePath, Any] = {}
        _encoded(_numbers(optimizer, self.lr), (), numbers)
        optimizer.param_groups[0].update(_decoded(kept.group, (), numbers))
        if started:
            kinds = self.kinds[_likeness(work)]
            for i, (x, held) in enumerate(zip(work, kept.per_leaf, strict=True)):
                optimizer.state[x] = _decoded(held, (i,), kinds)
        return optimizer


def _check_class(cls: Any) -> None:
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise TypeError(
            f"from_torch got {cls!r}; expected a class that derives from torch.optim.Optimizer, "
            "and its settings: from_torch(torch.optim.RMSprop, lr=...)."
        )
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        way_out = (
            " Use pureaccum's lbfgs, which takes a function." if cls is torch.optim.LBFGS else ""
        )
        raise ValueError(
            f"{cls.__name__} cannot become a pure function of the gradient, because its step "
            f"takes a closure and evaluates the loss again.{way_out}"
        )


def _refuse_transforms(cls: type, tensors: list[Tensor]) -> None:
    if modes.transform_active() or functorch.any_tangent(tensors):
        raise RuntimeError(
            f"from_torch({cls.__name__}) cannot run under a torch.func transform, "
            "torch.compile or forward AD, because the class changes parameters in place and reads "
            "numbers on the host. Use sgd, adam or adamw."
        )


def _likeness(leaves: list[Tensor]) -> Any:
    return tuple((x.shape, x.dtype, x.device) for x in leaves)


def _check_same(cls: type, after: list[Any], before: list[Any]) -> None:
    cause = (
        f"{cls.__name__} keeps other values than after its first step, but the structure of a "
        "state is fixed."
    )
    specs = trees.flatten(before)[1], trees.flatten(after)[1]
    checks.check_same_structure(*specs, "the state before", "the state after", cause)


# Python numbers as tensors, and back ----------------------------------------------------------


DTYPES: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}


def _encoded(value: Any, path: StatePath, kinds: dict[StatePath, Any]) -> Any:
    """A state in tensors alone; ``kinds`` then says where there was a number, or None."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {key: _encoded(x, (*path, key), kinds) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_encoded(x, (*path, i), kinds) for i, x in enumerate(value))
    if value is None:
        kinds[path] = None
        return ()
    if isinstance(value, (bool, int, float)):
        kind = next(kind for kind in DTYPES if isinstance(value, kind))  # NumPy's are floats too
        kinds[path] = kind
        return torch.full((), value, dtype=DTYPES[kind], device="cpu")
    raise TypeError(
        f"the optimizer keeps {value!r} under {path!r}; expected tensors and numbers, in dicts, "
        "lists and tuples."
    )


def _decoded(value: Any, path: StatePath, kinds: dict[StatePath, Any]) -> Any:
    """The state as the class keeps it, with Python numbers and None again."""
    if path in kinds and isinstance(value, Tensor):
        return value.item()
    if path in kinds:
        return None
    if isinstance(value, dict):
        return {key: _decoded(x, (*path, key), kinds) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_decoded(x, (*path, i), kinds) for i, x in enumerate(value))
    return value


def _numbers(optimizer: torch.optim.Optimizer, lr: Any) -> dict[str, Any]:
    """An optimizer's settings that are numbers; a learning rate that is none is the caller's."""
    group = optimizer.param_groups[0]
    ours = {"params"} if isinstance(lr, float | int | None) else {"params", "lr"}
    return {
        name: value
        for name, value in group.items()
        if name not in ours
        and {*map(type, value if isinstance(value, tuple) else [value])} <= {int, float, Tensor}
    }
