"""Real networks: the full batch's gradient and value, however the batch is accumulated.

Two graphs of a network round differently, and the error of each sample's gradient is unknown; in
float64 it is below the square root of the unit, which leaves eight digits for every real fault.
"""

import pytest
import torch
from hypothesis import given, note, target
from hypothesis import strategies as st

import pureaccum as pa
from pureaccum.testing.strategies import KINDS, histories, pieces, reduction, seeds
from tests.draws import examples
from tests.networks import NETWORKS, ROWS, batch_of, loss_of, params_of
from tests.problems import leaf
from tests.rounding import UNIT, gamma


pytestmark = [pytest.mark.bounds, pytest.mark.promise("bounds")]
ROOT_OF_UNIT = float(UNIT[torch.float64]) ** 0.5
networks = pytest.mark.parametrize("network", list(NETWORKS))
engines = pytest.mark.parametrize("engine", ["func", "autograd"])


def one_graph(network, kind, params, batch):
    """Gradient and value of the whole batch; then what the samples add to them, one by one."""

    def weigh(of):
        return of["weights"] if kind == "weighted" else torch.ones_like(of["weights"])

    by = 1.0 if kind == "sum" else weigh(batch).sum()

    def share(params, of):
        total = loss_of(network, "weighted")(params, of | {"weights": weigh(of)}).total
        return total / by

    grad_and_value = lambda of: torch.func.grad_and_value(share)(params, of)  # noqa: E731
    return grad_and_value(batch), [grad_and_value(row) for row in pieces(batch, [1] * ROWS)]


@networks
@engines
@pytest.mark.parametrize("kind", KINDS)
@examples(1 / 4)
@given(seed=seeds(), history=histories(ROWS), size=st.integers(1, ROWS + 1), donate=st.booleans())
def test_any_history_is_the_full_batch_in_float64(
    network, engine, kind, seed, history, size, donate
):
    params, batch = params_of(seed, torch.float64), batch_of(seed, torch.float64)
    loss, options = loss_of(network, kind), {"reduction": reduction(kind), "engine": engine}
    (want, want_value), rows = one_graph(network, kind, params, batch)

    acc = pa.accumulator(loss, **options)
    streamed = acc.finalize(history.run(acc, params, batch, donate))
    cut = pa.grad_and_value(loss, microbatch_size=size, **options)(params, batch)

    for grads in (streamed[0], cut[0]):
        for name in params:
            allowed = ROOT_OF_UNIT * sum(row[name].norm() for row, _ in rows)
            assert (grads[name] - want[name]).norm() <= allowed, name
    alone = pa.value(loss, microbatch_size=size, reduction=reduction(kind))(params, batch)
    for value in (streamed[1], cut[1], alone):
        assert (value - want_value).abs() <= ROOT_OF_UNIT * sum(row.abs() for _, row in rows)


@networks
@engines
@examples(1 / 4)
@given(seed=seeds(), history=histories(ROWS))
def test_in_float32_nothing_is_lost_but_the_roundings_of_the_sum(network, engine, seed, history):
    """Of k microbatch gradients as torch itself gives them, k - 1 additions, number by number.

    How far those are from the truth is the loss's own affair, as it is for the full batch.
    """
    params, batch = params_of(seed, torch.float32), batch_of(seed, torch.float32)
    loss = loss_of(network, "sum")
    given = [backward(loss, params, part) for part in pieces(batch, history.sizes)]

    acc = pa.accumulator(loss, reduction="sum", engine=engine)
    got = history.run(acc, params, batch).grads

    unit = gamma(len(given) - 1, UNIT[torch.float32]) + gamma(len(given), UNIT[torch.float64])
    for name in params:
        addends = torch.stack([g[name] for g in given]).double()
        error = (got[name].double() - addends.sum(0)).abs()
        assert (error <= float(unit) * addends.abs().sum(0)).all(), name

    full = backward(loss, params, batch)
    ratio = own_error(network, got, seed) / own_error(network, full, seed)
    note(f"error against float64 is {ratio:.3g} of the full batch's own")
    target(float(ratio), label="error relative to the full batch's own")


def backward(loss, params, batch):
    """The gradient as ``.backward()`` gives it: torch.func's differs in the last place of some
    derivatives (silu, group_norm), which it takes by formulas that can be differentiated again.
    """
    leaves = {name: leaf(x) for name, x in params.items()}
    options = {"allow_unused": True, "materialize_grads": True}
    grads = torch.autograd.grad(loss(leaves, batch), [*leaves.values()], **options)
    return dict(zip(params, grads, strict=True))


def own_error(network, grads, seed):
    """The distance from the same gradient in float64, of the same float32 numbers."""
    params, batch = params_of(seed, torch.float32), batch_of(seed, torch.float32)
    params, batch = ({k: x.double() for k, x in tree.items()} for tree in (params, batch))
    want = torch.func.grad(loss_of(network, "sum"))(params, batch)
    return torch.stack([(grads[k].double() - want[k]).norm() for k in want]).norm()
