"""The private names of torch that the package touches exist, and do what it takes them to do."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pureaccum._base.torch_internals import (
    autograd,
    compiler,
    functorch,
    kernels,
    modes,
    module_slots,
    operations,
)


pytestmark = [pytest.mark.parity, pytest.mark.promise("private")]


def test_a_transform_is_seen_at_every_level():
    seen = []

    def look(x):
        seen.append(modes.transform_active())
        return (x * x).sum()

    x = torch.ones(2)
    look(x)
    for transform in (
        torch.func.grad(look),
        torch.func.vmap(look),
        torch.func.jacfwd(look),
        torch.func.jacrev(look),
        lambda x: torch.func.jvp(look, (x,), (x,)),
        lambda x: torch.func.vjp(look, x),
        torch.func.functionalize(look),
        torch.func.vmap(torch.func.grad(look)),
    ):
        transform(x.reshape(1, 2))
    look(x)
    assert seen == [False, *[True] * 8, False]
    assert torch._C._functorch.maybe_current_level() is None


def test_compilation_is_seen():
    torch.compiler.reset()
    compiled = torch.compile(
        lambda x: x + 1 if modes.transform_active() else x - 1,
        backend="eager",
        fullgraph=True,
    )
    assert compiled(torch.zeros(())) == 1


def test_foreach_add_adds_in_place_and_widens():
    sums = [torch.ones(2), torch.ones(3)]
    kernels.foreach_add_(sums, [torch.ones(2).bfloat16(), torch.ones(3)], alpha=3.0)
    assert torch.equal(sums[0], torch.full((2,), 4.0))
    assert torch.equal(sums[1], torch.full((3,), 4.0))


def test_foreach_lerp_has_the_bits_of_lerp_and_leaves_its_arguments():
    x, y = torch.arange(9.0) / 7, torch.arange(9.0) ** 2 / 3
    for share in (1 - 0.999, 0.3, 1 - 0.3):
        versions = x._version, y._version
        (mean,) = kernels.foreach_lerp([x], [y], share)
        assert (x._version, y._version) == versions
        assert torch.equal(mean, torch.lerp(x, y, share))
        assert torch.equal(mean, torch.lerp(x, y, torch.tensor(share, dtype=torch.float32)))
        kernels.foreach_lerp_([into := x.clone()], [y], share)
        assert torch.equal(mean, into)


@pytest.mark.mechanism
def test_tensors_lie_apart_where_none_has_a_number_of_another():
    """Views that interleave count as if they did not; an empty one has no number."""
    x, y = torch.zeros(12), torch.zeros(12)
    table = x.view(3, 4)
    assert kernels.lie_apart([*x.split(5), y, y.new_zeros(0), x[5:5]])
    assert kernels.lie_apart([table[:1].t(), table[1:].t(), x.to_sparse()])
    for others in ([x, x], [x, x.detach()], [x[:6], x[5:]], [table[:, 0], table[:, 3]]):
        assert not kernels.lie_apart([y, *others])
    assert not kernels.lie_apart([(sparse := x.to_sparse()), sparse])


def test_foreach_add_takes_no_lists_that_are_empty():
    """Why ``add_gradients_`` asks first."""
    with pytest.raises(RuntimeError, match="at least one tensor"):
        kernels.foreach_add_([], [])


def test_a_backward_pass_gives_gradients_or_adds_them_to_sums():
    """As ``torch.autograd.grad`` and ``.backward()``; a leaf that is not used has none."""
    x, y, z = (torch.arange(3.0).requires_grad_() for _ in range(3))
    cotangent = torch.tensor(2.0)

    def total():
        return (x * x + 3 * y).sum()

    want = (4 * x.detach(), torch.full((3,), 6.0), None)
    for came in (
        autograd.gradients(total(), [x, y, z], cotangent),
        torch.autograd.grad(total(), [x, y, z], cotangent, allow_unused=True),
    ):
        assert torch.equal(came[0], want[0])
        assert torch.equal(came[1], want[1])
        assert came[2] is None
    sums = {0: torch.ones(3), 2: torch.ones(3)}
    came = autograd.gradients_into(sums, total(), [x, y, z], cotangent)
    assert came[0] is None
    assert torch.equal(came[1], want[1])
    assert torch.equal(sums[0], 1 + want[0])
    assert torch.equal(sums[2], torch.ones(3))
    assert x.grad is y.grad is z.grad is None


def test_a_level_of_our_own_is_that_of_vjp_without_its_trees():
    """Over when it is left, by an error too; nested; and without the hooks that vjp refuses."""
    x, y = torch.arange(3.0), torch.ones(3)

    def outs(leaves):
        x, y = leaves
        within = torch.func.grad(lambda x: (x**3).sum())(x)
        return [(within * x).sum() + y.sin().sum(), x * 2]

    own, (total, _), (value, twice) = functorch.on_a_level(outs, [x, y])
    assert torch._C._functorch.maybe_current_level() is None
    assert not functorch.is_wrapped(value)
    assert not functorch.is_wrapped(twice)
    want, pull, _ = torch.func.vjp(lambda *xs: (outs([*xs])[0], xs[0]), x, y, has_aux=True)
    assert torch.equal(value, want)
    for came, wanted in zip(
        autograd.gradients(total, own, torch.tensor(2.0)),
        pull(torch.tensor(2.0)),
        strict=True,
    ):
        assert torch.equal(came, wanted)
        assert not functorch.is_wrapped(came)

    def fails(_):
        with torch.autograd.graph.save_on_cpu():
            raise AssertionError

    for _ in range(2):
        with pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"):
            functorch.on_a_level(fails, [x])
        assert torch._C._functorch.maybe_current_level() is None
        assert autograd.saved_tensors_hooks_allowed()
        assert not torch._C._functorch.get_inplace_requires_grad_allowed()
    with (
        torch.autograd.graph.save_on_cpu(),
        pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"),
    ):
        functorch.on_a_level(outs, [x, y])
    assert autograd.saved_tensors_hooks_allowed()


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_kernel_tells_what_is_finite_and_changes_no_bit(dtype, bad):
    tensors = [torch.randn(5, dtype=dtype), torch.tensor([-0.0, 5e-324, 1e38], dtype=dtype)]
    before = [x.clone() for x in tensors]
    assert kernels.finite_by_one_kernel(tensors)
    for x, y in zip(tensors, before, strict=True):
        assert torch.equal(x, y)
        assert torch.equal(x.signbit(), y.signbit())
    tensors[1][1] = bad
    assert not kernels.finite_by_one_kernel(tensors)


def test_whether_saved_tensor_hooks_are_allowed():
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        assert not autograd.saved_tensors_hooks_allowed()
    assert autograd.saved_tensors_hooks_allowed()


def test_no_mode_sees_what_is_unseen():
    seen = []
    with modes.seeing(lambda _, out: seen.append(out)):
        with modes.unseen():
            torch.ones(2) + 1
        assert not seen
        torch.ones(2) + 1
    assert seen


def test_foreach_add_takes_a_sparse_term():
    rows = torch.tensor([[1, 1]])
    term = torch.sparse_coo_tensor(rows, torch.ones(2, 3), (4, 3), check_invariants=True)
    total = torch.zeros(4, 3)
    kernels.foreach_add_([total], [term], alpha=2.0)
    assert torch.equal(total, 2 * term.to_dense())


def test_modules_keep_their_tensors_where_we_look():
    norm = nn.BatchNorm1d(2)
    root = nn.Sequential(nn.Linear(2, 2), nn.Sequential(norm, norm), nn.LSTM(2, 2), nn.ReLU())
    places = {(module, name) for module, _, name in module_slots.tensor_places(root)}
    linear, lstm = root[0], root[2]
    assert places == {
        (linear, "_parameters"),
        (norm, "_parameters"),
        (norm, "_buffers"),
        (lstm, "_parameters"),
    }
    for module, attributes, name in module_slots.tensor_places(root):
        assert attributes[name] is getattr(module, name)
    assert dict(linear._parameters) == {"weight": linear.weight, "bias": linear.bias}
    assert dict(norm._buffers) == dict(norm.named_buffers())
    assert dict(root._modules) == dict(root.named_children())


def test_functional_call_puts_tensors_into_those_places():
    """And a recurrent module sees by itself at each call that its flat weights are others."""
    lstm = nn.LSTM(2, 2)
    other = {name: torch.ones_like(p) for name, p in lstm.named_parameters()}
    found = []

    def look(module, *_):
        found.extend([list(module._parameters.values()), list(module._flat_weights)])

    lstm.register_forward_hook(look)
    torch.func.functional_call(lstm, other, (torch.zeros(1, 2),))
    lstm(torch.zeros(1, 2))
    for tensors, expected in zip(found, (other, other, *[lstm._parameters] * 2), strict=True):
        assert all(a is b for a, b in zip(tensors, expected.values(), strict=True))


def test_setting_nothing_empties_a_tensor_in_place():
    """What donation leaves behind: ``set_`` frees the memory, and the class can be changed."""
    tensor = torch.ones(3)
    alias = tensor.detach()
    tensor.set_()
    tensor.__class__ = type("Marked", (torch.Tensor,), {})
    assert tensor.numel() == 0
    assert torch.equal(alias, torch.ones(3))


def test_versions_count_writes_but_not_those_in_inference_mode():
    x = torch.zeros(2)
    with torch.inference_mode():
        unseen = torch.zeros(2)
    assert (
        autograd.version(x),
        autograd.version(x.add_(1)),
        autograd.version(unseen),
    ) == (0, 1, None)


def test_hooks_on_tensors_are_seen_of_both_kinds():
    def hook(grad):
        pass

    x = torch.zeros(2, requires_grad=True)
    assert autograd.tensor_hooks(x) == [[], []]
    before, after = x.register_hook(hook), x.register_post_accumulate_grad_hook(hook)
    assert autograd.tensor_hooks(x) == [[hook], [hook]]
    before.remove()
    after.remove()
    assert autograd.tensor_hooks(x) == [[], []]


def test_hooks_of_all_modules_are_seen_of_every_kind():
    def hook(*_):
        pass

    before = module_slots.hooks_of_all_modules()
    known = vars(nn.modules.module).items()
    registers = {name: f for name, f in known if name.startswith("register_module_")}
    del registers["register_module_backward_hook"]  # goes with no full one, and has its place
    assert len(registers) >= 7
    for register in registers.values():
        handle = register(hook)
        seen = module_slots.hooks_of_all_modules()
        assert [hook] in [hooks for name, hooks in seen.items() if hooks != before.get(name)]
        handle.remove()
        assert module_slots.hooks_of_all_modules() == before


def test_functional_call_leaves_no_more_behind_than_flat_weights():
    """Which a recurrent module makes anew at its next call."""
    lstm = nn.LSTM(2, 2)
    other = {name: torch.ones_like(p) for name, p in lstm.named_parameters()}
    lstm(torch.zeros(1, 2))
    whole, ours = dict(vars(lstm)), module_slots.module_vars(lstm)
    torch.func.functional_call(lstm, other, (torch.zeros(1, 2),))
    assert all(vars(lstm)[name] is held for name, held in ours.items())
    assert {name for name in whole if name not in ours} >= {"_flat_weights", "_flat_weights_names"}


def test_whether_saved_tensors_hooks_are_allowed_is_seen():
    assert autograd.saved_tensors_hooks_allowed()
    with torch.autograd.graph.disable_saved_tensors_hooks("no"):
        assert not autograd.saved_tensors_hooks_allowed()
    assert autograd.saved_tensors_hooks_allowed()


def test_the_innermost_saved_tensors_hooks_are_seen():
    pairs = [(lambda x: x, lambda x: x) for _ in range(2)]
    assert autograd.saved_tensors_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(*pairs[0]):
        assert autograd.saved_tensors_hooks() == pairs[0]
        with torch.autograd.graph.saved_tensors_hooks(*pairs[1]):
            assert autograd.saved_tensors_hooks() == pairs[1]
        assert autograd.saved_tensors_hooks() == pairs[0]


# The compiler -----------------------------------------------------------------------------


@pytest.mark.slow
def test_scan_is_a_loop_in_a_graph():
    """Over a body that calls torch.func, with a carry that is a tree, and outputs stacked."""

    def body(carry, xs):
        total, count = carry
        grad = torch.func.grad(lambda x: (x**2).sum())(xs[0])
        return (total + grad, count + 1), [grad.sum()]

    def run(x):
        return compiler.scan_in_graph(
            body, (torch.zeros(2), torch.zeros((), dtype=torch.int64)), [x]
        )

    x = torch.arange(6.0).reshape(3, 2)
    torch.compiler.reset()
    (total, count), (sums,) = torch.compile(run, backend="aot_eager", fullgraph=True)(x)
    assert total.tolist() == [12.0, 18.0]
    assert count == 3
    assert sums.tolist() == [2.0, 10.0, 18.0]


def counting(graphs):
    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    return {"backend": backend}


@pytest.mark.slow
def test_functions_of_one_def_have_limits_of_their_own():
    """torch counts recompilations by code: the ninth closure would not compile."""
    graphs = []

    def add(number):
        return lambda x: x + number

    functions = [compiler.compile_anew(add(i), True, counting(graphs)) for i in range(10)]
    assert [f(torch.zeros(1)).item() for f in functions] == list(range(10))
    assert len(graphs) == 10


def test_one_graph_takes_any_number_of_rows_if_it_is_told_to():
    graphs = []
    function = compiler.compile_anew(lambda x: x.sum(0), False, counting(graphs))
    for rows in (5, 3, 9):
        assert function(compiler.let_vary(torch.ones(rows, 2))).tolist() == [rows, rows]
    assert len(graphs) == 1
    fixed = compiler.compile_anew(lambda x: x.sum(0), False, counting(graphs))
    for rows in (5, 3):
        fixed(torch.ones(rows, 2))
    assert len(graphs) == 3


def test_errors_of_the_compiler_are_told_from_others():
    """And where in the user's code they came from."""

    def branches(x):
        if x.sum() > 0:
            return x
        return -x

    def raising(graph, inputs):
        def run(*args):
            raise RuntimeError("while it runs")

        return run

    def no_backend(graph, inputs):
        raise RuntimeError("while it is compiled")

    x = torch.ones(2)
    with pytest.raises(Exception, match=r"[Dd]ata-dependent") as caught:
        compiler.compile_anew(branches, False, {"backend": "eager"})(x)
    assert compiler.is_compiler_error(caught.value)
    last = compiler.compiler_stack(caught.value)[-1]
    assert (last.filename, last.line) == (__file__, "if x.sum() > 0:")
    with pytest.raises(Exception, match="while it is compiled") as caught:
        compiler.compile_anew(lambda x: x + 1, False, {"backend": no_backend})(x)
    assert compiler.is_compiler_error(caught.value)
    with pytest.raises(RuntimeError, match="while it runs") as caught:
        compiler.compile_anew(lambda x: x + 2, False, {"backend": raising})(x)
    assert not compiler.is_compiler_error(caught.value)
    assert compiler.compiler_stack(caught.value) == []
    function = compiler.compile_anew(lambda x, y: x if y else -x, False, {"backend": "eager"})
    function(x, True)
    with (
        torch._dynamo.config.patch(recompile_limit=1),
        pytest.raises(Exception, match="fullgraph=True") as caught,
    ):
        function(x, None)
    assert compiler.is_compiler_error(caught.value)
    assert "recompile" in type(caught.value).__name__.lower()  # what explain.py looks for


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"dynamic": None}, {"dynamic": True}])
def test_numbers_are_constants_of_a_graph(settings):
    """Those of arguments and those that are captured, ints and floats; sizes as they are asked."""
    made = []

    def backend(graph, inputs):
        made.append([type(x) for x in inputs])
        return graph.forward

    held = {"t": 0.0}

    def function(x, t):
        return x * (1 - t) * (1 - held["t"])

    program = compiler.compile_anew(function, False, {"backend": backend} | settings)
    numbers = [0.99999, 2, 3, 0.99998]
    for turn in range(2):
        for t in numbers:
            held["t"] = t
            x = torch.ones(3 + turn, 4)
            assert torch.equal(program(x, t), function(x, t))
    assert len(made) == len(numbers) * (1 if settings.get("dynamic") else 2)
    kinds = {kind for inputs in made for kind in inputs}
    assert kinds == {torch.Tensor} | ({torch.SymInt} if settings.get("dynamic") else set())


@pytest.mark.mechanism
def test_guards_are_left_out_by_names_that_torch_gives_them(
    monkeypatch,
):
    """Some are left out, and none that is about what the user holds."""
    seen = []
    real = compiler._worth_guarding

    def spying(guards):
        worth = real(guards)
        seen.extend(zip([guard.name for guard in guards], worth, strict=True))
        return worth

    monkeypatch.setattr(compiler, "_worth_guarding", spying)
    module, held = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)), {"number": 2.0}

    def function(x):
        return torch.nn.functional.relu(module(x)) * held["number"]

    compiler.compile_anew(function, False, {"backend": "eager"})(torch.ones(1, 2))
    names = {kept: [name for name, worth in seen if worth is kept] for kept in (True, False)}
    assert any("__import_torch" in name for name in names[False])
    assert any("held" in name or "['number']" in name for name in names[True])
    assert any("training" in name for name in names[True])
    assert any("_global_forward_hooks" in name for name in names[True])
    assert not any("held" in name or "training" in name for name in names[False])


@pytest.mark.parametrize("dims", [0, 1])
def test_what_a_graph_writes_to_a_0d_float64_tensor_is_lost(dims):
    """Why ``_programs.written`` returns those: up to torch 2.14 they are numbers to the graph."""

    def function(x, y):
        x.copy_(y + 1)
        return y * 2

    torch.compiler.reset()
    x, y = torch.zeros([1] * dims, dtype=torch.float64), torch.ones([1] * dims).double()
    torch.compile(function, backend="aot_eager", fullgraph=True)(x, y)
    mended = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)
    assert x.item() == (2 if dims or mended else 0)


def test_every_operation_is_seen_below_transforms_and_in_backward_passes():
    seen = []

    def see(arguments, out):
        assert type(out) is torch.Tensor
        seen.append((autograd.in_backward(), len(arguments)))

    x = torch.ones(3)
    with modes.seeing(see):
        torch.func.vmap(torch.func.grad(lambda x: x.sin()))(x)
    assert {backward for backward, _ in seen} == {False, True}
    assert not autograd.in_backward()
    count = len(seen)
    x.add(1)
    assert len(seen) == count


def test_what_is_imagined_holds_no_numbers():
    """And does not draw any."""
    before = torch.get_rng_state()
    huge = torch.empty(2**30, 2**10, device="meta", dtype=torch.bool)
    captured = torch.ones(3)
    with modes.imagining() as (imagined, taken_for):
        x = imagined(torch.ones(3, 2).T)
        assert (x.shape, x.stride(), x.device.type) == ((2, 3), (1, 2), "cpu")
        assert imagined(huge).device.type == "cpu"
        assert x.sum().item() == 1.0
        assert (x.sum() > 2).item() is True
        assert torch.equal(x, x + 1)
        assert nn.functional.dropout(x).untyped_storage().device.type == "meta"
        view = captured.view(1, 3)
        assert view.untyped_storage() is taken_for(captured).untyped_storage()
        assert taken_for(x) is x
    assert torch.equal(torch.get_rng_state(), before)


def test_who_sees_operations_is_seen():
    """Modes, tracers and tensors that hold no numbers, under transforms too; no function mode."""
    assert not modes.dispatched()
    with modes.seeing(), torch.device("cpu"):
        assert modes.dispatched()
    with modes.imagining():
        assert modes.dispatched()
    seen = []

    def note(x):
        seen.append(modes.dispatched())
        return x * 2

    make_fx(note)(torch.ones(2))
    with torch.device("cpu"), modes.Asking(lambda *_: None):
        torch.func.vmap(torch.func.functionalize(note))(torch.ones(2))
    assert seen == [True, False]


def test_who_traces_is_told_from_us_and_from_who_chooses_a_device():
    class Functions(TorchFunctionMode):
        pass

    class Operations(TorchDispatchMode):
        pass

    assert not modes.traced()
    with torch.device("cpu"), modes.Asking(lambda *_: None), modes.seeing():
        assert modes.may_write()
    with modes.imagining():
        assert modes.may_write()
    for mode in Functions, Operations, FakeTensorMode:
        with mode(), modes.Asking(lambda *_: None):
            assert modes.traced()
            assert not modes.may_write()
            assert not modes.transform_active()
    seen = []

    def note(x):
        its = modes
        seen.append((its.may_write(), its.transform_active(), its.pre_dispatching()))
        return x * 2

    make_fx(note)(torch.ones(2))
    make_fx(note, pre_dispatch=True)(torch.ones(2))
    torch.func.functionalize(note)(torch.ones(2))
    assert seen == [(False, True, False), (False, True, True), (False, True, False)]


@pytest.mark.given_up("restored modes")
def test_modes_that_were_on_once_are_put_on_again():
    class Functions(TorchFunctionMode):
        pass

    class Operations(TorchDispatchMode):
        pass

    function, operation, later = Functions(), Operations(), Operations()
    with torch.device("cpu"), function, operation:
        then = modes.modes_around()
    assert then[0][1:] == [function]
    assert then[1:] == [[operation]]
    assert modes.modes_around() == [[], []]
    with later, modes.Asking(lambda *_: None), FakeTensorMode():
        now = modes.modes_around()
        with modes.within(then):
            assert modes.modes_around() == then
            assert torch.overrides._get_current_function_mode_stack()[1:] == then[0]
            assert modes.dispatched()
        assert modes.modes_around() == now == [[], [later]]
    assert modes.modes_around() == [[], []]


def test_a_tensor_that_is_noted_to_be_zero_is_seen():
    x = torch.ones(3, requires_grad=True)
    (zero,) = torch.autograd.grad(torch.sgn(x).sum(), x)
    assert zero._is_zerotensor()
    assert not kernels.owns_its_memory(zero)
    assert not kernels.materialised(zero).add_(1).sub_(1).any()
    assert kernels.materialised(x) is x


def test_collectives_are_known_by_their_names():
    for name in ("all_reduce", "all_gather_into_tensor", "wait_tensor"):
        operation = getattr(torch.ops._c10d_functional, name).default
        assert operation.namespace in operations.COLLECTIVES
    assert torch.ops.c10d.allreduce_.default.namespace in operations.COLLECTIVES
    assert torch.ops.aten.add.Tensor.namespace not in operations.COLLECTIVES
    drawing = torch.ops.aten.bernoulli.default, torch.ops.aten.native_dropout.default
    assert all(torch.Tag.nondeterministic_seeded in each.tags for each in drawing)


def test_a_mode_is_asked_before_each_function():
    asked = []
    with modes.Asking(lambda func, args, kwargs: asked.append((func, len(args), kwargs))):
        torch.sum(torch.ones(2, 2), dim=0)
    assert (torch.sum, 1, {"dim": 0}) in asked


def test_what_an_operation_writes_to_is_known_before_it_runs():
    """Batch norm declares nothing, and writes to its statistics all the same."""
    seen = {}

    def before(operation, args, kwargs):
        written = operations.written_by(operation, args, kwargs)
        seen[str(operation)] = len(written)

    x, mean, var = torch.randn(4, 3), torch.zeros(3), torch.ones(3)
    with modes.seeing(before=before):
        x.add(1)
        x.add_(1)
        torch.add(x, 1, out=torch.empty(4, 3))
        torch._foreach_mul_([x, mean], 2)
        torch.nn.functional.embedding(torch.tensor([1]), x, max_norm=1.0)
        torch.batch_norm(x, None, None, mean, var, False, 0.1, 1e-5, False)
        assert seen["aten.native_batch_norm.default"] == 0
        torch.batch_norm(x, None, None, mean, var, True, 0.1, 1e-5, False)
    assert seen["aten.native_batch_norm.default"] == 2
    assert (seen["aten.add.Tensor"], seen["aten.add_.Tensor"], seen["aten.add.out"]) == (0, 1, 1)
    assert seen["aten._foreach_mul_.Scalar"] == 2
    assert seen["aten.embedding_renorm_.default"] == 1


def test_views_have_one_memory_and_others_have_not():
    x = torch.ones(4, 3)
    views = (x[1:], x.T, x.detach(), x.data, x.view(-1), torch.nn.Parameter(x))
    assert {kernels.memory_of(y) for y in views} == {kernels.memory_of(x)}
    assert kernels.memory_of(x.clone()) != kernels.memory_of(x)
    assert kernels.memory_of(x.to_sparse()) is None
    inside = torch.func.vmap(lambda y: y.sum() * (kernels.memory_of(y) == kernels.memory_of(x)))(x)
    assert inside.eq(3).all()


def test_who_else_lies_in_the_memory_of_a_tensor_is_seen():
    x = torch.ones(4, 3)
    assert kernels.owns_its_memory(x)
    assert not kernels.owns_its_memory(x.to_sparse())
    assert not kernels.owns_its_memory(torch.ones(3, dtype=torch.complex64).conj())
    view = x[:2]
    assert not kernels.owns_its_memory(x)
    assert not kernels.owns_its_memory(view)
    alone = view.detach()
    del x, view
    assert kernels.owns_its_memory(alone)


def test_a_vmap_is_left_and_entered_by_hand():
    """As torch.func's own: what is mapped, what is not, and what another transform wraps."""
    x, w = torch.arange(6.0).reshape(3, 2), torch.ones(2, requires_grad=True)
    found = []

    def of(row, turned):
        level = functorch.transform_level() or 0
        found.append([functorch.members_of(a, level) for a in (row, turned.T, w)])
        torch.func.grad(lambda a: found.append(functorch.members_of(a, level)) or a.sum())(row)
        below = functorch.below_vmap(torch.mul, x, w)
        assert functorch.below_vmap(lambda: functorch.transform_level() is None)
        return [functorch.as_members(below, level) + row, row.sum(), torch.ones(4)]

    turned = torch.arange(12.0).reshape(3, 2, 2)
    outs = functorch.over_rows(of, [x, turned], "error")
    (mapped, transposed, plain), nothing = found
    assert torch.equal(mapped[0], x)
    assert torch.equal(transposed[0], turned.mT)
    assert plain[0] is w
    assert [a[1] for a in (mapped, transposed, plain)] == [True, True, False]
    assert nothing is None
    want = torch.func.vmap(lambda row: (2 * row, row.sum(), torch.ones(4)))(x)
    assert all(torch.equal(a, b) for a, b in zip(outs, want, strict=True))
    assert [*autograd.ends_of(outs[0].sum())] == [w]
    with pytest.raises(RuntimeError, match="randomness"):
        functorch.over_rows(lambda row: [torch.rand_like(row)], [x], "error")
    assert functorch.transform_level() is None


@pytest.mark.parametrize("own", [None, 3, torch.ones(2)])
def test_what_a_function_itself_calls_variable_is_no_end_of_a_graph(own):
    class Scales(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return 2 * x

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.variable = own

        @staticmethod
        def backward(ctx, *grads):
            return 2 * grads[0]

    w = torch.ones(3, requires_grad=True)
    total = Scales.apply(w).sum()
    (end,) = autograd.ends_of(total)
    assert end is w
    assert autograd.ends_of(w) == [w]
    assert autograd.ends_of(torch.ones(3)) == []


def test_forward_ad_asks_only_for_the_layout_of_a_tangent_that_is_not_used():
    asked = set()

    class Tangent(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, _types, args=(), _kwargs=None):
            asked.add(func)
            assert operations.compares_layouts(func)
            return True

    class Constant(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x.detach().contiguous()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def jvp(ctx, tangent):
            return torch.ones(2).as_subclass(Tangent)

    x = torch.ones(2)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        out = dual.sum() + Constant.apply(dual).detach().sum()
        assert torch.autograd.forward_ad.unpack_dual(out).tangent == 2
    assert asked
    assert not operations.compares_layouts(torch.ops.aten.equal.default)


def test_what_is_untraced_is_written_down_by_no_tracer():
    def func(x):
        with modes.untraced():
            x.sin()
        return x.cos()

    names = [str(node.target) for node in make_fx(func)(torch.ones(2)).graph.nodes]
    assert not any("sin" in name for name in names)
    assert any("cos" in name for name in names)


def test_the_first_member_of_a_tensor_that_is_mapped_is_found():
    found = []

    def look(x):
        found.append(functorch.one_member(x))
        return x.sum()

    x = torch.arange(6.0).reshape(2, 3)
    torch.func.vmap(torch.func.grad(look), 1)(x)
    assert torch.equal(found[0], x[:, 0])
    assert functorch.one_member(x) is x


def test_the_effects_of_operations_are_known():
    """Whether they draw, may write, and give memory of their own."""
    aten = torch.ops.aten
    for operation, effects in (
        (aten.bernoulli.p, (True, False, True)),
        (aten.mul.Tensor, (False, False, True)),
        (aten.mul_.Tensor, (False, True, False)),
        (aten.view.default, (False, False, False)),
        (aten.native_batch_norm.default, (False, True, True)),
    ):
        assert operations.effects_of(operation) == effects
