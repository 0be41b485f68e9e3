"""An option with a value that it does not have is refused where it is set, not where it is used."""

import numpy as np
import pytest
import torch

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from tests.problems import once
from tests.refusals import PARAMS, Loss, make_batch, refused, squares
from tests.runs import runs
from tests.tables import each_once


pytestmark = [pytest.mark.faults, pytest.mark.promise("errors"), pytest.mark.table]
MAKERS = {
    "grad": pa.grad,
    "grad_and_value": pa.grad_and_value,
    "value": pa.value,
    "accumulator": pa.accumulator,
}
GRADS, TRANSFORMS = ("grad", "grad_and_value"), ("grad", "grad_and_value", "value")
BOTH = ("batch_argnums", "split")
SIZES = [(0, ValueError), (-1, ValueError), *((s, TypeError) for s in (True, 2.0, "2", {2}))]
SIZED = ("an int of at least 1", "samples")


def named(name, argnums):
    """As an error names it, and what is said of it: the second of several is no int."""
    what = f"{name}[1] is {argnums[1]!r}" if type(argnums) is tuple else f"{name} is {argnums!r}"
    return TypeError, what, "an int or a tuple of ints"


def every_option():
    """Who refuses, what is given, the error, and words of it."""
    for size, error in SIZES:
        yield TRANSFORMS, {"microbatch_size": size}, error, f"microbatch_size is {size!r}", *SIZED
    yield TRANSFORMS, {"microbatch_size": (2, 0)}, ValueError, "microbatch_size[1] is 0"
    for word in ("average", "", None, ["mean"], 1):
        what = f"reduction is {word!r}"
        yield MAKERS, {"reduction": word}, ValueError, what, "'mean' or 'sum'"
    for word in ("ignore", None, True):
        words = f"nonfinite is {word!r}", "'propagate' or 'skip' or 'raise'"
        yield (*GRADS, "accumulator"), {"nonfinite": word}, ValueError, *words
        words = f"engine is {word!r}", "'func' or 'autograd'"
        yield (*GRADS, "accumulator"), {"engine": word}, ValueError, *words
    for word in ("join", ["concat", "join"], {"a": ("join",)}):
        words = "aux_reduction is 'join'", "'concat' or 'sum'"
        yield TRANSFORMS, {"has_aux": True, "aux_reduction": word}, ValueError, *words
    for dtype in (torch.bfloat16, torch.float16, torch.int64, "float32", float):
        words = f"dtype is {dtype}", "torch.float32 or torch.float64", "bits"
        yield (*GRADS, "accumulator"), {"dtype": dtype}, ValueError, *words
    for argnums in ("0", 0.0, None, True, [0], (0, "1"), (0, False)):
        yield GRADS, {"argnums": argnums}, *named("argnums", argnums)
    for argnums in ("1", 1.0, None, True, [1], (1, "2")):
        yield MAKERS, {"batch_argnums": argnums}, *named("batch_argnums", argnums)
    for wrt, cut in ((0, 0), (1, 1), ((0, 2), (1, 2)), (-1, -1)):
        yield GRADS, {"argnums": wrt, "batch_argnums": cut}, ValueError, "argument", *BOTH
    for cut in (0, (0,), (1, 0)):
        yield ["accumulator"], {"batch_argnums": cut}, ValueError, "argument 0", "params", *BOTH


def cases(table):
    """One for each who refuses."""
    return [
        pytest.param(MAKERS[name], given, error, words, id=f"{name}-{given}")
        for names, given, error, *words in table
        for name in names
    ]


@pytest.mark.parametrize(("make", "given", "error", "words"), cases(every_option()))
def test_a_value_that_an_option_does_not_have_is_refused(make, given, error, words):
    with refused(error, *words):
        make(squares, **given)


def arguments():
    """What can only be seen at the call, which is early enough."""
    for wrt, cut in ((0, -2), (-1, 1), ((0, -1), (1,))):
        for size in (None, 2):
            given = {"argnums": wrt, "batch_argnums": cut, "microbatch_size": size}
            yield GRADS, given, ValueError, "argument", *BOTH
    for wrt, asked in ((2, 2), (-3, -3), ((0, 5), 5)):
        words = f"argnums names argument {asked}", "passed 2 positional"
        yield GRADS, {"argnums": wrt, "microbatch_size": 2}, ValueError, *words
    for cut in (2, -3, (1, 7)):
        words = "batch_argnums names argument", "passed 2 positional", "batch_argnums=()"
        yield TRANSFORMS, {"batch_argnums": cut, "microbatch_size": 2}, ValueError, *words


@pytest.mark.parametrize(("make", "given", "error", "words"), cases(arguments()))
def test_what_names_no_argument_or_one_twice_is_refused(make, given, error, words):
    loss, args = Loss(squares), (PARAMS, make_batch())
    with refused(error, *words, given=args, loss=loss):
        make(loss, **given)(*args)


@pytest.mark.parametrize("make", [pa.grad, pa.value])
def test_a_batch_passed_by_keyword_is_not_found(make):
    loss = Loss(squares)
    with refused(
        ValueError, "batch_argnums names argument 1", "Pass batches by position", loss=loss
    ):
        make(loss, microbatch_size=2)(PARAMS, batch=make_batch())


@pytest.mark.parametrize(("cut", "words"), [(-2, "params"), (4, "argument 4"), (-4, "argument -4")])
def test_an_accumulator_does_not_cut_params_counted_from_the_right(cut, words):
    loss, batch = Loss(squares), make_batch()
    acc = pa.accumulator(loss, batch_argnums=cut)
    state = acc.init(PARAMS)
    with refused(ValueError, "batch_argnums", words, given=(state, batch), loss=loss):
        acc.update(state, PARAMS, batch)


@pytest.mark.parametrize(("size", "error"), [*SIZES, (None, TypeError)])
def test_a_size_is_a_positive_int(size, error):
    """Refused by the call, before the first ``next``."""
    with refused(error, f"size is {size!r}", *SIZED):
        pa.microbatches(make_batch(), size)
    with refused(error, f"k is {size!r}", "an int of at least 1", "microbatches of a window"):
        pa.windows([1, 2, 3], size)


# Ints of any kind ------------------------------------------------------------------------


class Two:
    def __index__(self):
        return 2


def fits(w, x):
    return (w * x).square().mean()


def step_of(**options):
    return pa.make_step(fits, pa.sgd(0.1), **options)


W, X, KEY = torch.tensor(2.0), torch.arange(6.0), pa.key(0)
TWOS = {"np.int64": np.int64(2), "a 0-d array": np.array(2), "an object": Two()}
NONE = {  # and what is said of it
    "an array": (np.array([2, 4]), "an array of shape (2,)"),
    "a tensor of one": (torch.tensor([2]), "a tensor of shape (1,)"),
    "a bool": (True, "True, a bool"),
    "a bool of numpy": (np.True_, f"{np.True_!r}, a bool"),
    "a bool tensor": (torch.tensor(True), "tensor(True), a Tensor"),
    "a float": (2.0, "2.0, a float"),
}
TAKES = {
    "grad": ("microbatch_size", lambda n: pa.grad(fits, microbatch_size=n)(W, X)),
    "sizes": (
        "microbatch_size[0]",
        lambda n: pa.grad_and_value(fits, microbatch_size=[n, 4])(W, X),
    ),
    "value": ("microbatch_size", lambda n: pa.value(fits, microbatch_size=n)(W, X)),
    "step": ("microbatch_size", lambda n: once(step_of(microbatch_size=n), W, X)),
    "microbatches": ("size", lambda n: list(pa.microbatches(X, n))),
    "windows": ("k", lambda n: list(pa.windows(range(5), n))),
    "samples": ("chunk_size", lambda n: pa.per_sample_grad(fits, chunk_size=n)(W, X)),
    "argnums": (
        "argnums",
        lambda n: pa.grad(lambda a, x, w: fits(w, x), n, microbatch_size=2)(W, X, W),
    ),
    "several argnums": (
        "argnums[1]",
        lambda n: pa.grad(lambda a, x, w: fits(w * a, x), (0, n))(W, X, W),
    ),
    "batch_argnums": (
        "batch_argnums",
        lambda n: pa.grad(lambda w, a, x: fits(w, x), batch_argnums=n)(W, W, X),
    ),
    "key": ("seed", pa.key),
    "split_key": ("n", lambda n: pa.split_key(KEY, n)),
    "growth_interval": (
        "growth_interval",
        lambda n: pa.dynamic_loss_scale(growth_interval=n).update(
            pa.dynamic_loss_scale().init(), torch.tensor(True)
        ),
    ),
}


@each_once("takes, two", {name: takes for name, (_, takes) in TAKES.items()}, TWOS)
def test_whatever_has_an_index_is_an_int(takes, two):
    assert_trees_bitwise_equal(takes(two), takes(2))


@each_once("root, takes, value, came", TAKES, NONE)
def test_what_has_no_index_is_no_int(root, takes, value, came):
    with refused(TypeError, f"{root} is {came}", "expected an int"):
        takes(value)


# Numbers beyond what torch counts with are refused, or work as smaller ones do -----------------


LARGER = {
    name: lambda n, run=run: run(fits, W, X, size=n)
    for name, run in runs(
        *("grad", "autograd", "skip", "value", "step", "compiled step", "samples", "clipped")
    ).items()
} | {
    "microbatch": lambda n: pa.microbatch(torch.mul, microbatch_size=n)(W, X),
    "twice": lambda n: torch.func.jacrev(pa.grad(fits, microbatch_size=n))(W, X),
    "microbatches": lambda n: list(pa.microbatches({"x": X}, n)),
    "windows": lambda n: list(pa.windows([X, X], n)),
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n == "compiled step" else ()) for n in LARGER],
)
def test_a_size_may_be_any_number_above_the_rows(name):
    want = LARGER[name](1000)
    for huge in (2**63 - 1, 2**63, 2**64, 10**400, 10**5000):
        assert_trees_bitwise_equal(LARGER[name](huge), want)


COUNTS = {
    "sizes": ("microbatch_size=[", lambda n: pa.grad(fits, microbatch_size=[n, 4])(W, X)),
    "argnums": ("argnums ", lambda n: pa.grad(fits, n)(W, X)),
    "several": ("argnums[1] is", lambda n: pa.grad(fits, (0, n))(W, X)),
    "batch_argnums": ("batch_argnums ", lambda n: pa.grad(fits, batch_argnums=n)(W, X)),
    "fold_in": ("n is", lambda n: pa.fold_in(KEY, n)),
    "split_key": ("n is", lambda n: pa.split_key(KEY, n)),
    "uniform": ("shape has", lambda n: pa.uniform(KEY, (2, n))),
    "normal": ("shape has", lambda n: pa.normal(KEY, (n,))),
    "growth_interval": ("growth_interval is", lambda n: pa.dynamic_loss_scale(growth_interval=n)),
    "hysteresis": ("hysteresis is", lambda n: pa.dynamic_loss_scale(hysteresis=n)),
    "warmup": ("steps is", lambda n: pa.linear_warmup(0.1, n)),
    "cosine": ("steps is", lambda n: pa.cosine_decay(0.1, n)),
    "decay": ("steps is", lambda n: pa.step_decay(0.1, n)),
    "decays": ("steps[1] is", lambda n: pa.step_decay(0.1, [3, n])),
    "exponential": ("steps is", lambda n: pa.exponential_decay(0.1, 0.5, n)),
    "cycle": ("steps is", lambda n: pa.one_cycle(0.1, n)),
    "joined": ("boundaries[0] is", lambda n: pa.join_schedules([pa.constant(0.1)] * 2, [n])),
}


@pytest.mark.parametrize(("root", "takes"), COUNTS.values(), ids=COUNTS)
def test_a_count_that_torch_cannot_hold_is_refused(root, takes):
    for huge in (2**63, 2**64, 10**400, 10**5000):
        with refused(ValueError, root):
            takes(huge)


def test_a_count_that_torch_can_hold():
    most = 2**63 - 1
    assert pa.linear_warmup(0.5, most)(torch.tensor(most)) == 0.5
    assert pa.step_decay(0.5, most)(torch.tensor(most)) == 0.05
    assert pa.exponential_decay(0.5, 0.5, most)(torch.tensor(most)) == 0.25
    assert pa.one_cycle(0.5, most, div_factor=1, final_div_factor=2)(torch.tensor(most)) == 0.25
    joined = pa.join_schedules([pa.constant(0.1), pa.constant(0.2)], [most])
    assert [joined(torch.tensor(n)).item() for n in (3, most)] == [0.1, 0.2]


def test_a_seed_has_64_bits():
    for huge in (2**64, -(2**63) - 1, 10**400, 10**5000):
        with refused(ValueError, "seed is", "from -2**63 to 2**64 - 1"):
            pa.key(huge)


FLOATS = {
    "lr": ("lr is inf", pa.sgd),
    "momentum": ("momentum is inf", lambda x: pa.sgd(0.1, x)),
    "weight_decay": ("weight_decay is inf", lambda x: pa.adamw(0.1, weight_decay=x)),
    "eps": ("eps is inf", lambda x: pa.adam(0.1, eps=x)),
    "constant": ("value is inf", pa.constant),
    "warmup": ("peak is inf", lambda x: pa.linear_warmup(x, 3)),
    "cosine": ("end is inf", lambda x: pa.cosine_decay(0.1, 3, x)),
    "factor": ("factor is inf", lambda x: pa.step_decay(0.1, 3, x)),
    "cycle": ("div_factor is inf", lambda x: pa.one_cycle(0.1, 3, div_factor=x)),
    "average": ("decay is inf", pa.ema),
    "static": ("scale is inf", pa.static_loss_scale),
    "dynamic": ("init_scale is inf", pa.dynamic_loss_scale),
    "growth": ("growth_factor is inf", lambda x: pa.dynamic_loss_scale(growth_factor=x)),
    "noise": ("std is inf", lambda x: pa.add_noise({"w": W}, x, KEY)),
    "decay": ("decay is inf", pa.running_noise_scale),
}


@pytest.mark.parametrize("name", FLOATS)
def test_a_whole_number_larger_than_any_float_is_refused(name):
    root, takes = FLOATS[name]
    for huge in (10**400, 10**5000):
        with refused(ValueError, root):
            takes(huge)


def test_a_whole_number_is_a_float():
    """Those from 2**64 on too, which torch takes for no number at all."""
    for n in (3, 2**63, 2**64):
        for make in (
            lambda x: pa.sgd(x).init(W),
            lambda x: pa.constant(x)(torch.tensor(3)),
            lambda x: pa.linear_warmup(x, 4, start=x)(torch.tensor(3)),
            lambda x: pa.static_loss_scale(x).init(),
            lambda x: pa.dynamic_loss_scale(x, max_scale=x).init(),
            lambda x: pa.clip_by_global_norm(x).update({"w": W}, ()),
            lambda x: pa.add_noise({"w": W}, x, KEY),
            lambda x: (opt := pa.adamw(0.1, eps=x)).apply(W, opt.init(W), W),
        ):
            assert_trees_bitwise_equal(make(n), make(float(n)))


def test_without_a_size_there_need_not_be_a_batch():
    """As for torch.func.grad; with one there must be."""
    f, w = lambda w: (w**3).sum(), torch.tensor([1.0, -2.0])
    assert torch.equal(pa.grad(f)(w), 3 * w**2)
    grads, value = pa.grad_and_value(f)(w)
    assert torch.equal(grads, 3 * w**2)
    assert value == -7
    assert torch.equal(pa.grad(lambda w: pa.grad(f)(w).sum())(w), 6 * w)
    assert torch.equal(pa.value(f)(w), value)
    with pytest.raises(ValueError, match="the call passed 1 positional arguments"):
        pa.grad(f, microbatch_size=1)(w)
