"""Tag storages with absent devices when torch saves them, by `torch.serialization.register_package`."""

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

# By data pointer. The reference to the storage keeps its address from being used again.
PLACED: dict[int, tuple[UntypedStorage, str]] = {}
SAVED: dict[int, str] = {}


def tag(storage: Storage | TypedStorage | UntypedStorage) -> str | None:
    """The tag for `torch.serialization.location_tag`; None for the storages of torch's own taggers."""
    _, device = PLACED.get(storage.data_ptr(), (None, "cpu"))
    SAVED[storage.data_ptr()] = device
    if device == "cpu":
        return None
    kind, _, index = device.partition(":")
    # A new string at each call, as `_backend_tag` makes one for cuda; `_mps_tag` and `_cpu_tag` return a
    # constant, which pickle then shares through its memo.
    return kind + ":" + index if index else sys.intern(kind)


def load_nothing(storage: object, location: str) -> None:
    """Leave every load to torch."""
    del storage, location


def register() -> None:
    """Call `tag` before torch's own taggers."""
    torch.serialization.register_package(0, tag, load_nothing)


def clear() -> None:
    """Forget every storage."""
    PLACED.clear()
    SAVED.clear()


@contextmanager
def numbered_storages() -> Iterator[None]:
    """Name the storages of legacy files 0, 1, 2 and so on; torch uses their addresses, which differ in each run."""
    numbers: dict[int, int] = {}

    def number(storage: UntypedStorage) -> int:
        return numbers.setdefault(storage.data_ptr(), len(numbers))

    with mock.patch.object(torch.UntypedStorage, "_cdata", property(number)):
        yield


def saved_devices() -> dict[str, int]:
    """Number of distinct storages for each tag since `clear`."""
    devices = sorted(SAVED.values())
    return {device: devices.count(device) for device in dict.fromkeys(devices)}


def named_tensors(tree: object, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in `tree`, with its dotted path; a module counts as its `state_dict()`."""
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
    """Tag the tensors of `tree` with `device`, except those whose last name is in `but`."""
    for path, tensor in named_tensors(tree):
        if path.rpartition(".")[2] not in but:
            storage = tensor.untyped_storage()
            PLACED[storage.data_ptr()] = (storage, device)
    return tree
