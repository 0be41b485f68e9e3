"""Optimizers as pure functions: ``init(params)`` and ``apply(grads, state, params)``.

``updates`` defines the optimizer protocol and the update that leaves every bit unchanged when a
step is not applied. ``optimizers`` has the arithmetic of ``sgd``, ``adam`` and ``adamw``.
``schedules`` and ``decays`` compute learning rates from the number of applied steps. ``ema``
averages parameters. ``combinators`` builds optimizers from others (``chain``, ``partition``), and
``from_torch`` wraps any class of ``torch.optim``, and ``users`` those of anybody's own. A
``minimizer`` takes a function of the whole batch instead of its gradient: ``sam``, and ``lbfgs``
with its ``line_search``.
"""
