"""An open checkpoint: a file, a directory, an archive of files or a distributed checkpoint, in one form."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from ckptmove.checkpoint.naming import naming
from ckptmove.checkpoint.parts import FilePart
from ckptmove.formats.facts import facts_of
from ckptmove.io.contracts import Versioned
from ckptmove.io.locations import shared_mode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptmove.checkpoint.inventory.outline import OutlineLine
    from ckptmove.checkpoint.parts import OpenPart
    from ckptmove.errors import LimitExceeded, UnreadableInput
    from ckptmove.io.contracts import Progress, Traffic
    from ckptmove.io.listing import Listing
    from ckptmove.io.source import DiskPlace
    from ckptmove.model import ArchiveFact, Inventory


@dataclass(frozen=True, eq=False, repr=False)
class OpenCheckpoint:
    """An open checkpoint. A file is a checkpoint of one part without a name."""

    inventory: Inventory  # its content
    parts: tuple[OpenPart, ...]  # its checkpoint files and distributed checkpoints
    read_from: tuple[DiskPlace, ...]  # files on the disk that contain it
    outline: tuple[OutlineLine, ...] = ()  # outline of its trees and other files, if requested
    unreadable: tuple[UnreadableInput | LimitExceeded, ...] = ()  # errors of files that were left out
    listing: Listing | None = None  # its files; None if it is one file
    links: Mapping[str, str] = field(default_factory=dict)  # targets of its links, by path
    others: tuple[str, ...] = ()  # paths of links and of files that are not checkpoints
    outside: tuple[ArchiveFact, ...] = ()  # facts about an archive and about members that are not checkpoints
    repeated: frozenset[str] = frozenset()  # paths of shards that only repeat the consolidated files
    top: str = ""  # folder that contains everything in an archive, with a slash; empty if it has no such folder
    traffic: Traffic | None = None  # requests for a checkpoint at a URL; None for a local one

    @property
    def path(self) -> str:
        """Path of the checkpoint as the user gave it."""
        return self.inventory.path

    @property
    def file(self) -> FilePart:
        """The one part of a checkpoint that is a file."""
        return cast("FilePart", self.parts[0])

    @property
    def nbytes(self) -> int:
        """Total size of the files of its parts."""
        return sum(part.inventory.size_bytes for part in self.parts)

    @property
    def mode(self) -> int:
        """Permission bits of its files: those that all have; of a new file if it is not on the disk."""
        return shared_mode(place.path for place in self.read_from)

    @property
    def is_whole(self) -> bool:
        """Whether its names have no path as a prefix: it is one file or one distributed checkpoint."""
        return [part.name for part in self.parts] == [""]

    @property
    def without_checksums(self) -> tuple[str, ...]:
        """Paths of the checkpoint files without CRCs, of their own or of their archive."""
        return tuple(
            part.name or part.path
            for part in self.parts
            if not (facts_of(part.inventory.container).is_distributed or part.has_checksums)
        )

    @property
    def no_devices(self) -> str:
        """Why no device is stored in any file that has tensors; empty if one is."""
        inventories = [part.inventory for part in self.parts]
        reasons = [no_devices(one) for one in inventories if one.tensors or self.listing is None]
        return reasons[0] if reasons and all(reasons) else ""

    @property
    def traffic_note(self) -> str:
        """The requests so far for a checkpoint at a URL; empty for a local one."""
        return "" if self.traffic is None else self.traffic.described(self.inventory.size_bytes)

    def check(self, progress: Progress | None = None, jobs: int = 1) -> tuple[ArchiveFact, ...]:
        """All facts about its bytes, after comparing every record with its CRC."""
        found: list[ArchiveFact] = []
        done = 0
        for part in self.parts:
            found += part.check(None if progress is None else shifted_progress(progress, done, self.nbytes), jobs)
            done += part.inventory.size_bytes
        if self.listing is not None:
            checked = {part.name for part in self.parts if isinstance(part, FilePart) and part.has_own_checksums}
            for file in self.listing.files:
                if not (file.is_hidden or file.path in checked):
                    found += self.listing.flaws(file.path)
        return (*found, *self.outside)

    def require_unchanged(self) -> None:
        """Raise SourceChanged if a file that contains it was written, replaced or removed since it was read."""
        for place in self.read_from:
            place.require_unchanged()
        for part in self.parts:
            if part.is_remote and isinstance(part, FilePart) and isinstance(part.source, Versioned):
                part.source.require_unchanged()
        if self.listing is not None:
            self.listing.require_opened_unchanged()

    def described(self, other: str) -> str:
        """SHA-256 of a file, or target of a link."""
        if other in self.links:
            return f"a link to {self.links[other]}"
        import hashlib

        digest = hashlib.sha256()
        with naming(self.path):
            # A file has no others.
            for block in cast("Listing", self.listing).contents(other):
                digest.update(block)
        return f"sha256 {digest.hexdigest()}"

    def weight_map(self, index: str) -> Mapping[str, str]:
        """The file of each tensor in an index of shards, which was checked when the directory was read."""
        import json

        blocks = cast("Listing", self.listing).contents(index)
        found: dict[str, str] = json.loads(b"".join(map(bytes, blocks)))["weight_map"]
        return found


def no_devices(inventory: Inventory) -> str:
    """Why a file stores no device that could be changed; empty if it does.

    A file of ``torch.save`` without tensors counts as one that does: its conversion is a copy.
    """
    kind = facts_of(inventory.container)
    is_empty = not (inventory.tensors or inventory.storages)
    return kind.why_no_devices or (kind.no_devices_when_empty if is_empty else "")


def shifted_progress(progress: Progress, before: int, total: int) -> Progress:
    """Progress of one file as a part of the progress of several.

    Args:
        progress: called with the bytes done so far and the total, of all files.
        before: bytes of the files before it.
        total: bytes of all files.
    """
    return lambda done, _of_the_file: progress(before + done, total)


def side_by_side(one: OpenCheckpoint, other: OpenCheckpoint) -> tuple[OpenCheckpoint, OpenCheckpoint]:
    """Prepare two checkpoints for a comparison: keep the top folder of an archive if the other side has it too."""
    is_shared = _has_folder(other, one.top), _has_folder(one, other.top)
    return replace(one, top="" if is_shared[0] else one.top), replace(other, top="" if is_shared[1] else other.top)


def _has_folder(side: OpenCheckpoint, folder: str) -> bool:
    return any(f"{path}/".startswith(folder) for path in (*(part.name for part in side.parts), *side.others))
