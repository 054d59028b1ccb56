"""Find the names that bytes would import if a loader read them as a pickle, a zip or a tar. No structure is trusted.

For bytes that a load of the checkpoint does not reach, that another reader could take for a checkpoint, or that are
damaged. Loaders are more lenient than the formats here: torch.load ignores CRCs, and most flags of a zip.
"""

from __future__ import annotations

import re
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.errors import CrcMismatch, DamagedArchive, DamagedPickle, LimitExceeded
from ckptmove.formats.bare_pickle import BarePickle
from ckptmove.formats.enclosed_pickle import NUMPY, of_objects
from ckptmove.formats.inflated import inflated
from ckptmove.formats.nested_streams import LOADER
from ckptmove.formats.pickle_outline import first_pickle, imports_nothing, may_be_pickle
from ckptmove.formats.tar_index import BLOCK, is_header, iterate_members
from ckptmove.formats.torch_legacy import MAGIC, TorchLegacy
from ckptmove.formats.torch_tar import TorchTar
from ckptmove.formats.zip_archive.headers import LOCAL, LOCAL_BYTES, LOCAL_SIGNATURE
from ckptmove.formats.zip_archive.index import DEFLATED
from ckptmove.formats.zip_archive.lenient import find_end, listed_headers
from ckptmove.io.part import MemorySource, PartSource
from ckptmove.model import Span
from ckptmove.pickles.state import Machine
from ckptmove.pickles.tensors import TensorReader

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from ckptmove.formats.contract import Container
    from ckptmove.formats.zip_archive.lenient import ListedHeader, ZipEnd
    from ckptmove.io.contracts import ByteSource
    from ckptmove.limits import Limits

#: Archives in archives that are read.
_DEPTH: Final = 2
#: Records that are read in all, and inflated bytes; headers that the directory does not list are searched for in this
#: number of bytes at both ends of a file.
_MOST_RECORDS: Final = 1 << 12
_MOST_INFLATED: Final = 1 << 27
_SEARCHED: Final = 1 << 25
_HEAD: Final = 1 << 12
_SMALL: Final = 1 << 22
#: Longest line in a pickle.
_LINE_BYTES: Final = 1 << 26
#: Records of storages: no loader unpickles them.
_STORAGE: Final = re.compile(r"(?:.*/)?(?:data|constants|tensors)/\d+")


class Salvage:
    """Reads bytes as every loader would.

    Attributes:
        machine: holds the names; of a damaged pickle, only the dangerous ones before the damage.
        found: what the first source is to a reader: ``a zip archive``, ``a tar archive``, ``a pickle`` with imports.
        unread: what was not read, because it is nested too deeply or too large, or is one of too many.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits._replace(string_bytes=min(limits.string_bytes, _LINE_BYTES))
        self._records = limits.factor * _MOST_RECORDS
        self._inflated = limits.factor * _MOST_INFLATED
        self.machine = Machine(b"", limits)
        self.found: list[str] = []
        self.unread: list[str] = []

    def read(self, source: ByteSource, name: str, depth: int = _DEPTH) -> None:
        """Note the names in a source.

        Args:
            source: the bytes.
            name: their name in ``unread``.
            depth: number of archives in each other to read.

        Raises:
            SourceChanged, AccessFailed: as the source.
        """
        head = source.read(0, min(_HEAD, source.size))
        end = find_end(source)
        is_zip, is_tar = end is not None or head.startswith(LOCAL_SIGNATURE), is_header(head[:BLOCK])
        if (is_zip or is_tar) and depth == 0:
            self.unread.append(name)
        else:
            if is_zip:
                self._read_all(self._zip_parts(source, end), name, depth - 1)
            if is_tar:
                self._read_all(self._tar_parts(source), name, depth - 1)
                self._read_as(TorchTar, source, name)
        known = self._known
        array = of_objects(source) if head.startswith(NUMPY) else None
        if array is not None:
            self._read_pickles(array, name)
        if not _imports_nothing(source) and may_be_pickle(head, source.size):
            self._read_pickles(source, name)
        if depth == _DEPTH:
            imports = self._known != known
            kinds = {"a zip archive": is_zip, "a tar archive": is_tar, "a pickle": imports}
            self.found = [kind for kind, is_one in kinds.items() if is_one]

    @property
    def _known(self) -> tuple[int, int, int]:
        return len(self.machine.globals), len(self.machine.runs), len(self.unread)

    def _read_all(self, parts: Iterator[tuple[ByteSource, str]], name: str, depth: int) -> None:
        for part, part_name in parts:
            if self._records == 0:
                self.unread.append(name)
                return
            self._records -= 1
            self.read(part, part_name, depth)

    def _read_pickles(self, source: ByteSource, name: str) -> None:
        """Note the names in the pickles from the start of a source on."""
        first = first_pickle(source, self._limits)
        self.machine.note_runs(first.runs)
        self.unread += [name] if first.is_too_large else []
        if first.machine is not None:
            form = TorchLegacy if first.machine.root == MAGIC else BarePickle
            has_more = first.rest or LOADER in first.machine.globals
            if not (has_more and self._read_as(form, source, name)):
                self.machine.note_names(first.machine)

    def _read_as(self, form: type[Container], source: ByteSource, name: str) -> bool:
        """Note the names in a file of a format, also in later pickles and in streams; return whether it is one."""
        try:
            container = form.open(source, None, self._limits)
            inner = container.read()
            for opened in container.opened:
                inner.globals.pop(opened, None)
                inner.runs.pop(opened, None)
            self.machine.note_names(inner)
            reader = TensorReader()
            reader.gather(inner.persistents)
            container.locate(reader.storages())
        except (DamagedArchive, DamagedPickle) as error:
            self.machine.note_runs(error.runs)
            return False
        except (CrcMismatch, LimitExceeded):
            self.unread.append(name)
            return False
        self.machine.note_names(inner)  # locating storages can add names
        return True

    def _tar_parts(self, source: ByteSource) -> Iterator[tuple[ByteSource, str]]:
        try:
            for member in iterate_members(source, self._limits):
                if member.kind == "file":
                    yield PartSource(source, member.span), member.name
        except (DamagedArchive, LimitExceeded):
            return  # other readers stop here too

    def _zip_parts(self, source: ByteSource, end: ZipEnd | None) -> Iterator[tuple[ByteSource, str]]:
        """The records of a zip, also inflated; storages are left out."""
        listed = {one.offset: one for one in listed_headers(source, end)} if end is not None else {}
        for offset in chain(listed, _local_headers(source, listed)):
            found = _record(source, offset, listed.get(offset))
            if found is None or _STORAGE.fullmatch(found.name):
                continue
            part = PartSource(source, found.span)
            yield part, found.name
            if found.is_deflated:
                data = self._inflate(part)
                if data:
                    yield MemorySource(source.path, data), found.name

    def _inflate(self, part: PartSource) -> bytes:
        data = inflated(part, self._inflated)
        self._inflated -= len(data)
        return data


def _imports_nothing(source: ByteSource) -> bool:
    """Whether a source is small, and its pickle imports nothing: a fast answer for the pickles of torch's C++ code."""
    return source.size <= _SMALL and imports_nothing(source.read(0, source.size))


class _Record(NamedTuple):
    """A record of a zip archive.

    Attributes:
        name: its name in its local header.
        span: its bytes as stored, up to the end of the file if their number is unknown.
        is_deflated: whether a reader could inflate them.
    """

    name: str
    span: Span
    is_deflated: bool


def _record(source: ByteSource, offset: int, listed: ListedHeader | None) -> _Record | None:
    """The record at a local header; None if there is none."""
    begin = offset + LOCAL_BYTES
    if not 0 <= offset <= source.size - LOCAL_BYTES:
        return None
    signature, _, _, method, _, _, _, stored, _, name_bytes, extra_bytes = LOCAL.unpack(source.read(offset, begin))
    start = begin + name_bytes + extra_bytes
    if signature != LOCAL_SIGNATURE or start > source.size:
        return None
    name = source.read(begin, begin + name_bytes).decode("utf-8", "backslashreplace")
    # torch reads what the directory says; a reader of streams, what the local header says, where 0 is unknown.
    nbytes = listed.stored_bytes if listed is not None else stored
    end = start + nbytes if 0 < nbytes <= source.size - start else source.size
    return _Record(name, Span(start, end), DEFLATED in {method, listed.method if listed is not None else method})


def _local_headers(source: ByteSource, known: Collection[int]) -> Iterator[int]:
    """Offsets of local headers that are not in the directory, near both ends of a file."""
    middle = max(_SEARCHED, source.size - _SEARCHED)
    for first, last in ((0, min(_SEARCHED, source.size)), (middle, source.size)):
        data = source.read(first, last) if first < last else b""
        at = data.find(LOCAL_SIGNATURE)
        while at >= 0:
            if first + at not in known:
                yield first + at
            at = data.find(LOCAL_SIGNATURE, at + 1)
