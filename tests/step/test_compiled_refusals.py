"""What a step that compiles itself refuses, and what becomes of a state that it was given up to.

What the eager step refuses too is said in its words, to the letter; what only the compiler minds is
a ``CompileError`` about the user's own line.
"""

import logging
from functools import partial

import optree
import pytest
import torch
from torch import nn

import pureaccum as pa
from pureaccum._base.refusals import CompileError
from pureaccum._base.states import Donated, Spoiled
from pureaccum._core.batches import read_batch
from pureaccum._step.recipes import Shapes, has_cpp_wrapper, recipe_for
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from tests.refusals import PARAMS, make_batch, refused, saying, squares
from tests.step.problems import EAGER, leaves, pair
from tests.tables import every_night


pytestmark = [
    pytest.mark.faults,
    pytest.mark.promise("compiled"),
    pytest.mark.promise("errors"),
    pytest.mark.table,
]
IN_PLACE = {"backend": "aot_eager"}


def make(optimizer=None, loss=squares, **options):
    options = {"microbatch_size": 2, "compile": EAGER} | options
    return pa.make_step(loss, optimizer or pa.sgd(0.1), **options)


# make_step --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        *(
            (
                {"compile": it},
                TypeError,
                ["compile is ", "expected True, False, or the arguments of torch.compile"],
            )
            for it in ("yes", 1, None, EAGER.items())
        ),
        (
            {"engine": "autograd", "compile": True},
            ValueError,
            ["engine='autograd' does not work with compile", "leave compile out"],
        ),
        (
            {"nonfinite": "raise", "compile": True},
            ValueError,
            ["nonfinite='raise' does not work with compile", "'skip' or 'propagate'"],
        ),
    ],
)
def test_what_does_not_go_with_compile_is_refused(options, error, words):
    with refused(error, *words):
        make(**options)


# What only the compiler minds -------------------------------------------------------------

KEPT = []
LOG = logging.getLogger("mine")


def branches(params, batch):
    value = squares(params, batch)
    return value * 2 if value > 0 else value


def prints(params, batch):
    value = squares(params, batch)
    print("the loss")
    return value


def logs(params, batch):
    value = squares(params, batch)
    LOG.info("the loss")
    return value


def gets_a_logger(params, batch):
    logging.getLogger("mine")
    return squares(params, batch)


def lists(params, batch):
    value = squares(params, batch)
    batch["x"].tolist()
    return value


def opens(params, batch):
    value = squares(params, batch)
    with open(__file__):
        return value


def keeps(params, batch):
    value = squares(params, batch)
    KEPT.append(value.detach())
    return value


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("loss", "line", "why"),
    [
        (branches, "if value > 0", "torch.where, which computes both sides"),
        (lists, 'batch["x"].tolist()', "Keep the value a tensor"),
        (prints, 'print("the loss")', "Return values to print as aux"),
        (logs, 'LOG.info("the loss")', "Return values to log as aux"),
        (gets_a_logger, 'logging.getLogger("mine")', ""),
        (opens, "with open(__file__):", "a graph only computes on tensors"),
        (keeps, "KEPT.append(value.detach())", "Return the value as aux"),
    ],
)
def test_the_line_that_does_not_compile_is_named(loss, line, why):
    """In the first sentence; the compiler's own words follow. Without it the step runs."""
    step = make(loss=loss, nonfinite="skip", donate=True)
    state, batch = step.init(PARAMS), make_batch(6)
    with unchanged(state, batch), pytest.raises(CompileError) as caught:
        step(state, batch)
    first, below = str(caught.value).split("\n\n", 1)
    assert isinstance(caught.value, RuntimeError)
    assert first.startswith("cannot compile `")
    assert line in first
    assert f'File "{__file__}"' in first
    assert f"in {loss.__name__})" in first
    assert why in first
    assert below
    assert make(loss=loss, compile=False)(state, batch)[1].applied


def test_an_optimizer_of_torch_is_refused_in_a_graph_of_the_users_own():
    """In the words in which they refuse transforms. A step that compiles itself leaves it out."""
    optimizer = pa.from_torch(torch.optim.RMSprop, lr=0.1)
    grads = {"w": torch.ones(2)}
    state = optimizer.init(grads)
    with pytest.raises(Exception, match=r"from_torch\(RMSprop\) cannot run under a torch.func"):
        torch.compile(optimizer.apply, fullgraph=True, backend="eager")(grads, state, grads)


# What the eager step refuses too ----------------------------------------------------------


class OwnError(ValueError):
    pass


def raises(params, batch):
    if batch["x"].shape[1] == 2:
        raise OwnError("my own words")
    return squares(params, batch)


NORM = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
FN = pa.functional(NORM)


def normed(params, batch, buffers):
    out, new = FN.apply(params, buffers, batch["x"])
    return (out**2).mean(), new


SCALED = {"loss_scale": pa.dynamic_loss_scale()}
AUX = {"has_aux": True}


def same(loss=squares, change=lambda s, b: (s, b), **options):
    """How both steps are made, and what both are given in place of a state and a batch."""
    return {"loss": loss, **options}, change


def with_x(p, b):
    return squares(p, b), b["x"]


SAME = {
    "the loss's own error": same(raises),
    "a loss of another shape": same(lambda p, b: b["x"] @ p["w"]),
    "a loss that is no tensor": same(lambda p, b: 1.0),
    "aux that nobody announced": same(with_x),
    "aux that is missing": same(**AUX),
    "aux that cannot be joined": same(lambda p, b: (squares(p, b), {"a": p["b"]}), **AUX),
    "shapes that do not fit": same(lambda p, b: (b["x"] @ p["w"][:1]).sum()),
    "no rows, with aux": same(with_x, lambda s, b: (s, make_batch(0)), **AUX),
    "no state": same(change=lambda s, b: (s.params, b)),
    "parameters that are no tensors": same(
        change=lambda s, b: (s._replace(params={"w": 1.0, "b": 2.0}), b)
    ),
    "a key that is none": same(
        lambda p, b, keys: squares(p, b),
        lambda s, b: (s._replace(key=torch.tensor(1)), b),
        keys=True,
    ),
    "a loss scale too many": same(change=lambda s, b: (make(**SCALED).init(PARAMS), b)),
    "another optimizer's state": same(
        change=lambda s, b: (s._replace(opt_state=pa.adam(0.1).init(PARAMS)), b)
    ),
    "rows that disagree": same(change=lambda s, b: (s, b | {"y": torch.ones(3)})),
    "a batch of an array": same(change=lambda s, b: (s, b | {"y": b["x"].numpy()})),
    "a batch without a tensor": same(change=lambda s, b: (s, {"x": 1.0})),
    "a batch of 0-d tensors": same(change=lambda s, b: (s, {"x": torch.tensor(1.0)})),
}
# With aux, and of a loss that runs, graphs are made before anything is refused: that takes seconds.
LATE = {"aux that cannot be joined", "aux that is missing", "aux that nobody announced"}


@pytest.mark.slow
@pytest.mark.parametrize("name", every_night(SAME, but=SAME.keys() - LATE))
def test_errors_have_the_words_of_the_eager_step(name):
    """And a state that was to be given up is as good as before."""
    options, change = SAME[name]
    ours, eager = (make(**options, donate=True, compile=c) for c in (EAGER, False))
    state, batch = change(ours.init(PARAMS), make_batch(6))
    said = []
    for step in (ours, eager):
        with unchanged(batch), pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
            step(state, batch)
        said.append((caught.type, str(caught.value)))
        assert not any(isinstance(x, (Donated, Spoiled)) for x in leaves(state))
    assert said[0] == said[1]


@pytest.mark.nightly
def test_a_batch_norm_that_is_given_one_row_has_the_words_of_the_eager_step():
    """After other numbers of samples have been compiled."""
    said = []
    for compile in (EAGER, False):
        step = make(loss=normed, buffers="sequential", microbatch_size=None, compile=compile)
        state = step.init(FN.params, FN.buffers)
        step(state, make_batch(3))
        with (
            unchanged(state),
            pytest.raises(ValueError, match="more than 1 value per channel") as e,
        ):
            step(state, make_batch(1))
        said.append(str(e.value))
    assert said[0] == said[1]


STATISTICS = {"running_mean": torch.zeros(2), "running_var": torch.ones(2)}


@pytest.mark.parametrize(("mine", "other"), [("pooled", "sequential"), ("sequential", "pooled")])
def test_a_window_of_another_kind_of_buffers_is_refused_by_a_compiled_step(mine, other):
    """Inside a graph no structures are compared."""

    def loss(params, batch, buffers):
        return squares(params, batch), buffers

    step, stranger = (make(loss=loss, buffers=b, donate=True) for b in (mine, other))
    state = step.init(PARAMS, STATISTICS)
    window = stranger.begin(state)
    words = ("window.buffers does not have the structure", f"buffers={mine!r}")
    with saying(ValueError, *words):
        step.apply(state, window)
    with saying(ValueError, *words):
        step.update(state, window, make_batch())


# Donation ---------------------------------------------------------------------------------


TABLE = 200  # samples of 2000: 1.6 MB; where gradients are below 1 MiB nothing is in place


def tabled(params, batch):
    value = squares(params, batch)
    return value * (1 + params["table"][0].sum())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "rows"),
    [
        pytest.param("unrolled", 4, marks=pytest.mark.given_up("recipes")),
        pytest.param("scan", 10, marks=pytest.mark.promise("donation")),
    ],
)
def test_a_donated_state_is_written_to_in_place(form, rows):
    """Memory stays where it is, numbers without dimensions are right, old names are gone."""
    optimizer = pa.chain(pa.clip_by_global_norm(1.0), pa.adamw(2.0**-3))
    scaling = pa.dynamic_loss_scale(8.0, growth_interval=1)
    step, eager = pair(tabled, optimizer, donate=True, compile=IN_PLACE, loss_scale=scaling)
    params = PARAMS | {"table": torch.zeros(TABLE, 2000)}
    state, other = step.init(params), eager.init(params)
    assert step.form(state, make_batch(rows)) == form
    for i in range(3):
        batch = make_batch(rows)
        if i == 1:
            batch["x"][-1] = torch.nan
        at = [x.data_ptr() for x in leaves(state) if x.dim()]
        old = leaves(state)
        state, info = step(state, batch)
        other, _ = eager(other, batch)
        assert all(type(x) is Donated for x in old)
        assert [x.data_ptr() for x in leaves(state) if x.dim()] == at
        for x, y in zip(leaves(state), leaves(other), strict=True):
            # float32, three steps of a few operations each, on numbers around one
            torch.testing.assert_close(x, y, rtol=2**-18, atol=2**-18)
        assert state.opt_state[1].lr == 2.0**-3
        assert info.applied == (i != 1)
    assert (state.attempts.item(), state.applied.item()) == (3, 2)
    with pytest.raises(RuntimeError, match="given up with donate=True"):
        old[0] + 1


def tied(params, batch):
    return ((batch["x"] @ params["a"] @ params["b"].T) ** 2).mean()


@pytest.mark.nightly
@pytest.mark.promise("donation")
def test_tied_leaves_are_not_written_to_twice():
    step, eager = pair(tied, pa.sgd(0.25, momentum=0.5), donate=True)
    w = torch.zeros(2, 2**17)  # large enough to be written to in place, were it not tied
    w[:, :2] = torch.tensor([[1.0, 2.0], [0.0, 1.0]])
    new, other = step.init({"a": w, "b": w}), eager.init({"a": w, "b": w})
    shared = w.clone()
    new = new._replace(params={"a": shared, "b": shared})
    for _ in range(2):
        (new, _), (other, _) = step(new, make_batch()), eager(other, make_batch())
        torch.testing.assert_close(new.params, other.params, rtol=2**-18, atol=2**-18)
    assert type(shared) is Donated


@pytest.mark.nightly
@pytest.mark.promise("purity")
def test_without_donation_no_memory_is_shared():
    step = make(pa.sgd(0.1, momentum=0.5), compile=IN_PLACE, **SCALED)
    state, batch = step.init(PARAMS), make_batch(7)
    with unchanged(state, batch):
        new, _ = step(state, batch)
        window = step.begin(state)
        later = step.update(state, window, batch)
        applied, _ = step.apply(state, later)
    given = [x.untyped_storage().data_ptr() for x in leaves((state, batch))]
    for tree in (new, applied, (window, later)):
        held = [x.untyped_storage().data_ptr() for x in leaves(tree)]
        assert len(set(held)) == len(held)
        assert not set(held) & set(given)


FAILING = []


def failing(graph, inputs):
    """A graph that fails in the middle, while it runs."""

    def run(*args):
        out = graph.forward(*args)
        if FAILING:
            raise MemoryError("no memory left")
        return out

    return run


@pytest.mark.nightly
@pytest.mark.promise("donation")
def test_only_a_graph_that_failed_while_it_ran_spoils_a_window():
    step = make(donate=True, loss=raises, compile={"backend": failing})
    good = make(donate=True, compile={"backend": failing})
    state, batch = step.init(PARAMS), make_batch()
    window = step.begin(state)
    copy = optree.tree_map(torch.clone, window, namespace="pureaccum")
    with pytest.raises(OwnError, match="my own words"):
        step.update(state, window, batch)
    assert_trees_bitwise_equal(window, copy)
    window = good.update(state, window, batch)
    FAILING.append(True)
    try:
        with unchanged(state), pytest.raises(MemoryError):
            good.update(state, window, batch)
    finally:
        FAILING.clear()
    assert all(type(x) is Spoiled for x in leaves(window))
    with pytest.raises(RuntimeError, match="failed in the middle"):
        good.apply(state, window)
    assert good(state, batch)[1].applied


@pytest.mark.nightly
@pytest.mark.promise("donation")
def test_a_donated_window_is_given_up():
    step = make(donate=True, compile=IN_PLACE)
    state = step.init(PARAMS)
    window = step.begin(state)
    new = step.update(state, window, make_batch())
    assert all(type(x) is Donated for x in leaves(window))
    assert not any(isinstance(x, Donated) for x in leaves(state))
    last, info = step.apply(state, new)
    assert all(type(x) is Donated for x in leaves((new, state)))
    assert info.applied
    for call in (partial(step, state), partial(step.update, last, window)):
        with pytest.raises(RuntimeError, match="given up with donate=True"):
            call(make_batch())


# What inductor can build ------------------------------------------------------------------


@pytest.mark.mechanism
@pytest.mark.parametrize(
    ("device", "toolkit", "wraps"),
    [
        ("cpu", None, True),
        ("cuda", "/usr/local/cuda", True),
        ("cuda", None, False),
        ("meta", "/usr/local/cuda", False),
    ],
)
def test_a_wrapper_in_cpp_is_asked_for_where_it_can_be_built(device, toolkit, wraps):
    """For CUDA that takes a toolkit, which does not come with torch."""
    assert has_cpp_wrapper(device, lambda: toolkit) == wraps


@pytest.mark.mechanism
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_device_of_the_state_decides_about_the_wrapper(device):
    step = make(compile=False, microbatch_size=None)
    plan = step.update.args[0]
    state = optree.tree_map(lambda x: x.to(device), step.init(PARAMS), namespace="pureaccum")
    recipe = recipe_for(plan, state, read_batch(make_batch()), Shapes({}, {}, True))
    assert recipe.cpp == has_cpp_wrapper(device) == (device == "cpu")
