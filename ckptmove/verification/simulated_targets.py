"""Which target each simulated device stands for, and which devices stand at present.

Never forgets a target: a tensor may outlive the time in which its device stands.
"""

from __future__ import annotations

from typing import Any, Final

import torch

#: What the PrivateUse1 backend of this process is called.
BACKEND: Final = "sim"
# The index of a `sim` device is a place in this list, so that a torch.device alone tells its target. The first device
# is 0, which torch/csrc/acc/Module.cpp takes for the current one: `Tensor.new_tensor` asks it.
_TARGETS: Final[list[str]] = []
# The indices of the devices that are entered, the innermost last: the current device, as torch calls it.
_ENTERED: Final[list[int]] = []


def device_for(target: str) -> torch.device:
    """The device that stands for a target (`cuda:3`, `mps`) in this process."""
    name = target if ":" in target else f"{target}:0"
    if name not in _TARGETS:
        _TARGETS.append(name)
    return torch.device(BACKEND, _TARGETS.index(name))


def enter(device: torch.device) -> None:
    """Make a device the current one."""
    _ENTERED.append(device.index)


def leave() -> None:
    """Make the one before that the current device."""
    _ENTERED.pop()


def any_stands() -> bool:
    """Whether any device is entered."""
    return bool(_ENTERED)


def count() -> int:
    """How many devices are simulated in this process."""
    return len(_TARGETS)


def current() -> int:
    """The index of the device that is meant where none is named."""
    return _ENTERED[-1] if _ENTERED else 0


def kind() -> str:
    """The kind of target that is meant where none is named."""
    return kind_of(torch.device(BACKEND))


def name_of(device: torch.device) -> str:
    """The target's name of a simulated device, and any other device's own."""
    if device.type != BACKEND:
        return str(device)
    index: int | None = device.index  # torch's own annotation leaves the None out
    return _TARGETS[current() if index is None else index]


def kind_of(device: torch.device) -> str:
    """The kind of the target (`cuda`) of a simulated device, and any other device's own."""
    return name_of(device).partition(":")[0]


def meant_by(asked: Any) -> torch.device | None:
    """The simulated device that is meant by what names a device: itself, or its target where that stands.

    Args:
        asked: a torch.device, a string or an index, as torch takes them; or None.
    """
    device = torch.device("cpu" if asked is None else asked)
    standing = torch.device(BACKEND, current())
    index: int | None = device.index  # see above
    if device.type == BACKEND:
        return standing if index is None else device
    names = {name_of(standing), kind_of(standing)} if _ENTERED else set()
    return standing if str(device) in names else None
