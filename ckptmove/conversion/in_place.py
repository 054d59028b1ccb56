"""A checkpoint in one file, moved without a new file, and moved back.

Never changes a byte itself: ``containers`` say which, and ``streams`` change them, whole or not at all.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from ckptmove.checkpoint.opening import naming, no_devices, open_checkpoint
from ckptmove.conversion.notes import conversion_notes, is_refused, unmatched_options
from ckptmove.conversion.plan import plan_move
from ckptmove.errors import ArchiveOfFiles, InPlaceImpossible, NothingToUndo
from ckptmove.formats.opening import open_container
from ckptmove.io.changes import UndoResult
from ckptmove.io.outputs import do_nothing
from ckptmove.io.patch import apply_patch, stamp
from ckptmove.io.recovery import recover
from ckptmove.io.source import is_folder
from ckptmove.moves import ConvertResult
from ckptmove.pickles.edits import apply_plan
from ckptmove.text import Command, amount, command_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckptmove.checkpoint.opening import Checkpoint
    from ckptmove.conversion.file import ConvertRequest
    from ckptmove.io.changes import Patch
    from ckptmove.limits import Limits
    from ckptmove.moves import MovePlan


def convert_in_place(request: ConvertRequest) -> ConvertResult:
    """Plan a conversion and carry it out in the file itself; no byte of a tensor is read.

    Errors as of :func:`ckptmove.api.convert`.
    """
    path = request.path
    if is_folder(path):
        raise InPlaceImpossible(path, "it is a directory, of which a new one is made")
    with naming(path):
        recovered = recover(path)
        before = stamp(path)
        with _opened(path, request.limits) as checkpoint:
            container = checkpoint.inventory.container
            plan = plan_move(checkpoint.inventory, request.move)
            reason = no_devices(checkpoint.inventory) if plan.is_empty else ""
            notes = [recovered, *conversion_notes(checkpoint.inventory, plan), reason]
            unmatched = tuple(unmatched_options(checkpoint.inventory, request.move))
            patch = None if plan.is_empty and not plan.inflates else _patch(checkpoint, plan, path)
            refused = is_refused(checkpoint.inventory)
            size = checkpoint.container.source.size
        if patch is not None:
            notes += _other_names(path)
        if patch is not None and not request.dry_run:
            apply_patch(path, patch, before, request.settle)
            notes.append(_way_back(path, patch, size))
    return ConvertResult(
        container=container,
        plan=plan,
        output=None if request.dry_run else path,
        bytes_copied=0 if patch is None or request.dry_run else patch.nbytes,
        seconds=time.perf_counter() - request.began,
        notes=tuple(note for note in notes if note),
        in_place=True,
        unmatched=unmatched,
        is_refused=refused,
    )


def undo_in_place(path: str, *, dry_run: bool, limits: Limits, settle: Callable[[], None] = do_nothing) -> UndoResult:
    """Make a file what it was before it was first converted in place.

    Arguments and errors as of :func:`ckptmove.api.undo`.
    """
    began = time.perf_counter()
    if is_folder(path):
        raise NothingToUndo(path, "it is a directory, and only a file is converted in place", "directory")
    with naming(path):
        recovered = recover(path)
        before = stamp(path)
        try:
            container = open_container(path, limits)
        except ArchiveOfFiles as error:
            raise NothingToUndo(path, "it is an archive of files, of which a new one is made", "archive") from error
        try:
            patch, size = container.undo(), container.source.size
        except NothingToUndo as error:
            error.container = container.name
            raise
        finally:
            container.source.close()
        if not dry_run:
            apply_patch(path, patch, before, settle)
    return UndoResult(
        path=path,
        size=patch.size,
        removed=size - patch.size,
        is_done=not dry_run,
        seconds=time.perf_counter() - began,
        notes=(recovered,) if recovered else (),
    )


def _other_names(path: str) -> Iterator[str]:
    """Under which other names the change is one too."""
    if os.path.islink(path):  # noqa: PTH114  # the path stays text
        yield f"it is a symbolic link: the change is one of the file that it leads to, {os.path.realpath(path)}"
    with suppress(OSError):  # whoever changes it says so
        others = os.stat(path).st_nlink - 1  # noqa: PTH116  # the path stays text
        if others > 0:
            yield f"the file has {amount(others, 'other name')} (hard links): the change is one under all of them"


def _way_back(path: str, patch: Patch, size: int) -> str:
    """How a change that was made is taken back, of a file that had a length before."""
    if not patch.writes:
        return "it is again what it was before it was first converted in place, byte for byte"
    if not patch.can_undo:
        return "there is no --undo of a file of this kind: to take it back, convert it back"
    whither = " to what it was before its first conversion in place" if patch.writes[0][0] < size else ""
    return Command(f"to take it back{whither}: {command_line(['ckptmove', 'convert', path, '--undo'])}")


@contextmanager
def _opened(path: str, limits: Limits) -> Iterator[Checkpoint]:
    try:
        with open_checkpoint(path, limits) as checkpoint:
            yield checkpoint
    except ArchiveOfFiles as error:
        raise InPlaceImpossible(path, "it is an archive of files, of which a new one is made") from error


def _patch(checkpoint: Checkpoint, plan: MovePlan, path: str) -> Patch:
    """The change that a plan makes, where it moves no storage.

    Raises:
        InPlaceImpossible: it casts, or the format has no room for another pickle.
        UneditablePickle: a change falls on a place that no pickler of Python writes.
    """
    if plan.inflates:
        raise InPlaceImpossible(path, "its storages are compressed, and would be stored plainly")
    if any(edit.cast for edit in plan.edits):
        raise InPlaceImpossible(path, "--cast writes tensors anew, in another length")
    return checkpoint.container.patch(apply_plan(checkpoint.machine, plan))
