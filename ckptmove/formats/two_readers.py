"""Find what another reader would see in the file of a checkpoint: a pickle at its start, an archive at its end.

``torch.load`` looks for a zip at the start, then for a tar, then for a pickle. ``torch.jit.load`` and ``zipfile`` look
for a zip from the end. ``pickle.load``, ``tarfile`` and safetensors look at the start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.formats.head import HEAD_BYTES, is_header
from ckptmove.io.part import PartSource
from ckptmove.model import Span
from ckptmove.text import some

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ckptmove.formats.contract import Container
    from ckptmove.formats.salvage import Salvage
    from ckptmove.io.contracts import ByteSource
    from ckptmove.model import FactKind

_BLOCK: Final = 1 << 16
#: Formats that begin with a pickle, and the other formats that are no zip.
_PICKLES: Final = frozenset({"pickle", "torch-legacy", "dcp"})
_OTHERS: Final = frozenset({"safetensors", "torch-tar"})


class Reading(NamedTuple):
    """What another reader sees, or may see where nobody looked."""

    kind: FactKind  # `second-reading`, or `stray-bytes` if the middle of stray bytes was not searched
    what: str  # a noun phrase: `a pickle at its start`
    nbytes: int  # number of bytes that it is in
    stray: str  # name of the stray bytes that it is in; empty if it is in bytes that belong to the checkpoint
    salvage: Salvage  # what it imports


def other_readings(container: Container) -> Iterator[Reading]:
    """What other readers see in the file of a checkpoint. Call ``container.locate`` before."""
    source, name = container.source, container.name
    head = source.read(0, min(HEAD_BYTES, source.size))
    strays = [*container.strays()]
    if name != "torch-tar" and is_header(head):
        yield from _of_whole(container, "a tar archive", "at its start")
    if name in _OTHERS:
        from ckptmove.formats.pickle_signature import may_be_pickle

        if may_be_pickle(head, source.size):
            yield from _of_whole(container, "a pickle", "at its start")
    if name in _OTHERS | _PICKLES:
        from ckptmove.formats.zip_archive.lenient import find_end

        end = find_end(source)
        # A tensor may hold the bytes of an archive. One whose offsets count from the start of the file was put there.
        if end is not None and (end.shift == 0 or name == "safetensors"):
            yield from _of_whole(container, "a zip archive", "at its end")
    for stray, span in strays:
        yield from _of_stray(container, stray, span)


def _of_whole(container: Container, kind: str, where: str) -> Iterator[Reading]:
    salvage = _salvaged([container.source], container, kind)
    if kind in salvage.found:
        yield Reading("second-reading", f"{kind} {where}", container.source.size, "", salvage)


def _of_stray(container: Container, stray: str, span: Span) -> Iterator[Reading]:
    from ckptmove.formats.zip_archive.lenient import local_headers, searched_bytes

    rest = PartSource(container.source, span)
    end = searched_bytes(rest)
    starts = [_after_zeros(rest, Span(0, end))]
    is_partial = starts == [end] and 2 * end < rest.size
    if starts == [end] and end < rest.size:
        # The directory of an archive may be between them, and its records.
        starts.append(_after_zeros(rest, Span(max(end, rest.size - end), rest.size)))
    parts = [PartSource(rest, Span(start, rest.size)) for start in starts]
    salvage = _salvaged(parts, container, stray)
    kinds = [*salvage.found]
    if container.name in _PICKLES:
        kinds = [kind for kind in kinds if kind != "a pickle"]  # the next object that a program has saved
    elif not kinds and next(local_headers(parts[0]), None) is not None:
        kinds = ["records"]
    if kinds:
        yield Reading("second-reading", f"{some(kinds)} in the {stray}", span.nbytes, stray, salvage)
    elif is_partial:
        yield Reading("stray-bytes", f"{stray} (the middle was not searched)", span.nbytes, stray, salvage)


def _salvaged(sources: Iterable[ByteSource], container: Container, name: str) -> Salvage:
    from ckptmove.formats.salvage import Salvage  # most files need none

    salvage = Salvage(container.limits)
    for source in sources:
        salvage.read(source, name)
    return salvage


def _after_zeros(source: ByteSource, span: Span) -> int:
    """Offset of the first byte of a span that is not zero, or its end."""
    position = span.start
    for block in source.blocks(span, _BLOCK):
        rest = bytes(block).lstrip(b"\0")
        position += len(block) - len(rest)
        if rest:
            break
    return position
