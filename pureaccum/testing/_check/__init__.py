"""The checker: may a loss, or a loop, be cut into microbatches, and why not?

``check`` tries many splits of the batch and compares each with the full batch (``trials``); where
one is off, ``diagnosis`` looks for the cause, by what ``watch`` saw of the loss and by what the
loss is of its ``rows``. Read ``check`` first, then ``trials``, which says what is rounding.
"""
