"""The paths of a command: typed, or from ``[tool.ckptmove]``."""

from __future__ import annotations

import os
from glob import glob, has_magic
from itertools import zip_longest
from typing import TYPE_CHECKING

from ckptmove.errors import CkptMoveError, NothingConfigured, UsageError
from ckptmove.io.locations import inside
from ckptmove.io.remote.address import Address, as_location

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.cli.config import Config


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
    if os.path.lexists(pattern) or not has_magic(pattern) or "\0" in pattern:  # no path has a null character
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
