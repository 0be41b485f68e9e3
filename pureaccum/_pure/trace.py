"""What the forward of a module computes, written down while it computes that for one microbatch.

    with recorder:             # in the thread and the modes of the caller
        out = module(*args)    # each operation of torch is seen, and what it is given
    recorder.operations

Values are tensors and numbers, so that code goes the way that it always goes. Only how many samples
there are is a number that nobody may decide by. What would be lost in silence is refused: modes
that forward enters, numbers that it reads in tensors, writes to what is not its own.
"""

import inspect
import linecache
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import getitem, mul
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .._base.torch_internals.autograd import versions
from .._base.torch_internals.functorch import is_wrapped, one_member
from .._base.torch_internals.kernels import memory_of
from .._base.trees import tree_leaves
from .._core.called_modules import origins
from .batch_norm import BATCH_NORMS, batch_norm_call, check_input, in_training, refusing_batch_norm
from .symbols import ROWS, Amount, Formed, Symbol, amount, symbol_of, value_of, values_in


class Operation(NamedTuple):
    """An operation, and symbols of what it is given."""

    func: Callable[..., Any]
    kwargs: dict[str, Any]
    args: tuple[Any, ...] = ()
    writes: Symbol | None = None  # what it writes to; its own value is that, afterwards
    draws: bool = False  # random numbers
    place: str = ""  # the module in whose forward it stands
    layer: Any = None  # that module, where it is a batch norm of the batch
    growth: float = 0  # how many numbers it gives for each that it is given

    def reads(self) -> list[Symbol]:
        """The values that it is given."""
        return values_in(*self.args, *self.kwargs.values())

    def is_norm(self) -> bool:
        """Whether it is a batch norm of the batch."""
        return self.layer is not None

    def affine(self) -> tuple[Any, Any] | None:
        """Weight and bias of a batch norm; None if they are computed where it is called."""
        pair = self.kwargs["weight"], self.kwargs["bias"]
        return pair if all(x is None or x.kind == "own" for x in pair) else None

    def name(self) -> str:
        """What its function is called."""
        name = getattr(self.func, "__name__", str(self.func))
        return name.strip("_") if name.startswith("__") else name


class RefusedError(BaseException):
    """Forward does what cannot be written down; no code of a user's is to catch it."""


class _Known(NamedTuple):
    """What is known of a tensor."""

    tensor: ref[Tensor]
    value: Symbol
    varies: bool  # whether it depends on the batch or on the module's tensors
    of_batch: bool = False
    writes: int = 0  # how often its memory had been written to


class Recorder(TorchFunctionMode):
    """Writes operations down."""

    def __init__(
        self,
        paths: Mapping[nn.Module, str],  # of each module in the module, itself first
        own: set[int],  # the ids of the module's own tensors
        rows: int,  # how many the microbatch has
        given: Mapping[Symbol, Tensor],  # what the module is called with, and holds
        answer: Callable[[dict[str, Any]], Tensor],  # what a batch norm gives
    ) -> None:
        super().__init__()
        self.paths, self.own, self.rows, self.answer = paths, own, rows, answer
        self.given, self.modes, self.leads_back = given, modes(), False
        self.operations: list[Operation] = []
        self.captured: list[Tensor] = []
        self.active, self.drew, self.refusal = True, False, ""
        self.known: dict[int, _Known] = {}  # by id
        self.writers: dict[Any, list[str]] = {}  # by memory, who has written to it
        self.made: set[Any] = set()  # the memory of what was made while it was traced
        self.begin()
        for value, x in given.items():
            self.of_batch, self.varies = value.kind == "input", True
            self.note(x, value)

    def note(self, x: Tensor, value: Symbol) -> None:
        """Note what a tensor is."""
        writes = len(self.writers.get(memory_of(x), ())) if self.writers else 0
        self.known[id(x)] = _Known(
            tensor=ref(x), value=value, writes=writes, of_batch=self.of_batch, varies=self.varies
        )

    def begin(self, norm: bool = False) -> None:
        """Begin with an operation of which nothing is known."""
        self.norm, self.of_batch, self.varies = norm, False, False
        self.tensors: dict[Symbol, Any] = {}  # what it is given

    # What an operation is given -----------------------------------------------------------------

    def symbol(self, x: Any) -> Any:
        """What stands for a tensor or a number of samples that an operation is given."""
        if isinstance(x, Amount):
            self.of_batch = True
            return x.symbol
        its = self.known.get(id(x))
        if its is None or its.tensor() is not x:
            its = self.capture(x)
        updating = self.norm and its.value.kind == "own"
        writers = self.writers.get(memory_of(x)) if self.writers and not updating else None
        if writers and len(writers) > its.writes:
            self.refuse(_SHARED, writers[-1])
        self.tensors[its.value] = one_member(x)
        self.of_batch, self.varies = self.of_batch or its.of_batch, self.varies or its.varies
        return its.value

    def capture(self, x: Tensor) -> _Known:
        """Note a tensor that comes from elsewhere."""
        if id(x) in self.own:
            self.leads_back = True
            self.refuse(_LEADS_BACK)
        if memory_of(x) in self.made:
            self.refuse(_UNSEEN)
        value, differs = Symbol("captured", len(self.captured)), is_wrapped(x) or x.requires_grad
        self.captured.append(x)
        self.known[id(x)] = known = _Known(tensor=ref(x), value=value, varies=differs)
        return known

    # What it gives ------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        func, kwargs = getattr(func, "__wrapped__", func) if _is_users(func) else func, kwargs or {}
        name = getattr(func, "__name__", "")
        name = func.__self__.__name__ if name == "__get__" else name  # an attribute of a tensor
        self.check_numbers(name, args, kwargs)
        self.begin(norm=func is F.batch_norm and in_training(func, args, kwargs))
        symbols = tuple([symbol_of(x, self.symbol) for x in args])
        named = {key: symbol_of(x, self.symbol) for key, x in kwargs.items()}
        known = {ROWS: self.rows, **self.tensors}
        args = tuple([value_of(x, known) for x in symbols])
        kwargs = {key: value_of(x, known) for key, x in named.items()}
        if self.norm and self.of_batch:
            return self.normalised(batch_norm_call(symbols, named), batch_norm_call(args, kwargs))
        if self.norm and batch_norm_call(args, kwargs)["running_mean"] is not None:
            self.refuse(_NO_BATCH)
        if _asks_for_a_fact(name) and not isinstance(out := func(*args, **kwargs), Tensor):
            return self.fact(name, args, kwargs, out)
        return self.computed(Operation(func=func, args=symbols, kwargs=named), name, args, kwargs)

    def computed(self, operation: Operation, name: str, args: Any, kwargs: Any) -> Any:
        tensors = [*self.tensors.values()]
        before, self.running, self.drew = versions(tensors), operation, False
        with self.looking(operation.func, name, args, kwargs):
            out = operation.func(*args, **kwargs)
        leaves = [out] if isinstance(out, Tensor) else tree_leaves(out)
        found = [x for x in leaves if isinstance(x, Tensor)]
        if not (tensors or found):
            return out
        written = [x for x, v in zip(tensors, before, strict=True) if versions([x]) != [v]]
        if name == "detach_":  # which counts no write
            written.append(out)
        self.check_result(name, not (found or written or out is None))
        growth = sum(x.numel() for x in found) / max([1, *(x.numel() for x in tensors)])
        operation = operation._replace(draws=self.drew, place=self.place(), growth=growth)
        if written:
            self.written(operation, written, found)
        else:
            self.gives(out, self.added(operation))
        return out

    def check_numbers(self, name: str, args: Any, kwargs: Any) -> None:
        if not _NUMBERS.isdisjoint((name.strip("_"), name.strip("_")[1:])):
            numbers = tree_leaves(args) if "tensor" in name else (*args, *kwargs.values())
            if any(isinstance(x, Amount) for x in numbers):
                self.refuse(_ROWS)

    def looking(self, func: Any, name: str, args: Any, kwargs: Any) -> AbstractContextManager[Any]:
        """Refuse an operation that would not be recorded, or look for one inside of it."""
        if self.tensors and modes() != self.modes:
            self.refuse(_MODES)
        if self.of_batch and "batch_norm" in name and in_training(func, args, kwargs):
            self.refuse(_NO_CUT.format(name))
        if not _is_users(func):
            return nullcontext()
        return refusing_batch_norm(lambda norm: self.refuse(_NO_CUT.format(norm.__name__)))

    def check_result(self, name: str, is_number: bool) -> None:
        """Refuse what an operation gave: random numbers, hidden facts, numbers in tensors."""
        if self.drew and not self.of_batch:
            self.refuse(DRAWS)
        if f" {name} " in _PRIVATE:
            self.refuse(_HIDDEN.format(name))
        if self.varies and is_number:
            self.refuse(_READS.format(self.running.name()))

    def added(self, operation: Operation) -> Symbol:
        """Note an operation; its value."""
        self.operations.append(operation)
        return Symbol("made", len(self.operations) - 1)

    def written(self, operation: Operation, written: list[Tensor], found: list[Tensor]) -> None:
        """Note a write in place, whose value is what was written to."""
        target, who = written[0], f"{self.place()} writes in place ({operation.name()})"
        its = self.known[id(target)]
        if any(x is not target for x in (*written, *found)):
            self.refuse(_SHARED, who)
        if its.value.kind == "own" and not isinstance(self.module(), BATCH_NORMS):
            self.refuse_write(memory_of(target))  # what counts batches is that in name alone
        self.writers.setdefault(memory_of(target), []).append(who)
        self.note(target, self.added(operation._replace(writes=its.value)))

    def refuse_write(self, memory: Any) -> Any:
        """Refuse a write to what is not its own, before it happens."""
        names = [v.at for v, x in self.given.items() if memory_of(x) == memory]
        where = f"{self.place()} writes in place ({self.running.name()})"
        self.refuse(_OWN.format((*names, "tensor")[0]), where)

    def symbols(self, outs: Sequence[Any]) -> list[Any]:
        """Symbols of the tensors among what forward returns."""
        self.begin()
        return [self.symbol(x) if isinstance(x, Tensor) else x for x in outs]

    def gives(self, out: Any, value: Symbol) -> None:
        """Note the tensors that an operation gives."""
        if isinstance(out, Tensor):
            its = self.known.get(id(out))
            if _is_users(self.running.func) or its is None or its.tensor() is not out:
                self.note(out, value)  # else torch gives back what it was given
        elif isinstance(out, (tuple, list, dict)):
            for key, x in out.items() if isinstance(out, dict) else enumerate(out):
                if isinstance(x, (Tensor, tuple, list, dict)):
                    self.gives(x, self.added(Operation(func=getitem, kwargs={}, args=(value, key))))

    def normalised(self, symbols: dict[str, Any], call: dict[str, Any]) -> Tensor:
        """What a batch norm of the batch gives, here with other moments."""
        layer = self.module()
        place = self.place(layer)
        statistics = [k for k in ("running_mean", "running_var") if symbols[k] is not None]
        if any(getattr(symbols[k], "kind", "") != "own" for k in statistics):
            self.refuse(_NO_BUFFERS)
        if isinstance(layer, BATCH_NORMS) and layer.momentum is None:  # the mean over all batches
            symbols["momentum"] = None
        check_input(layer, place, call["input"].shape)
        out = self.answer(call)
        for k in statistics:  # at the end of the batch
            self.writers.setdefault(memory_of(call[k]), []).append(f"{place} writes (batch_norm)")
        operation = Operation(func=F.batch_norm, args=(), kwargs=symbols, place=place, layer=layer)
        self.note(out, self.added(operation))
        return out

    def fact(self, name: str, args: Any, kwargs: Any, out: Any) -> Any:
        """What a tensor has that is no tensor; of samples, a number that nobody may decide by."""
        if not self.of_batch:
            return out
        shape = next(iter(self.tensors.values())).shape
        dims = self.dims_of_rows(shape)
        if isinstance(out, torch.Size):
            return torch.Size([self.amount(n) if i in dims else n for i, n in enumerate(out)])
        if name == "size" and (*args[1:], *kwargs.values())[0] % len(shape) in dims:
            return self.amount(out)
        if name in ("numel", "nelement", "nbytes") and dims:
            return self.amount(out)
        if name == "__len__" and 0 in dims:
            self.refuse(_ROWS)
        return out

    def dims_of_rows(self, shape: Sequence[int]) -> list[int]:
        """The dims that may be that of the samples, which is the first unless dims were swapped."""
        exact = [i for i, n in enumerate(shape) if n == self.rows]
        if 0 in exact or self.rows == 1:
            return exact[:1] if 0 in exact else exact
        several = [i for i, n in enumerate(shape) if n > 0 == n % self.rows]
        return [0, *exact] if 0 in several else several

    def amount(self, n: int) -> Any:
        """A number of samples."""
        symbol = ROWS if n // self.rows == 1 else Formed(mul, (ROWS, n // self.rows))
        return amount(n, symbol, lambda: self.active and self.refuse(_ROWS))

    # Where it is --------------------------------------------------------------------------------

    def module(self) -> nn.Module:
        """The innermost module whose forward runs."""
        frame: FrameType | None = inspect.currentframe()
        while frame is not None:
            module = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames else None
            if isinstance(module, nn.Module) and origins.get(module, module) in self.paths:
                return origins.get(module, module)
            frame = frame.f_back
        return next(iter(self.paths))

    def place(self, module: nn.Module | None = None) -> str:
        """What a module is called: the innermost one, if none is given."""
        module = self.module() if module is None else module
        path = self.paths[origins.get(module, module)]
        return f"{'module.' * bool(path)}{path or 'module'} ({type(module).__name__})"

    def refuse(self, what: str, where: str | nn.Module | None = None) -> Any:
        """Refuse what forward does, even where its own code goes on after that."""
        frame: FrameType | None = inspect.currentframe()
        while frame is not None and frame.f_code.co_filename.startswith(_NOT_USERS):
            frame = frame.f_back
        line = ""
        if frame is not None:
            file, number = frame.f_code.co_filename, frame.f_lineno
            code = linecache.getline(file, number).strip()
            line = f" This is at {Path(file).name} line {number}: `{code}`."
        where = where if isinstance(where, str) else self.place(where)
        self.refusal = self.refusal or f"{where} {what}.{line} {_WAYS_OUT}"
        raise RefusedError(self.refusal)


def modes() -> tuple[Any, ...]:
    """The modes that a trace is made for."""
    casts = [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
    return torch.is_grad_enabled(), *casts


def _is_users(func: Any) -> bool:
    """Whether a function of Python is none of torch's, but one that is not looked into."""
    return isinstance(func, FunctionType) and not func.__module__.startswith("torch.")


def _asks_for_a_fact(name: str) -> bool:
    return f" {name} " in _FACTS or (name.startswith("is_") and f" {name} " not in _PRIVATE)


_NOT_USERS = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])
# What asks a tensor for what is no number in it; what it hides; and what takes a number.
_FACTS = (
    " shape dtype device layout ndim names itemsize nbytes dim ndimension size stride numel type "
    "nelement element_size get_device storage_offset __len__ __repr__ __str__ __format__ __hash__ "
)
_PRIVATE = (
    " requires_grad grad_fn grad is_leaf retains_grad output_nr _version data __set__ "
    "requires_grad_ retain_grad register_hook register_post_accumulate_grad_hook "
)
_NUMBERS = {"add", "sub", "mul", "div", "truediv", "floordiv", "floor_divide", "true_divide"} | {
    *("divide", "multiply", "subtract", "pow", "float_power", "mod", "remainder", "fmod"),
    *("fill", "full", "new_full", "full_like", "tensor", "as_tensor", "new_tensor"),
}
_CUT = "cannot be cut at its BatchNorm layers: "
_READS = f"{_CUT}its result must not depend on numbers of its input ({{}})"
_HIDDEN = (
    f"{_CUT}it reads or sets {{}} of a tensor, which transforms see differently. Use detach() "
    "instead of data"
)
_ROWS = f"{_CUT}its result must not depend on how many samples it gets"
_MODES = (
    f"{_CUT}it computes under no_grad or autocast, as a torch.autograd.Function does, which the "
    "trace does not record"
)
_UNSEEN = f"{_CUT}it uses a tensor of no traced operation. Likely cause: a scripted function"
DRAWS = (
    f"{_CUT}it draws random numbers that do not depend on its input, so each microbatch would get "
    "others. Draw them like the input: torch.rand_like(x)"
)
_LEADS_BACK = (
    f"{_CUT}it reaches a tensor of the module through more than self (a closure, a global name), "
    "which apply does not replace. Reach it through self alone"
)
_SHARED = (
    "to a tensor that is read again as another one, perhaps through a view. Use an operation that "
    "returns a new tensor: x = x + y instead of x += y, relu instead of relu_, inplace=False"
)
_OWN = (
    "to its own module.{}, but forward runs for every microbatch and again for derivatives, so it "
    "would write each time. Keep such a state outside"
)
_NO_BUFFERS = f"{_CUT}its batch_norm has running statistics that are not buffers of the module"
_NO_BATCH = "gets an input that is not of the batch; expected samples, or no running statistics"
_NO_CUT = (
    "calls {} with training=True, where pureaccum cannot cut; expected nn.BatchNorm1d, 2d or 3d, "
    "or F.batch_norm, in a forward that is traced"
)
_WAYS_OUT = (
    "Put it into a function under torch.overrides.wrap_torch_function, which is not traced, or "
    "omit microbatch_size to take the batch whole."
)
