"""The checker: can a loss, or a loop, be cut into microbatches, and why not?

``check`` tries many splits of the batch and compares each with the full batch (``trials``). It
calls the loss as a ``subject``, a ``loop`` of the user's own, or a ``training_loop`` over a module.
If a split is off, ``diagnosis`` looks for the cause: in what ``watch`` recorded, in the state that
the loss has ``kept``, and in how its ``rows`` combine. The ``report`` is a table, and the
``command`` prints it. Read ``check`` first, then ``trials``, which defines rounding.
"""
