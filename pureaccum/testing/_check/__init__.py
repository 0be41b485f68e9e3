"""The checker: may a loss, or a loop, be cut into microbatches, and why not?

``check`` tries many splits of the batch and compares each with the full batch (``trials``); the
loss is called as a ``subject``, or there is a ``loop`` of the user's own, or a ``training_loop``
over a module. Where a split is off, ``diagnosis`` looks for the cause, by what ``watch`` saw of the
loss, by what it has ``kept`` and by what it is of its ``rows``. The ``report`` is a table; the
``command`` prints it. Read ``check`` first, then ``trials``, which says what is rounding.
"""
