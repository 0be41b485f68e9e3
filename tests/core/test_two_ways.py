"""A gradient that is followed is the one that is not, over the zoo.

At top level it is summed in place. Where parameters require grad it is that sum, attached to them:
the same bits. Under a transform it is a function, in other operations: half of the digits.
"""

import optree
import pytest
import torch

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from tests.problems import near
from tests.zoo import fits_networks, fits_programs, fits_sums  # noqa: F401
from tests.zoo.species import ZOO


pytestmark = [pytest.mark.laws, pytest.mark.promise("closure")]
FIT = [it for it in ZOO if not it.kind]
BY_AUTOGRAD = {  # torch.func cannot run them
    *("packed_sequences", "differential_equation", "parameters_that_require_grad"),
    *("checkpointed", "custom_function", "matched_by_numpy"),
}


def residents(but=()):
    """Where time is short every third one."""
    return [
        pytest.param(it, id=it.name, marks=pytest.mark.slow if i % 3 else ())
        for i, it in enumerate(FIT)
        if it.name not in but
    ]


def numbers(tree):
    leaves = optree.tree_leaves(tree, namespace="pureaccum")
    return [x.detach() for x in leaves if torch.is_tensor(x)]


def compared(species, engine, run):
    """Gradients, value and aux: by a run of a function of the parameters, and by a call."""
    dtype = torch.float64 if torch.float64 in species.dtypes else species.dtypes[0]
    loss, params, batch, options = species.make(dtype, seed=0)
    known = {name: x for name, x in options.items() if name in ("has_aux", "reduction")}
    known |= {"microbatch_size": 5, "engine": engine, "check": False, "aux_reduction": "last"}
    gradient = pa.grad_and_value(loss, **known)
    torch.manual_seed(1)
    want = numbers(gradient(params, batch))
    torch.manual_seed(1)
    return numbers(run(lambda p: numbers(gradient(p, batch)), params)), want


@pytest.mark.parametrize("species", residents())
def test_where_parameters_require_grad_it_has_the_same_bits(species):
    def attached(gradient, params):
        asked = optree.tree_map(lambda x: x.clone().requires_grad_(), params, namespace="pureaccum")
        return gradient(asked)

    assert_trees_bitwise_equal(*compared(species, "autograd", attached))


@pytest.mark.parametrize("species", residents(but=BY_AUTOGRAD))
def test_under_a_transform_it_is_the_same(species):
    near(*compared(species, "func", lambda gradient, params: torch.func.vjp(gradient, params)[0]))
