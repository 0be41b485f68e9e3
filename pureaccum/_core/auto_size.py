"""The largest microbatches that memory allows: ``microbatch_size="auto"``.

    size = rows of the batch, or what is known of batches of its kind
    while out of memory: forget the attempt, restore the generators, size = size / 2

The result is, to the bit, that of the size which went well: an attempt leaves nothing behind,
neither memory nor random numbers drawn. What went well and what did not is remembered, so that
later batches begin there.

``counting`` counts bytes, for ``memory_report``. A storage counts from the operation that returns
it until the last tensor over it is gone: in torch.func's forward and backward passes as in
autograd's own, in what hooks add, in an update. What was there before does not count, nor does what
a kernel allocates for itself and frees again. Every operation takes some ten microseconds longer.
"""

import gc
import sys
import traceback
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from .._base import checks, dtensors, random_state, refusals, trees
from .._base.torch_internals import autograd, modes
from . import batches, exchange


# Counting bytes ------------------------------------------------------------------------------


class Live:
    """How many bytes are alive, the most so far, and those when backward passes began."""

    __slots__ = ("before_backward", "before_first", "now", "peak")

    def __init__(self) -> None:
        self.now = self.peak = 0
        self.before_first = self.before_backward = 0  # the first of them, and the most


@contextmanager
def counting(
    device: torch.device | None = None,
    taken_for: Callable[[Tensor], Tensor] | None = None,
) -> Generator[Live]:
    """Count the bytes that are alive, on one device or on all.

    Where operations take a tensor in place of another one, ``taken_for`` says of which.
    """
    live = Live()
    counted: dict[int, weakref.ref[Any]] = {}  # by id, which stays as long as the storage does
    backwards = False

    def see(arguments: tuple[Any, ...], out: Any) -> None:
        nonlocal backwards
        if autograd.in_backward() != backwards:
            backwards = not backwards
            if backwards:
                live.before_first = live.before_first or live.now
                live.before_backward = max(live.before_backward, live.now)
        given: set[int] | None = None
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            key = id(storage)
            if key in counted or device not in (None, tensor.device):
                continue
            if taken_for is None and storage.device.type == "meta":  # DTensors work out a shape
                continue
            if given is None:
                found = _tensors(arguments)
                given = {id((taken_for(x) if taken_for else x).untyped_storage()) for x in found}
            if key not in given:  # else it is a view of what was there before
                counted[key] = weakref.ref(storage, _forgetting(key, storage.nbytes()))
                live.now += storage.nbytes()
        live.peak = max(live.peak, live.now)

    def _forgetting(key: int, bytes_: int) -> Callable[[Any], None]:
        def forget(_: Any) -> None:
            del counted[key]
            live.now -= bytes_

        return forget

    try:
        # of a DTensor, what this rank holds
        with modes.seeing(see, below=dtensors.classes()):
            yield live
    finally:
        counted.clear()


def _tensors(tree: Any) -> Generator[Tensor]:
    """The tensors that an operation takes or returns, but sparse ones, which have no storage."""
    if isinstance(tree, Tensor):
        if tree.layout is torch.strided:
            yield tree
    elif isinstance(tree, (tuple, list)):
        for each in tree:  # pyright: ignore[reportUnknownVariableType]
            yield from _tensors(each)


# The search ----------------------------------------------------------------------------------


Size = int | Sequence[int] | Literal["auto"] | None

Transform = TypeVar("Transform", bound=Callable[..., Callable[..., Any]])

KINDS_REMEMBERED = 1000  # kinds of batches


class Tried(NamedTuple):
    """What is known of batches of one kind."""

    fits: int = 0  # the largest size that went well
    fails: float = float("inf")  # the smallest that did not


class Search(NamedTuple):
    """A function that finds the microbatch size by itself."""

    run: Callable[..., Any]
    size_of: Callable[..., int | None]  # the size of some arguments; None where it would try


def by_memory(
    run: Callable[..., Any],
    look: Callable[..., tuple[trees.Tree, trees.Tree]],
    root: str = "batch",
    *,
    parts: int = 1,
) -> Search:
    """``run`` without its first argument, the microbatch size, which it finds by itself.

    Args:
        run: ``run(size, *args, **kwargs)``, a pure function.
        look: Gives the batch among ``args``, and what else decides how much memory is needed.
        root: What errors call the batch.
        parts: How many microbatches there should be at least.
    """
    kinds: dict[Any, Tried] = {}

    def begun_with(args: Any, kwargs: Any) -> tuple[Any, torch.device | None, int, Tried, int]:
        """The kind of a batch, its device and samples, what is known of it, and the first size."""
        batch, rest = look(*args, **kwargs)
        rows = max(batches.rows_to_cut(batches.read_batch(batch, root), root), 1)
        kind, device = _kind(batch, rest)
        most = -(-rows // min(parts, rows))
        known = kinds.get(kind, Tried())
        return kind, device, rows, known, most if most < known.fails else known.fits

    def size_of(*args: Any, **kwargs: Any) -> int | None:
        *_, known, size = begun_with(args, kwargs)
        return size if size <= known.fits else None

    def found(*args: Any, **kwargs: Any) -> Any:
        if modes.transform_active():
            raise RuntimeError(_TRANSFORMED)
        kind, device, rows, known, size = begun_with(args, kwargs)
        outer, tried, around = sys.exception(), list[int](), exchange.onlooker()
        forget = _undoing(device)
        while True:
            tried.append(size)
            try:
                with exchange.inside_of(around):
                    result = run(size, *args, **kwargs)
                break
            except Exception as error:
                if not refusals.is_out_of_memory(error):
                    raise
                if around.group is not None:
                    error.add_note(_REACHED)
                    raise
                if size == 1:
                    kinds.pop(kind, None)
                    error.add_note(_sentence(tried, rows))
                    raise
                _let_go(error, outer)
            forget()  # not above: the interpreter keeps an error until its except block is left
            # If it went well before, memory is tighter now.
            known = Tried(known.fits if size > known.fits else 0, size)
            size = max(size // 2, known.fits)
        if len(kinds) >= KINDS_REMEMBERED:
            kinds.clear()
        kinds[kind] = known._replace(fits=max(size, known.fits))
        return result

    return Search(found, size_of)


_TRANSFORMED = (
    "microbatch_size='auto' does not work under a torch.func transform or torch.compile, because "
    "a smaller size does not free their memory. Find the size outside of it (rows / "
    "info.microbatches of a step), and pass that number."
)
_REACHED = (
    "microbatch_size='auto' does not try another size, because the loss has communicated with "
    "other ranks, which do not try again. Pass a number as microbatch_size."
)


def _kind(batch: trees.Tree, rest: trees.Tree) -> tuple[Any, torch.device | None]:
    """What decides how much memory a sample needs, and the device of the first tensor."""
    (rows, rows_spec), (leaves, spec) = trees.flatten(batch), trees.flatten(rest)
    tensors = [x for x in (*leaves, *rows) if isinstance(x, Tensor)]
    shapes = (
        *((x.dtype, x.shape[1:]) if isinstance(x, Tensor) else type(x) for x in rows),
        *((x.dtype, x.shape) if isinstance(x, Tensor) else type(x) for x in leaves),
    )
    return (rows_spec, spec, shapes), tensors[0].device if tensors else None


def _sentence(tried: list[int], rows: int) -> str:
    return (
        f"microbatch_size='auto' tried {', '.join(map(str, tried))} of {rows} samples, and no "
        "smaller size exists. Gradients, optimizer state and the next state do not shrink with "
        "the size. Use remat to save activations, or donate=True with a number as microbatch_size "
        "to save the next state."
    )


# What an error holds -----------------------------------------------------------------------


def _let_go(error: BaseException, outer: BaseException | None) -> None:
    """Free the frames that an error came through, with all tensors in them.

    The error ``outer``, which the caller was already handling, keeps its own.
    """
    held: list[BaseException | None] = [error]
    done = [None, outer]
    while held:
        each = held.pop()
        if any(each is other for other in done):
            continue
        assert each is not None
        done.append(each)
        held += [each.__cause__, each.__context__]
        traceback.clear_frames(each.__traceback__)
        each.__traceback__ = None


def _undoing(device: torch.device | None) -> Callable[[], None]:
    """A function that frees what is left of an attempt that failed, and restores the generators.

    A backward pass that fails leaves in its thread's queue the nodes that were ready, with the
    tensors that they saved. The next pass drops those that would run before its own: the younger
    ones. So an old node is made here, and its pass is run to empty the queue.
    """
    before = random_state.generators([] if device is None else [device])
    with checks.outside_inference_mode(), torch.enable_grad():
        leaf = torch.zeros((), requires_grad=True)
        out = leaf * 1

    def forget() -> None:
        torch.autograd.grad(out, leaf, retain_graph=True)
        gc.collect()
        torch.cuda.empty_cache()
        random_state.restore(before)

    return forget


# Where it may be asked for -------------------------------------------------------------------


def automatic(transform: Transform) -> Transform:
    """Let ``grad_and_value`` and its kin take ``microbatch_size="auto"``."""

    @wraps(transform)
    def with_auto(*args: Any, **options: Any) -> Any:
        if not is_auto(options.get("microbatch_size")):
            return transform(*args, **options)
        if options.get("stream"):
            raise ValueError(
                "microbatch_size='auto' does not work with a stream, because no call sees all of "
                "it; expected a number of samples, or None to take its batches as they are."
            )
        make = partial(transform, *args)
        cut_at = checks.check_argnums(options.get("batch_argnums", 1), "batch_argnums")

        def run(size: int, /, *args: Any, **kwargs: Any) -> Any:
            return make(**options | {"microbatch_size": size})(*args, **kwargs)

        def look(*args: Any, **kwargs: Any) -> tuple[trees.Tree, trees.Tree]:
            at = checks.positions(cut_at, len(args), "batch_argnums")
            rest = [None if i in at else arg for i, arg in enumerate(args)]
            return {i: args[i] for i in at}, (rest, kwargs)

        func = make(**options | {"microbatch_size": 1})  # checks the options, and has a name
        return wraps(func)(by_memory(run, look, root="args").run)

    return cast(Transform, with_auto)


def is_auto(size: object) -> bool:
    """Whether a size is to be found; an array of sizes compares number by number."""
    return isinstance(size, str) and size == "auto"
