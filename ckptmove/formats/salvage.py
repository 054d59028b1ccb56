"""Find the names that bytes would import if a loader read them as a pickle, a zip or a tar. No structure is trusted.

For bytes that a load of the checkpoint does not reach, that another reader could take for a checkpoint, or that are
damaged. Loaders are more lenient than the formats here: torch.load ignores CRCs, and most flags of a zip.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from ckptmove.errors import CrcMismatch, DamagedArchive, DamagedPickle, LimitExceeded
from ckptmove.formats.bare_pickle import BarePickle
from ckptmove.formats.enclosed_pickle import NUMPY, of_objects
from ckptmove.formats.head import HEAD_BYTES, is_header
from ckptmove.formats.inflated import inflated
from ckptmove.formats.nested_streams import LOADER
from ckptmove.formats.pickle_outline import first_pickle
from ckptmove.formats.pickle_signature import imports_nothing, may_be_pickle, names_of
from ckptmove.formats.tar_index import iterate_members
from ckptmove.formats.torch_legacy import MAGIC, TorchLegacy
from ckptmove.formats.torch_tar import TorchTar
from ckptmove.formats.zip_archive.headers import LOCAL_SIGNATURE
from ckptmove.formats.zip_archive.lenient import find_end, find_records
from ckptmove.io.part import MemorySource, PartSource
from ckptmove.pickles.state import Machine
from ckptmove.pickles.tensors import TensorReader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.formats.contract import Container
    from ckptmove.formats.zip_archive.lenient import ZipEnd
    from ckptmove.io.contracts import ByteSource
    from ckptmove.limits import Limits

#: Archives in archives that are read.
_DEPTH: Final = 2
#: Records that are read in all, and inflated bytes.
_MOST_RECORDS: Final = 1 << 12
_MOST_INFLATED: Final = 1 << 27
_SMALL: Final = 1 << 22
#: Longest line in a pickle.
_LINE_BYTES: Final = 1 << 26
#: Records of storages: no loader unpickles them.
_STORAGE: Final = re.compile(r"(?:.*/)?(?:data|constants|tensors)/\d+")


class Salvage:
    """Reads bytes as every loader would."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits._replace(string_bytes=min(limits.string_bytes, _LINE_BYTES))
        self._records = limits.factor * _MOST_RECORDS
        self._inflated = limits.factor * _MOST_INFLATED
        #: Holds the names; of a damaged pickle, only the dangerous ones before the damage.
        self.machine = Machine(b"", limits)
        #: What the sources are to a reader: ``a zip archive``, ``a tar archive``, ``a pickle`` with imports.
        self.found: dict[str, None] = {}
        #: Name and size of what was not read, because it is nested too deeply or too large, or is one of too many. The
        #: name of a record begins with those of the archives around it.
        self.unread: dict[str, int] = {}

    def read(self, source: ByteSource, name: str) -> None:
        """Note the names in a source, and what it is; it has this name in ``unread``."""
        self.found |= self._read(source, name, _DEPTH)

    def _read(self, source: ByteSource, name: str, depth: int) -> dict[str, None]:
        """Note the names in a source, with this number of archives in each other; return what it is."""
        head = source.read(0, min(HEAD_BYTES, source.size))
        end = find_end(source)
        is_zip, is_tar = end is not None or head.startswith(LOCAL_SIGNATURE), is_header(head)
        if (is_zip or is_tar) and depth == 0:
            self.unread[name] = source.size
        else:
            if is_zip:
                self._read_all(self._zip_parts(source, end, depth - 1), source, name)
            if is_tar:
                self._read_all(self._tar_parts(source, depth - 1), source, name)
                self._read_as(TorchTar, source, name)
        imports = self._reads_pickles(source, head, name)
        kinds = {"a zip archive": is_zip, "a tar archive": is_tar, "a pickle": imports}
        return {kind: None for kind, is_one in kinds.items() if is_one}

    @property
    def _known(self) -> tuple[int, int, int]:
        return len(self.machine.globals), len(self.machine.runs), len(self.unread)

    def _read_all(self, parts: Iterator[tuple[ByteSource, str, int | None]], source: ByteSource, name: str) -> None:
        """Note the names in the parts of an archive: their bytes, names and depths; None for the depth of a pickle."""
        for part, part_name, depth in parts:
            if self._records == 0:
                self.unread[name] = source.size
                return
            self._records -= 1
            path = f"{name}/{part_name}"
            if depth is not None:
                self._read(part, path, depth)
            else:
                self._reads_pickles(part, part.read(0, min(HEAD_BYTES, part.size)), path)

    def _reads_pickles(self, source: ByteSource, head: bytes, name: str) -> bool:
        """Note the names in the pickles from the start of a source on; return whether there are any."""
        known = self._known
        array = of_objects(source) if head.startswith(NUMPY) else None
        if array is not None:
            self._read_pickles(array, name)
        # A fast answer for the small pickles of torch's C++ code.
        is_small = not source.is_remote and source.size <= _SMALL
        if not (is_small and imports_nothing(source.read(0, source.size))) and may_be_pickle(head, source.size):
            self._read_pickles(source, name)
        return self._known != known

    def _read_pickles(self, source: ByteSource, name: str) -> None:
        first = first_pickle(source, self._limits)
        self.machine.note_runs(names_of(first.runs))
        if first.is_too_large:
            self.unread[name] = source.size
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
            self.unread[name] = source.size
            return False
        self.machine.note_names(inner)  # locating storages can add names
        return True

    def _tar_parts(self, source: ByteSource, depth: int) -> Iterator[tuple[ByteSource, str, int]]:
        try:
            for member in iterate_members(source, self._limits):
                if member.kind == "file":
                    yield PartSource(source, member.span), member.name, depth
        except (DamagedArchive, LimitExceeded):
            return  # other readers stop here too

    def _zip_parts(
        self, source: ByteSource, end: ZipEnd | None, depth: int
    ) -> Iterator[tuple[ByteSource, str, int | None]]:
        """The records of a zip, also inflated; storages are left out.

        Those inside of another record are read as pickles alone: as archives they are read with that record.
        """
        for record in find_records(source, end):
            if _STORAGE.fullmatch(record.name):
                continue
            part, own_depth = PartSource(source, record.span), None if record.is_inside else depth
            yield part, record.name, own_depth
            if record.is_deflated:
                data = inflated(part, self._inflated)
                self._inflated -= len(data)
                if data:
                    yield MemorySource(source.path, data), record.name, own_depth
