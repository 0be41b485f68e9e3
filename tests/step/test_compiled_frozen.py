"""What is frozen, in a step that compiles itself and in a graph of the user's own.

LoRA, a layer, a teacher that is frozen as a whole: the numbers are those without the compiler, also
after what is frozen has changed, and under a vmap of the parameters the refusal is the same.
"""

import pytest
import torch
from torch import nn
from torch.func import grad, jacrev, jvp, vmap

import pureaccum as pa
from pureaccum.testing import unchanged
from tests.step.problems import assert_close, counting, leaves, pair


pytestmark = [
    pytest.mark.transforms,
    pytest.mark.promise("compiled"),
    pytest.mark.promise("frozen"),
]
slow = pytest.mark.slow


class Lora(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(2, 4))

    def forward(self, x):
        return self.base(x) + x @ self.a @ self.b


def layered():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    net[0].requires_grad_(False)
    return net


def distilled():
    student, teacher = pa.functional(nn.Linear(4, 4).double()), layered().double()
    fn = pa.functional(teacher.requires_grad_(False))

    def loss(p, x, **_):
        want, _ = fn.apply({}, fn.buffers, x.double())  # a policy casts what is given alone
        return (student.apply(p, (), x)[0] - want.to(x.dtype)).square().mean()

    return loss, student.params, teacher


def of(net):
    fn = pa.functional(net.double())

    def loss(p, x, **_):
        return fn.apply(p, fn.buffers, x)[0].square().mean()

    return loss, fn.params, net


NETS = {
    "LoRA": lambda: of(nn.Sequential(Lora(), nn.GELU(), Lora())),
    "a layer": lambda: of(layered()),
    "a teacher": distilled,
}
BF16 = pa.Policy(param=torch.float64, compute=torch.bfloat16)
FORMS = {
    "scan": {},
    "unrolled": {"microbatch_size": None},
    "stream": {},
    "donated": {"donate": True, "compile": {"backend": "aot_eager"}},
    "a donated stream": {"donate": True, "compile": {"backend": "aot_eager"}},
    "a policy": {"policy": BF16, "nonfinite": "skip"},
    "keys, a scale": {"keys": True, "loss_scale": pa.static_loss_scale(4.0), "nonfinite": "skip"},
    "open sizes": {"compile": {"backend": "eager", "dynamic": True}},
    "inductor": {"microbatch_size": None, "compile": True},
}
# Every form with one of them at least, and the plain ones with two.
PAIRS = {
    "LoRA": ("scan", "unrolled", "a donated stream", "open sizes"),
    "a layer": ("unrolled", "stream", "donated", "a policy"),
    "a teacher": ("stream", "scan", "keys, a scale", "inductor"),
}


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "form"), [(n, f) for n, forms in PAIRS.items() for f in forms])
def test_a_step_over_what_is_frozen_in_part_is_the_eager_one(name, form):
    """And the module is as it was."""
    loss, params, net = NETS[name]()
    ours, eager = pair(loss, pa.adamw(0.01), **FORMS[form])
    batches = [torch.randn(7, 4).double() for _ in range(2)]
    mine, other = ours.init(params), eager.init(params)
    with unchanged(net, batches):
        if "stream" not in form:
            assert ours.form(mine, batches[0]) in ("scan", "unrolled")
            for x in batches:
                (mine, info), (other, what) = ours(mine, x), eager(other, x)
                assert_close((mine, info), (other, what))
        else:
            for _ in range(2):
                (mine, _), (other, _) = ours.window(mine, batches), eager.window(other, batches)
                assert_close(mine, other)


# What is frozen may change ------------------------------------------------------------------------


@torch.no_grad()
def in_place(net):
    net[0].weight.mul_(2)


def data(net):
    net[0].weight.data = net[0].weight.data * 2


def replaced(net):
    net[0].weight = nn.Parameter(2 * net[0].weight.detach(), requires_grad=False)


CHANGES = {
    "in place": in_place,
    "data": data,
    "loaded": lambda net: net.load_state_dict({k: 2 * x for k, x in net.state_dict().items()}),
    "replaced": replaced,
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "change"),
    [(n, c) for n in ("a layer", "a teacher") for c in CHANGES],
)
def test_what_is_frozen_is_what_the_module_holds_now(name, change):
    """As for a teacher that is an average; only eager code can see that another object is there."""
    loss, params, net = NETS[name]()
    settings, graphs = counting()
    ours, eager = pair(loss, pa.sgd(0.01), microbatch_size=None, compile=settings)
    mine = torch.compile(loss, backend="eager", fullgraph=True)
    state, x = ours.init(params), torch.randn(6, 4).double()
    seen = [ours(state, x)[1].loss]
    for _ in range(2):
        mine(state.params, x)
        CHANGES[change](net)
        fresh = pa.functional(net)
        given = {**state.params, **fresh.frozen} if name == "a layer" else None
        want = fresh.apply(given, (), x)[0].square().mean() if given else None
        got = ours(state, x)
        if change == "replaced":
            with pytest.raises(RuntimeError, match="has other parameters or modules than when"):
                eager(state, x)
        else:
            assert_close(got, eager(state, x))
        assert_close(got[1].loss, mine(state.params, x).detach())
        if want is not None:
            assert_close(got[1].loss, want.detach())
        seen.append(got[1].loss)
    assert len({float(x) for x in seen}) == 3
    assert len(graphs) == 1 + (change == "replaced")  # a graph knows which tensors are one


@pytest.mark.nightly
def test_what_is_put_into_frozen_is_taken():
    """As an average that is made anew at every step."""
    settings, graphs = counting()
    fn = pa.functional(net := layered().double())

    def loss(p, x):
        return fn.apply(p, (), x)[0].square().mean()

    ours, eager = pair(loss, pa.sgd(0.01), microbatch_size=None, compile=settings)
    state, x = ours.init(fn.params), torch.randn(6, 4).double()
    seen = [ours(state, x)[1].loss.item()]
    for _ in range(3):
        with unchanged(net):
            fn.frozen["0.weight"] = 0.5 * fn.frozen["0.weight"]
            got = ours(state, x)
            assert_close(got, eager(state, x))
        seen.append(got[1].loss.item())
    assert len(set(seen)) == 4
    assert len(graphs) == 2


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("part", "words"), [(0, "0.weight was frozen"), (2, "2.weight was trained")]
)
def test_to_freeze_or_unfreeze_later_is_refused_in_a_graph_too(part, words):
    """In whichever form."""
    loss, params, net = NETS["a layer"]()
    ours, eager = pair(loss, pa.sgd(0.01), microbatch_size=None)
    mine = torch.compile(loss, backend="eager", fullgraph=True)
    state, x = ours.init(params), torch.randn(6, 4).double()
    ours(state, x), mine(state.params, x)
    net[part].requires_grad_(part == 0)
    for call in (lambda: ours(state, x), lambda: eager(state, x)):
        with pytest.raises(RuntimeError, match=words):
            call()
    with pytest.raises(Exception, match=words):
        mine(state.params, x)


# In a graph of the user's own ---------------------------------------------------------------------


MEMBERS = [pa.functional(nn.Sequential(Lora(), nn.GELU(), Lora()).double()) for _ in range(3)]
FN, X = MEMBERS[0], torch.arange(32.0).double().view(8, 4).sin()
STACKED = pa.stack([fn.params for fn in MEMBERS])


def value(p, x=X):
    return FN.apply(p, FN.buffers, x)[0].square().mean()


def rows(p):
    return FN.apply(p, (), X)[0]


def twice(p):
    return grad(lambda q: sum(x.square().sum() for x in grad(value)(q).values()))(p)


PROGRAMS = {
    "itself": value,
    "grad": grad(value),
    "grad of grad": twice,
    "jacrev": jacrev(rows),
    "jvp": lambda p: jvp(value, (p,), (p,))[1],
    "vmap of rows": lambda p: vmap(value, (None, 0))(p, X),
    "vmap of rows of grad": lambda p: vmap(grad(value), (None, 0))(p, X),
    "microbatched": lambda p: pa.microbatch(value, microbatch_size=3, reduce="stack")(p, X),
    "one of its parameters": lambda p: value({**FN.params, "0.a": p["0.a"]}),
}
MAPPED = {
    "vmap": vmap(value),
    "vmap of grad": vmap(grad(value)),
    "grad of vmap": grad(lambda p: vmap(value)(p).sum()),
    "vmap of grad of vmap": vmap(lambda p: vmap(grad(value), (None, 0))(p, X)),
    "vmap of vmap": lambda p: vmap(lambda x: vmap(value, (0, None))(p, x))(X.view(2, 4, 4)),
    "vmap of one of them": lambda p: vmap(lambda a: value({**FN.params, "0.a": a}))(p["0.a"]),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_graph_of_the_users_own_takes_what_is_frozen(name):
    program = PROGRAMS[name]
    got = torch.compile(program, backend="eager", fullgraph=True)(FN.params)
    assert_close(leaves(got), leaves(program(FN.params)))


@pytest.mark.slow
@pytest.mark.parametrize("name", MAPPED)
def test_under_a_vmap_of_the_parameters_what_is_frozen_is_refused_in_a_graph_too(name):
    """Members may differ in it, whichever transforms are between; what is given is taken."""
    words = "vmap maps the parameters"
    with pytest.raises(ValueError, match=words):
        MAPPED[name](STACKED)
    with pytest.raises(Exception, match=words):
        torch.compile(MAPPED[name], backend="eager", fullgraph=True)(STACKED)


@slow
def test_what_is_given_for_each_member_is_taken():
    frozen = pa.stack([fn.frozen for fn in MEMBERS])
    program = vmap(lambda p, own: value({**own, **p}))
    got = torch.compile(program, backend="eager", fullgraph=True)(STACKED, frozen)
    assert_close(got, program(STACKED, frozen))
    assert_close(got, torch.stack([value({**fn.params, **fn.frozen}) for fn in MEMBERS]))
