"""Modules that cannot be cut into stages are refused, by name, and so are calls that do not fit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import pureaccum as pa
from tests.faults.refusals import refused, saying


X = torch.arange(12.0).reshape(4, 3).sin()


def norm(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), *layers)


def loss(out: Tensor, batch: Any) -> Tensor:
    return out.square().mean()


class Of(nn.Module):
    """A forward that is a function of itself and the input, above a network with BatchNorm."""

    def __init__(self, func: Callable[[Any, Any], Any], **parts: Any) -> None:
        super().__init__()
        self.func, self.body = func, norm()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.func(self, self.body(x))


def refuses(module: Any, *words: str, error: type[Exception] = ValueError) -> None:
    """Before any work."""
    state = module.state_dict() if isinstance(module, nn.Module) else ()
    with refused(error, *words, given=state):
        pa.staged_from(module, loss)


def calls(module: nn.Module, params: Any = None, buffers: Any = None, batch: Any = X) -> Any:
    """With what is given in place of the module's own."""
    fn = pa.functional(module)
    func = pa.grad_and_value(
        pa.staged_from(module, loss), microbatch_size=3, has_aux=True, aux_reduction="last"
    )
    params = fn.params if params is None else params
    return func(params, batch, buffers=fn.buffers if buffers is None else buffers)


# What torch.fx cannot trace, or would lose ----------------------------------------------------


class Gate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = x + 1
        return x


def test_a_branch_on_numbers_names_the_module_and_the_line():
    refuses(
        norm(nn.Sequential(Gate())),
        "module.2.0 (Gate) cannot be cut into stages, because torch.fx cannot trace it",
        "symbolically traced variables cannot be used as inputs to control flow",
        "at test_staged_from.py line ",
        ": `if x.sum() > 0:`",
        "torch.fx.wrap",
        "pa.staged([...]) with pa.batch_norm(...)",
    )


def test_a_loop_over_a_shape_is_a_branch_too():
    module = Of(lambda self, x: sum(x[i] for i in range(x.shape[0])))
    refuses(module, "module (Of) cannot be cut", "for i in range(x.shape[0])")


@fx.wrap
def gate(x: Tensor) -> Tensor:
    return x + 1 if x.sum() > 0 else x


def test_the_way_out_is_a_wrapped_function():
    module = Of(lambda self, x: gate(x))
    grads, (_, buffers) = calls(module)
    assert grads["body.0.weight"].isfinite().all()
    assert buffers["body.1.num_batches_tracked"] == 1


def no_grad(self: Any, x: Any) -> Any:
    with torch.no_grad():
        return x * 2


def autocast(self: Any, x: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return x @ x.T


@pytest.mark.parametrize("func", [no_grad, autocast])
def test_modes_that_forward_enters_would_be_lost(func):
    refuses(Of(func), "module (Of)", "under no_grad or autocast, which is not recorded")


def test_modes_around_staged_from_are_none_of_its_business():
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        pa.staged_from(norm(), loss)


def assigns(self: Any, x: Any) -> Any:
    self.last = x
    return x


def counts(self: Any, x: Any) -> Any:
    self.calls = self.calls + 1
    return x


def appends(self: Any, x: Any) -> Any:
    self.calls.append(x)
    return x


@pytest.mark.parametrize(
    ("func", "calls"), [(assigns, 0), (counts, 0), (appends, [])], ids=["new", "old", "list"]
)
def test_attributes_that_forward_assigns_would_be_lost(func, calls):
    module = Of(func, calls=calls)
    before = dict(vars(module))
    refuses(module, "module (Of) assigns its attribute '", "in forward")
    assert vars(module) == before
    assert module.calls in (0, [])


def test_random_numbers_that_do_not_depend_on_the_input_would_be_drawn_once():
    module = Of(lambda self, x: x * torch.rand(3))
    state = torch.get_rng_state()
    refuses(module, "module (Of)", "random numbers", "rand_like(x)")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook"])
@pytest.mark.parametrize("at", ["", "1", "2"], ids=["module", "norm", "inner"])
def test_hooks_on_what_is_taken_apart_would_not_run(kind, at):
    module = norm(nn.Sequential(nn.ReLU()))
    getattr(module.get_submodule(at), f"register_{kind}")(lambda *args: None)
    name = kind.removeprefix("full_").replace("_", " ")
    refuses(module, f"{'module.' + at if at else 'module'} (", f"has {name}s, which would not run")


def test_hooks_on_other_layers_run():
    module, seen = norm(), []
    module[0].register_forward_hook(lambda layer, args, out: seen.append(out.shape[0]))
    calls(module)
    assert seen == [3, 1, 3, 1]  # each microbatch, and again for its gradient


# BatchNorm that is not there to be cut --------------------------------------------------------


def test_batch_norm_called_as_a_function():
    def func(self: Any, x: Any) -> Any:
        return F.batch_norm(x, None, None, training=self.training)

    refuses(Of(func), "module (Of) calls batch_norm as a function with training=True")
    pa.staged_from(
        Of(lambda self, x: F.batch_norm(x, self.zero, self.zero + 1), zero=nn.Buffer(X[0]))
    )


def test_torch_batch_norm_called_as_a_function():
    refuses(
        Of(lambda self, x: torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, False)),
        "module (Of) calls batch_norm as a function",
    )


@fx.wrap
def normalised(x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, training=True)


def test_batch_norm_in_a_function_that_is_not_looked_into():
    with saying(RuntimeError, "torch.fx.wrap calls batch_norm as a function with training=True"):
        calls(Of(lambda self, x: normalised(x)))


class Closed(nn.Module):
    """A leaf of torch.fx by the module of its class."""

    __module__ = "torch.nn.modules.closed"

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def test_batch_norm_inside_a_leaf():
    refuses(
        norm(Closed()),
        "module.2.norm (BatchNorm1d) lies inside module.2 (Closed), which torch.fx does not look",
    )
    pa.staged_from(norm(Closed().eval()), loss)


class Activated(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


def test_batch_norm_with_a_forward_of_its_own():
    refuses(norm(Activated(3)), "module.2 (Activated) has a forward of its own")


def test_batch_norm_with_a_parametrized_weight():
    module = norm()
    nn.utils.parametrize.register_parametrization(module[1], "weight", nn.Softplus())
    refuses(module, "weight or bias of module.1 (ParametrizedBatchNorm1d) is parametrized")


def test_batch_norm_of_parameters():
    module = Of(lambda self, x: x @ self.norm(self.w), w=nn.Parameter(X), norm=nn.BatchNorm1d(3))
    refuses(module, "module.norm (BatchNorm) is given what does not depend on the batch")


@pytest.mark.parametrize("affine", [True, False])
def test_lazy(affine):
    lazy = nn.LazyBatchNorm1d(affine=affine, track_running_stats=affine)
    refuses(norm(lazy), "lazy module" if affine else "module.2 is a LazyBatchNorm1d")


def test_no_module_and_wrapped_ones():
    refuses(torch.relu, "expected a torch.nn.Module", error=TypeError)
    refuses(nn.DataParallel(norm()), "DataParallel; pass module.module", error=TypeError)


def test_functions_and_boundaries():
    module = norm()
    for name in ("loss_fn", "inputs"):
        with refused(TypeError, f"{name} is 3; expected a function, or None"):
            pa.staged_from(module, **{name: 3})
    with refused(ValueError, "boundaries is 'disk'"):
        pa.staged_from(module, boundaries="disk")


# What is written to --------------------------------------------------------------------------


def test_other_buffers_that_change():
    refuses(
        nn.Sequential(nn.Conv1d(3, 3, 1), nn.InstanceNorm1d(3, track_running_stats=True)),
        "module.1 is written to in forward, but each stage runs twice",
    )
    module = norm(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)))
    name = "2.parametrizations.weight.0._u"
    with refused(RuntimeError, f"buffers['{name}'] is written to", given=module.state_dict()):
        calls(module)
    calls(norm(module[2].eval()))


def test_buffers_and_parameters_that_forward_writes_to():
    count = {"n": nn.Buffer(torch.zeros(3))}
    for func in (lambda self, x: x + self.n.add_(1), lambda self, x: (self.n[0].add_(1), x)[1]):
        refuses(Of(func, **count), "module (Of) writes in place (add_) to its own module.n")
    refuses(
        Of(lambda self, x: x + F.relu_(self.n), n=nn.Parameter(X[0])),
        "writes in place (relu_) to its own module.n",
    )


def views(self: Any, x: Any) -> Any:
    y = x.view(-1)
    x.relu_()
    return x + y.view(-1, 3)


def parts(self: Any, x: Any) -> Any:
    x[0].add_(1)
    return x


def names(self: Any, x: Any) -> Any:
    identity = x
    x += 1
    return x * identity


@pytest.mark.parametrize("func", [views, parts, names])
def test_what_is_written_to_and_read_under_another_name(func):
    refuses(Of(func), "module (Of) writes in place (", "is read again as '", "x = x + y in place")


@fx.wrap
def doubled_(x: Tensor) -> Tensor:
    return x.mul_(2)


@fx.wrap
def doubles(x: Tensor) -> Tensor:
    return doubled_(x)


def test_a_function_that_is_not_looked_into_and_writes_to_what_it_is_given():
    with saying(RuntimeError, "doubles, which torch.fx does not look into, writes in place"):
        calls(Of(lambda self, x: doubles(x)))


# What it is called with ----------------------------------------------------------------------


def test_parameters_and_buffers():
    module = norm()
    params, buffers = pa.functional(module).params, pa.functional(module).buffers
    some = {name: p for name, p in params.items() if name != "1.weight"}
    cases: list[tuple[Any, Any, str]] = [
        (some, None, "params['1.weight'] is missing; expected all 4 of functional(module).params"),
        (params | {"2.weight": X}, None, "params['2.weight'] is no parameter of the module"),
        (
            params | {"0.bias": X[0, :1]},
            None,
            "params['0.bias'] has shape (1,); the module has (3,)",
        ),
        (None, {}, "buffers['1.running_mean'] is missing; expected all 3"),
        (None, buffers | {"1.running_var": 1.0}, "buffers['1.running_var'] is a float"),
    ]
    for params, buffers, words in cases:
        with refused(ValueError, words):
            calls(module, params, buffers)
    with refused(TypeError, "params is a list; expected a dict of tensors by name"):
        calls(module, [X])
    with refused(TypeError, "buffers is a Tensor; expected a dict of tensors by name"):
        calls(module, None, X)
    with refused(ValueError, "reads 'buffers', which no stage pools and this call does not give"):
        pa.staged_from(module, loss)(pa.functional(module).params, X)


class Masked(nn.Module):
    def forward(self, x: Tensor, scale: Tensor, *, mask: Tensor | None = None) -> Tensor:
        return x * scale if mask is None else x * mask


def test_inputs():
    def called(*batch: Any, module: nn.Module | None = None, **named: Any) -> Any:
        return pa.staged_from(module or Masked(), loss)({}, named or batch)

    assert called(X, X) == (X * X).square().mean()
    forward = "forward(x: torch.Tensor, scale: torch.Tensor, *, mask"
    with refused(TypeError, forward, "inputs(batch) gave: missing a required argument: 'scale'"):
        called(X)
    with refused(TypeError, "inputs(batch) gave: too many positional arguments"):
        called(X, X, X)
    with refused(ValueError, "mask came for ", "was traced with its default"):
        called(x=X, scale=X, mask=X)
    with refused(TypeError, "scale is 2.0 for ", "expected tensors with one row per sample"):
        called(X, 2.0)
    with refused(TypeError, "scale is None for "):
        called(X, None)

    class Any_(nn.Module):
        def forward(self, *xs: Tensor) -> Tensor:
            return xs[0]

    refuses(Any_(), "forward of module (Any_) takes *xs; expected arguments with names")


def test_what_is_handed_on_has_rows():
    module = nn.Sequential(norm(), nn.BatchNorm1d(3))
    module.insert(1, Of(lambda self, x: x.repeat(2, 1)))
    with saying(
        ValueError, "has shape (6, 3) for 3 rows; what a stage hands to the next has one row"
    ):
        calls(module)


def test_shapes_that_batch_norm_refuses():
    with refused(ValueError, "module.1: expected 2D or 3D input (got 4D input)"):
        calls(nn.Sequential(nn.Identity(), nn.BatchNorm1d(3)), batch=X[..., None, None])
    with refused(ValueError, "module.1 normalises 1 channels, but its input has shape (3, 3)"):
        calls(nn.Sequential(nn.Identity(), nn.BatchNorm1d(1)))


def test_one_value_per_channel():
    with saying(ValueError, "more than one value per channel"):
        calls(norm(), batch=X[:1])
