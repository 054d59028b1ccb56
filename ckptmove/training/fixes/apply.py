"""Find the edits that make a case or a script pass, for ``verify --fix``, and write them. Does not import torch."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ckptmove.errors import NotDurable, SourceChanged, UsageError, WriteFailed, reason_of
from ckptmove.io.sink import FileSink
from ckptmove.proof.evidence import NOT_KNOWN, FixedFile
from ckptmove.proof.source_edits import Edit, FixNotWritten, diff_of, digest, lines_of
from ckptmove.text import Argument, quoted
from ckptmove.training.code.entrance import is_generated, is_installed

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from ckptmove.proof.evidence import CheckResult, Verdict
    from ckptmove.proof.request import VerifyRequest

#: Maximum number of fixes: a script that needs more is edited by hand.
_MOST: Final = 20


class EditedFile(NamedTuple):
    """A file with its edits, not written."""

    path: str  # real path
    before: bytes  # content of the file
    after: bytes  # content with the edits
    edits: tuple[Edit, ...] = ()  # the edits, in the order in which they were found


class Fixes(NamedTuple):
    """The fixes of a case or a script."""

    first: Verdict  # verdict on the files without edits
    last: Verdict  # verdict on the files with all edits
    files: tuple[EditedFile, ...]  # the edited files
    unfixed: str  # why it does not pass with all edits, or that this is not known; empty if it does


def find_fixes(request: VerifyRequest, verify: Callable[[VerifyRequest], Verdict]) -> Fixes:
    """Verify with the edit that the last check suggests, and again, until that passes or no other edit is known.

    No file is written: the case or script runs with the edits in memory. An edit that makes it unusable is left out.
    """
    results = [verify(request)]
    files: dict[str, EditedFile] = {}
    edits: list[Edit] = []
    faults: set[Hashable] = set()
    tried: set[Hashable] = {None}
    unfixed = ""
    while (check := results[-1].checks[-1]).status != "passed":
        edit = _edit_of(check)
        unfixed = _obstacle(check, edit, len(edits), request)
        if edit is None or unfixed:
            break
        path = os.path.realpath(edit.path)
        try:
            file = _edited(files.get(path), path, edit)
        except (UnicodeError, SyntaxError) as error:
            unfixed = f"{_shown(path)} cannot be edited: {error}"
            break
        faults.add(_fault(check, edits))
        tried.add(_place(edit, edits))
        try:
            result = verify(request._replace(edits=(*edits, edit)))
        except UsageError as error:
            unfixed = f"{error.message}, with this fix, which was left out: {check.fix}"
            break
        after, more = result.checks[-1], [*edits, edit]
        # One operation can have a fault for several reasons, each with a fix of its own.
        if _fault(after, more) in faults and _place(_edit_of(after), more) in tried:
            unfixed = f"a fault came back with this fix, which was left out: {check.fix}"
            break
        edits.append(edit)
        files[path] = file
        results.append(result)
    for file in files.values():
        _require_unchanged(file)
    return Fixes(results[0], results[-1], tuple(files.values()), unfixed)


def write(files: Sequence[EditedFile]) -> tuple[FixedFile, ...]:
    """Write edited files, each after a backup of its content.

    Each file is replaced in one step: an interruption leaves its old or its new content.
    """
    for file in files:
        _require_unchanged(file)
    backups = [_back_up(file) for file in files]
    for file in files:
        _write(file.path, file.after, _mode(file.path), force=True)
    return fixed_files(files, [_shown(backup) for backup in backups])


def fixed_files(files: Sequence[EditedFile], backups: Sequence[str | None] = ()) -> tuple[FixedFile, ...]:
    """Edited files for the report.

    Their diffs are one patch for the working directory. ``git apply`` and ``patch`` refuse a file outside of the
    directory that they run in: then the patch is for the common directory of the files, which its first line names.

    Args:
        backups: the backup of each; by default None, for files that were not written.
    """
    home, note = os.path.realpath(os.curdir), ""
    if not all(file.path.startswith(home + os.sep) for file in files):
        home = os.path.commonpath([Path(file.path).parent for file in files])
        note = f"# patch -p1 -d {quoted(home)}\n"
    found = []
    for file, backup in zip(files, backups or [None] * len(files), strict=True):
        diff = diff_of(os.path.relpath(file.path, home), file.before, file.after)
        found.append(FixedFile(_shown(file.path), len(file.edits), note + diff, backup))
        note = ""
    return tuple(found)


def _edit_of(check: CheckResult) -> Edit | None:
    facts: Any = dict(check.evidence).get("edit")
    return None if facts is None else Edit(**facts)


def _fault(check: CheckResult, edits: Sequence[Edit]) -> Hashable:
    """Key of a fault: equal if the edits have not changed it. Lines have the numbers of the unedited file."""
    evidence = dict(check.evidence)
    number = evidence.get("line")
    if not isinstance(number, int):
        return check.status, check.failures
    place = _unedited(str(evidence.get("file")), number, edits)
    return check.status, place, *(evidence.get(key) for key in ("tensor", "operation", "on"))


def _place(edit: Edit | None, edits: Sequence[Edit]) -> Hashable:
    """Key of an edit: equal if other edits have only moved its lines. None for no edit."""
    return None if edit is None else (_unedited(edit.path, edit.first, edits), edit.how, edit.text)


def _unedited(path: str, number: int, edits: Sequence[Edit]) -> tuple[str, int]:
    """Real path of a file, and the number that a line of it has without some edits."""
    real = os.path.realpath(path)
    for edit in reversed(edits):
        if os.path.realpath(edit.path) == real:
            number = edit.number_before(number)
    return real, number


def _obstacle(check: CheckResult, edit: Edit | None, tried: int, request: VerifyRequest) -> str:
    """Why the fix of a check is not applied; empty if it can be."""
    if check.status == "skipped":
        return f"{check.name} was skipped"
    if not {"timed_out", "timeout"}.isdisjoint(dict(check.evidence)):
        return f"{NOT_KNOWN}: the time ran out ({Argument('timeout')})"
    if edit is None:
        return f"needs an edit by hand: {check.fix}" if check.fix else "no fix is known"
    if tried == _MOST:
        return f"{check.name} still fails after {_MOST} fixes"
    path = os.path.realpath(edit.path)
    script = os.path.realpath(request.script or (request.case or "").rpartition(":")[0])
    return (_why_not_own(path, script, request) if path != script else "") or _why_not_writable(path)


def _why_not_own(path: str, script: str, request: VerifyRequest) -> str:
    """Why a file is not code of the user; empty if it may be."""
    name = _shown(path)
    if is_installed(path):
        return f"the fix is in an installed library: {name}"
    if Path(request.path).is_dir() and path.startswith(os.path.realpath(request.path) + os.sep):
        return f"the fix is in a file of the checkpoint: {name}"
    if is_generated(path, str(Path(script).parent)):
        return f"the fix is in a generated file: {name}"
    return ""


def _why_not_writable(path: str) -> str:
    name = _shown(path)
    try:
        with Path(path).open("rb+"):
            return "" if _mode(path) & stat.S_IWUSR else f"{name} is read-only"
    except OSError as error:
        return f"{name} cannot be written: {reason_of(error)}"


def _edited(file: EditedFile | None, path: str, edit: Edit) -> EditedFile:
    if file is None:
        data = Path(path).read_bytes()
        file = EditedFile(path, data, data)
    if digest(lines_of(file.after)) != edit.sha256:
        raise SourceChanged(path)
    return file._replace(after=edit.applied(file.after), edits=(*file.edits, edit))


def _require_unchanged(file: EditedFile) -> None:
    if not _has(file.path, file.before):
        raise SourceChanged(file.path)


def _back_up(file: EditedFile) -> str:
    """Copy a file to the first free name of ``NAME.bak``, ``NAME.bak1``, …, or to one that has the content already."""
    names = (f"{file.path}.bak{number or ''}" for number in count())
    backup = next(one for one in names if not os.path.lexists(one) or _has(one, file.before))
    if not os.path.lexists(backup):
        _write(backup, file.before, _mode(file.path), force=False)
    return backup


def _has(path: str, data: bytes) -> bool:
    with suppress(OSError):
        return Path(path).read_bytes() == data
    return False


def _write(path: str, data: bytes, mode: int, *, force: bool) -> None:
    try:
        with FileSink(path, force=force, mode=mode) as sink:
            sink.write(data)
            sink.commit(mode=mode)
    except NotDurable:
        raise
    except WriteFailed as error:
        raise FixNotWritten(path, error.reason) from error


def _shown(path: str) -> str:
    return path.removeprefix(os.path.realpath(os.curdir) + os.sep)


def _mode(path: str) -> int:
    return stat.S_IMODE(Path(path).stat().st_mode)
