"""Read and lay out the stream that ``torch.save`` wrote from 0.1.10 to 1.5: five pickles, then the storages.

The elements of a storage are not read, only their number.

From torch/serialization.py ``_legacy_save`` and ``_legacy_load``, and torch/csrc/serialization.cpp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.errors import DamagedArchive, DamagedPickle, LimitExceeded
from ckptmove.formats.contract import Container
from ckptmove.io.contracts import BytesSegment, CastSegment, CopySegment
from ckptmove.io.part import PartSource
from ckptmove.model import ArchiveFact, Span
from ckptmove.pickles.machine import interpret
from ckptmove.pickles.state import Machine
from ckptmove.pickles.stream import read_pickle
from ckptmove.pickles.tensors import TensorReader
from ckptmove.pickles.tree import MADE, List, Tuple
from ckptmove.text import some

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptmove.formats.zip_archive.index import ZipDirectory
    from ckptmove.io.contracts import ByteSource, Segment
    from ckptmove.limits import Limits
    from ckptmove.model import StorageRef
    from ckptmove.pickles.tree import Value

#: ``MAGIC_NUMBER`` and ``PROTOCOL_VERSION``.
MAGIC: Final = 0x1950A86A20F9469CFC6C
_PROTOCOL: Final = 1001
_COUNT_BYTES: Final = 8
#: Length of one read, in bytes: small storages are close together.
_WINDOW: Final = 1 << 12


class TorchLegacy(Container):
    """A checkpoint of ``torch.save`` before 1.6, or with ``_use_new_zipfile_serialization=False``.

    torch writes and reads the storages of a stream in little-endian order on every machine, and ignores the byte order
    in the third pickle.
    """

    name = "torch-legacy"

    @classmethod
    def open(cls, source: ByteSource, directory: ZipDirectory | None, limits: Limits) -> TorchLegacy:
        return cls(source, limits)

    def __init__(self, source: ByteSource, limits: Limits) -> None:
        self.source = source
        self.limits = limits
        self._position = 0
        self.around = Machine(b"", limits)  # has the names in the four small pickles, which torch.load runs too
        for what, wanted in (("magic number", MAGIC), ("protocol version", _PROTOCOL)):
            value = self._read_value(what)
            if value != wanted and not isinstance(value, MADE):
                raise self._damage(f"its {what} is not {wanted}")
        self._read_value("system information")
        begin = self._position
        try:
            self._pickle = self._read_pickle()
        except DamagedPickle as error:
            raise self._with_names(error) from error
        self._pickle_span = Span(begin, self._position)
        self._keys = self._read_keys()
        self._machine: Machine | None = None
        self._spans: dict[str, Span] = {}
        self._cut_off: list[str] = []
        self._window = b""
        self._window_start = 0
        self._end = source.size

    def object_pickle(self) -> bytes:
        return self._pickle

    def read(self) -> Machine:
        """Interpret :meth:`object_pickle`; the names in the pickles around it are added."""
        try:
            machine = super().read()
        except DamagedPickle as error:
            raise self._with_names(error) from error
        machine.note_names(self.around)
        self._machine = machine
        return machine

    def locate(self, storages: Sequence[StorageRef]) -> tuple[ArchiveFact, ...]:
        """Find the bytes of the storages: each starts at the end of the one before it.

        A storage that the object pickle does not name cannot be skipped: only the pickle has the size of its elements.
        The machine of :meth:`read` also gets the names in pickles after the last storage.
        """
        facts, end = self._locate(storages)
        rest = self.source.size - end
        self._end = min(end, self.source.size)
        if rest > 0:
            facts.append(ArchiveFact("orphan-record", "bytes after the last storage", rest))
            if self._machine is not None:
                self._note_rest(self._machine, end)
        return tuple(facts)

    def strays(self) -> tuple[tuple[str, Span], ...]:
        """The bytes after the last storage, if they are an archive: the names in pickles there are already known."""
        span = Span(self._end, self.source.size)
        return (("bytes after the last storage", span),) if span.nbytes else ()

    def _locate(self, storages: Sequence[StorageRef]) -> tuple[list[ArchiveFact], int]:
        """Problems with the bytes of the storages, and the end of the last one.

        The counts in a remote file are not compared: each would cost a request.
        """
        facts: list[ArchiveFact] = []
        rest = {storage.key: storage for storage in storages}
        position, size = self._position, self.source.size
        for key in self._keys:
            storage = rest.pop(key, None)
            if storage is None:
                raise self._damage(f"its list of keys names storage '{key:.40}', but its object pickle does not")
            start = position + _COUNT_BYTES
            position = start + storage.nbytes
            if start <= size and not self.source.is_remote and self._count(start - _COUNT_BYTES) != storage.numel:
                raise self._damage(f"the number of elements of storage '{key:.40}' differs from its object pickle")
            if position <= size:
                self._spans[key] = Span(start, position)
            else:
                facts.append(ArchiveFact("past-end", key, min(position - size, storage.nbytes)))
        self._cut_off = [fact.record for fact in facts]
        facts += [ArchiveFact("missing-storage", key, storage.nbytes) for key, storage in rest.items()]
        return facts, position

    def _note_rest(self, machine: Machine, position: int) -> None:
        """Collect the names in later streams and pickles, which the next ``torch.load`` of an open file runs.

        Any bytes may follow: only names before the first damage are collected.
        """
        try:
            while position < self.source.size:
                rest = PartSource(self.source, Span(position, self.source.size))
                data = read_pickle(rest, 0, self.limits)
                first = interpret(data, self.limits)
                machine.note_names(first)
                is_stream = first.root == MAGIC or isinstance(first.root, MADE)
                position += (_stream_bytes(rest, machine, self.limits) if is_stream else None) or len(data)
        except DamagedPickle as error:
            machine.note_runs(error.runs)

    def storage_span(self, key: str) -> Span | None:
        """Span of a storage's bytes in the source; None if they are cut off, or before :meth:`locate`."""
        return self._spans.get(key)

    def lay_out(self, pickle: bytes, casts: Mapping[str, tuple[str, str]]) -> tuple[Segment, ...]:
        """The output with a new object pickle; everything else unchanged."""
        if self._cut_off:
            cut_off = some(f"'{key:.40}'" for key in self._cut_off)
            raise self._damage(f"it ends before the end of storage {cut_off}")
        new: list[tuple[Span, Segment]] = []
        if pickle != self._pickle:
            new.append((self._pickle_span, BytesSegment(pickle)))
        for key, (source, target) in casts.items():
            span = self._spans.get(key)
            if span is None:
                raise self._damage(f"storage '{key:.40}' has no bytes to cast")
            new.append((span, CastSegment(CopySegment(span), source, target, self.byteorder)))
        segments: list[Segment] = []
        position = 0
        for span, segment in sorted(new, key=lambda one: one[0].start):
            segments += CopySegment(Span(position, span.start)), segment
            position = span.end
        return *segments, CopySegment(Span(position, self.source.size))

    def _read_pickle(self) -> bytes:
        data = read_pickle(self.source, self._position, self.limits)
        self._position += len(data)
        return data

    def _read_value(self, what: str) -> Value:
        begin = self._position
        try:
            machine = interpret(self._read_pickle(), self.limits)
        except DamagedPickle as error:
            detail = f"its {what} is not a valid pickle: {error.detail} at byte {begin + error.offset}"
            raise self._damage(detail, error.runs) from error
        self.around.note_names(machine)
        return machine.root

    def _read_keys(self) -> tuple[str, ...]:
        root = self._read_value("list of keys")
        keys = root.items if isinstance(root, List | Tuple) else (None,)
        if any(isinstance(key, MADE) for key in (root, *keys)):
            return ()  # only running the pickle would give the keys
        if len(keys) > self.limits.records:
            raise LimitExceeded("the number of storages", limit=self.limits.records, actual=len(keys))
        found = tuple(key for key in keys if type(key) is str)
        if len(set(found)) < len(keys):
            raise self._damage("its list of keys has a duplicate, or an item that is not a key")
        return found

    def _count(self, position: int) -> int:
        at = position - self._window_start
        if not 0 <= at <= len(self._window) - _COUNT_BYTES:
            self._window = self.source.read(position, min(position + _WINDOW, self.source.size))
            self._window_start, at = position, 0
        return int.from_bytes(self._window[at : at + _COUNT_BYTES], "little", signed=True)

    def _damage(self, detail: str, runs: tuple[str, ...] = ()) -> DamagedArchive:
        return DamagedArchive(self.source.path, detail, runs=(*self.around.runs, *runs))

    def _with_names(self, error: DamagedPickle) -> DamagedPickle:
        """The same error, with the dangerous names in the pickles before the damaged one."""
        runs = (*self.around.runs, *error.runs)
        return DamagedPickle(error.detail, offset=error.offset, runs=runs)


def _stream_bytes(source: ByteSource, machine: Machine, limits: Limits) -> int | None:
    """Length of the stream at the start of a source; None if it is damaged. The machine gets its names."""
    try:
        stream = TorchLegacy(source, limits)
        inner = stream.read()
        machine.note_names(inner)
        reader = TensorReader()
        reader.gather(inner.persistents)
        return stream._locate(reader.storages())[1]  # noqa: SLF001  # its own class
    except (DamagedArchive, DamagedPickle) as error:
        machine.note_runs(error.runs)
        return None
