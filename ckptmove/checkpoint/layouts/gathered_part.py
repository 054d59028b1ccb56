"""A file that is not written yet, whose storages are gathered from runs of elements in the files of a checkpoint."""

from __future__ import annotations

import sys
from itertools import accumulate
from threading import Lock, local
from typing import TYPE_CHECKING, NamedTuple, cast

from ckptmove.checkpoint.layouts.tree_part import NewTreePart
from ckptmove.errors import CrcMismatch
from ckptmove.formats.chunks import Chunk
from ckptmove.lazy.chunked import Chunked
from ckptmove.lazy.stored import StoredBytes
from ckptmove.lazy.tensor import Elements, LazyTensor
from ckptmove.model import Span
from ckptmove.torch_facts.dtypes import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ckptmove.checkpoint.parts import FilePart
    from ckptmove.limits import Limits
    from ckptmove.model import TensorRecord
    from ckptmove.pickles.tree import Value


class Run(NamedTuple):
    """A run of elements in a file."""

    part: FilePart  # the file
    record: TensorRecord  # the elements as a tensor with one axis

    @classmethod
    def of(cls, part: FilePart, record: TensorRecord, start: int, end: int) -> Run:
        """The elements from ``start`` to ``end`` (exclusive) of a contiguous tensor."""
        place, nbytes = record.storage_offset + start, (end - start) * ITEM_BYTES[record.dtype]
        return cls(part, record._replace(shape=(end - start,), stride=(1,), storage_offset=place, nbytes=nbytes))


class _Recent(local):
    """What each thread has read last: key of a storage, and its elements."""

    last: tuple[str, Chunked] | None = None


class _Gathered(LazyTensor):
    """The elements of a storage of a gathered part."""

    def __init__(self, part: GatheredPart, key: str, dtype: str, count: int) -> None:
        self._part, self._key, self.dtype, self.shape = part, key, dtype, (count,)

    @property
    def block_bytes(self) -> int:
        return self._part.assembled(self._key).block_bytes

    def read_into(self, first: int, memory: memoryview) -> None:
        self._part.assembled(self._key).read_into(first, memory)


class GatheredPart(NewTreePart):
    """A new tree whose storages are concatenations of runs."""

    is_distributed = False
    has_checksums = True
    byteorder = sys.byteorder

    def __init__(
        self, path: str, root: Value, storages: Mapping[str, Callable[[], Iterable[Run]]], limits: Limits
    ) -> None:
        """Hold a new tree. ``storages`` are functions that return runs, by key: all runs together are many."""
        super().__init__("", path, root, limits)
        self._storages = storages
        self._sound: set[str] = set()
        self._checking = Lock()
        self._recent = _Recent()

    def storage(self, key: str) -> StoredBytes | None:
        count, dtype = 0, "uint8"
        for run in self._storages[key]():
            if run.record.nbytes and run.part.elements(run.record) is None:
                return None
            count, dtype = count + run.record.shape[0], run.record.dtype
        tensor = _Gathered(self, key, dtype, count)
        return StoredBytes(Elements(tensor), Span(0, tensor.nbytes), self.byteorder)

    def assembled(self, key: str) -> Chunked:
        """The elements of a storage; of each thread, only those of the last one stay in memory."""
        last = self._recent.last
        if last is None or last[0] != key:
            last = key, self._assemble([run for run in self._storages[key]() if run.record.nbytes])
            self._recent.last = last
        return last[1]

    @staticmethod
    def _assemble(runs: Sequence[Run]) -> Chunked:
        ends = list(accumulate((run.record.shape[0] for run in runs), initial=0))
        chunks = [Chunk((start,), run.record.shape) for start, run in zip(ends, runs, strict=False)]

        def load(place: int) -> LazyTensor:
            return cast("LazyTensor", runs[place].part.elements(runs[place].record))  # `storage` found it

        return Chunked((ends[-1],), runs[0].record.dtype, chunks, load)

    def require_sound(self, key: str) -> None:
        """Compare the files of a storage with their CRCs, each once."""
        with self._checking:
            for part in {run.part.name: run.part for run in self._storages[key]()}.values():
                if part.name not in self._sound:
                    for fact in (*part.check(), *part.flaws()):
                        if fact.kind == "crc-mismatch":
                            raise CrcMismatch(part.path, fact.record)
                    self._sound.add(part.name)
