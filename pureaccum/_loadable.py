"""``torch.load(file, weights_only=True)`` reads every state, with no word from the user.

torch then makes no object of a class that nobody has named to it. These are tuples of tensors,
which run nothing when they are made.
"""

import torch

from ._accumulator import AccumState
from ._buffers import Carried
from ._from_torch import TorchState
from ._loss_scale import LossScaleState
from ._moments import Moments as BufferMoments
from ._noise_scale import BatchNoise, NoiseAverages, NoiseScale
from ._optimizers import AdamState, SGDState
from ._reducers import Moments, MomentSums
from ._train_state import StepInfo, StepWindow, TrainState


torch.serialization.add_safe_globals(
    [
        AccumState,
        AdamState,
        BatchNoise,
        BufferMoments,
        Carried,
        LossScaleState,
        Moments,
        MomentSums,
        NoiseAverages,
        NoiseScale,
        SGDState,
        StepInfo,
        StepWindow,
        TorchState,
        TrainState,
    ]
)
