"""Products with curvature over whole numbers: the same bits however the batch is cut."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad, jvp, vmap

import pureaccum as pa
from pureaccum.curvature import cg, fisher_vp, ggnvp, hvp
from pureaccum.distributed import gather, psum
from pureaccum.testing import assert_trees_bitwise_equal
from tests.draws import examples, generator, slices, take
from tests.ranks import in_step, on_ranks


pytestmark = [pytest.mark.exact, pytest.mark.promise("curvature")]
PRODUCTS = ["hessian", "gauss-newton", "fisher"]
REDUCTIONS = ["sum", "weighted", "mean"]  # of as many samples as is a power of two


def whole_numbers(*shape, seed):
    return torch.randint(-3, 4, shape, generator=generator(seed)).double()


def tree(seed):
    return {"w": whole_numbers(2, 3, seed=seed), "b": whole_numbers(2, seed=seed + 1)}


def batch_of(rows, seed):
    mask = torch.randint(0, 3, (rows,), generator=generator(seed)).double()
    return {"x": whole_numbers(rows, 3, seed=seed), "mask": mask}


def forward(params, batch):
    z = batch["x"] @ params["w"].T + params["b"]
    return torch.stack([z[:, 0] ** 2, z[:, 0] * z[:, 1]], 1)


def of_rows(out, batch):
    return (out[:, 0] - batch["x"][:, 0]) ** 2 + out[:, 0] * out[:, 1]


def loss_of(out, batch, reduction):
    each = of_rows(out, batch)
    if reduction == "weighted":
        return pa.Weighted((each * batch["mask"]).sum(), batch["mask"].sum())
    return each.sum() if reduction == "sum" else each.mean()


def losses_of(params, batch, reduction):
    each = of_rows(forward(params, batch), batch)
    return pa.Weighted(each * batch["mask"], batch["mask"]) if reduction == "weighted" else each


def product(kind, reduction, **options):
    """A product of ours, of (params, batch, v)."""
    options["reduction"] = "sum" if reduction == "sum" else "mean"
    if kind == "hessian":
        of = hvp(lambda p, b: loss_of(forward(p, b), b, reduction), **options)
        return lambda p, b, v: of(p, b, v)[1]
    if kind == "gauss-newton":
        return ggnvp(forward, partial(loss_of, reduction=reduction), **options)
    return fisher_vp(partial(losses_of, reduction=reduction), **options)


def by_hand(kind, reduction, params, batch, v):
    """The same of the whole batch in plain torch.func: a sum, and one division."""
    if kind == "fisher":

        def one(params, row):
            one_row = {name: x[None] for name, x in row.items()}
            return of_rows(forward(params, one_row), one_row)[0]

        each = vmap(grad(one), (None, 0))(params, batch)
        along = sum((g * v[name]).flatten(1).sum(1) for name, g in each.items())
        weight = batch["mask"] if reduction == "weighted" else torch.ones(len(batch["x"]))
        sums = {n: torch.einsum("n...,n->...", g, along * weight.double()) for n, g in each.items()}
    else:
        weight = batch["mask"] if reduction == "weighted" else torch.ones(len(batch["x"]))

        def total(out):
            return (of_rows(out, batch) * weight.double()).sum()

        if kind == "hessian":
            sums = jvp(grad(lambda p: total(forward(p, batch))), (params,), (v,))[1]
        else:
            out, moved = jvp(lambda p: forward(p, batch), (params,), (v,))
            bent = jvp(grad(total), (out,), (moved,))[1]
            sums = torch.func.vjp(lambda p: forward(p, batch), params)[1](bent)[0]
    if reduction == "sum":
        return sums
    return {name: x / weight.sum() for name, x in sums.items()}


KIND, REDUCTION = pytest.mark.parametrize("kind", PRODUCTS), st.sampled_from(REDUCTIONS)


@pytest.mark.slow
@KIND
@given(REDUCTION, st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(0, 2**20))
def test_any_cut_gives_the_same_bits(kind, reduction, sizes, seed):
    if reduction == "mean":
        sizes = [4] * (1 << (len(sizes) // 2))
    batch, params, v = batch_of(sum(sizes), seed), tree(seed + 2), tree(seed + 4)
    if reduction == "weighted":
        batch["mask"][0] = 1.0
    want = by_hand(kind, reduction, params, batch, v)
    parts = [take(batch, rows) for rows in slices(sizes)]
    for came in (
        product(kind, reduction)(params, batch, v),
        product(kind, reduction, microbatch_size=sizes)(params, batch, v),
        product(kind, reduction, microbatch_size=4)(params, batch, v),
        product(kind, reduction, stream=True)(params, parts, v),
        product(kind, reduction, stream=True, microbatch_size=4)(params, parts, v),
    ):
        assert_trees_bitwise_equal(came, want)


@pytest.mark.slow
@KIND
@given(REDUCTION, st.integers(0, 2**20))
def test_it_is_symmetric_and_linear(kind, reduction, seed):
    batch, params, u, v = batch_of(8, seed), *(tree(seed + i) for i in (2, 4, 6))
    if reduction == "weighted":
        batch["mask"] = torch.ones(8).double()
    of = partial(product(kind, reduction, microbatch_size=4), params, batch)
    u_v = sum((of(u)[name] * x).sum() for name, x in v.items())
    v_u = sum((of(v)[name] * x).sum() for name, x in u.items())
    assert torch.equal(torch.as_tensor(u_v), torch.as_tensor(v_u))
    both = of({name: 2 * x - v[name] for name, x in u.items()})
    assert_trees_bitwise_equal(both, {name: 2 * x - of(v)[name] for name, x in of(u).items()})


@given(REDUCTION, st.integers(1, 9), st.integers(0, 2**20))
def test_gauss_newton_is_the_hessian_where_forward_is_linear(reduction, size, seed):
    def linear(params, batch):
        return batch["x"] @ params["w"].T + params["b"]

    batch, params, v = batch_of(8, seed), tree(seed + 2), tree(seed + 4)
    batch["mask"][3] = 2.0
    options = {"microbatch_size": size, "reduction": "sum" if reduction == "sum" else "mean"}
    if reduction == "mean":
        options["microbatch_size"] = 2
    loss = partial(loss_of, reduction=reduction)
    gauss_newton = ggnvp(linear, loss, **options)(params, batch, v)
    grads, hessian = hvp(lambda p, b: loss(linear(p, b), b), **options)(params, batch, v)
    assert_trees_bitwise_equal(gauss_newton, hessian)
    of_grad = pa.grad(lambda p, b: loss(linear(p, b), b), **options)(params, batch)
    assert_trees_bitwise_equal(grads, of_grad)


@KIND
def test_a_microbatch_without_weight_adds_nothing(kind):
    batch, params, v = batch_of(6, 0), tree(1), tree(2)
    batch["mask"] = torch.tensor([1.0, 2.0, 0.0, 0.0, 1.0, 1.0]).double()
    want = by_hand(kind, "weighted", params, batch, v)
    batch["x"][2:4] = torch.nan
    came = product(kind, "weighted", microbatch_size=2)(params, batch, v)
    assert_trees_bitwise_equal(came, want)
    batch["mask"] = torch.zeros(6).double()
    for x in product(kind, "weighted", microbatch_size=2)(params, batch, v).values():
        assert x.isnan().all()


@pytest.mark.parametrize("v", [{"w": torch.zeros(2, 3), "b": torch.zeros(2)}, tree(5)])
def test_a_numerator_without_weight_adds_its_total(v):
    """Also along a vector on which nothing depends: a loss counts by what it is itself."""

    def ratio(params, batch):
        each = of_rows(forward(params, batch), batch)
        return pa.Weighted(each.sum(), batch["mask"].sum())

    batch, params = batch_of(6, 3), tree(1)
    v = {name: x.double() for name, x in v.items()}
    batch["mask"] = torch.tensor([1.0, 2.0, 0.0, 0.0, 1.0, 0.0]).double()
    want = jvp(grad(lambda p: of_rows(forward(p, batch), batch).sum()), (params,), (v,))
    for came, sums in zip(hvp(ratio, microbatch_size=2)(params, batch, v), want, strict=True):
        assert_trees_bitwise_equal(came, {name: x / 4 for name, x in sums.items()})


@KIND
@examples(1 / 4)
@given(st.integers(1, 9), st.integers(0, 2**20))
def test_several_vectors_at_once(kind, size, seed):
    batch, params = batch_of(9, seed), tree(seed + 2)
    several = {"w": whole_numbers(3, 2, 3, seed=seed), "b": whole_numbers(3, 2, seed=seed + 1)}
    of = partial(product(kind, "sum", microbatch_size=size), params, batch)
    one_by_one = pa.stack([of(take(several, i)) for i in range(3)])
    assert_trees_bitwise_equal(vmap(of)(several), one_by_one)


# Conjugate gradients --------------------------------------------------------------------------


@examples(1 / 4)
@given(st.integers(0, 12), st.integers(0, 2**20))
def test_a_solution_that_is_interrupted(tmp_path_factory, at, seed):
    file = tmp_path_factory.mktemp("cg") / "state"
    params, b = tree(seed), tree(seed + 2)
    of = partial(product("fisher", "mean", microbatch_size=3), params)
    solver = cg(partial(of, batch_of(9, seed)), damping=50.0)
    pa.save(file, solver.run(solver.init(b), at))
    assert_trees_bitwise_equal(
        solver.run(pa.load(file, like=solver.init(b)), 20), solver.run(solver.init(b), at + 20)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_decides_is_not_rounded_on_the_way(dtype):
    """A product of two numbers of 24 bits has 48: float64 holds it, their own dtype not."""
    b = torch.full((4,), 0.1, dtype=dtype)
    state = cg(lambda v: v).init(b)
    assert state.energy == 4 * b[0].double() ** 2


# Ranks ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.promise("curvature")
@pytest.mark.promise("ranks")
@on_ranks(1, 2, 3)
@in_step(1 / 2)
@given(st.data())
def test_the_rows_of_all_ranks(rank, world, data):
    kind, reduction = data.draw(st.sampled_from(PRODUCTS)), data.draw(REDUCTION)
    cuts = sorted(data.draw(st.integers(0, 8)) for _ in range(world - 1))
    own = slice([0, *cuts][rank], [*cuts, 8][rank])
    batch, params, v = batch_of(8, 7), tree(1), tree(2)
    batch["mask"][3] = 2.0
    want = by_hand(kind, reduction, params, batch, v)
    if reduction == "mean":  # of each rank's rows: whole numbers divided by them
        reduction, batch["mask"] = "weighted", torch.ones(8).double()
    part = take(batch, own)
    stream = data.draw(st.booleans())
    came = product(
        kind, reduction, group=torch.distributed.group.WORLD, stream=stream, microbatch_size=2
    )(params, [part] if stream else part, v)
    assert_trees_bitwise_equal(came, want)
    several = {name: torch.stack([x, 2 * x]) for name, x in v.items()}
    of = partial(
        product(kind, reduction, group=torch.distributed.group.WORLD, microbatch_size=3), params
    )
    assert_trees_bitwise_equal(
        vmap(lambda v: of(part, v))(several),
        {name: torch.stack([x, 2 * x]) for name, x in want.items()},
    )


@pytest.mark.slow
@pytest.mark.promise("curvature")
@pytest.mark.promise("ranks")
@on_ranks(2)
def test_a_loss_that_reaches_other_ranks(rank, world):
    """Of all pairs of samples, of which each rank scores its own against all."""
    x, params, v = whole_numbers(7, 3, seed=1), tree(1), tree(2)
    own = slice(0, 4) if rank == 0 else slice(4, 7)

    def of_pairs(some, rows):
        return ((some @ rows.T) ** 2).sum()

    def embed(params, x):
        return (x @ params["w"].T + params["b"]) ** 2

    def loss(params, x):
        z = embed(params, x)
        return of_pairs(z, gather(z)) + psum(z.sum()) * z.sum()

    def whole(params):
        z = embed(params, x)
        return of_pairs(z, z) + z.sum() * z.sum()

    options = {"reduction": "sum", "group": torch.distributed.group.WORLD}
    want = jvp(grad(whole), (params,), (v,))
    assert_trees_bitwise_equal(hvp(loss, **options)(params, x[own], v), want)

    def scores(z, x):
        return of_pairs(z, gather(z)) + psum(z.sum()) * z.sum()

    z, moved = jvp(lambda p: embed(p, x), (params,), (v,))
    bent = jvp(grad(lambda z: of_pairs(z, z) + z.sum() * z.sum()), (z,), (moved,))[1]
    (want,) = torch.func.vjp(lambda p: embed(p, x), params)[1](bent)
    assert_trees_bitwise_equal(ggnvp(embed, scores, **options)(params, x[own], v), want)


@pytest.mark.slow
@pytest.mark.promise("curvature")
@pytest.mark.promise("ranks")
@on_ranks(2)
def test_a_derivative_of_a_product_over_ranks(rank, world):
    batch, params, v = batch_of(7, 7), tree(1), tree(2)
    own = slice(0, 7) if rank == 0 else slice(7, 7)

    def along(of, params):
        return sum((x * tree(3)[name]).sum() for name, x in of(params).items())

    for kind in PRODUCTS:
        of = product(kind, "sum", group=torch.distributed.group.WORLD, microbatch_size=3)
        came = grad(partial(along, lambda params, of=of: of(params, take(batch, own), v)))(params)
        by = partial(by_hand, kind, "sum")
        want = grad(partial(along, lambda params, by=by: by(params, batch, v)))(params)
        assert_trees_bitwise_equal(came, want)
