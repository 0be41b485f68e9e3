"""Optimizers as pure functions: ``init(params)`` and ``apply(grads, state, params)``.

``optimizers`` has the arithmetic of ``sgd``, ``adam`` and ``adamw``; ``updates`` says what an
optimizer is, and how those three take a step that leaves every bit as it was if not applied.
``schedules`` and ``decays`` are learning rates that depend on the number of applied steps. ``ema``
averages parameters. ``combinators`` makes optimizers of others (``chain``, ``partition``), and
``from_torch`` of any class of ``torch.optim``. A ``minimizer`` is given a function of the whole
batch instead: ``sam``, and ``lbfgs`` with its ``line_search``.
"""
