"""The exact full-batch gradient, as a pure function, in the memory of one microbatch.

    grads, value = pa.grad_and_value(loss, microbatch_size=32)(params, batch)

    step = pa.make_step(loss, pa.adamw(1e-3), microbatch_size=32)
    state = step.init(params)
    state, info = step(state, batch)

The gradient     grad, grad_and_value, value, Weighted, CoupledLossError, checks
Streams          accumulator, AccumState, microbatches, windows, cut, Cut
The primitive    microbatch, scan, remat, Reducer
The step         make_step, TrainState, StepInfo, Policy, dynamic_loss_scale, static_loss_scale,
                 LossScaleState, import_state, export_state
Optimizers       sgd, adam, adamw, from_torch, chain, partition, clip_by_global_norm, lbfgs, sam,
                 ema
Schedules        constant, linear_warmup, cosine_decay, exponential_decay, step_decay, one_cycle,
                 join_schedules
Modules          functional
Random numbers   key, split_key, fold_in, uniform, normal, dropout
Samples          per_sample_grad, per_sample_accumulator, clipped_sum, add_noise, gramian, Moments,
                 noise_scale, running_noise_scale, NoiseScale
Trees            stack, unstack, tree_get, tree_set, all_finite, global_norm
Memory, disk     memory_report, MemoryReport, Memory, save, load
Modules of pa    curvature (hvp, ggnvp, fisher_vp, cg, ...), distributed (psum, gather, ...),
                 testing (check_accumulation, ...; needs hypothesis for its strategies)

``help(pa.grad)`` says more of each. ``python -m pureaccum demo`` shows it on real data.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from . import curvature, distributed
from ._base.asking import checks
from ._base.named_leaves import tree_get, tree_set
from ._base.states import make_public as _make_public
from ._base.states import stack, unstack
from ._base.trees import all_finite, global_norm
from ._core.accumulator import accumulator
from ._core.batches import microbatches, windows
from ._core.causes import CoupledLossError
from ._core.evaluation import value
from ._core.ledger import AccumState
from ._core.microbatch import microbatch
from ._core.precision import Policy
from ._core.reductions import Reducer
from ._core.remat import remat
from ._core.scan import scan
from ._core.token_budget import Cut, cut
from ._core.transforms import grad, grad_and_value
from ._core.weighted import Weighted
from ._optim.combinators import chain, clip_by_global_norm, partition
from ._optim.decays import exponential_decay, one_cycle, step_decay
from ._optim.ema import ema
from ._optim.from_torch import from_torch
from ._optim.lbfgs import lbfgs
from ._optim.optimizers import adam, adamw, sgd
from ._optim.sam import sam
from ._optim.schedules import constant, cosine_decay, join_schedules, linear_warmup
from ._pure.functional import functional
from ._pure.keys import dropout, fold_in, key, normal, split_key, uniform
from ._samples.clipping import add_noise, clipped_sum
from ._samples.gramian import gramian
from ._samples.noise_scale import NoiseScale, noise_scale, running_noise_scale
from ._samples.per_sample import per_sample_accumulator, per_sample_grad
from ._samples.reducers import Moments
from ._step.loss_scale import LossScaleState, dynamic_loss_scale, static_loss_scale
from ._step.memory_report import Memory, MemoryReport, memory_report
from ._step.state import StepInfo, TrainState
from ._step.step import make_step
from ._step.taken_over import export_state, import_state
from .checkpoint.save_load import load, save


if _TYPE_CHECKING:
    from . import testing as testing

__version__ = "0.3.0"
__all__ = [
    "AccumState", "CoupledLossError", "Cut", "LossScaleState", "Memory", "MemoryReport",
    "Moments", "NoiseScale", "Policy", "Reducer", "StepInfo", "TrainState", "Weighted",
    "accumulator", "adam", "adamw", "add_noise", "all_finite", "chain", "checks",
    "clip_by_global_norm", "clipped_sum", "constant", "cosine_decay", "curvature", "cut",
    "distributed", "dropout", "dynamic_loss_scale", "ema", "exponential_decay", "export_state",
    "fold_in", "from_torch", "functional", "global_norm", "grad", "grad_and_value", "gramian",
    "import_state", "join_schedules", "key", "lbfgs", "linear_warmup", "load", "make_step",
    "memory_report", "microbatch", "microbatches", "noise_scale", "normal", "one_cycle",
    "partition", "per_sample_accumulator", "per_sample_grad", "remat", "running_noise_scale",
    "sam", "save", "scan", "sgd", "split_key", "stack", "static_loss_scale", "step_decay",
    "testing", "tree_get", "tree_set", "uniform", "unstack", "value", "windows",
]  # fmt: skip
_make_public(globals(), __name__)


def __getattr__(name: str) -> _Any:
    """``pureaccum.testing`` is imported when it is asked for: most programs never do."""
    if name == "testing":
        from importlib import import_module

        return import_module(".testing", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
