"""Two ways for trees to agree: in every bit, or within a bound.

An error names the leaf, the number that is off and, if the numbers show it, the likely cause.
"""

import cmath
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base import checks, reprs, trees


def assert_trees_bitwise_equal(got: trees.Tree, want: trees.Tree) -> None:
    """Assert that two trees hold the same numbers, to the last bit.

    The rule: the structures are equal and, for each leaf, dtype, shape, device and numbers.

    As everywhere in pureaccum, NaN equals NaN and -0 equals 0. A sparse leaf equals a dense one
    with the same numbers. Leaves that are not tensors are compared by type and ``==``.

    Args:
        got: The actual result, a pytree.
        want: The expected result.

    Raises:
        AssertionError: The message names the first leaf that differs, how many of its numbers
            differ, the first of these, and the likely cause: a factor, a transposition, rounding,
            another order.

    Example:
        >>> want = {"w": torch.tensor([1.0, 2.0])}
        >>> assert_trees_bitwise_equal({"w": torch.tensor([1.0, 2.0])}, want)
        >>> assert_trees_bitwise_equal({"w": torch.tensor([3.0, 6.0])}, want)
        Traceback (most recent call last):
        AssertionError: got['w']: 2 of 2 numbers differ, the first at [0]: 3.0 came, 1.0 was \
expected, 12582912 units in the last place apart. Likely cause: it is 3 times what was expected, \
everywhere.

    References:
        `torch.equal <https://docs.pytorch.org/docs/stable/generated/torch.equal.html>`_, which says
        neither where nor why.
    """
    __tracebackhide__ = True  # of pytest
    found = [words for pair in _pairs(got, want) if (words := _difference(*pair))]
    if found:
        more = len(found) - 1
        others = f" ({more} more of the leaves {'differs' if more == 1 else 'differ'}.)"
        raise AssertionError(found[0] + (others if more else ""))


def assert_trees_within_bound(got: trees.Tree, want: trees.Tree, bound: trees.Tree) -> None:
    """Assert that every number is within a bound of the expected one.

    The rule: ``abs(got - want) <= bound``, decided exactly: with fractions if float64 might round
    in favour.

    Shapes must agree, dtypes need not. A NaN matches only a NaN, and an inf only an inf, unless the
    bound is inf.

    Args:
        got: The actual result, a pytree of tensors and numbers.
        want: The expected result, of any dtype, for example a float64 reference.
        bound: One number for all leaves. Or a tree like ``want``, of numbers and of tensors that
            broadcast to its leaves.

    Raises:
        AssertionError: The message names the worst number: the one with the largest error / bound.
        ValueError: A bound is negative or NaN, or does not fit.

    Example:
        >>> got, want = {"w": torch.tensor([1.0, 2.5])}, {"w": torch.tensor([1.0, 2.0])}
        >>> assert_trees_within_bound(got, want, 0.5)
        >>> assert_trees_within_bound(got, want, {"w": torch.tensor([0.0, 0.125])})
        Traceback (most recent call last):
        AssertionError: got['w'][1]: 2.5 came, 2.0 was expected within 0.125; the error, 0.5, is \
4 times the bound. 1 of 2 numbers lies outside.

    References:
        `torch.testing.assert_close <https://docs.pytorch.org/docs/stable/testing.html>`_, whose
        tolerances are chosen where this bound is derived.
    """
    __tracebackhide__ = True  # of pytest
    bounds = _bounds(bound, want)
    misses = [_miss(*pair, limit) for pair, limit in zip(_pairs(got, want), bounds, strict=True)]
    outside = sum(miss.outside for miss in misses)
    if outside:
        worst = max((miss for miss in misses if miss.outside), key=lambda miss: miss.ratio)
        numbers = sum(miss.numbers for miss in misses)
        many = f"{outside} of {numbers} numbers {'lies' if outside == 1 else 'lie'} outside."
        raise AssertionError(f"{worst.words} {many}")


def _pairs(got: trees.Tree, want: trees.Tree) -> Iterator[tuple[str, Any, Any]]:
    (xs, came), (ys, expected) = trees.flatten(got), trees.flatten(want)
    try:
        why = "None, the keys of dicts and the types of containers are structure."
        checks.check_same_structure(expected, came, "want", "got", why)
    except ValueError as error:
        raise AssertionError(str(error)) from None
    return zip(trees.paths(came, "got"), xs, ys, strict=True)


# Bits ------------------------------------------------------------------------------------


def dense(x: Tensor) -> Tensor:
    """The numbers of a tensor, whatever its layout."""
    x = x.detach()
    if x.is_quantized:
        return x.dequantize()
    x = x if x.layout == torch.strided else x.to_dense()
    return x.resolve_conj().resolve_neg()


def same(x: Tensor, y: Tensor) -> bool:
    """Whether two dense tensors have the same shape and numbers."""
    return x.shape == y.shape and not bool(_differing(x, y).any())


def _differing(x: Tensor, y: Tensor) -> Tensor:
    """Where the numbers differ: a NaN does not differ from a NaN, nor -0 from 0."""
    if x.is_complex() and y.is_complex():
        return _differing(torch.view_as_real(x), torch.view_as_real(y)).any(-1)
    return (x != y) & ((x == x) | (y == y))


def _difference(path: str, x: Any, y: Any) -> str:
    """How two leaves differ, in words; empty where they do not."""
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        return _difference_of_objects(path, x, y)
    if x.device != y.device:
        return f"{path}: it came on {x.device}, and was expected on {y.device}."
    known = x.device.type != "meta"
    a, b = (dense(x), dense(y)) if known else (x, y)
    if x.shape != y.shape:
        return _shapes(path, x, y) + (_because(_cause_of_shape(a, b)) if known else "")
    if x.dtype != y.dtype:
        why = _cause_of_dtype(a, b) if known else ""
        return f"{path}: {x.dtype} came, {y.dtype} was expected." + _because(why)
    if not known or not bool((where := _differing(a, b)).any()):
        return ""
    first = tuple(where.nonzero()[0].tolist())
    count = f"{int(where.sum())} of {where.numel()} numbers differ, the first{_at(first, ' at ')}"
    numbers = f"{a[first].item()!r} came, {b[first].item()!r} was expected"
    why = next(_causes(a, b), "")  # the first that fits
    return f"{path}: {count}: {numbers}{_units_apart(a[first], b[first])}." + _because(why)


def _difference_of_objects(path: str, x: Any, y: Any) -> str:
    """How two leaves differ that are not both tensors, in words; empty where they do not."""
    if type(x) is type(y) and bool(x == y or (x != x and y != y)):
        return ""
    came, expected = (
        f"a tensor of shape {tuple(z.shape)}" if isinstance(z, Tensor) else repr(z) for z in (x, y)
    )
    return f"{path}: {came} came, {expected} was expected."


def _shapes(path: str, x: Tensor, y: Tensor) -> str:
    return f"{path}: shape {tuple(x.shape)} came, {tuple(y.shape)} was expected."


def _units_apart(x: Tensor, y: Tensor) -> str:
    a, b = _ranks(x), _ranks(y)
    if a is None or b is None or not all(map(cmath.isfinite, (x.item(), y.item()))):
        return ""
    # in Python: ranks of float64s may lie farther apart than an int64 can say
    pairs = zip(a.flatten().tolist(), b.flatten().tolist(), strict=True)
    units = max(abs(i - j) for i, j in pairs)
    return f", {units} {'unit' if units == 1 else 'units'} in the last place apart"


def _because(why: str) -> str:
    return f" Likely cause: {why}." if why else ""


def _at(index: tuple[int, ...], before: str = "") -> str:
    return f"{before}{list(index)}" if index else ""


# Causes ----------------------------------------------------------------------------------


def _cause_of_shape(x: Tensor, y: Tensor) -> str:
    """Why two dense tensors may be of different shapes."""
    if x.dtype == y.dtype and x.ndim > 1 and same(x.mT, y):
        return "it is transposed"
    if x.dtype == y.dtype and x.numel() == y.numel() and same(x.reshape(y.shape), y):
        return "the numbers are the same, in another shape"
    if x.dtype == y.dtype and x.ndim == y.ndim + 1 and same(x.sum(0).to(y.dtype), y):
        return "a sum over dimension 0 is missing"
    return ""


def _cause_of_dtype(x: Tensor, y: Tensor) -> str:
    """Why two dense tensors may be of different dtypes."""
    if same(x.to(y.dtype).to(x.dtype), x) and same(x.to(y.dtype), y):
        return "the numbers are the same: only a cast is missing, or one too many"
    if same(x.to(y.dtype), y):
        return "a cast is missing: after it, the numbers are the same"
    if same(y.to(x.dtype), x):
        return "a cast too many, which rounded: before it, the numbers were the same"
    return ""


def _causes(x: Tensor, y: Tensor) -> Iterator[str]:
    """Why the numbers of two dense tensors of one dtype and shape may differ."""
    if x.dtype == torch.bool:
        return
    wide = torch.complex128 if x.is_complex() else torch.float64
    a, b = x.to(wide), y.to(wide)
    if not bool((a != 0).any()):
        yield "every number that came is zero: it may never have been written to"
    if count := int((a.isnan() & ~b.isnan()).sum()):
        yield f"{count} of them came as NaN: a 0 / 0, an inf - inf, or memory never written to"
    for narrow in _narrower(x.dtype):
        if same(y.to(narrow).to(x.dtype), x):
            yield f"it was rounded to {narrow} on the way"
    for scaled, words in _scaled(a, b):
        units = _most_units_apart(x, scaled.to(x.dtype))
        if same(scaled.to(x.dtype), x) or units <= _ROUNDING:
            yield f"it is {words}" + (", up to rounding" if units else ", everywhere")
    if x.ndim > 1 and same(x, y.mT):
        yield "it is transposed"
    if not x.is_complex() and same(a.flatten().sort().values, b.flatten().sort().values):
        yield "the numbers are the same, in another order"
    if (units := _most_units_apart(x, y)) <= _FEW:
        yield (
            f"never more than {units:.0f} units in the last place apart: rounding, as of another "
            "order of summation or another kernel"
        )


_ROUNDING = 4  # units in the last place: of a number that was rounded twice
_FEW = 64


def _narrower(dtype: torch.dtype) -> list[torch.dtype]:
    if dtype == torch.complex128:
        return [torch.complex64]
    narrow = [torch.float32, torch.float16, torch.bfloat16]
    return [n for n in narrow if dtype.is_floating_point and n.itemsize < dtype.itemsize]


def _scaled(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, str]]:
    """What was expected times or divided by the whole number that its largest number suggests."""
    size = torch.where(a.isfinite() & b.isfinite(), b.abs(), 0.0).flatten()
    if not bool((size > 0).any()):
        return
    at = size.argmax()
    ratio = (a.flatten()[at] / b.flatten()[at]).item().real
    if ratio == -1:
        yield -b, "the negative of what was expected"
    elif 1 < abs(ratio) < _LARGEST and abs(round(ratio)) > 1:
        yield b * round(ratio), f"{round(ratio)} times what was expected"
    elif 1 / _LARGEST < abs(ratio) < 1 and abs(round(1 / ratio)) > 1:
        yield b / round(1 / ratio), f"what was expected divided by {round(1 / ratio)}"


_LARGEST = 2.0**32


def _most_units_apart(x: Tensor, y: Tensor) -> float:
    """The largest difference in units in the last place; inf where they mean nothing."""
    a, b = _ranks(x), _ranks(y)
    wide = torch.complex128 if x.is_complex() else torch.float64
    if a is None or b is None or not bool((x.to(wide) - y.to(wide)).isfinite().all()):
        return 0.0 if same(x, y) else math.inf
    # between float64s on both sides of zero this may wrap, but never to a few
    return float((a - b).abs().max())


def _ranks(x: Tensor) -> Tensor | None:
    """The place of each number among those that its dtype can hold, counted from 0.

    Differences of ranks are units in the last place. None where that means nothing.
    """
    x = torch.view_as_real(x) if x.is_complex() else x
    # bits count numbers where there is one for the sign: not in float8_e8m0fnu
    if not x.is_floating_point() or torch.finfo(x.dtype).min >= 0:
        return None
    word = _WORDS[x.element_size()]
    bits = x.contiguous().view(word).long()
    return torch.where(bits < 0, -(bits & torch.iinfo(word).max), bits)


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# Bounds ----------------------------------------------------------------------------------


class _Miss(NamedTuple):
    """How many numbers of a leaf lie outside, and the worst of them in words."""

    outside: int
    numbers: int
    ratio: float = 0.0
    words: str = ""


_DOUBT = 2.0**-50  # float64 decides where error and bound are farther apart than this


def _miss(path: str, x: Any, y: Any, bound: Any) -> _Miss:
    if not (_is_number(x) and _is_number(y)):
        words = _difference_of_objects(path, x, y)
        return _Miss(bool(words), 1, math.inf, words)
    x, y, bound = _on_cpu(x), _on_cpu(y), _on_cpu(bound)
    if x.shape != y.shape:
        raise AssertionError(_shapes(path, x, y) + _because(_cause_of_shape(x, y)))
    try:
        bound = bound.expand(x.shape)
    except RuntimeError:
        fits = f"does not broadcast to {path}, whose shape is {tuple(x.shape)}"
        raise ValueError(f"a bound of shape {tuple(bound.shape)} {fits}.") from None
    (a, vague), (b, vague_too) = _parts(x), _parts(y)
    equal = ~_differing(a, b)
    apart = torch.where(equal, 0.0, a - b)
    error, limit = torch.hypot(*apart.unbind(-1)), bound.double()
    outside = ~(error <= limit) | apart.isnan().any(-1)
    near = (error - limit).abs() <= _DOUBT * limit + 2.0**-1060  # and among subnormal numbers
    doubtful = ((near & ~equal.all(-1)) | vague | vague_too) & limit.isfinite()
    for index in map(tuple, doubtful.nonzero().tolist()):
        squared = _squared_distance(x[index].item(), y[index].item())
        outside[index] = squared > Fraction(bound[index].item()) ** 2
    if not bool(outside.any()):
        return _Miss(0, x.numel())
    ratio = error / limit
    ratio = torch.where(ratio.isnan(), math.inf, ratio)
    at = int(torch.where(outside, ratio, -1.0).argmax())
    worst = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), x.shape))
    times = f"{ratio[worst].item():.6g}"
    return _Miss(
        int(outside.sum()),
        x.numel(),
        ratio[worst].item(),
        f"{path}{_at(worst)}: {x[worst].item()!r} came, {y[worst].item()!r} was expected within "
        f"{bound[worst].item()!r}; the error, {error[worst].item()!r}, is "
        f"{'just above 1' if times == '1' else times} times the bound.",
    )


def _is_number(x: Any) -> bool:
    return isinstance(x, (Tensor, int, float, complex))


def _on_cpu(x: Any) -> Tensor:
    """A dense tensor on the CPU: not every device knows float64."""
    if isinstance(x, Tensor):
        return dense(x).cpu()
    kind = torch.complex128 if isinstance(x, complex) else torch.float64
    return torch.tensor(x, dtype=torch.int64 if isinstance(x, int) else kind)


def _parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """Real and imaginary parts in float64, and where float64 does not hold the number."""
    wide = torch.view_as_real((x if x.is_complex() else x.double()).to(torch.complex128))
    floating = x.is_floating_point() or x.is_complex()
    return wide, (wide[..., 0].abs() >= 2.0**53) & (not floating)


def _squared_distance(x: complex, y: complex) -> Fraction:
    """The square of a distance, without rounding."""
    real = Fraction(x.real) - Fraction(y.real)
    imag = Fraction(x.imag) - Fraction(y.imag)
    return real * real + imag * imag


def _bounds(bound: trees.Tree, want: trees.Tree) -> list[Any]:
    """A bound for each leaf, all of them checked."""
    _, spec = trees.flatten(want)
    if isinstance(bound, (int, float, Fraction)) or (isinstance(bound, Tensor) and not bound.ndim):
        return [_check_bound("the bound", bound)] * spec.num_leaves
    bounds, came = trees.flatten(bound)
    checks.check_same_structure(
        spec, came, "want", "bound", "One number for all leaves would do, too."
    )
    return [_check_bound(*pair) for pair in zip(trees.paths(came, "bound"), bounds, strict=True)]


def _check_bound(name: str, bound: Any) -> Any:
    if isinstance(bound, Fraction):
        near = float(bound)
        bound = near if near <= bound else math.nextafter(near, -math.inf)  # never in favour
    if not _is_number(bound) or (limits := _on_cpu(bound)).is_complex():
        raise ValueError(f"{name} is {reprs.kind(bound)}; expected numbers.")
    if not bool((limits >= 0).all()):
        bad = limits[~(limits >= 0)][0].item()
        raise ValueError(f"{name} is {bad!r}; no bound may be negative or NaN.")
    return bound
