"""With ``keys=True`` randomness belongs to the samples of a run: no cut moves it.

Dropout of a half multiplies by two, so all is exact, and a mask that differs shows in the bits.
"""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import compositions, pieces, reduction, seeds
from tests.draws import examples, generator, take
from tests.exactly import integers


pytestmark = [pytest.mark.exact, pytest.mark.promise("keys")]
ROWS = 8
FEATURES = 4
kinds = pytest.mark.parametrize("kind", ["mean", "sum", "weighted"])
run_seeds = st.integers(-(2**63), 2**64 - 1)


def make_params(seed):
    g = generator(seed)
    return {"w": integers(g, 3, FEATURES, bound=3), "out": integers(g, FEATURES, bound=3)}


def make_batch(seed, rows=ROWS):
    g = generator(seed + 1)
    mask = torch.randint(0, 3, (rows,), generator=g).float()
    return {"x": integers(g, rows, 3, bound=3), "y": integers(g, rows, bound=3), "mask": mask}


def of_kind(kind):
    """Two layers with dropout between; aux has the keys that it was given, and what was kept."""

    def loss(params, batch, keys):
        assert keys.shape == (len(batch["y"]), 2)
        hidden = pa.dropout((batch["x"] @ params["w"]).relu(), 0.5, keys)
        rows = (hidden @ params["out"] - batch["y"]) ** 2
        if kind == "weighted":
            total = pa.Weighted((rows * batch["mask"]).sum(), batch["mask"].sum())
        else:
            total = rows.sum() if kind == "sum" else rows.mean()
        return total, {"keys": keys, "kept": hidden != 0}

    return loss


def make_step(kind, size=None, **options):
    return pa.make_step(
        of_kind(kind),
        pa.sgd(2.0**-20),
        has_aux=True,
        keys=True,
        reduction=reduction(kind),
        microbatch_size=size,
        **options,
    )


def streamed(step, state, parts):
    """State, info, and the keys that the microbatches got."""
    window, keys = step.begin(state), []
    for part in parts:
        window, aux = step.update(state, window, part)
        keys.append(aux["keys"])
    return *step.apply(state, window), torch.cat(keys)


def distinct(keys):
    return len(keys.unique(dim=0)) == len(keys)


def drawn(data, kind):
    params, batch = make_params(seed := data.draw(seeds())), make_batch(seed)
    assume(kind != "weighted" or batch["mask"].sum() > 0)
    return params, batch, data.draw(run_seeds)


@pytest.mark.parametrize(
    "kind", ["weighted", *(pytest.param(it, marks=pytest.mark.slow) for it in ("mean", "sum"))]
)
@examples(1 / 2)
@given(data=st.data(), engine=st.sampled_from(["func", "autograd"]))
def test_no_cut_moves_a_mask(kind, data, engine):
    params, batch, seed = drawn(data, kind)
    whole = make_step(kind)
    want, info = whole(whole.init(params, seed=seed), batch)
    assert distinct(info.aux["keys"])
    scale = pa.static_loss_scale(2.0 ** data.draw(st.integers(-4, 20)))
    for size in range(1, ROWS + 2):
        step = make_step(kind, size, engine=engine, loss_scale=scale)
        new, what = step(step.init(params, seed=seed), batch)
        assert_trees_bitwise_equal(new.params, want.params)
        assert_trees_bitwise_equal(what.aux, info.aux)
    parts = pieces(batch, data.draw(compositions(ROWS, empty=True)))
    step = make_step(kind, engine=engine, donate=data.draw(st.booleans()))
    new, _, keys = streamed(step, step.init(params, seed=seed), parts)
    assert_trees_bitwise_equal(new.params, want.params)
    assert_trees_bitwise_equal(keys, info.aux["keys"])
    assert new.samples == ROWS


@pytest.mark.slow
@kinds
@examples(1 / 2)
@given(data=st.data(), bad=st.integers(0, ROWS - 1), number=st.sampled_from([torch.inf, torch.nan]))
def test_skipped_rows_are_counted(kind, data, bad, number):
    """So those that come after keep their masks."""
    params, batch, seed = drawn(data, kind)
    whole = make_step(kind)
    _, clean = whole(whole.init(params, seed=seed), batch)

    batch["y"][bad] = number
    batch["mask"][bad] = 1
    size = data.draw(st.sampled_from([1, 2, 4]))
    step = make_step(kind, size, nonfinite="skip")
    start = step.init(params, seed=seed)
    new, info = step(start, batch)
    assert (info.skipped, new.samples) == (1, ROWS)
    parts = [take(batch, slice(i, i + size)) for i in range(0, ROWS, size)]
    other, _, keys = streamed(step, start, parts)
    assert_trees_bitwise_equal((new.params, keys), (other.params, clean.aux["keys"]))

    # The gradient of those samples alone, with the masks that they had in the clean batch.
    first = bad - bad % size
    left = torch.tensor([i for i in range(ROWS) if not first <= i < first + size])
    rest = {name: x[left] for name, x in batch.items()}

    def loss(p):
        total = of_kind("weighted" if kind == "weighted" else "sum")
        value = total(p, rest, clean.aux["keys"][left])[0]
        return value.total if kind == "weighted" else value

    weight = {"sum": 1, "mean": len(left), "weighted": rest["mask"].sum()}[kind]
    grads = torch.func.grad(loss)(params)
    want = {k: p - 2.0**-20 * (grads[k] / weight) for k, p in params.items()}
    assert_trees_bitwise_equal(new.params, want if weight else params)


@examples(1 / 2)
@given(
    run_seeds,
    run_seeds,
    st.lists(st.sampled_from(["good", "bad", "empty"]), min_size=1, max_size=5),
)
def test_no_key_comes_twice_in_a_run_or_in_another(one, other, steps):
    """Between attempts, applied or not, between samples, and between seeds."""
    assume((one - other) % 2**64)
    params, batch = make_params(0), make_batch(0)
    seen = []

    def run(seed):
        step = make_step("mean", 3)
        state, rows, applied = step.init(params, seed=seed), 0, 0
        for what in steps:
            if what == "empty":
                state, info = step.apply(state, step.begin(state))
            else:
                given = batch | {"y": torch.full((ROWS,), torch.nan)} if what == "bad" else batch
                state, info = step(state, given)
                seen.append(info.aux["keys"])
                rows += ROWS
            applied += what == "good"
            assert bool(info.applied) is (what == "good")
            assert_trees_bitwise_equal(state.key, pa.key(seed))
            assert (state.applied.item(), state.samples.item()) == (applied, rows)
        assert state.attempts == len(steps)
        return state

    assert_trees_bitwise_equal(run(one), again := run(one))
    if seen:
        half = len(seen) // 2
        assert_trees_bitwise_equal(seen[:half], seen[half:])
        del seen[half:]
        different = run(other)
        assert distinct(torch.cat(seen))
        assert_trees_bitwise_equal(different[5:], again[5:])


def test_the_same_rows_get_other_masks_in_the_next_step():
    step = make_step("mean", 3)
    state = step.init(make_params(0))
    state, first = step(state, make_batch(0))
    _, second = step(state, make_batch(0))
    assert not torch.equal(first.aux["kept"], second.aux["kept"])


def test_an_attempt_alone_makes_other_keys():
    """Also where the samples have the same numbers: after an empty window, say."""
    step = make_step("mean", 3)
    state = step.init(make_params(0))
    later, _ = step.apply(state, step.begin(state))
    assert later.samples == state.samples
    keys = [step(s, make_batch(0))[1].aux["keys"] for s in (state, later)]
    assert distinct(torch.cat(keys))


def test_a_run_goes_on_from_its_numbers_alone():
    """Attempts, samples and key are all that randomness depends on."""
    step = make_step("sum", 3)
    state = step.init(make_params(0), seed=7)
    for _ in range(3):
        state, _ = step(state, make_batch(0))
    fresh = step.init(state.params, seed=7)
    resumed = fresh._replace(attempts=state.attempts.clone(), samples=state.samples.clone())
    (a, one), (b, two) = step(state, make_batch(1)), step(resumed, make_batch(1))
    assert_trees_bitwise_equal((a.params, one.aux), (b.params, two.aux))


def test_a_short_and_a_long_batch_share_the_masks_of_their_rows():
    step, batch = make_step("sum"), make_batch(0)
    state = step.init(make_params(0))
    _, long = step(state, batch)
    _, short = step(state, take(batch, slice(0, 5)))
    assert_trees_bitwise_equal(short.aux["keys"], long.aux["keys"][:5])


def test_the_loss_may_map_over_its_rows():
    """``vmap`` hands each sample its key."""

    def mapped(params, batch, keys):
        def row(x, y, key):
            hidden = pa.dropout((x @ params["w"]).relu(), 0.5, key)
            return (hidden @ params["out"] - y) ** 2

        return torch.func.vmap(row)(batch["x"], batch["y"], keys).sum()

    options = {"reduction": "sum", "keys": True}
    ours = make_step("sum", 3)
    theirs = pa.make_step(mapped, pa.sgd(2.0**-20), microbatch_size=2, **options)
    params, batch = make_params(0), make_batch(0)
    a, _ = ours(ours.init(params, seed=3), batch)
    b, _ = theirs(theirs.init(params, seed=3), batch)
    assert_trees_bitwise_equal(a.params, b.params)


def test_policy_and_buffers_do_not_touch_the_keys():
    """A cast of the batch leaves them alone, and so do the buffers beside them."""

    def loss(params, batch, buffers, keys):
        assert keys.dtype == torch.int64
        total, aux = of_kind("sum")(params, batch, keys)
        return total, ({"n": buffers["n"] + 1}, aux)

    step = pa.make_step(
        loss,
        pa.sgd(2.0**-20),
        reduction="sum",
        has_aux=True,
        keys=True,
        buffers="sequential",
        microbatch_size=2,
        policy=pa.Policy(compute=torch.float64),
    )
    plain = make_step("sum")
    params, batch = make_params(0), make_batch(0)
    state, info = step(step.init(params, {"n": torch.tensor(0)}, seed=5), batch)
    want, other = plain(plain.init(params, seed=5), batch)
    assert_trees_bitwise_equal((state.params, info.aux), (want.params, other.aux))
    assert state.buffers["n"] == 4
