"""A directory, or an archive of files, read as one checkpoint.

A tensor's bytes are read only to compare their CRCs. A file that must have been a checkpoint is never passed over.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.checkpoint.inventory.outline import OutlineLine
from ckptmove.checkpoint.layouts.archive import inner_archives, limits_of, open_archive, standing_facts
from ckptmove.checkpoint.layouts.detect import layout_of, require_shards
from ckptmove.checkpoint.layouts.distributed import file_records, find_distributed, is_distributed, survey_distributed
from ckptmove.checkpoint.layouts.listing import list_directory
from ckptmove.checkpoint.layouts.merge import as_part, merge
from ckptmove.checkpoint.opening import no_devices, survey
from ckptmove.checkpoint.trainers import TRAINERS, is_spoiled
from ckptmove.errors import EmptyDirectory, LimitExceeded, NotACheckpoint, UnreadableInput
from ckptmove.io.recovery import recover_listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckptmove.checkpoint.directories import DirectoryInventory
    from ckptmove.checkpoint.layouts.distributed import DistributedFolder
    from ckptmove.checkpoint.layouts.listing import ListedFile, Listing
    from ckptmove.checkpoint.layouts.merge import Part
    from ckptmove.checkpoint.opening import Checkpoint, Survey
    from ckptmove.formats.dcp.checkpoint import DistributedCheckpoint
    from ckptmove.io.contracts import Progress
    from ckptmove.limits import Limits
    from ckptmove.model import ArchiveFact

    Visit = Callable[[str, Checkpoint], None]
    VisitDistributed = Callable[[DistributedFolder, DistributedCheckpoint], None]

_COUNTERS: Final = {trainer.counters for trainer in TRAINERS if trainer.counters}


class Directory(NamedTuple):
    """A checkpoint directory or archive, as it was read.

    Attributes:
        listing: everything in it.
        parts: its checkpoint files.
        inventory: what they hold together.
        outline: their trees, and the other files, where that was asked for.
        without_checksums: paths of the checkpoint files without CRCs, where the archive has none for them either.
        unreadable: errors of the files that could not be read, where reading was to go on without them.
    """

    listing: Listing
    parts: tuple[Part, ...]
    inventory: DirectoryInventory
    outline: tuple[OutlineLine, ...]
    without_checksums: tuple[str, ...]
    unreadable: tuple[UnreadableInput | LimitExceeded, ...] = ()

    def no_devices(self) -> str:
        """Why there is no device in any of the files that have tensors; empty where there is one."""
        reasons = [no_devices(part.inventory) for part in self.parts if part.inventory.tensors]
        return reasons[0] if reasons and all(reasons) else ""


def read_directory(
    path: str,
    limits: Limits,
    *,
    check: bool = False,
    outline: bool = False,
    objects: bool = True,
    keep_going: bool = False,
    progress: Progress | None = None,
    visit: Visit | None = None,
    visit_distributed: VisitDistributed | None = None,
) -> Directory:
    """Read every checkpoint in a directory as a part of one.

    Args:
        path: a directory.
        limits: what it, and each file in it, may ask for.
        check: whether to read every record and compare its CRC.
        outline: whether to make the outline too.
        objects: whether a distributed checkpoint is read with what is no tensor in it.
        keep_going: whether files that cannot be read are left out; the error of the first is raised where all are.
        progress: told of bytes checked and bytes in all.
        visit: shown each checkpoint of one file, by its path in the directory, while it is open.
        visit_distributed: shown each distributed one, of which no file is open any more.

    Raises:
        UnreadableInput: there is no checkpoint in it, or one that cannot be read or is damaged.
        LimitExceeded: it, or a file in it, asks for more than the limits allow.
    """
    listing = list_recovered(path, limits)
    return read_listing(
        listing,
        limits,
        check=check,
        outline=outline,
        objects=objects,
        keep_going=keep_going,
        progress=progress,
        visit=visit,
        visit_distributed=visit_distributed,
    )


def list_recovered(path: str, limits: Limits) -> Listing:
    """List a directory, once interrupted conversions in place are taken back.

    Raises:
        NotACheckpoint, LimitExceeded, AccessFailed: as :func:`ckptmove.checkpoint.layouts.listing.list_directory`.
        BeingConverted, RollbackFailed: as :func:`ckptmove.io.recovery.recover`.
    """
    listing = list_directory(path, limits)
    if recover_listed(path, [file.path for file in listing.files]):
        listing = list_directory(path, limits)
    return listing


def read_archive(
    path: str,
    limits: Limits,
    *,
    check: bool = False,
    outline: bool = False,
    keep_going: bool = False,
    progress: Progress | None = None,
) -> Directory:
    """Read every checkpoint in a zip or a tar as a part of one.

    Arguments and errors as of :func:`read_directory`.

    Raises:
        MustBeUnpacked: one of its members cannot be read where it lies.
    """
    with open_archive(path, limits) as listing:
        return read_listing(
            listing, limits, check=check, outline=outline, objects=True, keep_going=keep_going, progress=progress
        )


def read_listing(
    listing: Listing,
    limits: Limits,
    *,
    check: bool = False,
    outline: bool = False,
    objects: bool = False,
    keep_going: bool = False,
    progress: Progress | None = None,
    visit: Visit | None = None,
    visit_distributed: VisitDistributed | None = None,
) -> Directory:
    """Read every checkpoint that is listed as a part of one.

    Arguments and errors as of :func:`read_directory`.
    """
    reader = _Reader(
        listing, limits, check=check, outline=outline, keep_going=keep_going, progress=progress, visit=visit
    )
    with reader.tolerating():
        require_shards(listing)
    distributed = find_distributed(listing)
    homes = {part.folder for part in distributed}
    for part in distributed:
        with reader.tolerating():
            container = reader.read_distributed(part, objects=objects)
            if visit_distributed is not None:
                visit_distributed(part, container)
    for file in listing.files:
        if not file.is_hidden and not (file.folder in homes and is_distributed(file.name)):
            with reader.tolerating():
                reader.read(file)
    if not reader.parts and reader.unreadable:
        first, *others = reader.unreadable
        first.others = tuple(others)
        raise first
    if not reader.parts:
        inner = "".join(fact.record for fact in reader.inner[:1])
        is_cut = any(fact.kind == "missing-end" for fact in standing_facts(listing))
        raise EmptyDirectory(
            listing.path, reader.looked_at, listing.described, listing.form, inner=inner, is_cut=is_cut
        )
    if not reader.has_something:
        raise NotACheckpoint(listing.path, "a distributed checkpoint of nothing, without a tensor or an object in it")
    inventory = merge(listing.path, listing.container, reader.parts, listing.size_bytes)
    records = inventory.files
    contents = inventory.contents
    if len(reader.parts) == 1 and not reader.parts[0].file.path:
        inventory = replace(inventory, container="dcp", globals=reader.parts[0].inventory.globals)
    if any(file.name in _COUNTERS for file in listing.files):
        contents |= {"counter"}
    layout = layout_of(listing, records)
    facts = (*inventory.facts, *reader.facts, *reader.inner, *standing_facts(listing))
    inventory = replace(inventory, is_incomplete=bool(reader.unreadable), form=listing.form)
    return Directory(
        listing,
        tuple(reader.parts),
        replace(inventory, layout=layout, contents=contents, facts=facts),
        (OutlineLine(0, "", f"{listing.container} ({len(listing.files)})"), *reader.lines) if outline else (),
        tuple(reader.without_checksums),
        tuple(reader.unreadable),
    )


class _Reader:
    """Reads file after file."""

    def __init__(
        self,
        listing: Listing,
        limits: Limits,
        *,
        check: bool,
        outline: bool,
        keep_going: bool,
        progress: Progress | None,
        visit: Visit | None,
    ) -> None:
        self._listing = listing
        self._limits = limits
        self._check = check
        self._outline = outline
        self._keep_going = keep_going
        self._progress = progress
        self._visit = visit
        self._base = 0
        self._done = 0
        self.total = sum(file.size_bytes for file in listing.files)
        self.parts: list[Part] = []
        self.lines: list[OutlineLine] = []
        self.facts: list[ArchiveFact] = []
        self.inner: list[ArchiveFact] = []
        self.without_checksums: list[str] = []
        self.unreadable: list[UnreadableInput | LimitExceeded] = []
        self.looked_at = 0
        self.has_something = False

    @contextmanager
    def tolerating(self) -> Iterator[None]:
        """Go on after the error of one file, where that was asked for."""
        try:
            yield
        except (UnreadableInput, LimitExceeded) as error:
            if not self._keep_going:
                raise
            self.unreadable.append(error)

    def read_distributed(self, part: DistributedFolder, *, objects: bool) -> DistributedCheckpoint:
        found, container = survey_distributed(
            self._listing,
            part,
            self._limits,
            check=self._check,
            outline=self._outline,
            objects=objects,
            progress=self._told(),
        )
        self.has_something = self.has_something or bool(container.metadata.entries)
        whole = as_part(part.path, found.inventory, self._base)
        self.parts.append(whole._replace(rows=file_records(part, container, whole)))
        self._outline_of(part.path or ".metadata", found)
        self._done += found.inventory.size_bytes
        return container

    def read(self, file: ListedFile) -> None:
        self.looked_at += 1
        try:
            self._listing.look(file.path)
            found = survey(
                self._listing.full(file.path),
                limits_of(self._listing, file.path, self._limits),
                source=self._listing.open(file.path),
                check=self._check,
                outline=self._outline,
                progress=self._told(),
                visit=None if self._visit is None else partial(self._visit, file.path),
            )
        except NotACheckpoint as error:
            if is_spoiled(file.name, error.found):
                raise
            self.lines.append(OutlineLine(1, file.path, error.found))
            self.inner += inner_archives(self._listing, file, error, self._limits)
            is_checked = False
        else:
            self.has_something = True
            is_checked = found.has_checksums
            self.without_checksums += [] if is_checked or self._listing.has_checksums else [file.path]
            self.parts.append(as_part(file.path, found.inventory, self._base, self._listing.expression(file.path)))
            self._base += found.pickle_bytes
            self._outline_of(file.path, found)
        if self._check and not is_checked:
            self.facts += self._listing.flaws(file.path)
        self._done += file.size_bytes

    def _told(self) -> Progress | None:
        progress, done, total = self._progress, self._done, self.total
        return None if progress is None else lambda here, _of_the_part: progress(done + here, total)

    def _outline_of(self, path: str, found: Survey) -> None:
        for line in found.outline:
            self.lines.append(OutlineLine(line.depth + 1, line.name if line.depth else path, line.description))
