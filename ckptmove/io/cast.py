"""Cast elements to another floating dtype, one block at a time, as torch's ``Tensor.to`` does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.torch_facts.dtypes import COMPLEX_PARTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

#: Bytes of source elements to cast at a time; a multiple of every element size. The C library returns larger
#: arrays to the system after each use, and new pages cost more than the cast.
CAST_BLOCK: Final = 1 << 16


def cast_blocks(
    blocks: Iterable[bytes | memoryview],
    source: str,
    target: str,
    byteorder: str,
    overflowed: Callable[[int], None] | None = None,
) -> Iterator[bytes]:
    """Cast whole elements in blocks of any length.

    Values are rounded to nearest, ties to even. Values that are too large become infinite; float8_e4m3fn has no
    infinity, and they become its largest number, as in torch 2.13. ``overflowed`` is called for each block with values
    that overflow, with the number of finite values that were too large; a complex number counts as two values.
    """
    from ckptmove.io.floats import cast

    source, target = (COMPLEX_PARTS.get(dtype, dtype) for dtype in (source, target))
    order = "<" if byteorder == "little" else ">"
    for block in in_blocks(blocks, CAST_BLOCK):
        data, too_large = cast(block, source, target, order)
        if too_large and overflowed is not None:
            overflowed(too_large)
        yield data


def in_blocks(pieces: Iterable[bytes | memoryview], nbytes: int) -> Iterator[bytes | memoryview]:
    """Join and cut pieces into blocks of one length. A block is valid until the next one is taken."""
    held = b""
    for piece in pieces:
        start = min(nbytes - len(held), len(piece)) if held else 0
        held += piece[:start]
        if len(held) == nbytes:
            yield held
            held = b""
        whole = memoryview(piece)[start:]
        end = len(whole) - len(whole) % nbytes
        yield from (whole[at : at + nbytes] for at in range(0, end, nbytes))
        held += whole[end:]
    if held:
        yield held
