"""Open a file as the container of its format.

A format's module is imported when a file has that format, not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmove.errors import CkptMoveError, DistributedFile
from ckptmove.formats.sniff import examine
from ckptmove.io.source import open_source

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptmove.formats.contract import Container
    from ckptmove.formats.zip_archive.index import ZipDirectory
    from ckptmove.io.contracts import ByteSource
    from ckptmove.limits import Limits
    from ckptmove.model import ContainerName


def open_container(path: str, limits: Limits, source: ByteSource | None = None) -> Container:
    """Open a checkpoint that is one file. The caller closes the container's ``source``.

    Args:
        path: the file.
        limits: resource limits for reading it.
        source: its bytes, if the file is already open.

    Raises:
        MissingFile, AccessFailed: as :func:`ckptmove.io.source.open_source`.
        As :func:`container_of`.
    """
    source = open_source(path) if source is None else source
    try:
        return container_of(source, limits)
    except CkptMoveError:
        source.close()
        raise


def container_of(source: ByteSource, limits: Limits) -> Container:
    """Open a source as the container of its format.

    Raises:
        DistributedFile: if it is one file of a distributed checkpoint.
        UnsupportedContainer: if it has a dtype that torch lacks, or is an unsupported form of ``torch.export``.
        ArchiveOfFiles: if it is a zip or a tar of files, which may be checkpoints.
        AccessFailed, SourceChanged, NotACheckpoint, DamagedArchive, DamagedPickle, LimitExceeded: as the formats.
    """
    name, directory = examine(source, limits)
    if directory is not None and name != "dcp":
        return _zip_reader(name)(source, directory, limits)
    return _reader(name, source.path)(source, limits)


def _zip_reader(name: ContainerName) -> Callable[[ByteSource, ZipDirectory, Limits], Container]:
    if name == "torchscript":
        from ckptmove.formats.model_json import script_container

        return script_container
    if name == "torch-export":
        from ckptmove.formats.torch_export import TorchExport

        return TorchExport
    from ckptmove.formats.torch_zip import TorchZip

    return TorchZip


def _reader(name: ContainerName, path: str) -> Callable[[ByteSource, Limits], Container]:
    if name == "torch-legacy":
        from ckptmove.formats.torch_legacy import TorchLegacy

        return TorchLegacy
    if name == "torch-tar":
        from ckptmove.formats.torch_tar import TorchTar

        return TorchTar
    if name == "safetensors":
        from ckptmove.formats.safetensors_file import SafetensorsFile

        return SafetensorsFile
    if name == "pickle":
        from ckptmove.formats.bare_pickle import BarePickle

        return BarePickle
    raise DistributedFile(path)
