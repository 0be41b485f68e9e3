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
from tests.exactly import but_checked
from tests.refusals import PARAMS, Loss, make_batch, refused, saying, squares


pytestmark = [pytest.mark.faults, pytest.mark.promise("errors"), pytest.mark.table]
BATCH = make_batch(4)
BUFFERS = {"n": torch.tensor([1.0, 2.0])}
OTHER_PARAMS = {"b": torch.tensor(1.0), "w": torch.ones(3)}
donations = pytest.mark.parametrize("donate", [False, True])


def with_buffers(params, batch, buffers):
    return squares(params, batch), {"n": buffers["n"] + 1}


def make(optimizer=None, loss=squares, **options):
    options = {"microbatch_size": 2} | options
    return pa.make_step(loss, optimizer or pa.sgd(0.1), **options)


def threading(buffers="sequential", **options):
    return make(loss=with_buffers, buffers=buffers, **options)


def usable(step, state, *args):
    """As if nothing had been: the step that a fresh state takes."""
    fresh = step.init(PARAMS, *args)
    assert_trees_bitwise_equal(state, fresh)
    assert_trees_bitwise_equal(*(but_checked(step(each, BATCH)) for each in (state, fresh)))


def cases(table):
    """One for each row: what is called, the error, and its words."""
    return pytest.mark.parametrize(
        ("call", "error", "words"), [pytest.param(c, e, w, id=w[0]) for c, e, *w in table]
    )


# make_step and init ------------------------------------------------------------------------


def made():
    """Options that make no sense, losses and optimizers that are none."""
    for scale in (2.0**16, True, "dynamic", pa.dynamic_loss_scale, torch.tensor(8.0)):
        words = "loss_scale is ", "dynamic_loss_scale()", "static_loss_scale(...)", "None"
        yield partial(make, loss_scale=scale), TypeError, *words
    clip, cls = pa.clip_by_global_norm(1.0), torch.optim.AdamW
    for adamw in (cls, cls([nn.Parameter(torch.ones(2))], lr=0.1)):
        words = "torch's AdamW", "in place", "from_torch(AdamW, lr=...)"
        yield partial(make, adamw), TypeError, *words
        yield lambda it=adamw: make(pa.chain(clip, it)), TypeError, *words
        yield lambda it=adamw: make(pa.partition({"all": it}, lambda _: "all")), TypeError, *words
    for optimizer, came in ((clip, "a GradientMap"), (0.1, "a float")):
        words = f"optimizer is {came}", "init(params)", "chain(*maps, optimizer)"
        yield partial(make, optimizer), TypeError, *words
    words = "loss_fn is a module, Linear", "fn.apply(params", "functional(module)"
    yield partial(make, loss=nn.Linear(2, 1)), TypeError, *words
    for takes in (make, partial(pa.value, squares)):
        words = "policy is torch.bfloat16", "Policy(compute=...)"
        yield partial(takes, policy=torch.bfloat16), TypeError, *words
    words = "compute=torch.bfloat16", "autocast=torch.float16", "one of the two"
    both = {"compute": torch.bfloat16, "autocast": torch.float16}
    yield partial(pa.Policy, **both), ValueError, *words
    for option, value, error, *words in (
        ("microbatch_size", 0, ValueError, "at least 1"),
        ("microbatch_size", -1, ValueError, "at least 1"),
        ("microbatch_size", 2.0, TypeError, "int", "not the number"),
        ("microbatch_size", True, TypeError, "bool"),
        ("buffers", "pool", ValueError, "'sequential' or 'pooled'"),
        ("buffers", True, ValueError, "'sequential' or 'pooled'"),
        ("reduction", "avg", ValueError, "'mean' or 'sum'"),
        ("nonfinite", "drop", ValueError, "'skip'"),
        ("engine", "jit", ValueError, "'func' or 'autograd'"),
        ("aux_reduction", "avg", ValueError, "'concat'", "'last'"),
    ):
        yield partial(make, **{option: value}), error, f"{option} is {value!r}", *words
    given = {"aux_reduction": {"a": "avg"}}
    yield partial(make, **given), ValueError, "aux_reduction is 'avg'", "'concat'"


def begun():
    """Buffers that are missing or unexpected, and params and seeds that are none."""
    for absent in ({}, {"buffers": None}, {"buffers": ()}):
        words = "buffers='sequential'", "missing", "step.init("
        yield partial(threading().init, PARAMS, **absent), ValueError, *words
    words = "make_step does not know how", "'freeze'", "'sequential'", "'pooled'"
    yield partial(make().init, PARAMS, BUFFERS), ValueError, *words
    words = "buffers['count'] is an int", "tensor"
    yield partial(threading().init, PARAMS, {"count": 1}), TypeError, *words
    init = make().init
    yield partial(init, {}), ValueError, "params has no leaves"
    yield partial(init, {"w": torch.ones(2).long()}), TypeError, "params['w'] is torch.int64"
    yield partial(init, {"w": 1.0}), TypeError, "params['w'] is a float", "expected a tensor"
    yield partial(init, nn.Linear(2, 1)), TypeError, "params is a Linear", "functional(module)"
    for seed in (1.0, None, "1", True):
        yield partial(init, PARAMS, seed=seed), TypeError, f"seed is {seed!r}", "expected an int"


@cases([*made(), *begun()])
def test_what_makes_no_step_and_no_state_is_refused(call, error, words):
    with refused(error, *words, given=(PARAMS, BUFFERS)):
        call()


@pytest.mark.parametrize("field", pa.Policy._fields)
@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, "bf16", True, 16])
def test_a_policy_holds_dtypes_from_its_construction_on(field, dtype):
    words = f"policy.{field} is {dtype!r}", "floating-point dtype or None"
    with refused(TypeError, *words):
        pa.Policy(**{field: dtype})
    with refused(TypeError, *words):
        pa.Policy(*[dtype if field == own else None for own in pa.Policy._fields])
    replaced = pa.Policy()._replace(**{field: dtype})
    for takes in (make, partial(pa.value, squares)):
        with refused(TypeError, *words):
            takes(policy=replaced)


@pytest.mark.promise("documented")
def test_a_policy_is_copied_as_it_is():
    policy = pa.Policy(torch.float64, None, output=None, autocast=torch.bfloat16)
    assert policy == (torch.float64, None, None, torch.bfloat16)
    copies = copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))
    assert all(type(x) is pa.Policy and x == policy for x in copies)
    names = {"param": torch.float32, "compute": None, "output": torch.float32, "autocast": None}
    signature = inspect.signature(pa.Policy).parameters
    assert {name: x.default for name, x in signature.items()} == names


# The state and the window -------------------------------------------------------------------


def entries(step, window, state=None):
    """Everything that takes a state, or with a state all that takes a window."""
    of_windows = [
        lambda state, own=window: step.update(state, own, BATCH),
        lambda state, own=window: step.apply(state, own),
    ]
    if state is not None:
        return [partial(call, state) for call in of_windows]
    return [lambda state: step(state, BATCH), step.begin, *of_windows]


KEYS = {"7": 7, "None": None, "0-d": torch.tensor(1), "of 3": torch.zeros(3, dtype=torch.int64)}
NO_KEY = TypeError, ("state.key is ", "expected a key", "key(seed)")
NO_BUFFERS = ValueError, ("buffers='sequential'", "missing")
UNTOLD = ValueError, ("buffers were passed", "does not know how")


def no_state(came):
    return TypeError, (f"state is {came}", "expects the TrainState", "init")


def scaling(word):
    words = (
        "state.loss_scale is ",
        f"made {word} a loss scale",
        "the state comes from another configuration",
    )
    return ValueError, words


SCALED = {"loss_scale": pa.dynamic_loss_scale()}
THREADED = {"loss": with_buffers, "buffers": "sequential"}
# How the step is made, what it is given in place of its own state, and what it says.
STATES = {
    "state and info": ({}, lambda step, state: make()(state, BATCH), no_state("a tuple")),
    "a window": ({}, lambda step, state: step.begin(state), no_state("a StepWindow")),
    "opt_state": ({}, lambda step, state: state.opt_state, no_state("a SGDState")),
    "params": ({}, lambda step, state: state.params, no_state("a dict")),
    "a plain tuple": ({}, lambda step, state: tuple(state), no_state("a tuple")),
    "None": ({}, lambda step, state: None, no_state("a NoneType")),
    "with a loss scale": ({}, lambda *_: make(**SCALED).init(PARAMS), scaling("without")),
    "without a loss scale": (SCALED, lambda *_: make().init(PARAMS), scaling("with")),
    "without buffers": (THREADED, lambda *_: make().init(PARAMS), NO_BUFFERS),
    "with buffers": ({}, lambda *_: threading().init(PARAMS, BUFFERS), UNTOLD),
    **{
        f"no key: {name}": ({}, lambda step, state, key=key: state._replace(key=key), NO_KEY)
        for name, key in KEYS.items()
    },
}


@donations
@pytest.mark.parametrize("name", STATES)
def test_a_state_of_another_kind_is_refused(name, donate):
    """Wherever it is given, before the loss is called, which a state that fits goes on with."""
    options, other, (error, words) = STATES[name]
    loss = Loss(options.get("loss", squares))
    step = make(**options | {"loss": loss, "donate": donate})
    buffers = [BUFFERS] if "buffers" in options else []
    state = step.init(PARAMS, *buffers)
    window, wrong = step.begin(state), other(step, state)
    for call in entries(step, window):
        with refused(error, *words, given=(wrong, window, BATCH), loss=loss):
            call(wrong)
    usable(make(**options), state, *buffers)


SGD, MOMENTUM, ADAM = pa.sgd(0.1), pa.sgd(0.1, momentum=0.9), pa.adam(0.1)
CLIPPED = pa.chain(pa.clip_by_global_norm(1.0), SGD)
SCHEDULED = pa.sgd(pa.constant(0.1))
OF_A, OF_B = (pa.partition({name: SGD}, lambda _, name=name: name) for name in "ab")
OPTIMIZERS = [
    (ADAM, SGD, TypeError, "a SGDState", "AdamState"),
    (SGD, ADAM, TypeError, "an AdamState", "SGDState"),
    (MOMENTUM, SGD, ValueError, "momentum['b'] is missing"),
    (SGD, SCHEDULED, ValueError, "state.lr is ()", "lr=0.1"),
    (SCHEDULED, SGD, ValueError, "state.lr is tensor(0.1", "schedule"),
    (CLIPPED, SGD, TypeError, "a chain of 2 parts"),
    (SGD, CLIPPED, TypeError, "a tuple", "SGDState"),
    (OF_A, SGD, TypeError, "partition", "['a']"),
    (OF_A, OF_B, TypeError, "holds ['b']", "['a']"),
    (pa.from_torch(torch.optim.RMSprop), SGD, TypeError, "from_torch(RMSprop)", "TorchState"),
    (pa.adam(0.1, amsgrad=True), ADAM, ValueError, "max_exp_avg_sq['b'] is missing"),
]
MADE_FROM = "Pass a state that init made from these params"
MODELS = [
    (optimizer, params, *words, MADE_FROM)
    for optimizer in (MOMENTUM, ADAM, pa.chain(pa.clip_by_global_norm(1.0), ADAM))
    for params, *words in (
        (OTHER_PARAMS, "['w'] has shape (3,)", "expected (2,), as in params"),
        ({"w": torch.ones(2)}, "['b'] is missing", "(leaves: got 1, expected 2)"),
    )
]


@donations
@pytest.mark.parametrize(
    ("optimizer", "other", "params", "error", "words"),
    [(mine, other, PARAMS, error, words) for mine, other, error, *words in OPTIMIZERS]
    + [(mine, mine, params, ValueError, words) for mine, params, *words in MODELS],
)
def test_the_state_of_another_optimizer_or_model_is_refused(
    optimizer, other, params, error, words, donate
):
    step = make(optimizer, donate=donate)
    state, good = make(other).init(params), step.init(PARAMS)
    mixed = good._replace(opt_state=state.opt_state)
    with refused(error, *words, given=(state, good, BATCH)):
        step(mixed, BATCH)
    window = step.update(good, step.begin(good), BATCH)
    with refused(error, *words, given=(state, good, BATCH)):
        step.apply(mixed, window)
    usable(make(optimizer), good)


@donations
def test_the_state_of_another_model_is_refused(donate):
    """The module knows its names and shapes."""
    fn = pa.functional(nn.Linear(2, 1))
    wrapped = pa.functional(nn.Sequential(nn.Linear(2, 1)))
    wider = pa.functional(nn.Linear(3, 1))
    step = make(loss=lambda p, b: (fn.apply(p, (), b["x"])[0] ** 2).mean(), donate=donate)
    for other, *words in (
        (wrapped, "params['0.weight'] is not a parameter", "'weight'", "prefix '0.'"),
        (wider, "params['weight'] has shape (1, 3)", "(1, 2)", "another model"),
    ):
        state = step.init(other.params)
        with refused(ValueError, *words, given=(state, BATCH)):
            step(state, BATCH)
        assert not any(x.isnan().any() for x in optree.tree_leaves(state.params))
    assert step(step.init(fn.params), BATCH)[1].applied


NORM = {"running_mean": torch.zeros(2), "running_var": torch.ones(2)}
OF_ANOTHER = "grads['w'] has shape (3,)", "(2,)", "that init made from these params"
# What a step is given in place of its own window, and what it says.
WINDOWS = {
    "accumulator": (
        lambda w, step: w.accum,
        TypeError,
        "the window is an AccumState",
        "StepWindow",
    ),
    # what update returns with has_aux
    "and aux": (lambda w, _: (w, {"aux": 1}), TypeError, "the window is a tuple", "StepWindow"),
    "None": (lambda w, _: None, TypeError, "the window is a NoneType", "StepWindow"),
    "another model": (lambda _, s: s.begin(s.init(OTHER_PARAMS)), ValueError, *OF_ANOTHER),
}


@donations
@pytest.mark.parametrize("name", WINDOWS)
def test_what_is_no_window_of_a_step_is_refused(name, donate):
    wrong, error, *words = WINDOWS[name]
    loss = Loss(squares)
    step = make(loss=loss, donate=donate)
    state = step.init(PARAMS)
    window = step.begin(state)
    given = wrong(window, step)
    for call in entries(step, given, state):
        with refused(error, *words, given=(state, given, BATCH), loss=loss):
            call()
    usable(make(), state)
    assert step.update(state, window, BATCH).accum.microbatches == 1


@pytest.mark.parametrize("noise", [False, True])
def test_a_window_that_looked_at_other_norms_is_refused(noise):
    ours, theirs = make(noise=noise), make(noise=not noise)
    state = ours.init(PARAMS)
    window = theirs.begin(state)
    for call in entries(ours, window, state):
        with refused(ValueError, f"expected squares={noise}", "begin", given=(state, window)):
            call()


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
    for call in entries(step, window, state):
        with refused((TypeError, ValueError), "window", "buffers", given=(state, window, BATCH)):
            call()


# The batch, and what a loss returns ---------------------------------------------------------


def never(params, batch, keys):
    raise AssertionError


KEYED = {"loss": never, "keys": True, "microbatch_size": None}
BUFFERED = {"buffers": "sequential"}
AUX = {"has_aux": True}
PAIR, THREE = "(loss, new_buffers)", "(loss, (new_buffers, aux))"
NONE_ROWS, RAGGED = {"x": torch.tensor(1.0)}, {"x": torch.ones(3, 2), "y": torch.ones(2)}
N = BUFFERS["n"]


def returning(out, *words, error=TypeError, batch=BATCH, whole=False, **options):
    """A loss that returns this; what a step with options says to it, and ``whole`` if it alone."""
    return options | {"loss": lambda p, b, **_: out(p, b)}, batch, whole, error, words


def new_buffers(new, *words, error=ValueError):
    told = *words, "With buffers, aux is"
    return returning(lambda p, b: (squares(p, b), new), *told, error=error, **BUFFERED)


def aux(out, how, *words, error=ValueError):
    options = AUX | {"aux_reduction": how}
    return returning(lambda p, b: (squares(p, b), out), *words, error=error, whole=True, **options)


def with_rows(p, b):
    return squares(p, b), b["x"]


# How a step is made, its batch, whether a stream is none of it, the error and its words.
CALLS = {
    **{
        f"keys without rows: {batch}": (KEYED, batch, False, ValueError, ("no tensor", "samples"))
        for batch in ({}, {"x": 1.0}, None)
    },
    "0-d": ({}, NONE_ROWS, True, ValueError, ("['x'] is a 0-d tensor", "one row per sample")),
    "ragged": ({}, RAGGED, True, ValueError, ("['y'] has 2 samples", "['x'] has 3")),
    "a scalar": returning(squares, "the loss returned a Tensor", "has_aux=False", PAIR, **BUFFERED),
    "Weighted": returning(
        lambda p, b: pa.Weighted(squares(p, b), 1.0),
        *("the loss returned a Weighted", "has_aux=False", PAIR),
        **BUFFERED,
    ),
    "three": returning(
        lambda p, b: (squares(p, b), BUFFERS, 1),
        *("the loss returned a tuple", "has_aux=False", PAIR),
        **BUFFERED,
    ),
    "buffers and no aux": returning(
        lambda p, b: (squares(p, b), BUFFERS),
        *("the loss returned a tuple", "has_aux=True", THREE),
        **BUFFERED | AUX,
    ),
    "None": returning(
        lambda p, b: None,
        *("the loss returned a NoneType", "has_aux=True", THREE),
        **BUFFERED | AUX,
    ),
    "a buffer less": new_buffers({}, "new_buffers['n'] is missing"),
    "a buffer more": new_buffers({"n": N, "m": N}, "new_buffers['m'] is not in"),
    "a longer buffer": new_buffers({"n": torch.ones(3)}, "new_buffers['n'] has shape (3,)", "(2,)"),
    "an int": new_buffers({"n": N.long()}, "new_buffers['n'] is torch.int64", "float32"),
    "a float": new_buffers({"n": 1.0}, "new_buffers['n'] is a float", "tensor", error=TypeError),
    "0-d aux": aux(torch.tensor(1.0), "concat", "aux has shape ()", "'concat'", "'sum'"),
    "a number": aux({"a": 1.0}, "concat", "aux['a'] is a float", "aux_reduction"),
    "a word": aux({"a": "word"}, "sum", "aux['a'] is a str", "'last'", error=TypeError),
    "no prefix": aux({"a": torch.ones(2)}, {"b": "sum"}, "is not a prefix of the aux"),
    "aux that nobody announced": returning(with_rows, "a tuple of 2", "has_aux=True", whole=True),
    "no aux": returning(squares, "has_aux=True", "(loss, aux)", whole=True, **AUX),
    "aux of no rows": returning(
        with_rows,
        *("no samples", "has_aux=True"),
        error=ValueError,
        batch=make_batch(0),
        whole=True,
        **AUX,
    ),
}


@donations
@pytest.mark.parametrize("name", CALLS)
def test_a_batch_or_a_loss_that_does_not_fit_is_refused(name, donate):
    """Whole and streamed, where a stream cannot take it either."""
    options, batch, whole, error, words = CALLS[name]
    step = make(**options | {"donate": donate})
    buffers = [BUFFERS] if "buffers" in options else []
    state = step.init(PARAMS, *buffers)
    window = step.begin(state)
    loss = Loss(squares) if "loss" not in options else None
    if loss is not None:
        step = make(loss=loss, donate=donate)
    for call in (step, lambda state, batch: step.update(state, window, batch))[: 1 if whole else 2]:
        with refused(error, *words, given=(state, window, batch), loss=loss):
            call(state, batch)
    usable(threading() if buffers else make(), state, *buffers)


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


# Where it runs ----------------------------------------------------------------------------


@donations
def test_raise_names_the_microbatch(donate):
    step = make(nonfinite="raise", donate=donate)
    state, bad = step.init(PARAMS), make_batch(4)
    bad["x"][3] = torch.nan
    with refused(FloatingPointError, "loss of microbatch 1 (from sample 2)", given=(state, bad)):
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
            with saying(RuntimeError, "autocast for 'cpu' is enabled", "inside the loss function"):
                call(state)
    usable(step, state)
