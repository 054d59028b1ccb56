"""Which target each simulated device stands for, and which devices stand at present.

Never forgets a target: a tensor may outlive the time in which its device stands.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

#: What the PrivateUse1 backend of this process is called.
BACKEND: Final = "sim"
#: The target of each `sim` device by its index, which is the target's own for the first kind of the process: to torch,
#: and to a script, a bare number is a device, too.
_TARGETS: Final[dict[int, str]] = {}
_LAST: Final = 127  # the greatest index that torch has; devices of other kinds count down from there
# The devices that are entered, the innermost last, and how many of the kind the target's machine has.
_ENTERED: Final[list[tuple[torch.device, int]]] = []
# The devices that were made the current one, as torch calls it, the innermost last.
_CHOSEN: Final[list[torch.device]] = []


def device_for(target: str) -> torch.device:
    """The device that stands for a target (`cuda:3`, `mps`) in this process."""
    name = target if ":" in target else f"{target}:0"
    known = next((index for index, one in _TARGETS.items() if one == name), None)
    if known is None:
        kind, _, index = name.partition(":")
        is_first = all(one.startswith(f"{kind}:") for one in list(_TARGETS.values())[:1])
        known = int(index) if is_first else next(at for at in range(_LAST, 0, -1) if at not in _TARGETS)
        _TARGETS[known] = name
    return torch.device(BACKEND, known)


def enter(device: torch.device) -> None:
    """Have a device stand, on a machine that has as many as it speaks of."""
    _ENTERED.append((device, number_of(device) + 1))


def leave() -> None:
    """Have the innermost device stand no more, nor be the current one what was chosen since."""
    _ENTERED.pop()
    if not _ENTERED:
        _CHOSEN.clear()


def any_stands() -> bool:
    """Whether any device is entered."""
    return bool(_ENTERED)


def at_least(devices: int) -> None:
    """Have the machine of the innermost device have so many of the kind, where it has fewer."""
    device, count = _ENTERED.pop()
    _ENTERED.append((device, max(count, devices)))


def count() -> int:
    """How many devices of the kind that stands the target's machine has."""
    return max((count for device, count in _ENTERED if kind_of(device) == kind()), default=1)


def kind() -> str:
    """The kind of target that is meant where none is named."""
    innermost = _TARGETS[_ENTERED[-1][0].index] if _ENTERED else next(iter(_TARGETS.values()))
    return innermost.partition(":")[0]


def current() -> torch.device:
    """The device that is meant where its kind alone is named: the first, as long as no other is chosen."""
    chosen = [device for device in _CHOSEN if kind_of(device) == kind()]
    return chosen[-1] if chosen else device_for(f"{kind()}:0")


def choose(device: torch.device) -> None:
    """Make a device the current one from now on."""
    _CHOSEN.append(device)


@contextlib.contextmanager
def chosen(device: torch.device) -> Iterator[None]:
    """Make a device the current one, as long as the context is open."""
    before = list(_CHOSEN)
    _CHOSEN.append(device)
    try:
        yield
    finally:
        _CHOSEN[:] = before


def name_of(device: torch.device) -> str:
    """The target's name of a simulated device, and any other device's own."""
    if device.type != BACKEND:
        return str(device)
    index: int | None = device.index  # torch's own annotation leaves the None out
    if index is None:
        return name_of(current())
    return _TARGETS.get(index) or f"{kind()}:{index}"


def kind_of(device: torch.device) -> str:
    """The kind of the target (`cuda`) of a simulated device, and any other device's own."""
    return name_of(device).partition(":")[0]


def meant_by(asked: Any) -> torch.device | None:
    """The simulated device that is meant by what names a device: itself, or its target where such a one stands.

    Args:
        asked: a torch.device, a string or an index, as torch takes them; or None.

    Raises:
        RuntimeError: the target's machine has none of that number, in torch's words.
    """
    if isinstance(asked, int) and _ENTERED:
        return there(numbered(asked))
    device = torch.device("cpu" if asked is None else asked)
    index: int | None = device.index  # see above
    if device.type == BACKEND:
        return current() if index is None else there(device)
    if not _ENTERED or device.type != kind():
        return None
    return current() if index is None else there(numbered(index))


def numbered(index: int) -> torch.device:
    """The device of the kind that stands with a number of the target's, whether there is one or not."""
    known = {name: torch.device(BACKEND, at) for at, name in _TARGETS.items()}
    return known.get(f"{kind()}:{index}") or torch.device(BACKEND, index)


def there(device: torch.device) -> torch.device:
    """A simulated device that the target's machine has.

    Raises:
        RuntimeError: it has none of that number, in torch's words.
    """
    is_entered = any(device == one for one, _ in _ENTERED)
    if _ENTERED and not is_entered and kind_of(device) == kind() and number_of(device) >= count():
        raise RuntimeError("CUDA error: invalid device ordinal" if kind() == "cuda" else _missing(device))
    return device


def _missing(device: torch.device) -> str:
    return f"{name_of(device)} is not there: the machine has {count()} of {kind()}"


def number_of(device: torch.device) -> int:
    """The number of a simulated device among those of its kind on the target's machine."""
    return int(name_of(device).partition(":")[2])
