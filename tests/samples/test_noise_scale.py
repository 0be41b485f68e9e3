"""The noise scale is what it is defined to be, its estimates are unbiased, its interval holds.

By hand it is ``sum w |g - mean|**2 / (K - 1)`` over the mean gradients g of the K microbatches of
weights w > 0: no difference of sums that cancels. All is float64. An error is measured against
``sum w |g|**2 / (K - 1)``, of which both sides are made: ``sqrt(u)`` of it leaves eight decimals to
find a fault in. Where only a power of two or a term of zero lies between, bits are compared.
"""

import itertools

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.func import vmap

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import compositions, histories, pieces, seeds
from tests.draws import examples, generator
from tests.outer import U64, make, total, weight
from tests.problems import in_parts
from tests.refusals import refused
from tests.rounding import UNIT, gamma


pytestmark = [pytest.mark.bounds, pytest.mark.promise("samples")]
ROOT_U = U64**0.5
engines, policies = st.sampled_from(["func", "autograd"]), st.sampled_from(["propagate", "skip"])
kinds = st.sampled_from(["mean", "weighted"])
masks = st.sampled_from([[1, 1, 1, 1], [1, 0, 0, 1], [1, 1, 0, 1]])
problems = st.builds(make, kinds, policies, seeds(), st.integers(2, 8), st.just(2))


def gradients(problem, parts):
    """Mean gradients, a sample for each part: of both leaves together, then of each."""
    seen = [torch.func.grad(total)(problem.params, part) for part in parts]
    by = torch.stack([weight(part) for part in parts])[:, None]
    b, w = (torch.stack([g[name].flatten() for g in seen]) / by for name in "bw")
    return [torch.cat([b, w], 1), b, w]


def check(seen, problem, parts):
    """All fields, of all leaves and of each, and that leaves add up to all."""
    alone = pa.noise_scale(seen, like=problem.params)
    assert list(alone) == ["params['b']", "params['w']"]
    got = [pa.noise_scale(seen), *alone.values()]
    assert all(x.dtype == torch.float64 and x.dim() == 0 for z in got for x in z)
    parts = [part for part in parts if weight(part) > 0]
    k = len(parts)
    if k < 2:
        assert all(torch.stack(z[:5]).isnan().all() for z in got)
        return
    weights = torch.stack([weight(part) for part in parts])
    w = weights.sum()
    for z, g in zip(got, gradients(problem, parts), strict=True):
        mean = weights @ g / w
        noise = weights @ ((g - mean) ** 2).sum(1) / (k - 1)
        slack = ROOT_U * (weights @ (g**2).sum(1)) / (k - 1)
        assert (z.noise - noise).abs() <= slack
        assert (z.signal - (mean @ mean - noise / w)).abs() <= k * slack / w
        if (weights == w / k).all():  # then they are a variance and a mean inner product
            inner = torch.stack([a @ b for a, b in itertools.permutations(g, 2)]).mean()
            assert (z.noise - w / k * g.var(0).sum()).abs() <= slack
            assert (z.signal - inner).abs() <= k * slack / w
        assert z.scale == (z.noise / z.signal if z.signal > 0 else torch.inf)
        fields = z.signal * w / z.noise, z.signal / (z.signal + z.noise * k / w)
        assert_trees_bitwise_equal((z.snr, z.cosine), fields)
        assert (z.low, z.high) == (0, torch.inf)
    assert got[0][1:3] == (got[1].signal + got[2].signal, got[1].noise + got[2].noise)


@given(problems, st.data(), engines, st.booleans())
def test_any_history_has_the_moments_of_its_microbatches(problem, data, engine, donate):
    """Ragged ones, empty ones, without weight, in any order, in states merged along any tree."""
    history = data.draw(histories(len(problem.batch["x"])))
    acc = pa.accumulator(problem.loss, nonfinite=problem.nonfinite, engine=engine, squares=True)
    state = history.run(acc, problem.params, problem.batch, donate)
    check(state, problem, pieces(problem.batch, history.sizes))


@examples(1 / 2)
@given(problems, st.sampled_from([None, 1, 3]), st.integers(0, 2))
def test_samples_are_taken_as_microbatches_of_one_row(problem, chunk, cut):
    loss, params, batch, rows = problem.loss, problem.params, problem.batch, len(problem.batch["x"])
    options = {"keep_batch_dim": True, "chunk_size": chunk}
    acc = pa.per_sample_accumulator(loss, squares=True, **options)
    parts = pieces(batch, [1] * rows)
    check(pa.per_sample_grad(loss, reduce="moments", **options)(params, batch), problem, parts)
    states = (in_parts(acc, params, [x]) for x in pieces(batch, [rows - cut, cut]))
    check(acc.merge(*states), problem, parts)


@pytest.mark.promise("skip")
@pytest.mark.promise("samples")
@examples(1 / 2)
@given(seeds(), compositions(7), st.integers(0, 6), engines, st.booleans(), st.booleans())
def test_what_is_left_out_adds_nothing(seed, sizes, bad, engine, donate, masked):
    """A poisoned microbatch that is skipped, and one without weight: bit for bit the others'."""
    problem = make("weighted", "propagate" if masked else "skip", seed, 7, 2)
    parts = pieces(problem.batch, sizes)
    poisoned = parts.pop(bad := bad % len(parts))
    poisoned = poisoned | {"x": poisoned["x"] * torch.nan, "mask": poisoned["mask"] * 0}
    poisoned["mask"] += not masked
    acc = pa.accumulator(problem.loss, nonfinite=problem.nonfinite, engine=engine, squares=True)
    several = parts, [*parts[:bad], poisoned, *parts[bad:]]
    want, got = (in_parts(acc, problem.params, some, donate) for some in several)
    assert_trees_bitwise_equal(*([s.squares, s.weight, s.grads] for s in (got, want)))
    check(got, problem, parts)


@pytest.mark.parametrize("engine", ["func", "autograd"])
@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
def test_a_leaf_that_is_added_by_a_hook_has_its_squares(engine, nonfinite):
    """A mebibyte; with ``skip``, in a copy of the sum. Gradient: the mean of x times a vector."""
    by, sizes, x = torch.arange(2.0**17).double().cos(), [1, 2, 2], torch.arange(5).double() ** 2
    params = {"big": torch.zeros_like(by), "small": torch.zeros(2).double()}

    def loss(p, x):
        return (x * (p["big"] @ by + p["small"].sum())).mean()

    acc = pa.accumulator(loss, engine=engine, nonfinite=nonfinite, squares=True)
    state = in_parts(acc, params, x.split(sizes), nonfinite == "propagate")
    means = torch.cat([y.mean().expand(len(y)) for y in x.split(sizes)])
    for z, square in zip(pa.noise_scale(state, params).values(), (by @ by, 2), strict=True):
        want = square * ((means - x.mean()) ** 2).sum() / 2
        assert (z.noise - want).abs() <= ROOT_U * square * (means**2).sum() / 2


@examples(1 / 2)
@given(problems, st.integers(1, 9), engines, st.integers(-20, 20))
@example(make("weighted", "propagate", 0, 7, 2), 1, "func", 3)  # the fourth sample has no weight
@example(make("mean", "propagate", 0, 7, 2), 2, "autograd", 0)  # which could add by itself
def test_a_step_gives_the_noise_of_its_microbatches(problem, size, engine, exponent):
    """Whole, as a stream, donated, under vmap; and no bit of it depends on the loss scale."""
    rule = {"microbatch_size": size, "nonfinite": problem.nonfinite, "engine": engine}
    step = pa.make_step(problem.loss, pa.sgd(0.1), noise=True, **rule)
    state, parts = step.init(problem.params), list(pa.microbatches(problem.batch, size))
    noise = step(state, problem.batch)[1].noise
    check(noise, problem, parts)
    rule |= {"donate": True, "loss_scale": pa.static_loss_scale(2.0**exponent)}
    scaled = pa.make_step(problem.loss, pa.sgd(0.1), noise=True, **rule)
    whole = scaled(scaled.init(problem.params), problem.batch)
    window = step.begin(state)
    for part in parts:
        window = step.update(state, window, part)
    for _, info in (whole, step.apply(state, window)):
        assert_trees_bitwise_equal(pa.noise_scale(info.noise), pa.noise_scale(noise))
    if engine == "func":
        batches = [problem.batch, problem.batch | {"y": -problem.batch["y"]}]
        noises = vmap(step, (None, 0))(state, pa.stack(batches))[1].noise
        for seen, batch in zip(pa.unstack(noises), batches, strict=True):
            check(seen, problem, list(pa.microbatches(batch, size)))


def quadratic(w, batch):
    """The gradient of a sample x is ``w - x``."""
    x, mask = batch
    return pa.Weighted((mask * ((w - x) ** 2).sum(-1)).sum() / 2, mask.sum())


QUADRATIC = pa.accumulator(quadratic, squares=True)


def cut_up(w, x, sizes, mask=None):
    mask = torch.ones(len(x)).double() if mask is None else torch.tensor(mask).double()
    return in_parts(QUADRATIC, w, zip(x.split(sizes), mask.split(sizes), strict=True))


@examples(1 / 2)
@given(seeds(), st.sampled_from([[1, 3], [1, 1, 2], [2, 2], [1, 1, 1, 1]]), masks)
def test_the_mean_over_all_batches_is_the_truth(seed, sizes, mask):
    """All 81 batches of four of three points, equally likely, cut raggedly.

    A batch's estimate is off by less than 64 roundings, the mean of 81 by as many more.
    """
    w, *points = torch.randint(-8, 9, (4, 2), generator=generator(seed)).double()
    truth, var = w - torch.stack(points).mean(0), torch.stack(points).var(0, correction=0).sum()
    batches = torch.stack([torch.stack(b) for b in itertools.product(points, repeat=4)])
    states = vmap(lambda x: cut_up(w, x, sizes, mask))(batches)
    z = vmap(pa.noise_scale)(states)
    slack = float(gamma(64 + 81, UNIT[torch.float64])) * states.squares[:, 0].max()
    assert (z.noise.mean() - var).abs() <= slack
    naive = ((states.grads / sum(mask)) ** 2).sum(1).mean() - var / sum(mask)  # what signal omits
    assert max((x - truth @ truth).abs() for x in (z.signal.mean(), naive)) <= slack


def followed(mu, decay, batches, runs):
    """Runs of batches of 8 samples, of covariance R diag(1, 1/4, 4) R^T."""
    g, spread = generator(1), torch.tensor([1.0, 0.5, 2.0]).double()
    turn = torch.linalg.qr(torch.randn(3, 3, generator=g, dtype=torch.float64))[0]
    x = mu + (torch.randn(batches, runs, 8, 3, generator=g, dtype=torch.float64) * spread) @ turn.T
    w, running = torch.zeros(3).double(), pa.running_noise_scale(decay)
    averages = pa.stack([running.init(w)] * runs)
    for state in pa.unstack(vmap(vmap(lambda x: cut_up(w, x, [1, 2, 3, 2])))(x)):
        averages = vmap(running.update)(averages, state)
    return vmap(running.read)(averages)


@pytest.mark.slow
@pytest.mark.parametrize(("decay", "batches"), [(0.99, 10), (0.99, 40), (0.9, 40)])
def test_the_interval_holds_the_truth_in_95_of_100_runs(decay, batches):
    """Give or take four standard deviations of a binomial count, 1 % of 8000 runs, 2 % of 2000.

    A decay of 0.9 keeps some 19 batches, cautiously taken for Student's degrees of freedom: 1 %
    more is allowed above. Without a signal the upper end is inf, but by chance in 2.5 % of runs.
    """
    mu, runs, truth = torch.tensor([1.0, 0.5, -0.5]).double(), 80_000 // batches, 5.25 / 1.5
    z, four = followed(mu, decay, batches, runs), 4 * (0.95 * 0.05 / runs) ** 0.5
    share = ((z.low <= truth) & (truth <= z.high)).double().mean()
    assert 0.95 - four <= share <= 0.96 + four
    assert ((z.low <= z.scale) & (z.scale <= z.high)).all()
    assert followed(0 * mu, decay, batches, runs).high.isinf().double().mean() >= 0.975 - four


W = torch.zeros(2).double()
decays = pytest.mark.parametrize("decay", [0.0, 0.1, 0.9, 0.99])


def some_states(seed, count):
    x = torch.randn(count, 6, 2, generator=generator(seed), dtype=torch.float64) + 1
    return [cut_up(W, batch, [1, 2, 3]) for batch in x]


@examples(1 / 2)
@given(seeds(), st.floats(0, 0.999), st.integers(1, 9))
def test_averages_are_corrected_for_their_beginning(seed, decay, n):
    running, states = pa.running_noise_scale(decay), some_states(seed, n)
    averages, last = running.init(W), (latest := pa.running_noise_scale(0)).init(W)
    for state in states:
        averages, last = running.update(averages, state), latest.update(last, state)
    assert_trees_bitwise_equal(latest.read(last), pa.noise_scale(states[-1]))
    shares = torch.tensor([decay ** (n - 1 - i) for i in range(n)], dtype=torch.float64)
    slack = float(gamma(8 * n + 8, UNIT[torch.float64]))
    for field in ("signal", "noise"):
        x = torch.stack([getattr(pa.noise_scale(state), field) for state in states])
        want, size = shares @ x / shares.sum(), shares @ x.abs() / shares.sum()
        assert (getattr(running.read(averages), field) - want).abs() <= slack * size


@pytest.mark.slow
@decays
def test_one_batch_has_no_interval(decay):
    """What rounding leaves of a variance of zero tells nothing."""
    running = pa.running_noise_scale(decay)
    states = pa.stack(some_states(0, 64))
    z = vmap(lambda state: running.read(running.update(running.init(W), state)))(states)
    assert ((z.low == 0) & z.high.isposinf()).all()


@decays
def test_what_says_nothing_is_left_out(decay):
    """One microbatch, or a batch that is not finite; before all others, and after them."""
    running, (good, other) = pa.running_noise_scale(decay), some_states(0, 2)
    one, nan = (cut_up(W, torch.full((1, 2), x).double(), [1]) for x in (1.0, torch.nan))
    averages = running.init(W)
    for seen in (good, other):
        for state in (QUADRATIC.init(W), one, nan, QUADRATIC.merge(good, nan)):
            assert_trees_bitwise_equal(running.update(averages, state), averages)
        averages = running.update(averages, seen)


@pytest.mark.promise("applied")
@pytest.mark.parametrize("size", [None, 2, "auto"])
@pytest.mark.parametrize("form", ["step", "vmap", "grad"])
def test_a_batch_of_no_rows_is_a_step_not_applied(size, form):
    """As it is without noise; its noise is not known."""
    step = pa.make_step(
        lambda w, x: (x @ w).square().mean(), pa.sgd(0.5), microbatch_size=size, noise=True
    )
    w, none = torch.tensor([1.0, -2.0]), torch.ones(0, 2)
    if form == "step":
        state, info = step(step.init(w), none)
        assert not info.applied
        assert info.noise.noise.isnan().all()
        assert torch.equal(state.params, w)
    elif size != "auto":
        if form == "vmap":
            states = pa.stack([step.init(w), step.init(2 * w)])
            assert not vmap(step, in_dims=(0, None))(states, none)[1].applied.any()
        else:
            moved = torch.func.grad(lambda w: step(step.init(w), none)[0].params.sum())
            assert torch.equal(moved(w), torch.ones(2))


@pytest.mark.promise("errors")
def test_states_that_did_not_sum_squares_are_refused():
    x = torch.ones(3, 2).double(), torch.ones(3).double()
    plain = pa.accumulator(quadratic)
    state, squared = in_parts(plain, W, [x]), in_parts(QUADRATIC, W, [x])
    for acc, wrong in ((plain, squared), (QUADRATIC, state)):
        for args in ((wrong, W, x), (wrong, acc.init(W)), (acc.init(W), wrong)):
            with refused(ValueError, "squares=True", "squares=False", given=args):
                (acc.update if len(args) == 3 else acc.merge)(*args)
    for wrong, error in ((state, ValueError), (None, TypeError), (W, TypeError), ([], TypeError)):
        with refused(error, "squares=True", "" if wrong is state else type(wrong).__name__):
            pa.noise_scale(wrong)


@pytest.mark.promise("errors")
def test_what_has_no_noise_of_its_own_is_refused():
    acc = pa.accumulator(lambda w, x: (w * x).sum(), reduction="sum", squares=True)
    with refused(ValueError, "squares=True", "noise=True", "reduction='sum'", "Weighted"):
        acc.update(acc.init(W), W, torch.ones(3, 2))


@pytest.mark.promise("errors")
def test_other_params_and_bad_decays_are_refused():
    running, (seen,) = pa.running_noise_scale(0.9), some_states(0, 1)
    with refused(ValueError, "expected 1, as in the batch", "2", "init"):
        running.update(running.init([W, W]), seen)
    for like in ([W, W], {}):
        with refused(ValueError, "leaves"):
            pa.noise_scale(seen, like=like)
    for decay in (1, 1.5, -0.1, "0.9", None, torch.nan):
        error = ValueError if isinstance(decay, int | float) else TypeError
        with refused(error, "decay", repr(decay)):
            pa.running_noise_scale(decay)


@pytest.mark.parametrize("kind", ["mean", "weighted"])
@pytest.mark.parametrize("scale", [None, 8.0])
def test_a_step_and_its_window_say_the_same_of_a_batch(kind, scale):
    """Cut or in one piece, which says nothing of noise:

    all fields, weights in samples or as given.
    """
    problem = make(kind, "propagate", 0, 6, 2)
    options = {"noise": True, "loss_scale": scale and pa.static_loss_scale(scale)}
    for size in (None, 8, 6, 4, 1, [5, 1], [6]):
        step = pa.make_step(problem.loss, pa.sgd(0.5), microbatch_size=size, **options)
        state = step.init(problem.params)
        cut = 6 if size is None else size
        whole = step(state, problem.batch)[1]
        window = step.window(state, list(pa.microbatches(problem.batch, cut)))[1]
        sizes = window.noise.noise.abs() + window.noise.signal.abs()
        for name, came, want in zip(whole.noise._fields, whole.noise, window.noise, strict=True):
            slack = ROOT_U * (sizes if name in ("noise", "signal") else 1 + want.abs())
            alike = (came == want) | (came.isnan() & want.isnan())
            assert (alike | ((came - want).abs() <= slack)).all(), name
        assert whole.noise.weight == window.noise.weight == whole.weight
        assert whole.noise.weight == (6.0 if kind == "mean" else weight(problem.batch))
