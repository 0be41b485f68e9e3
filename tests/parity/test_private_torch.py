"""The private names of torch that the package touches exist, and do what it takes them to do."""

import pytest
import torch
from torch import nn

from pureaccum import _torch


def test_a_transform_is_seen_at_every_level() -> None:
    seen: list[bool] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(_torch.transform_active())
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


def test_compilation_is_seen() -> None:
    torch.compiler.reset()
    compiled = torch.compile(
        lambda x: x + 1 if _torch.transform_active() else x - 1, backend="eager", fullgraph=True
    )
    assert compiled(torch.zeros(())) == 1


def test_foreach_add_adds_in_place_and_widens() -> None:
    sums = [torch.ones(2), torch.ones(3)]
    _torch.foreach_add_(sums, [torch.ones(2).bfloat16(), torch.ones(3)], alpha=3.0)
    assert torch.equal(sums[0], torch.full((2,), 4.0))
    assert torch.equal(sums[1], torch.full((3,), 4.0))


def test_foreach_add_takes_no_lists_that_are_empty() -> None:
    """Why ours asks first."""
    with pytest.raises(RuntimeError, match="at least one tensor"):
        torch._foreach_add_([], [])
    _torch.foreach_add_([], [])


def test_foreach_add_takes_a_sparse_term() -> None:
    rows = torch.tensor([[1, 1]])
    term = torch.sparse_coo_tensor(rows, torch.ones(2, 3), (4, 3), check_invariants=True)
    total = torch.zeros(4, 3)
    _torch.foreach_add_([total], [term], alpha=2.0)
    assert torch.equal(total, 2 * term.to_dense())


def test_modules_keep_their_tensors_where_we_look() -> None:
    norm = nn.BatchNorm1d(2)
    root = nn.Sequential(nn.Linear(2, 2), nn.Sequential(norm, norm), nn.LSTM(2, 2), nn.ReLU())
    places = {(module, name) for module, _, name in _torch.tensor_places(root)}
    linear, lstm = root[0], root[2]
    assert places == {
        (linear, "_parameters"),
        (norm, "_parameters"),
        (norm, "_buffers"),
        (lstm, "_parameters"),
    }
    for module, attributes, name in _torch.tensor_places(root):
        assert attributes[name] is getattr(module, name)
    assert dict(linear._parameters) == {"weight": linear.weight, "bias": linear.bias}
    assert dict(norm._buffers) == dict(norm.named_buffers())
    assert dict(root._modules) == dict(root.named_children())


def test_functional_call_puts_tensors_into_those_places() -> None:
    """And a recurrent module sees by itself at each call that its flat weights are others."""
    lstm = nn.LSTM(2, 2)
    other = {name: torch.ones_like(p) for name, p in lstm.named_parameters()}
    found: list[list[torch.Tensor]] = []

    def look(module: nn.Module, *_: object) -> None:
        found.extend([list(module._parameters.values()), list(module._flat_weights)])

    lstm.register_forward_hook(look)
    torch.func.functional_call(lstm, other, (torch.zeros(1, 2),))
    lstm(torch.zeros(1, 2))
    for tensors, expected in zip(found, (other, other, *[lstm._parameters] * 2), strict=True):
        assert all(a is b for a, b in zip(tensors, expected.values(), strict=True))


def test_setting_nothing_empties_a_tensor_in_place() -> None:
    """What donation leaves behind: ``set_`` frees the memory, and the class can be changed."""
    tensor = torch.ones(3)
    alias = tensor.detach()
    tensor.set_()
    tensor.__class__ = type("Marked", (torch.Tensor,), {})
    assert tensor.numel() == 0
    assert torch.equal(alias, torch.ones(3))
