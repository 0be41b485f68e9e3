"""All that a step may be made of, compiled, beside the same step that is not.

In float64, to the bound of ``test_step.py``. Most graphs are run as they are traced (backend
``"eager"``): what the tracing leaves out or takes for constant is what can go wrong here.
"""

from functools import partial
from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from tests.draws import examples, generator
from tests.exactly import copied
from tests.problems import in_a_window
from tests.step.problems import (
    WARMUP,
    assert_close,
    counting,
    loss,
    make_batch,
    make_params,
    mapped,
    pair,
    poisoned,
    stacked,
)


pytestmark = [pytest.mark.transforms, pytest.mark.promise("compiled")]


def alike(ours, eager, state, batches):
    """Some steps of both; a step that is not applied leaves every bit as it was."""
    mine = other = state
    info = None
    for batch in batches:
        before = copied(mine[:3])
        mine, info = ours(mine, batch)
        other, what = eager(other, batch)
        assert_close((mine, info), (other, what))
        if not info.applied:
            assert_trees_bitwise_equal(mine[:3], before)
    return mine, info


def test_a_step_of_whole_numbers_is_the_full_batch_update():
    """The shortest of these: bits of three steps, ragged, and one that is not applied."""
    x, w = torch.tensor([[1.0, 2], [-1, 3], [2, 2], [0, -2]]), torch.tensor([2.0, -1.0])

    def squares(w, x):
        return ((x @ w) ** 2).sum()

    options = {"reduction": "sum", "microbatch_size": 3, "compile": {"backend": "eager"}}
    step = pa.make_step(squares, pa.sgd(0.25), **options)
    state = step.init(w)
    for batch, applied in ((x, True), (x * torch.inf, False), (-x, True)):
        state, info = step(state, batch)
        assert bool(info.applied) == applied
        w = w - 0.25 * torch.func.grad(squares)(w, batch) if applied else w
        assert torch.equal(state.params, w)


# Everything at once -----------------------------------------------------------------------


def token_loss(params, batch, keys):
    x = pa.dropout(batch["x"], 0.5, keys)
    out = torch.tanh(x @ params["w"] + params["b"])
    error = ((out - batch["y"]) ** 2).sum(-1)
    if "table" in params:
        error = error * params["table"][: len(error), 0] ** 2
    return pa.Weighted((error * batch["mask"]).sum(), batch["mask"].sum())


NESTEROV = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}
SCALING = pa.dynamic_loss_scale(8.0, growth_interval=2)
SCALED = {"nonfinite": "skip", "keys": True, "loss_scale": SCALING}
FULL = pair(
    token_loss,
    pa.chain(
        pa.clip_by_global_norm(0.5),
        pa.partition(
            {"w": pa.sgd(WARMUP, **NESTEROV), "b": pa.adamw(0.1, amsgrad=True)}, lambda path: path
        ),
    ),
    **SCALED,
)


@pytest.mark.slow
@examples(1 / 3)
@given(
    st.integers(0, 100),
    st.lists(st.sets(st.integers(0, 6), max_size=4), min_size=1, max_size=3),
    st.sets(st.integers(0, 6)),
)
@example(0, [{0}, set(range(7)), set()], {0, 1})
@example(1, [{6}, set()], set(range(7)))
@example(2, [{2, 6}], {2, 3})
def test_a_step_with_scales_masks_and_keys_is_the_eager_one(seed, bad, masked):
    """Bad microbatches come and go, some weigh nothing, and what is dropped is what eager drops."""
    mask = torch.ones(7, dtype=torch.float64)
    mask[list(masked)] = 0
    batches = [
        poisoned(make_batch(seed + i, 7), *rows) | {"mask": mask} for i, rows in enumerate(bad)
    ]
    ours, eager = FULL
    alike(ours, eager, ours.init(make_params(seed), seed=seed), batches)


@pytest.mark.nightly
def test_a_step_with_large_gradients_is_the_eager_one():
    """One graph for each microbatch, and one that applies them."""
    ours, eager = pair(token_loss, pa.sgd(WARMUP, momentum=0.9), check=False, **SCALED)
    table = torch.ones(600_000, 2, dtype=torch.float64)
    state = ours.init(make_params() | {"table": table}, seed=4)
    mask = torch.arange(9.0).double() % 4
    mask[:2] = 0
    batches = [make_batch(i, 9) | {"mask": mask} for i in range(2)]
    assert ours.form(state, batches[0]) == "loop"
    assert eager.form(state, batches[0]) == "eager"
    alike(ours, eager, state, [poisoned(batches[0], 0, 5, 8), batches[1]])


# Other numbers and trees ------------------------------------------------------------------


class Ends(NamedTuple):
    scale: Tensor
    bias: Tensor


def odd_loss(params, batch):
    w, ends = params["a"]
    out = (batch["x"][0] @ w.real) * ends.scale + batch["power"] * ends.bias
    picked = params["emb"][batch["index"]]
    assert batch["none"] is None
    return ((out - batch["y"]) ** 2).sum() + (w.abs() ** 2).sum() * picked.square().sum()


@pytest.mark.nightly
def test_parameters_may_be_complex_0d_and_nested():
    """In place, where tensors without dimensions are a case of their own: three steps."""
    ours, eager = pair(
        odd_loss, pa.adamw(0.1), reduction="sum", donate=True, compile={"backend": "aot_eager"}
    )
    g = generator(0)
    params = {
        "a": [
            torch.randn(3, 2, generator=g, dtype=torch.complex128),
            Ends(torch.tensor(2.0).double(), torch.randn(2, generator=g).double()),
        ],
        "emb": torch.randn(70_000, 2, generator=g).double(),  # too large to be copied
    }
    index = torch.tensor([0, 1, 1, 4, 0, 2, 4, 3, 3])

    def batch(i):
        b = make_batch(i, 9)
        return {"x": (b["x"],), "y": b["y"], "index": index, "none": None, "power": 2 + i}

    other, mine = eager.init(params), ours.init(params)
    for i in range(3):
        (mine, info), (other, what) = ours(mine, batch(i)), eager(other, batch(i))
        assert_close((mine, info), (other, what))
        assert mine.opt_state.lr == 0.1


# What is compiled anew --------------------------------------------------------------------


def scaled(params, batch):
    value = loss(params, batch)
    return value * params["table"][0, 0] if "table" in params else value


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("form", "size", "rows", "most"),
    [
        # a number of whole microbatches, then any
        ("scan", 12, [*range(26, 36), *range(38, 48)], 2),
        # one microbatch; of a single sample; of any number of samples
        pytest.param(
            *("unrolled", None, [*range(1, 21)], 3), marks=pytest.mark.given_up("recipes")
        ),
        # the first microbatch; one of ``size`` samples; one of any number; what applies them
        ("loop", 12, [*range(50, 60), *range(62, 72)], 4),
    ],
)
def test_twenty_sizes_are_a_handful_of_graphs(form, size, rows, most):
    """A second round adds none.

    (Nine numbers of samples in the tail are more than torch's limit.)
    """
    settings, graphs = counting()
    table = {"table": torch.ones(600_000, 2, dtype=torch.float64)} if form == "loop" else {}
    ours, eager = pair(scaled, pa.sgd(0.1), microbatch_size=size, compile=settings)
    state = ours.init(make_params() | table)
    for n in rows:
        batch = make_batch(n, n)
        assert ours.form(state, batch) == form
        new, info = ours(state, batch)
        if form != "loop":
            assert_close((new, info), eager(state, batch))
    made = len(graphs)
    assert made <= most
    for n in rows:
        ours(state, make_batch(0, n))
    assert len(graphs) == made


@pytest.mark.nightly
def test_twenty_sizes_of_a_whole_batch_are_a_handful_of_graphs():
    """One of a single sample, one of the number that came first, and one of any number."""
    settings, graphs = counting()
    ours, eager = pair(loss, pa.sgd(0.1), microbatch_size=None, compile=settings)
    state = ours.init(make_params())
    for n in range(1, 21):
        batch = make_batch(n, n)
        assert_close(ours(state, batch), eager(state, batch))
    made = len(graphs)
    assert made <= 3
    for n in range(1, 21):
        ours(state, make_batch(0, n))
    assert len(graphs) == made


@pytest.mark.nightly
def test_ragged_streams_and_other_states_add_no_graphs():
    """Three for the microbatches (some number of samples, one, any) and one that applies."""
    settings, graphs = counting()
    ours, eager = pair(
        loss,
        pa.sgd(WARMUP, momentum=0.9),
        nonfinite="skip",
        loss_scale=pa.dynamic_loss_scale(8.0, growth_interval=1),
        compile=settings,
    )
    mine = other = ours.init(make_params())
    sizes, made = [[2, 3, 1], [5, 4, 7], [1, 6, 2]], [0, 0]
    for turn in range(2):
        for i, rows in enumerate(sizes):
            windows = [ours.begin(mine), eager.begin(other)]
            for j, n in enumerate(rows):
                part = make_batch(i, n)
                if j == 1:
                    part["y"][0] = torch.nan
                triples = zip((ours, eager), (mine, other), windows, strict=True)
                windows = [step.update(state, window, part) for step, state, window in triples]
                assert_close(*windows)
            (mine, info), (other, what) = (
                ours.apply(mine, windows[0]),
                eager.apply(other, windows[1]),
            )
            assert_close((mine, info), (other, what))
            assert info.skipped == 1
        made[turn] = len(graphs)
    assert made[0] == made[1] <= 4


@pytest.mark.slow
def test_many_steps_of_one_loss_all_compile():
    """torch counts recompilations by the code of a function, up to a limit, here a small one."""
    settings, graphs = counting()
    state = pa.make_step(loss, pa.sgd(0.1)).init(make_params())
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(4):
            step = pa.make_step(loss, pa.sgd(0.1), compile=settings)
            step.apply(state, step.begin(state))  # the least that compiles
    assert len(graphs) == 4


class Switched(nn.Module):
    factor = 1.0

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(2).double()
        self.register_buffer("shift", torch.zeros(2).double())

    def forward(self, x):
        return self.norm(x) * (2.0 if self.training else 1.0) * self.factor + self.shift


@pytest.mark.slow
def test_what_a_loss_captures_may_change():
    """The next step sees it; compiled anew or not, nothing of the user's is taken for constant."""
    module = Switched().requires_grad_(False)
    held = {"number": 1.0, "tensor": torch.ones(2).double()}
    rebound = torch.ones(2).double()

    def loss(params, batch):
        out = module(batch["x"] @ params["w"] + params["b"]) * held["tensor"] * rebound
        return ((out - batch["y"]) ** 2).mean() * held["number"]

    ours, eager = pair(loss, pa.sgd(0.1), microbatch_size=None)
    state, batch = ours.init(make_params()), make_batch()

    def rebind():
        nonlocal rebound
        rebound = torch.full((2,), 3.0, dtype=torch.float64)

    changes = {
        "first": lambda: None,
        "eval": module.eval,
        "a tensor in place": lambda: held["tensor"].mul_(3),
        "a buffer in place": lambda: module.shift.add_(1),
        "a number": lambda: held.update(number=5.0),
        "a tensor": lambda: held.update(tensor=torch.full((2,), 0.5, dtype=torch.float64)),
        "a variable": rebind,
    }
    seen = []
    for name, change in changes.items():
        change()
        got, want = ours(state, batch), eager(state, batch)
        try:
            assert_close(got, want)
        except AssertionError as error:
            raise AssertionError(name) from error
        seen.append(got[1].loss.item())
    assert len(set(seen)) == len(changes)


# Where it runs ----------------------------------------------------------------------------


@pytest.mark.slow
def test_under_transforms_it_is_the_ordinary_step():
    settings, graphs = counting()
    ours, eager = pair(loss, pa.sgd(0.1), compile=settings)
    state, batch = ours.init(make_params()), make_batch()
    many = stacked([ours.init(make_params(i)) for i in range(2)])
    assert_close(*(torch.func.vmap(s, (0, None))(many, batch) for s in (ours, eager)))

    def after(step):
        return lambda params: loss(step(state._replace(params=params), batch)[0].params, batch)

    assert_close(*(torch.func.grad(after(s))(make_params()) for s in (ours, eager)))
    streamed = (partial(in_a_window, s, parts=[batch]) for s in (ours, eager))
    assert_close(*(torch.func.vmap(run)(many) for run in streamed))
    assert not graphs
    under = torch.compile(ours, fullgraph=True, backend="eager")
    assert_close(under(state, batch), eager(state, batch))
    assert not graphs


@pytest.mark.nightly
def test_autocast_around_a_compiled_step_is_seen_or_refused():
    """Without its cache a graph sees it; with it, it is refused as by the eager step."""
    ours, eager = pair(loss, pa.sgd(0.1), microbatch_size=None)
    state, batch = (
        mapped(lambda x: x.float() if x.is_floating_point() else x, tree)
        for tree in (ours.init(make_params()), make_batch())
    )
    state = state._replace(opt_state=ours.init(make_params()).opt_state)
    seen = []
    for on in (False, True, False):  # two graphs
        with torch.autocast("cpu", torch.bfloat16, enabled=on, cache_enabled=False):
            (_, info), (_, what) = ours(state, batch), eager(state, batch)
        seen.append(info.loss)
        assert_trees_bitwise_equal(info.loss, what.loss)
    assert seen[0] == seen[2] != seen[1]
    with torch.autocast("cpu", torch.bfloat16):
        for call in (
            lambda: ours(state, batch),
            lambda: ours.update(state, ours.begin(state), batch),
        ):
            with pytest.raises(RuntimeError, match="autocast for 'cpu' is enabled"):
                call()


@pytest.mark.given_up("recipes")
def test_the_form_can_be_read_off():
    ours, eager = pair(loss, pa.sgd(0.1))
    state = ours.init(make_params())
    forms = [ours.form(state, make_batch(0, n)) for n in (1, 2, 3, 4, 9)]
    assert forms == ["unrolled", "unrolled", "unrolled", "scan", "scan"]
    assert eager.form(state, make_batch()) == "eager"
    large = state._replace(params={"w": torch.empty(2**21 + 1), "b": torch.empty(1)})
    assert [ours.form(large, make_batch(0, n)) for n in (8, 9)] == ["unrolled", "loop"]
    medium = state._replace(params={"w": torch.empty(2**18 + 1), "b": torch.empty(1)})
    assert [ours.form(medium, make_batch(0, n)) for n in (8, 9)] == ["unrolled", "scan"]
