"""The private names by which ``pa.remat`` looks into torch.func's transforms."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.func import grad, jvp, vmap
from torch.overrides import TorchFunctionMode

from pureaccum._base.torch_internals import autograd, functorch, modes


pytestmark = [pytest.mark.parity, pytest.mark.promise("private")]


def test_the_wrappers_of_transforms_come_off():
    """And a write to what they wrap is counted there, which vmap's wrapper does not do."""
    x = torch.ones(2, 3)

    def look(row):
        before = autograd.version(functorch.innermost(row))
        row.detach().mul_(1)
        assert before is not None
        assert autograd.version(functorch.innermost(row)) == before + 1
        assert functorch.innermost(row).data_ptr() == x.data_ptr()
        seen.append(functorch.levels(row))
        return row.sum()

    seen = []
    look(x)
    torch.func.grad(look)(x)
    torch.func.vmap(look)(x)
    torch.func.grad(lambda x: torch.func.vmap(look)(x).sum())(x)
    torch.func.vmap(torch.func.grad(look))(x)
    torch.func.vmap(torch.func.vmap(look))(x)
    assert seen == [set(), {1}, {1}, {1, 2}, {1, 2}, {1, 2}]


@pytest.mark.slow
def test_a_vmap_is_seen_below_other_transforms_also_while_the_compiler_traces_them():
    def look(x):
        seen.append(functorch.any_mapped([torch.ones(2), x]))
        return x.square().sum()

    def forward(x):
        return jvp(look, (x,), (x,))[1]

    seen = []
    x = torch.ones(2, 3)
    unmapped = [look, grad(look), grad(lambda y: grad(look)(y).sum()), forward]
    mapped = [vmap(look), vmap(grad(look)), vmap(forward), vmap(vmap(look))]
    mapped += [grad(lambda y, f=f: vmap(f)(y).sum()) for f in (look, grad(look), forward)]
    beside = vmap(lambda row: grad(look)(x).sum() + row.sum())
    for number, transformed in enumerate([*unmapped, beside, *mapped]):
        for program in transformed, torch.compile(transformed, backend="eager", fullgraph=True):
            seen.clear()
            program(x)
            assert seen
            assert all(is_mapped is (number > len(unmapped)) for is_mapped in seen), number


def test_forward_ad_goes_on_in_the_rule_of_a_function():
    """torch turns it off there: an outer tangent would be lost without an error."""

    class Square(torch.autograd.Function):
        forward_ad: Any = nullcontext

        @staticmethod
        def forward(x):
            return x.detach() ** 2

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_forward(*inputs)

        @staticmethod
        def jvp(ctx, _):
            with Square.forward_ad():
                return torch.autograd.forward_ad.unpack_dual(ctx.saved_tensors[0] ** 2).tangent

    x = torch.tensor(3.0)
    with pytest.raises(RuntimeError):
        torch.func.jvp(Square.apply, (x,), (x,))
    Square.forward_ad = staticmethod(functorch.forward_ad)
    assert torch.func.jvp(Square.apply, (x,), (torch.ones(()),))[1] == 6.0


def test_what_autograd_records_has_a_number():
    """Made before or after, in this thread."""
    w = torch.ones((), requires_grad=True)
    before = w * 2
    begun = autograd.sequence_number()
    after = w * 2
    assert autograd.recorded_at(w) == -1
    assert (
        autograd.recorded_at(before)
        < begun
        <= autograd.recorded_at(after)
        < autograd.sequence_number()
    )


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 3 * x

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad


def test_what_autograd_records_says_which_function_it_is_of():
    w = torch.ones((), requires_grad=True)
    outs = [Tripled.apply(w.sin()).cos(), Tripled.apply(w)]
    assert autograd.custom_functions(outs) == [f"{__name__}.Tripled"]
    assert autograd.custom_functions([w, w * 2]) == []
    assert len([*autograd.nodes_from([x.grad_fn for x in outs], {None})]) == 5


def test_a_tensor_is_followed_by_transforms_up_to_a_level():
    """Seen from inside of another transform, where a tangent of an outer one does not show."""
    seen = {}

    def look(x):
        def inside(y):
            seen["outer"], seen["inner"] = (
                functorch.followed(x, 1),
                functorch.followed(y, 1),
            )
            seen["detached"] = functorch.followed(x.detach(), 1)
            seen["levels"] = functorch.levels(y)
            return (x * y).sum()

        return grad(inside)(torch.ones(2)).sum()

    jvp(look, (torch.ones(2),), (torch.ones(2),))
    assert seen["outer"] == (True, False)
    assert seen["inner"] == (False, True)
    assert seen["detached"] == (False, True)
    assert seen["levels"] == {1, 2}
    grad(look)(torch.ones(2))
    assert seen["outer"] == (True, False)
    vmap(look)(torch.ones(3, 2))
    assert seen["outer"] == (True, False)
    assert functorch.followed(torch.ones(2), 0) == (False, False)
    assert functorch.followed(torch.ones(2, requires_grad=True), 0) == (True, False)


def test_whether_anything_differentiates_is_seen():
    seen = []

    def look(x):
        seen.append(functorch.differentiating())
        return x.sum()

    vmap(look)(torch.ones(2, 2))
    vmap(grad(look))(torch.ones(2, 2))
    jvp(look, (torch.ones(2),), (torch.ones(2),))
    look(torch.ones(2))
    assert seen == [False, True, True, False]


def test_a_zero_of_all_levels_is_mapped_and_pushed_forward_by_all():
    """Whatever lies between, and whether or not anything else depends on it."""
    seen = []

    def look(x):
        zero = functorch.zero_of_all_levels(torch.device("cpu"))
        seen.append((functorch.mapped_levels(zero), functorch.differentiated(zero)))
        assert zero.shape == ()
        return torch.where(zero == 0, 1.0, zero)

    x = torch.ones(2)
    assert look(x) == 1
    assert vmap(look)(x).tolist() == [1, 1]
    assert vmap(vmap(look))(torch.ones(2, 3)).tolist() == [[1, 1, 1]] * 2
    assert vmap(look)(torch.ones(4)).tolist() == [1] * 4
    assert jvp(look, (x,), (x,))[1] == 0
    assert grad(lambda y: vmap(look)(x).sum() * y)(torch.ones(())) == 2
    assert vmap(lambda y: jvp(look, (y,), (y,))[1])(x).tolist() == [0, 0]
    assert [levels for levels, _ in seen] == [set(), {1}, {1, 2}, {1}, set(), {2}, {1}]
    assert [pushed for _, pushed in seen] == [False] * 4 + [True, False, True]


def test_what_is_differentiated_is_seen_at_any_level():
    seen = []

    def look(x):
        def inside(y):
            seen.append(functorch.differentiated(x))
            return y

        vmap(inside)(torch.ones(2))
        return x.sum()

    x = torch.ones(2, 2)
    for call in (look, vmap(look), grad(look), lambda x: jvp(look, (x,), (x,))):
        call(x)
    look(x.requires_grad_())
    assert seen == [False, False, True, True, True]
    assert not functorch.differentiated(1.0)


def test_what_is_done_unnoticed_goes_by_no_mode():
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    x = torch.ones(2)
    with Mode():
        x.add(1)
        with modes.unnoticed():
            x.sub(1)
    assert seen == ["add"]
