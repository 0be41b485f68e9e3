"""``engine="auto"``, with which steps are made, has the bits of ``"func"`` and of a transform.

At top level it is autograd. For a few operations (binary_cross_entropy_with_logits, silu, mish,
GroupNorm, LSTM on a CPU) torch.func takes another formula than ``.backward()``: there the two agree
to rounding.
"""

import pytest
import torch

import pureaccum as pa
from pureaccum._base.torch_internals import at_top_level
from pureaccum.testing import assert_trees_bitwise_equal
from tests.zoo import fits_networks, fits_programs, fits_sums  # noqa: F401
from tests.zoo.species import ZOO


pytestmark = [pytest.mark.parity, pytest.mark.promise("engines")]
SUMS = [it for it in ZOO if not it.kind]
OTHER_FORMULA = {"totals_without_a_weight"}  # the cross entropy


def residents():
    """Every loss that fits; where time is short every third one."""
    return [
        pytest.param(it, id=it.name, marks=pytest.mark.slow if i % 3 else ())
        for i, it in enumerate(SUMS)
    ]


def outcome(engine, species, *, whole):
    """Gradients and value, or the error of a loss that the engine refuses."""
    loss, params, batch, knobs = species.make(torch.float32, seed=0)
    given = {name: x for name, x in knobs.items() if name in ("has_aux", "reduction")}
    if whole:
        given |= {"microbatch_size": 5, "engine": engine, "aux_reduction": "last"}
        gradient = pa.grad_and_value(loss, **given)
        try:
            return gradient(params, batch)
        except RuntimeError as error:
            return error
    acc = pa.accumulator(loss, engine=engine, **given)
    state = acc.init(params)
    try:
        for part in pa.microbatches(batch, 5):
            state = acc.update(state, params, part, donate=True)
            state = state[0] if given.get("has_aux") else state
    except RuntimeError as error:
        return error
    return acc.finalize(state)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("species", residents())
def test_auto_has_the_bits_of_func_over_the_zoo(species, whole):
    auto, func = (outcome(engine, species, whole=whole) for engine in ("auto", "func"))
    assert not isinstance(auto, RuntimeError), auto
    if isinstance(func, RuntimeError):  # torch.func cannot run it, and says who can
        assert "engine='autograd'" in "".join(getattr(func, "__notes__", ()))
    elif species.name in OTHER_FORMULA:
        torch.testing.assert_close(auto, func)
    else:
        assert_trees_bitwise_equal(auto, func)


class Square(torch.autograd.Function):
    """Without ``setup_context``, so that torch.func refuses it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


def test_a_step_runs_what_torch_func_refuses_and_goes_through_transforms():
    step = pa.make_step(lambda w, x: Square.apply(w * x).mean(), pa.sgd(0.5), microbatch_size=2)
    state, _ = step(step.init(torch.tensor(1.0)), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert torch.equal(state.params, torch.tensor(-6.5))
    levels = []

    def loss(w, x):
        levels.append(at_top_level())
        return ((w * x) ** 2).mean()

    step = pa.make_step(loss, pa.sgd(0.5), microbatch_size=2)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    states = pa.stack([step.init(torch.tensor(w)) for w in (1.0, 2.0)])
    together, _ = torch.func.vmap(step, in_dims=(0, None))(states, x)
    assert not any(levels)
    levels.clear()
    each = [step(state, x)[0].params for state in pa.unstack(states)]
    assert all(levels)
    assert torch.equal(together.params, torch.stack(each))


class Given(torch.autograd.Function):
    """Its gradient is a view of what it was given."""

    @staticmethod
    def forward(x, slope):
        return (x * slope).sum()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0].view(-1), None


@pytest.mark.parametrize("engine", ["auto", "func", "autograd"])
def test_sums_take_no_memory_that_is_also_that_of_something_else(engine):
    """The first gradient begins the sums, unless it is a view of a slope, or of a cotangent."""
    slope, x = torch.tensor([2.0, 3.0]), torch.ones(5)
    loss = lambda params, x: Given.apply(params["v"], slope) + params["w"].reshape(())  # noqa: E731
    params = {"v": torch.ones(2), "w": torch.ones(1)}
    gradient = pa.grad(loss, microbatch_size=1, reduction="sum", engine=engine, check=False)
    for _ in range(2):
        got = gradient(params, x)
        assert_trees_bitwise_equal(got, {"v": 5 * slope, "w": torch.tensor([5.0])})
        got["v"].zero_()
        assert torch.equal(slope, torch.tensor([2.0, 3.0]))
