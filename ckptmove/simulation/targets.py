"""Map simulated devices to targets, and track which devices are active.

A target stays known, because its tensors may outlive the context of its device.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, Final

import torch

from ckptmove.text import amount

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    #: Wraps a CPU tensor as a tensor of a device, with the same memory.
    Place = Callable[[torch.Tensor, torch.device], torch.Tensor]

#: Name of the PrivateUse1 backend of this process.
BACKEND: Final = "sim"
#: Target of each `sim` device by index. The first device type of the process keeps its own indices, because torch and
#: scripts accept a bare number as a device.
_TARGETS: Final[dict[int, str]] = {}
#: The target's torch.device of each known `sim` device.
_SHOWN: Final[dict[torch.device, torch.device]] = {}
_LAST: Final = 127  # largest index of torch; devices of other types count down from it
# Active devices, innermost last, each with the number of devices of its type on the target's machine.
_ENTERED: Final[list[tuple[torch.device, int]]] = []
# Devices that were made current, innermost last.
_CHOSEN: Final[list[torch.device]] = []
#: torch's message on a machine without CUDA.
NO_CUDA: Final = "Torch not compiled with CUDA enabled"


def device_for(target: str) -> torch.device:
    """The device that represents a target (`cuda:3`, `mps`) in this process."""
    name = target if ":" in target else f"{target}:0"
    known = next((index for index, one in _TARGETS.items() if one == name), None)
    if known is None:
        kind, _, index = name.partition(":")
        is_first = all(one.startswith(f"{kind}:") for one in list(_TARGETS.values())[:1])
        known = int(index) if is_first else next(at for at in range(_LAST, 0, -1) if at not in _TARGETS)
        _TARGETS[known] = name
        device = _device(BACKEND, known)
        _SHOWN[device] = _device_of_target(device)
    return _device(BACKEND, known)


@functools.cache
def at_index(index: int) -> torch.device:
    """The simulated device with an index."""
    return _device(BACKEND, index)


def _device(*args: Any) -> torch.device:
    """A torch.device, which a function mode would replace by that of the target."""
    with torch._C.DisableTorchFunction():
        return torch.device(*args)


def enter(device: torch.device) -> None:
    """Activate a device, on a machine with at least as many devices as its index requires."""
    _ENTERED.append((device, number_of(device) + 1))
    translated.cache_clear()


def leave() -> None:
    """Deactivate the innermost device; with the last one, no device is current any more."""
    _ENTERED.pop()
    if not _ENTERED:
        _CHOSEN.clear()
    translated.cache_clear()


def is_any_active() -> bool:
    """Whether any device is active."""
    return bool(_ENTERED)


def at_least(devices: int) -> None:
    """Raise the number of devices on the machine of the innermost device."""
    device, count = _ENTERED.pop()
    _ENTERED.append((device, max(count, devices)))
    translated.cache_clear()


def device_count() -> int:
    """Number of devices of the active type on the target's machine."""
    return max((count for device, count in _ENTERED if kind_of(device) == kind()), default=1)


def kind() -> str:
    """Default device type: that of the innermost active device."""
    innermost = _TARGETS[_ENTERED[-1][0].index] if _ENTERED else next(iter(_TARGETS.values()))
    return innermost.partition(":")[0]


def current() -> torch.device:
    """The current device: the first of its type, unless another one was chosen."""
    chosen = [device for device in _CHOSEN if kind_of(device) == kind()]
    return chosen[-1] if chosen else device_for(f"{kind()}:0")


def set_current(device: torch.device) -> None:
    """Make a device current."""
    _CHOSEN.append(device)
    translated.cache_clear()


@contextlib.contextmanager
def chosen(device: torch.device) -> Iterator[None]:
    """Make a device current while the context is open."""
    before = list(_CHOSEN)
    set_current(device)
    try:
        yield
    finally:
        _CHOSEN[:] = before
        translated.cache_clear()


def tag_of(device: torch.device) -> str:
    """The target's tag for a simulated device; any other device's own tag."""
    if device.type != BACKEND:
        return str(device)
    index: int | None = device.index  # torch's own annotation leaves the None out
    if index is None:
        return tag_of(current())
    return _TARGETS.get(index) or f"{kind()}:{index}"


def kind_of(device: torch.device) -> str:
    """The target's device type (`cuda`) for a simulated device; any other device's own type."""
    return tag_of(device).partition(":")[0]


def shown(device: torch.device) -> torch.device:
    """The target's torch.device (`cuda:0`) for a simulated device; any other device itself.

    torch has no torch.device for a device type that only an extension registers (`npu`): the simulated one is shown.
    """
    known = _SHOWN.get(device)
    return _device_of_target(device) if known is None else known


def _device_of_target(device: torch.device) -> torch.device:
    with contextlib.suppress(RuntimeError):
        return _device(tag_of(device))
    return device


def home_of(tensor: torch.Tensor) -> torch.device:
    """The device of a tensor in this process, where `Tensor.device` shows that of the target."""
    home: torch.device | None = getattr(tensor, "simulated_on", None)
    return tensor.device if home is None else home


@functools.lru_cache(maxsize=1024)
def translated(named: Any) -> Any:
    """The simulated device for a device argument (a torch.device or a string); any other argument itself.

    Raises:
        RuntimeError: if the target's machine has no device with this index, with torch's message.
        AssertionError: if the target's machine has no CUDA device at all, with torch's message.
    """
    kind, _, index = str(named).partition(":")
    if kind not in {BACKEND, "cuda", *_kinds()} or not (not index or index.isdecimal()):
        return named
    found = meant_by(named)
    if found is None and _ENTERED:
        raise AssertionError(NO_CUDA)
    return named if found is None else found


def meant_by(asked: Any) -> torch.device | None:
    """The simulated device for a device argument: itself, or the device of its target if one is active; else None.

    Args:
        asked: a torch.device, a string or an index, as torch accepts them; or None.

    Raises:
        RuntimeError: if the target's machine has no device with this index, with torch's message.
    """
    if isinstance(asked, int) and _ENTERED:
        return require_device(device_at(asked))
    device = _device("cpu" if asked is None else asked)
    index: int | None = device.index  # torch's annotation leaves the None out
    if device.type == BACKEND:
        return current() if index is None else require_device(device)
    if device.type not in _kinds():
        return None
    if device.type != kind():  # that of an outer context
        return device_for(f"{device.type}:{index or 0}")
    return current() if index is None else require_device(device_at(index))


def of_number(value: Any) -> Any:
    """The simulated device of a number; any other value itself."""
    return meant_by(value) if type(value) is int else value


def _kinds() -> set[str]:
    """The types of the active devices."""
    return {kind_of(device) for device, _ in _ENTERED}


def device_at(index: int) -> torch.device:
    """The device of the active type with an index on the target's machine, whether it exists or not."""
    known = {name: _device(BACKEND, at) for at, name in _TARGETS.items()}
    return known.get(f"{kind()}:{index}") or _device(BACKEND, index)


def require_device(device: torch.device) -> torch.device:
    """Return a simulated device if the target's machine has it.

    Raises:
        RuntimeError: if it does not, with torch's message.
    """
    is_entered = any(device == one for one, _ in _ENTERED)
    if _ENTERED and not is_entered and kind_of(device) == kind() and number_of(device) >= device_count():
        raise RuntimeError("CUDA error: invalid device ordinal" if kind() == "cuda" else _missing(device))
    return device


def _missing(device: torch.device) -> str:
    return f"{tag_of(device)} does not exist: the machine has {amount(device_count(), f'{kind()} device')}"


def number_of(device: torch.device) -> int:
    """Index of a simulated device among the devices of its type on the target's machine."""
    return int(tag_of(device).partition(":")[2])
