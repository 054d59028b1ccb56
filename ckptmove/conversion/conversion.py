"""A conversion in progress: the request, the plan, and the notes for the user."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.directories import DirectoryInventory
from ckptmove.checkpoint.merge import split_plan
from ckptmove.conversion.notes import (
    conversion_notes,
    is_refused,
    overflow_note,
    source_warnings,
    unmatched_options,
)
from ckptmove.conversion.plan import plan_before_remap, plan_move, require_dtypes
from ckptmove.conversion.results import Converted, TwoReadings
from ckptmove.conversion.target_format import target_format
from ckptmove.errors import DamagedArchive, UsageError
from ckptmove.formats.contract import ReadOnlyFormat
from ckptmove.formats.facts import facts_of
from ckptmove.io.locations import exists
from ckptmove.io.outputs import do_nothing
from ckptmove.io.segments import without_checks
from ckptmove.limits import Limits
from ckptmove.model import LACKING
from ckptmove.moves import MovePlan, Remap
from ckptmove.pickles.edits import apply_plan
from ckptmove.text import Argument, Phrase, amount, some

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.conversion.remap.remapping import Remapped
    from ckptmove.conversion.target_format import TargetFormat
    from ckptmove.formats.contract import Container
    from ckptmove.io.contracts import Progress, Segment
    from ckptmove.model import Inventory
    from ckptmove.moves import MoveRequest
    from ckptmove.pickles.state import Machine

#: Names in a note.
_SHOWN: Final = 4
#: Kinds of facts about bytes that are missing or damaged, so that the original bytes cannot be copied.
_BROKEN: Final = LACKING | {"damaged-piece"}
_CONTAINERS: Final[dict[str, str]] = {
    "torch": "torch-zip", "safetensors": "safetensors", "shards": "safetensors",
}  # fmt: skip
#: Note on the order of parameters when shards with an optimizer become one file.
_GUESSED_ORDER: Final = (
    "the shards do not store the order of the parameters: it is chosen by the shapes of the optimizer's state, "
    "so no check of the new file proves which state belongs to which parameter"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertRequest:
    """Request for a conversion."""

    path: str  # a file or a directory
    move: MoveRequest  # the changes to make
    #: folders in the directory that are checkpoints of their own, by their paths in it: they are neither read nor
    #: copied.
    exclude: tuple[str, ...] = ()
    output: str | None = None  # the new file or directory; None for the default
    default_output: str = ""
    shard_bytes: int | None = None  # largest size of a safetensors file in a new directory; None to write no shards
    in_place: bool = False  # whether to change the file itself
    force: bool = False  # whether to replace an existing output
    dry_run: bool = False  # whether to stop after the plan
    strict: bool = False  # whether to stop after the plan if an option of moves matches nothing
    check: bool = True  # whether to compare copied bytes with their CRCs
    #: number of files of a directory that are written at once, or of tensors of a new file with the tensors of a
    #: directory; None for the default.
    jobs: int | None = None
    progress: Progress | None = None  # called with the bytes done so far and the total
    verify: bool = False  # whether to compare the output with its source before it gets its name
    #: called with the path of what was written, before the output gets its name or an in-place change is final; raises
    #: an error if it is not what was asked for, and returns its number of tensors. None without ``verify``.
    prove: Callable[[str], int] | None = None
    settle: Callable[[], None] = do_nothing  # called before the last step, which cannot be undone
    limits: Limits = field(default_factory=Limits)  # resource limits for reading the file
    began: float = field(default_factory=time.perf_counter)  # time of the request, by `time.perf_counter`

    @property
    def target(self) -> str:
        """Path of the output."""
        if self.in_place:
            return self.path
        return self.output or self.default_output

    def format_for(self, inventory: Inventory) -> TargetFormat:
        """The format of the output of a checkpoint; errors as of :func:`target_format`."""
        is_sharded, in_place = self.shard_bytes is not None, self.in_place
        return target_format(self.output, self.default_output, inventory, is_sharded=is_sharded, in_place=in_place)


class Conversion:
    """A conversion in progress.

    Attributes:
        remapped: the new tree, if anything but devices changes; else None.
        unchecked: paths of the files whose bytes have no CRCs; empty for the one file of a checkpoint.
        resources: closed after the output was written.
        overflowed: numbers of values that were too large for the dtype of their cast.
        verified: number of tensors of the output that were compared with the source; None without ``verify``.
        is_writing: whether to write the output. False in a dry run, and without changes if the checkpoint stores no
            devices, unless ``output`` requests a copy.
    """

    def __init__(self, request: ConvertRequest, checkpoint: OpenCheckpoint) -> None:
        inventory, move = checkpoint.inventory, request.move
        is_move = move.to is not None or bool(move.mapping)
        self.format = request.format_for(inventory)
        self.request = request
        is_new = self.format == "shards" or (self.format != "same" and request.output is not None)
        if not (is_move or is_new) and move.remap == Remap():
            raise UsageError(
                Phrase(
                    "convert needs a target, ",
                    Argument("to", "DEVICE"),
                    ", another change, for example ",
                    Argument("strip_prefix", True),
                    ", or another format: ",
                    Argument("output", "X.pth"),
                )
            )
        readings = tuple(fact.record for fact in inventory.facts if fact.kind == "second-reading")
        if readings:
            raise TwoReadings(inventory.path, readings)
        is_remap = move.remap != Remap() or self.format != "same"
        is_written = facts_of(inventory.container).is_written  # else a dtype does not matter
        plan = plan_move if is_written and not is_remap else plan_before_remap
        moves = plan(inventory, move) if is_move else MovePlan(move)
        self.remapped = self._remap(checkpoint, moves) if is_remap else None
        if self.remapped is None:
            _require_written(checkpoint, moves)
        self.plan = moves if self.remapped is None else self.remapped.plan
        self._container = _CONTAINERS.get(self.format, inventory.container)
        if self.remapped is not None:
            self._container = facts_of(self._container).rewritten_as or self._container
        if self._container != inventory.container or self.format == "shards":
            self.plan = self.plan._replace(format=self._container)
        new = inventory if self.remapped is None else self.remapped.inventory
        self.notes = [*conversion_notes(new, self.plan)]
        if self.remapped is not None and self.remapped.is_reordered and new.optimizers:
            self.notes.append(_GUESSED_ORDER)
        self.notes += _of_first_rank(checkpoint)
        self.notes += _left_out(checkpoint, self.remapped)
        self._is_refused = is_refused(new)
        self._unmatched = tuple(unmatched_options(inventory, move))
        self.unchecked: list[str] = []
        self.resources = ExitStack()
        self.overflowed: list[int] = []
        self.verified: int | None = None
        reason = checkpoint.no_devices if self.plan.is_empty and self.remapped is None else ""
        is_needless = bool(reason) and request.output is None and not request.in_place
        is_one_file = self.remapped is not None and self.remapped.is_file
        self._warnings = () if is_needless else tuple(source_warnings(inventory, new, is_one_file=is_one_file))
        is_stopped = request.strict and bool(self._unmatched)
        self.is_writing = not (request.dry_run or is_stopped or is_needless)
        if isinstance(inventory, DirectoryInventory) and not is_needless:
            _require_whole(inventory)
        if reason:
            several = "archive" if self._container == "archive" else "directory"
            what = "file" if checkpoint.listing is None else several
            self.notes.append(reason + f"; nothing was written (-o OUT copies the {what})" * is_needless)
        is_free = is_needless or request.force or request.in_place
        if request.dry_run and not is_free and exists(request.target):
            self.notes.append(f"{request.target} already exists: {Argument('force', True)} replaces it")

    def _remap(self, checkpoint: OpenCheckpoint, moves: MovePlan) -> Remapped:
        from ckptmove.conversion.remap.remapping import remap

        request = self.request
        remapped = remap(checkpoint, moves, request.limits, as_file=self.format != "same")
        if self.format not in {"safetensors", "shards"} and moves.edits:  # those formats store no device
            require_dtypes(remapped.inventory, request.move)
        return remapped

    def prove(self, written: str) -> None:
        """Compare what was written with the source, if the request asks for it."""
        if self.request.prove is not None:
            self.verified = self.request.prove(written)

    def result(self, written: int) -> Converted:
        """The result, with the number of bytes written."""
        notes = self.notes
        if self.verified is not None:
            notes.append(f"verified against the source: {amount(self.verified, 'tensor')}")
        if self.unchecked == [""]:
            notes.append("the file has no CRCs: its bytes were copied unchecked")
        elif self.unchecked:
            unchecked = ", ".join(sorted(self.unchecked))
            notes.append(f"copied unchecked, because they have no CRCs: {unchecked}")
        if self.overflowed:
            notes.append(overflow_note(sum(self.overflowed)))
        return Converted(
            container=self._container,
            plan=self.plan,
            output=self.request.target if self.is_writing else None,
            bytes_copied=written,
            verified=self.verified,
            seconds=time.perf_counter() - self.request.began,
            notes=tuple(notes),
            in_place=self.request.in_place,
            unmatched=self._unmatched,
            warnings=self._warnings,
            is_refused=self._is_refused,
        )

    def lay_out(self, container: Container, machine: Machine, plan: MovePlan) -> tuple[Segment, ...]:
        """Segments of a file, changed by its plan."""
        casts = {edit.storage: edit.cast for edit in plan.edits if edit.cast is not None}
        return self.checked(container.lay_out(apply_plan(machine, plan), casts))

    def checked(self, segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
        """The segments with their checks, unless the request leaves them out."""
        return segments if self.request.check else without_checks(segments)


def _of_first_rank(checkpoint: OpenCheckpoint) -> Iterator[str]:
    """Notes on tensors that differ between ranks: the new file has those of the first rank."""
    for part in checkpoint.parts:
        if part.differing:
            names = some(part.differing, _SHOWN)
            yield f"not the same in the files of all ranks, so those of {part.rows[0].path} are used: {names}"


def _left_out(checkpoint: OpenCheckpoint, remapped: Remapped | None) -> Iterator[str]:
    """A note on shards that would repeat tensors as they were before the conversion."""
    kept = None if remapped is None else remapped.kept
    names = sorted(checkpoint.repeated & kept.removed) if kept is not None else []
    if names:
        yield f"left out, because they repeat tensors that have changed: {some(names, _SHOWN)}"


def _require_written(checkpoint: OpenCheckpoint, plan: MovePlan) -> None:
    """Raise ReadOnlyFormat if a file would change whose format is not written, before anything else is written."""
    parts = checkpoint.parts
    if all(facts_of(part.inventory.container).is_written for part in parts):
        return
    for part, own in zip(parts, (plan,) if checkpoint.is_whole else split_plan(plan, parts), strict=True):
        container = part.inventory.container
        if not (own.is_empty or facts_of(container).is_written):
            raise ReadOnlyFormat(part.path, container, facts_of(container).unwritten_hint)


def _require_whole(inventory: DirectoryInventory) -> None:
    """Raise DamagedArchive if bytes to be copied are missing, before anything is written and in a dry run too."""
    containers = {file.path: file.container for file in inventory.files}
    for fact in inventory.facts:
        folder = fact.record
        while folder and folder not in containers:
            folder = folder.rpartition("/")[0]
        # Bytes that a file never had are only reported; a distributed checkpoint must be whole to be a copy.
        is_distributed = folder not in containers or facts_of(containers[folder]).is_distributed
        if fact.kind in _BROKEN and (fact.kind == "past-end" or is_distributed):
            raise DamagedArchive(inventory.path, f"'{fact.record:.200}' is damaged or incomplete")
