"""The answers of commands, as renderers receive them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ckptmove.api import Inspection, InspectRequest
    from ckptmove.conversion.conversion import ConvertRequest
    from ckptmove.model import TensorRecord
    from ckptmove.moves import ConvertResult, StorageEdit
    from ckptmove.verification.evidence import VerifyResult
    from ckptmove.verification.request import VerifyRequest


class Failure(NamedTuple):
    """An error with its hint.

    Attributes:
        kind: kebab-case name of the error.
        message: the error, in one line.
        hint: what to do next; may be empty.
        path: the checkpoint that failed, or None.
        exit_code: exit code of the command.
    """

    kind: str
    message: str
    hint: str
    path: str | None
    exit_code: int


class Expectation(NamedTuple):
    """The result of ``--expect``.

    Attributes:
        device: the expected device.
        misplaced: moves that would meet the expectation; empty if it is met.
        unplaced: number of tensors that are stored without a device.
    """

    device: str
    misplaced: tuple[StorageEdit, ...]
    unplaced: int


class Detail(NamedTuple):
    """Optional parts of the report of ``inspect``.

    Attributes:
        tensors: a row for each tensor.
        tree: the outline.
        globals: the names that the pickle imports.
        verbose: every place of every finding.
    """

    tensors: bool = False
    tree: bool = False
    globals: bool = False
    verbose: bool = False


class InspectAnswer(NamedTuple):
    """The answer of ``inspect`` for one checkpoint.

    Attributes:
        request: the options of the command.
        inspection: the inventory, and the findings that ``--select`` and ``--ignore`` leave.
        tensors: the tensors that ``--match`` leaves.
        expectation: the result of ``--expect``, or None.
        exit_code: 0 or 1.
        detail: optional parts of the report.
    """

    request: InspectRequest
    inspection: Inspection
    tensors: tuple[TensorRecord, ...]
    expectation: Expectation | None
    exit_code: int
    detail: Detail = Detail()


class ConvertAnswer(NamedTuple):
    """The answer of ``convert``.

    Attributes:
        request: the options of the command.
        result: the plan, and the output if one was written.
        exit_code: 1 if ``--strict`` stopped the conversion, otherwise 0.
        strict_from: path of the configuration file that sets ``strict``; empty if ``--strict`` was typed.
    """

    request: ConvertRequest
    result: ConvertResult
    exit_code: int = 0
    strict_from: str = ""


class VerifyAnswer(NamedTuple):
    """The answer of ``verify`` for one checkpoint.

    Attributes:
        request: the options of the command.
        result: the checks, the findings and the verdict.
        strict: whether warnings, and a resume that is not proven, are failures.
        dry_run: whether the answer is a patch of the user's files, which are not written.
    """

    request: VerifyRequest
    result: VerifyResult
    strict: bool = False
    dry_run: bool = False

    @property
    def fails(self) -> bool:
        """Whether the exit code is 1."""
        return self.result.fails(strict=self.strict)


class Summary(NamedTuple):
    """The outcome of a command.

    Attributes:
        command: name of the command, or None if the command line names no known one.
        exit_code: the highest exit code of its checkpoints.
        failures: errors, in the order in which they occurred.
        checkpoints: number of checkpoints of the command.
        good: number of checkpoints with the exit code 0.
        unproven: how many of those are not proven to resume.
        skipped: how many of those were left out by ``--skip-existing``.
        is_complete: False if an interruption left checkpoints out.
    """

    command: str | None
    exit_code: int
    failures: tuple[Failure, ...] = ()
    checkpoints: int = 1
    good: int = 0
    unproven: int = 0
    skipped: int = 0
    is_complete: bool = True


class Share(NamedTuple):
    """Number and size of the tensors of one role on one device.

    Attributes:
        device: device tag.
        role: role in the checkpoint, as of :class:`ckptmove.model.TensorRecord`.
        tensors: number of tensors.
        nbytes: size in bytes; a tensor with two names counts once.
    """

    device: str
    role: str
    tensors: int
    nbytes: int


def shares(tensors: tuple[TensorRecord, ...]) -> tuple[Share, ...]:
    """Count tensors by device and role, in the order of the file."""
    counts: dict[tuple[str, str], int] = {}
    nbytes: dict[tuple[str, str], int] = {}
    # Most storages hold one tensor. Only tensors that share a storage are compared as views.
    first: dict[str | None, TensorRecord] = {}
    views: set[tuple[object, ...]] = set()
    for tensor in tensors:
        place = (tensor.device, tensor.role)
        counts[place] = counts.get(place, 0) + 1
        other = first.setdefault(tensor.storage, tensor)
        if other is not tensor and tensor.storage is not None:
            views.add(_view(other))
            if _view(tensor) in views:
                continue
            views.add(_view(tensor))
        nbytes[place] = nbytes.get(place, 0) + tensor.nbytes
    return tuple(Share(*place, counts[place], nbytes[place]) for place in counts)


def _view(tensor: TensorRecord) -> tuple[object, ...]:
    """A key that is equal for two names of one tensor."""
    numbers = tensor.storage_offset, tensor.dtype, tensor.shape, tensor.stride
    return tensor.device, tensor.role, tensor.storage, *numbers
