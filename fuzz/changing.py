"""What a fuzzer does with a file and what stands beside it: a journal, leftovers, links. And what must hold of it.

Never writes anything outside of a temporary folder, which it removes.

An input stands for a folder in which ``model.pth`` is the checkpoint. Whatever is beside it, no file but this one ever
changes; without a journal that is whole, and its own, this one does not either; and what was converted in place is put
back byte for byte.
"""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ckptmove.conversion.convert import convert
from ckptmove.conversion.in_place import undo_in_place
from ckptmove.conversion.plan import plan_move
from ckptmove.errors import CkptMoveError
from ckptmove.io.journal import decode, home_of, journal_path
from ckptmove.io.leftovers import clear_leftovers, is_temporary
from ckptmove.io.recovery import recover
from fuzz.harness import LIMITS, asked_for, bytes_of, in_each_way, opened, require, require_planned
from fuzz.packing import lay_out
from fuzz.wholes import content_of, folder_in_memory

if TYPE_CHECKING:
    from ckptmove.io.journal import Journal
    from ckptmove.moves import MoveRequest
    from fuzz.wholes import Content

#: The checkpoint, in the folder that an input stands for.
CHECKPOINT: Final = "model.pth"


def examine_changes(data: bytes) -> None:
    """A file beside whatever there is: what was left is cleared up, and it is recovered, taken back and converted."""
    with folder_in_memory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what was recovered is warned of
        home = Path(folder, "input")
        lay_out(data, home)
        path = home / CHECKPOINT
        _clear(home)
        _recover(path, home)
        was = path.read_bytes() if path.is_file() else b""
        first = _undone(path, home)
        in_each_way(lambda request: _convert(path, home, request, {was, first}))


def _clear(home: Path) -> None:
    """Nothing goes but what has the name of a leftover, and nothing comes but what was in one."""
    before = content_of(home)
    clear_leftovers(home)
    after = content_of(home)
    for path, body in before.items():
        is_left = is_temporary(Path(path).relative_to(home).parts[0])
        require(is_left or after.get(path, ...) == body, f"{path} was no leftover")
    names = {Path(path).name for path in before}
    require(all(Path(path).name in names for path in after), "something came from nowhere")


def _recover(path: Path, home: Path) -> None:
    """The file is left as it is, or is what its own journal says that it was."""
    before, journal, real = content_of(home), _journal_of(path), os.path.realpath(path)
    try:
        recover(str(path))
    finally:
        after = content_of(home)
        _require_alone(path, before, after)
        if after.get(real) != before.get(real):
            require(journal is not None and after[real] == _as_before(journal, before[real]), "it is not as it was")
    require(not recover(str(path)), "it was recovered twice")


def _as_before(journal: Journal, changed: bytes | str | None) -> bytes:
    """What a journal says that a file was, from what it is."""
    was = bytearray(changed if isinstance(changed, bytes) else b"")[: journal.old_size].ljust(journal.old_size, b"\0")
    for start, old in journal.old:
        was[start : start + len(old)] = old
    return bytes(was)


def _undone(path: Path, home: Path) -> bytes | None:
    """What the file was before it was first converted in place, None where it never was; it stays what it is."""
    before = content_of(home)
    try:
        result = undo_in_place(str(path), dry_run=False, limits=LIMITS)
    except CkptMoveError:
        require(content_of(home) == before, "an undo that was refused has changed something")
        return None
    _require_alone(path, before, content_of(home))
    undone = path.read_bytes()
    require(len(undone) == result.size, "an undo left another size than it says")
    path.write_bytes(_body(before, path))
    return undone


def _convert(path: Path, home: Path, request: MoveRequest, firsts: set[bytes | None]) -> None:
    """Convert in place, hold the outcome against the plan, and take it back.

    Raises:
        CkptMoveError: it cannot be converted.
    """
    before = content_of(home)
    try:
        result = convert(asked_for(str(path), request, in_place=True))
    except CkptMoveError:
        require(content_of(home) == before, "what was refused has changed something")
        raise
    _require_alone(path, before, content_of(home))
    was, changed = _body(before, path), path.read_bytes()
    if changed == was:
        return
    source, output = opened(was), opened(changed)
    require(plan_move(output.inventory, request).is_empty, "what was converted would be converted again")
    require_planned((source.inventory, bytes_of(source)), result.plan, (output.inventory, bytes_of(output)))
    undone = _undone(path, home)
    require(undone is None or undone in firsts, "an undo has made another file of it")
    path.write_bytes(was)


def _body(content: Content, path: Path) -> bytes:
    body = content[os.path.realpath(path)]
    if not isinstance(body, bytes):
        raise AssertionError("what was changed is no file")  # noqa: TRY004  # the invariant does not hold
    return body


def _journal_of(path: Path) -> Journal | None:
    """The journal that is the file's own, where there is one that is whole."""
    with suppress(OSError, ValueError):
        beside = Path(journal_path(str(path)))
        journal = None if beside.is_symlink() else decode(beside.read_bytes())
        if journal is not None and journal.name == home_of(str(path))[1]:
            return journal
    return None


def _require_alone(path: Path, before: Content, after: Content) -> None:
    """Nothing has changed but the file, nothing is gone but its journal, and nothing has come."""
    different = {one for one in {*before, *after} if before.get(one, ...) != after.get(one, ...)}
    require(different <= {os.path.realpath(path), journal_path(str(path))}, "another file was changed")
    require(after.keys() <= before.keys(), "something was left")
