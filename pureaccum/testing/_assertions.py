"""Two ways for trees to agree: in every bit, and within a bound.

The error names the leaf, the number that is off and, where it can be told, the likely cause.
"""

import cmath
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base.trees import Tree, check_same_structure, flatten, paths
from ._compare import cause, dense, differing, dtype_cause, ranks, shape_cause


def assert_trees_bitwise_equal(got: Tree, want: Tree) -> None:
    """Assert that two trees hold the same numbers, to the last bit.

    The rule: one structure, and of every leaf dtype, shape, device and numbers. As everywhere in
    pureaccum a NaN is the same as a NaN, and -0 as 0; a sparse leaf is the same as a dense one of
    its numbers. Leaves that are not tensors are compared by type and ``==``.

    Args:
        got: What came: a pytree.
        want: What was expected.

    Raises:
        AssertionError: Names the first leaf that is off, how many of its numbers are, the first of
            these, and the likely cause: a factor, a transposition, a rounding, another order.

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
    found = [said for pair in _pairs(got, want) if (said := _difference(*pair))]
    if found:
        more = len(found) - 1
        others = f" ({more} more of the leaves {'differs' if more == 1 else 'differ'}.)"
        raise AssertionError(found[0] + (others if more else ""))


def assert_trees_within_bound(got: Tree, want: Tree, bound: Tree) -> None:
    """Assert that every number is as near to what was expected as its bound says.

    The rule: ``abs(got - want) <= bound``, and exactly so: where float64 might round in favour,
    fractions decide. Shapes have to agree and dtypes need not. Only a NaN is near to a NaN, and to
    an inf only an inf, unless the bound is one.

    Args:
        got: What came: a pytree of tensors and numbers.
        want: What was expected, of any dtype: a reference in float64, for example.
        bound: A number for all, or a tree like ``want`` of numbers, and of tensors that broadcast
            to its leaves.

    Raises:
        AssertionError: Names the worst number of all: the one with the largest error / bound.
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
        raise AssertionError(f"{worst.says} {many}")


def _pairs(got: Tree, want: Tree) -> Iterator[tuple[str, Any, Any]]:
    (xs, came), (ys, expected) = flatten(got), flatten(want)
    try:
        why = "None, the keys of dicts and the types of containers are structure."
        check_same_structure(expected, came, "want", "got", why)
    except ValueError as error:
        raise AssertionError(str(error)) from None
    return zip(paths(came, "got"), xs, ys, strict=True)


# Bits ------------------------------------------------------------------------------------


def _difference(path: str, x: Any, y: Any) -> str:
    """What is to say of two leaves that differ, and nothing of others."""
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        return _unlike(path, x, y)
    if x.device != y.device:
        return f"{path}: it came on {x.device}, and was expected on {y.device}."
    known = x.device.type != "meta"
    a, b = (dense(x), dense(y)) if known else (x, y)
    if x.shape != y.shape:
        return _shapes(path, x, y) + (_because(shape_cause(a, b)) if known else "")
    if x.dtype != y.dtype:
        why = dtype_cause(a, b) if known else ""
        return f"{path}: {x.dtype} came, {y.dtype} was expected." + _because(why)
    if not known or not bool((where := differing(a, b)).any()):
        return ""
    first = tuple(where.nonzero()[0].tolist())
    count = f"{int(where.sum())} of {where.numel()} numbers differ, the first{_at(first, ' at ')}"
    numbers = f"{a[first].item()!r} came, {b[first].item()!r} was expected"
    return f"{path}: {count}: {numbers}{_units(a[first], b[first])}." + _because(cause(a, b))


def _unlike(path: str, x: Any, y: Any) -> str:
    """The same of leaves that are not both tensors."""
    if type(x) is type(y) and bool(x == y or (x != x and y != y)):
        return ""
    shown = [
        f"a tensor of shape {tuple(z.shape)}" if isinstance(z, Tensor) else repr(z) for z in (x, y)
    ]
    return f"{path}: {shown[0]} came, {shown[1]} was expected."


def _shapes(path: str, x: Tensor, y: Tensor) -> str:
    return f"{path}: shape {tuple(x.shape)} came, {tuple(y.shape)} was expected."


def _units(x: Tensor, y: Tensor) -> str:
    a, b = ranks(x), ranks(y)
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


# Bounds ----------------------------------------------------------------------------------


class _Miss(NamedTuple):
    """How many numbers of a leaf lie outside, and the worst of them."""

    outside: int
    numbers: int
    ratio: float = 0.0
    says: str = ""


_NEAR = 2.0**-50  # float64 decides where error and bound are farther apart than this


def _miss(path: str, x: Any, y: Any, bound: Any) -> _Miss:
    if not (_is_number(x) and _is_number(y)):
        said = _unlike(path, x, y)
        return _Miss(bool(said), 1, math.inf, said)
    x, y, bound = _here(x), _here(y), _here(bound)
    if x.shape != y.shape:
        raise AssertionError(_shapes(path, x, y) + _because(shape_cause(x, y)))
    try:
        bound = bound.expand(x.shape)
    except RuntimeError:
        fits = f"does not broadcast to {path}, whose shape is {tuple(x.shape)}"
        raise ValueError(f"a bound of shape {tuple(bound.shape)} {fits}.") from None
    (a, vague), (b, vague_too) = _parts(x), _parts(y)
    equal = ~differing(a, b)
    apart = torch.where(equal, 0.0, a - b)
    error, limit = torch.hypot(*apart.unbind(-1)), bound.double()
    outside = ~(error <= limit) | apart.isnan().any(-1)
    near = (error - limit).abs() <= _NEAR * limit + 2.0**-1060  # and among subnormal numbers
    doubtful = ((near & ~equal.all(-1)) | vague | vague_too) & limit.isfinite()
    for index in map(tuple, doubtful.nonzero().tolist()):
        squared = _squared(x[index].item(), y[index].item())
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


def _here(x: Any) -> Tensor:
    """A dense tensor on the CPU: not every device knows float64."""
    if isinstance(x, Tensor):
        return dense(x).cpu()
    kind = torch.complex128 if isinstance(x, complex) else torch.float64
    return torch.tensor(x, dtype=torch.int64 if isinstance(x, int) else kind)


def _parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """Real and imaginary parts in float64, and where it does not hold the number."""
    wide = torch.view_as_real((x if x.is_complex() else x.double()).to(torch.complex128))
    floating = x.is_floating_point() or x.is_complex()
    return wide, (wide[..., 0].abs() >= 2.0**53) & (not floating)


def _squared(x: complex, y: complex) -> Fraction:
    """The square of a distance, without rounding."""
    real = Fraction(x.real) - Fraction(y.real)
    imag = Fraction(x.imag) - Fraction(y.imag)
    return real * real + imag * imag


def _bounds(bound: Tree, want: Tree) -> list[Any]:
    """A bound for each leaf, all of them checked."""
    _, spec = flatten(want)
    if isinstance(bound, (int, float, Fraction)) or (isinstance(bound, Tensor) and not bound.ndim):
        return [_check_bound("the bound", bound)] * spec.num_leaves
    bounds, came = flatten(bound)
    check_same_structure(spec, came, "want", "bound", "One number for all leaves would do, too.")
    return [_check_bound(*pair) for pair in zip(paths(came, "bound"), bounds, strict=True)]


def _check_bound(name: str, bound: Any) -> Any:
    if isinstance(bound, Fraction):
        near = float(bound)
        bound = near if near <= bound else math.nextafter(near, -math.inf)  # never in favour
    if not _is_number(bound) or (limits := _here(bound)).is_complex():
        raise ValueError(f"{name} is a {type(bound).__name__}; expected numbers.")
    if not bool((limits >= 0).all()):
        bad = limits[~(limits >= 0)][0].item()
        raise ValueError(f"{name} is {bad!r}; no bound may be negative or NaN.")
    return bound
