"""Count the bytes of the tensors on simulated devices, for scripts that ask torch for the memory in use.

Views share their storage. Memory inside a kernel is not seen, parts of sparse tensors are left out, and no device runs
out of memory.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Final

import torch

#: Memory of each device in bytes, as scripts see it.
TOTAL: Final = 1 << 34


@dataclass(slots=True)
class DeviceMemory:
    """Memory of one device."""

    used: int = 0  # bytes of the live storages
    peak: int = 0  # maximum of `used` since the script reset it


class _Storage(weakref.ref[Any]):
    """A storage on a device, which may have been freed."""

    __slots__ = ("key", "memory", "nbytes")
    key: int
    nbytes: int
    memory: DeviceMemory


_DEVICES: Final[defaultdict[torch.device, DeviceMemory]] = defaultdict(DeviceMemory)
#: The live storages, by the address of their StorageImpl.
_LIVE: Final[dict[int, _Storage]] = {}


def memory_of(device: torch.device) -> DeviceMemory:
    """Memory of a simulated device."""
    return _DEVICES[device]


def count(host: torch.Tensor, device: torch.device) -> None:
    """Count the storage of a tensor, unless it is known and was not resized."""
    if host.layout is not torch.strided:
        return
    storage: Any = host.untyped_storage()
    key, nbytes = storage._cdata, storage.nbytes()
    known = _LIVE.get(key)
    if known is not None:
        if known.nbytes == nbytes:
            return
        _free(known)
    one = _LIVE[key] = _Storage(storage, _free)
    one.key, one.nbytes, one.memory = key, nbytes, memory_of(device)
    one.memory.used += nbytes
    one.memory.peak = max(one.memory.peak, one.memory.used)


def _free(one: _Storage) -> None:
    _LIVE.pop(one.key, None)
    one.memory.used -= one.nbytes
