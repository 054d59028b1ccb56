"""Errors of ``load``. Hints are in ``api``."""

from __future__ import annotations

from pickle import UnpicklingError

from ckptmove.errors import Refused, UnreadableInput, UsageError
from ckptmove.text import some

#: Maximum number of names in one message.
_SHOWN = 4


class NotWeightsOnly(Refused, UnpicklingError):
    """``torch.load(weights_only=True)`` rejects the checkpoint: only code could build its objects.

    Attributes:
        names: functions and classes that weights-only mode does not allow.
        is_dangerous: whether one of them is a function that no checkpoint needs.
        instead: what reads it, tried on the checkpoint; empty if nothing does.
    """

    kind = "not-weights-only"

    def __init__(self, path: str, names: tuple[str, ...], *, is_dangerous: bool, instead: str) -> None:
        super().__init__(f"weights-only mode does not allow {some(names, _SHOWN)}", path=path)
        self.names = names
        self.is_dangerous = is_dangerous
        self.instead = instead


class NotLoadable(Refused, ValueError):
    """The format holds code, for example a TorchScript archive."""

    kind = "not-loadable"

    def __init__(self, path: str, container: str) -> None:
        super().__init__(f"a {container} file holds code, which is not run", path=path)


class NotRebuilt(UnreadableInput, ValueError):
    """torch rejects the arguments that the file has for a tensor or an object."""

    kind = "not-rebuilt"


class MissingDevice(UsageError, RuntimeError):
    """This machine has no device of the name.

    Attributes:
        device: the device.
        is_requested: whether ``map_location`` names it; otherwise the file does.
    """

    kind = "missing-device"
    is_of_checkpoint = True

    def __init__(self, path: str, device: str, *, is_requested: bool) -> None:
        named = "map_location names" if is_requested else "its tensors are on"
        super().__init__(f"{named} {device}, which this machine does not have", path=path)
        self.device, self.is_requested = device, is_requested
