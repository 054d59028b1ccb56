"""Detect the format of a file from its bytes, and open the file as the container of its format.

File names are ignored: a dozen formats use ``.pt``, ``.bin`` and ``.ckpt``. The module of a format is imported when a
file has the format, not before.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.errors import ArchiveOfFiles, DamagedArchive, DistributedFile, NotACheckpoint
from ckptmove.formats.enclosed_pickle import BZIP2, GZIP, NUMPY, XZ, gunzipped, is_zlib, runs_inside
from ckptmove.formats.pickle_signature import HEAD_BYTES, is_pickle
from ckptmove.formats.tar_header import BLOCK, is_header
from ckptmove.formats.zip_archive.headers import LOCAL_SIGNATURE
from ckptmove.formats.zip_archive.index import END_BYTES, END_SIGNATURE, ZipDirectory, read_directory
from ckptmove.formats.zip_archive.names import export_form, object_folder
from ckptmove.limits import Limits

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptmove.formats.contract import Container
    from ckptmove.io.contracts import ByteSource

#: What :class:`NotACheckpoint` calls a file of ``numpy.save``.
NUMPY_ARRAY: Final = "a numpy array"
#: What it calls a file that begins with the end of a zip archive.
EMPTY_ZIP: Final = "an empty zip archive"
#: Signatures of formats that are not checkpoints.
_MAGIC: Final[tuple[tuple[bytes, str], ...]] = (
    (GZIP, "a gzip file"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"Rar!\x1a\x07", "a rar archive"),
    (BZIP2, "a bzip2 file"),
    (XZ, "an xz file"),
    (b"\x28\xb5\x2f\xfd", "a zstd file"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (NUMPY, NUMPY_ARRAY),
    (b"GGUF", "a GGUF file"),
    (b"PK\x05\x06", EMPTY_ZIP),
    (b"version https://git-lfs.github.com/spec/", "a git-lfs pointer"),
)
#: Those that may hold a pickle.
_ENCLOSING: Final = frozenset({"a gzip file", "a bzip2 file", "an xz file", "a zlib file", NUMPY_ARRAY})
#: torch/serialization.py ``MAGIC_NUMBER`` as LONG1 and STOP, and as text in protocols 0 and 1.
_LEGACY: Final = (b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", b"L119547037146038801333356L\n.")
_LEGACY_WITHIN: Final = 32
#: Module of the root class of ``.metadata``: its first name, after PROTO and FRAME at most.
_DISTRIBUTED: Final = b"torch.distributed.checkpoint.metadata"
_DISTRIBUTED_WITHIN: Final = 16
#: ``MAX_HEADER_SIZE`` of safetensors.
_MOST_HEADER_BYTES: Final = 100_000_000
#: Records of a TorchScript archive, next to ``code/``; ``model.json`` in version 1.0.
_SCRIPT_RECORDS: Final = frozenset({"constants.pkl", "model.json"})
#: The file identifier in torch/csrc/jit/serialization/mobile_bytecode.fbs; the offset of the root comes first.
_FLATBUFFER: Final = b"PTMF"
#: Place of the magic in the header of a tar since POSIX.
_TAR_MAGIC: Final = slice(257, 262)
# Compiled on first use, for a file of no known format.
_HTML: Final = rb"(?i)\s*<(!doctype html|html|head)\b"
#: The index that ``save_pretrained`` of transformers writes next to the shards: ``metadata``, then ``weight_map``.
_INDEX: Final = rb"(?s)\s*\{.*\"weight_map\"\s*:"
_CONTROL: Final = r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]"


class _Start(NamedTuple):
    """What the signatures of formats are compared with."""

    source: ByteSource  # bytes of the file
    limits: Limits  # resource limits for reading a zip or a tar archive
    head: bytes  # first bytes of the file; empty for a zip archive, whose directory decides
    directory: ZipDirectory | None  # central directory of a zip archive; None for any other file
    names: list[str]  # names of its records
    is_cut: bool  # whether `source` is only the start of the file


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
    name, directory = _examine(source, limits)
    if name == "dcp":
        raise DistributedFile(source.path)  # it is read with the sizes of the files that it names
    return container_class(name).open(source, directory, limits)


def recognise(source: ByteSource, *, is_cut: bool = False) -> str:
    """The name of the format of a file. The source may be the start of the file."""
    return _examine(source, Limits(), is_cut=is_cut)[0]


def _examine(source: ByteSource, limits: Limits, *, is_cut: bool = False) -> tuple[str, ZipDirectory | None]:
    """The name of the format of a file, and the directory of a zip archive."""
    if source.size == 0:
        raise NotACheckpoint(source.path, "an empty file")
    head = source.read(0, min(HEAD_BYTES, source.size))
    directory = read_directory(source, limits) if head.startswith(LOCAL_SIGNATURE) else None
    if directory is None:
        start = _Start(source, limits, head, None, [], is_cut)
        _refuse_others(start)
    else:
        start = _Start(source, limits, b"", directory, [*directory.records.names()], is_cut)
    name = next((name for name, matches in SIGNATURES.items() if matches(start)), None)
    if name is None:
        raise NotACheckpoint(source.path, _describe(head))
    return name, directory


def _refuse_others(start: _Start) -> None:
    """Raise NotACheckpoint if the file has the signature of another format, and is no pickle."""
    head, path = start.head, start.source.path
    found = next((found for magic, found in _MAGIC if head.startswith(magic)), None)
    if found is None and head[4:8] == _FLATBUFFER:
        found = "a mobile module in FlatBuffer form"
    if found is None and is_zlib(head):
        found = "a zlib file"
    if found is None or _is_pickle(start):
        return
    runs = None
    if found in _ENCLOSING:
        runs = runs_inside(start.source, head, start.limits, is_cut=start.is_cut)
    raise NotACheckpoint(path, f"a tar archive in {found}" if is_header(gunzipped(head, BLOCK) or b"") else found, runs)


def _is_torchscript(start: _Start) -> bool:
    """Whether the names in a zip's folder are those of a TorchScript archive, complete or not.

    ``code/`` alone is not enough: an archive of sources has it too.
    """
    if start.directory is None:
        return False
    names = start.names
    storages = names[0].partition("/")[0] + "/data/" if names else "/data/"
    inside = {name.partition("/")[2] for name in names if not name.startswith(storages)}
    return not _SCRIPT_RECORDS.isdisjoint(inside) or (
        "data.pkl" in inside and any(name.startswith("code/") for name in inside)
    )


def _is_torch_zip(start: _Start) -> bool:
    """Whether a zip is one archive of ``torch.save``; False for several in a row, as in a distributed checkpoint."""
    directory, path = start.directory, start.source.path
    if directory is None:
        return False
    object_folder(start.names, path)
    if directory.shift == 0:
        return True
    if not start.names[0].endswith("/data.pkl"):
        raise DamagedArchive(path, f"{directory.shift} unexpected bytes before its first record")
    # FileSystemWriter of torch.distributed.checkpoint appends one torch.save after the other: the archive before this
    # one ends where it starts. Otherwise it is the last whole member of a truncated archive.
    if not start.source.read(max(0, directory.shift - END_BYTES), directory.shift).startswith(END_SIGNATURE):
        raise DamagedArchive(path, "truncated: the central directory at its end is missing")
    return False


def _is_torch_tar(start: _Start) -> bool:
    if not (is_header(start.head) or start.head[_TAR_MAGIC] == b"ustar"):  # its header may be damaged
        return False
    from ckptmove.formats.tar_index import iterate_members
    from ckptmove.formats.torch_tar import MEMBERS

    first = next(iterate_members(start.source, start.limits), None)
    if first is not None and first.name.removeprefix("./") in MEMBERS:
        return True
    if _is_pickle(start):
        return False  # the name of its first member, to another reader
    raise ArchiveOfFiles(start.source.path, "a tar archive", "tar")


def _is_distributed(start: _Start) -> bool:
    if start.directory is not None:
        return True
    return 0 <= start.head.find(_DISTRIBUTED) < _DISTRIBUTED_WITHIN and _is_pickle(start)


def _is_pickle(start: _Start) -> bool:
    return is_pickle(start.source, start.head, is_cut=start.is_cut)


def _describe(head: bytes) -> str:
    if not head.strip(b"\0"):
        return "nothing but zero bytes"
    if re.match(_HTML, head):
        return "an HTML page"
    if re.match(_INDEX, head):
        return "an index of a model in several files"
    try:
        text = head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.reason != "unexpected end of data":
            return "bytes of no known format"
        text = head[: error.start].decode("utf-8")
    return "bytes of no known format" if re.search(_CONTROL, text) else "a text file"


#: Signature of each format, by its name, in the order of the comparison.
SIGNATURES: Final[dict[str, Callable[[_Start], bool]]] = {
    "torchscript": _is_torchscript,
    "torch-export": lambda start: start.directory is not None and export_form(start.names) is not None,
    "torch-zip": _is_torch_zip,
    "torch-tar": _is_torch_tar,
    "safetensors": lambda start: (
        start.head[8:9] == b"{" and int.from_bytes(start.head[:8], "little") <= _MOST_HEADER_BYTES
    ),
    "torch-legacy": lambda start: any(0 <= start.head.find(magic) < _LEGACY_WITHIN for magic in _LEGACY),
    "dcp": _is_distributed,
    "pickle": _is_pickle,
}
