"""Both engines and a hand-written ``.backward()`` loop give the same bits on ordinary floats.

The three take the same gradients with the same cotangents and add them in the same order; only
the machinery differs: torch.func, ``torch.autograd.grad``, and ``.grad`` of parameters.
"""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import pureaccum as pa
from pureaccum._base.torch_internals.modes import at_top_level
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import seeds
from tests.core.models import MODELS, problem
from tests.draws import examples
from tests.problems import function, in_parts, once
from tests.zoo import fits_networks, fits_programs, fits_sums  # noqa: F401
from tests.zoo.species import ZOO


pytestmark = [pytest.mark.parity, pytest.mark.promise("engines")]


def by_hand(given_, loss, parts, weights):
    """Sum ``weight * gradient`` of each microbatch, pulled with weight / 2**e; divide once."""
    module = given_.module
    module.load_state_dict(given_.params)
    wide = [torch.promote_types(p.dtype, torch.float32) for p in module.parameters()]
    sums = [torch.zeros_like(p, dtype=d) for p, d in zip(module.parameters(), wide, strict=True)]
    for part, weight in zip(parts, weights, strict=True):
        power = 2.0 ** (weight - 1).bit_length()
        module.zero_grad()
        out = loss(dict(module.named_parameters()), part)
        out.backward(torch.full_like(out, weight / power))
        for total, p in zip(sums, module.parameters(), strict=True):
            total += p.grad.to(total.dtype) * power
    names = dict(module.named_parameters())
    return {
        name: (total / sum(weights)).to(p.dtype)
        for (name, p), total in zip(names.items(), sums, strict=True)
    }


@pytest.mark.parametrize("name", MODELS)
@examples(1 / 2)
@example(nonfinite="propagate", dtype=torch.float32, seed=1, rows=7, size=3)
@given(
    nonfinite=st.sampled_from(["propagate", "skip", "raise"]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    seed=seeds(),
    rows=st.integers(2, 8),
    size=st.integers(1, 7),
)
def test_a_mean_has_the_bits_of_both_engines_and_of_a_loop(
    name, nonfinite, dtype, seed, rows, size
):
    given_ = problem(name, seed, rows, dtype)
    size = min(size, rows - 1)  # not the whole batch, which is not scaled at all
    options = {"microbatch_size": size, "nonfinite": nonfinite}
    func, autograd = (
        pa.grad(given_.mean, engine=engine, **options)(given_.params, given_.batch)
        for engine in ("func", "autograd")
    )
    parts = list(pa.microbatches(given_.batch, size))
    hand = by_hand(given_, given_.mean, parts, [len(part["x"]) for part in parts])
    assert_trees_bitwise_equal(func, autograd)
    assert_trees_bitwise_equal(func, hand)


@pytest.mark.parametrize("name", MODELS)
@examples(1 / 2)
@example(nonfinite="propagate", seed=1, rows=7, size=2)
@given(
    nonfinite=st.sampled_from(["propagate", "skip"]),
    seed=seeds(),
    rows=st.integers(1, 8),
    size=st.integers(1, 8),
)
def test_a_weighted_mean_has_the_bits_of_both_engines_and_of_a_loop(
    name, nonfinite, seed, rows, size
):
    """As streams; by hand, the totals of the microbatches that are not all masked."""
    given_ = problem(name, seed, rows)
    states = [
        in_parts(
            pa.accumulator(given_.weighted, nonfinite=nonfinite, engine=engine),
            given_.params,
            pa.microbatches(given_.batch, size),
        )
        for engine in ("func", "autograd")
    ]
    assert_trees_bitwise_equal(*states)
    live = [part for part in pa.microbatches(given_.batch, size) if part["mask"].sum()]
    if not live:
        assert not any(g.any() for g in states[0].grads.values())
        return
    module = given_.module
    sums = {name: torch.zeros_like(p) for name, p in given_.params.items()}
    module.load_state_dict(given_.params)
    for part in live:
        module.zero_grad()
        given_.weighted(dict(module.named_parameters()), part).total.backward()
        for name, p in module.named_parameters():
            sums[name] += p.grad
    assert_trees_bitwise_equal(states[0].grads, sums)


# engine="auto", with which steps are made: the bits of "func", and of a transform -----------------


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
    loss, params, batch, options = species.make(torch.float32, seed=0)
    given = {name: x for name, x in options.items() if name in ("has_aux", "reduction")}
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
@pytest.mark.parametrize(
    "engine", [pytest.param("auto", marks=pytest.mark.given_up("auto engine")), "autograd"]
)
def test_auto_has_the_bits_of_func_over_the_zoo(engine, species, whole):
    """At top level it is autograd. For a few operations (binary_cross_entropy_with_logits, silu,
    mish, GroupNorm, LSTM on a CPU) torch.func takes another formula: they agree to rounding.
    """
    auto, func = (outcome(it, species, whole=whole) for it in (engine, "func"))
    assert not isinstance(auto, RuntimeError), auto
    if isinstance(func, RuntimeError):  # torch.func cannot run it, and says who can
        assert "engine='autograd'" in "".join(getattr(func, "__notes__", ()))
    elif species.name in OTHER_FORMULA:
        torch.testing.assert_close(auto, func)
    else:
        assert_trees_bitwise_equal(auto, func)


Square = function(lambda x: x * x, lambda g, x: 2 * x * g, old=True)  # torch.func refuses it


def test_a_step_runs_what_torch_func_refuses_and_goes_through_transforms():
    step = pa.make_step(lambda w, x: Square.apply(w * x).mean(), pa.sgd(0.5), microbatch_size=2)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    state, _ = once(step, torch.tensor(1.0), x)
    assert torch.equal(state.params, torch.tensor(-6.5))
    levels = []

    def loss(w, x):
        levels.append(at_top_level())
        return ((w * x) ** 2).mean()

    step = pa.make_step(loss, pa.sgd(0.5), microbatch_size=2)
    states = pa.stack([step.init(torch.tensor(w)) for w in (1.0, 2.0)])
    together, _ = torch.func.vmap(step, in_dims=(0, None))(states, x)
    assert not any(levels)
    levels.clear()
    each = [step(state, x)[0].params for state in pa.unstack(states)]
    assert all(levels)
    assert torch.equal(together.params, torch.stack(each))


# Its gradient is a view of what it was given.
Given = function(lambda x, slope: (x * slope).sum(), lambda g, x, slope: (slope.view(-1), None))


@pytest.mark.parametrize(
    "engine", [pytest.param("auto", marks=pytest.mark.given_up("auto engine")), "func", "autograd"]
)
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
