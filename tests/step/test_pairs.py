"""Every two features of a step go together, or the table of what does not says why."""

from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.ranks import cases_on_ranks
from tests.step.pairs import FEATURES, RANKS, REFUSED, check, page, pairs


pytestmark = [pytest.mark.laws, pytest.mark.promise("together")]
ALONE = [(name,) for name in FEATURES if name not in RANKS]
STREAM_WEIGHTS = {("stream", "terms"), ("skip", "terms")}
PAGE = Path(__file__).parents[2] / "examples" / "guide" / "together.md"


def marks(pair):
    """Mark a pair that is slow, or that the next version gives up."""
    if pair in STREAM_WEIGHTS:
        yield pytest.mark.given_up("stream weights")
    if "compile" in pair:
        yield pytest.mark.slow


@pytest.mark.parametrize(
    "pair",
    [
        *(pytest.param(it, id=it[0], marks=[*marks(it)]) for it in ALONE),
        *(
            # Every feature is in several of those that are quick.
            pytest.param(
                it, id="+".join(it), marks=[*([pytest.mark.slow] if i % 2 else []), *marks(it)]
            )
            for i, it in enumerate(pairs())
            if not RANKS & {*it}
        ),
    ],
)
def test_two_features_go_together(pair):
    check(pair)


@pytest.mark.nightly
@pytest.mark.skipif(not dist.is_available(), reason="torch was built without it")
def test_two_features_go_together_on_ranks():
    """One test, since processes are started once for all pairs."""
    some = [*((name,) for name in RANKS), *(it for it in pairs() if RANKS & {*it})]
    cases = {" and ".join(pair): partial(check, pair) for pair in some}
    wrong = [
        f"{name}, {text}"
        for name, texts in cases_on_ranks(2, cases).items()
        for text in texts
        if text
    ]
    assert not wrong, "\n\n".join(wrong)


def test_nine_of_ten_cells_that_have_a_meaning_work():
    every = [*pairs()]
    assert all(pair in every for pair in REFUSED)
    meant = [it for it in every if it not in REFUSED or REFUSED[it].reason != "no meaning"]
    assert len([it for it in meant if it not in REFUSED]) >= 0.9 * len(meant)


def test_the_page_is_the_table():
    assert page() in PAGE.read_text(), "python -m tests.step.pairs prints the table of the page"
