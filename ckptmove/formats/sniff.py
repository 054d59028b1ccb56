"""Detect the format of a file from its bytes.

File names are ignored: a dozen formats use ``.pt``, ``.bin`` and ``.ckpt``.
"""

from __future__ import annotations

import re
import zlib
from io import BytesIO
from typing import TYPE_CHECKING, Final

from ckptmove.errors import ArchiveOfFiles, DamagedArchive, NotACheckpoint
from ckptmove.formats.zip_archive.index import END_BYTES, END_SIGNATURE, ZipDirectory, read_directory
from ckptmove.formats.zip_archive.names import export_form, object_folder
from ckptmove.limits import Limits

if TYPE_CHECKING:
    from ckptmove.io.contracts import ByteSource
    from ckptmove.model import ContainerName

_HEAD: Final = 4096
#: Signatures of formats that are not checkpoints.
_MAGIC: Final[tuple[tuple[bytes, str], ...]] = (
    (b"\x1f\x8b", "a gzip file"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"Rar!\x1a\x07", "a rar archive"),
    (b"BZh", "a bzip2 file"),
    (b"\xfd7zXZ\x00", "an xz file"),
    (b"\x28\xb5\x2f\xfd", "a zstd file"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (b"\x93NUMPY", "a numpy array"),
    (b"GGUF", "a GGUF file"),
    (b"PK\x05\x06", "an empty zip archive"),
    (b"version https://git-lfs.github.com/spec/", "a git-lfs pointer"),
)
#: torch/serialization.py ``MAGIC_NUMBER`` as LONG1 and STOP, and as text in protocols 0 and 1.
_LEGACY: Final = (b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", b"L119547037146038801333356L\n.")
_LEGACY_WITHIN: Final = 32
#: Module of the root class of ``.metadata``: its first name, after PROTO and FRAME at most.
_DISTRIBUTED: Final = b"torch.distributed.checkpoint.metadata"
_DISTRIBUTED_WITHIN: Final = 16
#: PROTO and its argument, written since protocol 2.
_NEW_PICKLE: Final = tuple(b"\x80" + bytes([protocol]) for protocol in range(2, 6))
#: First opcodes of a pickle of protocol 0 or 1 whose root is a container or an object.
_OLD_PICKLE: Final = (b"(", b"}", b"]", b")", b"c")
#: ``MAX_HEADER_SIZE`` of safetensors.
_MOST_HEADER_BYTES: Final = 100_000_000
#: Records of a TorchScript archive, next to ``code/``; ``model.json`` in version 1.0.
_SCRIPT_RECORDS: Final = frozenset({"constants.pkl", "model.json"})
#: The file identifier in torch/csrc/jit/serialization/mobile_bytecode.fbs; the offset of the root comes first.
_FLATBUFFER: Final = b"PTMF"
#: ``wbits`` that makes zlib read the gzip format; and the length of a tar header.
_GZIP: Final = 16 + zlib.MAX_WBITS
_TAR_HEADER: Final = 512
#: Each member costs a copy of the bytes after it.
_GZIP_MEMBERS: Final = 64
_HTML: Final = re.compile(rb"\s*<(!doctype html|html|head)\b", re.IGNORECASE)
#: The index that ``save_pretrained`` of transformers writes next to the shards: ``metadata``, then ``weight_map``.
_INDEX: Final = re.compile(rb"\s*\{.*\"weight_map\"\s*:", re.DOTALL)
_CONTROL: Final = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")


def recognise(source: ByteSource) -> ContainerName:
    """The format of the file.

    Raises:
        ArchiveOfFiles: if it is a zip or a tar of files, which may be checkpoints.
        NotACheckpoint: if it is something else; the error names it.
        DamagedArchive: if it starts as a zip archive but does not end as one.
        SourceChanged, AccessFailed: as the source.
    """
    return examine(source, Limits())[0]


def examine(source: ByteSource, limits: Limits) -> tuple[ContainerName, ZipDirectory | None]:
    """The format of the file, and the directory of a zip archive.

    Args:
        source: bytes of the file.
        limits: resource limits for reading a zip or a tar archive.

    Raises:
        LimitExceeded: if the archive needs more than the limits allow.
        As :func:`recognise`.
    """
    if source.size == 0:
        raise NotACheckpoint(source.path, "an empty file")
    head = source.read(0, min(_HEAD, source.size))
    if head.startswith(b"PK\x03\x04"):
        directory = read_directory(source, limits)
        return _zip_kind(directory, source), directory
    found = next((found for magic, found in _MAGIC if head.startswith(magic)), None)
    if found is not None:
        raise NotACheckpoint(source.path, f"a tar archive in {found}" if _is_tar_in_gzip(head) else found)
    if head[4:8] == _FLATBUFFER:
        raise NotACheckpoint(source.path, "a mobile module in FlatBuffer form")
    if head[257:262] == b"ustar":
        from ckptmove.formats.tar_index import iterate_members  # noqa: PLC0415  # used for tars only
        from ckptmove.formats.torch_tar import MEMBERS  # noqa: PLC0415  # used for tars only

        first = next(iterate_members(source, limits), None)
        if first is not None and first.name.removeprefix("./") in MEMBERS:
            return "torch-tar", None
        raise ArchiveOfFiles(source.path, "a tar archive", "tar")
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= _MOST_HEADER_BYTES:
        return "safetensors", None
    if any(0 <= head.find(magic) < _LEGACY_WITHIN for magic in _LEGACY):
        return "torch-legacy", None
    if _is_pickle(head, source):
        return "dcp" if 0 <= head.find(_DISTRIBUTED) < _DISTRIBUTED_WITHIN else "pickle", None
    raise NotACheckpoint(source.path, _describe(head))


def gunzipped(data: bytes, most: int) -> bytes | None:
    """The first bytes of a gzip file, decompressed; None if it is not a gzip file.

    Members in a row count as one file, as in every gzip reader. Only the first 64 members are decompressed.

    Args:
        data: the start of the file; a member may be cut off.
        most: maximum length of the result, in bytes.
    """
    found = b""
    for _ in range(_GZIP_MEMBERS):
        member = zlib.decompressobj(_GZIP)
        try:
            found += member.decompress(data, most - len(found))
        except zlib.error:
            return found or None
        data = member.unused_data
        if not data or len(found) == most:
            break
    return found


def _is_tar_in_gzip(head: bytes) -> bool:
    """Whether a file with this head is a tar archive compressed with gzip."""
    return (gunzipped(head, _TAR_HEADER) or b"")[257:262] == b"ustar"


def _zip_kind(directory: ZipDirectory, source: ByteSource) -> ContainerName:
    path = source.path
    first = directory.records[0].name if directory.records else ""
    storages = first.partition("/")[0] + "/data/"
    others = [record.name for record in directory.records if not record.name.startswith(storages)]
    if _is_script({name.partition("/")[2] for name in others}):
        return "torchscript"
    if export_form(directory) is not None:
        return "torch-export"
    object_folder(directory, path)
    if directory.shift == 0:
        return "torch-zip"
    if first.endswith("/data.pkl"):
        # FileSystemWriter of torch.distributed.checkpoint appends one torch.save after the other: the archive before
        # this one ends where it starts. Otherwise it is the last whole member of a truncated archive.
        if source.read(max(0, directory.shift - END_BYTES), directory.shift).startswith(END_SIGNATURE):
            return "dcp"
        raise DamagedArchive(path, "truncated: the central directory at its end is missing")
    raise DamagedArchive(path, f"{directory.shift} unexpected bytes before its first record")


def _is_script(inside: set[str]) -> bool:
    """Whether the names in a zip's folder are those of a TorchScript archive, complete or not.

    ``code/`` alone is not enough: an archive of sources has it too.
    """
    return not _SCRIPT_RECORDS.isdisjoint(inside) or (
        "data.pkl" in inside and any(name.startswith("code/") for name in inside)
    )


def _is_pickle(head: bytes, source: ByteSource) -> bool:
    if head.startswith(_NEW_PICKLE):
        return True
    if not head.startswith(_OLD_PICKLE) or source.read(source.size - 1, source.size) != b".":
        return False
    import pickletools  # noqa: PLC0415  # used for protocols 0 and 1 only

    stream = BytesIO(head)
    try:
        for opcode, _, _ in pickletools.genops(stream):
            if opcode.proto > 1:
                return False
    except ValueError:
        # Only the head of a longer pickle was read: its opcodes must be valid up to the end of the head.
        return source.size > len(head) and stream.tell() == len(head)
    return True


def _describe(head: bytes) -> str:
    if not head.strip(b"\0"):
        return "nothing but zero bytes"
    if _HTML.match(head):
        return "an HTML page"
    if _INDEX.match(head):
        return "an index of a model in several files"
    try:
        text = head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.reason != "unexpected end of data":
            return "bytes of no known format"
        text = head[: error.start].decode("utf-8")
    return "bytes of no known format" if _CONTROL.search(text) else "a text file"
