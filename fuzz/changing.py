"""Fuzz in-place conversions and undo of a file in a folder with a journal, leftovers and links.

An input is a folder, in which ``model.pth`` is the checkpoint. It is written to a temporary folder.

The invariant: no other file changes, and none by reading. A checkpoint with a journal of its own is not read.
``--undo`` restores it byte for byte.
"""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ckptmove.api.undoing import undo_in_place
from ckptmove.conversion.convert import convert
from ckptmove.conversion.plan import plan_move
from ckptmove.errors import CkptMoveError
from ckptmove.io.journal import decode
from ckptmove.io.leftovers import clear_leftovers, is_temporary
from ckptmove.io.locations import home_of, journal_path
from ckptmove.io.outputs import do_nothing
from ckptmove.io.recovery import require_settled
from fuzz.harness import LIMITS, asked_for, bytes_of, in_each_way, opened, require, require_planned
from fuzz.packing import lay_out
from fuzz.wholes import content_of, folder_in_memory

if TYPE_CHECKING:
    from ckptmove.io.journal import Journal
    from ckptmove.moves import MoveRequest
    from fuzz.wholes import Content

#: Name of the checkpoint in the folder.
CHECKPOINT: Final = "model.pth"


def examine_changes(data: bytes) -> None:
    """Remove the leftovers in a folder, then read, undo and convert its checkpoint."""
    with folder_in_memory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # removed leftovers are warned about
        home = Path(folder, "input")
        lay_out(data, home)
        path = home / CHECKPOINT
        _clear(home)
        _read(path, home)
        _undone(path, home)  # a journal is gone now, unless its undo is refused
        was = path.read_bytes() if path.is_file() else b""
        first = _undone(path, home)
        in_each_way(lambda request: _convert(path, home, request, {was, first}))


def _clear(home: Path) -> None:
    """Remove leftovers; check that other files stay and that no file appears, except from a leftover."""
    before = content_of(home)
    clear_leftovers(home)
    after = content_of(home)
    for path, body in before.items():
        is_left = is_temporary(Path(path).relative_to(home).parts[0])
        require(is_left or after.get(path, ...) == body, f"{path} was removed or changed, but is not a leftover")
    names = {Path(path).name for path in before}
    require(all(Path(path).name in names for path in after), "a new file appeared")


def _read(path: Path, home: Path) -> None:
    """Read the file; check that this changes nothing, and that a file with a journal of its own is not read."""
    before, journal = content_of(home), _journal_of(path)
    try:
        require_settled(str(path))
        require(journal is None or not path.is_file(), "a file that may be half changed was read")
    except CkptMoveError:
        pass
    finally:
        require(content_of(home) == before, "reading changed a file")


def _as_before(journal: Journal, changed: bytes | str | None) -> bytes:
    """The original bytes of a changed file, from its journal."""
    was = bytearray(changed if isinstance(changed, bytes) else b"")[: journal.old_size].ljust(journal.old_size, b"\0")
    for start, old in journal.old:
        was[start : start + len(old)] = old
    return bytes(was)


def _undone(path: Path, home: Path) -> bytes | None:
    """The bytes that an undo restores; None if it is refused. The file itself is then put back."""
    before, journal, real = content_of(home), _journal_of(path), os.path.realpath(path)
    try:
        result = undo_in_place(str(path), dry_run=False, force=False, limits=LIMITS, settle=do_nothing)
    except CkptMoveError:
        require(content_of(home) == before, "a refused undo changed a file")
        return None
    _require_alone(path, before, content_of(home))
    undone = path.read_bytes()
    require(len(undone) == result.size, "an undo reports another size than that of the file")
    if journal is not None and undone != before[real]:
        require(undone == _as_before(journal, before[real]), "the file was not restored")
    path.write_bytes(_body(before, path))
    return undone


def _convert(path: Path, home: Path, request: MoveRequest, firsts: set[bytes | None]) -> None:
    """Convert in place, compare the result with the plan, and undo it.

    Raises:
        CkptMoveError: if the checkpoint cannot be converted.
    """
    before = content_of(home)
    try:
        result = convert(asked_for(str(path), request, in_place=True))
    except CkptMoveError:
        require(content_of(home) == before, "a refused conversion changed a file")
        raise
    _require_alone(path, before, content_of(home))
    was, changed = _body(before, path), path.read_bytes()
    if changed == was:
        return
    source, output = opened(was), opened(changed)
    require(plan_move(output.inventory, request).is_empty, "a converted checkpoint would be converted again")
    require_planned((source.inventory, bytes_of(source)), result.plan, (output.inventory, bytes_of(output)))
    undone = _undone(path, home)
    require(undone is None or undone in firsts, "an undo restored other bytes")
    path.write_bytes(was)


def _body(content: Content, path: Path) -> bytes:
    body = content[os.path.realpath(path)]
    if not isinstance(body, bytes):
        raise AssertionError("the checkpoint is not a file")  # noqa: TRY004  # the invariant does not hold
    return body


def _journal_of(path: Path) -> Journal | None:
    """The intact journal of the file itself; None if it has no such journal."""
    with suppress(OSError, ValueError):
        own_journal = Path(journal_path(str(path)))
        journal = None if own_journal.is_symlink() else decode(own_journal.read_bytes())
        if journal is not None and journal.name == home_of(str(path))[1]:
            return journal
    return None


def _require_alone(path: Path, before: Content, after: Content) -> None:
    """Check that only the file has changed, only its journal is gone, and no file has appeared."""
    different = {one for one in {*before, *after} if before.get(one, ...) != after.get(one, ...)}
    require(different <= {os.path.realpath(path), journal_path(str(path))}, "another file was changed")
    require(after.keys() <= before.keys(), "a new file was left")
