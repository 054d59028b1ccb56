"""List the members of a tar archive with the spans of their headers and bytes, and resize a header.

Members are not read, links are not followed, and names are not used as paths.

Formats as in POSIX.1-2008 (ustar and pax) and GNU tar. Python's ``tarfile`` parses only the blocks here: its reader of
archives ends silently at an invalid header, reads an extension of any size, and recurses from one extension to the
next. An archive that two readers could understand differently is an error here.
"""

from __future__ import annotations

import tarfile
from posixpath import dirname, join, normpath
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from ckptmove.errors import DamagedArchive, LimitExceeded
from ckptmove.formats.head import BLOCK
from ckptmove.model import Span

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping

    from ckptmove.io.contracts import ByteSource
    from ckptmove.limits import Limits

TarKind: TypeAlias = Literal["file", "folder", "link", "symlink", "sparse", "other"]

#: Far more than the longest path of any system and its attributes.
_MOST_EXTENSION_BYTES: Final = 1 << 20
_MOST_NAME_LETTERS: Final = 1 << 12
_SIZE: Final = slice(124, 136)
_CHECKSUM: Final = slice(148, 156)
_SPARSE_MORE: Final = 482
_SPARSE_NEXT_MORE: Final = 504
#: First size that does not fit into the octal digits of a header.
_OCTAL_END: Final = 8**11
_BASE_256: Final = 0x80
#: Maximum digits of the length of a pax record.
_MOST_DIGITS: Final = 20
_PAX: Final = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_EXTENSIONS: Final = (*_PAX, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XGLTYPE)
_KINDS: Final[dict[bytes, TarKind]] = {
    tarfile.REGTYPE: "file",
    tarfile.AREGTYPE: "file",
    tarfile.CONTTYPE: "file",
    tarfile.DIRTYPE: "folder",
    tarfile.LNKTYPE: "link",
    tarfile.SYMTYPE: "symlink",
    tarfile.GNUTYPE_SPARSE: "sparse",
}
#: Types without bytes. If their header has a size, some readers use it and some ignore it.
_WITHOUT_BYTES: Final = (
    tarfile.DIRTYPE, tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE,
)  # fmt: skip


class TarMember(NamedTuple):
    """A member of the archive."""

    name: str  # decoded, as written: it may be absolute, contain `..`, or occur twice
    kind: TarKind  # `file`, or the type of another member: `link` is a hard link, `other` a device, a pipe or unknown
    header: Span  # its header, with the extensions of pax or GNU tar before it
    span: Span  # its bytes as stored, without the padding of the last block
    target: str  # of a link, the path in the archive that it leads to; else empty
    mode: int  # its permission bits


def read_members(source: ByteSource, limits: Limits) -> tuple[TarMember, ...]:
    """List the members in the order of the archive."""
    return read_to_end(source, limits)[0]


def read_to_end(source: ByteSource, limits: Limits) -> tuple[tuple[TarMember, ...], int]:
    """List the members, and check the end of the archive.

    POSIX ends an archive with two blocks of zeros. GNU tar warns if there is only one, and accepts an archive without
    any, as ``tarfile`` does: an archive cut off between two members only looks shorter. One block is an end here.

    Returns the members, and the number of bytes missing from the block of zeros after them.
    """
    ends: list[int] = []

    def walk() -> Iterator[TarMember]:
        ends.append((yield from iterate_members(source, limits)))

    members = tuple(walk())
    return members, max(0, ends[0] + BLOCK - source.size)


def iterate_members(source: ByteSource, limits: Limits) -> Generator[TarMember, None, int]:
    """Iterate over the members up to the first block of zeros or the end of the file; return its offset."""
    extensions: dict[bytes, bytes] = {}
    start = position = count = 0
    while (info := _read_header(source, position)) is not None:
        if info.type in _EXTENSIONS:
            data = _read_extension(source, position, info)
            position += BLOCK + padded(len(data))
            if info.type == tarfile.XGLTYPE and not extensions:
                _check_global(source, data)
                start = position
            elif info.type == tarfile.XGLTYPE or info.type in extensions:
                raise DamagedArchive(source.path, f"the header at byte {start} has two extensions of one kind")
            else:
                extensions[info.type] = data
            continue
        count += 1
        if count > limits.entries:
            raise LimitExceeded("members of a tar", limit=limits.entries, actual=count, path=source.path)
        member = _member(source, info, Span(start, position + BLOCK), extensions)
        yield member
        start = position = padded(member.span.end)
        extensions = {}
    if extensions:
        raise DamagedArchive(source.path, f"the header at byte {start} has an extension, but no member")
    return position


def padded(nbytes: int) -> int:
    """A number of bytes, rounded up to whole blocks."""
    return -(-nbytes // BLOCK) * BLOCK


def resized_header(header: bytes, nbytes: int) -> bytes:
    """The header of a member with a new length; everything else unchanged. Restoring the length restores the header.

    Args:
        header: the bytes of :attr:`TarMember.header`, of a member that is not sparse.
    """
    pieces: list[bytes] = []
    position, in_pax = 0, False
    while position < len(header) - BLOCK:
        block = header[position : position + BLOCK]
        info = _parse(block)
        begin, position = position + BLOCK, position + BLOCK + padded(info.size)
        data = header[begin : begin + info.size]
        records = _pax_records(data) if info.type in _PAX else []
        if any(keyword == b"size" for keyword, _ in records):
            in_pax = True
            data = b"".join(_pax_record(key, b"%d" % nbytes if key == b"size" else value) for key, value in records)
            pieces += _resized_block(block, len(data)), data.ljust(padded(len(data)), b"\0")
        else:
            pieces.append(header[begin - BLOCK : position])
    main = header[-BLOCK:]
    # A pax record overrides the size field, which keeps the value of its writer.
    return b"".join(pieces) + (main if in_pax else _resized_block(main, nbytes))


# --- reading ---------------------------------------------------------------------------------------------------------


def _read_header(source: ByteSource, position: int) -> tarfile.TarInfo | None:
    """The header in the block at a position, or None at the end of the archive."""
    block = source.read(position, min(position + BLOCK, source.size))
    if not block.strip(b"\0"):
        return None
    try:
        info = _parse(block)
    except tarfile.HeaderError as error:
        raise DamagedArchive(source.path, f"no valid tar header at byte {position}") from error
    if info.size < 0:
        raise DamagedArchive(source.path, f"the header at byte {position} has a negative size")
    return info


def _parse(block: bytes) -> tarfile.TarInfo:
    return tarfile.TarInfo.frombuf(block, "utf-8", "backslashreplace")


def _read_extension(source: ByteSource, position: int, info: tarfile.TarInfo) -> bytes:
    if info.size > _MOST_EXTENSION_BYTES:
        resource = "the size of a tar's header in bytes"
        raise LimitExceeded(resource, limit=_MOST_EXTENSION_BYTES, actual=info.size, path=source.path, is_fixed=True)
    begin = position + BLOCK
    if begin + padded(info.size) > source.size:
        raise DamagedArchive(source.path, f"it ends within the header at byte {position}")
    return source.read(begin, begin + info.size)


def _check_global(source: ByteSource, data: bytes) -> None:
    """Raise DamagedArchive if a pax header for all members has a size or a name."""
    for keyword, _ in _records_of(source, data):
        if keyword in {b"size", b"path"} or keyword.startswith(b"GNU.sparse."):
            raise DamagedArchive(source.path, f"it has one {keyword.decode('ascii')} for all members")


def _member(source: ByteSource, info: tarfile.TarInfo, header: Span, extensions: dict[bytes, bytes]) -> TarMember:
    name, size, kind = info.name, info.size, _KINDS.get(info.type, "other")
    long_name = extensions.get(tarfile.GNUTYPE_LONGNAME)
    if long_name is not None:
        name = long_name.partition(b"\0")[0].decode("utf-8", "backslashreplace")
    pax = [record for code in _PAX for record in _records_of(source, extensions.get(code, b""))]
    for keyword, value in pax:
        if keyword == b"path":
            name = value.decode("utf-8", "backslashreplace").rstrip("/")
        elif keyword == b"size":
            size = _decimal(source, value, header)
        elif keyword.startswith(b"GNU.sparse."):
            kind = "sparse"
    if kind == "folder":
        name = name.rstrip("/")
    if "\0" in name or len(name) > _MOST_NAME_LETTERS or (long_name is not None and dict(pax).keys() & {b"path"}):
        raise DamagedArchive(source.path, f"the header at byte {header.start} has an invalid name, or two names")
    if size and info.type in _WITHOUT_BYTES:
        raise DamagedArchive(source.path, f"member '{name:.80}' is a {kind}, but has a size")
    begin = _after_sparse_map(source, header.end) if info.type == tarfile.GNUTYPE_SPARSE else header.end
    if begin + padded(size) > source.size:
        raise DamagedArchive(source.path, f"it ends before the end of member '{name:.80}'")
    target = _target(info, name, extensions)
    return TarMember(name, kind, Span(header.start, begin), Span(begin, begin + size), target, info.mode)


def _target(info: tarfile.TarInfo, name: str, extensions: Mapping[bytes, bytes]) -> str:
    """Path in the archive that a link leads to; empty for another member."""
    if info.type not in {tarfile.LNKTYPE, tarfile.SYMTYPE}:
        return ""
    long_link = extensions.get(tarfile.GNUTYPE_LONGLINK, b"").partition(b"\0")[0]
    pax = dict(record for code in _PAX for record in _pax_records(extensions.get(code, b"")))
    text = (pax.get(b"linkpath") or long_link).decode("utf-8", "backslashreplace") or info.linkname
    return normpath(join(dirname(name), text) if info.type == tarfile.SYMTYPE else text)


def _decimal(source: ByteSource, value: bytes, header: Span) -> int:
    if not value.isdigit() or len(value) > _MOST_DIGITS:
        raise DamagedArchive(source.path, f"the header at byte {header.start} has a size that is not a number")
    return int(value)


def _after_sparse_map(source: ByteSource, position: int) -> int:
    """Offset of the bytes of a sparse member, after the blocks that list its holes (old GNU tar)."""
    more = source.read(position - BLOCK, position)[_SPARSE_MORE]
    while more and position + BLOCK <= source.size:
        more = source.read(position, position + BLOCK)[_SPARSE_NEXT_MORE]
        position += BLOCK
    return position


def _records_of(source: ByteSource, data: bytes) -> list[tuple[bytes, bytes]]:
    try:
        return _pax_records(data)
    except ValueError as error:
        raise DamagedArchive(source.path, "a pax header in it has an invalid record") from error


def _pax_records(data: bytes) -> list[tuple[bytes, bytes]]:
    """Keywords and values of records ``LENGTH KEYWORD=VALUE``, each ended by a line feed."""
    records: list[tuple[bytes, bytes]] = []
    position = 0
    while position < len(data):
        digits = data[position : position + _MOST_DIGITS].partition(b" ")[0]
        end = position + int(digits) if digits.isdigit() else 0
        keyword, equals, value = data[position + len(digits) + 1 : end].partition(b"=")
        if not (position < end <= len(data) and keyword and equals and value.endswith(b"\n")):
            raise ValueError(position)
        records.append((keyword, value[:-1]))
        position = end
    return records


# --- writing ---------------------------------------------------------------------------------------------------------


def _pax_record(keyword: bytes, value: bytes) -> bytes:
    """A record; its length counts its own digits."""
    body = b" " + keyword + b"=" + value + b"\n"
    nbytes = len(body)
    while nbytes != len(body) + len(b"%d" % nbytes):
        nbytes = len(body) + len(b"%d" % nbytes)
    return b"%d" % nbytes + body


def _resized_block(block: bytes, nbytes: int) -> bytes:
    """A header block with another size, and its checksum."""
    field = block[_SIZE]
    # GNU tar writes a size in octal digits if it fits; other writers keep the form they started with.
    keeps_base = field[0] == _BASE_256 and int.from_bytes(field[1:], "big") < _OCTAL_END
    wide = nbytes >= _OCTAL_END or keeps_base
    size = bytes([_BASE_256]) + nbytes.to_bytes(len(field) - 1, "big") if wide else _octal(field, nbytes)
    block = block[: _SIZE.start] + size + block[_SIZE.stop :]
    blank = block[: _CHECKSUM.start] + b" " * len(block[_CHECKSUM]) + block[_CHECKSUM.stop :]
    return block[: _CHECKSUM.start] + _octal(block[_CHECKSUM], sum(blank)) + block[_CHECKSUM.stop :]


def _octal(field: bytes, value: int) -> bytes:
    """Octal digits with the same leading and trailing characters as the field had."""
    body = field.rstrip(b"\0 ")
    digits = b"%o" % value
    if field[0] == _BASE_256 or len(digits) > len(body):
        return digits.rjust(len(field) - 1, b"0") + b"\0"
    return digits.rjust(len(body), b" " if body.startswith(b" ") else b"0") + field[len(body) :]
