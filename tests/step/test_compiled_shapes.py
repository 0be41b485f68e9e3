"""Which sizes a step that compiles itself leaves open, and what becomes of those it does not.

``nn.Dropout`` tells: torch.func has none for tensors of which a size is open.
"""

import pytest
import torch
from torch import nn

import pureaccum as pa
from tests.problems import in_a_window
from tests.step.problems import assert_close, counting, loss, make_batch, make_params, pair
from tests.step.test_memory_report import allocated


pytestmark = [pytest.mark.transforms, pytest.mark.promise("compiled")]
ROWS = 600_000  # of a table whose gradient is too large for a scan


def dropping(module, size, backend, table=0, **options):
    """A step of a loss that hands out what a network with nn.Dropout did to its samples."""
    fn = pa.functional(module)

    def loss(params, x):
        out, _ = fn.apply(params["net"], fn.buffers, x)
        value = out.square().mean()
        return (value + params["table"][0].sum() if table else value), out.flatten(1).sum(1)

    options = {"has_aux": True, "compile": {"backend": backend}} | options
    step = pa.make_step(loss, pa.sgd(0.0), microbatch_size=size, **options)
    params = {"net": fn.params} | ({"table": torch.zeros(table, 4)} if table else {})
    return step, step.init(params)


def check(info, rows):
    """Every sample is there, and of a hundred numbers in it about half are zero, the others two."""
    assert info.applied
    assert len(info.aux) == rows
    assert all(40 <= n <= 160 for n in info.aux.tolist())
    assert len(info.aux.unique()) > 1 or rows == 1  # no two samples share their mask


class Ones(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.one * x


def net():
    """Ones in, and 0 or 2 out."""
    return nn.Sequential(Ones(), nn.Dropout(0.5))


WIDTHS = [(10, 10, 10), (10, 4, 25), (10, 5, 20)]


def of_rows(*all_rows):
    return [(rows, 10, 10) for rows in all_rows]


# The form, the size, the rows of a table, the shapes of batches, the compiler, and torch's limit.
RUNS = {
    "widths in a scan": ("scan", 2, 0, WIDTHS, "eager", 1),
    "widths, unrolled": ("unrolled", None, 0, WIDTHS, "eager", 1),
    "widths in a loop": ("loop", 2, ROWS, WIDTHS, "eager", 1),
    "widths by inductor": ("scan", 2, 0, [(8, 10, 10), (8, 4, 25)], "inductor", 8),
    "rows in a scan": ("scan", 4, 0, of_rows(14, 11), "eager", 1),
    "rows, unrolled": ("unrolled", None, 0, of_rows(3, 4, 5, 6, 1), "eager", 2),
    "rows in a loop": ("loop", 4, ROWS, of_rows(18, 19), "eager", 2),
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.given_up("recipes") if "unrolled" in n else ())
        for n in RUNS
    ],
)
def test_dropout_compiles_at_any_shape(name):
    """Each width has a graph of its own, so torch's limit (here one) is none; so has each number of
    samples, since a graph for any number of them does not compile.
    """
    form, size, table, shapes, backend, limit = RUNS[name]
    step, state = dropping(net(), size, backend, table)
    with torch._dynamo.config.patch(recompile_limit=limit):
        for shape in shapes:
            batch = torch.ones(*shape)
            assert step.form(state, batch) == form
            check(step(state, batch)[1], len(batch))


@pytest.mark.nightly
def test_dropout_compiles_in_a_second_model():
    """In one process; torch remembers the sizes of the first by the same lines of ours."""
    for width in (3, 5):
        module = nn.Sequential(nn.Linear(width, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        step, state = dropping(module, 2, "aot_eager")
        assert step(state, torch.randn(8, width))[1].applied


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("size", "table", "all_rows", "limit"),
    [(4, 0, (14, 11), 1), (None, 0, (3, 4, 5, 6, 1), 2), (4, ROWS, (18, 19), 2)],
)
def test_dropout_compiles_at_any_number_of_rows(size, table, all_rows, limit):
    """A graph for any number of samples does not compile, and one for each of them does."""
    step, state = dropping(net(), size, "eager", table)
    with torch._dynamo.config.patch(recompile_limit=limit):
        for rows in all_rows:
            check(step(state, torch.ones(rows, 10, 10))[1], rows)


@pytest.mark.nightly
def test_dropout_compiles_in_a_ragged_stream():
    step, state = dropping(net(), None, "eager")
    window = step.begin(state)
    for rows in (2, 3, 4, 3):
        window, aux = step.update(state, window, torch.ones(rows, 10, 10))
        assert len(aux) == rows
    assert step.apply(state, window)[1].weight == 12


@pytest.mark.nightly
def test_no_other_size_is_open():
    """Of a second model of other widths in the same process, or of another length."""
    seen = []

    def backend(graph, inputs):
        seen.append([x for x in inputs if isinstance(x, torch.SymInt)])
        return graph.forward

    settings = {"compile": {"backend": backend}}
    for width in (3, 5):
        ours, _ = pair(lambda p, x: (x @ p).square().mean(), pa.sgd(0.1), **settings)
        for length in (2, 3):
            ours(ours.init(torch.ones(width, width)), torch.ones(8, length, width))
    assert seen == [[]] * 4


@pytest.mark.nightly
def test_each_microbatch_of_a_list_of_sizes_goes_through_a_graph():
    """One of two sizes, so two graphs; and what they come to is what the eager step comes to."""
    settings, graphs = counting()
    ours, eager = pair(loss, pa.sgd(0.5), microbatch_size=[2, 3, 2], compile=settings)
    state, batch = eager.init(make_params()), make_batch(rows=7)
    assert ours.form(state, batch) == "loop"
    assert_close(ours(state, batch), eager(state, batch))
    assert len(graphs) >= 2


@pytest.mark.nightly
def test_open_sizes_are_had_for_the_asking():
    """``dynamic`` is torch's own word, and shapes then share a graph."""
    settings, graphs = counting()
    loss = lambda w, x: (x * w).square().mean()  # noqa: E731
    compile = settings | {"dynamic": True}
    ours, eager = pair(loss, pa.sgd(0.1), nonfinite="skip", compile=compile)
    state = ours.init(torch.tensor(1.0).double())
    for length in range(2, 6):
        batch = torch.ones(8, length).double()
        assert_close(ours(state, batch), eager(state, batch))
    assert len(graphs) <= 2


@pytest.mark.nightly
def test_a_module_that_begins_to_drop_goes_on():
    """Microbatches that went through together, while nothing was random, go one by one."""
    fn = pa.functional(module := net().eval())
    ours, _ = pair(lambda p, x: fn.apply(p, fn.buffers, x)[0].square().mean(), pa.sgd(0.0))
    state = ours.init(fn.params)
    losses = []
    for mode in (False, True, False):
        module.train(mode)
        losses.append(ours(state, torch.ones(8, 50))[1].loss.item())
    assert losses[0] == losses[2] == 1
    assert losses[1] != 1


# Several models of one step -----------------------------------------------------------------------


def of_width(width, dtype=torch.float64):
    shapes = {"w1": (4, width), "w2": (width, 1)}
    return {name: torch.randn(shape, dtype=dtype) / width**0.5 for name, shape in shapes.items()}


def two_layers(p, x):
    return ((x @ p["w1"]).tanh() @ p["w2"]).square().mean()


@pytest.mark.nightly
@pytest.mark.parametrize("form", ["unrolled", "scan", "stream"])
def test_each_model_of_one_step_has_graphs_of_its_own(form):
    """So torch's limit (here one) is none, and a model that came before is not compiled again."""
    settings, graphs = counting()
    size = 2 if form == "scan" else None
    ours, eager = pair(two_layers, pa.adamw(0.1), microbatch_size=size, compile=settings)
    kinds = [(3, torch.float64), (5, torch.float64), (5, torch.float32)]
    made = []
    with torch._dynamo.config.patch(recompile_limit=1):
        for width, dtype in (*kinds, *kinds):
            state, x = ours.init(of_width(width, dtype)), torch.randn(8, 4, dtype=dtype)
            if form == "stream":
                got, want = (in_a_window(s, state, [x]) for s in (ours, eager))
            else:
                got, want = ours(state, x), eager(state, x)
            if dtype == torch.float64:
                assert_close(got, want)
            made.append(len(graphs))
    each = 2 if form == "stream" else 1
    assert made == [each, 2 * each, *[3 * each] * 4]


@pytest.mark.nightly
@pytest.mark.parametrize(("first", "second"), [(4, 50_000), (50_000, 4)])
def test_a_second_model_takes_the_memory_that_it_takes_alone(first, second, tmp_path):
    """How many microbatches go together follows from the model, of which batches know nothing."""
    x = torch.randn(512, 4)
    peaks = []
    for widths in ([second], [first, second]):
        compile = {"backend": "aot_eager"}
        step = pa.make_step(two_layers, pa.sgd(0.1), microbatch_size=8, compile=compile)
        for width in widths:
            state = step.init(of_width(width, torch.float32))
            step(state, x)
        peaks.append(allocated(lambda: step(state, x), tmp_path / "trace.json"))  # noqa: B023
    assert peaks[0] == peaks[1]
