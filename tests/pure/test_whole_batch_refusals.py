"""Modules that cannot be cut are refused, by name, and so are calls that do not fit."""

import random
import threading
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pureaccum as pa
from tests.pure import resnets
from tests.pure.networks import Of, squares
from tests.refusals import refused, saying


pytestmark = [pytest.mark.faults, pytest.mark.promise("errors"), pytest.mark.table]
X = torch.arange(12.0).reshape(4, 3).sin()


def norm(*layers):
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), *layers)


def of(func, **parts):
    """A forward that is a function of itself and of what a network with BatchNorm gives."""
    return Of(lambda self, x: self.above(self, self.body(x)), above=func, body=norm(), **parts)


def calls(module, *args, size=3, **kwargs):
    """The gradient, and what apply returns."""
    fn = pa.functional(module, microbatch_size=size)

    def loss(params):
        out, buffers = fn.apply(params, fn.buffers, *(args or (X,)), **kwargs)
        return out.square().mean(), (out, buffers)

    grads, (_, aux) = torch.func.grad_and_value(loss, has_aux=True)(fn.params)
    return grads, *aux


def refuses(module, *words, error=ValueError):
    """Before any work but for one microbatch of each size, of which the trace is made."""
    ran, state = [], torch.get_rng_state()
    for layer in module.modules():
        if type(layer) in (nn.Linear, nn.Conv1d):
            layer.register_forward_pre_hook(lambda _, args: ran.append(len(args[0])))
    with refused(error, *words, given=module.state_dict()):
        calls(module)
    assert all(ran.count(rows) <= 2 for rows in ran)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.promise("coupled")
def test_nothing_that_an_attribute_holds_is_copied():
    """Nor where an attribute leads back to the module, or a closure to a layer in it."""
    layer = nn.Linear(3, 3)
    module = of(lambda self, x: x @ layer.weight, layer=layer, lock=threading.Lock())
    for _ in range(2):
        got, want = calls(module), calls(module, size=None)
        for mine, its in zip(pa_leaves(got), pa_leaves(want), strict=True):
            torch.testing.assert_close(mine, its)
        module.method = module.forward
    module.layer.register_forward_hook(lambda *_: None)
    refuses(module, "hooks, which would not run")


def pa_leaves(tree):
    return [x for part in tree for x in (part.values() if isinstance(part, dict) else [part])]


@pytest.mark.promise("followed")
def test_a_tensor_of_the_module_that_a_closure_holds_is_refused():
    layer = nn.Linear(3, 3)
    weight = layer.weight
    module = of(lambda self, x: x @ weight, layer=layer)
    with refused(ValueError, "more than self (a closure"):
        calls(module)


# What would be lost ---------------------------------------------------------------------------


ROWS = {
    "equal": lambda x: x.shape[0] == 3,
    "not equal": lambda x: x.size(0) != 3,
    "named": lambda x: x.size(dim=0) > 3,
    "bool": lambda x: bool(x.size()[0]),
    "int": lambda x: int(x.shape[0] / 2) > 1,
    "float": lambda x: float(x.shape[0]) > 1,
    "computed": lambda x: 2 * x.shape[0] - 1 > 2,
    "remainder": lambda x: x.shape[0] % 2 == 0,
    "divmod": lambda x: divmod(x.shape[0], 2)[1] == 0,
    "max": lambda x: max(x.shape[0], 3) == 3,
    "in": lambda x: x.shape[0] in (3, 4),
    "shape": lambda x: x.shape == (3, 3),
    "numel": lambda x: x.numel() > 9,
    "len": lambda x: len(x) > 3,
    "flat": lambda x: x.flatten().shape[0] > 9,
    "list": lambda x: len([*x]) > 3,
}


@pytest.mark.promise("followed")
@pytest.mark.parametrize("condition", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("swallowing", [False, True])
def test_a_condition_on_how_many_rows_there_are_is_refused(condition, swallowing):
    """It is another one for the batch; whatever forward makes of the error."""

    def func(self, x):
        try:
            return x * 2 if condition(x) else x
        except BaseException:
            if swallowing:
                return x
            raise

    refuses(of(func), "module (Of) cannot be cut", "must not depend on how many samples it gets")


@pytest.mark.promise("followed")
def test_what_is_done_row_by_row_is_refused_where_microbatches_differ():
    module = of(lambda self, x: torch.stack([x[i] * 2 for i in range(x.shape[0])]))
    with refused(RuntimeError, "module (Of) computes for 1 samples", "depends on how many samples"):
        calls(module)
    torch.testing.assert_close(calls(module, size=2)[1], 2 * module.body(X))


def not_looked_into(func):
    return torch.overrides.wrap_torch_function(lambda x: (x,))(func)


@not_looked_into
def gate(x):
    return x + 1 if x.sum() > 0 else x


@pytest.mark.promise("coupled")
def test_a_branch_in_a_wrapped_function_is_taken():
    module = of(lambda self, x: gate(x))
    grads, _, buffers = calls(module)
    assert grads["body.0.weight"].isfinite().all()
    assert buffers["body.1.num_batches_tracked"] == 1


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        return grad * 3 * ctx.saved_tensors[0] ** 2


@pytest.mark.promise("coupled")
def test_a_function_is_computed_where_nothing_is_recorded_around_it_either():
    module = of(lambda self, x: Cube.apply(x))
    fn = pa.functional(module, microbatch_size=3)
    with torch.no_grad():
        out, _ = fn.apply(fn.params, fn.buffers, X)
        want, _ = pa.functional(module).apply(fn.params, fn.buffers, X)
    torch.testing.assert_close(out, want)
    assert not out.requires_grad


@pytest.mark.promise("coupled")
def test_modes_and_transforms_around_are_none_of_its_business():
    """What forward makes of numbers is traced once, and is no part of the first call's."""
    module = of(lambda self, x: x * torch.arange(3.0) + torch.zeros(3))
    fn = pa.functional(module, microbatch_size=3)

    def total(params, x):
        return fn.apply(params, fn.buffers, x)[0].sum()

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        func = torch.func.vmap(torch.func.grad(total), (None, 0))
        assert func(fn.params, X.expand(2, 4, 3))["body.1.bias"].shape == (2, 3)
    want = pa.functional(module).apply(fn.params, fn.buffers, X)[0].sum()
    torch.testing.assert_close(total(fn.params, X), want)


def assigns(self, x):
    self.last = x
    return x


def counts(self, x):
    self.calls = self.calls + 1
    return x


def appends(self, x):
    self.calls.append(x)
    return x


@pytest.mark.promise("followed")
@pytest.mark.parametrize(
    ("func", "calls"), [(assigns, 0), (counts, 0), (appends, [])], ids=["new", "old", "list"]
)
def test_attributes_that_forward_assigns_are_refused(func, calls):
    module = of(func, calls=calls)
    before = dict(vars(module))
    refuses(module, "module (Of) assigns its attribute '", "in forward")
    assert vars(module) == before
    assert module.calls in (0, [])


@pytest.mark.promise("followed")
def test_a_set_that_is_copied_in_another_order_is_no_assignment():
    seen = {*range(2000)}
    seen -= {*range(2000)} - {1, 8}
    assert [*seen] != [*seen.copy()]
    module = of(lambda self, x: x, seen=seen)
    calls(module)
    module.above = lambda self, x: (self.seen.add(2), x)[1]
    refuses(module, "module (Of) assigns its attribute 'seen'")
    assert seen == {1, 8}


@pytest.mark.slow
@pytest.mark.promise("second run")
def test_python_s_random_numbers_are_drawn_once_for_the_batch():
    module = of(lambda self, x: x * random.random() if random.random() < 0.5 else x)
    for seed in range(8):
        found = []
        for size in (3, None):
            random.seed(seed)
            found.append((calls(module, size=size)[1], random.random()))
        torch.testing.assert_close(*found)


@pytest.mark.slow
@pytest.mark.promise("threads")
def test_another_thread_s_random_numbers_are_not_its_own():
    """They are drawn all the time, and the generators are nobody's to put back."""
    done = threading.Event()
    drawn = []

    def draw():
        while not done.is_set():
            drawn.append(float(torch.rand((), dtype=torch.float64)) + random.random())

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for _ in range(5):
            fn = pa.functional(resnets.Shared(), microbatch_size=3)
            with torch.no_grad():
                fn.apply(fn.params, fn.buffers, X @ torch.ones(3, 4))
    finally:
        done.set()
        thread.join()
    assert len({*drawn}) == len(drawn)


@pytest.mark.promise("followed")
@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook"])
@pytest.mark.parametrize("at", ["", "1", "2"], ids=["module", "norm", "inner"])
def test_hooks_on_what_is_taken_apart_are_refused(kind, at):
    module = norm(nn.Sequential(nn.ReLU()))
    getattr(module.get_submodule(at), f"register_{kind}")(lambda *args: None)
    name = kind.removeprefix("full_").replace("_", " ")
    refuses(module, f"{'module.' + at if at else 'module'} (", f"has {name}s, which would not run")


@pytest.mark.promise("coupled")
def test_what_hooks_on_other_layers_change_is_in_the_result():
    module, seen = norm(nn.Tanh()), []
    module[0].register_forward_pre_hook(lambda layer, args: (args[0] * 2,))
    module[0].register_forward_hook(lambda layer, args, out: out.sin())
    module[0].register_forward_hook(lambda layer, args, out: seen.append(len(out)))
    got = calls(module)
    assert seen
    assert max(seen) <= 3  # samples of a microbatch
    for mine, its in zip(pa_leaves(got), pa_leaves(calls(module, size=None)), strict=True):
        torch.testing.assert_close(mine, its)


@pytest.mark.mechanism
def test_hooks_on_other_layers_run():
    module, seen = norm(), []
    module[0].register_forward_hook(lambda layer, args, out: seen.append(out.shape[0]))
    calls(module)
    # One is recorded, and one of each size compared with its levels; each microbatch, and again for
    # its gradient.
    assert seen[-4:] == [3, 1, 3, 1]
    assert sorted(seen[:-4]) == [1, 1, 3, 3, 3]


@pytest.mark.promise("followed")
def test_hooks_that_come_later_are_found():
    module = norm(nn.Sequential(nn.ReLU()))
    fn = pa.functional(module, microbatch_size=3)
    fn.apply(fn.params, fn.buffers, X)
    module[2].register_forward_hook(lambda *args: None)
    with refused(ValueError, "module.2 (Sequential) has forward hooks"):
        fn.apply(fn.params, fn.buffers, X)


# BatchNorm that is not there to be cut --------------------------------------------------------


def test_batch_norm_of_parameters_is_refused():
    """Without running statistics it is a function of parameters as any other."""
    module = of(
        lambda self, x: x @ self.norm(self.w), w=nn.Parameter(X[:3]), norm=nn.BatchNorm1d(3)
    )
    refuses(module, "module.norm (BatchNorm1d) gets an input that is not of the batch")
    module.norm = nn.BatchNorm1d(3, track_running_stats=False)
    calls(module)


def test_a_scripted_batch_norm_is_refused():
    module = nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.BatchNorm1d(3)))
    with saying(ValueError, "module.1 is scripted"):
        pa.functional(module, microbatch_size=3)


@pytest.mark.parametrize("affine", [True, False])
def test_a_lazy_module_is_not_cut(affine):
    lazy = nn.LazyBatchNorm1d(affine=affine, track_running_stats=affine)
    with saying(ValueError, "lazy module" if affine else "module.2 is a LazyBatchNorm1d"):
        pa.functional(norm(lazy), microbatch_size=3)


@pytest.mark.promise("coupled")
def test_a_branch_is_no_hindrance_where_no_batch_norm_looks_at_the_batch():
    """Nobody looks into such a module."""
    module = norm(Gate()).eval()
    torch.testing.assert_close(calls(module)[1][:3], module(X[:3]))


def test_options_of_a_module_that_make_no_sense_are_refused():
    module = norm()
    for size in (0, 2.0, "few", [3, 0]):
        with refused((TypeError, ValueError), "microbatch_size"):
            pa.functional(module, microbatch_size=size)
    with refused(ValueError, "microbatch_size=[3, 3] adds up to 6 samples", "has 4"):
        calls(module, size=[3, 3])


# What is refused by name ----------------------------------------------------------------------


class Gate(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            x = x + 1
        return x


class ByHand(nn.BatchNorm1d):
    def forward(self, input):
        return (input - input.mean(0)) / input.std(0)


@not_looked_into
def normalised(x):
    return F.batch_norm(x, None, None, training=True)


def no_grad(self, x):
    with torch.no_grad():
        return x * 2


def autocast(self, x):
    with torch.autocast("cpu", torch.bfloat16):
        return x @ x.T


def own_statistics(self, x):
    return F.batch_norm(x, self.zero * 1, self.zero + 1, training=True)


def views(self, x):
    y = x.view(-1)
    x.relu_()
    return x + y.view(-1, 3)


def parts(self, x):
    x[0].add_(1)
    return x


def torch_s(self, x):
    return torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, False)


MODES = "under no_grad or autocast, as a torch.autograd.Function does"
TRAINS = "module (Of) calls batch_norm with training=True"
ADDS = "module (Of) writes in place (add_) to its own module.n"
READ = "is read again as another one", "x = x + y instead of x += y"
ALIASES = (
    "module (Of) writes in place (",
    "read again as another one",
    "x = x + y instead of x += y",
)
TRACKING = nn.InstanceNorm1d(1, track_running_stats=True)
COUNT = {"n": nn.Buffer(torch.zeros(3))}
REFUSED = {
    "a branch on numbers": (
        lambda: norm(nn.Sequential(Gate())),
        "module.2.0 (Gate) cannot be cut at its BatchNorm layers: its result must not depend on "
        "numbers of its input (bool). This is at test_whole_batch_refusals.py line ",
        ": `if x.sum() > 0:`",
        "torch.overrides.wrap_torch_function",
    ),
    "no_grad": (lambda: of(no_grad), "module (Of)", MODES),
    "autocast": (lambda: of(autocast), "module (Of)", MODES),
    "a function": (lambda: of(lambda self, x: Cube.apply(x)), "module (Of)", MODES),
    "random numbers": (
        lambda: of(lambda self, x: x * torch.rand(3)),
        *("module (Of)", "random numbers", "rand_like(x)"),
    ),
    "a function of torch": (lambda: of(torch_s), TRAINS),
    "a function not looked into": (lambda: of(lambda self, x: normalised(x)), TRAINS),
    "statistics that are no buffers": (
        lambda: of(own_statistics, zero=nn.Buffer(X[0])),
        *("module (Of)", "running statistics that are not buffers"),
    ),
    "a formula of its own": (
        lambda: norm(ByHand(3)),
        "module.2 (ByHand) has a forward of its own that does not call",
    ),
    "statistics of another layer": (
        lambda: nn.Sequential(norm(), nn.Unflatten(1, (1, 3)), deepcopy(TRACKING)),
        "module.2 (InstanceNorm1d) writes in place (instance_norm) to its own module.2.running",
    ),
    "a buffer": (lambda: of(lambda self, x: x + self.n.add_(1), **COUNT), ADDS),
    "a view of a buffer": (lambda: of(lambda self, x: (self.n[0].add_(1), x)[1], **COUNT), ADDS),
    "a parameter": (
        lambda: of(lambda self, x: x + F.relu_(self.n), n=nn.Parameter(X[0])),
        "writes in place (relu_) to its own module.n",
    ),
    "views": (lambda: of(views), *ALIASES),
    "parts": (lambda: of(parts), *ALIASES),
}


@pytest.mark.promise("followed")
@pytest.mark.parametrize(("make", "words"), [(m, w) for m, *w in REFUSED.values()], ids=REFUSED)
def test_what_cannot_be_cut_is_refused_by_name(make, words):
    refuses(make(), *words)


# A cut around a cut ---------------------------------------------------------------------------


@pytest.mark.promise("refused")
def test_a_cut_around_a_cut_is_refused():
    """It would be the gradient of parts that are each normalised by themselves."""
    module = norm()
    fn = pa.functional(module, microbatch_size=1)

    loss = squares(fn)
    inside = Of(lambda self, x: self.fn.apply(self.fn.params, self.fn.buffers, x)[0], fn=fn)
    step = pa.make_step(loss, pa.sgd(0.1), microbatch_size=2)
    for around in (
        lambda: pa.microbatch(loss, microbatch_size=2, reduce="mean")(fn.params, X),
        lambda: pa.functional(inside, microbatch_size=2).apply({}, (), X),
        lambda: pa.grad(loss, microbatch_size=2)(fn.params, X),
        lambda: pa.value(loss, microbatch_size=2)(fn.params, X),
        lambda: pa.per_sample_grad(loss, keep_batch_dim=True)(fn.params, X),
        lambda: step(step.init(fn.params), X),
        lambda: torch.func.grad(pa.value(loss, microbatch_size=3))(fn.params, X),
    ):
        with refused(
            RuntimeError, "module.1 (BatchNorm1d) couples all samples", "splits the batch too"
        ):
            around()
    one = pa.microbatch(loss, microbatch_size=4, reduce="mean")(fn.params, X)
    torch.testing.assert_close(one, loss(fn.params, X))
    module.eval()  # where it couples nothing
    parts = pa.microbatch(loss, microbatch_size=2, reduce="mean")(fn.params, X)
    torch.testing.assert_close(parts, loss(fn.params, X))


# What is written to --------------------------------------------------------------------------


@pytest.mark.promise("followed")
def test_other_buffers_that_change_are_refused():
    module = of(lambda self, x: (setattr(self, "n", self.n + 1), x)[1], n=nn.Buffer(X[0] * 1))
    refuses(module, "buffers['n'] is written to in forward", error=RuntimeError)
    module = nn.Sequential(nn.Conv1d(3, 3, 1), nn.InstanceNorm1d(3, track_running_stats=True))
    words = "buffers['1.running_mean'] is written to in forward"
    with refused(RuntimeError, words, given=module.state_dict()):
        calls(module, X[..., None].expand(4, 3, 2))
    module = norm(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)))
    words = "module.2.parametrizations.weight.0 (_SpectralNorm) cannot be cut", "under no_grad"
    with refused(ValueError, *words, given=module.state_dict()):
        calls(module)
    calls(norm(module[2].eval()))


def names(self, x):
    identity = x
    x += 1
    return x * identity


@not_looked_into
def doubled(x):
    return x.mul_(2)


@pytest.mark.promise("coupled")
@pytest.mark.parametrize("func", [names, lambda self, x: doubled(x) + x])
def test_a_write_that_can_be_followed_is_right(func):
    module = of(func)
    torch.testing.assert_close(calls(module)[1], module(X))


# What it is called with ----------------------------------------------------------------------


def test_parameters_and_buffers_that_do_not_fit_are_refused():
    module = norm()
    fn = pa.functional(module, microbatch_size=3)
    params, buffers = fn.params, fn.buffers
    cases = [
        (params | {"2.weight": X}, buffers, "params['2.weight'] is not a parameter of the module"),
        (params | {"0.bias": X[0, :1]}, buffers, "params['0.bias'] has shape (1,); expected"),
        (params, {}, "buffers['1.running_mean'] is missing; expected all 3"),
    ]
    for some, others, words in cases:
        with refused(ValueError, words):
            fn.apply(some, others, X)
    with refused(TypeError, "buffers['1.running_var'] is a float"):
        fn.apply(params, buffers | {"1.running_var": 1.0}, X)
    with refused(TypeError, "params is a list; expected a dict of tensors by name"):
        fn.apply([X], buffers, X)


def masked(self, x, scale, *, mask=None):
    return self.norm(x) * scale if mask is None else x * mask


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_arguments_that_do_not_fit_are_refused(mode):
    def called(*args, **named):
        module = Of(masked, norm=nn.BatchNorm1d(3))
        return calls(getattr(module, mode)(), *args, **named)

    called(X, X)
    called(X, 2.0, mask=X)
    with saying((TypeError, ValueError), "missing 1 required positional argument: 'scale'"):
        called(X)
    with refused(ValueError, "args['mask'] has 3 samples", "args[0] has 4"):
        called(X, X, mask=X[:3])
    with refused(ValueError, "args[1] is a 0-d tensor"):
        called(X, torch.tensor(2.0))
    with refused(TypeError, "args[1] is a numpy.ndarray"):
        called(X, X.numpy())
    with refused(ValueError, "the input of apply holds no tensor"):
        called(1.0, 2.0)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize(
    ("func", "name", "came"),
    [
        (lambda x: x.mean(), "out", "has shape ()"),
        (lambda x: {"a": x, "b": (x, x.sum(0))}, "out['b'][1]", "has shape (3,)"),
        (lambda x: [x, 3], "out[1]", "is 3"),
        (lambda x: (x, "name"), "out[1]", "is 'name'"),
        (lambda x: (x, x.shape[0]), "out[1]", "is 2"),
    ],
)
def test_outputs_without_rows_are_refused(mode, func, name, came):
    module = Of(lambda self, x: self.above(self.norm(x)), above=func, norm=nn.BatchNorm1d(3))
    with refused(ValueError, f"{name}, which the module returned for ", came, "plain code after"):
        calls(getattr(module, mode)(), X, size=2)


def test_tensors_between_levels_without_rows_are_refused():
    module = nn.Sequential(norm(), nn.BatchNorm1d(3))
    module.insert(1, of(lambda self, x: x.mean(0, keepdim=True)))
    with saying(
        ValueError, "'mean' in module.1 (Of) has shape (1, 3) for 3 samples; expected one row"
    ):
        calls(module)


def test_shapes_that_batch_norm_refuses_are_refused_in_its_words():
    with refused(ValueError, "module.1 (BatchNorm1d): expected 2D or 3D input (got 4D input)"):
        calls(nn.Sequential(nn.Identity(), nn.BatchNorm1d(3)), X[..., None, None])
    with refused(ValueError, "module.1 (BatchNorm1d) normalises 1 channels, but its input has"):
        calls(nn.Sequential(nn.Identity(), nn.BatchNorm1d(1)))


@pytest.mark.parametrize("rows", [0, 1])
def test_too_few_rows_are_refused(rows):
    words = ("more than one value per channel", "a batch without samples")[rows == 0]
    module = norm()
    with refused(ValueError, "module.1 (BatchNorm1d)", words):
        calls(module, X[:rows])
