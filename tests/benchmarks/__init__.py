"""What microbatching costs, beside the loop that a user would have written by hand.

``python -m tests.benchmarks`` takes about five minutes (``--quick``); ``--full`` takes every
width, row count and window; ``--json FILE`` keeps every raw number.

Rule: ratios only, both sides in one run. Nothing here fails on a slow day: a target that is missed
is a line of the table and not an exit status.
"""
