"""Curvature of a loss over a batch, as products with a vector, in the memory of one microbatch.

``products`` multiply by the Hessian, Gauss-Newton or Fisher matrix. Each product is built from the
``derivatives`` of one number per microbatch, in one of the ``passes`` over a batch. ``estimates``
compute a diagonal or a trace from products, ``cg`` solves linear systems with them, and
``operator`` writes them with ``@`` and hands them to SciPy.
"""

from .._base.states import make_public as _make_public
from .cg import CG, CGState, cg
from .estimates import Estimate, diagonal, trace
from .operator import Operator
from .products import fisher_vp, ggnvp, hvp


__all__ = [
    "CG",
    "CGState",
    "Estimate",
    "Operator",
    "cg",
    "diagonal",
    "fisher_vp",
    "ggnvp",
    "hvp",
    "trace",
]
_make_public(globals(), __name__)
