"""The private names by which ``pa.remat`` looks into torch.func's transforms."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from pureaccum import _torch


def test_the_wrappers_of_transforms_come_off() -> None:
    """And a write to what they wrap is counted there, which vmap's wrapper does not do."""
    x = torch.ones(2, 3)

    def look(row: torch.Tensor) -> torch.Tensor:
        before = _torch.version(_torch.innermost(row))
        row.detach().mul_(1)
        assert before is not None
        assert _torch.version(_torch.innermost(row)) == before + 1
        assert _torch.innermost(row).data_ptr() == x.data_ptr()
        seen.append(_torch.mapped_levels(row))
        return row.sum()

    seen: list[set[int]] = []
    look(x)
    torch.func.grad(look)(x)
    torch.func.vmap(look)(x)
    torch.func.grad(lambda x: torch.func.vmap(look)(x).sum())(x)
    torch.func.vmap(torch.func.grad(look))(x)
    torch.func.vmap(torch.func.vmap(look))(x)
    assert seen == [set(), set(), {1}, {2}, {1}, {1, 2}]


def test_forward_ad_goes_on_in_the_rule_of_a_function() -> None:
    """torch turns it off there: an outer tangent would be lost without an error."""

    class Square(torch.autograd.Function):
        forward_ad: Any = nullcontext

        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return x.detach() ** 2

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_forward(*inputs)

        @staticmethod
        def jvp(ctx: Any, _: Any) -> Any:  # type: ignore[override]
            with Square.forward_ad():
                return torch.autograd.forward_ad.unpack_dual(ctx.saved_tensors[0] ** 2).tangent

    x = torch.tensor(3.0)
    with pytest.raises(RuntimeError):
        torch.func.jvp(Square.apply, (x,), (x,))
    Square.forward_ad = staticmethod(_torch.forward_ad)
    assert torch.func.jvp(Square.apply, (x,), (torch.ones(()),))[1] == 6.0
