"""The members of a tar archive: where the header and the bytes of each lie, and a header for bytes of another length.

Never reads the bytes of a member, never follows a link, and never makes a file of a name.

Formats as in POSIX.1-2008 (ustar and pax) and GNU tar. Python's ``tarfile`` reads the blocks, but not the archive: it
ends in silence at a header that is none, reads an extension of any size, and recurses from one to the next. Where two
readers could take one archive for two different things, it is refused here.
"""

from __future__ import annotations

import tarfile
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from ckptmove.errors import DamagedArchive, LimitExceeded
from ckptmove.model import Span

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from ckptmove.io.contracts import ByteSource
    from ckptmove.limits import Limits

TarKind: TypeAlias = Literal["file", "folder", "link", "symlink", "sparse", "other"]

BLOCK: Final = tarfile.BLOCKSIZE
#: Far more than the longest path of any system, and than what goes with it.
_MOST_EXTENSION_BYTES: Final = 1 << 20
_MOST_NAME_LETTERS: Final = 1 << 12
_SIZE: Final = slice(124, 136)
_CHECKSUM: Final = slice(148, 156)
_SPARSE_MORE: Final = 482
_SPARSE_NEXT_MORE: Final = 504
#: From this size on the octal digits of a header do not suffice.
_OCTAL_END: Final = 8**11
_BASE_256: Final = 0x80
#: Digits of the length that leads a pax record.
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
#: These have no bytes. Where their header states a size, some readers believe it and some do not.
_WITHOUT_BYTES: Final = (
    tarfile.DIRTYPE, tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE,
)  # fmt: skip


class TarMember(NamedTuple):
    """A member of the archive.

    Attributes:
        name: decoded, as written: it may be absolute, or lead out of a folder, or stand there twice.
        kind: ``file``, or what else it is: a ``link`` is a hard one, ``other`` a device, a pipe or an unknown type.
        header: its header, with the extensions of pax or GNU tar that lead it.
        span: its bytes as they are stored, without what fills up their last block.
    """

    name: str
    kind: TarKind
    header: Span
    span: Span


def read_members(source: ByteSource, limits: Limits) -> tuple[TarMember, ...]:
    """List the members, in the order of the archive.

    Arguments and errors as of :func:`iterate_members`.
    """
    return read_to_end(source, limits)[0]


def read_to_end(source: ByteSource, limits: Limits) -> tuple[tuple[TarMember, ...], int]:
    """List the members, and count what the end of the archive lacks.

    Two blocks of zeros end it, says POSIX. GNU tar warns where there is only one, and takes an archive without any for
    a whole one, as ``tarfile`` does: cut off between two members, it only looks shorter. One block is an end here.

    Arguments and errors as of :func:`iterate_members`.

    Returns:
        The members, and the number of bytes that are missing of a block of zeros behind them: 0 where it has one.
    """
    ends: list[int] = []

    def walk() -> Iterator[TarMember]:
        ends.append((yield from iterate_members(source, limits)))

    members = tuple(walk())
    return members, max(0, ends[0] + BLOCK - source.size)


def iterate_members(source: ByteSource, limits: Limits) -> Generator[TarMember, None, int]:
    """The members one by one, up to the first block of zeros or the end of the file; it returns where that is.

    Args:
        source: the archive, not compressed.
        limits: what it may ask for: ``entries`` bounds the number of members.

    Raises:
        DamagedArchive: a header is none, contradicts itself, or asks for more bytes than the file has.
        LimitExceeded: it has more members, or a longer header, than the limits allow.
        SourceChanged, AccessFailed: as the source.
    """
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
        raise DamagedArchive(source.path, f"the header at byte {start} has an extension, and no member")
    return position


def padded(nbytes: int) -> int:
    """The number of bytes in as many whole blocks as these bytes take."""
    return -(-nbytes // BLOCK) * BLOCK


def resized_header(header: bytes, nbytes: int) -> bytes:
    """The header of a member whose bytes have another length, all else as it was; the way back gives the old one.

    Args:
        header: the bytes of :attr:`TarMember.header`, of a member that is not sparse.
        nbytes: the new length.
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
    # What a pax record says counts; the field that it stands for is left at what its writer puts there.
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
        raise DamagedArchive(source.path, f"no header of a tar stands at byte {position}") from error
    if info.size < 0:
        raise DamagedArchive(source.path, f"the header at byte {position} states a size below zero")
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
    """What holds for all members is not a size or a name."""
    for keyword, _ in _records_of(source, data):
        if keyword in {b"size", b"path"} or keyword.startswith(b"GNU.sparse."):
            raise DamagedArchive(source.path, f"it gives all its members one {keyword.decode('ascii')}")


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
        raise DamagedArchive(source.path, f"the header at byte {header.start} has no name, or two, or one too long")
    if size and info.type in _WITHOUT_BYTES:
        raise DamagedArchive(source.path, f"member '{name:.80}' is a {kind}, and has a size")
    begin = _after_sparse_map(source, header.end) if info.type == tarfile.GNUTYPE_SPARSE else header.end
    if begin + padded(size) > source.size:
        raise DamagedArchive(source.path, f"it ends before the end of member '{name:.80}'")
    return TarMember(name, kind, Span(header.start, begin), Span(begin, begin + size))


def _decimal(source: ByteSource, value: bytes, header: Span) -> int:
    if not value.isdigit() or len(value) > _MOST_DIGITS:
        raise DamagedArchive(source.path, f"the header at byte {header.start} states a size that is no number")
    return int(value)


def _after_sparse_map(source: ByteSource, position: int) -> int:
    """Where the bytes of a member begin that lists its holes in more blocks than one, as old GNU tar does."""
    more = source.read(position - BLOCK, position)[_SPARSE_MORE]
    while more and position + BLOCK <= source.size:
        more = source.read(position, position + BLOCK)[_SPARSE_NEXT_MORE]
        position += BLOCK
    return position


def _records_of(source: ByteSource, data: bytes) -> list[tuple[bytes, bytes]]:
    try:
        return _pax_records(data)
    except ValueError as error:
        raise DamagedArchive(source.path, "a pax header in it has a record that is none") from error


def _pax_records(data: bytes) -> list[tuple[bytes, bytes]]:
    """The keywords and values of records ``LENGTH KEYWORD=VALUE``, each with its line feed.

    Raises:
        ValueError: they are not written so, or do not fill the header.
    """
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
    """A record, whose length counts its own digits."""
    body = b" " + keyword + b"=" + value + b"\n"
    nbytes = len(body)
    while nbytes != len(body) + len(b"%d" % nbytes):
        nbytes = len(body) + len(b"%d" % nbytes)
    return b"%d" % nbytes + body


def _resized_block(block: bytes, nbytes: int) -> bytes:
    """A header block with another size, and the checksum for it."""
    field = block[_SIZE]
    # GNU tar writes a size that octal digits can state as digits; other writers keep to what they began with.
    keeps_base = field[0] == _BASE_256 and int.from_bytes(field[1:], "big") < _OCTAL_END
    wide = nbytes >= _OCTAL_END or keeps_base
    size = bytes([_BASE_256]) + nbytes.to_bytes(len(field) - 1, "big") if wide else _octal(field, nbytes)
    block = block[: _SIZE.start] + size + block[_SIZE.stop :]
    blank = block[: _CHECKSUM.start] + b" " * len(block[_CHECKSUM]) + block[_CHECKSUM.stop :]
    return block[: _CHECKSUM.start] + _octal(block[_CHECKSUM], sum(blank)) + block[_CHECKSUM.stop :]


def _octal(field: bytes, value: int) -> bytes:
    """Octal digits in the style of those that they take the place of: what leads them, and what ends them."""
    body = field.rstrip(b"\0 ")
    digits = b"%o" % value
    if field[0] == _BASE_256 or len(digits) > len(body):
        return digits.rjust(len(field) - 1, b"0") + b"\0"
    return digits.rjust(len(body), b" " if body.startswith(b" ") else b"0") + field[len(body) :]
