"""Hold what a conversion has written against its source (``convert --verify``), before it gets its name.

Every tensor of the output is compared with the one that the options of the conversion name, bit for bit, after the cast
that they ask for. Torch and safetensors read both sides, and torch casts and joins.
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from ckptmove.conversion.target_format import names_format
from ckptmove.errors import CkptMoveError, DamagedArchive
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.proof.checks import Offenders
from ckptmove.proof.errors import ConversionDiffers
from ckptmove.proof.original.against import Sides
from ckptmove.proof.original.names import wanted
from ckptmove.proof.original.values import TorchTensors, difference, digest
from ckptmove.proof.restored.loaded import LoadedFiles
from ckptmove.proof.restored.survey import NOT_COMPARED
from ckptmove.proof.tensors.stored import StoredTensors, distinct

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import torch

    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.checkpoint.parts import OpenPart
    from ckptmove.conversion.conversion import ConvertRequest
    from ckptmove.model import TensorRecord
    from ckptmove.moves import Remap
    from ckptmove.proof.original.names import Wanted
    from ckptmove.proof.tensors.pieces import TensorSource

    #: Returns how a tensor of the output differs from a dense part of its source; empty if it does not.
    _Compare = Callable[[torch.Tensor, TensorRecord], str]


@contextmanager
def proof_of(request: ConvertRequest) -> Iterator[Callable[[str], int]]:
    """A function that compares the output of a conversion, at any path, with its source.

    It returns the number of tensors of the output, and raises ConversionDiffers if one of them is not what the request
    asks for. The values of a file that is changed in place are read before the change.
    """
    with ExitStack() as stack:
        before = _Digests(request, stack) if request.in_place else None
        yield lambda written: _compare(request, written, before)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Hide the warnings of torch about old pickles."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@_without_warnings()
def _compare(request: ConvertRequest, written: str, before: _Digests | None) -> int:
    with ExitStack() as stack:
        try:
            output = stack.enter_context(_opened(request, written, is_written=True))
        except CkptMoveError as error:
            raise ConversionDiffers(request.path, [f"it cannot be read: {error.message}"]) from error
        stored = stack.enter_context(StoredTensors(output.parts))
        own = LoadedFiles(output.parts, stored)
        if before is not None:
            values: TensorSource = TorchTensors(output, own, stored)
            faults = _Comparison(output, before.wanted, request.move.remap, before.unlike).faults(values)
        else:
            source = stack.enter_context(_opened(request, request.path))
            sides = Sides.of(output, own, stored, source, request.limits, stack)

            def unlike(values: torch.Tensor, record: TensorRecord) -> str:
                return difference(values, sides.others.tensor(record))

            sources = wanted(sides.original, request.move)
            faults = _Comparison(output, sources, request.move.remap, unlike).faults(sides.own)
            source.require_unchanged()
    if faults:
        raise ConversionDiffers(request.path, faults.failures())
    return len(output.inventory.tensors)


@contextmanager
def _opened(request: ConvertRequest, path: str, *, is_written: bool = False) -> Iterator[OpenCheckpoint]:
    """A side as the conversion reads it: in a copy of a directory, each rank keeps its file."""
    is_new = names_format(request.output) or request.shard_bytes is not None
    with open_checkpoint(
        path, request.limits, ranks=is_new, keep_trees=True, exclude=request.exclude, is_settled=is_written
    ) as checkpoint:
        yield checkpoint


class _Digests:
    """The digests of a file's tensors, before it is changed in place.

    Attributes:
        wanted: the tensors, and what they must be afterwards.
    """

    @_without_warnings()
    def __init__(self, request: ConvertRequest, stack: ExitStack) -> None:
        source = stack.enter_context(_opened(request, request.path))
        stored = stack.enter_context(StoredTensors(source.parts))
        values = TorchTensors(source, LoadedFiles(source.parts, stored), stored)
        self.wanted = wanted(source, request.move)
        dense = (part for one in self.wanted if one.record.kind not in NOT_COMPARED for part in one.record.dense())
        self._digests = {id(part): digest(distinct(values.tensor(part))) for part in dense}

    def unlike(self, values: torch.Tensor, record: TensorRecord) -> str:
        """How a tensor of the output differs from a dense part of the source; empty if it does not."""
        if values.shape != record.shape:
            return f": shape {list(values.shape)} in place of {list(record.shape)}"
        return "" if digest(distinct(values)) == self._digests[id(record)] else ": other bits"


class _Comparison:
    """The tensors of an output beside those that the options of the conversion name."""

    def __init__(self, output: OpenCheckpoint, sources: Sequence[Wanted], options: Remap, unlike: _Compare) -> None:
        self._output, self._sources, self._options, self._unlike = output, sources, options, unlike
        kept = [one for one in sources if one.is_kept]
        self._full = _index((one.part.full_name(one.name), one) for one in kept)
        self._by_name = _index((one.name, one) for one in kept)
        self._by_key = _index((one.key, one) for one in kept)
        self._inside = _index((_last(one.name), one) for one in sources if one.is_inside)

    def faults(self, values: TensorSource) -> Offenders:
        """Tensors of the output that differ from their source, that have none, or that are missing."""
        found = Offenders()
        used: set[object] = set()
        for part in self._output.parts:
            for record in part.inventory.tensors:
                fault = " is not in the source"
                for source in self._candidates(part, record):
                    used.add(_view(source))
                    fault = self._fault(record, source, values)
                    if not fault:
                        break
                if fault:
                    found.add(f"{record.name}{fault}")
        for one in self._sources:
            # A tied tensor may be written once. Only the state_dict is left of a module.
            is_lost = one.is_inside and self._options.plain and one.record.kind != "parameter"
            if one.is_kept and not is_lost and _view(one) not in used:
                found.add(f"{one.record.name} is missing")
        return found

    def _candidates(self, part: OpenPart, record: TensorRecord) -> Sequence[Wanted]:
        """The tensors of the source that a tensor of the output may be: several if files have the same names."""
        full, name = self._full.get(record.name, ()), part.own_name(record.name)
        if full:
            return full
        if name in self._by_name:
            return self._by_name[name]
        ends = [place for place, letter in enumerate(name) if letter == "."]
        for end in ends:  # a gathered file has the names of its sources, or of their groups, in front
            found = self._by_name.get(name[end + 1 :], ())
            if found:
                return [one for one in found if one.part.name.startswith(name[:end])] or found
        # An object has another name if the place that named it is gone.
        return self._by_key.get(name, self._inside.get(_last(name), []))

    def _fault(self, record: TensorRecord, source: Wanted, values: TensorSource) -> str:
        """How a tensor differs from its source, as text that follows its name; empty if it does not."""
        pairs = [*zip(record.dense(), source.record.dense(), strict=False)]
        if len(record.dense()) != len(source.record.dense()):
            return f" is {record.kind} in place of {source.record.kind}"
        for mine, theirs in pairs:
            allowed = source.dtypes if theirs.dtype == source.record.dtype else {theirs.dtype}
            if mine.dtype not in allowed:
                return f": dtype {mine.dtype} in place of {' or '.join(sorted(allowed))}"
            try:
                fault = "" if record.kind in NOT_COMPARED else self._unlike(values.tensor(mine), theirs)
            except DamagedArchive as error:
                fault = f": {error.message}"
            if fault:
                return fault
        return ""


def _index(pairs: Iterable[tuple[str, Wanted]]) -> dict[str, list[Wanted]]:
    found: dict[str, list[Wanted]] = {}
    for name, one in pairs:
        found.setdefault(name, []).append(one)
    return found


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _view(source: Wanted) -> object:
    """The elements of a tensor, by their place in the file: tied tensors have the same."""
    record = source.record
    if record.storage is None:
        return record.name
    return source.part.name, record.storage, record.storage_offset, record.shape, record.stride
