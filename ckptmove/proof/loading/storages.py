"""Storages of torch with the bytes of a checkpoint: read into memory, or mapped from its files."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.serialization import default_restore_location

from ckptmove.checkpoint.parts import FilePart
from ckptmove.errors import DamagedArchive, OutOfMemory
from ckptmove.model import Span
from ckptmove.pickles.rebuild_arguments import view_of
from ckptmove.pickles.storage_id import FIELDS, KEY, LOCATION
from ckptmove.pickles.tree import PlainStorage, tuple_items
from ckptmove.proof.loading.errors import MissingDevice
from ckptmove.proof.tensors.dtypes import dtype_of
from ckptmove.torch_facts.dtypes import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

    from ckptmove.checkpoint.parts import OpenPart
    from ckptmove.io.source import DiskPlace
    from ckptmove.model import StorageRef
    from ckptmove.pickles.tree import Persistent
    from ckptmove.proof.tensors.stored import StoredTensors


class Storages:
    """The storages of a checkpoint, each built when its first tensor is."""

    def __init__(
        self,
        homes: Mapping[str, tuple[OpenPart, StorageRef]],
        devices: Mapping[str, str],
        *,
        is_meta: bool = False,
        is_mapped: bool = False,
    ) -> None:
        """Begin with no file open.

        Args:
            homes: part and description of each storage, by key.
            devices: devices of the storages that are not on the device of their persistent id, by key.
            is_meta: whether all storages are on the meta device, without bytes.
            is_mapped: whether storages that stay on the CPU are mapped from the files, instead of read into memory.
        """
        self._homes, self._devices, self._is_meta, self._is_mapped = homes, devices, is_meta, is_mapped
        self._stored: StoredTensors | None = None
        self._files: dict[str, Any] = {}
        self._made: dict[str, Any] = {}
        self._views: dict[tuple[str, int, int], Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stored is not None:
            self._stored.__exit__()

    def storage(self, node: Persistent) -> Any:
        """The typed storage of a persistent id, or the view of it that torch before 0.4 saved."""
        if type(node) is PlainStorage:
            return self._whole(node.ref.key, node.ref.device)
        fields = tuple_items(node.pid)
        key = str(fields[KEY])
        made = self._whole(key, str(fields[LOCATION]))
        view = view_of(node) if len(fields) > FIELDS else None
        return made if view is None else self._view(key, made, *view)

    def _whole(self, key: str, device: str) -> Any:
        made = self._made.get(key)
        if made is None:
            part, stored = self._homes[key]
            untyped = self._untyped(part, stored, self._devices.get(key) or device)
            made = self._made[key] = _typed(untyped, dtype_of(stored.dtype))
        return made

    def _view(self, key: str, whole: Any, first: int, numel: int) -> Any:
        """A view of a storage, one object for each, as in torch/serialization.py ``_legacy_load``."""
        found = self._views.get((key, first, numel))
        if found is None:
            item = whole._element_size()  # `element_size` warns
            if whole.device.type == "meta":  # a storage on the meta device has no slices
                untyped = _empty(numel * item, "meta")
            else:
                untyped = whole._untyped_storage[first * item : (first + numel) * item]  # no copy
            found = self._views[key, first, numel] = _typed(untyped, whole.dtype)
        return found

    def _untyped(self, part: OpenPart, stored: StorageRef, device: str) -> Any:
        if self._is_meta or device == "meta":
            return _empty(stored.nbytes, "meta")
        if not stored.nbytes:
            values = _empty(0, "cpu")
        else:
            # A mapping of bytes that are copied to another device ends with the load.
            is_mapped = self._is_mapped or device != "cpu"
            values = self._on_cpu(part, part.own_name(stored.key), stored, is_mapped=is_mapped)
        values = values[:]  # a slice cannot be resized: a tensor that exceeds it is an error
        if device == "cpu":
            return values
        try:
            return default_restore_location(values, device)
        except RuntimeError as error:
            raise MissingDevice(part.path, device, is_requested=device != stored.device) from error

    def _on_cpu(self, part: OpenPart, key: str, stored: StorageRef, *, is_mapped: bool) -> Any:
        """The bytes of a storage, mapped only if its elements are in this machine's byte order and aligned."""
        disk, span, item = part.disk, part.span(key), ITEM_BYTES[stored.dtype]
        swaps = part.byteorder != sys.byteorder and item > 1
        if span is not None and span.nbytes >= stored.nbytes:
            if disk is not None and is_mapped and not swaps and (disk.start + span.start) % item == 0:
                start = disk.start + span.start
                return self._file(disk)[start : start + stored.nbytes]
            values = _empty(stored.nbytes, "cpu")
            self._read(part, key, Span(span.start, span.start + stored.nbytes), values)
        else:
            values = _inflated(part, key)
        if values.nbytes() < stored.nbytes:
            held = values.nbytes() if span is None else span.nbytes
            raise DamagedArchive(part.path, f"storage '{key:.40}' has {held} of its {stored.nbytes} bytes")
        if swaps:
            values.byteswap(dtype_of(stored.dtype))
        return values

    def _read(self, part: OpenPart, key: str, span: Span, values: Any) -> None:
        """Read bytes of a storage. Mapped storages need neither this nor its modules."""
        from ckptmove.proof.tensors.stored import StoredTensors, memory_of

        if self._stored is None:
            self._stored = StoredTensors(dict.fromkeys(part for part, _ in self._homes.values()))
        self._stored.read_into(part, key, span, memory_of(values))

    def _file(self, disk: DiskPlace) -> Any:
        """A file as one storage, mapped privately: writing to it never changes the file."""
        mapped = self._files.get(disk.path)
        if mapped is None:
            mapped = self._files[disk.path] = torch.UntypedStorage.from_file(
                disk.path, False, disk.nbytes
            )  # torch names it `shared` in Python only
            disk.require_unchanged()
        return mapped


def _typed(untyped: Any, dtype: torch.dtype) -> Any:
    kind: Any = torch.storage.TypedStorage
    return kind(wrap_storage=untyped, dtype=dtype, _internal=True)


def _empty(nbytes: int, device: str) -> Any:
    kind: Any = torch.UntypedStorage
    try:
        return kind(nbytes, device=device)
    except RuntimeError as error:  # of torch's allocator
        raise OutOfMemory from error


def _inflated(part: OpenPart, key: str) -> Any:
    """The bytes of a deflated storage; empty for all others."""
    from ckptmove.io.contracts import InflateSegment
    from ckptmove.io.segments import blocks_of
    from ckptmove.proof.tensors.stored import memory_of

    if isinstance(part, FilePart):
        with part.content() as (container, _):
            segment = container.storage_segment(key)
            if isinstance(segment, InflateSegment):
                values, done = _empty(segment.nbytes, "cpu"), 0
                memory = memory_of(values)
                for block in blocks_of(container.source, (segment,)):
                    memory[done : done + len(block)] = block
                    done += len(block)
                return values
    return _empty(0, "cpu")
