"""Where the samples' storages are said to live: the tags of devices that need not be here.

Never moves a byte, and never answers torch for a storage that was not placed.

Tags come through `torch.serialization.register_package`, torch's own hook for the question "where does this
storage live".
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar
from unittest import mock

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.storage import TypedStorage, UntypedStorage
    from torch.types import Storage

Tree = TypeVar("Tree")

# By data pointer. The storage stands beside its device so that its address cannot be given to another one.
PLACED: dict[int, tuple[UntypedStorage, str]] = {}
SAVED: dict[int, str] = {}


def tag(storage: Storage | TypedStorage | UntypedStorage) -> str | None:
    """Answer `torch.serialization.location_tag`; None leaves the storage to torch's own taggers."""
    _, device = PLACED.get(storage.data_ptr(), (None, "cpu"))
    SAVED[storage.data_ptr()] = device
    if device == "cpu":
        return None
    kind, _, index = device.partition(":")
    # A new string at each call, as `_backend_tag` makes one for cuda; `_mps_tag` and `_cpu_tag` return a
    # constant, which pickle then shares through its memo.
    return kind + ":" + index if index else sys.intern(kind)


def load_nothing(storage: object, location: str) -> None:
    """Leave every load to torch: this package tags, it never maps."""
    del storage, location


def register() -> None:
    """Ask `tag` before torch's own taggers; until something is placed it answers nothing."""
    torch.serialization.register_package(0, tag, load_nothing)


def clear() -> None:
    """Forget every storage."""
    PLACED.clear()
    SAVED.clear()


@contextmanager
def numbered_storages() -> Iterator[None]:
    """Let a legacy file call its storages 0, 1, 2 and so on: torch names them by addresses, which no two runs share."""
    numbers: dict[int, int] = {}

    def number(storage: UntypedStorage) -> int:
        return numbers.setdefault(storage.data_ptr(), len(numbers))

    with mock.patch.object(torch.UntypedStorage, "_cdata", property(number)):
        yield


def saved_devices() -> dict[str, int]:
    """For each tag that was written since `clear`, on how many distinct storages."""
    devices = sorted(SAVED.values())
    return {device: devices.count(device) for device in dict.fromkeys(devices)}


def named_tensors(tree: object, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor below `tree` with its dotted path; a module counts as its `state_dict()`."""
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, nn.Module):
        yield from named_tensors(tree.state_dict(), path)
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from named_tensors(value, f"{path}.{key}")
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from named_tensors(value, f"{path}.{index}")


def place(tree: Tree, device: str, *, but: tuple[str, ...] = ("step",)) -> Tree:
    """Say that the tensors of `tree` live on `device`, except those whose last name is in `but`."""
    for path, tensor in named_tensors(tree):
        if path.rpartition(".")[2] not in but:
            storage = tensor.untyped_storage()
            PLACED[storage.data_ptr()] = (storage, device)
    return tree
