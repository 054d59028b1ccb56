"""The archive that ``torch.jit.save`` writes: the zip of ``torch.save`` with code, and more pickles than one.

Never compiles a line of the code, and never inflates more of it than a real module has.

Record names from torch/csrc/jit/serialization/export_module.cpp. The archives of ``torch.save`` have the same writer:
all but the pickles and the folders of the storages is as there.
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
    from ckptmove.model import ContainerName, StorageRef
    from ckptmove.pickles.state import Machine


class _Pickle(NamedTuple):
    """A pickle besides ``data.pkl``: its record, the folder of its storages, and its name on the module."""

    record: str
    folder: str
    attribute: str = ""


#: The lite interpreter's constants are those of the module once more, in the same folder; its own names for them are
#: instructions. The inputs of a trace are examples, saved without their bytes.
_MORE_PICKLES: Final = (
    _Pickle("constants.pkl", "constants/", "CONSTANTS"),
    _Pickle("bytecode.pkl", "constants/"),
    _Pickle("traced_inputs.pkl", "traced_inputs/"),
)
_WITHOUT_BYTES: Final = "traced_inputs/"
_CODE: Final = "code/"


def _folder_of(directory: ZipDirectory, record: str, path: str) -> str:
    """The folder of the archive that holds a record, with its slash.

    Raises:
        DamagedArchive: there is none, or there are several.
    """
    names = [one.name for one in directory.records if one.name.partition("/")[2] == record]
    if len(names) != 1:
        raise DamagedArchive(path, f"{record} stands in it {len(names)} times")
    return names[0].removesuffix(record)


class TorchScript(TorchZip):
    """A module of ``torch.jit.save`` since 1.3, or of ``_save_for_lite_interpreter``.

    Attributes:
        name: ``torchscript``.
        source: its bytes.
        byteorder: of the elements of its storages.
        torch_version: None: the archive holds versions of the format only.
    """

    name: ContainerName = "torchscript"
    is_torch_save = False
    is_mappable = False
    has_code = True
    loader = "torch.jit.load"
    weights_only = None
    not_weights_only = (
        "it is a TorchScript archive: weights-only mode reads none since torch 2.6, and torch.jit.load reads all"
    )
    #: The record that every archive of the kind has.
    _main: ClassVar[str] = "data.pkl"
    _own_pickles = ("data.pkl", *(one.record for one in _MORE_PICKLES))

    @classmethod
    def load_call(cls, file: str) -> str:
        """Python that loads a file on the CPU."""
        return f"torch.jit.load({file}, map_location='cpu'"

    def __init__(self, source: ByteSource, directory: ZipDirectory, limits: Limits) -> None:
        """Look through the directory.

        Raises:
            DamagedArchive: its main record is absent, or stands in it several times.
        """
        super().__init__(source, directory, limits, _folder_of(directory, self._main, source.path))
        if directory.shift:
            raise DamagedArchive(source.path, f"{directory.shift} bytes stand before its first record")
        self._more = tuple(one for one in _MORE_PICKLES if one.record in self._inside)
        for folder in {one.folder for one in self._more}:
            self._storages |= {f"{folder}{key}": record for key, record in self._within(folder).items()}

    def object_pickle(self) -> bytes:
        """The pickles of the module, of its constants, of its bytecode and of the inputs of its trace, in a row.

        Raises:
            LimitExceeded: one of them is larger than the limits allow.
            CrcMismatch: the bytes of one differ from their CRC, or cannot be inflated.
            DamagedArchive: the header of one is none, or it reaches into the directory.
        """
        return b"".join(self._read(record, "pickle bytes") for record in self._pickles())

    def read(self) -> Machine:
        """The machine that has read all of the pickles: its tree is the module, with its constants on it.

        Raises:
            DamagedPickle: one of them is no pickle.
            LimitExceeded: one of them asks for more than the limits allow.
            CrcMismatch: the bytes of one differ from their CRC, or cannot be inflated.
            DamagedArchive: the header of one is none, or it reaches into the directory.
        """
        return interpret_parts(self.object_pickle(), self._parts(), self.limits)

    def _parts(self) -> tuple[PicklePart, ...]:
        """Where each of the pickles is, that of the module first."""
        found: list[PicklePart] = []
        end = 0
        for one, record in zip((_Pickle("data.pkl", ""), *self._more), self._pickles(), strict=True):
            begin, end = end, end + record.nbytes
            found.append(PicklePart(Span(begin, end), one.record, one.folder, one.attribute))
        return tuple(found)

    def code(self) -> Iterator[tuple[str, str]]:
        """Each file of code, with its name inside of the archive.

        Raises:
            LimitExceeded: all together inflate to more than the limits allow.
            CrcMismatch: the bytes of one differ from their CRC, or cannot be inflated.
            DamagedArchive: the header of one is none, or it reaches into the directory.
        """
        files = [(name, record) for name, record in self._inside.items() if name.startswith(_CODE)]
        files = [(name, record) for name, record in files if name.endswith(".py")]
        nbytes, limit = sum(record.nbytes for _, record in files), self.limits.max_inflated_bytes(self.source.size)
        if nbytes > limit:
            raise LimitExceeded("code bytes", limit=limit, actual=nbytes, path=self.source.path)
        for name, record in files:
            yield name, self._read(record, "code bytes").decode("utf-8", "replace")

    def locate(self, storages: Sequence[StorageRef]) -> tuple[ArchiveFact, ...]:
        """What is amiss with the records of the storages, seen from the directory, which says where they lie.

        Args:
            storages: every storage that the pickles name. Of those on ``meta``, and of the inputs of a trace, torch
                writes no bytes.
        """
        bare = {one.key for one in storages if one.device == "meta" or one.key.startswith(_WITHOUT_BYTES)}
        names = {record.name for key, record in self._storages.items() if key in bare}
        facts = super().locate([one for one in storages if one.key not in bare])
        return tuple(fact for fact in facts if fact.kind != "orphan-record" or fact.record not in names)

    def _pickles(self) -> tuple[ZipRecord, ...]:
        return (self._inside["data.pkl"], *(self._inside[one.record] for one in self._more))

    def _pickle_records(self, pickle: bytes) -> dict[int, NewRecord]:
        """The records of the pickles that differ, by their places in the directory."""
        records = self._pickles()
        return {
            record.place: self._new(data)
            for record, data in zip(records, split_parts(pickle, len(records)), strict=True)
            if data != self._read(record, "pickle bytes")
        }
