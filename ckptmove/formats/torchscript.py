"""Read and lay out the zip archive that ``torch.jit.save`` writes: code, and more pickles than ``torch.save``.

Code is never compiled, and its length is limited. Record names from torch/csrc/jit/serialization/export_module.cpp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

from ckptmove.errors import DamagedArchive, LimitExceeded
from ckptmove.formats.torch_zip import TorchZip
from ckptmove.model import ArchiveFact, Span
from ckptmove.pickles.script import PicklePart, interpret_parts, split_parts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptmove.formats.zip_archive.index import ZipDirectory, ZipRecord
    from ckptmove.formats.zip_archive.layout import NewRecord
    from ckptmove.io.contracts import ByteSource
    from ckptmove.limits import Limits
    from ckptmove.model import StorageRef
    from ckptmove.pickles.state import Machine


class _Pickle(NamedTuple):
    """A pickle next to ``data.pkl``: its record, the folder of its storages, and its attribute on the module."""

    record: str
    folder: str
    attribute: str = ""


#: The constants in the lite interpreter's bytecode repeat those of the module, with storages in the same folder; the
#: bytecode itself gives them no names. The inputs of a trace are examples, saved without their bytes.
_MORE_PICKLES: Final = (
    _Pickle("constants.pkl", "constants/", "CONSTANTS"),
    _Pickle("bytecode.pkl", "constants/"),
    _Pickle("traced_inputs.pkl", "traced_inputs/"),
)
_WITHOUT_BYTES: Final = "traced_inputs/"
_CODE: Final = "code/"


class TorchScript(TorchZip):
    """A module of ``torch.jit.save`` since 1.3, or of ``_save_for_lite_interpreter``.

    The archive holds only versions of the format, and none of torch.
    """

    name = "torchscript"
    #: The record that every archive of this format has.
    _main: ClassVar[str] = "data.pkl"
    _own_pickles = ("data.pkl", *(one.record for one in _MORE_PICKLES))

    def __init__(self, source: ByteSource, directory: ZipDirectory, limits: Limits) -> None:
        names = [name for name in directory.records.names() if name.partition("/")[2] == self._main]
        if len(names) != 1:
            raise DamagedArchive(source.path, f"it holds {self._main} {len(names)} times")
        super().__init__(source, directory, limits, names[0].removesuffix(self._main))
        if directory.shift:
            raise DamagedArchive(source.path, f"{directory.shift} unexpected bytes before its first record")
        self._more = tuple(one for one in _MORE_PICKLES if one.record in self._inside)
        for folder in {one.folder for one in self._more}:
            self._storages |= {f"{folder}{key}": record.place for key, record in self._within(folder).items()}

    def object_pickle(self) -> bytes:
        """The pickles of the module, its constants, its bytecode and the inputs of its trace, one after the other."""
        return b"".join(self._read(record, "pickle bytes") for record in self._pickles())

    def read_compact(self) -> Machine:
        return self.read()

    def read(self) -> Machine:
        """Interpret all pickles: the root of the returned machine is the module, with its constants as an attribute."""
        return interpret_parts(self.object_pickle(), self._parts(), self.limits)

    def _parts(self) -> tuple[PicklePart, ...]:
        """Spans of the pickles, the module's first."""
        found: list[PicklePart] = []
        end = 0
        for one, record in zip((_Pickle("data.pkl", ""), *self._more), self._pickles(), strict=True):
            begin, end = end, end + record.nbytes
            found.append(PicklePart(Span(begin, end), one.record, one.folder, one.attribute))
        return tuple(found)

    def code(self) -> Iterator[tuple[str, str]]:
        """Name and text of each code file in the archive."""
        files = [(name, record) for name, record in self._inside.items() if name.startswith(_CODE)]
        files = [(name, record) for name, record in files if name.endswith(".py")]
        nbytes, limit = sum(record.nbytes for _, record in files), self.limits.max_inflated_bytes(self.source.size)
        if nbytes > limit:
            raise LimitExceeded("code bytes", limit=limit, actual=nbytes, path=self.source.path)
        for name, record in files:
            yield name, self._read(record, "code bytes").decode("utf-8", "replace")

    def locate(self, storages: Sequence[StorageRef]) -> tuple[ArchiveFact, ...]:
        """Problems with the records of the storages, according to the directory, and with the local headers.

        torch writes no bytes for storages on ``meta`` and in the inputs of a trace.
        """
        bare = {one.key for one in storages if one.device == "meta" or one.key.startswith(_WITHOUT_BYTES)}
        names = {self._directory.records.name(place) for key, place in self._storages.items() if key in bare}
        facts = super().locate([one for one in storages if one.key not in bare])
        return tuple(fact for fact in facts if fact.kind != "orphan-record" or fact.record not in names)

    def _pickles(self) -> tuple[ZipRecord, ...]:
        return (self._inside["data.pkl"], *(self._inside[one.record] for one in self._more))

    def _pickle_records(self, pickle: bytes) -> dict[int, NewRecord]:
        """New records for the pickles that differ, by their places in the directory."""
        records = self._pickles()
        return {
            record.place: self._new(data)
            for record, data in zip(records, split_parts(pickle, len(records)), strict=True)
            if data != self._read(record, "pickle bytes")
        }
