"""The values that the command line adds to those of the use-cases: what was asked for besides, and what failed.

Never makes a decision and never formats one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ckptmove.api import Inspection
    from ckptmove.model import TensorRecord
    from ckptmove.moves import StorageEdit


class Failure(NamedTuple):
    """An error as it is told: the fact, and what to do next.

    Attributes:
        kind: the error's kebab-case name.
        message: the fact, in one line.
        hint: what to do next; empty where there is nothing to say.
        path: the file that it is about, or None.
        exit_code: what the command leaves with because of it.
    """

    kind: str
    message: str
    hint: str
    path: str | None
    exit_code: int


class Expectation(NamedTuple):
    """The answer to ``--expect``.

    Attributes:
        device: where everything that should move was expected.
        misplaced: the moves that would bring it there; empty where the expectation is met.
        unplaced: tensors with which no device is stored, so that whatever loads them decides.
    """

    device: str
    misplaced: tuple[StorageEdit, ...]
    unplaced: int


class InspectAnswer(NamedTuple):
    """What ``inspect`` has to say of one checkpoint.

    Attributes:
        inspection: what was found; of its findings, those that count.
        tensors: those whose names match.
        expectation: the answer to ``--expect``, or None.
        exit_code: 0 or 1.
    """

    inspection: Inspection
    tensors: tuple[TensorRecord, ...]
    expectation: Expectation | None
    exit_code: int


class Detail(NamedTuple):
    """How much of it people want to see.

    Attributes:
        tensors: a row for each tensor.
        tree: the outline.
        globals: the names that the pickle would import.
        verbose: every place of every finding.
    """

    tensors: bool = False
    tree: bool = False
    globals: bool = False
    verbose: bool = False


class Share(NamedTuple):
    """The tensors of one role on one device.

    Attributes:
        device: their tag.
        role: what they are for.
        tensors: how many there are.
        nbytes: what they take; a tensor that has two names counts once.
    """

    device: str
    role: str
    tensors: int
    nbytes: int


def shares(tensors: tuple[TensorRecord, ...]) -> tuple[Share, ...]:
    """How tensors lie on devices, by role, in the order of the file."""
    counts: dict[tuple[str, str], int] = {}
    nbytes: dict[tuple[str, str], int] = {}
    # Most tensors have a storage for themselves: only those of the others are told apart as views.
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
    """What two names of one tensor have in common."""
    numbers = tensor.storage_offset, tensor.dtype, tensor.shape, tensor.stride
    return tensor.device, tensor.role, tensor.storage, *numbers
