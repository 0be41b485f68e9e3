"""Optimizers as pure functions: ``init(params)`` and ``apply(grads, state, params)``.

``optimizers`` has the arithmetic of ``sgd``, ``adam`` and ``adamw``; ``update`` says what an
optimizer is, and how those three take a step that leaves every bit as it was if not applied.
``schedules`` and ``decays`` are learning rates that depend on the number of applied steps,
``plateau`` is one that depends on a metric. ``ema`` averages parameters. ``combinators`` makes
optimizers of others (``chain``, ``partition``), and ``from_torch`` of any class of ``torch.optim``.
Two look again, at a function of the whole batch: ``sam``, and ``lbfgs`` by its ``line_search``.
"""

from .combinators import GradientMap as GradientMap
from .combinators import as_optimizer as as_optimizer
from .combinators import chain as chain
from .combinators import clip_by_global_norm as clip_by_global_norm
from .combinators import partition as partition
from .decays import exponential_decay as exponential_decay
from .decays import one_cycle as one_cycle
from .decays import step_decay as step_decay
from .ema import ema as ema
from .from_torch import TorchState as TorchState
from .from_torch import from_torch as from_torch
from .lbfgs import lbfgs as lbfgs
from .optimizers import AdamState as AdamState
from .optimizers import SGDState as SGDState
from .optimizers import adam as adam
from .optimizers import adamw as adamw
from .optimizers import sgd as sgd
from .plateau import plateau as plateau
from .sam import sam as sam
from .schedules import constant as constant
from .schedules import cosine_decay as cosine_decay
from .schedules import join_schedules as join_schedules
from .schedules import linear_warmup as linear_warmup
from .update import Optimizer as Optimizer
