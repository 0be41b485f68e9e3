"""Which tests a profile runs, and what the others would add.

``dev`` runs tests of promises that are not slow, ``ci`` also those that are slow and those of no
promise, ``thorough`` everything. Of a test's cases, dev and ci run those that differ most: first
the ones with entries of tables that no case before them has; of a slow test ci, too, runs a few. A
case that the command line names runs in any profile.
"""

from collections import Counter, defaultdict

import pytest


KINDS = ("promise", "given_up", "mechanism")
SLOW_DOCTESTS = ("strategies.data.exact_trees", "strategies.data.batches")  # which shrink
CASES = {"dev": 4, "ci": 8}  # of each test; of one that is marked ``table`` each entry
ADDED_BY = {"dev": ("ci", "thorough"), "ci": ("thorough",), "thorough": ()}
RUNS = {
    "dev": "the strongest tests of each promise, a few cases of each",
    "ci": "what every change has to pass: slow tests too, more cases, more examples",
    "thorough": "what runs every night: all tests, all cases, 1,000 examples a property",
}
LEFT_OUT = pytest.StashKey[Counter]()
UNMARKED = pytest.StashKey[list[str]]()


def protects(item):
    """The kind of what a test protects: by its own marker, or else by its file's."""
    return next((marker.name for marker in item.iter_markers() if marker.name in KINDS), None)


def choose(config, profile, items):
    """Deselect what the profile leaves out, and count it by the profile that runs it."""
    tests = [item for item in items if not isinstance(item, pytest.DoctestItem)]
    config.stash[UNMARKED] = [item.nodeid for item in tests if protects(item) is None]
    runs = {item: _first_profile(item) for item in items}
    for cases in _by_function(tests).values():
        for this, later in ("ci", "thorough"), ("dev", "ci"):
            mine = [case for case in cases if this in (runs[case], *ADDED_BY[runs[case]])]
            mine.sort(key=lambda case: runs[case] != "dev")  # the quick ones first
            few = set(_few(mine, this))
            runs |= {case: later for case in mine if case not in few}
    named = tuple(arg.partition("::")[2] for arg in config.args if "[" in arg)
    added = [item for item in items if runs[item] in ADDED_BY[profile]]
    left = {item: None for item in added if not (named and item.nodeid.endswith(named))}
    items[:] = [item for item in items if item not in left]
    config.stash[LEFT_OUT] = Counter(runs[item] for item in left)
    if left:
        config.hook.pytest_deselected(items=[*left])


def _first_profile(item):
    if isinstance(item, pytest.DoctestItem):
        return "ci" if item.name.endswith(SLOW_DOCTESTS) else "dev"
    promised = protects(item) in ("promise", None)
    if item.get_closest_marker("nightly"):
        return "thorough"
    if item.get_closest_marker("slow"):
        return "ci" if promised else "thorough"
    return "dev" if promised else "ci"


def _by_function(items):
    groups = defaultdict(list)
    for item in items:
        groups[item.nodeid.partition("[")[0]].append(item)
    return groups


def _few(cases, profile):
    slow = all(case.get_closest_marker("slow") for case in cases)
    most = CASES["dev" if slow else profile]
    if len(cases) <= most:
        return cases
    return unlike(cases, most, every_entry=cases[0].get_closest_marker("table") is not None)


def unlike(cases, fewest, every_entry):
    """So many cases, each with as many entries of tables as possible that few before it have.

    With ``every_entry``, more of them until there is no other entry.
    """
    left, met, chosen = {case: _entries(case) for case in cases}, Counter(), []

    def repeats(case):
        times = [met[entry] for entry in left[case]]
        return sum(map(bool, times)), sum(times)

    while left:
        best = min(left, key=repeats)
        if len(chosen) >= fewest and not (every_entry and repeats(best)[0] < len(left[best])):
            break
        met.update(left.pop(best))
        chosen.append(best)
    return chosen


def _entries(case):
    """The entry of each table that a case has, and each argument of it."""
    arguments = case.callspec.params.items()
    return [*enumerate(case.callspec._idlist), *((name, id(value)) for name, value in arguments)]


def summary(profile, left_out, skipped):
    """Say what ran, and what was left out, to somebody who has never run these tests."""
    yield f"This was the profile {profile}: {RUNS[profile]}."
    for other in ADDED_BY[profile]:
        if left_out[other]:
            yield f"HYPOTHESIS_PROFILE={other} adds {left_out[other]:,} tests. It is {RUNS[other]}."
    for reason, count in skipped.most_common():
        yield f"{count} skipped: {reason.removeprefix('Skipped: ')}"
