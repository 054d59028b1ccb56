"""What every fuzzer does with an input, and what must hold of it.

Never writes a file: sources and sinks are bytes in memory.

The invariant: only :class:`ckptmove.errors.CkptMoveError` escapes, in one line; nothing that is shown to people holds a
character that a terminal would obey; and whatever is converted reads back as it was planned.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ckptmove.api import Inspection
from ckptmove.checkpoint import Checkpoint
from ckptmove.containers.opening import container_of
from ckptmove.conversion import ConvertRequest, write_checkpoint
from ckptmove.errors import CkptMoveError
from ckptmove.findings.context import Context
from ckptmove.findings.registry import find_all
from ckptmove.inventory.build import build_inventory
from ckptmove.inventory.outline import outline
from ckptmove.model import Limits
from ckptmove.moves import ConvertResult, MoveRequest
from ckptmove.pickles.machine import interpret
from ckptmove.plan import plan_move
from ckptmove.report import conversion, document, github, inspection
from ckptmove.report.answers import Detail, InspectAnswer
from ckptmove.report.page import Page
from ckptmove.report.text import sentence
from ckptmove.streams.part import MemorySource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ckptmove.model import Inventory, TensorRecord
    from ckptmove.moves import MovePlan

#: Those of the program, but for the walk, so that a bomb costs a fuzzer milliseconds and not seconds.
LIMITS: Final = Limits(visits=20_000)
REQUESTS: Final = (
    MoveRequest(to="cuda:0", rewrite_strings=True),
    MoveRequest(to="mps", cast=True),
    MoveRequest(to="cpu", keep=("model*",)),
)
_PAGE: Final = Page(columns=100, unicode=True)
_DETAIL: Final = Detail(tensors=True, tree=True, globals=True, verbose=True)


class MemorySink:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.data = bytearray()

    def reserve(self, nbytes: int) -> None:
        """Nothing: there is room as long as there is memory."""

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        self.data += data

    def copy(self, source: int, start: int, nbytes: int) -> int:
        """Nothing is copied by the kernel."""
        del source, start, nbytes
        return 0


def guarded(target: Callable[[bytes], None], data: bytes) -> str:
    """Run a target on an input.

    Returns:
        The kind of the error that it ended with; ``ok`` without one.
    """
    try:
        target(data)
    except CkptMoveError as error:
        _require_printable([sentence(str(error))])
        return error.kind
    return "ok"


def examine_pickle(data: bytes) -> None:
    """The symbolic machine alone: it ends inside of the data, with nothing left over."""
    machine = interpret(data, LIMITS)
    _require(0 < machine.end <= len(data), "it ended outside of the data")
    _require(not machine.stack and not machine.marks, "something was left on the stack")
    _require(len(machine.memo) <= len(data), "more was memoised than there are operations")


def examine_file(data: bytes) -> None:
    """A file of any kind: inspected with every flag, shown in every format, and converted in three ways."""
    checkpoint = opened(data)
    container, machine = checkpoint.container, checkpoint.machine
    inventory = replace(checkpoint.inventory, facts=(*checkpoint.inventory.facts, *container.check()))
    lines = outline(machine.root, LIMITS, len(machine.data))
    findings = find_all(inventory, Context(target=None, device_count=1))
    answer = InspectAnswer(
        inspection=Inspection(inventory, findings, lines), tensors=inventory.tensors, expectation=None, exit_code=1
    )
    _require_printable(inspection.inspection_lines(_PAGE, answer, _DETAIL))
    _require_printable(github.inspection_lines(answer))
    _require_printable([document.dumps(document.inspect_document([answer], 1, []))])
    refused: CkptMoveError | None = None
    for request in REQUESTS:
        try:
            convert(data, request)
        except CkptMoveError as error:  # noqa: PERF203  # the other requests are tried all the same
            refused = error
    if refused is not None:
        raise refused


def opened(data: bytes) -> Checkpoint:
    """A checkpoint in memory.

    Raises:
        CkptMoveError: it is none.
    """
    container = container_of(MemorySource("input", data), LIMITS)
    machine = container.read()
    return Checkpoint(container, machine, build_inventory(container, machine, LIMITS))


def convert(data: bytes, request: MoveRequest) -> None:
    """Convert a checkpoint, and hold what comes out against the plan.

    Raises:
        CkptMoveError: it cannot be converted.
    """
    checkpoint = opened(data)
    plan = plan_move(checkpoint.inventory, request)
    sink = MemorySink()
    asked = ConvertRequest(
        path="input", move=request, output=None, beside="output", force=False, dry_run=False, check=True, progress=None,
        limits=LIMITS,
    )  # fmt: skip
    written = write_checkpoint(checkpoint, plan, sink, asked, lambda _: None)
    _require(written == len(sink.data), "the count of bytes written is wrong")
    result = ConvertResult(container="torch-zip", plan=plan, output="output", bytes_copied=written, seconds=0.0)
    _require_printable(conversion.conversion_lines(_PAGE, "input", result, verbose=True))
    _require_printable([document.dumps(document.convert_document(result))])
    if plan.is_empty:
        return
    try:
        after = opened(bytes(sink.data))
        again = plan_move(after.inventory, request)
    except CkptMoveError as error:
        raise AssertionError("what was written cannot be read") from error
    _require(again.is_empty, "what was converted would be converted again")
    _require_planned(checkpoint, plan, after)


def _require_planned(source: Checkpoint, plan: MovePlan, output: Checkpoint) -> None:
    """The storages lie and are typed as planned, hold the same bytes, and everything else says what it said."""
    edits = {edit.storage: edit for edit in plan.edits}
    before, after = source.inventory, output.inventory
    _require([one.key for one in before.storages] == [one.key for one in after.storages], "storages differ")
    for old, new in zip(before.storages, after.storages, strict=True):
        edit = edits.get(old.key)
        cast = edit.cast if edit is not None else None
        _require(new.device == (old.device if edit is None else edit.target), f"storage {old.key} is misplaced")
        _require(new.dtype == (old.dtype if cast is None else cast[1]), f"storage {old.key} has another dtype")
        _require(new.numel == old.numel, f"storage {old.key} has another size")
        if cast is None and old.key not in plan.inflates:
            _require(_bytes_of(source, old.key) == _bytes_of(output, old.key), f"storage {old.key} has other bytes")
    _require([*map(_geometry, before.tensors)] == [*map(_geometry, after.tensors)], "tensors differ")
    _require(_names(before) == _names(after), "the pickle names other globals")


def _bytes_of(checkpoint: Checkpoint, key: str) -> bytes | None:
    span = checkpoint.container.storage_span(key)
    return None if span is None else checkpoint.container.source.read(span.start, span.end)


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
    """A cast writes another storage class."""
    return {use.name for use in inventory.globals if not use.name.endswith("Storage")}


def _require_printable(lines: Iterable[str]) -> None:
    for line in lines:
        _require(line.isprintable(), f"a terminal would obey {line!r}")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)
