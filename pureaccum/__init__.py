"""The exact full-batch gradient, as a pure function, in the memory of one microbatch."""

from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from . import _loadable as _loadable  # names the classes of states to torch.load
from . import distributed as distributed
from ._accumulator import AccumState as AccumState
from ._accumulator import accumulator as accumulator
from ._batches import microbatches as microbatches
from ._batches import windows as windows
from ._chain import chain as chain
from ._chain import clip_by_global_norm as clip_by_global_norm
from ._clipped import add_noise as add_noise
from ._clipped import clipped_sum as clipped_sum
from ._ensemble import stack as stack
from ._ensemble import unstack as unstack
from ._from_torch import from_torch as from_torch
from ._loss import Weighted as Weighted
from ._loss_scale import LossScaleState as LossScaleState
from ._loss_scale import dynamic_loss_scale as dynamic_loss_scale
from ._loss_scale import static_loss_scale as static_loss_scale
from ._memory_report import Memory as Memory
from ._memory_report import MemoryReport as MemoryReport
from ._memory_report import memory_report as memory_report
from ._microbatch import microbatch as microbatch
from ._module import functional as functional
from ._noise_scale import NoiseScale as NoiseScale
from ._noise_scale import noise_scale as noise_scale
from ._noise_scale import running_noise_scale as running_noise_scale
from ._optimizers import adam as adam
from ._optimizers import adamw as adamw
from ._optimizers import sgd as sgd
from ._partition import partition as partition
from ._per_sample import per_sample_accumulator as per_sample_accumulator
from ._per_sample import per_sample_grad as per_sample_grad
from ._precision import Policy as Policy
from ._random import dropout as dropout
from ._random import fold_in as fold_in
from ._random import key as key
from ._random import normal as normal
from ._random import split_key as split_key
from ._random import uniform as uniform
from ._reducers import Moments as Moments
from ._remat import remat as remat
from ._remat import remat_sequential as remat_sequential
from ._schedules import constant as constant
from ._schedules import cosine_decay as cosine_decay
from ._schedules import join_schedules as join_schedules
from ._schedules import linear_warmup as linear_warmup
from ._step import make_step as make_step
from ._train_state import StepInfo as StepInfo
from ._train_state import TrainState as TrainState
from ._transforms import grad as grad
from ._transforms import grad_and_value as grad_and_value
from ._transforms import value as value
from ._tree import all_finite as all_finite
from ._tree import global_norm as global_norm
from ._words import Reducer as Reducer
from .checkpoint import load as load
from .checkpoint import save as save


if _TYPE_CHECKING:
    from . import testing as testing

__version__ = "0.1.0"


def __getattr__(name: str) -> _Any:
    """``pureaccum.testing`` is imported when it is asked for: most programs never do."""
    if name == "testing":
        from importlib import import_module

        return import_module(".testing", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
