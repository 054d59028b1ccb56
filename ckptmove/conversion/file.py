"""A checkpoint in one file, moved into another.

Never decides on a move: ``plan`` does.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.directories import DirectoryInventory
from ckptmove.checkpoint.opening import naming, no_devices, open_checkpoint
from ckptmove.conversion.notes import conversion_notes, is_refused, overflow_note, unmatched_options
from ckptmove.conversion.plan import plan_move
from ckptmove.errors import DamagedArchive, OutputExists, OutputIsFolder, OutputIsSource, OutputSuffix
from ckptmove.io.leftovers import clear_leftovers
from ckptmove.io.outputs import unheard
from ckptmove.io.portable import SEPARATORS
from ckptmove.io.rewrite import write_segments
from ckptmove.io.segments import without_checks
from ckptmove.io.sink import FileSink, same_file
from ckptmove.io.source import is_folder
from ckptmove.limits import Limits
from ckptmove.model import LACKING
from ckptmove.moves import ConvertResult
from ckptmove.pickles.edits import apply_plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptmove.checkpoint.opening import Checkpoint
    from ckptmove.io.contracts import ByteSink, Progress, Segment
    from ckptmove.model import Inventory
    from ckptmove.moves import MovePlan, MoveRequest

_TORCH: Final = frozenset({"torch-zip", "torch-legacy", "torch-tar", "torchscript", "pickle"})
#: Suffixes that name a format, each with the containers that it stands for; of an archive, its form.
_SUFFIXES: Final[dict[str, frozenset[str]]] = {
    ".safetensors": frozenset({"safetensors"}),
    **dict.fromkeys((".pt", ".pth", ".ckpt", ".bin", ".pkl"), _TORCH),
    ".pt2": frozenset({"torch-export"}),
    ".zip": frozenset({"zip", "torch-zip", "torchscript", "torch-export"}),
    ".tar": frozenset({"tar"}) | _TORCH,  # model.pth.tar is a common name for what torch.save writes
    **dict.fromkeys((".gguf", ".onnx", ".h5", ".npz", ".npy", ".msgpack", ".gz", ".tgz"), frozenset()),
}
#: What a file has that cannot be copied as what it was.
_BROKEN: Final = LACKING | {"damaged-piece"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertRequest:
    """A conversion as it was asked for.

    Attributes:
        path: a file or a directory.
        move: what goes where.
        output: the new file or directory, or None.
        beside: default for ``output``.
        in_place: whether the file itself is changed.
        force: whether an existing output is replaced.
        dry_run: whether to stop after the plan.
        check: whether the bytes that are copied are compared with their CRCs.
        progress: told of bytes done and bytes in all.
        settle: called before the last step, which cannot be taken back.
        limits: what the file may ask for.
        began: when it was asked for, by the clock of ``time.perf_counter``.
    """

    path: str
    move: MoveRequest
    output: str | None = None
    beside: str = ""
    in_place: bool = False
    force: bool = False
    dry_run: bool = False
    check: bool = True
    progress: Progress | None = None
    settle: Callable[[], None] = unheard
    limits: Limits = field(default_factory=Limits)
    began: float = field(default_factory=time.perf_counter)

    @property
    def target(self) -> str:
        """Where the output goes."""
        return self.output or self.beside


class Conversion:
    """A conversion under way: what was decided, and what there is to say of it.

    Attributes:
        plan: what goes where.
        notes: for people.
        overflowed: numbers of values that were too large for the dtype that they were cast to.
        is_writing: whether anything is to be written: not in a dry run, nor a copy that nobody asked for.
    """

    def __init__(self, request: ConvertRequest, inventory: Inventory, no_devices: Callable[[], str]) -> None:
        """Decide.

        Args:
            request: what was asked for.
            inventory: of the source.
            no_devices: why there is none in the source that could be another one; empty where there is one.

        Raises:
            OutputSuffix: the suffix of the output names another format.
            UnsupportedDtype, UncastableDtype: as :func:`ckptmove.conversion.plan.plan_move`.
            DamagedArchive: a file of a directory or of an archive is cut off.
        """
        _require_suffix(request, inventory)
        self._request = request
        self._container = inventory.container
        self.plan = plan_move(inventory, request.move)
        self.notes = [*conversion_notes(inventory, self.plan)]
        self._is_refused = is_refused(inventory)
        self._unmatched = tuple(unmatched_options(inventory, request.move))
        self.overflowed: list[int] = []
        reason = no_devices() if self.plan.is_empty else ""
        is_idle = bool(reason) and request.output is None
        self.is_writing = not (request.dry_run or is_idle)
        if isinstance(inventory, DirectoryInventory) and not is_idle:
            _require_whole(inventory)
        if reason:
            several = "archive" if self._container == "archive" else "directory"
            what = several if isinstance(inventory, DirectoryInventory) else "file"
            self.notes.append(reason + f"; nothing was written, -o OUT copies the {what}" * is_idle)
        if request.dry_run and not (is_idle or request.force) and os.path.lexists(request.target):
            self.notes.append(f"{request.target} is there already: without --force nothing replaces it")

    def result(self, written: int = 0) -> ConvertResult:
        """What came of it.

        Args:
            written: bytes of the output.
        """
        overflow = [overflow_note(sum(self.overflowed))] if self.overflowed else []
        return ConvertResult(
            container=self._container,
            plan=self.plan,
            output=self._request.target if self.is_writing else None,
            bytes_copied=written,
            seconds=time.perf_counter() - self._request.began,
            notes=(*self.notes, *overflow),
            unmatched=self._unmatched,
            is_refused=self._is_refused,
        )


def convert_file(request: ConvertRequest) -> ConvertResult:
    """Plan a conversion and carry it out.

    Errors as of :func:`ckptmove.api.convert`.
    """
    with naming(request.path), open_checkpoint(request.path, request.limits) as checkpoint:
        inventory = checkpoint.inventory
        conversion = Conversion(request, inventory, lambda: no_devices(inventory))
        if not conversion.is_writing:
            if request.dry_run:
                _try_out(checkpoint, conversion.plan)
            return conversion.result()
        require_output(request)
        with FileSink(request.target, force=request.force) as sink:
            written = write_checkpoint(checkpoint, conversion.plan, sink, request, conversion.overflowed.append)
            sink.commit(request.settle)
        if request.check and not checkpoint.container.has_checksums():
            conversion.notes.append("the file holds no CRCs: its bytes were copied unchecked")
    return conversion.result(written)


def _require_suffix(request: ConvertRequest, inventory: Inventory) -> None:
    """Refuse an output whose suffix names another format. The suffix of the source is right, whatever it is.

    Raises:
        OutputSuffix: readers that go by the suffix would fail on the output.
    """
    if request.output is None:
        return
    (root, suffix), source = os.path.splitext(request.output), os.path.splitext(request.beside)[1]  # noqa: PTH122  # paths stay as they were typed
    form = inventory.form if isinstance(inventory, DirectoryInventory) else None
    container = form or inventory.container
    named = _SUFFIXES.get(suffix.lower())
    if named is not None and container not in named and suffix.lower() != source.lower():
        raise OutputSuffix(request.output, suffix, container, root + ("" if container == "directory" else source))


def _require_whole(inventory: DirectoryInventory) -> None:
    """Refuse what is cut off in a directory or an archive before anything is written, and in a dry run too.

    Raises:
        DamagedArchive: bytes that would have to be copied are not there.
    """
    containers = {file.path: file.container for file in inventory.files}
    for fact in inventory.facts:
        folder = fact.record
        while folder and folder not in containers:
            folder = folder.rpartition("/")[0]
        # What a file never held is lost already, and only said; of a distributed checkpoint nothing else is a copy.
        is_refused = fact.kind == "past-end" or containers.get(folder, "dcp") == "dcp"
        if fact.kind in _BROKEN and is_refused:
            raise DamagedArchive(inventory.path, f"'{fact.record:.200}' is not what was written, or not all")


def _try_out(checkpoint: Checkpoint, plan: MovePlan) -> None:
    """Refuse in a dry run what the conversion would refuse, as far as no tensor has to be read to know.

    Raises:
        DamagedArchive, UneditablePickle: as :func:`write_checkpoint`.
        CrcMismatch: the bytes of a deflated record that is no storage differ from their CRC.
    """
    # Without the casts: an archive reads what is to be cast, for its new CRC.
    checkpoint.container.lay_out(apply_plan(checkpoint.machine, plan), {})
    absent = {fact.storage_key for fact in checkpoint.inventory.facts if fact.kind == "missing-storage"}
    for edit in plan.edits:
        if edit.cast is not None and edit.storage in absent:
            raise DamagedArchive(checkpoint.inventory.path, f"storage '{edit.storage:.40}' has no bytes to be cast")


def require_output(request: ConvertRequest) -> None:
    """Refuse a new file that cannot be one, before anything is written; clear up what others have left there.

    Raises:
        OutputIsFolder, OutputIsSource, OutputExists: as they say.
    """
    target = request.target
    clear_leftovers(Path(target).parent)
    if is_folder(target) or target.endswith(tuple(SEPARATORS)):
        raise OutputIsFolder(target, os.path.join(target, os.path.basename(request.beside)))  # noqa: PTH118, PTH119  # a path stays as it was typed: a Path would drop "./" and a slash at its end
    if same_file(request.path, target):
        raise OutputIsSource(target)
    if not request.force and os.path.lexists(target):
        raise OutputExists(target)


def write_checkpoint(
    checkpoint: Checkpoint,
    plan: MovePlan,
    sink: ByteSink,
    request: ConvertRequest,
    overflowed: Callable[[int], None],
) -> int:
    """Write an open checkpoint, changed by its plan, into a sink; return the number of bytes.

    Args:
        checkpoint: the source.
        plan: that was made for it.
        sink: takes the bytes; whoever opened it commits it.
        request: its path for errors, whether to check, and whom to tell of the progress.
        overflowed: told of the values of a tensor that were too large for the dtype that they were cast to.

    Raises:
        CrcMismatch, DamagedArchive, SourceChanged, AccessFailed: as the source.
        UneditablePickle: a change falls on a place that no pickler of Python writes.
        WriteFailed: as the sink.
    """
    segments = lay_out(checkpoint, plan, request)
    return write_segments(checkpoint.container.source, segments, sink, request.path, request.progress, overflowed)


def lay_out(checkpoint: Checkpoint, plan: MovePlan, request: ConvertRequest) -> tuple[Segment, ...]:
    """The segments of an open checkpoint, changed by its plan.

    Raises:
        CrcMismatch, DamagedArchive, UneditablePickle: as :func:`write_checkpoint`.
    """
    casts = {edit.storage: edit.cast for edit in plan.edits if edit.cast is not None}
    segments = checkpoint.container.lay_out(apply_plan(checkpoint.machine, plan), casts)
    return segments if request.check else without_checks(segments)
