"""Inspect, show and convert one file, and check the invariant of every fuzz target.

Sources and sinks are bytes in memory. ``wholes`` does the same for directories and archives, on the disk.

The invariant: only :class:`ckptmove.errors.CkptMoveError` escapes, with a one-line message. Text for a terminal has no
control characters. A converted file reads back as planned. ``diff`` finds the planned changes and no others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeAlias

from ckptmove.api import document
from ckptmove.api.inspection import Inspection, InspectRequest
from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
from ckptmove.checkpoint.pairing import pair_all
from ckptmove.checkpoint.parts import FilePart, read_file
from ckptmove.checkpoint.summary import summarize
from ckptmove.cli.render import conversion, github, inspection, report
from ckptmove.cli.render.renderer import Detail, InspectAnswer
from ckptmove.cli.render.text import Page, sentence
from ckptmove.comparison.compare import TensorComparison
from ckptmove.comparison.counterparts import find_counterparts
from ckptmove.conversion.conversion import Conversion, ConvertRequest
from ckptmove.conversion.plan import plan_move
from ckptmove.conversion.remap.new_files import lay_out_file
from ckptmove.conversion.results import Converted
from ckptmove.errors import CkptMoveError
from ckptmove.findings.context import Context
from ckptmove.findings.registry import find_all
from ckptmove.formats.contract import ReadOnlyFormat
from ckptmove.io.part import MemorySource
from ckptmove.io.rewrite import write_segments
from ckptmove.limits import Limits
from ckptmove.moves import MoveRequest
from ckptmove.pickles.machine import interpret

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ckptmove.checkpoint.inventory.outline import OutlineLine
    from ckptmove.io.contracts import ByteWriter
    from ckptmove.model import ArchiveFact, Inventory, TensorRecord
    from ckptmove.moves import MovePlan

    #: The inventory of a checkpoint, and the bytes of its storages.
    Snapshot: TypeAlias = tuple[Inventory, Mapping[str, bytes | None]]

#: The default limits, except for fewer visited nodes: a bomb takes milliseconds instead of seconds.
LIMITS: Final = Limits(visits=20_000)
REQUESTS: Final = (
    MoveRequest(to="cuda:0", rewrite_strings=True),
    MoveRequest(to="mps", cast=True),
    MoveRequest(to="cpu", keep=("model*",)),
)
PAGE: Final = Page(columns=100, unicode=True)
_DETAIL: Final = Detail(tensors=True, tree=True, globals=True, verbose=True)


class MemorySink:
    """A sink that collects bytes in memory."""

    def __init__(self) -> None:
        self.data = bytearray()

    def clone(self, source: int) -> bool:
        """Return False: memory cannot be cloned."""
        del source
        return False

    def at(self, start: int) -> ByteWriter:
        """Never called, because the segments are written in turn."""
        raise NotImplementedError

    def skip(self, nbytes: int) -> None:
        """Never called, because :meth:`clone` returns False."""
        raise NotImplementedError

    def reserve(self, nbytes: int) -> None:
        """Do nothing: the buffer grows."""

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        self.data += data

    def copy(self, source: int, start: int, nbytes: int) -> int:
        """Return 0: the kernel copies nothing."""
        del source, start, nbytes
        return 0


def guarded(target: Callable[[bytes], None], data: bytes) -> str:
    """Run a target on an input.

    Returns:
        The kind of the error that it raised; ``ok`` if it raised none.
    """
    try:
        target(data)
    except CkptMoveError as error:
        require_printable([sentence(str(error))])
        return error.kind
    return "ok"


def examine_pickle(data: bytes) -> None:
    """Run the pickle machine alone; check that it ends inside the data, with an empty stack."""
    machine = interpret(data, LIMITS)
    require(0 < machine.end <= len(data), "it ended outside the data")
    require(not machine.stack and not machine.marks, "something was left on the stack")
    require(len(machine.memo) <= len(data), "more was memoised than there are operations")


def examine_file(data: bytes) -> None:
    """Inspect a file with every flag, show it in every format, and convert it in three ways."""
    checkpoint = opened(data)
    show_checkpoint(checkpoint, checkpoint.file.outline(), checkpoint.check())
    in_each_way(lambda request: convert(data, request))


def show_checkpoint(checkpoint: OpenCheckpoint, lines: tuple[OutlineLine, ...], facts: tuple[ArchiveFact, ...]) -> None:
    """Render the output of ``inspect`` in every format."""
    inventory = replace(checkpoint.inventory, facts=facts)
    found = Inspection(
        inventory=inventory,
        findings=find_all(inventory, Context(target=None, device_count=1)),
        outline=lines,
        summary=summarize(checkpoint),
        pairings=pair_all(inventory),
    )
    answer = InspectAnswer(
        request=InspectRequest("input"), result=found, tensors=inventory.tensors, exit_code=1, detail=_DETAIL
    )
    require_printable(inspection.inspection_lines(PAGE, answer))
    require_printable(github.annotations_of(report.inspected(answer)))
    require_printable([document.dumps(found.to_dict())])


def show_result(result: Converted) -> None:
    """Render the output of ``convert`` in every format."""
    require_printable(conversion.conversion_lines(PAGE, "input", result, verbose=True))
    require_printable([document.dumps(document.conversion(result))])


def in_each_way(convert_one: Callable[[MoveRequest], None]) -> None:
    """Call a function with every request.

    Raises:
        CkptMoveError: the last refusal, after all requests were tried.
    """
    refused: CkptMoveError | None = None
    for request in REQUESTS:
        try:
            convert_one(request)
        except CkptMoveError as error:  # noqa: PERF203  # the other requests are tried too
            refused = error
    if refused is not None:
        raise refused


def asked_for(path: str, move: MoveRequest, output: str | None = None, *, in_place: bool = False) -> ConvertRequest:
    """The request that the command line makes for a conversion."""
    return ConvertRequest(
        path=path, move=move, output=output, default_output="output", in_place=in_place, force=False, dry_run=False,
        check=True, progress=None, limits=LIMITS,
    )  # fmt: skip


def opened(data: bytes) -> OpenCheckpoint:
    """Open a checkpoint in memory.

    Raises:
        CkptMoveError: if the data is not a checkpoint.
    """
    part = FilePart(read_file(MemorySource("input", data), LIMITS), LIMITS, None)
    return OpenCheckpoint(part.inventory, (part,), ())


def convert(data: bytes, request: MoveRequest) -> None:
    """Convert a checkpoint, and compare the output with the plan.

    Raises:
        CkptMoveError: if it cannot be converted.
    """
    checkpoint = opened(data)
    try:
        conversion, sink = Conversion(asked_for("input", request), checkpoint), MemorySink()
    except ReadOnlyFormat:
        return
    plan, remapped = conversion.plan, conversion.remapped
    with checkpoint.file.content() as (container, machine):
        if remapped is None:
            source, segments = container.source, conversion.lay_out(container, machine, plan)
        else:  # its format is not written
            source, segments = lay_out_file(conversion, remapped, checkpoint)
        written = write_segments(source, segments, sink)
    require(written == len(sink.data), "the number of bytes written is wrong")
    show_result(Converted(container="torch-zip", plan=plan, output="output", bytes_copied=written, seconds=0.0))
    if plan.is_empty:
        return
    try:
        after = opened(bytes(sink.data))
        again = plan_move(after.inventory, request)
    except CkptMoveError as error:
        raise AssertionError("the output cannot be read") from error
    require(again.is_empty, "a converted checkpoint would be converted again")
    if remapped is None:
        require_planned((checkpoint.inventory, bytes_of(checkpoint)), plan, (after.inventory, bytes_of(after)))
        _require_different(checkpoint, plan, after)


def require_planned(source: Snapshot, plan: MovePlan, output: Snapshot) -> None:
    """Check devices and dtypes of the storages against the plan, and that all else is unchanged."""
    edits = {edit.storage: edit for edit in plan.edits}
    (before, old_bytes), (after, new_bytes) = source, output
    require([one.key for one in before.storages] == [one.key for one in after.storages], "storages differ")
    for old, new in zip(before.storages, after.storages, strict=True):
        edit = edits.get(old.key)
        cast = edit.cast if edit is not None else None
        require(new.device == (old.device if edit is None else edit.target), f"storage {old.key} is on another device")
        require(new.dtype == (old.dtype if cast is None else cast[1]), f"storage {old.key} has another dtype")
        require(new.numel == old.numel, f"storage {old.key} has another size")
        if cast is None and old.key not in plan.inflates:
            require(old_bytes.get(old.key) == new_bytes.get(old.key), f"storage {old.key} has other bytes")
    require([*map(_geometry, before.tensors)] == [*map(_geometry, after.tensors)], "tensors differ")
    require(_names(before) == _names(after), "the pickle names other globals")


def _require_different(source: OpenCheckpoint, plan: MovePlan, output: OpenCheckpoint) -> None:
    """Check that ``diff`` finds only changes that the plan makes: devices, casts, flags and strings."""
    comparison = TensorComparison(source, output, LIMITS, lambda *_: None)
    found = comparison.result(find_counterparts(source, output))
    require(not found.added and not found.removed, "diff finds added or removed tensors")
    allowed: set[str] = {"device"}
    if any(edit.cast is not None for edit in plan.edits):
        allowed |= {"dtype", "value", "object"}  # storage classes are in the tree too
    if plan.flags:
        allowed.add("object")
    for change in found.changed:
        require(change.what in allowed, f"diff finds {change}")


def bytes_of(checkpoint: OpenCheckpoint) -> dict[str, bytes | None]:
    """The bytes of each storage of an open checkpoint, by key."""
    found: dict[str, bytes | None] = {}
    for part in checkpoint.parts:
        for storage in part.inventory.storages if isinstance(part, FilePart) else ():
            stored = part.storage(storage.key.removeprefix(f"{part.name}/"))
            found[storage.key] = None if stored is None else stored.source.read(stored.span.start, stored.span.end)
    return found


def _geometry(tensor: TensorRecord) -> tuple[object, ...]:
    return (
        tensor.name,
        tensor.shape,
        tensor.stride,
        tensor.storage,
        tensor.storage_offset,
        tensor.role,
    )


def _names(inventory: Inventory) -> set[str]:
    """Names of the globals, without storage classes, which a cast changes."""
    return {use.name for use in inventory.globals if not use.name.endswith("Storage")}


def require_printable(lines: Iterable[str]) -> None:
    """Fail if a line has a control character."""
    for line in lines:
        require(line.isprintable(), f"not printable: {line!r}")


def require(holds: bool, otherwise: str) -> None:
    """Fail if a condition does not hold."""
    if not holds:
        raise AssertionError(otherwise)
