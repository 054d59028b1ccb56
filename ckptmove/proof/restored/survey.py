"""The ``restore`` check: tensors that ``torch.load`` returns equal the stored ones bit for bit.

Only bits, sizes, strides and dtypes are compared, not values.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from ckptmove.lazy.geometry import extent_numel
from ckptmove.proof.checks import UNITED, Offenders, Tally, failed, passed, skipped
from ckptmove.proof.equality import other_form, same_integers
from ckptmove.proof.processes.shares import ONE_PROCESS
from ckptmove.proof.restored.numbers import NumbersTally
from ckptmove.proof.restored.pages import PagesOfFiles
from ckptmove.proof.restored.pieces import PiecesTally, compare_pieces, load_objects
from ckptmove.proof.tensors.dtypes import dtype_of
from ckptmove.proof.tensors.stored import without_padding
from ckptmove.text import amount, quoted, some

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence

    from ckptmove.assembled.part import AssembledPart
    from ckptmove.model import Inventory, TensorRecord
    from ckptmove.proof.evidence import CheckResult
    from ckptmove.proof.processes.shares import ProcessGroup, Share
    from ckptmove.proof.restored.loaded import LoadedFiles
    from ckptmove.proof.sampling import Sample
    from ckptmove.proof.tensors.pieces import TensorSource, Window
    from ckptmove.proof.tensors.stored import StoredExtent, StoredTensors

#: Kinds without bytes of their own in a storage, or whose parts torch does not return.
NOT_COMPARED: Final = frozenset({"meta", "device-data", "wrapper-subclass", "nested"})
#: Missing files that a message names.
_SHOWN: Final = 4
#: Message of torch for a damaged archive.
_DAMAGED: Final = "PytorchStreamReader failed"


@dataclass(slots=True)
class RestoreTally(Tally):
    """Figures and faults of the comparison so far, and of the numbers, which are checked in the same pass."""

    compared: int = 0  # tensors compared with torch's
    nbytes: int = 0  # bytes compared
    apart: dict[str, int] = field(default_factory=Counter)  # number of tensors without bytes to compare, by kind
    differing: Offenders = field(default_factory=Offenders)  # tensors that differ, and how
    unreadable: Offenders = field(default_factory=Offenders)  # tensors whose bytes are encoded or incomplete
    lost: Offenders = field(default_factory=Offenders)  # tensors with shards in missing files
    pieces: PiecesTally = field(default_factory=PiecesTally)  # results for tensors in several files
    numbers: NumbersTally = field(default_factory=NumbersTally)
    #: refusals and errors of the loaded files, by name.
    files: dict[str, tuple[str, str]] = field(default_factory=dict, metadata=UNITED)


def places(inventory: Inventory) -> dict[tuple[str, str | None, int], int]:
    """Index of every dense tensor, by name, storage and offset, among the tensors with the same name.

    A key may contain dots, so ``{"a.b": …}`` and ``{"a": {"b": …}}`` have the same name.
    """
    counts: dict[str, int] = {}
    found: dict[tuple[str, str | None, int], int] = {}
    for _, record in dense_records(inventory):
        found.setdefault(_at(record), counts.get(record.name, 0))
        counts[record.name] = counts.get(record.name, 0) + 1
    return found


def _at(record: TensorRecord) -> tuple[str, str | None, int]:
    return record.name, record.storage, record.storage_offset


def dense_records(inventory: Inventory, names: Container[str] | None = None) -> Iterator[tuple[int, TensorRecord]]:
    """Dense tensors with bytes, with the index of the tensor; a sparse tensor is replaced by its parts."""
    for place, record in enumerate(inventory.tensors):
        if record.kind not in NOT_COMPARED and (names is None or record.name in names):
            yield from ((place, dense) for dense in record.dense())


def survey(
    inventory: Inventory,
    stored: StoredTensors,
    loaded: LoadedFiles,
    numbers: NumbersTally,
    sample: Sample | None = None,
    share: Share | None = None,
    group: ProcessGroup = ONE_PROCESS,
) -> CheckResult:
    """The ``restore`` check: compare every tensor, or a sample, with the result of ``torch.load``.

    Its numbers are checked in the same pass, also those of files that torch did not load. Of a share, the other
    processes of the group check the rest, and rank 0 returns the check of the checkpoint.
    """
    comparison = _LoadComparison(stored, loaded, numbers)
    tally = comparison.tally
    is_first = share is None or share.is_first
    for record in inventory.tensors:
        if is_first and record.kind in NOT_COMPARED:
            tally.apart[record.kind] += 1
    seen: set[tuple[StoredExtent, str]] = set()
    encoded = {fact.storage_key for fact in inventory.facts if fact.kind == "encoded-storage"}
    chosen = sample or share
    for index, record in dense_records(inventory, None if chosen is None else chosen.names):
        tally.set_index(index)
        place = stored.place(record)
        if place is None:
            if record.storage in encoded:
                tally.apart["text-encoded"] += 1
            else:
                part = stored.part_of(record)
                (tally.lost if part is not None and part.missing else tally.unreadable).add(record.name)
            continue
        values = stored.tensor(record)
        # Tied tensors and shared views have the same bytes under several names.
        if (place, record.dtype) not in seen:
            numbers.look(record, values)
        comparison.compare(record, place, values)
        seen.add((place, record.dtype))
    for part in loaded.all_assembled:
        comparison.compare_objects(part, is_first=is_first)
    loaded.release()
    tally.files = loaded.results()
    group.join(tally)
    loaded.add(tally.files)
    total = len(inventory.tensors)
    return _outcome(inventory, tally, loaded, total, total if sample is None else sample.size.tensors)


class LoadedTensors:
    """Source of the tensors that ``torch.load`` returned; releases the pages of one when the next is asked for."""

    def __init__(self, loaded: LoadedFiles, stored: StoredTensors, inventory: Inventory, instead: TensorSource) -> None:
        """Index the loaded tensors by the records of an inventory; ``instead`` has the files that were not loaded."""
        self._loaded = loaded
        self._stored = stored
        self._missing = loaded.missing | loaded.released | loaded.left_out
        self._instead = instead
        self._places = places(inventory)
        self._pages = PagesOfFiles(loaded.mapped & stored.native)
        #: The file, the address, the offset and the size of the last tensor.
        self._last: tuple[str, int, int, int] | None = None

    def tensor(self, record: TensorRecord, window: Window | None = None) -> torch.Tensor:
        """The tensor of a record, or a run of its elements; it must not be written to."""
        place, part = self._stored.place(record), self._stored.part_of(record)
        if part is None or part.name in self._missing:
            return self._instead.tensor(record, window)
        alike = self._loaded.alike(part.name, record.name)[self._places[_at(record)] :]
        if not alike:  # the `restore` check has told of it
            return self._instead.tensor(record, window)
        tensor = alike[0]
        found = without_padding(tensor, record)
        found = found if window is None else window.cut(found)
        if place is None:  # torch inflates or decodes it
            return found
        if self._last is not None:
            self._pages.seen(*self._last)
        start = place.span.start + found.data_ptr() - tensor.data_ptr()
        self._last = place.file, found.data_ptr(), start, raw_bytes(found).nbytes
        return found


class _LoadComparison:
    """Compares stored tensors with those that ``torch.load`` returns, and releases the pages of the latter."""

    def __init__(self, stored: StoredTensors, loaded: LoadedFiles, numbers: NumbersTally) -> None:
        self.tally = RestoreTally(numbers=numbers)
        self._stored, self._loaded = stored, loaded
        self._pages = PagesOfFiles(loaded.mapped & stored.native)
        #: How often each name has occurred; several paths may be written the same.
        self._places: Counter[str] = Counter()
        #: Bytes of the file and their addresses in memory that were found equal.
        self._known: set[tuple[StoredExtent, int]] = set()
        #: Tensors in objects of distributed checkpoints, with their paths there, by part and name of the object.
        self._held: dict[tuple[str, str], list[tuple[str, TensorRecord]]] = {}

    def compare(self, record: TensorRecord, place: StoredExtent, values: torch.Tensor) -> None:
        """Compare a tensor, at once or in parts; nothing happens if its file is not loaded."""
        part = self._loaded.assembled(place.file)
        holder = None if part is None else part.object_of(record)
        is_compared = True
        if part is not None and holder is not None:
            self._held.setdefault((part.name, holder[0]), []).append((holder[1], record))
            return
        if part is not None:
            is_compared = compare_pieces(record, values, part, self._loaded, self.tally.pieces)
        elif self._loaded.has(place.file):
            alike = self._loaded.alike(place.file, record.name)
            self._note(record, self._fault(record, place, values, alike[self._places[record.name] :]))
            self._places[record.name] += 1
        else:
            is_compared = False
        self.tally.compared += is_compared
        self.tally.nbytes += place.span.nbytes * is_compared

    def compare_objects(self, part: AssembledPart, *, is_first: bool) -> None:
        """Compare the tensors in objects; the first process also loads the objects without tensors."""
        names = {name for path, name in self._held if path == part.name}
        for name, loaded in load_objects(part, None if is_first else names, self.tally.pieces):
            counts: Counter[str] = Counter()
            for path, record in self._held.get((part.name, name), ()):
                alike = loaded.tensors.get(path, [])[counts[path] :]
                counts[path] += 1
                fault = _unlike(record, alike)
                if not fault and not same_integers(raw_bytes(self._stored.tensor(record)), raw_bytes(alike[0])):
                    fault = ": other bits"
                self._note(record, fault)
                self.tally.compared += 1
                self.tally.nbytes += record.nbytes

    def _fault(
        self, record: TensorRecord, place: StoredExtent, values: torch.Tensor, alike: Sequence[torch.Tensor]
    ) -> str:
        """How the first of the loaded tensors differs, as text that follows its name; empty if it does not."""
        fault = _unlike(record, alike)
        if fault:
            return fault
        raw = raw_bytes(alike[0])
        if (place, raw.data_ptr()) in self._known:
            return ""
        digests = self._loaded.digests(place.file)
        if digests is not None and digests.has_taken(raw):
            same = raw.nbytes == place.span.nbytes and digests.is_same(record, raw)
        else:
            same = same_integers(raw_bytes(values), raw)
        self._pages.seen(place.file, raw.data_ptr(), place.span.start, place.span.nbytes)
        if same:
            self._known.add((place, raw.data_ptr()))
        return "" if same else ": other bits"

    def _note(self, record: TensorRecord, fault: str) -> None:
        if fault:
            self.tally.differing.add(f"{record.name}{fault}")


def _unlike(record: TensorRecord, alike: Sequence[torch.Tensor]) -> str:
    """How the form of the first of the loaded tensors differs, as text that follows its name; empty if it does not."""
    if not alike:
        return " is missing"
    form = other_form(alike[0], dtype_of(record.dtype), record.shape, record.stride)
    return f": {form}" if form and record.kind != "storage" else ""


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View the bytes of a dense tensor from its first element to its last, including gaps."""
    item = tensor.element_size()
    count = extent_numel(tuple(tensor.shape), tuple(tensor.stride()))
    start = tensor.storage_offset() * item
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), start, (count * item,), (1,))


def _outcome(inventory: Inventory, tally: RestoreTally, loaded: LoadedFiles, total: int, looked_at: int) -> CheckResult:
    refused = loaded.refused | tally.pieces.refused_files
    figures: dict[str, object] = {
        "tensors": total,
        "compared": tally.compared,
        "bytes": tally.nbytes,
        "differing": tally.differing.count + tally.pieces.differing.count,
        "unreadable": tally.unreadable.count + tally.lost.count,
        "weights_only": not refused,
    }
    if refused:
        figures["refusal"] = "; ".join(f"{name}: {reason}" if name else reason for name, reason in refused.items())
    apart = "".join(f"; {amount(count, kind + ' tensor')} left out" for kind, count in tally.apart.items())
    apart += tally.pieces.summary
    if loaded.left_out:
        apart += f"; not loaded: {amount(len(loaded.left_out), 'file')} outside the sample"
    failing = (f"{name}: {reason}" for name, reason in tally.pieces.failed_files.items())
    error = loaded.error or str(tally.pieces.errors) or next(failing, "")
    if error:
        fix = f"copy or download it again, then: ckptmove inspect --check {quoted(inventory.path)}"
        is_damaged = tally.pieces.errors or _DAMAGED in error
        return failed("restore", f"torch.load fails: {error}", fix if is_damaged else "", **figures)
    if tally.unreadable or tally.lost:
        files = some([fact.record for fact in inventory.facts if fact.kind == "missing-rank"], _SHOWN)
        lines = tally.unreadable.failures("bytes encoded or incomplete: ")
        lines += tally.lost.failures(f"shards in missing files ({files}, F808): ")
        return failed("restore", lines, **figures)
    differing = [*tally.differing.failures(), *tally.pieces.differing.failures()]
    if differing:
        return failed("restore", [f"{loaded.what} something else: {differing[0]}", *differing[1:]], **figures)
    if refused and not tally.compared:
        several = "" not in refused
        detail = (
            f"{amount(looked_at, 'tensor')} complete in the file{'s' * several}{apart}; not compared with torch.load, "
            f"because weights_only=True refuses {'' if several else 'the file: '}{figures['refusal']}"
        )
        return skipped("restore", detail, **figures)
    compared = f"{amount(tally.compared, 'tensor')} ({amount(tally.nbytes, 'byte')}) equal what {loaded.what}{apart}"
    aside = ", ".join(f"{name} ({reason})" for name, reason in refused.items())
    left = f"; not compared, because weights_only=True refuses it: {aside}" if refused else ""
    return passed("restore", f"{compared}{left}", **figures)
