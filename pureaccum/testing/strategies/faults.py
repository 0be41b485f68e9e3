"""Microbatches that go wrong: an inf, a NaN, or numbers that overflow later."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from ..._base.trees import Tree, map


class Fault(NamedTuple):
    """What goes wrong, and where.

    Attributes:
        microbatch: Which one, counted from 0.
        kind: ``"nan"`` or ``"inf"``; or ``"overflow"``, the largest number of its dtype, which is
            finite where its square, or the sum of two, is not.

    Example:
        >>> fault = Fault(1, "inf")
        >>> fault.spoil([torch.tensor([1.0]), torch.tensor([2.0, 3.0])])
        [tensor([1.]), tensor([inf, inf])]

    References:
        ``faults``, which draws it; ``accumulator``, whose ``nonfinite`` says what becomes of it.
    """

    microbatch: int
    kind: Literal["nan", "inf", "overflow"]

    def spoil(self, microbatches: Sequence[Tree]) -> list[Tree]:
        """The same microbatches but one, whose floating-point tensors hold nothing else.

        Integers stay, tokens as well as a mask. Whether a loss takes notice is its own affair:
        a weight of zero does not, nor does a microbatch without rows.

        Args:
            microbatches: Trees; none is changed.

        Returns:
            A new list.
        """

        def spoilt(x: Any) -> Any:
            if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
                return x
            number = {"nan": torch.nan, "inf": torch.inf, "overflow": torch.finfo(x.dtype).max}
            return torch.full_like(x, number[self.kind])

        new = list(microbatches)
        new[self.microbatch] = map(spoilt, new[self.microbatch])
        return new


def faults(parts: int) -> st.SearchStrategy[Fault]:
    """One microbatch that goes wrong; it shrinks to a NaN in the first.

    The rule: ``Fault(microbatch, kind)`` for each ``microbatch`` below ``parts`` and each kind.

    Args:
        parts: How many microbatches there are, at least one.

    Returns:
        A strategy for ``Fault``.

    Example:
        >>> from hypothesis import find
        >>> find(faults(3), lambda fault: fault.kind != "nan")
        Fault(microbatch=0, kind='inf')

    References:
        `Hypothesis <https://hypothesis.readthedocs.io>`_; ``Fault.spoil``
    """
    if parts < 1:
        raise ValueError(f"parts is {parts}; expected at least one microbatch to spoil.")
    return st.builds(Fault, st.integers(0, parts - 1), st.sampled_from(["nan", "inf", "overflow"]))
