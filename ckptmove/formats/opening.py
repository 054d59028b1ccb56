"""Open the container of a checkpoint file; the module of a format is imported when a file has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmove.errors import DistributedFile
from ckptmove.formats.sniff import examine

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptmove.formats.contract import Container
    from ckptmove.formats.zip_archive.index import ZipDirectory
    from ckptmove.io.contracts import ByteSource
    from ckptmove.limits import Limits
    from ckptmove.model import ContainerName


def container_of(source: ByteSource, limits: Limits) -> Container:
    """The container that the bytes are, opened.

    Raises:
        DistributedFile: a file that is not read alone.
        UnsupportedContainer: it has a dtype that torch lacks, or is a form of ``torch.export`` that is not read.
        ArchiveOfFiles: a zip or a tar of files, which may be checkpoints.
        AccessFailed, SourceChanged, NotACheckpoint, DamagedArchive, DamagedPickle, LimitExceeded: as they say.
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
