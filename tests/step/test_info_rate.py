"""``info.lr`` is the rate that moved the parameters, and belongs to the info alone."""

import pytest
import torch

import pureaccum as pa


pytestmark = [pytest.mark.exact, pytest.mark.promise("applied")]

RATES = {
    "number": 0.25,
    "tensor": torch.tensor(0.25, dtype=torch.float64),
    "schedule": lambda count: 0.25 * 0.5 ** count.double(),
}
OPTIMIZERS = {
    "sgd": pa.sgd,
    "fused": lambda lr: pa.sgd(lr, fused=True),
    "chain": lambda lr: pa.chain(pa.clip_by_global_norm(8.0), pa.sgd(lr)),
    "from_torch": lambda lr: pa.from_torch(torch.optim.SGD, lr=lr),
    "partition": lambda lr: pa.partition({"a": pa.sgd(lr), "b": pa.sgd(0.5)}, str),
}
BATCH = torch.ones(4)


def loss(params, batch):
    return (sum(params.values()) * batch).mean()  # every gradient is one


def begun(optimizer, **options):
    step = pa.make_step(loss, optimizer, microbatch_size=2, **options)
    params = {"a": torch.zeros((), dtype=torch.float64), "b": torch.zeros((), dtype=torch.float64)}
    return step, step.init(params)


EAGER = [
    (kind, rate, {"donate": donate})
    for kind in OPTIMIZERS
    for rate in RATES
    for donate in (False, True)
]
COMPILED = [
    (kind, "schedule", {"compile": {"backend": "eager"}}) for kind in ("chain", "partition")
]


@pytest.mark.parametrize(
    ("kind", "rate", "options"),
    [*EAGER, *(pytest.param(*case, marks=pytest.mark.slow) for case in COMPILED)],
)
def test_the_rate_of_an_info_moved_the_parameters(kind, rate, options):
    step, state = begun(OPTIMIZERS[kind](RATES[rate]), **options)
    told, before = [], {"a": 0.0, "b": 0.0}
    for count in range(3):
        state, info = step(state, BATCH)
        moved = {name: before[name] - x.item() for name, x in state.params.items()}
        before = {name: x.item() for name, x in state.params.items()}
        told.append((info.lr, moved))
        assert moved["a"] == (0.25 * 0.5**count if rate == "schedule" else 0.25)
    for lr, moved in told:  # none was given up, or written to, by a later step
        lr = lr if kind == "partition" else {"a": lr, "b": lr}
        assert {name: x.item() for name, x in lr.items()} == moved
        assert all(x.shape == () for x in lr.values())


def test_a_rate_is_told_where_the_step_was_not_applied():
    step, state = begun(pa.sgd(0.25))
    _, info = step(state, torch.tensor([1.0, torch.inf]))
    assert (info.lr.item(), info.applied.item()) == (0.25, False)


def test_members_of_an_ensemble_have_rates_of_their_own():
    step, state = begun(pa.sgd(0.25))
    states = pa.stack(
        [state, state._replace(opt_state=state.opt_state._replace(lr=state.opt_state.lr / 2))]
    )
    _, info = torch.func.vmap(step, in_dims=(0, None))(states, BATCH)
    assert info.lr.tolist() == [0.25, 0.125]


def test_an_optimizer_that_does_not_tell_has_none():
    class Plain:
        def init(self, params):
            return ()

        def apply(self, grads, state, params):
            return {name: x - grads[name] for name, x in params.items()}, ()

    step, state = begun(pa.chain(pa.clip_by_global_norm(8.0), Plain()))
    assert step(state, BATCH)[1].lr == ()
