"""Let a user's own `torch.load` and `torch.save` place tensors on a simulated device.

A storage is marked and not copied: in a legacy file its values come after the tensors.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

import torch

from ckptmove.simulation import targets
from ckptmove.simulation.replaced import replaced

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.simulation.targets import Place

#: Priority of the package. torch sorts packages with their functions, which fails if two have the same priority.
BEFORE_OTHERS: Final[Any] = 0.5


def on_device(storage: Any, device: torch.device) -> Any:
    """Mark a storage, which is in CPU memory, with its simulated device."""
    storage.simulated_on = device
    return storage


def location_of(storage: Any) -> str | None:
    """The location of a marked storage in a file, as torch writes it on the target's machine; None for another."""
    home: torch.device | None = getattr(storage, "simulated_on", None)
    tag = "" if home is None else targets.tag_of(home)
    return tag.removesuffix(":0") if tag.startswith("mps") else tag or None


def restore_storage(storage: Any, location: str) -> Any:
    """Mark a storage, which stays in CPU memory, with its simulated device; None for another device.

    A function for `torch.serialization.register_package`: `location` is a tag, or the result of `map_location` for it.
    """
    with contextlib.suppress(RuntimeError):  # the tag is not that of a device
        device = targets.meant_by(location)
        if device is not None:
            return on_device(storage, device)
    return None


@contextlib.contextmanager
def storages_on_device(place: Place) -> Iterator[None]:
    """Let storages move to the device, and tensors of marked storages be on it, while the context is open."""
    rebuild: Any = torch._utils._rebuild_tensor  # every kind of tensor is rebuilt by it
    storages: Any = torch.storage
    move = storages._to  # called by `storage.cuda` and `storage.to`

    def moved(storage: Any, device: torch.device, non_blocking: bool = False) -> Any:
        home = targets.meant_by(device)
        if home is None:
            return move(storage, device, non_blocking)
        if getattr(storage, "simulated_on", None) == home:
            return storage
        return on_device(storage.clone(), home)  # the device has no memory of its own here

    def rebuilt(storage: Any, *rest: Any) -> Any:
        untyped = storage._untyped_storage  # as `_rebuild_tensor` does
        device = getattr(untyped, "simulated_on", None)
        if device is None:
            return rebuild(storage, *rest)
        del untyped.simulated_on  # its memory is the CPU's
        tensor = rebuild(storage, *rest)
        on_device(untyped, device)
        return place(tensor, device)

    with replaced(torch._utils, _rebuild_tensor=rebuilt), replaced(storages, _to=moved):
        yield
