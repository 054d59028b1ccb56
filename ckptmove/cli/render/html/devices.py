"""Colors of devices: the same device has the same color everywhere in a page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.cli.render.html.markup import Markup, element, joined
from ckptmove.cli.render.text import clean
from ckptmove.torch_facts.devices import NO_DEVICE, split

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Number of colors for accelerators in ``page.css``; with more devices, colors repeat.
_COLORS: Final = 8
_FIXED: Final = {"cpu": "cpu", "meta": "none", NO_DEVICE: "none"}


class Palette:
    """The colors of a page, given to devices as they appear."""

    __slots__ = ("_slots",)

    def __init__(self) -> None:
        self._slots: dict[str, str] = {}

    def ordered(self, devices: Iterable[str]) -> list[str]:
        """Return the distinct devices: ``cpu`` first, then the others by type and index."""
        found = sorted(set(devices), key=_order)
        for device in found:
            self.slot(device)
        return found

    def slot(self, device: str) -> str:
        """Return the class of a device in ``page.css``."""
        if device in _FIXED:
            return f"device-{_FIXED[device]}"
        number = self._slots.setdefault(device, str(len(self._slots) % _COLORS))
        return f"device-{number}"

    def label(self, device: str) -> Markup:
        """Return the name of a device with its color."""
        return joined([element("span", class_=f"swatch {self.slot(device)}"), element("bdi", clean(device))])


def _order(device: str) -> tuple[bool, bool, str, int]:
    kind, index = split(device)
    return device != "cpu", device in _FIXED, kind, -1 if index is None else index
