"""Compare a checkpoint with its original (``verify --against``), ignoring devices.

Tensors are paired by name, by the keys of optimizers, and by content. Their values are those of torch's own readers.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.assembled.zero import gather_partitions
from ckptmove.checkpoint.inventory.partitions import is_partitioned
from ckptmove.checkpoint.open_checkpoint import side_by_side
from ckptmove.checkpoint.state_dicts import AVERAGED, RootKeys
from ckptmove.comparison.counterparts import find_counterparts
from ckptmove.comparison.other_content import OtherContent
from ckptmove.errors import CkptMoveError
from ckptmove.formats.facts import facts_of
from ckptmove.formats.safetensors_file import METADATA
from ckptmove.proof.checks import Offenders, Tally
from ckptmove.proof.original.content import change_of, group_of, may_be_cast, pair_by_change, pair_by_content
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
DENSE: Final = frozenset({"tensor", "parameter"})
#: Paths of modules in the attributes of a state_dict.
_MODULES: Final = "._metadata."
#: Paths of the names of parameters in the groups of an optimizer.
_NAMES: Final = re.compile(r"(?:^|\.)(?:params|param_names)(?:\.|$)")
#: Kinds whose values are not compared, and have no parts that are.
_UNREAD: Final = frozenset({"nested", "device-data"})
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
    is_gathered: bool  # whether the original is put together from partitions of ZeRO

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
        whole = None
        if checkpoint.listing is None and not any(map(is_partitioned, checkpoint.inventory.optimizers)):
            whole = gather_partitions(original, limits)
            original = whole or original
        kept = stack.enter_context(StoredTensors(original.parts, keeps=True))
        files = LoadedFiles(original.parts, kept)
        others = WithWrappers(TorchTensors(original, files, kept), files)
        is_plain = bool(files.refused) and not loaded.refused
        return cls(checkpoint, original, TorchTensors(checkpoint, loaded, stored), others, is_plain, whole is not None)


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
        self._is_plain, self._is_gathered = sides.is_plain, sides.is_gathered
        self.found = find_counterparts(*self._sides)
        self.tally = AgainstTally()
        self._roots = RootKeys(self._sides[0].inventory)
        unpaired = self.found.removed, self.found.added
        self._renamed = pair_by_change(pair_by_content(*unpaired, *self._values), *unpaired, self._roots)
        paired = {id(stored) for pair in self._renamed for stored in pair}
        self.found.pairs += self._renamed
        self.found.removed = [one for one in self.found.removed if id(one) not in paired]
        added = [one for one in self.found.added if id(one) not in paired]
        # A format without shared storages has a tied tensor once.
        is_table = all(facts_of(part.inventory.container).is_table for part in self._sides[0].parts)
        views = {_view(theirs) for _, theirs in self.found.pairs} if is_table else set()
        self.found.added = [one for one in added if _view(one) not in views]
        self._tied = Counter(one.record.role for one in added if _view(one) in views)
        alone = (self.found.removed, self.found.added)
        #: Whether the model was split or joined: parameters with the same number may then be others.
        self._is_restructured = all(any(one.record.role == "model" for one in side) for side in alone)

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
        if is_first:
            self._compare_names()
            unread = [mine.record.name for mine, _ in self.found.pairs if mine.record.kind in _UNREAD]
            if unread:
                self.tally.unseen.add(f"values of another layout: {some(unread, _SHOWN)}")
            if self._is_gathered:
                self.tally.unseen.add("the partitions of ZeRO were put together in the way of convert")
        for index, (mine, theirs) in enumerate(self.found.pairs, 1):
            self.tally.set_index(index)
            fault = _form(mine.record, theirs.record)
            if not fault and (names is None or mine.record.name in names):
                self._note(mine.record, self._value(mine.record, theirs.record))
            elif is_first:
                self._note(mine.record, fault)
        if is_first:
            self.tally.set_index(len(self.found.pairs) + 1)
            self._compare_dtypes()
            self._compare_rest()

    def _note(self, record: TensorRecord, fault: str) -> None:
        if fault:
            is_other = self._is_restructured and record.role == "optimizer"
            (self.tally.unseen if is_other else self.tally.lost).add(f"{record.name}{fault}")

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
        counts = [len(side.inventory.tensors) for side in self._sides]
        if any(counts) and not self.found.pairs:
            lost.add(f"none of its {amount(counts[0], 'tensor')} is in the original, by name or by content")
            return
        totals = Counter(record.role for record in self._sides[1].inventory.tensors) - self._tied
        roles: set[str] = {one.record.role for one in mine} | ({"optimizer"} if self._is_restructured else set())
        for role, group in _by_role(theirs).items():
            if len(group) == totals[role] and role not in roles:
                unseen.add(f"left out: {role} ({amount(len(group), 'tensor')})")
            elif role in roles:
                unseen.add(f"only in the original: {_named(group)}")
            else:
                for one in group:
                    lost.add(f"{one.record.name} is missing")
        others: set[str] = {one.record.role for one in theirs} | ({"optimizer"} if self._is_restructured else set())
        for one in mine:
            if one.record.role not in others:
                lost.add(f"{one.record.name} is not in the original")
        changed = [one for one in mine if one.record.role in others]
        if changed:
            unseen.add(f"not in the original: {_named(changed)}")
        self._compare_changes()

    def _compare_changes(self) -> None:
        """Tell of the tensors that were paired under another name.

        A state_dict whose names all have the same change was renamed. Otherwise two tensors may have exchanged names.
        """
        groups: dict[object, list[tuple[str, str]]] = {}
        for one, two in self.found.pairs if self._renamed else ():
            if one.own_name.rpartition(".")[2] != AVERAGED:  # it has no prefix
                groups.setdefault(group_of(one, self._roots), []).append((one.record.name, two.record.name))
        for pairs in groups.values():
            changes = [change_of(*names) for names in pairs]
            ((common, _), *others) = Counter(changes).most_common()
            if common != ("", ""):
                lines = [_renamed(*names) for names, one in zip(pairs, changes, strict=True) if one == common]
                self.tally._notes.append(f"paired by their change of name: {some(lines)}")
            for names, change in zip(pairs, changes, strict=True) if others else ():
                if change != common:
                    self.tally.unseen.add(f"paired by content alone: {_renamed(*names)}")
        for one, two in self._renamed:
            if one.record.role != two.record.role:
                self.tally.unseen.add(f"{_renamed(one.record.name, two.record.name)}, of role {two.record.role}")

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

    def _compare_rest(self) -> None:
        """Compare everything that is not a tensor."""
        rest = OtherContent(*self._sides, self.found, devices_count=False)
        rest.compare()
        for unknown in (*self.found.ambiguous, *rest.uncompared):
            self.tally.unseen.add(f"{unknown.name}: {unknown.reason}")
        # Its place may have changed with names, parts or files.
        is_elsewhere = self._is_plain or self._sides[0].is_whole != self._sides[1].is_whole
        may_be_gone = bool(self._renamed or self.tally.unseen)
        kinds = {facts_of(part.inventory.container).is_table for side in self._sides for part in side.parts}
        for change in rest.changed:
            if change.name.endswith(METADATA) and len(kinds) > 1:
                continue  # torch.save has no metadata
            is_absent = "absent" in {change.source, change.target}
            if self._renamed and ((is_absent and _MODULES in f".{change.name}.") or _is_class_of_dict(change)):
                continue  # the paths of modules have changed with the names of their tensors; the root is another dict
            is_gone = may_be_gone and is_absent
            is_name = bool(self._renamed or self._is_restructured) and _NAMES.search(change.name) is not None
            (self.tally.unseen if is_elsewhere or is_gone or is_name else self.tally.lost).add(_describe(change))
        self.tally._notes += rest.notes


def _form(mine: TensorRecord, theirs: TensorRecord) -> str:
    """How a tensor differs from its counterpart in kind or shape, as text that follows its name."""
    if mine.kind != theirs.kind and not {mine.kind, theirs.kind} <= DENSE:
        return f" is {mine.kind} in place of {theirs.kind}"
    if [one.shape for one in (mine, *mine.dense())] != [one.shape for one in (theirs, *theirs.dense())]:
        return f": shape {list(mine.shape)} in place of {list(theirs.shape)}"
    if not may_be_cast(*(tuple(part.dtype for part in one.dense()) for one in (theirs, mine))):
        return f": dtype {mine.dtype} in place of {theirs.dtype}"
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


def _renamed(name: str, original: str) -> str:
    return f"{name} is {original} of the original"


def _is_class_of_dict(change: Change) -> bool:
    """Whether only the class of a dict differs, or its attributes: those of a state_dict are versions of modules."""
    if change.name.startswith("the attributes of "):
        return True
    return all("dict" in text.lower() and " " not in text.removeprefix("a ") for text in (change.source, change.target))


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
