"""Read and lay out the zip archive that ``torch.save`` writes since 1.6.

The archive is one folder with ``data.pkl`` and a record for each storage. A record is never inflated beyond its
declared length. TorchScript and ``torch.export`` use the same writer: their classes derive from :class:`TorchZip`.

Record names from torch/serialization.py ``_save`` and caffe2/serialize/inline_container.cc.
"""

from __future__ import annotations

import zlib
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Final, cast

from ckptmove.errors import CrcMismatch, DamagedArchive, LimitExceeded, NothingToUndo
from ckptmove.formats.contract import Container
from ckptmove.formats.zip_archive.headers import LOCAL_BYTES, LocalHeaders, hidden_bytes
from ckptmove.formats.zip_archive.index import DEFLATED, STORED, ZipDirectory, ZipRecord
from ckptmove.formats.zip_archive.names import (
    KNOWN_RECORDS,
    object_folder,
    refuse_doubles,
    refuse_obstacles,
    refuse_strays,
)
from ckptmove.formats.zip_archive.undo import original_directory, read_undo
from ckptmove.io.changes import Patch
from ckptmove.io.contracts import BytesSegment, CastSegment, CheckedRange, CopySegment, InflateSegment
from ckptmove.io.part import MemorySource, PartSource
from ckptmove.io.source import READS_AT_ONCE
from ckptmove.model import ArchiveFact, Span
from ckptmove.pickles.plain_tensors import interpret_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ckptmove.formats.zip_archive.layout import NewRecord
    from ckptmove.io.contracts import ByteSource, Segment
    from ckptmove.limits import Limits
    from ckptmove.model import StorageRef
    from ckptmove.pickles.state import Machine

#: torch's default alignment, in bytes, without a ``.storage_alignment`` record (``kFieldAlignment``).
_ALIGNMENT: Final = 64
#: Maximum alignment: the padding is an extra field, whose length has 16 bits.
_MAX_ALIGNMENT: Final = 1 << 15
#: Block size of file systems that share blocks between files, and the minimum size that makes sharing worthwhile.
_FILE_BLOCK: Final = 4096
_SHARED_BYTES: Final = 1 << 20
#: Maximum length of a record that holds a word or a number.
_SHORT_TEXT_BYTES: Final = 64
_BLOCK: Final = 1 << 20
#: Bytes of the records that one thread compares with their CRCs.
_BATCH_BYTES: Final = 1 << 25


class TorchZip(Container):
    """A checkpoint of ``torch.save``; little-endian if no record names the byte order, as in torch."""

    name = "torch-zip"
    #: Records that are held in memory together: if one is compressed, lower limits apply to all of them.
    _own_pickles: ClassVar[tuple[str, ...]] = ("data.pkl",)

    @classmethod
    def open(cls, source: ByteSource, directory: ZipDirectory | None, limits: Limits) -> Container:
        return cls(source, cast("ZipDirectory", directory), limits)

    def __init__(self, source: ByteSource, directory: ZipDirectory, limits: Limits, folder: str | None = None) -> None:
        """Check the records in the directory, and read byte order and alignment.

        The folder of its records, with a slash, is by default the one that holds ``data.pkl``.
        """
        records = directory.records
        names = [*records.names()]
        folder = object_folder(names, source.path) if folder is None else folder
        self.source = source
        self._directory = directory
        self._headers = LocalHeaders(source, directory)
        self._undo = read_undo(source, directory.start)
        refuse_doubles(records, names, source.path)
        refuse_obstacles(records, source.path)
        refuse_strays(names, folder, source.path)
        #: Records by their names in the folder, without those in ``data/``, which are storages.
        self._inside: dict[str, ZipRecord] = {}
        self._data_folder = f"{folder}data/"
        for place, name in enumerate(names):
            if not self._is_storage(name):
                self._inside[name[len(folder) :]] = records[place]
        held = [self._inside[name] for name in self._own_pickles if name in self._inside]
        is_deflated = any(record.method == DEFLATED for record in held)
        stored_bytes = sum(record.stored_bytes for record in held)
        self.limits = limits.for_packed(stored_bytes, len(held)) if is_deflated else limits
        #: Length in bytes of each compressed storage in the pickle, by key.
        self._storage_bytes: dict[str, int] = {}
        self._strays: tuple[tuple[str, Span], ...] = ()
        #: Places of the records in the folder of the storages that no storage refers to.
        self._orphans: tuple[int, ...] = ()
        self._has_crcs = any(crc and nbytes for crc, nbytes in zip(records.crcs, records.nbytes, strict=True))
        self.byteorder = self._short_text(self._inside.get("byteorder")) or "little"
        if self.byteorder not in {"little", "big"}:
            raise DamagedArchive(source.path, f"unknown byte order '{self.byteorder}'")
        alignment = self._short_text(self._inside.get(".storage_alignment"))
        known = alignment.isdecimal() and 0 < int(alignment) <= _MAX_ALIGNMENT
        self._alignment = int(alignment) if known else _ALIGNMENT

    @cached_property
    def _storages(self) -> dict[str, int]:
        """Places of the storages in the directory, by key; not needed before the tree of the pickle is walked."""
        start, names = len(self._data_folder), enumerate(self._directory.records.names())
        return {name[start:]: place for place, name in names if self._is_storage(name)}

    def _is_storage(self, name: str) -> bool:
        return name.startswith(self._data_folder) and not name.endswith("/")

    def object_pickle(self) -> bytes:
        return self._read(self._inside["data.pkl"], "pickle bytes")

    def read_compact(self) -> Machine:
        return interpret_tensors(self.object_pickle(), self.limits)

    def extras(self) -> Iterator[tuple[str, bytes]]:
        """Records of the archive that are neither pickles nor storages: code, and files that a user added.

        Versions, the serialization id and source locations of the code are left out: every save writes new ones.
        """
        import hashlib

        storages = {*self._storages.values()}
        for name, record in self._inside.items():
            own = record.place in storages or name in KNOWN_RECORDS or name.endswith((".debug_pkl", "/"))
            if not own and not name.startswith((".data/", "data/")):
                digest = hashlib.sha256()
                for block in self._contents(record):
                    digest.update(block)
                yield name, digest.digest()

    def locate(self, storages: Sequence[StorageRef]) -> tuple[ArchiveFact, ...]:
        """Problems with the records of the storages, according to the directory, and with the local headers.

        The local headers of a remote file are compared when the records are read: each would cost a request.
        """
        found: list[ArchiveFact] = []
        records, used = self._directory.records, 0
        for storage in storages:
            place = self._storages.get(storage.key)
            if place is None:
                found.append(ArchiveFact("missing-storage", storage.key, storage.nbytes))
                continue
            used += 1
            missing = storage.nbytes - records.nbytes[place]
            if missing > 0:
                found.append(ArchiveFact("short-storage", records.name(place), missing))
            if records.methods[place] == DEFLATED:
                self._storage_bytes[storage.key] = storage.nbytes
        # Most files have no orphans: without them, the keys of the storages are not needed again.
        known = {storage.key for storage in storages} if used < len(self._storages) else self._storages.keys()
        for key, place in self._storages.items():
            if key not in known:
                found.append(ArchiveFact("orphan-record", records.name(place), records.nbytes[place]))
            elif records.methods[place] != STORED:
                found.append(ArchiveFact("compressed-storage", records.name(place), records.nbytes[place]))
        last = self._directory.start - LOCAL_BYTES
        found += [
            ArchiveFact("past-end", records.name(place), offset + nbytes - last)
            for place, (offset, nbytes) in enumerate(zip(records.header_offsets, records.stored_bytes, strict=True))
            if offset + nbytes > last
        ]
        if self._undo is not None:
            found.append(ArchiveFact("kept-for-undo", "bytes added in place", self.source.size - self._undo.size))
        archive = self._original() or self  # the fact before covers the tail
        strays = hidden_bytes(archive._directory, archive._headers, archive._alignment, archive.source.size)  # noqa: SLF001  # another of this class
        self._strays = tuple(strays)
        found += [ArchiveFact("stray-bytes", name, span.nbytes) for name, span in self._strays]
        self._orphans = tuple(place for key, place in self._storages.items() if key not in known)
        if not self.source.is_remote:
            self._headers.check_all()
        return tuple(found)

    def strays(self) -> tuple[tuple[str, Span], ...]:
        return self._strays

    def apart(self) -> Iterator[tuple[str, ByteSource]]:
        """Records that torch does not read as a pickle, a storage or a word."""
        own, storages = self._read_places(), {*self._storages.values()}
        others = [
            record.place
            for name, record in self._inside.items()
            if record.place not in own and not (name.endswith("/") or _is_word(name, record))
        ]
        records = self._directory.records
        for place in dict.fromkeys((*(place for place in others if place not in storages), *self._orphans)):
            source = self._whole(records[place])
            if source is not None:
                yield records.name(place), source

    def _read_places(self) -> set[int]:
        """Places of the records that are read as pickles."""
        return {self._inside[name].place for name in self._own_pickles if name in self._inside}

    def _whole(self, record: ZipRecord) -> ByteSource | None:
        """A record as a source; None if it is deflated and neither a pickle nor an archive."""
        part = PartSource(self.source, self._span(record.place))
        if record.method != DEFLATED:
            return part
        from ckptmove.formats.inflated import inflated  # most archives have no such record

        data = inflated(part, self.limits.max_inflated_bytes(record.stored_bytes))
        return MemorySource(self.source.path, data) if data else None

    def storage_span(self, key: str) -> Span | None:
        """Span of a storage's bytes in the source; None if they are missing or deflated."""
        place = self._storages.get(key)
        if place is None or self._directory.records.methods[place] != STORED:
            return None
        return self._span(place)

    def storage_segment(self, key: str) -> Segment | None:
        """How a storage's record is copied, with the check of its CRC; inflated if it is deflated."""
        record = self._storage(key)
        if record is None:
            return super().storage_segment(key)
        if record.method == DEFLATED:
            return self._inflate_segment(record, self._storage_bytes.get(key, 0))
        return CopySegment(self._span(record.place), self._checks(record))

    def storage_crc(self, key: str) -> int | None:
        place = self._storages.get(key)
        return None if place is None else self._directory.records.crcs[place] or None

    def check(self, jobs: int = 1) -> tuple[ArchiveFact, ...]:
        """Read every record and compare it with its CRC; return a ``crc-mismatch`` for each that differs.

        A CRC of 0 is not compared: ``torch.serialization.skip_data`` writes it for the storages.
        """
        from ckptmove.io.at_once import at_once

        found = at_once(self._check_records, self._batches(), jobs if READS_AT_ONCE else 1)
        return tuple(ArchiveFact("crc-mismatch", record.name, record.nbytes) for batch in found for record in batch)

    def has_checksums(self) -> bool:
        """Whether the archive holds CRCs; ``torch.serialization.set_crc32_options(False)`` leaves them out."""
        return self._has_crcs

    def lay_out(self, pickle: bytes, casts: Mapping[str, tuple[str, str]]) -> tuple[Segment, ...]:
        """The output with a new object pickle and all storages stored plainly; everything else unchanged.

        Storages keep their alignment, and inflated ones get it: ``torch.load(mmap=True)`` reads every record as plain
        bytes.
        """
        from ckptmove.formats.zip_archive.layout import Layout

        original = self._original()
        if original is not None and (casts or pickle != self.object_pickle()):
            return original.lay_out(pickle, casts)  # a new file needs no tail
        new = dict(self._inflated()) | dict(self._cast(key, *dtypes) for key, dtypes in casts.items())
        alignment = self._alignment if new else self._shared_alignment()
        for record in self._directory.records:
            if record.method == DEFLATED and record.crc and record.place not in new and not self._crc_matches(record):
                raise CrcMismatch(self.source.path, record.name)  # it is copied deflated, so the copy cannot check it
        if casts or pickle != self.object_pickle():
            new |= self._pickle_records(pickle)
        return Layout(self._headers, alignment).build(new)

    def _shared_alignment(self) -> int:
        """Alignment that lets large storages move by whole file system blocks, for a file in which no storage changes.

        From copy_file_range(2) and ioctl_ficlonerange(2): files share only whole blocks.
        """
        sizes = self._directory.records.stored_bytes
        if _FILE_BLOCK % self._alignment or sum(map(sizes.__getitem__, self._storages.values())) < _SHARED_BYTES:
            return self._alignment
        return _FILE_BLOCK

    def patch(self, pickle: bytes) -> Patch:
        """Append the new pickle, and a directory that points to it, to the archive before its first conversion.

        The tail of an earlier in-place conversion is replaced, so that the file does not grow with each conversion.
        """
        from ckptmove.formats.zip_archive.append import append_records

        archive = self._original() or self
        new = archive._pickle_records(pickle) if pickle != archive.object_pickle() else {}  # noqa: SLF001  # another of this class
        size = archive.source.size
        tail = append_records(archive.source, archive._directory, self._alignment, new) if new else b""  # noqa: SLF001  # another of this class
        return Patch(((size, tail),) if new else (), size + len(tail), can_undo=bool(new))

    def undo(self) -> Patch:
        """Cut off the tail of all in-place conversions; the bytes before it were never changed."""
        if self._undo is None:
            # A program that adds a record writes it over the directory, right after the undo record.
            if any(read_undo(self.source, offset) for offset in self._directory.records.header_offsets):
                raise NothingToUndo(self.source.path, "another program has added to the file since it was converted")
            raise NothingToUndo(self.source.path)
        if self._original() is None:
            raise NothingToUndo(self.source.path, "its earlier state was overwritten")
        return Patch((), self._undo.size)

    def _original(self) -> TorchZip | None:
        """The archive before its first in-place conversion; None if it was never converted, or is not restorable."""
        undo = self._undo
        if undo is None:
            return None
        offsets = self._directory.records.header_offsets
        if any(offsets[place] >= undo.size for place in self._storages.values()):
            return None
        found = original_directory(self.source, self._directory, undo, self.limits)
        if found is None:
            return None
        archive = type(self)(PartSource(self.source, Span(0, undo.size)), found, self.limits)
        archive._undo = None  # noqa: SLF001  # another of this class; an earlier undo record in it is not its own
        return archive

    def _pickle_records(self, pickle: bytes) -> dict[int, NewRecord]:
        """New records for a new object pickle, by their places in the directory."""
        return {self._inside["data.pkl"].place: self._new(pickle)}

    def _new(self, data: bytes) -> NewRecord:
        return _one_segment(BytesSegment(data), len(data), zlib.crc32(data) if self._has_crcs else 0)

    def _inflated(self) -> Iterator[tuple[int, NewRecord]]:
        """Plain records for the compressed storages in the pickle, by their places in the directory."""
        for key, nbytes in self._storage_bytes.items():
            record = self._directory.records[self._storages[key]]
            segment = self._inflate_segment(record, nbytes)
            yield record.place, _one_segment(segment, record.nbytes, record.crc)

    def _inflate_segment(self, record: ZipRecord, needed: int) -> InflateSegment:
        """Raises LimitExceeded if a deflated storage declares far more bytes than its tensors need."""
        limit = max(needed, self.limits.max_inflated_bytes(record.stored_bytes))
        if record.nbytes > limit:
            raise LimitExceeded("storage bytes", limit=limit, actual=record.nbytes, path=self.source.path)
        return InflateSegment(self._span(record.place), record.nbytes, record.crc, record.name)

    def _checks(self, record: ZipRecord) -> tuple[CheckedRange, ...]:
        """The check of a plainly stored record, if it has a CRC."""
        return (CheckedRange(self._span(record.place), record.crc, record.name),) if record.crc else ()

    def _cast(self, key: str, source: str, target: str) -> tuple[int, NewRecord]:
        from ckptmove.io.segments import blocks_of, length, without_checks

        record, path = self._storage(key), self.source.path
        if record is None:
            raise DamagedArchive(path, f"storage '{key}' has no bytes to cast")
        segment = CastSegment(cast("Segment", self.storage_segment(key)), source, target, self.byteorder)
        crc = 0
        for block in blocks_of(self.source, without_checks((segment,))) if self._has_crcs else ():
            crc = zlib.crc32(block, crc)
        return record.place, _one_segment(segment, length(segment), crc)

    def _storage(self, key: str) -> ZipRecord | None:
        place = self._storages.get(key)
        return None if place is None else self._directory.records[place]

    def _within(self, folder: str) -> dict[str, ZipRecord]:
        """The records in a folder, by their names there."""
        return {
            name[len(folder) :]: record
            for name, record in self._inside.items()
            if name.startswith(folder) and not name.endswith("/")
        }

    def _read(self, record: ZipRecord, resource: str) -> bytes:
        """All bytes of a record that is not a storage."""
        limit = self.limits.pickle_bytes
        if record.method == DEFLATED:
            limit = min(limit, self.limits.max_inflated_bytes(record.stored_bytes))
        if record.nbytes > limit:
            raise LimitExceeded(resource, limit=limit, actual=record.nbytes, path=self.source.path)
        data = b"".join(bytes(block) for block in self._contents(record))
        if len(data) != record.nbytes or (record.crc and zlib.crc32(data) != record.crc):
            raise CrcMismatch(self.source.path, record.name)
        return data

    def _short_text(self, record: ZipRecord | None) -> str:
        """Text of a small record, or the size of a larger one; empty if there is no record."""
        if record is None or record.nbytes > _SHORT_TEXT_BYTES:
            return "" if record is None else f"{record.nbytes} bytes"
        return b"".join(bytes(block) for block in self._contents(record)).decode("ascii", "replace").strip()

    def _span(self, place: int) -> Span:
        start = self._headers.data_start(place)
        return Span(start, start + self._directory.records.stored_bytes[place])

    def _batches(self) -> Iterator[list[tuple[ZipRecord, Span]]]:
        """The records with a CRC and their places, several small ones at a time."""
        batch: list[tuple[ZipRecord, Span]] = []
        nbytes = 0
        for record in self._directory.records:
            if record.crc:
                batch.append((record, self._span(record.place)))
                nbytes += record.stored_bytes
            if nbytes > _BATCH_BYTES:
                yield batch
                batch, nbytes = [], 0
        yield batch

    def _check_records(self, batch: list[tuple[ZipRecord, Span]]) -> list[ZipRecord]:
        """The records of a batch that differ from their CRC; called in several threads."""
        return [record for record, span in batch if not self._crc_matches(record, span)]

    def _crc_matches(self, record: ZipRecord, span: Span | None = None) -> bool:
        crc, nbytes = 0, 0
        for block in self._contents(record, span):
            crc, nbytes = zlib.crc32(block, crc), nbytes + len(block)
        return crc == record.crc and nbytes == record.nbytes

    def _contents(self, record: ZipRecord, span: Span | None = None) -> Iterator[bytes | memoryview]:
        """A record's bytes, inflated, in blocks; at most one byte more than the record declares."""
        blocks = self.source.blocks(span or self._span(record.place), _BLOCK)
        if record.method != DEFLATED:
            return blocks
        from ckptmove.io.inflate import inflate

        return inflate(blocks, record.nbytes + 1, _BLOCK)


def _is_word(name: str, record: ZipRecord) -> bool:
    """Whether a record is too short for a pickle, with the name of one that holds a word or a number."""
    return (name in KNOWN_RECORDS or name.startswith(".data/")) and record.nbytes <= _SHORT_TEXT_BYTES


def _one_segment(segment: Segment, nbytes: int, crc: int) -> NewRecord:
    from ckptmove.formats.zip_archive.layout import NewRecord

    return NewRecord((segment,), nbytes, crc)
