"""A step that compiles itself, on CUDA: the numbers of the eager step, and nothing waits."""

import optree
import pytest
import torch

import pureaccum as pa


pytestmark = [
    pytest.mark.parity,
    pytest.mark.cuda,
    # inductor says once that it could round more
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.promise("compiled"),
]
TABLES = {"scan": 8, "unrolled": 40_000, "loop": 300_000}  # samples of 8: to 9.6 MB


def loss(params, batch, keys):
    h = torch.relu(batch["x"] @ params["in"] + params["table"][batch["i"]])
    error = ((pa.dropout(h, 0.5, keys) @ params["out"] - batch["y"]) ** 2).sum(-1)
    return pa.Weighted((error * batch["mask"]).sum(), batch["mask"].sum())


def make_params(rows, dtype):
    random = torch.Generator("cuda").manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=random, device="cuda", dtype=dtype)

    table = torch.zeros(rows, 8, device="cuda", dtype=dtype)
    return {"in": draw(4, 8), "out": draw(8, 2), "table": table}


def make_batch(rows, seed, dtype):
    random = torch.Generator("cuda").manual_seed(seed)
    return {
        "x": torch.randn(rows, 4, generator=random, device="cuda", dtype=dtype),
        "y": torch.randn(rows, 2, generator=random, device="cuda", dtype=dtype),
        "i": torch.randint(0, 8, (rows,), generator=random, device="cuda"),
        "mask": torch.randint(0, 3, (rows,), generator=random, device="cuda").to(dtype),
    }


def make(compile, dtype, **options):
    return pa.make_step(
        loss,
        pa.chain(pa.clip_by_global_norm(1.0), pa.adamw(1e-2)),
        microbatch_size=4,
        keys=True,
        nonfinite="skip",
        loss_scale=pa.dynamic_loss_scale(8.0),
        compile=compile,
        **options,
    )


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize(
    "form", ["scan", pytest.param("unrolled", marks=pytest.mark.given_up("recipes")), "loop"]
)
def test_a_compiled_step_has_the_numbers_of_the_eager_one_on_cuda(form, donate):
    """In float64, where a fused sum in another order is far below what a fault would be."""
    dtype = torch.float64
    ours, eager = make(True, dtype, donate=donate), make(False, dtype)
    params = make_params(TABLES[form] // 2, dtype)
    state, other = ours.init(params), eager.init(params)
    rows = 14 if form == "unrolled" else 22
    assert ours.form(state, make_batch(rows, 0, dtype)) == form
    for seed in range(3):
        batch = make_batch(rows, seed, dtype)
        if seed == 1:
            batch["y"][5] = torch.nan
        (state, info), (other, what) = ours(state, batch), eager(other, batch)
        assert info.skipped.item() == what.skipped.item()
        pairs = zip(
            optree.tree_leaves((state, info), namespace="pureaccum"),
            optree.tree_leaves((other, what), namespace="pureaccum"),
            strict=True,
        )
        for x, y in pairs:
            assert (x.dtype, x.shape, x.device) == (y.dtype, y.shape, y.device)
            if x.is_floating_point():
                assert (x - y).norm() <= 2.0**-26.5 * y.norm()
            else:
                assert torch.equal(x, y)


@pytest.mark.promise("launches")
@pytest.mark.promise("compiled")
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("form", ["scan", "loop"])
def test_a_compiled_step_does_not_wait_for_the_device(form, donate):
    """Once it is compiled."""
    dtype = torch.float32
    step = make(True, dtype, donate=donate)
    state = step.init(make_params(TABLES[form], dtype))
    batches = [make_batch(22, seed, dtype) for seed in range(3)]
    batches[1]["x"][:] = torch.inf
    for batch in batches[:2]:  # kernels load and wait
        state, _ = step(state, batch)
        state, _ = step.apply(state, step.update(state, step.begin(state), batch))
    applied = []
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            state, info = step(state, batch)
            applied.append(info.applied)
        window = step.update(state, step.begin(state), batches[0])
        state, info = step.apply(state, window)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [x.item() for x in applied] == [True, False, True]
    assert info.applied
