"""Open a file as the container of its format, which its bytes tell and not its name.

File names are ignored: a dozen formats use ``.pt``, ``.bin`` and ``.ckpt``. The module of a format is imported when a
file has the format, not before.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

from ckptmove.errors import DamagedArchive, DistributedFile
from ckptmove.formats.head import HEAD_BYTES
from ckptmove.formats.zip_archive.headers import LOCAL_SIGNATURE
from ckptmove.formats.zip_archive.index import END_BYTES, END_SIGNATURE, read_directory
from ckptmove.formats.zip_archive.names import export_form, object_folder
from ckptmove.limits import Limits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.formats.contract import Container
    from ckptmove.formats.zip_archive.index import ZipDirectory
    from ckptmove.io.contracts import ByteSource

#: Records of a TorchScript archive, next to ``code/``; ``model.json`` in version 1.0.
_SCRIPT_RECORDS: Final = frozenset({"constants.pkl", "model.json"})


@cache
def container_class(name: str) -> type[Container]:  # noqa: PLR0911  # one import for each format
    """The class of a format."""
    if name == "torch-zip":
        from ckptmove.formats.torch_zip import TorchZip

        return TorchZip
    if name == "torch-legacy":
        from ckptmove.formats.torch_legacy import TorchLegacy

        return TorchLegacy
    if name == "torch-tar":
        from ckptmove.formats.torch_tar import TorchTar

        return TorchTar
    if name == "torchscript":
        from ckptmove.formats.model_json import ModelJson

        return ModelJson  # its `open` returns a TorchScript where there is no model.json
    if name == "torch-export":
        from ckptmove.formats.torch_export import TorchExport

        return TorchExport
    if name == "safetensors":
        from ckptmove.formats.safetensors_file import SafetensorsFile

        return SafetensorsFile
    from ckptmove.formats.bare_pickle import BarePickle

    return BarePickle


def container_of(source: ByteSource, limits: Limits) -> Container:
    """Open a source as the container of its format."""
    head = source.read(0, min(HEAD_BYTES, source.size))
    if head.startswith(LOCAL_SIGNATURE):
        directory = read_directory(source, limits)
        name = _zip_format(directory, source)
    else:
        from ckptmove.formats.signatures import format_of

        directory, name = None, format_of(source, head, limits)
    if name == "dcp":
        raise DistributedFile(source.path)  # it is read with the sizes of the files that it names
    return container_class(name).open(source, directory, limits)


def recognise(source: ByteSource, *, is_cut: bool = False) -> str:
    """The name of the format of a file. The source may be the start of the file."""
    head = source.read(0, min(HEAD_BYTES, source.size))
    if head.startswith(LOCAL_SIGNATURE):
        return _zip_format(read_directory(source, Limits()), source)
    from ckptmove.formats.signatures import format_of

    return format_of(source, head, Limits(), is_cut=is_cut)


def _zip_format(directory: ZipDirectory, source: ByteSource) -> str:
    """The name of the format of a zip archive: the names of its records decide."""
    names = [*directory.records.names()]
    if _is_torchscript(names):
        return "torchscript"
    if export_form(names) is not None:
        return "torch-export"
    return "torch-zip" if _is_one_save(directory, names, source) else "dcp"


def _is_torchscript(names: Sequence[str]) -> bool:
    """Whether the names in a zip's folder are those of a TorchScript archive, complete or not.

    ``code/`` alone is not enough: an archive of sources has it too.
    """
    storages = names[0].partition("/")[0] + "/data/" if names else "/data/"
    inside = {name.partition("/")[2] for name in names if not name.startswith(storages)}
    return not _SCRIPT_RECORDS.isdisjoint(inside) or (
        "data.pkl" in inside and any(name.startswith("code/") for name in inside)
    )


def _is_one_save(directory: ZipDirectory, names: Sequence[str], source: ByteSource) -> bool:
    """Whether a zip is one archive of ``torch.save``; False for several in a row, as in a distributed checkpoint."""
    path = source.path
    object_folder(names, path)
    if directory.shift == 0:
        return True
    if not names[0].endswith("/data.pkl"):
        raise DamagedArchive(path, f"{directory.shift} unexpected bytes before its first record")
    # FileSystemWriter of torch.distributed.checkpoint appends one torch.save after the other: the archive before this
    # one ends where it starts. Otherwise it is the last whole member of a truncated archive.
    if not source.read(max(0, directory.shift - END_BYTES), directory.shift).startswith(END_SIGNATURE):
        raise DamagedArchive(path, "truncated: the central directory at its end is missing")
    return False
