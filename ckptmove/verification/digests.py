"""What torch has read of each storage, as a digest in place of bytes that are stored just so.

Never lets go of bytes that are not: whoever compares them is to say where they differ.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

import torch

from ckptmove.torch_facts.dtypes import ITEM_BYTES
from ckptmove.verification.pages import drop_pages

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.storage import UntypedStorage

    from ckptmove.model import TensorRecord

#: As much is hashed at once: of more, torch has a copy made by all processors, and each waits for the others.
_BLOCK_BYTES: Final = 2**15


class StorageDigests:
    """The digests of the storages of one file, by where torch holds them.

    Each stays where it is for as long as a tensor views it, with its memory given back: such a tensor has torch's own
    sizes and strides, and no values.
    """

    def __init__(self, stored: Mapping[str, bytes]) -> None:
        """Begin with no storage of torch's.

        Args:
            stored: the SHA-256 of each storage as it is in the file, by its key.
        """
        self._stored = stored
        self._known = frozenset(stored.values())
        self._taken: dict[int, bytes] = {}
        self._buffer = bytearray(_BLOCK_BYTES)
        self._block = torch.frombuffer(self._buffer, dtype=torch.uint8)

    def take(self, storage: UntypedStorage, location: str) -> UntypedStorage:
        """Digest a storage, and give its memory back if it is one of the file's; the ``map_location`` of a load.

        Of an archive of ``torch.save`` that is called once for each storage, when its bytes were read and put in this
        machine's byte order (``torch/serialization.py``, ``load_tensor``); of the format before, too early. torch
        before 2.10 takes a storage to be as long as the pickle says, also where its record is shorter: what lies
        behind that is not touched, since no file has it.

        Args:
            storage: with its bytes, on the CPU.
            location: the tag of its device, which is of no concern here.

        Returns:
            The same storage: views are known by where it lies.
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
        """Whether the bytes of the storage that a tensor views are gone."""
        return tensor.untyped_storage().data_ptr() in self._taken

    def is_same(self, record: TensorRecord, raw: torch.Tensor) -> bool:
        """Whether a view of a storage that was taken is that of a record: at the same place in the same storage.

        Args:
            record: a dense tensor of the file.
            raw: the bytes of torch's, from its first element to its last, as many as the record's.
        """
        is_there = raw.storage_offset() == record.storage_offset * ITEM_BYTES[record.dtype]
        return is_there and self._taken[raw.untyped_storage().data_ptr()] == self._stored.get(record.storage or "")
