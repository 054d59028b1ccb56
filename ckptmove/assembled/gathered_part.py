"""A file that is not written yet, whose storages are gathered from runs of elements in the files of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ckptmove.assembled.part import AssembledPart
from ckptmove.assembled.table import Placed, TableEntry
from ckptmove.checkpoint.tree_part import NewTreePart
from ckptmove.errors import CrcMismatch
from ckptmove.formats.chunks import Chunk
from ckptmove.torch_facts.dtypes import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ckptmove.checkpoint.parts import FilePart
    from ckptmove.limits import Limits
    from ckptmove.model import TensorRecord
    from ckptmove.pickles.tree import Value


class Run(NamedTuple):
    """A run of elements in a file."""

    part: FilePart  # the file
    record: TensorRecord  # the elements as a tensor with one axis
    start: int  # index of the first one in the tensor of this name

    @classmethod
    def of(cls, part: FilePart, record: TensorRecord, start: int, end: int) -> Run:
        """The elements from ``start`` to ``end`` (exclusive) of a contiguous tensor."""
        place, nbytes = record.storage_offset + start, (end - start) * ITEM_BYTES[record.dtype]
        own = record._replace(shape=(end - start,), stride=(1,), storage_offset=place, nbytes=nbytes)
        return cls(part, own, start)


class GatheredPart(AssembledPart, NewTreePart):
    """A new tree whose storages are concatenations of runs."""

    has_checksums = True

    def __init__(
        self, path: str, root: Value, storages: Mapping[str, Callable[[], Iterable[Run]]], limits: Limits
    ) -> None:
        """Hold a new tree. ``storages`` are functions that return runs, by key: all runs together are many."""
        AssembledPart.__init__(self)
        NewTreePart.__init__(self, "", path, root, limits)
        self._storages = storages
        self.members: dict[str, FilePart] = {}

    def entry(self, key: str) -> TableEntry:
        placed: list[Placed] = []
        end, dtype = 0, "uint8"
        for part, record, start in self._storages[key]():
            self.members[part.name] = part
            chunk, dtype = Chunk((end,), record.shape), record.dtype
            own = part.own_key(record) or ""
            name = part.own_name(record.name) if record.name != record.storage else ""  # else no tensor, but a storage
            placed.append(Placed(chunk, part.name, key=own, local=record, name=name, offsets=(start,)))
            end += record.shape[0]
        return TableEntry(dtype, (end,), placed)

    def check_chunk(self, key: str, placed: Placed) -> None:
        del key
        part, own = self.members[placed.file], (placed.file, "")
        with self._lock:  # each file is read once
            for fact in () if own in self._sound else (*part.check(), *part.flaws()):
                if fact.kind == "crc-mismatch":
                    raise CrcMismatch(part.path, fact.record)
            self._sound.add(own)
