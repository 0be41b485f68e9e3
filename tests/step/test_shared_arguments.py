"""Further arguments of a loss, whole for every microbatch; and a window in one call."""

import pytest
import torch
import torch._dynamo.testing
from hypothesis import given
from hypothesis import strategies as st

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from pureaccum.testing.strategies import compositions, seeds
from tests.draws import generator
from tests.step.problems import EAGER


pytestmark = [pytest.mark.exact, pytest.mark.promise("documented")]
ROWS = 6
FORMS = {
    "eager": {},
    "func": {"engine": "func"},
    "donated": {"donate": True},
    "auto": {"microbatch_size": "auto"},
    "compiled": {"compile": EAGER},
    "compiled and donated": {"compile": EAGER, "donate": True},
}
forms = pytest.mark.parametrize("form", FORMS)
MADE = {}


def integers(seed, *shape):
    return torch.randint(-7, 8, shape, generator=generator(seed)).float()


def loss(w, x, teacher, beta):
    """The teacher has as many samples as the batch, and is not cut all the same."""
    total = (x @ w).sum() * beta + (x @ teacher["w"]).sum() * w.sum()
    seen = {"rows": pa.Weighted(len(teacher["rows"]) * total.detach(), len(x)), "top": x.amax()}
    return pa.Weighted(total, len(x)), seen


def made(form, **options):
    key = form, *map(str, options.values())
    if key not in MADE:
        given_ = {"has_aux": True, "aux_reduction": {"rows": "sum", "top": "max"}}
        MADE[key] = pa.make_step(loss, pa.sgd(1.0), **(given_ | FORMS[form] | options))
    return MADE[key]


def teacher(seed):
    return {"w": integers(seed, 2), "rows": torch.ones(ROWS, requires_grad=True)}


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(it, marks=[pytest.mark.slow] if it.startswith("compiled") else [])
        for it in FORMS
    ],
)
@given(
    seeds(), st.sampled_from([[6], [4, 2], [2, 2, 2], [1, 5]]), st.sampled_from([2.0, -3.0, 0.5])
)
def test_what_is_shared_is_whole_for_every_microbatch(form, seed, sizes, beta):
    x, w, guide = integers(seed, ROWS, 2), torch.tensor([1.0, -2.0]), teacher(seed + 1)
    want = (x.sum(0) * beta + (x @ guide["w"]).sum()) / ROWS
    top, each = x.amax(), loss(w, x, guide, beta)[1]["rows"]
    options = {} if form == "auto" else {"microbatch_size": sizes}
    step = made(form, **options)
    with unchanged((x, guide)):
        results = [
            step(step.init(w), x, guide, beta),
            step.window(step.init(w), pa.microbatches(x, sizes), guide, beta),
        ]
    for state, info in results:
        assert torch.equal(state.params, w - want)
        assert info.aux["top"] == top
        assert info.aux["rows"] == each.total / ROWS
        assert info.loss.requires_grad  # as what is shared does
    state = step.init(w)
    window = step.begin(state)
    for part in x.split(sizes):
        window, aux = step.update(state, window, part, guide, beta)
        assert aux["top"] == part.amax()
    state, _ = step.apply(state, window)
    assert torch.equal(state.params, w - want)


@pytest.mark.slow
@pytest.mark.promise("sizes")
def test_what_is_shared_is_whole_where_a_size_is_looked_for():
    x, w, guide = integers(0, ROWS, 2), torch.tensor([1.0, -2.0]), teacher(1)

    def scarce(w, x, guide, beta):
        if len(x) > 2:
            raise torch.OutOfMemoryError
        return loss(w, x, guide, beta)

    options = {"has_aux": True, "aux_reduction": {"rows": "sum", "top": "max"}}
    step = pa.make_step(scarce, pa.sgd(1.0), microbatch_size="auto", **options)
    with unchanged((x, guide)):
        state, info = step(step.init(w), x, guide, 2.0)
    assert info.microbatches >= ROWS / 2
    assert torch.equal(state.params, w - (x.sum(0) * 2.0 + (x @ guide["w"]).sum()) / ROWS)
    assert info.aux["rows"] == loss(w, x, guide, 2.0)[1]["rows"].total / ROWS


@pytest.mark.nightly
def test_a_graph_is_made_once_for_a_tensor_and_once_for_each_value_of_a_number():
    count = torch._dynamo.testing.CompileCounter()

    def annealed(w, x, beta):
        return (x * w).mean() * beta["now"]

    step = pa.make_step(annealed, pa.sgd(1.0), microbatch_size=None, compile={"backend": count})
    state, x = step.init(torch.tensor(1.0)), torch.arange(4.0)
    frames = []
    for beta in (0.5, 3.0, 0.5, 3.0, *map(torch.tensor, (7.5, 11.0, 13.5))):
        assert step(state, x, {"now": beta})[1].loss == 1.5 * beta
        frames.append(count.frame_count)
    once = frames[0]
    assert frames == [once, 2 * once, 2 * once, 2 * once, *[3 * once] * 3]


def test_with_keys_buffers_a_policy_and_a_loss_scale():
    """What is shared comes after the batch, and a policy casts it as it casts the batch."""

    def full(w, x, guide, *, buffers, keys):
        assert {w.dtype, x.dtype, guide.dtype} == {torch.bfloat16}
        assert len(keys) == len(x)
        return (x * w * guide.sum()).mean(), {"n": buffers["n"] + 1}

    step = pa.make_step(
        full,
        pa.sgd(1.0),
        microbatch_size=2,
        keys=True,
        buffers="sequential",
        policy=pa.Policy(compute=torch.bfloat16),
        loss_scale=pa.static_loss_scale(4.0),
    )
    state = step.init(torch.tensor(1.0), buffers={"n": torch.zeros(())})
    x, guide = torch.arange(4.0), torch.ones(3)
    for new, info in (step(state, x, guide), step.window(state, list(x.split(2)), guide)):
        assert info.applied
        assert new.params == 1.0 - 4.5
        assert new.buffers["n"] == 2


# Transforms --------------------------------------------------------------------------------------


@pytest.mark.promise("closure")
def test_derivatives_with_respect_to_what_is_shared():
    """A meta-gradient with respect to a teacher, in microbatches as in one."""

    def after(size, guide):
        def distilled(w, x, guide):
            return ((x @ w - x @ guide) ** 2).mean()

        step = pa.make_step(distilled, pa.sgd(0.125), microbatch_size=size)
        state, _ = step(step.init(w), x, guide)
        return (state.params**2).sum()

    x, w, guide = integers(0, 8, 2), torch.tensor([1.0, -2.0]), torch.tensor([2.0, 1.0])
    x, w, guide = x.double(), w.double(), guide.double()
    want = torch.func.grad(lambda g: after(None, g))(guide)
    got = torch.func.grad(lambda g: after(4, g))(guide)
    assert want.abs().min() > 0
    assert torch.equal(got, want)  # whole numbers over powers of two
    several = torch.stack([guide, -guide])
    each = torch.func.vmap(torch.func.grad(lambda g: after(2, g)))(several)
    assert torch.equal(each[0], want)


@pytest.mark.promise("ensembles")
def test_an_ensemble_has_a_teacher_each():
    step = made("eager", microbatch_size=4)
    guides = [teacher(seed) for seed in (1, 2)]
    x, states = integers(0, ROWS, 2), [step.init(integers(seed, 2)) for seed in (3, 4)]
    stacked = pa.stack(guides)
    new, _ = torch.func.vmap(step, in_dims=(0, None, 0, None))(pa.stack(states), x, stacked, 2.0)
    for state, guide, got in zip(states, guides, pa.unstack(new), strict=True):
        assert_trees_bitwise_equal(got.params, step(state, x, guide, 2.0)[0].params)


@pytest.mark.promise("one buffer")
def test_a_memory_report_is_given_what_the_step_is_given():
    step = made("eager", microbatch_size=2)
    report = pa.memory_report(step, step.init(torch.ones(2)), torch.ones(6, 2), teacher(0), 2.0)
    assert report.measured
    assert report.measured.gradients == 8


# Faults ------------------------------------------------------------------------------------------


@pytest.mark.given_up("early writes")
@pytest.mark.parametrize("form", ["eager", "compiled"])
def test_a_write_to_what_is_shared_is_refused_by_name(form):
    def writing(w, x, guide):
        guide["ema"].mul_(0.5)
        return (x * w).mean() + 0 * guide["ema"].sum()

    step = pa.make_step(writing, pa.sgd(1.0), microbatch_size=2, **FORMS[form])
    guide = {"ema": torch.ones(3)}
    state = step.init(torch.tensor(1.0))
    with unchanged(guide), pytest.raises(RuntimeError, match=r"writes to shared\[0\]\['ema'\]"):
        step(state, torch.ones(4), guide)
    with unchanged(guide), pytest.raises(RuntimeError, match=r"writes to shared\[0\]\['ema'\]"):
        step.window(state, [torch.ones(4)], guide)


@pytest.mark.promise("writes")
@pytest.mark.parametrize("form", ["eager", "compiled"])
def test_a_write_to_what_is_shared_is_named(form):
    def writing(w, x, guide):
        guide["ema"].mul_(0.5)
        return (x * w).mean() + 0 * guide["ema"].sum()

    step = pa.make_step(writing, pa.sgd(1.0), microbatch_size=2, **FORMS[form])
    state = step.init(torch.tensor(1.0))
    with pytest.raises(RuntimeError, match=r"shared\[0\]\['ema'\]"):
        step(state, torch.ones(4), {"ema": torch.ones(3)})
    with pytest.raises(RuntimeError, match=r"shared\[0\]\['ema'\]"):
        step.window(state, [torch.ones(4)], {"ema": torch.ones(3)})


@pytest.mark.given_up("early writes")
def test_a_loss_that_decides_by_what_is_shared_is_watched_for_each_kind():
    kept = torch.zeros(3)

    def deciding(w, x, training):
        if training:
            kept.add_(1.0)
        return (x * w).mean()

    step = pa.make_step(deciding, pa.sgd(1.0), microbatch_size=2)
    state = step.init(torch.tensor(1.0))
    state, _ = step(state, torch.ones(4), False)
    with pytest.raises(RuntimeError, match="writes to a tensor of shape"):
        step(state, torch.ones(4), True)
    assert not kept.any()


@forms
@pytest.mark.parametrize(
    "given_",
    [torch.ones(4, 2), {"x": torch.ones(2)}, (torch.ones(2), torch.ones(2)), "words", 3, None],
)
def test_what_is_no_stream_is_no_window(form, given_):
    step = made(form)
    state = step.init(torch.ones(2))
    with unchanged(state), pytest.raises(TypeError, match="expected a list or another iterable of"):
        step.window(state, given_, teacher(0), 1.0)


@forms
def test_a_window_of_nothing_is_not_applied(form):
    step = made(form)
    state, info = step.window(step.init(torch.ones(2)), [], teacher(0), 1.0)
    assert not info.applied
    assert info.microbatches == 0
    assert info.aux == ()
    assert torch.equal(state.params, torch.ones(2))


@pytest.mark.promise("errors")
@pytest.mark.parametrize("form", ["eager", "compiled"])
def test_a_window_that_breaks_off_loses_nothing(form):
    def stream():
        yield torch.ones(2, 2)
        raise OSError("the disk")

    step = made(form, microbatch_size=2)
    state = step.init(torch.ones(2))
    with unchanged(state), pytest.raises(OSError, match="the disk"):
        step.window(state, stream(), teacher(0), 1.0)
    assert step.window(state, [torch.ones(2, 2)], teacher(0), 1.0)[1].applied


# Sizes ------------------------------------------------------------------------------------------


@given(seeds(), compositions(ROWS))
def test_a_step_takes_a_list_of_sizes(seed, sizes):
    x, w = integers(seed, ROWS, 2), torch.tensor([1.0, -2.0])
    step = made("eager", microbatch_size=sizes)
    guide = teacher(seed + 1)
    state, info = step(step.init(w), x, guide, 2.0)
    want, _ = made("eager", microbatch_size=ROWS)(step.init(w), x, guide, 2.0)
    assert_trees_bitwise_equal(state.params, want.params)
    assert info.microbatches == len(sizes)


@pytest.mark.promise("errors")
@pytest.mark.parametrize("form", ["eager", "compiled"])
def test_sizes_that_are_not_those_of_the_batch_are_refused(form):
    step = made(form, microbatch_size=[2, 3])
    state = step.init(torch.ones(2))
    with pytest.raises(ValueError, match="adds up to 5 samples; the batch has 6"):
        step(state, torch.ones(6, 2), teacher(0), 1.0)
    for sizes in ([0, 6], [2.5], [-1, 7], [True]):
        with pytest.raises((TypeError, ValueError), match=r"microbatch_size\[0\] is"):
            pa.make_step(loss, pa.sgd(1.0), microbatch_size=sizes)
    with pytest.raises(ValueError, match=r"size=\[2, 3\] adds up to 5 samples"):
        pa.microbatches(torch.ones(6), [2, 3])
    assert [len(x) for x in pa.microbatches(torch.ones(2), [0, 2, 0])] == [0, 2, 0]
    with pytest.raises(ValueError, match=r"size\[1\] is -1"):
        pa.microbatches(torch.ones(2), [3, -1])
