"""Open a file as the container of its format.

A format's module is imported when a file has that format, not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmove.formats.sniff import examine

if TYPE_CHECKING:
    from ckptmove.formats.contract import Container
    from ckptmove.io.contracts import ByteSource
    from ckptmove.limits import Limits
    from ckptmove.model import ContainerName


def container_of(source: ByteSource, limits: Limits) -> Container:
    """Open a source as the container of its format.

    Raises:
        DistributedFile: if it is one file of a distributed checkpoint.
        UnsupportedContainer: if it has a dtype that torch lacks, or is an unsupported form of ``torch.export``.
        ArchiveOfFiles: if it is a zip or a tar of files, which may be checkpoints.
        AccessFailed, SourceChanged, NotACheckpoint, DamagedArchive, DamagedPickle, LimitExceeded: as the formats.
    """
    name, directory = examine(source, limits)
    return container_class(name).open(source, directory, limits)


def container_class(name: ContainerName) -> type[Container]:  # noqa: PLR0911  # one import for each format
    """The class of a format, with its properties; of a directory or an archive of files, the base class."""
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
    if name == "pickle":
        from ckptmove.formats.bare_pickle import BarePickle

        return BarePickle
    if name == "dcp":
        from ckptmove.formats.dcp.checkpoint import DistributedCheckpoint

        return DistributedCheckpoint
    from ckptmove.formats.contract import Container

    return Container
