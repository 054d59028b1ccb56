"""Cut an optimizer's parameters and state into pieces that fit in memory, and group the pieces into batches.

A piece holds records and no tensors: it names the elements of each record that are stepped together.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from ckptmove.checkpoint.pairing import moments
from ckptmove.checkpoint.state_dicts import is_never_trained
from ckptmove.formats.local_shards import CLASSES
from ckptmove.lazy.geometry import extent_numel, is_contiguous
from ckptmove.torch_facts.optimizers import BY_NAME, is_elementwise, keeps_state_on_first

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator

    import torch

    from ckptmove.model import OptimizerRecord, StateEntry, TensorRecord

#: Elements stepped at once. With fewer, each step takes longer to prepare than to compute; the results of a few times
#: as many do not fit in a processor's cache.
WINDOW_ELEMENTS: Final = 2**19
_BATCH_PIECES: Final = 512
#: Elements in the extents of all runs of a tensor, as a multiple of those in its own extent.
_MOST_OVERLAP: Final = 2
NOT_SAMPLED: Final = "not in the sample"
#: Why a parameter without state is not stepped if other parameters have state.
WITHOUT_STATE: Final = "it has no state, so it was frozen or its state is lost"
#: What proves the shard of one rank.
_OF_RANKS: Final = "verify reads the files of all ranks together, from their directory"
#: Groups in a batch. An optimizer compares each new group with all groups before it.
_BATCH_GROUPS: Final = 32


class TensorSource(Protocol):
    """A source of tensors by record; the returned tensors must not be written to."""

    def tensor(self, record: TensorRecord, window: Window | None = None) -> torch.Tensor:
        """The tensor of a record, or a run of its elements, on the CPU."""
        ...


class Window(NamedTuple):
    """A run of a parameter's elements."""

    start: int  # first element or row
    end: int  # element or row after the last one
    flat: bool  # whether it counts elements of the flat tensor; otherwise rows

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """This run of a tensor with the parameter's shape, as a view if the tensor is contiguous or it counts rows."""
        return (tensor.reshape(-1) if self.flat else tensor).narrow(0, self.start, self.end - self.start)

    def of(self, record: TensorRecord) -> TensorRecord | None:
        """This run as a record of its own; None if it is cut from the whole tensor instead.

        That is so if its elements are not in order in the storage, or if the runs of the tensor overlap there, as the
        rows of a transposed tensor do: to read them one by one, most of the storage is read for each.
        """
        count = self.end - self.start
        if not self.flat:
            start = record.storage_offset + self.start * record.stride[0]
            run = record._replace(shape=(count, *record.shape[1:]), storage_offset=start)
            share = count / record.shape[0]
            whole = extent_numel(record.shape, record.stride)
            return run if extent_numel(run.shape, run.stride) <= _MOST_OVERLAP * share * whole else None
        if not is_contiguous(record.shape, record.stride):
            return None
        return record._replace(shape=(count,), stride=(1,), storage_offset=record.storage_offset + self.start)


class ParameterPiece(NamedTuple):
    """A parameter, or a run of its elements, with its optimizer state."""

    name: str  # the parameter's name in the checkpoint, or the path of its state if the file has no parameter
    group: int  # index of its group
    #: its record; if the file has none, the record of its first moment, which has the same shape.
    parameter: TensorRecord
    is_stored: bool  # whether `parameter` is the record of the parameter itself
    entry: StateEntry | None  # its state, or None
    window: Window | None  # its run of elements; None for all
    elements: int  # number of elements
    offset: int  # index of its first element in the parameter
    position: int = 0  # index of the parameter among those of the optimizer

    def of(self, record: TensorRecord, source: TensorSource) -> torch.Tensor:
        """This piece of a tensor: its window if the tensor has the parameter's shape, else the whole tensor."""
        if self.window is None or record.shape != self.parameter.shape:
            return source.tensor(record)
        return source.tensor(record, self.window)


class SelectedParameters(NamedTuple):
    """The parameters of an optimizer that are stepped, and those that are not."""

    pieces: list[ParameterPiece]  # pieces of the parameters to step, in the order of the groups
    left_out: dict[str, list[str]]  # names of listed parameters that cannot be stepped, by reason

    def leave_out(self, name: str, reason: str) -> None:
        """Note a parameter that is not stepped, unless its library never steps it."""
        if reason != WITHOUT_STATE or not is_never_trained(name):
            self.left_out.setdefault(reason, []).append(name)


def select(
    optimizer: OptimizerRecord,
    parameters: dict[str, TensorRecord | None],
    algorithm: str,
    chosen: Container[str] | None = None,
    obstacle: Callable[[TensorRecord], str] = lambda record: f"it keeps a {record.kind} tensor ({record.name})",
    own: Container[str] | None = None,
) -> SelectedParameters:
    """Select the parameters that can be stepped.

    A parameter without state is not stepped if others have state. If the file has no values of a parameter, a tensor
    with the shape of its moment is used instead.

    Args:
        parameters: the parameter's record by state key, or None.
        algorithm: class name in ``torch.optim``, or the name of another class.
        chosen: keys of the parameters to step; None for all. An optimizer that steps all as one vector ignores it.
        obstacle: returns why state that is not dense cannot be restored, or an empty string if it can.
        own: keys of the parameters whose pieces are returned; None for all.
    """
    entries = {entry.key: entry.without_inner() for entry in optimizer.state}
    found = SelectedParameters([], {})
    listed = [(index, key) for index, group in enumerate(optimizer.groups) for key in group.params]
    for place, (index, key) in enumerate(listed):
        entry = entries.get(key)
        is_apart = not keeps_state_on_first(algorithm)
        parameter = parameters.get(key)
        known = parameter or _stand_in(entry, algorithm)
        name = parameter.name if parameter is not None else f"{optimizer.where}.state.{key}".lstrip(".")
        if is_apart and not (chosen is None or key in chosen):
            reason = NOT_SAMPLED
        elif is_apart and entries and entry is None:
            reason = WITHOUT_STATE
        elif known is None:
            reason = "the file contains neither the parameter nor a moment of its shape"
        elif not is_dense(known):
            reason = f"it is a {known.subclass or f'{known.kind} tensor'}, without plain values to step"
            if known.subclass in CLASSES:
                reason += f"; {_OF_RANKS}"
        else:
            others = [one for _, one in entry.tensors if not is_dense(one)] if entry is not None else []
            reason = next(filter(None, map(obstacle, others)), "")
        if known is None or reason:
            found.leave_out(name, reason)
            continue
        if own is not None and key not in own:
            continue
        size = prod(known.shape)
        whole = ParameterPiece(name, index, known, parameter is not None, entry, None, size, 0, place)
        found.pieces.extend(_cut(whole) if is_elementwise(algorithm) else (whole,))
    return found


def is_dense(record: TensorRecord) -> bool:
    """Whether a storage contains the tensor's values one by one; False for meta, sparse and quantized tensors."""
    return record.storage is not None and not record.parts and record.kind in {"tensor", "parameter"}


def batches(pieces: Iterator[ParameterPiece], *, together: bool) -> Iterator[list[ParameterPiece]]:
    """Group pieces into batches, each for one optimizer instance: many small pieces, or one large piece."""
    batch: list[ParameterPiece] = []
    groups: set[int] = set()
    elements = 0
    for piece in pieces:
        is_full = elements + piece.elements > WINDOW_ELEMENTS or len(batch) == _BATCH_PIECES
        if batch and not together and (is_full or len(groups | {piece.group}) > _BATCH_GROUPS):
            yield batch
            batch, elements = [], 0
            groups.clear()
        batch.append(piece)
        groups.add(piece.group)
        elements += piece.elements
    if batch:
        yield batch


def _stand_in(entry: StateEntry | None, algorithm: str) -> TensorRecord | None:
    """A moment of a parameter that is not in the file; it has the parameter's shape."""
    known = algorithm if algorithm in BY_NAME else None
    return next((record for _, record in moments(entry, known)), None) if entry is not None else None


def _cut(piece: ParameterPiece) -> Iterator[ParameterPiece]:
    tensors = [piece.parameter, *(record for _, record in piece.entry.tensors)] if piece.entry else [piece.parameter]
    sized = [record for record in tensors if record.shape]
    if piece.elements <= WINDOW_ELEMENTS or any(record.shape != piece.parameter.shape for record in sized):
        yield piece  # a moment of another shape: the step shows whether the optimizer accepts it
        return
    flat = all(is_contiguous(record.shape, record.stride) for record in sized)
    rows = piece.elements if flat else piece.parameter.shape[0]
    row = piece.elements // rows
    step = max(1, WINDOW_ELEMENTS // row)
    for start in range(0, rows, step):
        end = min(start + step, rows)
        window = Window(start, end, flat)
        yield piece._replace(window=window, elements=(end - start) * row, offset=start * row)
