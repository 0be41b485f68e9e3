"""The device in software, loaded: ``device.cpp`` before torch, and what stands in for torch.cuda.

    python -m pytest -p tests.device.software tests/device/features.py

As a plugin of pytest it loads the device, and fails every test in which two streams raced.
"""

import ctypes
import sys
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from tests.device.library import NEEDED, build, folder_of_torch


TOTAL_MEMORY = 8 * 2**30
_device = None


def load():
    """Make torch believe in one CUDA device; it has not been imported yet."""
    global _device
    if "torch" in sys.modules:
        raise RuntimeError(
            "torch has been imported, and asks but once whether there is CUDA. Expected the device "
            "to be loaded first, as by `pytest -p tests.device.software`."
        )
    for name in NEEDED:
        ctypes.CDLL(str(folder_of_torch() / "lib" / f"lib{name}.so"), mode=ctypes.RTLD_GLOBAL)
    _device = ctypes.CDLL(str(build()))
    for text in (_device.device_seen, _device.device_races):
        text.restype = ctypes.c_char_p
    for number in (_device.device_current, _device.device_alive, _device.device_peak):
        number.restype = ctypes.c_longlong
    for given in (_device.device_enter, _device.device_limit):
        given.argtypes = [ctypes.c_longlong]
    _stand_in_for_cuda()


# What the device saw -------------------------------------------------------------------------


class Record(NamedTuple):
    """What happened in a block, in order; complete when the block has ended."""

    lines: list[str]

    def of(self, *kinds):
        return [line for line in self.lines if line.split(" ", 1)[0] in kinds]

    @property
    def launches(self):
        """How often each operation was launched."""
        return Counter(line.split()[1] for line in self.of("launch"))

    @property
    def waits(self):
        return self.of("wait")

    @property
    def copies(self):
        """Copies between host and device."""
        return self.of("h2d", "d2h")


@contextmanager
def recorded():
    record = Record([])
    _device.device_seen()  # forgets what was before
    _device.device_record(True)
    try:
        yield record
    finally:
        _device.device_record(False)
        record.lines.extend(_device.device_seen().decode().splitlines())


@contextmanager
def nothing_waits():
    """Whatever would wait for a GPU raises where it stands."""
    _device.device_strict(True)
    try:
        with recorded() as record:
            yield record
    finally:
        _device.device_strict(False)


def races():
    """What two streams did to one memory, of which neither had waited for the other."""
    return [*dict.fromkeys(_device.device_races().decode().splitlines())]


# The plugin ----------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests():
    """Before tests/conftest.py, which imports torch."""
    load()


@pytest.fixture(autouse=True)
def in_order():
    races()
    yield
    assert not races()


# torch.cuda ------------------------------------------------------------------------------------


def _stand_in_for_cuda():
    """What Python asks of CUDA's library itself, which this torch was built without."""
    import torch

    cuda = torch.cuda
    _device.device_hand_out_default(True)
    generator = torch.Generator("cuda")
    _device.device_hand_out_default(False)

    def always(value):  # each time another, as the compiler wants them
        return lambda *_, **__: value

    @contextmanager
    def stream(entered):
        before = _device.device_current()
        _device.device_enter(entered.stream_id)
        try:
            yield entered
        finally:
            _device.device_enter(before)

    def limit_memory(fraction, device=None):
        _device.device_limit(-1 if fraction >= 1 else int(fraction * TOTAL_MEMORY))

    properties = SimpleNamespace(
        name="software",
        major=9,
        minor=0,
        multi_processor_count=132,
        regs_per_multiprocessor=2**16,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        total_memory=TOTAL_MEMORY,
        shared_memory_per_block=48 * 2**10,
        shared_memory_per_block_optin=227 * 2**10,
        shared_memory_per_multiprocessor=228 * 2**10,
        L2_cache_size=50 * 2**20,
        gcnArchName="",
    )
    stand_ins = {
        "_lazy_init": always(None),
        "_exchange_device": always(0),
        "_initialized": True,
        "_maybe_exchange_device": always(0),
        "Event": torch.Event,
        "Stream": lambda device=None, priority=0: torch.Stream(device="cuda:0"),
        "current_device": always(0),
        "current_stream": lambda device=None: torch.accelerator.current_stream(),
        "default_generators": (generator,),
        "device_count": always(1),
        "empty_cache": always(None),
        "get_device_capability": always((9, 0)),
        "get_device_name": always("software"),
        "get_device_properties": always(properties),
        "get_rng_state": lambda device=None: generator.get_state(),
        "get_rng_state_all": lambda: [generator.get_state()],
        "is_available": always(True),
        "is_current_stream_capturing": always(False),
        "is_initialized": always(True),
        "manual_seed": lambda seed: generator.manual_seed(seed),
        "manual_seed_all": lambda seed: generator.manual_seed(seed),
        "max_memory_allocated": lambda device=None: _device.device_peak(),
        "memory_allocated": lambda device=None: _device.device_alive(),
        "memory_reserved": lambda device=None: _device.device_alive(),
        "reset_peak_memory_stats": lambda device=None: _device.device_reset_peak(),
        "seed": lambda: generator.seed(),
        "seed_all": lambda: generator.seed(),
        "set_device": always(None),
        "set_per_process_memory_fraction": limit_memory,
        "set_rng_state": lambda state, device=None: generator.set_state(state),
        "set_sync_debug_mode": lambda mode: _device.device_strict(mode in (2, "error")),
        "stream": stream,
        "synchronize": lambda device=None: torch.accelerator.synchronize(),
    }
    for name, stand_in in stand_ins.items():
        assert hasattr(cuda, name), name
        setattr(cuda, name, stand_in)
