"""What a loss does besides computing: tensors it writes to, random draws, normalisation.

A mode sees every call of a torch function, and hooks see modules begin and end. A tensor that is an
argument of a torch function but the result of none is one that the loss received or holds.
"""

import weakref
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from ..._base import refusals, trees
from ..._base.torch_internals import autograd, modes, module_slots
from ..._core import ledger, losses
from ..._core.weighted import Weighted
from .._pure import generators_beside_torch, reachable
from . import report
from .kept import Held, Kept, Namespace, differs
from .subject import BATCH_NORM, Subject, is_active


class Call(NamedTuple):
    """A call of a torch function: its name, and the module or the line that made it."""

    function: str = ""
    module: str = ""  # "net.1 (BatchNorm1d)"
    root: str = ""  # "net"
    path: str = ""  # "1"
    line: str = ""  # "loss.py:12 (x = net(x))"

    @property
    def where(self) -> str:
        """Who makes the call, as the subject of a sentence."""
        return self.module or f"torch's {self.function} at {self.line}"


NOBODY = Call()


class Written(NamedTuple):
    """A tensor that the loss writes to, whenever it is called."""

    name: str
    given: bool  # handed to the loss, not captured by it
    by: Call  # the first function that saw it


class Seen(NamedTuple):
    """All that was seen of a loss."""

    written: list[Written]
    assigned: list[str]  # names of another object, or of other numbers, after a first call
    kept: Kept  # what has to be put back
    draws: list[Call]
    batch_norms: list[Call]  # in training mode
    generators: list[torch.Generator]  # the loss's own
    weighted: bool
    dtype: torch.dtype  # of the loss
    narrowest: torch.dtype  # of all that it computes with


def watch(subject: Subject, names: list[Namespace]) -> Seen:
    """Call a loss on its batch, and on its batch in reverse; afterwards all is as it was.

    A tensor that only the first call writes to is a cache and no state.
    """
    mode = _Watching(subject)
    try:
        mode.check_that_params_matter(mode.call(subject.everything()))
        first = mode.written()
        later = [n._replace(before=n.now()) for n in names]
        mode.call_again()
        second = mode.written()
    except BaseException:
        mode.written()
        Kept(tuple(mode.changed.values()), tuple(names)).put_back()
        raise
    finally:
        for generator, state in mode.generators.values():
            generator.set_state(state)
    anew = [name for n in later if n.kind == "tensors" for name in n.assigned()]
    assigned = [w.name for w in first if not w.given] + _assigned(names)
    # A large model has thousands of attributes, and a loss changes few.
    kept_names = (n for n in names if n.kind != "attributes" or n.assigned())
    kept = Kept(tuple(mode.changed.values()), tuple(kept_names))
    kept.put_back()
    weighted, dtype, _ = mode.totals[0]
    return Seen(
        written=_always_written(first, second) + [Written(name, False, NOBODY) for name in anew],
        assigned=[name for name in assigned if not _is_mode_or_cache(name)],
        kept=kept,
        draws=list(mode.draws),
        batch_norms=list(mode.batch_norms),
        generators=[generator for generator, _ in mode.generators.values()],
        weighted=weighted,
        dtype=dtype,
        narrowest=min(mode.dtypes, key=lambda it: torch.finfo(it).bits, default=dtype),
    )


def _always_written(first: list[Written], second: list[Written]) -> list[Written]:
    """What a first call writes to that it is given, and what even a second writes to."""
    return [w for w in first if w.given] + [w for w in second if not w.given]


def _assigned(names: list[Namespace]) -> list[str]:
    plain = (n for n in names if n.kind in ("names", "attributes"))
    return [name for n in plain for name in n.assigned()]


def _is_mode_or_cache(name: str) -> bool:
    return name.endswith(".training") or module_slots.is_cache(name.rpartition(".")[2])


# The mode --------------------------------------------------------------------------------


class _Noted(NamedTuple):
    """A tensor that a function was called with, and that no function had returned."""

    name: str
    tensor: weakref.ref[Tensor]  # dead after the call if it was the loss's own
    first: Tensor  # the numbers that it held when it was seen first
    held: Tensor  # the numbers that it held when it was seen first in this call
    given: bool
    by: Call


class _Watching(TorchFunctionMode):
    """Notes what is seen of a loss while it runs."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.subject = subject
        self.held = list(reachable({"loss_fn": subject.loss_fn}))
        self.names = {id(x): path.rpartition("'s ")[2] for path, x in self.held}
        self.made: dict[int, weakref.ref[Tensor]] = {}
        self.noted: dict[int, _Noted] = {}
        self.changed: dict[int, Held] = {}  # captured tensors, and their first numbers
        self.draws: dict[Call, None] = {}
        self.batch_norms: dict[Call, None] = {}
        self.generators: dict[int, tuple[torch.Generator, Tensor]] = {}
        self.roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.stack: list[nn.Module] = []  # the modules that are running
        self.dtypes: set[torch.dtype] = set()
        self.given: list[Tensor] = []
        self.totals: list[tuple[bool, torch.dtype, bool]] = []  # Weighted? dtype, leads to params?
        self.note_held()

    # Calls

    def call(self, rows: report.Indices) -> ledger.AccumState:
        """Call the loss on some samples."""
        return self.subject._replace(loss_fn=self.loss).sums(rows)

    def call_again(self) -> None:
        """Call it on the whole batch in another order, where it takes that."""
        self.given.clear()
        self.noted = {
            key: noted._replace(held=x.detach().clone())
            for key, noted in self.noted.items()
            if not noted.given and (x := noted.tensor()) is not None
        }
        self.note_held()
        try:
            self.call(self.subject.everything()[::-1])
        except Exception:
            self.call(self.subject.everything())

    def check_that_params_matter(self, state: ledger.AccumState) -> None:
        """Raise where no gradient leads to params."""
        if not self.totals[0][2] and not any(g.any() for g in trees.tree_leaves(state.grads)):
            raise ValueError(
                "the loss does not depend on params, so no gradient leads to them. Likely cause: "
                "it is detached (detach, item, float, no_grad), or it uses a module's own "
                "parameters. Use torch.func.functional_call(module, params, (x,))."
            )

    def loss(self, params: Any, part: Any) -> Any:
        """The loss, while all that it does is seen."""
        self.note_given(params, "params")
        self.note_given(part, "batch")
        with self, self.following_modules(), self.watching_generators():
            out = self.subject.loss_fn(params, part)
        loss = out[0] if self.subject.has_aux and losses.is_pair(out) else out
        weighted = isinstance(loss, Weighted)
        total = loss.total if weighted else loss
        if isinstance(total, Tensor):
            leads = autograd.leads_to(total, trees.tree_leaves(params))
            self.totals.append((weighted, total.dtype, leads))
        return out

    def written(self) -> list[Written]:
        """The tensors that hold other numbers than at the beginning of this call."""
        found: list[Written] = []
        for noted in self.noted.values():
            if (x := noted.tensor()) is not None and differs(x, noted.held):
                name = noted.name or self.name_of(x, noted.by)
                found.append(Written(name, noted.given, noted.by))
                if not noted.given:
                    self.changed[id(x)] = Held(x, noted.first)
        return found

    # What is seen meanwhile

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        for x in trees.tree_leaves((args, kwargs)):
            if isinstance(x, torch.Generator):
                self.generators.setdefault(id(x), (x, x.get_state()))
            elif isinstance(x, Tensor) and not modes.transform_active():
                self.note_used(x, name)
        if name == BATCH_NORM and is_active(name, args, kwargs):
            self.batch_norms[self.caller(name)] = None
        before = _random_state()
        out = func(*args, **kwargs)
        if not before.equal(_random_state()):
            self.draws[self.caller(name)] = None
        for x in trees.tree_leaves(out):
            if isinstance(x, Tensor):
                if x.is_floating_point():
                    self.dtypes.add(x.dtype)
                if not self.knows(x):
                    self.made[id(x)] = weakref.ref(x)
        return out

    @contextmanager
    def watching_generators(self) -> Generator[None]:
        """Note draws from the global generators that are not torch's."""
        before = generators_beside_torch()
        try:
            yield
        finally:
            for name, state in generators_beside_torch().items():
                if state != before.get(name, state):
                    self.draws[Call(module=name)] = None

    @contextmanager
    def following_modules(self) -> Generator[None]:
        """Know which modules are running."""

        def begin(module: nn.Module, args: Any) -> None:
            if not self.stack:
                self.roots.add(module)
            self.stack.append(module)

        def end(module: nn.Module, args: Any, out: Any) -> None:
            self.stack.pop()

        with (
            register_module_forward_pre_hook(begin),
            register_module_forward_hook(end, always_call=True),
        ):
            yield

    # Tensors

    def note(self, name: str, x: Tensor, given: bool, by: Call = NOBODY) -> None:
        """Remember a tensor, and the numbers that it holds."""
        numbers = x.detach().clone()
        self.noted[id(x)] = _Noted(
            name=name, tensor=weakref.ref(x), first=numbers, held=numbers, given=given, by=by
        )

    def note_given(self, tree: Any, root: str) -> None:
        """Note what is handed to the loss."""
        leaves, spec = trees.flatten(tree)
        for path, x in zip(trees.paths(spec, root), leaves, strict=True):
            if isinstance(x, Tensor):
                self.given.append(x)  # alive until it has been looked at
                self.note(path, x, given=True)

    def note_held(self) -> None:
        """Note what modules hold: code that is not Python's may write to it unseen."""
        for root in (x for _, x in self.held if isinstance(x, nn.Module)):
            grads = ((f"{n}.grad", p.grad) for n, p in root.named_parameters())
            for name, x in [*root.named_buffers(), *grads]:
                if x is not None and id(x) not in self.noted:
                    self.note(f"{self.root_name(root)}.{name}", x, given=False)

    def note_used(self, x: Tensor, function: str) -> None:
        """Note who uses a tensor first, if the loss did not make it."""
        noted = self.noted.get(id(x))
        if not self.knows(x):
            self.note("", x, given=False, by=self.caller(function))
        elif noted is not None and noted.by is NOBODY and not noted.given:
            self.noted[id(x)] = noted._replace(by=self.caller(function))

    def knows(self, x: Tensor) -> bool:
        """Whether a tensor was made by the loss, or has been noted."""
        made, noted = self.made.get(id(x)), self.noted.get(id(x))
        return (made is not None and made() is x) or (noted is not None and noted.tensor() is x)

    # Names

    def name_of(self, x: Tensor, by: Call) -> str:
        """What the user calls a captured tensor."""
        if id(x) in self.names:
            return self.names[id(x)]
        for root in self.roots:
            for name, tensor in (*root.named_parameters(), *root.named_buffers()):
                if tensor is x:
                    return f"{self.root_name(root)}.{name}"
        return f"a tensor of shape {tuple(x.shape)}, first used at {by.line}"

    def root_name(self, root: nn.Module) -> str:
        """What the user calls a module."""
        return self.names.get(id(root), type(root).__name__)

    def caller(self, function: str) -> Call:
        """Who calls a function now."""
        if not self.stack:
            return Call(function=function, line=refusals.users_line())
        root, inner = self.stack[0], self.stack[-1]
        path = next((name for name, part in root.named_modules() if part is inner), "")
        of, kind = self.root_name(root), type(inner).__name__
        module = f"{of}.{path} ({kind})" if path else of if of == kind else f"{of} ({kind})"
        return Call(
            function=function, module=module, root=of, path=path, line=refusals.users_line()
        )


def _random_state() -> Tensor:
    state = torch.get_rng_state()
    return torch.cat([state, torch.cuda.get_rng_state()]) if torch.cuda.is_initialized() else state
