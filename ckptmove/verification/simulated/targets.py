"""Map simulated devices to targets, and track which devices are active.

A target stays known, because its tensors may outlive the context of its device.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

import torch

from ckptmove.text import amount

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Name of the PrivateUse1 backend of this process.
BACKEND: Final = "sim"
#: Target of each `sim` device by index. The first device type of the process keeps its own indices, because torch and
#: scripts accept a bare number as a device.
_TARGETS: Final[dict[int, str]] = {}
_LAST: Final = 127  # largest index of torch; devices of other types count down from it
# Active devices, innermost last, each with the number of devices of its type on the target's machine.
_ENTERED: Final[list[tuple[torch.device, int]]] = []
# Devices that were made current, innermost last.
_CHOSEN: Final[list[torch.device]] = []


def device_for(target: str) -> torch.device:
    """The device that represents a target (`cuda:3`, `mps`) in this process."""
    name = target if ":" in target else f"{target}:0"
    known = next((index for index, one in _TARGETS.items() if one == name), None)
    if known is None:
        kind, _, index = name.partition(":")
        is_first = all(one.startswith(f"{kind}:") for one in list(_TARGETS.values())[:1])
        known = int(index) if is_first else next(at for at in range(_LAST, 0, -1) if at not in _TARGETS)
        _TARGETS[known] = name
    return torch.device(BACKEND, known)


def enter(device: torch.device) -> None:
    """Activate a device, on a machine with at least as many devices as its index requires."""
    _ENTERED.append((device, number_of(device) + 1))


def leave() -> None:
    """Deactivate the innermost device; with the last one, no device is current any more."""
    _ENTERED.pop()
    if not _ENTERED:
        _CHOSEN.clear()


def is_any_active() -> bool:
    """Whether any device is active."""
    return bool(_ENTERED)


def at_least(devices: int) -> None:
    """Raise the number of devices on the machine of the innermost device."""
    device, count = _ENTERED.pop()
    _ENTERED.append((device, max(count, devices)))


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


@contextlib.contextmanager
def chosen(device: torch.device) -> Iterator[None]:
    """Make a device current while the context is open."""
    before = list(_CHOSEN)
    _CHOSEN.append(device)
    try:
        yield
    finally:
        _CHOSEN[:] = before


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


def meant_by(asked: Any) -> torch.device | None:
    """The simulated device for a device argument: itself, or the device of its target if one is active; else None.

    Args:
        asked: a torch.device, a string or an index, as torch accepts them; or None.

    Raises:
        RuntimeError: if the target's machine has no device with this index, with torch's message.
    """
    if isinstance(asked, int) and _ENTERED:
        return require_device(device_at(asked))
    device = torch.device("cpu" if asked is None else asked)
    index: int | None = device.index  # see above
    if device.type == BACKEND:
        return current() if index is None else require_device(device)
    if not _ENTERED or device.type != kind():
        return None
    return current() if index is None else require_device(device_at(index))


def device_at(index: int) -> torch.device:
    """The device of the active type with an index on the target's machine, whether it exists or not."""
    known = {name: torch.device(BACKEND, at) for at, name in _TARGETS.items()}
    return known.get(f"{kind()}:{index}") or torch.device(BACKEND, index)


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
