"""Which tests a profile runs, and what the others would add.

``dev`` leaves out what is marked slow or nightly, and of a parametrised test it runs as few cases as
meet each entry of each table. ``ci`` leaves out what is nightly, ``thorough`` nothing. A case that
the command line names runs in any profile.
"""

from collections import Counter, defaultdict

import pytest


ADDED_BY = {"dev": ("ci", "thorough"), "ci": ("thorough",)}
ADDS = {
    "ci": "what every change has to pass: slow tests, all cases of tables, more examples",
    "thorough": "what runs every night",
}
LEFT_OUT = pytest.StashKey[Counter]()


def choose(config, profile, items):
    """Deselect what the profile leaves out, and count it by the profile that runs it."""
    named = [arg.partition("::")[2] for arg in config.args if "[" in arg]
    runs = {id(item): _first_profile(item) for item in items}
    for cases in _by_function(items).values():
        quick = [item for item in cases if runs[id(item)] == "dev"]
        met = {id(item) for item in meeting_each_entry(quick)}
        runs |= {id(item): "ci" for item in quick if id(item) not in met}
    later = {
        id(item)
        for item in items
        if runs[id(item)] in ADDED_BY.get(profile, ()) and not item.nodeid.endswith(tuple(named))
    }
    left = [item for item in items if id(item) in later]
    items[:] = [item for item in items if id(item) not in later]
    config.stash[LEFT_OUT] = Counter(runs[id(item)] for item in left)
    if left:
        config.hook.pytest_deselected(items=left)


def _first_profile(item):
    if item.get_closest_marker("nightly"):
        return "thorough"
    return "ci" if item.get_closest_marker("slow") else "dev"


def _by_function(items):
    groups = defaultdict(list)
    for item in items:
        groups[item.nodeid.partition("[")[0]].append(item)
    return groups


def meeting_each_entry(cases):
    """As few cases as have each entry of each table of the test's parameters among them."""
    entries = {
        id(case): set(case.callspec.indices.items()) if hasattr(case, "callspec") else {case}
        for case in cases
    }
    missing, met = set().union(*entries.values()), []
    while missing:
        best = max(cases, key=lambda case: len(entries[id(case)] & missing))
        missing -= entries[id(best)]
        met.append(best)
    return met


def summary(profile, left_out):
    """Lines for somebody who has never run these tests."""
    for other in ADDED_BY.get(profile, ()):
        if left_out[other]:
            yield f"HYPOTHESIS_PROFILE={other} adds {left_out[other]:,} tests: {ADDS[other]}"
