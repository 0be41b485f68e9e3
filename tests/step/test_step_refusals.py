"""What a step refuses, in words that name what came; the state is good for a step afterwards."""

import copy
import inspect
import pickle
from functools import partial

import optree
import pytest
import torch
from torch import nn

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from tests.refusals import PARAMS, Loss, make_batch, refused, saying, squares


pytestmark = [pytest.mark.faults, pytest.mark.promise("errors")]
BATCH = make_batch(4)
BUFFERS = {"n": torch.tensor([1.0, 2.0])}
ANOTHER = "A state of another configuration?"
OTHER_PARAMS = {"b": torch.tensor(1.0), "w": torch.ones(3)}
donations = pytest.mark.parametrize("donate", [False, True])


def with_buffers(params, batch, buffers):
    return squares(params, batch), {"n": buffers["n"] + 1}


def make(optimizer=None, loss=squares, **knobs):
    knobs = {"microbatch_size": 2} | knobs
    return pa.make_step(loss, optimizer or pa.sgd(0.1), **knobs)


def threading(buffers="sequential", **knobs):
    return make(loss=with_buffers, buffers=buffers, **knobs)


def usable(step, state, *args):
    """As if nothing had been: the step that a fresh state takes."""
    fresh = step.init(PARAMS, *args)
    assert_trees_bitwise_equal(state, fresh)
    assert_trees_bitwise_equal(step(state, BATCH), step(fresh, BATCH))


# make_step --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss_scale", [2.0**16, True, "dynamic", pa.dynamic_loss_scale, torch.tensor(8.0)]
)
def test_a_loss_scale_is_made_by_a_function(loss_scale):
    words = ("loss_scale is ", "dynamic_loss_scale()", "static_loss_scale(...)", "None")
    with refused(TypeError, *words):
        make(loss_scale=loss_scale)


@pytest.mark.parametrize("where", ["alone", "in a chain", "in a partition"])
@pytest.mark.parametrize("instance", [False, True])
def test_torchs_optimizers_go_through_from_torch(where, instance):
    cls = torch.optim.AdamW
    given = cls([nn.Parameter(torch.ones(2))], lr=0.1) if instance else cls
    with refused(TypeError, "torch's AdamW", "in place", "from_torch(AdamW, lr=...)"):
        if where == "in a chain":
            make(pa.chain(pa.clip_by_global_norm(1.0), given))
        elif where == "in a partition":
            make(pa.partition({"all": given}, lambda path: "all"))
        else:
            make(given)


@pytest.mark.parametrize(
    ("optimizer", "came"),
    [(pa.clip_by_global_norm(1.0), "a GradientMap"), (pa.sgd, "a function"), (0.1, "a float")],
)
def test_what_is_no_optimizer_is_refused_by_a_step(optimizer, came):
    with refused(TypeError, f"optimizer is {came}", "init(params)", "chain(*maps, optimizer)"):
        make(optimizer)


def test_a_policy_is_one():
    for takes in (make, partial(pa.value, squares)):
        with refused(TypeError, "policy is torch.bfloat16", "Policy(compute=...)"):
            takes(policy=torch.bfloat16)


@pytest.mark.parametrize("field", pa.Policy._fields)
@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, "bf16", True, 16])
def test_a_policy_holds_dtypes_from_its_construction_on(field, dtype):
    words = f"Policy({field}={dtype!r})", "floating-point dtype or None"
    with refused(TypeError, *words):
        pa.Policy(**{field: dtype})
    with refused(TypeError, *words):
        pa.Policy(*[dtype if field == own else None for own in pa.Policy._fields])
    replaced = pa.Policy()._replace(**{field: dtype})
    for takes in (make, partial(pa.value, squares)):
        with refused(TypeError, *words):
            takes(policy=replaced)


def test_a_policy_computes_in_one_way():
    with refused(ValueError, "compute=torch.bfloat16", "autocast=torch.float16", "one of the two"):
        pa.Policy(compute=torch.bfloat16, autocast=torch.float16)


def test_a_policy_is_copied_as_it_is():
    policy = pa.Policy(torch.float64, None, output=None, autocast=torch.bfloat16)
    assert policy == (torch.float64, None, None, torch.bfloat16)
    copies = copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))
    assert all(type(x) is pa.Policy and x == policy for x in copies)
    names = {"param": torch.float32, "compute": None, "output": torch.float32, "autocast": None}
    signature = inspect.signature(pa.Policy).parameters
    assert {name: x.default for name, x in signature.items()} == names


@pytest.mark.parametrize(
    ("knobs", "error", "words"),
    [
        ({"microbatch_size": 0}, ValueError, ["microbatch_size is 0", "at least 1"]),
        ({"microbatch_size": -1}, ValueError, ["microbatch_size is -1", "at least 1"]),
        ({"microbatch_size": 2.0}, TypeError, ["microbatch_size is 2.0", "int", "not the number"]),
        ({"microbatch_size": True}, TypeError, ["microbatch_size is True", "bool"]),
        ({"buffers": "pool"}, ValueError, ["buffers is 'pool'", "'sequential' or 'pooled'"]),
        ({"buffers": True}, ValueError, ["buffers is True", "'sequential' or 'pooled'"]),
        ({"reduction": "avg"}, ValueError, ["reduction is 'avg'", "'mean' or 'sum'"]),
        ({"nonfinite": "drop"}, ValueError, ["nonfinite is 'drop'", "'skip'"]),
        ({"engine": "jit"}, ValueError, ["engine is 'jit'", "'func' or 'autograd'"]),
        ({"aux_reduction": "avg"}, ValueError, ["aux_reduction is 'avg'", "'concat'", "'last'"]),
        ({"aux_reduction": {"a": "avg"}}, ValueError, ["aux_reduction is 'avg'", "'concat'"]),
    ],
)
def test_knobs_of_a_step_that_make_no_sense_are_refused(knobs, error, words):
    with refused(error, *words):
        make(**knobs)


# init -------------------------------------------------------------------------------------


def test_missing_buffers_are_refused():
    step = threading()
    for absent in ({}, {"buffers": None}, {"buffers": ()}):
        with refused(ValueError, "buffers='sequential'", "missing", "step.init(", given=PARAMS):
            step.init(PARAMS, **absent)


def test_unexpected_buffers_are_refused():
    words = ("make_step was not told", "'freeze'", "'sequential'", "'pooled'")
    with refused(ValueError, *words, given=(PARAMS, BUFFERS)):
        make().init(PARAMS, BUFFERS)


def test_a_buffer_that_is_no_tensor_is_named():
    with refused(TypeError, "buffers['count'] is a int", "tensor", given=PARAMS):
        threading().init(PARAMS, {"count": 1})


@pytest.mark.parametrize(
    ("params", "error", "words"),
    [
        ({}, ValueError, ["params has no leaves"]),
        ({"w": torch.ones(2).long()}, TypeError, ["params['w'] is torch.int64"]),
        ({"w": 1.0}, TypeError, ["params['w'] is a float", "expected a tensor"]),
        (nn.Linear(2, 1), TypeError, ["params is a Linear", "named_parameters()"]),
    ],
)
def test_params_are_floating_point_tensors(params, error, words):
    with refused(error, *words):
        make().init(params)


@pytest.mark.parametrize("seed", [1.0, None, "1", True])
def test_a_seed_is_an_int(seed):
    with refused(TypeError, f"seed is {seed!r}", "expected an int"):
        make().init(PARAMS, seed=seed)


# The state --------------------------------------------------------------------------------


def entries(step, window):
    """Everything that takes a state."""
    return [
        lambda state: step(state, BATCH),
        lambda state: step.begin(state),
        lambda state: step.update(state, window, BATCH),
        lambda state: step.apply(state, window),
    ]


@donations
@pytest.mark.parametrize(
    ("pick", "came"),
    [
        (lambda step, state: make()(state, BATCH), "a tuple"),  # (state, info)
        (lambda step, state: step.begin(state), "a StepWindow"),
        (lambda step, state: state.opt_state, "a SGDState"),
        (lambda step, state: state.params, "a dict"),
        (lambda step, state: tuple(state), "a tuple"),
        (lambda step, state: None, "a NoneType"),
    ],
    ids=["state and info", "window", "opt_state", "params", "plain tuple", "None"],
)
def test_what_is_no_train_state_is_refused(pick, came, donate):
    loss = Loss(squares)
    step = make(loss=loss, donate=donate)
    state = step.init(PARAMS)
    window, wrong = step.begin(state), pick(step, state)
    for call in entries(step, window):
        words = (f"state is {came}", "expects the TrainState", "init")
        with refused(TypeError, *words, given=(wrong, window, BATCH), loss=loss):
            call(wrong)
    usable(make(), state)


@donations
def test_a_state_with_or_without_a_loss_scale_belongs_to_a_step_like_it(donate):
    plain, scaled = (make(loss_scale=s, donate=donate) for s in (None, pa.dynamic_loss_scale()))
    for step, state, word in (
        (plain, scaled.init(PARAMS), "without"),
        (scaled, plain.init(PARAMS), "with"),
    ):
        window = step.begin(step.init(PARAMS))
        for call in entries(step, window):
            words = ("state.loss_scale is ", f"made {word} a loss scale", ANOTHER)
            with refused(ValueError, *words, given=(state, window)):
                call(state)
    assert plain(plain.init(PARAMS), BATCH)[1].applied


@pytest.mark.parametrize("noise", [False, True])
def test_a_window_that_looked_at_other_norms_is_refused(noise):
    ours, theirs = make(noise=noise), make(noise=not noise)
    state = ours.init(PARAMS)
    window = theirs.begin(state)
    for call in (lambda: ours.update(state, window, BATCH), lambda: ours.apply(state, window)):
        with refused(ValueError, f"expected squares={noise}", "begin", given=(state, window)):
            call()


@donations
def test_a_state_with_or_without_buffers_belongs_to_a_step_like_it(donate):
    plain, threaded = make(donate=donate), threading(donate=donate)
    without, held = plain.init(PARAMS), threaded.init(PARAMS, BUFFERS)
    for call in entries(threaded, threaded.begin(held)):
        with refused(ValueError, "buffers='sequential'", "missing", given=(without, held)):
            call(without)
    for call in entries(plain, plain.begin(without)):
        with refused(ValueError, "buffers came", "was not told", given=(without, held)):
            call(held)
    usable(make(), without)
    usable(threading(), held, BUFFERS)


@pytest.mark.parametrize("key", [7, None, torch.tensor(1), torch.zeros(3, dtype=torch.int64)])
def test_what_is_no_key_is_refused(key):
    step = make()
    state = step.init(PARAMS)
    with refused(TypeError, "state.key is ", "expected a key", "key(seed)"):
        step(state._replace(key=key), BATCH)
    usable(step, state)


SGD, MOMENTUM, ADAM = pa.sgd(0.1), pa.sgd(0.1, momentum=0.9), pa.adam(0.1)


@donations
@pytest.mark.parametrize(
    ("optimizer", "other", "error", "words"),
    [
        (ADAM, SGD, TypeError, ["a SGDState", "AdamState"]),
        (SGD, ADAM, TypeError, ["a AdamState", "SGDState"]),
        (MOMENTUM, SGD, ValueError, ["momentum['b'] is missing"]),
        (SGD, pa.sgd(pa.constant(0.1)), ValueError, ["state.lr is ()", "lr=0.1"]),
        (pa.sgd(pa.constant(0.1)), SGD, ValueError, ["state.lr is tensor(0.1", "schedule"]),
        (pa.chain(pa.clip_by_global_norm(1.0), SGD), SGD, TypeError, ["a chain of 2 parts"]),
        (SGD, pa.chain(pa.clip_by_global_norm(1.0), SGD), TypeError, ["a tuple", "SGDState"]),
        (pa.partition({"a": SGD}, lambda p: "a"), SGD, TypeError, ["partition", "['a']"]),
        (
            pa.partition({"a": SGD}, lambda p: "a"),
            pa.partition({"b": SGD}, lambda p: "b"),
            TypeError,
            ["holds ['b']", "['a']"],
        ),
        (pa.from_torch(torch.optim.RMSprop), SGD, TypeError, ["from_torch(RMSprop)", "TorchState"]),
        (pa.adam(0.1, amsgrad=True), ADAM, ValueError, ["max_exp_avg_sq['b'] is missing"]),
    ],
)
def test_the_state_of_another_optimizer_is_refused(optimizer, other, error, words, donate):
    step = make(optimizer, donate=donate)
    state, good = make(other).init(PARAMS), step.init(PARAMS)
    mixed = good._replace(opt_state=state.opt_state)
    with refused(error, *words, given=(state, good, BATCH)):
        step(mixed, BATCH)
    window = step.update(good, step.begin(good), BATCH)
    with refused(error, *words, given=(state, good, BATCH)):
        step.apply(mixed, window)
    usable(make(optimizer), good)


@donations
@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM, pa.chain(pa.clip_by_global_norm(1.0), ADAM)])
@pytest.mark.parametrize(
    ("params", "words"),
    [
        (OTHER_PARAMS, ["['w'] has shape (3,)", "params has (2,)"]),
        ({"w": torch.ones(2)}, ["['b'] is missing", "(1 leaves came, 2 were expected)"]),
    ],
)
def test_the_optimizer_state_of_another_model_is_refused(optimizer, params, words, donate):
    step = make(optimizer, donate=donate)
    good, other = step.init(PARAMS), step.init(params)
    mixed = good._replace(opt_state=other.opt_state)
    words = [*words, "belongs to the params that it was made from by init"]
    with refused(ValueError, *words, given=(good, other, BATCH)):
        step(mixed, BATCH)
    usable(make(optimizer), good)


@donations
def test_the_state_of_another_model_is_refused(donate):
    """The module knows its names and shapes."""
    fn = pa.functional(nn.Linear(2, 1))
    wrapped = pa.functional(nn.Sequential(nn.Linear(2, 1)))
    wider = pa.functional(nn.Linear(3, 1))
    step = make(loss=lambda p, b: (fn.apply(p, (), b["x"])[0] ** 2).mean(), donate=donate)
    for other, words in (
        (wrapped, ["params['0.weight'] is no parameter", "'weight'", "prefix '0.'"]),
        (wider, ["params['weight'] has shape (1, 3)", "(1, 2)", "another model"]),
    ):
        state = step.init(other.params)
        for call in entries(step, step.begin(state))[:1]:
            with refused(ValueError, *words, given=(state, BATCH)):
                call(state)
        assert not any(x.isnan().any() for x in optree.tree_leaves(state.params))
    assert step(step.init(fn.params), BATCH)[1].applied


# The window -------------------------------------------------------------------------------


@donations
@pytest.mark.parametrize(
    ("wrong", "came"),
    [
        (lambda window: window.accum, "a AccumState"),
        (lambda window: (window, {"aux": 1}), "a tuple"),  # what update returns with has_aux
        (lambda window: None, "a NoneType"),
    ],
    ids=["accumulator", "window and aux", "None"],
)
def test_what_is_no_window_is_refused(wrong, came, donate):
    loss = Loss(squares)
    step = make(loss=loss, donate=donate)
    state = step.init(PARAMS)
    window = step.begin(state)
    given = wrong(window)
    for call in (step.update, step.apply):
        with refused(TypeError, f"the window is {came}", "StepWindow", given=state, loss=loss):
            call(state, given, *([BATCH] if call is step.update else []))
    usable(make(), state)
    assert step.update(state, window, BATCH).accum.microbatches == 1


@donations
def test_the_window_of_another_model_is_refused(donate):
    step = make(donate=donate)
    state = step.init(PARAMS)
    window = step.begin(step.init(OTHER_PARAMS))
    words = ("grads['w'] has shape (3,)", "(2,)", "belongs to the params")
    with refused(ValueError, *words, given=(state, window, BATCH)):
        step.update(state, window, BATCH)
    with refused(ValueError, *words, given=(state, window, BATCH)):
        step.apply(state, window)
    usable(make(), state)


NORM = {"running_mean": torch.zeros(2), "running_var": torch.ones(2)}


@donations
@pytest.mark.parametrize(
    ("mine", "other"),
    [
        ("sequential", None),
        (None, "sequential"),
        ("pooled", "sequential"),
        ("sequential", "pooled"),
    ],
)
def test_the_window_of_another_kind_of_buffers_is_refused(mine, other, donate):
    """A pooled window holds moments; without them running statistics would go wrong in silence."""

    def loss(params, batch, **named):
        value = squares(params, batch)
        return (value, named["buffers"]) if named else value

    step, stranger = (make(loss=loss, buffers=b, donate=donate) for b in (mine, other))
    state = step.init(PARAMS, NORM if mine else None)
    window = stranger.begin(stranger.init(PARAMS, NORM if other else None))
    with refused((TypeError, ValueError), "window", "buffers", given=(state, window, BATCH)):
        step.update(state, window, BATCH)
    with refused((TypeError, ValueError), "window", "buffers", given=(state, window)):
        step.apply(state, window)


# The batch --------------------------------------------------------------------------------


@donations
def test_keys_need_rows(donate):
    def loss(params, batch, keys):
        raise AssertionError

    step = make(loss=loss, keys=True, microbatch_size=None, donate=donate)
    state = step.init(PARAMS)
    window = step.begin(state)
    for batch in ({}, {"x": 1.0}, None):
        with refused(ValueError, "no tensor", "rows", given=(state, window)):
            step(state, batch)
        with refused(ValueError, "no tensor", "rows", given=(state, window)):
            step.update(state, window, batch)


@donations
@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"x": torch.tensor(1.0)}, ["['x'] is a 0-d tensor", "one row per sample"]),
        ({"x": torch.ones(3, 2), "y": torch.ones(2)}, ["['y'] has 2 rows", "['x'] has 3"]),
    ],
)
def test_every_tensor_of_a_batch_has_its_rows(batch, words, donate):
    loss = Loss(squares)
    step = make(loss=loss, donate=donate)
    state = step.init(PARAMS)
    window = step.begin(state)
    with refused(ValueError, *words, given=(state, window, batch), loss=loss):
        step(state, batch)
    usable(make(), state)


@donations
@pytest.mark.parametrize("tensors", [(1.0,), ([[0.0], [1.0]], [0.0])])
def test_a_microbatch_of_a_stream_needs_rows_for_a_mean_over_them(tensors, donate):
    """Which only the loss can tell: it has been called, and nothing was lost."""
    batch = [*map(torch.tensor, tensors)]
    step = make(loss=lambda p, b: p["w"].sum(), donate=donate)
    state = step.init(PARAMS)
    window = step.begin(state)
    with refused(ValueError, "one row per sample", given=(state, window, batch)):
        step.update(state, window, batch)
    broken = make(loss=lambda p, b: (p["w"] * torch.ones(7)).sum(), donate=donate)
    with pytest.raises(RuntimeError) as caught:
        broken.update(state, window, batch)
    assert "one row per sample" in "".join(caught.value.__notes__)
    usable(make(), state)


# What a loss returns ----------------------------------------------------------------------


def shapes_of_return():
    value, n = squares, BUFFERS
    return {
        "a scalar": (False, lambda p, b: value(p, b), "a Tensor", "(loss, new_buffers)"),
        "Weighted": (
            False,
            lambda p, b: pa.Weighted(value(p, b), 1.0),
            "a Weighted",
            "(loss, new_buffers)",
        ),
        "three": (False, lambda p, b: (value(p, b), n, 1), "a tuple", "(loss, new_buffers)"),
        "no aux": (True, lambda p, b: (value(p, b), n), "a tuple", "(loss, (new_buffers, aux))"),
        "None": (True, lambda p, b: None, "a NoneType", "(loss, (new_buffers, aux))"),
    }


@donations
@pytest.mark.parametrize("wrong", shapes_of_return().values(), ids=shapes_of_return())
def test_with_buffers_a_loss_returns_a_pair(wrong, donate):
    has_aux, returned, came, expected = wrong
    step = make(
        loss=lambda p, b, buffers: returned(p, b),
        buffers="sequential",
        has_aux=has_aux,
        donate=donate,
    )
    state = step.init(PARAMS, BUFFERS)
    window = step.begin(state)
    words = (f"the loss returned {came}", f"has_aux={has_aux}", expected)
    with refused(TypeError, *words, given=(state, window, BATCH)):
        step(state, BATCH)
    with refused(TypeError, *words, given=(state, window, BATCH)):
        step.update(state, window, BATCH)
    usable(threading(), state, BUFFERS)


@donations
@pytest.mark.parametrize(
    ("new", "error", "words"),
    [
        ({}, ValueError, ["new_buffers['n'] is missing"]),
        ({"n": BUFFERS["n"], "m": BUFFERS["n"]}, ValueError, ["new_buffers['m'] is not in"]),
        ({"n": torch.ones(3)}, ValueError, ["new_buffers['n'] has shape (3,)", "(2,)"]),
        ({"n": torch.ones(2).long()}, ValueError, ["new_buffers['n'] is torch.int64", "float32"]),
        ({"n": 1.0}, TypeError, ["new_buffers['n'] is a float", "tensor"]),
    ],
)
def test_new_buffers_of_another_kind_are_refused(new, error, words, donate):
    step = make(
        loss=lambda p, b, buffers: (squares(p, b), new), buffers="sequential", donate=donate
    )
    state = step.init(PARAMS, BUFFERS)
    window = step.begin(state)
    with refused(error, *words, "With buffers, aux is", given=(state, window, BATCH)):
        step(state, BATCH)
    with refused(error, *words, "With buffers, aux is", given=(state, window, BATCH)):
        step.update(state, window, BATCH)
    usable(threading(), state, BUFFERS)


@donations
@pytest.mark.parametrize(
    ("aux", "how", "error", "words"),
    [
        (torch.tensor(1.0), "concat", ValueError, ["aux has shape ()", "'concat'", "'sum'"]),
        ({"a": 1.0}, "concat", ValueError, ["aux['a'] is a float", "aux_reduction"]),
        ({"a": "word"}, "sum", TypeError, ["aux['a'] is a str", "'last'"]),
        ({"a": torch.ones(2)}, {"b": "sum"}, ValueError, ["is no prefix of the aux"]),
    ],
)
def test_aux_that_cannot_be_reduced_is_refused(aux, how, error, words, donate):
    step = make(
        loss=lambda p, b: (squares(p, b), aux), has_aux=True, aux_reduction=how, donate=donate
    )
    state = step.init(PARAMS)
    with refused(error, *words, given=(state, BATCH)):
        step(state, BATCH)
    usable(make(), state)


@donations
def test_aux_is_announced(donate):
    """Returned without has_aux; promised and not returned; and of a batch without rows."""
    state = make().init(PARAMS)
    unannounced = make(loss=lambda p, b: (squares(p, b), b["x"]), donate=donate)
    with refused(TypeError, "a tuple of 2", "has_aux=True", given=state):
        unannounced(state, BATCH)
    missing = make(has_aux=True, donate=donate)
    with refused(TypeError, "has_aux=True", "(loss, aux)", given=state):
        missing(state, BATCH)
    step = make(loss=lambda p, b: (squares(p, b), b["x"]), has_aux=True, donate=donate)
    with refused(ValueError, "no rows", "has_aux=True", given=state):
        step(state, make_batch(0))
    usable(make(), state)


# Where it runs ----------------------------------------------------------------------------


@donations
def test_raise_names_the_microbatch(donate):
    step = make(nonfinite="raise", donate=donate)
    state, bad = step.init(PARAMS), make_batch(4)
    bad["x"][3] = torch.nan
    with refused(FloatingPointError, "loss of microbatch 1 (from row 2)", given=(state, bad)):
        step(state, bad)
    window = step.update(state, step.begin(state), BATCH)
    with refused(FloatingPointError, "loss of microbatch 1:", given=(state, window, bad)):
        step.update(state, window, bad)
    assert step.apply(state, window)[1].applied


def test_an_autocast_cache_around_a_step_is_refused():
    step = make()
    state = step.init(PARAMS)
    window = step.begin(state)
    with torch.autocast("cpu", dtype=torch.bfloat16), unchanged(state, window):
        for call in entries(step, window)[:3]:
            with saying(RuntimeError, "autocast for 'cpu' is open", "inside the loss function"):
                call(state)
    usable(step, state)
