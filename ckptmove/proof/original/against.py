"""Compare a checkpoint with its original (``verify --against``), ignoring devices.

Tensors are paired by name, by the keys of optimizers, and by content. Their values are those of torch's own readers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.assembled.zero import gather_partitions
from ckptmove.checkpoint.inventory.partitions import is_partitioned
from ckptmove.checkpoint.open_checkpoint import side_by_side
from ckptmove.comparison.counterparts import find_counterparts
from ckptmove.comparison.other_content import OtherContent
from ckptmove.errors import CkptMoveError
from ckptmove.formats.facts import facts_of
from ckptmove.formats.safetensors_file import METADATA
from ckptmove.proof.checks import Offenders, Tally
from ckptmove.proof.original.content import common_end, pair_by_content
from ckptmove.proof.original.values import TorchTensors, difference
from ckptmove.proof.restored.loaded import LoadedFiles
from ckptmove.proof.restored.survey import NOT_COMPARED
from ckptmove.proof.tensors.dtypes import dtype_of
from ckptmove.proof.tensors.stored import StoredTensors, without_padding
from ckptmove.proof.tensors.wrappers import WithWrappers
from ckptmove.text import amount, some

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence
    from contextlib import ExitStack

    import torch

    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.comparison.counterparts import Counterparts, Stored
    from ckptmove.comparison.differences import Change
    from ckptmove.limits import Limits
    from ckptmove.model import Inventory, OptimizerRecord, ParamGroup, Role, TensorRecord
    from ckptmove.proof.tensors.pieces import TensorSource, Window

#: Kinds that store their elements in the same way.
_DENSE: Final = frozenset({"tensor", "parameter"})
#: Paths of modules in the attributes of a state_dict.
_MODULES: Final = "._metadata."
#: Names in a message.
_SHOWN: Final = 3


class Sides(NamedTuple):
    """A checkpoint and its original, with their tensors as torch reads them."""

    checkpoint: OpenCheckpoint
    original: OpenCheckpoint  # with the partitions of ZeRO gathered, if the checkpoint is one file of whole parameters
    own: TensorSource  # tensors of the checkpoint
    others: TensorSource  # tensors of the original
    #: whether weights-only mode refuses the original alone, so that a conversion has replaced its objects.
    is_plain: bool

    @classmethod
    def of(
        cls,
        checkpoint: OpenCheckpoint,
        loaded: LoadedFiles,
        stored: StoredTensors,
        original: OpenCheckpoint,
        limits: Limits,
        stack: ExitStack,
    ) -> Sides:
        """Open the original's tensors, until the stack is closed, beside those of the checkpoint."""
        if checkpoint.listing is None and not any(map(is_partitioned, checkpoint.inventory.optimizers)):
            original = gather_partitions(original, limits) or original
        kept = stack.enter_context(StoredTensors(original.parts, keeps=True))
        files = LoadedFiles(original.parts, kept)
        others = WithWrappers(TorchTensors(original, files, kept), files)
        is_plain = bool(files.refused) and not loaded.refused
        return cls(checkpoint, original, TorchTensors(checkpoint, loaded, stored), others, is_plain)


class OriginalTensors:
    """Tensors of the original, by the names and with the dtypes of the checkpoint made from it."""

    def __init__(self, found: Counterparts, original: Inventory, source: TensorSource) -> None:
        self._optimizers = original.optimizers
        self.is_cast = bool(casts(found))  # whether any tensor was cast to another dtype
        self._records = {_key(mine): theirs for mine, theirs in _dense_pairs(found)}
        both = ((mine.record, theirs.record) for mine, theirs in found.pairs)
        self._records |= {_key(mine): theirs for mine, theirs in both if mine.kind == theirs.kind == "wrapper-subclass"}
        self._source = source

    def tensor(self, record: TensorRecord, window: Window | None = None) -> torch.Tensor:
        """The original of a record, or a run of its elements, with the record's dtype."""
        theirs = self._records.get(_key(record))
        if theirs is None:  # of a kind that is not compared
            raise LookupError(f"{record.name} was not compared with the original")
        values = self._source.tensor(theirs, window)
        values = without_padding(values, record) if window is None else values
        return values if record.kind == "wrapper-subclass" else values.to(dtype_of(record.dtype))

    def groups(self, optimizer: OptimizerRecord) -> tuple[ParamGroup, ...]:
        """The original's groups of an optimizer of the checkpoint; empty if they cannot be matched."""
        alike = [one for one in self._optimizers if one.where == optimizer.where] or self._optimizers
        groups = alike[0].groups if len(alike) == 1 else ()
        return groups if len(groups) == len(optimizer.groups) else ()


@dataclass(slots=True)
class AgainstTally(Tally):
    """What the comparison has found so far."""

    lost: Offenders = field(default_factory=Offenders)  # differences
    #: what was not compared, or has changed so much that its values cannot be held against the original's.
    unseen: Offenders = field(default_factory=Offenders)
    _notes: list[str] = field(default_factory=list)  # remarks on how the tensors were paired

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on how the tensors were paired."""
        return tuple(self._notes)


class Comparison:
    """A checkpoint beside its original.

    Attributes:
        found: the tensors that were paired, and those that were not.
        tally: the results of :meth:`compare`.
    """

    def __init__(self, sides: Sides) -> None:
        """Pair the tensors."""
        self._sides = side_by_side(sides.checkpoint, sides.original)
        self._values = sides.own, sides.others
        self._is_plain = sides.is_plain
        self.found = find_counterparts(*self._sides)
        self.tally = AgainstTally()
        self._renamed = pair_by_content(self.found.removed, self.found.added, *self._values)
        paired = {id(stored) for pair in self._renamed for stored in pair}
        self.found.pairs += self._renamed
        self.found.removed = [one for one in self.found.removed if id(one) not in paired]
        views = {_view(theirs) for _, theirs in self.found.pairs}
        self.found.added = [one for one in self.found.added if id(one) not in paired and _view(one) not in views]

    def tensors(self) -> OriginalTensors | None:
        """The original of each tensor of the checkpoint; None if one has no counterpart."""
        if self.found.removed or self.found.ambiguous:
            return None
        return OriginalTensors(self.found, self._sides[1].inventory, self._values[1])

    def summary(self, unseen: str) -> str:
        """The result without differences, as text; ``unseen`` is what was left out."""
        tally = self.tally
        what = "every tensor equals" if tally.notes else "all equal"
        what = "every paired tensor equals" if tally.unseen else what
        cast = casts(self.found)
        notes = "".join(f"; {note}" for note in tally.notes) + f"; not shown: {tally.unseen}" * bool(tally.unseen)
        return f"{what} {self._sides[1].path}{unseen}, ignoring devices{f' and {cast}' if cast else ''}{notes}"

    def compare(self, names: Container[str] | None, *, is_first: bool) -> None:
        """Compare the paired tensors.

        Args:
            names: names of the tensors whose values are compared; None for all.
            is_first: whether this process also compares everything that is not a value of a tensor.
        """
        for index, (mine, theirs) in enumerate(self.found.pairs):
            self.tally.set_index(index)
            fault = _form(mine.record, theirs.record)
            if not fault and (names is None or mine.record.name in names):
                self._note(mine.record, self._value(mine.record, theirs.record))
            elif is_first:
                self._note(mine.record, fault)
        self.tally.set_index(len(self.found.pairs))
        if is_first:
            self._compare_names()
            self._compare_dtypes()
            self._compare_rest()

    def _note(self, record: TensorRecord, fault: str) -> None:
        if fault:
            self.tally.lost.add(f"{record.name}{fault}")

    def _value(self, mine: TensorRecord, theirs: TensorRecord) -> str:
        """How the values of a tensor differ, as text that follows its name; empty if they do not."""
        for pair in zip(mine.dense(), theirs.dense(), strict=True) if mine.kind not in NOT_COMPARED else ():
            try:
                values = [source.tensor(one) for source, one in zip(self._values, pair, strict=True)]
            except CkptMoveError as error:  # bytes that are missing or damaged
                return f": {error.message}"
            fault = difference(*values)
            if fault:
                return fault
        return ""

    def _compare_names(self) -> None:
        """Judge the tensors that only one side has, and those with another name."""
        lost, unseen = self.tally.lost, self.tally.unseen
        mine, theirs = self.found.removed, self.found.added
        count = len(self._sides[0].inventory.tensors)
        if count and not self.found.pairs:
            lost.add(f"none of its {amount(count, 'tensor')} is in the original, by name or by content")
            return
        totals = Counter(record.role for record in self._sides[1].inventory.tensors)
        roles = {one.record.role for one in mine}
        for role, group in _by_role(theirs).items():
            if len(group) == totals[role] and role not in roles:
                unseen.add(f"left out: {role} ({amount(len(group), 'tensor')})")
            elif mine:
                unseen.add(f"only in the original: {_named(group)}")
            else:
                for one in group:
                    lost.add(f"{one.record.name} is missing")
        for one in () if theirs else mine:
            lost.add(f"{one.record.name} is not in the original")
        if theirs and mine:
            unseen.add(f"not in the original: {_named(mine)}")
        renamed: dict[str, list[tuple[str, str]]] = {}
        for one, two in self._renamed:
            renamed.setdefault(one.record.role, []).append((one.record.name, two.record.name))
        for pairs in renamed.values():
            self._judge_renames(pairs)

    def _compare_dtypes(self) -> None:
        """Tell of tensors that were not cast as the others of their role and dtype. Scalars of an optimizer are not."""
        kinds: dict[tuple[str, str], list[TensorRecord]] = {}
        for mine, theirs in self.found.pairs:
            if mine.record.shape and not mine.record.parts:
                kinds.setdefault((theirs.record.role, theirs.record.dtype), []).append(mine.record)
        for records in kinds.values():
            ((common, _), *others) = Counter(record.dtype for record in records).most_common()
            for record in records if others else ():
                if record.dtype != common:
                    self.tally.unseen.add(f"{record.name} is {record.dtype}, and others of its role are {common}")

    def _judge_renames(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Tell of the tensors of a role that were paired by content, by their names and those of the original.

        All of them having the same change at the front of their names shows a renaming. Otherwise two tensors may have
        swapped their names.
        """
        lines = [f"{name} is {original} of the original" for name, original in pairs]
        if len({_change_of(*names) for names in pairs}) == 1:
            self.tally._notes.append(f"paired by content: {some(lines)}")
        else:
            for line in lines:
                self.tally.unseen.add(f"paired by content alone: {line}")

    def _compare_rest(self) -> None:
        """Compare everything that is not a tensor.

        If names, parts or files have changed, so may have its place: a difference is then told, and is no fault.
        """
        rest = OtherContent(*self._sides, self.found, devices_count=False)
        rest.compare()
        for unknown in (*self.found.ambiguous, *rest.uncompared):
            self.tally.unseen.add(f"{unknown.name}: {unknown.reason}")
        is_gathered = self._sides[0].is_whole != self._sides[1].is_whole
        is_same = not (self._renamed or self.tally.unseen or self._is_plain or is_gathered)
        kinds = {facts_of(part.inventory.container).is_table for side in self._sides for part in side.parts}
        for change in rest.changed:
            if change.name.endswith(METADATA) and len(kinds) > 1:
                continue  # torch.save has no metadata
            if self._renamed and _MODULES in f".{change.name}.":
                continue  # the paths of modules, whose names have changed with those of their tensors
            (self.tally.lost if is_same else self.tally.unseen).add(_describe(change))
        self.tally._notes += rest.notes


def _form(mine: TensorRecord, theirs: TensorRecord) -> str:
    """How a tensor differs from its counterpart in kind or shape, as text that follows its name."""
    if mine.kind != theirs.kind and not {mine.kind, theirs.kind} <= _DENSE:
        return f" is {mine.kind} in place of {theirs.kind}"
    if [one.shape for one in (mine, *mine.dense())] != [one.shape for one in (theirs, *theirs.dense())]:
        return f": shape {list(mine.shape)} in place of {list(theirs.shape)}"
    return ""


def _view(stored: Stored) -> object:
    """The elements of a tensor, by their place in the file: tied tensors have the same."""
    record = stored.record
    if record.storage is None:
        return id(record)
    return stored.part.name, record.storage, record.storage_offset, record.shape, record.stride


def _by_role(tensors: Sequence[Stored]) -> dict[Role, list[Stored]]:
    found: dict[Role, list[Stored]] = {}
    for one in tensors:
        found.setdefault(one.record.role, []).append(one)
    return found


def _named(tensors: Sequence[Stored]) -> str:
    return some([one.record.name for one in tensors], _SHOWN)


def _change_of(name: str, original: str) -> tuple[str, str]:
    """What two names have in front of their common end."""
    kept = common_end(name, original)
    return ".".join(name.split(".")[: -kept or None]), ".".join(original.split(".")[: -kept or None])


def _describe(change: Change) -> str:
    if change.source == "absent":
        return f"{change.name} is missing"
    if change.target == "absent":
        return f"{change.name} is not in the original"
    return f"{change.name} is {change.source} in place of {change.target}"


def casts(found: Counterparts) -> str:
    """Casts between the original and the checkpoint, as text for the report; empty without casts."""
    pairs = Counter((theirs.dtype, mine.dtype) for mine, theirs in _dense_pairs(found) if theirs.dtype != mine.dtype)
    return ", ".join(f"{amount(count, 'tensor')} cast from {one} to {other}" for (one, other), count in pairs.items())


def _dense_pairs(found: Counterparts) -> Iterator[tuple[TensorRecord, TensorRecord]]:
    """Matched dense tensors that have bytes."""
    for mine, theirs in found.pairs:
        if not NOT_COMPARED & {mine.record.kind, theirs.record.kind}:
            yield from zip(mine.record.dense(), theirs.record.dense(), strict=False)


def _key(record: TensorRecord) -> tuple[str, str | None, int]:
    return record.name, record.storage, record.storage_offset
