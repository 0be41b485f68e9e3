"""Products, estimates and solutions for networks, beside matrices that are written out in full.

In float64 on both sides, to the square root of the unit: a network's graphs add in another order.
What is drawn is within five standard errors of the truth, which a wrong formula is not: for the
keys that are written here that is no matter of luck.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap

import pureaccum as pa
from pureaccum._base.trees import tree_leaves
from pureaccum._core.auto_size import counting
from pureaccum.curvature import Operator, cg, diagonal, fisher_vp, ggnvp, hvp, trace
from tests.draws import examples
from tests.dropped import is_dropped
from tests.tables import every_night


pytestmark = [pytest.mark.bounds, pytest.mark.promise("curvature")]
ROOT_OF_UNIT = 2.0**-26.5
ROWS, CLASSES = 9, 3
NETWORKS = {
    "mlp": lambda: [nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, CLASSES)],
    "norm": lambda: [nn.Linear(6, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, CLASSES)],
    "convnet": lambda: [
        *(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 2, 2, padding=1), nn.Softplus()),
        *(nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(24, CLASSES)),
    ],
    "embedding": lambda: [nn.Embedding(7, 4), nn.Tanh(), nn.Flatten(), nn.Linear(24, CLASSES)],
}
NAMES = pytest.mark.parametrize("name", NETWORKS)


class Problem:
    """A network as functions, and its matrices written out."""

    def __init__(self, name):
        torch.manual_seed(0)
        self.net = nn.Sequential(*NETWORKS[name]()).double()
        self.params = {n: p.detach() for n, p in self.net.named_parameters()}
        x = torch.randint(0, 7, (ROWS, 6)) if name == "embedding" else torch.randn(ROWS, 6).double()
        self.batch = {
            "x": x,
            "y": torch.randint(0, CLASSES, (ROWS,)),
            "mask": torch.tensor([1.0, 0.0, 2.0, 1.0, 1.0, 0.5, 0.0, 0.0, 1.0]).double(),
        }
        self.flat = partial(flat, names=[*self.params])
        torch.manual_seed(1)
        self.u, self.v = ({n: torch.randn_like(p) for n, p in self.params.items()} for _ in "uv")

    def forward(self, params, batch):
        return functional_call(self.net, params, (batch["x"],))

    def each(self, out, batch):
        return F.cross_entropy(out, batch["y"], reduction="none")

    def loss(self, out, batch):
        return pa.Weighted((self.each(out, batch) * batch["mask"]).sum(), batch["mask"].sum())

    def losses(self, params, batch):
        each = self.each(self.forward(params, batch), batch)
        return pa.Weighted(each * batch["mask"], batch["mask"])

    def products(self, **options):
        whole = hvp(lambda p, b: self.loss(self.forward(p, b), b), **options)
        return {
            "hessian": lambda p, b, v: whole(p, b, v)[1],
            "gauss-newton": ggnvp(self.forward, self.loss, **options),
            "fisher": fisher_vp(self.losses, **options),
        }

    def matrix(self, kind, params=None):
        """The whole matrix, differentiable in params."""
        params, batch = params or self.params, self.batch
        weight = batch["mask"].sum()

        def as_matrix(blocks, rows):
            return torch.cat([blocks[n].reshape(rows, -1) for n in self.params], 1)

        if kind == "hessian":
            blocks = hessian(lambda p: self.loss(self.forward(p, batch), batch).total)(params)
            count = {n: p.numel() for n, p in params.items()}
            return torch.cat([as_matrix(blocks[n], count[n]) for n in params]) / weight
        if kind == "fisher":
            each = jacrev(lambda p: self.each(self.forward(p, batch), batch))(params)
            j = as_matrix(each, ROWS)
            return j.T @ (j * batch["mask"][:, None]) / weight
        j = as_matrix(jacrev(lambda p: self.forward(p, batch))(params), ROWS * CLASSES)
        out = self.forward(params, batch)
        bent = hessian(lambda out: self.loss(out, batch).total)(out).reshape(len(j), len(j))
        return j.T @ bent @ j / weight


def hessian(f):
    """Not torch.func's, which takes jacrev twice, and is wrong of F.layer_norm up to torch 2.13."""
    return jacrev(grad(f))


def flat(tree, names):
    return torch.cat([tree[n].reshape(-1) for n in names])


def near(came, want):
    assert (came - want).norm() <= ROOT_OF_UNIT * want.norm(), (came, want)


KINDS = ["hessian", "gauss-newton", "fisher"]
KIND = pytest.mark.parametrize("kind", KINDS)
SIZES = st.one_of(st.none(), st.integers(1, ROWS), st.just([2, 3, 3, 1]))


@NAMES
@KIND
@examples(1 / 4, fewest=6)
@given(SIZES)
def test_a_product_is_that_of_the_matrix(name, kind, size):
    """A masked mean, of which one microbatch may have nothing."""
    problem = Problem(name)
    of = partial(problem.products(microbatch_size=size)[kind], problem.params, problem.batch)
    near(problem.flat(of(problem.v)), problem.matrix(kind) @ problem.flat(problem.v))


@pytest.mark.parametrize("name", ["mlp", "embedding"])  # torch is wrong of F.layer_norm's third
@KIND
@examples(1 / 8, fewest=4)
@given(SIZES)
def test_transforms_around_a_product(name, kind, size):
    """Several vectors at once; and derivatives of the product, in params and along the vector."""
    problem = Problem(name)
    of = problem.products(microbatch_size=size)[kind]
    params, batch, u, v = problem.params, problem.batch, problem.u, problem.v
    several = pa.stack([u, v])
    came = vmap(lambda v: of(params, batch, v))(several)
    want = [problem.matrix(kind) @ problem.flat(x) for x in (u, v)]
    for x, y in zip(pa.unstack(came), want, strict=True):
        near(problem.flat(x), y)

    def number(params):
        return problem.flat(u) @ problem.flat(of(params, batch, v))

    def by_hand(params):
        return problem.flat(u) @ problem.matrix(kind, params) @ problem.flat(v)

    near(problem.flat(grad(number)(params)), problem.flat(grad(by_hand)(params)))
    near(jvp(number, (params,), (u,))[1], jvp(by_hand, (params,), (u,))[1])
    transposed = vjp(lambda v: of(params, batch, v), v)[1](u)[0]
    near(problem.flat(transposed), want[0])


@KIND
def test_a_product_of_several_arguments_and_dtypes(kind):
    """Complex parameters are pairs of real ones, float64 beside them, and a shared tensor."""
    torch.manual_seed(2)
    params = {"w": torch.randn(3, 2, dtype=torch.complex128), "b": torch.randn(2).double()}
    v = {n: torch.randn_like(p) for n, p in params.items()}
    x, y, scale = torch.randn(5, 3).double(), torch.randn(5, 2).double(), torch.tensor(0.5)

    def forward(params, x, scale, y):
        z = x.to(params["w"].dtype) @ params["w"]
        return {"out": z.real * scale + params["b"], "other": [z.imag, (x > 0)]}

    def rows(out, x, scale, y):
        kept = torch.where(out["other"][1][:, :2], out["other"][0], 0.0)
        return ((out["out"] - y) ** 4 + kept**2).sum(1)

    def loss(out, *args):
        return rows(out, *args).mean()

    def parts(tree):
        return torch.cat([torch.view_as_real(tree["w"]).reshape(-1), tree["b"]])

    def whole(vector):
        return {"w": torch.view_as_complex(vector[:12].view(3, 2, 2)), "b": vector[12:]}

    def of_parts(vector):
        return rows(forward(whole(vector), x, scale, y), x, scale, y)

    at = parts(params)
    options = {"microbatch_size": 2, "batch_argnums": (1, 3)}
    if kind == "hessian":
        of = hvp(lambda p, *args: loss(forward(p, *args), *args), **options)
        came, matrix = of(params, x, scale, y, v)[1], hessian(lambda a: of_parts(a).mean())(at)
    elif kind == "fisher":
        of = fisher_vp(lambda p, *args: rows(forward(p, *args), *args), **options)
        came, j = of(params, x, scale, y, v), jacrev(of_parts)(at)
        matrix = j.T @ j / 5
    else:
        came = ggnvp(forward, loss, **options)(params, x, scale, y, v)

        def outs(vector):
            out = forward(whole(vector), x, scale, y)
            return torch.cat([out["out"].reshape(-1), out["other"][0].reshape(-1)])

        def of_outs(outs):
            a, b = outs.view(2, 5, 2)
            return loss({"out": a, "other": [b, x > 0]}, x, scale, y)

        j = jacrev(outs)(at)
        matrix = j.T @ hessian(of_outs)(outs(at)) @ j
    near(parts(came), matrix @ parts(v))


@pytest.mark.slow
def test_plain_autograd_and_forward_ad_around_a_call():
    """Params that require grad are taken as they are; a tangent of the caller goes through."""
    problem = Problem("mlp")
    of = problem.products(microbatch_size=4)
    wanting = {n: p.clone().requires_grad_() for n, p in problem.params.items()}
    for product in of.values():
        want = product(problem.params, problem.batch, problem.v)
        came = product(wanting, problem.batch, problem.v)
        assert all(torch.equal(came[n], want[n]) and came[n].requires_grad for n in want)
        with torch.no_grad(), torch.inference_mode():
            came = product(problem.params, problem.batch, problem.v)
        assert all(torch.equal(came[n], want[n]) for n in want)
        along = partial(lambda f, p: f(p, problem.batch, problem.v), product)
        want = jvp(along, (problem.params,), (problem.u,))[1]
        with dual_level():
            duals = {n: make_dual(p, problem.u[n]) for n, p in problem.params.items()}
            if product is not of["hessian"]:
                with pytest.raises(RuntimeError, match=r"Use torch\.func\.jvp"):
                    along(duals)
                continue
            tangents = {n: unpack_dual(x).tangent for n, x in along(duals).items()}
        near(problem.flat(tangents), problem.flat(want))


@pytest.mark.slow
def test_functions_that_are_cut_inside():
    """A loss of all pairs of samples, an exact BatchNorm:

    a batch that is whole, with cuts in it.
    """
    problem = Problem("mlp")

    def of_pairs(embed):
        def loss(params, batch):
            z = embed(params, batch)
            return F.cross_entropy(z @ z.T, torch.arange(ROWS))

        return loss

    cut = pa.microbatch(problem.forward, microbatch_size=4)
    args = problem.params, problem.batch, problem.v
    want = jvp(lambda p: grad(of_pairs(problem.forward))(p, problem.batch), (args[0],), (args[2],))
    for came, x in zip(hvp(of_pairs(cut))(*args), want, strict=True):
        near(problem.flat(came), problem.flat(x))

    def scores(z, batch):
        return F.cross_entropy(z @ z.T, torch.arange(ROWS))

    near(
        problem.flat(ggnvp(cut, scores)(*args)), problem.flat(ggnvp(problem.forward, scores)(*args))
    )
    layers = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, CLASSES)
    net = nn.Sequential(*layers).double()
    whole, parts = pa.functional(net), pa.functional(net, microbatch_size=4)
    params = whole.params
    v = {n: torch.randn_like(p) for n, p in params.items()}

    def through(fn):
        return lambda params, batch: fn.apply(params, fn.buffers, batch["x"])[0]

    def both(fn):
        of = hvp(lambda p, b: problem.loss(through(fn)(p, b), b))
        return [
            of(params, problem.batch, v)[1],
            ggnvp(through(fn), problem.loss)(params, problem.batch, v),
        ]

    for came, x in zip(both(parts), both(whole), strict=True):
        near(flat(came, [*params]), flat(x, [*params]))


@pytest.mark.nightly
@KIND
def test_compiled(kind):
    problem = Problem("mlp")
    product = problem.products(microbatch_size=4)[kind]
    args = problem.params, problem.batch, problem.v
    want = problem.flat(product(*args))
    near(problem.flat(torch.compile(product, fullgraph=True, backend="aot_eager")(*args)), want)
    several = pa.stack([problem.u, problem.v])
    at_once = torch.compile(vmap(product, (None, None, 0)), fullgraph=True, backend="aot_eager")
    near(problem.flat(pa.unstack(at_once(*args[:2], several))[1]), want)


@pytest.mark.slow
@pytest.mark.promise("curvature")
@pytest.mark.promise("threads")
def test_threads():
    """Of which each has its own numbers, though torch's forward AD is one for all."""
    problem = Problem("mlp")
    fn = pa.functional(problem.net)  # torch's functional_call is not for several threads
    problem.forward = lambda params, batch: fn.apply(params, (), batch["x"])[0]
    products, args = problem.products(microbatch_size=2), (problem.params, problem.batch)
    wants = {kind: problem.flat(of(*args, problem.v)) for kind, of in products.items()}

    def run(i):
        kind = KINDS[i % 3]
        near(problem.flat(products[kind](*args, problem.v)), wants[kind])

    with ThreadPoolExecutor(4) as threads:
        assert len([*threads.map(run, range(90))]) == 90


# What is drawn ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", every_night(KINDS, but=["hessian"]))
def test_estimates_are_as_near_as_they_say(kind):
    problem = Problem("norm")
    of = partial(problem.products(microbatch_size=4)[kind], problem.params, problem.batch)
    matrix, key = problem.matrix(kind), pa.key(5)
    came = diagonal(of, problem.params, key=key, samples=200)
    off = (problem.flat(came.mean) - matrix.diag()).abs()
    assert (off <= 5 * problem.flat(came.error)).all()
    number = trace(of, problem.params, key=key, samples=200)
    assert (number.mean - matrix.trace()).abs() <= 5 * number.error
    # The error itself is the root of a variance that is known, over the samples.
    others = matrix - matrix.diag().diag()
    want = (2 * others.square().sum() / 200).sqrt()
    assert 0.7 < number.error / want < 1.4
    of_rows = (others.square().sum(1) / 200).sqrt()
    assert 0.8 < problem.flat(came.error).norm() / of_rows.norm() < 1.25
    # The same signs, of which a longer estimate has more.
    fewer = diagonal(of, problem.params, key=key, samples=3)
    again = diagonal(of, problem.params, key=key, samples=3)
    assert all(torch.equal(fewer.mean[n], again.mean[n]) for n in fewer.mean)
    assert diagonal(of, problem.params, key=key, samples=1).error["1.bias"].isnan().all()


def test_the_diagonal_of_the_empirical_fisher_matrix_by_moments():
    problem = Problem("mlp")

    def one(params, batch):
        each = problem.losses(params, batch)
        return pa.Weighted(each.total.sum(), each.weight.sum())

    moments = pa.per_sample_grad(one, reduce="moments", chunk_size=4, keep_batch_dim=True)
    came = moments(problem.params, problem.batch).second
    near(problem.flat(came), problem.matrix("fisher").diag())


def classes(params, batch, forward):
    """Labels from a softmax, by keys."""
    logits = forward(params, batch)
    uniform = pa.uniform(batch["keys"], logits.shape[1:], torch.float64)
    return batch | {"y": (logits - (-uniform.log()).log()).argmax(1)}


def of_labels(params, batch, forward):
    return F.cross_entropy(forward(params, batch), batch["y"], reduction="none")


@pytest.mark.slow
@pytest.mark.parametrize("size", [None, 4])
def test_what_is_drawn_is_a_constant_of_the_product(size):
    """It is what the loss itself would draw, though it is a function of params."""
    problem = Problem("mlp")
    keys = pa.fold_in(pa.key(0), torch.arange(ROWS))
    batch = problem.batch | {"keys": keys}

    def noisy(params, batch):
        out = problem.forward(params, batch)
        return batch | {"y": out * (1 + pa.normal(batch["keys"], out.shape[1:], torch.float64))}

    def errors(params, batch):
        return (problem.forward(params, batch) - batch["y"]).square().sum(1)

    def inside(params, batch):
        return errors(params, noisy({k: x.detach() for k, x in params.items()}, batch))

    drawn = fisher_vp(errors, draw=noisy, microbatch_size=size)
    want = fisher_vp(inside, microbatch_size=size)
    ours, theirs = (problem.flat(of(problem.params, batch, problem.v)) for of in (drawn, want))
    assert torch.equal(ours, theirs)


@pytest.mark.slow
def test_labels_that_are_drawn_give_gauss_newton_on_average():
    """The Fisher matrix of a softmax is that of Gauss-Newton; and one draw is one matrix."""
    problem = Problem("mlp")
    batch = problem.batch | {"mask": torch.ones(ROWS).double()}
    losses = partial(of_labels, forward=problem.forward)
    draw = partial(classes, forward=problem.forward)
    of, draws = fisher_vp(losses, draw=draw, microbatch_size=4), []
    for i in range(300):
        keys = pa.fold_in(pa.fold_in(pa.key(0), i), torch.arange(ROWS))
        draws.append(problem.flat(of(problem.params, batch | {"keys": keys}, problem.v)))
        if i == 0:
            both = batch | {"keys": keys}
            u_v = problem.flat(problem.u) @ draws[0]
            v_u = problem.flat(problem.v) @ problem.flat(of(problem.params, both, problem.u))
            near(u_v, v_u)
            whole = fisher_vp(losses, draw=draw)(problem.params, both, problem.v)
            near(problem.flat(whole), draws[0])  # however it is cut
    problem.batch = batch
    want = problem.matrix("gauss-newton") @ problem.flat(problem.v)
    each = torch.stack(draws)
    error = each.std(0) / 300**0.5
    assert ((each.mean(0) - want).abs() <= 5 * error).all()


# What is solved ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_solution_is_that_of_the_matrix():
    problem = Problem("norm")
    of = partial(problem.products(microbatch_size=4)["gauss-newton"], problem.params, problem.batch)
    matrix = problem.matrix("gauss-newton")
    matrix = matrix + 0.1 * torch.eye(len(matrix)).double()
    want = torch.linalg.solve(matrix, problem.flat(problem.v))
    inverse = {n: 1 / d for n, d in unflat(matrix.diag(), problem).items()}
    steps = {}
    for name, options in {
        "plain": {},
        "preconditioned": {"preconditioner": lambda r: {n: x * inverse[n] for n, x in r.items()}},
        "exactly": {
            "preconditioner": lambda r: unflat(torch.linalg.solve(matrix, problem.flat(r)), problem)
        },
    }.items():
        solver = cg(of, damping=0.1, rtol=1e-10, **options)
        state = solver.run(solver.init(problem.v))
        # |x - want| is at most |residual| / the smallest eigenvalue, which damping bounds
        bound = 1e-10 * problem.flat(problem.v).norm() / 0.1
        assert (problem.flat(state.x) - want).norm() <= 2 * bound
        assert state.norm <= state.target
        steps[name] = int(state.steps)
        again = solver.run(solver.init(problem.v, state.x))
        assert int(again.steps) <= 1  # it begins where it was told to
    assert steps["exactly"] == 1
    several = pa.stack([problem.u, problem.v])
    solver = cg(of, damping=0.1, rtol=1e-10)
    state = vmap(solver.init)(several)
    for _ in range(2 * len(matrix)):
        state = vmap(solver.update)(state)
    came = pa.unstack(state.x)
    assert (problem.flat(came[1]) - want).norm() <= 2 * bound


def unflat(vector, problem):
    parts = vector.split([p.numel() for p in problem.params.values()])
    pairs = zip(problem.params.items(), parts, strict=True)
    return {n: part.view(p.shape) for (n, p), part in pairs}


@pytest.mark.slow
def test_scipy_and_columns():
    linalg = pytest.importorskip("scipy.sparse.linalg", reason="SciPy is not installed")
    problem = Problem("mlp")
    of = partial(problem.products(microbatch_size=4)["gauss-newton"], problem.params, problem.batch)
    operator = Operator(of, problem.params)
    names = sorted(problem.params)  # as a tree has them
    order = torch.cat(
        [
            torch.arange(len(problem.flat(problem.v))).split(
                [p.numel() for p in problem.params.values()]
            )[[*problem.params].index(n)]
            for n in names
        ]
    )
    matrix = problem.matrix("gauss-newton")[order][:, order]
    near(operator @ torch.eye(len(matrix)).double(), matrix)
    near(operator @ flat(problem.v, names), matrix @ flat(problem.v, names))
    near(flat(operator @ problem.v, names), matrix @ flat(problem.v, names))
    largest = linalg.eigsh(operator.to_scipy(), k=2, return_eigenvectors=False)
    near(torch.as_tensor(largest), torch.linalg.eigvalsh(matrix)[-2:])
    assert operator.shape == operator.to_scipy().shape == matrix.shape


# Memory, and calls ------------------------------------------------------------------------------


@pytest.mark.slow
@KIND
def test_the_memory_of_one_microbatch(kind):
    """With 64 microbatches as with 4, by a tenth at most; and whole it grows with the batch."""
    width = 48
    params = [torch.randn(width, width) / width**0.5 for _ in range(4)]

    def forward(params, x):
        for w in params:
            x = torch.tanh(x @ w)
        return x

    def peak(rows, size):
        x = torch.randn(rows, width)
        products = {
            "hessian": hvp(lambda p, x: forward(p, x).square().mean(), microbatch_size=size),
            "gauss-newton": ggnvp(forward, lambda o, x: o.square().mean(), microbatch_size=size),
            "fisher": fisher_vp(lambda p, x: forward(p, x).square().mean(1), microbatch_size=size),
        }
        with counting() as live:
            products[kind](params, x, params)
        return live.peak

    assert peak(64 * 64, 64) <= 1.1 * peak(4 * 64, 64)
    assert peak(64 * 64, None) > 3 * peak(64 * 64, 64)


def test_each_function_is_called_once_a_microbatch():
    problem, calls = Problem("mlp"), []

    def forward(params, batch):
        if not is_dropped():
            calls.append("forward")
        return problem.forward(params, batch)

    def loss(out, batch):
        if not is_dropped():
            calls.append("loss")
        return problem.loss(out, batch)

    def losses(params, batch):
        return problem.each(forward(params, batch), batch)

    args = problem.params, problem.batch, problem.v
    for of, names in (
        (
            hvp(lambda p, b: loss(forward(p, b), b), microbatch_size=4, check=False),
            ["forward", "loss"],
        ),
        (ggnvp(forward, loss, microbatch_size=4, check=False), ["forward", "loss"]),
        (fisher_vp(losses, microbatch_size=4, check=False), ["forward"]),
    ):
        calls.clear()
        of(*args)
        assert calls == names * 3
    assert tree_leaves(args[0])[0].grad is None
