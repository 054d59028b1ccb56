"""A directory read as one checkpoint.

Never reads a tensor's bytes unless their CRCs are asked for, and never passes over a file that must have been a
checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint import survey
from ckptmove.directories import EmptyDirectory
from ckptmove.errors import NotACheckpoint
from ckptmove.inventory.outline import OutlineLine
from ckptmove.layouts.detect import layout_of, refuse_distributed, require_shards
from ckptmove.layouts.listing import list_directory
from ckptmove.layouts.merge import as_part, merge
from ckptmove.layouts.places import is_spoiled

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptmove.checkpoint import Checkpoint
    from ckptmove.contracts import Progress
    from ckptmove.directories import DirectoryInventory
    from ckptmove.layouts.listing import ListedFile, Listing
    from ckptmove.layouts.merge import Part
    from ckptmove.model import Limits

    Visit = Callable[[str, Checkpoint], None]

#: Where the HF Trainer keeps its counters.
_TRAINER_STATE: Final = "trainer_state.json"


@dataclass(frozen=True, slots=True)
class Directory:
    """A checkpoint directory, as it was read.

    Attributes:
        listing: everything in it.
        parts: its checkpoint files.
        inventory: what they hold together.
        outline: their trees, and the other files, where that was asked for.
    """

    listing: Listing
    parts: tuple[Part, ...]
    inventory: DirectoryInventory
    outline: tuple[OutlineLine, ...]


def read_directory(
    path: str,
    limits: Limits,
    *,
    check: bool = False,
    outline: bool = False,
    progress: Progress | None = None,
    visit: Visit | None = None,
) -> Directory:
    """Read every checkpoint in a directory as a part of one.

    Args:
        path: a directory.
        limits: what it, and each file in it, may ask for.
        check: whether to read every record and compare its CRC.
        outline: whether to make the outline too.
        progress: told of bytes checked and bytes in all.
        visit: shown each checkpoint, by its path in the directory, while it is open.

    Raises:
        UnreadableInput: there is no checkpoint in it, or one that cannot be read or is damaged.
        LimitExceeded: it, or a file in it, asks for more than the limits allow.
    """
    listing = list_directory(path, limits)
    refuse_distributed(listing)
    require_shards(listing)
    reader = _Reader(listing, limits, check=check, outline=outline, progress=progress, visit=visit)
    for file in listing.files:
        if not file.is_hidden:
            reader.read(file)
    if not reader.parts:
        raise EmptyDirectory(path, reader.looked_at)
    inventory = merge(path, reader.parts, reader.total)
    records = inventory.files
    layout = layout_of(listing, records)
    contents = inventory.contents
    if any(file.name == _TRAINER_STATE for file in listing.files):
        contents |= {"counter"}
    return Directory(
        listing,
        tuple(reader.parts),
        replace(inventory, layout=layout, contents=contents),
        (OutlineLine(0, "", f"directory ({len(listing.files)})"), *reader.lines) if outline else (),
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
        progress: Progress | None,
        visit: Visit | None,
    ) -> None:
        self._listing = listing
        self._limits = limits
        self._check = check
        self._outline = outline
        self._progress = progress
        self._visit = visit
        self._base = 0
        self._done = 0
        self.total = sum(file.size_bytes for file in listing.files)
        self.parts: list[Part] = []
        self.lines: list[OutlineLine] = []
        self.looked_at = 0

    def read(self, file: ListedFile) -> None:
        self.looked_at += 1
        progress, done, total = self._progress, self._done, self.total
        told = None if progress is None else lambda here, _of_the_file: progress(done + here, total)
        try:
            found = survey(
                self._listing.full(file.path),
                self._limits,
                check=self._check,
                outline=self._outline,
                progress=told,
                visit=None if self._visit is None else partial(self._visit, file.path),
            )
        except NotACheckpoint as error:
            if is_spoiled(file.name, error.found):
                raise
            self.lines.append(OutlineLine(1, file.path, error.found))
        else:
            self.parts.append(as_part(file.path, found.inventory, self._base))
            self._base += found.pickle_bytes
            for line in found.outline:
                self.lines.append(OutlineLine(line.depth + 1, line.name if line.depth else file.path, line.description))
        self._done += file.size_bytes
