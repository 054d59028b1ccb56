"""Detect the format of a file that does not begin as a zip archive."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.errors import ArchiveOfFiles, NotACheckpoint
from ckptmove.formats.enclosed_pickle import BZIP2, GZIP, NUMPY, XZ, gunzipped, is_zlib, runs_inside
from ckptmove.formats.head import BLOCK, is_header
from ckptmove.formats.pickle_signature import is_pickle

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptmove.io.contracts import ByteSource
    from ckptmove.limits import Limits

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
    limits: Limits  # resource limits for reading a tar archive
    head: bytes  # first bytes of the file
    is_cut: bool  # whether `source` is only the start of the file


def format_of(source: ByteSource, head: bytes, limits: Limits, *, is_cut: bool = False) -> str:
    """The name of the format of a file with this head. The source may be the start of the file."""
    if source.size == 0:
        raise NotACheckpoint(source.path, "an empty file")
    start = _Start(source, limits, head, is_cut)
    _refuse_others(start)
    name = next((name for name, matches in SIGNATURES.items() if matches(start)), None)
    if name is None:
        raise NotACheckpoint(source.path, _describe(head))
    return name


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
    "torch-tar": _is_torch_tar,
    "safetensors": lambda start: (
        start.head[8:9] == b"{" and int.from_bytes(start.head[:8], "little") <= _MOST_HEADER_BYTES
    ),
    "torch-legacy": lambda start: any(0 <= start.head.find(magic) < _LEGACY_WITHIN for magic in _LEGACY),
    "dcp": _is_distributed,
    "pickle": _is_pickle,
}
