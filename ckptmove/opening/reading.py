"""Read a directory or an archive of files as one checkpoint, without the bytes of its tensors.

A file whose name or content marks it as a checkpoint is never skipped: its errors are raised.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ckptmove.assembled.dcp import DistributedPart
from ckptmove.assembled.dcp_folder import find_distributed, is_distributed, read_distributed
from ckptmove.assembled.hf import ShardsPart, find_shards
from ckptmove.assembled.megatron import join_optimizers
from ckptmove.assembled.rank_shards import group_by_rank, missing_by_name, read_rank_file
from ckptmove.assembled.ranks import RankFilesPart
from ckptmove.assembled.zero_files import is_later_rank, partitioned_parameters, require_ranks, zero_file
from ckptmove.checkpoint.inventory.outline import OutlineLine
from ckptmove.checkpoint.merge import file_record, merge_inventories, moved_inventory
from ckptmove.checkpoint.naming import naming
from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint, shifted_progress
from ckptmove.checkpoint.open_files import OpenFiles
from ckptmove.checkpoint.parts import FilePart, read_file
from ckptmove.checkpoint.trainers import is_checkpoint_name, is_spoiled, trainer_of
from ckptmove.errors import EmptyDirectory, LimitExceeded, MissingFile, NotACheckpoint, SourceChanged, UnreadableInput
from ckptmove.io.locations import leads_nowhere
from ckptmove.io.recovery import require_settled
from ckptmove.model import ArchiveFact
from ckptmove.opening.archive import look_inside
from ckptmove.opening.beside import PICKLED, code_beside, hidden_pickles, unread_file
from ckptmove.opening.detect import layout_of, require_shards, trainer_counters
from ckptmove.opening.interrupted_save import find_two_saves, newer_files
from ckptmove.opening.pointers import dangling_pointers
from ckptmove.text import amount

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ckptmove.assembled.dcp_folder import DistributedFolder
    from ckptmove.assembled.hf import ShardsFolder
    from ckptmove.assembled.rank_shards import RankFile
    from ckptmove.assembled.zero_files import ZeroFile
    from ckptmove.checkpoint.directories import DirectoryInventory, UnreadFile
    from ckptmove.checkpoint.parts import OpenPart
    from ckptmove.io.contracts import Progress
    from ckptmove.io.listing import ListedFile, Listing
    from ckptmove.limits import Limits

#: Bytes of the pickles of remote files whose trees are kept.
_MOST_KEPT: Final = 1 << 21
#: The counters of SpeechBrain, as text (speechbrain/core.py ``Brain._save``).
_OF_BRAIN: Final = "brain.ckpt"


class Reader:
    """Reads the files of a listing one by one, and keeps them open."""

    def __init__(
        self,
        listing: Listing,
        limits: Limits,
        *,
        objects: bool,
        ranks: bool,
        keep_trees: bool,
        keep_going: bool,
        check: bool,
        jobs: int,
        outline: bool,
        progress: Progress | None,
    ) -> None:
        """Prepare to read; arguments as of :func:`ckptmove.opening.checkpoint.open_checkpoint`."""
        self._listing, self._limits = listing, limits
        self._objects, self._ranks, self._keep_trees, self._keep_going = objects, ranks, keep_trees, keep_going
        self._check, self._jobs, self._make_outline, self._progress = check, jobs, outline, progress
        self._files = OpenFiles(listing)
        self._base = self._kept = 0
        self._done = 0
        self._total = sum(file.size_bytes for file in listing.files)
        self._parts: list[OpenPart] = []
        self._lines: list[OutlineLine] = []
        self._flaws: list[ArchiveFact] = []
        self._inner: list[ArchiveFact] = []
        self._unread: list[UnreadFile] = []
        self._lost: list[ArchiveFact] = []
        self._rank_files: list[RankFile] = []
        self._unreadable: list[UnreadableInput | LimitExceeded] = []
        self._unreadable_files: set[str] = set()
        self._zero_files: list[ZeroFile] = []
        self._partitioned: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._looked_at = 0
        self._has_something = False

    def read(self) -> OpenCheckpoint:
        """Read every checkpoint of the listing as a part of one."""
        listing = self._listing
        with self._tolerating():
            require_shards(listing)
        self._require_linked()
        self._require_settled()
        folders = find_distributed(listing)
        homes = {folder.folder for folder in folders}
        joined: set[str] = set()
        for folder in folders:
            if folder.folder not in joined:
                with self._tolerating():
                    joined |= self._read_distributed(folder)
        shards = find_shards(listing)
        pieces = {file.path for file in listing.files if _is_piece(file.path, homes)}
        pieces |= {file.path for folder in shards for file in folder.files}
        passed = pieces | self._unreadable_files
        left = [file for file in listing.files if not file.is_hidden and file.path not in passed]
        texts = [file for file in left if listing.is_text(file.path)]
        self._read_files(file for file in left if not listing.is_text(file.path))
        self._unread += hidden_pickles(listing, self._limits)
        repeated: set[str] = set()
        for one in shards:
            with self._tolerating():
                repeated |= self._read_shards(one)
        pieces -= repeated
        if self._parts:
            self._lines += (OutlineLine(1, file.path, "text, by its name") for file in texts)
        else:
            self._read_files(texts)
        with self._tolerating():
            require_ranks(listing, self._zero_files)
        with self._tolerating():
            join_optimizers(self._parts)
        self._require_something()
        self._join_ranks()
        files = {row.path for part in self._parts for row in part.rows if not part.is_distributed}
        links = {link.path: link.target for link in listing.links}
        shown = [file for file in listing.files if not file.is_hidden]
        files |= pieces
        apart = (path for path in links if not _is_piece(path, homes))
        outside = (*self._inner, *self._lost, *listing.facts)
        return OpenCheckpoint(
            inventory=self._merged(outside),
            parts=tuple(self._parts),
            read_from=listing.read_from(file for file in shown if file.path in files),
            outline=(OutlineLine(0, "", f"{listing.container} ({len(listing.files)})"), *self._lines)
            if self._make_outline
            else (),
            unreadable=tuple(self._unreadable),
            listing=listing,
            links=links,
            others=(*(file.path for file in shown if file.path not in files), *apart),
            outside=outside,
            repeated=frozenset(repeated),
            top=_top(shown) if listing.form else "",
        )

    def close(self) -> None:
        """Close all files, and free their trees."""
        for part in self._parts:
            part.close()
        self._files.close()

    @contextmanager
    def _tolerating(self, *files: str) -> Iterator[None]:
        """Continue after the error of one file, if requested, and keep its path."""
        try:
            yield
        except (UnreadableInput, LimitExceeded) as error:
            if not self._keep_going:
                raise
            self._unreadable.append(error)
            self._unreadable_files.update(files)

    def _require_linked(self) -> None:
        """Raise MissingFile for a link that leads nowhere, if its name promises a checkpoint."""
        listing = self._listing
        for link in listing.links if listing.form is None else ():
            if is_checkpoint_name(link.name) and leads_nowhere(listing.full(link.path)):
                with self._tolerating(link.path):
                    raise MissingFile(listing.full(link.path))

    def _require_settled(self) -> None:
        """Raise InterruptedConversion for a file with a journal beside it, also if it is only copied."""
        for path in self._listing.with_journals:
            with self._tolerating(path):
                require_settled(self._listing.full(path))

    def _read_distributed(self, folder: DistributedFolder) -> set[str]:
        """Read a distributed checkpoint; return its folder if the ``__R.metadata`` of all ranks were read with it."""
        read = read_distributed(self._listing, folder, self._limits, objects=self._objects)
        part = DistributedPart(read, self._files, self._limits, self._base)
        part.note(find_two_saves(part, newer_files(self._listing, read.folder, read.container.sizes)))
        self._look_into(part, part.name or ".metadata")
        self._has_something = self._has_something or bool(read.container.metadata.entries)
        self._parts.append(part)
        self._done += part.inventory.size_bytes
        return {folder.folder} if read.folder.is_joined else set()

    def _read_shards(self, folder: ShardsFolder) -> set[str]:
        """Read shards as one part; return their paths if they only repeat the consolidated files next to them."""
        part = ShardsPart(folder, self._files, self._limits, self._base)
        self._done += part.inventory.size_bytes
        if folder.is_consolidated(part.tensors, self._parts):
            found = f"{amount(len(folder.files), 'shard')} of the tensors in {folder.parent or 'this folder'}"
            self._lines.append(OutlineLine(1, folder.path, found))
            return {file.path for file in folder.files}
        self._has_something = self._has_something or bool(part.tensors)
        self._look_into(part, part.name or "shards")
        self._parts.append(part)
        return set()

    def _read_files(self, files: Iterable[ListedFile]) -> None:
        by_path = {file.path: file for file in files}
        for path in self._listing.read_ahead(by_path):
            with self._tolerating(path):
                self._read_file(by_path[path])

    def _read_file(self, file: ListedFile) -> None:
        self._looked_at += 1
        listing, path = self._listing, file.path
        try:
            with naming(listing.full(path)):
                listing.look(path)
                limits = listing.limits(path, self._limits)  # only if it may be a checkpoint
                is_kept = self._keep_trees or listing.is_remote
                source = self._files.source(path) if is_kept else listing.open(path)
                with closing(source):  # a kept one is opened again when it is read
                    part = FilePart(read_file(source, limits), limits, listing.disk(file))
                    stated = zero_file(path, part.tree())
                    if stated is not None:
                        self._zero_files.append(stated)
                        self._partitioned[stated.folder] += partitioned_parameters(path, part)
                    inventory = moved_inventory(path, part.inventory, self._base)
                    row = file_record(path, inventory)
                    part.put_into(self._files, inventory, self._base, row)
                    self._look_into(part, path)
                    rank_file = read_rank_file(part)
                    if rank_file is not None:
                        self._rank_files.append(rank_file)
                    if not self._keeps(part):
                        part.drop()
        except NotACheckpoint as error:
            if is_spoiled(file.name, error.found):
                raise
            self._lines.append(OutlineLine(1, path, error.found))
            self._note_unread(file, error)
            is_checked = False
        except SourceChanged:
            if is_checkpoint_name(file.name) or file.name.endswith(PICKLED):
                raise
            self._lines.append(OutlineLine(1, path, "no checkpoint, by its name; it changed while it was read"))
            is_checked = True
        else:
            self._has_something = True
            is_checked = part.has_own_checksums
            self._parts.append(part)
            self._base += part.pickle_bytes
        if self._check and not is_checked:
            self._flaws += listing.flaws(path)
        self._done += file.size_bytes

    def _note_unread(self, file: ListedFile, error: NotACheckpoint) -> None:
        """Keep what a file without a checkpoint may hold."""
        inside = look_inside(self._listing, file, error, self._limits)
        if inside.is_unread and self._listing.form is not None:
            self._inner.append(ArchiveFact("inner-archive", file.path, file.size_bytes))
        unread = unread_file(self._listing, file, error, inside)
        self._unread += () if unread is None else (unread,)

    def _join_ranks(self) -> None:
        """Make one part of the files of all ranks that are shards of the same tensors, and find missing ones."""
        unreadable = frozenset(self._unreadable_files)
        names = self._listing.names
        # A file of a rank that is read, but not as one, makes all of them files of their own.
        groups = [
            one._replace(unreadable=unreadable)
            for one in group_by_rank(self._rank_files)
            if (names - unreadable).isdisjoint(one.missing)
        ]
        known = {path for group in groups for path in group.missing} | names
        if not self._ranks:
            self._lost += (fact for group in groups for fact in group.facts(f"{group.name}."))
            groups = []
        joined = {id(file.part) for group in groups for file in group.files}
        leads = {id(group.files[0].part): group for group in groups}
        is_whole = len(groups) == 1 and len(joined) == len(self._parts)
        parts: list[OpenPart] = []
        for part in self._parts:
            group = leads.get(id(part))
            if group is not None:
                ranks = RankFilesPart(group, "" if is_whole else group.name, self._limits)
                self._lost += ranks.replica_facts() if self._check else ()
                parts.append(ranks)
            elif id(part) not in joined:
                parts.append(part)
        self._parts = parts
        # A file that is there, but unreadable, is not missing.
        lost = missing_by_name(part.name for part in parts)
        self._lost += (ArchiveFact("missing-rank", path, 0) for path in lost if path not in known)

    def _keeps(self, part: OpenPart) -> bool:
        """Whether the tree of a part stays in memory. To read a remote file again takes requests."""
        if self._listing.is_remote:
            self._kept += part.pickle_bytes
        keeps_trees = self._keep_trees and not is_later_rank(part.name.rpartition("/")[2])
        return keeps_trees or (self._listing.is_remote and self._kept <= _MOST_KEPT)

    def _look_into(self, part: OpenPart, path: str) -> None:
        """Check a part and make its outline, if requested, while its tree is in memory."""
        if self._check:
            progress = None if self._progress is None else shifted_progress(self._progress, self._done, self._total)
            part.inventory = replace(part.inventory, facts=part.check(progress, self._jobs))
        if self._make_outline:
            for line in part.outline():
                self._lines.append(OutlineLine(line.depth + 1, line.name if line.depth else path, line.description))

    def _require_something(self) -> None:
        listing = self._listing
        if not self._parts and self._unreadable:
            first, *others = self._unreadable
            first.others = tuple(others)
            raise first
        if not self._parts:
            runs = dict.fromkeys(name for file in self._unread for name in file.runs)
            if runs:
                raise NotACheckpoint(listing.path, listing.described, tuple(runs))
            inner = "".join(fact.record for fact in self._inner[:1])
            is_cut = any(fact.kind == "missing-end" for fact in listing.facts)
            raise EmptyDirectory(
                listing.path, self._looked_at, listing.described, listing.form, inner=inner, is_cut=is_cut
            )
        if not self._has_something:
            raise NotACheckpoint(listing.path, "a distributed checkpoint without any tensor or object")

    def _merged(self, outside: tuple[ArchiveFact, ...]) -> DirectoryInventory:
        listing, parts = self._listing, self._parts
        inventory = merge_inventories(listing.path, listing.container, parts, listing.size_bytes)
        contents = inventory.contents
        if len(parts) == 1 and not parts[0].name and parts[0].metadata is not None:
            inventory = replace(inventory, container=parts[0].inventory.container, globals=parts[0].inventory.globals)
        layout = layout_of(listing, inventory.files)
        counters = trainer_counters(listing, layout)
        if any(file.name in {trainer_of(layout).counters, _OF_BRAIN} for file in listing.files):
            contents |= {"counter"}
        partitioned = self._partitioned.values()  # the same in all files of one checkpoint
        first = next(iter(partitioned), Counter[str]())
        return replace(
            inventory,
            layout=layout,
            contents=contents,
            epoch=inventory.epoch if counters.epoch is None else counters.epoch,
            step=inventory.step if counters.step is None else counters.step,
            facts=(*inventory.facts, *self._flaws, *outside),
            is_incomplete=bool(self._unreadable),
            form=listing.form,
            partitioned=first if all(one == first for one in partitioned) else sum(partitioned, Counter[str]()),
            unread=tuple(self._unread),
            code=tuple(code_beside(listing)),
            pointers=tuple(dangling_pointers(listing)),
        )


def _is_piece(path: str, homes: set[str]) -> bool:
    folder, _, name = path.rpartition("/")
    return folder in homes and is_distributed(name)


def _top(files: Sequence[ListedFile]) -> str:
    """The folder that contains all files, as in an archive of a directory."""
    tops = {file.path.partition("/")[0] if "/" in file.path else "" for file in files}
    (top,) = tops if len(tops) == 1 else ("",)
    return f"{top}/" if top else ""
