"""The checkpoints of a command: paths, globs, and with ``**`` at the end of a path all checkpoints below a folder."""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from functools import partial
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.cli.paths import as_operand, checkpoint_paths, expand_glob
from ckptmove.errors import CkptMoveError, EmptyDirectory, MissingFile
from ckptmove.io.locations import is_folder
from ckptmove.io.remote.address import Address

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ckptmove.cli.config import Config
    from ckptmove.io.walk import WalkedFile
    from ckptmove.opening.discover import FoundCheckpoint

#: A pattern for all checkpoints below a folder.
_SEARCH: Final = re.compile(r"(?P<folder>(?:.*[/\\])?)\*\*(?:[/\\]\*?)?", re.DOTALL)


class Target(NamedTuple):
    """A checkpoint of the command."""

    path: str  # its path, or its address
    members: tuple[WalkedFile, ...] | None = None  # the files of a directory that belong to it; None for all
    exclude: tuple[str, ...] = ()  # folders in it that are checkpoints of their own, by their paths in it
    version: str | None = None  # fingerprint of its files; None if unknown
    is_found: bool = False  # whether a search found it, and no word names it
    error: CkptMoveError | None = None  # why it cannot be looked for; None otherwise


class Targets(NamedTuple):
    """The checkpoints of the command."""

    targets: list[Target]  # the checkpoints, without duplicates
    left_out: int  # number of files below folders that are no part of a checkpoint by their names


def find_targets(words: Sequence[str], config: Config) -> Targets:
    """Expand the words of the command line; without any, those of the configuration."""
    left_out = 0
    found: list[Target] = []
    patterns = words or config.checkpoints
    if not any(map(_SEARCH.fullmatch, patterns)):
        found = [Target(path) for path in checkpoint_paths(words, config, "inspect")]
        patterns = ()
    for word in patterns:
        targets, others = _matching(word, config)
        found += targets
        left_out += others
    single: dict[str, Target] = {}
    for one in found:  # the text of an address has no credentials, which may be all that tells two of them apart
        key = one.path.url if isinstance(one.path, Address) else one.path
        if single.setdefault(key, one).is_found and not one.is_found:
            single[key] = one  # what the user named is read as a whole, also next to a search
    return Targets([*single.values()], left_out)


class Search(NamedTuple):
    """The checkpoints of a command that reads a folder with all that is in it."""

    paths: tuple[str, ...]  # their paths, or addresses
    #: for each that a search found, the folders below it that are checkpoints of their own.
    exclude: Mapping[str, tuple[str, ...]]
    failures: Mapping[str, CkptMoveError]  # errors of the paths that cannot be read, by path


def search(words: Sequence[str], config: Config, command: str) -> Search:
    """Expand the words of a command that reads a folder with all that is in it."""
    patterns = words or config.checkpoints
    if not any(map(_SEARCH.fullmatch, patterns)):
        return Search(checkpoint_paths(words, config, command), {}, {})
    targets = find_targets(words, config).targets
    return Search(
        tuple(one.path for one in targets),
        {one.path: one.exclude for one in targets},
        {one.path: one.error for one in targets if one.error is not None},
    )


def identified(target: Target) -> Target:
    """The target with the fingerprint of its files, as a search has taken it already. It is None if unknown."""
    from ckptmove.io.walk import local_fingerprint

    if target.is_found:
        return target
    if not isinstance(target.path, Address):
        return target._replace(version=local_fingerprint(target.path))
    from ckptmove.io.remote.filesystem import identify

    path, members, version = identify(target.path)
    return target._replace(path=path, members=members, version=version)


def _matching(word: str, config: Config) -> tuple[list[Target], int]:
    """The checkpoints that one of several words means, and the number of files that a search leaves out."""
    search = _SEARCH.fullmatch(word)
    if search is None or os.path.lexists(word) or "\0" in word:  # no path has a null character
        return [Target(path) for path in checkpoint_paths([word], config, "inspect")], 0
    return _search(search["folder"], word)


def _search(folder: str, word: str) -> tuple[list[Target], int]:
    """The checkpoints below the folders that the part of a pattern before ``**`` matches."""
    targets: list[Target] = []
    looked_at = left_out = 0
    for top in expand_glob(folder or os.curdir):
        shown = "" if not folder else top
        try:
            found, files, others = _below(top, shown)
        except CkptMoveError as error:
            targets.append(Target(word, error=error))
            continue
        targets += found
        looked_at += files
        left_out += others
    if not targets:
        path = as_operand(word)
        targets.append(Target(path, error=EmptyDirectory(path, looked_at) if looked_at else MissingFile(path)))
    return targets, left_out


def _below(top: str, shown: str) -> tuple[list[Target], int, int]:
    """The checkpoints below one folder, the number of its files, and how many of them are no part of one."""
    from ckptmove.io.walk import fingerprint, walk
    from ckptmove.opening.discover import find_checkpoints

    if isinstance(top, Address):
        from ckptmove.io.remote.filesystem import child, walk_remote

        place, files = walk_remote(Address(f"{top.url.rstrip('/')}/", top.place))
        errors: Sequence[CkptMoveError] = ()
        within: Callable[[str], str] = partial(child, place)
    else:
        if not is_folder(top):
            raise MissingFile(top)
        files, errors = walk(top)
        within = partial(_local, shown)
    found = find_checkpoints(files)
    folders = [one.path for one in found.checkpoints if one.is_folder]
    targets = [Target(error.path or top, error=error) for error in errors]
    targets += [
        Target(
            within(one.path),
            one.files if one.is_folder else None,
            _below_it(one, folders),
            fingerprint(one.files),
            is_found=True,
        )
        for one in found.checkpoints
    ]
    return targets, len(files), found.left_out


def _below_it(one: FoundCheckpoint, folders: Sequence[str]) -> tuple[str, ...]:
    """Those of some sorted folders that are below a checkpoint, by their paths in it."""
    if not one.is_folder:
        return ()
    start = f"{one.path}/" if one.path else ""
    inner = takewhile(lambda path: path.startswith(start), islice(folders, bisect_left(folders, start), None))
    return tuple(path[len(start) :] for path in inner if path != one.path)


def _local(folder: str, path: str) -> str:
    return os.path.join(folder, *path.split("/")) or os.curdir
