"""A run that was stopped anywhere, saved and loaded goes on as if it had not been, to the bit.

The step clips, skips and scales (the scale grows, backs off and forgives), drops out by keys,
pools the statistics of BatchNorm and runs AdamW on a schedule: all of it is in the state.
"""

import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from tests import optimizers
from tests.draws import examples, take
from tests.states import a_row, batch_of, first_state, full_step


pytestmark = [pytest.mark.exact, pytest.mark.promise("disk")]
STEPS, PARTS = 5, 3
CUTS = [slice(0, 4), slice(4, 8), slice(8, 10)]

Position = tuple[int, int]  # steps done, and microbatches of the window that is begun


def parts(number):
    batch = batch_of(10, number)
    if number == 3:
        batch["x"][5] = torch.nan  # a microbatch that is skipped
    return [take(batch, rows) for rows in CUTS]


def run(step, state, window, begin, end):
    """From one position to another: the state, the window and the infos of the steps between."""
    infos = []
    at, (done, part) = begin, begin
    while at != end:
        if window is None:
            window = step.begin(state)
        window = step.update(state, window, parts(done)[part])
        part += 1
        if part == PARTS:
            state, info = step.apply(state, window)
            window, done, part = None, done + 1, 0
            infos.append(info)
        at = (done, part)
    return state, window, infos


def resumed(path, begin, **options):
    """As a program does that finds a file: it makes everything anew, and loads."""
    step = full_step(**options)
    like = {"state": first_state(step), "done": 0, "part": 0}
    if begin[1]:
        like["window"] = step.begin(like["state"])
    tree = pa.load(path, like=like)
    assert (tree["done"], tree["part"]) == begin
    return run(step, tree["state"], tree.get("window"), begin, (STEPS, 0))[::2]


def saved(path, at, **options):
    step = full_step(**options)
    state, window, infos = run(step, first_state(step), None, (0, 0), at)
    tree = {"state": state, "done": at[0], "part": at[1]}
    pa.save(path, tree if window is None else tree | {"window": window})
    return infos


@cache
def whole(**options):
    step = full_step(**options)
    return run(step, first_state(step), None, (0, 0), (STEPS, 0))[::2]


positions = st.tuples(st.integers(0, STEPS - 1), st.integers(0, PARTS - 1))


@given(at=positions, engine=st.sampled_from(["func", "autograd"]), donate=st.booleans())
@examples(1 / 2)
def test_a_run_that_was_stopped_anywhere_goes_on(at, engine, donate):
    options = {"engine": engine, "donate": donate}
    with TemporaryDirectory() as folder:
        before = saved(f"{folder}/run", at, **options)
        state, after = resumed(f"{folder}/run", at, **options)
    want, infos = whole(**options)
    assert_trees_bitwise_equal(state, want)
    assert_trees_bitwise_equal(before + after, infos)
    # the run has seen what a state must remember
    assert sum(int(info.skipped) for info in infos) > 0
    assert len({float(info.scale) for info in infos}) > 1


@pytest.mark.slow
@given(at=st.integers(0, STEPS - 1))
@examples(1 / 4)
def test_a_run_that_was_stopped_after_each_step_goes_on(at):
    """And stopped after each step, at that."""

    def steps(state, numbers, path=None):
        step = full_step()
        for number in numbers:
            state, info = step(state, batch_of(10, number))
            if path is not None:
                pa.save(path, state)
                state = pa.load(path, like=first_state(full_step()))
        return state, info

    with TemporaryDirectory() as folder:
        first = first_state(full_step())
        got = steps(first, range(STEPS - at, STEPS + 3), f"{folder}/run")
        assert_trees_bitwise_equal(got, steps(first, range(STEPS - at, STEPS + 3)))


@pytest.mark.slow
def test_a_run_goes_on_in_another_process(tmp_path):
    at = (3, 2)
    before = saved(str(tmp_path / "run"), at)
    program = (
        "import torch; torch.set_num_threads(1)\n"
        "import pureaccum as pa; from tests.checkpoint import test_resume as t\n"
        f"state, infos = t.resumed({str(tmp_path / 'run')!r}, {at})\n"
        f"pa.save({str(tmp_path / 'end')!r}, [state, infos])\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
    state, infos = whole()
    got = pa.load(tmp_path / "end", like=[state, infos[at[0] :]])
    assert_trees_bitwise_equal(got, [state, infos[at[0] :]])
    assert_trees_bitwise_equal(before, infos[: at[0]])


ACCUMULATORS = {
    "accumulator": lambda: pa.accumulator(a_row),
    "squares": lambda: pa.accumulator(a_row, squares=True, dtype=torch.float64),
    "skip": lambda: pa.accumulator(a_row, nonfinite="skip"),
    "samples": lambda: pa.per_sample_accumulator(a_row, chunk_size=2),
    "moments": lambda: pa.per_sample_accumulator(a_row, chunk_size=3, reduce="moments"),
}


@pytest.mark.parametrize("make", ACCUMULATORS.values(), ids=ACCUMULATORS)
@pytest.mark.parametrize("at", range(4))
def test_a_sum_that_was_stopped_anywhere_goes_on(make, at, tmp_path):
    w = batch_of(3)["x"][:, :2]

    def add(state, numbers):
        for number in numbers:
            state = make().update(state, w, batch_of(2 + number, number))
        return state

    pa.save(tmp_path / "run", add(make().init(w), range(at)))
    state = add(pa.load(tmp_path / "run", like=make().init(w)), range(at, 4))
    want = add(make().init(w), range(4))
    assert_trees_bitwise_equal(state, want)
    assert_trees_bitwise_equal(make().finalize(state), make().finalize(want))


@pytest.mark.parametrize("kind", optimizers.KINDS)
def test_every_optimizer_goes_on_from_what_was_saved(kind, tmp_path):
    params = optimizers.make_params()

    def update(params, state, numbers):
        optimizer = optimizers.make_optimizer(kind)
        for number in numbers:
            params, state = optimizer.apply(optimizers.make_params(number), state, params)
        return params, state

    first = optimizers.make_optimizer(kind).init(params)
    pa.save(tmp_path / "run", update(params, first, range(3)))
    like = (params, optimizers.make_optimizer(kind).init(params))
    got = update(*pa.load(tmp_path / "run", like=like), range(3, 6))
    assert_trees_bitwise_equal(got, update(params, first, range(6)))
