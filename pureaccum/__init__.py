"""The exact full-batch gradient, as a pure function, in the memory of one microbatch."""

from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from . import curvature as curvature
from . import distributed as distributed
from ._base import all_finite as all_finite
from ._base import global_norm as global_norm
from ._base import make_public as _make_public
from ._base import stack as stack
from ._base import tree_get as tree_get
from ._base import tree_set as tree_set
from ._base import unstack as unstack
from ._core import AccumState as AccumState
from ._core import Cut as Cut
from ._core import Policy as Policy
from ._core import Reducer as Reducer
from ._core import Weighted as Weighted
from ._core import accumulator as accumulator
from ._core import cut as cut
from ._core import grad as grad
from ._core import grad_and_value as grad_and_value
from ._core import microbatch as microbatch
from ._core import microbatches as microbatches
from ._core import remat as remat
from ._core import remat_sequential as remat_sequential
from ._core import value as value
from ._core import windows as windows
from ._optim import adam as adam
from ._optim import adamw as adamw
from ._optim import chain as chain
from ._optim import clip_by_global_norm as clip_by_global_norm
from ._optim import constant as constant
from ._optim import cosine_decay as cosine_decay
from ._optim import ema as ema
from ._optim import exponential_decay as exponential_decay
from ._optim import from_torch as from_torch
from ._optim import join_schedules as join_schedules
from ._optim import lbfgs as lbfgs
from ._optim import linear_warmup as linear_warmup
from ._optim import one_cycle as one_cycle
from ._optim import partition as partition
from ._optim import plateau as plateau
from ._optim import sam as sam
from ._optim import sgd as sgd
from ._optim import step_decay as step_decay
from ._pure import dropout as dropout
from ._pure import fold_in as fold_in
from ._pure import functional as functional
from ._pure import key as key
from ._pure import normal as normal
from ._pure import split_key as split_key
from ._pure import uniform as uniform
from ._samples import Moments as Moments
from ._samples import NoiseScale as NoiseScale
from ._samples import add_noise as add_noise
from ._samples import clipped_sum as clipped_sum
from ._samples import gramian as gramian
from ._samples import noise_scale as noise_scale
from ._samples import per_sample_accumulator as per_sample_accumulator
from ._samples import per_sample_grad as per_sample_grad
from ._samples import running_noise_scale as running_noise_scale
from ._step import LossScaleState as LossScaleState
from ._step import Memory as Memory
from ._step import MemoryReport as MemoryReport
from ._step import StepInfo as StepInfo
from ._step import TrainState as TrainState
from ._step import dynamic_loss_scale as dynamic_loss_scale
from ._step import export_state as export_state
from ._step import import_state as import_state
from ._step import make_step as make_step
from ._step import memory_report as memory_report
from ._step import static_loss_scale as static_loss_scale
from .checkpoint.save_load import load as load
from .checkpoint.save_load import save as save


if _TYPE_CHECKING:
    from . import testing as testing

__version__ = "0.2.0"
_make_public(globals(), __name__)


def __getattr__(name: str) -> _Any:
    """``pureaccum.testing`` is imported when it is asked for: most programs never do."""
    if name == "testing":
        from importlib import import_module

        return import_module(".testing", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
