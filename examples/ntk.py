"""Regress with a network's kernel at initialisation, without writing out a Jacobian.

The empirical neural tangent kernel of two images is the inner product of the network's derivatives
at these images. Its Jacobians have images × outputs × parameters numbers. `pa.gramian` runs one
backward pass over a block of images, and keeps only the inputs and gradients of each layer for two
blocks. The derivative by a weight matrix is an outer product, and the inner product of two outer
products is a product of two inner products.

    Run:   python examples/ntk.py
    Needs: no extra
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.profiler import profile

import pureaccum as pa


Tensors = dict[str, Tensor]


def peak(run: Callable[[], object]) -> int:
    """The peak of allocated bytes during a call, beyond those before it."""
    with profile(profile_memory=True) as seen:
        run()
    live = most = 0
    for event in seen.profiler.kineto_results.events():
        live += event.nbytes() if event.name() == "[memory]" else 0
        most = max(most, live)
    return most


def make_network(side: int, channels: int, classes: int) -> nn.Module:
    left = side - 4  # of height and width, after two convolutions
    return nn.Sequential(
        nn.Conv2d(1, channels, 3),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3),
        nn.ReLU(),
        nn.Flatten(0),
        nn.Linear(channels * left * left, classes),
    )


def main(rows: int = 120, new: int = 60, side: int = 16, channels: int = 16) -> dict[str, float]:
    """The accuracy on new images, how far off the kernel is, and its time and memory."""
    torch.manual_seed(0)
    classes = 4
    net = make_network(side, channels, classes)
    params: Tensors = {name: p.detach() for name, p in net.named_parameters()}
    shapes = torch.randn(classes, 1, side, side)

    def drawn(rows: int) -> tuple[Tensor, Tensor]:
        y = torch.arange(rows) % classes
        return shapes[y] + 3 * torch.randn(rows, 1, side, side), y

    (x, y), (other, labels) = drawn(rows), drawn(new)

    def f(params: Tensors, x: Tensor) -> Tensor:  # of one image
        return functional_call(net, params, (x,))

    def written_out(a: Tensor, b: Tensor) -> Tensor:
        """As in torch's tutorial."""
        one, two = (vmap(jacrev(f), (None, 0))(params, z) for z in (a, b))
        pairs = ((one[name].flatten(2), two[name].flatten(2)) for name in params)
        return sum(torch.einsum("naf,mbf->nmab", i, j) for i, j in pairs)  # type: ignore[return-value]

    kernel = pa.gramian(f, chunk_size=30)
    ways: dict[str, Callable[[], Tensor]] = {
        "Jacobians": lambda: written_out(other, x),
        "pa.gramian": lambda: kernel(params, other, other=x),
    }
    found: dict[str, Tensor] = {}
    took: dict[str, float] = {}
    held: dict[str, int] = {}
    print(f"kernel of {new} and {rows} images with {classes} outputs each")
    for name, way in ways.items():
        way()
        begin = time.perf_counter()
        found[name] = way()
        took[name] = time.perf_counter() - begin
        held[name] = peak(way)
        print(f"  {name:10}: {held[name] / 1e6:7.1f} MB, {1000 * took[name]:5.0f} ms")

    # Regression on one-hot targets, with a separate kernel for each output.
    targets = torch.eye(classes)[y]
    own = kernel(params, x).diagonal(dim1=2, dim2=3).movedim(2, 0)  # (outputs, rows, rows)
    across = found["pa.gramian"].diagonal(dim1=2, dim2=3).movedim(2, 0)
    noise = 1e-2 * own.diagonal(dim1=1, dim2=2).mean() * torch.eye(rows)
    weights = torch.linalg.solve(own + noise, targets.T.unsqueeze(2))
    said = (across @ weights).squeeze(2).argmax(0)
    right = float((said == labels).float().mean())
    off = float((found["pa.gramian"] - found["Jacobians"]).norm() / found["Jacobians"].norm())
    print(f"  {right:.0%} of new images classified correctly; the kernels differ by {off:.0e}")
    return {
        "right": right,
        "off": off,
        "memory": held["pa.gramian"] / held["Jacobians"],
        "time": took["pa.gramian"] / took["Jacobians"],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
