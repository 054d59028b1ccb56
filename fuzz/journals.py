"""Seeds and mutators for in-place conversions: a checkpoint with its journal and leftovers in one folder."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ckptmove.conversion.plan import plan_move
from ckptmove.io.journal import ANCHOR_BYTES, ChangedRange, Journal, decode
from ckptmove.io.leftovers import temporary_names
from ckptmove.io.locations import journal_name
from ckptmove.model import Span
from ckptmove.moves import MoveRequest
from ckptmove.pickles.edits import apply_plan
from fuzz.changing import CHECKPOINT
from fuzz.harness import opened
from fuzz.mutators import NUMBERS
from fuzz.packing import Entry, pack, unpack
from fuzz.seeds import archive_of, tensors
from fuzz.whole_mutators import content_mutator

if TYPE_CHECKING:
    from collections.abc import Iterable
    from random import Random

    from fuzz.mutators import Plain

_NAME: Final = CHECKPOINT.encode()
_JOURNAL: Final = journal_name(CHECKPOINT).encode()
#: Leftovers of one conversion, which share a stem, by a process that has ended.
_PART, _OLD, _LOCK = (
    path.name[: -len("0123456789abcdef.part")].encode() + bytes(8).hex().encode() + path.suffix.encode()
    for path in temporary_names(Path())
)
_OTHER: Final = b".ckptmove-00000000-0000000000000000.part"
_NAMES: Final = (
    _NAME, _JOURNAL, _PART, _OLD, _LOCK, _OTHER, _OLD + b"/" + _NAME, _OLD + b"/other", _PART + b"/x",
    b"sub/" + _NAME, b"sub/" + _JOURNAL, b"other.pth", journal_name("other.pth").encode(), _JOURNAL + b"/x",
)  # fmt: skip


def changes() -> Iterable[bytes]:
    """Folders with a checkpoint before, after or halfway through an in-place conversion, or with other files."""
    for pickled in tensors():
        was = archive_of(pickled, {"0": bytes(16)})
        now = converted(was)
        if now == was:
            continue
        journal = between(CHECKPOINT, was, now).encode()
        yield _folder(was)
        yield _folder(now)
        for found in (was, now, now[: (len(was) + len(now)) // 2], now[:-40] + bytes(40)):
            yield _folder(found, (_JOURNAL, journal))
        yield _folder(now, (_JOURNAL, journal[:-9]))
        yield _folder(now, (journal_name("other.pth").encode(), between("other.pth", was, now).encode()))
        yield _folder(was, (_PART, now), (_OLD + b"/" + _NAME, was), (_OTHER, b""))
        yield pack(
            [Entry(1, _NAME, b"sub/" + _NAME), Entry(0, b"sub/" + _NAME, now), Entry(0, b"sub/" + _JOURNAL, journal)]
        )


def _folder(checkpoint: bytes, *others: tuple[bytes, bytes]) -> bytes:
    return pack([Entry(0, _NAME, checkpoint), *(Entry(0, name, body) for name, body in others)])


def converted(data: bytes) -> bytes:
    """The bytes of a checkpoint after an in-place conversion."""
    checkpoint = opened(data)
    plan = plan_move(checkpoint.inventory, MoveRequest(to="mps"))
    with checkpoint.file.content() as (container, machine):
        patch = container.patch(apply_plan(machine, plan))
    changed = bytearray(data.ljust(patch.size, b"\0"))
    for start, new in patch.writes:
        changed[start : start + len(new)] = new
    return bytes(changed[: patch.size])


def between(name: str, old: bytes, new: bytes) -> Journal:
    """The journal of a change between two contents of a file: one run, from the first different byte to the end."""
    start = next(
        (at for at, (one, two) in enumerate(zip(old, new, strict=False)) if one != two), min(len(old), len(new))
    )
    anchor = Span(max(0, start - ANCHOR_BYTES), start)
    return Journal(
        name=name, old_size=len(old), new_size=len(new), runs=(ChangedRange(start, old[start:], new[start:]),),
        anchors=(anchor, Span(0, 0)), anchor_crc=zlib.crc32(old[anchor.start : anchor.end]),
    )  # fmt: skip


def change_mutator(data: bytes, random: Random, plain: Plain) -> bytes:
    """Change the checkpoint, its journal or another entry of the folder."""
    entries = unpack(data)
    if not entries:
        return plain(data)
    at = random.randrange(len(entries))
    kind, name, body = entries[at]
    match random.randrange(14):
        case 0:
            del entries[at]
        case 1:
            entries[at] = Entry(kind, random.choice(_NAMES), body)
        case 2:
            entries.append(Entry(0, random.choice(_NAMES), random.choice([one.body for one in entries])))
        case 3:
            entries.insert(0, Entry(random.randrange(1, 3), random.choice(_NAMES), random.choice((*_NAMES, b""))))
        case 4:
            other = entries[random.randrange(len(entries))]
            journal = between(CHECKPOINT, other.body, body).encode()
            entries.append(Entry(0, _JOURNAL, journal))
        case 5 | 6 if kind == 0:
            entries[at] = Entry(kind, name, _half_changed(body, random.choice(entries).body, random))
        case _ if name.endswith(b".journal"):
            entries[at] = Entry(kind, name, journal_mutator(body, _body_of(entries), random, plain))
        case _:
            entries[at] = Entry(kind, name, content_mutator(body, random, plain))
    return pack(entries)


def journal_mutator(data: bytes, file: bytes, random: Random, plain: Plain) -> bytes:
    """Change a journal, and update its checksums."""
    try:
        journal = decode(data)
    except ValueError:
        journal = None
    if journal is None or random.random() < 0.3:
        return _summed(plain(data[:-4]))
    runs, anchors = list(journal.runs), list(journal.anchors)
    number = random.choice((*NUMBERS, len(file), len(file) // 2, journal.old_size, journal.new_size)) % 2**63
    old_size, new_size, at = journal.old_size, journal.new_size, random.randrange(max(1, len(runs)))
    match random.randrange(8):
        case 0:
            old_size = number
        case 1:
            new_size = number
        case 2:
            anchors[random.randrange(2)] = Span(number, number + random.choice((0, 1, ANCHOR_BYTES)))
        case 3:
            runs[at:at] = runs[at : at + 1] or [ChangedRange(number % 2**16, b"", b"x" * 9)]
        case 4:
            del runs[at : at + 1]
        case 5 if runs:
            runs[at] = ChangedRange(number, runs[at].old, runs[at].new)
        case 6 if runs:
            runs[at] = ChangedRange(runs[at].start, plain(runs[at].old), runs[at].new)
        case _ if runs:
            run, cut = runs[at], random.randrange(1 + len(runs[at].new))
            runs[at : at + 1] = (
                ChangedRange(run.start, run.old[:cut], run.new[:cut]),
                ChangedRange(run.start + cut, run.old[cut:], run.new[cut:]),
            )
    crc = zlib.crc32(b"".join(file[span.start : span.end] for span in anchors))
    name = random.choice((*[journal.name] * 9, "other.pth"))
    return Journal(
        name=name, old_size=old_size, new_size=new_size, runs=tuple(runs), anchors=(anchors[0], anchors[1]),
        anchor_crc=crc,
    ).encode()  # fmt: skip


def _summed(body: bytes) -> bytes:
    return body + zlib.crc32(body).to_bytes(4, "little")


def _half_changed(one: bytes, two: bytes, random: Random) -> bytes:
    """A file with the beginning of one content, and the end of another, of zeros, or missing."""
    cut = random.randrange(1 + len(one))
    return one[:cut] + random.choice((two[cut:], b"", bytes(len(one) - cut)))


def _body_of(entries: list[Entry]) -> bytes:
    return next((entry.body for entry in entries if entry.name == _NAME), b"")
