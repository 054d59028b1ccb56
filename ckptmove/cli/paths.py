"""The checkpoints of a command: paths, globs, and with ``**`` at the end of a path all checkpoints below a folder.

They are typed, or from ``[tool.ckptmove]``.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from functools import partial
from itertools import islice, takewhile, zip_longest
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.errors import CkptMoveError, EmptyDirectory, MissingFile, NothingConfigured, UsageError
from ckptmove.io.locations import inside, is_folder
from ckptmove.io.remote.address import Address, as_location

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ckptmove.cli.config import Config
    from ckptmove.io.walk import WalkedFile
    from ckptmove.opening.discover import FoundCheckpoint

#: A pattern for all checkpoints below a folder.
_SEARCH: Final = re.compile(r"(?P<folder>(?:.*[/\\])?)\*\*(?:[/\\]\*?)?", re.DOTALL)


def checkpoint_paths(words: Sequence[str], config: Config, command: str) -> tuple[str, ...]:
    """The paths of a command without duplicates, with globs expanded. A URL is an :class:`Address`.

    A glob without a match is kept, and later reported as a missing file. So is one at a URL that cannot be listed.
    """
    patterns = tuple(words) or config.checkpoints
    if not patterns:
        raise UsageError(
            f"no checkpoint given: type 'ckptmove {command} PATH', or set in pyproject.toml: "
            '[tool.ckptmove] checkpoints = ["runs/*/last.pth"]'
        )
    found = (path for pattern in patterns for path in expand_glob(pattern))
    # The text of an address has no credentials, which may be all that tells two of them apart.
    paths = tuple({path.url if isinstance(path, Address) else path: path for path in found}.values())
    if not words and config.path is not None and not any(map(_may_exist, paths)):
        raise NothingConfigured(config.path, patterns)
    return paths


def single_path(words: Sequence[str], config: Config, command: str) -> str:
    """The path of a command that takes exactly one."""
    paths = checkpoint_paths(words, config, command)
    if len(paths) > 1:
        raise UsageError(f"{command} takes one checkpoint, not {len(paths)}: {', '.join(paths)}")
    return paths[0]


def as_operand(word: str) -> str:
    """Prefix a path that looks like an option: ``./-x.pth`` for ``-x.pth``. A single ``-`` stays: it means a stream.

    A URL becomes an :class:`Address`.
    """
    if not word:
        raise UsageError("a path is empty: check the variable or the option that it comes from")
    return f"./{word}" if word.startswith("-") and word != "-" else as_location(word)


def download_paths(paths: Sequence[str], folder: str | None) -> dict[str, str]:
    """The local copy of each URL among the paths: by name, or by path below their common folder if names are equal.

    The keys are the URLs with their credentials. Without a folder, nothing is downloaded.
    """
    addresses = [path for path in paths if isinstance(path, Address) and folder is not None]
    places = {address.url: inside(folder or "", address) for address in addresses}
    if len(set(places.values())) == len(places):
        return places
    folders = [address.partition("?")[0].rstrip("/").split("/")[:-1] for address in addresses]
    shared = next((at for at, same in enumerate(zip_longest(*folders)) if len(set(same)) > 1), len(folders[0]))
    return {
        address.url: os.path.join(folder or "", *own[shared:], address.name)
        for address, own in zip(addresses, folders, strict=True)
    }


def _may_exist(path: str) -> bool:
    return isinstance(path, Address) or os.path.lexists(path)


def expand_glob(pattern: str) -> Sequence[str]:
    """The paths that match a glob, sorted; the pattern itself if it is a path, matches nothing or cannot be listed."""
    pattern = as_operand(pattern)
    if isinstance(pattern, Address):
        return _expand_url(pattern)
    if os.path.lexists(pattern) or "\0" in pattern:  # no path has a null character
        return [pattern]
    from glob import glob, has_magic

    if not has_magic(pattern):
        return [pattern]
    # Path.glob rejects absolute patterns before Python 3.13, and drops a leading `./`.
    return sorted(glob(pattern, recursive=True)) or [pattern]


def _expand_url(address: Address) -> Sequence[str]:
    if not address.has_magic or address.is_artifact:
        return [address]
    from ckptmove.io.remote.filesystem import expand

    try:
        return expand(address)
    except CkptMoveError:  # opening it reports the error, among those of the other paths
        return [address]


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
