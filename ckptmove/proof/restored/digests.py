"""Replace the bytes that torch read for a storage by a digest, if they equal the stored bytes.

Bytes that differ are kept, so that the comparison can report where they differ.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

import torch

from ckptmove.proof.restored.pages import drop_pages
from ckptmove.torch_facts.dtypes import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.storage import UntypedStorage

    from ckptmove.model import TensorRecord

#: Bytes hashed at once. torch copies larger blocks with all processors, and each waits for the others.
_BLOCK_BYTES: Final = 2**15


class StorageDigests:
    """Digests of the storages of one file, by their address in torch's memory.

    A storage keeps its address as long as a tensor views it, but its memory is released. The tensor keeps its sizes and
    strides, and has no values.
    """

    def __init__(self, stored: Mapping[str, bytes]) -> None:
        """Begin with no storage taken.

        Args:
            stored: SHA-256 of each storage in the file, by storage key.
        """
        self._stored = stored
        self._known = frozenset(stored.values())
        self._taken: dict[int, bytes] = {}
        self._buffer = bytearray(_BLOCK_BYTES)
        self._block = torch.frombuffer(self._buffer, dtype=torch.uint8)

    def take(self, storage: UntypedStorage, location: str) -> UntypedStorage:
        """Digest a storage, and release its memory if the file has equal bytes; the ``map_location`` of a load.

        torch calls it once for each storage of a ``torch.save`` archive, after reading the bytes and converting them
        to this machine's byte order (``torch/serialization.py``, ``load_tensor``). For the legacy format torch calls
        it too early. torch before 2.10 gives a storage the length that the pickle states, also if its record is
        shorter; bytes after the record are not in the file, so they are not touched.

        Returns:
            The same storage, because its views are identified by its address.
        """
        del location
        flat = torch.empty(0, dtype=torch.uint8).set_(storage)
        hashed = hashlib.sha256()
        for start in range(0, len(flat), _BLOCK_BYTES):
            part = flat[start : start + _BLOCK_BYTES]
            self._block[: len(part)].copy_(part)
            hashed.update(memoryview(self._buffer)[: len(part)])
        if hashed.digest() in self._known:
            address = storage.data_ptr()
            self._taken[address] = hashed.digest()
            drop_pages(address, address + len(flat))
        return storage

    def has_taken(self, tensor: torch.Tensor) -> bool:
        """Whether the storage that a tensor views was released."""
        return tensor.untyped_storage().data_ptr() in self._taken

    def is_same(self, record: TensorRecord, raw: torch.Tensor) -> bool:
        """Whether a view of a released storage matches a record: same storage, same offset.

        Args:
            raw: torch's bytes from the tensor's first element to its last; as many as the record has.
        """
        is_there = raw.storage_offset() == record.storage_offset * ITEM_BYTES[record.dtype]
        return is_there and self._taken[raw.untyped_storage().data_ptr()] == self._stored.get(record.storage or "")
