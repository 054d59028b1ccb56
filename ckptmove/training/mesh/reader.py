"""Load with ``torch.distributed.checkpoint.load`` without unpickling the checkpoint.

torch's own reader unpickles ``.metadata``, and its planner unpickles each object. Here the metadata is built from the
tables that :mod:`ckptmove.formats.dcp` has parsed, and objects are read with ``weights_only=True``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint._nested_dict import set_element  # type: ignore[attr-defined]  # of a private one
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptmove.formats.dcp.metadata import StoredTensor
from ckptmove.proof.tensors.dtypes import dtype_of

if TYPE_CHECKING:
    import io

    from torch.distributed.checkpoint.planner import ReadItem

    from ckptmove.formats.dcp.metadata import DistributedMetadata, StoredObject


class ParsedReader(FileSystemReader):
    """torch's reader of the files, with metadata that is already parsed."""

    def __init__(self, folder: str, metadata: DistributedMetadata) -> None:
        super().__init__(folder)
        self._parsed = metadata

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The metadata, as torch would have unpickled it."""
        return Metadata(
            {entry.name: _entry(entry) for entry in self._parsed.entries},
            planner_data=None,
            storage_data={
                MetadataIndex(piece.name, None if piece.offsets is None else torch.Size(piece.offsets)): _StorageInfo(
                    piece.file, piece.span.start, piece.span.nbytes
                )
                for piece in self._parsed.pieces
            },
            storage_meta=StorageMeta(),
        )


def _entry(entry: StoredTensor | StoredObject) -> TensorStorageMetadata | BytesStorageMetadata:
    if not isinstance(entry, StoredTensor):
        return BytesStorageMetadata()
    return TensorStorageMetadata(
        TensorProperties(dtype=dtype_of(entry.dtype), requires_grad=entry.requires_grad),
        torch.Size(entry.shape),
        [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in entry.chunks],
    )


class SafePlanner(DefaultLoadPlanner):
    """torch's planner, which reads objects with ``weights_only=True``."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Read an object, and put it into the nested state_dict."""
        data = torch.load(value, weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], data)
