"""The archive that ``torch.save`` writes since 1.6: a zip of one folder, ``data.pkl`` and a record a storage.

Never inflates more than a record says it holds, and never runs a pickle.

What else torch writes with the same writer is read from here: it has more pickles, and storages in more folders.

Record names from torch/serialization.py ``_save`` and caffe2/serialize/inline_container.cc.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Final

from ckptmove.cast import CAST_BLOCK, SHRINK, cast_blocks
from ckptmove.containers.contract import Container
from ckptmove.containers.zip_gaps import hidden_bytes
from ckptmove.containers.zip_index import DEFLATED, STORED, ZipDirectory, ZipRecord
from ckptmove.containers.zip_layout import LOCAL_BYTES, Layout, LocalHeaders, NewRecord
from ckptmove.contracts import BytesSegment, CastSegment, CheckedRange
from ckptmove.errors import CrcMismatch, DamagedArchive, LimitExceeded, NotACheckpoint
from ckptmove.model import ArchiveFact, Span

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ckptmove.contracts import ByteSource, Segment
    from ckptmove.model import ContainerName, Limits, StorageRef

#: torch's alignment where no ``.storage_alignment`` record says otherwise (``kFieldAlignment``).
_ALIGNMENT: Final = 64
#: An extra field's length has 16 bits: no larger alignment can be kept up.
_MAX_ALIGNMENT: Final = 1 << 15
#: The records beside the storages that this module reads hold a word or a number.
_WORD_BYTES: Final = 64
_BLOCK: Final = 1 << 20
#: Records that are read for what they say.
_KNOWN_RECORDS: Final = frozenset({
    "data.pkl", "byteorder", "version", ".storage_alignment", ".format_version", "constants.pkl", "bytecode.pkl",
    "traced_inputs.pkl", "model.json",
})  # fmt: skip
#: What a deflated record that is no storage may inflate to: 64 MiB, and a hundred times what it takes in the archive.
INFLATED_BYTES: Final = 1 << 26
INFLATED_RATIO: Final = 100
_CHECKPOINT_SUFFIXES: Final = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")


def object_folder(directory: ZipDirectory, path: str) -> str:
    """The folder of the archive that holds ``data.pkl``, with its slash.

    It is the stem that the file had when it was saved, whatever it is called now.

    Raises:
        NotACheckpoint: there is none.
        DamagedArchive: there are several.
    """
    names = [record.name for record in directory.records if record.name.endswith("/data.pkl")]
    folders = [name.removesuffix("data.pkl") for name in names if name.count("/") == 1]
    if len(folders) > 1:
        raise DamagedArchive(path, f"data.pkl stands in it {len(folders)} times")
    if not folders:
        # stable-baselines3 and others zip whole checkpoints.
        held = [record.name for record in directory.records if record.name.endswith(_CHECKPOINT_SUFFIXES)]
        more = f" and {len(held) - 1} more" if len(held) > 1 else ""
        raise NotACheckpoint(path, "a zip archive without data.pkl" + (f"; it holds {held[0]}{more}" if held else ""))
    return folders[0]


def _refuse_doubles(directory: ZipDirectory, path: str) -> None:
    """Refuse names that torch's reader, which folds the case of ASCII letters, could take for another record's."""
    seen: set[bytes] = set()
    for record in directory.records:
        folded = directory.raw_name(record).lower()
        if folded in seen:
            raise DamagedArchive(path, f"two of its records have the same name but for its case: {record.name.lower()}")
        seen.add(folded)
        own = record.name.lower().rpartition("/")[2]
        if own in _KNOWN_RECORDS and not record.name.endswith(own):
            raise DamagedArchive(path, f"record '{record.name}' would be taken for '{own}'")
        if b"\0" in folded:
            raise DamagedArchive(path, f"the name of record '{record.name}' goes on behind its end")


def _refuse_strays(directory: ZipDirectory, folder: str, path: str) -> None:
    """Refuse what torch's reader refuses: it takes the first record's folder for that of all.

    From caffe2/serialize/inline_container.cc ``PyTorchStreamReader::init`` and ``getAllRecords``.
    """
    stray = next((record.name for record in directory.records if not record.name.startswith(folder)), None)
    if stray is not None:
        raise DamagedArchive(path, f"record '{stray}' is not in the folder '{folder}' of the others: torch refuses it")


class TorchZip(Container):
    """A checkpoint of ``torch.save``.

    Attributes:
        name: ``torch-zip``.
        source: its bytes.
        byteorder: of the elements of its storages; ``little`` where no record says so, as torch takes it.
    """

    name: ContainerName = "torch-zip"

    def __init__(self, source: ByteSource, directory: ZipDirectory, limits: Limits, folder: str | None = None) -> None:
        """Look through the directory, and read what the archive says of itself.

        Args:
            source: the file.
            directory: its directory.
            limits: what it may ask for.
            folder: the folder of its records, with a slash; by default the one that holds ``data.pkl``.

        Raises:
            NotACheckpoint: it has no such folder.
            DamagedArchive: two records have one name, or its byte order is none.
        """
        folder = object_folder(directory, source.path) if folder is None else folder
        self.source = source
        self._directory = directory
        self.limits = limits
        self._headers = LocalHeaders(source, directory)
        _refuse_doubles(directory, source.path)
        _refuse_strays(directory, folder, source.path)
        #: By their names inside of the folder.
        self._inside = {
            record.name[len(folder) :]: record for record in directory.records if record.name.startswith(folder)
        }
        self._storages = self._within("data/")
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

    def locate(self, storages: Sequence[StorageRef]) -> tuple[ArchiveFact, ...]:
        """What is amiss with the records of the storages, seen from the directory, which says where they lie.

        Args:
            storages: every storage that the object pickle names.

        Raises:
            DamagedArchive: records share bytes.
        """
        found: list[ArchiveFact] = []
        for storage in storages:
            record = self._storages.get(storage.key)
            if record is None:
                found.append(ArchiveFact("missing-storage", storage.key, storage.nbytes))
            elif record.nbytes < storage.nbytes:
                found.append(ArchiveFact("short-storage", record.name, storage.nbytes - record.nbytes))
        used = {storage.key for storage in storages}
        for key, record in self._storages.items():
            if record.method != STORED:
                found.append(ArchiveFact("compressed-storage", record.name, record.nbytes))
            if key not in used:
                found.append(ArchiveFact("orphan-record", record.name, record.nbytes))
        for record in self._directory.records:
            past = record.header_offset + LOCAL_BYTES + record.stored_bytes - self._directory.start
            if past > 0:
                found.append(ArchiveFact("past-end", record.name, past))
        return (*found, *hidden_bytes(self._directory, self._headers, self._alignment, self.source.path))

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
        """The output with another object pickle in place of this one, all else as it is.

        Args:
            pickle: the new object pickle.
            casts: storages by key that change dtype: before and after. Each is read once here, for its CRC.

        Returns:
            Segments that make up the output from its first byte to its last; storages keep their alignment, deflated
            ones stay deflated.

        Raises:
            DamagedArchive: records overlap, or a storage to be cast has no bytes that could be.
        """
        for record in self._directory.records:
            if record.method == DEFLATED and record.crc and not self._sound(record):
                raise CrcMismatch(self.source.path, record.name)  # its bytes pass as they are, inflated by nobody
        new = dict(self._cast(key, *dtypes) for key, dtypes in casts.items())
        if casts or pickle != self.object_pickle():
            new |= self._pickle_records(pickle)
        layout = Layout(self.source, self._directory, self._alignment)
        return layout.build(new)

    def _pickle_records(self, pickle: bytes) -> dict[int, NewRecord]:
        """The records that hold a new object pickle, by their places in the directory."""
        return {self._inside["data.pkl"].place: self._new(pickle)}

    def _new(self, data: bytes) -> NewRecord:
        return NewRecord(BytesSegment(data), len(data), zlib.crc32(data) if self._summed else 0)

    def _cast(self, key: str, source: str, target: str) -> tuple[int, NewRecord]:
        record, span = self._storages.get(key), self.storage_span(key)
        if record is None or span is None:
            raise DamagedArchive(self.source.path, f"storage '{key}' has no plain bytes that could be cast")
        check = CheckedRange(span, record.crc, record.name) if record.crc else None
        segment = CastSegment(span, source, target, self.byteorder, check)
        crc = 0
        if self._summed:
            for block in cast_blocks(self.source.blocks(span, CAST_BLOCK), segment, self.source.path):
                crc = zlib.crc32(block, crc)
        return record.place, NewRecord(segment, span.nbytes // SHRINK, crc)

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
            limit = min(limit, INFLATED_BYTES + INFLATED_RATIO * record.stored_bytes)
        if record.nbytes > limit:
            raise LimitExceeded(resource, limit=limit, actual=record.nbytes, path=self.source.path)
        data = b"".join(bytes(block) for block in self._contents(record))
        if len(data) != record.nbytes or (record.crc and zlib.crc32(data) != record.crc):
            raise CrcMismatch(self.source.path, record.name)
        return data

    def _word(self, record: ZipRecord | None) -> str:
        """The text of a small record; empty where there is none, or it is no word."""
        if record is None or record.nbytes > _WORD_BYTES:
            return ""
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
        if record.method != DEFLATED:
            yield from blocks
            return
        inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        left = record.nbytes + 1
        for block in blocks:
            rest = bytes(block)
            # Once more without any input: the output of the last one may not have fitted.
            while left and not inflater.eof:
                try:
                    data = inflater.decompress(rest, min(left, _BLOCK))
                except zlib.error:
                    return
                if not data:
                    break
                left -= len(data)
                rest = inflater.unconsumed_tail
                yield data
