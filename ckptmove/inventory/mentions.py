"""Devices that are named outside of tensors: ``torch.device`` objects, device strings and device ids.

Never takes a word for a device only because it reads like one: a vocabulary holds ``cpu`` too, so a bare word counts
under a key that speaks of devices.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from ckptmove.model import Mention
from ckptmove.pickles.lore import device_text
from ckptmove.pickles.tree import Call, Sequence, Tuple

if TYPE_CHECKING:
    from ckptmove.pickles.tree import Value

_TYPES: Final = "cpu|cuda|mps|xpu|hpu|mtia|xla|npu|mlu|musa|hip|ipu|vulkan|privateuseone|meta"
_INDEXED: Final = re.compile(rf"(?:{_TYPES}):\d{{1,3}}")
_BARE: Final = re.compile(rf"(?:{_TYPES})")
_DEVICE_WORD: Final = re.compile(r"device|gpu|map_location|accelerator|placement|cuda", re.IGNORECASE)
_ID_KEYS: Final = frozenset({"device_ids", "gpu_ids", "gpus", "devices", "device_id", "gpu_id", "gpu", "device"})


def speaks_of_devices(key: str) -> bool:
    """Whether a key says that its value may be a device."""
    return _DEVICE_WORD.search(key[-200:]) is not None


def string_mention(key: str, value: str, where: str, start: int) -> Mention | None:
    """The device that a string names, or None.

    Args:
        key: the key that the string stands under, or that of the list around it.
        value: the string.
        where: its path.
        start: its start in the pickle.
    """
    if _INDEXED.fullmatch(value) or (_BARE.fullmatch(value) and speaks_of_devices(key)):
        return Mention(where, "string", value, start)
    return None


def ids_mention(key: str, value: Value, where: str) -> Mention | None:
    """Device ids, as DataParallel keeps them: an int, or a list of ints, under a key that says so; else None."""
    if key.lower() not in _ID_KEYS:
        return None
    items = value.items if isinstance(value, Sequence) else [value]
    ids = [str(item) for item in items if type(item) is int and 0 <= item < 1024]  # noqa: PLR2004  no host has more
    if not ids or len(ids) != len(items):
        return None
    return Mention(where, "device_ids", f"[{', '.join(ids)}]" if isinstance(value, Sequence) else ids[0])


def device_mention(call: Call, where: str) -> Mention | None:
    """The mention that a ``torch.device`` call is, or None where its arguments are none that torch writes."""
    text = device_text(call)
    if text is None or type(call.args) is not Tuple:
        return None
    starts = call.args.starts
    return Mention(where, "torch.device", text, starts[0], starts[1] if len(starts) > 1 else None, call.args_start)
