"""The first bytes of a file: how many are compared with signatures, and whether they are the header of a tar."""

from __future__ import annotations

from typing import Final

#: First bytes of a file that its format is recognised by.
HEAD_BYTES: Final = 4096
#: Length of the header of a member of a tar. Every part of a tar is as long, or a multiple of it.
BLOCK: Final = 512
_CHECKSUM: Final = slice(148, 156)
#: What ``int`` ignores before a number, and the first bytes of a number: in octal digits, or in base 256.
_BLANK: Final = b" \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f"
_FIRST: Final = frozenset(b"01234567+\x80\xff")


def is_header(head: bytes) -> bool:
    """Whether a file that begins with these bytes begins with the header of a member of a tar.

    As in ``tarfile``, the magic of POSIX is not needed.
    """
    number = head[_CHECKSUM].lstrip(_BLANK)
    if not number or number[0] not in _FIRST:
        return False  # without an import: this is asked about every file
    import tarfile

    try:
        tarfile.TarInfo.frombuf(head[:BLOCK], "utf-8", "backslashreplace")
    except tarfile.HeaderError:
        return False
    return True
