"""Inductor for the device: a compiled step's own code runs, and Triton's kernels are counted.

They are compiled for the GPU that the device says it is, down to its machine code, and do not run:
numbers have no meaning. All else that a compiled step launches, such as a product of matrices, does
run.
"""

import os
from collections import Counter
from contextlib import ExitStack, contextmanager, nullcontext
from tempfile import TemporaryDirectory
from typing import NamedTuple
from unittest import mock

import torch


class Compiled(NamedTuple):
    """What was compiled, and how often each kernel of Triton was launched since it was cleared."""

    graphs: list[str]  # the code of each
    kernels: list[str]  # the names of those of Triton
    launched: Counter[str]


class Driver:
    """What Triton asks of the driver of a GPU."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self):
        return torch.device("cuda", 0)

    def get_device_interface(self):
        return torch.cuda

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def get_benchmarker(self):
        return lambda *_, **__: [1.0]

    def map_python_to_cpp_type(self, type_):
        return "void*"


def always(value):
    return lambda *_, **__: value


def fastest(value):
    """As a static method: what a class of inductor's is asked without an instance."""
    return staticmethod(always(value))


@contextmanager
def of_the_device():
    """Compile for the device, in a block."""
    import torch._inductor.config as config
    import triton.runtime
    from torch._dynamo import device_interface
    from torch._inductor.graph import GraphLowering
    from torch._inductor.runtime import benchmarking, triton_helpers
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    seen = Compiled([], [], Counter())
    properties = torch.cuda.get_device_properties("cuda")

    def compile_(self, *args, **kwargs):
        self._precompile_worker()  # to machine code, which is not loaded
        assert self.compile_results
        seen.kernels.append(self.fn.__name__)

    def launch(self, *args, **kwargs):
        seen.launched[self.fn.__name__] += 1

    def empty_strided(size, stride, dtype):
        return torch.empty_strided(size, stride, dtype=dtype, device="cuda")

    guards = torch._C._dynamo.guards
    patches = [
        (
            torch.cuda,
            {
                "_DeviceGuard": always(nullcontext()),
                "_get_device_properties": always(properties),
                "can_device_access_peer": always(False),
                "device": always(nullcontext()),
                "get_arch_list": always(["sm_90"]),
            },
        ),
        (
            torch._C,
            {
                "_cuda_cudaCachingAllocator_is_enabled": always(True),
                "_cuda_getCurrentRawStream": always(0),
                "_cuda_getDevice": always(0),
            },
        ),
        (guards, {"_empty_strided_cuda": empty_strided}),
        (device_interface, {"get_cuda_stream": always(0)}),
        (
            device_interface.CudaInterface,
            {
                "current_device": fastest(0),
                "device_count": fastest(1),
                "exchange_device": fastest(0),
                "get_compute_capability": fastest(90),
                "get_device_properties": fastest(properties),
                "get_raw_stream": fastest(0),
                "is_available": fastest(True),
                "is_bf16_supported": fastest(True),
                "is_triton_capable": fastest(True),
                "maybe_exchange_device": fastest(0),
                "raise_if_triton_unavailable": fastest(None),
                "synchronize": fastest(None),
            },
        ),
        (
            device_interface.CudaInterface.Worker,
            {
                "current_device": fastest(0),
                "get_device_properties": fastest(properties),
                "set_device": fastest(None),
            },
        ),
        (CachingAutotuner, {"run": launch, "precompile": compile_}),
        (GraphLowering, {"save_output_code": staticmethod(seen.graphs.append)}),
        (triton_helpers, {"set_driver_to_gpu": always(None)}),
    ]
    for found in vars(benchmarking).values():
        if isinstance(found, type):
            timed = ("benchmark", "benchmark_gpu", "benchmark_many_gpu")
            patches.append((found, {name: always(1.0) for name in timed if name in vars(found)}))
    options = {
        "compile_threads": 1,
        "fx_graph_cache": False,
        "shape_padding": False,
        "triton.cudagraphs": False,
    }
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        caches = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder}
        stack.enter_context(mock.patch.dict(os.environ, caches))
        for where, names in patches:
            for name, value in names.items():
                stack.enter_context(mock.patch.object(where, name, value, create=True))
        stack.enter_context(config.patch(options))
        triton.runtime.driver.set_active(Driver())
        yield seen
