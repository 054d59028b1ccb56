"""Devices that are named outside of tensors: ``torch.device`` objects, device strings and device ids.

Never takes a word for a device only because it reads like one: a vocabulary holds ``cpu`` too, so a bare word counts
under a key that speaks of devices.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from ckptmove.model import Mention
from ckptmove.pickles.rebuild_arguments import device_text
from ckptmove.pickles.tree import Call, Sequence, Tuple
from ckptmove.torch_facts.devices import is_device_string

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.model import Inventory
    from ckptmove.pickles.tree import Value

_LONGEST: Final = 32
_DEVICE_WORD: Final = re.compile(r"device|gpu|map_location|accelerator|placement|cuda", re.IGNORECASE)
#: Keys of lists of indices. A single number under the first is how many there are.
_COUNTS: Final = frozenset({"gpus", "devices"})
_ID_LISTS: Final = frozenset({"device_ids", "gpu_ids", "gpus", "devices"})
_ID_KEYS: Final = frozenset({"device_id", "gpu_id", "gpu", "device", "output_device"})
_MOST_DEVICES: Final = 1024
#: As torch/csrc/jit/serialization/python_print.cpp prints constants, and ``x.cuda()``.
_CODE_DEVICE: Final = re.compile(r"""torch\.device\("([^"\n]{1,31})"\)|\btorch\.(cuda|cpu)\(""")


#: ``DeviceMesh`` under the names that it has had, and the attribute for its device type: ``device_type`` until 2.8.
_MESHES: Final = frozenset(
    {"torch.distributed.device_mesh.DeviceMesh", "torch.distributed._tensor.device_mesh.DeviceMesh"}
)
_MESH_TYPE: Final = frozenset({"_device_type", "device_type"})


def names_device(key: str, value: str) -> bool:
    """Whether a string names a device.

    Args:
        key: the key that the string stands under, or that of the list around it.
        value: the string.
    """
    return (
        len(value) < _LONGEST
        and (":" in value or _DEVICE_WORD.search(key[-200:]) is not None)
        and is_device_string(value)
    )


def device_ids(key: str, value: Value) -> str | None:
    """Device ids, as DataParallel keeps them: an int, or a list of ints, under a key that says so; else None."""
    word = key.lower()
    if word in _ID_KEYS and _is_index(value):
        return str(value)
    if not isinstance(value, Sequence) or word not in _ID_LISTS | _ID_KEYS:
        return None
    return f"[{', '.join(map(str, value.items))}]" if value.items and all(map(_is_index, value.items)) else None


def named_ids(mention: Mention) -> frozenset[int]:
    """The indices in a mention of device ids; none where a bare number under ``gpus`` counts devices (Lightning)."""
    if not mention.value.startswith("[") and mention.where.rpartition(".")[2] in _COUNTS:
        return frozenset()
    return frozenset(int(number) for number in re.findall(r"\d+", mention.value))


def _is_index(value: Value) -> bool:
    return type(value) is int and 0 <= value < _MOST_DEVICES


def device_mention(call: Call, where: str) -> Mention | None:
    """The mention that a ``torch.device`` call is, or None where its arguments are none that torch writes."""
    text = device_text(call)
    if text is None or type(call.args) is not Tuple:
        return None
    starts = call.args.starts
    return Mention(where, "torch.device", text, starts[0], starts[1] if len(starts) > 1 else None, call.args_start)


def is_mesh(call: Call) -> bool:
    """Whether an object is a ``DeviceMesh``, which every DTensor refers to."""
    return call.name in _MESHES


def is_mesh_type(key: str, value: str) -> bool:
    """Whether an attribute of a ``DeviceMesh`` is its device type (``DeviceMesh.__getstate__``)."""
    return key in _MESH_TYPE and is_device_string(value)


def is_in_code(inventory: Inventory, mention: Mention) -> bool:
    """Whether a device is named by a line of TorchScript, in a file of its own or in one of a directory."""
    return (
        inventory.container in {"torchscript", "directory"} and mention.site is None and mention.kind == "torch.device"
    )


def code_mentions(name: str, text: str) -> Iterator[Mention]:
    """The devices that a file of TorchScript code names, by file and line; none of them can be edited.

    Args:
        name: of the file.
        text: its code.
    """
    line, position = 1, 0
    for match in _CODE_DEVICE.finditer(text):
        line += text.count("\n", position, match.start())
        position = match.start()
        yield Mention(f"{name}:{line}", "torch.device", match[1] or match[2])
