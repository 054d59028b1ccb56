"""Inflate a record of a zip archive that may be a pickle or an archive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.formats.head import HEAD_BYTES, is_header
from ckptmove.formats.pickle_signature import may_be_pickle
from ckptmove.formats.zip_archive.headers import LOCAL_SIGNATURE
from ckptmove.io.inflate import inflate
from ckptmove.model import Span

if TYPE_CHECKING:
    from ckptmove.io.part import PartSource

_SMALL: Final = 1 << 14
_BLOCK: Final = 1 << 16


def inflated(part: PartSource, most: int) -> bytes:
    """The content of a deflated record, up to a number of bytes; empty if it is large and of no interest."""

    def first(nbytes: int) -> bytes:
        return b"".join(inflate(part.blocks(Span(0, part.size), _BLOCK), nbytes, _BLOCK))

    if part.size <= _SMALL:
        return first(most)
    head = first(HEAD_BYTES)
    size = len(head) + (len(head) == HEAD_BYTES)  # there may be more
    is_archive = head.startswith(LOCAL_SIGNATURE) or is_header(head)
    return first(most) if is_archive or may_be_pickle(head, size) else b""
