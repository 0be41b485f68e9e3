"""A whole optimizer step as one pure function, eager and compiled."""

from .loss_scale import LossScaleState as LossScaleState
from .loss_scale import dynamic_loss_scale as dynamic_loss_scale
from .loss_scale import static_loss_scale as static_loss_scale
from .memory_report import Memory as Memory
from .memory_report import MemoryReport as MemoryReport
from .memory_report import memory_report as memory_report
from .precision import Policy as Policy
from .state import StepInfo as StepInfo
from .state import TrainState as TrainState
from .step import make_step as make_step
