"""The command that verifies a checkpoint, for the machine that it was judged for.

Never opens a file: what is in it has been read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmove.text import command_line

if TYPE_CHECKING:
    from collections.abc import Sequence


def verify_command(path: str, options: Sequence[str] = (), *, devices: int | None = None) -> str:
    """The command line.

    Args:
        path: of the checkpoint.
        options: words that follow it.
        devices: how many devices the machine has, where the user said so.
    """
    count = ["--devices", str(devices)] if devices is not None else []
    return command_line(["ckptmove", "verify", path, *options, *count])
