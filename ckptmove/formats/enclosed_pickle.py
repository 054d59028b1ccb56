"""Find a pickle inside another file: in a numpy array of objects, or in a compressed file."""

from __future__ import annotations

import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from ckptmove.errors import DamagedArchive, DamagedPickle
from ckptmove.formats.head import HEAD_BYTES
from ckptmove.formats.pickle_signature import is_pickle
from ckptmove.io.part import MemorySource, PartSource
from ckptmove.model import Span

if TYPE_CHECKING:
    from ckptmove.io.contracts import ByteSource
    from ckptmove.limits import Limits

GZIP: Final = b"\x1f\x8b"
BZIP2: Final = b"BZh"
XZ: Final = b"\xfd7zXZ\x00"
NUMPY: Final = b"\x93NUMPY"
#: First byte of zlib's format with its usual window. The first two bytes are a multiple of 31.
_ZLIB: Final = 0x78
_ZLIB_CHECK: Final = 31
#: ``wbits`` that makes zlib read the gzip format.
_GZIP_BITS: Final = 16 + zlib.MAX_WBITS
#: Each member costs a copy of the bytes after it.
_GZIP_MEMBERS: Final = 64
#: Bytes of a compressed file that are decompressed, and bytes that they may become.
_LOOK: Final = 1 << 18
#: A dictionary of xz takes up to 4 GiB of memory; its own presets need 64 MiB.
_XZ_MEMORY: Final = 1 << 26


def is_zlib(head: bytes) -> bool:
    """Whether a file with this head is in zlib's format, which has no signature."""
    is_so = head[:1] == bytes([_ZLIB]) and int.from_bytes(head[:2], "big") % _ZLIB_CHECK == 0
    return is_so and bool(decompressed(head, HEAD_BYTES))


def gunzipped(data: bytes, most: int) -> bytes | None:
    """The first bytes of a gzip file, decompressed; None if it is not a gzip file.

    Members in a row count as one file, as in every gzip reader. Only the first 64 members are decompressed, the last of
    which may be cut off.
    """
    found = b""
    for _ in range(_GZIP_MEMBERS):
        member = zlib.decompressobj(_GZIP_BITS)
        try:
            found += member.decompress(data, most - len(found))
        except zlib.error:
            return found or None
        data = member.unused_data
        if not data or len(found) == most:
            break
    return found


def decompressed(data: bytes, most: int) -> bytes:
    """The first bytes of a gzip, bzip2, xz or zlib file, decompressed; empty if it is damaged, or another file."""
    if data.startswith(GZIP):
        return gunzipped(data, most) or b""
    if data.startswith(BZIP2):
        with suppress(ImportError, OSError):  # some builds of Python lack the module
            import bz2

            return bz2.BZ2Decompressor().decompress(data, most)
    elif data.startswith(XZ):
        with suppress(ImportError):
            import lzma

            with suppress(lzma.LZMAError):
                return lzma.LZMADecompressor(lzma.FORMAT_XZ, _XZ_MEMORY).decompress(data, most)
    else:
        with suppress(zlib.error):
            return zlib.decompressobj().decompress(data, most)
    return b""


def runs_inside(source: ByteSource, head: bytes, limits: Limits, *, is_cut: bool) -> tuple[str, ...] | None:
    """The dangerous names in the pickle inside a file; None without a pickle. The source may be the start of the file.

    The pickle of an array is read whole, and only the start of a compressed one.
    """
    inner: ByteSource | None
    if head.startswith(NUMPY):
        inner = of_objects(source)
    else:
        data = decompressed(source.read(0, min(_LOOK, source.size)), _LOOK)
        inner, is_cut = MemorySource(source.path, data), is_cut or _LOOK in {len(data), min(_LOOK, source.size)}
    if (
        inner is None
        or not inner.size
        or not is_pickle(inner, inner.read(0, min(HEAD_BYTES, inner.size)), is_cut=is_cut)
    ):
        return None
    from ckptmove.formats.bare_pickle import BarePickle

    try:
        return (*BarePickle(inner, limits).read().runs,)
    except (DamagedArchive, DamagedPickle) as error:
        return error.runs


def of_objects(source: ByteSource) -> ByteSource | None:
    """What follows the header of a numpy array of objects; None for another array. From numpy/lib/_format_impl.py."""
    width = 2 if source.read(6, min(7, source.size)) == b"\x01" else 4
    begin = 8 + width
    if source.size < begin:
        return None
    start = begin + int.from_bytes(source.read(8, begin), "little")
    if start >= source.size:
        return None
    # The dtype of objects is O or object. The header is Python, in which any letter can be an escape.
    is_of_objects = any(mark in source.read(begin, start) for mark in (b"O", b"object", b"\\"))
    return PartSource(source, Span(start, source.size)) if is_of_objects else None
