"""The paths of a command: typed, or from ``[tool.ckptmove]``."""

from __future__ import annotations

import os
from glob import glob, has_magic
from typing import TYPE_CHECKING

from ckptmove.errors import NothingConfigured, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.cli.config import Config


def checkpoint_paths(words: Sequence[str], config: Config, command: str) -> tuple[str, ...]:
    """The paths of a command without duplicates, with globs expanded.

    A glob without a match is kept, and later reported as a missing file.

    Raises:
        UsageError: if no path was typed and none is configured.
        NothingConfigured: if no path was typed and no configured one exists.
    """
    patterns = tuple(words) or config.checkpoints
    if not patterns:
        raise UsageError(
            f"no checkpoint given: type 'ckptmove {command} PATH', or set in pyproject.toml: "
            '[tool.ckptmove] checkpoints = ["runs/*/last.pth"]'
        )
    paths = tuple(dict.fromkeys(path for pattern in patterns for path in _expand(pattern)))
    if not words and config.path is not None and not any(map(os.path.lexists, paths)):
        raise NothingConfigured(config.path, patterns)
    return paths


def single_path(words: Sequence[str], config: Config, command: str) -> str:
    """The path of a command that takes exactly one.

    Raises:
        UsageError: if there is not exactly one.
        NothingConfigured: if no path was typed and no configured one exists.
    """
    paths = checkpoint_paths(words, config, command)
    if len(paths) > 1:
        raise UsageError(f"{command} takes one checkpoint, not {len(paths)}: {', '.join(paths)}")
    return paths[0]


def as_operand(word: str) -> str:
    """Prefix a path that looks like an option: ``./-x.pth`` for ``-x.pth``. A single ``-`` stays: it means a stream."""
    return f"./{word}" if word.startswith("-") and word != "-" else word


def _expand(pattern: str) -> Sequence[str]:
    pattern = as_operand(pattern)
    if os.path.lexists(pattern) or not has_magic(pattern):
        return [pattern]
    # Path.glob rejects absolute patterns before Python 3.13, and drops a leading `./`.
    return sorted(glob(pattern, recursive=True)) or [pattern]
