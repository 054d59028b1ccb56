"""End processes that the user's code started and that left the process group of the check. Linux only."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Final

#: Environment variable with the mark of a check. Every process that the check starts inherits it.
MARK: Final = "_CKPTMOVE_CHECK"
_PROCESSES: Final = Path("/proc")


def end_strays(mark: str) -> None:
    """Kill every process with a mark."""
    wanted = f"{MARK}={mark}".encode()
    for folder in _PROCESSES.glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or belongs to another user
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
