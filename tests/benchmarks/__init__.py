"""What microbatching costs, beside the loop that a user would have written by hand.

``python -m tests.benchmarks`` takes about twelve minutes (``--quick``), ``--only step`` about four,
``--only microbatch`` and ``--only samples`` about two, ``--only checkpoint`` a quarter of one;
``--full`` takes every width, row count and window; ``--json FILE`` keeps every raw number, and
``--plot FILE`` draws the whole training steps.

Rule: ratios only, both sides in one run. Nothing here fails on a slow day: a target that is missed
is a line of the table and not an exit status.
"""
