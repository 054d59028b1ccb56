"""The archive that ``torch.save`` writes since 1.6: a zip of one folder, ``data.pkl`` and a record a storage.

Never inflates more than a record says it holds, and never runs a pickle.

What else torch writes with the same writer is read from here: it has more pickles, and storages in more folders.

Record names from torch/serialization.py ``_save`` and caffe2/serialize/inline_container.cc.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, ClassVar, Final, cast

from ckptmove.errors import CrcMismatch, DamagedArchive, LimitExceeded, NothingToUndo
from ckptmove.formats.contract import Container
from ckptmove.formats.zip_archive.append import append_records, original_directory, read_undo
from ckptmove.formats.zip_archive.gaps import hidden_bytes
from ckptmove.formats.zip_archive.index import DEFLATED, STORED, ZipDirectory, ZipRecord
from ckptmove.formats.zip_archive.layout import LOCAL_BYTES, Layout, LocalHeaders, NewRecord
from ckptmove.formats.zip_archive.names import (
    KNOWN_RECORDS,
    object_folder,
    refuse_doubles,
    refuse_obstacles,
    refuse_strays,
)
from ckptmove.io.cast import SHRINK
from ckptmove.io.changes import Patch
from ckptmove.io.contracts import BytesSegment, CastSegment, CheckedRange, InflateSegment
from ckptmove.io.inflate import inflate
from ckptmove.io.part import PartSource
from ckptmove.io.segments import blocks_of
from ckptmove.model import ArchiveFact, Span

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ckptmove.io.contracts import ByteSource, Segment
    from ckptmove.limits import Limits
    from ckptmove.model import ContainerName, StorageRef

#: torch's alignment where no ``.storage_alignment`` record says otherwise (``kFieldAlignment``).
_ALIGNMENT: Final = 64
#: An extra field's length has 16 bits: no larger alignment can be kept up.
_MAX_ALIGNMENT: Final = 1 << 15
#: Blocks of a file system that can share them between files, of what is worth it.
_FILE_BLOCK: Final = 4096
_SHARED_BYTES: Final = 1 << 20
#: The records beside the storages that this module reads hold a word or a number.
_WORD_BYTES: Final = 64
_BLOCK: Final = 1 << 20


class TorchZip(Container):
    """A checkpoint of ``torch.save``.

    Attributes:
        name: ``torch-zip``.
        source: its bytes.
        byteorder: of the elements of its storages; ``little`` where no record says so, as torch takes it.
    """

    name: ContainerName = "torch-zip"
    is_torch_save = True
    is_mappable = True
    #: What is read as data at once: where one of them is compressed, all together may ask for less.
    _own_pickles: ClassVar[tuple[str, ...]] = ("data.pkl",)

    @classmethod
    def open(cls, source: ByteSource, directory: ZipDirectory | None, limits: Limits) -> Container:
        """Open a file of this format."""
        return cls(source, cast("ZipDirectory", directory), limits)

    def __init__(self, source: ByteSource, directory: ZipDirectory, limits: Limits, folder: str | None = None) -> None:
        """Look through the directory, and read what the archive says of itself.

        Args:
            source: the file.
            directory: its directory.
            limits: what it may ask for.
            folder: the folder of its records, with a slash; by default the one that holds ``data.pkl``.

        Raises:
            ArchiveOfFiles: it has no such folder.
            DamagedArchive: two records have one name, one is encrypted, or its byte order is none.
        """
        folder = object_folder(directory, source.path) if folder is None else folder
        self.source = source
        self._directory = directory
        self._headers = LocalHeaders(source, directory)
        self._undo = read_undo(source, directory.start)
        refuse_doubles(directory, source.path)
        refuse_obstacles(directory, source.path)
        refuse_strays(directory, folder, source.path)
        #: By their names inside of the folder.
        self._inside = {
            record.name[len(folder) :]: record for record in directory.records if record.name.startswith(folder)
        }
        held = [self._inside[name] for name in self._own_pickles if name in self._inside]
        is_packed = any(record.method == DEFLATED for record in held)
        stored_bytes = sum(record.stored_bytes for record in held)
        self.limits = limits.for_packed(stored_bytes, len(held)) if is_packed else limits
        self._storages = self._within("data/")
        #: Bytes of each storage that a pickle names, by key.
        self._named: dict[str, int] = {}
        self._summed = any(record.crc for record in directory.records if record.nbytes)
        self.byteorder = self._word(self._inside.get("byteorder")) or "little"
        if self.byteorder not in {"little", "big"}:
            raise DamagedArchive(source.path, f"its byte order is '{self.byteorder}'")
        alignment = self._word(self._inside.get(".storage_alignment"))
        known = alignment.isdecimal() and 0 < int(alignment) <= _MAX_ALIGNMENT
        self._alignment = int(alignment) if known else _ALIGNMENT

    def object_pickle(self) -> bytes:
        """The pickle of the saved object.

        Raises:
            LimitExceeded: it is larger than the limits allow.
            CrcMismatch: its bytes differ from their CRC, or cannot be inflated.
            DamagedArchive: its header is not one, or it reaches into the directory.
        """
        return self._read(self._inside["data.pkl"], "pickle bytes")

    def extras(self) -> Iterator[tuple[str, bytes]]:
        """What lies in the archive besides pickles and storages: code, and files that somebody has put there.

        What every save writes anew is left out: versions, an identity, places in the source that code came from.
        """
        import hashlib  # noqa: PLC0415  # OpenSSL takes its time, and only a comparison asks

        storages = {record.name for record in self._storages.values()}
        for name, record in self._inside.items():
            own = record.name in storages or name in KNOWN_RECORDS or name.endswith((".debug_pkl", "/"))
            if not own and not name.startswith((".data/", "data/")):
                digest = hashlib.sha256()
                for block in self._contents(record):
                    digest.update(block)
                yield name, digest.digest()

    def locate(self, storages: Sequence[StorageRef]) -> tuple[ArchiveFact, ...]:
        """What is amiss with the records of the storages, seen from the directory, which says where they lie.

        Args:
            storages: every storage that the object pickle names.

        Raises:
            DamagedArchive: records share bytes, or a local header is not what the directory says.
        """
        found: list[ArchiveFact] = []
        for storage in storages:
            record = self._storages.get(storage.key)
            if record is None:
                found.append(ArchiveFact("missing-storage", storage.key, storage.nbytes))
            elif record.nbytes < storage.nbytes:
                found.append(ArchiveFact("short-storage", record.name, storage.nbytes - record.nbytes))
        self._named = {storage.key: storage.nbytes for storage in storages}
        for key, record in self._storages.items():
            if key not in self._named:
                found.append(ArchiveFact("orphan-record", record.name, record.nbytes))
            elif record.method != STORED:
                found.append(ArchiveFact("compressed-storage", record.name, record.nbytes))
        for record in self._directory.records:
            past = record.header_offset + LOCAL_BYTES + record.stored_bytes - self._directory.start
            if past > 0:
                found.append(ArchiveFact("past-end", record.name, past))
        if self._undo is not None:
            found.append(ArchiveFact("kept-for-undo", "what was added in place", self.source.size - self._undo.size))
        archive = self._original() or self  # what was added in place is accounted for
        found += hidden_bytes(archive._directory, archive._headers, archive._alignment, self.source.path)  # noqa: SLF001  # another of this class
        self._headers.check_all()
        return tuple(found)

    def storage_span(self, key: str) -> Span | None:
        """Where a storage's bytes lie in the source; None where it has none, or they are deflated.

        Raises:
            DamagedArchive: the record's header is not one, or the record reaches into the directory.
        """
        record = self._storages.get(key)
        if record is None or record.method != STORED:
            return None
        return self._span(record)

    def check(self) -> tuple[ArchiveFact, ...]:
        """Read every record and compare it with its CRC: one ``crc-mismatch`` for each that differs.

        A CRC of 0 stands for none: so ``torch.serialization.skip_data`` leaves those of the storages alone.

        Raises:
            DamagedArchive: a record's header is not one, or a record reaches into the directory.
        """
        return tuple(
            ArchiveFact("crc-mismatch", record.name, record.nbytes)
            for record in self._directory.records
            if record.crc and not self._sound(record)
        )

    def has_checksums(self) -> bool:
        """Whether the archive holds CRCs; ``torch.serialization.set_crc32_options(False)`` leaves them out."""
        return self._summed

    def lay_out(self, pickle: bytes, casts: Mapping[str, tuple[str, str]]) -> tuple[Segment, ...]:
        """The output with another object pickle in place of this one, and deflated storages stored; all else as it is.

        Args:
            pickle: the new object pickle.
            casts: storages by key that change dtype: before and after. Each is read once here, for its CRC.

        Returns:
            Segments that make up the output from its first byte to its last; storages keep their alignment, and those
            that were deflated get it: ``torch.load(mmap=True)`` takes any record for plain bytes.

        Raises:
            DamagedArchive: records overlap, or a storage to be cast has no bytes that could be.
            CrcMismatch: the bytes of a deflated record differ from their CRC, or cannot be inflated.
            LimitExceeded: a deflated storage says that it holds more than its tensors need, beyond measure.
        """
        original = self._original()
        if original is not None and (casts or pickle != self.object_pickle()):
            return original.lay_out(pickle, casts)  # a new file needs nothing of what is kept for an undo
        new = dict(self._inflated()) | dict(self._cast(key, *dtypes) for key, dtypes in casts.items())
        alignment = self._alignment if new else self._shared_alignment()
        for record in self._directory.records:
            if record.method == DEFLATED and record.crc and record.place not in new and not self._sound(record):
                raise CrcMismatch(self.source.path, record.name)  # its bytes pass as they are, inflated by nobody
        if casts or pickle != self.object_pickle():
            new |= self._pickle_records(pickle)
        return Layout(self.source, self._directory, alignment).build(new)

    def _shared_alignment(self) -> int:
        """What storages move by a multiple of where none of them changes: by whole blocks, if they are large.

        From copy_file_range(2) and ioctl_ficlonerange(2): blocks are shared where both places are at the start of one.
        """
        if _FILE_BLOCK % self._alignment or sum(one.stored_bytes for one in self._storages.values()) < _SHARED_BYTES:
            return self._alignment
        return _FILE_BLOCK

    def patch(self, pickle: bytes) -> Patch:
        """The new pickle and a directory that points to it, behind the archive as it was when it was never converted.

        What an earlier conversion in place has left there is replaced, so that the file does not grow with each.

        Args:
            pickle: the new object pickle.

        Raises:
            DamagedArchive: a header does not belong to its record.
        """
        archive = self._original() or self
        new = archive._pickle_records(pickle) if pickle != archive.object_pickle() else {}  # noqa: SLF001  # of its own kind
        size = archive.source.size
        tail = append_records(archive.source, archive._directory, self._alignment, new) if new else b""  # noqa: SLF001  # of this class
        return Patch(((size, tail),) if new else (), size + len(tail), can_undo=bool(new))

    def undo(self) -> Patch:
        """The archive without what conversions in place have left behind it: nothing before that was ever touched.

        Raises:
            NothingToUndo: there is no such thing, or the archive before it has changed since.
        """
        if self._undo is None:
            # Who adds a record puts it where the directory was: right behind the undo record.
            if any(read_undo(self.source, record.header_offset) for record in self._directory.records):
                raise NothingToUndo(self.source.path, "another program has added to the file since it was converted")
            raise NothingToUndo(self.source.path)
        if self._original() is None:
            raise NothingToUndo(self.source.path, "what it was has been written over since")
        return Patch((), self._undo.size)

    def _original(self) -> TorchZip | None:
        """The archive before its first conversion in place; None where there was none, or it cannot be known."""
        undo = self._undo
        if undo is None or any(record.header_offset >= undo.size for record in self._storages.values()):
            return None
        found = original_directory(self.source, self._directory, undo, self.limits)
        if found is None:
            return None
        archive = type(self)(PartSource(self.source, Span(0, undo.size)), found, self.limits)
        archive._undo = None  # noqa: SLF001  # of its own kind; what it was before that, if anything, is nobody's
        return archive

    def _pickle_records(self, pickle: bytes) -> dict[int, NewRecord]:
        """The records that hold a new object pickle, by their places in the directory."""
        return {self._inside["data.pkl"].place: self._new(pickle)}

    def _new(self, data: bytes) -> NewRecord:
        return NewRecord((BytesSegment(data),), len(data), zlib.crc32(data) if self._summed else 0)

    def _inflated(self) -> Iterator[tuple[int, NewRecord]]:
        """The deflated storages that the pickle names, stored, by their places in the directory."""
        for key, nbytes in self._named.items():
            record = self._storages.get(key)
            if record is not None and record.method == DEFLATED:
                limit = max(nbytes, self.limits.max_inflated_bytes(record.stored_bytes))
                if record.nbytes > limit:
                    raise LimitExceeded("storage bytes", limit=limit, actual=record.nbytes, path=self.source.path)
                yield record.place, NewRecord((self._packed(record),), record.nbytes, record.crc)

    def _packed(self, record: ZipRecord) -> InflateSegment:
        return InflateSegment(self._span(record), record.nbytes, record.crc, record.name)

    def _cast(self, key: str, source: str, target: str) -> tuple[int, NewRecord]:
        record, path = self._storages.get(key), self.source.path
        if record is None:
            raise DamagedArchive(path, f"storage '{key}' has no bytes that could be cast")
        span, packed = self._span(record), self._packed(record) if record.method == DEFLATED else None
        check = CheckedRange(span, record.crc, record.name) if record.crc and packed is None else None
        segment = CastSegment(span, source, target, self.byteorder, check, packed)
        crc = 0
        for block in blocks_of(self.source, (segment,)) if self._summed else ():
            crc = zlib.crc32(block, crc)
        return record.place, NewRecord((segment,), segment.nbytes // SHRINK, crc)

    def _within(self, folder: str) -> dict[str, ZipRecord]:
        """The records in a folder, by their names there."""
        return {
            name[len(folder) :]: record
            for name, record in self._inside.items()
            if name.startswith(folder) and not name.endswith("/")
        }

    def _read(self, record: ZipRecord, resource: str) -> bytes:
        """All of a record that is no storage."""
        limit = self.limits.pickle_bytes
        if record.method == DEFLATED:
            limit = min(limit, self.limits.max_inflated_bytes(record.stored_bytes))
        if record.nbytes > limit:
            raise LimitExceeded(resource, limit=limit, actual=record.nbytes, path=self.source.path)
        data = b"".join(bytes(block) for block in self._contents(record))
        if len(data) != record.nbytes or (record.crc and zlib.crc32(data) != record.crc):
            raise CrcMismatch(self.source.path, record.name)
        return data

    def _word(self, record: ZipRecord | None) -> str:
        """The text of a small record, and of a larger one its size; empty where there is none."""
        if record is None or record.nbytes > _WORD_BYTES:
            return "" if record is None else f"{record.nbytes} bytes"
        return b"".join(bytes(block) for block in self._contents(record)).decode("ascii", "replace").strip()

    def _span(self, record: ZipRecord) -> Span:
        start = self._headers.read(record).data_start
        return Span(start, start + record.stored_bytes)

    def _sound(self, record: ZipRecord) -> bool:
        crc, nbytes = 0, 0
        for block in self._contents(record):
            crc, nbytes = zlib.crc32(block, crc), nbytes + len(block)
        return crc == record.crc and nbytes == record.nbytes

    def _contents(self, record: ZipRecord) -> Iterator[bytes | memoryview]:
        """A record's bytes, inflated, in blocks: as many as there are, at most one more than it says."""
        blocks = self.source.blocks(self._span(record), _BLOCK)
        return inflate(blocks, record.nbytes + 1, _BLOCK) if record.method == DEFLATED else blocks
