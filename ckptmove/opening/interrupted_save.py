"""Detect a save that was interrupted while it replaced an earlier one in the same folder.

``torch.distributed.checkpoint.save`` writes over an earlier checkpoint, and writes ``.metadata`` last. If a rank is
killed, the folder has files of both saves, and the ``.metadata`` of the earlier one. A load reads
them without an error.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from ckptmove.io.at_once import at_once
from ckptmove.model import ArchiveFact

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ckptmove.assembled.dcp import DistributedPart
    from ckptmove.assembled.dcp_folder import DistributedFolder
    from ckptmove.assembled.table import Placed
    from ckptmove.io.listing import Listing
    from ckptmove.model import OptimizerRecord, Span, StateEntry, TensorRecord

#: A copy of a folder, which may set the times of its files anew, is assumed to write at least this many bytes in a
#: nanosecond, after a pause of at most two seconds.
_SLOWEST_COPY: Final = 0.02
_PAUSE: Final = 2_000_000_000
#: Step counts of each file that are read first; and of a large file at a URL the place of the only one among them, as
#: a part of all. Halves of a model, its first and its last layers are often frozen for a time.
_SAMPLE: Final = 4
_PLACE: Final = 0.4


def newer_files(listing: Listing, folder: DistributedFolder, sizes: Mapping[str, int]) -> dict[str, int]:
    """Names and sizes in bytes of files that were written after the ``.metadata`` of their folder, as by a later save.

    A plain copy writes one file after the other, in any order. So a file counts only if the time between it and the
    file before it is longer than a copy takes. ``sizes`` has the files that ``.metadata`` names.
    """
    times = {file.path: file.stamp[-1] for file in listing.files}
    latest = times.get(folder.metadata, sys.maxsize)  # a link has no time of its own
    found: dict[str, int] = {}
    for time, name in sorted((times.get(folder.full(name), 0), name) for name in sizes):
        if found or time - latest > _PAUSE + sizes[name] / _SLOWEST_COPY:
            found[name] = sizes[name]
        latest = max(latest, time)
    return found


def find_two_saves(part: DistributedPart, newer: Mapping[str, int]) -> Iterator[ArchiveFact]:
    """Facts about files of another save than the rest of their folder, by their step counts.

    A newer file is of another save if its counts differ from those in all other files. Without such a time, a file is
    of another save if its counts differ from those in the files that share its parameters.
    """
    if newer:
        counts: dict[bool, set[float]] = {True: set(), False: set()}
        for optimizer in part.inventory.optimizers:
            for entry in optimizer.state:
                record = entry.tensor("step")
                if record is not None and (count := part.number(record)) is not None:
                    counts[any(name in newer for name in part.files_of(record))].add(count)
        differ = all(counts.values()) and counts[True].isdisjoint(counts[False])
        for name, nbytes in newer.items():
            yield ArchiveFact("other-save" if differ else "newer-file", name, nbytes)
    odd = {name for one in part.inventory.optimizers for name in _of_another_save(part, one)}
    for name in sorted(odd - newer.keys()):
        yield ArchiveFact("other-step", name, 0)


class _StepCount(NamedTuple):
    """The step count of a parameter, a 0-d tensor."""

    record: TensorRecord  # the count
    placed: Placed  # its place
    entry: StateEntry  # the state of the parameter


def _of_another_save(part: DistributedPart, optimizer: OptimizerRecord) -> list[str]:
    """The files with other step counts of an optimizer than the rest; empty if not all of a file have the same.

    torch saves a count, which all ranks have, in the file of one of them: parameters with other counts, of a layer that
    was frozen for a time, are spread over the files. So two counts of a file are the least that proves anything.
    """
    steps: dict[str, list[_StepCount]] = {}
    for entry in optimizer.state:
        record = entry.tensor("step")
        placed = None if record is None else _only_chunk(part, record)
        if record is not None and placed is not None:
            steps.setdefault(placed.file, []).append(_StepCount(record, placed, entry))
    steps = {file: own for file, own in steps.items() if len(own) > 1}
    if len(steps) < 2 or not _odd_files(part, {file: _few(part, file, own) for file, own in steps.items()}):
        return []
    return _odd_files(part, {file: own if part.is_near(file) else _few(part, file, own) for file, own in steps.items()})


def _only_chunk(part: DistributedPart, record: TensorRecord) -> Placed | None:
    """The place of a tensor that is one chunk; None if it has several, is in an object, or is not there."""
    key = part.own_key(record)
    entry = None if key is None else part.entry(key)
    placed = [] if entry is None or entry.is_storage else [*entry.placed]
    return placed[0] if len(placed) == 1 else None


def _few(part: DistributedPart, file: str, steps: Sequence[_StepCount]) -> list[_StepCount]:
    """A few step counts of a file; one of a large file at a URL, where each takes a request."""
    ordered = sorted(steps, key=lambda one: cast("Span", one.placed.span).start)
    if not part.is_near(file):
        return [ordered[int(len(ordered) * _PLACE)]]
    return [ordered[place] for place in sorted({at * (len(ordered) - 1) // (_SAMPLE - 1) for at in range(_SAMPLE)})]


def _odd_files(part: DistributedPart, steps: Mapping[str, Sequence[_StepCount]]) -> list[str]:
    """The files whose counts are not those of most files, if the files share parameters with these."""

    def counts_in(file: str) -> set[float | None]:
        return {part.number(one.record) for one in steps[file]}

    counts: dict[str, float] = {}
    for file, (count, *others) in zip(steps, at_once(counts_in, steps, part.jobs), strict=True):
        if others or count is None:
            return []
        counts[file] = count
    files = Counter(counts.values())
    usual = max(files, key=lambda count: (files[count], -count))
    rest = [file for file in counts if counts[file] == usual]
    if len(files) == 1:
        return []
    shared = {
        file: {name for one in own for _, record in one.entry.tensors for name in part.files_of(record)}
        for file, own in steps.items()
    }
    return [
        file
        for file in steps
        if file not in rest and any(file in shared[other] and other in shared[file] for other in rest)
    ]
