"""What a user's own `torch.load` puts on the target, where a simulated device stands for it.

Never copies a storage of its own accord: in a legacy file its values come after the tensors.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

import torch

from ckptmove.verification.simulated import targets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: torch sorts its packages with what they do, which only compares where two are of one priority: this is no one's.
BEFORE_OTHERS: Final[Any] = 0.5


def restore(storage: Any, location: str) -> Any:
    """Take note of where a storage belongs, which stays in the memory of the CPU; None where that is elsewhere.

    As `torch.serialization.register_package` wants it: of a tag, or of what `map_location` makes of that.
    """
    with contextlib.suppress(RuntimeError):  # the tag is no device's
        device = targets.meant_by(location)
        if device is not None:
            storage.simulated_on = device
            return storage
    return None


@contextlib.contextmanager
def rebuilt_there(place: Callable[[torch.Tensor, torch.device], torch.Tensor]) -> Iterator[None]:
    """Have storages move to the device, and tensors of such storages be there, as long as the context is open.

    Args:
        place: makes a tensor of the device from one of the CPU, with the same memory.
    """
    module: Any = torch._utils  # noqa: SLF001  # no public name for it
    rebuild = module._rebuild_tensor  # noqa: SLF001  # as each kind of tensor is rebuilt
    storages: Any = torch.storage
    move = storages._to  # noqa: SLF001  # as `storage.cuda` and `storage.to` call it

    def moved(storage: Any, device: torch.device, non_blocking: bool = False) -> Any:
        home = targets.meant_by(device)
        if home is None:
            return move(storage, device, non_blocking)
        if getattr(storage, "simulated_on", None) == home:
            return storage
        copy = storage.clone()  # memory of a device is nothing that could be had here
        copy.simulated_on = home
        return copy

    def rebuilt(storage: Any, *rest: Any) -> Any:
        tensor = rebuild(storage, *rest)
        device = getattr(storage._untyped_storage, "simulated_on", None)  # noqa: SLF001  # as `_rebuild_tensor` does
        return tensor if device is None else place(tensor, device)

    module._rebuild_tensor = rebuilt  # noqa: SLF001  # another takes its place while the device stands
    storages._to = moved  # noqa: SLF001  # the same
    try:
        yield
    finally:
        module._rebuild_tensor = rebuild  # noqa: SLF001  # the function, put back
        storages._to = move  # noqa: SLF001  # the same
