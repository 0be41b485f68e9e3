"""A loss writes neither to what it is given nor to what it captures.

    the first microbatch of a loss      it is run once more, observed, and what it gives is dropped:
    or of a new kind                    an operation that would write to memory that was there
                                        before is refused before it runs
    each run that is not observed       the versions of what is given and captured are compared

A kind is what a loss may decide by: the modes of the modules that it calls, and the structure,
dtypes and flags of the batch. Versions show a write only afterwards, and none by ``.data``.

Where torch's own collectives or DTensors begin the observed run ends: other ranks would have to
take part in it. Under a dispatch mode nobody observes: it would see the loss twice.
"""

import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from types import MethodType
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakMethod, ref

import optree
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from .._base import asking, checks, deterministic, dtensors, observation, states, trees
from .._base.torch_internals import autograd, kernels, module_slots, operations
from .._base.torch_internals.modes import dispatched, transform_active, unnoticed
from . import called_modules, closures, coupling, losses


class Known:
    """What is known of a loss. No tuple: a compiler would look into that, and guard it."""

    def __init__(self, loss: Any = None) -> None:
        self.loss: Callable[[], Any] = lambda: None  # the loss, while it lives
        if loss is not None:
            with suppress(TypeError):  # it takes no weak reference
                self.loss = WeakMethod(loss) if isinstance(loss, MethodType) else ref(loss)
        self.kinds: set[Any] = set()  # of microbatches in which it wrote to nothing
        self.captured: list[ReferenceType[Tensor]] = []  # what it reads, and is not given
        self.modules: list[ReferenceType[nn.Module]] = []  # that it calls …
        self.themselves: list[ReferenceType[nn.Module]] = []  # … with buffers, and in no shell
        # Whether its backward pass computes it again, once that is known: see windows.py.
        self.recomputes: bool | None = None
        # Whether it captures what requires grad, once a call has gone through: see history.py.
        self.captures: bool | None = None
        self.answers: dict[Any, asking.Answer] = {}  # by the kinds of questions: see asking.py
        self.numbers: set[Any] = set()  # of samples, which have kinds of their own
        self.terms: int | None = None  # of a sum of ``Weighted``, once known: see denominators.py
        self.by_func = False  # whether it calls what plain autograd takes for a constant
        self.draws = self.reaches = False  # whether it was seen to draw, or to reach other ranks
        self.unseen = False  # whether it was found that its use of leaves cannot be followed
        # Under a transform, and outside of any: did autograd's graph not tell what it captures?
        self.watched: set[bool] = set()

    def counted(self, kind: Any) -> Any:
        """The kind of a question; after eight numbers of samples all others are one."""
        if len(self.numbers) < asking.NUMBERS:
            self.numbers.add(kind[-2:])
        return kind if kind[-2:] in self.numbers else kind[:-2]


class Given(NamedTuple):
    """Something that a loss is given: its name, its leaves, and their structure."""

    root: str
    leaves: list[Any]
    spec: optree.PyTreeSpec


class WriteError(RuntimeError):
    """A loss has written, or is about to write, to what is not its own."""


# By identity: of a loss, or of the object whose method it is, what is known by function.
_of_losses: "WeakIdKeyDictionary" = WeakIdKeyDictionary()
_here = threading.local()


def known_of(loss: Any) -> Known:
    """What is known of a loss, by whichever function it was called before."""
    if torch.compiler.is_dynamo_compiling():
        return Known()
    owner, function = loss, None
    if isinstance(loss, MethodType):
        owner, function = loss.__self__, loss.__func__
    try:
        of_owner: dict[Any, Known] = _of_losses.setdefault(owner, {})  # pyright: ignore
    except TypeError:  # it takes no weak reference
        return Known(loss)
    if function not in of_owner:
        of_owner[function] = Known(loss)
    return of_owner[function]


@contextmanager
def unguarded() -> Generator[None]:
    """Let losses write, in this thread: somebody else looks."""
    before, _here.off = getattr(_here, "off", False), True
    try:
        yield
    finally:
        _here.off = before


class Asks(NamedTuple):
    """What a loss is asked, and whether new buffers of modules must reach what it returns."""

    question: coupling.Question | None = None
    keeps_buffers: bool = False


def guarding(
    known: Known | None,
    *given: Given,
    asks: Asks = Asks(),  # noqa: B008
) -> AbstractContextManager[Callable[..., Any]]:
    """Guard what is given to a loss, and what it captures, while it is called.

    What it is differentiated by is given first, unless that is all. A loss that is asked a question
    is called as a ``LossOfPart``. The context yields ``guarded``, which makes a guarded loss of a
    loss. Our own losses, of which nothing is known, are not guarded.
    """
    if known is None or torch.compiler.is_dynamo_compiling() or getattr(_here, "off", False):
        return nullcontext(_itself)
    return _Guard(known, given, asks)


def knows(known: Known, *given: Given, asked: Any = None, keeps_buffers: bool = False) -> bool:
    """Whether batches of this kind were watched before, and the loss need not be asked.

    It is asked a question of the kind ``asked``, if any. Where it need not be, the call counts.
    """
    kind = _kind(known, given, keeps_buffers)
    if asked is None or kind not in known.kinds:
        return kind in known.kinds
    if checks.here.checks == "off":
        return True
    answer = known.answers.get((kind, known.counted(asked)))
    if answer is None or answer.calls + 1 >= answer.due or checks.here.checks == "always":
        return False
    answer.calls += 1
    return True


def remember(known: Known, *given: Given) -> None:
    """Know batches of this kind from now on."""
    known.kinds.add(_kind(known, given))


def _alive(references: list[ReferenceType[Any]]) -> list[Any]:
    return [x for at in references if (x := at()) is not None]


def _itself(loss: Any, _tried: Any = None) -> Any:
    return loss


class _Guard:
    """The context of ``guarding``, a class because @contextmanager would take twice the time."""

    __slots__ = (
        "asks", "before", "decides", "given", "inquiry", "keeps", "known", "question", "tensors",
        "watched",
    )  # fmt: skip

    def __init__(self, known: Known, given: tuple[Given, ...], asks: Asks) -> None:
        self.known, self.given, (self.question, self.keeps) = known, given, asks
        self.asks, self.inquiry = self.question is not None, None
        self.decides = given[1:] or given  # all but the leaves to differentiate with respect to
        self.tensors: list[Tensor] | None = None
        self.watched = False

    def __enter__(self) -> Callable[..., Any]:
        known, question = self.known, self.question
        kind = _kind(known, self.decides, self.keeps)
        off = checks.here.checks == "off"
        if off or kind in known.kinds:
            self.watched, self.asks = True, self.asks and not off
            self.begin()
            if question is not None and self.asks:
                answer = known.answers.get((kind, known.counted(question.kind)))
                always = checks.here.checks == "always"
                if answer is not None and answer.calls + 1 < answer.due and not always:
                    answer.calls, self.asks = answer.calls + 1, False
        self.asks = self.asks and coupling.may_be_asked()
        return self.guarded

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None and self.tensors is not None:
            now = autograd.versions(self.tensors)
            if now != self.before:
                pairs = zip(now, self.before, self.tensors, strict=True)
                x = next(x for a, b, x in pairs if a != b)
                name = _names(self.given).get(kernels.memory_of(dtensors.local(x)))
                name = name or called_modules.name_in(x, _alive(self.known.modules))
                raise WriteError(_sentence("has written to", name))

    def begin(self) -> None:
        """Compare versions from here on."""
        self.tensors = _tensors(self.known, self.given)
        self.before = autograd.versions(self.tensors)

    def guarded(self, loss: Any, tried: Callable[..., Any] | None = None) -> Any:
        """A guarded loss; where that cannot be called twice, something else is ``tried``."""
        if self.tensors is not None and not self.asks:
            return loss

        def call(*args: Any) -> Any:
            first = not self.watched and (checks.here.observed is not None or not dispatched())
            dropped: list[str] = []
            run = partial(tried or loss, *args)
            goes_well = first and _goes_well(run, args, self.known, self.given, dropped)
            raises = self.keeps and dropped
            if goes_well and not raises:
                self.note()
            self.asks = self.asks and (goes_well or not first)  # what failed is not called in parts
            if self.tensors is None:
                self.begin()
            out = self.asked(loss, args) if self.asks else loss(*args)
            if raises:  # a coupled loss has raised that
                raise called_modules.DroppedBuffersError(dropped[0])
            if first:  # it was the observer's fault if that run has not gone well
                self.note()
            return out

        return call

    def asked(self, loss: Any, args: tuple[Any, ...]) -> Any:
        """What the loss returns, once it is sure that samples may be cut."""
        known, question = self.known, self.question
        assert question is not None
        if self.inquiry is None:  # only now are the modes of its modules known
            key = _kind(known, self.decides, self.keeps), known.counted(question.kind)
            if not known.answers:
                asking.count_loss(known.loss())
            answer = known.answers.setdefault(key, asking.Answer())
            answer.calls += 1
            self.asks = answer.asks_at(answer.calls)
            reaches = known.reaches or any(dtensors.any_sharded(x.leaves) for x in self.given)
            if self.asks and reaches:
                answer.note(None, 0)
                self.asks = False
            if not self.asks:
                return loss(*args)
            self.inquiry = coupling.Inquiry(question, answer, known.draws, _alive(known.modules))
            checks.here.asked += 1
        return self.inquiry(loss, args)

    def note(self) -> None:
        """Take the kind for known."""
        self.watched = True
        self.known.kinds.add(_kind(self.known, self.decides, self.keeps))


def _kind(known: Known, given: tuple[Given, ...], keeps: bool = False) -> Any:
    looks = [_looks_of(x) for each in given for x in each.leaves]
    modes = [module.training for at in known.modules if (module := at()) is not None]
    return keeps, *[each.spec for each in given], *looks, *modes


def _looks_of(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.dtype, x.dim(), x.device.type
    return x if isinstance(x, bool) else type(x)


def _tensors(known: Known, given: tuple[Given, ...]) -> list[Tensor]:
    """What a loss is given and captures, and the buffers of modules that are called themselves."""
    tensors = [x for each in given for x in each.leaves if isinstance(x, Tensor)]
    if known.captured:
        captured = (x for at in known.captured if (x := at()) is not None)
        # It was seen to read buffers of an earlier state, which may have been donated since.
        tensors += [x for x in captured if not isinstance(x, states.Refusing)]
    for at in known.themselves:
        if (module := at()) is not None:
            tensors += [x for x in vars(module)[module_slots.BUFFERS].values() if x is not None]
    return tensors


def _goes_well(
    run: Callable[[], Any],
    args: tuple[Any, ...],
    known: Known,
    given: tuple[Given, ...],
    dropped: list[str],
) -> bool:
    """Whether a run is observed without an error; what it gives is dropped."""
    devices = {x.device for each in given for x in each.leaves if isinstance(x, Tensor)}
    observer = _Observer(known, _names(given))
    around, checks.here.note_buffers = checks.here.note_buffers, observer.buffers.note
    try:
        with called_modules.noting_calls(observer.note):
            out, end = observation.observed(run, devices, observer.before, observer.see)
    finally:
        checks.here.note_buffers = around
    if end in ("whole", "reaching"):
        dropped += observer.buffers.dropped(out)
    if observer.refused:  # even if the loss has caught it
        raise observer.refused[0]
    if args and isinstance(args[0], list):  # leaves, to differentiate with respect to
        ours = closures.is_ours(known.loss())  # a product with curvature may be flat
        if torch.is_grad_enabled() or transform_active():
            losses.check_depends(out, args[0], observer.trained, None if ours else observer.uses)
    _add(known.captured, [x for at, x in observer.alive.items() if at not in observer.names])
    _add(known.modules, observer.modules)
    _add(known.themselves, observer.themselves)
    known.reaches = known.reaches or end in ("reaching", "at ranks")
    return end != "failed"


def _add(references: list[Any], found: Iterable[Any]) -> None:
    held = {id(at()) for at in references}
    references.extend(ref(x) for x in found if id(x) not in held)


class _Observer:
    """What a loss does, operation by operation: one that would write to what is lent is refused."""

    def __init__(self, known: Known, names: dict[Any, str]) -> None:
        self.known, self.names = known, names
        self.modules: dict[nn.Module, None] = {}
        self.themselves: dict[nn.Module, None] = {}
        self.trained: list[nn.Module] = []  # those that are called with parameters of their own
        self.refused: list[WriteError] = []
        self.ours: set[Any] = set()  # the memory of what the loss itself has made
        self.alive: dict[Any, Tensor] = {}  # held so that no new tensor gets an old one's memory
        self.buffers = called_modules.NewBuffers()

    def before(self, operation: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        self.known.draws = self.known.draws or deterministic.draws(operation, args, kwargs)
        ours = self.ours
        for x in operations.written_by(operation, args, kwargs):
            memory = kernels.memory_of(dtensors.local(x))
            if memory is not None and memory not in ours:
                what = self.names.get(memory) or called_modules.name_in(x, [*self.modules])
                what = f"{_sentence('writes to', what)}\n\nThe operation: {operation}"
                self.refused.append(WriteError(what))
                raise self.refused[-1]
        if operations.is_taken_as_new(operation):
            ours.add(kernels.memory_of(dtensors.local(args[0])))
        for x in trees.tree_leaves((args, kwargs)):
            if isinstance(x, Tensor):
                memory = kernels.memory_of(dtensors.local(x))
                self.buffers.reads(memory)
                if memory not in ours:
                    self.alive.setdefault(memory, x)

    def see(self, _: tuple[Any, ...], out: Any) -> None:
        made = (x for x in trees.tree_leaves(out) if isinstance(x, Tensor))
        memories = {kernels.memory_of(dtensors.local(x)) for x in made}
        self.ours.update(memories.difference(self.alive))

    def uses(self, leaves: list[Any]) -> bool:
        """Whether any of some leaves was read, or other tensors of all their shapes."""
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        shapes = {x.shape for x in self.alive.values()}
        alike = [x.dim() > 0 and x.shape in shapes for x in tensors]
        read = (kernels.memory_of(dtensors.local(x)) in self.alive for x in tensors if x.numel())
        return any(read) or (bool(alike) and all(alike))

    def note(self, module: nn.Module) -> None:
        if not module_slots.is_compiled_module(module):
            self.modules.setdefault(called_modules.origins.get(module, module))
            if module not in called_modules.origins:
                if vars(module)[module_slots.BUFFERS]:
                    self.themselves.setdefault(module)
                own = (
                    x
                    for x in vars(module)[module_slots.PARAMETERS].values()
                    if isinstance(x, nn.Parameter)
                )
                if any(x.requires_grad for x in own):
                    self.trained.append(module)


def _names(given: tuple[Given, ...]) -> dict[Any, str]:
    """The names of the tensors that are given, by their memory."""
    names: dict[Any, str] = {}
    with unnoticed():
        for root, its, spec in given:
            for x, name in zip(its, trees.paths(spec, root), strict=True):
                if isinstance(x, Tensor):
                    names.setdefault(kernels.memory_of(dtensors.local(x)), name)
    return names


def _sentence(does: str, what: str) -> str:
    return (
        f"the loss {does} {what} in place, but it must not change tensors that it gets or "
        "captures: the state of a run, the batch, a module's tensors. Likely causes: an in-place "
        "operation (clamp_, x += y, inplace=True, out=), also under no_grad or through .data; "
        "nn.Embedding(max_norm=...); a BatchNorm in training mode that functional(module).apply "
        "does not call. Compute a new tensor, or write to a clone."
    )
