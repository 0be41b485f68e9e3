"""Optimizers as pure functions: ``init(params)`` and ``apply(grads, state, params)``.

``optimizers`` has the arithmetic of ``sgd``, ``adam`` and ``adamw``; ``update`` says what an
optimizer is, and how those three take a step that leaves every bit as it was if not applied.
``schedules`` and ``decays`` are learning rates that depend on the number of applied steps,
``plateau`` is one that depends on a metric. ``ema`` averages parameters. ``combinators`` makes
optimizers of others (``chain``, ``partition``), and ``from_torch`` of any class of ``torch.optim``.
Two look again, at a function of the whole batch: ``sam``, and ``lbfgs`` by its ``line_search``.
"""
