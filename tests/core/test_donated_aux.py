"""What a step with ``donate=True`` returned beside the state stays what it was in later steps."""

import itertools

import pytest
import torch

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from tests.exactly import copied


pytestmark = [pytest.mark.purity, pytest.mark.promise("donation")]
X = torch.arange(12.0).view(6, 2) - 5


def aliases(p, b, sparse):
    """Everything that an aux may be of parameters and buffers."""
    dense = p["w"].detach()
    return {
        "parameter": p["w"],
        "large one, turned": p["large"].t(),
        "views": [p["w"].view(1, 2), p["w"][:1], p["s"].expand(3), dense],
        "buffers": b,
        "view of a buffer": b["mean"][1:],
        "sparse": torch.sparse_coo_tensor([[0, 1]], dense, (2,)) if sparse else (),
    }


OPTIMIZERS = {
    "sgd": lambda: pa.sgd(0.01),
    "adamw": lambda: pa.adamw(0.01),
    "fused adamw": lambda: pa.adamw(0.01, fused=True),
    "from_torch": lambda: pa.from_torch(torch.optim.RMSprop, lr=0.01),
    "clip and momentum": lambda: pa.chain(
        pa.clip_by_global_norm(1.0), pa.sgd(0.01, momentum=0.9, nesterov=True)
    ),
}


def step_of(optimizer, sparse, **knobs):
    """A step whose aux are aliases of what it is given, and its first state."""

    def loss(p, x, *, buffers):
        new = {"mean": buffers["mean"] * 0.5 + x.mean(0), "calls": buffers["calls"] + 1}
        value = ((x * p["w"]) ** 2).mean() * p["s"].exp() + buffers["mean"].sum()
        value = value + p["large"].mean()
        return value, (new, [aliases(p, b, sparse) for b in (buffers, new)])

    step = pa.make_step(
        loss,
        OPTIMIZERS[optimizer](),
        has_aux=True,
        aux_reduction="last",
        buffers="sequential",
        donate=True,
        **knobs,
    )
    params = {"w": torch.tensor([1.0, -0.5]), "s": torch.tensor(0.5)}
    params["large"] = torch.ones(512, 512)
    return step, step.init(params, buffers={"mean": torch.zeros(2), "calls": torch.tensor(0)})


def over_batches(step, state):
    return step(state, X)


def over_streams(step, state):
    window, aux = step.begin(state), []
    for part in pa.microbatches(X, 2):
        window, one = step.update(state, window, part)
        aux.append(one)
    state, info = step.apply(state, window)
    return state, (info, aux)


def check(forward, step, state):
    came, copies = [], []
    for _ in range(3):
        state, beside = forward(step, state)
        came.append(beside)
        copies.append(copied(beside))
    assert_trees_bitwise_equal(came, copies)


forms = pytest.mark.parametrize("forward", [over_batches, over_streams])


@forms
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_came_beside_a_donated_state_stays(forward, optimizer):
    for engine, size in itertools.product(("func", "autograd"), (None, 2)):
        check(forward, *step_of(optimizer, True, engine=engine, microbatch_size=size))


@pytest.mark.slow
@forms
def test_what_came_beside_a_donated_state_of_a_compiled_step_stays(forward):
    torch.compiler.reset()
    knobs = {"compile": {"backend": "eager"}, "microbatch_size": 4}
    check(forward, *step_of("adamw", False, **knobs))
