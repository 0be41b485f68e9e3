"""The monoid of sums of gradients and of weights, and the primitive: a function of samples.

``batches`` cut a batch, by a size that ``auto_size`` may find, or by tokens (``token_budget``).
``losses`` read what a loss returned. It has a weight (``weights``), and may be ``weighted`` itself
or a sum of such ``terms``, whose ``denominators`` are counted first. Four functions (``seams``)
take the gradient of a microbatch; ``layers`` and a policy (``precision``) wrap them. ``engines`` go
forwards and back, in one of two ``windows``. Gradients end in ``sums``, everything else in a
``ledger``. The ``accumulator`` does that over a stream, and ``whole_batch`` over a batch at hand;
``transforms`` makes ``grad`` of it, and ``evaluation`` makes ``value``, without gradients.
``structures`` keeps the decisions that depend on the structure of the arguments alone.

``microbatch`` is the primitive. It cuts its ``arguments``, and puts its ``outputs`` together by
``reductions`` (``gathered``); its derivatives follow the ``rule``
(``attachment``). ``remat`` is the same with one piece, and ``scan`` calls one piece after another
with a carry. ``recomputation`` lets a function that runs again see what it saw first, wherever that
is (``closures``, ``called_modules``; ``watch`` where no graph tells), and ``writes`` refuses writes
to arguments. ``coupling`` checks whether a loss can be cut, and ``causes`` says why not. Results
have a ``history`` that plain autograd follows. ``differences`` checks derivatives numerically.
Ranks ``exchange`` tensors inside a function, and sum in ``buckets``.
"""
