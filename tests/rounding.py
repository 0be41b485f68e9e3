"""What rounding may do, and no more: the standard bounds, as exact rationals."""

from fractions import Fraction

import torch


UNIT = {torch.float32: Fraction(1, 2**24), torch.float64: Fraction(1, 2**53)}


def gamma(operations, unit):
    """A bound on the relative error of that many roundings, one after another (Higham, 3.1)."""
    return operations * unit / (1 - operations * unit)


def exact_sum(numbers):
    """The sum and the sum of absolute values."""
    exact = [Fraction(x) for x in numbers]
    return sum(exact, Fraction(0)), sum(map(abs, exact), Fraction(0))


def ulps(error, magnitude, unit):
    """The error in units of u * sum|x|, for ``hypothesis.target``."""
    return float(error / (magnitude * unit)) if magnitude else 0.0
