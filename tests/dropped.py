"""A first call is made once more, observed, and what it gives is dropped: see ``observation.py``.

Tests that count calls, or let one of them fail, leave that one out.
"""

from pureaccum._base.checks import here


def is_dropped():
    """Whether what runs now is dropped afterwards."""
    return here.observed is not None
