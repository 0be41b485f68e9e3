"""Parametrizations that are smaller than the product of their tables."""

import pytest


def each_once(names, *tables):
    """As many cases as the longest table has entries; every entry of every table is in one.

    For tables whose entries matter one by one: what is refused, say, and the doors at which one and
    the same check refuses it. An entry that is a plain tuple stands for several arguments.
    """
    cases = []
    for i in range(max(map(len, tables))):
        picked = [[*table.items()][i % len(table)] for table in tables]
        entries = [entry if type(entry) is tuple else (entry,) for _, entry in picked]
        id_ = "-".join(key for key, _ in picked)
        cases.append(pytest.param(*(value for entry in entries for value in entry), id=id_))
    return pytest.mark.parametrize(names, cases)


def every_night(cases, but):
    """Cases of which only some are run for every change; a tuple stands for several arguments."""
    entries = [case if type(case) is tuple else (case,) for case in cases]
    nightly = [() if case in but else pytest.mark.nightly for case in cases]
    return [pytest.param(*it, marks=marks) for it, marks in zip(entries, nightly, strict=True)]
