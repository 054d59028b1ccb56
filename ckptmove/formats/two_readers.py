"""Find what another reader would see in the file of a checkpoint: a pickle at its start, an archive at its end.

``torch.load`` looks for a zip at the start, then for a tar, then for a pickle. ``torch.jit.load`` and ``zipfile`` look
for a zip from the end. ``pickle.load``, ``tarfile`` and safetensors look at the start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.formats.zip_archive.headers import LOCAL_SIGNATURE
from ckptmove.formats.zip_archive.lenient import find_end
from ckptmove.io.part import PartSource
from ckptmove.model import Span
from ckptmove.text import some

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.formats.contract import Container
    from ckptmove.formats.salvage import Salvage
    from ckptmove.io.contracts import ByteSource

_HEAD: Final = 1 << 12
_BLOCK: Final = 1 << 16
#: Bytes of a run of stray bytes in which headers of records are searched for.
_SEARCHED: Final = 1 << 25
#: The checksum in the header of a tar, and the first bytes of a number that is not written in octal digits.
_CHECKSUM: Final = slice(148, 156)
_TAR_HEADER: Final = 512
_BASE_256: Final = (b"\x80", b"\xff")
#: Formats that begin with a pickle, and the other formats that are no zip.
_PICKLES: Final = frozenset({"pickle", "torch-legacy", "dcp"})
_OTHERS: Final = frozenset({"safetensors", "torch-tar"})


class Reading(NamedTuple):
    """What another reader sees.

    Attributes:
        what: a noun phrase: ``a pickle at its start``.
        nbytes: number of bytes that it is in.
        stray: name of the stray bytes that it is in; empty if it is in bytes that belong to the checkpoint.
        salvage: what it imports.
    """

    what: str
    nbytes: int
    stray: str
    salvage: Salvage


def other_readings(container: Container) -> Iterator[Reading]:
    """What other readers see in the file of a checkpoint. Call ``container.locate`` before.

    Raises:
        SourceChanged, AccessFailed: as the source.
    """
    source, name = container.source, container.name
    head = source.read(0, min(_HEAD, source.size))
    strays = [*container.strays()]
    if name != "torch-tar" and _may_be_tar(head):
        yield from _of_whole(container, "a tar archive", "at its start")
    if name in _OTHERS and _may_be_pickle(head, source.size):
        yield from _of_whole(container, "a pickle", "at its start")
    if name in _OTHERS | _PICKLES:
        end = find_end(source)
        # A tensor may hold the bytes of an archive. One whose offsets count from the start of the file was put there.
        if end is not None and (end.shift == 0 or name == "safetensors"):
            yield from _of_whole(container, "a zip archive", "at its end")
    for stray, span in strays:
        yield from _of_stray(container, stray, span)


def _of_whole(container: Container, kind: str, where: str) -> Iterator[Reading]:
    salvage = _salvaged(container.source, container, kind)
    if kind in salvage.found:
        yield Reading(f"{kind} {where}", container.source.size, "", salvage)


def _of_stray(container: Container, stray: str, span: Span) -> Iterator[Reading]:
    start = _after_zeros(container.source, span)
    rest = PartSource(container.source, Span(start, span.end))
    salvage = _salvaged(rest, container, stray)
    kinds = salvage.found
    if container.name in _PICKLES:
        kinds = [kind for kind in kinds if kind != "a pickle"]  # the next object that a program has saved
    elif not kinds and LOCAL_SIGNATURE in rest.read(0, min(rest.size, _SEARCHED)):
        kinds = ["records"]
    if kinds:
        yield Reading(f"{some(kinds)} in the {stray}", span.nbytes, stray, salvage)


def _salvaged(source: ByteSource, container: Container, name: str) -> Salvage:
    from ckptmove.formats.salvage import Salvage  # most files need none

    salvage = Salvage(container.limits)
    salvage.read(source, name)
    return salvage


def _may_be_tar(head: bytes) -> bool:
    """Whether a checksum is where the header of a tar has one."""
    checksum = head[_CHECKSUM]
    return len(head) >= _TAR_HEADER and (checksum.strip(b"\0 ").isdigit() or checksum.startswith(_BASE_256))


def _may_be_pickle(head: bytes, size: int) -> bool:
    from ckptmove.formats.pickle_outline import may_be_pickle

    return may_be_pickle(head, size)


def _after_zeros(source: ByteSource, span: Span) -> int:
    """Offset of the first byte of a span that is not zero, or its end."""
    position = span.start
    for block in source.blocks(span, _BLOCK):
        rest = bytes(block).lstrip(b"\0")
        position += len(block) - len(rest)
        if rest:
            break
    return position
