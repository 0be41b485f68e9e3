"""A profile that leaves out cases of a test runs those that differ most."""

import pytest


pytestmark = [pytest.mark.laws, pytest.mark.promise("documented")]


@pytest.mark.parametrize("other", ["left", "right"])
@pytest.mark.parametrize("one", range(6))
def test_cases_that_run_differ_in_each_of_their_tables(one, other, request):
    name = request.node.originalname
    cases = [it.callspec.params for it in request.session.items if f"::{name}[" in it.nodeid]
    assert {"one": one, "other": other} in cases
    if len(cases) > 1:
        assert len({case["one"] for case in cases}) == min(len(cases), 6)
        assert len({case["other"] for case in cases}) == 2
