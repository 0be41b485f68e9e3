"""The monoid of sums of gradients and of weights, and the primitive: a function of samples.

A batch is cut (``batches``), by a size that may be found (``auto_size``) or by tokens
(``token_budget``). What a loss returns (``losses``) weighs something (``weights``): it may be
``weighted`` itself, or a sum of such (``terms``), whose ``denominators`` are counted first. The
gradient of a microbatch is four functions (``seams``), which features wrap (``layers``), and so
does a policy (``precision``); ``engines`` go forwards and back, gradients end in ``sums``, in one
of two ``windows``, and all else that they come to in a ``ledger``. Over a stream that is the
``accumulator``, over a batch at hand ``whole_batch``, of which ``transforms`` makes ``grad``;
``evaluation`` has ``value``, without gradients. What a structure decides is decided once
(``structures``).

``microbatch`` is the primitive: its ``arguments`` are cut, its ``outputs`` are put together by
their ``reductions`` (``gathered``, on the device or the host), and its derivatives follow the
``rule`` (``attachment``); ``remat`` is the same with one piece, and ``scan`` is one after the other
of these, with a carry. A function that is run again sees what it saw (``recomputation``), wherever
it finds it (``closures``, ``called_modules``; where no graph tells, ``watch``), and writes to
nothing that is not its own (``writes``). A loss is asked whether it may be cut (``coupling``), and
told why not (``causes``). Results have a ``history`` that plain autograd follows. Whether
derivatives are those of the numbers is said by ``differences``. Ranks ``exchange`` what a function
asks for, and sum in ``buckets``.
"""
