"""Functions of `torch.<device>` for a simulated device, called by torch and by scripts.

Random numbers come from the CPU's generator, and no call waits for anything.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import torch

from ckptmove.simulation import accounting, targets
from ckptmove.simulation.device_streams import StreamContext, current_stream, default_stream, nothing, set_stream
from ckptmove.simulation.generator import encode_state, restore_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

#: Compute capability of a generic device, which code checks before it uses bfloat16 or its own kernels.
_CAPABILITY: Final = (8, 0)
#: Its other properties: those of an A100, with one multiprocessor.
_PROPERTIES: Final[dict[str, object]] = {
    "major": _CAPABILITY[0],
    "minor": _CAPABILITY[1],
    "multi_processor_count": 1,
    "is_integrated": 0,
    "is_multi_gpu_board": 0,
    "max_threads_per_multi_processor": 2048,
    "regs_per_multiprocessor": 65536,
    "gcnArchName": "simulated",
    "warp_size": 32,
    "uuid": "00000000-0000-0000-0000-000000000000",
    "L2_cache_size": 40 << 20,
    "clock_rate": 1_410_000,
    "memory_clock_rate": 1_215_000,
    "memory_bus_width": 5120,
    "shared_memory_per_block": 48 << 10,
    "shared_memory_per_block_optin": 163 << 10,
    "shared_memory_per_multiprocessor": 164 << 10,
}


def _chosen(device: Any) -> torch.device | None:
    """The device to make current; None for None or a negative number, which change nothing."""
    return None if isinstance(device, int) and device < 0 else targets.meant_by(device)


def _number(device: Any) -> int:
    """The index of a device, or of the current one."""
    return device if isinstance(device, int) else targets.number_of(targets.meant_by(device) or targets.current())


def _memory(device: Any) -> accounting.DeviceMemory:
    """Memory of a device, or of the current one."""
    return accounting.memory_of(targets.meant_by(device) or targets.current())


class DeviceCalls:
    """The public functions of a device's module."""

    def __init__(self, kind: Callable[[], str]) -> None:
        self._kind = kind

    def is_available(self) -> bool:
        """Always True."""
        return True

    def device_count(self) -> int:
        """Number of devices of the target's machine."""
        return targets.device_count()

    def current_device(self) -> int:
        """Index of the current device."""
        return targets.number_of(targets.current())

    def current_accelerator(self, check_available: bool = False) -> torch.device:  # noqa: ARG002  # torch's name
        """The target's device type."""
        return torch.device(self._kind())

    def is_current_stream_capturing(self) -> bool:
        """False: there are no CUDA graphs."""
        return False

    def is_bf16_supported(self, *_args: object, **_more: object) -> bool:
        """Always True, as on the CPU."""
        return True

    def get_device_name(self, device: object = None) -> str:  # noqa: ARG002  # torch's name
        """Name of the device."""
        return "simulated"

    def get_device_capability(self, device: object = None) -> tuple[int, int]:  # noqa: ARG002  # the same
        """Compute capability of an Ampere GPU."""
        return _CAPABILITY

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        """Properties of a device.

        Raises:
            AssertionError: if the device does not exist, with torch's message.
        """
        if _number(device) >= self.device_count():
            raise AssertionError("Invalid device id")
        return SimpleNamespace(name=self.get_device_name(), total_memory=accounting.TOTAL, **_PROPERTIES)

    def get_arch_list(self) -> list[str]:
        """Always empty: nothing is compiled for it."""
        return []

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Free and total memory in bytes."""
        return max(accounting.TOTAL - _memory(device).used, 0), accounting.TOTAL

    def recommended_max_memory(self) -> int:
        """Total memory in bytes."""
        return accounting.TOTAL

    def memory_allocated(self, device: Any = None) -> int:
        """Bytes of all live tensors; nothing is reserved in addition."""
        return _memory(device).used

    def max_memory_allocated(self, device: Any = None) -> int:
        """Most bytes in use since the last reset."""
        return _memory(device).peak

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Start a new maximum with the bytes in use."""
        memory = _memory(device)
        memory.peak = memory.used

    def memory_stats(self, device: Any = None) -> Counter[str]:
        """Bytes in use, and most bytes in use, as in torch's statistics; 0 for its other figures."""
        memory = _memory(device)
        figures = {"current": memory.used, "peak": memory.peak}
        kinds = "active_bytes", "allocated_bytes", "reserved_bytes"
        return Counter({f"{kind}.all.{name}": nbytes for kind in kinds for name, nbytes in figures.items()})

    def memory_summary(self, *_args: object, **_more: object) -> str:
        """Always empty."""
        return ""

    def get_rng_state(self, device: object = None) -> torch.Tensor:  # noqa: ARG002  # torch's name
        """RNG state of the CPU's generator, in the target's format."""
        return encode_state(torch.default_generator, self._kind())

    def get_rng_state_all(self) -> list[torch.Tensor]:
        """RNG state of each device."""
        return [self.get_rng_state()] * self.device_count()

    def set_rng_state(self, new_state: torch.Tensor, device: Any = None) -> None:
        """Restore an own state, or use the state of a real device as a seed.

        Raises:
            IndexError: if the device does not exist, with torch's message.
        """
        if _number(device) >= self.device_count():
            raise IndexError("tuple index out of range")
        restore_state(torch.default_generator, self._kind(), new_state)

    def set_rng_state_all(self, new_states: Iterable[torch.Tensor]) -> None:
        """Restore the RNG state of each device."""
        for index, state in enumerate(new_states):
            self.set_rng_state(state, index)

    def initial_seed(self) -> int:
        """Seed of the CPU's generator."""
        return torch.initial_seed()

    def set_device(self, device: Any) -> None:
        """Make a device the current one."""
        chosen = _chosen(device)
        if chosen is not None:
            targets.set_current(chosen)

    current_stream = staticmethod(current_stream)
    default_stream = staticmethod(default_stream)
    set_stream = staticmethod(set_stream)
    stream = StreamContext
    memory_reserved = memory_allocated
    max_memory_reserved = max_memory_allocated
    reset_max_memory_allocated = reset_peak_memory_stats
    current_allocated_memory = driver_allocated_memory = memory_allocated
    get_memory_info = mem_get_info
    empty_cache = ipc_collect = init = synchronize = nothing
    manual_seed = manual_seed_all = seed = seed_all = nothing
    reset_accumulated_memory_stats = set_per_process_memory_fraction = nothing


class DeviceContext:
    """A context that changes the current device."""

    def __init__(self, device: Any) -> None:
        self._asked = device
        self._open = contextlib.ExitStack()

    def __enter__(self) -> None:
        chosen = _chosen(self._asked)
        if chosen is not None:
            self._open.enter_context(targets.chosen(chosen))

    def __exit__(self, *_error: object) -> None:
        self._open.close()


class DeviceOf(DeviceContext):
    """A context that makes the device of a tensor current."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.device)


class DeviceModule(DeviceCalls):
    """The module of the PrivateUse1 backend, for the lifetime of the process."""

    def is_initialized(self) -> bool:
        """Always True."""
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Dtypes of autocast."""
        return [torch.float16, torch.bfloat16]
