"""What is asked of `torch.<device>` for a simulated device: by torch, and by a script that names its target.

Never keeps a state of its own: draws come from the CPU's generator, and nothing is ever waited for.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import torch

from ckptmove.verification.simulated import states as simulated_states
from ckptmove.verification.simulated import targets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

#: A device of no maker: of the memory and the kind that code asks for before it uses bfloat16 or its own kernels.
_BYTES: Final = 1 << 34
_CAPABILITY: Final = (8, 0)


def _chosen(device: Any) -> torch.device | None:
    """The device that is to become the current one; None where a number below zero, or None, leaves it as it is."""
    return None if isinstance(device, int) and device < 0 else targets.meant_by(device)


def _number(device: Any) -> int:
    """The number of a device: as it is given, or that of the current one."""
    return device if isinstance(device, int) else targets.number_of(targets.meant_by(device) or targets.current())


def _nothing(*_args: object, **_more: object) -> None:
    """Nothing: there is no memory to free, nothing to wait for, and no generator but the CPU's."""


class DeviceCalls:
    """The public functions of a device's module."""

    def __init__(self, kind: Callable[[], str]) -> None:
        """Take down what to ask.

        Args:
            kind: of the target: ``cuda``.
        """
        self._kind = kind

    def is_available(self) -> bool:
        """Yes, as far as a script can tell."""
        return True

    def device_count(self) -> int:
        """How many devices there are."""
        return targets.count()

    def current_device(self) -> int:
        """The one that is meant where none is named."""
        return targets.number_of(targets.current())

    def is_current_stream_capturing(self) -> bool:
        """No: there is no stream to capture."""
        return False

    def is_bf16_supported(self, *_args: object, **_more: object) -> bool:
        """Yes, as the CPU does."""
        return True

    def get_device_name(self, _device: object = None) -> str:
        """What it is."""
        return "simulated"

    def get_device_capability(self, _device: object = None) -> tuple[int, int]:
        """That of an Ampere."""
        return _CAPABILITY

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        """Those of the device that it names.

        Raises:
            AssertionError: there is no such device, in torch's words.
        """
        if _number(device) >= self.device_count():
            raise AssertionError("Invalid device id")
        major, minor = _CAPABILITY
        figures = {"total_memory": _BYTES, "multi_processor_count": 1, "major": major, "minor": minor}
        return SimpleNamespace(name=self.get_device_name(), **figures)

    def get_arch_list(self) -> list[str]:
        """None: nothing is compiled for it."""
        return []

    def mem_get_info(self, _device: object = None) -> tuple[int, int]:
        """All of its memory is free."""
        return _BYTES, _BYTES

    def memory_allocated(self, _device: object = None) -> int:
        """None of it."""
        return 0

    def memory_stats(self, _device: object = None) -> dict[str, int]:
        """No figures."""
        return {}

    def memory_summary(self, *_args: object, **_more: object) -> str:
        """Nothing to say."""
        return ""

    def get_rng_state(self, _device: object = None) -> torch.Tensor:
        """That of the CPU's generator, which draws for it."""
        return simulated_states.given(torch.default_generator, self._kind())

    def get_rng_state_all(self) -> list[torch.Tensor]:
        """One for each device."""
        return [self.get_rng_state()] * self.device_count()

    def set_rng_state(self, new_state: torch.Tensor, device: Any = None) -> None:
        """Take one of its own back, or one of a real device, which is good for a seed.

        Raises:
            IndexError: there is no such device, in torch's words.
        """
        if _number(device) >= self.device_count():
            raise IndexError("tuple index out of range")
        simulated_states.take(torch.default_generator, self._kind(), new_state)

    def set_rng_state_all(self, new_states: Iterable[torch.Tensor]) -> None:
        """Take them back."""
        for index, state in enumerate(new_states):
            self.set_rng_state(state, index)

    def initial_seed(self) -> int:
        """That of the CPU's generator."""
        return torch.initial_seed()

    def set_device(self, device: Any) -> None:
        """Make a device the current one."""
        chosen = _chosen(device)
        if chosen is not None:
            targets.choose(chosen)

    max_memory_allocated = memory_reserved = max_memory_reserved = memory_allocated
    current_allocated_memory = driver_allocated_memory = memory_allocated
    get_memory_info = mem_get_info
    synchronize = empty_cache = ipc_collect = init = _nothing
    manual_seed = manual_seed_all = seed = seed_all = _nothing
    reset_peak_memory_stats = reset_accumulated_memory_stats = reset_max_memory_allocated = _nothing
    set_per_process_memory_fraction = _nothing


class Device:
    """A context in which another device is the current one."""

    def __init__(self, device: Any) -> None:
        """Take what a real one takes."""
        self._asked = device
        self._open = contextlib.ExitStack()

    def __enter__(self) -> None:
        chosen = _chosen(self._asked)
        if chosen is not None:
            self._open.enter_context(targets.chosen(chosen))

    def __exit__(self, *_error: object) -> None:
        self._open.close()


class DeviceOf(Device):
    """A context in which the device of a tensor is the current one."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """Take what a real one takes."""
        super().__init__(tensor.device)


class DeviceModule(DeviceCalls):
    """Stands for the module of the PrivateUse1 backend, as long as the process lives."""

    def is_initialized(self) -> bool:
        """Yes: there is nothing to do for it."""
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """What autocast may cast to."""
        return [torch.float16, torch.bfloat16]
