"""``ema`` beside torch's AveragedModel, and as a pure state."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import pureaccum as pa
from pureaccum._base.trees import tree_map
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from pureaccum.testing.strategies import seeds
from tests.draws import examples, generator
from tests.optimizers import Copies, clones, leaves, normal, unread
from tests.refusals import saying


pytestmark = [pytest.mark.parity, pytest.mark.promise("documented")]
decays = st.sampled_from([0.0, 0.5, 0.9, 0.999]) | st.floats(0, 1, exclude_max=True)
flags = st.lists(st.booleans(), max_size=6)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool]


def model_of(seed):
    """Convolutions, a BatchNorm with its buffers, a scalar, and a leaf that is a lot larger."""
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3), nn.Linear(70, 70))
    model.register_parameter("scale", nn.Parameter(torch.zeros(())))
    return randomized(model, seed)


def randomized(model, seed):
    random = generator(seed)
    with torch.no_grad():
        for x in model.parameters():
            x.copy_(normal(x.shape, random))
        for x in model.buffers():
            x.copy_(torch.randint(0, 100, x.shape, generator=random) / 4)
    return model


def params_of(seed, dtypes=DTYPES):
    """Leaves of every dtype, and one of no numbers."""
    random = generator(seed)
    made = {str(dtype): (8 * normal((3,), random)).to(dtype) for dtype in dtypes}
    return {**made, "0-d": [normal((), random)], "empty": (torch.zeros(0),)}


def averaged(decay, seen, flags=None):
    average = pa.ema(decay)
    states = [average.init(seen[0])]
    for i, params in enumerate(seen[1:]):
        given = {} if flags is None else {"applied": flags[i]}
        states.append(average.update(states[-1], params, **given))
    return states


def warmed_up(n):
    return ((1 + n.double()) / (10 + n)).clamp(max=0.9)


# Beside torch ---------------------------------------------------------------------------


@examples(1 / 4)
@given(decays, st.lists(seeds(), max_size=5), st.booleans())
def test_averages_are_those_of_torch(decay, draws, buffers):
    """To the bit. Of buffers too, but for integers, of which torch averages the roundings."""
    model = model_of(0)
    their = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=buffers)

    def tree(model):
        return [dict(model.named_parameters()), dict(model.named_buffers()) if buffers else {}]

    average = pa.ema(decay)
    state = average.init(tree(model))
    for seed in draws:
        their.update_parameters(randomized(model, seed))
        state = average.update(state, tree(model))
    latest = dict(model.named_buffers())["1.num_batches_tracked"]
    if buffers:
        assert torch.equal(state.params[1].pop("1.num_batches_tracked"), latest)
        dict(their.module.named_buffers())["1.num_batches_tracked"].copy_(latest)
    want = tree(their.module)
    want[1].pop("1.num_batches_tracked", None)
    assert_trees_bitwise_equal(leaves(state.params), [x.detach() for x in leaves(want)])
    assert state.updates == their.n_averaged
    assert not any(x.requires_grad for x in leaves(state))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_averages_of_other_dtypes_are_those_of_torch(dtype):
    model = nn.ParameterList([normal((5,), generator(0), dtype)])
    their = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    average = pa.ema(0.9)
    state = average.init([*model])
    for seed in range(1, 4):
        with torch.no_grad():
            model[0].copy_(normal((5,), generator(seed), dtype))
        their.update_parameters(model)
        state = average.update(state, [*model])
    assert_trees_bitwise_equal(state.params, [x.detach() for x in their.parameters()])


def test_a_bfloat16_average_moves():
    """Where AveragedModel, which averages in the dtype of the model, stays for ever."""
    model = nn.ParameterList([torch.ones(1, dtype=torch.bfloat16)])
    their = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    average = pa.ema(0.999)
    state = average.init([*model])
    for value in (1.0, *[1.5] * 200):
        nn.init.constant_(model[0], value)
        their.update_parameters(model)
        state = average.update(state, [*model])
    assert next(their.parameters()) == 1
    want = 1.5 - 0.5 * 0.999**200
    assert state.params[0].dtype == torch.float32
    assert abs(state.params[0].item() - want) < 400 * 2.0**-24


# The rule -------------------------------------------------------------------------------


@given(st.lists(st.integers(-(2**10), 2**10), min_size=1, max_size=8))
def test_the_first_update_copies_and_later_ones_average(seen):
    """Whole numbers and halves: no rounding."""
    *_, state = averaged(0.5, [torch.tensor(9.0), *[torch.tensor(float(x)) for x in seen]])
    want = float(seen[0])
    for x in seen[1:]:
        want = (want + x) / 2
    assert (state.params, state.updates) == (want, len(seen))


@pytest.mark.parametrize("before", [-0.0, math.inf, math.nan, 1e38])
@pytest.mark.parametrize("x", [-0.0, math.inf, -1e38, 2.0])
def test_the_first_update_copies_whatever_was_there(before, x):
    for updates in (torch.tensor(0), unread(torch.tensor(0))):
        average = pa.ema(0.9)
        state = average.init(torch.tensor(before))._replace(updates=updates)
        assert_trees_bitwise_equal(
            average.update(state, torch.tensor(x)).params.as_subclass(Tensor), torch.tensor(x)
        )


@given(seeds(), flags)
def test_what_is_not_applied_leaves_no_trace(seed, flags):
    """Not even a NaN; whether the host can read the flag or not."""
    seen = [params_of(seed + i) for i in range(len(flags) + 1)]
    kept = [seen[0], *[x for x, flag in zip(seen[1:], flags, strict=True) if flag]]
    *_, want = averaged(warmed_up, kept)
    poisoned = [
        x if flag else {k: _spoiled(v) for k, v in x.items()}
        for x, flag in zip(seen[1:], flags, strict=True)
    ]
    for wrap in (torch.tensor, lambda flag: unread(torch.tensor(flag))):
        *_, got = averaged(warmed_up, [seen[0], *poisoned], [wrap(flag) for flag in flags])
        got = tree_map(lambda x: x.as_subclass(Tensor), got)
        assert_trees_bitwise_equal(got, want)


def _spoiled(leaf):
    return tree_map(lambda x: x * math.nan if x.is_floating_point() else torch.ones_like(x), leaf)


@given(seeds(), st.integers(1, 5))
def test_integers_are_taken_over_and_the_rest_is_kept_wide(seed, updates):
    seen = [params_of(seed + i) for i in range(updates + 1)]
    for i, state in enumerate(averaged(0.9, seen)):
        for name in ("torch.int64", "torch.bool"):
            assert torch.equal(state.params[name], seen[i][name])
        assert state.params["torch.bfloat16"].dtype == torch.float32
        kept = {"torch.float32", "torch.float64", "torch.complex64", "torch.int64", "torch.bool"}
        assert all(str(state.params[name].dtype) == name for name in kept)


@given(decays, seeds(), st.integers(1, 4))
def test_a_function_of_the_updates_is_as_good_as_a_number(decay, seed, updates):
    """To the bit, whether the host can read it or not; it is asked for the updates before."""
    seen, asked = [params_of(seed + i) for i in range(updates + 1)], list[int]()
    *_, want = averaged(decay, seen)
    kept = torch.tensor(decay, dtype=torch.float64)

    def known(n):
        asked.append(n.item())
        return kept

    for of in (known, lambda n: unread(kept), lambda n: decay, pa.constant(decay)):
        *_, got = averaged(of, seen)
        got = tree_map(lambda x: x.as_subclass(Tensor), got)
        assert_trees_bitwise_equal(got, want)
    assert asked == [*range(updates)]


def test_the_warm_up_of_an_average():
    seen = [torch.tensor(float(x), dtype=torch.float64) for x in (7, 1, 2, 4)]
    *_, state = averaged(warmed_up, seen)
    second = 1 + (1 - 2 / 11) * (2 - 1)
    assert abs(state.params - (second + (1 - 3 / 12) * (4 - second))) < 1e-14


# As a pure state ------------------------------------------------------------------------


@pytest.mark.promise("purity")
@given(seeds(), flags)
def test_no_argument_changes_and_nothing_is_shared(seed, flags):
    average, seen = pa.ema(0.9), [params_of(seed)]
    states = [average.init(seen[0])]
    for i, flag in enumerate(flags):
        seen.append(params_of(seed + i + 1))
        applied = torch.tensor(flag) if i % 2 else None
        with unchanged([*states], seen, applied):
            new = average.update(states[-1], seen[-1], applied)
        states.append(new)
    places = [x.data_ptr() for x in leaves([states, seen]) if x.numel()]
    assert len(set(places)) == len(places)


def test_of_parameters_that_require_grad_no_graph_is_recorded():
    params = {"w": torch.ones(2, requires_grad=True), "b": nn.Parameter(torch.ones(1))}
    for flags in (None, [torch.tensor(True)], [torch.tensor(False)]):
        for state in averaged(0.9, [params, params], flags):
            assert all(type(x) is Tensor and not x.requires_grad for x in leaves(state))


MEMBERS = [torch.float32, torch.bfloat16, torch.int64]


@pytest.mark.promise("ensembles")
@examples(1 / 4)
@given(seeds(), st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=4))
def test_members_are_averaged_alone(seed, flags):
    """Also where one has had its first update and another has not."""
    for decay in (0.9, warmed_up):
        average = pa.ema(decay)
        many = torch.func.vmap(average.init)(
            pa.stack([params_of(seed + i, MEMBERS) for i in (0, 1)])
        )
        alone = [average.init(params_of(seed + i, MEMBERS)) for i in (0, 1)]
        for n, both in enumerate(flags):
            each = [params_of(seed + 2 * n + i, MEMBERS) for i in (2, 3)]
            applied = torch.tensor(both)
            many = torch.func.vmap(average.update)(many, pa.stack(each), applied)
            alone = [average.update(*args) for args in zip(alone, each, applied, strict=True)]
        for got, want in zip(pa.unstack(many), alone, strict=True):
            assert_near(got, want)


def assert_near(got, want):
    """Other kernels: a rounding of each update, of what is no larger than 2**10."""
    for x, y in zip(leaves(got), leaves(want), strict=True):
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        assert (
            torch.all((x - y).abs() <= 4 * 3 * 2.0**-24 * 2**12)
            if x.is_floating_point()
            else (torch.equal(x, y))
        )


@pytest.mark.slow
@pytest.mark.promise("compiled")
@pytest.mark.parametrize("decay", [0.9, warmed_up], ids=["number", "function"])
def test_an_update_compiles_into_one_graph(decay):
    torch.compiler.reset()
    average = pa.ema(decay)
    compiled = torch.compile(average.update, fullgraph=True, backend="aot_eager")
    seen = [params_of(i, MEMBERS) for i in range(5)]
    flags = [torch.tensor(flag) for flag in (False, True, True, False, True)]
    state = compiled(average.init(seen[0]), seen[0], flags[0])
    with torch.compiler.set_stance("fail_on_recompile"):
        for params, flag in zip(seen[1:], flags[1:], strict=True):
            state = compiled(state, params, flag)
    want = averaged(decay, [seen[0], *seen], flags)[-1]
    assert_near(state, want)


def test_an_average_has_the_derivatives_of_its_rule():
    """With respect to parameters, and to what the decay is made of."""
    x, y = torch.tensor(2.0).double(), torch.tensor(6.0).double()

    def last(x, y, decay):
        return averaged(lambda n: decay, [x, x, y])[-1].params

    at = (x, y, torch.tensor(0.75).double())
    assert torch.func.grad(last, (0, 1, 2))(*at) == (0.75, 0.25, x - y)
    for i, want in enumerate((0.75, 0.25, x - y)):
        tangents = tuple(torch.ones_like(x) * (j == i) for j in range(3))
        assert torch.func.jvp(last, at, tangents) == (3.0, want)


@pytest.mark.promise("followed")
def test_a_loss_that_plain_autograd_records_may_not_average():
    """It would take the average for a constant."""
    average = pa.ema(0.5)

    def loss(params, batch):
        state = average.update(average.init(params.detach()), params)
        return ((average.update(state, 2 * params).params - batch) ** 2).mean()

    x, batch = torch.tensor(1.0), torch.tensor([1.0, 2.0])
    want = torch.func.grad(loss)(x, batch)
    assert pa.grad(loss, microbatch_size=1)(x, batch) == want
    with saying(RuntimeError, "an average by ema keeps no graph"):
        pa.grad(loss, microbatch_size=1, engine="autograd")(x, batch)


def test_a_step_says_what_counts():
    """Beside AveragedModel that is updated after the steps that are applied."""
    step, average = pa.make_step(errors, pa.sgd(0.25)), pa.ema(0.5)
    state = step.init({"w": torch.ones(2)})
    kept = average.init(state.params)
    seen = [state.params]
    for scale in (1.0, math.nan, 2.0, math.inf, 0.5):
        state, info = step(state, torch.ones(4, 2) * scale)
        kept = average.update(kept, state.params, info.applied)
        seen += [state.params] if info.applied else []
    assert len(seen) == 4
    assert_trees_bitwise_equal(kept, averaged(0.5, seen)[-1])


def errors(params, batch):
    return ((batch @ params["w"] - 1) ** 2).mean()


# Off the CPU ----------------------------------------------------------------------------


def on_meta(count):
    dtypes = (torch.float32, torch.bfloat16)
    return [torch.ones(3, dtype=dtype, device="meta") for dtype in dtypes * count]


DECAYS = {"number": 0.9, "function": warmed_up, "of the host": lambda n: 0.9}


@pytest.mark.promise("launches")
@pytest.mark.parametrize("decay", DECAYS.values(), ids=DECAYS)
@pytest.mark.parametrize("flag", [None, "cpu", "meta"])
def test_nothing_waits_for_a_device(decay, flag):
    """On the meta device, where nobody can read a number; few copies go there."""
    found = []
    for count in (1, 4):
        average, params = pa.ema(decay), on_meta(count)
        state = average.init(params)
        applied = None if flag is None else torch.ones((), dtype=torch.bool, device=flag)
        with unchanged(clones(params)), Copies() as copies:
            state = average.update(state, params, applied)
        assert {x.device.type for x in leaves(state)} == {"meta"}
        assert not any(copy.waits for copy in copies.seen)
        found.append(sum(copy.away for copy in copies.seen))
    assert len(set(found)) == 1, "a copy to the device for every leaf"
