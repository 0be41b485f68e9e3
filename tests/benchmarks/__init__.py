"""What microbatching costs, beside the loop that a user would have written by hand.

``python -m tests.benchmarks`` takes about half an hour, a part (``--only steps``) some minutes, and
one row (``--row 'tiled head'``) less than one; ``--full`` takes every width, row count and window.
``--json FILE`` keeps every row, of which ``tests.benchmarks.report FILE`` makes the tables and the
picture of the guide.

Rule: ratios only, both sides in one run. Nothing here fails on a slow day: a target that is missed
is a line of the table and not an exit status.
"""
