"""The exact full-batch gradient, as a pure function, in the memory of one microbatch.

    grads, value = pa.grad_and_value(loss, microbatch_size=32)(params, batch)

    step = pa.make_step(loss, pa.adamw(1e-3), microbatch_size=32)
    state = step.init(params)
    state, info = step(state, batch)

The gradient     grad, grad_and_value, value, Weighted, CoupledLossError, checks
Streams          accumulator, AccumState, microbatches, windows, cut, Cut
The primitive    microbatch, scan, remat, remat_sequential, Reducer
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

from . import curvature as curvature
from . import distributed as distributed
from ._base.asking import checks as checks
from ._base.named_leaves import tree_get as tree_get
from ._base.named_leaves import tree_set as tree_set
from ._base.states import make_public as _make_public
from ._base.states import stack as stack
from ._base.states import unstack as unstack
from ._base.trees import all_finite as all_finite
from ._base.trees import global_norm as global_norm
from ._core.accumulator import accumulator as accumulator
from ._core.batches import microbatches as microbatches
from ._core.batches import windows as windows
from ._core.causes import CoupledLossError as CoupledLossError
from ._core.evaluation import value as value
from ._core.ledger import AccumState as AccumState
from ._core.microbatch import microbatch as microbatch
from ._core.precision import Policy as Policy
from ._core.reductions import Reducer as Reducer
from ._core.remat import remat as remat
from ._core.remat import remat_sequential as remat_sequential
from ._core.scan import scan as scan
from ._core.token_budget import Cut as Cut
from ._core.token_budget import cut as cut
from ._core.transforms import grad as grad
from ._core.transforms import grad_and_value as grad_and_value
from ._core.weighted import Weighted as Weighted
from ._optim.combinators import chain as chain
from ._optim.combinators import clip_by_global_norm as clip_by_global_norm
from ._optim.combinators import partition as partition
from ._optim.decays import exponential_decay as exponential_decay
from ._optim.decays import one_cycle as one_cycle
from ._optim.decays import step_decay as step_decay
from ._optim.ema import ema as ema
from ._optim.from_torch import from_torch as from_torch
from ._optim.lbfgs import lbfgs as lbfgs
from ._optim.optimizers import adam as adam
from ._optim.optimizers import adamw as adamw
from ._optim.optimizers import sgd as sgd
from ._optim.sam import sam as sam
from ._optim.schedules import constant as constant
from ._optim.schedules import cosine_decay as cosine_decay
from ._optim.schedules import join_schedules as join_schedules
from ._optim.schedules import linear_warmup as linear_warmup
from ._pure.functional import functional as functional
from ._pure.keys import dropout as dropout
from ._pure.keys import fold_in as fold_in
from ._pure.keys import key as key
from ._pure.keys import normal as normal
from ._pure.keys import split_key as split_key
from ._pure.keys import uniform as uniform
from ._samples.clipping import add_noise as add_noise
from ._samples.clipping import clipped_sum as clipped_sum
from ._samples.gramian import gramian as gramian
from ._samples.noise_scale import NoiseScale as NoiseScale
from ._samples.noise_scale import noise_scale as noise_scale
from ._samples.noise_scale import running_noise_scale as running_noise_scale
from ._samples.per_sample import per_sample_accumulator as per_sample_accumulator
from ._samples.per_sample import per_sample_grad as per_sample_grad
from ._samples.reducers import Moments as Moments
from ._step.loss_scale import LossScaleState as LossScaleState
from ._step.loss_scale import dynamic_loss_scale as dynamic_loss_scale
from ._step.loss_scale import static_loss_scale as static_loss_scale
from ._step.memory_report import Memory as Memory
from ._step.memory_report import MemoryReport as MemoryReport
from ._step.memory_report import memory_report as memory_report
from ._step.state import StepInfo as StepInfo
from ._step.state import TrainState as TrainState
from ._step.step import make_step as make_step
from ._step.taken_over import export_state as export_state
from ._step.taken_over import import_state as import_state
from .checkpoint.save_load import load as load
from .checkpoint.save_load import save as save


if _TYPE_CHECKING:
    from . import testing as testing

__version__ = "0.3.0"
__all__ = [
    "AccumState",
    "CoupledLossError",
    "Cut",
    "LossScaleState",
    "Memory",
    "MemoryReport",
    "Moments",
    "NoiseScale",
    "Policy",
    "Reducer",
    "StepInfo",
    "TrainState",
    "Weighted",
    "accumulator",
    "adam",
    "adamw",
    "add_noise",
    "all_finite",
    "chain",
    "checks",
    "clip_by_global_norm",
    "clipped_sum",
    "constant",
    "cosine_decay",
    "curvature",
    "cut",
    "distributed",
    "dropout",
    "dynamic_loss_scale",
    "ema",
    "exponential_decay",
    "export_state",
    "fold_in",
    "from_torch",
    "functional",
    "global_norm",
    "grad",
    "grad_and_value",
    "gramian",
    "import_state",
    "join_schedules",
    "key",
    "lbfgs",
    "linear_warmup",
    "load",
    "make_step",
    "memory_report",
    "microbatch",
    "microbatches",
    "noise_scale",
    "normal",
    "one_cycle",
    "partition",
    "per_sample_accumulator",
    "per_sample_grad",
    "remat",
    "remat_sequential",
    "running_noise_scale",
    "sam",
    "save",
    "scan",
    "sgd",
    "split_key",
    "stack",
    "static_loss_scale",
    "step_decay",
    "testing",
    "tree_get",
    "tree_set",
    "uniform",
    "unstack",
    "value",
    "windows",
]
_make_public(globals(), __name__)


def __getattr__(name: str) -> _Any:
    """``pureaccum.testing`` is imported when it is asked for: most programs never do."""
    if name == "testing":
        from importlib import import_module

        return import_module(".testing", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
