"""The gradients of single samples, reduced while they stream.

``chunks`` takes the gradients of a few samples at a time, ``reducers`` say what becomes of them,
and ``per_sample`` makes a function and an accumulator of the two. What is only scaled and summed
goes ``by_layers``: ``layers`` tell what they see, by their ``layer_rules``, and gradients come as
``outer_products``. ``clipping`` and ``noise_scale`` are what that is used for: DP-SGD's noisy sum,
and how much gradients scatter.
"""

from .clipping import add_noise as add_noise
from .clipping import clipped_sum as clipped_sum
from .gramian import gramian as gramian
from .noise_scale import BatchNoise as BatchNoise
from .noise_scale import NoiseScale as NoiseScale
from .noise_scale import noise_of as noise_of
from .noise_scale import noise_scale as noise_scale
from .noise_scale import running_noise_scale as running_noise_scale
from .per_sample import per_sample_accumulator as per_sample_accumulator
from .per_sample import per_sample_grad as per_sample_grad
from .reducers import Moments as Moments
