"""What stands for a value that is another one in each microbatch.

    Symbol("input", 0)  what the module is called with    Symbol("own", "0.bias")  what is in it
    Symbol("made", 7)   what operation 7 gives            Symbol("captured", 1)    other tensors
    Symbol("rows", 0)   how many rows there are           Formed(f, parts)         f(*parts)

All else stands for itself. The number of rows goes through a module as an int.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch


class Symbol(NamedTuple):
    """A value, by its kind and by what it is called among those."""

    kind: str
    at: Any


class Formed(NamedTuple):
    """What a function makes of symbols: a container, a slice, a number."""

    make: Callable[..., Any]
    parts: tuple[Any, ...]


ROWS = Symbol("rows", 0)
ATOMS = {int, float, complex, bool, str, bytes, type(None), type(...), torch.dtype, torch.device}


def symbol_of(x: Any, of: Callable[[Any], Any]) -> Any:
    """The symbol of an argument; ``of`` gives those of the tensors and numbers of rows in it."""
    kind: Any = type(x)
    if kind in ATOMS:
        return x
    if isinstance(x, (torch.Tensor, Amount)):
        return of(x)
    if isinstance(x, (tuple, list)):
        form = list_of if isinstance(x, list) else tuple_of
        plain = ATOMS.issuperset(map(type, x))
        return Formed(form, tuple(x if plain else [symbol_of(part, of) for part in x]))
    if kind is slice:
        return Formed(slice, tuple([symbol_of(y, of) for y in (x.start, x.stop, x.step)]))
    if isinstance(x, dict):
        return Formed(dict_of, tuple([symbol_of(y, of) for pair in x.items() for y in pair]))
    return x


def tuple_of(*parts: Any) -> tuple[Any, ...]:
    return parts


def list_of(*parts: Any) -> list[Any]:
    return [*parts]


def dict_of(*parts: Any) -> dict[Any, Any]:
    return dict(zip(parts[::2], parts[1::2], strict=True))


def value_of(x: Any, known: Mapping[Symbol, Any]) -> Any:
    """What a symbol stands for."""
    kind = type(x)
    if kind is Symbol:
        return known[x]
    return x.make(*[value_of(part, known) for part in x.parts]) if kind is Formed else x


def values_in(*symbols: Any) -> list[Symbol]:
    """The values that symbols are made of."""
    found: list[Symbol] = []
    for x in symbols:
        found += [x] if type(x) is Symbol else values_in(*x.parts) if type(x) is Formed else []
    return found


class Amount(int):
    """How many rows there are, or a number made of that; ``refuse`` is called where code decides.

    The batch has more rows than a microbatch, and might go another way.
    """

    symbol: Any
    refuse: Callable[[], Any]


def amount(n: int, symbol: Any, refuse: Callable[[], Any]) -> Amount:
    """A number of rows with a symbol."""
    made = Amount(n)
    made.symbol, made.refuse = symbol, refuse
    return made


def _arithmetic(func: Callable[..., Any], swapped: bool = False) -> Any:
    def compute(self: Amount, *others: Any) -> Any:
        if any(isinstance(x, torch.Tensor) for x in others):
            return NotImplemented
        if not all(isinstance(x, int) for x in others):  # [x] * n
            self.refuse()
        given = (*others, self) if swapped else (self, *others)
        symbols = tuple([getattr(x, "symbol", x) for x in given])
        return amount(func(*[int.__pos__(x) for x in given]), Formed(func, symbols), self.refuse)

    return compute


def _decision(func: Callable[..., Any]) -> Any:
    def decide(self: Amount, *others: Any) -> Any:
        if not others or not all(isinstance(x, Amount) for x in others):
            self.refuse()
        return func(self, *others)

    return decide


_DECISIONS = (
    "eq ne lt le gt ge bool int float divmod rdivmod truediv rtruediv pow rpow and or xor lshift "
    "rshift invert round trunc floor ceil abs index str repr format hash"
)
Amount.__neg__ = _arithmetic(operator.neg)
for _name in ("add", "sub", "mul", "floordiv", "mod"):
    _func = getattr(operator, _name)
    setattr(Amount, f"__{_name}__", _arithmetic(_func))
    setattr(Amount, f"__r{_name}__", _arithmetic(_func, swapped=True))
for _name in [f"__{name}__" for name in _DECISIONS.split()]:
    setattr(Amount, _name, _decision(getattr(int, _name)))
