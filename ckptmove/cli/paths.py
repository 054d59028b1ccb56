"""Which checkpoints a command is about: what was typed, or what the project says.

Never opens one.
"""

from __future__ import annotations

import os
from glob import glob, has_magic
from typing import TYPE_CHECKING

from ckptmove.errors import NothingConfigured, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.cli.config import Config


def checkpoint_paths(words: Sequence[str], config: Config, command: str) -> tuple[str, ...]:
    """The paths of a command, each once, patterns expanded where the shell did not.

    A pattern that matches nothing stays as it is, so that it is reported like any other file that is not there.

    Raises:
        UsageError: none was typed, and the project names none.
        NothingConfigured: none was typed, and nothing of what the project names is there.
    """
    patterns = tuple(words) or config.checkpoints
    if not patterns:
        raise UsageError(
            f"no checkpoint was named: type 'ckptmove {command} PATH', or name them in pyproject.toml: "
            '[tool.ckptmove] checkpoints = ["runs/*/last.pth"]'
        )
    paths = tuple(dict.fromkeys(path for pattern in patterns for path in _expand(pattern)))
    if not words and config.path is not None and not any(map(os.path.lexists, paths)):
        raise NothingConfigured(config.path, patterns)
    return paths


def single_path(word: str | None, config: Config, command: str) -> str:
    """The path of a command that takes one.

    Raises:
        UsageError: there is none, or there are several.
    """
    paths = checkpoint_paths([] if word is None else [word], config, command)
    if len(paths) > 1:
        raise UsageError(f"{command} takes one checkpoint at a time, and there are {len(paths)}: {', '.join(paths)}")
    return paths[0]


def as_operand(word: str) -> str:
    """A path that no program takes for an option: ``./-x.pth`` for ``-x.pth``, which every command named later has.

    A ``-`` alone stays: whoever types it means a stream.
    """
    return f"./{word}" if word.startswith("-") and word != "-" else word


def _expand(pattern: str) -> Sequence[str]:
    pattern = as_operand(pattern)
    if os.path.lexists(pattern) or not has_magic(pattern):
        return [pattern]
    # Path.glob takes no absolute pattern before Python 3.13, and loses a leading `./`.
    return sorted(glob(pattern, recursive=True)) or [pattern]  # noqa: PTH207  # Path.glob cannot take every pattern
