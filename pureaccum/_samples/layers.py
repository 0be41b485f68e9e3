"""What layers see of a chunk of samples: their inputs, and the cotangents of their outputs.

    def one(*tensors):                    # for a vmap over samples
        with layers:
            return loss(layers.given, *tensors)

    layers.pull(vmap(one)(*rows), see)    # see(i, gradients of leaf i), during the backward pass

It is one forward pass and one backward pass of plain autograd, below the vmap. A matrix that
multiplies a sample's data, or a table in which a sample looks up rows, is not recorded: its
gradients are outer products of what the layer sees. For any other use each sample gets a copy of
the leaf, whose gradient is the sample's own. Such leaves are small: norms, biases, positions.

A use that no torch function shows, such as a transform of the leaf itself or a custom Function, is
recorded as a use of its stand-in, which otherwise has no gradient. That is how it is detected.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._base import checks, trees
from .._base.torch_internals import autograd, functorch
from . import outer_products


SMALL = 2**10  # numbers
See = Callable[[int, outer_products.Outer | Tensor], None]
# What is done for all samples at once in place of functions, and in place of those that are called
# by keyword. A rule returns None where it does not apply.
Rules = tuple[dict[Any, Callable[..., Any]], dict[Any, Callable[..., Any]]]


class Unfit(RuntimeError):
    """What a loss does with its leaves cannot be followed: its gradients are to be had otherwise.

    What was seen until then is worth nothing.
    """


class Layers(TorchFunctionMode):
    """What stands between a loss and its leaves, for one call with a chunk of samples.

    Args:
        leaves: What to differentiate with respect to.
        rows: How many samples there are.
        at_least: The dtype of sums. A leaf is kept out of outer products where its own is narrower,
            since a sum over samples would be taken in that.
        rules: What is done in place of functions.
    """

    def __init__(
        self, leaves: Sequence[Tensor], rows: int, at_least: torch.dtype, rules: Rules
    ) -> None:
        super().__init__()
        self.rules = rules
        self.leaves = [x.detach() if x.requires_grad else x for x in leaves]
        self.rows = rows
        self.given = tuple(x.detach().requires_grad_() for x in leaves)
        if any(type(x) is not Tensor or x.layout != torch.strided for x in self.given):
            raise Unfit("a leaf is no plain tensor, and has a way of its own with operations")
        self.wide = [
            x.is_floating_point() and trees.accumulation_dtype(x.dtype, at_least) == x.dtype
            for x in leaves
        ]
        self.level: int | None = None
        self.stand_ins = {id(x): (i, False) for i, x in enumerate(self.given)}
        self.views: list[Tensor] = []  # stand-ins too, and so are to live
        self.copies: dict[int, tuple[Tensor, Tensor]] = {}  # below the vmap, and in it
        # Beyond half of all nothing is saved, unless that is next to nothing.
        self.may_copy = max(sum(x.numel() for x in leaves) // 2, SMALL)
        self.uses = [0] * len(leaves)
        # For its sake autograd comes by all layers.
        self.token = leaves[0].new_zeros((), requires_grad=True)
        self.unfit = ""
        self.see: See
        self.several: int | None = None  # cotangents
        self.parts: dict[
            int, list[outer_products.Outer | Tensor]
        ] = {}  # of leaves with several uses
        self.whole: set[int] = set()

    # Forwards --------------------------------------------------------------------------------

    def __enter__(self) -> Any:
        self.level = functorch.transform_level()
        return super().__enter__()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if checks.here.observed is not None:  # what the loss does there is done again
            return func(*args, **kwargs)
        rule = self.rules[bool(kwargs)].get(func)
        if rule is not None and (out := rule(self, *args, **kwargs)) is not None:
            return out
        if func in UNFIT:
            raise self.refusal(UNFIT[func])
        if self.holds(args) or (kwargs and self.holds(kwargs.values())):
            if func in LOOKS:
                return func(*args, **kwargs)
            args = self.with_copies(args)
            kwargs = {key: self.with_copies(x) for key, x in kwargs.items()}
        return func(*args, **kwargs)

    def refusal(self, why: str) -> Unfit:
        """An error, which is remembered where the loss catches it."""
        self.unfit = f"the loss {why}"
        return Unfit(self.unfit)

    def holds(self, values: Iterable[Any]) -> bool:
        """Whether there is a stand-in among what an operation is given."""
        for x in values:
            if isinstance(x, Tensor):
                if id(x) in self.stand_ins:
                    return True
            elif isinstance(x, (tuple, list)) and self.holds(x):
                return True
        return False

    def with_copies(self, x: Any) -> Any:
        """What an operation is given, with a copy for each sample in place of each stand-in."""
        if isinstance(x, Tensor):
            at = self.stand_ins.get(id(x))
            return x if at is None else self.copy_of(*at)
        if type(x) in (tuple, list):
            return type(x)(map(self.with_copies, x))
        return x

    def copy_of(self, i: int, transposed: bool) -> Tensor:
        """A copy of a leaf for each sample, as one of them sees it."""
        if functorch.transform_level() != self.level:
            raise self.refusal("uses a leaf under a transform of its own")
        if i not in self.copies:
            leaf = self.leaves[i]
            self.may_copy -= leaf.numel()
            if self.may_copy < 0:
                raise self.refusal("uses large leaves in other ways than layers do")
            copy = functorch.below_vmap(
                lambda: leaf.expand(self.rows, *leaf.shape).requires_grad_()
            )
            self.copies[i] = copy, functorch.as_members(copy, functorch.transform_level() or 0)
            self.uses[i] += 1
        copy = self.copies[i][1]
        return copy.mT if transposed else copy

    # What a rule asks for -----------------------------------------------------------------------

    def leaf_of(self, x: Any, dims: int | None = None) -> tuple[int, bool] | None:
        """Which leaf a tensor stands for, and whether transposed, if sums are in its dtype."""
        at = self.stand_ins.get(id(x))
        if at is None or not self.wide[at[0]]:
            return None
        return at if dims in (None, self.leaves[at[0]].dim()) else None

    def bias_of(self, x: Any, weight: Tensor) -> int | None:
        """Which leaf the bias of a layer stands for, if any."""
        at = self.leaf_of(x, 1)
        return None if at is None or self.leaves[at[0]].shape != weight.shape[:1] else at[0]

    def rows_of(self, x: Any, dims: int, expand: bool = False) -> Tensor | None:
        """What a tensor of a sample is for all of them, along dim 0; it has so many dims at least.

        One that is the same for all is None, or expanded.
        """
        if (
            not isinstance(x, Tensor)
            or self.level is None
            or functorch.transform_level() != self.level
        ):
            return None
        found, mapped = functorch.members_of(x, self.level) or (x, None)
        if not mapped and not (expand and mapped is False):
            return None
        found = found if mapped else found.expand(self.rows, *found.shape)
        return found if found.dim() > dims else None

    def fits(self, i: int, a: Tensor) -> bool:
        """Whether a layer computes in the dtype of its leaf."""
        like = self.leaves[i]
        autocast = torch.is_autocast_enabled(like.device.type)
        return a.dtype == like.dtype and a.device == like.device and not autocast

    def below(self, layer: Any, uses: Iterable[int | None], *given: Any) -> Tensor:
        """What a layer gives for all samples, as one of them sees it."""
        for i in uses:
            if i is not None:
                self.uses[i] += 1
        return self.as_sample(layer, *given, self.token)

    def as_sample(self, func: Any, *given: Any) -> Tensor:
        """What a function of all samples gives, as one of them sees it."""
        return functorch.as_members(functorch.below_vmap(func, *given), self.level or 0)

    def standing_in(self, x: Tensor, i: int, transposed: bool) -> Tensor:
        """One more tensor that stands for a leaf."""
        self.views.append(x)
        self.stand_ins[id(x)] = i, transposed
        return x

    def all_of(self, totals: Tensor) -> bool:
        """Whether the graph of what the loss gave ends nowhere but here."""
        return {*map(id, self.own)}.issuperset(map(id, autograd.ends_of(totals)))

    @property
    def own(self) -> list[Tensor]:
        """The tensors here in which graphs may end."""
        return [self.token, *self.given, *(copy for copy, _ in self.copies.values())]

    # Backwards -------------------------------------------------------------------------------

    def pull(self, totals: Tensor, see: See, cotangents: Tensor | None = None) -> None:
        """Go back from the totals of all samples, and hand over the gradients of each leaf once.

        Each comes as soon as it is there, and is dropped before the next one unless it is kept.

        Args:
            totals: What the vmap gave: (rows,), or more dims where there are ``cotangents``.
            see: ``see(i, gradients)``: outer products, or a tensor of (rows, *leaf.shape).
            cotangents: Several of them, shaped like totals, along a dim 0 that gradients then have.
        """
        self.see, self.several = see, None if cotangents is None else len(cotangents)
        if self.unfit:
            raise Unfit(self.unfit)
        copies = [copy for copy, _ in self.copies.values()]
        wrt = [self.token, *copies, *self.given]
        if cotangents is None:
            found = autograd.gradients(totals, wrt, torch.ones_like(totals))
        else:
            found = _by_several(totals, wrt, cotangents)
        if any(x is not None for x in found[1 + len(copies) :]):
            raise self.refusal("uses a leaf in a way that cannot be seen")
        for i, grad in zip(self.copies, found[1:], strict=False):
            if grad is not None:
                self.arrived(i, grad)
        for i, leaf in enumerate(self.leaves):
            if i not in self.whole:
                parts = self.parts.pop(i, None)
                see(
                    i,
                    outer_products.sum_of_parts(parts)
                    if parts
                    else outer_products.zero_gradients(leaf, self.rows),
                )

    def lowered(self, x: Tensor) -> Tensor:
        """A tensor of the backward pass; the several cotangents are dim 0."""
        if self.several is None:
            return x
        x, mapped = functorch.members_of(x, functorch.transform_level() or 0) or (x, False)
        return x if mapped else x.expand(self.several, *x.shape)

    def cotangents(self, d: Tensor) -> Tensor:
        """The cotangent of a layer's output: (rows, t, n), or (cotangents, rows, t, n)."""
        d = self.lowered(d)
        many = () if self.several is None else (self.several,)
        return d.reshape(*many, self.rows, -1, d.shape[-1])

    def arrived(self, i: int, part: outer_products.Outer | Tensor) -> None:
        """Take the gradients of one use of a leaf."""
        if self.uses[i] == 1:
            self.whole.add(i)
            self.see(i, part)
        else:
            self.parts.setdefault(i, []).append(part)


def _by_several(totals: Tensor, wrt: list[Tensor], cotangents: Tensor) -> list[Tensor | None]:
    """The gradients for each of several cotangents, in one backward pass."""
    none: list[bool] = []

    def of(cotangent: Tensor) -> list[Tensor]:
        found = autograd.gradients(totals, wrt, cotangent)
        none.extend(x is None for x in found)
        return [cotangent if x is None else x for x in found]

    found = functorch.over_rows(of, [cotangents], "same")  # what is run again draws the same
    return [None if nothing else x for x, nothing in zip(found, none, strict=True)]


# Functions of tensors --------------------------------------------------------------------------


LOOKS = {  # what tells nothing of a leaf's numbers
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout")),
    *(getattr(Tensor, name).__get__ for name in ("is_leaf", "grad")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex),
    *(Tensor.__len__, torch.is_floating_point, torch.is_complex, torch.is_tensor),
}
UNFIT = {
    F.multi_head_attention_forward: "attends by a function that shows none of its products",
    torch.as_strided: "looks at memory that copies share",
    Tensor.as_strided: "looks at memory that copies share",
}
