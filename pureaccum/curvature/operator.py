"""A product with a vector, written as a matrix."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base import checks, reprs, trees


class Operator(NamedTuple):
    """A linear map from trees like params to trees like params, written with ``@``.

    The rule::

        operator @ v = product(v)        # v: a tree, or flat: all its leaves as one vector

    Attributes:
        product: ``product(v)`` returns a tree like ``v``.
        like: A tree like ``v``, such as params.

    Example:
        >>> import torch
        >>> from pureaccum.curvature import hvp
        >>> params, batch = {"w": torch.ones(2)}, torch.tensor([[1.0, 2.0], [3.0, 1.0]])
        >>> product = hvp(lambda params, x: (x @ params["w"]).square().mean(), microbatch_size=1)
        >>> hessian = Operator(lambda v: product(params, batch, v)[1], params)
        >>> hessian @ {"w": torch.tensor([1.0, 0.0])}
        {'w': tensor([10.,  5.])}
        >>> hessian @ torch.eye(2)
        tensor([[10.,  5.],
                [ 5.,  5.]])

    References:
        `scipy.sparse.linalg.LinearOperator
        <https://docs.scipy.org/doc/scipy/reference/generated/scipy.sparse.linalg.LinearOperator.html>`_,
        for SciPy's eigenvalues and solvers; Dangel et al., `curvlinops
        <https://github.com/f-dangel/curvlinops>`_
    """

    product: Callable[[trees.Tree], trees.Tree]
    like: trees.Tree

    __repr__ = reprs.of_record

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of rows and columns of the matrix."""
        n = sum(x.numel() for x in checks.read_params(self.like, "like")[0])
        return n, n

    def __matmul__(self, v: trees.Tree) -> trees.Tree:
        """The product with a tree, with a flat vector, or with the columns of a matrix."""
        leaves, spec = checks.read_params(self.like, "like")
        if not isinstance(v, Tensor) or (len(leaves) == 1 and v.shape == leaves[0].shape):
            return self.product(v)
        n, _ = self.shape
        if v.dim() not in (1, 2) or len(v) != n:
            raise ValueError(
                f"the operator is {n} × {n}, but was multiplied by a tensor of shape "
                f"{tuple(v.shape)}; expected a tree like {trees.paths(spec, 'like')}, a vector "
                f"({n},) or a matrix ({n}, k)."
            )
        columns = v.unsqueeze(1) if v.dim() == 1 else v
        found = [_flat(self.product(trees.unflatten(spec, _split(x, leaves)))) for x in columns.T]
        out = torch.stack(found, 1) if found else v.clone()
        return out.to(v.dtype).view(v.shape)

    def to_scipy(self) -> Any:
        """Return it as a ``scipy.sparse.linalg.LinearOperator``, which is real and symmetric.

        Its dtype is the widest of the leaves. It copies vectors to the device of the first leaf.
        """
        leaves, spec = checks.read_params(self.like, "like")
        for name, x in zip(trees.paths(spec, "like"), leaves, strict=True):
            if x.is_complex():
                raise TypeError(
                    f"{name} is {x.dtype}; expected real numbers, because the curvature of a real "
                    "loss is linear in real and imaginary parts, but not in complex numbers. "
                    "SciPy has no such operator."
                )
        try:
            from scipy.sparse.linalg import LinearOperator  # pyright: ignore
        except ImportError as error:
            raise ImportError("to_scipy() needs SciPy: pip install 'pureaccum[scipy]'.") from error
        dtype = trees.accumulation_dtype(trees.widest_dtype(leaves))  # NumPy knows no bfloat16
        device = leaves[0].device

        def product(v: Any) -> Any:
            columns = torch.as_tensor(v, dtype=dtype).to(device, copy=True)
            return (self @ columns.reshape(self.shape[0], -1)).cpu().numpy().reshape(v.shape)

        options: Any = dict.fromkeys(("matvec", "rmatvec", "matmat", "rmatmat"), product)
        options["dtype"] = torch.empty(0, dtype=dtype).numpy().dtype
        return LinearOperator(self.shape, **options)


def _split(x: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    parts = x.split([leaf.numel() for leaf in leaves])
    pairs = zip(parts, leaves, strict=True)
    return [part.to(leaf.device, leaf.dtype).view(leaf.shape) for part, leaf in pairs]


def _flat(tree: trees.Tree) -> Tensor:
    leaves, _ = trees.flatten(tree)
    device, dtype = leaves[0].device, trees.widest_dtype(leaves)
    return torch.cat([x.reshape(-1).to(device, dtype) for x in leaves])
