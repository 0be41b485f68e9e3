"""Products with curvature: those of curvlinops, on the same network and batches.

To the square root of the unit in float64: two graphs of one network add in another order.
"""

import pytest
import torch
from torch import nn

import pureaccum as pa


curvlinops = pytest.importorskip("curvlinops", reason="needs curvlinops (the extra bench)")
pytestmark = [
    pytest.mark.parity,
    pytest.mark.promise("curvature"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
ROOT_OF_UNIT = 2.0**-26.5


@pytest.mark.parametrize("cut", [None, 4], ids=["whole", "in microbatches"])
@pytest.mark.parametrize("kind", ["mse", "cross entropy"])
@pytest.mark.parametrize("of", ["Hessian", "GGN", "EF"])
def test_products(of, kind, cut):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    criterion = nn.MSELoss() if kind == "mse" else nn.CrossEntropyLoss()
    x = torch.randn(11, 5).double()
    y = torch.randn(11, 3).double() if kind == "mse" else torch.randint(0, 3, (11,))
    batch, batches = (x, y), [(x[:6], y[:6]), (x[6:], y[6:])]
    params = {name: p.detach() for name, p in net.named_parameters()}
    v = {name: torch.randn_like(p) for name, p in params.items()}

    def forward(params, batch):
        return torch.func.functional_call(net, params, (batch[0],))

    def losses(params, batch):
        each = type(criterion)(reduction="none")(forward(params, batch), batch[1])
        # curvlinops divides the matrix of a mean over outputs by their number, and not the losses.
        return each if each.dim() == 1 else each.sum(1) / 3**0.5

    makers = {
        "Hessian": lambda **options: second(
            pa.curvature.hvp(lambda p, b: criterion(forward(p, b), b[1]), **options)
        ),
        "GGN": lambda **options: pa.curvature.ggnvp(
            forward, lambda out, b: criterion(out, b[1]), **options
        ),
        "EF": lambda **options: pa.curvature.fisher_vp(losses, **options),
    }
    came = makers[of](microbatch_size=cut)(params, batch, v)
    streamed = makers[of](stream=True)(params, batches, v)
    operator = getattr(curvlinops, f"{of}LinearOperator")
    theirs = operator(net, criterion, [*net.parameters()], batches)
    want = dict(zip(params, theirs @ [v[name] for name in params], strict=True))
    for name in params:
        for x in (came, streamed):
            assert (x[name] - want[name]).norm() <= ROOT_OF_UNIT * want[name].norm(), name


def test_solutions_and_estimates():
    """Of one matrix, that of a regression: solutions to tolerances, estimates to errors."""
    torch.manual_seed(0)
    net = nn.Linear(8, 1, bias=False).double()
    batch, like = (torch.randn(20, 8).double(), torch.randn(20, 1).double()), net.weight.detach()
    b = torch.randn(1, 8).double()
    params = [net.weight]
    theirs = curvlinops.HessianLinearOperator(net, nn.MSELoss(), params, [batch])
    hvp = pa.curvature.hvp(lambda w, b: (b[0] @ w.T - b[1]).square().mean(), microbatch_size=6)

    def ours(v):
        return hvp(like, batch, v)[1]

    (want,) = curvlinops.CGInverseLinearOperator(theirs, tolerance=1e-12, max_iter=200) @ [b]
    solver = pa.curvature.cg(ours, rtol=1e-12)
    came = solver.run(solver.init(b)).x
    smallest = torch.linalg.eigvalsh(batch[0].T @ batch[0] / 10)[0]
    assert (came - want).norm() <= 2 * 1e-12 * b.norm() / smallest + ROOT_OF_UNIT * want.norm()

    of_trace = pa.curvature.trace(ours, like, key=pa.key(0), samples=7)
    assert (curvlinops.hutchinson_trace(theirs, 7) - of_trace.mean).abs() <= 8 * of_trace.error
    each = pa.curvature.diagonal(ours, like, key=pa.key(0), samples=7)
    off = curvlinops.hutchinson_diag(theirs, 7) - each.mean.flatten()
    assert (off.abs() <= 8 * each.error.flatten()).all()


def second(product):
    return lambda *args: product(*args)[1]
