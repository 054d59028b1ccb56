"""Several files as one tree: each tensor is assembled from chunks in the files."""

from __future__ import annotations

import sys
from abc import abstractmethod
from math import prod
from threading import Lock, local
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from ckptmove.assembled.table import OpenChunk
from ckptmove.checkpoint.elements import extent_span
from ckptmove.checkpoint.parts import OpenPart
from ckptmove.formats.chunks import flaw_of
from ckptmove.lazy.chunked import Chunked
from ckptmove.lazy.stored import StoredBytes, Strided, as_strided
from ckptmove.lazy.tensor import LazyTensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckptmove.assembled.dcp_folder import PiecesOfFile
    from ckptmove.assembled.table import Placed, TableEntry
    from ckptmove.formats.chunks import Chunk
    from ckptmove.io.contracts import ByteSource, Progress
    from ckptmove.model import ArchiveFact, Span, TensorRecord

#: Tensors that each thread keeps the places of: a parameter and its moments are read in turn.
_MOST_RECENT: Final = 8


class _Whole(NamedTuple):
    """A tensor, or the storage of one file, whose bytes are all there."""

    entry: TableEntry  # its row of the table
    chunks: Sequence[Placed]  # those with elements, each once
    storage: StoredBytes  # the bytes
    tensor: LazyTensor | None = None  # the tensor; None for the storage of one file


class _Recent(local):
    """What a thread has read last, by key."""

    def __init__(self) -> None:
        self.found: dict[str, _Whole | None] = {}


class AssembledPart(OpenPart):
    """Several files as one part of a checkpoint. Its keys are those of whole tensors, or of storages of one file."""

    is_assembled = True
    byteorder = sys.byteorder
    pickle_bytes = 0

    def __init__(self) -> None:
        self._recent = _Recent()
        self._lock = Lock()
        #: Storages of files that were compared with their CRCs: a tensor may share them with others.
        self._sound: set[tuple[str, str]] = set()
        self._complete: set[str] = set()

    @abstractmethod
    def entry(self, key: str) -> TableEntry:
        """The row of the table for a key."""

    def opened(self, key: str, placed: Placed) -> OpenChunk | None:
        """Open a chunk; None if its bytes are missing or damaged."""
        del key
        part = self.members[placed.file]
        stored = part.storage(placed.key) if placed.key else None
        if stored is None or (placed.local is not None and extent_span(stored.span, placed.local) is None):
            return None
        return OpenChunk(stored, placed.local, part.inventory.container)

    def check_chunk(self, key: str, placed: Placed) -> None:
        """Raise CrcMismatch if the bytes of a chunk differ from their CRC."""

    def source(self, file: str) -> ByteSource:
        """The bytes of a file of the table."""
        return self.members[file].source

    def chunks(self, key: str) -> Sequence[Chunk]:
        found = self.entry(key)
        return () if found.is_storage else tuple(placed.chunk for placed in found.placed)

    def pieces(self, key: str) -> Sequence[Placed]:
        """The chunks of a tensor with elements, with their replicas."""
        return [placed for placed in self.entry(key).placed if placed.chunk.volume]

    def files_of(self, record: TensorRecord) -> frozenset[str]:
        """The files with chunks of a tensor."""
        key = self.own_key(record)
        return frozenset() if key is None else frozenset(placed.file for placed in self.entry(key).placed)

    def span(self, key: str) -> Span | None:
        stored = self.storage(key)
        return None if stored is None else stored.span

    def storage(self, key: str) -> StoredBytes | None:
        """The elements of a tensor in order, as if they were contiguous, or the bytes of the storage of one file."""
        found = self._whole(key)
        if found is None or found.entry.is_storage:
            return None if found is None else found.storage
        # The places of the chunks take more memory than a row of the table: those of many tensors are found again.
        return as_strided(_OfPart(self, key, found.entry)).storage

    def require_sound(self, key: str) -> None:
        """Compare the chunks of a tensor with their CRCs, if they have any."""
        found = self._whole(key)
        for placed in () if found is None else found.chunks:
            self.check_chunk(key, placed)

    def objects(self) -> Iterable[tuple[str, Placed, str]]:
        """Objects that are no tensors and that torch loads: name, place and format."""
        return ()

    def object_of(self, record: TensorRecord) -> tuple[str, str] | None:
        """The object that holds a tensor, and the path of the tensor in it; None for a tensor of its own."""
        del record
        return None

    def pieces_of_files(self) -> Mapping[str, PiecesOfFile]:
        """The pieces with CRCs in each file, by the path of the file in the directory."""
        return {}

    def close(self) -> None:
        """Do nothing: the files of the directory are closed together."""

    def check(self, progress: Progress | None = None, jobs: int = 1) -> tuple[ArchiveFact, ...]:
        """The facts so far: the files have no CRCs, or are checked by themselves."""
        del progress, jobs
        return self.inventory.facts

    def extras(self) -> Mapping[str, bytes]:
        """Return nothing: the files have no content outside their tensors."""
        return {}

    def tensor(self, key: str) -> LazyTensor:
        """A tensor that is complete."""
        return cast("LazyTensor", cast("_Whole", self._whole(key)).tensor)

    def _whole(self, key: str) -> _Whole | None:
        """All bytes of a key; None if some are missing or damaged. The last ones of each thread are kept."""
        found = self._recent.found
        if key in found:
            found[key] = found.pop(key)
        else:
            if len(found) == _MOST_RECENT:
                del found[next(iter(found))]
            found[key] = self._assemble(key)
        return found[key]

    def _assemble(self, key: str) -> _Whole | None:
        entry = self.entry(key)
        if entry.is_storage:
            (placed,) = entry.placed
            stored = self.opened(key, placed)
            return None if stored is None else _Whole(entry, [placed], stored.storage)
        by_chunk: dict[Chunk, Placed] = {}
        for placed in entry.placed:
            if placed.chunk.volume:
                by_chunk.setdefault(placed.chunk, placed)
        chunks, distinct = [*by_chunk], [*by_chunk.values()]
        numel = prod(entry.shape)
        if sum(chunk.volume for chunk in chunks) != numel or flaw_of(entry.shape, chunks):
            return None
        if key not in self._complete:  # to open all chunks again would take longer than to find them
            if any(self.opened(key, placed) is None for placed in distinct):
                return None
            self._complete.add(key)

        def load(place: int) -> LazyTensor:
            # It was opened before, and all of it is there.
            storage, local, _ = cast("OpenChunk", self.opened(key, distinct[place]))
            own = cast("TensorRecord", local)
            return Strided(storage, own.dtype, own.shape, own.stride, own.storage_offset)

        tensor = Chunked(entry.shape, entry.dtype, chunks, load)
        return _Whole(entry, distinct, as_strided(tensor).storage, tensor)


class _OfPart(LazyTensor):
    """A tensor of a part, whose chunks are found when it is read."""

    def __init__(self, part: AssembledPart, key: str, entry: TableEntry) -> None:
        self.dtype, self.shape = entry.dtype, entry.shape
        self._part, self._key = part, key

    @property
    def block_bytes(self) -> int:
        return self._part.tensor(self._key).block_bytes

    def read_into(self, first: int, memory: memoryview) -> None:
        self._part.tensor(self._key).read_into(first, memory)
