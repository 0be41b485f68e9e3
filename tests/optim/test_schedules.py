"""Schedules beside torch's learning-rate schedulers, and as pure functions of a tensor."""

import math
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler as torchs

import pureaccum as pa
from pureaccum._optim.schedules import rate_at
from tests.draws import examples
from tests.optimizers import Copies


pytestmark = [pytest.mark.parity, pytest.mark.promise("optimizers")]
rates = st.floats(1e-8, 1e3)
lengths = st.integers(1, 40)
COUNTS = torch.arange(12)


def ours(schedule, counts):
    found = [schedule(torch.tensor(count)) for count in range(counts)]
    assert all(x.dtype == torch.float64 and x.shape == () for x in found)
    return [x.item() for x in found]


def theirs(lr, counts, scheduler):
    """The rates of an optimizer's first steps."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=lr)
    found = []
    with warnings.catch_warnings(action="ignore"):  # SequentialLR calls what torch deprecates
        schedule = scheduler(optimizer)
        for _ in range(counts):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
    return found


def assert_close(got, want):
    """torch's schedulers multiply the last rate, so that roundings of the largest add up."""
    largest = max(map(abs, want))
    assert all(abs(a - b) <= 1e-12 * largest for a, b in zip(got, want, strict=True)), (got, want)


# Beside torch ---------------------------------------------------------------------------


AT = st.sets(st.integers(1, 40), max_size=5).map(sorted)
FACTORS = st.floats(0.0, 1.5)
BESIDE = {  # arguments; ours, and the scheduler, made of a rate and of those; how many counts
    "linear_warmup": (
        st.tuples(lengths, st.floats(0.001, 1.0)),
        lambda lr, steps, factor: pa.linear_warmup(lr, steps, start=lr * factor),
        lambda o, steps, factor: torchs.LinearLR(o, factor, total_iters=steps),
        43,
    ),
    "step_decay": (st.tuples(lengths, FACTORS), pa.step_decay, torchs.StepLR, 100),
    "step_decay at": (st.tuples(AT, FACTORS), pa.step_decay, torchs.MultiStepLR, 45),
    "exponential_decay": (st.tuples(FACTORS), pa.exponential_decay, torchs.ExponentialLR, 60),
}


@pytest.mark.parametrize("name", BESIDE)
@given(rates, st.data())
def test_a_schedule_is_that_of_torch(name, peak, data):
    args, make, scheduler, counts = BESIDE[name]
    args = data.draw(args)
    want = theirs(peak, counts, lambda o: scheduler(o, *args))
    assert_close(ours(make(peak, *args), counts), want)


@given(rates, lengths, st.floats(0.0, 0.9))
def test_cosine_decay_is_that_of_torch(peak, steps, factor):
    """CosineAnnealingLR goes up again where ours stays."""
    end = peak * factor
    want = theirs(peak, steps + 1, lambda o: torchs.CosineAnnealingLR(o, steps, eta_min=end))
    got = ours(pa.cosine_decay(peak, steps, end=end), steps + 3)
    assert_close(got[: steps + 1], want)
    assert got[steps:] == [end] * 3


@given(rates, st.tuples(lengths, lengths), st.integers(1, 3))
def test_joined_schedules_are_those_of_torch(peak, steps, more):
    """SequentialLR starts each scheduler at the boundary, at its own count 0."""
    up, down = steps

    def sequence(optimizer):
        parts = [
            torchs.LinearLR(optimizer, 0.1, total_iters=up),
            torchs.CosineAnnealingLR(optimizer, down, eta_min=peak / 100),
            torchs.ConstantLR(optimizer, 0.25, total_iters=1000),
        ]
        return torchs.SequentialLR(optimizer, parts, milestones=[up, up + down])

    schedule = pa.join_schedules(
        [
            pa.linear_warmup(peak, up, start=peak / 10),
            pa.cosine_decay(peak, down, end=peak / 100),
            pa.constant(peak / 4),
        ],
        [up, up + down],
    )
    counts = up + down + more
    assert_close(ours(schedule, counts), theirs(peak, counts, sequence))


@given(
    peak=rates,
    steps=lengths,
    share=st.sampled_from([0.0, 0.25, 1.0]) | st.floats(0.0, 1.0),
    cycle=st.fixed_dictionaries(
        {
            "anneal_strategy": st.sampled_from(["cos", "linear"]),
            "div_factor": st.floats(0.5, 100.0),
            "final_div_factor": st.floats(0.5, 1e6),
            "three_phase": st.booleans(),
        }
    ),
)
def test_one_cycle_is_that_of_torch(peak, steps, share, cycle):
    """But where torch divides by zero, and after its last step."""
    cycle["pct_start"] = share / 2 if cycle["three_phase"] else share
    got = ours(pa.one_cycle(peak, steps, **cycle), steps + 3)
    assert got[steps:] == [got[steps - 1]] * 3
    if cycle["pct_start"] * steps != 1:  # a first phase of no length

        def their(optimizer):
            more = {"total_steps": steps, "cycle_momentum": False}
            return torchs.OneCycleLR(optimizer, peak, **more, **cycle)

        # its last call, which may divide by zero too, is for a step that is never taken
        assert_close(got[:steps], [*theirs(peak, steps - 1, their), got[steps - 1]])
        down = cycle["pct_start"] < 1  # else it ends at its peak
        end = peak / cycle["div_factor"] / cycle["final_div_factor"] if down else peak
        assert got[steps - 1] == end


# The rule -------------------------------------------------------------------------------


@given(rates, rates, lengths)
def test_both_ends_are_exact_and_nothing_leaves_them(a, b, steps):
    for schedule in (pa.linear_warmup(b, steps, start=a), pa.cosine_decay(a, steps, end=b)):
        first, *_, last = got = ours(schedule, steps + 1)
        assert (first, last) == (a, b)
        assert ours(schedule, steps + 4)[steps:] == [b] * 4
        assert got == sorted(got, reverse=a > b)


@given(rates, st.integers(1, 2**53), st.integers(0, 50), st.floats(0.0, 0.9))
def test_step_decay_counts_whole_steps(peak, steps, passed, factor):
    """Also where a count is no longer exact as a float."""
    rate = pa.step_decay(peak, steps, factor)
    want = peak * factor**passed
    for count in (passed * steps, passed * steps + steps - 1):
        assert abs(rate(torch.tensor(count)).item() - want) <= 4 * 2.0**-53 * want
    assert rate(torch.tensor(0)) == peak


@given(st.lists(st.integers(1, 2**62), min_size=1, max_size=5, unique=True).map(sorted))
def test_step_decay_changes_at_the_very_counts(at):
    rate = pa.step_decay(1.0, at, 0.5)
    for i, count in enumerate(at):
        got = [rate(torch.tensor(n)).item() for n in (count - 1, count, count + 1)]
        following = 0.5 ** (i + 1 + (at[i + 1 : i + 2] == [count + 1]))
        assert got == [0.5**i, 0.5 ** (i + 1), following]


@given(rates, st.floats(0.01, 1.0), lengths, st.floats(0.0, 1.0))
def test_exponential_decay_follows_its_rule(peak, factor, steps, share):
    """Exact after whole steps of a power of two, and at both ends; never below the end."""
    end = peak * share
    got = ours(pa.exponential_decay(peak, factor, steps, end), 6 * steps)
    assert got[0] == peak
    assert got == sorted(got, reverse=True)
    for count, rate in enumerate(got):
        want = max(peak * factor ** (count / steps), end)
        assert abs(rate - want) <= 16 * 2.0**-53 * want
        assert rate >= end
    halved = ours(pa.exponential_decay(peak, 0.5, steps, end), 6 * steps + 1)
    assert halved[::steps] == [max(peak * 0.5**n, end) for n in range(7)]


@given(rates, st.sampled_from(["cos", "linear"]))
def test_one_cycle_meets_its_rates(peak, anneal):
    for three in (False, True):
        made = pa.one_cycle(
            peak, 9, pct_start=1 / 3, anneal_strategy=anneal, div_factor=8, three_phase=three
        )
        got = ours(made, 12)
        low, last = peak / 8, peak / 8 / 1e4
        assert (got[0], got[2], got[8:]) == (low, peak, [last] * 4)
        assert got[:3] == sorted(got[:3])
        assert got[2:] == sorted(got[2:], reverse=True)
        if three:
            assert got[4] == low


@pytest.mark.parametrize(("steps", "three"), [(4, False), (4, True), (2, True)])
def test_a_first_phase_of_no_length_is_at_its_end(steps, three):
    """torch divides by zero."""
    cycle = {"pct_start": 1 / steps, "three_phase": three}
    with pytest.raises(ZeroDivisionError):
        theirs(1.0, 1, lambda o: torchs.OneCycleLR(o, 1.0, steps, cycle_momentum=False, **cycle))
    first, *_, last = ours(pa.one_cycle(1.0, steps, **cycle), steps)
    assert (first, last) == (1.0, 1 / 25 / 1e4)


@given(st.integers(3, 2**53 - 1), st.booleans())
def test_one_cycle_is_exact_at_the_ends_of_long_runs(steps, three):
    rate = pa.one_cycle(1.0, steps, pct_start=0.5, div_factor=8, three_phase=three)
    got = [rate(torch.tensor(count)).item() for count in (0, steps - 1, steps, 2**62)]
    assert got == [1 / 8, *[1 / 8 / 1e4] * 3]
    if steps % 2 == 0:
        assert rate(torch.tensor(steps // 2 - 1)) == 1


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_a_count_may_be_an_int_of_any_size(dtype):
    """An int32 is not compared with what it cannot hold."""
    count = torch.tensor(3, dtype=dtype)
    for schedule in (
        pa.linear_warmup(0.5, 2**40, start=0.25),
        pa.cosine_decay(0.5, 2**40),
        pa.join_schedules([pa.constant(0.25), pa.constant(0.5)], [2**40]),
        pa.step_decay(0.5, 2**40),
        pa.step_decay(0.5, [2, 2**40]),
        pa.exponential_decay(0.5, 0.5, 2**40),
        pa.one_cycle(0.5, 2**40),
    ):
        assert schedule(count) == schedule(count.long())


@given(st.integers(1, 2**40), st.floats(0.0, 1.0))
def test_a_cosine_does_not_cancel_near_its_end(steps, share):
    """sin is right to the last place, so that the relative error is some roundings, everywhere."""
    count = round(steps * share)
    got = pa.cosine_decay(1.0, steps)(torch.tensor(count)).item()
    want = math.sin(math.pi / 2 * ((steps - count) / steps)) ** 2
    assert abs(got - want) <= 8 * 2.0**-53 * want
    if count < steps:
        assert got > 0


def test_a_schedule_is_asked_for_its_own_counts_only():
    asked = [[], [], []]

    def asking(i):
        return lambda count: (asked[i].append(count.item()), torch.tensor(float(i)))[1]

    schedule = pa.join_schedules([asking(0), asking(1), asking(2)], [3, 5])
    assert ours(schedule, 8) == [0, 0, 0, 1, 1, 2, 2, 2]
    assert [sorted(set(counts)) for counts in asked] == [[0, 1, 2], [0, 1], [0, 1, 2]]


def test_boundaries_are_read_once():
    schedules, boundaries = [pa.constant(1.0), pa.constant(2.0)], [2]
    schedule = pa.join_schedules(schedules, boundaries)
    boundaries[0], schedules[1] = 4, pa.constant(3.0)
    assert ours(schedule, 4) == [1.0, 1.0, 2.0, 2.0]


def test_one_schedule_may_be_joined_alone():
    assert ours(pa.join_schedules([pa.linear_warmup(1.0, 2)], []), 4) == [0.0, 0.5, 1.0, 1.0]


# As pure functions of a tensor ----------------------------------------------------------


def made_of(peak):
    return {
        "constant": pa.constant(peak),
        "linear_warmup": pa.linear_warmup(peak, 4, start=0.25),
        "cosine_decay": pa.cosine_decay(peak, 4, end=0.25),
        "join_schedules": pa.join_schedules(
            [pa.linear_warmup(peak, 3), pa.cosine_decay(peak, 4)], [3]
        ),
        "step_decay": pa.step_decay(peak, 3, 0.5),
        "step_decay at": pa.step_decay(peak, [2, 3, 7], 0.5),
        "exponential_decay": pa.exponential_decay(peak, 0.5, 3),
        "exponential_decay to its end": pa.exponential_decay(peak, 0.5, 3, end=0.05),
        "one_cycle": pa.one_cycle(peak, 9),
        "one_cycle, three phases": pa.one_cycle(
            peak, 9, pct_start=0.4, anneal_strategy="linear", three_phase=True
        ),
        "their own": lambda count: peak / torch.sqrt(1.0 + count),
    }


KINDS = pytest.mark.parametrize("name", made_of(1.0))


@KINDS
def test_a_schedule_goes_through_vmap(name):
    schedule = made_of(0.5)[name]
    got = torch.func.vmap(lambda count: rate_at(schedule, count))(COUNTS)
    alone = torch.stack([schedule(count) for count in COUNTS])
    torch.testing.assert_close(got, alone, rtol=2**-48, atol=2**-48)  # some roundings of cos or pow


@pytest.mark.slow
@pytest.mark.promise("compiled")
@KINDS
def test_a_schedule_compiles_into_one_graph(name):
    """The rate changes without a recompilation."""
    schedule = made_of(0.5)[name]
    torch.compiler.reset()
    compiled = torch.compile(
        lambda count: rate_at(schedule, count), fullgraph=True, backend="aot_eager"
    )
    got = [compiled(COUNTS[0])]
    with torch.compiler.set_stance("fail_on_recompile"):
        got += [compiled(count) for count in COUNTS[1:]]
    assert torch.equal(torch.stack(got), torch.stack([schedule(count) for count in COUNTS]))


@pytest.mark.parametrize("name", [name for name in made_of(1.0) if "to its end" not in name])
@examples(1 / 5)
@given(st.floats(0.1, 10.0))
def test_a_schedule_has_a_derivative_with_respect_to_its_peak(name, peak):
    """A rate that no end holds is linear in its parts: the slope is the difference."""
    for count in COUNTS:

        def rate(peak, count=count):
            return rate_at(made_of(peak)[name], count)

        at = torch.tensor(peak, dtype=torch.float64)
        slope = rate(at + 1) - rate(at)
        one = torch.ones_like(at)
        for got in (torch.func.grad(rate)(at), torch.func.jvp(rate, (at,), (one,))[1]):
            assert abs(got - slope) <= 64 * 2.0**-53 * (peak + 1)


@examples(1 / 2)
@given(st.floats(0.125, 2.0), st.integers(0, 11))
def test_a_decay_has_a_derivative_with_respect_to_its_factor(factor, count):
    """Forward and reverse, and at the count at which nothing has decayed yet."""
    at, n = torch.tensor(factor, dtype=torch.float64), torch.tensor(count)
    for make, power in (
        (lambda f: pa.step_decay(2.0, 3, f), count // 3),
        (lambda f: pa.step_decay(2.0, [2, 7], f), (count >= 2) + (count >= 7)),
        (lambda f: pa.exponential_decay(2.0, f, 4), count / 4),
    ):

        def rate(factor, make=make):
            return make(factor)(n)

        slope = 2 * power * factor ** (power - 1)
        for got in (
            torch.func.grad(rate)(at),
            torch.func.jvp(rate, (at,), (torch.ones_like(at),))[1],
        ):
            assert abs(got - slope) <= 64 * 2.0**-53 * slope


def test_a_schedule_that_is_not_chosen_has_no_derivative():
    """sqrt(-1) is NaN, and NaN * 0 would be too."""

    def rate(peak, count):
        def falling(count):
            return peak * torch.sqrt(4.0 - count)

        def rising(count):
            return peak * torch.sqrt(count.double())

        return pa.join_schedules([falling, rising], [4])(count)

    for count, slope in ((0, 2.0), (3, 1.0), (5, 1.0), (8, 2.0)):
        assert torch.func.grad(rate)(torch.tensor(1.0), torch.tensor(count)) == slope


@pytest.mark.mechanism
def test_a_rate_may_be_a_number_a_tensor_or_a_schedule():
    count, tensor = torch.tensor(3), torch.tensor(0.25, requires_grad=True)
    for lr in (0.25, pa.constant(0.25), lambda count: 0.25):
        rate = rate_at(lr, count)
        assert (rate.item(), rate.dtype, rate.shape) == (0.25, torch.float64, ())
    assert rate_at(1, count).dtype == torch.float64
    assert rate_at(tensor, count) is tensor
    assert rate_at(lambda count: tensor, count) is tensor


@pytest.mark.promise("launches")
@pytest.mark.parametrize("peak", [0.25, torch.tensor(0.25)], ids=["number", "tensor"])
def test_a_rate_lies_where_the_count_lies_and_nothing_waited_for_it(peak):
    count = torch.zeros((), dtype=torch.int64, device="meta")
    for lr in (0.25, *made_of(peak).values()):
        with Copies() as copies:
            assert rate_at(lr, count).device.type == "meta"
        assert not any(copy.waits for copy in copies.seen)
