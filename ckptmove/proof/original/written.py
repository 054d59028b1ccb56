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
from ckptmove.formats.facts import facts_of
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.proof.checks import Offenders
from ckptmove.proof.errors import ConversionDiffers
from ckptmove.proof.original.against import DENSE, Sides
from ckptmove.proof.original.names import wanted
from ckptmove.proof.original.values import TorchTensors, difference, digest
from ckptmove.proof.restored.loaded import LoadedFiles
from ckptmove.proof.restored.survey import NOT_COMPARED
from ckptmove.proof.tensors.stored import StoredTensors, distinct

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import torch

    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.conversion.conversion import ConvertRequest
    from ckptmove.model import TensorRecord
    from ckptmove.proof.original.names import Wanted
    from ckptmove.proof.tensors.pieces import TensorSource

    #: Returns how a tensor of the output differs from a dense part of its source; empty if it does not.
    _Compare = Callable[[torch.Tensor, TensorRecord], str]


@contextmanager
def proof_of(request: ConvertRequest) -> Iterator[Callable[[str], int]]:
    """A function that compares the output of a conversion, at any path, with its source.

    It returns the number of tensors that it has compared, and raises ConversionDiffers if one of the output is not what
    the request asks for. The values of a file that is changed in place are read before the change.
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
            comparison = _Comparison(output, before.wanted, request, before.unlike)
            faults = comparison.faults(TorchTensors(output, own, stored))
        else:
            source = stack.enter_context(_opened(request, request.path))
            sides = Sides.of(output, own, stored, source, request.limits, stack)

            def unlike(values: torch.Tensor, record: TensorRecord) -> str:
                return difference(values, sides.others.tensor(record))

            sources = wanted(sides.original, request.move, is_joined=_is_joined(request, output))
            comparison = _Comparison(output, sources, request, unlike)
            faults = comparison.faults(sides.own)
            source.require_unchanged()
    if faults:
        raise ConversionDiffers(request.path, faults.failures())
    return comparison.count


def _is_joined(request: ConvertRequest, output: OpenCheckpoint) -> bool:
    """Whether the output is one file, or new shards of one."""
    return request.shard_bytes is not None or output.is_whole


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
        self.wanted = wanted(source, request.move, is_joined=True)
        dense = (part for one in self.wanted if one.record.kind not in NOT_COMPARED for part in one.record.dense())
        self._digests = {id(part): digest(distinct(values.tensor(part))) for part in dense}

    def unlike(self, values: torch.Tensor, record: TensorRecord) -> str:
        """How a tensor of the output differs from a dense part of the source; empty if it does not."""
        return "" if digest(distinct(values)) == self._digests[id(record)] else ": other bits"


class _Comparison:
    """The tensors of an output beside those that the options of the conversion name.

    Attributes:
        count: number of tensors whose values were compared.
    """

    def __init__(
        self, output: OpenCheckpoint, sources: Sequence[Wanted], request: ConvertRequest, unlike: _Compare
    ) -> None:
        options = request.move.remap
        self._output, self._sources, self._options, self._unlike = output, sources, options, unlike
        self._is_joined = _is_joined(request, output)
        self._by_name = _index((one.name, one) for one in sources if one.is_kept)
        # An object with several names has the first one here, which may be gone; a module becomes a state_dict.
        others = (one for one in sources if one.is_inside and (options.plain or not one.is_kept))
        self._inside = _index((_last(one.name), one) for one in others)
        self._used: set[int] = set()
        self.count = 0

    def faults(self, values: TensorSource) -> Offenders:
        """Tensors of the output that differ from their source, that have none, or that are missing."""
        found = Offenders()
        for part in self._output.parts:
            for record in part.inventory.tensors:
                # The path of a new shard is no part of the name.
                fault = self._compared(record, part.own_name(record.name) if self._is_joined else record.name, values)
                if fault:
                    found.add(f"{record.name}{fault}")
        is_table = all(facts_of(part.inventory.container).is_table for part in self._output.parts)
        views = {_view(one) for one in self._sources if id(one) in self._used} if is_table else set()
        for one in self._sources:
            # A format without shared storages has a tied tensor once. Only the state_dict is left of a module.
            is_lost = one.is_inside and self._options.plain and one.record.kind != "parameter"
            if one.is_kept and not is_lost and id(one) not in self._used and _view(one) not in views:
                found.add(f"{one.record.name} is missing")
        return found

    def _compared(self, record: TensorRecord, name: str, values: TensorSource) -> str:
        """How a tensor differs from the first source of its name that no other tensor has."""
        named = [one for one in self._by_name.get(name, []) if id(one) not in self._used][:1]
        fault = " is not in the source"
        for source in named or self._inside.get(_last(name), []):
            fault = self._fault(record, source, values)
            if named or not fault:
                self._used.add(id(source))
                break
        return fault

    def _fault(self, record: TensorRecord, source: Wanted, values: TensorSource) -> str:
        """How a tensor differs from its source, as text that follows its name; empty if it does not."""
        if record.kind != source.record.kind and not {record.kind, source.record.kind} <= DENSE:
            return f" is {record.kind} in place of {source.record.kind}"
        if record.shape != source.record.shape or len(record.dense()) != len(source.record.dense()):
            return f": shape {list(record.shape)} in place of {list(source.record.shape)}"
        self.count += record.kind not in NOT_COMPARED
        for mine, theirs in zip(record.dense(), source.record.dense(), strict=True):
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
    return source.part.name, record.storage, record.storage_offset, record.shape, record.stride
