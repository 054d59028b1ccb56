"""Find devices outside of tensors: ``torch.device`` objects, device strings and device ids.

A string without an index, like ``cpu``, counts only under a key about devices: a vocabulary can contain it too.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from ckptmove.formats.facts import facts_of
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
#: Keys of lists of indices. A single number under one of the first is a number of devices.
_COUNTS: Final = frozenset({"gpus", "devices"})
_ID_LISTS: Final = frozenset({"device_ids", "gpu_ids", "gpus", "devices"})
_ID_KEYS: Final = frozenset({"device_id", "gpu_id", "gpu", "device", "output_device"})
_MOST_DEVICES: Final = 1024
#: Device constants as torch/csrc/jit/serialization/python_print.cpp prints them, and ``x.cuda()``.
_CODE_DEVICE: Final = r"""torch\.device\("([^"\n]{1,31})"\)|\btorch\.(cuda|cpu)\("""


#: The names of ``DeviceMesh`` in all versions, and its attribute for the device type: ``device_type`` until 2.8.
_MESHES: Final = frozenset(
    {"torch.distributed.device_mesh.DeviceMesh", "torch.distributed._tensor.device_mesh.DeviceMesh"}
)
_MESH_TYPE: Final = frozenset({"_device_type", "device_type"})


def names_device(key: str, value: str) -> bool:
    """Whether a string names a device; ``key`` is that of the string, or of the list around it."""
    return (
        len(value) < _LONGEST
        and (":" in value or _DEVICE_WORD.search(key[-200:]) is not None)
        and is_device_string(value)
    )


def device_ids(key: str, value: Value) -> str | None:
    """Return device ids as text: an int or a list of ints under a key for ids, as in DataParallel; else None."""
    word = key.lower()
    if word in _ID_KEYS and _is_index(value):
        return str(value)
    if not isinstance(value, Sequence) or word not in _ID_LISTS | _ID_KEYS:
        return None
    return f"[{', '.join(map(str, value.items))}]" if value.items and all(map(_is_index, value.items)) else None


def named_ids(mention: Mention) -> frozenset[int]:
    """Return the indices in a mention of device ids; empty for a number of devices, like ``gpus`` of Lightning."""
    if not mention.value.startswith("[") and mention.where.rpartition(".")[2] in _COUNTS:
        return frozenset()
    return frozenset(int(number) for number in re.findall(r"\d+", mention.value))


def _is_index(value: Value) -> bool:
    return type(value) is int and 0 <= value < _MOST_DEVICES


def device_mention(call: Call, where: str) -> Mention | None:
    """Return the mention for a ``torch.device`` call, or None if its arguments are not what torch writes."""
    text = device_text(call)
    if text is None or type(call.args) is not Tuple:
        return None
    starts = call.args.starts
    return Mention(where, "torch.device", text, starts[0], starts[1] if len(starts) > 1 else None, call.args_start)


def is_mesh(call: Call) -> bool:
    """Whether an object is the ``DeviceMesh`` of a DTensor."""
    return call.name in _MESHES


def is_mesh_type(key: str, value: str) -> bool:
    """Whether an attribute of a ``DeviceMesh`` is its device type (``DeviceMesh.__getstate__``)."""
    return key in _MESH_TYPE and is_device_string(value)


def mesh_owners(inventory: Inventory) -> dict[str, str]:
    """The path of the device type of each mesh inside a DTensor, and the name of that DTensor.

    A mesh that several DTensors share is listed inside the first. A ``meta`` DTensor does not tell where its mesh is.
    """
    owners: dict[str, str] = {}
    if not any(mention.kind == "device_mesh" for mention in inventory.mentions):
        return owners
    wrappers = {one.name for one in inventory.tensors if one.kind == "wrapper-subclass" and one.device != "meta"}
    for mention in inventory.mentions:
        if mention.kind == "device_mesh":
            path = mention.where
            while path and path not in wrappers:
                path = path.rpartition(".")[0]
            if path in wrappers:
                owners[mention.where] = path
    return owners


def is_in_code(inventory: Inventory, mention: Mention) -> bool:
    """Whether a mention is in TorchScript code, in a single file or in a file of a directory."""
    may_have_code = inventory.container == "directory" or facts_of(inventory.container).is_script
    return may_have_code and mention.site is None and mention.kind == "torch.device"


def code_mentions(name: str, text: str) -> Iterator[Mention]:
    """Iterate over the devices in a file of TorchScript code, by file and line; these mentions cannot be edited."""
    line, position = 1, 0
    for match in re.finditer(_CODE_DEVICE, text):
        line += text.count("\n", position, match.start())
        position = match.start()
        yield Mention(f"{name}:{line}", "torch.device", match[1] or match[2])
